"""All that the numbers of a sweep depend on, as plain values: equal sweeps have equal provenance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from conewise.identity.digests import inputs_digest
from conewise.program.tensors import Tensor
from conewise.program.weights import Sums
from conewise.runs.captured import Captured
from conewise.runs.interventions.interventions import Intervention, as_intervention
from conewise.runs.reading import Reading
from conewise.sweeps.planning.model_facts import facts_of
from conewise.sweeps.planning.plan import Lazy
from conewise.sweeps.planning.shapes.costs import versions
from conewise.sweeps.planning.spec import SweepSpec
from conewise.sweeps.storage.identifying import Identifying
from conewise.sweeps.storage.model_digest import model_digest


@dataclass(frozen=True, slots=True)
class Given:
    """What was given as base and source of each batch, and to cells as sources of their own."""

    batches: Sequence[tuple[Any, Any]]
    own: Sequence[Intervention] = ()


def provenance(
    model: Captured, spec: SweepSpec, given: Given, weights: Sums | None = None, *, strict: bool = False
) -> dict[str, Any]:
    """All that the numbers depend on. `weights`: sums over their bits, where these were just read.

    What cannot be identified for certain says so; with `strict` it raises IdentityError.
    """
    return _with_model(model, _identified(model, spec, given, strict), weights)


def lazy_provenance(model: Captured, spec: SweepSpec, given: Given, weights: Sums) -> Mapping[str, Any]:
    """The same for a run that was made with these weights; they are hashed when it is first read.

    So are inputs, which are the sweep's own. What others may change meanwhile is identified now.
    """
    identified = _identified(model, spec, given, strict=False)

    def made() -> dict[str, Any]:
        return _with_model(model, identified, weights)

    return Lazy(made)


def _with_model(model: Captured, identified: dict[str, Any], weights: Sums | None) -> dict[str, Any]:
    digest = model_digest(model, weights)
    batches = [
        {name: one() if callable(one) else one for name, one in batch.items()}
        for batch in identified["batches"]
    ]
    return {
        "model": model.name,
        "program": digest.program,
        "weights": digest.weights,
        **({"constants": digest.constants} if digest.constants else {}),
        **identified,
        "batches": batches,
    }


def _identified(model: Captured, spec: SweepSpec, given: Given, strict: bool) -> dict[str, Any]:
    """All that the numbers depend on besides the model; digests of inputs are made when they are called."""
    identify, facts = Identifying(strict), facts_of(model)
    batches = []
    for base, source in given.batches:
        is_run = isinstance(source, Reading | Mapping)
        put = None if is_run else as_intervention(source, model)
        batches.append(
            {
                "base": run_digest(model, base, identify),
                "source": run_digest(model, source, identify) if is_run else None,
                "patch": ["source"] if put is None else identify.patch(put),
            }
        )
    if strict:
        model.expect_program("store this run, so that it is known again")
    changed = model.changed_sites
    return {
        **({"graph": f"changed after the capture, at {', '.join(changed)}"} if changed else {}),
        "dtype": str(facts.dtype),
        "device": ", ".join(map(str, facts.devices)),
        **({} if spec.precision is None else {"precision": spec.precision}),
        "sites": list(spec.names),
        **({"sources": [_own(model, one, identify) for one in given.own]} if given.own else {}),
        "metrics": [identify.metric(metric) for metric in spec.metrics],
        "batches": batches,
        "versions": versions(),
    }


def _own(model: Captured, put: Intervention, identify: Identifying) -> Any:
    """What identifies a source that cells have of their own."""
    if not put.is_run:
        return identify.patch(put)
    found = run_digest(model, put.runs[0], identify)
    return found() if callable(found) else found


def run_digest(
    model: Captured, given: Reading | Mapping[str, Any], identify: Identifying
) -> str | Callable[[], str]:
    """A digest of the inputs, and of what is patched in them; nothing is run for it.

    That of inputs which are the sweep's own is made when it is called.
    """
    if not isinstance(given, Reading):
        digest = partial(inputs_digest, model.signature.bind((), given))
        return digest if all(isinstance(value, Tensor) for value in given.values()) else digest()
    values, functions = dict(given.inputs), []
    for number, edit in enumerate(given.edits):
        if isinstance(edit.part, Tensor):
            values[f"{number} {edit.place}"] = edit.part
        else:
            functions.append(f"{number} {edit.place} {identify.edit(edit)}")
    return " + ".join([inputs_digest(values), *functions])

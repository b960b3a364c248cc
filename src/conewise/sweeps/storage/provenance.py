"""All that the numbers of a sweep depend on, as plain values: equal sweeps have equal provenance."""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from conewise.errors import Argument, IdentityError
from conewise.jobs.digests import fingerprint, inputs_digest, program_digest
from conewise.jobs.identity import identified
from conewise.program.tensors import Tensor
from conewise.program.weights import Sums
from conewise.runs.captured import Captured
from conewise.runs.interventions import Intervention, as_intervention
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.sweeps.planning.costs import versions
from conewise.sweeps.planning.plan import Lazy
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.spec import SweepSpec

if TYPE_CHECKING:
    from conewise.runs.values import Edit

LONGEST, MOST = 60, 8


def differences(old: Any, new: Any) -> list[str]:
    """A line `where: old → new` for each place at which two nested dicts and lists differ; at most eight.

    Lists of different length differ as a whole: shown are both, or where they first differ if they are long.
    """
    found = list(_differences(old, new, ""))
    return found if len(found) <= MOST else [*found[:MOST], f"and {len(found) - MOST} more"]


def _differences(old: Any, new: Any, where: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        lines: list[str] = []
        for key in {**old, **new}:
            place = f"{where}.{key}" if where else str(key)
            if key not in old or key not in new:
                lines.append(f"{place}: {_short(old.get(key))} → {_short(new.get(key))}")
            else:
                lines += _differences(old[key], new[key], place)
        return lines
    if old == new:
        return []
    if isinstance(old, list) and isinstance(new, list):
        if len(old) == len(new):
            pairs = enumerate(zip(old, new, strict=True))
            return [line for place, (a, b) in pairs for line in _differences(a, b, f"{where}[{place}]")]
        if len(repr(old)) <= LONGEST and len(repr(new)) <= LONGEST:
            return [f"{where}: {old} → {new}"]
        first = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
        if first is None:
            first = min(len(old), len(new))
        a, b = (_short(side[first]) if first < len(side) else "nothing" for side in (old, new))
        return [f"{where}: {len(old)} of them → {len(new)}, from number {first} on: {a} → {b}"]
    return [f"{where}: {_short(old)} → {_short(new)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    if re.fullmatch("[0-9a-f]{64}", text):
        return f"{text[:12]}..."
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


Identity = str | dict[str, str]


class Identifying:
    """Identities of the parts of a sweep. One that cannot be known says so, or with `strict` is refused."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict

    def patch(self, put: Intervention) -> list[Identity]:
        """Identify what a sweep puts into a site."""
        name = f"the intervention {put.name!r}"
        return self._parts(put.described or (put.name, put.part), name, "cw.intervention(function, key=...)")

    def metric(self, metric: Metric) -> list[Identity]:
        """Identify a metric."""
        described = metric.described or (metric.compute, metric.output, metric.last)
        at = () if metric.pos is None or not metric.described else ("pos", metric.pos)
        return self._parts(
            (metric.name, *described, *at), f"the metric {metric.name!r}", "cw.metric(function, key=...)"
        )

    def edit(self, edit: Edit) -> str:
        """Identify what is patched in a base."""
        found = self._part(edit.part, f"the patch at {edit.place}", "cw.intervention(function, key=...)")
        return (
            found if isinstance(found, str) else ", ".join(f"{name}: {text}" for name, text in found.items())
        )

    def _parts(self, parts: Iterable[Any], name: str, remedy: str) -> list[Identity]:
        return [part if isinstance(part, str) else self._part(part, name, remedy) for part in parts]

    def _part(self, part: object, name: str, remedy: str) -> Identity:
        try:
            return identified(part)
        except IdentityError as error:
            if not self._strict:
                return f"not identified: {error}"
            raise IdentityError(
                error.where,
                error.what,
                f"{name} cannot be stored and resumed: it depends on something of which a change would go "
                f"unseen ({error}). Give it a name of your own, `{remedy}`, and another one whenever it "
                "means something else; or run without ",
                Argument("out"),
                ".",
            ) from None


@dataclass(frozen=True, slots=True)
class ModelDigest:
    """`weights`: a digest of architecture and weights. `constants`: of what is no part of these.

    `program`: of what is computed, whatever the weights are.
    """

    weights: str
    constants: str
    program: str


_KNOWN: weakref.WeakKeyDictionary[Captured, tuple[Sums, ModelDigest]] = weakref.WeakKeyDictionary()


def model_digest(model: Captured, weights: Sums | None = None) -> ModelDigest:
    """The digests of a model, as it was when its weights had these sums over their bits; None: as it is.

    Of weights that were written to since, no digest can be made any more: then the sums themselves are given.
    """
    known, found = _KNOWN.get(model, (None, None))
    if found is not None and weights is not None and known == weights:
        return found
    now = model.weights.whole_contents().whole
    if weights is not None and weights != now:
        sums = hashlib.sha256(repr(weights).encode()).hexdigest()
        return ModelDigest(f"bits {sums}", f"bits {sums}", program_digest(model.program))
    if found is None or known != now:
        saved = model.module.state_dict()
        rest = {
            source.name: source.value
            for source in model.program.sources
            if saved.keys().isdisjoint((source.name, *source.aliases))
        }
        constants = inputs_digest(rest) if rest else ""
        found = ModelDigest(fingerprint(model.module), constants, program_digest(model.program))
        _KNOWN[model] = now, found
    return found


@dataclass(frozen=True, slots=True)
class Given:
    """Bases and sources of batches as they were given, and the sources that cells have of their own."""

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
    """Identify a source that cells have of their own."""
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

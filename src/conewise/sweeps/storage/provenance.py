"""All that the numbers of a sweep depend on, as plain values: equal sweeps have equal provenance."""

from __future__ import annotations

import base64
import hashlib
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from conewise.anatomy.components import Edges
from conewise.anatomy.places import EdgePlace, Place
from conewise.anatomy.selectors import Pairs, Part, Selector, Selectors, SourceAt, SourcedCell, SourcedCells
from conewise.errors import Argument, IdentityError, SweepError
from conewise.jobs.digests import fingerprint, inputs_digest, program_digest
from conewise.jobs.identity import identified
from conewise.program.tensors import Tensor
from conewise.program.weights import Sums
from conewise.runs import metric_words as known_metrics
from conewise.runs.captured import Captured
from conewise.runs.interventions import Intervention, OwnSources, add, as_intervention, masked, noise
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.sweeps.planning.costs import versions
from conewise.sweeps.planning.plan import Lazy
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.planning.spec import SweepSpec
from conewise.sweeps.storage.codec import decoded, plain

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


# -- the sweep that a plan is for, in plain values ---------------

Rerunning = Callable[[Mapping[str, Tensor]], Reading]
"""Runs inputs again."""

NO_SOURCE = "none"
"""Stands for the source of a sweep in which every cell has its own."""

SOURCES: Mapping[str, Callable[..., Any]] = {
    "value": lambda value: value,
    "add": lambda scale, vector: add(vector, scale),
    "zero": lambda: "zero",
    "mean": lambda: "mean",
    "masked": masked,
    "noise": noise,
}
"""Sources of cells that can be written down, by kind, and what each was given as."""

METRICS = ("logit_diff", "logit", "prob")
"""Metrics that are made of tokens alone."""


def plain_spec(
    model: str,
    selectors: Selectors,
    metrics: Sequence[Metric],
    precision: str | None,
    batches: Sequence[tuple[Any, Any]],
    own: OwnSources,
) -> dict[str, Any]:
    """Return what is asked, in plain values. `batches` has what was given as base and source of each.

    `own` are the sources that cells have of their own.
    """
    return {
        "model": model,
        "sites": [_selector_to_plain(part, own.number) for part in selectors.parts],
        **({"sources": [_source_to_plain(one) for one in own]} if len(own) else {}),
        "metrics": [_metric_to_plain(metric) for metric in metrics],
        "precision": precision,
        "batches": [
            [_run_to_plain(base), NO_SOURCE if source is None else _run_to_plain(source)]
            for base, source in batches
        ],
    }


def asked_by(spec: Mapping[str, Any], run: Rerunning) -> dict[str, Any]:
    """Return what `Sweep` has to be given for a plan's spec; SweepError says what could not be written down.

    What was given as a run is run again, by `run`: as inputs it would be rounded otherwise. A spec that was
    damaged raises SweepError too.
    """
    try:
        return _asked(spec, run)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SweepError(
            f"what this plan is for cannot be understood ({type(error).__name__}: {error}). Give what "
            "`plan.to_json()` wrote."
        ) from None


def _asked(spec: Mapping[str, Any], run: Rerunning) -> dict[str, Any]:
    metrics = [_metric(one) for one in spec["metrics"]]
    batches = [(_given(base, run), _given(source, run)) for base, source in spec["batches"]]
    missing = [
        name for name, found in (("metric", metrics), ("base", [b for b, _ in batches])) if None in found
    ]
    missing += ["source"] if any(source is None for _, source in spec["batches"]) else []
    written = spec.get("sources", ())
    missing += ["cells' own sources"] if None in written else []
    if missing:
        raise SweepError(
            f"this plan does not hold its {' and '.join(missing)}: a function, or a run in which something "
            "is patched, cannot be written down. Make the sweep with `model.sweep(...)`, and run the plan "
            "with `sweep.run(plan=plan)`."
        )
    one = len(batches) == 1
    sources = [_source(source, run) for source in written]
    return {
        "sites": Selectors(tuple(_selector(part, sources) for part in spec["sites"])),
        "base": batches[0][0] if one else [base for base, _ in batches],
        "source": batches[0][1]
        if one or batches[0][1] is None or isinstance(batches[0][1], str)
        else [source for _, source in batches],
        "metric": metrics,
        "precision": None if spec["precision"] is None else _text(spec["precision"]),
    }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} stands where a text is expected")
    return value


def _selector_to_plain(part: Part, number: Callable[[Any], int]) -> Any:
    """A part, with the number of each source that cells have of their own."""
    if isinstance(part, Edges):
        rows = zip(part.places, part.writers, part.readers, strict=True)
        return {"edges": [[_place_to_plain(place), writer, reader] for place, writer, reader in rows]}
    if isinstance(part, Selector):
        return plain(part, whole=True)
    if isinstance(part, SourcedCells):
        whole = part.of
        of = (
            _selector_to_plain(whole, number)
            if isinstance(whole, Selector)
            else [_place_to_plain(place) for place in whole]
        )
        if part.at is not None:
            found = [[_place_to_plain(place), number(one)] for place, one in part.at.found.items()]
            return {"cells": of, "at": found}
        sources = [[label, number(one)] for label, one in part.sources.items()]
        return {"cells": of, "sources": sources, "axis": part.axis}
    if isinstance(part, Pairs):
        return {"pairs": [_selector_to_plain(one, number) for one in part.of.parts], "singles": part.singles}
    return [[_member_to_plain(one, number) for one in group] for group in part]


def _member_to_plain(one: Place | SourcedCell, number: Callable[[Any], int]) -> Any:
    if not isinstance(one, SourcedCell):
        return _place_to_plain(one)
    places = [_place_to_plain(place) for place in one.places]
    return {"places": places, "source": number(one.source), "label": one.label}


def _selector(given: Any, sources: Sequence[Any]) -> Part:
    if isinstance(given, Mapping) and "edges" in given:
        places, writers, readers = zip(*given["edges"], strict=True)
        return Edges(tuple(map(_edge_place, places)), writers, readers)
    if isinstance(given, Mapping) and "cells" in given:
        of = given["cells"]
        where = decoded(of, Selector, "cells") if isinstance(of, Mapping) else tuple(map(_place, of))
        if "at" in given:
            found = {_place(place): sources[number] for place, number in given["at"]}
            return SourcedCells(where, {}, at=SourceAt(None, found))
        named = {str(label): sources[number] for label, number in given["sources"]}
        return SourcedCells(where, named, given["axis"])
    if isinstance(given, Mapping) and "pairs" in given:
        parts = tuple(_selector(one, sources) for one in given["pairs"])
        return Pairs(Selectors(parts), bool(given["singles"]))
    if isinstance(given, Mapping):
        selector: Selector = decoded(given, Selector, "a selector")
        return selector
    return tuple(tuple(_member(one, sources) for one in group) for group in given)


def _member(given: Any, sources: Sequence[Any]) -> Place | SourcedCell:
    if not isinstance(given, Mapping):
        return _place(given)
    return SourcedCell(tuple(map(_place, given["places"])), sources[given["source"]], given["label"])


def _source_to_plain(put: Intervention) -> Any:
    if put.is_run:
        return ["run", _run_to_plain(put.runs[0])] if not put.runs[0].edits else None
    kind, *given = put.described
    if kind not in SOURCES:
        return None
    return [kind, *(_tensor_to_plain(one) if isinstance(one, Tensor) else one for one in given)]


def _source(given: Any, run: Rerunning) -> Any:
    kind, *given = given
    if kind == "run":
        return _given(given[0], run)
    if kind not in SOURCES:
        raise SweepError(f"no source {kind!r} of a cell: there are {', '.join(SOURCES)}.")
    return SOURCES[kind](*(_tensor(one) if isinstance(one, Mapping) else one for one in given))


def _place_to_plain(place: Place) -> Any:
    return list(plain(place, whole=True).values())


def _place(given: Any) -> Place:
    """A place, an edge's where it has more than four parts."""
    kind = EdgePlace if len(given) > len(fields(Place)) else Place
    found: Place = decoded(dict(zip((one.name for one in fields(kind)), given, strict=True)), kind, "a place")
    return found


def _edge_place(given: Any) -> EdgePlace:
    place = _place(given)
    if not isinstance(place, EdgePlace):
        raise SweepError(f"{place} is no edge, where this plan should have one.")
    return place


def _metric_to_plain(metric: Metric) -> Any:
    kind, *tokens = metric.described or (None,)
    is_plain = all(
        isinstance(one, list | tuple) and all(isinstance(own, int) for own in one) for one in tokens
    )
    if kind not in METRICS or not is_plain:
        return None
    at = [] if metric.pos is None else [list(metric.pos)]
    return [kind, metric.name, [[int(token) for token in one] for one in tokens], *at]


def _metric(given: Any) -> Metric | None:
    if given is None:
        return None
    kind, name, tokens, *at = given
    if kind not in METRICS:
        raise SweepError(f"no metric {kind!r} that is made of tokens: there are {', '.join(METRICS)}.")
    made: Metric = getattr(known_metrics, kind)(*tokens, name=name)
    return known_metrics.read_at(made, at[0]) if at else made


def _run_to_plain(given: Any) -> Any:
    if isinstance(given, str):
        return given
    if isinstance(given, Reading):
        return None if given.edits else ["run", _run_to_plain(given.inputs)]
    if not isinstance(given, Mapping):
        return None
    return {name: _tensor_to_plain(value) for name, value in given.items() if value is not None}


def _given(given: Any, run: Rerunning) -> Any:
    if given is None or isinstance(given, str):
        return None if given == NO_SOURCE else given
    if isinstance(given, list):
        return run(_given(given[1], run))
    return {name: _tensor(value) for name, value in given.items()}


def _tensor_to_plain(given: Any) -> Any:
    value = torch.as_tensor(given).detach().cpu().contiguous()
    dtype = str(value.dtype).removeprefix("torch.")
    if not value.is_floating_point() and not value.is_complex():
        return {"dtype": dtype, "values": value.tolist()}
    raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": dtype, "shape": list(value.shape), "bytes": base64.b64encode(raw).decode()}


def _tensor(given: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, str(given["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise SweepError(f"no dtype {given['dtype']!r} in this plan's inputs.")
    try:
        if "values" in given:
            return torch.tensor(given["values"], dtype=dtype)
        raw = bytearray(base64.b64decode(given["bytes"], validate=True))
        return torch.frombuffer(raw, dtype=dtype).reshape(given["shape"])
    except RuntimeError as error:  # numbers that the dtype does not hold, or not as many as the shape has
        raise ValueError(str(error).partition("\n")[0]) from None

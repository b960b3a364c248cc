"""The sweep that a plan is for, in plain values: selectors, metrics, inputs. Another process can run it.

What cannot be written down (a function, a run in which something is patched) is None, and has to be given
again where the plan is run.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from conewise.anatomy.edges import Edges
from conewise.anatomy.places import EdgePlace, Place
from conewise.anatomy.selectors import Pairs, Part, Selector, Selectors, SourcedCell, SourcedCells
from conewise.errors import SweepError
from conewise.runs import metrics as known_metrics
from conewise.runs.interventions import Intervention, OwnSources, add, masked, noise
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading

Tensor = torch.Tensor
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
    metrics = [_metric(plain) for plain in spec["metrics"]]
    batches = [(_given(base, run), _given(source, run)) for base, source in spec["batches"]]
    missing = [
        name for name, found in (("metric", metrics), ("base", [b for b, _ in batches])) if None in found
    ]
    missing += ["source"] if any(source is None for _, source in spec["batches"]) else []
    plain = spec.get("sources", ())
    missing += ["cells' own sources"] if None in plain else []
    if missing:
        raise SweepError(
            f"this plan does not hold its {' and '.join(missing)}: a function, or a run in which something "
            "is patched, cannot be written down. Make the sweep with `model.sweep(...)`, and run the plan "
            "with `sweep.run(plan=plan)`."
        )
    one = len(batches) == 1
    sources = [_source(source, run) for source in plain]
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
        choices = {axis: list(c) if isinstance(c, tuple) else c for axis, c in part.choices.items()}
        return {"name": part.name, "stack": part.stack, "choices": choices}
    if isinstance(part, SourcedCells):
        whole = part.of
        of = (
            _selector_to_plain(whole, number)
            if isinstance(whole, Selector)
            else [_place_to_plain(place) for place in whole]
        )
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


def _selector(plain: Any, sources: Sequence[Any]) -> Part:
    if isinstance(plain, Mapping) and "edges" in plain:
        places, writers, readers = zip(*plain["edges"], strict=True)
        return Edges(tuple(map(_edge_place, places)), writers, readers)
    if isinstance(plain, Mapping) and "cells" in plain:
        of = plain["cells"]
        named = {str(label): sources[number] for label, number in plain["sources"]}
        where = _plain_selector(of) if isinstance(of, Mapping) else tuple(map(_place, of))
        return SourcedCells(where, named, plain["axis"])
    if isinstance(plain, Mapping) and "pairs" in plain:
        parts = tuple(_selector(one, sources) for one in plain["pairs"])
        return Pairs(Selectors(parts), bool(plain["singles"]))
    if isinstance(plain, Mapping):
        return _plain_selector(plain)
    return tuple(tuple(_member(one, sources) for one in group) for group in plain)


def _plain_selector(plain: Mapping[str, Any]) -> Selector:
    choices = {a: tuple(c) if isinstance(c, list) else c for a, c in plain["choices"].items()}
    hash((*choices.values(),))  # what is no plain value is found out here
    return Selector(_text(plain["name"]), _text(plain["stack"]), choices)


def _member(plain: Any, sources: Sequence[Any]) -> Place | SourcedCell:
    if not isinstance(plain, Mapping):
        return _place(plain)
    return SourcedCell(tuple(map(_place, plain["places"])), sources[plain["source"]], plain["label"])


def _source_to_plain(put: Intervention) -> Any:
    if put.is_run:
        return ["run", _run_to_plain(put.runs[0])] if not put.runs[0].edits else None
    kind, *given = put.described
    if kind not in SOURCES:
        return None
    return [kind, *(_tensor_to_plain(one) if isinstance(one, Tensor) else one for one in given)]


def _source(plain: Any, run: Rerunning) -> Any:
    kind, *given = plain
    if kind == "run":
        return _given(given[0], run)
    if kind not in SOURCES:
        raise SweepError(f"no source {kind!r} of a cell: there are {', '.join(SOURCES)}.")
    return SOURCES[kind](*(_tensor(one) if isinstance(one, Mapping) else one for one in given))


def _place_to_plain(place: Place) -> Any:
    part: dict[str, Any] = {}
    for axis, one in place.part.items():
        if isinstance(one, slice):
            part[axis] = {"slice": [one.start, one.stop, one.step]}
        else:
            part[axis] = one if isinstance(one, int) else list(one)
    plain: list[Any] = [place.name, place.layer, place.stack, part]
    if isinstance(place, EdgePlace):
        plain += [place.edge, place.writer, place.entry, place.live, list(place.also)]
    return plain


def _edge_place(plain: Any) -> EdgePlace:
    place = _place(plain)
    if not isinstance(place, EdgePlace):
        raise SweepError(f"{place} is no edge, where this plan should have one.")
    return place


def _place(plain: Any) -> Place:
    name, layer, stack, part, *edge = plain
    chosen: dict[str, Any] = {}
    for axis, one in part.items():
        if isinstance(one, Mapping):
            chosen[axis] = slice(*one["slice"])
        else:
            chosen[axis] = tuple(one) if isinstance(one, list) else one
    hash((layer, _text(name), _text(stack), *(one for one in chosen.values() if not isinstance(one, slice))))
    if not edge:
        return Place(name, layer, stack, chosen)
    own, writer, entry, live, also = edge
    return EdgePlace(name, layer, stack, chosen, own, writer, entry, live, tuple(also))


def _metric_to_plain(metric: Metric) -> Any:
    kind, *tokens = metric.described or (None,)
    if kind not in METRICS or not all(isinstance(one, list | tuple) for one in tokens):
        return None
    at = [] if metric.pos is None else [list(metric.pos)]
    return [kind, metric.name, [[int(token) for token in one] for one in tokens], *at]


def _metric(plain: Any) -> Metric | None:
    if plain is None:
        return None
    kind, name, tokens, *at = plain
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


def _given(plain: Any, run: Rerunning) -> Any:
    if plain is None or isinstance(plain, str):
        return None if plain == NO_SOURCE else plain
    if isinstance(plain, list):
        return run(_given(plain[1], run))
    return {name: _tensor(value) for name, value in plain.items()}


def _tensor_to_plain(given: Any) -> Any:
    value = torch.as_tensor(given).detach().cpu().contiguous()
    dtype = str(value.dtype).removeprefix("torch.")
    if not value.is_floating_point() and not value.is_complex():
        return {"dtype": dtype, "values": value.tolist()}
    raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": dtype, "shape": list(value.shape), "bytes": base64.b64encode(raw).decode()}


def _tensor(plain: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, str(plain["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise SweepError(f"no dtype {plain['dtype']!r} in this plan's inputs.")
    try:
        if "values" in plain:
            return torch.tensor(plain["values"], dtype=dtype)
        raw = bytearray(base64.b64decode(plain["bytes"], validate=True))
        return torch.frombuffer(raw, dtype=dtype).reshape(plain["shape"])
    except RuntimeError as error:  # numbers that the dtype does not hold, or not as many as the shape has
        raise ValueError(str(error).partition("\n")[0]) from None

"""Evaluation: how much of what a model does its circuit does, with all other edges removed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conewise.circuits.forwards import Asked, asked
from conewise.circuits.masked_forward import Forward, Numbers
from conewise.circuits.replaced_parts import Mask
from conewise.errors import CircuitError
from conewise.jobs.job import pool_of
from conewise.jobs.pool import Pool
from conewise.runs.captured import Captured
from conewise.templates import bars, beside, lead, note, shown
from conewise.threads import one_thread


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Metrics of a circuit: how much it does of what the model does, with removed edges ablated.

    faithfulness = (m(circuit) − m(ablated)) / (m(full) − m(ablated)): 1 where the circuit does all of it.
    completeness is the same ratio for the complement, all edges but the circuit's: 0 where nothing of it is
    done without the circuit. minimality is the smallest |change| of m when one edge of the circuit is
    removed too, and `weakest` that edge; None where it was not asked for, or where the circuit has no edge.
    NaN is a ratio over nothing.

    `full` is the base itself, `ablated` has all edges removed: under "resample" it is the source. `size` is
    how many edges the circuit has, of `edges`, and `source` what removed ones carry. `per_prompt` has
    the four values for each prompt, by name.
    """

    metric: str
    source: str
    size: int
    edges: int
    full: float
    ablated: float
    circuit: float
    complement: float
    faithfulness: float
    completeness: float
    minimality: float | None = None
    weakest: str | None = None
    per_prompt: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    unit: str = "edges"

    def __repr__(self) -> str:
        share = self.size / self.edges if self.edges else math.nan
        return (
            f"Evaluation of {self.size:,} of {self.edges:,} {self.unit} ({share:.1%}): faithfulness "
            f"{self.faithfulness:.3f}, completeness {self.completeness:.3f} "
            f"({self.metric} {self.circuit:.4g}, of the model {self.full:.4g})"
        )

    @property
    def finding(self) -> str:
        """The finding, in a sentence."""
        edges = f"{self.size:,} of {self.edges:,} {self.unit}"
        return f"A circuit of {edges} keeps {self.faithfulness:.0%} of {self.metric}."

    def _repr_html_(self) -> str:
        ratios = [
            ("faithfulness", self.faithfulness, f"{self.faithfulness:.3f}"),
            ("completeness (0 is best)", self.completeness, f"{self.completeness:.3f}"),
        ]
        values = [
            (f"{self.metric} of the model", self.full, f"{self.full:.4g}"),
            ("of the circuit", self.circuit, f"{self.circuit:.4g}"),
            (f"without the circuit's {self.unit}", self.complement, f"{self.complement:.4g}"),
            (f"with all {self.unit} removed", self.ablated, f"{self.ablated:.4g}"),
        ]
        weakest = "" if self.weakest is None else f"; the edge needed least is {self.weakest}"
        prompts = len(self.per_prompt.get("full", ()))
        over = f"Over {prompts:,} prompt{'s' if prompts != 1 else ''}"
        sure = f"{over}; removed {self.unit}: {self.source}{weakest}."
        return shown(lead(self.finding), note(sure), beside(bars(ratios), bars(values)))

    def __str__(self) -> str:
        share = self.size / self.edges if self.edges else math.nan
        known = f"of the model {self.full:.4g}, with nothing kept {self.ablated:.4g}"
        without, removed = f"{self.complement:.4g}", f"removed {self.unit}: {self.source}"
        lines = [
            f"circuit of {self.size:,} {self.unit}, {share:.1%} of {self.edges:,}; " + removed,
            f"  faithfulness {self.faithfulness:8.3f}   {self.metric} of the circuit {self.circuit:.4g}, "
            + known,
            f"  completeness {self.completeness:8.3f}   without the circuit's {self.unit} " + without,
        ]
        if self.minimality is not None:
            lines.append(f"  minimality   {self.minimality:8.3g}   the weakest edge is {self.weakest}")
        return "\n".join(lines)


ONLY = ("faithfulness", "completeness")
"""The values that can be asked for alone: each takes the worlds that it needs and no others."""


def evaluate(
    model: Captured,
    edges: Collection[str],
    *,
    only: str | None = None,
    minimality: bool = True,
    workers: int | str | Pool | None = None,
    **question: Any,
) -> Evaluation:
    """Evaluate the circuit of these edges: run it with all others removed, and its complement likewise.

    `question` is what it is evaluated on: `base` is the run whose behaviour is to be kept, and removed edges
    carry what they do in `source`: a run, inputs or a text. With "zero" they carry nothing, with "mean" their
    mean over the base, with "mean-positional" that at each position, with `cw.mean(...)` that over another
    batch. `prompts`, in the place of `base`, are pairs of prompts of any lengths; the corrupted ones are the
    source then, and with "mean-template" removed edges carry their mean over the prompts of a template, at
    each position. See `conewise.circuits.forwards.asked`.

    With `only`, "faithfulness" or "completeness", nothing else is computed. With `minimality`, every edge of
    the circuit is removed once more, in a world of its own. `workers` evaluate these worlds beyond this
    process: see `Runnable.run`.
    """
    given = asked(model, **question)
    removed = given.graph.all_but(given.graph.numbers(edges))
    with pool_of(workers) as pool, given.forward(pool) as forward:
        (found,) = _evaluated(given, forward, [removed], only)
        weakest = _weakest(given, forward, removed) if minimality and only is None else None
    if weakest is None:
        return found
    return replace(found, minimality=weakest[0], weakest=weakest[1])


@one_thread
def evaluate_all(
    model: Captured,
    circuits: Sequence[Collection[str]],
    *,
    only: str | None = None,
    workers: int | str | Pool | None = None,
    **question: Any,
) -> list[Evaluation]:
    """Evaluate many circuits as one stack of worlds; see `evaluate`. Minimality is not among it."""
    given = asked(model, **question)
    removed = [given.graph.all_but(given.graph.numbers(edges)) for edges in circuits]
    with pool_of(workers) as pool, given.forward(pool) as forward:
        return _evaluated(given, forward, removed, only)


def _evaluated(given: Asked, forward: Forward, removed: Sequence[Mask], only: str | None) -> list[Evaluation]:
    """The evaluation of each circuit: its worlds, and what both ends are, in one stack."""
    if only is not None and only not in ONLY:
        raise CircuitError(f"only={only!r} is none of {', '.join(map(repr, ONLY))}; leave it out for all.")
    everything = given.graph.there
    ends = [np.zeros_like(everything), everything] if only is None else []
    wanted = [name for name in ("circuit", "complement") if only is None or name == _WORLDS[only]]
    worlds = {
        "circuit": list(removed),
        "complement": [everything & ~one for one in removed],
    }
    stack = [*ends, *(world for name in wanted for world in worlds[name])]
    values = forward.values(np.stack(stack)) if stack else np.zeros((0, 0))
    full, ablated = values[:2] if ends else ends_of(given, forward)
    found = {name: values[len(ends) + at * len(removed) :] for at, name in enumerate(wanted)}
    return [
        _evaluation(
            given,
            int((everything & ~one).sum()),
            full,
            ablated,
            {name: rows[at] for name, rows in found.items()},
        )
        for at, one in enumerate(removed)
    ]


_WORLDS = {"faithfulness": "circuit", "completeness": "complement"}


def ends_of(given: Asked, forward: Forward) -> tuple[Numbers, Numbers]:
    """The metric of each prompt with all edges, and with none: read off the runs where these are the same.

    With every edge removed a model computes what it does in the source, where base and source differ in
    their tokens alone.
    """
    full = given.of_runs([one.base for one in given.groups])
    if all(one.ends_in_source for one in given.groups):
        return full, given.of_runs([one.source for one in given.groups])
    ablated: Numbers = forward.values(given.graph.there[None])[0]
    return full, ablated


def _evaluation(
    given: Asked, size: int, full: Numbers, ablated: Numbers, values: Mapping[str, Numbers]
) -> Evaluation:
    rows = {"full": full, "ablated": ablated, **values}
    mean = {name: float(row.mean()) for name, row in rows.items()}
    circuit, complement = mean.get("circuit", math.nan), mean.get("complement", math.nan)
    whole = mean["full"] - mean["ablated"]
    return Evaluation(
        given.metric.name,
        given.ablation,
        size,
        given.graph.count,
        mean["full"],
        mean["ablated"],
        circuit,
        complement,
        ratio(circuit - mean["ablated"], whole),
        ratio(complement - mean["ablated"], whole),
        per_prompt={name: tuple(row.tolist()) for name, row in rows.items()},
    )


def faithfulness_of(
    model: Captured,
    circuits: Sequence[Collection[str]],
    **asked_for: Any,
) -> list[float]:
    """The faithfulness of many circuits, as one stack of worlds; see `evaluate_all`."""
    return [one.faithfulness for one in evaluate_all(model, circuits, only="faithfulness", **asked_for)]


def _weakest(given: Asked, forward: Forward, removed: Mask) -> tuple[float, str] | None:
    """The smallest change when one more edge is removed, and which edge that is."""
    current = float(forward.begin(removed).mean())
    smallest: tuple[float, str] | None = None
    for stage in reversed(forward.stages):
        rows = removed[stage.rows]
        kept = np.argwhere(given.graph.there[stage.rows] & ~rows)
        many = forward.most(stage.number)
        for at in range(0, len(kept), many):
            some = kept[at : at + many]
            worlds = np.repeat(rows[None], len(some), 0)
            worlds[np.arange(len(some)), some[:, 0], some[:, 1]] = True
            changes: Numbers = np.abs(forward.below(stage.number, worlds).mean(1) - current)
            least = int(changes.argmin())
            if smallest is None or changes[least] < smallest[0]:
                reader, writer = some[least]
                name = given.graph.edges[int(given.graph.starts[stage.first + reader]) + int(writer)]
                smallest = float(changes[least]), name
    return smallest


def ratio(part: float, whole: float) -> float:
    """A part over the whole; NaN where that is nothing."""
    return part / whole if whole else math.nan

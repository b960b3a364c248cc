"""Evaluation: how much of what a model does its circuit does, with all other edges removed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conewise.circuits.masked_forward import Forward, Numbers
from conewise.circuits.question import CircuitQuestion
from conewise.circuits.replaced_parts import Mask
from conewise.errors import CircuitError
from conewise.jobs.job import pool_of
from conewise.jobs.pool import Pool
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

    @classmethod
    def of(
        cls, metric: str, source: str, size: int, edges: int, rows: Mapping[str, Any], unit: str = "edges"
    ) -> Evaluation:
        """The evaluation by the metric of each prompt, by name: what is missing was not asked for."""
        mean = {name: float(np.mean(row)) for name, row in rows.items()}
        circuit, complement = mean.get("circuit", math.nan), mean.get("complement", math.nan)
        full, ablated = mean["full"], mean["ablated"]
        return cls(
            metric,
            source,
            size,
            edges,
            full,
            ablated,
            circuit,
            complement,
            ratio(circuit - ablated, full - ablated),
            ratio(complement - ablated, full - ablated),
            per_prompt={name: tuple(np.asarray(row).tolist()) for name, row in rows.items()},
            unit=unit,
        )

    @property
    def _share(self) -> str:
        return f"{self.size / self.edges if self.edges else math.nan:.1%}"

    def __repr__(self) -> str:
        return (
            f"Evaluation of {self.size:,} of {self.edges:,} {self.unit} ({self._share}): faithfulness "
            f"{self.faithfulness:.3f}, completeness {self.completeness:.3f} "
            f"({self.metric} {self.circuit:.4g}, of the model {self.full:.4g})"
        )

    @property
    def finding(self) -> str:
        """The finding, in a sentence."""
        edges = f"{self.size:,} of {self.edges:,} {self.unit}"
        return f"A circuit of {edges} keeps {self.faithfulness:.0%} of {self.metric}."

    @property
    def certainty(self) -> str:
        """The prompts that it was measured on, what removed edges carried, and the edge needed least."""
        weakest = "" if self.weakest is None else f"; the edge needed least is {self.weakest}"
        prompts = len(self.per_prompt.get("full", ()))
        over = f"Over {prompts:,} prompt{'s' if prompts != 1 else ''}"
        return f"{over}; removed {self.unit}: {self.source}{weakest}."

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
        return shown(lead(self.finding), note(self.certainty), beside(bars(ratios), bars(values)))

    def __str__(self) -> str:
        known = f"of the model {self.full:.4g}, with nothing kept {self.ablated:.4g}"
        without, removed = f"{self.complement:.4g}", f"removed {self.unit}: {self.source}"
        lines = [
            f"circuit of {self.size:,} {self.unit}, {self._share} of {self.edges:,}; " + removed,
            f"  faithfulness {self.faithfulness:8.3f}   {self.metric} of the circuit {self.circuit:.4g}, "
            + known,
            f"  completeness {self.completeness:8.3f}   without the circuit's {self.unit} " + without,
        ]
        if self.minimality is not None:
            lines.append(f"  minimality   {self.minimality:8.3g}   the weakest edge is {self.weakest}")
        return "\n".join(lines)


ONLY = {"faithfulness": "circuit", "completeness": "complement"}
"""The values that can be asked for alone, each with the worlds that it needs."""


@one_thread
def evaluate(
    given: CircuitQuestion,
    circuits: Sequence[Collection[str]],
    *,
    only: str | None = None,
    minimality: bool = False,
    workers: int | str | Pool | None = None,
) -> list[Evaluation]:
    """Evaluate circuits of these edges: run each with all others removed, and its complement likewise.

    With `only`, "faithfulness" or "completeness", nothing else is computed. With `minimality`, every edge of
    a circuit is removed once more, in a world of its own. `workers` evaluate these worlds beyond this
    process: see `Runnable.run`.
    """
    if only is not None and only not in ONLY:
        raise CircuitError(f"only={only!r} is none of {', '.join(map(repr, ONLY))}; leave it out for all.")
    graph, everything = given.graph, given.graph.there
    removed = [graph.all_but(graph.numbers(edges)) for edges in circuits]
    worlds = {"circuit": removed, "complement": [everything & ~one for one in removed]}
    wanted = [name for name in worlds if only is None or name == ONLY[only]]
    ends = [np.zeros_like(everything), everything] if only is None else []
    stack = [*ends, *(world for name in wanted for world in worlds[name])]
    with pool_of(workers) as pool, given.forward(pool) as forward:
        values = forward.values(np.stack(stack)) if stack else np.zeros((0, 0))
        full, ablated = values[:2] if ends else ends_of(given, forward)
        found = []
        for at, one in enumerate(removed):
            rows = {name: values[len(ends) + n * len(removed) + at] for n, name in enumerate(wanted)}
            size = int((everything & ~one).sum())
            rows = {"full": full, "ablated": ablated, **rows}
            found.append(Evaluation.of(given.metric.name, given.ablation, size, graph.count, rows))
            weakest = _weakest(given, forward, one) if minimality and only is None else None
            if weakest is not None:
                found[-1] = replace(found[-1], minimality=weakest[0], weakest=weakest[1])
    return found


def ends_of(given: CircuitQuestion, forward: Forward) -> tuple[Numbers, Numbers]:
    """The metric of each prompt with all edges, and with none: read off the runs where these are the same.

    With every edge removed a model computes what it does in the source, where base and source differ in
    their tokens alone.
    """
    full = given.of_runs([one.base for one in given.groups])
    if all(one.ends_in_source for one in given.groups):
        return full, given.of_runs([one.source for one in given.groups])
    ablated: Numbers = forward.values(given.graph.there[None])[0]
    return full, ablated


def _weakest(given: CircuitQuestion, forward: Forward, removed: Mask) -> tuple[float, str] | None:
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

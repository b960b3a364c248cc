"""What a sweep will cost: evaluator, chunks that fit into memory, operations, time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from conewise.amounts import shown_bytes
from conewise.errors import Argument, SweepError
from conewise.sweeps.plan import SweepPlan
from conewise.sweeps.planning.costs import matmul_rate
from conewise.sweeps.planning.fusing import fitting
from conewise.sweeps.planning.memory import Footprint, footprint
from conewise.sweeps.planning.passes import (
    Chunk,
    NodeSizes,
    Pass,
    Prepared,
    chunk_of,
    last_reads,
    reader,
    runs_of,
)
from conewise.sweeps.planning.preparing import Preparation
from conewise.sweeps.planning.regions import Regions
from conewise.sweeps.planning.shown import Lying, lying

if TYPE_CHECKING:
    from conewise.sweeps.storage.store import Agreed
    from conewise.sweeps.sweep import Batch

DEFAULT_MEMORY = 2 << 30
"""What a sweep may hold beside the model and its baseline, where nothing else is said."""


class Planner(Preparation):
    """Plans one sweep. Nothing of the sweep is computed."""

    # -- the plan ------------------------------------------------------------------------------

    def plan(
        self,
        batch: Batch,
        max_memory: int | None,
        evaluator: str,
        agreed: Agreed | None = None,
    ) -> tuple[SweepPlan, list[Chunk]]:
        """The plan for a batch, and its chunks; `agreed` is how a run that is resumed was cut."""
        prepared, sweep = self.prepare(batch), self.sweep
        chosen, why = self._chosen(prepared, evaluator, agreed)
        if chosen == "serial":
            chunks = [Chunk(1 << world) for world in range(len(sweep.cells))]
        else:
            starts = self.starts(prepared, batch)
            if agreed:
                chunks = [chunk_of(worlds, starts) for worlds in runs_of(agreed.chunks)]
            else:
                chunks = self._chunks(prepared, batch, max_memory or DEFAULT_MEMORY, starts)
        stacked = chosen == "wavefront"
        peak = max(self._peak(prepared, batch, chunk, stacked=stacked) for chunk in chunks)
        if agreed and max_memory is not None and peak > max_memory and stacked:
            raise SweepError(
                f"the stored run was cut into chunks that take {shown_bytes(peak)}, more than the budget of "
                f"{shown_bytes(max_memory)}, and other chunks would round differently. Resume it with ",
                Argument("max_memory", peak),
                " or more, or start again in another folder.",
            )
        if max_memory is not None and peak > max_memory and not stacked:
            raise _no_room(peak, max_memory)
        plan, (computed, full) = prepared.schedule, prepared.full
        done, launches = self._work(prepared, batch, chunks, stacked=stacked)
        rate = sweep.facts.rates.get(chosen)
        return (
            SweepPlan(
                worlds=len(sweep.cells),
                batches=sweep.batches,
                node_evaluations=plan.node_evaluations * sweep.batches,
                full_evaluations=computed * len(sweep.cells) * sweep.batches,
                launches=launches * sweep.batches,
                flops=done * sweep.batches,
                full_flops=full * len(sweep.cells) * sweep.batches,
                peak_bytes=peak,
                max_memory=max_memory,
                chunks=tuple(len(chunk) for chunk in chunks),
                evaluator=chosen,
                why=why,
                seconds=(done * sweep.batches / (rate or self._calibrated())),
            ),
            chunks,
        )

    def _chosen(self, prepared: Prepared, evaluator: str, agreed: Agreed | None) -> tuple[str, str]:
        """The evaluator, and why it was chosen."""
        if evaluator not in {"auto", "serial", "wavefront"}:
            raise SweepError(f"no evaluator {evaluator!r}: there are 'serial', 'wavefront' and 'auto'.")
        if evaluator == "wavefront" and prepared.obstacle:
            raise SweepError(f"this sweep cannot run as a wavefront: {prepared.obstacle}. Run it serially.")
        chosen = evaluator if evaluator != "auto" else "serial" if prepared.obstacle else "wavefront"
        chosen = agreed.evaluator if agreed else chosen
        if chosen == "serial" and self.sweep.precision:
            raise SweepError(
                f"a serial run is a full re-run bit for bit, and {self.sweep.precision} rounds more. Leave ",
                Argument("precision"),
                f" out{'' if prepared.obstacle else ', or run it as a wavefront'}.",
            )
        rounding = "TF32" if self.sweep.precision else "batched kernels"
        why = (
            prepared.obstacle
            or ("one world after another, bit for bit a full re-run" if chosen == "serial" else "")
            or f"all worlds in one pass, equal up to the rounding of {rounding}"
        )
        return chosen, why

    def _work(
        self, prepared: Prepared, batch: Batch, chunks: Sequence[Chunk], *, stacked: bool
    ) -> tuple[int, int]:
        """Operations and launches of all chunks."""
        plan, name = prepared.schedule, self._graph.name
        if not stacked:
            whole = prepared.whole_costs
            done = sum(whole.flops(name(node)) * worlds.bit_count() for node, worlds in plan.steps)
            return done, plan.node_evaluations
        key = tuple(chunks)
        if key in prepared.work:
            return prepared.work[key]
        done = launches = 0
        for chunk in chunks:
            regions = self.regions(prepared, chunk.start, batch.base)
            launches += self.passing(prepared, chunk, regions).plan.launches
            for node, worlds in plan.steps:
                if count := (worlds & chunk.worlds).bit_count():
                    done += prepared.costs.flops(name(node), rows=regions.of(name(node))) * count
        prepared.work[key] = done, launches
        return done, launches

    def passing(self, prepared: Prepared, chunk: Chunk, regions: Regions) -> Pass:
        """The pass over a chunk."""
        graph, plan = self._graph, prepared.schedule.of(chunk.worlds)
        name, number, table = graph.name, graph.number, graph.table
        steps = {name(node): (worlds, regions.of(name(node))) for node, worlds in plan.steps}
        kept = {name(node) for node in (*plan.patched, *plan.targets)}
        fused = fitting(
            self.sweep.facts.fusions, steps, kept, lambda node: map(name, table.consumers[number(node)])
        )
        gone = {number(node) for fusion in fused.values() for node in fusion.inside}
        inputs = {node: table.inputs[node] for node, _ in plan.steps}
        inputs |= {number(node): tuple(graph.numbers(fusion.inputs)) for node, fusion in fused.items()}
        plan = replace(plan, steps=tuple(step for step in plan.steps if step[0] not in gone))
        drops: dict[int, list[int]] = {}
        for site, last_reader in last_reads(plan, inputs).items():
            drops.setdefault(last_reader, []).append(site)
        return Pass(plan, inputs, drops, fused)

    def _calibrated(self) -> float:
        """Operations a second, from one matrix product: an estimate until a sweep has been timed."""
        facts = self.sweep.facts
        if "product" not in facts.rates:
            facts.rates["product"] = matmul_rate(facts.device, facts.dtype, time.perf_counter)
        return facts.rates["product"]

    # -- memory --------------------------------------------------------------------------------

    def _chunks(self, prepared: Prepared, batch: Batch, budget: int, starts: Sequence[int]) -> list[Chunk]:
        """Runs of worlds that each fit the budget, as few as possible; no run spans two groups."""
        chunks: list[Chunk] = []
        for worlds in runs_of(self.arrangement.groups):
            chunks += self._pieces(prepared, batch, budget, worlds, starts)
        return chunks

    def _pieces(
        self, prepared: Prepared, batch: Batch, budget: int, group: int, starts: Sequence[int]
    ) -> list[Chunk]:
        count, first = group.bit_count(), (group & -group).bit_length() - 1
        pieces = 1
        while True:
            size = math.ceil(count / pieces)
            chunks = [
                chunk_of(((1 << min(size, count - begin)) - 1) << first + begin, starts)
                for begin in range(0, count, size)
            ]
            most = max(self._peak(prepared, batch, chunk, stacked=True) for chunk in chunks)
            if most <= budget:
                return chunks
            if size == 1:
                alone = [chunk_of(1 << world, starts) for world in range(len(starts))]
                least = max(self._peak(prepared, batch, chunk, stacked=True) for chunk in alone)
                raise _no_room(least, budget)
            pieces = min(count, max(pieces + 1, math.ceil(pieces * most / budget)))

    def _peak(self, prepared: Prepared, batch: Batch, chunk: Chunk, *, stacked: bool) -> int:
        """The bytes held at most while the worlds of `chunk` are computed, together or one by one."""
        if stacked:
            return self.footprint(prepared, batch, chunk).peak
        # A world holds all that it computed until it is dropped.
        plan, costs, space = prepared.schedule.of(chunk.worlds), prepared.whole_costs, prepared.workspace
        shown, name, read = self._lying(prepared).shown, self._graph.name, reader(batch.base)
        held = prepared.fills.held(chunk.worlds)
        held += sum(costs.bytes_of_copy(name(node)) for node in plan.patched)
        peak = held
        for node in (name(number) for number, _ in plan.steps):
            held += 0 if node in shown else costs.bytes_of_copy(node)
            peak = max(peak, held + space.each(node, None, read) + space.fixed(node, None, read))
        return max(peak, held + self._reading(prepared))

    def footprint(self, prepared: Prepared, batch: Batch, chunk: Chunk) -> Footprint:
        """What the worlds of `chunk` take when they are computed together, step by step."""
        regions = self.regions(prepared, chunk.start, batch.base)
        known, found = prepared.footprints.get(chunk, (None, None))
        if found is None or known != regions:
            one, how, read = self.passing(prepared, chunk, regions), self._lying(prepared), reader(batch.base)
            found = footprint(
                one.plan,
                one.inputs,
                NodeSizes(self._graph, prepared, how, regions, one.plan.patched, read),
                drops=one.drops,
                reading=self._reading(prepared),
                put=prepared.fills.held(chunk.worlds),
            )
            prepared.footprints[chunk] = regions, found
        return found

    def _lying(self, prepared: Prepared) -> Lying:
        facts = self.sweep.facts
        shape = tuple(sorted(prepared.layout.symbols.items()))
        if shape not in facts.lying:
            facts.lying[shape] = lying(prepared.layout, facts.device)
        return facts.lying[shape]

    def _reading(self, prepared: Prepared) -> int:
        """The bytes that the metrics take for one world, one metric after another."""
        costs = prepared.costs
        taken = [0]
        for metric in self.sweep.metrics:
            if not metric.whole and not prepared.columns:
                target = self.sweep._target(metric)
                elements = costs.elements(target, rows=1 if metric.last else None)
                wide = 0 if costs.itemsize(target) == 4 else 1
                taken.append((metric.copies + wide) * elements * 4 if metric.copies else 0)
        return max(taken)


def _no_room(least: int, budget: int) -> SweepError:
    return SweepError(
        f"one world alone takes {shown_bytes(least)}, more than the budget of {shown_bytes(budget)}. The "
        "least that would do is ",
        Argument("max_memory", least),
        ".",
    )

"""ACDC (Conmy et al., 2023): edges are removed one by one, each for good if the metric can do without it.

Readers are visited from the last to the first, and for each the edges into it from the last writer to the
first. A removed edge carries its writer's ablated part from then on, so the worlds are a sequence of
persistent changes: the interleaved regime of the theory of grafts. Candidates in line are evaluated many at
once, each assuming that those before it were decided as guessed; the result is that of one at a time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from conewise.anatomy.edge_graph import EdgeGraph
from conewise.arguments import Positive, PositiveNumber, Seed, as_bytes, checked, shown_bytes
from conewise.circuits.circuit import Circuit
from conewise.circuits.circuit_data import Decision, best, is_whole, pruned
from conewise.circuits.circuit_files import CIRCUIT
from conewise.circuits.curve import LOSSES, helpful_sign
from conewise.circuits.learned import Training, in_batches, learned_gates
from conewise.circuits.masked_forward import Forward, Stage, layers_of, stages_of
from conewise.circuits.question import CircuitQuestion, circuit_question
from conewise.circuits.replaced_parts import Mask, edge_facts
from conewise.errors import Argument, CircuitError
from conewise.files import Format, as_path, is_there, read_json
from conewise.jobs.job import pool_of
from conewise.jobs.progress import bar
from conewise.jobs.runnable import How, Runnable
from conewise.jobs.store import Recorder, Request, is_store, recorder
from conewise.program.walk import support
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric
from conewise.runs.reading import Reading
from conewise.sweeps.planning.costs import versions
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.storage.codec import decoded
from conewise.sweeps.storage.provenance import Identifying, differences, model_digest, run_digest
from conewise.templates import bars, folded, heading, shown
from conewise.threads import Turn, one_thread

HARMS: dict[str, Callable[[float], float]] = {
    "increase": lambda change: change,
    "decrease": lambda change: -change,
    "either": abs,
}
"""The harm of a change of the metric: what is compared with the threshold."""

SAVE_EVERY = 5.0
"""Seconds from one writing of decisions to the next."""

FORMAT = Format("conewise search", 1)
"""The files of searches of conewise 0.1.0, which are read."""


TIE = 8.0
"""A change is too close to the threshold where it is within so many times the rounding that was seen."""
ULPS = 32.0
"""Rounding that is taken for granted, in units of the last place of the metric."""


Candidate = tuple[int, int]
"""An edge in line: its reader's number within the stage, and its writer's number."""
Verdict = tuple[bool, float]
"""True if a candidate is kept, and what removing it changed."""


class Worlds(Protocol):
    """Evaluates worlds that differ in what is removed of the edges into one stage."""

    @property
    def epsilon(self) -> float:
        """The unit of rounding of the model's numbers."""

    @property
    def most(self) -> int:
        """The number of worlds that fit into memory at once."""

    @property
    def few(self) -> int:
        """The number of worlds that take hardly longer than one does."""

    def values(self, removed: Mask) -> NDArray[np.float64]:
        """The metric of each world, [world]; `removed` is [world, reader, writer]."""

    def exact(self, removed: Mask) -> float:
        """The metric of one world by a computation that depends on what is removed and on nothing else."""


@dataclass(slots=True)
class Spent:
    """Counts of a search: worlds evaluated in so many stacks; some were guessed `in_vain`.

    `ties` are changes that were too close to the threshold, and were computed once more.
    """

    worlds: int = 0
    stacks: int = 0
    in_vain: int = 0
    ties: int = 0


@dataclass(slots=True)
class Greedy:
    """Decides candidates in line: one is removed where the harm of its change is below `threshold`.

    What is decided does not depend on how: a guess that turns out wrong is thrown away with all that rests on
    it, and a change that is too close to the threshold to tell from rounding is computed once more, in a way
    that depends on nothing but what is removed.

    `value` is the metric of the current world, as it was computed last, `width` how many candidates are
    tried at once: it follows how far guesses turn out right. `rounding` is the largest difference that was
    seen between two computations of one world's metric.
    """

    threshold: float
    harm: Callable[[float], float]
    speculative: bool = True
    value: float = 0.0
    rounding: float = 0.0
    width: int = 0
    spent: Spent = field(default_factory=Spent)

    def decide(self, worlds: Worlds, line: Sequence[Candidate], removed: Mask) -> Iterator[list[Verdict]]:
        """The verdicts on all of `line`, in order, some at a time; `removed` and `value` follow them.

        In the beginning `value` is the metric of the world with `removed` as it is given.
        """
        guesses = [True] * len(line)
        done = 0
        while done < len(line):
            most = min(max(self.width, worlds.few), worlds.most - 1)
            if self.speculative and most > 1:
                found = self._together(worlds, line, done, most, guesses, removed)
            else:
                found = [self._alone(worlds, line[done], removed)]
            done += len(found)
            yield found

    def _alone(self, worlds: Worlds, candidate: Candidate, removed: Mask) -> Verdict:
        """The verdict on the next candidate, in a world of its own."""
        (value,) = self._values(worlds, _with(removed, candidate)[None]).tolist()
        size = max(abs(value), abs(self.value))
        return self._decided(worlds, candidate, removed, value, value - self.value, size)

    def _together(
        self,
        worlds: Worlds,
        line: Sequence[Candidate],
        done: int,
        most: int,
        guesses: list[bool],
        removed: Mask,
    ) -> list[Verdict]:
        """The verdicts on the next candidates as far as guesses about those before them are right.

        World 0 is the current one. World i has candidate i removed, and those before it as guessed. What is
        seen behind a wrong guess is no verdict, but the best guess there is.
        """
        ahead = range(done, min(done + most, len(line)))
        stack = np.repeat(removed[None], len(ahead) + 1, 0)
        for world, at in enumerate(ahead, 1):
            stack[world:, *line[at]] = True
            stack[world + 1 :, *line[at]] = guesses[at]
        values = self._values(worlds, stack)
        self.rounding = max(self.rounding, abs(float(values[0]) - self.value))  # one world, twice
        size = float(np.abs(values).max())
        here = self.value = float(values[0])
        found: list[Verdict] = []
        is_right = True
        for at, value in zip(ahead, values[1:].tolist(), strict=True):
            guess = guesses[at]
            if is_right:
                found.append(self._decided(worlds, line[at], removed, value, value - here, size))
                is_right = found[-1][0] is not guess
            else:
                guesses[at] = self.harm(value - here) < self.threshold
            if guess:
                here = value
        wasted = len(ahead) - len(found)
        self.spent.in_vain += wasted
        self.width = 2 * most if not wasted else min(most, 2 * len(found))
        return found

    def _decided(
        self, worlds: Worlds, candidate: Candidate, removed: Mask, value: float, change: float, size: float
    ) -> Verdict:
        """The verdict on the next candidate, whose removal changed the metric as it seems by `change`.

        The search goes on in the world that it leads to; `value` is the metric without the candidate.
        """
        doubt = TIE * max(self.rounding, ULPS * worlds.epsilon * size)
        if abs(self.harm(change) - self.threshold) <= doubt:
            self.spent.ties += 1
            change = worlds.exact(_with(removed, candidate)) - worlds.exact(removed)
        is_kept = not self.harm(change) < self.threshold
        if not is_kept:
            removed[candidate] = True
            self.value = value
        return is_kept, change

    def _values(self, worlds: Worlds, removed: Mask) -> NDArray[np.float64]:
        self.spent.worlds += len(removed)
        self.spent.stacks += 1
        return worlds.values(removed)


def _with(removed: Mask, candidate: Candidate) -> Mask:
    """The same with one candidate removed too."""
    found = removed.copy()
    found[candidate] = True
    return found


# -- the search ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class SearchPlan:
    """The cost of a search at most: one world for each edge, none of them shared, none left out.

    `node_evaluations` are those of one at a time over the whole graph, as the theory of interleaved grafts
    has them: for each edge what lies behind its reader, the reader's correction, and those of readers behind
    it. What nothing reads any more, and what no kept edge reaches, is not computed, so a search takes the
    less, the more it removes; worlds that are guessed in vain come on top. `stages` has how many edges and
    node evaluations there are in each stage, in the order of visits.

    `peak_bytes` is the memory that worlds are planned to hold at once, with what is held for all of them. A
    search that keeps nearly all edges takes this to 2 %, one that removes many takes less. A change too close
    to the threshold to tell is computed once more, in a world beside the others, which can take 6 % more.
    """

    edges: int
    worlds: int
    node_evaluations: int
    stages: tuple[tuple[str, int, int], ...]
    peak_bytes: int | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        held = "" if self.peak_bytes is None else f", {shown_bytes(self.peak_bytes)}"
        return (
            f"SearchPlan over {self.edges:,} edges: at most {self.worlds:,} worlds, "
            f"{self.node_evaluations:,} node evaluations, in {len(self.stages)} stages{held}"
        )

    def _repr_html_(self) -> str:
        rows = [
            (name, float(cost), f"{edges:,} edges, {cost:,} node evaluations")
            for name, edges, cost in self.stages
        ]
        return shown(heading(repr(self)), folded("By stage", bars(rows)))

    def __str__(self) -> str:
        worlds = f"at most {self.worlds:,} worlds one at a time"
        lines = [f"ACDC over {self.edges:,} edges: {worlds}, {self.node_evaluations:,} node evaluations"]
        lines += [
            f"  {name:24} {edges:8,} edges {cost:14,} node evaluations" for name, edges, cost in self.stages
        ]
        return "\n".join(lines)


@checked
@one_thread
class Search(Runnable[Circuit]):
    """A search for a circuit: see `Model.find_circuit`. `spent` says what it took, after it ran."""

    def __init__(
        self,
        model: Captured,
        *,
        threshold: float,
        harm: str = "auto",
        heads: str = "descending",
        speculative: bool = True,
        **question: Any,
    ) -> None:
        self.asked = circuit_question(model, **question)
        if not threshold > 0:
            raise CircuitError(
                Argument("threshold", threshold), " is no threshold: it is a change of the metric, above 0."
            )
        self.threshold = threshold
        self.harm = _harm(harm, self.asked.metric)
        _expect(heads, "heads", ("descending", "ascending"))
        self.heads = heads
        self.speculative = speculative
        self.spent = Spent()
        self.node_evaluations = 0

    @property
    def _turn(self) -> Turn:
        return self.asked.model._turn

    def __repr__(self) -> str:
        asked = self.asked
        about = f"{asked.graph.count:,} edges of {asked.model.name}, reading {asked.metric.name}"
        return f"Search by ACDC over {about}: threshold {self.threshold:g}"

    def plan(self, max_memory: int | str | None = None) -> SearchPlan:
        """Return what the search takes at most; no world is computed, and its memory is rehearsed."""
        given = replace(self.asked, max_memory=as_bytes(max_memory))
        with given.forward() as forward:
            peak = sum(forward.search_bytes(speculative=self.speculative))
        return replace(search_plan(given.model, given.metric), peak_bytes=peak)

    def _run(self, how: How) -> Circuit:
        if how.workers is not None and not self.speculative:
            raise CircuitError(
                "with speculative=False candidates are evaluated one at a time, and there is nothing that "
                "workers could share. Leave `workers` out, or speculative=False."
            )
        given = replace(self.asked, max_memory=how.max_memory)
        graph = self.asked.graph
        log: list[Decision] = []
        old = [] if how.out is None else _old_decisions(as_path(how.out), self._identity, resume=how.resume)
        with ExitStack() as under_way:
            store = under_way.enter_context(recorder(self._request(), how.out, how.resume))
            kept = _Kept(store, graph, old)
            under_way.enter_context(kept.keeping(log))
            tell = under_way.enter_context(bar(how.progress, graph.count, facts_of(self.asked.model).device))
            pool = under_way.enter_context(pool_of(how.workers))
            forward = under_way.enter_context(given.forward(pool))
            for some in self._decisions(forward, kept.known):
                log += some
                tell(len(some))
                kept.write(log, every=SAVE_EVERY)
            self.node_evaluations = forward.node_evaluations
        found = self._circuit(log)
        if how.out is not None:
            found.save(as_path(how.out) / CIRCUIT)
        return found

    def _circuit(self, log: Sequence[Decision]) -> Circuit:
        """The circuit that these decisions make."""
        graph = self.asked.graph
        return Circuit.made(
            graph,
            [one.edge for one in log if one.kept],
            of=self.asked.model.name,
            method="acdc",
            threshold=self.threshold,
            scores={one.edge: one.change for one in log},
            log=log,
            helps=helpful_sign(self.asked.metric),
            model=self.asked.model,
        )

    def _request(self) -> Request:
        """Return the identity of the search, for its store."""
        graph, device = self.asked.graph, facts_of(self.asked.model).device
        unit, error = "decisions", CircuitError
        return Request(graph.count, 1, self._identity, lambda: graph.edges, device, "search", unit, error)

    def _identity(self) -> dict[str, Any]:
        """All that the decisions depend on, by name. Raises IdentityError for what cannot be identified."""
        given, identify = self.asked, Identifying(strict=True)
        digest, facts = model_digest(given.model), facts_of(given.model)

        def run(one: Reading | None) -> str | None:
            return None if one is None else str(run_digest(given.model, one, identify))

        groups = [[run(one.base), run(one.source), identify.metric(one.metric)] for one in given.more]
        return {
            "method": "acdc",
            "model": given.model.name,
            "program": digest.program,
            "weights": digest.weights,
            "constants": digest.constants,
            "base": run(given.base),
            "source": run(given.source),
            "metric": identify.metric(given.metric),
            **({"groups": groups} if groups else {}),
            "threshold": self.threshold,
            "ablation": given.described_ablation,
            "harm": self.harm,
            "heads": self.heads,
            "dtype": str(facts.dtype),
            "device": ", ".join(map(str, facts.devices)),
            "versions": versions(),
        }

    def _decisions(self, forward: Forward, known: Sequence[Decision]) -> Iterator[list[Decision]]:
        """All decisions in the order of visits, some at a time; `known` are those made before."""
        removed: Mask = np.zeros(forward.shape, dtype=bool)
        for layer in layers_of(forward.stages):
            is_known = len(known) >= sum(one.writers for stage in layer for one in stage.readers)
            # Every layer begins from the base and with guesses of its own: its last bits depend on nothing
            # but what is removed, so that a search that goes on has those of one that was not cut off.
            greedy = Greedy(self.threshold, HARMS[self.harm], self.speculative, spent=self.spent)
            has_begun = False
            for stage in layer:
                visits = self._visits(stage, removed, forward.moved)
                again = _matching(known, visits)
                known = known[len(again) :]
                if is_known:
                    for visit, decision in zip(visits, again, strict=True):
                        removed[visit.reader, visit.writer] = not decision.kept
                    yield again
                    continue
                for visit in visits:
                    removed[visit.reader, visit.writer] |= not visit.is_read
                line = [(one.reader - stage.first, one.writer) for one in visits if one.is_read]
                if line and not (has_begun and self.speculative):  # else each stack has the current world
                    greedy.value, has_begun = float(forward.begin(removed).mean()), True
                yield from self._stage(forward, stage, greedy, line, visits, removed)

    def _stage(
        self,
        forward: Forward,
        stage: Stage,
        greedy: Greedy,
        line: Sequence[Candidate],
        visits: Sequence[_Visit],
        removed: Mask,
    ) -> Iterator[list[Decision]]:
        """The decisions of one stage; those about what nothing reads stand in their places."""
        worlds = _StageWorlds(forward, stage, removed)
        waiting = iter(visits)
        rows = removed[stage.rows]  # a view: it follows the decisions
        for verdicts in greedy.decide(worlds, line, rows):
            worlds.adopt(rows)
            made: list[Decision] = []
            for kept, change in verdicts:
                for visit in waiting:
                    if visit.is_read:
                        made.append(Decision(visit.edge, kept, change))
                        break
                    made.append(Decision(visit.edge, False, 0.0))
            yield made
        yield [Decision(visit.edge, False, 0.0) for visit in waiting]

    def _visits(self, stage: Stage, removed: Mask, moved: Sequence[Sequence[int]]) -> list[_Visit]:
        """The edges into the readers of a stage in the order in which they are visited."""
        graph = self.asked.graph
        kept = graph.there & ~removed
        found: list[_Visit] = []
        for number in range(stage.first + len(stage.readers) - 1, stage.first - 1, -1):
            is_read = not moved[number] or bool(kept[:, list(moved[number])].any())
            for writer in self._order(graph.readers[number].writers):
                edge = graph.edges[int(graph.starts[number]) + writer]
                found.append(_Visit(number, writer, edge, is_read))
        return found

    def _order(self, count: int) -> list[int]:
        """Writers in the order in which edges from them are visited."""
        order = list(range(count - 1, -1, -1))
        if self.heads == "descending":
            return order
        writers = self.asked.graph.writers
        last = {(one.layer, one.head is None): n for n, one in enumerate(writers[:count])}
        return sorted(order, key=lambda n: (-last[writers[n].layer, writers[n].head is None], n))


@dataclass(frozen=True, slots=True)
class _Visit:
    """An edge in line; `is_read`: what it leads into is read by something."""

    reader: int
    writer: int
    edge: str
    is_read: bool


class _StageWorlds:
    """Worlds that differ in the edges into one stage, as the greedy search asks for them."""

    def __init__(self, forward: Forward, stage: Stage, removed: Mask) -> None:
        self._forward, self._stage, self._removed = forward, stage, removed
        self.epsilon = forward.epsilon
        self.most, self.few = forward.most(stage.number), forward.few

    def values(self, removed: Mask) -> NDArray[np.float64]:
        """The metric of each world, averaged over prompts."""
        found: NDArray[np.float64] = self._forward.below(self._stage.number, removed).mean(1)
        return found

    def exact(self, removed: Mask) -> float:
        """The metric of one world, computed from the base, alone."""
        whole = self._removed.copy()
        whole[self._stage.rows] = removed
        return float(self._forward.values(whole[None]).mean())

    def adopt(self, removed: Mask) -> None:
        """Go on from this world."""
        self._forward.adopt(self._stage.number, removed.copy())


class _Kept:
    """The decisions of a search in its store; each writing is a chunk [decision, (edge, kept, change), 1]."""

    def __init__(self, record: Recorder, graph: EdgeGraph, old: Sequence[Decision] = ()) -> None:
        self._record, self._graph, pieces = record, graph, record.pieces(0)
        self.known = [_decision(graph, row) for rows in pieces for row in rows[..., 0].tolist()]
        self._count, self._stored, self._written_at = len(pieces), len(self.known), time.monotonic()
        if old:
            self.known = [*old]
            self.write(old)

    def write(self, log: Sequence[Decision], every: float = 0.0) -> None:
        """Store the decisions that are not stored yet, if the last writing was so many seconds ago."""
        rest = log[self._stored :]
        if not self._record.keeps or not rest or time.monotonic() - self._written_at < every:
            return
        rows = [[self._graph.number(one.edge), one.kept, one.change] for one in rest]
        self._record.put(0, self._count, torch.tensor(rows, dtype=torch.float64)[..., None])
        self._count, self._stored, self._written_at = self._count + 1, len(log), time.monotonic()

    @contextmanager
    def keeping(self, log: Sequence[Decision]) -> Iterator[None]:
        """Store what is in the log at the end, however that comes."""
        try:
            yield
        finally:
            self.write(log)


def _decision(graph: EdgeGraph, row: Sequence[float]) -> Decision:
    edge, kept, change = row
    if not 0 <= edge < graph.count or kept not in {0.0, 1.0}:
        raise CircuitError(f"a stored decision is about edge {edge:g}, of {graph.count}: it is damaged.")
    return Decision(graph.edges[int(edge)], bool(kept), change)


def _old_decisions(
    folder: Path, identity: Callable[[], Mapping[str, Any]], *, resume: bool
) -> list[Decision]:
    """The decisions of a folder without a store that 0.1.0 kept in a file, in the folder or beside it."""
    for path in (folder / "search.json", folder.parent / f"{folder.name}.json"):
        if is_store(folder) or not is_there(path, Path.is_file):
            continue
        if not resume:
            raise CircuitError(
                f"{path} holds a search already. Go on with it with ",
                Argument("resume", True),
                ", or give another folder with ",
                Argument("out"),
                ".",
            )
        return _read_old(path, identity())
    return []


def _read_old(path: Path, search: Mapping[str, Any]) -> list[Decision]:
    """The decisions in a file of 0.1.0. Raises CircuitError where it is damaged, or of another search."""
    try:
        found = FORMAT.expect(read_json(path), str(path))
        body = {name: found.get(name) for name in ("search", "decisions")}
        checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if found.get("sha256") != checksum:
            raise ValueError("it does not have the checksum that it was written with")
        rows = decoded(body["decisions"], tuple[tuple[str, bool, Any], ...], "decisions")
        if not all(isinstance(change, float | int) for _, _, change in rows):  # it may be infinite
            raise ValueError("its decisions are not (edge, kept, change)")
        of = decoded(body["search"], dict[str, Any], "search")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CircuitError(
            f"the search in {path} cannot be read: {why}. It was left as it is. Put a sound copy in its "
            "place, or begin again in another folder."
        ) from None
    now = {name: one for name, one in json.loads(json.dumps(search)).items() if name in of}
    if other := differences(of, now):
        lines = "\n".join(f"  {line}" for line in other)
        raise CircuitError(
            f"the search in {path} is another one. What differs, in the file and now:\n{lines}\n"
            "It was left as it is. Search as it was, or begin again in another folder."
        )
    return [Decision(edge, kept, float(change)) for edge, kept, change in rows]


def _matching(known: Sequence[Decision], visits: Sequence[_Visit]) -> list[Decision]:
    """The known decisions about these visits. Raises CircuitError where they are about others."""
    found = list(known[: len(visits)])
    for visit, decision in zip(visits, found, strict=False):
        if visit.edge != decision.edge:
            raise CircuitError(
                f"the stored search decided about {decision.edge} where {visit.edge} is next in line: its "
                "folder is not of this search. Begin again with another ",
                Argument("out"),
                ".",
            )
    return found


def _harm(given: str, metric: Metric) -> str:
    if given == "auto":
        is_loss = bool(metric.described) and metric.described[0] in LOSSES
        return "increase" if is_loss else "either"
    _expect(given, "harm", tuple(HARMS))
    return given


def _expect(given: str, name: str, known: Sequence[str]) -> None:
    if given not in known:
        raise CircuitError(f"{name}={given!r} is none of {', '.join(map(repr, known))}.")


def search_plan(model: Captured, metric: Metric) -> SearchPlan:
    """Return what a search for a circuit takes at most."""
    components, program = edge_facts(model).parts.components, model.program
    facts = facts_of(model)
    targets = facts.targets((metric,))
    needed = {record.name for record in support(program, targets)}
    costs: list[tuple[str, int, int]] = []
    corrected: list[str] = []
    for stage in reversed(stages_of(components.readers)):
        edges = total = 0
        for one in reversed(stage.readers):
            cone = components.wiring.cone(one.node)
            again = sum(node == one.node or node in cone for node in corrected)
            edges += one.writers
            total += one.writers * (len(cone & needed) + 1 + again)
            corrected.append(one.node)
        costs.append((stage.name, edges, total))
    edges = sum(count for _, count, _ in costs)
    return SearchPlan(edges, edges, sum(cost for *_, cost in costs), tuple(costs))


# -- edge pruning --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PruningPlan:
    """What a training of gates takes: in each of its steps a forward and a backward pass over the prompts."""

    edges: int
    steps: int
    forwards: int

    def __str__(self) -> str:
        return (
            f"edge pruning of {self.edges:,} edges: {self.steps:,} steps, {self.forwards:,} forward and "
            "backward passes with a stream for every reader"
        )

    def _repr_html_(self) -> str:
        return heading(str(self))


class EdgePruning(Runnable[Circuit]):
    """A circuit by learned gates: see `Model.find_circuit`. `losses` has the distance at each step."""

    def __init__(self, given: CircuitQuestion, top: int | None, training: Training) -> None:
        count = given.graph.count
        if not is_whole(top) or top is None or not 1 <= top < count:
            raise CircuitError(
                "edge pruning learns which edges stay: say how many with ",
                Argument("top"),
                f", 1 to {count - 1:,}; it is {top!r}.",
            )
        self.asked, self.top, self.training = given, int(top), training
        self.losses: tuple[float, ...] = ()

    @property
    def _turn(self) -> Turn:
        return self.asked.model._turn

    def plan(self, max_memory: int | str | None = None) -> PruningPlan:
        """Return what the training takes; nothing is computed."""
        as_bytes(max_memory)
        each = 1 if self.training.in_turn else len(self.asked.groups)
        return PruningPlan(self.asked.graph.count, self.training.steps, self.training.steps * each)

    def _run(self, how: How) -> Circuit:
        for option in (Argument("workers"), Argument("resume"), Argument("max_memory")):
            if getattr(how, option.name):
                raise CircuitError(
                    "a training is one sequence of steps in this process, each of which holds all of its "
                    "prompts; `batch_size` makes it less. Leave out ",
                    option,
                    ".",
                )
        if how.out is not None and is_there(as_path(how.out) / CIRCUIT, Path.is_file):
            raise CircuitError(
                f"{how.out} holds a circuit already; give another folder with ", Argument("out"), "."
            )
        given, graph = self.asked, self.asked.graph
        with bar(how.progress, self.training.steps, facts_of(given.model).device) as tell:
            numbers, losses = learned_gates(given, self.training, self.top, tell)
        self.losses = tuple(losses)
        scores = torch.sigmoid(numbers.double()).cpu().numpy()
        kept = pruned(graph, np.sort(best(numbers.double().cpu().numpy(), self.top)))
        found = Circuit.made(
            graph,
            graph.names(kept),
            of=given.model.name,
            method="edge-pruning",
            scores=dict(zip(graph.edges, scores.tolist(), strict=True)),
            helps=1.0,
            model=given.model,
        )
        if how.out is not None:
            found.save(as_path(how.out) / CIRCUIT)
        return found


@checked
@one_thread
def find_circuit(
    model: Captured,
    prompts: Any = None,
    *,
    base: Any = None,
    source: Any = None,
    metric: Any = None,
    method: str = "acdc",
    threshold: float | None = None,
    harm: str = "auto",
    heads: str = "descending",
    speculative: bool = True,
    top: int | None = None,
    steps: Positive | None = None,
    lr: PositiveNumber | None = None,
    seed: Seed | None = None,
    batch_size: Positive | None = None,
) -> Runnable[Circuit]:
    """Find the circuit of a task by ACDC: the edges whose removal changes the metric by `threshold` or more.

    With method="edge-pruning", find the `top` edges whose learned gates are most open, see below.

    `base` is the run whose behaviour is preserved. `source` selects the values that removed edges carry:
    their values in another run, "zero", "mean" or `cw.mean(...)`. Alternatively, `prompts` are pairs of any
    lengths. See `Circuit.evaluate`. Edges are visited in the published order: readers from the last to the
    first (the logits; then for each layer the MLP, values, keys, queries, heads from the last to the first),
    and for each reader its writers from the last to the first. With heads="ascending", writers that are heads
    of one layer are visited from the first to the last: this is the default of the published class, while the
    published program uses the descending order. An edge into a component that nothing reads any more is
    removed without evaluation.

    An edge is removed if its removal changes the metric, averaged over prompts, by less than `threshold`. For
    `cw.kl_to(base)` and `cw.cross_entropy(...)` the change is the increase, as published; for any other
    metric it is the absolute change, as in the published option of absolute values. `harm` selects one of
    these: "increase", "decrease", "either", or "auto".

    With `speculative`, many candidates are evaluated at once; the edges, and the order of decisions, are
    those of a search that evaluates one at a time. The memory of stacked worlds is rehearsed, so that they
    fit into `max_memory`. Decisions are stored in `out` as they are made. A resumed search restarts at the
    layer in which it was interrupted, so that decisions and scores equal those of an uninterrupted search,
    bit for bit if `max_memory` and workers are the same. `progress` counts decided edges out of all edges.
    Each worker evaluates a part of the candidates; this process decides.

    **Edge pruning** (Bhaskar et al. 2024) learns a hard-concrete gate for every edge, in `steps` (200) of
    Adam with the rate `lr` (0.1) and random numbers from `seed` (0). Training keeps the circuit close to the
    model while all but `top` gates close. The distance is the metric if it is a loss (`kl`, `cross_entropy`),
    and the squared difference from the model's metric otherwise. The circuit has the `top` edges with the
    most open gates, without dead ends; its scores are the gates' odds as probabilities. A step uses all
    prompts or, with `batch_size`, at most that many prompts of one length, in turn.
    """
    _expect(method, "method", ("acdc", "edge-pruning"))
    question = {"base": base, "source": source, "metric": metric}
    if method == "edge-pruning":
        if threshold is not None:
            raise CircuitError(
                Argument("threshold"), " is for ACDC; edge pruning keeps ", Argument("top"), " edges."
            )
        batches = in_batches(model, prompts, batch_size)
        given = circuit_question(model, prompts=batches, **question)
        training = Training(steps or 200, lr or 0.1, seed or 0, batch_size is not None)
        return EdgePruning(given, top, training)
    learning = {"top": top, "steps": steps, "lr": lr, "seed": seed, "batch_size": batch_size}
    for name in (name for name, one in learning.items() if one is not None):
        raise CircuitError(f"`{name}` is for method='edge-pruning', not for ACDC.")
    if threshold is None:
        raise CircuitError(
            "ACDC keeps edges by ", Argument("threshold"), ", a change of the metric; give one."
        )
    return Search(
        model,
        prompts=prompts,
        threshold=threshold,
        harm=harm,
        heads=heads,
        speculative=speculative,
        **question,
    )

"""A run: the baseline world of a captured model for one input; a run's fork is where patches are made."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from conewise.decomposing.attention_patterns import AttentionPatterns, attention_patterns
from conewise.decomposing.decomposition import Decomposition, decompose
from conewise.decomposing.lens import Lens, lens
from conewise.decomposing.logit_attribution import LogitAttribution, attribute, expect_linear
from conewise.engine.ledger import Ledger
from conewise.engine.world import World
from conewise.errors import (
    GradientError,
    MetricError,
    NoEffectWarning,
    OpError,
    PatchError,
    WeightsChangedError,
)
from conewise.graph.table import Rule
from conewise.locations.located import Located
from conewise.locations.places import Place, PlaceLike, as_place
from conewise.locations.selectors import SelectorLike
from conewise.markup import heading, table
from conewise.program.streaming import (
    assembled,
    described_fields,
    field_names,
    field_of,
    output_names,
    partly_assembled,
)
from conewise.program.tensors import (
    Tensor,
    computing,
    copy_of,
    same_bits,
    writes_to,
    zeros_like,
)
from conewise.program.weights import Contents, Sums, bits_of
from conewise.runs.backward.backward_cost import BackwardCost, backward_cost_of
from conewise.runs.captured import Captured
from conewise.runs.gradients import Gradients, gradients_of
from conewise.runs.metrics import Metric, as_metric, expect_prompts, measured
from conewise.runs.tape import Tape
from conewise.structure.axes.outputs import Outputs

Part = Tensor | Callable[[Tensor], Tensor]


class Intervening:
    """What says what is put in a place, given what is there: interventions."""

    __slots__ = ()

    def for_world(self, place: Place, base: Reading) -> Part:
        """What a patch at `place` of a fork of `base` is."""
        raise NotImplementedError


class Reading:
    """Values of a captured model, by site; the module's outputs, in the module's own structure.

    What is returned is the cached value, or a view of it: read it, do not write to it. A write is
    noticed at the next reading, and refused.
    """

    def __init__(
        self, model: Captured, world: World | None, sizes: tuple[int, ...], parent: Reading | None = None
    ) -> None:
        """`world` is None for a reading that makes it when it is asked for."""
        self.model = model
        self._world = world
        self._sizes = sizes
        self._parent = parent
        self._edits: dict[str, list[Edit]] = {}
        self._changes = 0
        self._lent: dict[str, tuple[Any, int, Sums, int]] = {}
        self._trusted = 0

    @property
    def world(self) -> World:
        """The world of the engine that holds the values."""
        assert self._world is not None
        return self._world

    @contextmanager
    def checked_once(self) -> Iterator[None]:
        """Look for writes to weights and to what was lent now and at the end, and not at every reading.

        That holds for the forks of this one too: a loop over many forks is faster inside.
        """
        look = self._check_lent if self._is_trusted else self._check_bits
        look()
        with self.trusted():
            yield
        look()

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """Look for no writes meanwhile: whoever asks for it has done so, and does so again afterwards."""
        trusted = self._trusted
        try:
            self._trusted = trusted + 1
            yield
        finally:
            self._trusted = trusted

    def check(self, now: Contents | None = None) -> None:
        """Read every bit of the weights, and raise WeightsChangedError if they are not those of this run.

        Values that were read from here are checked too: PatchError if one was written to.

        Each run of a sweep does so at its start and at its end. Elsewhere, counted writes are looked for at
        every reading, and the bits are read whenever something was computed: all of them on a GPU and of
        models of up to 8 MiB, else one line in 61. `now`: what the weights hold, where that was just read.
        """
        self._check_bits(self.model.weights.whole_contents() if now is None else now)

    @property
    def _is_trusted(self) -> bool:
        """Whether whoever reads looks for writes before and after all that is read."""
        return self._trusted > 0 or (self._parent is not None and self._parent._is_trusted)

    def _computed(self) -> int:
        """How many values were computed here and in the worlds above so far."""
        above = 0 if self._parent is None else self._parent._computed()
        return above + self.ledger.count("recomputed")

    def demand(self, nodes: Iterable[str]) -> tuple[Any, ...]:
        """The values at nodes of the graph, by the graph's own names."""
        return self._values(tuple(nodes))

    def __getitem__(self, place: PlaceLike) -> Any:
        """The value at a place, in the site's natural axes."""
        found = self.model.locate(as_place(place))
        (value,) = self._values((found.node,))
        self._lend([found.node], [value])
        read = found.read(self._held(found, value), self._sizes)
        self._report((found.node if found.result is None else found.result.projection.name,))
        return read

    def read(self, place: PlaceLike) -> Tensor:
        """The same, for code that writes to nothing: it is not watched, which would cost a pass over it."""
        found = self.model.locate(as_place(place))
        return found.read(self._present(found), self._sizes)

    def value_at(self, node: str) -> Any:
        """The value at a node of the graph, likewise; warns of no patch that it does not depend on."""
        return self._values((node,))[0]

    @property
    def outputs(self) -> Any:
        """What the module would return."""
        names = output_names(self.model.program)
        values = self.demand(names)
        self._lend(names, values)
        return assembled(self.model.program, dict(zip(names, values, strict=True)), self._sizes)

    def __getattr__(self, name: str) -> Any:
        """A field of the outputs by its name, `run.logits`; only that field is computed."""
        if name.startswith("_") or "model" not in vars(self):
            raise AttributeError(name)
        program = self.model.program
        names = field_names(program, name)
        if names is None:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}, and neither have the module's outputs "
                f"({described_fields(program)}). All outputs together are `.outputs`; a site's value is "
                "`run[...]`."
            )
        values = self.demand(names)
        self._lend(names, values)
        found = dict(zip(names, values, strict=True))
        return field_of(partly_assembled(program, found, self._sizes), name)

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """The inputs of the run that all this is a change of."""
        assert self._parent is not None
        return self._parent.inputs

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Every patch that is in force here, those of the worlds above first."""
        above = () if self._parent is None else self._parent.edits
        return (*above, *(edit for edits in self._edits.values() for edit in edits))

    def identity_parts(self) -> tuple[object, ...]:
        """All that the values depend on."""
        return (self.model, dict(self.inputs), [(str(edit.place), edit.part) for edit in self.edits])

    @property
    def ledger(self) -> Ledger:
        """What this world invalidated, recomputed and reused."""
        return self.world.ledger

    def gradients(self, metric: Any, sites: SelectorLike) -> Gradients:
        """The gradients of a metric by sites, by place, each in the natural axes of its place.

        One backward pass, by torch's autograd, over what lies behind the sites: that part of the program is
        computed again and recorded, with weights as constants. A place is one of `sites` as a sweep takes
        them; prompts do not read each other, so each prompt's gradient is that of its own number. Patches
        that stand here are as they are. Raises GradientError where a site holds no floating-point numbers,
        where an operation has no derivative, or where the metric is no function that torch differentiates.
        """
        return gradients_of(self._tape(), as_metric(metric), sites, self.inputs)

    def backward_cost(self, metric: Any, sites: SelectorLike, *, weights: bool = False) -> BackwardCost:
        """Which part of a metric's reverse pass a patch at each of `sites` makes stale, counted in nodes.

        The reverse pass is that of `gradients(metric, sites)`; with `weights`, that by every parameter of
        the module, as in training. What an operation's gradient reads is what torch saves for it; what then
        is stale follows from the graph (docs/backward-locality.md). Nothing is patched. Raises GradientError
        in a world with patches, and where the metric has no gradient by a site.
        """
        if self.edits:
            raise GradientError(
                f"{len(self.edits)} patches stand in this world, and costs are counted against a run without "
                "any. Ask the run that it is a fork of."
            )
        return backward_cost_of(self._tape(), as_metric(metric), sites, self.inputs, weights=weights)

    def decompose(
        self, by: str = "head", at: PlaceLike | None = None, *, stack: str = "", tokenizer: Any = None
    ) -> Decomposition:
        """Take the residual stream apart: what each head, layer or component has in it.

        `by` is "head" (heads and MLPs), "component" (attentions and MLPs, whole) or "layer". `at` is a value
        of the stream, such as ("resid_post", 3); by default what the final norm reads. Where norms lie on the
        way (Gemma 2, BERT), parts are carried through them with the run's own scale. The parts are checked to
        add up to the stream; DecompositionError says what is in the way where they do not, or cannot.
        """
        return decompose(self, by, at, stack=stack, tokenizer=self._tokenizer(tokenizer))

    def logit_attribution(
        self,
        metric: Any,
        by: str = "head",
        *,
        positions: str = "last",
        stack: str = "",
        tokenizer: Any = None,
    ) -> LogitAttribution:
        """Direct logit attribution: what each head, layer or component adds to a metric by itself.

        Every part of the stream goes through the final norm, whose scale is frozen as it is here, and the
        unembedding; the parts and biases are checked to add up to the metric. That needs a metric that is a
        sum of logits: `logit` and `logit_diff`, MetricError for others. With positions="all" the same is
        read at every position. Where logits are capped (Gemma 2), the factor that the cap comes to for each
        logit is frozen too.
        """
        metric = as_metric(metric)
        expect_linear(metric)
        prompts = Outputs(self.model.program).prompts(self.inputs)
        expect_prompts(metric, prompts, "this run")
        numbers = self._measured(metric, prompts)
        return attribute(
            self, metric, numbers, by, positions=positions, stack=stack, tokenizer=self._tokenizer(tokenizer)
        )

    def lens(self, *, top: int = 5, tokens: Any = (), stack: str = "", tokenizer: Any = None) -> Lens:
        """The logit lens: the model's own final norm and unembedding, applied to the stream at every layer.

        For every position, the `top` likeliest next tokens and their probabilities are kept, and logit,
        probability and rank of those of `tokens` (numbers, or texts where a tokenizer is known): never the
        logits of all layers at once. The last row is checked to be what the model itself puts out.
        """
        return lens(self, top=top, tokens=tokens, stack=stack, tokenizer=self._tokenizer(tokenizer))

    def attention(self, layer: Any = None, *, stack: str = "", tokenizer: Any = None) -> AttentionPatterns:
        """The attention patterns of a layer, of several, or of all: [layer, batch, head, query, key].

        MissingSiteError says why a model shows none, and what to load it with.
        """
        return attention_patterns(self, layer, stack=stack, tokenizer=self._tokenizer(tokenizer))

    def _measured(self, metric: Metric, prompts: int) -> Tensor:
        """A metric of one output here, [prompt]."""
        program = self.model.program
        names = field_names(program, metric.output) or output_names(program)
        if len(names) != 1:
            raise MetricError(
                f"{metric.name!r} reads {metric.output!r}, and the outputs are {described_fields(program)}."
            )
        value = self.value_at(names[0])
        return measured(metric, Outputs(program).arranged(names[0], value, 1, prompts))[0]

    def _tokenizer(self, given: Any) -> Any:
        """What writes tokens: given, or what the model was captured with."""
        return self.model.tokenizer if given is None else given

    def _tape(self) -> Tape:
        """Computes parts of this run again, recorded."""
        return Tape(self.model, lambda node: self._values((node,))[0], self._sizes, self._edits_at)

    def fork(self) -> RunWorld:
        """A world in which sites can be patched; it shares all other values with this one."""
        return RunWorld(self)

    def _values(self, nodes: tuple[str, ...]) -> tuple[Any, ...]:
        """The values at nodes; does not warn of patches without effect."""
        if self._is_trusted:
            with computing():
                return self.world.demand(nodes)
        self._check_lent()
        before = self._computed()
        with computing():
            values = self.world.demand(nodes)
        if self._computed() != before:
            self._check_bits()
        return values

    def _present(self, found: Located) -> Tensor:
        """The whole site's value here, before a part of it is selected."""
        (value,) = self._values((found.node,))
        return self._held(found, value)

    def _held(self, found: Located, value: Tensor) -> Tensor:
        """What the site holds when its node has this value: the value, or what is computed from it."""
        if found.result is None:
            return value
        (weight,) = self._values((found.result.weight,))
        with computing():
            result = found.result.read(value, weight, found.z_view, self._sizes)
            for edit in self._result_edits(found.result.projection.name):
                result = edit.applied(result, self._sizes, set())
        return result

    def _edits_at(self, node: str) -> tuple[Edit, ...]:
        """All edits at a node of the graph that are in force here, in the order they were made."""
        above = () if self._parent is None else self._parent._edits_at(node)
        return (*above, *self._edits.get(node, ()))

    def _result_edits(self, projection: str) -> Sequence[Edit]:
        return [edit for edit in self._edits_at(projection) if edit.found.result is not None]

    def _edited(self) -> frozenset[str]:
        """The nodes at which an edit is in force here."""
        above: frozenset[str] = frozenset() if self._parent is None else self._parent._edited()
        return above | self._edits.keys()

    def _covers(self, node: str) -> bool:
        """Whether the node's whole value is given here, and reads nothing."""
        return any(edit.covers for edit in self._edits_at(node))

    def _stamp(self) -> tuple[int, ...]:
        """Another one whenever what is patched here, or in a world above, is another."""
        above = () if self._parent is None else self._parent._stamp()
        return (*above, self._changes)

    def _settle(self) -> None:
        """Hand over to the engine what was patched since the last time."""

    def _report(self, nodes: tuple[str, ...]) -> None:
        """Warn of patches of this world that have no effect on the values at `nodes`."""

    def _lend(self, names: Sequence[str], values: Sequence[Any]) -> None:
        sums = bits_of(values)
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            known = self._lent.get(name)
            if known is not None and known[0] is value and known[2][known[3]] != sums[place]:
                raise _written(name)
            self._lent[name] = value, writes_to(value), sums, place

    def _check_lent(self) -> None:
        """Look for writes that torch counts: to what was lent, and to the weights."""
        for name, (value, writes, _, _) in self._lent.items():
            if writes_to(value) != writes:
                raise _written(name)

    def _check_bits(self, weights: Contents | None = None) -> None:
        """Look for any writes; `weights` are what these hold, where every bit of them was just read."""
        self._check_lent()
        if self._lent:
            now = bits_of([value for value, *_ in self._lent.values()])
            for (name, (_, _, sums, place)), found in zip(self._lent.items(), now, strict=True):
                if sums[place] != found:
                    raise _written(name)
        if self._parent is not None:
            self._parent._check_bits(weights)


class Run(Reading):
    """The baseline for one input. It never changes; another input is another run."""

    def __init__(
        self, model: Captured, world: World | None, sizes: tuple[int, ...], inputs: Mapping[str, Tensor]
    ) -> None:
        super().__init__(model, world, sizes)
        self._inputs = inputs
        self._changed = ""
        if world is not None:
            self._begin()

    def _begin(self) -> None:
        """Note what the weights and the inputs hold now: the values are of these."""
        self._weights = self.model.weights.contents()
        self._lend(list(self._inputs), list(self._inputs.values()))

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """What the run was given, by name."""
        return self._inputs

    def _check_bits(self, weights: Contents | None = None) -> None:
        super()._check_bits(weights)
        if weights is None:
            self._expect_same(self._weights.glance, self.model.weights.glance())
        else:
            self._expect_same(self._weights.whole, weights.whole)

    def _expect_same(self, old: Sums, new: Sums) -> None:
        if not self._changed and old != new:
            # Forks may hold values of both: the run stays refused, even if the weights are put back.
            self._changed = self.model.weights.changed(old, new)
        if self._changed:
            raise WeightsChangedError(
                f"the weights of {self.model.name} were written to after this run: {self._changed}. Its "
                "values are those of the old weights: run again, `model.run(...)`."
            )

    def _check_lent(self) -> None:
        super()._check_lent()
        self._expect_same(self._weights.writes, self.model.weights.writes())

    def __repr__(self) -> str:
        given = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.inputs.items())
        return f"Run of {self.model.name} on {given}"

    def _repr_html_(self) -> str:
        rows = [(name, str(tuple(value.shape)), str(value.dtype)) for name, value in self.inputs.items()]
        known = heading(
            "", f"Outputs: {described_fields(self.model.program)}. A site's value: run[kind, layer]"
        )
        return heading(f"Run of {self.model.name}") + table(rows, ("input", "shape", "dtype")) + known


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """One patch: which part of a site's value, and what takes its place."""

    place: Place
    found: Located
    part: Part

    @property
    def node(self) -> str:
        """The node of the graph at which the engine has to do something else."""
        result = self.found.result
        return self.found.node if result is None else result.projection.name

    @property
    def covers(self) -> bool:
        """Whether nothing of what would have been there is left."""
        return isinstance(self.part, Tensor) and not self.place.part and self.found.result is None

    @property
    def described(self) -> str:
        """What takes the part's place, in words."""
        if isinstance(self.part, Tensor):
            return f"a tensor of shape {tuple(self.part.shape)}"
        return f"the function {getattr(self.part, '__name__', self.part)}"

    def applied(self, value: Tensor, sizes: tuple[int, ...], idle: set[Edit]) -> Tensor:
        """A copy of `value` with the part replaced; the edit is in `idle` when that changes nothing."""
        present = self.found.read(value, sizes)
        # A copy: what the function writes to must not be the cached value.
        part = self.part if isinstance(self.part, Tensor) else self.part(copy_of(present))
        self.found.expect(part, present, self.place)
        (idle.add if same_bits(part, present) else idle.discard)(self)
        return self.found.view.replace(value, self.found.part, part, sizes)


class RunWorld(Reading):
    """A run in which something is patched. Use it in a `with` block, or just drop it; forks nest.

    Patches of several parts of one value add up, those of the worlds above included. A part that is
    not patched is what it would have been in this world: if it lies downstream of another patch, it is
    computed again.
    """

    def __init__(self, parent: Reading) -> None:
        super().__init__(parent.model, parent.world.fork(), parent._sizes, parent)
        self._parent: Reading = parent
        self._patched_nodes: set[str] = set()
        self._settled: tuple[int, ...] = self._stamp()
        self._idle: set[Edit] = set()

    def patch(
        self, place: PlaceLike, value: Reading | Tensor | str | Intervening | Callable[[Tensor], Tensor]
    ) -> None:
        """Replace (a part of) a site's value.

        `value`: another run, whose value at the same place is taken; a tensor of exactly the
        part's shape, dtype and device; "zero"; "mean" (the site's mean over batch and positions, before
        this world's patches); an intervention such as `cw.add(vector, 2.0)`; or a function from what the
        part would have been to what it shall be.
        """
        place = as_place(place)
        found = self.model.locate(place)
        whole = self._parent._present(found)
        part = self._part(place, found, value, whole)
        if isinstance(part, Tensor):
            found.expect(part, found.read(whole, self._sizes), place)
        edit = Edit(place, found, part)
        self._change(edit.node, [*self._edits.get(edit.node, ()), edit])

    def restore(self, place: PlaceLike) -> None:
        """Take back all patches that were made in this world at exactly this place."""
        place = as_place(place)
        found = self.model.locate(place)
        gone = [edit for edit in self._own_edits() if edit.found.is_same_place(found)]
        if not gone:
            here = ", ".join(str(edit.place) for edit in self._own_edits())
            raise PatchError(f"{place} is not patched in this world. Patched here: {here or 'nothing'}.")
        node = gone[0].node
        self._idle.difference_update(gone)
        self._change(node, [edit for edit in self._edits[node] if edit not in gone])

    def _change(self, node: str, edits: list[Edit]) -> None:
        """Let these be the edits at a node: by one assignment, so whole or not at all."""
        # Counted first: when it is interrupted in between, the same is handed over once more.
        self._changes += 1
        if edits:
            self._edits[node] = edits
        else:
            del self._edits[node]

    def demand(self, nodes: Iterable[str]) -> tuple[Any, ...]:
        """The values at nodes of the graph, under the patches; warns of a patch without effect."""
        nodes = tuple(nodes)
        values = self._values(nodes)
        self._report(nodes)
        return values

    def close(self) -> None:
        """Drop this world and its forks."""
        self.world.close()
        self._edits.clear()
        self._lent.clear()

    def _part(self, place: Place, found: Located, value: Any, whole: Tensor) -> Part:
        if isinstance(value, Reading):
            if value.model is not self.model:
                raise PatchError(
                    f"the patch at {place} comes from a run of another model ({value.model.name}); both "
                    f"runs must be of the same captured model ({self.model.name})."
                )
            return found.read(value._present(found), value._sizes)
        if isinstance(value, Tensor):
            return copy_of(value)
        if isinstance(value, Intervening):
            with computing():
                return value.for_world(place, self._parent)
        if isinstance(value, str) and value == "zero":
            return zeros_like(found.read(whole, self._sizes))
        if isinstance(value, str) and value == "mean":
            with computing():
                return found.mean(whole, self._sizes, place)
        if callable(value):
            return value  # type: ignore[no-any-return]
        raise PatchError(
            f"cannot patch {place} with {value!r}. A patch is another run, a tensor, 'zero', 'mean', an "
            "intervention or a function of what would have been there."
        )

    # -- handing the patches to the engine ---------------------------------------------------

    def _values(self, nodes: tuple[str, ...]) -> tuple[Any, ...]:
        self._settle()
        try:
            return super()._values(nodes)
        except OpError as error:
            if isinstance(error.__cause__, PatchError):
                raise error.__cause__ from None
            raise

    def _check_lent(self) -> None:
        self._parent._check_lent()
        super()._check_lent()

    def _own_edits(self) -> Iterator[Edit]:
        for edits in self._edits.values():
            yield from edits

    def _settle(self) -> None:
        """Hand the patches to the engine, those of the worlds above first.

        A value that no patch of this world reaches is patched with a value: it is not computed
        again. One that a patch reaches is patched with a function of what it is then, and so is one
        that a world above patches in part.
        """
        self._parent._settle()
        stamp = self._stamp()
        if stamp == self._settled:
            return
        self._lent.clear()
        graph = self.model.graph
        reached = set(graph.names(graph.table.cone(graph.numbers(self._edits))))
        partly = {node for node in self._parent._edited() & reached if not self._parent._covers(node)}
        nodes = set(self._edits) | partly | (self._parent._edited() & self._patched_nodes)
        gone = self._patched_nodes - nodes
        # All that may be patched, before it is: an interruption leaves nothing patched that is not known.
        self._patched_nodes = self._patched_nodes | nodes
        for node in gone.intersection(self.world.patched) if gone else ():
            self.world.restore(node)
        numbers = {graph.number(node): node for node in nodes}
        for number in graph.table.sorted(numbers):
            self._patch_node(numbers[number], is_reached=numbers[number] in reached)
        self._patched_nodes = nodes
        self._settled = stamp

    def _patch_node(self, node: str, *, is_reached: bool) -> None:
        """Put in a node's place what the edits make of it."""
        edits, own = self._edits_at(node), _of_values(self._edits.get(node, ()))
        values, results = _of_values(edits), tuple(e for e in edits if e.found.result is not None)
        sizes, idle = self._sizes, self._idle
        cover = next((i for i in reversed(range(len(own))) if own[i].covers), None)
        if cover is None and not self._parent._covers(node):
            if results:
                rule = self._result_rule(results)
                self.world.patch_rule(node, lambda *inputs: _applied(values, rule(*inputs), sizes, idle))
                return
            if is_reached:
                self.world.patch(node, lambda given: _applied(values, given, sizes, idle))
                return
        (present,) = self._parent._values((node,))
        with computing():
            self.world.patch(node, _applied(own[cover or 0 :], present, sizes, idle))
        if cover is not None and is_reached:
            # The value of the baseline, put where another patch would change it, has an effect.
            idle.discard(own[cover])

    def _result_rule(self, edits: tuple[Edit, ...]) -> Rule:
        """The output projection under patches of `result`, which no node holds."""
        found, sizes, idle = edits[0].found, self._sizes, self._idle
        assert found.result is not None
        whole = self._parent._present(found)
        own = self.model.graph.rule(found.result.projection.name)
        batch, positions, heads = whole.shape[:3]
        return found.result.changed(
            own, lambda result: _applied(edits, result, sizes, idle), heads, (batch, positions)
        )

    # -- patches without effect --------------------------------------------------------------

    def _report(self, nodes: tuple[str, ...]) -> None:
        number, support = self.model.graph.number, self.model.support(nodes, self._given())
        for node, edits in self._edits.items():
            if number(node) not in support:
                _warn(
                    f"the patch at {edits[-1].place} has no effect on what was asked for, which does not "
                    f"depend on {node!r}."
                )
        for edit in self._own_edits():
            if edit in self._idle and number(edit.node) in support:
                _warn(f"the patch at {edit.place} changes nothing: its value is the old one, bit for bit.")

    def _given(self) -> frozenset[str]:
        edited = self._edited()
        return frozenset(filter(self._covers, edited)) if len(edited) > 1 else frozenset()

    def __enter__(self) -> RunWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        places = ", ".join(str(edit.place) for edit in self._own_edits())
        return f"RunWorld over {self._parent!r}, patched at {places or 'nothing'}"

    def _repr_html_(self) -> str:
        rows = [(str(edit.place), edit.described) for edit in self.edits]
        patches = table(rows, ("patched", "with")) if rows else heading("", "Nothing is patched.")
        return heading(f"World of {self.model.name}", repr(self.ledger)) + patches


def _written(name: str) -> PatchError:
    return PatchError(
        f"the value of {name!r} was written to after it was read from here. It is the cached value that "
        "others are computed from: run again, and write to a copy, `run[...].clone()`, or patch the site in "
        "a fork."
    )


def _of_values(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    return tuple(edit for edit in edits if edit.found.result is None)


def _applied(edits: tuple[Edit, ...], value: Tensor, sizes: tuple[int, ...], idle: set[Edit]) -> Tensor:
    # A plain function of its arguments: a rule that held its world would keep it from being dropped.
    for edit in edits:
        value = edit.applied(value, sizes, idle)
    return value


def _warn(message: str) -> None:
    """Warn at the line outside of conewise that asked."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("conewise."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, NoEffectWarning, stacklevel=level)

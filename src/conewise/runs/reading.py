"""A reading: a run or a fork of it, which can be forked; in forks, sites are patched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import Place, PlaceLike, Places, as_place
from conewise.anatomy.selectors import SelectorLike
from conewise.anatomy.sites import Located
from conewise.arguments import checked
from conewise.errors import GradientError, MetricError, NoEffectWarning, OpError, PatchError, warn
from conewise.program.tensors import Tensor, computing, copy_of, recording, writes_to
from conewise.program.walk import described_fields, field_names, output_names
from conewise.reactive.table import Rule
from conewise.runs.attention_patterns import AttentionPatterns, attention_patterns
from conewise.runs.backward_cost import BackwardCost, backward_cost_of
from conewise.runs.decomposition import Decomposition, LogitAttribution, attribute, decompose, expect_linear
from conewise.runs.glance import Likely, next_tokens, shown_change
from conewise.runs.gradients import Gradients, Tape, gradients_of
from conewise.runs.lens import Lens, lens
from conewise.runs.metric_words import as_metric
from conewise.runs.metrics import Metric, applied, at_run, expect_prompts, fetched
from conewise.runs.values import Edit, Part, Values, applied_in_turn, node_names, of_values, trained_by
from conewise.templates import folded, heading, note, shown, table
from conewise.text.tokens import expect_decodes
from conewise.threads import one_thread


@checked
@one_thread
class Reading(Values):
    """Values of a captured model, by site; a fork shares them except for what is patched in it."""

    _parent: Reading | None

    def fork(self) -> RunWorld:
        """Return a world in which sites can be patched; it shares all other values with this one."""
        return RunWorld(self)

    @recording()
    def gradients(self, metric: Any, sites: SelectorLike) -> Gradients:
        """Compute the gradients of a metric with respect to sites, each in the natural axes of its place.

        This takes one backward pass, by torch's autograd, over the operations downstream of the sites. That
        part of the program is recomputed and recorded, with weights as constants. A place is one of `sites`,
        which are given as in a sweep. Prompts do not read each other, so each prompt's gradient is that of
        its own metric value. Patches in this world stay in force. Raises GradientError if a site holds no
        floating-point numbers, if an operation has no derivative, or if torch cannot differentiate the
        metric.
        """
        with self._checked_once():
            return gradients_of(self._tape(), as_metric(metric, self.model), sites, self.inputs)

    @recording()
    def backward_cost(self, metric: Any, sites: SelectorLike, *, weights: bool = False) -> BackwardCost:
        """Count the nodes of a metric's reverse pass that a patch at each of `sites` makes stale.

        The reverse pass is that of `gradients(metric, sites)`; with `weights`, it computes the gradient of
        every parameter of the module, as in training. The gradient of an operation reads the values that
        torch saves for it; the stale nodes then follow from the graph (docs/backward-locality.md). Nothing is
        patched. Raises GradientError in a world with patches, and if the metric has no gradient with respect
        to a site.
        """
        if self.edits:
            raise GradientError(
                f"{len(self.edits)} patches stand in this world, and costs are counted against a run without "
                "any. Ask the run that it is a fork of."
            )
        with self._checked_once():
            return backward_cost_of(
                self._tape(), as_metric(metric, self.model), sites, self.inputs, weights=weights
            )

    def decompose(
        self, by: str = "head", at: PlaceLike | None = None, *, stack: str = "", tokenizer: Any = None
    ) -> Decomposition:
        """Split the residual stream into the contributions of heads, layers or components.

        `by` is "head" (heads and MLPs), "component" (whole attentions and MLPs) or "layer". `at` is a value
        of the stream, such as ("resid_post", 3); by default the input of the final norm. Parts that pass
        through norms (Gemma 2, BERT) are scaled with the run's own scale. The parts are checked to add up to
        the stream; if they do not or cannot, DecompositionError names the obstacle.
        """
        with self._checked_once():
            return decompose(self, by, at, stack=stack, tokenizer=self._tokenizer(tokenizer))

    def logit_attribution(
        self,
        metric: Any,
        by: str = "head",
        *,
        pos: str = "last",
        stack: str = "",
        tokenizer: Any = None,
    ) -> LogitAttribution:
        """Compute the direct contribution of each head, layer or component to a metric.

        This is direct logit attribution. Every part of the stream passes through the final norm, with its
        scale frozen as in this run, and the unembedding; the parts and biases are checked to add up to the
        metric. The metric has to be a sum of logits: `logit` or `logit_diff`; others raise MetricError. With
        pos="all", the metric is read at every position. If logits are capped (Gemma 2), the factor of the cap
        for each logit is frozen too.
        """
        metric = as_metric(metric, self.model)
        expect_linear(metric)
        prompts = Outputs(self.model.program).prompts(self.inputs)
        expect_prompts(metric, prompts, "this run")
        name = self._read_by(metric)
        metric = at_run(metric, self.model, self.inputs, name)
        with self._checked_once():
            value = Outputs(self.model.program).arranged(name, self.value_at(name), 1, prompts)
            numbers = fetched(metric, applied(metric, prompts, value))[0]
            tokenizer = self._tokenizer(tokenizer)
            return attribute(self, metric, numbers, by, pos=pos, stack=stack, tokenizer=tokenizer)

    def lens(self, *, top: int = 5, tokens: Any = (), stack: str = "", tokenizer: Any = None) -> Lens:
        """Compute the logit lens: apply the model's final norm and unembedding to the stream at every layer.

        For every position, the result keeps the `top` likeliest next tokens and their probabilities, and the
        logit, probability and rank of each of `tokens` (numbers, or texts if a tokenizer is known). The
        logits of all layers are never held at once. The last row is checked against the model's own output.
        """
        with self._checked_once():
            return lens(self, top=top, tokens=tokens, stack=stack, tokenizer=self._tokenizer(tokenizer))

    def attention(self, layer: Any = None, *, stack: str = "", tokenizer: Any = None) -> AttentionPatterns:
        """Return the attention patterns of a layer, of several, or of all: [layer, batch, head, query, key].

        If a model does not compute patterns explicitly, MissingSiteError names the reason and the loading
        option.
        """
        with self._checked_once():
            return attention_patterns(self, layer, stack=stack, tokenizer=self._tokenizer(tokenizer))

    def _read_by(self, metric: Metric) -> str:
        """The output that a metric reads."""
        program = self.model.program
        names = field_names(program, metric.output) or output_names(program)
        if len(names) != 1:
            raise MetricError(
                f"{metric.name!r} reads {metric.output!r}, and the outputs are {described_fields(program)}."
            )
        return names[0]

    def _tokenizer(self, given: Any) -> Any:
        """Return the tokenizer that was given, or that of the model."""
        expect_decodes(given)
        return self.model.tokenizer if given is None else given

    def _tape(self) -> Tape:
        """Computes parts of this run again, recorded."""
        return Tape(self.model, lambda node: self._values((node,))[0], self._sizes, self._edits_at)


class Intervening:
    """Base of interventions, which say what is put in a place, given what is there."""

    __slots__ = ()

    def for_world(self, place: Place, base: Reading) -> Part:
        """Return the patch at `place` of a fork of `base`."""
        raise NotImplementedError


@one_thread
class RunWorld(Reading):
    """A run with patches. Use it in a `with` block, or drop the last reference to it; forks nest.

    Patches of several parts of one value combine, including those of parent worlds. A part that is not
    patched has its value in this world: if it is downstream of another patch, it is recomputed.

    A patch can have parameters: an `nn.Module`, a tensor that requires a gradient, or a function that reads
    either. Values that depend on such a patch have gradients with respect to the parameters, regardless of
    the caller's grad mode; the model's own weights are constants. After parameters are written to, e.g. by an
    optimizer, values are recomputed.
    """

    def __init__(self, parent: Reading) -> None:
        super().__init__(parent.model, parent.world.fork(), parent._sizes, parent)
        self._parent: Reading = parent
        self._patched_nodes: set[str] = set()
        self._settled: tuple[int, ...] = self._stamp()
        self._idle: set[Edit] = set()

    def patch(
        self,
        place: PlaceLike | Places,
        value: Reading | Tensor | str | Intervening | Callable[[Tensor], Tensor],
    ) -> None:
        """Replace (a part of) a site's value; at the path of a module, the result of each of its calls.

        `value` is another run, whose value at the same place is used; a tensor of the part's dtype and
        device, and of its shape or its last axes ([d] is used at every position of every prompt); "zero";
        "mean" (the site's mean over batch and positions that are not padding, before this world's patches);
        an intervention such as `cw.add(vector, 2.0)`; or a function from the unpatched part to its
        replacement, which can be an `nn.Module`.
        """
        self.model.weights.expect_captured()
        edits = dict(self._edits)
        places = list(place) if isinstance(place, Places) else [as_place(place)]
        for one in self.model.each_call(places):
            found = self.model.locate(one)
            self._parent._check_lent()
            with self._read_inside():  # every bit is looked at when what is made of it is read
                whole = self._parent._present(found)
            part = self._part(one, found, value, whole)
            parameters = trained_by(part if isinstance(value, Intervening) else value, self.model.module)
            if isinstance(part, Tensor):
                present = found.read(whole, self._sizes)
                if part.shape != present.shape and part.shape == present.shape[present.ndim - part.ndim :]:
                    part = part.expand(present.shape)  # a vector [d]: the same for all axes in front
                found.expect(part, present, one)
            edit = Edit(one, found, part, parameters)
            edits[edit.node] = [*edits.get(edit.node, ()), edit]
        self._change(edits)

    def _trained(self) -> tuple[Tensor, ...]:
        """The parameters of all patches that are in force here."""
        above = self._parent._trained() if isinstance(self._parent, RunWorld) else ()
        return (*above, *(one for edit in self._own_edits() for one in edit.parameters))

    def restore(self, place: PlaceLike) -> None:
        """Remove all patches that were made in this world at exactly this place."""
        place = as_place(place)
        found = [self.model.locate(one) for one in self.model.each_call([place])]
        gone = [edit for edit in self._own_edits() if any(map(edit.found.is_same_place, found))]
        if not gone:
            here = ", ".join(str(edit.place) for edit in self._own_edits())
            raise PatchError(f"{place} is not patched in this world. Patched here: {here or 'nothing'}.")
        self._idle.difference_update(gone)
        self._change(
            {
                node: left
                for node, edits in self._edits.items()
                if (left := [edit for edit in edits if edit not in gone])
            }
        )

    def _change(self, edits: dict[str, list[Edit]]) -> None:
        """Let these be the edits, by node: by one assignment, so whole or not at all."""
        # Counted first: when it is interrupted in between, the same is handed over once more.
        self._changes += 1
        self._edits = edits

    def demand(self, nodes: str | Iterable[str]) -> tuple[Any, ...]:
        """Return the values at nodes of the graph, under the patches; warns of a patch without effect."""
        names = node_names(nodes)
        values = self._values(names)
        self._report(names)
        return values

    def close(self) -> None:
        """Drop this world and its forks."""
        self.world.close()
        self._edits.clear()
        self._lent.clear()

    def _part(self, place: Place, found: Located, value: Any, whole: Tensor) -> Part:
        if isinstance(value, Reading):
            self.model.expect_own(f"the patch at {place} comes from a run", value.model)
            whole = value._present(found)
            self.expect_same_weights(value)
            return found.read(whole, value._sizes)
        if isinstance(value, Tensor):
            with recording():
                return value.clone() if value.requires_grad else copy_of(value)
        if isinstance(value, Intervening):
            with computing():
                return value.for_world(place, self._parent)
        if isinstance(value, str) and value == "zero":
            return torch.zeros_like(found.read(whole, self._sizes))
        if isinstance(value, str) and value == "mean":
            with computing():
                return found.mean(whole, self._sizes, place, self.model.program, self.inputs)
        if callable(value):
            return value  # type: ignore[no-any-return]
        raise PatchError(
            f"cannot patch {place} with {value!r}. A patch is another run, a tensor, 'zero', 'mean', an "
            "intervention or a function of what would have been there."
        )

    # -- handing the patches to the engine ---------------------------------------------------

    def _stamp(self) -> tuple[int, ...]:
        return (*super()._stamp(), *map(writes_to, self._trained()))

    @property
    def _is_recorded(self) -> bool:
        """True if something with parameters is patched here or above: values have gradients by them."""
        return bool(self._trained()) or super()._is_recorded

    def _demanded(self, nodes: tuple[str, ...]) -> tuple[Any, ...]:
        self._settle()
        try:
            return super()._demanded(nodes)
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
        edits, own = self._edits_at(node), of_values(self._edits.get(node, ()))
        values, results = of_values(edits), tuple(e for e in edits if e.found.result is not None)
        sizes, idle = self._sizes, self._idle
        cover = next((i for i in reversed(range(len(own))) if own[i].covers), None)
        if cover is None and not self._parent._covers(node):
            if results:
                rule = self._result_rule(results)
                self.world.patch_rule(
                    node, lambda *inputs: applied_in_turn(values, rule(*inputs), sizes, idle)
                )
                return
            if is_reached:
                self.world.patch(node, lambda given: applied_in_turn(values, given, sizes, idle))
                return
        (present,) = self._parent._values((node,))
        with self._evaluating():
            self.world.patch(node, applied_in_turn(own[cover or 0 :], present, sizes, idle))
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
            own, lambda result: applied_in_turn(edits, result, sizes, idle), heads, (batch, positions)
        )

    # -- patches without effect --------------------------------------------------------------

    def _report(self, nodes: tuple[str, ...]) -> None:
        number, support = self.model.graph.number, self.model.support(nodes, self._given())
        for node, edits in self._edits.items():
            if number(node) not in support:
                warn(
                    f"the patch at {edits[-1].place} has no effect on what was asked for, which does not "
                    f"depend on {node!r}.",
                    NoEffectWarning,
                )
        for edit in self._own_edits():
            if edit in self._idle and not edit.parameters and number(edit.node) in support:
                warn(
                    f"the patch at {edit.place} changes nothing: its value is the old one, bit for bit.",
                    NoEffectWarning,
                )

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

    def _next_tokens(self, run: Reading) -> list[Likely]:
        """The next tokens under the same patches in another world: nothing is computed in this one."""
        with warnings.catch_warnings(), run.fork() as seen:
            warnings.simplefilter("ignore", NoEffectWarning)
            for edit in self.edits:
                seen.patch(edit.place, edit.part)
            return next_tokens(seen)

    def _repr_html_(self) -> str:
        rows = [(str(edit.place), edit.described) for edit in self.edits]
        patches = table(rows, ("patched", "with")) if rows else heading("", "Nothing is patched.")
        run: Reading | None = self
        while isinstance(run, RunWorld):
            run = run._parent
        before = [] if run is None else next_tokens(run)
        after = [] if run is None or not before else self._next_tokens(run)
        change = shown_change(before, after) if len(before) == len(after) else ""
        title = heading(f"World of {self.model.name}", "" if change else "with nothing computed yet")
        return shown(title, patches, change, folded("What was computed", note(repr(self.ledger))))

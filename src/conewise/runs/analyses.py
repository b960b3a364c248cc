"""What is read off a run as a whole: gradients, decompositions, the lens, attention patterns."""

from __future__ import annotations

from typing import Any

from conewise.arguments import checked
from conewise.decomposing.attention_patterns import AttentionPatterns, attention_patterns
from conewise.decomposing.decomposition import Decomposition, decompose
from conewise.decomposing.lens import Lens, lens
from conewise.decomposing.logit_attribution import LogitAttribution, attribute, expect_linear
from conewise.errors import GradientError, MetricError
from conewise.locations.places import PlaceLike
from conewise.locations.selectors import SelectorLike
from conewise.program.streaming import described_fields, field_names, output_names
from conewise.program.tensors import recording
from conewise.runs.backward.backward_cost import BackwardCost, backward_cost_of
from conewise.runs.backward.gradients import Gradients, gradients_of
from conewise.runs.backward.tape import Tape
from conewise.runs.metrics import Metric, as_metric, at_run, expect_prompts, measured
from conewise.runs.values import Values
from conewise.structure.axes.outputs import Outputs
from conewise.texts.tokenizing import expect_decodes
from conewise.threads import one_thread


@checked
@one_thread
class Analyses(Values):
    """Values of a captured model, and what is found in them."""

    @recording()
    def gradients(self, metric: Any, sites: SelectorLike) -> Gradients:
        """The gradients of a metric by sites, by place, each in the natural axes of its place.

        One backward pass, by torch's autograd, over what lies behind the sites: that part of the program is
        computed again and recorded, with weights as constants. A place is one of `sites` as a sweep takes
        them; prompts do not read each other, so each prompt's gradient is that of its own number. Patches
        that stand here are as they are. Raises GradientError where a site holds no floating-point numbers,
        where an operation has no derivative, or where the metric is no function that torch differentiates.
        """
        with self.checked_once():
            return gradients_of(self._tape(), as_metric(metric), sites, self.inputs)

    @recording()
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
        with self.checked_once():
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
        with self.checked_once():
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
        name = self._read_by(metric)
        metric = at_run(metric, self.model, self.inputs, name)
        with self.checked_once():
            value = Outputs(self.model.program).arranged(name, self.value_at(name), 1, prompts)
            numbers, tokenizer = measured(metric, value)[0], self._tokenizer(tokenizer)
            return attribute(self, metric, numbers, by, positions=positions, stack=stack, tokenizer=tokenizer)

    def lens(self, *, top: int = 5, tokens: Any = (), stack: str = "", tokenizer: Any = None) -> Lens:
        """The logit lens: the model's own final norm and unembedding, applied to the stream at every layer.

        For every position, the `top` likeliest next tokens and their probabilities are kept, and logit,
        probability and rank of those of `tokens` (numbers, or texts where a tokenizer is known): never the
        logits of all layers at once. The last row is checked to be what the model itself puts out.
        """
        with self.checked_once():
            return lens(self, top=top, tokens=tokens, stack=stack, tokenizer=self._tokenizer(tokenizer))

    def attention(self, layer: Any = None, *, stack: str = "", tokenizer: Any = None) -> AttentionPatterns:
        """The attention patterns of a layer, of several, or of all: [layer, batch, head, query, key].

        MissingSiteError says why a model shows none, and what to load it with.
        """
        with self.checked_once():
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
        """What writes tokens: given, or what the model was captured with."""
        expect_decodes(given)
        return self.model.tokenizer if given is None else given

    def _tape(self) -> Tape:
        """Computes parts of this run again, recorded."""
        return Tape(self.model, lambda node: self._values((node,))[0], self._sizes, self._edits_at)

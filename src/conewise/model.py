"""A captured model: any `nn.Module` as a reactive graph, to be run, patched, swept and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import torch

from conewise.anatomy.components import Components, Edges, Receivers, Senders, paths_of
from conewise.anatomy.places import Index, PlaceLike, Places
from conewise.anatomy.selectors import Selector, SelectorLike
from conewise.arguments import Positive, PositiveNumber, Samples, Seed, Share, checked, expect
from conewise.attributing.attribution import attribute
from conewise.checks.verify import Verification, verify
from conewise.circuits.acdc import find_circuit
from conewise.circuits.features import feature_graph
from conewise.circuits.replaced_parts import edge_facts, model_edges
from conewise.circuits.tracing import causal_trace
from conewise.errors import ArgumentError, CaptureError, PromptError, SweepError, describe
from conewise.generation.sweep import Writing, WritingSweep, writing
from conewise.jobs.digests import fingerprint
from conewise.program.calls import forward_parameters
from conewise.program.export import unwrapped
from conewise.program.foreign import within_memory
from conewise.program.kept import Shelf
from conewise.program.streamed_modules import with_streams
from conewise.program.tensors import Tensor
from conewise.runs.activations import Activations, activations
from conewise.runs.captured import Captured
from conewise.runs.generate import Patches, Positions, Prompt, Written, generate
from conewise.runs.inputs import is_text, token_rows, tokens_of
from conewise.runs.interventions import Intervention
from conewise.runs.learned import Learned
from conewise.runs.reading import Reading
from conewise.runs.run import Keep, Run, baseline
from conewise.runs.splicing import active, splice_step, splicing
from conewise.runs.spreading import with_named
from conewise.status import status_line
from conewise.surgery.module import ProgramModule
from conewise.sweeps.batches import Base
from conewise.sweeps.execution.wavefront import load_kernels
from conewise.sweeps.planning.plan import SweepPlan
from conewise.sweeps.storage.provenance import asked_by
from conewise.sweeps.sweep import Sweep
from conewise.sweeps.training import Fit
from conewise.templates import heading
from conewise.text.ask import ask
from conewise.text.tokens import expect_decodes
from conewise.threads import Turn, one_module, one_thread

CAPTURED = frozenset(
    {
        *("program", "signature", "batch_is_fixed", "graph", "state", "weights", "fidelity", "site_table"),
        *("phases", "splices", "operated_from", "_built", "_again", "_behind", "_supports", "_bytes"),
    }
)
"""The attributes that a model has once it is captured."""


_CACHE = "`run = model.run(text)`: `run['resid_post', 2]` is an activation, `run.logits` the output"
_PATCH = "`with run.fork() as world: world.patch(site, value)` for one change, `model.sweep(...)` for many"
_MODULE = "`model.module`, the PyTorch module"
_CONFIG = "`model.n_layers`, `model.n_heads`, or `model.module.config`"
ELSEWHERE = {
    **dict.fromkeys(("run_with_cache", "forward", "cache", "activations"), _CACHE),
    **dict.fromkeys(("run_with_hooks", "hooks", "add_hook", "trace", "patch", "ablate"), _PATCH),
    **dict.fromkeys(("to_tokens", "to_string", "to_str_tokens", "tokenize"), "`model.tokenizer`"),
    **dict.fromkeys(
        ("cfg", "config", "d_model", "d_head", "d_vocab", "d_mlp", "n_ctx", "num_layers", "vocab_size"),
        _CONFIG,
    ),
    **dict.fromkeys(("device", "dtype", "to", "eval", "cuda", "parameters", "state_dict"), _MODULE),
}
"""Names that models of other libraries have, and what to use instead here."""


@checked
@one_thread
class Model(Captured):
    """A module as a graph of its operations, with the module's own weights.

    The module is only read: no hook, buffer or attribute is left on it. The graph shares the module's
    tensors. An in-place change of a weight therefore changes the model: runs that were computed before are
    refused from then on, and new runs use the new weights. If tensors of the module are replaced (`module.w =
    nn.Parameter(...)`, `load_state_dict(..., assign=True)`, `module.to(dtype)`), an error asks for a new
    capture. `fidelity` reports how the graph compares with the module on the example.

    A model that `cw.load` returns is captured when it is first used. The example is the first input it
    receives, or eight tokens if something else is requested first. It computes the logits of all positions.
    Capture a model that takes further inputs, such as a mask, with all of them: `cw.capture(model,
    input_ids=..., attention_mask=...)`.
    """

    @classmethod
    def _loaded(
        cls, module: Any, tokenizer: Any, label: str, origin: str, shelf: Shelf | None = None
    ) -> Model:
        """A model that is captured when it is first used; its program may lie on a shelf of the cache."""
        model = object.__new__(cls)
        model._shelf = shelf
        model.module, model.tokenizer, model.label, model.origin = module, tokenizer, label, origin
        model.name, model._batch_dim, model._turn = type(module).__name__, None, Turn()
        model._is_waiting = True
        return model

    def __getattr__(self, name: str) -> Any:
        """Capture a loaded model where something is read that only a captured one has."""
        if name not in CAPTURED or self.is_captured:
            hint = f" Use {ELSEWHERE[name]}." if name in ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hint}")
        self._capture_for(None)
        return getattr(self, name)

    @property
    def is_captured(self) -> bool:
        """True once the model is a graph; a model from `cw.load` is captured when it is first used."""
        return not vars(self).get("_is_waiting")

    def _capture_for(self, given: Any) -> None:
        """Capture a loaded model, with the first inputs that it is given; a captured one stays as it is."""
        if not self.is_captured:
            self._capture_now(given)

    def _capture_now(self, given: Any) -> None:
        with one_module():
            if self.is_captured:
                return  # another thread did so meanwhile
            self._is_waiting, before = False, vars(self).copy()
            try:
                self._capture((), self._first_example(given))
                load_kernels(self)
            except BaseException:
                vars(self).clear()
                vars(self).update(before, _is_waiting=True)
                raise

    def _first_example(self, given: Any) -> Mapping[str, Any]:
        """The arguments that the model is captured with; a module is not built for them if it need not be."""
        entry = self._shelf.any() if self._shelf is not None and self._is_unbuilt else None
        if self._shelf is None or entry is None or entry.needs_module:
            return _example(self.module, given, self)
        return _example_of(entry.forward.parameters, self._shelf.device, given, self)

    @within_memory("this run")
    def run(self, /, *args: Any, keep: Keep = None, **kwargs: Any) -> Run:
        """Run the model on one input, and return the baseline: the module's outputs, and every site's value.

        `keep` selects the values that stay in memory. "all" keeps all of them. A list of places (a bare kind
        such as "z" stands for all of its layers) keeps the values that patches at these places read. A number
        of bytes, or text like "500MB", keeps as many values as are estimated to fit, beginning with those
        that patches at the model's named sites read; the outputs always stay. None keeps everything if it
        fits into 1 GiB, and otherwise the values that patches at the named sites read. Other values are
        recomputed when they are read; results do not depend on `keep`.

        On a CUDA device, a small run is computed when one of its values is first read, with the weights and
        the precision at the time of this call. A sweep computes base and source together.

        A model that has its tokenizer accepts texts: `run("...")`, or several texts of one length.
        """
        self._capture_for(args[0] if len(args) == 1 and is_text(args[0]) else kwargs)
        return baseline(self, args, kwargs, keep)

    @overload
    def sweep(
        self,
        sites: SelectorLike,
        *,
        base: Base,
        source: Any = None,
        metric: Any = None,
        precision: str | None = None,
        generate: None = None,
    ) -> Sweep: ...
    @overload
    def sweep(
        self,
        sites: SelectorLike,
        *,
        base: Any,
        source: Any = None,
        metric: Any = None,
        precision: str | None = None,
        generate: int | Writing,
    ) -> WritingSweep: ...
    def sweep(
        self,
        sites: SelectorLike,
        *,
        base: Any,
        source: Any = None,
        metric: Any = None,
        precision: str | None = None,
        generate: int | Writing | None = None,
    ) -> Sweep | WritingSweep:
        """Patch each of `sites` in a world of its own, and evaluate `metric` there.

        `base` is the run that is changed, or its inputs, or several of either; or texts, if the model was
        captured with its tokenizer. `source` provides the patched values: a run or inputs of the same shape,
        an intervention such as `cw.mean(...)`, "zero", "mean" (over each base's own prompts and positions),
        or a function of the present value. It can be omitted if every cell has its own source:
        `cw.cell(place, source=...)`, `cw.cells(place, sources={...})`. `metric` is one metric or a list of
        them: `cw.logit_diff(...)`, or a function of the outputs. See `Sweep`.

        Sites are selectors, places, names ("L2H1", "z[layer=2, head=1]", "blocks.2.attn.hook_z"), edges
        (`model.edges()`, or by name: "a0.h1->m2", "L0H1->mlp_out[layer=2]"), or a list of them. A nested list
        is patched together, in one world. If several edges of one world lead into the same reader, all of
        them are patched. Edges in one world raise an error if one changes the value that the reader of
        another reads, because a reader is patched with its value in the base. `Circuit.evaluate` removes
        edges with every reader live.

        With `generate`, a number of tokens or `cw.writing(...)`, the model generates text in each world, and
        the result is `WrittenTexts`. A metric is then a function of texts, and can be omitted.
        """
        if generate is not None:
            self._capture_for(None)
            how = writing(generate) if isinstance(generate, int) else generate
            if precision is not None:
                raise ArgumentError(
                    "`precision` is for sweeps that read logits; leave it out with `generate`."
                )
            return WritingSweep(
                self, with_named(sites, self), base=base, source=source, writing=how, judge=metric
            )
        if metric is None:
            raise SweepError(
                "no metric: say what is read in each world, such as `metric=cw.logit_diff(...)`, or let each "
                "write, `generate=20`."
            )
        self._capture_for(base)
        return Sweep(
            self, with_named(sites, self), base=base, source=source, metric=metric, precision=precision
        )

    def fit(
        self,
        intervention: Learned | Intervention,
        sites: SelectorLike,
        examples: Sequence[Any],
        *,
        steps: Positive = 200,
        batch: Positive = 16,
        learning_rate: PositiveNumber = 5e-3,
        held_out: Share | Sequence[Any] = 0.25,
        seed: Seed = 0,
    ) -> Fit:
        """Train an intervention at every one of `sites`, each in a world of its own.

        This is distributed alignment search. `intervention` is `cw.rotation(k)`, `cw.boundless()`,
        `cw.learned_mask()`, `cw.low_rank(k)`, or `cw.add(vector)`, which starts from that vector. An example
        is (base, source, label): two inputs of one length, as texts, tokens or a mapping, and the token that
        the base should predict after the intervention has taken its part from the source. The loss is the
        label's cross-entropy at the last position.

        Every step draws `batch` examples of one length and computes one differentiable pass over all worlds.
        Adam with this `learning_rate` updates each world by its own loss. `held_out` is the share of examples
        that is not used for training, or a list of other examples; the accuracy of every place is measured on
        them. All randomness depends on `seed` alone. `fit.run(...)` returns the trained interventions; with
        `out`, an interrupted run continues where it stopped. `max_memory` limits the memory of a
        recorded pass: worlds are split to fit.
        """
        self._capture_for(_first_base(examples))
        return Fit(
            self,
            intervention,
            with_named(sites, self),
            examples,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            held_out=held_out,
            seed=seed,
        )

    def activations(
        self,
        texts: Sequence[Any],
        sites: Selector | PlaceLike,
        pos: int | str | Sequence[int] = -1,
        *,
        batch: Positive = 32,
        out: str | Path | None = None,
        progress: bool | Callable[[int, int], None] | None = None,
    ) -> Activations:
        """Read the values of a site for texts of any lengths, as one array, e.g. to train probes.

        `sites` is `cw.sites("resid_post", layer=":")`, one place, or a site's name. The array's axes are
        text, then those of the site: [text, layer, d_model]. `pos` is a position, counted from each text's
        own end if it is negative, or several positions (an axis `pos` after the text axis). "mean" averages
        over all of a text's positions, and "all" returns a row for each token. Texts can also be rows of
        tokens.

        Texts of one length are run together, at most `batch` at a time, up to the last site and no further.
        With `out`, a path that ends in .npy, the array is written to that file as it is computed, and is
        never held in memory.
        """
        has_text = isinstance(texts, list | tuple) and len(texts) > 0 and isinstance(texts[0], str)
        self._capture_for(texts[0] if has_text else None)
        with within_memory("these activations"):
            return activations(self, texts, sites, pos, batch, out, progress)

    ask = ask
    attribute = attribute
    causal_trace = causal_trace
    feature_graph = feature_graph
    find_circuit = find_circuit

    def components(self, stack: str = "") -> Components:
        """Return the components that write into the residual stream and those that read it.

        They are heads, MLPs, the input of the stream and its readers at the end. `stack` selects the stack,
        if there are several. Raises EdgeError if the model has no such components.
        """
        return edge_facts(self, stack).components

    def edges(self, *, pos: int | Sequence[int] | None = None, stack: str = "") -> Edges:
        """Return every edge between components: from a writer, such as a head, to a reader.

        With `pos`, one position or several, there is an edge for each of these positions: the reader receives
        a different value at that position only. `stack` selects the encoder or the decoder if the model has
        both. Raises EdgeError if the architecture has no such edges, and names the feature that prevents
        them.
        """
        return model_edges(self, pos, stack)

    def paths(
        self,
        senders: Senders,
        receivers: Receivers,
        *,
        freeze: str = "all",
        base: Base,
        source: Any,
        metric: Any,
        stack: str = "",
    ) -> Sweep:
        """Path patching: patch the paths from each sender to each receiver, and measure the metric.

        In the world of a pair, the receiver is patched with the value it would have if the sender wrote its
        output from the source. `freeze` selects the components between the two that keep their values from
        the base: `freeze="all"` leaves the direct path only (an edge), "attention" freezes heads while MLPs
        are live, "none" freezes nothing. Everything downstream of the receiver is live. Senders are writers
        such as `a0.h1`, `m3` and `input`; receivers are readers such as `a9.h6<q>`, `m5` and `logits`. Names
        can contain `*`, and a set of receivers is patched together. The plan counts the worlds; the cost of
        live components for senders is added to it.
        """
        self._capture_for(base)
        facts = edge_facts(self, stack)
        cells = paths_of(facts.components, senders, receivers, freeze)
        _ = facts.parts  # raises where what components wrote cannot be told apart
        return Sweep(self, cells, base=base, source=source, metric=metric)

    def splice(
        self,
        place: PlaceLike,
        dictionary: Any = None,
        *,
        encode: Callable[[Tensor], Tensor] | None = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        reads: PlaceLike | None = None,
        name: str = "sae",
        also: Sequence[str] = (),
        skips: bool | None = None,
    ) -> Model:
        """Return a model with a dictionary at a place: a sparse autoencoder, or a transcoder with `reads`.

        `dictionary` has the functions `encode` and `decode`, or these two functions are given directly.
        `encode` maps the value [..., d] at the place to latents [..., latent], and `decode` maps latents to a
        value. The error term, the part of the value that the dictionary does not reconstruct, is added. The
        outputs therefore equal those of this model bit for bit, which is checked on the example. A transcoder
        reads the value at `reads`, and writes at its place. `cw.dictionary(folder)` reads a dictionary from
        files.

        With `skips`, `decode(latents, value)` also receives the value that was read: the skip connection of a
        transcoder, which is unchanged when latents are patched. A cross-layer transcoder is spliced layer by
        layer: with `also`, the names of dictionaries in earlier layers, `decode(latents, *others)` also
        receives their latents. `others` are in the order of the names, followed by the value read if the
        dictionary `skips`.

        The new model has the sites `sae.latents` (with the axis `latent`), `sae.reconstruction`, `sae.error`,
        `sae.output` and `sae.input`, and all sites of this model: the value at the place is now the output of
        the dictionary. This model and its module are not changed.
        """
        step = splice_step(place, dictionary, encode, decode, reads, name, also, skips)
        with (
            within_memory("splicing a dictionary into this model"),
            one_module(),
            status_line(f"splicing {name}") as doing,
        ):
            doing("exporting")
            made = splicing(self, step)
            model = self._made_of(step, made, doing)
            doing("comparing")
            model.splices = MappingProxyType({**self.splices, name: made.checked(self, model)})
        model.phases = doing.seconds()
        return model

    def to_module(self) -> ProgramModule:
        """Return the model as an `nn.Module`, equal bit for bit, to be stored, trained or exported.

        It has exactly the weights that the program needs, under the names that they have in the model. They
        are shared with the model until one of the two is moved, copied or trained. The new module takes the
        arguments of the captured module, and returns the same structure. It draws no random numbers: dropout
        is off, as in the capture.
        """
        self.expect_program("make a module of this model")
        self.weights.expect_captured()
        return ProgramModule(self.program, self.signature)

    def active(
        self, name: str, run: Reading, *, top: int | None = None, pos: Index | None = None
    ) -> tuple[int, ...]:
        """Return the latents of the dictionary `name` that are active in a run, the strongest first.

        A latent is active if it is not zero somewhere in the run. `top` limits the number of latents; with
        `pos`, only latents that are active at these positions are returned. The result can be used as a
        selection: `cw.sites("sae.latents", latent=model.active("sae", run))`.
        """
        return active(self, name, run, top=top, pos=pos)

    def generate(
        self,
        prompt: Prompt,
        n: int,
        patches: Patches = (),
        *,
        pos: Positions = "all",
        when: Callable[[int], bool] | None = None,
        read: PlaceLike | Places | Sequence[PlaceLike | Places] = (),
        tokenizer: Any = None,
        **options: Any,
    ) -> Written:
        """Generate up to `n` tokens after a prompt while patches are applied (steering).

        The module's own `generate` runs with its `options` (`do_sample=True`, `num_beams=4`,
        `stop_strings=["."]`). It uses a cache unless its `generation_config.use_cache` or an option disables
        it, and is greedy unless the options select another strategy. Patches are pairs (place, value),
        applied in this order by hooks that are removed afterwards. A value is `cw.add(vector, 2.0)`, "zero",
        a function of the unpatched value, or, if the place names its positions, a tensor or another run.

        `pos="all"` patches the prompt and the generated text; "new" patches only positions after the prompt,
        so that the first generated token is unchanged. A place that names positions, counted from 0, is
        patched at those. `when` is called with the number of each step and returns True if patches apply in
        it: step 0 reads the prompt, step 1 the first generated token, and so on.

        `read` names places whose values are kept, after patches: `read=[("resid_post", 2)]`, then
        `written["resid_post", 2]` [batch, pos, d_model], with all positions of the prompt and of the
        generated text except the last token. Attention patterns are assembled into the whole square.

        The prompt is text (several texts can differ in length) if the model was captured with its tokenizer
        or one is given; or token ids [batch, pos], or inputs by name. An encoder reads the whole prompt at
        once, and its sites are patched then; the decoder's prompt is its start token.
        """
        reads = tokenizer if tokenizer is not None else getattr(self, "tokenizer", None)
        with within_memory("writing with this model"):
            return generate(self, prompt, n, patches, pos, reads, when, options, read)

    def planned(self, plan: SweepPlan) -> Sweep:
        """Return the sweep that a plan describes, from the sites, metrics and inputs that the plan holds."""
        return Sweep(self, **asked_by(plan.spec, lambda inputs: baseline(self, (), inputs)))

    def fingerprint(self) -> str:
        """Compute the SHA-256 of the module's architecture and its current weights."""
        return fingerprint(self.module)

    def __repr__(self) -> str:
        return super().__repr__() if self.is_captured else f"Model {self._described()}"

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self.is_captured else heading("Model", self._described())

    def _described(self) -> str:
        weights = sum(weight.numel() for weight in self.module.parameters())
        tokenizer = "no tokenizer" if self.tokenizer is None else "its tokenizer"
        return f"{self.label}: {self.name} of {weights:,} weights, and {tokenizer} ({self.origin})"

    def verify(self, *, seed: int = 0, n: Samples = 3) -> Verification:
        """Check the graph against the module itself, on random inputs; see `Verification`."""
        with within_memory("verifying this model"):
            return verify(self, seed=seed, n=n)


def capture(module: Any, /, *args: Any, batch_dim: Any = None, tokenizer: Any = None, **kwargs: Any) -> Model:
    """Turn any `nn.Module` into a graph, by tracing it on the example arguments.

    The batch size can vary from run to run, and so can the number of positions if the module allows it. The
    batch dimension of the inputs is inferred from the computation; if that is not possible, give `batch_dim`
    (if the module's own `forward` has an argument `batch_dim`, the value is passed to it instead). Hugging
    Face models are captured with `use_cache=False`; give `logits_to_keep=1` to compute the last position's
    logits only. `DataParallel`, `DistributedDataParallel` and the result of `torch.compile` stand for the
    module inside. Raises CaptureError with torch's reason and a remedy if the module is not one graph.

    With a `tokenizer`, the model accepts texts wherever it accepts inputs: `model.run("...")`. A language
    model then needs no example, and a text can serve as one. A model that `cw.load` returns can be passed as
    the module with its tokenizer: it is captured anew, immediately.
    """
    module = unwrapped(module)
    if not isinstance(module, Model | torch.nn.Module):
        load = f" Load it first: cw.load({module!r})." if isinstance(module, str) else ""
        raise CaptureError(
            f"cw.capture takes an nn.Module, or what cw.load gives, and this is {describe(module)}.{load}"
        )
    label = origin = ""
    module = module if isinstance(module, Model) else with_streams(module)
    if isinstance(module, Model):
        tokenizer = module.tokenizer if tokenizer is None else tokenizer
        label, origin, module = module.label, module.origin, module.module
    parameters = inspect.signature(module.forward).parameters if hasattr(module, "forward") else {}
    if batch_dim is not None and "batch_dim" in parameters:
        kwargs, batch_dim = {**kwargs, "batch_dim": batch_dim}, None
    if tokenizer is not None and "tokenizer" in parameters:
        kwargs, tokenizer = {**kwargs, "tokenizer": tokenizer}, None
    expect_decodes(tokenizer)
    expect("batch_dim", batch_dim, "int | None")
    given = args[0] if args else kwargs.get("input_ids")
    if is_text(given):
        if tokenizer is None:
            raise PromptError(
                "a text was given as the example, and no tokenizer to read it with. Give one with "
                "`tokenizer=`, or tokens: `input_ids=...`."
            )
        tokens = tokens_of(tokenizer, given).to(_device(module))
        args = (tokens, *args[1:]) if args else args
        kwargs = kwargs if args else {**kwargs, "input_ids": tokens}
    elif not args and given is None and tokenizer is not None:
        kwargs = {**_example(module), **kwargs}
    with within_memory("capturing this module"):
        model = Model(module, args, kwargs, batch_dim=batch_dim, tokenizer=tokenizer, label=label)
        model.origin = origin
        load_kernels(model)
    return model


EXAMPLE = tuple(range(8))
"""The tokens that a language model is captured with where none are given; any do, their number may vary."""

PROMPTS = 2
"""So many of the first inputs of a loaded model are the example: a capture computes it."""


def _example(module: Any, given: Any = None, reader: Any = None) -> Mapping[str, Any]:
    """Return the arguments that a language model is captured with: those of its first inputs, or tokens."""
    is_two = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    parameters = {} if is_two else forward_parameters(module)
    return _example_of(parameters, _device(module), given, reader)


def _example_of(parameters: Collection[str], device: Any, given: Any, reader: Any) -> Mapping[str, Any]:
    """Return these arguments for a forward that takes `parameters`.

    Of a batch, `PROMPTS` rows are taken. `reader` has the tokenizer.
    """
    one = given[0] if isinstance(given, list | tuple) and given and not is_text(given) else given
    if is_text(one) and getattr(reader, "tokenizer", None) is not None:
        texts = [one] if isinstance(one, str) else list(one[:PROMPTS])
        return {"input_ids": tokens_of(reader.tokenizer, texts).to(device)}
    if isinstance(one, Mapping) and one:
        batches = {len(value) for value in one.values() if isinstance(value, Tensor) and value.ndim}
        rows = PROMPTS if len(batches) == 1 else None
        is_cut = {name: isinstance(value, Tensor) and value.ndim > 0 for name, value in one.items()}
        return {name: value[:rows] if is_cut[name] else value for name, value in one.items()}
    if "input_ids" not in parameters:
        return {}
    return {"input_ids": token_rows([EXAMPLE], device)}


def _first_base(examples: Any) -> Any:
    """The base of the first example, as far as it can be told."""
    first = examples[0] if isinstance(examples, list | tuple) and examples else None
    if isinstance(first, Mapping):
        return first.get("base")
    return first[0] if isinstance(first, list | tuple) and first else None


def _device(module: Any) -> Any:
    first = next(iter(module.parameters()), None)
    return None if first is None else first.device

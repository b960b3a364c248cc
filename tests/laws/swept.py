"""Sweeps drawn at random: small captured models, sets of places patched together, and what is put there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import transformers
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor, nn

import conewise as cw
from conewise.anatomy.places import Place
from conewise.errors import MetricError, PatchError, SweepError
from conewise.model import Model
from conewise.program.records import Ref
from conewise.program.walk import Interpreter
from conewise.runs.metrics import Metric, applied, fetched
from conewise.runs.run import Run
from conewise.runs.values import Edit
from conewise.sweeps.sweep import Sweep

VOCABULARY = 61
LENGTH = 7
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_GPT = {**_TOKENS, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
_LLAMA = {
    **_TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
_BERT = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}


class Branches(nn.Module):
    """Branches, a skip over all of it, a value in several parts, a write in place, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.left, self.right, self.both = nn.Linear(4, 6), nn.Linear(8, 6), nn.Linear(12, 12)
        self.norm, self.head = nn.BatchNorm1d(12), nn.Linear(12, VOCABULARY)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        a, b = x.split([4, 8], -1)
        left, right = self.left(a).relu(), torch.tanh(self.right(b))
        mixed = torch.cat([left * right, right.cumsum(1)], -1)
        mixed[:, 1:, :3] += 0.5
        y = self.norm(self.both(mixed).transpose(1, 2)).transpose(1, 2) + x
        rows = torch.arange(y.shape[0], device=y.device)
        longest = (input_ids > 3).sum(-1).clamp(max=y.shape[1] - 1)
        return {"logits": self.head(y), "picked": y[rows, longest]}


def _hugging_face(config: str, model: str, options: dict[str, Any], attention: str) -> nn.Module:
    made = getattr(transformers, config)(**options, attn_implementation=attention)
    module: nn.Module = getattr(transformers, model)(made)
    return module


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: _hugging_face("GPT2Config", "GPT2LMHeadModel", _GPT, "eager"),
    "gpt2 of classes": lambda: _hugging_face(
        "GPT2Config", "GPT2ForSequenceClassification", {**_GPT, "num_labels": 4}, "sdpa"
    ),
    "llama": lambda: _hugging_face("LlamaConfig", "LlamaForCausalLM", _LLAMA, "sdpa"),
    "gemma2": lambda: _hugging_face(
        "Gemma2Config", "Gemma2ForCausalLM", {**_LLAMA, "head_dim": 4, "sliding_window": 4}, "eager"
    ),
    "bert of classes": lambda: _hugging_face(
        "BertConfig", "BertForSequenceClassification", {**_BERT, "num_labels": 4}, "eager"
    ),
    "branches": Branches,
}
MASKED = frozenset({"gpt2", "llama", "gemma2", "bert of classes"})


def inputs(name: str, batch: int, length: int, seed: int) -> dict[str, Tensor]:
    """Prompts, padded on the right or on the left where the model reads a mask: by shape, not by seed."""
    generator = torch.Generator().manual_seed(seed)
    padded = torch.Generator().manual_seed(length)
    given = {"input_ids": torch.randint(1, VOCABULARY, (batch, length), generator=generator)}
    if name == "gpt2 of classes":
        given["input_ids"][0, -2:] = 0  # padding, which it finds by itself
    if name in MASKED:
        mask = torch.ones(batch, length, dtype=torch.long)
        for row in range(batch):
            padding = int(torch.randint(0, 3, (), generator=padded))
            # Metrics read the last token of a prompt: on the right, padding would be what `read_all` reads.
            if padding and (row % 2 or name != "bert of classes"):
                mask[row, :padding] = 0
            elif padding:
                mask[row, -padding:] = 0
        given["attention_mask"] = mask
    return given


@cache
def captured(name: str) -> Model:
    torch.manual_seed(0)
    module = MAKERS[name]().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            # Far from the tiny weights of a fresh model, so that a patch has an effect worth comparing.
            parameter.add_(torch.randn(parameter.shape) * 0.15)
    return cw.capture(module, **inputs(name, 2, LENGTH, 0))


@cache
def run_of(name: str, batch: int, length: int, seed: int) -> Run:
    return captured(name).run(**inputs(name, batch, length, seed))


@cache
def late_change(name: str, batch: int, length: int, seed: int) -> Run:
    """The run of the same prompts with another last token: most of its values are the base's, bit for bit."""
    given = inputs(name, batch, length, seed)
    given["input_ids"][:, -1] = 5
    return captured(name).run(**given)


def read_last(name: str) -> Metric:
    return cw.logit_diff(1, 2, name=name)


def read_all(name: str) -> Metric:
    """The same as `read_last`, by a metric that has every position computed."""

    def compute(logits: Tensor) -> Tensor:
        row = logits[:, :, -1] if logits.ndim > 3 else logits
        return row[..., 1] - row[..., 2]

    return Metric(name, compute, last=False)


def whole_outputs(outputs: Any) -> Tensor:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return sum((leaf.flatten(1).square().mean(-1) for leaf in leaves), torch.zeros(len(leaves[0])))


def scaled(present: Tensor) -> Tensor:
    return present * -0.7 + 0.1


METRICS: dict[str, Callable[[], list[Any]]] = {
    "last": lambda: [read_last("last")],
    "all": lambda: [read_all("all")],
    "whole": lambda: [whole_outputs],
    "two, both last": lambda: [read_last("last"), cw.prob(3)],
    "last and all": lambda: [read_last("last"), read_all("all"), whole_outputs],
}


@dataclass(frozen=True)
class Swept:
    """A sweep, and what it was made of."""

    name: str
    base: Run
    cells: tuple[tuple[Place, ...], ...]
    source: Any
    metrics: tuple[Any, ...]

    @property
    def model(self) -> Model:
        return captured(self.name)

    @property
    def puts_functions(self) -> bool:
        """Whether what is put in depends on what would have been there: then no value is replaced whole."""
        return callable(self.source) or getattr(self.source, "is_function", False)

    @cached_property
    def in_full(self) -> Tensor:
        """The numbers of full runs; the strategy has computed them, since it refuses what has none."""
        return run_in_full(self)

    @property
    def sweep(self) -> Sweep:
        made: Sweep = self.model.sweep(
            list(self.cells), base=self.base, source=self.source, metric=list(self.metrics)
        )
        return made


def _parts(draw: st.DrawFn, axes: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for axis, size in zip(axes, shape, strict=True):
        way = draw(st.sampled_from(["", "", "", "number", "slice", "list"]))
        match way if axis != "batch" else "":
            case "number":
                part[axis] = draw(st.integers(-size, size - 1))
            case "slice":
                start = draw(st.integers(0, size - 1))
                part[axis] = slice(start, draw(st.integers(start + 1, size)))
            case "list":
                part[axis] = draw(
                    st.lists(st.integers(0, size - 1), min_size=1, max_size=min(3, size), unique=True)
                )
    return part


@st.composite
def places(draw: st.DrawFn, name: str, base: Run, targets: tuple[str, ...]) -> Place:
    """A named site, or any operation that the targets depend on, whole or a part of it."""
    model = captured(name)
    support = set(model.graph.support(targets))
    kinds = [k for k in model.site_table.kinds if k != "result"]
    by_kind: bool = draw(st.booleans())
    if kinds and by_kind:
        kind = draw(st.sampled_from(kinds))
        place = cw.site(kind, layer=draw(st.sampled_from(model.site_table.layers(kind))))
        if model.locate(place).node not in support:
            place = cw.site(kind, layer=0)
    else:
        nodes = [
            r.name
            for r in model.program.records
            if r.name in support and r.shape and r.dtype is not None and r.dtype.is_floating_point
        ]
        place = cw.site(draw(st.sampled_from(nodes)))
    found = model.locate(place)
    part = _parts(draw, found.view.axes, tuple(base[place].shape))
    return cw.site(place.name, layer=place.layer, **part)


@st.composite
def sweeps(draw: st.DrawFn, metrics: str = "") -> Swept:
    """A model, a base, cells of one to three places, a source, and metrics."""
    name = draw(st.sampled_from(sorted(MAKERS)))
    batch, length = draw(st.integers(1, 3)), draw(st.sampled_from([LENGTH, 4]))
    seed = draw(st.integers(1, 2))
    base = run_of(name, batch, length, seed)
    read = METRICS[metrics or draw(st.sampled_from(sorted(METRICS)))]()
    program = captured(name).program
    outputs = tuple(out.name for out in program.outputs if isinstance(out, Ref))
    # Each metric reads the logits, or everything: what the logits depend on, all of them depend on.
    target = outputs[:1]
    cell = st.lists(places(name, base, target), min_size=1, max_size=3).map(tuple)
    cells = tuple(draw(st.lists(cell, min_size=1, max_size=6)))
    source = draw(
        st.sampled_from(
            [
                run_of(name, batch, length, 3),
                late_change(name, batch, length, seed),
                "zero",
                "mean",
                cw.noise(0.5, seed=1),
                cw.add(torch.tensor(0.3), scale=2.0),
                cw.resample(run_of(name, batch, length, 4)),
                scaled,
            ]
        )
    )
    swept = Swept(name, base, cells, source, tuple(read))
    try:
        swept.sweep.batch(0).expect_possible(swept.cells)  # padding in place of a token is refused
        assert swept.in_full is not None
    except (MetricError, PatchError):
        # What was put under a root is negative; or a place without a batch has no mean and no other prompt.
        reject()
    except SweepError as error:
        if "counted from the end of the batch" not in str(error):  # there is padding, which is refused
            raise
        reject()
    return swept


def run_in_full(swept: Swept) -> Tensor:
    """Each cell as a full run of the program, every operation computed: [metric, cell, prompt]."""
    sweep, base = swept.sweep, swept.base
    batch = sweep.batch(0)
    interpreter = Interpreter(swept.model.program)
    rows = []
    for cell in swept.cells:
        edits: dict[str, list[Edit]] = {}
        for place in cell:
            found = swept.model.locate(place)
            part = batch.intervention.part(place, base)
            edits.setdefault(found.node, []).append(Edit(place, found, part))

        def changed(own: list[Edit]) -> Callable[[Tensor], Tensor]:
            def change(value: Tensor) -> Tensor:
                for edit in own:
                    value = edit.applied(value, base._sizes, set())
                return value

            return change

        values = interpreter.values(base.inputs, edits={node: changed(own) for node, own in edits.items()})
        prompts = next(iter(base.inputs.values())).shape[0]
        numbers = []
        for metric in sweep.metrics:
            stack = None
            if metric.is_of_output:
                stack = values[sweep.facts.target(metric)].unflatten(0, (1, prompts))
            own = applied(metric, prompts, stack, outputs=interpreter.output(values))
            numbers.append(fetched(metric, own)[0])
        rows.append(torch.stack(numbers))
    return torch.stack(rows, 1)


def stale_in_theory(swept: Swept) -> int:
    """Σ over worlds of (cone(P) − W) ∩ support(targets, cut at W): P is patched there, W of it whole.

    For worlds that patch whole values only, this is `theory.stale`.
    """
    graph, sweep = swept.model.graph, swept.sweep
    functions = swept.puts_functions
    total = 0
    for cell in swept.cells:
        nodes = {swept.model.locate(place).node for place in cell}
        whole = {swept.model.locate(p).node for p in cell if not p.part and not functions}
        total += len((set(graph.cone(nodes)) - whole) & set(graph.support(sweep.targets(), cut=whole)))
    return total

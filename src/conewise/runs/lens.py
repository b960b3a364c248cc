"""The logit lens: what the final norm and the unembedding make of the stream at every layer and position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conewise.anatomy.placements import Outputs
from conewise.anatomy.residual_names import Layer
from conewise.arguments import checked
from conewise.circuits.replaced_parts import edge_facts
from conewise.circuits.walks import StackedValues, stacked_walk
from conewise.errors import DecompositionError, EdgeError
from conewise.extras import needs
from conewise.program.tensors import computing
from conewise.program.walk import between, described_fields
from conewise.runs.decomposition import (
    Drawn,
    by_position,
    difference,
    expect_prompt,
    largest,
    logits_name,
    patches_in_the_way,
)
from conewise.runs.values import Values, reader
from conewise.templates import heading, note, shown, texts, visible
from conewise.text.tokens import position_labels, token_numbers, token_text

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure
POSITIONS = 24
"""The number of positions that a notebook shows, the last ones."""

AT_ONCE = 1 << 24
"""The most logits that are looked at at once: what is computed of one layer is gone through in blocks."""


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Lens(Drawn):
    """The likeliest next tokens that the logit lens reads from the stream after each layer.

    All arrays start with the axes [row, prompt, pos]. `rows` names what was read: "input" is the input of the
    first layer, "3" the output of layer 3. `top` are the numbers of tokens [row, prompt, pos, rank], the
    likeliest first, and `top_probs` their probabilities. For the requested `tokens`, `logits`, `probs` and
    `ranks` (0 is the likeliest) are [row, prompt, pos, token]. The last row is the model's own output, which
    was checked. `texts` holds the tokens as text, if a tokenizer was available.
    """

    rows: tuple[str, ...]
    top: Tensor
    top_probs: Tensor
    tokens: tuple[int, ...]
    logits: Tensor
    probs: Tensor
    ranks: Tensor
    labels: tuple[tuple[str, ...], ...]
    texts: Mapping[int, str]

    def text(self, token: int) -> str:
        """Return the text of a token, or its number if the text is not known."""
        return self.texts.get(token, str(token))

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row for each layer, prompt, position and rank, and one for each requested token."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        rows: list[dict[str, Any]] = []
        for at, row in enumerate(self.rows):
            for prompt, labels in enumerate(self.labels):
                for pos, label in enumerate(labels):
                    place = {"layer": row, "prompt": prompt, "pos": pos, "token": label}
                    rows += [{**place, **one} for one in self._at(at, prompt, pos)]
        return pd.DataFrame(rows)

    def _at(self, row: int, prompt: int, pos: int) -> Iterator[dict[str, Any]]:
        """The tokens of one row, prompt and position: the likeliest, and those that were asked for."""
        at = (row, prompt, pos)
        for rank, (one, prob) in enumerate(
            zip(self.top[at].tolist(), self.top_probs[at].tolist(), strict=True)
        ):
            yield {"which": "top", "rank": rank, "next": self.text(one), "id": one, "prob": prob}
        asked = zip(self.tokens, self.ranks[at].tolist(), self.probs[at].tolist(), strict=True)
        for one, rank, prob in asked:
            yield {"which": "asked", "rank": rank, "next": self.text(one), "id": one, "prob": prob}

    def plot(self, *, prompt: int = 0, token: int | str | None = None) -> Figure:
        """Draw a table for one prompt: the likeliest token after each layer and its probability.

        The last layer is on top. With one of the requested `tokens`, the table shows its probability and its
        rank instead.
        """
        from conewise.runs.figures import lens_table  # noqa: PLC0415  # needs plotly

        prompt = expect_prompt(prompt, len(self.labels))
        if token is None:
            shown = [[self.text(one[0]) for one in row] for row in self.top[:, prompt].tolist()]
            shares, title = self.top_probs[:, prompt, :, 0], "Logit lens: the likeliest next token"
        else:
            at = self._number(token)
            shown = [[f"#{rank + 1}" for rank in row] for row in self.ranks[:, prompt, :, at].tolist()]
            shares = self.probs[:, prompt, :, at]
            title = f"Logit lens: the rank of {self.text(self.tokens[at])}"
        return lens_table(
            shown,
            shares.tolist(),
            [
                [self._told(at, prompt, pos) for pos in range(self.top.shape[2])]
                for at in range(len(self.rows))
            ],
            rows=self.rows,
            columns=self.labels[prompt],
            title=title,
            measure="probability",
        )

    def _number(self, token: int | str) -> int:
        """Return the index of a token among those that were asked for."""
        for at, one in enumerate(self.tokens):
            if token == one or (isinstance(token, str) and self.text(one) == visible(token)):
                return at
        asked = ", ".join(map(self.text, self.tokens)) or "none"
        raise DecompositionError(
            f"{token!r} is no token that this lens was asked for ({asked}): `run.lens(tokens=[...])`."
        )

    def _told(self, row: int, prompt: int, pos: int) -> str:
        """Describe one cell: where it is, and the likeliest tokens."""
        tokens, probs = self.top[row, prompt, pos].tolist(), self.top_probs[row, prompt, pos].tolist()
        lines = [f"{self.text(one)}  {prob:.3f}" for one, prob in zip(tokens, probs, strict=True)]
        where = "what enters" if self.rows[row] == "input" else f"after layer {self.rows[row]}"
        return "\n".join([f"{where}, at {self.labels[prompt][pos]}", *lines])

    def _repr_html_(self) -> str:
        first = max(0, self.top.shape[2] - POSITIONS)
        cells = [
            [
                (
                    self.text(int(self.top[row, 0, pos, 0])),
                    float(self.top_probs[row, 0, pos, 0]),
                    self._told(row, 0, pos),
                )
                for pos in range(first, self.top.shape[2])
            ]
            for row in reversed(range(len(self.rows)))
        ]
        names = ["input" if name == "input" else f"after {name}" for name in reversed(self.rows)]
        which = [f"prompt 1 of {len(self.labels)}"] if len(self.labels) > 1 else []
        which += [f"the last {POSITIONS} positions"] if first else []
        left = f" Shown: {', '.join(which)}." if which else ""
        words = "The likeliest next token if the model stopped after each layer; strong colours are certain."
        return shown(heading("Logit lens"), texts(cells, names, self.labels[0][first:]), note(words + left))

    def __repr__(self) -> str:
        rows, prompts, positions, count = self.top.shape
        return (
            f"Lens over {rows} rows, {prompts} prompts, {positions} positions: the {count} likeliest tokens"
        )


class Head:
    """The operations of a model from the stream behind its last layer to the logits."""

    def __init__(self, run: Values, stack: str) -> None:
        self._program = run.model.program
        logits = logits_name(run)
        if logits is None:
            raise DecompositionError(
                f"the lens reads logits, and this model returns {described_fields(self._program)}. Capture "
                "it with its unembedding, as `AutoModelForCausalLM` has it."
            )
        self.output = logits
        self.layers, self.entry = self._found(run, stack)
        self._walk = stacked_walk(self._program, [self.entry], [self.output])
        self._values = StackedValues(self._program)

    def rows(self) -> Iterator[tuple[str, str]]:
        """The values of the stream that are read: a name, and the node."""
        for before, layer in zip([None, *self.layers[:-1]], self.layers, strict=True):
            name = "input" if before is None else str(before.number)
            node = layer.nodes.get("resid_pre")
            if node is None:
                raise DecompositionError(
                    f"layer {layer.number} has no 'resid_pre', which the lens reads: "
                    f"{layer.missing.get('resid_pre', 'it was not found')}."
                )
            yield name, node
        yield str(self.layers[-1].number), self.entry

    def logits(self, read: Callable[[str], Any], node: str) -> Tensor:
        """The logits of the stream at a node, laid out as the model's own are."""
        own, value = read(self.entry), read(node)
        if value.shape != own.shape:
            raise DecompositionError(
                f"the stream at {node!r} has shape {tuple(value.shape)}, and that before the final norm "
                f"{tuple(own.shape)}: the lens cannot read the one as the other."
            )
        reads = self._values.reading(read, 1)
        found: Tensor = self._walk.run({self.entry: value.to(own.dtype)}, reads)[self.output]
        return found

    def _found(self, run: Values, stack: str) -> tuple[list[Layer], str]:
        """The layers whose stream the logits are made of, and the value of it that is read there."""
        layers = run.model.site_table.model_layers
        stacks = list(dict.fromkeys(layer.stack for layer in layers))
        for one in [stack] if stack in stacks else stacks if not stack else []:
            own = sorted((layer for layer in layers if layer.stack == one), key=lambda layer: layer.number)
            entry = self._entry(run, own, one)
            if entry is not None and self._leads_out(entry, layers):
                return own, entry
        shown = ", ".join(map(repr, stacks)) or "none: " + run.model.site_table.why_no_kinds
        raise DecompositionError(
            f"no stack of layers was found whose stream leads to the logits (stacks: {shown}). The lens "
            "needs a residual stream that the unembedding reads."
        )

    def _entry(self, run: Values, layers: Sequence[Layer], stack: str) -> str | None:
        try:
            readers = edge_facts(run.model, stack).components.readers
        except EdgeError:  # heads are not told apart, which the lens does not need
            return layers[-1].nodes.get("resid_post")
        return next((one.entry for one in readers if one.slot == "logits"), None)

    def _leads_out(self, entry: str, layers: Sequence[Layer]) -> bool:
        """True if the logits are made of this value, with no attention in between."""
        cores = {layer.attention.core.name for layer in layers}
        cores |= {layer.cross.core.name for layer in layers if layer.cross is not None}
        names = {one.name for one in between(self._program, [entry], [self.output])}
        return self.output in names and not cores & names


def lens(run: Values, *, top: int = 5, tokens: Any = (), stack: str = "", tokenizer: Any = None) -> Lens:
    """Compute the logit lens of a run; see `Run.lens`."""
    if top < 1:
        raise DecompositionError(f"top={top!r}: the lens keeps a number of tokens, at least 1.")
    head, read = Head(run, stack), reader(run)
    prompts = Outputs(run.model.program).prompts(run.inputs)
    own = by_position(run.model.program, head.output, read(head.output), prompts)
    asked = token_numbers(tokens, tokenizer, own.shape[-1])
    rows, found = [], []
    with computing():
        for name, node in head.rows():
            rows.append(name)
            logits = by_position(run.model.program, head.output, head.logits(read, node), prompts)
            if node == head.entry:
                _expect_own(run, logits, own)
            found.append(_looked_at(logits, min(top, own.shape[-1]), asked))
            del logits
    top_tokens, top_probs, own_logits, probs, ranks = (torch.stack(one) for one in zip(*found, strict=True))
    texts: dict[int, str] = {}
    if tokenizer is not None:
        numbers = {*torch.unique(top_tokens).tolist(), *asked}
        texts = {number: visible(token_text(tokenizer, number)) for number in sorted(numbers)}
    labels = position_labels(run.inputs, tokenizer, *own.shape[:2])
    return Lens(tuple(rows), top_tokens, top_probs, asked, own_logits, probs, ranks, labels, texts)


def _looked_at(logits: Tensor, top: int, asked: Sequence[int]) -> tuple[Tensor, ...]:
    """Return what is kept of logits [prompt, pos, token]: the likeliest tokens, and what was asked for."""
    prompts, positions, vocabulary = logits.shape
    flat = logits.reshape(-1, vocabulary)
    wanted = torch.tensor(list(asked), dtype=torch.long, device=logits.device)
    blocks: list[tuple[Tensor, ...]] = []
    for block in torch.split(flat, max(1, AT_ONCE // vocabulary)):
        wide = block if block.dtype == torch.float64 else block.float()
        total = wide.logsumexp(-1, keepdim=True)
        values, numbers = wide.topk(top, -1)
        own = wide[:, wanted]
        ranks = torch.stack([(wide > one[:, None]).sum(-1) for one in own.unbind(1)], 1) if asked else wanted
        ranks = ranks.expand(len(block), 0) if not asked else ranks
        kept = (numbers, (values - total).exp(), own, (own - total).exp(), ranks)
        blocks.append(tuple(one.cpu() for one in kept))
    return tuple(
        torch.cat(each).reshape(prompts, positions, -1 if each[0].shape[-1] else 0)
        for each in zip(*blocks, strict=True)
    )


def _expect_own(run: Values, found: Tensor, own: Tensor) -> None:
    """The last row has to be the model's own logits. Raises DecompositionError."""
    if torch.equal(found, own):
        return
    apart = float(difference(found, own).max()) / largest(own)
    allowed = 1e-4 if own.dtype in {torch.float32, torch.float64} else 3e-2
    if not apart <= allowed:
        raise DecompositionError(
            "the final norm and the unembedding, applied to the stream behind the last layer, are not this "
            f"run's logits: they differ by {apart:.1e} of the largest.{patches_in_the_way(run)}"
        )

"""Attention patterns of a run: how much each head reads, at each position, of each other one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conewise.anatomy.attention import attention_argument
from conewise.anatomy.places import as_numbers, site
from conewise.anatomy.residual_names import Layer
from conewise.arguments import checked
from conewise.errors import DecompositionError, MissingSiteError
from conewise.extras import needs
from conewise.program.records import ATTENTION, Ref
from conewise.program.tensors import computing
from conewise.runs.decomposition import Drawn, expect_prompt
from conewise.runs.values import Values, reader
from conewise.templates import Heatmap, beside, heading, note, shown
from conewise.text.tokens import position_labels

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure
DRAWN = 400_000
"""The most weights that one figure draws."""


SHOWN = 12
"""The number of heads that a notebook shows."""


@checked
@dataclass(frozen=True, eq=False, repr=False)
class AttentionPatterns(Drawn):
    """Attention weights: `tensor` is [layer, batch, head, query, key]. Each query's weights add up to 1."""

    layers: tuple[int, ...]
    tensor: Tensor
    labels: tuple[tuple[str, ...], ...]

    def __getitem__(self, layer: int) -> Tensor:
        """The weights of one layer, [batch, head, query, key]."""
        return self.tensor[self._index(layer)]

    def _index(self, layer: int) -> int:
        if layer not in self.layers:
            shown = ", ".join(map(str, self.layers))
            raise DecompositionError(f"no patterns of layer {layer} here: there are those of {shown}.")
        return self.layers.index(layer)

    def to_dataframe(self, *, prompt: int = 0) -> pd.DataFrame:
        """Return a row for each layer, head, query and key of one prompt."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        prompt = expect_prompt(prompt, len(self.labels))
        own = self.tensor[:, prompt].double().cpu()
        index = torch.cartesian_prod(*(torch.arange(length) for length in own.shape))
        names = ("layer", "head", "query", "key")
        columns = dict(zip(names, index.T.tolist(), strict=True))
        columns["layer"] = [self.layers[at] for at in columns["layer"]]
        return pd.DataFrame({**columns, "weight": own.flatten().tolist()})

    def plot(
        self, layer: int | None = None, *, prompt: int = 0, heads: int | Iterable[int] | None = None
    ) -> Figure:
        """Draw one small panel for each head: queries as rows from the top, keys as columns from the left.

        Axes are labelled with tokens. All layers are drawn, and a menu selects the layer that is shown; or
        one `layer`, or some `heads` of it.
        """
        from conewise.runs.figures import patterns  # noqa: PLC0415  # needs plotly

        prompt = expect_prompt(prompt, len(self.labels))
        chosen = self.layers if layer is None else (self.layers[self._index(layer)],)
        count = self.tensor.shape[2]
        try:
            numbers = as_numbers(range(count) if heads is None else heads)
        except TypeError:
            raise DecompositionError(f"heads={heads!r}: give numbers of heads, from 0.") from None
        own = [numbers] if isinstance(numbers, int) else list(numbers)
        outside = [head for head in own if not 0 <= head < count]
        if outside or not own:
            raise DecompositionError(f"heads={own}: there are {count} heads, from 0.")
        rows = [self.layers.index(one) for one in chosen]
        drawn = self.tensor[rows][:, prompt][:, own]
        if drawn.numel() > DRAWN:
            raise DecompositionError(
                f"{drawn.numel():,} weights are too many for one figure ({DRAWN:,}): draw one layer, "
                "`plot(layer=...)`, or some heads of it."
            )
        return patterns(
            drawn,
            layers=chosen,
            heads=own,
            queries=self.labels[prompt][-drawn.shape[2] :],
            keys=self.labels[prompt],
        )

    def _repr_html_(self) -> str:
        layers, _, heads = self.tensor.shape[:3]
        few = layers * heads <= SHOWN
        own = self.tensor[:, 0].double().cpu()
        # A head that reads the first token alone, as many do where they have nothing to say, is shown last.
        away = 1 - own[:, :, :, 0].mean(-1)
        order = away.flatten().argsort(descending=True)[:SHOWN].tolist()
        chosen = range(layers * heads) if few else sorted(order)
        keys, queries = self.labels[0], self.labels[0][-own.shape[2] :]
        size = 12.0 * min(len(keys), 16)
        drawn = []
        for number in chosen:
            layer, head = divmod(number, heads)
            weights = own[layer, head].tolist()
            told = [
                [f"{query} reads {key}: {weight:.3f}" for key, weight in zip(keys, row, strict=True)]
                for query, row in zip(queries, weights, strict=True)
            ]
            name = f"head {self.layers[layer]}.{head}"
            rows, columns = (queries, keys) if len(chosen) == 1 else ([""] * len(queries), [""] * len(keys))
            drawn.append(
                Heatmap(weights, rows, columns, told, title=name, largest=1.0, size=(size, size)).html()
            )
        which = "" if few else f" The {SHOWN} heads that look away from the first token most."
        words = heading("Attention patterns", repr(self).removeprefix("AttentionPatterns "))
        how = "Each row is a token, and how much it reads of each token from the left." + which
        return shown(words, beside(*drawn), note(how))

    def __repr__(self) -> str:
        layers, prompts, heads, queries, keys = self.tensor.shape
        return f"AttentionPatterns of {layers} layers: {prompts} prompts, {heads} heads, {queries} × {keys}"


def attention_patterns(
    run: Values, layer: Any = None, *, stack: str = "", tokenizer: Any = None
) -> AttentionPatterns:
    """Return the attention patterns of some layers, or of all; see `Run.attention`."""
    known = [one.number for one in run.model.site_table.model_layers if one.stack == stack]
    if layer is None:
        chosen = known or [0]  # 0 is refused with the reason why there is none
    else:
        try:
            numbers = as_numbers(layer)
        except TypeError:
            raise DecompositionError(f"layer={layer!r}: give a number, or several.") from None
        chosen = [numbers] if isinstance(numbers, int) else list(numbers)
        if not chosen:
            raise DecompositionError("layer=[]: give at least one number, or leave it out for all layers.")
    numbered = dict(_pattern(run, one, stack) for one in chosen)
    layers, values = tuple(numbered), list(numbered.values())
    if len({value.shape for value in values}) > 1:
        raise DecompositionError("layers have patterns of several shapes: ask for one `layer` at a time.")
    tensor = torch.stack(values)
    labels = position_labels(run.inputs, tokenizer, tensor.shape[1], tensor.shape[-1])
    return AttentionPatterns(layers, tensor, labels)


def _pattern(run: Values, layer: int, stack: str) -> tuple[int, Tensor]:
    """The pattern of one layer, and the layer's number from 0. A fused attention's is computed anew."""
    own = [one for one in run.model.site_table.model_layers if one.stack == stack]
    at = layer + max((one.number for one in own), default=-1) + 1 if layer < 0 else layer
    try:
        return at, run.read(site("pattern", layer=layer, stack=stack))
    except MissingSiteError:
        found = [one for one in own if one.number == at]
        value = _computed(run, found[0]) if found else None
        if value is None:
            raise
        return at, value


def _computed(run: Values, layer: Layer) -> Tensor | None:
    """The weights of a fused attention, of what it reads; None where they are not its own for certain.

    They are compared with what the operation returned: weights times values.
    """
    record, read = layer.attention.core, reader(run)
    if record.op != ATTENTION:
        return None
    if record.name in run.model.changed_sites:
        run.model.expect_program(f"compute the attention weights of layer {layer.number}")
    named = (*record.args[:3], attention_argument(record, "attn_mask"))
    query, key, value, mask = (read(one.name) if isinstance(one, Ref) else one for one in named)
    if query.ndim != 4:
        return None
    with computing():
        groups = query.shape[1] // key.shape[1]
        key, value = (one.float().repeat_interleave(groups, 1) for one in (key, value))
        scale = record.kwargs.get("scale") or query.shape[-1] ** -0.5
        scores = query.float() @ key.transpose(-2, -1) * scale
        if attention_argument(record, "is_causal"):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(-1)
        made, own = weights @ value, read(record.name)
        largest = float(own.float().abs().max()) or 1.0
        allowed = 1e-4 if own.dtype in {torch.float32, torch.float64} else 3e-2
        is_own = made.shape == own.shape and float((made - own).abs().max()) <= allowed * largest
    return weights.to(query.dtype) if is_own else None

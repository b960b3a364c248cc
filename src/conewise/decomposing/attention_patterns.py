"""Attention patterns of a run: how much each head reads, at each position, of each other one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from conewise.decomposing.decomposition import expect_prompt
from conewise.decomposing.labels import position_labels
from conewise.decomposing.taken import TakenRun
from conewise.errors import DecompositionError
from conewise.locations.places import as_numbers, site

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

Tensor = torch.Tensor
DRAWN = 400_000
"""How many weights one figure draws at most."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPatterns:
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
        """A row for each layer, head, query and key of one prompt."""
        import pandas as pd  # noqa: PLC0415  # only those who want a DataFrame need pandas

        prompt = expect_prompt(prompt, len(self.labels))
        own = self.tensor[:, prompt].double().cpu()
        index = torch.cartesian_prod(*(torch.arange(length) for length in own.shape))
        names = ("layer", "head", "query", "key")
        columns = dict(zip(names, index.T.tolist(), strict=True))
        columns["layer"] = [self.layers[at] for at in columns["layer"]]
        return pd.DataFrame({**columns, "weight": own.flatten().tolist()})

    def plot(
        self, layer: int | None = None, *, prompt: int = 0, heads: Iterable[int] | None = None
    ) -> Figure:
        """Small pictures, one for each head: queries from above, keys from the left, with their tokens.

        All layers are drawn, and a menu chooses which is shown; or one `layer`, or some `heads` of it.
        """
        from conewise.decomposing.figures import patterns  # noqa: PLC0415  # needs plotly

        prompt = expect_prompt(prompt, len(self.labels))
        chosen = self.layers if layer is None else (self.layers[self._index(layer)],)
        count = self.tensor.shape[2]
        own = list(range(count)) if heads is None else list(heads)
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

    def save_image(self, path: str | Path, layer: int, *, prompt: int = 0) -> Path:
        """Write a layer's picture as PNG, SVG, PDF, JPEG or WebP, by the ending of `path`; needs kaleido."""
        from conewise.decomposing.figures import save_image  # noqa: PLC0415  # needs plotly

        return save_image(self.plot(layer, prompt=prompt), path)

    def __repr__(self) -> str:
        layers, prompts, heads, queries, keys = self.tensor.shape
        return f"AttentionPatterns of {layers} layers: {prompts} prompts, {heads} heads, {queries} × {keys}"


def attention_patterns(
    run: TakenRun, layer: Any = None, *, stack: str = "", tokenizer: Any = None
) -> AttentionPatterns:
    """The attention patterns of some layers, or of all; see `Run.attention`."""
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
    found = [(run.model.locate(site("pattern", layer=one, stack=stack)), one) for one in chosen]
    values = [run.read(site("pattern", layer=one, stack=stack)) for one in chosen]
    if len({value.shape for value in values}) > 1:
        raise DecompositionError("layers have patterns of several shapes: ask for one `layer` at a time.")
    tensor = torch.stack(values)
    layers = tuple(place.site.layer if place.site.layer is not None else one for place, one in found)
    labels = position_labels(run.inputs, tokenizer, tensor.shape[1], tensor.shape[-1])
    return AttentionPatterns(layers, tensor, labels)

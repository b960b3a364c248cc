"""Direct logit attribution: what each part of the stream adds to a metric, through the frozen final norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conewise.arguments import Count, checked
from conewise.circuits.replaced_parts import EdgeFacts
from conewise.circuits.stream_parts import TOLERANCES
from conewise.errors import DecompositionError, MetricError
from conewise.extras import needs
from conewise.runs.decomposition import (
    BIAS,
    Part,
    Unembedding,
    by_position,
    difference,
    expect_prompt,
    expect_way,
    facts_of,
    index_of,
    logits_name,
    parts_at,
    patches_in_the_way,
)
from conewise.runs.metrics import Metric
from conewise.runs.values import Values, reader
from conewise.templates import bars, heading, note, shown
from conewise.text.tokens import position_labels

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure
Rows = tuple[tuple[tuple[int, float], ...], ...]


@checked
@dataclass(frozen=True, eq=False, repr=False)
class LogitAttribution:
    """The contributions of parts to a metric: `tensor` is [part, prompt], or [part, prompt, pos] by position.

    The norm's scale is as it is in the run. The parts add up to `numbers`, the metric itself, [prompt] or
    [prompt, pos]. That was checked: they differ by `deviation` of what is added up, which is rounding;
    `allowed` was allowed. `bias` is what no component wrote: biases of projections, of the final norm and of
    the unembedding.
    """

    by: str
    metric: str
    parts: tuple[Part, ...]
    tensor: Tensor
    numbers: Tensor
    deviation: float
    allowed: float
    labels: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in the order of computation."""
        return tuple(part.name for part in self.parts)

    @property
    def has_positions(self) -> bool:
        """True if there is a number for each position."""
        return self.tensor.ndim == 3

    def __getitem__(self, name: str) -> Tensor:
        """The contribution of one part, [prompt] or [prompt, pos]."""
        return self.tensor[index_of(self.names, name)]

    def __len__(self) -> int:
        return len(self.parts)

    def strongest(self, top: Count = 5) -> list[tuple[str, float]]:
        """The parts that add or take the most, by their mean over prompts (and positions)."""
        means = self.tensor.flatten(1).mean(1).tolist()
        order = sorted(range(len(means)), key=lambda at: -abs(means[at]))
        return [(self.parts[at].name, means[at]) for at in order[:top]]

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each part and prompt, and each position where there are several."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        rows: list[dict[str, Any]] = []
        for part, numbers in zip(self.parts, self.tensor.tolist(), strict=True):
            own = {"part": part.name, "kind": part.kind, "layer": part.layer, "head": part.head}
            for prompt, number in enumerate(numbers):
                if self.has_positions:
                    rows += [
                        {**own, "prompt": prompt, "pos": pos, "token": label, "value": value}
                        for pos, (label, value) in enumerate(zip(self.labels[prompt], number, strict=True))
                    ]
                else:
                    rows.append({**own, "prompt": prompt, "value": number})
        return pd.DataFrame(rows).astype({"layer": "Int64", "head": "Int64"})

    def plot(self, *, prompt: int | None = None) -> Figure:
        """The mean over prompts, or one prompt: heads by layer as a heatmap, anything else as bars.

        By position, parts are rows and positions columns, of one prompt (the first unless it is named).
        """
        from conewise.runs.figures import bars, heatmap  # noqa: PLC0415  # needs plotly

        title = f"What each {self.by} adds to {self.metric}"
        if self.has_positions:
            at = expect_prompt(prompt or 0, len(self.labels))
            return heatmap(
                self.tensor[:, at],
                rows=self.names,
                columns=self.labels[at],
                title=title,
                measure=self.metric,
                row_title=self.by,
            )
        prompts = self.tensor.shape[1]
        values = self.tensor.mean(1) if prompt is None else self.tensor[:, expect_prompt(prompt, prompts)]
        if self.by != "head":
            return bars(values, names=self.names, title=title, measure=self.metric)
        table, rows, columns = by_layer_and_head(self.parts, values)
        return heatmap(
            table,
            rows=rows,
            columns=columns,
            title=title,
            measure=self.metric,
            row_title="layer",
            column_title="head",
        )

    def save_image(self, path: str | Path, *, prompt: int | None = None) -> Path:
        """Write the picture as PNG, SVG, PDF, JPEG or WebP, by the ending of `path`; needs kaleido."""
        from conewise.runs.figures import save_image  # noqa: PLC0415  # needs plotly

        return save_image(self.plot(prompt=prompt), path)

    def _repr_html_(self) -> str:
        ranked = [(name, value, f"{value:+.4g}") for name, value in self.strongest(12)]
        return shown(heading(repr(self)), bars(ranked), note("Blue raises the metric, red lowers it."))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value:+.3g}" for name, value in self.strongest(3))
        return (
            f"LogitAttribution of {self.metric} by {self.by}: {len(self)} parts, which add up to it within "
            f"{self.deviation:.1e}; the largest: {shown}"
        )


def by_layer_and_head(parts: Sequence[Part], values: Tensor) -> tuple[Tensor, list[str], list[str]]:
    """Numbers of heads and MLPs by layer, heads first; what enters, and biases, are rows of their own."""
    layers = sorted({part.layer for part in parts if part.layer is not None})
    heads = max((part.head for part in parts if part.head is not None), default=-1) + 1
    others = [part for part in parts if part.layer is None]
    rows = [*(str(layer) for layer in layers), *(part.name for part in others)]
    table = torch.full((len(rows), heads + 1), float("nan"), dtype=torch.float64)
    for part, value in zip(parts, values.double().cpu(), strict=True):
        row = rows.index(part.name) if part.layer is None else layers.index(part.layer)
        table[row, heads if part.head is None else part.head] = value
    return table, rows, [*map(str, range(heads)), "MLP"]


def expect_linear(metric: Metric) -> None:
    """Raise MetricError for a metric that is no sum of logits."""
    if not metric.linear:
        raise MetricError(
            f"{metric.name!r} is no sum of logits, so what each part adds to it is not defined. Attribute "
            "`cw.logit(...)` or `cw.logit_diff(...)`; effects on any metric are those of a sweep."
        )


def attribute(
    run: Values,
    metric: Metric,
    numbers: Tensor,
    by: str = "head",
    *,
    pos: str = "last",
    stack: str = "",
    tokenizer: Any = None,
) -> LogitAttribution:
    """Attribute a metric whose value is `numbers`, [prompt]; see `Run.logit_attribution`."""
    expect_way(by)
    if pos not in {"last", "all"}:
        raise DecompositionError(f"pos={pos!r}: it is 'last', as metrics read it, or 'all'.")
    facts = facts_of(run, stack)
    way, prompts = _unembedding(facts, logits_name(run)), numbers.shape[0]
    parts, tensor, constant = parts_at(run, facts, way.reader.entry, by)
    tokens = tuple(dict.fromkeys(token for row in metric.linear for token, _ in row))
    coefficients = _coefficients(metric.linear, tokens, prompts).to(tensor.device)
    shares = way.shares(reader(run), tensor, constant, tokens, prompts)
    picked = (lambda value: _at_last(value, metric.behind)) if pos == "last" else (lambda value: value)
    added = torch.einsum("nptk,pk->npt", picked(shares.parts).double(), coefficients)
    rest = torch.einsum("ptk,pk->pt", picked(shares.rest).double(), coefficients)
    logits = picked(by_position(run.model.program, way.output, reader(run)(way.output), prompts))
    whole = torch.einsum("ptk,pk->pt", logits[..., list(tokens)].double(), coefficients)
    if pos == "last":
        whole = numbers[:, None].to(whole)
    if bool(rest.any()):
        parts, added = (*parts, BIAS), torch.cat([added, rest[None]])
    deviation, allowed = _compared(run, facts, way, metric.name, added, whole)
    labels = position_labels(run.inputs, tokenizer, prompts, shares.rest.shape[1])
    if pos == "last":
        behind = metric.behind or (0,) * prompts
        labels = tuple((row[len(row) - 1 - one],) for row, one in zip(labels, behind, strict=True))
        added, whole = added[..., 0], whole[:, 0]
    return LogitAttribution(by, metric.name, parts, added.cpu(), whole.cpu(), deviation, allowed, labels)


def _at_last(value: Tensor, behind: Sequence[int]) -> Tensor:
    """[..., prompt, 1, token] at the position of each prompt, which has so many `behind` it."""
    length, prompts = value.shape[-2], value.shape[-3]
    at = torch.tensor([length - 1 - one for one in behind or [0]], device=value.device).expand(prompts)
    return value[..., torch.arange(prompts, device=value.device), at, :].unsqueeze(-2)


def _unembedding(facts: EdgeFacts, logits: str | None) -> Unembedding:
    """Found once, and kept with what is known of the model."""
    kept: Unembedding | None = vars(facts).get("unembedding")
    if kept is None:
        kept = vars(facts)["unembedding"] = Unembedding(facts, logits)
    return kept


def _coefficients(linear: Rows, tokens: tuple[int, ...], prompts: int) -> Tensor:
    """[prompt, token]: what each logit is multiplied with."""
    found = torch.zeros(prompts, len(tokens), dtype=torch.float64)
    for prompt in range(prompts):
        for token, coefficient in linear[prompt if len(linear) > 1 else 0]:
            found[prompt, tokens.index(token)] += coefficient
    return found


def _compared(
    run: Values, facts: EdgeFacts, way: Unembedding, name: str, added: Tensor, whole: Tensor
) -> tuple[float, float]:
    """Return the distance of the parts from the metric, as a share of what is added up; and the limit."""
    behind = [allowed for dtype, allowed in TOLERANCES.items() if dtype in way.dtypes]
    allowed = max(facts.parts.tolerance(way.reader.entry), *behind)
    sizes = added.abs().sum(0).clamp(min=1e-30)
    shares = torch.where(whole.isfinite(), difference(added.sum(0), whole) / sizes, 0.0)
    apart = float(shares.max())
    if not apart <= allowed:
        raise DecompositionError(
            f"the parts do not add up to {name}: they differ by {apart:.1e} of what is added up, and "
            f"{allowed:.0e} is allowed for rounding.{patches_in_the_way(run)}"
        )
    return apart, allowed

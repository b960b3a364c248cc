"""The residual stream taken apart: what heads, layers or components have in it, and add to a metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from conewise.anatomy.components import Components, Reader, Writer
from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import PlaceLike, as_place
from conewise.anatomy.wiring import SAME, AffinePath, affine_path
from conewise.arguments import Count, checked
from conewise.circuits.replaced_parts import EdgeFacts, edge_facts
from conewise.circuits.stream_parts import TOLERANCES, AffineWalk, Rows
from conewise.circuits.walks import StackedValues
from conewise.errors import DecompositionError, EdgeError, MetricError
from conewise.extras import needs
from conewise.program.records import BIASED_PRODUCTS, NUMBER_KEEPING, POINTWISE, Program, Record, Ref
from conewise.program.tensors import Tensor, computing
from conewise.program.walk import Read, between, field_names, output_names
from conewise.runs.metrics import Metric
from conewise.runs.values import Values, reader
from conewise.templates import Heatmap, bars, heading, note, shown
from conewise.text.tokens import position_labels

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure


def logits_name(run: Values) -> str | None:
    """The node of the logits: the output of that name, or the only one there is. None where neither is."""
    program = run.model.program
    names = field_names(program, "logits") or output_names(program)
    return names[0] if len(names) == 1 else None


def by_position(program: Program, name: str, value: Tensor, prompts: int) -> Tensor:
    """[prompt, pos, token] of an output's value; one position where it has none."""
    placed = Outputs(program).arranged(name, value, 1, prompts)[0]
    return placed.unsqueeze(1) if placed.ndim == 2 else placed


def difference(found: Tensor, whole: Tensor) -> Tensor:
    """Return the distance of two values; what is not finite in the second, or alike in both, is 0 apart."""
    apart = (found.double() - whole.double()).abs()
    return torch.where(whole.isfinite(), apart, torch.zeros_like(apart))


def largest(whole: Tensor) -> float:
    """The largest finite number of a value, 1 where there is none but 0."""
    return float(torch.where(whole.isfinite(), whole.double().abs(), 0.0).max()) or 1.0


def patches_in_the_way(run: Values) -> str:
    """Return what a message says of patches, where parts do not add up."""
    if not run.edits:
        return ""
    places = ", ".join(dict.fromkeys(str(edit.place) for edit in run.edits))
    return (
        f" This world is patched at {places}: what a patch puts into the stream, or into what heads add to "
        "it, no component wrote. Patch what components read or make (z, mlp_out), or take the run apart."
    )


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of logits of some tokens: `parts` is [part, prompt, pos, token], `rest` [prompt, pos, token].

    `rest` is what no part has: biases of the norm and of the unembedding. All add up to the logits.
    """

    parts: Tensor
    rest: Tensor


class Unembedding:
    """The way from the stream behind the last layer to the logits, as a linear map once scales are a run's.

    That is the final norm and one product with the vocabulary. Behind the product, logits may be scaled, or
    capped (Gemma 2): the factor that a cap comes to in the run is frozen, as the norm's scale is. Raises
    DecompositionError for a model that has something else there.
    """

    def __init__(self, facts: EdgeFacts, logits: str | None) -> None:
        self._facts = facts
        self._program = facts.components.program
        self._wiring = facts.components.wiring
        self._values = StackedValues(self._program)
        self.output = self._expect_logits(logits)
        self.reader = self._expect_reader()
        self._product = self._expect_product()
        (self._operand,) = self._wiring.operands(self._product)
        self._norm = self._expect_affine(self.reader.entry, self._operand)
        self._walk = AffineWalk(self._norm.steps, [self._operand])
        self._behind = affine_path(self._wiring, [self._product.name], self.output)
        self._expect_pointwise()

    def shares(
        self, read: Read, parts: Tensor, constant: Tensor, tokens: Sequence[int], prompts: int
    ) -> Shares:
        """Return the shares that the parts [part, batch, pos, d_model] have in the logits of these tokens.

        `constant` is what of the stream no part has, [batch, pos, d_model].
        """
        with computing():
            parts = self._facts.parts.as_node(self.reader.entry, parts)
            constant = self._facts.parts.as_node(self.reader.entry, constant[None])[0]
            reading = self._values.reading(read, 1)
            known = self._walk.parts({self.reader.entry: Rows(parts, range(len(parts)))}, reading)
            fixed = self._walk.constants({self.reader.entry: constant}, reading)
            rows, bias = self._directions(read, tokens)
            found = known[self._operand].stack.to(rows.dtype) @ rows.T
            rest = fixed[self._operand].to(rows.dtype) @ rows.T + bias
            arranged = self._arranged(torch.cat([found, rest[None]]), prompts)
            return self._at_logits(read, arranged, tokens, prompts)

    @property
    def dtypes(self) -> set[torch.dtype | None]:
        """The precisions of all that lies on the way."""
        return {record.dtype for record in between(self._program, [self.reader.entry], [self.output])}

    # -- what lies on the way ------------------------------------------------------------------

    def _expect_logits(self, name: str | None) -> str:
        if name is None:
            raise DecompositionError(
                "this model returns no logits, so nothing can be attributed to them. Take the stream apart "
                "instead: `run.decompose(...)`."
            )
        return name

    def _expect_reader(self) -> Reader:
        found = [one for one in self._facts.components.readers if one.slot == "logits"]
        if not found:
            raise DecompositionError(
                "the logits of this model are not made of this stack's stream alone. Where there are "
                "several stacks, say which with `stack`."
            )
        return found[0]

    def _expect_product(self) -> Record:
        wiring, entry = self._wiring, self.reader.entry
        cone = wiring.cone(entry)
        products = [
            record
            for record in wiring.upward(self.output, lambda r: r.name == entry or wiring.is_linear(r))
            if wiring.is_linear(record) and record.name in cone
        ]
        if len(products) != 1 or products[0].op not in {"linear", "mm", "matmul", "addmm"}:
            shown = ", ".join(f"{record.name!r} ({record.op})" for record in products) or "none"
            raise DecompositionError(
                f"the logits are not one product of the normed stream with a vocabulary: found {shown}."
            )
        return products[0]

    def _expect_affine(self, entry: str, end: str) -> AffinePath:
        walk = affine_path(self._wiring, [entry], end)
        if walk.bent is not None:
            raise DecompositionError(
                f"between the stream and the unembedding lies {walk.bent.name!r} ({walk.bent.op}), which is "
                "neither a norm nor a projection: logits are not a sum of what components wrote, and "
                "direct logit attribution is not defined for this model. `run.lens()` is."
            )
        return walk

    def _expect_pointwise(self) -> None:
        """Raise DecompositionError where logits are made of each other behind the product."""
        for record in between(self._program, [self._product.name], [self.output]):
            if record.op not in POINTWISE | NUMBER_KEEPING | SAME:
                raise DecompositionError(
                    f"behind the unembedding lies {record.name!r} ({record.op}), which mixes the logits of "
                    "tokens or positions: they are not a sum of what components wrote."
                )

    def _directions(self, read: Read, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The rows of the vocabulary for some tokens, [token, d_model], and what is added for each."""
        record = self._product
        shift = 1 if record.op in BIASED_PRODUCTS else 0
        weight = read(record.args[1 + shift].name)
        index = torch.tensor(list(tokens), device=weight.device)
        rows = weight[index] if record.op == "linear" else weight[..., index].T
        wide = torch.promote_types(rows.dtype, torch.float32)
        added = (
            record.args[0] if shift else record.args[2] if len(record.args) > 2 else record.kwargs.get("bias")
        )
        bias = (
            read(added.name)[index].to(wide) if isinstance(added, Ref) else torch.zeros(len(tokens)).to(rows)
        )
        return rows.to(wide), bias.to(wide)

    def _arranged(self, stack: Tensor, prompts: int) -> Tensor:
        """[part, prompt, pos, token] of a stack of values that lie as the product's do."""
        parts, tokens = stack.shape[0], stack.shape[-1]
        # Parts stand beside tokens meanwhile: what is last is not looked at where prompts are found.
        beside = stack.movedim(0, -1).flatten(-2)
        placed = by_position(self._program, self._product.name, beside, prompts)
        return placed.unflatten(-1, (tokens, parts)).movedim(-1, 0)  # type: ignore[no-untyped-call,no-any-return]

    def _at_logits(self, read: Read, arranged: Tensor, tokens: Sequence[int], prompts: int) -> Shares:
        """The shares behind all that follows the product: scales, caps, and what is added there."""
        found, rest = arranged[:-1], arranged[-1]
        steps = self._behind.steps
        if self._behind.bent is None and all(step.keeps_numbers for step in steps):
            return Shares(found, rest)
        raw = self._picked(read, self._product.name, tokens, prompts).to(found.dtype)
        made = self._picked(read, self.output, tokens, prompts).to(found.dtype)
        if self._behind.bent is None and any(step.added or step.is_sum for step in steps):
            raise DecompositionError(
                f"something is added to the logits behind the unembedding ({steps[-1].record.name!r}), which "
                "no component wrote."
            )
        # One number for each logit, read off the run: its cap or scale at work.
        factor = torch.where(raw == 0, torch.ones_like(raw), made / torch.where(raw == 0, 1.0, raw))
        return Shares(found * factor, rest * factor)

    def _picked(self, read: Read, name: str, tokens: Sequence[int], prompts: int) -> Tensor:
        """[prompt, pos, token] of the logits of a run."""
        value = by_position(self._program, name, read(name), prompts)
        return value[..., torch.tensor(list(tokens), device=value.device)]


WAYS = ("head", "layer", "component")
STREAM = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True, slots=True)
class Part:
    """Writer of a part: `input`, a head (`a3.h1`), an attention (`a3`), an MLP (`m3`), a layer, or `bias`.

    `kind` is "input", "head", "attention", "mlp", "layer" or "bias". `bias` is what no component wrote:
    biases of output projections where heads are told apart, and of norms on the way.
    """

    name: str
    kind: str
    layer: int | None = None
    head: int | None = None


BIAS = Part("bias", "bias")


class Drawn:
    """A result that can be drawn."""

    plot: Callable[..., Figure]

    def save_image(self, path: str | Path, *args: Any, **how: Any) -> Path:
        """Save the figure as PNG, SVG, PDF, JPEG or WebP, by the ending of `path`; needs kaleido."""
        from conewise.runs.figures import save_image  # noqa: PLC0415  # needs plotly

        return save_image(self.plot(*args, **how), path)


class _OfParts:
    """Numbers for each of some parts of the stream, which `tensor` has along its first dimension."""

    by: str
    parts: tuple[Part, ...]
    tensor: Tensor
    deviation: float
    labels: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in the order of computation."""
        return tuple(part.name for part in self.parts)

    def __getitem__(self, name: str) -> Tensor:
        """The numbers of one part."""
        if name not in self.names:
            few = self.names if len(self) <= 8 else (*self.names[:4], "...", *self.names[-3:])
            raise DecompositionError(f"no part {name!r} here; the parts are {', '.join(few)}.")
        return self.tensor[self.names.index(name)]

    def __len__(self) -> int:
        return len(self.parts)

    def _frame(self, has_positions: bool, **values: Tensor) -> pd.DataFrame:
        """A row for each part and prompt, and each position where there are any."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        part, prompt, *pos = np.indices(next(iter(values.values())).shape).reshape(2 + has_positions, -1)
        own = {name: [getattr(self.parts[n], name) for n in part] for name in ("kind", "layer", "head")}
        columns: dict[str, Any] = {"part": [self.names[n] for n in part], **own, "prompt": prompt}
        if has_positions:
            columns |= {
                "pos": pos[0],
                "token": [self.labels[n][p] for n, p in zip(prompt, pos[0], strict=True)],
            }
        columns |= {name: value.flatten().tolist() for name, value in values.items()}
        return pd.DataFrame(columns).astype({"layer": "Int64", "head": "Int64"})


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(_OfParts, Drawn):
    """The parts of the residual stream at `place`: `tensor` is [part, batch, pos, d_model].

    The parts add up to `stream`, [batch, pos, d_model]. This was checked: their sum differs from it by
    `deviation`, as a share of its largest value, because of rounding; `allowed` is the tolerance. `labels`
    are the tokens of each prompt, or their numbers.
    """

    by: str
    place: str
    parts: tuple[Part, ...]
    tensor: Tensor
    stream: Tensor
    deviation: float
    allowed: float
    labels: tuple[tuple[str, ...], ...]

    def along(self) -> Tensor:
        """Return each part's length along the stream, [part, batch, pos]; the lengths add up to its norm."""
        stream = self.stream.double()
        unit = stream / stream.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        found: Tensor = torch.einsum("nbpd,bpd->nbp", self.tensor.double(), unit)
        return found

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row for each part, prompt and position: its norm, and its length along the stream."""
        return self._frame(True, norm=self.tensor.double().norm(dim=-1), along=self.along())

    def plot(self, *, prompt: int = 0) -> Figure:
        """Draw a heatmap for one prompt: each part's length along the stream at each position."""
        from conewise.runs.figures import heatmap  # noqa: PLC0415  # needs plotly

        return heatmap(
            self.along()[:, expect_prompt(prompt, len(self.labels))],
            rows=self.names,
            columns=self.labels[prompt],
            title=f"What is in {self.place}, by {self.by}",
            measure="along the stream",
            row_title=self.by,
        )

    def _repr_html_(self) -> str:
        along = self.along()[:, 0].tolist()
        drawn = Heatmap(along, self.names, self.labels[0], row_title=self.by, column_title="position").html()
        words = "What each part adds to the stream's length (blue) or takes away (red), in the first prompt."
        return shown(heading(repr(self)), drawn, note(words))

    def __repr__(self) -> str:
        batch, pos, width = self.stream.shape
        return (
            f"Decomposition of {self.place} by {self.by}: {len(self)} parts, {batch} × {pos} × {width}; they "
            f"add up within {self.deviation:.1e} of its largest value"
        )


def expect_prompt(prompt: int, prompts: int) -> int:
    """A prompt's number. Raises DecompositionError for one that is not there."""
    if not -prompts <= prompt < prompts:
        raise DecompositionError(f"no prompt {prompt}: there are {prompts}, from 0.")
    return prompt % prompts


def decompose(
    run: Values,
    by: str = "head",
    at: PlaceLike | None = None,
    *,
    stack: str = "",
    tokenizer: Any = None,
) -> Decomposition:
    """Decompose the residual stream; see `Run.decompose`."""
    expect_way(by)
    facts = facts_of(run, stack)
    node, place = _node_at(run, facts.components, at, stack)
    parts, tensor, constant = parts_at(run, facts, node, by)
    if bool(constant.any()):
        parts = (*parts, BIAS)
        tensor = torch.cat([tensor, constant[None].to(tensor.dtype)])
    # Copies: what is lent here may be written to, and the run stays as it is.
    stream = facts.parts.stream(reader(run), node).clone()
    tensor = tensor.clone() if len(parts) == 1 else tensor
    deviation, allowed = _compared(run, facts, node, place, tensor, stream)
    labels = position_labels(run.inputs, tokenizer, *stream.shape[:2])
    return Decomposition(by, place, parts, tensor, stream, deviation, allowed, labels)


def expect_way(by: str) -> None:
    """Raise DecompositionError where parts are asked for by something else than there is."""
    if by not in WAYS:
        raise DecompositionError(f"by={by!r}: the stream is taken apart by {', '.join(map(repr, WAYS))}.")


def facts_of(run: Values, stack: str) -> EdgeFacts:
    """Return the facts about who writes into a stack's stream. Raise DecompositionError with what hinders."""
    try:
        try:
            facts = edge_facts(run.model, stack)
        except EdgeError:  # queries, keys or values are not told apart, and are no parts of the stream
            facts = edge_facts(run.model, stack, reads_heads=False)
        _ = facts.parts
    except EdgeError as error:
        raise DecompositionError(
            f"what components wrote into the residual stream of this model cannot be told apart: {error}"
        ) from None
    return facts


def parts_at(run: Values, facts: EdgeFacts, node: str, by: str) -> tuple[tuple[Part, ...], Tensor, Tensor]:
    """The parts of a value of the stream, [part, batch, pos, d_model], in the order of computation.

    And what belongs to none of them, [batch, pos, d_model].
    """
    read, components = reader(run), facts.components
    try:
        found, constant = facts.parts.at(read, node, whole=by != "head")
        writers = components.writers[: components.prefix(node)]
    except EdgeError as error:
        raise DecompositionError(f"the stream at {node!r} cannot be taken apart: {error}") from None
    if by == "head":
        parts = [Part(one.name, _kind(one), one.layer, one.head) for one in writers]
    else:
        parts = _whole_parts(components, writers)
    if by == "layer":
        parts, found = _by_layer(parts, found)
    return tuple(parts), found, constant


def _kind(writer: Writer) -> str:
    return "mlp" if writer.slot == "mlp" else writer.slot


def _whole_parts(components: Components, writers: tuple[Writer, ...]) -> list[Part]:
    """Attentions and MLPs as parts: what they add to the stream, whole."""
    first = {components.terms[term].start: term for term in components.terms}
    return [
        Part(f"a{one.layer}", "attention", one.layer)
        if one.slot == "head"
        else Part(one.name, _kind(one), one.layer)
        for one in writers
        if one.number in first
    ]


def _by_layer(parts: list[Part], found: Tensor) -> tuple[list[Part], Tensor]:
    layers = list(dict.fromkeys(part.layer for part in parts if part.layer is not None))
    rows = [found[0]]
    for layer in layers:
        own = [at for at, part in enumerate(parts) if part.layer == layer]
        rows.append(found[own].sum(0))
    return [parts[0], *(Part(f"layer {layer}", "layer", layer) for layer in layers)], torch.stack(rows)


def _node_at(run: Values, components: Components, at: PlaceLike | None, stack: str) -> tuple[str, str]:
    """The node of the stream that is meant, and the place in words."""
    if at is None:
        last = next((one for one in components.readers if one.slot == "logits"), None)
        if last is not None:
            return last.entry, "the stream before the final norm"
        return components.layers[-1].nodes["resid_post"], "the stream behind the last layer"
    place = as_place(at)
    found = run.model.locate(place)
    if found.site.kind not in STREAM or found.site.stack != stack:
        raise DecompositionError(
            f"{place} is no value of the residual stream, which is what is taken apart. Name one of "
            f"{', '.join(STREAM)} and a layer, as in at=('resid_post', 0)."
        )
    if place.part:
        raise DecompositionError(
            f"{place} is a part of a site; the stream is taken apart as a whole. Leave out "
            f"{', '.join(place.part)}, and select from `.tensor`."
        )
    return found.node, str(place)


def _compared(
    run: Values, facts: EdgeFacts, node: str, place: str, tensor: Tensor, stream: Tensor
) -> tuple[float, float]:
    """Return how far the sum of the parts is off the stream, and may be. Raise DecompositionError."""
    allowed = facts.parts.tolerance(node)
    apart = float(difference(tensor.sum(0, dtype=torch.float64), stream).max()) / largest(stream)
    if not apart <= allowed:
        raise DecompositionError(
            f"the parts do not add up to {place}: they differ by {apart:.1e} of its largest value, and "
            f"{allowed:.0e} is allowed for rounding.{patches_in_the_way(run)}"
        )
    return apart, allowed


# -- direct logit attribution ----------------------------------------------------------------------


@checked
@dataclass(frozen=True, eq=False, repr=False)
class LogitAttribution(_OfParts, Drawn):
    """The contributions of parts to a metric: `tensor` is [part, prompt], or [part, prompt, pos] by position.

    The norm's scale is frozen as in the run. The parts add up to `numbers`, the metric itself, [prompt] or
    [prompt, pos]. This was checked: they differ by `deviation` of the summed terms, because of rounding;
    `allowed` is the tolerance. `bias` is the contribution that no component wrote: biases of projections, of
    the final norm and of the unembedding.
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
    def has_positions(self) -> bool:
        """True if there is a number for each position."""
        return self.tensor.ndim == 3

    def strongest(self, top: Count = 5) -> list[tuple[str, float]]:
        """Return the parts with the largest absolute contributions, averaged over prompts (and positions)."""
        means = self.tensor.flatten(1).mean(1).tolist()
        order = sorted(range(len(means)), key=lambda at: -abs(means[at]))
        return [(self.parts[at].name, means[at]) for at in order[:top]]

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row for each part and prompt, and for each position if there are several."""
        return self._frame(self.has_positions, value=self.tensor)

    def plot(self, *, prompt: int | None = None) -> Figure:
        """Draw the mean over prompts, or one prompt: heads by layer as a heatmap, other parts as bars.

        By position, parts are rows and positions are columns, for one prompt (by default the first).
        """
        from conewise.runs.figures import bars as drawn_bars  # noqa: PLC0415  # needs plotly
        from conewise.runs.figures import heatmap  # noqa: PLC0415

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
            return drawn_bars(values, names=self.names, title=title, measure=self.metric)
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
    deviation, allowed = _compared_with_metric(run, facts, way, metric.name, added, whole)
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


def _coefficients(linear: Any, tokens: tuple[int, ...], prompts: int) -> Tensor:
    """[prompt, token]: what each logit is multiplied with."""
    found = torch.zeros(prompts, len(tokens), dtype=torch.float64)
    for prompt in range(prompts):
        for token, coefficient in linear[prompt if len(linear) > 1 else 0]:
            found[prompt, tokens.index(token)] += coefficient
    return found


def _compared_with_metric(
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

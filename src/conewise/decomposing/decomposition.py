"""The residual stream taken apart: what heads, layers or components have in it at a place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from conewise.arguments import checked
from conewise.decomposing.labels import position_labels
from conewise.decomposing.taken import TakenRun, difference, largest, patches_in_the_way, reading
from conewise.edges.edge_facts import EdgeFacts, edge_facts
from conewise.errors import DecompositionError, EdgeError
from conewise.extras import needs
from conewise.locations.places import PlaceLike, as_place
from conewise.structure.components.components import Components, Writer

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

Tensor = torch.Tensor
WAYS = ("head", "layer", "component")
STREAM = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True, slots=True)
class Part:
    """Who wrote a part: `input`, a head (`a3.h1`), an attention (`a3`), an MLP (`m3`), a layer, or `bias`.

    `kind` is "input", "head", "attention", "mlp", "layer" or "bias". `bias` is what no component wrote:
    biases of output projections where heads are told apart, and of norms on the way.
    """

    name: str
    kind: str
    layer: int | None = None
    head: int | None = None


BIAS = Part("bias", "bias")


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Decomposition:
    """What each part has in the residual stream at `place`: `tensor` is [part, batch, pos, d_model].

    The parts add up to `stream`, [batch, pos, d_model]. That was checked: they differ by `deviation` of its
    largest value, which is rounding; `allowed` was allowed. `labels` are the tokens of each prompt, or their
    numbers.
    """

    by: str
    place: str
    parts: tuple[Part, ...]
    tensor: Tensor
    stream: Tensor
    deviation: float
    allowed: float
    labels: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in the order of computation."""
        return tuple(part.name for part in self.parts)

    def __getitem__(self, name: str) -> Tensor:
        """One part, [batch, pos, d_model]."""
        return self.tensor[index_of(self.names, name)]

    def __len__(self) -> int:
        return len(self.parts)

    def along(self) -> Tensor:
        """How far each part goes along the stream, [part, batch, pos]: these add up to the stream's norm."""
        stream = self.stream.double()
        unit = stream / stream.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        found: Tensor = torch.einsum("nbpd,bpd->nbp", self.tensor.double(), unit)
        return found

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each part, prompt and position: its norm, and how far it goes along the stream."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        norms, along = self.tensor.double().norm(dim=-1).tolist(), self.along().tolist()
        rows = [
            {
                "part": part.name,
                "kind": part.kind,
                "layer": part.layer,
                "head": part.head,
                "prompt": prompt,
                "pos": pos,
                "token": label,
                "norm": norms[at][prompt][pos],
                "along": along[at][prompt][pos],
            }
            for at, part in enumerate(self.parts)
            for prompt, labels in enumerate(self.labels)
            for pos, label in enumerate(labels)
        ]
        return pd.DataFrame(rows).astype({"layer": "Int64", "head": "Int64"})

    def plot(self, *, prompt: int = 0) -> Figure:
        """A heatmap for one prompt: how far each part goes along the stream at each position."""
        from conewise.decomposing.figures import heatmap  # noqa: PLC0415  # needs plotly

        along = self.along()[:, expect_prompt(prompt, len(self.labels))]
        return heatmap(
            along,
            rows=self.names,
            columns=self.labels[prompt],
            title=f"What is in {self.place}, by {self.by}",
            measure="along the stream",
            row_title=self.by,
        )

    def save_image(self, path: str | Path, *, prompt: int = 0) -> Path:
        """Write the picture as PNG, SVG, PDF, JPEG or WebP, by the ending of `path`; needs kaleido."""
        from conewise.decomposing.figures import save_image  # noqa: PLC0415  # needs plotly

        return save_image(self.plot(prompt=prompt), path)

    def __repr__(self) -> str:
        batch, pos, width = self.stream.shape
        return (
            f"Decomposition of {self.place} by {self.by}: {len(self)} parts, {batch} × {pos} × {width}; they "
            f"add up within {self.deviation:.1e} of its largest value"
        )


def index_of(names: tuple[str, ...], name: str) -> int:
    """The number of a part. Raises DecompositionError for one that is not there."""
    if name not in names:
        shown = ", ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-3:]])
        raise DecompositionError(f"no part {name!r} here; the parts are {shown}.")
    return names.index(name)


def expect_prompt(prompt: int, prompts: int) -> int:
    """A prompt's number. Raises DecompositionError for one that is not there."""
    if isinstance(prompt, bool) or not hasattr(prompt, "__index__"):
        raise DecompositionError(f"prompt={prompt!r}: give its number, from 0.")
    if not -prompts <= prompt < prompts:
        raise DecompositionError(f"no prompt {prompt}: there are {prompts}, from 0.")
    return prompt % prompts


def decompose(
    run: TakenRun,
    by: str = "head",
    at: PlaceLike | None = None,
    *,
    stack: str = "",
    tokenizer: Any = None,
) -> Decomposition:
    """Take the residual stream apart; see `Run.decompose`."""
    expect_way(by)
    facts = facts_of(run, stack)
    node, place = _node_at(run, facts.components, at, stack)
    parts, tensor, constant = parts_at(run, facts, node, by)
    if bool(constant.any()):
        parts = (*parts, BIAS)
        tensor = torch.cat([tensor, constant[None].to(tensor.dtype)])
    # Copies: what is lent here may be written to, and the run stays as it is.
    stream = facts.parts.stream(reading(run), node).clone()
    tensor = tensor.clone() if len(parts) == 1 else tensor
    deviation, allowed = _compared(run, facts, node, place, tensor, stream)
    labels = position_labels(run.inputs, tokenizer, *stream.shape[:2])
    return Decomposition(by, place, parts, tensor, stream, deviation, allowed, labels)


def expect_way(by: str) -> None:
    """Raise DecompositionError where parts are asked for by something else than there is."""
    if by not in WAYS:
        raise DecompositionError(f"by={by!r}: the stream is taken apart by {', '.join(map(repr, WAYS))}.")


def facts_of(run: TakenRun, stack: str) -> EdgeFacts:
    """What is known of who writes into a stack's stream. Raises DecompositionError, and says what hinders."""
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


def parts_at(run: TakenRun, facts: EdgeFacts, node: str, by: str) -> tuple[tuple[Part, ...], Tensor, Tensor]:
    """The parts of a value of the stream, [part, batch, pos, d_model], in the order of computation.

    And what belongs to none of them, [batch, pos, d_model].
    """
    read, components = reading(run), facts.components
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


def _node_at(run: TakenRun, components: Components, at: PlaceLike | None, stack: str) -> tuple[str, str]:
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
    run: TakenRun, facts: EdgeFacts, node: str, place: str, tensor: Tensor, stream: Tensor
) -> tuple[float, float]:
    """How far the sum of the parts is off the stream, and how far it may be. Raises DecompositionError."""
    allowed = facts.parts.tolerance(node)
    apart = float(difference(tensor.sum(0, dtype=torch.float64), stream).max()) / largest(stream)
    if not apart <= allowed:
        raise DecompositionError(
            f"the parts do not add up to {place}: they differ by {apart:.1e} of its largest value, and "
            f"{allowed:.0e} is allowed for rounding.{patches_in_the_way(run)}"
        )
    return apart, allowed

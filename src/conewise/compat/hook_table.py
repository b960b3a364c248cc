"""The hook names of a captured model, in the order of computation, and how each value is read and changed.

Most are sites. What is no node of the graph is made of nodes: a norm's scale and its normalised value of what
the norm reads, the embedding of positions of what is the same for every prompt. A change of these is put in
at the node behind them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from conewise.anatomy.attention import through_layout
from conewise.anatomy.places import PlaceLike
from conewise.anatomy.wiring import Wiring, affine_path
from conewise.compat.matrices import Matrices, Norm, Written, is_alike, norm_of
from conewise.errors import MissingSiteError, nearest
from conewise.model import Model
from conewise.program.records import REARRANGEMENTS, Record
from conewise.runs.reading import Reading
from conewise.runs.run import Run

OTHER_NAMES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "mlp_mid": "mid",
    "mlp_post": "post",
    "mlp_pre": "pre",
    "query": "q",
    "value": "v",
}
"""Other names that TransformerLens has for a kind of activation."""

_PARTS = {"a": "attn", "attention": "attn", "b": "", "block": "", "blocks": "", "m": "mlp"}
_IN_ATTENTION = frozenset({"attn_scores", "k", "pattern", "q", "result", "rot_k", "rot_q", "v", "z"})
_IN_MLP = frozenset({"mid", "post", "pre", "pre_linear"})
_OF_NORMS = frozenset({"normalized", "scale"})
_SHORT = re.compile(r"([a-z]+)(\d+)([a-z]?.*)")


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """The full name of a hook: `get_act_name("k", 6)` is "blocks.6.attn.hook_k".

    `layer_type` is the part of the block ("attn", "mlp", "ln1", or "a", "m"), needed for norms alone. A full
    name is returned as it is; "k6" and "scale4ln1" are read as kind, layer and part. A norm's value without
    a layer is the final norm's.
    """
    if layer is None and layer_type is None and ("." in name or name.startswith("hook_")):
        return name
    short = _SHORT.match(name)
    if short is not None:
        name, layer, layer_type = short.groups()
    kind = OTHER_NAMES.get(name, name)
    if kind in _IN_ATTENTION:
        part = "attn"
    elif kind in _IN_MLP:
        part = "mlp"
    else:
        part = _PARTS.get(layer_type or "", layer_type or "")
    if layer is None and kind in _OF_NORMS:
        part = "ln_final"
    pieces = [*(() if layer is None else ("blocks", str(layer))), *((part,) if part else ()), f"hook_{kind}"]
    return ".".join(pieces)


Tensor = torch.Tensor
Change = Callable[[Tensor], Tensor]
Edits = list[tuple[PlaceLike, Change]]

KINDS = (
    "resid_pre",
    *("attn_in", "q_input", "k_input", "v_input"),
    "ln1",
    *("q", "k", "v", "rot_q", "rot_k", "attn_scores", "pattern", "z", "result"),
    "ln1_post",
    "attn_out",
    "resid_mid",
    "mlp_in",
    "ln2",
    *("pre", "pre_linear", "post"),
    "ln2_post",
    "mlp_out",
    "resid_post",
)
"""The kinds of a block, in the order of computation; a norm stands for its scale and what it divides."""

POST_NORMS = {"attn_out": "ln1_post", "mlp_out": "ln2_post"}
"""The norm that makes what is added to the stream, where there is one."""

BIASES = {"attn_out": "b_O", "mlp_out": "b_out"}
"""The bias of the output projection of attention and of the MLP."""

INTO_HEADS = {"attn_in": "qkv", "q_input": "q", "k_input": "k", "v_input": "v"}
"""Kinds that heads read, and what they make of each."""

ON_REQUEST = {
    "result": "use_attn_result",
    "mlp_in": "use_hook_mlp_in",
    "attn_in": "use_attn_in",
    **dict.fromkeys(("q_input", "k_input", "v_input"), "use_split_qkv_input"),
}
"""Kinds that a cache lists only after `set_use_attn_result(True)` and its like. They can be read and hooked
before that too."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One hook name. `edits(change)` are the patches by which the value becomes `change` of what it is.

    With a `norm` there are none: changes at one norm are put in together, by `HookTable.edits`. `touches` are
    the places that are patched; `is_site` says that the value is that of the one place.
    """

    name: str
    layer: int | None
    kind: str
    read: Callable[[Reading], Tensor]
    touches: tuple[PlaceLike, ...]
    edits: Callable[[Change], Edits] | None = None
    norm: Norm | None = None
    is_site: bool = False


class HookTable:
    """Every hook name of a model of one stack of layers. Raises MissingSiteError where there is none."""

    def __init__(self, model: Model, probe: Run, matrices: Matrices) -> None:
        self.model, self._matrices, self._wiring = model, matrices, Wiring(model.program)
        sites = model.site_table
        stacks = {layer.stack for layer in sites.model_layers}
        if len(stacks) != 1:
            raise MissingSiteError(
                f"hook names go by blocks, and {model.name} has "
                + (f"several stacks of them ({', '.join(sorted(stacks))})" if stacks else "none")
                + (f": {sites.why_no_kinds}." if sites.why_no_kinds else ".")
                + " Use the captured model itself, `conewise.capture(...)`."
            )
        self._known = frozenset(site.name for site in sites)
        self.n_layers = 1 + max(layer.number for layer in sites.model_layers)
        self.norms = {**self._norms(probe), **self._post_norms(probe)}
        self._ways: dict[tuple[str, int], tuple[str, bool]] = {}
        self.is_summed = self._is_summed(probe)
        """True if the stream is a sum from end to end: no norm stands in it, from block to block."""
        self.embed, self.pos_embed, self.pos_table = self._embeddings(probe)
        self.entries: Mapping[str, Entry] = {entry.name: entry for entry in self._all()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def full(self, name: str) -> str:
        """The full name of what was written. Raises MissingSiteError with the reason, or nearest names."""
        return self.find(name).name

    def find(self, name: str, layer: int | None = None, layer_type: str | None = None) -> Entry:
        """The entry of a name: a full one, or a kind with its layer. Negative layers count from the end."""
        if layer is not None and layer < 0:
            if layer < -self.n_layers:
                raise MissingSiteError(
                    f"no layer {layer}: the blocks of this model are 0 to {self.n_layers - 1}."
                )
            layer += self.n_layers
        full = get_act_name(name, layer, layer_type)
        if full in self.entries:
            return self.entries[full]
        raise self._missing(full)

    def places(self, names: Iterable[str]) -> dict[str, PlaceLike]:
        """The places of those names that are sites."""
        found = {name: self.entries[name] for name in names}
        return {name: entry.touches[0] for name, entry in found.items() if entry.is_site}

    def edits(self, changes: Mapping[str, Change]) -> Edits:
        """The patches by which values become `changes` of what they are, by full names; in their order."""
        found: Edits = []
        of_norms: dict[str, dict[str, Change]] = {}
        for name, entry in self.entries.items():
            if name not in changes:
                continue
            if entry.edits is not None:
                found += entry.edits(changes[name])
            elif entry.norm is not None:
                if entry.norm.after not in of_norms:
                    found += _at_norm(entry.norm, of_norms.setdefault(entry.norm.after, {}))
                of_norms[entry.norm.after][entry.kind] = changes[name]
        return found

    def written(self, kind: str, layer: int) -> Written:
        """Return the way of the output projection of "attn_out" or "mlp_out" into the stream.

        Raises ValueError where it gets there in another way than `Written` knows.
        """
        norm = self.norms.get(f"blocks.{layer}.{POST_NORMS[kind]}")
        if (kind, layer) not in self._ways:
            self._ways[kind, layer] = self._way(kind, layer, norm)
        begin, is_plain = self._ways[kind, layer]
        if is_plain:
            return Written(norm)
        probe = self._matrices.probe()
        shift, one = (_put(probe, begin, number, (kind, layer)) for number in (0.0, 1.0))
        written = Written(norm, (one - shift)[0, 0], shift[0, 0])
        if not self._is_written(written, kind, layer, probe):
            raise ValueError(
                f"what the heads or neurons of layer {layer} have in {kind!r} is not known: behind their "
                "output projection lies more than a norm, a factor and a sum. The whole is there, "
                f"`cache[{kind!r}, {layer}]`; for heads, try `model.captured.run(...).decompose()`."
            )
        return written

    def _way(self, kind: str, layer: int, norm: Norm | None) -> tuple[str, bool]:
        """The node behind projection and norm; and True if its numbers get into the stream as they are."""
        begin = self._projection(kind, layer).name if norm is None else norm.after
        nodes = {one.number: one.nodes for one in self.model.site_table.model_layers}[layer]
        if kind not in nodes:
            return begin, True
        walk = affine_path(self._wiring, [begin], nodes[kind])
        is_reached = begin == nodes[kind] or bool(walk.steps)
        return begin, is_reached and all(step.keeps_numbers for step in walk.steps)

    def _projection(self, kind: str, layer: int) -> Record:
        of = self._matrices
        return (of.head_projection if kind == "attn_out" else of.neuron_projection)(layer)

    def _is_written(self, written: Written, kind: str, layer: int, probe: Run) -> bool:
        """True if that makes of the probe's projection what the probe adds to the stream."""
        if kind == "attn_out":
            whole = probe.read(("result", layer)).sum(-2) + self._matrices.out_of_heads(layer)[1]
        else:
            weight, bias = self._matrices.out_of_neurons(layer)
            whole = probe.read(("post", layer)) @ weight + bias
        scale = None if written.norm is None else written.norm.scale(whole)
        own = probe.read((kind, layer))
        return is_alike(written.constant(whole, scale), own, own.dtype)

    def _missing(self, name: str) -> MissingSiteError:
        parts = name.split(".")
        if parts[-1] in NOT_HERE:
            return MissingSiteError(f"no hook {name!r}: {NOT_HERE[parts[-1]]}")
        if parts[0] == "blocks" and len(parts) > 2 and parts[1].isdigit():
            kind = parts[-1].removeprefix("hook_")
            if int(parts[1]) >= self.n_layers:
                return MissingSiteError(
                    f"no hook {name!r}: the blocks of this model are 0 to {self.n_layers - 1}."
                )
            if kind == "attn_in":
                return MissingSiteError(
                    f"no hook {name!r}: it stands for what every head reads, and keys and values have other "
                    "heads here. Hook 'hook_q_input', 'hook_k_input' and 'hook_v_input'."
                )
            if kind in {"scale", "normalized"}:
                return MissingSiteError(
                    f"no hook {name!r}: no module between the stream and what reads it is a norm of that "
                    "place. What norms make is there by module path, in a run of the captured model."
                )
            try:
                self.model.locate((kind, int(parts[1])))
            except MissingSiteError as error:
                if get_act_name(kind, int(parts[1])) == name:
                    return error
        near = nearest(name, self.entries)
        return MissingSiteError(
            f"no hook {name!r} in this model.{near} All of them: `list(model.hook_dict)`."
        )

    # -- what is there -----------------------------------------------------------------------------

    def _all(self) -> Iterator[Entry]:
        yield from self._of_embeddings()
        known = self._known
        for layer in range(self.n_layers):
            for kind in KINDS:
                name = get_act_name(kind, layer)
                if kind in {"ln1", "ln1_post", "ln2", "ln2_post"}:
                    yield from self._of_norm(f"blocks.{layer}.{kind}", layer)
                elif kind == "mlp_in":
                    norm = self.norms.get(f"blocks.{layer}.ln2")
                    if norm is not None:
                        yield _of_norm_entry(name, layer, kind, norm, partial(_value, norm.before))
                elif kind in INTO_HEADS:
                    yield from self._into_heads(name, layer, kind)
                elif name in known:
                    yield _site_entry(name, layer, kind, name)
        yield from self._of_norm("ln_final", None)

    def _of_embeddings(self) -> Iterator[Entry]:
        first = get_act_name("resid_pre", 0)
        yield _site_entry("hook_embed", None, "embed", self.embed)
        if self.pos_embed is not None:
            read = partial(_of_every_prompt, self.pos_embed, first)
            edits = partial(_added, first, self.pos_embed)
            yield Entry("hook_pos_embed", None, "pos_embed", read, (self.pos_embed, first), edits)

    def _of_norm(self, where: str, layer: int | None) -> Iterator[Entry]:
        norm = self.norms.get(where)
        if norm is None:
            return
        for kind, read in (("scale", _scale), ("normalized", _normalized)):
            yield _of_norm_entry(f"{where}.hook_{kind}", layer, kind, norm, partial(read, norm))

    def _into_heads(self, name: str, layer: int, kind: str) -> Iterator[Entry]:
        """Yield what heads read, a copy for each, if the norm before them and their projections are known."""
        norm, places = self.norms.get(f"blocks.{layer}.ln1"), []
        for made in INTO_HEADS[kind]:
            where = get_act_name(made, layer)
            if norm is None or where not in self._known:
                return
            if kind == "attn_in" and "kv_head" in self.model.locate(where).view.axes:
                return
            places.append(where)
        if norm is not None:
            read = partial(_by_head, norm.before, places[0])
            edits = partial(_before_heads, norm, self._matrices, layer, INTO_HEADS[kind])
            yield Entry(name, layer, kind, read, (norm.before, *places), edits)

    def _norms(self, probe: Run) -> dict[str, Norm]:
        """The norms between the stream and what reads it, by place: "blocks.3.ln1", "ln_final"."""
        wanted: dict[str, tuple[str, int]] = {}
        nodes = {layer.number: layer.nodes for layer in self.model.site_table.model_layers}
        for number, kinds in nodes.items():
            wanted[f"blocks.{number}.ln1"] = "resid_pre", number
            wanted[f"blocks.{number}.ln2"] = "resid_mid" if "resid_mid" in kinds else "resid_pre", number
        wanted["ln_final"] = "resid_post", max(nodes)
        found: dict[str, Norm] = {}
        taken: set[str] = set()
        for where, (kind, number) in wanted.items():
            if kind in nodes[number]:
                norms = self._reading(nodes[number][kind], get_act_name(kind, number), probe)
                norm = next((one for one in norms if one.after not in taken), None)
                if norm is not None:
                    found[where] = norm
                    taken.add(norm.after)
        return found

    def _post_norms(self, probe: Run) -> dict[str, Norm]:
        """The norms of what attention and MLPs are about to add to the stream: "blocks.3.ln1_post"."""
        found: dict[str, Norm] = {}
        for kind, layer in itertools.product(POST_NORMS, range(self.n_layers)):
            with suppress(AttributeError):  # of models without such a projection
                node = self._projection(kind, layer).name
                norm = next(self._reading(node, node, probe), None)
                if norm is not None:
                    found[f"blocks.{layer}.{POST_NORMS[kind]}"] = norm
        return found

    def _reading(self, node: str, site: str, probe: Run) -> Iterator[Norm]:
        """The norms that read a node, in whatever form."""
        readers = through_layout(self._wiring, node, None)
        forms = {node, *(reader.name for reader, _ in readers if reader.op in REARRANGEMENTS)}
        for port in self.model.program.ports:
            if port.inputs and port.inputs[0] in forms and len(port.outputs) == 1:
                norm = norm_of(self._module(port.call.path), port.call.path, site, port.outputs[0])
                if norm is not None and self._is_that(norm, probe):
                    yield norm

    def _is_summed(self, probe: Run) -> bool:
        kinds = [layer.nodes for layer in self.model.site_table.model_layers]
        has_both = all("resid_pre" in nodes and "resid_post" in nodes for nodes in kinds)
        return has_both and all(
            torch.equal(probe.read(("resid_post", layer)), probe.read(("resid_pre", layer + 1)))
            for layer in range(self.n_layers - 1)
        )

    def _is_that(self, norm: Norm, probe: Run) -> bool:
        """True if what the norm makes of the stream, row by row, is what it put out."""
        (own,) = probe.demand([norm.after])
        made = norm(probe.read(norm.before))
        is_alike = made.numel() == own.numel()
        return is_alike and torch.allclose(made.reshape(own.shape), own, rtol=1e-3, atol=1e-3)

    def _embeddings(self, probe: Run) -> tuple[str, str | None, str | None]:
        """The nodes whose values are added up to what enters the first block, of tokens and of positions.

        And the path of the table of positions. Without one, what enters the first block is that of tokens.
        """
        first = get_act_name("resid_pre", 0)
        whole = probe.read(first)
        tables = {
            port.outputs[0]: port.call.path
            for port in self.model.program.ports
            if len(port.outputs) == 1 and isinstance(self._module(port.call.path), nn.Embedding)
        }
        values = {node: probe.demand([node])[0] for node in tables}
        for tokens, one in values.items():
            for positions, other in values.items():
                if tokens != positions and one.shape == whole.shape and _adds_up(one, other, whole):
                    return tokens, positions, tables[positions]
        return first, None, None

    def _module(self, path: str) -> nn.Module:
        found: nn.Module = self.model.module.get_submodule(path)
        return found


NOT_HERE = {
    "hook_mid": "only models with a norm inside their MLPs have it, and they are no Hugging Face models.",
    "hook_tokens": "tokens are the input; change them before the model runs.",
}


def _adds_up(one: Tensor, other: Tensor, whole: Tensor) -> bool:
    try:
        return torch.equal(one + other, whole)
    except RuntimeError:  # of shapes that do not go together
        return False


def _put(probe: Run, node: str, number: float, place: PlaceLike) -> Tensor:
    """The value of a place, where every number at a node is the same one."""
    with probe.fork() as world:
        world.patch(node, torch.full_like(probe.demand([node])[0], number))
        return world.read(place)


# -- reading and changing ------------------------------------------------------------------------------


def _value(place: PlaceLike, run: Reading) -> Tensor:
    return run.read(place)


def _at(place: PlaceLike, change: Change) -> Edits:
    return [(place, change)]


def _site_entry(name: str, layer: int | None, kind: str, place: PlaceLike) -> Entry:
    read, edits = partial(_value, place), partial(_at, place)
    return Entry(name, layer, kind, read, (place,), edits, is_site=True)


def _of_norm_entry(
    name: str, layer: int | None, kind: str, norm: Norm, read: Callable[[Reading], Tensor]
) -> Entry:
    return Entry(name, layer, kind, read, (norm.before, norm.after), norm=norm)


def _by_head(before: PlaceLike, made: PlaceLike, run: Reading) -> Tensor:
    """The stream, a copy for each head."""
    heads = run.read(made).shape[2]
    return run.read(before).unsqueeze(2).expand(-1, -1, heads, -1)


def _before_heads(norm: Norm, matrices: Matrices, layer: int, kinds: str, change: Change) -> Edits:
    """Return edits of what heads project: norm and projection of a changed stream, head by head."""
    weights = {kind: matrices.made(kind, layer) for kind in kinds}
    seen: list[Tensor] = []
    changed: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        seen[:], changed[:] = [x.clone()], []
        return x

    def put(kind: str, own: Tensor) -> Tensor:
        given = seen[0].unsqueeze(2).expand(-1, -1, own.shape[2], -1)
        if not changed:
            changed.append(change(given.clone()))
        if changed[0].shape == given.shape and torch.equal(changed[0], given):
            return own
        weight, bias = weights[kind]
        return torch.einsum("bphm,hmd->bphd", norm(changed[0]), weight) + bias

    return [(norm.before, note), *((get_act_name(kind, layer), partial(put, kind)) for kind in kinds)]


def _of_every_prompt(node: str, like: PlaceLike, run: Reading) -> Tensor:
    return run.read(node).expand_as(run.read(like))


def _added(first: PlaceLike, node: str, change: Change) -> Edits:
    """A change of what is the same for all prompts, where it was added: each prompt may get another one."""
    seen: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        seen[:] = [value.clone()]
        return value

    def add(whole: Tensor) -> Tensor:
        own = seen[0].expand_as(whole)
        changed = change(own.clone())
        return whole if torch.equal(changed, own) else whole + (changed - own)

    return [(node, note), (first, add)]


def _scale(norm: Norm, run: Reading) -> Tensor:
    return norm.scale(run.read(norm.before))


def _normalized(norm: Norm, run: Reading) -> Tensor:
    x = run.read(norm.before)
    return norm.centered(x) / norm.scale(x)


def _at_norm(norm: Norm, changes: Mapping[str, Change]) -> Edits:
    """Changes of what a norm reads ("mlp_in"), of its "scale" and of what it makes ("normalized").

    What it reads is noted on the way; its output lies in the cone of that, so it is computed afterwards.
    Where nothing changes, the output is the module's own, bit for bit.
    """
    seen: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        seen[:] = [x.clone()]
        return x

    def changed(kind: str, value: Tensor) -> Tensor:
        return changes[kind](value.clone()) if kind in changes else value

    def made(own: Tensor) -> Tensor:
        given = changed("mlp_in", seen[0])
        if not torch.equal(given, seen[0]):
            own = norm(given).reshape(own.shape)
        scale = changed("scale", norm.scale(given))
        normalized = norm.centered(given) / scale
        left = changed("normalized", normalized)
        is_same = torch.equal(scale, norm.scale(given)) and torch.equal(left, normalized)
        return own if is_same else norm.affine(left).reshape(own.shape)

    return [(norm.before, note), (norm.after, made)]

"""Sites: the named places of a captured model, found from its graph and its module tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from conewise.anatomy.attention import Activation, Attention, find_attention, natural_axes, weight_of
from conewise.anatomy.axes import Axes, Axis, Kept, View, regroup, view_of
from conewise.anatomy.padding import shown_entries
from conewise.anatomy.places import Place
from conewise.anatomy.recurrence import READ, WRITE, find_recurrences
from conewise.anatomy.residual_names import FINAL_SCALE, SCALES, Layer, find_layers, scale_of
from conewise.anatomy.wiring import Wiring
from conewise.errors import MissingSiteError, PatchError, Piece, describe, nearest
from conewise.program.records import ModulePort, Program, Record
from conewise.program.tensors import Tensor, mean_of
from conewise.program.walk import Rule

AXES = ("batch", "pos", "head", "d_model")


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The way from z to `result`: through which projection, and whether its weight is [out, in].

    `is_pos_first`: what the projection reads has its positions in front of the batch.
    """

    projection: Record
    weight: str
    out_in: bool
    is_pos_first: bool = False

    def read(
        self, z: torch.Tensor, weight: torch.Tensor, view: View, sizes: Sequence[int] = ()
    ) -> torch.Tensor:
        """[batch, pos, head, d_model], of the value of z's node and of the weight."""
        heads = view.present(z, sizes)
        return torch.einsum("bphd,hdm->bphm", heads, self.by_head(weight, heads.shape[-2:]))

    def by_head(self, weight: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """The weight as [head, d_head, d_model]; `heads` are the first two of these lengths."""
        found: torch.Tensor = (weight.T if self.out_in else weight).unflatten(0, tuple(heads))  # type: ignore[no-untyped-call]
        return found

    def changed(
        self, own: Rule, change: Callable[[torch.Tensor], torch.Tensor], heads: int, shape: Sequence[int]
    ) -> Rule:
        """A rule for the projection under which `result` is `change` of what it would have been.

        It takes the inputs of `own`, which is the projection's rule. `shape` is (batch, pos) of the run.
        """
        weight_at = self.projection.inputs.index(self.weight)
        view = View(AXES, tuple((axis,) for axis in AXES), {})
        lead = tuple(reversed(shape)) if self.is_pos_first else tuple(shape)

        def rule(*inputs: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = own(*inputs)
            weight = inputs[weight_at]
            wide = weight.shape[1] if self.out_in else weight.shape[0]
            others = (x for i, x in enumerate(inputs) if i != weight_at)
            activation = next(x for x in others if x.shape[-1] == wide and x.ndim > 1)
            z = activation.reshape(*lead, heads, wide // heads)
            result = self.read(z.transpose(0, 1) if self.is_pos_first else z, weight, view)
            added = (change(result) - result).sum(2)
            return value + (added.transpose(0, 1) if self.is_pos_first else added).reshape(value.shape)

        return rule


DICTIONARY = "dictionary"
"""The kind of the sites of a dictionary that was spliced in; these are found by their names."""

STREAM = ("batch", "pos", "d_model")
NEURONS = ("batch", "pos", "neuron")
EXPERTS = ("batch", "pos", "expert")
_NATURAL = {
    **dict.fromkeys(("pre", "pre_linear", "post"), NEURONS),
    **dict.fromkeys(("router_logits", "expert_weights"), EXPERTS),
}

WHERE: Mapping[str, str] = {
    "resid_pre": "the residual stream as it enters the layer, before the layer's first norm",
    "resid_mid": "resid_pre + attn_out: the sum itself, before any norm of it",
    "resid_mid_cross": "the stream plus cross_attn_out: the sum itself, before any norm of it",
    "resid_post": "the last sum of the layer, usually the stream plus mlp_out: before any norm of it",
    "attn_out": "what attention adds to the stream, after the output projection and any post-norm",
    "cross_attn_out": "what cross-attention adds to the stream, after any post-norm",
    "mlp_out": "what the MLP adds to the stream, after the down projection and any post-norm",
    "q": "the queries as projected, bias included, before any q-norm, scaling and rotary embedding",
    "k": "the keys as projected, before any k-norm and rotary embedding, not repeated",
    "v": "the values as projected, not repeated",
    "rot_q": "the queries that enter the scores, after q-norm and rotary embedding",
    "rot_k": "the keys that enter the scores, after k-norm and rotary embedding, not repeated",
    "attn_scores": "what the softmax reads: scaled, capped and masked",
    "pattern": "the attention weights that multiply the values",
    "z": "each head's result, in front of the output projection",
    "result": "each head's share of the output projection, without its bias; computed from z",
    "pre": "the neurons before the activation (of the gate, in a gated MLP)",
    "pre_linear": "the neurons of a gated MLP that are not activated, before the product",
    "router_logits": "what the router of a mixture of experts gives each expert, as projected",
    "expert_weights": "their softmax or sigmoid, which the router chooses experts from, before it chooses",
    WRITE: "what each position adds to the state of a state-space model, for each channel: B̄·x in Mamba",
    READ: "the weights with which the output reads each entry of that state: C in Mamba",
    "ln1_scale": "what the norm that attention reads multiplies with: 1/√(mean square + ε); not in lists",
    "ln2_scale": "what the norm that the MLP reads multiplies with, likewise",
    "ln_final_scale": "what the norm that the unembedding reads multiplies with, likewise",
    "post": "the neurons as the down projection reads them: activated, and gated",
}
"""The place of each kind; the test suite checks every line against hooks on the module."""

WHERE_IN_DICTIONARY: Mapping[str, str] = {
    "latents": "what encode makes of the value; what is patched here leaves the error term alone",
    "reconstruction": "what decode makes of the latents",
    "error": "what the dictionary misses of the value, with the latents as they were encoded",
    "output": "reconstruction + error: what the rest of the model reads",
    "input": "the value itself, before the dictionary",
}
"""The place of each site of a dictionary, by the end of its name."""

_CALL = re.compile(r"(.+)[#@]([0-9]+)((?:\.(?:input|output)(?:\.[0-9]+)?)?)")
"""One call of a module, as names write it, or as they were written once: `a#1`, `a@1`, `a#1.input`."""

_PARTS = {
    "attn": ("q", "k", "v", "rot_q", "rot_k", "z", "result", "attn_scores", "pattern"),
    "mlp": ("pre", "pre_linear", "post", "router_logits", "expert_weights"),
}
_HOOKS = {kind: f"{part}.hook_{kind}" for part, kinds in _PARTS.items() for kind in kinds}


@dataclass(frozen=True, slots=True)
class Site:
    """A place whose value can be read and replaced.

    `view` shows the node's value in natural axes; None where the value is shown as it is. Where
    `result` is given, the site is not a node's value but is computed from it; see `HeadResult`.
    """

    name: str
    kind: str
    node: str
    view: View | None
    layer: int | None = None
    stack: str = ""
    result: HeadResult | None = None


class SiteTable:
    """All sites of a program, by name and by (kind, layer).

    Names are, in this order: the TransformerLens spelling of a transformer's kinds
    (`blocks.9.attn.hook_z`), module paths (`transformer.h.9.mlp`, with `.input` for what goes
    in), and the graph's own names, one for each operation.

    A module's path means all of its calls, as a hook on the module does. Each call of a module that is
    called several times has a site of its own, `path#0`, `path#1`, ... (`path#1.input`).
    """

    def __init__(self, program: Program) -> None:
        self._wiring = Wiring(program)
        attentions = find_attention(self._wiring)
        self.model_layers = find_layers(self._wiring, attentions)
        self.why_no_kinds = "" if self.model_layers else "no attention was found in its graph"
        if attentions and not self.model_layers:
            self.why_no_kinds = (
                f"{len(attentions)} attentions were found, several in one module, so no path says which "
                "layer each is of"
            )
        self._by_name: dict[str, Site] = {}
        self._by_kind: dict[tuple[str, str, int], Site] = {}
        self._missing: dict[tuple[str, str, int], tuple[Piece, ...]] = {}
        for layer in self.model_layers:
            for site in _layer_sites(self._wiring, layer):
                self._by_name[site.name] = site
                self._by_kind[site.kind, site.stack, site.layer or 0] = site
            self._note_missing(layer)
        for one in find_recurrences(self._wiring):
            for kind, (node, view) in one.nodes.items():
                site = Site(_name(kind, "", one.layer), kind, node, view, one.layer)
                self._by_name[site.name] = self._by_kind[kind, "", one.layer] = site
        self._add_modules_and_operations(program)

    def _add_modules_and_operations(self, program: Program) -> None:
        self._calls: dict[str, tuple[Site, ...]] = {}
        self._hidden: dict[str, str] = {}
        by_module: dict[tuple[str, ...], list[ModulePort]] = {}
        for port in program.ports:
            by_module.setdefault(port.paths or (port.call.path,), []).append(port)
        paths = {path for paths in by_module for path in paths}
        for own, ports in by_module.items():
            for path in own:
                self._add_module(path, sorted(ports, key=lambda port: port.call.call), paths)
        for name in (*(i.name for i in program.inputs), *(r.name for r in program.records)):
            if name not in self._calls:
                self._by_name.setdefault(name, Site(name, "op", name, None))

    def _add_module(self, path: str, ports: Sequence[ModulePort], taken: Set[str]) -> None:
        """Add the sites of a module: those of its one call, or those of every call, and of all of them."""
        acting = [port for port in ports if port.outputs or port.hidden]
        whole: dict[str, list[Site]] = {}
        for port in ports:
            called = path if len(ports) == 1 else f"{path}#{port.call.call}"
            if port.hidden or not port.outputs:
                why = port.hidden or "nothing that the model returns depends on it"
                self._hidden[called] = f"{called!r} has no output of its own: {why}"
            for site in _module_sites(self._wiring, port, called):
                name = path + site.name.removeprefix(called)
                if site.name not in taken - {path}:  # a module of that name comes first
                    known = self._by_name.setdefault(site.name, site)
                    if port in acting and len(ports) > 1 and name not in taken - {path}:
                        whole.setdefault(name, []).append(known)
        for name, sites in whole.items():
            nodes = {site.node: site for site in sites}
            is_input = sites[0].kind == "module input"
            if name not in self._by_name:
                self._calls[name] = tuple(nodes.values()) if is_input else tuple(sites)
            if len(sites) < len(acting) or (len(nodes) < len(sites) and not is_input):
                names = (f"{path}#{port.call.call}" for port in acting)
                reasons = [self._hidden[one] for one in names if one in self._hidden]
                self._hidden[name] = (
                    reasons[0] if reasons else "its calls hand over values of different kinds"
                )

    @property
    def has_repeated_calls(self) -> bool:
        """True if some module is called several times."""
        return bool(self._calls)

    def calls(self, name: str) -> tuple[str, ...]:
        """The names of the sites that a name means: itself, or each call of a module that has several.

        Raises MissingSiteError where some call of the module has no such site.
        """
        if name in self._by_name or name not in self._calls:
            return (name,)
        names = tuple(site.name for site in self._calls[name])
        if name in self._hidden:
            raise MissingSiteError(
                f"{name!r} means all calls of a module, as a hook on it does, and not all have a site: "
                f"{self._hidden[name]}. Those that have one are {_listed(names)}: name them one by one."
            )
        return names

    def operated(
        self,
        program: Program,
        renamed: Mapping[str, str],
        own: Iterable[Site],
        why: str = "",
        without: Sequence[str] = (),
    ) -> SiteTable:
        """The table of a program that was changed: every name is still there whose value is.

        Whatever was called by a value that is `renamed` now is the other one, which is read instead.
        `own` are the sites of what was put in. `why` says of those whose value is gone what took it away;
        names by the paths of modules `without` which the module is now are gone too.
        """
        there = {*program.record_of, *(leaf.name for leaf in program.inputs)}
        made = object.__new__(SiteTable)
        made._wiring = Wiring(program)
        made.why_no_kinds, made._missing = self.why_no_kinds, dict(self._missing)
        made.model_layers = [_operated_layer(one, program, renamed, there, why) for one in self.model_layers]
        inner = tuple(f"{path}." for path in without)
        ends = {f"{path}.{way}" for path in without for way in ("input", "output")}
        sites = (
            _operated_site(site, program, renamed)
            for site in self
            if site.kind != "op"
            and (site.layer is not None or not site.name.startswith(inner) or site.name in ends)
        )
        made._by_name = {site.name: site for site in sites if site is not None and site.node in there}
        made._by_kind = {
            key: made._by_name[s.name] for key, s in self._by_kind.items() if s.name in made._by_name
        }
        gone = self._by_kind.keys() - made._by_kind.keys()
        made._missing |= dict.fromkeys(gone, (why,))
        made._by_name |= {site.name: site for site in own}
        made._add_modules_and_operations(program)
        gone_names = (site.name for site in self if site.kind != "op" and site.name not in made._by_name)
        for name in gone_names:
            made._hidden.setdefault(name, f"it is gone since {why}")
        for name in self._hidden.keys() - made._by_name.keys():
            made._hidden.setdefault(name, self._hidden[name])
        return made

    def narrowed(self, shapes: Mapping[str, Any], kept: Mapping[str, Kept]) -> SiteTable:
        """The table, where entries of values of these `shapes` were removed: the lengths of axes are new."""

        def site(one: Site) -> Site:
            if one.view is None or one.node not in kept:
                return one
            return replace(one, view=one.view.narrowed(shapes[one.node], kept[one.node]))

        def attention(own: Attention) -> Attention:
            known: dict[str, Activation] = {}
            for kind, one in own.activations.items():
                view = one.view.narrowed(shapes[one.node], kept[one.node]) if one.node in kept else one.view
                if view is not None:
                    known[kind] = Activation(one.node, view)
            is_cut = own.projection is not None and any(name in kept for name in own.projection.inputs)
            return replace(own, activations=known, operand=None if is_cut else own.operand)

        self.model_layers = [
            replace(layer, attention=attention(layer.attention), cross=layer.cross and attention(layer.cross))
            for layer in self.model_layers
        ]
        self._by_name = {name: site(one) for name, one in self._by_name.items()}
        self._by_kind = {key: site(one) for key, one in self._by_kind.items()}
        return self

    def __iter__(self) -> Iterator[Site]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that this model has."""
        return tuple(dict.fromkeys(kind for kind, _, _ in self._by_kind))

    @property
    def dictionaries(self) -> tuple[str, ...]:
        """The names of the dictionaries that were spliced in."""
        known = (site.name for site in self if site.kind == DICTIONARY)
        return tuple(name.removesuffix(".latents") for name in known if name.endswith(".latents"))

    def layers(self, kind: str, stack: str = "") -> tuple[int, ...]:
        """The layers that have this kind."""
        known = self._scales if kind in SCALES else self._by_kind
        return tuple(sorted(layer for k, s, layer in known if (k, s) == (kind, stack)))

    @property
    def missing(self) -> Mapping[tuple[str, str, int], tuple[Piece, ...]]:
        """Reasons why kinds are not there, by (kind, stack, layer)."""
        return self._missing

    def find(self, kind_or_name: str, layer: int | None = None, stack: str = "") -> Site:
        """The site of a name, or of a kind and a layer (negative ones count from the end).

        Raises MissingSiteError with the reason where it is known, else with the nearest names.
        """
        by_kind = self._by_kind
        if kind_or_name in {*SCALES, FINAL_SCALE}:
            if not any(one.stack == stack for one in self.model_layers):
                raise MissingSiteError(f"no {kind_or_name!r} here: {self.why_no_kinds or 'no such stack'}.")
            by_kind, layer = self._scales, -1 if kind_or_name == FINAL_SCALE else layer
        if layer is None:
            if kind_or_name in self._by_name:
                return self._by_name[kind_or_name]
            names = self.calls(kind_or_name)
            if len(names) > 1:
                raise MissingSiteError(
                    f"{kind_or_name!r} means {len(names)} calls of one module, each with a value of its own. "
                    f"Say which: {_listed(names)}. Patches and sweeps take {kind_or_name!r} for all of them."
                )
            renamed = self._renamed(names[0])
            if renamed in self._by_name:
                return self._by_name[renamed]
            module = kind_or_name.removesuffix(".output")  # as nnsight writes it
            if module in self._by_name and self._by_name[module].kind == "module":
                return self._by_name[module]
            kind, _, number = kind_or_name.rpartition(".")
            if kind in self.kinds and re.fullmatch("-?[0-9]+", number):  # resid_post.10, z.-1
                return self.find(kind, int(number), stack)
            if kind_or_name in {*self.kinds, *SCALES}:
                raise MissingSiteError(
                    f"{kind_or_name!r} is a kind of site, one in each layer: say which, as in "
                    f"`site({kind_or_name!r}, layer=0)`."
                )
            raise self._unknown(kind_or_name)
        if (kind_or_name, stack, layer) in by_kind:
            return by_kind[kind_or_name, stack, layer]
        stacks = list(dict.fromkeys(layer.stack for layer in self.model_layers))
        if stack not in stacks and stacks:
            raise MissingSiteError(
                f"this model has the stacks {', '.join(map(repr, stacks))}; say which one with stack=."
            )
        known = sorted({layer.number for layer in self.model_layers if layer.stack == stack})
        if kind_or_name in {WRITE, READ}:
            known = list(self.layers(kind_or_name, stack))
        if layer < 0 and known:
            layer += known[-1] + 1
        if (kind_or_name, stack, layer) in by_kind:
            return by_kind[kind_or_name, stack, layer]
        having = self.layers(kind_or_name, stack)
        at = layer if layer in known or having else min(known, default=layer)
        reason = self._missing.get((kind_or_name, stack, at))
        if by_kind is not self._by_kind and at in known:
            own = next(one for one in self.model_layers if (one.stack, one.number) == (stack, at))
            reason = (scale_of(self._wiring, own, kind_or_name)[1],)
        if reason:
            raise MissingSiteError(f"layer {at} has no {kind_or_name!r}: ", *reason, ".")
        if having and layer not in known:
            raise MissingSiteError(_no_layer(layer, known))
        if having:
            raise MissingSiteError(
                f"layer {layer} has no {kind_or_name!r}; layers that have it: {spans(having)}."
            )
        raise self._unknown(kind_or_name)

    @cached_property
    def _scales(self) -> dict[tuple[str, str, int], Site]:
        """The scales of norms, where nodes hold them. No list of kinds has them: few look for them.

        That behind a stack is one of its last layer.
        """
        found: dict[tuple[str, str, int], Site] = {}
        last = {one.stack: one for one in sorted(self.model_layers, key=lambda one: one.number)}
        for layer in self.model_layers:
            for kind in (*SCALES, FINAL_SCALE) if layer is last[layer.stack] else SCALES:
                node, _ = scale_of(self._wiring, layer, kind)
                if node is not None:
                    is_final, view = kind == FINAL_SCALE, self._scale_view(layer, node)
                    name = kind if is_final else _name(kind, layer.stack, layer.number)
                    number = None if is_final else layer.number
                    found[kind, layer.stack, layer.number] = Site(name, kind, node, view, number, layer.stack)
        return found

    def _scale_view(self, layer: Layer, node: str) -> View | None:
        """[batch, pos] of a value that lies as the stream does, with one number for all features."""
        stream = layer.nodes.get("resid_pre") or layer.nodes.get("resid_post")
        view = None if stream is None else _stream_view(self._wiring, layer, stream, STREAM)
        own, shape = self._wiring.shape(node), None if stream is None else self._wiring.shape(stream)
        if view is None or own is None or shape is None or own[:-1] != shape[:-1]:
            return None
        packing = tuple(tuple(axis for axis in packed if axis != "d_model") for packed in view.packing)
        return View(tuple(axis for axis in view.axes if axis != "d_model"), packing, view.lengths)

    def _renamed(self, name: str) -> str:
        """The name of a call as the table has it: `a#1` for `a@1`; `a` for `a#0` where it is called once."""
        match = _CALL.fullmatch(name)
        if match is None:
            return name
        path, number, rest = match.groups()
        called = f"{path}#{number}{rest}"
        return called if called in self._by_name or int(number) else f"{path}{rest}"

    def _unknown(self, name: str) -> MissingSiteError:
        if self._renamed(name) in self._hidden:
            return MissingSiteError(f"no site {name!r}: {self._hidden[self._renamed(name)]}.")
        for (kind, stack, layer), reason in self._missing.items():
            if name == _name(kind, stack, layer):
                return MissingSiteError(f"no site {name!r}: ", *reason, ".")
            if name == kind and kind not in self.kinds:
                return MissingSiteError(f"no site {name!r} in layer {layer}: ", *reason, ".")
        near = nearest(name, [*self.kinds, *self._by_name])
        kinds = ", ".join(self.kinds) or f"none: {self.why_no_kinds}"
        return MissingSiteError(f"no site {name!r} in this model.{near} Its kinds are {kinds}.")

    def _note_missing(self, layer: Layer) -> None:
        reasons: dict[str, tuple[Piece, ...]] = {kind: (reason,) for kind, reason in layer.missing.items()}
        reasons |= layer.attention.missing
        if ("result", layer.stack, layer.number) not in self._by_kind:
            reasons.setdefault("result", ("its output projection could not be determined from the graph",))
        if layer.cross is not None:
            reasons |= {f"cross_{kind}": reason for kind, reason in layer.cross.missing.items()}
        for kind, reason in reasons.items():
            self._missing[kind, layer.stack, layer.number] = reason


def _name(kind: str, stack: str, layer: int) -> str:
    prefix = f"{stack}.blocks.{layer}" if stack else f"blocks.{layer}"
    if kind.startswith("cross_") and kind != "cross_attn_out":
        return f"{prefix}.cross_attn.hook_{kind.removeprefix('cross_')}"
    return f"{prefix}.{_HOOKS.get(kind, f'hook_{kind}')}"


def _layer_sites(wiring: Wiring, layer: Layer) -> Iterator[Site]:
    def site(kind: str, node: str, view: View | None, result: HeadResult | None = None) -> Site:
        name = _name(kind, layer.stack, layer.number)
        return Site(name, kind, node, view, layer.number, layer.stack, result)

    for kind, node in layer.nodes.items():
        yield site(kind, node, _stream_view(wiring, layer, node, _NATURAL.get(kind, STREAM)))
    for prefix, attention in (("", layer.attention), ("cross_", layer.cross)):
        if attention is None:
            continue
        for kind, activation in attention.activations.items():
            yield site(prefix + kind, activation.node, activation.view)
        if attention.projection is None or "z" not in attention.activations:
            continue
        weight, z = weight_of(wiring, attention.projection), attention.activations["z"]
        lead = _lead_of(attention.operand)
        if weight is not None and lead and z.view.axes == ("batch", "pos", "head", "d_head"):
            result = HeadResult(attention.projection, *weight, is_pos_first=lead[0] == "pos")
            yield site(f"{prefix}result", z.node, z.view, result)


def _operated_site(site: Site, program: Program, renamed: Mapping[str, str]) -> Site | None:
    """A site after a surgery: where it was a value that is renamed, it is the other one."""
    result = site.result
    if result is not None:
        if result.projection.name not in program.record_of:
            return None
        result = replace(result, projection=program.record_of[result.projection.name])
    return replace(site, node=renamed.get(site.node, site.node), result=result)


def _operated_layer(
    layer: Layer, program: Program, renamed: Mapping[str, str], there: Collection[str], why: str
) -> Layer:
    """A layer after a surgery: where a kind was a value that is renamed, it is the other one."""

    def attention(own: Attention) -> Attention:
        moved = {
            kind: replace(one, node=renamed.get(one.node, one.node)) for kind, one in own.activations.items()
        }
        gone = {kind: (why,) for kind, one in moved.items() if one.node not in there}
        return replace(
            own,
            core=program.record_of.get(own.core.name, own.core),
            projection=own.projection and program.record_of.get(own.projection.name),
            activations={kind: one for kind, one in moved.items() if kind not in gone},
            missing={**own.missing, **gone},
        )

    nodes = {kind: renamed.get(node, node) for kind, node in layer.nodes.items()}
    return replace(
        layer,
        nodes={kind: node for kind, node in nodes.items() if node in there},
        missing={**layer.missing, **{kind: why for kind, node in nodes.items() if node not in there}},
        attention=attention(layer.attention),
        cross=layer.cross and attention(layer.cross),
        members=layer.members.intersection(there),
    )


def _lead_of(operand: Axes | None) -> tuple[str, ...]:
    """The order of batch and positions in what a projection reads; empty where it is another, or unknown."""
    names = tuple(axis.name for packed in operand or () for axis in packed)
    is_by_head = names[2:] in {("head", "d_head"), ("d_head",)}
    return names[:2] if is_by_head and set(names[:2]) == {"batch", "pos"} else ()


def _stream_view(wiring: Wiring, layer: Layer, node: str, natural: tuple[str, str, str]) -> View | None:
    """The view of a stream's value, wherever batch and positions lie, flattened into one or not."""
    shape, lead = wiring.shape(node), layer.attention.lead
    if shape is None or not layer.has_features_last:
        return None
    lead = lead or _lead_by_sizes(wiring, layer)
    if lead is None:
        return None
    for own in (lead, lead[::-1]):  # attention may turn what it reads (`nn.MultiheadAttention`)
        packed = regroup((*((axis,) for axis in own), (Axis(natural[-1], shape[-1]),)), shape)
        if packed:
            break
    return view_of(packed, natural_axes(wiring, packed or (), natural), wiring.program.sizes)


def _lead_by_sizes(wiring: Wiring, layer: Layer) -> tuple[Axis, ...] | None:
    """The axes in front of a stream's features, known by their sizes; a fixed batch comes first."""
    kinds = ("attn_out", "resid_pre", "resid_post", "mlp_out")
    shape = next((wiring.shape(layer.nodes[kind]) for kind in kinds if kind in layer.nodes), None)
    known = wiring.program.dimensions
    if shape is None or len(shape) != 3 or known.doubt or known.is_unbatched:
        return None
    for dim in (0, 1):
        role, other = ("batch", "pos") if str(shape[dim]) in known.batch else ("pos", "batch")
        if str(shape[dim]) in known.batch | known.positions:
            names = (role, other) if dim == 0 else (other, role)
            return tuple(Axis(name, size) for name, size in zip(names, shape[:2], strict=True))
    return None if known.batch else (Axis("batch", shape[0]), Axis("pos", shape[1]))


def _module_sites(wiring: Wiring, port: ModulePort, path: str) -> Iterator[Site]:
    """A module's output under the path, its first input under `path.input`; several are numbered.

    Of several outputs, the one shaped like the first input has the bare path.
    """
    outputs = () if port.hidden else port.outputs
    primary = outputs
    if len(primary) > 1 and port.inputs:
        shape = wiring.shape(port.inputs[0])
        primary = tuple(name for name in primary if wiring.shape(name) == shape)
    if len(primary) == 1:
        yield Site(path, "module", primary[0], None)
    if port.inputs:
        yield Site(f"{path}.input", "module input", port.inputs[0], None)
    for way, kind, names in (("output", "module", outputs), ("input", "module input", port.inputs)):
        if len(names) > 1:
            for i, node in enumerate(names):
                yield Site(f"{path}.{way}.{i}", kind, node, None)


def _listed(names: Sequence[str]) -> str:
    """Names in short."""
    return ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])


def _no_layer(layer: int, known: Sequence[int]) -> str:
    if known == list(range(len(known))):
        return f"no layer {layer}: this model's layers are {spans(known)}."
    return (
        f"no kinds in layer {layer}: the layers with attention are {spans(known)}. What other layers hold is "
        "there by module path."
    )


def runs_of(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as runs of such that follow each other."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: 0 to 3, 5 and 7 to 9."""
    said = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs_of(numbers)]
    return " and ".join(filter(None, (", ".join(said[:-1]), said[-1]))) if said else "none"


@dataclass(frozen=True, slots=True)
class Located:
    """A place found in a model: the node, the view of its value, and which part is meant."""

    site: Site
    view: View
    part: Mapping[str, Any]

    @property
    def node(self) -> str:
        """The node of the graph whose value it is, or from which it is computed."""
        return self.site.node

    @property
    def result(self) -> HeadResult | None:
        """The way to compute it, where no node holds it."""
        return self.site.result

    @property
    def z_view(self) -> View:
        """The view of the node's own value, where the site is computed from it."""
        assert self.site.view is not None
        return self.site.view

    @property
    def part_axes(self) -> tuple[str, ...]:
        """The axes that are left of the part: those that no single number selects."""
        return tuple(axis for axis in self.view.axes if not isinstance(self.part.get(axis), int))

    def read(self, value: Tensor, sizes: Sequence[int]) -> Tensor:
        """The part that is meant of the node's value, in natural axes."""
        return self.view.read(value, self.part, sizes)

    def mean(
        self,
        value: Tensor,
        sizes: Sequence[int],
        place: Place,
        program: Program,
        inputs: Mapping[str, Tensor],
    ) -> Tensor:
        """The site's mean over batch and positions, at every place of the part that is meant.

        Positions that the attention mask among the `inputs` hides are left out.
        """
        present = self.view.present(value, sizes)
        try:
            shown = mean_of(present, self.view.axes, self.shown(present, program, inputs))
        except ValueError as error:
            raise PatchError(
                f"{place} has no mean over batch and positions: it holds {error}. Give the value itself."
            ) from None
        plain = View(self.view.axes, tuple((axis,) for axis in self.view.axes), {})
        return plain.read(shown, self.part).clone()

    def shown(self, present: Tensor, program: Program, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Return which entries of the whole site, in natural axes, are no padding: see `shown_entries`."""
        is_cross, stack = self.site.kind.startswith("cross_"), self.site.stack or self.site.name
        return shown_entries(
            program, inputs, self.view.axes, present.shape, self.node, stack, is_cross=is_cross
        )

    def is_same_place(self, other: Located) -> bool:
        """True if both are the same part of the same site, whatever name it was found by."""
        return self.site is other.site and dict(self.part) == dict(other.part)

    def expect(self, part: object, present: Tensor, place: Place) -> None:
        """Refuse a part of another shape, dtype or device: nothing is cast, moved or broadcast."""
        if isinstance(part, Tensor):
            made = part.shape, part.dtype, part.device, part.layout
            if made == (present.shape, present.dtype, present.device, present.layout):
                return
        expected = f"shape {tuple(present.shape)}, {present.dtype}, on {present.device}"
        axes = ", ".join(self.part_axes)
        if not isinstance(part, Tensor):
            raise PatchError(
                f"the function for {place} returned {describe(part)}; it has to return a tensor of "
                f"{expected} ({axes})."
            )
        if part.layout is not present.layout:
            raise PatchError(f"the value for {place} is {part.layout}; give a dense tensor, `.to_dense()`.")
        raise PatchError(
            f"the value for {place} has shape {tuple(part.shape)}, {part.dtype}, on {part.device}; the "
            f"place has {expected} ({axes}). Convert it first: nothing is cast, moved or broadcast."
        )

"""The scales of norms: what a norm of the residual stream multiplies with, where a node holds it."""

from __future__ import annotations

from conewise.program.operations import NORMS
from conewise.program.streaming import field_names
from conewise.structure.residual.branches import is_light
from conewise.structure.residual.layers import Layer
from conewise.structure.wiring.wiring import Wiring

SCALES = ("ln1_scale", "ln2_scale")
"""The scales of a layer: of the norm that attention reads, and of that which the MLP reads."""

FINAL_SCALE = "ln_final_scale"
"""The scale of the norm that the unembedding reads."""


def scale_of(wiring: Wiring, layer: Layer, kind: str) -> tuple[str | None, str]:
    """The node of a layer's scale; or None, and why there is none."""
    if kind == "ln1_scale":
        begin, found = layer.nodes.get("resid_pre"), layer.attention.activations.get("q")
        end = None if found is None else found.node
        what = "queries"
    else:
        begin = layer.nodes.get("resid_mid") or layer.nodes.get("resid_pre")
        end, what = layer.nodes.get("mlp_out"), "mlp_out"
    if begin is None or end is None:
        return None, f"its stream or its {what} could not be determined"
    return _between(wiring, begin, end)


def final_scale(wiring: Wiring, last: Layer) -> tuple[str | None, str]:
    """The node of the final norm's scale; or None, and why there is none."""
    names = field_names(wiring.program, "logits") or ()
    begin = last.nodes.get("resid_post")
    if len(names) != 1 or begin is None:
        return None, "this model returns no logits that are made of its stream"
    return _between(wiring, begin, names[0])


def _between(wiring: Wiring, begin: str, end: str) -> tuple[str | None, str]:
    """The first 1/√ of the stream's own numbers on the way from one of its values."""
    cone, everything = wiring.cone(begin), frozenset(wiring.records)
    between = wiring.above(end, everything, frozenset({begin})) & cone
    for name in sorted(between, key=wiring.order.__getitem__):
        record, shape = wiring.records[name], wiring.shape(name)
        above = wiring.above(name, everything, frozenset({begin})) & cone
        if not all(is_light(wiring.records[one]) for one in above):
            break  # behind the norm
        if record.op in NORMS:
            return None, (
                f"its norm is one operation ({record.op}, {name!r}), which never holds its scale. "
                "`run.decompose` and `run.logit_attribution` freeze it; to patch it, write the norm out in "
                "the module"
            )
        if record.op == "rsqrt" and shape and shape[-1] == 1:
            return name, ""
    return None, "no norm of the stream with a 1/√ of its own was found there"

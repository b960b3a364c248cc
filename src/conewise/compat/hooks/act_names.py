"""Names of hooks, from the short forms that people write: `get_act_name("k", 6)`, "k6", "scale4ln1"."""

from __future__ import annotations

import re

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

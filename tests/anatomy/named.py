"""What the named sites of a layer should hold, in hooks on its submodules, and a check of that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conewise.anatomy.sites import Site, SiteTable
from conewise.errors import MissingSiteError
from conewise.program.export import export
from conewise.program.records import SIZES
from conewise.program.walk import Interpreter

KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "pre", "post")


@dataclass(frozen=True)
class Expected:
    """One layer: `there` says for each kind which hooks add up to it, `missing` why the others are not there.

    A hook is `in:path` or `out:path`, relative to `block`; `0.5*` in front scales it. An empty text says that
    the kind is there and that no module holds it.
    """

    block: str
    there: Mapping[str, str]
    missing: Mapping[str, str] = field(default_factory=dict)
    layer: int = 0
    stack: str = ""
    call: int = 0


class Seen:
    """What went into and came out of every module, call by call."""

    def __init__(self, module: nn.Module) -> None:
        self.values: dict[str, list[Tensor]] = {}
        for path, part in module.named_modules():
            part.register_forward_pre_hook(self._enter(path), with_kwargs=True)
            part.register_forward_hook(self._leave(path))

    def _enter(self, path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            value: Any = args[0] if args else next(iter(kwargs.values()), None)
            self.values.setdefault(f"in:{path}", []).append(value)

        return hook

    def _leave(self, path: str) -> Any:
        def hook(_: nn.Module, args: Any, out: Any) -> None:
            self.values.setdefault(f"out:{path}", []).append(out[0] if isinstance(out, tuple | list) else out)

        return hook

    def value(self, written: str, block: str, call: int) -> Tensor:
        """The sum of the hooks in `written`."""
        found: Tensor | None = None
        for term in written.split(" + "):
            scale, _, hook = term.rpartition("*")
            way, _, path = hook.partition(":")
            full = ".".join(filter(None, (block, path)))
            calls = self.values[f"{way}:{full}"]
            value = calls[call if len(calls) > 1 else 0]
            value = value * float(scale) if scale else value
            found = value if found is None else found + value
        assert found is not None
        return found


def check(
    module: nn.Module, given: dict[str, Any], layers: Sequence[Expected], *, norms_values: bool = False
) -> SiteTable:
    """Compare every kind of every layer that is expected; `norms_values`: what is weighed is a norm of v."""
    exported = export(module, (), given)
    table = SiteTable(exported.program)
    values = Interpreter(exported.program).values(exported.signature.bind((), given))
    seen = Seen(module)
    constants = {"use_cache": False} if "use_cache" in exported.signature.example.kwargs else {}
    with torch.no_grad():
        module(**given, **constants)
    for one in layers:
        where = (one.block, one.layer)
        assert set(one.there).isdisjoint(one.missing), where
        for kind in {*KINDS, *one.there, *one.missing}:
            if kind in one.missing:
                with pytest.raises(MissingSiteError) as caught:
                    table.find(kind, one.layer, one.stack)
                assert re.search(one.missing[kind], str(caught.value)), (where, kind, str(caught.value))
            else:
                assert kind in one.there, (where, f"nothing is written about {kind}")
                site = table.find(kind, one.layer, one.stack)
                if one.there[kind]:
                    expected = seen.value(one.there[kind], one.block, one.call)
                    same = torch.allclose if " + " in one.there[kind] else torch.equal
                    assert same(shown(site, values, expected), expected), (where, kind, site.node)
    check_sums(table, values)
    check_heads(table, values, norms_values=norms_values)
    return table


def shown(site: Site, values: Mapping[str, Any], like: Tensor) -> Tensor:
    """The site's value as it is presented, in the shape of what a hook saw."""
    value: Tensor = values[site.node]
    if site.view is not None:
        value = site.view.present(value, values[SIZES])
        if value.ndim == like.ndim and value.shape[:2] == like.shape[:2][::-1] != like.shape[:2]:
            value = value.transpose(0, 1)  # the module has its positions in front of the batch
    assert value.numel() == like.numel(), (site.name, value.shape, like.shape)
    return value.reshape(like.shape)


def check_heads(table: SiteTable, values: Mapping[str, Any], *, norms_values: bool) -> None:
    """Wherever a pattern is named: it is the softmax of the scores, and weighs the values into z."""
    for block in table.model_layers:
        for prefix in ("", *(["cross_"] if block.cross is not None else [])):
            found: dict[str, Tensor] = {}
            for kind in ("attn_scores", "pattern", "v", "z"):
                if block.number in table.layers(prefix + kind, block.stack):
                    site = table.find(prefix + kind, block.number, block.stack)
                    assert site.view is not None
                    shown = site.view.present(values[site.node], values[SIZES]).float()
                    found[kind] = shown.flatten(0, 1) if "fold" in site.view.axes else shown
            if {"attn_scores", "pattern"} <= set(found):
                softmax = found["attn_scores"].softmax(-1)
                assert torch.allclose(softmax, found["pattern"], atol=1e-6), (block.call, prefix)
            if {"pattern", "v", "z"} <= set(found) and not norms_values:
                group = found["z"].shape[2] // found["v"].shape[2]
                each = found["v"].repeat_interleave(group, 2)
                weighed = torch.einsum("bhqk,bkhd->bqhd", found["pattern"], each)
                assert torch.allclose(weighed, found["z"], atol=1e-5), (block.call, prefix)


def check_sums(table: SiteTable, values: Mapping[str, Any]) -> None:
    """What is promised of the sums holds wherever they are named."""
    for block in table.model_layers:
        at = {kind: values[node] for kind, node in block.nodes.items()}
        if "resid_mid" in at:
            assert torch.equal(at["resid_mid"], (at["resid_pre"] + at["attn_out"]).view_as(at["resid_mid"]))
        assert {*KINDS} <= {*block.nodes, *block.missing}, (block.call, "a kind without a word about it")
        assert set(block.nodes).isdisjoint(block.missing)


def without(kinds: Mapping[str, str], *names: str) -> dict[str, str]:
    return {kind: hook for kind, hook in kinds.items() if kind not in names}


def because(reason: str, *kinds: str) -> dict[str, str]:
    return dict.fromkeys(kinds, reason)


def neurons(reason: str) -> dict[str, str]:
    return because(reason, "pre", "post")


def mlp(reason: str) -> dict[str, str]:
    return because(reason, "mlp_out", "pre", "post")

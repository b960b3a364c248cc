"""Every architecture of the zoo: equal to its module bit for bit, and its sites where hooks say."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from conewise.anatomy.sites import SiteTable
from conewise.program.export import Exported, export
from conewise.program.records import SIZES
from conewise.program.walk import Interpreter
from tests.program.marks import marks
from tests.program.zoo import ZOO, Case
from tests.sweeps.execution.kernels import kernels

BOTH = {"gpt2", "llama", "bert", "t5"}
"""Those that are always gone through with every attention, and GPT-2 with every precision.

`make test-architectures` goes through all.
"""
PAIRS = [(name, attention) for name, case in ZOO.items() for attention in case.attention]


def _cost(name: str, attention: str, dtype: torch.dtype = torch.float32) -> list[pytest.MarkDecorator]:
    """Beside one attention in float32, the others say little that is new."""
    is_one = attention == ZOO[name].attention[-1] and dtype == torch.float32 and not marks(name)
    is_gone_through = name in BOTH and (dtype == torch.float32 or name == "gpt2")
    return [] if is_one or is_gone_through else [pytest.mark.slow]


EVERY = [
    pytest.param(
        (name, attention, dtype), marks=_cost(name, attention, dtype), id=f"{name}-{attention}-{dtype}"
    )
    for name, attention in PAIRS
    for dtype in (torch.float32, torch.bfloat16)
]
HOOKED = [
    pytest.param(
        (name, attention, torch.float32),
        marks=_cost(name, attention) or marks(name),
        id=f"{name}-{attention}",
    )
    for name, attention in PAIRS
    if ZOO[name].hooks
]
Traced = tuple[str, nn.Module, Exported]


@pytest.fixture(scope="module")
def traced(request: pytest.FixtureRequest) -> Traced:
    """A module and its program, traced once for all that is asked of them."""
    name, attention, dtype = request.param
    module = ZOO[name].make(attention, dtype)
    return name, module, export(module, (), ZOO[name].example(1, 12, dtype))


def run_module(module: nn.Module, captured: Exported, given: dict[str, Any]) -> Any:
    constants = {"use_cache": False} if "use_cache" in captured.signature.example.kwargs else {}
    with torch.no_grad():
        return module(**given, **constants)


@pytest.mark.parametrize("traced", EVERY, indirect=True)
def test_a_program_equals_its_module_bit_for_bit_at_every_batch_size_and_length(traced: Traced) -> None:
    name, module, captured = traced
    case, dtype = ZOO[name], next(module.parameters()).dtype
    assert captured.fixed == ""
    interpreter = Interpreter(captured.program)
    for batch, length in zip((3, 2, 1, 4), case.lengths, strict=False):
        given = case.example(batch, length, dtype)
        expected = run_module(module, captured, given)
        inputs = captured.signature.bind((), given)
        found = interpreter.output(interpreter.values(inputs))
        assert type(found) is type(expected)
        # The same kernels with the same masks, flags and strides: on another device they round alike, too.
        # One position alone needs no mask, and one that sees less than its window does not either.
        if length > case.options.get("sliding_window", 1):
            ours = kernels(partial(interpreter.values, inputs))
            assert ours == kernels(partial(run_module, module, captured, given))
        for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert torch.equal(one, other)


class Hooks:
    """What passes through the hooked modules during one call; every hook is removed after it."""

    def __init__(self, module: nn.Module, paths: set[str]) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        self.handles = []
        for path in paths:
            part = module.get_submodule(path)
            self.handles.append(part.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            self.handles.append(part.register_forward_hook(self._leave(path)))

    def _enter(self, path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            self.seen.setdefault(f"in:{path}", []).append(value)

        return hook

    def _leave(self, path: str) -> Any:
        def hook(_: nn.Module, args: Any, out: Any) -> None:
            value = out[0] if isinstance(out, tuple) else out
            self.seen.setdefault(f"out:{path}", []).append(value)

        return hook

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def hook_of(case: Case, kind: str, layer: int) -> tuple[str, str]:
    way, _, path = case.hooks[kind].partition(":")
    block = case.block.format(layer)
    return way, f"{block}.{path}" if path else block


def layer_count(table: SiteTable, stack: str) -> int:
    return len([block for block in table.model_layers if block.stack == stack])


@pytest.mark.parametrize("traced", HOOKED, indirect=True)
def test_sites_hold_what_hooks_on_the_module_see(traced: Traced) -> None:
    name, module, captured = traced
    case = ZOO[name]
    table = SiteTable(captured.program)
    interpreter = Interpreter(captured.program)
    stack = "decoder" if name == "t5" else ""
    layers = layer_count(table, stack)
    assert layers == getattr(module.config, "num_hidden_layers", None)

    paths = {hook_of(case, kind, layer)[1] for kind in case.hooks for layer in range(layers)}
    given = case.example(3, case.lengths[-1])
    hooks = Hooks(module, paths)
    run_module(module, captured, given)
    hooks.remove()
    values = interpreter.values(captured.signature.bind((), given))

    for kind in case.hooks:
        for layer in range(layers):
            site = table.find(kind, layer, stack)
            assert site.view is not None, kind
            shown = site.view.present(values[site.node], values[SIZES])
            seen = hooks.seen[":".join(hook_of(case, kind, layer))]
            expected = seen[layer if "{}" not in case.block else 0]
            assert torch.equal(shown.reshape(expected.shape), expected), (kind, layer)
    if case.parallel:
        assert "resid_mid" not in table.kinds


@pytest.mark.parametrize("traced", HOOKED, indirect=True)
def test_a_patched_head_equals_a_hook_on_the_output_projection(traced: Traced) -> None:
    name, module, captured = traced
    case = ZOO[name]
    table = SiteTable(captured.program)
    interpreter = Interpreter(captured.program)
    site = table.find("z", 1, "decoder" if name == "t5" else "")
    assert site.view is not None
    given = case.example(2, case.lengths[0])
    values = interpreter.values(captured.signature.bind((), given))
    head = {"head": 1}
    part = torch.randn_like(site.view.read(values[site.node], head))
    patched = site.view.replace(values[site.node], head, part, values[SIZES])

    calls = 0

    def swap(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        nonlocal calls
        calls += 1
        if "{}" not in case.block and calls != 2:
            return None
        fresh = args[0].clone()
        fresh.view(*fresh.shape[:2], 4, -1)[:, :, 1] = part
        return (fresh, *args[1:])

    projection = module.get_submodule(hook_of(case, "z", 1)[1])
    handle = projection.register_forward_pre_hook(swap)
    expected = run_module(module, captured, given)
    handle.remove()
    found = interpreter.output(
        interpreter.values(captured.signature.bind((), given), patches={site.node: patched})
    )
    base = interpreter.output(values)
    assert not torch.equal(tree_leaves(base)[0], tree_leaves(expected)[0])
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(one, other)

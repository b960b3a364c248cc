"""A path means every call of its module, and `path#k` one of them, as hooks on the module do.

The oracle is torch alone: hooks on modules whose parts are called up to three times, by several paths,
one inside another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import MissingSiteError, NoEffectWarning

WIDTH = 4


class Pair(nn.Module):
    """Returns a tuple: what it makes, and a number beside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x).sin(), (x * x).sum(-1)


class Script(nn.Module):
    """Calls its parts in a random order, each up to three times; a part may be known by several paths."""

    def __init__(self, rng: random.Random, depth: int, shared: list[nn.Module]) -> None:
        super().__init__()
        kinds: list[Callable[[], nn.Module]] = [
            lambda: nn.Linear(WIDTH, WIDTH),
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            lambda: nn.LayerNorm(WIDTH),
            nn.Dropout,
            nn.Tanh,
            Pair,
        ]
        parts: list[nn.Module] = []
        for number in range(rng.randint(1, 3)):
            if depth and rng.random() < 0.5:
                part: nn.Module = Script(rng, depth - 1, shared)
            elif shared and rng.random() < 0.3:
                part = rng.choice(shared)
            else:
                part = rng.choice(kinds)()
            shared.append(part)
            parts.append(part)
            setattr(self, f"p{number}", part)
        self.rows = nn.ModuleList([rng.choice(parts) for _ in range(2)]) if rng.random() < 0.3 else None
        names = [f"p{number}" for number in range(len(parts))]
        calls = [name for name in names for _ in range(rng.randint(1, 3))]
        rng.shuffle(calls)
        kept = [rng.random() < 0.9 for _ in calls]
        chained = [rng.random() < 0.5 for _ in calls]
        self.steps = list(zip(calls, kept, chained, strict=True))
        self.start = rng.randint(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        total, last = x * 0.5, x
        for number, (name, is_kept, is_chained) in enumerate(self.steps):
            made = getattr(self, name)(last if is_chained else x * (1 + 0.3 * number))
            made = made[0] + 0.1 * made[1][..., None] if isinstance(made, tuple) else made
            if is_kept:
                total, last = total + made * (0.3 + 0.2 * number), made
        for part in self.rows[self.start :] if self.rows is not None else ():
            made = part(total)
            total = total + (made[0] if isinstance(made, tuple) else made)
        return total.tanh()


def first(output: Any) -> Tensor:
    """The value that a module's path means, of what it returns."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


class Hooked:
    """A module with a hook on one part: what each call returned, and what is put there instead."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module, self.path = module, path

    def run(self, x: Tensor, put: Callable[[int, Tensor], Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        seen: list[Tensor] = []

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            seen.append(first(output))
            new = put(len(seen) - 1, first(output))
            return None if new is None else (new, *output[1:]) if isinstance(output, tuple) else new

        handle = self.module.get_submodule(self.path).register_forward_hook(hook)
        try:
            return self.module(x), seen
        finally:
            handle.remove()


def measured(y: Tensor) -> Tensor:
    return (y * torch.tensor([1.0, -2.0, 0.5, 1.5])).sum(-1)


def changed(value: Tensor) -> Tensor:
    return value * 1.5 + 0.1


def replacing(given: Any, only: int | None, theirs: list[Tensor]) -> Callable[[int, Tensor], Tensor | None]:
    """What a hook puts there: zeros, a function of the value, or what the other run returned at that call."""

    def put(call: int, value: Tensor) -> Tensor | None:
        if only not in {None, call}:
            return None
        return value * 0 if isinstance(given, str) else changed(value) if given is changed else theirs[call]

    return put


def check_module(seed: int) -> tuple[int, int]:
    """How many patches, values and gradients were compared, and how many names were refused."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    module = Script(rng, 2, []).eval()
    x, other = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    model = cw.capture(module, x)
    base, source = model.run(x), model.run(other)
    names: dict[str, tuple[Hooked, int | None, list[Tensor]]] = {}
    refused = compared = 0
    for path, part in module.named_modules(remove_duplicate=False):
        if not path or isinstance(part, nn.ModuleList):
            continue
        hooked = Hooked(module, path)
        with torch.no_grad():
            own, theirs = (hooked.run(one, lambda *_: None)[1] for one in (x, other))
        for name, only in [(path, None), *((f"{path}#{k}", k) for k in range(len(own)))]:
            try:
                with base.fork() as world:
                    world.patch(name, "zero")
                names[name] = hooked, only, theirs
            except MissingSiteError:
                refused += 1
                continue
            if only is not None:
                torch.testing.assert_close(base[name], own[only], rtol=1e-4, atol=1e-5)
                outputs, mine = hooked.run(x.clone().requires_grad_(), lambda _, value: value * 1)
                gradient = torch.autograd.grad(measured(outputs).sum(), mine[only])[0]
                ours = base.gradients(measured, [name])[name]
                torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-5)
                compared += 2
    for given in ("zero", source, changed):
        expected: dict[str, Tensor] = {}
        for name, (hooked, only, theirs) in names.items():
            with torch.no_grad():
                expected[name], _ = hooked.run(x, replacing(given, only, theirs))
        for evaluator in ("serial", "wavefront") if names else ():
            sweep = model.sweep(list(names), base=base, source=given, metric=measured)
            found = sweep.run(evaluator=evaluator).per_prompt[0]
            for row, name in enumerate(names):
                torch.testing.assert_close(
                    found[row].float(),
                    measured(expected[name]),
                    rtol=1e-4,
                    atol=1e-5,
                    msg=f"{name} {evaluator}",
                )
                compared += 1
        for name, outputs in expected.items():
            with base.fork() as world:
                world.patch(name, given)
                torch.testing.assert_close(world.outputs, outputs, rtol=1e-4, atol=1e-5)
            compared += 1
    return compared, refused


@pytest.mark.filterwarnings(f"ignore::{NoEffectWarning.__module__}.{NoEffectWarning.__name__}")
@pytest.mark.parametrize("seed", [0, 3, 7])
def test_paths_and_their_calls_are_patched_read_and_differentiated_as_hooks_do(seed: int) -> None:
    compared, _ = check_module(seed)
    assert compared > 0

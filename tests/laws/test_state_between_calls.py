"""State that changes between any two calls: every answer is that of plain hooks on the module as it is now.

Or it is refused, for a reason that is in force. And no answer depends on what was asked before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import GraphChangedError, ModuleChangedError, SweepError, WeightsChangedError
from conewise.model import Model

REFUSALS = (GraphChangedError, ModuleChangedError, WeightsChangedError)
WIDTH = 6
SITES = ["embed", "blocks.0", "blocks.0.act", "blocks.1.up", "blocks.1"]


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.is_on = config, True
        self.up, self.low, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act, self.drop = nn.GELU(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x) + (self.low(x) if self.is_on else 0)
        found: Tensor = self.drop(self.down(self.act(x) * self.config["scale"]))
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = {"scale": 1.5}
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(config) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def _kept(seen: list[Tensor], value: Tensor) -> Tensor:
    """The first value that came here."""
    seen.append(value)
    return seen[0]


def metric(out: Tensor) -> Tensor:
    return out[:, 0] - out[:, 2]


class Scene:
    """A module, its model, and changes in force, each with what undoes it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.module: Any = Net().eval()
        self.model = cw.capture(self.module, torch.randn(2, WIDTH))
        self.undo: dict[str, Callable[[], object]] = {}
        self.surgery: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {}
        self.kept: list[tuple[Tensor, Tensor, cw.Run, cw.Sweep]] = []
        self.has_written = False

    def change(self) -> None:
        """Make a change, or undo one."""
        if self.undo and self.random.random() < 0.55:
            self.undo.pop(self.random.choice(list(self.undo)))()
            return
        name = self.random.choice(list(CHANGES))
        if name not in self.undo:
            block = self.module.blocks[self.random.randrange(2)]
            self.undo[name] = CHANGES[name](self, block)
        self.has_written |= name in {"written", "data"}

    def operate(self, is_graft: bool) -> Callable[[], object]:
        """Put a function behind a site, as its rule or as a graft."""
        site = self.random.choice([site for site in SITES if site not in self.surgery])
        graph, node = self.model.graph, self.model.locate(site).node
        if is_graft:
            graft = graph.graft_after(node, cw.chain(lambda value: value * 2 + 1))
            self.surgery[site] = True, lambda value: value * 2 + 1
        else:
            old = graph.rule(node)
            graph.redefine(node, lambda *inputs: old(*inputs) * -1.5)
            self.surgery[site] = False, lambda value: value * -1.5

        def undo() -> None:
            graph.remove(graft) if is_graft else graph.redefine(node, old)
            del self.surgery[site]

        return undo

    # -- the oracle: hooks on the module, which share no code with what is tested ------------------

    @contextmanager
    def hooked(self, patches: dict[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
        def changed(site: str, value: Tensor) -> Tensor:
            is_graft, change = self.surgery.get(site, (False, lambda value: value))
            value = value if is_graft else change(value)
            value = patches[site](value) if site in patches else value
            return change(value) if is_graft else value

        handles = [
            self.module.get_submodule(site).register_forward_hook(
                lambda _m, _i, out, site=site: changed(site, out)
            )
            for site in SITES
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def outputs(self, x: Tensor, patches: dict[str, Callable[[Tensor], Tensor]]) -> Tensor:
        with self.hooked(patches):
            found: Tensor = self.module(x)
        return found

    def swept(self, x: Tensor, y: Tensor) -> Tensor:
        values = []
        for site in SITES:
            seen: list[Tensor] = []
            with torch.no_grad():
                self.outputs(y, {site: partial(_kept, seen)})
                values.append(metric(self.outputs(x, {site: partial(_kept, seen)})).mean())
        return torch.stack(values).double()

    def gradient(self, x: Tensor, site: str) -> Tensor:
        seen: list[Tensor] = []

        def keep(value: Tensor) -> Tensor:
            seen.append(value.detach().requires_grad_())
            return seen[0]

        (found,) = torch.autograd.grad(metric(self.outputs(x, {site: keep})).sum(), seen or [x])
        return found

    # -- jobs ----------------------------------------------------------------------------------------

    def job(self) -> tuple[Tensor, Callable[[], Tensor]]:
        """An answer, and what the oracle says."""
        x, y = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
        kind, site = self.random.choice(JOBS), self.random.choice(SITES)
        if kind.startswith("old") and self.kept:
            x, y, run, sweep = self.random.choice(self.kept)
        else:
            run = self.model.run(x)
            given = ({"x": x}, {"x": y}) if kind != "runs" else (run, self.model.run(y))
            sweep = self.model.sweep(SITES, base=given[0], source=given[1], metric=metric)
            self.kept.append((x, y, run, sweep))
        if kind == "run":
            return run.outputs, lambda: self.outputs(x, {}).detach()
        if kind.endswith("fork"):
            with run.fork() as world:
                world.patch(site, "zero")
                found = world.outputs
            return found, lambda: self.outputs(x, {site: torch.zeros_like}).detach()
        if kind == "gradients":
            (found,) = run.gradients(metric, [site]).values()
            return found, lambda: self.gradient(x, site)
        if kind == "verified":
            assert sweep.run().verify(3).ok
        evaluator = kind if kind in {"serial", "wavefront"} else "auto"
        return sweep.run(evaluator=evaluator).values, lambda: self.swept(x, y)


JOBS = ["run", "fork", "sweep", "runs", "serial", "wavefront", "gradients", "verified", "old fork", "old"]


def _set(holder: Any, name: str, value: Any) -> Callable[[], object]:
    old = getattr(holder, name)
    setattr(holder, name, value)
    return lambda: setattr(holder, name, old)


def _scaled(tensor: Tensor, is_counted: bool) -> Callable[[], object]:
    target = tensor.detach() if is_counted else tensor.data
    target.mul_(2)
    return lambda: target.div_(2)


def _other_scale(block: Any) -> Callable[[], object]:
    block.config["scale"] = 0.5
    return lambda: block.config.update(scale=1.5)


def _noted(block: Any) -> Callable[[], object]:
    block.note = "read by nobody"
    return lambda: delattr(block, "note")


def _forward(block: Any) -> Callable[[], object]:
    vars(block.down)["forward"] = torch.neg
    return lambda: vars(block.down).pop("forward")


CHANGES: dict[str, Callable[[Scene, Any], Callable[[], object]]] = {
    "hook": lambda _, block: block.down.register_forward_hook(lambda _m, _i, out: out * 2).remove,
    "pre-hook": lambda _, block: block.register_forward_pre_hook(lambda _m, args: (args[0] + 1,)).remove,
    "forward": lambda _, block: _forward(block),
    "config": lambda _, block: _other_scale(block),
    "adapter": lambda _, block: _set(block, "is_on", False),
    "submodule": lambda _, block: _set(block, "act", nn.ReLU()),
    "training": lambda scene, _: (scene.module.train(), scene.module.eval)[1],
    "written": lambda _, block: _scaled(block.down.weight, is_counted=True),
    "data": lambda _, block: _scaled(block.up.weight, is_counted=False),
    "replaced": lambda _, block: _set(block.down, "bias", nn.Parameter(block.down.bias.detach() + 1)),
    "rule": lambda scene, _: scene.operate(is_graft=False),
    "graft": lambda scene, _: scene.operate(is_graft=True),
    "note": lambda _, block: _noted(block),
}


def play(seed: int, steps: int) -> tuple[int, int]:
    """How many answers were compared, and how many were refused."""
    scene, answers, refused = Scene(seed), 0, 0
    for _ in range(steps):
        scene.change()
        try:
            found, expected = scene.job()
        except REFUSALS:
            assert scene.undo.keys() - {"note"} or scene.has_written, "refused without a reason"
            refused += 1
            continue
        except SweepError as error:
            if not scene.surgery or "the graph was changed" not in str(error):
                raise
            refused += 1
            continue
        torch.testing.assert_close(found.double(), expected().double(), rtol=1e-4, atol=1e-5)
        answers += 1
    return answers, refused


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_is_that_of_hooks_on_the_module_as_it_is_now_or_is_refused(seed: int) -> None:
    answers, refused = play(seed, 12)
    assert answers
    assert refused


# -- what was asked before -------------------------------------------------------------------------

CLEAN = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"


@cache
def tiny() -> Model:
    return cw.capture(cw.load("tiny"))


def sweep_of(sites: Any) -> cw.Sweep:
    return tiny().sweep(sites, base=CLEAN, source=OTHER, metric=cw.logit_diff(5, 6))


HEADS = cw.sites("z", layer=1, head=":")
BEFORE: dict[str, Callable[[cw.Sweep], object]] = {
    "nothing": lambda _: None,
    "a run": lambda sweep: sweep.run(),
    "a check": lambda sweep: sweep.run().verify(1),
    "a plan": lambda sweep: sweep.plan(),
    "a reading": lambda sweep: (sweep.batch(0).base.logits, sweep.batch(0).source.logits),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("sites", [HEADS, ["m0->logits", "a0.h1->m2"]], ids=["heads", "edges"])
def test_the_bits_of_a_sweep_over_inputs_do_not_depend_on_what_was_asked_before(sites: Any) -> None:
    expected = sweep_of(sites).run()
    for name, ask in BEFORE.items():
        sweep = sweep_of(sites)
        ask(sweep)
        assert sweep.run().equals(expected), name


@pytest.mark.parametrize("method", ["atp", "ig"])
def test_the_bits_of_an_attribution_do_not_depend_on_what_was_asked_before(method: str) -> None:
    def asked() -> Tensor:
        return (
            tiny()
            .attribute(
                HEADS,
                base=[[CLEAN, OTHER]],
                source=[[OTHER, CLEAN]],
                metric=cw.logit_diff(5, 6),
                method=method,
            )
            .run()
            .per_prompt
        )

    first = asked()
    sweep_of(HEADS).run()
    assert torch.equal(asked(), first)

"""Path patching: senders, receivers, and what lies between them, against full forwards with plain hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import EdgeError
from tests.circuits.edge_models import inputs_of, module_of, run_of
from tests.circuits.hook_oracle import HookOracle
from tests.sweeps.test_edges import METRIC, difference

HEADS = 4


def model_of(name: str) -> Any:
    return run_of(name, 0).model


class PathOracle:
    """Path patching on a GPT-2 in two hooked forwards: one finds the receiver's stream, one uses it."""

    def __init__(self, module: Any, base: dict[str, Tensor], source: dict[str, Tensor]) -> None:
        self.module, self.base, self.oracle = module, base, HookOracle(module)
        self.blocks = module.transformer.h
        self.wide = module.config.n_embd // module.config.n_head
        self.z = {"base": self._seen(base), "source": self._seen(source)}

    def value(self, sender: str, receivers: list[str], freeze: str) -> Tensor:
        """The metric where these receivers see what the sender makes of their streams."""
        seen = self._streams(sender, freeze)
        world = self.oracle.world(self.base, {}, streams={one: seen[one] for one in receivers})
        return difference(world.logits)

    def _seen(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        hooks = []
        for at, block in enumerate(self.blocks):
            hooks.append(_before(block.attn.c_proj, lambda x, at=at: found.update({f"z{at}": x})))  # type: ignore[misc]
            hooks.append(_behind(block.mlp, lambda y, at=at: found.update({f"m{at}": y})))  # type: ignore[misc]
        hooks.append(_before(self.blocks[0].ln_1, lambda x: found.update({"input": x})))
        with torch.no_grad():
            self.module(**inputs, use_cache=False)
        for hook in hooks:
            hook.remove()
        return found

    @torch.no_grad()
    def _streams(self, sender: str, freeze: str) -> dict[str, Tensor]:
        """The stream of every reader, with the sender replaced and others frozen."""
        base, source = self.z["base"], self.z["source"]
        hooks = []
        for at, block in enumerate(self.blocks):
            kept = base[f"z{at}"].clone()
            is_sent = sender.startswith(f"a{at}.h")
            head = slice(0, 0)
            if is_sent:
                number = int(sender.split("h")[1])
                head = slice(number * self.wide, (number + 1) * self.wide)

            def attend(x: Tensor, kept: Tensor = kept, head: slice = head, at: int = at) -> Tensor:
                fresh = x.clone() if freeze == "none" else kept.clone()
                fresh[..., head] = source[f"z{at}"][..., head]
                return fresh

            hooks.append(_before(block.attn.c_proj, attend))
            if sender == f"m{at}":
                hooks.append(_behind(block.mlp, lambda _, at=at: source[f"m{at}"]))  # type: ignore[misc]
            elif freeze == "all":
                hooks.append(_behind(block.mlp, lambda _, at=at: base[f"m{at}"]))  # type: ignore[misc]
        if sender == "input":
            # The stream as it enters is the block's own input.
            hooks.append(_before(self.blocks[0], lambda _: source["input"]))
        try:
            return dict(self.oracle.forward(**self.base).streams)
        finally:
            for hook in hooks:
                hook.remove()


def _before(module: nn.Module, action: Callable[[Tensor], Tensor | None]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
        changed = action(args[0])
        return None if changed is None else (changed, *args[1:])

    return module.register_forward_pre_hook(hook)


def _behind(module: nn.Module, action: Callable[[Tensor], Tensor | None]) -> Any:
    return module.register_forward_hook(lambda _, __, output: action(output))


SENDERS = ["input", "a0.h1", "m0", "a1.h0"]
RECEIVERS = ["a1.h2<q>", "a1.h3<v>", "m1", "logits"]


@pytest.mark.parametrize("freeze", ["all", "attention", "none"])
def test_every_pair_is_what_two_hooked_forwards_say(freeze: str) -> None:
    model = model_of("gpt2")
    oracle = PathOracle(module_of("gpt2"), inputs_of("gpt2", 0), inputs_of("gpt2", 1))
    sweep = model.paths(
        SENDERS, RECEIVERS, freeze=freeze, base=run_of("gpt2", 0), source=run_of("gpt2", 1), metric=METRIC
    )
    result = sweep.run()
    assert len(result.cells) == 3 + 3 + 4 + 4
    for cell, values in zip(result.cells, result.per_prompt[0], strict=True):
        sender, _, rest = cell.name.partition("->")
        expected = oracle.value(sender, [rest.partition(" via")[0]], freeze)
        torch.testing.assert_close(values, expected, rtol=0, atol=5e-5)
    serial = sweep.run(evaluator="serial")
    torch.testing.assert_close(serial.values, result.values, rtol=0, atol=5e-5)
    assert result.ledger.node_evaluations == result.plan.node_evaluations


def test_what_is_live_matters() -> None:
    """The three ways differ where MLPs or heads stand between."""
    model, values = model_of("gpt2"), []
    for freeze in ("all", "attention", "none"):
        sweep = model.paths(
            "a0.h1", "logits", freeze=freeze, base=run_of("gpt2", 0), source=run_of("gpt2", 1), metric=METRIC
        )
        values.append(float(sweep.run().values[0]))
    assert len({round(value, 4) for value in values}) == 3


def test_receivers_that_are_patched_together() -> None:
    model = model_of("gpt2")
    oracle = PathOracle(module_of("gpt2"), inputs_of("gpt2", 0), inputs_of("gpt2", 1))
    together = ["a1.h0<q>", "a1.h2<k>", "logits"]
    sweep = model.paths(
        ["a0.h*", "m0"],
        [together],
        freeze="attention",
        base=inputs_of("gpt2", 0),
        source=inputs_of("gpt2", 1),
        metric=METRIC,
    )
    result = sweep.run()
    assert len(result.cells) == HEADS + 1
    for cell, values in zip(result.cells, result.per_prompt[0], strict=True):
        expected = oracle.value(cell.name.partition("->")[0], together, "attention")
        torch.testing.assert_close(values, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma2"])
def test_the_direct_path_is_an_edge(name: str) -> None:
    model, base, source = model_of(name), run_of(name, 0), run_of(name, 1)
    paths = model.paths("m0", ["m1", "logits"], base=base, source=source, metric=METRIC).run()
    names = ["m0->m1", "m0->logits"]
    edges = model.sweep(model.edges()[names], base=base, source=source, metric=METRIC).run()
    assert [cell.name for cell in paths.cells] == names
    torch.testing.assert_close(paths.values, edges.values, rtol=0, atol=1e-6)


def test_a_plan_of_paths_is_a_value() -> None:
    model, base, source = model_of("gpt2"), run_of("gpt2", 0), run_of("gpt2", 1)
    sweep = model.paths("a0.*", "a1.h1", freeze="none", base=base, source=source, metric=METRIC)
    plan = cw.SweepPlan.from_json(sweep.plan().to_json())
    assert plan == sweep.plan()
    assert plan.run(model).equals(sweep.run())
    assert [cell.name for cell in sweep.cells][:2] == ["a0.h0->a1.h1<q> via all", "a0.h1->a1.h1<q> via all"]


def test_what_is_no_path_is_refused() -> None:
    model = model_of("gpt2")
    given: dict[str, Any] = {"base": run_of("gpt2", 0), "source": run_of("gpt2", 1), "metric": METRIC}
    with pytest.raises(EdgeError, match="freeze='mlp' is none of"):
        model.paths("a0.h1", "logits", freeze="mlp", **given)
    with pytest.raises(EdgeError, match=r"no sender 'a0.h9'.*Nearest"):
        model.paths("a0.h9", "logits", **given)
    with pytest.raises(EdgeError, match=r"no receiver 'a9.h1<q>'"):
        model.paths("a0.h1", "a9.h1<q>", **given)
    with pytest.raises(EdgeError, match="no path"):
        model.paths("m1", "m0", **given)
    with pytest.raises(EdgeError, match="not by 3"):
        model.paths([3], "m0", **given)
    with pytest.raises(EdgeError, match=r"senders are a name such as 'a0.h1'.*, or a list, not None"):
        model.paths(None, "m0", **given)
    with pytest.raises(EdgeError, match=r"receivers are a name .* not 3"):
        model.paths("a0.h1", [3], **given)
    with pytest.raises(EdgeError, match="no receivers"):
        model.paths("a0.h1", [[]], **given)
    sweep = model.paths("a0.h1", "logits", freeze="none", **{**given, "source": "zero"})
    with pytest.raises(EdgeError, match="from a source run"):
        sweep.run()

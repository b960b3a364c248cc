"""Gradients through a captured model are those of the module itself, and those of finite differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.anatomy.selectors import SelectorLike
from conewise.errors import GradientError, MetricError, MissingSiteError
from conewise.program.walk import output_names
from tests.circuits.edge_models import inputs_of, model_of, module_of, run_of

OUT_PROJECTIONS = {"gpt2": "attn.c_proj", "llama": "self_attn.o_proj", "bert": "attention.output.dense"}
MLPS = {"gpt2": "mlp.c_proj", "llama": "mlp.down_proj", "bert": "output.dense"}


def squares(outputs: Any) -> Tensor:
    """A metric that every logit of the last position matters to."""
    found: Tensor = outputs.logits[:, -1].square().sum(-1) / 100
    return found


def module_gradients(name: str, metric: Callable[[Any], Tensor]) -> dict[tuple[str, int], Tensor]:
    """PyTorch's own gradients by what output projections read (z, flat) and what MLPs put out."""
    module, seen = module_of(name), dict[tuple[str, int], Tensor]()
    handles = []

    def noting(key: tuple[str, int]) -> Callable[..., None]:
        def hook(*given: Any) -> None:
            seen[key] = given[1][0] if key[0] == "z" else given[2]

        return hook

    for path, part in module.named_modules():
        layer = next((int(piece) for piece in path.split(".") if piece.isdigit()), -1)
        if path.endswith(OUT_PROJECTIONS[name]):
            handles.append(part.register_forward_pre_hook(noting(("z", layer))))
        elif path.endswith(MLPS[name]) and "attention" not in path:
            handles.append(part.register_forward_hook(noting(("mlp_out", layer))))
    try:
        total = metric(module(**inputs_of(name, 1), use_cache=False)).sum()
    finally:
        for handle in handles:
            handle.remove()
    found = torch.autograd.grad(total, list(seen.values()))
    return dict(zip(seen, found, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_gradients_are_those_of_the_module_with_hooks(name: str) -> None:
    expected, run = module_gradients(name, squares), run_of(name, 1)
    found = run.gradients(squares, cw.sites("z", layer=":") + cw.sites("mlp_out", layer=":"))
    assert len(expected) == len(found) == 4
    for kind, layer in expected:
        gradient = found[kind, layer]
        assert gradient.shape == run[kind, layer].shape
        flat = gradient.flatten(2) if kind == "z" else gradient
        torch.testing.assert_close(flat, expected[kind, layer], rtol=1e-4, atol=1e-5)
    assert not any(one.requires_grad for one in found.values())
    assert all(weight.grad is None for weight in module_of(name).parameters())


@pytest.mark.parametrize("kind", ["resid_pre", "q", "k", "v", "attn_scores", "pattern", "result", "post"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_gradients_are_finite_differences(name: str, kind: str) -> None:
    run, place = run_of(name, 1, torch.float64), cw.site(kind, layer=0)
    gradient = run.gradients(squares, place)[place]
    generator = torch.Generator().manual_seed(0)
    way = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
    way[run[place].isinf()] = 0.0  # what a mask hides
    ends = []
    for step in (1e-5, -1e-5):
        with run.fork() as world:
            world.patch(place, run[place] + step * way)
            ends.append(squares(world.outputs))
    slope = (ends[0] - ends[1]) / 2e-5
    torch.testing.assert_close((gradient * way).flatten(1).sum(1), slope, rtol=1e-6, atol=1e-8)


def test_parts_of_sites_have_parts_of_gradients_and_kinds_of_metrics_agree() -> None:
    run = run_of("llama", 1)
    whole = run.gradients(cw.logit(3), ("z", 1))["z", 1]
    heads = run.gradients(
        lambda outputs: outputs.logits[:, -1, 3], cw.sites("z", layer=":", head=":", pos=-1)
    )
    for head in range(whole.shape[2]):
        place = cw.site("z", layer=1, head=head, pos=whole.shape[1] - 1)
        torch.testing.assert_close(heads[place], whole[:, -1, head])
    assert torch.equal(heads.numbers, run.logits[:, -1, 3])


def test_one_number_for_all_prompts_has_its_own_gradient_and_not_a_multiple_of_it() -> None:
    run = run_of("gpt2", 1)
    each = run.gradients(squares, ("z", 0))["z", 0]
    mean = run.gradients(lambda outputs: squares(outputs).mean(), ("z", 0))["z", 0]
    torch.testing.assert_close(mean, each / 2)


def test_only_what_lies_behind_the_sites_is_computed_again() -> None:
    run = run_of("gpt2", 1)
    model, tape = run.model, run._tape()
    node, targets = model.locate(("mlp_out", 1)).node, output_names(model.program)
    behind = model.behind([node], targets)
    graph = model.graph
    cone = set(graph.names(graph.table.cone(graph.numbers([node]))))
    assert set(behind) <= cone
    assert len(behind) < 12 < len(model.program.records)
    assert set(tape.record([node], targets)) <= {node, *behind}


def test_a_patched_run_has_the_gradients_of_its_own_values() -> None:
    base, source = run_of("gpt2", 1), run_of("gpt2", 2)
    with base.fork() as world:
        world.patch(cw.site("z", layer=1, head=1), source)
        world.patch(("mlp_out", 1), lambda value: 2 * value)
        found = world.gradients(squares, cw.sites("resid_pre", layer=":"))
        seen = world.gradients(squares, ("z", 1))
        expected = squares(world.outputs)
    assert torch.equal(found.numbers, expected)
    assert float(found["resid_pre", 0].abs().max()) > 0
    assert seen["z", 1].shape == base["z", 1].shape
    plain = base.gradients(squares, cw.sites("resid_pre", layer=":"))
    assert not torch.allclose(plain["resid_pre", 1], found["resid_pre", 1])


def test_a_patch_in_the_way_is_differentiated_as_it_stands() -> None:
    run, place = run_of("gpt2", 1, torch.float64), cw.site("resid_pre", layer=0)

    def patched(world: Any) -> None:
        world.patch(cw.site("z", layer=0, head=1), "zero")
        world.patch(("mlp_out", 1), lambda value: value.square())

    with run.fork() as world:
        patched(world)
        gradient = world.gradients(squares, place)[place]
    way = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = []
    for step in (1e-6, -1e-6):
        with run.fork() as world:
            world.patch(place, run[place] + step * way)
            patched(world)
            ends.append(squares(world.outputs))
    torch.testing.assert_close(
        (gradient * way).flatten(1).sum(1), (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-8
    )


def test_what_the_metric_does_not_depend_on_has_a_gradient_of_zeros() -> None:
    run = run_of("gpt2", 1)
    found = run.gradients(cw.logit(3), cw.site("resid_post", layer=1, pos=0))
    (gradient,) = found.values()
    assert not gradient.any()


def ranks(outputs: Any) -> Tensor:
    """A metric that is constant almost everywhere."""
    found: Tensor = outputs.logits[:, -1].argmax(-1).float()
    return found


def test_what_cannot_be_differentiated_is_named() -> None:
    run = run_of("gpt2", 1)
    with pytest.raises(GradientError, match=r"'input_ids' holds torch\.int64"):
        run.gradients(squares, "input_ids")
    with pytest.raises(GradientError, match="metric 'ranks' has no gradient"):
        run.gradients(ranks, ("z", 0))
    with pytest.raises(GradientError, match=r"'metric' cannot be differentiated: .*numpy"):
        run.gradients(lambda outputs: float(outputs.logits[0, -1].numpy()[0]), ("z", 0))
    with pytest.raises(MetricError, match="made for 3 prompts"):
        run.gradients(cw.logit([1, 2, 3]), ("z", 0))
    with pytest.raises(MissingSiteError, match="no gradient by z"):
        run.gradients(squares, ("z", 0))["z", 1]
    with pytest.raises(MissingSiteError, match="is an edge"):
        run.gradients(squares, model_of("gpt2").edges()[:2])


class Stepping(nn.Module):
    """A module with an operation that torch does not differentiate, and one that a gradient ends at."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.step = nn.Linear(3, 3), nn.Linear(3, 2), step

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.step(self.first(x)))
        return found


@pytest.mark.parametrize(
    "step", [lambda x: torch.igamma(x.abs(), torch.ones_like(x)), lambda x: torch.heaviside(x, x.sign())]
)
def test_an_operation_without_a_derivative_is_named(step: Callable[[Tensor], Tensor]) -> None:
    model = cw.capture(Stepping(step), torch.ones(2, 3))
    run = model.run(torch.ones(2, 3))
    assert run.gradients(lambda out: out.sum(-1), "second.input")["second.input"].shape == (2, 3)
    with pytest.raises(GradientError, match=r"igamma|heaviside"):
        run.gradients(lambda out: out.sum(-1), "first")


def test_a_detached_value_is_a_function_of_what_lies_in_front_of_it() -> None:
    """The program computes the same with it and without; so do sweeps."""
    run = cw.capture(Stepping(lambda x: x.detach()), torch.ones(2, 3)).run(torch.ones(2, 3))
    assert run.gradients(lambda out: out.sum(-1), "first")["first"].all()


@contextmanager
def switched_off() -> Iterator[None]:
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "switched off": switched_off,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_computed_where_the_caller_has_switched_them_off(mode: str) -> None:
    """In that mode tokens, runs and references are made too; afterwards it is as it was."""
    model, tokens = model_of("gpt2"), inputs_of("gpt2", 1)["input_ids"]
    sites, edges = cw.sites("z", layer=":", head=":"), model.edges()
    asked: list[tuple[SelectorLike, str, dict[str, Any]]] = [
        *((sites, method, {}) for method in ("atp", "atp*", "relp")),
        *((edges, method, {}) for method in ("eap", "relp")),
        (sites, "ig", {"steps": 2}),
        (sites, "hybrid", {"top": 2, "n": 2}),
        *((edges, method, {"steps": 2}) for method in ("eap-ig", "eap-ig-activations")),
    ]

    def everything() -> list[Tensor]:
        base, source = {"input_ids": tokens.clone()}, {"input_ids": tokens.flip(0).clone()}
        run, answers = model.run(**base), torch.tensor([3, 4])
        found = list(run.gradients(squares, cw.sites("z", layer=":")).values())
        found += run.gradients(cw.kl_to(model.run(**source)), cw.sites("resid_pre", layer=":")).values()
        metric = cw.logit_diff(answers, answers + 1)
        for chosen, method, more in asked:
            found.append(
                model.attribute(chosen, base=base, source=source, metric=metric, method=method, **more)
                .run()
                .effect
            )
        found.append(model.attribute(sites, base=run, source="zero", metric=squares).run().effect)
        run.backward_cost(metric, cw.sites("z", layer=":"))
        with pytest.raises(GradientError, match="has no gradient"):
            run.gradients(lambda out: out.logits[:, -1].argmax(-1).float(), cw.sites("z", layer=":"))
        return found

    with MODES[mode]():
        before = modes()
        found = everything()
        assert modes() == before
        weight = torch.ones(())
    assert modes() == (True, False)
    for one, expected in zip(found, everything(), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)
    if mode == "inference":
        with pytest.raises(GradientError, match="metric' cannot be differentiated: Inference tensors cannot"):
            model.run(input_ids=tokens).gradients(lambda out: weight * squares(out), cw.sites("z", layer=":"))

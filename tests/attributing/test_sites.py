"""Effects of patches at sites by gradients: against hooks on the module, exact sweeps, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import GradientError, MissingSiteError, SweepError
from tests.circuits.edge_models import inputs_of, model_of, module_of, run_of
from tests.ground_truth.stack import Stack
from tests.runs.test_gradients import OUT_PROJECTIONS, squares

HEADS = cw.sites("z", layer=":", head=":")


@contextmanager
def projections(name: str, hook: Any) -> Iterator[None]:
    """While it lasts, `hook(layer, z)` sees, and may replace, what each output projection reads."""
    handles = []
    for path, part in module_of(name).named_modules():
        if path.endswith(OUT_PROJECTIONS[name]):
            layer = next(int(piece) for piece in path.split(".") if piece.isdigit())

            def before(_: nn.Module, args: tuple[Tensor], layer: int = layer) -> tuple[Tensor]:
                found = hook(layer, args[0])
                return args if found is None else (found,)

            handles.append(part.register_forward_pre_hook(before))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def forward(name: str, seed: int) -> Tensor:
    return squares(module_of(name)(**inputs_of(name, seed), use_cache=False))


def flat_z(name: str, seed: int) -> dict[int, Tensor]:
    seen: dict[int, Tensor] = {}
    with projections(name, lambda layer, z: seen.update({layer: z})):
        forward(name, seed)
    return {layer: z.detach() for layer, z in seen.items()}


def by_heads(name: str, product: Tensor) -> Tensor:
    """[prompt, head]: a product of z's shape, summed over positions and what a head holds."""
    heads = run_of(name, 1)["z", 0].shape[2]
    return product.view(*product.shape[:2], heads, -1).sum((1, 3)).double()


def by_hooks(name: str, steps: int) -> Tensor:
    """Integrated gradients of each head by hooks, [layer, head, prompt]: z of a layer goes along a line."""
    base, source = flat_z(name, 1), flat_z(name, 2)
    found = []
    for layer, own in base.items():
        total = torch.zeros_like(own)
        for step in range(steps):
            point = (own + step / steps * (source[layer] - own)).requires_grad_()
            with projections(name, lambda at, _, layer=layer, point=point: point if at == layer else None):
                (gradient,) = torch.autograd.grad(forward(name, 1).sum(), point)
            total += gradient / steps
        found.append(by_heads(name, (source[layer] - own) * total).T)
    return torch.stack(found)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize(("method", "steps"), [("atp", None), ("ig", 3)])
def test_they_are_those_of_hooks_on_the_module(name: str, method: str, steps: int | None) -> None:
    base, source = run_of(name, 1), run_of(name, 2)
    found = (
        model_of(name, torch.float32)
        .attribute(HEADS, base=base, source=source, metric=squares, method=method, steps=steps)
        .run()
    )
    expected = by_hooks(name, steps or 1)
    assert found.base_per_prompt is not None
    effects = found.per_prompt[0] - found.base_per_prompt
    torch.testing.assert_close(effects, expected.flatten(0, 1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.effect, expected.mean(-1), rtol=1e-3, atol=1e-4)
    assert torch.equal(
        found.base,
        model_of(name, torch.float32)
        .sweep(HEADS, base=base, source=source, metric=squares)
        .read_metrics(base)
        .mean(-1),
    )


def test_a_small_patch_has_the_effect_that_is_estimated() -> None:
    """Finite differences, of every method of sites."""
    model, run = model_of("gpt2", torch.float64), run_of("gpt2", 1, torch.float64)
    cells = (
        HEADS + cw.sites("q", layer=":") + cw.sites("k", layer=":", pos=":") + cw.sites("mlp_out", layer=":")
    )

    def near(value: Tensor) -> Tensor:
        return 1.000001 * value

    exact = model.sweep(cells, base=run, source=near, metric=squares).run()
    for method, steps in (("atp", None), ("ig", 2)):
        found = model.attribute(
            cells, base=run, source=near, metric=squares, method=method, steps=steps
        ).run()
        torch.testing.assert_close(found.effect, exact.effect, rtol=1e-4, atol=1e-11)


def test_integrated_gradients_of_a_whole_site_add_up_to_its_effect() -> None:
    model, base, source = model_of("gpt2", torch.float32), run_of("gpt2", 1), run_of("gpt2", 2)
    cells = cw.sites("mlp_out", layer=":") + cw.sites("z", layer=":")
    exact = model.sweep(cells, base=base, source=source, metric=squares).run()
    coarse, fine = (
        model.attribute(cells, base=base, source=source, metric=squares, method="ig", steps=steps).run()
        for steps in (8, 256)
    )
    torch.testing.assert_close(fine.effect, exact.effect, rtol=2e-2, atol=2e-2)
    assert (coarse.effect - exact.effect).abs().max() > 4 * (fine.effect - exact.effect).abs().max()


def test_one_step_is_attribution_patching_and_places_may_be_parts_and_sets() -> None:
    model, base, source = model_of("llama", torch.float32), run_of("llama", 1), run_of("llama", 2)
    asked: dict[str, Any] = {"base": base, "source": source, "metric": [squares, cw.prob(3)]}
    one = model.attribute(HEADS, method="ig", steps=1, **asked).run()
    atp = model.attribute(HEADS, **asked).run()
    torch.testing.assert_close(one.per_prompt, atp.per_prompt)
    both = [cw.site("z", layer=0, head=0), cw.site("mlp_out", layer=1, pos=slice(1, 3))]
    listed: list[Any] = [
        both,
        [both[0]],
        [both[1]],
        cw.site("z", layer=0, head=[0, 1]),
        cw.site("z", layer=0, head=1, batch=1),
    ]
    found = model.attribute(listed, **asked).run()
    effects = found.per_prompt - found.base_per_prompt[:, None]  # type: ignore[index]
    torch.testing.assert_close(effects[:, 0], effects[:, 1] + effects[:, 2])
    expected = atp.per_prompt - atp.base_per_prompt[:, None]  # type: ignore[index]
    torch.testing.assert_close(effects[:, 1], expected[:, 0])
    torch.testing.assert_close(effects[:, 3], expected[:, 0] + expected[:, 1])
    assert not effects[:, 4, 0].any()
    torch.testing.assert_close(effects[:, 4, 1], expected[:, 1, 1])


def test_batches_are_as_if_given_together_and_other_sources_than_runs_are_taken() -> None:
    model, base, source = model_of("gpt2", torch.float32), inputs_of("gpt2", 1), inputs_of("gpt2", 2)
    together = model.attribute(HEADS, base=base, source=source, metric=squares).run()
    apart = [
        [{name: value[row : row + 1] for name, value in one.items()} for row in range(2)]
        for one in (base, source)
    ]
    each = model.attribute(HEADS, base=apart[0], source=apart[1], metric=squares).run()
    torch.testing.assert_close(each.per_prompt, together.per_prompt, rtol=1e-5, atol=1e-5)
    assert each.plan.batches == 2
    for given in ("zero", "mean", cw.noise(0.1), cw.add(torch.ones(16)), lambda z: 0 * z):
        found = model.attribute(HEADS, base=base, source=given, metric=squares).run()
        assert found.effect.abs().min() > 0
        assert found.source is None
    zeros = model.attribute(HEADS, base=base, source="zero", metric=squares).run()
    made = model.attribute(HEADS, base=base, source=lambda z: 0 * z, metric=squares).run()
    torch.testing.assert_close(zeros.per_prompt, made.per_prompt)


# -- hand-set models ---------------------------------------------------------------------------


def stack(layers: int, **weights: Tensor) -> Stack:
    """A stack of 1 head of width 2 over a stream of 8, all weights zero but those that are given."""
    made = Stack(
        tokens=4,
        length=3,
        width=8,
        layers=layers,
        heads=1,
        head_width=2,
        neurons=2,
        outputs=1,
        is_causal=False,
    )
    state = {name: torch.zeros_like(value) for name, value in made.state_dict().items()}
    for name, value in weights.items():
        state[name.replace("__", ".")][: value.shape[0], : value.shape[1]] = value
    made.load_state_dict(state)
    return made.requires_grad_(False).eval()


def test_on_a_linear_model_every_method_is_exact() -> None:
    torch.manual_seed(0)
    sizes = {"tokens": 5, "length": 4, "width": 6, "heads": 2, "head_width": 3, "neurons": 0, "outputs": 3}
    module = Stack(layers=2, is_causal=True, **sizes)
    for layer in module.blocks:
        layer.attn.key.weight.data.zero_()  # every head looks everywhere alike, whatever its queries
    model = cw.capture(module.eval(), torch.tensor([[0, 1, 2, 3]]))
    base, source = (model.run(torch.tensor(rows)) for rows in ([[0, 1, 2, 3]], [[4, 2, 2, 0]]))
    metric = cw.logit_diff(0, 1)
    cells = HEADS + cw.sites("v", layer=":", head=":") + cw.sites("resid_pre", layer=":", pos=":")
    exact = model.sweep(cells, base=base, source=source, metric=metric).run()
    assert exact.effect.abs().max() > 0.1
    for method, steps in (("atp", None), ("ig", 3)):
        found = model.attribute(
            cells, base=base, source=source, metric=metric, method=method, steps=steps
        ).run()
        torch.testing.assert_close(found.effect, exact.effect, rtol=1e-4, atol=1e-6)
    last = cw.sites("z", layer=1, head=":") + cw.sites("q", layer=1, head=":") + cw.sites("v", layer=1)
    exact = model.sweep(last, base=base, source=source, metric=metric).run()
    star = model.attribute(last, base=base, source=source, metric=metric, method="atp*").run()
    torch.testing.assert_close(star.effect, exact.effect, rtol=1e-4, atol=1e-6)
    edges = model.edges()
    exact = model.sweep(edges, base=base, source=source, metric=metric).run()
    for method, steps in (("eap", None), ("eap-ig", 3), ("eap-ig-activations", 2)):
        found = model.attribute(
            edges, base=base, source=source, metric=metric, method=method, steps=steps
        ).run()
        torch.testing.assert_close(found.effect, exact.effect, rtol=1e-4, atol=1e-6)


KEY_A, KEY_B, QUERY_A, QUERY_B, VALUE, ANSWER = range(6)


def row(**at: float) -> Tensor:
    found = torch.zeros(1, 8)
    for name, value in at.items():
        found[0, globals()[name]] = value
    return found


def looking(sharpness: float = 60.0) -> cw.Model:
    """A head that looks for A or B, whichever it is asked for, and says what is there."""
    module = stack(
        1,
        embed__weight=torch.cat([row(KEY_A=1), row(KEY_B=1, VALUE=1), row(QUERY_A=1), row(QUERY_B=1)]),
        layers__0__attn__query__weight=sharpness * torch.cat([row(QUERY_A=1), row(QUERY_B=1)]),
        layers__0__attn__key__weight=torch.cat([row(KEY_A=1), row(KEY_B=1)]),
        layers__0__attn__value__weight=row(VALUE=1),
        layers__0__attn__out__weight=torch.eye(8)[:, ANSWER : ANSWER + 1],
        unembed__weight=row(ANSWER=1),
    )
    return cw.capture(module, torch.tensor([[0, 1, 2]]))


@pytest.mark.parametrize(("site", "other"), [("q", [0, 1, 3]), ("k", [1, 0, 2])])
def test_a_saturated_softmax_hides_queries_and_keys_from_gradients_and_not_from_their_correction(
    site: str, other: list[int]
) -> None:
    model = looking()
    base, source = (model.run(torch.tensor([ids])) for ids in ([0, 1, 2], other))
    asked: dict[str, Any] = {"base": base, "source": source, "metric": cw.logit(0, pos=-1)}
    cells = cw.sites(site, layer=0, head=":")
    exact = model.sweep(cells, **asked).run()
    assert float(exact.effect) == pytest.approx(1.0)
    assert abs(float(model.attribute(cells, method="atp", **asked).run().effect)) < 1e-6
    assert float(model.attribute(cells, method="atp*", **asked).run().effect) == pytest.approx(1.0)


def cancelling() -> cw.Model:
    """What the head brings, x, is said directly, and −relu(x + 1) is added: their slopes cancel at 0."""
    module = stack(
        2,
        embed__weight=torch.cat([row(KEY_A=1), row(VALUE=-3), row(QUERY_A=1), row(QUERY_B=1)]),
        positions__weight=torch.cat([row(QUERY_B=1)] * 3),
        layers__0__attn__value__weight=row(VALUE=3),
        layers__0__attn__out__weight=torch.eye(8)[:, ANSWER : ANSWER + 1],
        layers__1__mlp__0__weight=row(ANSWER=1, QUERY_B=1),
        layers__1__mlp__2__weight=-torch.eye(8)[:, ANSWER : ANSWER + 1],
        unembed__weight=row(ANSWER=1),
    )
    return cw.capture(module, torch.tensor([[0, 0, 0]]))


def test_paths_that_cancel_hide_a_head_from_gradients_and_not_where_they_are_dropped() -> None:
    model = cancelling()
    base, source = (model.run(torch.tensor([ids])) for ids in ([0, 0, 0], [1, 0, 0]))
    asked: dict[str, Any] = {"base": base, "source": source, "metric": cw.logit(0, pos=-1)}
    cells = cw.sites("z", layer=0, head=":")
    exact = float(model.sweep(cells, **asked).run().effect)
    assert exact == pytest.approx(-2.0)  # x goes from 0 to -3, and -relu(x + 1) from -1 to 0
    assert float(model.attribute(cells, method="atp", **asked).run().effect) == 0.0
    star = float(model.attribute(cells, method="atp*", **asked).run().effect)
    assert abs(star) == pytest.approx(3.0)  # the direct path alone


def terms_of(name: str) -> list[tuple[nn.Module, nn.Module]]:
    """The modules that make what each layer adds to the stream."""
    inner: Any = module_of(name).base_model
    if name == "gpt2":
        return [(block.attn.c_proj, block.mlp) for block in inner.h]
    if name == "llama":
        return [(block.self_attn.o_proj, block.mlp) for block in inner.layers]
    return [(block.attention.output.dense, block.output.dense) for block in inner.encoder.layer]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_dropped_gradients_are_those_of_a_module_whose_layers_pass_none(name: str) -> None:
    """By hooks on the module: what layer l adds to the stream is detached."""
    base, source = flat_z(name, 1), flat_z(name, 2)
    signs = by_hooks(name, 1).sign()
    sizes = torch.zeros_like(signs)
    for terms in terms_of(name):
        handles = [part.register_forward_hook(lambda _, __, out: out.detach()) for part in terms]
        seen: dict[int, Tensor] = {}
        with projections(name, lambda layer, z, seen=seen: seen.update({layer: z})):
            total = forward(name, 1).sum()
        for handle in handles:
            handle.remove()
        found = torch.autograd.grad(total, list(seen.values()), allow_unused=True)
        for layer, gradient in zip(seen, found, strict=True):
            if gradient is not None:
                sizes[layer] += by_heads(name, (source[layer] - base[layer]) * gradient).T.abs()
    star = (
        model_of(name, torch.float32)
        .attribute(HEADS, base=run_of(name, 1), source=run_of(name, 2), metric=squares, method="atp*")
        .run()
    )
    effects = star.per_prompt[0] - star.base_per_prompt  # type: ignore[operator]
    torch.testing.assert_close(effects, (signs * sizes).flatten(0, 1), rtol=1e-3, atol=1e-4)


# -- results, and what is refused --------------------------------------------------------------


def test_a_result_says_that_it_is_approximate_wherever_it_goes(tmp_path: Any) -> None:
    model, base, source = model_of("gpt2", torch.float32), run_of("gpt2", 1), run_of("gpt2", 2)
    found = model.attribute(HEADS, base=base, source=source, metric=squares, method="ig", steps=2).run()
    assert found.method == "ig, 2 steps"
    assert "approximate (ig, 2 steps)" in repr(found)
    assert "approximate (ig, 2 steps)" in found.plot().layout.title.text
    assert set(found.to_dataframe()["method"]) == {"ig, 2 steps"}
    assert found.provenance["attribution"] == {"method": "ig", "steps": 2}
    read = cw.open(found.save(tmp_path / "saved"))
    assert isinstance(read, cw.Result)
    assert read.equals(found)
    assert read.method == "ig, 2 steps"
    assert "approximated by ig, 2 steps" in found.report(tmp_path / "page.html").read_text("utf-8")
    exact = model.sweep(HEADS, base=base, source=source, metric=squares).run()
    assert not exact.method
    assert "method" not in exact.to_dataframe()
    assert found.plan.node_evaluations == found.ledger.node_evaluations > 0
    assert found.plan.full_evaluations == exact.plan.full_evaluations
    with pytest.raises(SweepError, match="these values are approximate"):
        found.verify()


def test_what_cannot_be_attributed_to_is_refused() -> None:
    model, base, source = model_of("gpt2", torch.float32), run_of("gpt2", 1), run_of("gpt2", 2)
    asked: dict[str, Any] = {"base": base, "source": source, "metric": squares}
    with pytest.raises(SweepError, match="no method 'apt'"):
        model.attribute(HEADS, method="apt", **asked).run()
    with pytest.raises(SweepError, match="leave out steps=3"):
        model.attribute(HEADS, method="atp", steps=3, **asked).run()
    with pytest.raises(SweepError, match="steps is a number from 1 to 1,000,000"):
        model.attribute(HEADS, method="ig", steps=0, **asked).run()
    with pytest.raises(SweepError, match=r"'atp' attributes to sites, and .* is an edge"):
        model.attribute(model.edges()[:3], method="atp", **asked).run()
    with pytest.raises(SweepError, match=r"'eap' attributes to edges, and .* is a site"):
        model.attribute(HEADS, method="eap", **asked).run()
    with pytest.raises(GradientError, match="several sites together"):
        model.attribute([[("z", 0), ("z", 1)]], method="ig", **asked).run()
    with pytest.raises(SweepError, match="patching a head's z patches its result"):
        model.attribute(cw.sites("result", layer=":", head=":"), **asked).run()
    with pytest.raises(MissingSiteError):
        model.attribute(("zz", 0), **asked).run()


class Mixed(nn.Module):
    """Every row reads the mean of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).square() + x.mean(0, keepdim=True)


def test_prompts_that_read_each_other_are_refused() -> None:
    model = cw.capture(Mixed(), torch.ones(3, 4), batch_dim=0)
    runs = [model.run(torch.randn(3, 4)) for _ in range(2)]
    with pytest.raises(GradientError, match="mixes the prompts"):
        model.attribute("x", base=runs[0], source=runs[1], metric=lambda out: out.sum(-1)).run()


def test_a_model_without_layers_has_no_gradients_to_drop() -> None:
    model = cw.capture(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), torch.ones(2, 3))
    runs = [model.run(torch.randn(2, 3)) for _ in range(2)]
    asked: dict[str, Any] = {"base": runs[0], "source": runs[1], "metric": lambda out: out[:, 0]}
    assert model.attribute(["0", "1"], **asked).run().effect.shape == (2,)
    with pytest.raises(GradientError, match="no layers"):
        model.attribute(["0", "1"], method="atp*", **asked).run()

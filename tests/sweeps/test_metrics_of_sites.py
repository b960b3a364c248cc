"""Metrics read inside the model, at any site: against plain forwards of the module with hooks; counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import GradientError, MetricError, MissingSiteError, SweepError
from tests.anatomy.named_architectures import NAMED
from tests.sweeps.tiny import prompts, tiny

ARCHITECTURES = (
    *("smollm3", "gemma", "olmo", "granite", "nemotron"),
    *("starcoder2", "biogpt", "xglm", "olmo3", "cohere"),
)
KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "pre", "post")
LENGTH, BATCH = 6, 2


@cache
def captured(name: str) -> Any:
    module = NAMED[name].make()
    torch.manual_seed(1)
    for weight in module.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.15)
    return cw.capture(module, **NAMED[name].inputs(1, LENGTH))


class Plain:
    """The module alone: what its hooks see, with one value of one site put in."""

    def __init__(self, name: str) -> None:
        self.module, self.layers = captured(name).module, NAMED[name].layers

    def kinds(self, layer: int) -> list[str]:
        there = self.layers[layer].there
        return [
            kind for kind in KINDS if there.get(kind) and " + " not in there[kind] and "*" not in there[kind]
        ]

    def _port(self, kind: str, layer: int) -> tuple[nn.Module, bool]:
        way, _, path = self.layers[layer].there[kind].partition(":")
        full = ".".join(filter(None, (self.layers[layer].block, path)))
        return self.module.get_submodule(full), way == "in"

    def _hook(self, kind: str, layer: int, act: Callable[[Tensor], Tensor | None]) -> Any:
        part, is_input = self._port(kind, layer)

        def enter(_: Any, args: Any, kwargs: Any) -> Any:
            if args:
                new = act(args[0])
                return None if new is None else ((new, *args[1:]), kwargs)
            first = next(iter(kwargs))
            new = act(kwargs[first])
            return None if new is None else (args, {**kwargs, first: new})

        def leave(_: Any, __: Any, out: Any) -> Any:
            new = act(out[0] if isinstance(out, tuple) else out)
            return None if new is None else ((new, *out[1:]) if isinstance(out, tuple) else new)

        if is_input:
            return part.register_forward_pre_hook(enter, with_kwargs=True)
        return part.register_forward_hook(leave)

    @torch.no_grad()
    def run(
        self,
        inputs: dict[str, Tensor],
        reads: list[tuple[str, int]],
        put: tuple[str, int, int, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The logits, and what hooks see at `reads`, with a value put into a site at one position."""
        seen: dict[tuple[str, int], Tensor] = {}
        handles = []
        if put is not None:
            kind, layer, pos, value = put

            def change(whole: Tensor) -> Tensor:
                new = whole.clone()
                new[:, pos] = value.reshape(BATCH, LENGTH, -1)[:, pos]
                return new.reshape(whole.shape)

            handles.append(self._hook(kind, layer, change))
        handles += [self._hook(*one, partial(_keep, seen, one)) for one in reads]
        try:
            logits = self.module(**inputs, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return logits, [seen[read] for read in reads]


def _keep(seen: dict[Any, Tensor], at: Any, whole: Tensor) -> None:
    seen[at] = whole.clone()


def a_case(name: str, chosen: random.Random) -> tuple[float, float]:
    """The largest difference of a random sweep from plain forwards, and the largest value there is."""
    model, plain = captured(name), Plain(name)
    torch.manual_seed(chosen.randrange(10**6))
    ids, others = (torch.randint(1, 29, (BATCH, LENGTH)) for _ in range(2))
    others[:, : chosen.randrange(LENGTH)] = ids[:, : chosen.randrange(LENGTH) or 1][:, :1]
    layers = len(plain.layers)
    at = chosen.randrange(layers)
    # A hook in front of the second norm changes what the norm reads, and not the stream beside it.
    patched = chosen.choice([kind for kind in plain.kinds(at) if kind != "resid_mid"])
    reads = []
    for _ in range(chosen.choice((1, 1, 2))):
        layer = chosen.randrange(at, layers)
        reads.append((chosen.choice(plain.kinds(layer)), layer))
    pos = chosen.choice((None, -1, -1, chosen.randrange(LENGTH)))
    part = "" if pos is None else f", pos={pos}"
    places = [cw.site(f"{kind}[layer={layer}{part}]") for kind, layer in reads]

    def cut(value: Tensor) -> Tensor:
        return value if pos is None else value[:, pos]

    probe = plain.run({"input_ids": ids}, reads)[1]
    width = probe[0].shape[-1]
    direction = torch.randn(chosen.choice(((width,), (3, width))))
    how = chosen.choice(("site", "direction", "norm", "of sites", "of both", "several"))
    one: Callable[[Tensor, list[Tensor]], list[Tensor]]
    metric: Any
    if how == "site":
        metric, one = places[0], lambda _, seen: [cut(seen[0])]
    elif how == "direction":
        metric = cw.read(places[0], direction=direction)
        one = lambda _, seen: [cut(seen[0]) @ direction.movedim(-1, 0)]  # noqa: E731
    elif how == "norm":
        metric, one = cw.read(places[0], norm=True), lambda _, seen: [cut(seen[0]).norm(dim=-1)]
    elif how == "of sites":
        metric = cw.metric(_squares if len(places) == 1 else _more_squares, reads=places)
        one = lambda _, seen: [sum(cut(v).flatten(1).square().mean(1) for v in seen)]  # type: ignore[list-item]  # noqa: E731
    elif how == "of both":
        metric = cw.metric(
            lambda out, *given: out.logits[:, -1, 3] + given[0].flatten(1).sum(1), reads=places
        )
        one = lambda logits, seen: [logits[:, -1, 3] + cut(seen[0]).flatten(1).sum(1)]  # noqa: E731
    else:
        metric = [places[0], cw.logit_diff(3, 5)]
        one = lambda logits, seen: [cut(seen[0]), logits[:, -1, 3] - logits[:, -1, 5]]  # noqa: E731
    sweep = model.sweep(
        cw.sites(patched, layer=at, pos=":"),
        base={"input_ids": ids},
        source={"input_ids": others},
        metric=metric,
    )
    result = None
    with suppress(SweepError):  # where what is read lies in front of all that is patched
        result = sweep.run(evaluator=chosen.choice(("auto", "serial", "wavefront")))
    given = plain.run({"input_ids": others}, [(patched, at)])[1][0]
    worst, scale = 0.0, 1e-6
    for cell in range(LENGTH):
        logits, seen = plain.run({"input_ids": ids}, reads, (patched, at, cell, given))
        expected = one(logits, seen)
        whole = torch.cat([value.reshape(BATCH, -1) for value in expected], 1).double()
        if result is None:
            base = one(*plain.run({"input_ids": ids}, reads))
            whole = whole - torch.cat([value.reshape(BATCH, -1) for value in base], 1).double()
        mine = torch.zeros_like(whole) if result is None else result.per_prompt[:, cell].movedim(0, 1)
        assert mine.shape == whole.shape, (name, how, patched, reads, pos)
        worst = max(worst, float((mine - whole).abs().max()))
        scale = max(scale, float(whole.abs().max()))
    return worst, scale


def _squares(value: Tensor) -> Tensor:
    return value.flatten(1).square().mean(1)


def _more_squares(value: Tensor, other: Tensor) -> Tensor:
    return _squares(value) + _squares(other)


@pytest.mark.parametrize(
    "name", [*ARCHITECTURES[:3], *(pytest.param(one, marks=pytest.mark.slow) for one in ARCHITECTURES[3:])]
)
def test_metrics_of_sites_are_those_of_the_module_with_hooks(name: str) -> None:
    chosen = random.Random(name)
    for _ in range(4):
        worst, scale = a_case(name, chosen)
        assert worst <= 1e-4 * scale


@pytest.mark.parametrize("pos", [-1, 2, None])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_lies_behind_a_site_that_is_read_is_not_computed(name: str, pos: int | None) -> None:
    """Theorem 2, cut at the site: (cone(patch) − patch) ∩ support(site), for each world."""
    model = tiny(name)
    place = cw.site("resid_post[layer=1]" if pos is None else f"resid_post[layer=1, pos={pos}]")
    sweep = model.sweep(
        cw.sites("mlp_out", layer=":") + cw.sites("resid_pre", layer=1),
        base={"input_ids": prompts(1, 1)},
        source={"input_ids": prompts(1, 2)},
        metric=place,
    )
    plan, table, graph = sweep.plan(), model.graph.table, model.graph
    target = model.locate(place).node
    front = table.support(graph.numbers([target]), ())
    expected = 0
    for cell in sweep.cells:
        patched = graph.number(model.locate(cell.places[0]).node)
        cut = table.support(graph.numbers([target]), (patched,))
        expected += len(table.cone({patched}) & cut - {patched})
    assert plan.node_evaluations == expected == sweep.run(evaluator="serial").ledger.node_evaluations
    assert plan.compiled is not None
    assert {node for node, _ in plan.compiled.steps} <= set(graph.names(front))
    assert plan.full_evaluations < len(model.program.records) * plan.worlds
    assert "nothing behind resid_post[layer=1" in plan.why


def test_a_vector_has_axes_of_its_own_and_survives_saving(tmp_path: Any) -> None:
    model = tiny("gpt2")
    asked: Any = {"base": {"input_ids": prompts(2, 1)}, "source": {"input_ids": prompts(2, 2)}}
    metric: Any = [cw.site("resid_post", layer=1, pos=-1), cw.logit_diff(3, 5)]
    result = model.sweep(cw.sites("z", layer=":", head=":"), metric=metric, **asked).run(
        out=tmp_path / "store", verify=3
    )
    assert result.verification is not None
    assert result.verification.ok
    assert result.axes == ("layer", "head", "d_model")
    assert result.values.shape == result.effect.shape == (3, 4, 32)
    assert result.coordinates["d_model"] == list(range(32))
    assert result.metric("logit_diff").shape == (3, 4)
    assert result.select("logit_diff").values.equal(result.metric("logit_diff"))
    entry = result.metric("resid_post[layer=1, pos=-1][d_model=7]")
    assert entry.equal(result.values[..., 7])
    assert (result.effect[2] == 0).all()  # layer 2 lies behind the site
    cell, far, _ = result.strongest(top=1)[0]
    assert result.base_per_prompt is not None
    lengths = (result.per_prompt[:32] - result.base_per_prompt[:32, None]).norm(dim=0).mean(-1)
    assert far == pytest.approx(float(lengths.max()))
    assert cell.name in str(result)
    assert cw.open(result.save(tmp_path / "saved")).equals(result)
    again = model.sweep(cw.sites("z", layer=":", head=":"), metric=metric, **asked)
    resumed = again.run(out=tmp_path / "store", resume=True)
    assert resumed.equals(result)
    assert resumed.ledger.resumed == 12


def test_attention_from_one_token_to_another_is_a_number() -> None:
    model = tiny("gpt2")
    weight = cw.site("pattern", layer=2, head=1, query_pos=-1, key_pos=3)
    ids, others = prompts(2, 1), prompts(2, 2)
    result = model.sweep(
        cw.sites("z", layer=":", head=":"),
        base={"input_ids": ids},
        source={"input_ids": others},
        metric=weight,
    ).run()
    with model.run(input_ids=ids).fork() as world:
        world.patch("z[layer=0, head=3]", model.run(input_ids=others))
        expected = world["pattern", 2][:, 1, -1, 3]
    assert result.values.shape == (3, 4)
    assert torch.allclose(result.per_prompt[0, 3], expected.double(), atol=1e-6)


def test_gradients_of_a_site_are_those_of_autograd() -> None:
    model, ids = tiny("llama"), prompts(2, 3)
    direction = torch.randn(32)
    metric = cw.read(cw.site("resid_post", layer=1, pos=-1), direction=direction)
    found = model.run(input_ids=ids).gradients(metric, [("resid_pre", 0), ("mlp_out", 1)])
    module, seen = model.module, {}

    def keep(_: Any, args: Any) -> Any:
        seen["in"] = args[0].detach().requires_grad_()
        return (seen["in"], *args[1:])

    def after(_: Any, __: Any, out: Any) -> None:
        seen["out"] = out[0] if isinstance(out, tuple) else out

    handles = [
        module.model.layers[0].register_forward_pre_hook(keep),
        module.model.layers[1].register_forward_hook(after),
    ]
    module(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    (expected,) = torch.autograd.grad((seen["out"][:, -1] @ direction).sum(), seen["in"])
    assert torch.allclose(found["resid_pre", 0], expected, atol=1e-4)
    assert torch.allclose(found["mlp_out", 1][:, -1], direction.expand(2, -1), atol=1e-5)
    with pytest.raises(GradientError, match="32 numbers, and gradients are of one"):
        model.run(input_ids=ids).gradients(cw.site("resid_post", layer=1, pos=-1), [("resid_pre", 0)])


def test_what_cannot_be_read_is_said_before_the_run() -> None:
    model = tiny("gpt2")

    heads = cw.sites("z", layer=":", head=":")

    def sweep(metric: Any, sites: Any = heads) -> Any:
        return model.sweep(
            sites, base={"input_ids": prompts(2)}, source={"input_ids": prompts(2, 1)}, metric=metric
        )

    with pytest.raises(MetricError, match=r"the direction has 5 numbers, and .* has 32 along 'd_model'"):
        sweep(cw.read(cw.site("resid_post", layer=1, pos=-1), direction=[1.0] * 5))
    with pytest.raises(MetricError, match="not finite"):
        cw.read(cw.site("resid_post", layer=1), direction=[1.0, float("nan")])
    with pytest.raises(MissingSiteError, match="no layer 9"):
        sweep(cw.site("resid_post", layer=9))
    with pytest.raises(MissingSiteError, match="no pos 12"):
        sweep(cw.site("resid_post", layer=1, pos=12)).plan()
    with pytest.raises(MetricError, match="no node holds result"):
        sweep(cw.site("result", layer=1))
    with pytest.raises(MetricError, match="selects prompts"):
        sweep(cw.site("resid_post", layer=1, batch=0))
    with pytest.raises(MetricError, match="takes 4 arguments"):
        cw.metric(lambda a, b, c, d: a, reads=[cw.site("z", layer=1)])
    with pytest.raises(MetricError, match="A vector needs `size=`"):
        sweep(cw.metric(lambda z: z[:, -1, 0, :3], reads=[cw.site("z", layer=1)])).run()
    with pytest.raises(SweepError, match="does not depend on 1 of 1 cells"):
        sweep(cw.site("resid_post", layer=0), cw.sites("z", layer=2)).plan()


def test_padding_is_not_read_and_batches_have_one_length_of_a_vector() -> None:
    ids, module = prompts(2, 1), tiny("llama").module
    place, mlps = cw.site("resid_post", layer=1, pos=-1), cw.sites("mlp_out", layer=":")
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :2], right[0, -2:] = 0, 0
    model = cw.capture(module, input_ids=ids, attention_mask=left)

    def sweep(mask: Tensor, metric: Any) -> Any:
        return model.sweep(
            mlps, base={"input_ids": ids, "attention_mask": mask}, source="zero", metric=metric
        )

    assert sweep(left, place).run(verify=2).verification.ok
    assert sweep(right, cw.site("resid_post", layer=1, pos=3)).run(verify=2).verification.ok
    with pytest.raises(MetricError, match="Pad on the left"):
        sweep(right, place).run()
    batches = [{"input_ids": prompts(1, 1)}, {"input_ids": prompts(2, 3, 5)}]
    found = tiny("llama").sweep(mlps, base=batches, source="zero", metric=place).run()
    assert found.per_prompt.shape == (32, 3, 3)
    with pytest.raises(MetricError, match=r"has \(7, 32\) in one and \(5, 32\) in another"):
        tiny("llama").sweep(mlps, base=batches, source="zero", metric=cw.site("resid_post", layer=1))

"""Patches: what may be put where, what adds up, what is computed again, and what is reported."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import conewise as cw
from conewise.errors import MissingSiteError, NoEffectWarning, PatchError
from conewise.model import Model
from conewise.paper import theory
from conewise.runs.reading import RunWorld
from tests.sweeps.captured import assert_same, hooked, inputs, module_outputs, small

HOOKS = {
    "z": ("in", "transformer.h.1.attn.c_proj"),
    "mlp_out": ("out", "transformer.h.1.mlp.c_proj"),
    "post": ("in", "transformer.h.1.mlp.c_proj"),
    "resid_pre": ("in", "transformer.h.1"),
}


def base_and_source(name: str = "gpt2", attention: str = "sdpa") -> tuple[Model, cw.Run, cw.Run]:
    model = small(name, attention)
    return model, model.run(**inputs(name)), model.run(**inputs(name, seed=2))


def by_hook(model: Model, kind: str, change: Callable[[Tensor], Tensor], name: str = "gpt2") -> list[Tensor]:
    way, path = HOOKS[kind]
    with hooked(model.module, way, path, change):
        return module_outputs(model, inputs(name))


def heads(change: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    """A change of z with its heads apart, written as hooks are."""

    def changed(value: Tensor) -> Tensor:
        change(value.view(2, 12, 4, 16))
        return value

    return changed


PARTS: list[tuple[str, dict[str, Any], Any]] = [
    ("z", {}, (...,)),
    ("z", {"head": 1}, (slice(None), slice(None), 1)),
    ("z", {"head": -1}, (slice(None), slice(None), 3)),
    ("z", {"pos": 4}, (slice(None), 4)),
    ("z", {"pos": -1, "head": 2}, (slice(None), 11, 2)),
    ("z", {"pos": slice(3, 7)}, (slice(None), slice(3, 7))),
    ("z", {"pos": slice(None, None, 2), "head": [0, 3]}, (slice(None), slice(None, None, 2), [0, 3])),
    ("z", {"head": [3, 0]}, (slice(None), slice(None), [3, 0])),
    ("z", {"batch": 1, "head": 0, "d_head": slice(0, 4)}, (1, slice(None), 0, slice(0, 4))),
    ("mlp_out", {}, (...,)),
    ("mlp_out", {"pos": -2}, (slice(None), -2)),
    ("post", {"neuron": 17}, (slice(None), slice(None), 17)),
    ("post", {"neuron": slice(10, 20), "pos": 0}, (slice(None), 0, slice(10, 20))),
    ("resid_pre", {"pos": [2, 5]}, (slice(None), [2, 5])),
]


@pytest.mark.parametrize(("kind", "part", "index"), PARTS, ids=str)
def test_a_part_from_another_run_equals_a_hook_that_copies_it(
    kind: str, part: dict[str, Any], index: Any
) -> None:
    model, base, source = base_and_source()
    theirs = source[kind, 1]

    def change(value: Tensor) -> Tensor:
        shown = value.view(theirs.shape)
        shown[index] = theirs[index]
        return value

    with base.fork() as world:
        world.patch(cw.site(kind, layer=1, **part), source)
        assert_same([world.logits], by_hook(model, kind, change))
        assert not torch.equal(world.logits, base.logits)
        place = cw.site(kind, layer=1, **part)
        assert torch.equal(world[place], source[place])


def test_lists_on_several_axes_mean_every_combination() -> None:
    model, base, source = base_and_source()
    place = cw.site("z", layer=1, pos=[1, 4, 9], head=[3, 0])
    assert source[place].shape == (2, 3, 2, 16)
    theirs = source["z", 1]

    def change(z: Tensor) -> None:
        for pos in (1, 4, 9):
            for head in (3, 0):
                z[:, pos, head] = theirs[:, pos, head]

    with base.fork() as world:
        world.patch(place, source)
        assert_same([world.logits], by_hook(model, "z", heads(change)))
        assert torch.equal(world[place], source[place])


def test_keys_are_patched_by_their_own_heads() -> None:
    model, base, source = base_and_source("llama")
    theirs = source["k", 1]
    assert theirs.shape == (2, 12, 2, 16)

    def change(value: Tensor) -> Tensor:
        value.view(2, 12, 2, 16)[:, :, 1] = theirs[:, :, 1]
        return value

    with hooked(model.module, "out", "model.layers.1.self_attn.k_proj", change):
        expected = module_outputs(model, inputs("llama"))
    with base.fork() as world:
        world.patch(cw.site("k", layer=1, kv_head=1), source)
        assert_same([world.logits], expected)


def test_the_pattern_can_be_patched_where_attention_is_spelled_out() -> None:
    _, base, source = base_and_source("gpt2", "eager")
    place = cw.site("pattern", layer=1, head=2)
    assert base[place].shape == (2, 12, 12)
    with base.fork() as world:
        world.patch(place, source)
        weights, values = world["pattern", 1], base["v", 1]
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, values)
        torch.testing.assert_close(world["z", 1], mixed)
        assert torch.equal(world["z", 1][:, :, 0], base["z", 1][:, :, 0])


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "zero": lambda _: "zero",
    "mean": lambda _: "mean",
    "tensor": lambda part: torch.full_like(part, 0.25),
    "function": lambda _: torch.neg,
}


@pytest.mark.parametrize("value", list(VALUES))
def test_every_kind_of_value_equals_a_hook(value: str) -> None:
    model, base, _ = base_and_source()
    own = base["z", 1].clone()
    expected = {
        "zero": torch.zeros(2, 12, 16),
        "mean": own.mean((0, 1))[2].expand(2, 12, 16),
        "tensor": torch.full((2, 12, 16), 0.25),
        "function": -own[:, :, 2],
    }[value]

    def change(z: Tensor) -> None:
        z[:, :, 2] = expected

    with base.fork() as world:
        world.patch(cw.site("z", layer=1, head=2), VALUES[value](own[:, :, 2]))
        assert_same([world.logits], by_hook(model, "z", heads(change)))


def test_the_mean_is_the_sites_whatever_part_takes_it() -> None:
    _, base, _ = base_and_source()
    with base.fork() as world:
        world.patch(cw.site("z", layer=1, head=2, pos=3), "mean")
        expected = base["z", 1].mean((0, 1))[2]
        assert torch.equal(world[cw.site("z", layer=1, head=2, pos=3, batch=0)], expected)


def test_parts_of_one_value_add_up() -> None:
    model, base, source = base_and_source()
    theirs = source["z", 1]

    def change(z: Tensor) -> None:
        z[:, :, 0] = theirs[:, :, 0]
        z[:, :, 2] = 0
        z[:, 3] = 1

    with base.fork() as world:
        world.patch(cw.site("z", layer=1, head=0), source)
        world.patch(cw.site("z", layer=1, head=2), "zero")
        world.patch(cw.site("z", layer=1, pos=3), torch.ones_like)
        assert_same([world.logits], by_hook(model, "z", heads(change)))
        world.patch(("z", 1), source)
        assert torch.equal(world["z", 1], theirs)


def test_several_names_of_one_value_are_one_value() -> None:
    """A module's output and a kind may be the same node."""
    _, base, source = base_and_source()
    assert base.model.locate(("mlp_out", 1)).node == base.model.locate("transformer.h.1.mlp.c_proj").node
    with base.fork() as world:
        world.patch(cw.site("mlp_out", layer=1, pos=2), source)
        world.patch(cw.site("transformer.h.1.mlp.c_proj", pos=3), "zero")
        both = world["mlp_out", 1]
    assert torch.equal(both[:, 2], source["mlp_out", 1][:, 2])
    assert not both[:, 3].any()


def test_what_another_patch_reaches_is_computed_anew() -> None:
    """The other heads of layer 2 see the change in layer 0."""
    model, base, source = base_and_source()
    first, second = cw.site("z", layer=0, head=3), cw.site("z", layer=2, head=1)
    theirs = [source["z", layer] for layer in (0, 2)]

    def swap(layer: int, head: int) -> Callable[[Tensor], Tensor]:
        def change(value: Tensor) -> Tensor:
            value.view(2, 12, 4, 16)[:, :, head] = theirs[layer // 2][:, :, head]
            return value

        return change

    with (
        hooked(model.module, "in", "transformer.h.0.attn.c_proj", swap(0, 3)),
        hooked(model.module, "in", "transformer.h.2.attn.c_proj", swap(2, 1)),
    ):
        expected = module_outputs(model, inputs())
    for order in ((first, second), (second, first)):
        with base.fork() as world:
            for place in order:
                world.patch(place, source)
            assert_same([world.logits], expected)
            assert torch.equal(world[second], source[second])
            assert not torch.equal(world["z", 2][:, :, 0], base["z", 2][:, :, 0])


def test_a_function_sees_what_would_have_been_there() -> None:
    _, base, source = base_and_source()
    seen: list[Tensor] = []

    def keep(z: Tensor) -> Tensor:
        seen.append(z.clone())
        return z * 2

    with base.fork() as world:
        world.patch(("resid_pre", 0), source)
        expected = world["z", 2][:, :, 1].clone()
        world.patch(cw.site("z", layer=2, head=1), keep)
        assert torch.equal(world["z", 2][:, :, 1], expected * 2)
    assert torch.equal(seen[-1], expected)


# -- nested forks -------------------------------------------------------------------------------


def cumulative(base: cw.Run, patches: list[tuple[Any, Any]]) -> Tensor:
    with base.fork() as world:
        for place, value in patches:
            world.patch(place, value)
        logits: Tensor = world.logits
        return logits.clone()


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize(
    "places",
    [
        [("resid_pre", 0), cw.site("z", layer=1, head=2), ("mlp_out", 2)],
        [cw.site("z", layer=2, head=0), cw.site("z", layer=0, head=1), cw.site("z", layer=2, head=3)],
        [cw.site("z", layer=1, head=0), cw.site("z", layer=1, head=1), ("mlp_out", 0)],
        [cw.site("result", layer=1, head=0), cw.site("result", layer=1, head=1), ("resid_pre", 1)],
        [("attn_out", 1), cw.site("result", layer=1, head=1), cw.site("attn_out", layer=1, pos=3)],
        [("mlp_out", 1), cw.site("mlp_out", layer=1, pos=3), ("resid_pre", 0)],
    ],
    ids=lambda places: "+".join(map(str, places)),
)
def test_a_fork_of_a_fork_has_the_patches_of_both(places: list[Any], cut: int) -> None:
    model, base, _ = base_and_source("llama")
    patches = [(place, model.run(**inputs("llama", seed=3 + i))) for i, place in enumerate(places)]
    with base.fork() as outer, outer.fork() as inner:
        for place, value in patches[cut:]:
            inner.patch(place, value)
        early = cumulative(base, patches[cut:])
        assert torch.equal(inner.logits, early)
        for place, value in patches[:cut]:
            outer.patch(place, value)
        # The outer world changed under the inner one, which follows.
        both = cumulative(base, patches)
        torch.testing.assert_close(inner.logits, both, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(outer.logits, cumulative(base, patches[:cut]), atol=1e-6, rtol=1e-5)
        for place, _ in patches[cut:]:
            inner.restore(place)
        torch.testing.assert_close(inner.logits, outer.logits, atol=0, rtol=0)
        for place, _ in patches[:cut]:
            outer.restore(place)
        assert torch.equal(outer.logits, base.logits)
        assert torch.equal(inner.logits, base.logits)


def test_a_fork_sees_patches_that_its_parent_has_not_computed_yet() -> None:
    _, base, source = base_and_source()
    with base.fork() as outer:
        outer.patch(("mlp_out", 0), source)
        with outer.fork() as inner:
            found = inner.logits
        assert torch.equal(found, outer.logits)
        assert not torch.equal(found, base.logits)


def test_a_patch_taken_from_a_patched_world() -> None:
    _, base, source = base_and_source()
    with base.fork() as one, base.fork() as other:
        one.patch(("resid_pre", 0), source)
        other.patch(cw.site("z", layer=2, head=1), one)
        assert torch.equal(other["z", 2][:, :, 1], source["z", 2][:, :, 1])


# -- restore --------------------------------------------------------------------------------------


def test_restore_takes_back_exactly_one_place() -> None:
    _, base, source = base_and_source()
    with base.fork() as world:
        world.patch(cw.site("z", layer=1, head=0), source)
        alone = world.logits.clone()
        world.patch(cw.site("blocks.1.attn.hook_z", head=2), "zero")
        assert not torch.equal(world.logits, alone)
        world.restore(cw.site("z", layer=-2, head=2))
        assert torch.equal(world.logits, alone)
        world.restore(cw.site("z", layer=1, head=0))
        assert torch.equal(world.logits, base.logits)
        with pytest.raises(PatchError, match=r"z\[layer=1, head=0\] is not patched .* Patched here: nothing"):
            world.restore(cw.site("z", layer=1, head=0))
        world.patch(("mlp_out", 0), "zero")
        with pytest.raises(PatchError, match=r"Patched here: mlp_out\[layer=0\]"):
            world.restore(("mlp_out", 1))


# -- result ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_patched_result_acts_as_the_z_that_makes_it(name: str) -> None:
    """Up to rounding: the projection sums in another order."""
    _, base, source = base_and_source(name)
    with base.fork() as by_result, base.fork() as by_z:
        for head in (1, 3):
            by_result.patch(cw.site("result", layer=1, head=head), source)
            by_z.patch(cw.site("z", layer=1, head=head), source)
        torch.testing.assert_close(by_result.logits, by_z.logits, atol=1e-5, rtol=1e-4)
        assert not torch.equal(by_result.logits, base.logits)
        assert torch.equal(by_result["result", 1][:, :, 3], source["result", 1][:, :, 3])
        assert torch.equal(by_result["result", 1][:, :, 0], base["result", 1][:, :, 0])
        by_result.restore(cw.site("result", layer=1, head=1))
        by_z.restore(cw.site("z", layer=1, head=1))
        torch.testing.assert_close(by_result.logits, by_z.logits, atol=1e-5, rtol=1e-4)
        by_result.restore(cw.site("result", layer=1, head=3))
        assert torch.equal(by_result.logits, base.logits)


def test_a_function_of_a_result_sees_this_worlds_result() -> None:
    _, base, source = base_and_source()
    with base.fork() as world:
        world.patch(("resid_pre", 0), source)
        world.patch(cw.site("result", layer=1, head=1), lambda result: result * 2)
        torch.testing.assert_close(world["result", 1][:, :, 1], 2 * source["result", 1][:, :, 1])


def test_a_result_and_what_it_is_added_into() -> None:
    """In Llama `attn_out` is the projection itself."""
    _, base, source = base_and_source("llama")
    with base.fork() as world:
        world.patch(cw.site("result", layer=1, head=1), "zero")
        world.patch(cw.site("attn_out", layer=1, pos=3), source)
        out = world["attn_out", 1]
        assert torch.equal(out[:, 3], source["attn_out", 1][:, 3])
        expected = base["attn_out", 1] - base["result", 1][:, :, 1]
        torch.testing.assert_close(out[:, 4:], expected[:, 4:], atol=1e-6, rtol=1e-5)


# -- the ledger -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_one_patch_recomputes_its_cone_within_the_support_and_nothing_else(name: str) -> None:
    model, base, source = base_and_source(name)
    graph = model.graph
    stack = "decoder" if name == "t5" else ""
    targets = tuple(out.name for out in model.program.outputs)
    for kind, part in (("z", {"head": 1}), ("mlp_out", {}), ("resid_pre", {"pos": 2}), ("q", {"head": 0})):
        place = cw.site(kind, layer=1, stack=stack, **part)
        node = model.locate(place).node
        with base.fork() as world:
            world.patch(place, source)
            _ = world.outputs
            expected = set(graph.cone(node)) & set(graph.support(targets))
            assert sorted(world.ledger.recomputed) == sorted(expected)
            assert len(expected) == theory.patched_cost(graph, [node], targets).total
    assert base.ledger.recomputed == [s for s in graph.computed if s in set(graph.support(targets))]


def test_several_patches_recompute_what_the_theory_says() -> None:
    """Given sites are not computed; a site of which a part is patched is, where another patch reaches it."""
    model, base, source = base_and_source()
    graph = model.graph
    node = {place: model.locate(place).node for place in (("mlp_out", 0), ("z", 1), ("mlp_out", 1))}
    targets = [out.name for out in model.program.outputs]
    with base.fork() as world:
        world.patch(("mlp_out", 0), source)
        world.patch(cw.site("z", layer=1, head=1), source)
        world.patch(("mlp_out", 1), source)
        _ = world.logits
        given = [node["mlp_out", 0], node["mlp_out", 1]]
        support = graph.support(targets, cut=given)
        stale = (set(graph.cone([*node.values()])) - set(given)) & set(support)
        assert sorted(world.ledger.recomputed) == sorted(stale)
        assert node["z", 1] in world.ledger.recomputed
    with base.fork() as world:
        world.patch(("mlp_out", 0), source)
        world.patch(("z", 1), source)
        _ = world.logits
        cost = theory.patched_cost(graph, [node["mlp_out", 0], node["z", 1]], targets)
        assert len(world.ledger.recomputed) == cost.batched


def test_a_second_demand_computes_nothing() -> None:
    _, base, source = base_and_source()
    with base.fork() as world:
        world.patch(("z", 1), source)
        first = world.logits
        count = len(world.ledger.recomputed)
        assert world.logits is first
        assert len(world.ledger.recomputed) == count


def test_a_dropped_world_is_gone_at_once() -> None:
    """No cycle keeps its values until the garbage collector comes."""
    _, base, source = base_and_source()
    gc.disable()
    try:
        world: RunWorld | None = base.fork()
        assert world is not None
        world.patch(cw.site("z", layer=0, head=1), source)
        world.patch(cw.site("z", layer=1, head=1), lambda z: z + 1)
        world.patch(cw.site("result", layer=2, head=1), "zero")
        logits = weakref.ref(world.logits)
        world = None
        assert logits() is None
    finally:
        gc.enable()


# -- patches without effect -------------------------------------------------------------------------


def test_a_patch_that_changes_nothing_is_reported() -> None:
    _, base, source = base_and_source()
    with base.fork() as world:
        world.patch(cw.site("z", layer=1, head=1), base)
        with pytest.warns(
            NoEffectWarning, match=r"z\[layer=1, head=1\] changes nothing: its value is the old"
        ) as caught:
            assert torch.equal(world.logits, base.logits)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        world.patch(cw.site("z", layer=1, head=2), source)
        with pytest.warns(NoEffectWarning, match=r"head=1\] changes nothing") as caught:
            _ = world.logits
        assert len(caught) == 1
    with base.fork() as world:
        world.patch(("mlp_out", 1), lambda own: own)
        with pytest.warns(NoEffectWarning, match="changes nothing"):
            _ = world.logits


def test_minus_zero_for_zero_is_a_change() -> None:
    _, base, _ = base_and_source()
    with base.fork() as world:
        world.patch(("mlp_out", 1), "zero")
        with world.fork() as inner:
            inner.patch(("mlp_out", 1), lambda zeros: -zeros)
            _ = inner.logits


def test_the_old_value_where_another_patch_would_change_it_is_a_change() -> None:
    """Freezing a site is what path patching does."""
    _, base, source = base_and_source()
    with base.fork() as world:
        world.patch(("resid_pre", 0), source)
        world.patch(("mlp_out", 1), base)
        world.patch(cw.site("z", layer=2, head=1), base)
        assert not torch.equal(world.logits, source.logits)


def test_a_patch_that_the_demand_does_not_depend_on_is_reported() -> None:
    _, base, source = base_and_source()
    with base.fork() as world:
        world.patch(("mlp_out", 2), source)
        with pytest.warns(
            NoEffectWarning, match=r"mlp_out\[layer=2\] has no effect on what was asked for"
        ) as caught:
            assert world["z", 1] is not None
        assert caught[0].filename == __file__


def test_a_patch_that_others_shield_is_reported() -> None:
    _, base, source = base_and_source()
    with base.fork() as world:
        world.patch(("mlp_out", 0), source)
        world.patch(("resid_post", 1), source)
        with pytest.warns(NoEffectWarning, match=r"mlp_out\[layer=0\] has no effect"):
            _ = world.logits


def test_reading_for_a_patch_reports_nothing() -> None:
    """Neither a parent's patches nor a source's are in the way of what is read upstream of them."""
    _, base, source = base_and_source()
    with base.fork() as outer, outer.fork() as inner, source.fork() as other:
        outer.patch(("mlp_out", 2), source)
        other.patch(("mlp_out", 2), "zero")
        inner.patch(cw.site("z", layer=1, head=0), other)
        _ = inner.logits


# -- what cannot be put there -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(2, 12, 15),
            r"the value for z\[layer=1, head=1\] has shape \(2, 12, 15\), torch.float32",
        ),
        (torch.zeros(15), r"the place has shape \(2, 12, 16\), torch.float32, on cpu \(batch, pos, d_head\)"),
        (torch.zeros(1, 12, 16), "nothing is cast, moved or broadcast"),
        (torch.zeros(2, 12, 16, dtype=torch.float64), "has shape .* torch.float64"),
        (torch.zeros(2, 12, 16, device="meta"), "on meta; the place has"),
        ("noise", "cannot patch z.* with 'noise'. A patch is another run, a tensor, 'zero', 'mean'"),
        (0.0, "with 0.0"),
        (None, "with None"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_when_it_is_given(value: Any, message: str) -> None:
    _, base, _ = base_and_source()
    with base.fork() as world:
        with pytest.raises(PatchError, match=message):
            world.patch(cw.site("z", layer=1, head=1), value)
        assert torch.equal(world.logits, base.logits)


def test_a_vector_is_put_at_every_position_of_every_prompt() -> None:
    _, base, _ = base_and_source()
    place, drawn = cw.site("z", layer=1, head=1), torch.randn(12, 16)
    for value in (drawn[0], drawn, torch.tensor(0.25)):
        with base.fork() as world, base.fork() as other:
            world.patch(place, value)
            other.patch(place, value.expand(2, 12, 16).clone())
            assert torch.equal(world.logits, other.logits)
    vector = drawn[0].clone().requires_grad_()
    with base.fork() as world:
        world.patch(place, vector)
        world.logits.sum().backward()
    assert vector.grad is not None
    assert vector.grad.abs().max() > 0


@pytest.mark.parametrize("is_reached", [False, True])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda z: z[:, :1], r"the value for z\[layer=1, head=1\] has shape \(2, 1, 16\)"),
        (lambda z: z.double(), "torch.float64"),
        (lambda z: None, "the function for z.* returned NoneType None; it has to return a tensor of shape"),
        (lambda z: 3.0, "returned float 3.0"),
    ],
)
def test_a_function_that_returns_what_does_not_fit_is_refused(
    function: Any, message: str, is_reached: bool
) -> None:
    _, base, source = base_and_source()
    with base.fork() as world:
        if is_reached:
            world.patch(("resid_pre", 0), source)
        world.patch(cw.site("z", layer=1, head=1), function)
        with pytest.raises(PatchError, match=message):
            _ = world.logits


def test_a_run_of_another_model_or_length_is_refused() -> None:
    _, base, _ = base_and_source()
    other = small("llama").run(**inputs("llama"))
    shorter = small().run(**inputs(length=7))
    with base.fork() as world:
        with pytest.raises(PatchError, match=r"a run of another model \(LlamaForCausalLM\); both"):
            world.patch(("z", 1), other)
        with pytest.raises(PatchError, match=r"has shape \(2, 7, 4, 16\).* has shape \(2, 12, 4, 16\)"):
            world.patch(("z", 1), shorter)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"head": 4}, "no head 4: the axis 'head' has 4 entries here, 0 to 3"),
        ({"head": -5}, "no head -5"),
        ({"head": [0, 9]}, "no head 9"),
        ({"head": [1, -3]}, r"head=\[1, -3\] names an entry twice"),
        ({"head": []}, r"head=\[\] selects nothing"),
        ({"pos": slice(12, 20)}, r"pos=slice\(12, 20, None\) selects nothing: the axis 'pos' has 12"),
        ({"pos": slice(None, None, -1)}, "a slice goes forward"),
        ({"neuron": 0}, "no axis 'neuron' here: this site's axes are batch, pos, head, d_head"),
    ],
)
def test_a_part_that_is_not_there_is_refused(part: dict[str, Any], message: str) -> None:
    _, base, source = base_and_source()
    place = cw.site("z", layer=1, **part)
    with pytest.raises(MissingSiteError, match=message):
        _ = base[place]
    with base.fork() as world, pytest.raises(MissingSiteError, match=message):
        world.patch(place, source)


def test_a_name_that_is_not_there_is_refused() -> None:
    _, base, source = base_and_source()
    with base.fork() as world:
        with pytest.raises(MissingSiteError, match="'z' is a kind of site, one in each layer"):
            world.patch("z", source)
        with pytest.raises(MissingSiteError, match="this model's layers are 0 to 2"):
            world.patch(("z", 3), source)
        with pytest.raises(MissingSiteError, match=r"no site 'transformer.h.1.mpl'.* Nearest: transformer"):
            world.patch("transformer.h.1.mpl", source)
        with pytest.raises(MissingSiteError, match="attn_implementation='eager'"):
            world.patch(("pattern", 1), source)


def test_numbers_have_no_mean_where_they_are_names() -> None:
    _, base, _ = base_and_source()
    with base.fork() as world:
        with pytest.raises(
            PatchError, match=r"input_ids has no mean over batch and positions: .* torch.int64"
        ):
            world.patch("input_ids", "mean")
        world.patch("input_ids", "zero")
        expected = module_outputs(base.model, {"input_ids": torch.zeros(2, 12, dtype=torch.long)})
        assert_same(tree_leaves(world.outputs), expected)


def test_a_value_of_several_tensors_is_no_site() -> None:
    model, base, _ = base_and_source()
    several = next(r.name for r in model.program.records if r.shape is None)
    with pytest.raises(PatchError, match="is several tensors, not one"):
        _ = base[several]


def test_a_world_says_what_is_patched() -> None:
    _, base, source = base_and_source()
    with base.fork() as world:
        assert repr(world).endswith("patched at nothing")
        world.patch(cw.site("z", layer=1, head=[0, 2], pos=slice(3, None)), source)
        assert repr(world) == (
            "RunWorld over Run of GPT2LMHeadModel on input_ids (2, 12), "
            "patched at z[layer=1, head=[0, 2], pos=3:]"
        )

"""Runs: equal to the module bit for bit, in the module's own structure; what is kept, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import conewise as cw
from conewise.arguments import as_bytes
from conewise.errors import GradientError, InputMismatchError, PatchError
from conewise.program.walk import output_names
from tests.program.zoo import ZOO
from tests.sweeps.captured import assert_same, inputs, module_outputs, small

MODELS = ["gpt2", "llama", "bert", "t5", "skips", "two_and_two"]


@pytest.mark.parametrize("keep", [None, "all", "sites"])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_equals_the_module_bit_for_bit(name: str, keep: str | None) -> None:
    model = small(name)
    for batch, length in ((1, 12), (3, 12), *(((2, 7),) if len(ZOO[name].lengths) > 1 else ())):
        given = inputs(name, batch, length)
        some = [next(iter(model.sites)).name] if keep == "sites" else keep
        run = model.run(**given, keep=some)
        expected = module_outputs(model, given)
        assert_same(tree_leaves(run.outputs), expected)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_on_either_side_and_none_at_all_equal_the_module(name: str) -> None:
    """The module skips a mask that hides nothing, and then chooses another kernel; the graph keeps to one."""
    module = ZOO[name].make("sdpa")
    whole = torch.ones(2, 9, dtype=torch.long)
    right, left = whole.clone(), whole.clone()
    right[0, -3:], left[0, :3] = 0, 0
    ids = inputs(name, length=9)["input_ids"]
    model = cw.capture(module, input_ids=ids, attention_mask=whole)
    for mask in (whole, right, left):
        given = {"input_ids": ids, "attention_mask": mask}
        assert_same(tree_leaves(model.run(**given).outputs), module_outputs(model, given))
    padded = model.run(input_ids=ids, attention_mask=right)
    cut = model.run(input_ids=ids[:1, :6], attention_mask=whole[:1, :6])
    torch.testing.assert_close(padded.logits[:1, :6], cut.logits, atol=1e-6, rtol=1e-5)
    with padded.fork() as world:
        world.patch(cw.site("z", layer=1, pos=slice(6, None), batch=0), "zero")
        assert torch.equal(world.logits[1], padded.logits[1])
        assert torch.equal(world.logits[0, :6], padded.logits[0, :6])


def test_outputs_have_the_structure_of_the_module() -> None:
    model, given = small("two_and_two"), inputs("two_and_two")
    run = model.run(**given)
    assert list(run.outputs) == ["sum", "parts"]
    assert torch.equal(run.sum, run.outputs["sum"])
    assert isinstance(run.parts, tuple)
    assert torch.equal(run.parts[1], run.outputs["parts"][1])
    gpt2 = small()
    outputs = gpt2.run(**inputs()).outputs
    with torch.no_grad():
        assert type(outputs) is type(gpt2.module(**inputs(), use_cache=False))


class Sized(nn.Module):
    """Returns numbers beside a tensor: sizes of its input, and what is made of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        batch, length = x.shape[0], x.shape[1]
        y = self.out(self.inner(x).relu())
        return {"n": batch, "y": y, "counts": (batch * length, batch / 2, batch > 2, 7)}


def test_sizes_among_the_outputs_are_the_numbers_of_the_run() -> None:
    module = Sized().eval()
    model = cw.capture(module, torch.randn(2, 5, 4))
    for shape in ((2, 5, 4), (3, 6, 4)):
        x = torch.randn(shape)
        run, expected = model.run(x), module(x)
        assert (run.outputs["n"], run.outputs["counts"]) == (expected["n"], expected["counts"])
        assert [*map(type, run.counts)] == [int, float, bool, int]
        with run.fork() as world:
            world.patch("inner", "zero")
            assert (world.outputs["n"], world.outputs["counts"]) == (shape[0], expected["counts"])


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
def test_a_metric_of_all_outputs_is_given_the_sizes_of_one_world(evaluator: str) -> None:
    model = cw.capture(Sized().eval(), torch.randn(2, 5, 4))
    base, source = model.run(torch.randn(3, 6, 4)), model.run(torch.randn(3, 6, 4))
    seen: list[tuple[int, int]] = []

    def metric(out: dict[str, Any]) -> Tensor:
        seen.append((out["n"], out["counts"][0]))
        found: Tensor = out["y"].mean((1, 2)) * out["n"]
        return found

    result = model.sweep(["inner", "out"], base=base, source=source, metric=metric).run(evaluator=evaluator)
    assert set(seen) == {(3, 18)}
    assert result.verify(n=2).ok


def test_a_field_of_the_outputs_computes_that_field_alone() -> None:
    run = small("two_and_two").run(**inputs("two_and_two"))
    with run.fork() as world:
        world.patch("right", "zero")
        assert world.parts[0] is run.parts[0]
        assert "out/linear" not in world.ledger.recomputed
        assert not torch.equal(world.sum, run.sum)
        assert "out/linear" in world.ledger.recomputed


def test_a_sequential_takes_its_input_by_position() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    module = nn.Sequential(first, nn.ReLU(), last)
    model = cw.capture(module, torch.randn(3, 8))
    x = torch.randn(5, 8)
    run = model.run(x)
    with torch.no_grad():
        assert torch.equal(run.outputs, module(x))
        assert torch.equal(run["1"], first(x).relu())
    with run.fork() as world:
        world.patch("1", "zero")
        assert torch.equal(world.outputs, last.bias.detach().expand(5, 4))


def test_bfloat16_on_the_cpu() -> None:
    case = ZOO["llama"]
    module = case.make("sdpa", torch.bfloat16)
    model = cw.capture(module, **case.example(1, 12))
    run = model.run(**case.example(2, 9))
    assert run.logits.dtype == torch.bfloat16
    with run.fork() as world:
        world.patch(cw.site("k", layer=1, kv_head=1), "zero")
        assert not torch.equal(world.logits, run.logits)


def test_the_last_position_alone_when_it_is_asked_for() -> None:
    module, given = ZOO["gpt2"].make("sdpa"), inputs()
    run = cw.capture(module, **given, logits_to_keep=1).run(**given)
    with torch.no_grad():
        assert torch.equal(run.logits, module(**given, logits_to_keep=1, use_cache=False).logits)
    assert run.logits.shape[1] == 1


def test_a_run_under_inference_mode_gives_the_same() -> None:
    model, given = small(), inputs()
    expected = model.run(**given).logits
    with torch.inference_mode():
        run = model.run(**given)
        with run.fork() as world:
            world.patch(("z", 1), "zero")
            assert not torch.equal(world.logits, expected)
    assert torch.equal(run.logits, expected)


def test_results_carry_no_gradient() -> None:
    run = small().run(**inputs())
    assert not run.logits.requires_grad
    assert not run["z", 0].requires_grad
    with run.fork() as world:
        world.patch(("z", 0), lambda z: z * nn.Parameter(torch.tensor(2.0)))
        assert not world.logits.requires_grad


# -- what does not fit ----------------------------------------------------------------------


def test_a_run_of_other_arguments_is_refused() -> None:
    model = small()
    with pytest.raises(InputMismatchError, match="lacks 'input_ids'"):
        model.run()
    with pytest.raises(
        InputMismatchError, match=r"torch.float32 on cpu, but torch.int64 on cpu was captured"
    ):
        model.run(input_ids=torch.zeros(1, 12))
    with pytest.raises(InputMismatchError, match="'attention_mask' was not part of the captured call"):
        model.run(**inputs(), attention_mask=torch.zeros(2, 12))
    with pytest.raises(InputMismatchError, match="captured with 2 dimensions"):
        model.run(input_ids=torch.zeros(12, dtype=torch.long))


def test_a_name_that_the_outputs_lack_lists_those_they_have() -> None:
    run = small().run(**inputs())
    with pytest.raises(AttributeError, match=r"Run has no 'logit', and neither have .* \(logits\)"):
        _ = run.logit
    two = small("two_and_two").run(**inputs("two_and_two"))
    with pytest.raises(AttributeError, match=r"\(sum, parts\)"):
        _ = two.items
    mlp = cw.capture(nn.Linear(2, 2), torch.zeros(3, 2)).run(torch.zeros(3, 2))
    with pytest.raises(AttributeError, match=r"\(one tensor\). All outputs together are `.outputs`"):
        _ = mlp.logits


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("z", "keep is 'all', a list of places, an amount of memory or None, and 'z' is none"),
        (3.5, "keep is 'all', a list of places, an amount of memory or None, and 3.5 is none"),
        (cw.site("z", layer=1), "keep is 'all', a list of places, an amount of memory or None"),
        (("z", 1), r"write keep=\[\('z', 1\)\]"),
    ],
)
def test_a_keep_that_is_no_list_of_places_is_refused(keep: Any, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        small().run(**inputs(), keep=keep)


@pytest.mark.parametrize("budget", [1, 20_000, "40 KB", "1GiB"])
def test_a_run_keeps_no_more_than_its_budget_and_computes_the_rest_again(budget: int | str) -> None:
    model = small()
    run, whole = model.run(**inputs(), keep=budget), model.run(**inputs())
    held = [run.world.is_stale(name) for name in model.graph.computed]
    sizes = model.estimated_bytes(run.inputs)
    outputs = set(output_names(model.program))
    kept = sum(
        sizes.get(name, 0)
        for name, stale in zip(model.graph.computed, held, strict=True)
        if not stale and name not in outputs
    )
    allowed = as_bytes(budget)
    assert allowed is not None
    assert kept <= allowed
    assert any(held) == (allowed < sum(sizes.values()))
    for site in model.sites:
        if site.kind == "z":
            assert torch.equal(run[site.name], whole[site.name])


# -- values are shared, so they are not to be written to ---------------------------------------


def test_a_write_to_a_cached_value_is_noticed() -> None:
    run = small().run(**inputs())
    run["z", 1][:, :, 0] = 0
    with pytest.raises(PatchError, match=r"was written to after it was read .* `run\[...\].clone\(\)`"):
        _ = run.logits
    other = small().run(**inputs())
    other.logits.zero_()
    with pytest.raises(PatchError, match="was written to"), other.fork() as world:
        world.patch(("z", 1), "zero")


@pytest.mark.parametrize("way", ["data", "numpy", "view"])
def test_a_write_that_torch_does_not_count_is_noticed(way: str) -> None:
    """At the latest when something is computed of it, and before a sweep."""

    def write(value: Tensor) -> None:
        match way:
            case "data":
                value.data[0, 0] = 3.0
            case "numpy":
                value.detach().numpy()[0, 0] += 1.0
            case _:
                value[:, 1:].data.mul_(2)

    run = small().run(**inputs())
    write(run["mlp_out", 1])
    with pytest.raises(PatchError, match="was written to after it was read"):
        _ = run["mlp_out", 1]
    with run.fork() as world:
        world.patch(("mlp_out", 2), lambda value: value + 1)
        with pytest.raises(PatchError, match=r"was written to after it was read .* `run\[...\].clone\(\)`"):
            _ = world.logits
    run = small().run(**inputs())
    write(run.logits)
    sweep = small().sweep(cw.sites("mlp_out", layer=":"), base=run, source="zero", metric=cw.logit(1))
    with pytest.raises(PatchError, match="was written to after it was read"):
        sweep.run()


def test_a_write_to_the_inputs_of_a_run_is_noticed() -> None:
    run = small().run(**inputs())
    run.inputs["input_ids"][0, 0] += 1
    with pytest.raises(PatchError, match="the value of 'input_ids' was written to"):
        _ = run.logits
    run = small().run(**inputs())
    run.inputs["input_ids"].numpy()[0, 0] += 1
    with pytest.raises(PatchError, match="the value of 'input_ids' was written to"):
        run.check()


def test_a_write_to_the_weights_is_noticed() -> None:
    module = nn.Linear(2, 2)
    model = cw.capture(module, torch.zeros(3, 2))
    run = model.run(torch.ones(3, 2))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(PatchError, match="the weights of Linear were written to after this run"):
        _ = run.outputs
    with torch.no_grad():
        assert torch.equal(model.run(torch.ones(3, 2)).outputs, module(torch.ones(3, 2)))


def test_what_is_given_may_be_written_to_afterwards() -> None:
    model, given = small(), inputs()
    run = model.run(**given, keep=[("z", 2)])
    expected, untouched = run.logits.clone(), model.run(**given)
    value = torch.randn(2, 12, 64)
    with run.fork() as world:
        world.patch(("mlp_out", 0), value)
        value.zero_()
        given["input_ids"].zero_()
        patched = world.logits
        assert torch.equal(run["mlp_out", 1], untouched["mlp_out", 1])
    assert not torch.equal(patched, expected)
    torch.manual_seed(0)


def test_a_function_that_writes_to_what_it_is_given_changes_no_baseline() -> None:
    run = small().run(**inputs())
    before = run["z", 1].clone()

    def zeroed(z: Tensor) -> Tensor:
        return z.zero_()

    with run.fork() as world:
        world.patch(cw.site("z", layer=1, head=2), zeroed)
        by_function = world.logits
    assert torch.equal(run["z", 1], before)
    with run.fork() as world:
        world.patch(cw.site("z", layer=1, head=2), "zero")
        assert torch.equal(world.logits, by_function)


# -- what is kept --------------------------------------------------------------------------------

SITES = [cw.site("z", layer=1, head=2), cw.site("mlp_out", layer=2), cw.site("result", layer=1, head=0)]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_results_do_not_depend_on_what_is_kept(name: str) -> None:
    model, given = small(name), inputs(name)
    whole, sparse = model.run(**given), model.run(**given, keep=SITES)
    source = model.run(**inputs(name, seed=2), keep=SITES)
    for place in SITES:
        with whole.fork() as one, sparse.fork() as other:
            one.patch(place, source)
            other.patch(place, source)
            assert torch.equal(one.logits, other.logits)
            assert one.ledger.recomputed == other.ledger.recomputed
    for site in model.sites:
        if not isinstance(whole.world.demand(site.node), Tensor):
            continue
        assert torch.equal(whole[site.name], sparse[site.name]), site.name


def test_a_kept_site_needs_nothing_else_of_the_baseline() -> None:
    """Patches at the kept places compute nothing in the baseline: all that they read was kept."""
    model = small()
    run = model.run(**inputs(), keep=SITES[:2])
    source = model.run(**inputs(seed=2), keep=SITES[:2])
    for place in SITES[:2]:
        with run.fork() as world:
            world.patch(place, source)
            _ = world.logits
    assert run.ledger.recomputed == []
    assert source.ledger.recomputed == []
    assert run["pre", 0].shape == (2, 12, 256)
    assert run.ledger.recomputed != []


def test_a_bare_kind_is_kept_in_all_of_its_layers() -> None:
    model = small()
    by_kind = model.run(**inputs(), keep=["z", "mlp_out"])
    spelled = model.run(**inputs(), keep=[(kind, layer) for kind in ("z", "mlp_out") for layer in range(3)])
    assert held(by_kind) == held(spelled)


def held(run: cw.Run) -> set[str]:
    return {site for site in run.model.graph.computed if not run.world.is_stale(site)}


def storage_bytes(values: list[Any]) -> int:
    """The bytes that these values hold in memory, shared storage counted once."""
    storages: dict[int, int] = {}
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, tuple | list):
            stack.extend(value)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_only_what_patches_read_is_held() -> None:
    model = small()
    sparse, whole = (model.run(**inputs(), keep=keep) for keep in (["z", "mlp_out"], "all"))
    computed = set(model.graph.computed)
    kept = held(sparse)
    places = [(kind, layer) for kind in ("z", "mlp_out") for layer in range(3)]
    assert held(whole) == computed
    assert kept == model.read_by_patches_at(places) | {out.name for out in model.program.outputs}
    sizes = [
        storage_bytes([run.world.demand(name) for name in names])
        for run, names in ((sparse, kept), (whole, computed))
    ]
    assert sizes[0] < 0.5 * sizes[1]


def test_a_model_too_large_to_keep_all_keeps_what_its_named_sites_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small()
    monkeypatch.setattr("conewise.runs.run.KEEP_ALL_BYTES", 1000)
    run = model.run(**inputs())
    computed = set(model.graph.computed)
    assert held(run) < computed
    for kind in model.sites.kinds:
        with run.fork() as world:
            world.patch((kind, 1), "zero")
            _ = world.logits
    assert run.ledger.recomputed == []
    sequential = cw.capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.zeros(300, 2))
    assert sequential.run(torch.zeros(300, 2))["0"].shape == (300, 2)


def test_gradients_of_a_captured_model_say_what_they_are_for() -> None:
    model = cw.capture(nn.Linear(3, 3), torch.randn(2, 3))
    for given in (model, model.run(torch.randn(2, 3))):
        with pytest.raises(
            GradientError, match=rf"adds nodes to a Graph, and a {type(given).__name__} is none"
        ):
            cw.gradients(given, "linear", ["input"])  # type: ignore[arg-type]
    with pytest.raises(GradientError, match=r"'linear' .* has no `vjps`"):
        cw.gradients(model.graph, "linear", ["input"])

"""Weights that change after a run was made: whatever way they are written to, no number mixes old and new."""

from __future__ import annotations

import ctypes
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import ArgumentError, InexactCaptureWarning, WeightsChangedError
from conewise.model import Model
from conewise.program import weights as reading
from conewise.sweeps.sweep import Sweep
from tests.sweeps import small

WIDTH = 8


class Net(nn.Module):
    """Layers of which two are tied, a buffer that is saved, one that is not, a plain tensor, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.second.weight
        self.register_buffer("saved", torch.ones(WIDTH))
        self.register_buffer("unsaved", torch.ones(WIDTH), persistent=False)
        self.plain = torch.ones(WIDTH)
        self.held = [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.get_buffer("saved") + self.get_buffer("unsaved")
        out: Tensor = torch.tanh(self.second(x)) * self.plain + self.tied(x) + self.held[0]
        return out


@cache
def captured() -> Model:
    torch.manual_seed(0)
    return cw.capture(Net().eval(), torch.zeros(2, WIDTH))


@pytest.fixture
def net() -> Iterator[tuple[Net, Model]]:
    """A module and its model. Afterwards the module has the tensors that it had, with the same numbers."""
    model = captured()
    module = model.module
    modules = {name: (part, dict(vars(part))) for name, part in module.named_modules()}
    tables = [
        (part.__dict__[kind], dict(part.__dict__[kind])) for part, _ in modules.values() for kind in TABLES
    ]
    numbers = [
        (source.value, source.value.data, source.value.data.clone()) for source in model.program.sources
    ]
    yield module, model
    for table, entries in tables:
        table.clear()
        table.update(entries)
    module.plain = modules[""][1]["plain"]
    for tensor, data, values in numbers:
        tensor.data = data
        data.copy_(values)
        tensor.grad = None


TABLES = ("_parameters", "_buffers", "_modules")


def given(seed: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def total(outputs: Tensor) -> Tensor:
    return outputs.sum(-1)


def sweep_of(model: Model, base: Any = None, source: Any = None, metric: Any = total) -> Sweep:
    base = model.run(given(1)) if base is None else base
    source = model.run(given(2)) if source is None else source
    found: Sweep = model.sweep([cw.site("first"), cw.site("second")], base=base, source=source, metric=metric)
    return found


def patched(base: cw.Run, place: str) -> Tensor:
    with base.fork() as world:
        world.patch(place, lambda value: value * 2)
        found: Tensor = world.outputs
    return found


def data_write(module: Net) -> None:
    module.first.weight.data.mul_(2)


def one_number(module: Net) -> None:
    module.first.weight.data[3, 5] += 1e-6


def numpy_write(module: Net) -> None:
    module.first.bias.detach().numpy()[2] = 7.0


def memory_write(module: Net) -> None:
    ctypes.memset(module.second.weight.data_ptr() + 12, 1, 3)


def other_data(module: Net) -> None:
    module.first.weight.data = torch.randn(WIDTH, WIDTH)


def negated(module: Net) -> None:
    module.second.weight.data.neg_()


def exchanged(module: Net) -> None:
    rows = module.second.weight.data
    rows[[1, 4]] = rows[[4, 1]]


def counted(module: Net) -> None:
    with torch.no_grad():
        module.first.weight.add_(1)


def stepped(module: Net) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(given(3)).sum().backward()
    optimizer.step()


def buffer_write(module: Net) -> None:
    module.get_buffer("saved").mul_(3)


def buffer_data(module: Net) -> None:
    module.get_buffer("unsaved").data.mul_(3)


def plain_data(module: Net) -> None:
    module.plain.data[0] = 5.0


def held_data(module: Net) -> None:
    module.held[0].data[0] = 5.0


def loaded(module: Net) -> None:
    module.load_state_dict(Net().state_dict())


WRITES: list[tuple[Callable[[Net], None], str]] = [
    (data_write, "'first.weight'"),
    (one_number, "'first.weight'"),
    (numpy_write, "'first.bias'"),
    (memory_write, "'second.weight' = 'tied.weight'"),
    (other_data, "'first.weight'"),
    (negated, "'second.weight'"),
    (exchanged, "'second.weight'"),
    (counted, "'first.weight'"),
    (stepped, "'first.weight', 'first.bias', 'second.weight'"),
    (buffer_write, "'saved'"),
    (buffer_data, "'unsaved'"),
    (plain_data, "'plain'"),
    (held_data, "'lifted_tensor_0'"),
    (loaded, "'first.weight', 'first.bias', 'second.weight'"),
]


def replaced(module: Net) -> None:
    module.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def assigned(module: Net) -> None:
    module.load_state_dict(Net().state_dict(), assign=True)


def untied(module: Net) -> None:
    module.tied.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def other_module(module: Net) -> None:
    module.first = nn.Linear(WIDTH, WIDTH)


def other_buffer(module: Net) -> None:
    module.register_buffer("unsaved", torch.zeros(WIDTH), persistent=False)


def other_plain(module: Net) -> None:
    module.plain = torch.zeros(WIDTH)


def gone(module: Net) -> None:
    del module.first.bias


def converted(module: Net) -> None:
    module.to(torch.float64)


def moved(module: Net) -> None:
    module.to("meta")


def strided(module: Net) -> None:
    module.first.weight.data = module.first.weight.data.t().contiguous().t()


REPLACEMENTS: list[tuple[Callable[[Net], None], str]] = [
    (replaced, "'first.weight' of Net was replaced by another tensor after the capture"),
    (assigned, "'first.weight' of Net was replaced by another tensor after the capture"),
    (untied, "'tied.weight' of Net was replaced by another tensor after the capture"),
    (other_module, "'first.weight' of Net was replaced by another tensor after the capture"),
    (other_buffer, "'unsaved' of Net was replaced by another tensor after the capture"),
    (other_plain, "'plain' of Net was replaced by another tensor after the capture"),
    (gone, "'first.bias' of Net is gone since the capture"),
    (converted, r"is another kind of tensor than at the capture: torch.float32 → torch.float64"),
    (moved, r"'first.weight' of Net .*(cpu → meta|was replaced)"),
    (strided, r"is another kind of tensor than at the capture: \(8, 1\) → \(1, 8\)"),
]


# -- writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("write", "names"), WRITES, ids=lambda part: getattr(part, "__name__", ""))
def test_a_write_after_the_base_was_made_is_refused_by_name(
    net: tuple[Net, Model], write: Callable[[Net], None], names: str
) -> None:
    module, model = net
    sweep, base = sweep_of(model), model.run(given(1))
    write(module)
    with pytest.raises(WeightsChangedError, match=rf"were written to after this run: {names}.*run again"):
        sweep.run()
    with pytest.raises(WeightsChangedError, match="written to"):
        patched(base, "first")
    with pytest.raises(WeightsChangedError, match="written to"):
        base.check()


@pytest.mark.parametrize(("write", "_"), WRITES, ids=lambda part: getattr(part, "__name__", ""))
def test_a_run_made_after_a_write_has_the_new_weights(
    net: tuple[Net, Model], write: Callable[[Net], None], _: str
) -> None:
    module, model = net
    old = sweep_of(model).run()
    write(module)
    with torch.no_grad():
        assert torch.equal(model.run(given(1)).outputs, module(given(1)))
    new = sweep_of(model).run(verify=2)
    assert new.verification
    assert not torch.equal(new.table, old.table)
    told = [(one.provenance["weights"], one.provenance["constants"]) for one in (old, new)]
    assert told[0] != told[1]


def test_a_sweep_over_inputs_follows_the_weights(net: tuple[Net, Model]) -> None:
    """Its baselines are made anew in each run: so is all that it planned and kept of the old weights."""
    module, model = net
    sweep = sweep_of(model, {"x": given(1)}, {"x": given(2)})
    before = sweep.run()
    module.first.weight.data.mul_(2)
    module.tied.weight.data.neg_()
    after = sweep.run(verify=2)
    fresh = sweep_of(cw.capture(module, torch.zeros(2, WIDTH)), {"x": given(1)}, {"x": given(2)}).run()
    assert after.verification
    assert torch.equal(after.table, fresh.table)
    assert not torch.equal(after.table, before.table)
    with pytest.raises(WeightsChangedError, match="written to after this result was made"):
        before.verify(n=1)


def test_weights_put_back_do_not_mend_a_run_that_was_used_meanwhile(net: tuple[Net, Model]) -> None:
    module, model = net
    base, kept = model.run(given(1)), module.first.weight.detach().clone()
    data_write(module)
    fork = base.fork()
    fork.patch("second", lambda value: value + 1)
    with pytest.raises(WeightsChangedError, match="written to"):
        _ = fork.outputs
    module.first.weight.data.copy_(kept)
    with pytest.raises(WeightsChangedError, match="written to"):
        _ = fork.outputs
    with pytest.raises(WeightsChangedError, match="written to"):
        sweep_of(model, base).run()


def test_a_base_made_while_the_weights_were_others_is_refused(net: tuple[Net, Model]) -> None:
    """Between two equal moments: the run itself knows the bits it was made with."""
    module, model = net
    clean, kept = model.run(given(1)), module.first.weight.detach().clone()
    one_number(module)
    changed = model.run(given(1))
    module.first.weight.data.copy_(kept)
    assert sweep_of(model, clean).run(verify=1).verification
    with pytest.raises(WeightsChangedError, match=r"'first.weight'"):
        sweep_of(model, changed).run()


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_write_while_the_sweep_runs_leaves_no_result_and_nothing_stored(
    net: tuple[Net, Model], evaluator: str, stored: bool, tmp_path: Path
) -> None:
    module, model = net

    def writing(outputs: Tensor) -> Tensor:
        module.first.weight.data.mul_(1.01)
        return outputs.sum(-1)

    sweep = sweep_of(model, metric=writing)
    out = tmp_path if stored else None
    # What is not stored may be done twice; then the base is of the weights before the first write.
    when = r"while the sweep ran" if stored else r"(while the sweep ran|after this run)"
    with pytest.raises(WeightsChangedError, match=rf"written to {when}: 'first.weight'"):
        sweep.run(evaluator=evaluator, out=out)
    if stored:
        with closing(sqlite3.connect(tmp_path / "job.sqlite")) as store:
            assert list(store.execute("SELECT count(*) FROM chunks")) == [(0,)]


def test_means_over_a_dataset_are_taken_anew_with_new_weights(net: tuple[Net, Model]) -> None:
    module, model = net
    means = cw.mean(model, [{"x": given(seed)} for seed in range(3)])
    old = sweep_of(model, source=means).run()
    data_write(module)
    new = sweep_of(model, source=means).run(verify=2)
    expected = sweep_of(model, source=cw.mean(model, [{"x": given(seed)} for seed in range(3)])).run()
    assert new.verification
    assert torch.equal(new.table, expected.table)
    assert not torch.equal(new.table, old.table)


def test_a_run_to_resample_from_is_checked_too(net: tuple[Net, Model]) -> None:
    module, model = net
    others = model.run(given(5))
    one_number(module)
    sweep = sweep_of(model, source=cw.resample(others))
    with pytest.raises(WeightsChangedError, match=r"'first.weight'"):
        sweep.run()


def test_rows_that_mix_only_with_the_new_weights_are_not_stacked() -> None:
    """What a trial found out with the old weights is forgotten with them."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.much = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            x, rows = self.lin(x), x.shape[0]
            return torch.tanh(torch.eye(rows) + self.much * torch.ones(rows, rows)) @ x

    torch.manual_seed(0)
    module = Mixing()
    model = cw.capture(module, torch.zeros(2, WIDTH))
    sweep = model.sweep([cw.site("lin")], base=[{"x": given(1)}], source=[{"x": given(2)}], metric=total)
    sweep.run()
    module.much.data.fill_(1.0)
    result = sweep.run()
    again = cw.capture(module, torch.zeros(2, WIDTH))
    fresh = again.sweep(
        [cw.site("lin")], base=[{"x": given(1)}], source=[{"x": given(2)}], metric=total
    ).run()
    assert result.plan.evaluator == fresh.plan.evaluator
    assert torch.equal(result.table, fresh.table)


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_mask_among_the_weights_is_read_anew_when_it_was_written_to(is_counted: bool) -> None:
    """What a mask hides decides which kernel computes attention, and which positions a change reaches."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())

        def forward(self, x: Tensor) -> Tensor:
            value, mask = self.value(x)[:, None], self.get_buffer("mask")
            seen = nn.functional.scaled_dot_product_attention(value, value, value, attn_mask=mask)
            return self.out(seen[:, 0])  # type: ignore[no-any-return]

    def given_at(seed: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed))}

    torch.manual_seed(0)
    module = Masked()
    model = cw.capture(module, **given_at(0))
    sweep = model.sweep(
        [cw.site("value")], base=given_at(1), source=given_at(2), metric=lambda out: out[:, 0].sum(-1)
    )
    before = sweep.run(evaluator="wavefront")
    mask = module.get_buffer("mask")
    (mask if is_counted else mask.data).fill_(True)
    with torch.no_grad():
        clean = module(**given_at(1))[:, 0].sum(-1).double().mean()
    after = sweep.run(evaluator="wavefront", verify=1)
    assert after.verification
    assert abs(float(after.base[0] - before.base[0])) > 1e-3
    assert abs(float(after.base[0] - clean)) < 1e-6


@pytest.mark.parametrize("source", ["inputs", "mean"])
def test_an_interrupted_sweep_leaves_nothing_that_was_found_with_other_weights(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """It stops before the bits are read that a glance does not see, and the weights are put back."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.randn(4096, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.lin(x)) * self.scale.exp().mean(0))  # type: ignore[no-any-return]

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    def sweep_over(model: Model) -> Sweep:
        given_source = {"x": given(2)} if source == "inputs" else cw.mean(model, [{"x": given(3)}])
        places = [cw.site("lin" if source == "inputs" else "out")]
        return model.sweep(places, base={"x": given(1)}, source=given_source, metric=total)

    monkeypatch.setattr(reading, "READ_WHOLE_BYTES", 0)
    torch.manual_seed(0)
    module = Scaled()
    model = cw.capture(module, torch.zeros(2, WIDTH))
    sweep = sweep_over(model)
    model.weights.whole_contents()
    kept = module.scale.detach().clone()
    for _ in range(2):  # the second time with what the first one kept
        module.scale.data[2:4] += 9
        with pytest.raises(KeyboardInterrupt):
            sweep.run(evaluator="wavefront", progress=stop)
        module.scale.data.copy_(kept)
    result = sweep.run(evaluator="wavefront")
    expected = sweep_over(cw.capture(module, torch.zeros(2, WIDTH))).run(evaluator="serial")
    torch.testing.assert_close(result.table, expected.table, rtol=0, atol=1e-6)


# -- replacements --------------------------------------------------------------------------------


@pytest.mark.parametrize(("replace", "message"), REPLACEMENTS, ids=lambda part: getattr(part, "__name__", ""))
def test_a_module_whose_tensors_were_replaced_is_to_be_captured_again(
    net: tuple[Net, Model], replace: Callable[[Net], None], message: str
) -> None:
    module, model = net
    sweep, base = sweep_of(model), model.run(given(1))
    replace(module)
    for asked in (lambda: model.run(given(1)), sweep.run, sweep.plan, base.check):
        with pytest.raises(WeightsChangedError, match=rf"(?s){message}.*Capture the module again"):
            asked()


def test_equal_tensors_in_place_of_the_captured_ones_change_nothing(net: tuple[Net, Model]) -> None:
    module, model = net
    sweep = sweep_of(model)
    old = sweep.run()
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    module.second.weight.data = module.second.weight.data.clone()
    assert torch.equal(sweep.run().table, old.table)
    with torch.no_grad():
        module.first.weight.add_(1)  # the new one, which the captured model has not
    with pytest.raises(WeightsChangedError, match=r"'first.weight' of Net was replaced"):
        sweep.run()


# -- what is read --------------------------------------------------------------------------------


def test_of_a_large_model_a_sample_is_read_each_time_and_all_where_it_is_asked_for_or_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "READ_WHOLE_BYTES", 0)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300))
    model = cw.capture(module, torch.zeros(2, 300))
    x, weight = torch.ones(2, 300), module.get_parameter("0.weight")

    def unseen() -> None:
        """A word that is not read: of a small tensor the first of 127 is."""
        weight.data.view(-1)[16] += 1

    base = model.run(x)
    unseen()
    patched(base, "1")  # not noticed, as is documented
    with pytest.raises(WeightsChangedError, match=r"'0.weight'"):
        base.check()
    writes: list[Callable[[Tensor], object]] = [
        lambda rows: rows[6:10].zero_(),
        lambda rows: rows[:, 5].zero_(),
        lambda rows: rows.mul_(-1),
    ]
    for write in writes:
        base = model.run(x)
        write(weight.data)
        with pytest.raises(WeightsChangedError, match=r"'0.weight'"):
            patched(base, "1")
    base = model.run(x)
    unseen()
    sweep = model.sweep([cw.site("1")], base=base, source="zero", metric=total)
    sample = sweep.run()
    with pytest.raises(WeightsChangedError, match=r"'0.weight'"):
        sweep.run(check_weights="full")
    with pytest.raises(WeightsChangedError, match=r"'0.weight'"):
        sweep.run(out=tmp_path / "stored")
    with pytest.raises(WeightsChangedError, match=r"'0.weight'"):
        sample.verify()
    with pytest.raises(ArgumentError, match=r"`check_weights` is str 'some'; expected 'sample' or 'full'"):
        sweep.run(check_weights="some")  # type: ignore[arg-type]
    base = model.run(x)
    assert model.sweep([cw.site("1")], base=base, source="zero", metric=total).run(verify=1).verification


@pytest.mark.parametrize(
    ("shape", "dtype", "order"),
    [
        ((640, 576), torch.float32, (0, 1)),
        ((640, 61 * 16), torch.float32, (0, 1)),
        ((61 * 32, 300), torch.bfloat16, (1, 0)),
        ((513, 777), torch.float32, (0, 1)),
        ((300, 1001), torch.float64, (1, 0)),
        ((7, 130, 1000), torch.float32, (0, 1, 2)),
    ],
)
def test_the_sample_has_an_element_of_every_block_of_64_by_64(
    shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype).permute(order)
    glance = reading._Glance([weight])
    before, (rows, columns) = glance.read(), weight.shape[-2:]
    for _ in range(200):
        row, column = (int(torch.randint(n - 63, (), generator=generator)) for n in (rows, columns))
        block = weight[..., row : row + 64, column : column + 64]
        kept = block.clone()
        block.zero_()
        assert glance.read() != before
        block.copy_(kept)
    assert glance.read() == before


def test_forks_inside_of_checked_once_look_for_writes_at_its_ends(
    net: tuple[Net, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, model = net
    base, looks = model.run(given(1)), []
    glance = model.weights.glance

    def counted_glance() -> reading.Sums:
        looks.append(1)
        return glance()

    monkeypatch.setattr(model.weights, "glance", counted_glance)
    with base.checked_once():
        for _ in range(5):
            patched(base, "first")
    assert len(looks) == 2
    with pytest.raises(WeightsChangedError, match=r"'first.weight'"), base.checked_once():
        data_write(module)


def bits(tensor: Tensor) -> int:
    return reading.bits_of([tensor])[0]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (3,), (40, 5), (7, 3, 3)])
def test_the_bits_of_any_tensor_are_read(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    tensor = drawn.to(dtype)
    sum_of_bits = bits(tensor)
    assert sum_of_bits == bits(tensor.clone())
    for place in range(0, tensor.numel(), 7):
        other = tensor.clone()
        octets = other.view(-1).view(torch.uint8)
        octets[place * tensor.itemsize] ^= 1
        assert bits(other) != sum_of_bits
    if tensor.ndim > 1:
        assert bits(tensor.transpose(0, 1)[1]) == bits(tensor.transpose(0, 1)[1].clone())


def test_exchanged_and_negated_numbers_change_the_bits() -> None:
    """Changes that a plain sum or an exclusive or of the words would not see."""
    one = torch.eye(64)
    assert bits(one) != bits(one.flip(0))
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert bits(signs) != bits(-signs)
    large = torch.randn(600, 600, generator=torch.Generator().manual_seed(0))
    halves = torch.cat([large[300:], large[:300]])
    assert len({bits(one) for one in (large, halves, -large, large.flip(1))}) == 4
    odd = large.clone()
    odd[:, 1::2].neg_()
    assert bits(odd) != bits(large)


def test_bits_are_read_in_inference_mode_and_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SCRATCH", threading.local())
    with torch.inference_mode():
        inside = torch.arange(10)
        first = bits(inside)
    assert bits(inside) == first == bits(torch.arange(10))


def test_weights_without_memory_have_no_bits() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.warns(InexactCaptureWarning, match="no values on the meta device"):
        model = cw.capture(module, torch.zeros(2, 2, device="meta"))
    assert set(model.weights.whole_contents().whole) == {0}
    run = model.run(torch.zeros(2, 2, device="meta"))
    assert run.outputs.shape == (2, 2)


class Holed(nn.Module):
    """Its weight is every other column of a larger tensor, which no view of words can cover."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("every_other", torch.ones(WIDTH, 2 * WIDTH)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.get_buffer("every_other")


def test_a_write_to_a_tensor_with_holes_is_seen_at_any_reading() -> None:
    module = Holed().eval()
    model = cw.capture(module, torch.zeros(2, WIDTH))
    readings = [model.weights.whole_contents().whole for _ in range(3)]
    assert readings[0] == readings[1] == readings[2]
    module.get_buffer("every_other").data[3, 3] = 2.0
    assert model.weights.whole_contents().whole != readings[0]


PAST_THE_COUNTER: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda weight: weight.data.mul_(2),
    "numpy": lambda weight: weight.detach().numpy().__imul__(2),
}
OLD: dict[str, Callable[[Any, Any, Any], object]] = {
    "gradients": lambda model, old, new: old.gradients(cw.logit(5), [("mlp_out", 0)]),
    "gradients of a fork": lambda model, old, new: old.fork().gradients(cw.logit(5), [("mlp_out", 0)]),
    "backward cost": lambda model, old, new: old.backward_cost(cw.logit(5), [("mlp_out", 0)]),
    "lens": lambda model, old, new: old.lens(),
    "decompose": lambda model, old, new: old.decompose(),
    "logit attribution": lambda model, old, new: old.logit_attribution(cw.logit(5)),
    "kl": lambda model, old, new: cw.kl_to(old),
    "patch": lambda model, old, new: new.fork().patch(("mlp_out", 0), old),
    "resample": lambda model, old, new: new.fork().patch(("mlp_out", 0), cw.resample(old)),
    "result": lambda model, old, new: model.estimates.check(),
    "metric": lambda model, old, new: model.sweep(
        [("mlp_out", 0)], base=new, source="zero", metric=model.metric
    ).run(),
}


@pytest.mark.parametrize("write", list(PAST_THE_COUNTER))
def test_nothing_mixes_old_values_with_weights_that_were_written_past_torchs_counter(write: str) -> None:
    model: Any = small.model()
    ids = small.prompts(1, 2)
    old = model.run(input_ids=ids)
    model.metric = cw.kl_to(old)
    model.estimates = model.attribute(
        cw.sites("mlp_out", layer=":"),
        base={"input_ids": ids},
        source={"input_ids": small.prompts(2, 2)},
        metric=cw.logit(5),
    ).run()
    weight = model.module.transformer.h[1].mlp.c_proj.weight
    kept = weight.detach().clone()
    PAST_THE_COUNTER[write](weight)
    new = model.run(input_ids=ids)
    for job in OLD.values():
        with pytest.raises(WeightsChangedError, match=r"were written to.*h\.1\.mlp\.c_proj\.weight"):
            job(model, old, new)
    weight.data.copy_(kept)
    assert model.estimates.check(top=1, n=1)

"""How a module is captured: its calls, its sizes, its writes in place, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from conewise.errors import (
    CaptureError,
    ControlFlowError,
    InputMismatchError,
    RandomnessError,
)
from conewise.program import export as capturing
from conewise.program.export import Exported, export
from conewise.program.records import SIZES, Ref
from conewise.program.walk import Interpreter


class Function(nn.Module):
    """A module without parameters, for one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def run(exported: Exported, *args: Any, **kwargs: Any) -> Any:
    interpreter = Interpreter(exported.program)
    return interpreter.output(interpreter.values(exported.signature.bind(args, kwargs)))


def gpt2(**options: Any) -> Any:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 100, "n_positions": 32}
    module: nn.Module = GPT2LMHeadModel(GPT2Config(**{**shape, **options}))  # type: ignore[no-untyped-call]
    return module.eval()


# -- calls ------------------------------------------------------------------------------------


def test_arguments_may_be_given_by_position_or_by_keyword() -> None:
    module, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(3, 8)
    exported = export(module, (x,))
    assert torch.equal(run(exported, x), module(x))
    assert torch.equal(run(exported, input=x), module(x))
    other = torch.randn(5, 8)
    assert torch.equal(run(exported, other), module(other))


class Nested(nn.Module):
    def forward(self, *parts: Tensor, batch: dict[str, Tensor], flag: bool = True, **rest: Any) -> Any:
        total = parts[0] + parts[1] + batch["x"]
        return (total, [total * 2, None, 3]) if flag else (total, rest)


def test_variadic_nested_and_constant_arguments_come_back_in_their_structure() -> None:
    x = torch.randn(3, 4)
    exported = export(Nested(), (x, x), {"batch": {"x": x}, "flag": True})
    assert [leaf.name for leaf in exported.program.inputs] == ["args.0", "args.1", "batch.x"]
    first, (second, nothing, three) = run(exported, x, 2 * x, batch={"x": x})
    assert torch.equal(first, 4 * x)
    assert torch.equal(second, 8 * x)
    assert (nothing, three) == (None, 3)


def test_a_constant_of_the_capture_cannot_change() -> None:
    x = torch.randn(3, 4)
    exported = export(Nested(), (x, x), {"batch": {"x": x}, "flag": True})
    with pytest.raises(InputMismatchError, match="'flag' is False, but the graph was captured with True"):
        run(exported, x, x, batch={"x": x}, flag=False)
    with pytest.raises(InputMismatchError, match="'more' was not part of the captured call"):
        run(exported, x, x, batch={"x": x}, more=x)
    with pytest.raises(InputMismatchError, match="missing a required argument: 'batch'"):
        run(exported, x, x)


def test_nothing_is_cast_silently() -> None:
    exported = export(nn.Linear(4, 4), (torch.randn(3, 4),))
    with pytest.raises(InputMismatchError, match=r"torch\.float64 on cpu, but torch\.float32"):
        run(exported, torch.randn(3, 4, dtype=torch.float64))


def test_hugging_face_models_are_captured_without_a_cache_and_on_request_for_the_last_position() -> None:
    module, ids = gpt2(), torch.randint(0, 100, (1, 6))
    exported = export(module, (), {"input_ids": ids}, last_position_only=True)
    logits = run(exported, input_ids=ids).logits
    assert logits.shape == (1, 1, 100)
    with torch.no_grad():
        expected = module(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    assert torch.equal(logits, expected)


def test_tied_weights_are_one_source() -> None:
    program = export(gpt2(), (), {"input_ids": torch.randint(0, 100, (1, 6))}).program
    tied = [source for source in program.sources if source.aliases]
    assert [(source.name, source.aliases) for source in tied] == [
        ("transformer.wte.weight", ("lm_head.weight",))
    ]


# -- sizes ------------------------------------------------------------------------------------


def test_sizes_are_no_records_and_come_from_the_shapes_of_the_inputs_alone() -> None:
    program = export(gpt2(), (), {"input_ids": torch.randint(0, 100, (1, 6))}).program
    assert not any("sym" in record.op for record in program.records)
    symbols = program.sizes.symbols
    assert list(symbols.values()) == [("input_ids", 0), ("input_ids", 1)]
    users = [record for record in program.records if SIZES in record.inputs]
    assert users
    assert all(record.inputs[-1] == SIZES for record in users)


def test_an_example_of_batch_one_and_length_one_still_varies() -> None:
    module = gpt2()
    exported = export(module, (), {"input_ids": torch.randint(0, 100, (1, 1))})
    ids = torch.randint(0, 100, (3, 9))
    with torch.no_grad():
        assert torch.equal(run(exported, input_ids=ids).logits, module(ids, use_cache=False).logits)


def test_a_size_that_the_module_fixes_is_named_when_it_is_broken() -> None:
    exported = export(
        Function(lambda x: x.reshape(-1, 6) * 2 if x.shape[1] == 6 else x), (torch.randn(2, 6, 3),)
    )
    with pytest.raises(InputMismatchError, match="dimension 1 is fixed in this capture"):
        run(exported, torch.randn(2, 5, 3))


def test_a_relation_that_tracing_took_for_granted_is_checked() -> None:
    exported = export(Function(lambda x: x * 2 if x.shape[0] < 5 else x * 3), (torch.randn(2, 4),))
    assert torch.equal(run(exported, torch.ones(4, 4)), 2 * torch.ones(4, 4))
    with pytest.raises(InputMismatchError, match=r"break a relation .* = 6 \(dimension 0 of 'x'\)"):
        run(exported, torch.ones(6, 4))


def test_a_module_whose_batch_is_fixed_is_captured_as_it_is_and_says_why() -> None:
    exported = export(Function(lambda x: x.view(2, 2).sum(0)), (torch.randn(4),))
    assert exported.fixed
    assert torch.equal(run(exported, torch.ones(4)), torch.full((2,), 2.0))


# -- writes in place --------------------------------------------------------------------------


def into_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3].add_(1)
    return y


def through_two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    left, flat = y[:, :2], y.view(-1)
    left.mul_(flat[2:4])
    flat.sub_(3)
    return left + 1, y.t()


def of_integers(x: Tensor) -> Tensor:
    y = (x * 10).long()
    y.div_(3, rounding_mode="floor")
    y += 1
    return y


def of_a_transposed_value(x: Tensor) -> Tensor:
    y = (x + 1).t()
    y.mul_(torch.arange(y.shape[1]))
    return y.contiguous()


def of_parts(x: Tensor) -> Tensor:
    left, right = (x * 1).chunk(2, dim=1)
    left += right
    right.copy_(left * 2)
    return torch.cat((left, right), 1)


def of_the_input(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def of_a_diagonal(x: Tensor) -> Tensor:
    y = x @ x.t()
    y.diagonal().fill_(7)
    y.masked_fill_(y < 0, 0.0)
    return y


def of_several_results(x: Tensor) -> Tensor:
    values, indices = x.topk(2)
    values /= values.sum(-1, keepdim=True)
    indices[:, 0] = 0
    return values * indices


@pytest.mark.parametrize(
    "function",
    [
        into_a_view,
        through_two_views,
        of_integers,
        of_a_transposed_value,
        of_parts,
        of_the_input,
        of_a_diagonal,
        of_several_results,
    ],
)
def test_writes_in_place_are_made_functional_bit_for_bit(function: Any) -> None:
    exported = export(Function(function), (torch.randn(3, 4),))
    for record in exported.program.records:
        schema = getattr(record.target, "_schema", None)
        assert schema is None or not schema.is_mutable, record
    for rows in (3, 6):
        x = torch.randn(rows, 4)
        given = x.clone()
        found, expected = run(exported, given), function(x.clone())
        assert torch.equal(given, x), "a run wrote to its input"
        found, expected = (v if isinstance(v, tuple) else (v,) for v in (found, expected))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


class WritesLater(nn.Module):
    """Writes to what a submodule returned, as a residual connection or an activation in place does."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.first, self.last, self.write = nn.Linear(3, 3), nn.Linear(3, 2), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        kept = self.last(y)
        self.write(y, x)
        return kept + self.last(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "write",
    [
        lambda y, x: y.add_(x),
        lambda y, _: y.relu_(),
        lambda y, x: y.copy_(x),
        lambda y, _: y[:, 1:].mul_(2),
        lambda y, _: y.view(-1).masked_fill_(y.view(-1) > 0, 3.0),
        lambda y, _: y.transpose(0, 1)[0].zero_(),
    ],
)
def test_a_module_s_path_is_what_it_returned_and_not_what_was_written_to_it_later(write: Any) -> None:
    module, x = WritesLater(write).double().eval(), torch.randn(4, 3, dtype=torch.float64)
    model = cw.capture(module, torch.randn(2, 3, dtype=torch.float64))
    base = model.run(x)
    assert torch.equal(base["first"], module.first(x))
    for change in (torch.zeros_like, lambda value: value * 2 - 1):
        result = model.sweep(["first"], base=base, source=change, metric=lambda out: out[:, 0]).run(verify=1)
        hook = module.first.register_forward_hook(lambda _, __, value, own=change: own(value))
        with torch.no_grad():
            expected = module(x)[:, 0]
        hook.remove()
        assert torch.allclose(result.per_prompt[0][0], expected)
        assert result.verification is not None
        assert (result.verification.ok, result.verification.hooked) == (True, 1)


def test_no_rule_writes_to_its_inputs() -> None:
    exported = export(Function(through_two_views), (torch.randn(3, 4),))
    interpreter = Interpreter(exported.program)
    values = interpreter.values({"x": torch.randn(3, 4)})
    before = {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}
    again = Interpreter(exported.program).values({"x": values["x"]})
    assert all(torch.equal(values[name], value) for name, value in before.items())
    assert all(torch.equal(again[name], value) for name, value in before.items())


# -- what is refused --------------------------------------------------------------------------


def test_data_dependent_control_flow_passes_on_the_reason_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = Function(lambda x: x * 2 if x.sum() > 0 else x)
    with pytest.raises(ControlFlowError, match=r"(?s)torch\.export says: .*torch\.where") as caught:
        export(module, (torch.randn(3, 4),))
    assert "data-dependent" in caught.value.reason
    assert capsys.readouterr() == ("", "")


def test_dropout_in_training_mode_is_refused_and_in_eval_mode_is_no_record() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4)
    with pytest.raises(RandomnessError, match=r"1/dropout\. .* Call `module\.eval\(\)` first"):
        export(module.train(), (x,))
    program = export(module.eval(), (x,)).program
    assert [record.name for record in program.records] == ["0/linear"]
    assert program.outputs == (Ref("0/linear"),)


def test_batch_norm_in_training_mode_is_refused() -> None:
    with pytest.raises(RandomnessError, match="batch_norm"):
        export(nn.BatchNorm1d(4), (torch.randn(3, 4),))


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        torch.bernoulli,
        lambda x: torch.randn(x.shape),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.empty_like(x).normal_(),
    ],
)
def test_random_draws_are_refused(draw: Any) -> None:
    with pytest.raises(RandomnessError, match="draws random numbers"):
        export(Function(lambda x: x + draw(x)), (torch.rand(3, 4),))


def test_an_example_that_does_not_run_gives_torchs_reason() -> None:
    with pytest.raises(CaptureError, match=r"torch\.export cannot capture Linear"):
        export(nn.Linear(4, 4), (torch.randn(3, 5),))
    with pytest.raises(InputMismatchError, match="do not fit forward"):
        export(nn.Linear(4, 4), (), {"wrong": torch.randn(3, 4)})


# -- the module is left as it was -------------------------------------------------------------


def snapshot(module: nn.Module) -> dict[str, Any]:
    return {
        path: {
            key: value if not isinstance(value, dict) else (list(value), list(map(id, value.values())))
            for key, value in vars(part).items()
            if not isinstance(value, Tensor)
        }
        for path, part in module.named_modules()
    }


def test_the_module_is_bit_identical_afterwards_and_nothing_is_left_on_it() -> None:
    module = gpt2()
    state, parts = copy.deepcopy(module.state_dict()), snapshot(module)
    config = copy.deepcopy(module.config.to_dict())
    ids = torch.randint(0, 100, (1, 6))
    exported = export(module, (), {"input_ids": ids})
    run(exported, input_ids=ids)
    assert snapshot(module) == parts
    assert module.config.to_dict() == config
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in state.items())
    assert all(parameter.grad is None for parameter in module.parameters())


class WritesThroughViews(nn.Module):
    """Writes through a view of a view, and reads both again afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        rows = y[:, 1:]
        part = rows[:, :, :3]
        part += 1
        return part.sum(-1) + rows.sum(-1) + y[:, 1:].transpose(0, 1).transpose(0, 1)[..., 0]


def test_a_view_that_is_taken_again_after_a_write_has_its_own_shape() -> None:
    model = cw.capture(WritesThroughViews(), x=torch.randn(2, 5, 4))
    run = model.run(x=torch.randn(3, 5, 4))
    sizes = model.program.sizes
    symbols = sizes.symbols_of({leaf.name: leaf.shape for leaf in model.program.inputs}, {"x": (3, 5, 4)})
    for record in model.program.records:
        (value,) = run.demand([record.name])
        assert record.shape is not None
        assert tuple(value.shape) == tuple(sizes.value(size, symbols) for size in record.shape), record


def test_a_batch_that_torch_refuses_to_leave_open_is_left_open_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch 2.11 does so for some networks; a lone prompt beside positions must not become their number."""

    def refusing(module: nn.Module, call: Any, shapes: Any) -> Any:
        if any(
            isinstance(dim, torch.export.Dim) for dims in shapes.values() for dim in (dims or {}).values()
        ):
            raise ValueError("Constraints violated (batch)!")
        return exporting(module, call, shapes)

    exporting = capturing._torch_export
    example = {"x": torch.randn(6, 1, 8)}
    model = SequenceFirst().eval()
    expected = capturing.export(model, (), example).program.dimensions
    monkeypatch.setattr(capturing, "_torch_export", refusing)
    exported = capturing.export(model, (), example)
    assert exported.program.dimensions == expected
    assert not exported.fixed
    (leaf,) = exported.program.inputs
    assert {str(leaf.shape[1])} == exported.program.dimensions.batch


class SequenceFirst(nn.Module):
    """Attention over the first dimension, prompts along the second."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).transpose(0, 1) for one in (self.q, self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(seen.transpose(0, 1))
        return x + out

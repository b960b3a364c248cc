"""What is captured is what the module runs, for this run's inputs and for others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from conewise.anatomy.attention import attention_argument
from conewise.errors import InputMismatchError
from conewise.program import untraced
from conewise.program.export import Exported, export
from conewise.program.records import Ref
from conewise.program.untraced import CountingUp, Untraced
from conewise.program.walk import Interpreter
from tests.sweeps.execution.kernels import kernels

VOCABULARY = 50
OPTIONS = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
    "pad_token_id": None,
}


def small(name: str = "Llama", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**OPTIONS, **options)
    module: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return module.eval()


def ids(batch: int = 2, length: int = 8, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def attentions(captured: Exported) -> list[tuple[bool, bool, bool]]:
    """Of each attention: whether it has a mask, whether it is causal by itself, whether heads share keys."""
    records = [one for one in captured.program.records if one.op == "scaled_dot_product_attention"]
    return [
        (
            isinstance(attention_argument(one, "attn_mask"), Ref),
            bool(attention_argument(one, "is_causal")),
            bool(one.kwargs.get("enable_gqa")),
        )
        for one in records
    ]


def assert_equal(module: nn.Module, captured: Exported, given: dict[str, Any]) -> None:
    interpreter = Interpreter(captured.program)
    found = interpreter.output(interpreter.values(captured.signature.bind((), given)))
    constants = {"use_cache": False} if "use_cache" in captured.signature.example.kwargs else {}
    with torch.no_grad():
        expected = module(**given, **constants)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_without_a_mask_the_graph_has_none_and_shares_keys_as_the_module_does() -> None:
    module = small()
    captured = export(module, (), {"input_ids": ids()})
    assert attentions(captured) == [(False, True, True)]
    assert captured.reasons == ()
    interpreter = Interpreter(captured.program)
    for batch, length in ((1, 2), (3, 8), (2, 40)):
        given = {"input_ids": ids(batch, length)}
        ours = kernels(partial(interpreter.values, given))
        assert ours == kernels(partial(module, **given, use_cache=False))
    assert_equal(module, captured, {"input_ids": ids(2, 1)})


def test_a_mask_that_is_given_stays_even_where_it_hides_nothing() -> None:
    module = small()
    mask = torch.ones(2, 8, dtype=torch.long)
    captured = export(module, (), {"input_ids": ids(), "attention_mask": mask})
    assert attentions(captured) == [(True, False, False)]
    assert captured.reasons == (untraced.GIVEN,)
    padded = mask.clone()
    padded[0, :3] = 0
    for other in (mask, padded):
        assert_equal(module, captured, {"input_ids": ids(), "attention_mask": other})


def test_positions_that_are_given_may_hold_several_sequences() -> None:
    module = small()
    plain, packed = torch.arange(8).expand(2, 8), (torch.arange(8) % 4).expand(2, 8)
    captured = export(module, (), {"input_ids": ids(), "position_ids": plain})
    assert captured.reasons == (untraced.POSITIONS,)
    for positions in (plain, packed):
        assert_equal(module, captured, {"input_ids": ids(), "position_ids": positions.contiguous()})


def _written_through_a_view(ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1])
    shown = positions[None]
    positions[2:] -= 2
    return shown.expand_as(ids)


POSITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "from the tokens": lambda ids: torch.arange(ids.shape[1]) - ((ids == 7).cumsum(1) * 3),
    "starting again": lambda ids: (torch.arange(ids.shape[1]) % 4)[None].expand_as(ids),
    "written to": lambda ids: torch.arange(ids.shape[1]).repeat(2, 1).mul_(ids % 2 + 1),
    "written to through a view": _written_through_a_view,
    "in steps": lambda ids: torch.arange(0, 2 * ids.shape[1], 2)[None].expand_as(ids),
}


@pytest.mark.parametrize("kind", list(POSITIONS))
def test_positions_that_do_not_count_up_keep_their_mask(kind: str) -> None:
    """The module makes them itself, and its attention keeps the sequences of a row apart."""

    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small()

        def forward(self, input_ids: Tensor) -> Any:
            return self.model(input_ids, position_ids=POSITIONS[kind](input_ids), use_cache=False)

    module = Packing().eval()
    captured = export(module, (), {"input_ids": ids()})
    assert [mask for mask, _, _ in attentions(captured)] == [True]
    for seed in (1, 2):
        assert_equal(module, captured, {"input_ids": ids(seed=seed)})


def test_a_window_that_the_example_fits_into_is_a_reason_to_refuse_longer_runs() -> None:
    module = small("Mistral", sliding_window=10)
    captured = export(module, (), {"input_ids": ids(length=8)})
    assert attentions(captured) == [(False, True, True)]
    assert_equal(module, captured, {"input_ids": ids(length=9)})
    with pytest.raises(InputMismatchError, match="capture again with an example of this shape"):
        Interpreter(captured.program).values({"input_ids": ids(length=10)})


def test_a_window_that_the_example_exceeds_keeps_its_mask_for_every_length() -> None:
    module = small("Mistral", sliding_window=4)
    captured = export(module, (), {"input_ids": ids(length=8)})
    assert attentions(captured) == [(True, False, False)]
    assert captured.reasons == ("the module leaves out its mask where there are fewer positions than 4",)
    for length in (1, 3, 4, 20):
        assert_equal(module, captured, {"input_ids": ids(length=length)})


def asked() -> dict[str, Any]:
    names = ["is_tracing", "is_torchdynamo_exporting", "find_packed_sequence_indices"]
    names += ["_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"]
    return {name: getattr(masking_utils, name) for name in names}


def test_nothing_is_left_on_transformers() -> None:
    before = asked()
    export(small(), (), {"input_ids": ids()})
    assert asked() == before

    def interrupted() -> None:
        with untraced.untraced(Untraced()):
            assert all(asked()[name] is not before[name] for name in before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert asked() == before


def test_an_answer_that_breaks_the_module_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another version of transformers: then what is captured is what it shows to whoever traces it."""

    def breaking(_: Any, answers: Untraced, __: CountingUp) -> dict[str, Any]:
        def look(*args: Any, **kwargs: Any) -> bool:
            answers.used = True
            raise ValueError("values are read here")

        return {"find_packed_sequence_indices": look}

    monkeypatch.setattr(untraced, "_answers", breaking)
    module = small()
    captured = export(module, (), {"input_ids": ids()})
    assert attentions(captured) == [(True, False, False)]
    assert captured.reasons == (untraced.TRACED,)
    assert_equal(module, captured, {"input_ids": ids()})


COUNTING: list[tuple[Callable[[], Tensor], bool]] = [
    (lambda: torch.arange(5), True),
    (lambda: torch.arange(2, 5), True),
    (lambda: torch.arange(2, 8, 2), False),
    (lambda: torch.arange(0, 8, step=2), False),
    (lambda: torch.arange(5.0), False),
    (lambda: torch.arange(5) + 3, True),
    (lambda: 3 + torch.arange(5), True),
    (lambda: torch.arange(5) + torch.arange(5), False),
    (lambda: torch.add(torch.arange(5), 1, alpha=2), False),
    (lambda: torch.arange(5) * 2, False),
    (lambda: torch.arange(5).unsqueeze(0).expand(3, -1), True),
    (lambda: torch.arange(5).unsqueeze(-1), False),
    (lambda: torch.arange(6).view(1, 6), True),
    (lambda: torch.arange(6).view(2, 3), False),
    (lambda: torch.arange(300).to(torch.uint8), False),
    (lambda: torch.arange(5).to(torch.int32), True),
    (lambda: torch.arange(5).add_(1), False),
    (lambda: torch.zeros(5, dtype=torch.long), False),
]


@pytest.mark.parametrize("number", range(len(COUNTING)))
def test_what_counts_up_is_known_and_nothing_else(number: int) -> None:
    make, expected = COUNTING[number]
    with CountingUp() as known:
        tensor = make()
    if known.counts(tensor):
        steps = tensor.diff(dim=-1)
        assert torch.equal(steps, torch.ones_like(steps))
    assert known.counts(tensor) == expected


def test_a_write_to_anything_makes_all_positions_uncertain() -> None:
    with CountingUp() as known:
        kept, other = torch.arange(5), torch.zeros(5, dtype=torch.long)
        assert known.counts(kept)
        torch.zeros(3).add_(1)
        assert known.counts(kept)
        other[0] = 1
        assert not known.counts(kept)

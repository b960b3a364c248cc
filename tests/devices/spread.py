"""Small models that are spread over two devices, and what has to hold of them wherever they lie.

The checks take the devices, so that they run on the CPU and a GPU, and on any other second device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import conewise as cw
from conewise.errors import CaptureError, InputMismatchError, SweepError, WeightsChangedError
from conewise.model import Model
from conewise.sweeps.planning.planner import facts_of
from conewise.sweeps.result import Result
from tests.runs.state import assert_untouched, state_of

hugging_face: Any = transformers
CPU = torch.device("cpu")
VOCABULARY, LAYERS, WIDTH, LENGTH = 60, 4, 32, 7
ROUNDING = 1e-4
"""How far the same model on other devices may be, of the largest value: their products round differently."""


def gpt2() -> Any:
    torch.manual_seed(0)
    config = hugging_face.GPT2Config(
        n_layer=LAYERS,
        n_head=4,
        n_embd=WIDTH,
        vocab_size=VOCABULARY,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hugging_face.GPT2LMHeadModel(config).eval()


def llama() -> Any:
    torch.manual_seed(0)
    config = hugging_face.LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=WIDTH,
        intermediate_size=48,
        vocab_size=VOCABULARY,
    )
    return hugging_face.LlamaForCausalLM(config).eval()


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama}


def device_map(module: Any, first: torch.device, second: torch.device) -> dict[str, torch.device]:
    """Embeddings and the first half on one device, the rest on another; tied heads stay with embeddings."""
    if hasattr(module, "transformer"):
        stack, outer = "transformer.h", {"wte": first, "wpe": first, "ln_f": second}
        found = {f"transformer.{name}": where for name, where in outer.items()} | {"lm_head": first}
    else:
        stack = "model.layers"
        found = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": second}
        found["lm_head"] = second
    half = LAYERS // 2
    return found | {f"{stack}.{layer}": first if layer < half else second for layer in range(LAYERS)}


def by_hand(module: Any, where: dict[str, torch.device]) -> Any:
    """The module with its parts on their devices; hooks move what each part is given."""

    def moving(device: torch.device) -> Any:
        def move(part: nn.Module, args: Any, kwargs: Any) -> Any:
            del part
            return tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, (args, kwargs))

        return move

    for path, device in where.items():
        part = module.get_submodule(path).to(device)
        part.register_forward_pre_hook(moving(device), with_kwargs=True)
    return module


def by_accelerate(module: Any, where: dict[str, torch.device]) -> Any:
    """The module as accelerate dispatches it, nothing offloaded."""
    accelerate = pytest.importorskip("accelerate")
    named = {path: str(device) for path, device in where.items()}
    return accelerate.dispatch_model(module, named, main_device="cpu", force_hooks=True)


WAYS: dict[str, Callable[[Any, dict[str, torch.device]], Any]] = {
    "by hand": by_hand,
    "by accelerate": by_accelerate,
}


@dataclass(frozen=True)
class Case:
    """A model, how it is spread, and over which devices."""

    name: str
    way: str
    first: torch.device
    second: torch.device

    @cached_property
    def module(self) -> Any:
        module = MODELS[self.name]()
        return WAYS[self.way](module, device_map(module, self.first, self.second))

    @cached_property
    def model(self) -> Model:
        return cw.capture(self.module, input_ids=self.inputs(0)["input_ids"])

    @property
    def plain(self) -> Model:
        """The same model, all of it on the CPU."""
        return plain(self.name)

    def inputs(self, seed: int) -> dict[str, Tensor]:
        return {"input_ids": tokens(seed).to(self.first if self.way == "by hand" else CPU)}

    def values(self, model: Model, seed: int, *, runs: bool = False, **options: Any) -> Tensor:
        return numbers(self.result(model, seed, runs=runs, **options))

    def result(self, model: Model, seed: int, *, runs: bool = False, **options: Any) -> Result:
        where = model.program.inputs[0].device
        base, source = ({"input_ids": tokens(one).to(where)} for one in (seed, seed + 100))
        given: list[Any] = [model.run(**one) for one in (base, source)] if runs else [base, source]
        sites = cw.sites("z", layer=":", head=":") + cw.sites("resid_pre", layer=":", pos=":")
        sites += cw.sites("mlp_out", layer=":")
        metric = cw.logit_diff(answer=5, wrong=7)
        return model.sweep(sites, base=given[0], source=given[1], metric=metric).run(
            progress=False, **options
        )


@functools.cache
def plain(name: str) -> Model:
    """A model, all of it on the CPU; nothing writes to its weights."""
    return cw.capture(MODELS[name](), input_ids=tokens(0))


def tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def numbers(result: Result) -> Tensor:
    return result.per_prompt[0].double().cpu()


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest, as a share of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


# -- what has to hold --------------------------------------------------------------------------


def check_capture(case: Case) -> None:
    """The graph is the module, on both devices; nothing is left on the module."""
    before = state_of(case.module)
    model = case.model
    assert model.fidelity.bitwise, model.fidelity
    assert set(model.program.devices) == {case.first, case.second}
    found = model.verify()
    assert found, found
    assert_untouched(case.module, before)
    kinds = set(case.plain.site_table.kinds)
    assert kinds == set(model.site_table.kinds)


def check_sweep(case: Case) -> None:
    """Every way to sweep finds what the same model finds on the CPU, and what hooks on the module find."""
    for seed in range(2):
        expected = case.values(case.plain, seed, evaluator="serial")
        for options in ({"evaluator": "serial"}, {"evaluator": "wavefront"}):
            for runs in (True, False):
                found = case.values(case.model, seed, runs=runs, **options)
                assert deviation(found, expected) < ROUNDING, (seed, options, runs)
    result = case.result(case.model, 5, evaluator="wavefront")
    check = result.verify(n=12)
    assert check.ok, check
    assert check.hooked == check.cells, check
    assert "graph_pool" not in vars(facts_of(case.model))


def check_memory(case: Case, *, is_measured: bool) -> None:
    """A budget cuts the sweep; what was taken is in the ledger where there is a GPU."""
    whole = case.result(case.model, 0, evaluator="wavefront")
    cut = case.result(case.model, 0, evaluator="wavefront", max_memory=whole.plan.peak_bytes // 2)
    assert len(cut.plan.chunks) > len(whole.plan.chunks)
    assert deviation(numbers(cut), numbers(whole)) < ROUNDING
    if is_measured:
        assert cut.ledger.peak_bytes is not None
        assert cut.ledger.peak_bytes > 0
        assert cut.ledger.reserved_bytes is not None


def check_writes(case: Case) -> None:
    """A write to a weight is noticed on either device: old runs are refused, new ones have what is there."""
    stack = case.module.transformer.h if case.name == "gpt2" else case.module.model.layers
    for layer in (0, LAYERS - 1):
        base, source = case.model.run(**case.inputs(1)), case.model.run(**case.inputs(2))
        sweep = case.model.sweep(
            cw.sites("mlp_out", layer=":"),
            base=base,
            source=source,
            metric=cw.logit_diff(answer=5, wrong=7),
        )
        sweep.run(progress=False)
        before = case.values(case.model, 1)
        weight = next(one for one in stack[layer].mlp.parameters() if one.ndim == 2)
        weight.data.mul_(3)
        with pytest.raises(WeightsChangedError):
            sweep.run(progress=False)
        expected = numbers(case.result(cw.capture(case.module, **case.inputs(0)), 1, evaluator="serial"))
        assert deviation(before, expected) > 10 * ROUNDING
        assert deviation(case.values(case.model, 1), expected) < ROUNDING


def check_half_precision(case: Case) -> None:
    """In bfloat16 cells are judged by a copy in float32, which lies where the module does."""
    module = WAYS[case.way](
        MODELS[case.name]().bfloat16(), device_map(MODELS[case.name](), case.first, case.second)
    )
    model = cw.capture(module, **case.inputs(0))
    check = case.result(model, 0, evaluator="wavefront").verify(n=8)
    assert check.reference == "float32", check
    assert check.ok, check


def check_refusals(case: Case) -> None:
    """Products in parts are for CUDA alone; inputs are moved by nobody."""
    with pytest.raises(SweepError, match="CUDA"):
        case.model.sweep(
            cw.sites("mlp_out", layer=":"),
            base=case.inputs(0),
            source=case.inputs(1),
            metric=cw.logit_diff(answer=5, wrong=7),
            precision="split",
        )
    elsewhere = case.second if case.inputs(0)["input_ids"].device == case.first else case.first
    with pytest.raises(InputMismatchError, match="was captured"):
        case.model.run(tokens(0).to(elsewhere))


def check_one_device(name: str, device: torch.device, other: torch.device) -> None:
    """All on one device, while there is another: that is where everything happens."""
    module = MODELS[name]().to(device)
    with pytest.raises(CaptureError, match=f"weights on {device}") as refused:
        cw.capture(module, input_ids=tokens(0).to(other))
    assert f"inputs.to('{device}')" in str(refused.value)
    model = cw.capture(module, input_ids=tokens(0).to(device))
    assert model.verify()
    assert model.program.devices == (device,)
    case = Case(name, "by hand", device, device)
    expected = case.values(case.plain, 1, evaluator="serial")
    assert deviation(case.values(model, 1, evaluator="wavefront"), expected) < ROUNDING
    with pytest.raises(InputMismatchError, match=f"on {other}, but"):
        model.run(tokens(0).to(other))


def check_offloaded(other: torch.device) -> None:
    """Parts on the CPU that accelerate runs on another device have no values between two forwards."""
    accelerate = pytest.importorskip("accelerate")
    module = gpt2()
    named = {path: str(device) for path, device in device_map(module, CPU, other).items()}
    module = accelerate.dispatch_model(module, named, main_device=str(other), force_hooks=True)
    with pytest.raises(CaptureError, match="offloaded by accelerate"):
        cw.capture(module, input_ids=tokens(0))

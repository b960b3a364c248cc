"""Changes of a module after its capture, its weights apart: each is named before a job, or has no effect."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import CaptureError, ModuleChangedError, WeightsChangedError
from conewise.model import Model
from tests.program import elsewhere
from tests.sweeps import small

WIDTH = 4
GAIN = 1.0


class Config:
    """Settings as objects have them: of their own, of their class, nested."""

    cap = 3.0

    def __init__(self) -> None:
        self.scale = 1.5
        self.rope = {"factors": [1.0, 2.0]}


class Adapted(nn.Module):
    """A layer with an adapter that can be switched off, as libraries of adapters write it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.low = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self._disable_adapters = False
        self._active_adapter = ["default"]

    def forward(self, x: Tensor) -> Tensor:
        is_on = not self._disable_adapters and "default" in self._active_adapter
        found: Tensor = self.base(x) + self.low(x) if is_on else self.base(x)
        return found


class Quantised(Tensor):
    """A tensor that wraps another one, of the same shape, and knows no operation but `detach`."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Quantised:
        found: Quantised = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        found.held = inner
        return found

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> Quantised:
        return Quantised(inner["held"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is that of the one that is switched off
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(f"{operation} of quantised numbers")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.first, self.act, self.drop = Adapted(), nn.GELU(), nn.Dropout(0.5)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.first(x))) * self.config.scale * self.config.rope["factors"][1]
        return torch.tanh(self.norm(x) * GAIN / self.config.cap)


@dataclass(slots=True)
class Slots:
    scale: float = 2.0


def scaling(factor: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """A function that reads a variable of this one, and one that sets it."""

    def scaled(x: Tensor) -> Tensor:
        return x * factor

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    return scaled, set_factor


class Scattered(nn.Module):
    """Reads what is kept neither in attributes of its own nor in a config."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(WIDTH, WIDTH)]
        self.slots, self.array = Slots(), np.full(1, 2.0)
        self.scaled, self.set_factor = scaling(2.0)
        self.part = partial(torch.mul, other=2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(self.scaled(self.hidden[0](x))) * self.slots.scale * float(self.array[0])
        x = elsewhere.scaled(x) * elsewhere.BY_NAME["scale"] * elsewhere.Settings.scale
        return x * torch.tensor(1.0).dtype.itemsize


@cache
def scattered() -> tuple[Scattered, Model]:
    torch.manual_seed(0)
    module = Scattered().eval()
    return module, cw.capture(module, torch.zeros(2, WIDTH))


@cache
def captured() -> tuple[Net, Model]:
    torch.manual_seed(0)
    module = Net().eval()
    return module, cw.capture(module, torch.zeros(2, WIDTH))


def given(seed: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


Undo = Callable[[], object]


def set_to(holder: Any, name: str, value: Any) -> Undo:
    old = getattr(holder, name)
    setattr(holder, name, value)
    return partial(setattr, holder, name, old)


def forward_on_instance(module: Net) -> Undo:
    vars(module.norm)["forward"] = torch.neg
    return lambda: vars(module.norm).pop("forward")


def other_factor(module: Net) -> Undo:
    module.config.rope["factors"][1] = 5.0
    return lambda: module.config.rope["factors"].__setitem__(1, 2.0)


def other_adapter(module: Net) -> Undo:
    module.first._active_adapter.append("second")
    module.first._active_adapter.remove("default")
    return lambda: module.first._active_adapter.__setitem__(slice(None), ["default"])


def doubled(*arguments: Any) -> Any:
    return arguments[-1] * 2


CHANGES: dict[str, tuple[Callable[[Net], Undo], str]] = {
    "hook": (
        lambda module: module.first.register_forward_hook(doubled).remove,
        r"a forward hook on 'first' was added \(doubled\)",
    ),
    "pre-hook": (
        lambda module: module.register_forward_pre_hook(lambda _, args: (args[0] + 1,)).remove,
        "a forward pre-hook on the module was added",
    ),
    "backward hook": (
        lambda module: module.first.register_full_backward_hook(lambda *_: None).remove,
        "a backward hook on 'first' was added",
    ),
    "global hook": (
        lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None).remove,
        "a global forward hook was added",
    ),
    "forward": (forward_on_instance, "`forward` of 'norm' was replaced"),
    "forward of the class": (
        lambda _: set_to(Adapted, "forward", lambda self, x: self.base(x)),
        "`forward` of .*Adapted was replaced",
    ),
    "config": (lambda module: set_to(module.config, "scale", 0.5), "config.scale: 1.5 → 0.5"),
    "class of the config": (lambda _: set_to(Config, "cap", 9.0), r"Config.cap: 3.0 → 9.0"),
    "inside of the config": (other_factor, r"config.rope\['factors'\]\[1\]: 2.0 → 5.0"),
    "epsilon": (lambda module: set_to(module.norm, "eps", 0.1), "norm.eps: 1e-05 → 0.1"),
    "adapter off": (
        lambda module: set_to(module.first, "_disable_adapters", True),
        "first._disable_adapters: False → True",
    ),
    "other adapter": (other_adapter, r"first._active_adapter\[0\]: 'default' → 'second'"),
    "training": (lambda module: (module.train(), module.eval)[1], "training: False → True"),
    "submodule": (lambda module: set_to(module, "act", nn.ReLU()), "'act': GELU → ReLU"),
}


@pytest.fixture(params=list(CHANGES))
def changed(request: pytest.FixtureRequest) -> Iterator[tuple[Model, str]]:
    module, model = captured()
    change, expected = CHANGES[request.param]
    undo = change(module)
    try:
        yield model, expected
    finally:
        undo()
    assert torch.equal(model.run(given(1)).outputs, module(given(1)))


def test_what_changed_is_named_before_a_run_and_a_sweep(changed: tuple[Model, str]) -> None:
    model, expected = changed
    for _ in range(2):
        with pytest.raises(ModuleChangedError, match=expected):
            model.run(given(1))
    with pytest.raises(ModuleChangedError, match=expected):
        model.sweep(["first"], base={"x": given(1)}, source="zero", metric=lambda out: out[:, 0]).run()


def other_array(module: Scattered) -> Undo:
    module.array[0] = 3.0
    return partial(module.array.__setitem__, 0, 2.0)


def other_factor_of_a_function(module: Scattered) -> Undo:
    module.set_factor(3.0)
    return partial(module.set_factor, 2.0)


def other_item(holder: Any, key: Any, value: Any) -> Undo:
    old, holder[key] = holder[key], value
    return partial(holder.__setitem__, key, old)


def other_default_dtype(_: Scattered) -> Undo:
    torch.set_default_dtype(torch.float64)
    return partial(torch.set_default_dtype, torch.float32)


SCATTERED: dict[str, tuple[Callable[[Scattered], Undo], str]] = {
    "global of another module": (
        lambda _: set_to(elsewhere, "SCALE", 3.0),
        r"elsewhere.SCALE: 2.0 → 3.0",
    ),
    "dictionary of another module": (
        lambda _: other_item(elsewhere.BY_NAME, "scale", 3.0),
        r"elsewhere.BY_NAME\['scale'\]: 2.0 → 3.0",
    ),
    "class of another module": (
        lambda _: set_to(elsewhere.Settings, "scale", 3.0),
        r"elsewhere.Settings.scale: 2.0 → 3.0",
    ),
    "function of another module": (
        lambda _: set_to(elsewhere, "scaled", torch.neg),
        r"elsewhere.scaled: scaled → ",
    ),
    "slots": (lambda module: set_to(module.slots, "scale", 3.0), r"slots.scale: 2.0 → 3.0"),
    "array": (other_array, r"array: an array \(1,\) → an array \(1,\)"),
    "closure": (other_factor_of_a_function, r"scaled: factor: 2.0 → 3.0"),
    "partial": (
        lambda module: set_to(module, "part", partial(torch.mul, other=3.0)),
        r"part.keywords\['other'\]: 2.0 → 3.0",
    ),
    "hook on a module in a list": (
        lambda module: module.hidden[0].register_forward_hook(doubled).remove,
        r"a forward hook on 'hidden\[0\]' was added",
    ),
    "module in a list": (
        lambda module: other_item(module.hidden, 0, nn.Linear(WIDTH, WIDTH)),
        r"hidden\[0\].weight: a tensor",
    ),
    "default dtype": (other_default_dtype, r"get_default_dtype\(\): torch.float32 → torch.float64"),
}


@pytest.mark.parametrize("kind", list(SCATTERED))
def test_what_changed_elsewhere_is_named(kind: str) -> None:
    module, model = scattered()
    change, expected = SCATTERED[kind]
    undo = change(module)
    try:
        with pytest.raises(ModuleChangedError, match=expected):
            model.run(given(1))
    finally:
        undo()
    assert torch.equal(model.run(given(1)).outputs, module(given(1)))


@pytest.mark.parametrize("kind", ["hook", "config", "submodule"])
def test_what_was_made_before_the_change_is_refused_until_it_is_undone(kind: str) -> None:
    module, model = captured()
    run = model.run(given(1))
    sweep = model.sweep(["first"], base=run, source="zero", metric=lambda out: out[:, 0])
    result, world = sweep.run(), run.fork()
    undo = CHANGES[kind][0](module)
    try:
        for job in (
            lambda: run["first"],
            lambda: world.patch("first", "zero"),
            sweep.run,
            sweep.plan,
            result.verify,
            lambda: run.gradients(lambda out: out[:, 0], ["first"]),
            lambda: model.verify(n=1),
        ):
            with pytest.raises(ModuleChangedError):
                job()
    finally:
        undo()
    assert sweep.run().equals(result)
    assert result.verify().ok


def test_a_change_that_has_no_effect_is_not_refused() -> None:
    module, model = captured()
    before = model.run(given(1))
    vars(module.config)["note"] = "used by nobody"
    module.config.scale = 3 / 2
    module.first.other = nn.Linear(2, 2)
    try:
        assert torch.equal(model.run(given(1)).outputs, before.outputs)
    finally:
        del module.config.note, module.first.other  # type: ignore[attr-defined]
    assert torch.equal(model.run(given(1)).outputs, before.outputs)


def test_a_function_that_reads_a_run_under_hooks_of_a_check_is_not_refused() -> None:
    _, model = captured()
    run = model.run(given(2))
    sweep = model.sweep(
        ["first"],
        base=model.run(given(1)),
        source=lambda value: run["first"] + 0 * value,
        metric=lambda out: out[:, 0],
    )
    assert sweep.run().verify().ok


class Counting(nn.Module):
    """Counts its calls, and what it returns depends on them from the `first` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.calls, self.first, self.seen = 0, first, list[int]()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.layer(x) * max(1, self.calls - self.first)
        return found


class Appending(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(0)
        found: Tensor = self.layer(x) * len(self.seen)
        return found


@pytest.mark.parametrize("module", [Counting(0), Appending(0)])
def test_a_module_that_counts_its_calls_in_python_is_refused(module: Counting) -> None:
    with pytest.raises(
        CaptureError, match=r"each time that it runs.*(calls: \d → \d|seen\[\d\]: nothing → 0)"
    ):
        cw.capture(module.eval(), given(1))


CALLS = [0]


class CountingElsewhere(Counting):
    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        found: Tensor = self.layer(x) * CALLS[0]
        return found


class Drawing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * random.random()
        return found


@pytest.mark.parametrize("module", [CountingElsewhere(0), Drawing(0)])
def test_a_module_that_computes_something_else_on_the_same_example_is_refused(module: Counting) -> None:
    with pytest.raises(CaptureError, match="each time that it runs, on the same example"):
        cw.capture(module.eval(), given(1))


class Remembering(Counting):
    """Adds what it returned the last time."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        last = getattr(self, "last", None)
        found = found if last is None else found + last
        self.last = found.detach()
        return found


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # torch's, of the export
def test_a_module_that_keeps_what_it_returned_is_refused_and_keeps_no_tensor_without_values() -> None:
    module = Remembering(0).eval()
    with pytest.raises(CaptureError, match="last: nothing → a tensor"):
        cw.capture(module, given(1))
    assert torch.equal(module.last, module.layer(given(1)))


def test_a_count_that_matters_later_is_seen_then() -> None:
    module = Counting(4).eval()
    model = cw.capture(module, given(1))
    for _ in range(2):
        assert torch.equal(model.run(given(1)).outputs, module(given(1)))
    module(given(1))
    module(given(1))
    with pytest.raises(ModuleChangedError, match=r"calls: \d → \d"):
        model.run(given(1))


def test_an_attention_function_that_was_replaced_by_name_is_seen() -> None:
    from transformers import AttentionInterface  # noqa: PLC0415
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    model = small.model()
    base = {"input_ids": small.prompts(1)}
    assert model.module.config._attn_implementation == "sdpa"
    old: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def twice(*args: Any, **kwargs: Any) -> Any:
        out, weights = old(*args, **kwargs)
        return out * 2, weights

    AttentionInterface.register("sdpa", twice)
    try:
        with pytest.raises(ModuleChangedError, match=r"ALL_ATTENTION_FUNCTIONS\['sdpa'\]: sdpa_\w+ → "):
            model.run(**base)
    finally:
        AttentionInterface.register("sdpa", old)
    expected = model.run(**base).logits
    AttentionInterface.register("nobody_s", twice)  # no module is told to use it
    try:
        assert torch.equal(model.run(**base).logits, expected)
    finally:
        del AttentionInterface._global_mapping["nobody_s"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = twice
    try:
        with pytest.raises(ModuleChangedError, match=r"ALL_ATTENTION_FUNCTIONS\['sdpa'\]"):
            model.generate(small.prompts(1), 1)
    finally:
        del ALL_ATTENTION_FUNCTIONS._local_mapping["sdpa"]
    assert torch.equal(model.run(**base).logits, expected)


def test_weights_that_were_quantised_after_the_capture_are_told() -> None:
    """As torchao does it: the parameter is another tensor, which wraps some and knows few operations."""
    net = Net().eval()
    model = cw.capture(net, torch.ones(2, WIDTH))
    base = model.run(torch.ones(2, WIDTH))
    net.first.base.weight = nn.Parameter(Quantised(net.first.base.weight.detach()), requires_grad=False)
    for job in (lambda: model.run(torch.ones(2, WIDTH)), lambda: base["first"], model.verify):
        with pytest.raises(WeightsChangedError, match=r"'first\.base\.weight' of Net was replaced"):
            job()

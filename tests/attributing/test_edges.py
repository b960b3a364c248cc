"""Effects of edges by gradients: against the papers' formulas, by hooks on the module alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.attributing import edge_scores
from conewise.errors import SweepError
from tests.circuits.edge_models import inputs_of, model_of, module_of, run_of
from tests.circuits.hook_oracle import Forward, HookOracle, _World
from tests.runs.test_gradients import squares


class Differentiated(_World):
    """A forward in which each reader sees its stream plus a zero of its own, by which is differentiated."""

    def __init__(self, oracle: HookOracle) -> None:
        super().__init__(oracle, {reader: {} for reader in oracle.readers}, {}, None)
        self.zeros: dict[str, Tensor] = {}

    def _stream(self, reader: str) -> Tensor:
        own = super()._stream(reader)
        self.zeros[reader] = torch.zeros_like(own).requires_grad_()
        return own + self.zeros[reader]


@contextmanager
def entering(oracle: HookOracle, stream: Tensor | None) -> Iterator[None]:
    """While it lasts, this is what enters layer 0."""
    inner: Any = oracle.module.base_model
    blocks = inner.h if hasattr(inner, "h") else inner.layers

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stream is None:
            return None
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    handle = blocks[0].register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def by_hooks(name: str, steps: int) -> dict[str, Tensor]:
    """EAP-IG (inputs) from its formula, [prompt] by edge; with one step it is EAP."""
    oracle, inputs = HookOracle(module_of(name)), inputs_of(name, 1)
    base, source = oracle.forward(**inputs), oracle.forward(**inputs_of(name, 2))
    gradients = {reader: torch.zeros_like(base.parts["input"]) for reader in oracle.readers}
    for step in range(steps):
        point = base.parts["input"] + step / steps * (source.parts["input"] - base.parts["input"])
        world = Differentiated(oracle)
        with entering(oracle, point), world.hooked():
            outputs = Forward(logits=oracle.module(**inputs, use_cache=False).logits)
        found = torch.autograd.grad(squares(outputs).sum(), [world.zeros[one] for one in oracle.readers])
        for reader, gradient in zip(oracle.readers, found, strict=True):
            gradients[reader] += gradient / steps
    return {
        edge: ((source.parts[writer] - base.parts[writer]) * gradients[reader]).double().sum((1, 2))
        for edge in oracle.edges()
        for writer, _, reader in [edge.partition("->")]
    }


@contextmanager
def writing(oracle: HookOracle, layer: int, kind: str, value: Tensor) -> Iterator[None]:
    """While it lasts, this is what the heads of a layer, or its MLP, add to the stream."""
    block = oracle.blocks[layer]
    handle = (block.out if kind == "a" else block.last).register_forward_hook(lambda *_: value)
    try:
        yield
    finally:
        handle.remove()


def by_lines(name: str, steps: int) -> dict[str, Tensor]:
    """EAP-IG (activations) from its formula: gradients along the line of what the writer's layer writes."""
    oracle, inputs = HookOracle(module_of(name)), inputs_of(name, 1)
    base, source = oracle.forward(**inputs), oracle.forward(**inputs_of(name, 2))
    written = [_written(oracle, inputs_of(name, seed)) for seed in (1, 2)]
    found: dict[str, Tensor] = {}
    for line in written[0]:
        gradients = {reader: torch.zeros_like(base.parts["input"]) for reader in oracle.readers}
        for step in range(steps):
            point = written[0][line] + step / steps * (written[1][line] - written[0][line])
            world = Differentiated(oracle)
            at = (
                entering(oracle, point) if line == "input" else writing(oracle, int(line[1:]), line[0], point)
            )
            with at, world.hooked():
                outputs = Forward(logits=oracle.module(**inputs, use_cache=False).logits)
            zeros = [world.zeros[one] for one in oracle.readers]
            read = torch.autograd.grad(squares(outputs).sum(), zeros, materialize_grads=True)
            for reader, gradient in zip(oracle.readers, read, strict=True):
                gradients[reader] += gradient / steps
        for edge in oracle.edges():
            writer, _, reader = edge.partition("->")
            if writer.partition(".")[0] == line:
                more = source.parts[writer] - base.parts[writer]
                found[edge] = (more * gradients[reader]).double().sum((1, 2))
    return {edge: found[edge] for edge in oracle.edges()}


def _written(oracle: HookOracle, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What enters, and what the heads and the MLP of each layer add to the stream, biases included."""
    seen: dict[str, Tensor] = {}

    def keep(line: str) -> Any:
        return lambda _, __, output: seen.update({line: output.detach()})

    handles = []
    for layer, block in enumerate(oracle.blocks):
        handles.append(block.out.register_forward_hook(keep(f"a{layer}")))
        handles.append(block.last.register_forward_hook(keep(f"m{layer}")))
    entered = oracle.forward(**inputs).parts["input"]
    for handle in handles:
        handle.remove()
    return {"input": entered, **seen}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_along_activations_they_are_those_of_the_formula_by_hooks(name: str) -> None:
    model = model_of(name, torch.float32)
    asked: dict[str, Any] = {"base": run_of(name, 1), "source": run_of(name, 2), "metric": squares}
    found = model.attribute(model.edges(), **asked, method="eap-ig-activations", steps=3).run()
    effects = found.per_prompt[0] - found.base_per_prompt  # type: ignore[operator]
    expected = by_lines(name, 3)
    assert [cell.name for cell in found.cells] == list(expected)
    torch.testing.assert_close(effects, torch.stack(list(expected.values())), rtol=2e-3, atol=2e-3)
    one = model.attribute(model.edges(), **asked, method="eap-ig-activations", steps=1).run()
    plain = model.attribute(model.edges(), **asked, method="eap").run()
    torch.testing.assert_close(one.per_prompt, plain.per_prompt)
    assert (found.effect - plain.effect).abs().max() > 0.01


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize(("method", "steps"), [("eap", None), ("eap-ig", 3)])
def test_they_are_those_of_the_formulas_by_hooks(name: str, method: str, steps: int | None) -> None:
    model = model_of(name, torch.float32)
    found = model.attribute(
        model.edges(),
        base=run_of(name, 1),
        source=run_of(name, 2),
        metric=squares,
        method=method,
        steps=steps,
    ).run()
    effects = found.per_prompt[0] - found.base_per_prompt  # type: ignore[operator]
    expected = by_hooks(name, steps or 1)
    assert [cell.name for cell in found.cells] == list(expected)
    torch.testing.assert_close(effects, torch.stack(list(expected.values())), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_small_change_of_what_is_written_has_the_effect_that_is_estimated(name: str) -> None:
    """Finite differences, of streams that norm their sums too."""
    model, run = model_of(name, torch.float64), run_of(name, 1, torch.float64)

    def near(part: Tensor) -> Tensor:
        return 1.000001 * part

    exact = model.sweep(model.edges(), base=run, source=near, metric=squares).run()
    found = model.attribute(model.edges(), base=run, source=near, metric=squares, method="eap").run()
    size = exact.effect.abs().max()
    torch.testing.assert_close(found.effect / size, exact.effect / size, rtol=0, atol=1e-5)


def test_edges_at_positions_add_up_to_the_edge_and_circuits_are_made_of_them() -> None:
    model, base, source = model_of("gpt2", torch.float32), run_of("gpt2", 1), run_of("gpt2", 2)
    asked: dict[str, Any] = {
        "base": base,
        "source": source,
        "metric": [squares, cw.logit(3)],
        "method": "eap",
    }
    whole = model.attribute(model.edges(), **asked).run()
    length = base["resid_pre", 0].shape[1]
    parts = model.attribute(model.edges(pos=range(length)), **asked).run()
    effects = parts.per_prompt - parts.base_per_prompt[:, None]  # type: ignore[index]
    expected = whole.per_prompt - whole.base_per_prompt[:, None]  # type: ignore[index]
    torch.testing.assert_close(effects.unflatten(1, (-1, length)).sum(2), expected, rtol=1e-4, atol=1e-5)
    some = model.attribute(model.edges().select(reader="a1.*<k>"), **asked).run()
    torch.testing.assert_close(
        some.per_prompt, whole.per_prompt[:, [cell.name in some_names(some) for cell in whole.cells]]
    )
    several = model.attribute(
        [["m0->a1.h0<q>", "a0.h0->a1.h0<q>"], ["m0->a1.h1<k>", "a0.h1->a1.h2<v>"]], **asked
    ).run()
    at = {cell.name: number for number, cell in enumerate(whole.cells)}
    sums = several.per_prompt - several.base_per_prompt[:, None]  # type: ignore[index]
    torch.testing.assert_close(
        sums[:, 0], expected[:, at["m0->a1.h0<q>"]] + expected[:, at["a0.h0->a1.h0<q>"]]
    )
    torch.testing.assert_close(
        sums[:, 1], expected[:, at["m0->a1.h1<k>"]] + expected[:, at["a0.h1->a1.h2<v>"]]
    )
    circuit = whole.circuit(top=12)
    assert 0 < len(circuit.edges) <= 12


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_projections_by_head_are_those_of_whole_projections(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name, torch.float32)
    asked: dict[str, Any] = {"base": run_of(name, 1), "source": run_of(name, 2), "metric": squares}
    found = model.attribute(model.edges(), **asked, method="eap-ig", steps=2).run()
    seen: list[str] = []

    def none(*given: Any) -> None:
        seen.append(given[5])

    monkeypatch.setattr(edge_scores, "head_slices", none)
    monkeypatch.delitem(vars(model), "_attributed_cells")  # what was found is kept
    whole = model.attribute(model.edges(), **asked, method="eap-ig", steps=2).run()
    assert len(seen) == 6  # queries, keys and values of two layers
    torch.testing.assert_close(found.effect, whole.effect, rtol=1e-4, atol=1e-4)


def some_names(result: cw.Result) -> set[str]:
    return {cell.name for cell in result.cells}


def test_paths_and_lines_without_a_source_are_refused() -> None:
    model, base, source = model_of("gpt2", torch.float32), run_of("gpt2", 1), run_of("gpt2", 2)
    edges = model.edges()[:4]
    with pytest.raises(SweepError, match="give a run as the source"):
        model.attribute(edges, base=base, source="zero", metric=squares, method="eap-ig").run()
    with pytest.raises(SweepError, match="give a run as the source"):
        model.attribute(edges, base=base, source="zero", metric=squares, method="eap-ig-activations").run()
    paths = model.paths("a0.*", "a1.*<q>", freeze="none", base=base, source=source, metric=squares)
    with pytest.raises(SweepError, match="not a direct edge"):
        model.attribute(paths.selectors, base=base, source=source, metric=squares, method="eap").run()

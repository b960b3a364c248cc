"""Attention patterns are the module's own attentions, as values and as pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import conewise as cw
from conewise.errors import ArgumentError, DecompositionError, MissingSiteError
from conewise.runs import attention_patterns
from tests.circuits.edge_models import inputs_of, module_of, run_of
from tests.runs.test_lens import Letters


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "gemma2", "bert"])
def test_patterns_are_the_attentions_of_the_module(name: str) -> None:
    module: Any = module_of(name)
    with torch.no_grad():
        expected = module(**inputs_of(name, 0), output_attentions=True).attentions
    found = run_of(name, 0).attention()
    assert found.layers == (0, 1)
    for layer in range(2):
        torch.testing.assert_close(found[layer], expected[layer])
    one = run_of(name, 0).attention(-1)
    assert one.layers == (1,)
    torch.testing.assert_close(one[1], expected[1])


def test_the_table_and_the_pictures() -> None:
    found = run_of("gpt2", 0).attention(tokenizer=Letters())
    frame = found.to_dataframe(prompt=1)
    row = frame[(frame.layer == 1) & (frame["head"] == 2) & (frame["query"] == 4) & (frame["key"] == 3)]
    assert row.weight.item() == pytest.approx(float(found[1][1, 2, 4, 3]))
    figure = found.plot()
    assert len(figure.data) == 8
    assert [trace.visible for trace in figure.data] == [True] * 4 + [False] * 4
    second = figure.layout.updatemenus[0].buttons[1]
    assert second.args[0]["visible"] == [False] * 4 + [True] * 4
    assert list(figure.layout.xaxis.ticktext) == list(found.labels[0])
    some = found.plot(1, heads=[3, 0], prompt=1)
    assert len(some.data) == 2
    assert some.data[0].z[5][2] == pytest.approx(float(found[1][1, 3, 5, 2]))
    assert len(some.layout.updatemenus) == 0


def test_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("gpt2", 0)
    found = run.attention([0])
    with pytest.raises(DecompositionError, match="no patterns of layer 1 here"):
        found.plot(1)
    with pytest.raises(DecompositionError, match="there are 4 heads"):
        found.plot(0, heads=[4])
    with pytest.raises(ArgumentError, match="`heads` is str 'ab'; expected a whole number or an iterable"):
        found.plot(0, heads="ab")  # type: ignore[arg-type]
    assert len(found.plot(0, heads=1).data) == 1
    with pytest.raises(DecompositionError, match=r"layer=1\.5"):
        run.attention(1.5)
    with pytest.raises(MissingSiteError, match="no layer 9"):
        run.attention(9)
    monkeypatch.setattr(attention_patterns, "DRAWN", 100)
    with pytest.raises(DecompositionError, match="too many for one figure"):
        found.plot()


def test_a_model_without_patterns_is_refused_with_the_reason() -> None:
    plain = cw.capture(torch.nn.Linear(3, 4), torch.ones(2, 3))
    with pytest.raises(MissingSiteError, match="no attention was found"):
        plain.run(torch.ones(2, 3)).attention()

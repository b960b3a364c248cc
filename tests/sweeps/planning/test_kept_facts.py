"""What is kept of a model between shapes and pairs: it says the same as what is found anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from conewise.program.walk import compile_rule
from conewise.sweeps.planning import shapes as walking
from conewise.sweeps.planning.independence import Independence
from conewise.sweeps.planning.layout import Layout

SHAPES = ((1, 20), (2, 20), (1, 4), (3, 1), (1, 1), (4, 4), (12, 12), (2, 9))


def captured(layers: int) -> cw.Model:
    """A model that writes its attention out: heads are moved, and what products read has to be copied."""
    config = GPT2Config(
        n_layer=layers, n_head=4, n_embd=48, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    module: torch.nn.Module = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    return cw.capture(module.eval(), input_ids=torch.randint(0, 50, (2, 9)))


@pytest.fixture(scope="module")
def model() -> cw.Model:
    return captured(2)


def layout_of(model: cw.Model, batch: int, length: int) -> Layout:
    """The layout of runs of one shape."""
    return Layout(model.program, model.program.symbols_of({"input_ids": (batch, length)}))


@pytest.mark.parametrize(("batch", "length"), SHAPES)
def test_values_share_memory_where_the_walk_says_so(model: cw.Model, batch: int, length: int) -> None:
    """Against a run: a value that is new shares memory with nothing that it reads, and an alias does."""
    program, layout = model.program, layout_of(model, batch, length)
    aliases = walking.memory_layout(layout, torch.device("cpu")).aliases
    values: dict[str, Any] = dict(program.source_values)
    values |= {"input_ids": torch.zeros(batch, length, dtype=torch.long), "$sizes": layout.sizes(1)}
    with torch.no_grad():
        for record in program.records:
            values[record.name] = compile_rule(record)(*[values[read] for read in record.inputs])
    for record in program.records:
        value = values[record.name]
        if record.name not in layout.varying or not isinstance(value, torch.Tensor):
            continue
        owners = [one for one in record.inputs if _storages(values[one]) & _storages(value)]
        assert bool(owners) == (record.name in aliases), record.name
        if owners:
            assert aliases[record.name] in owners


def _storages(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    return set().union(*map(_storages, value)) if isinstance(value, tuple | list) else set()


def test_of_equal_layers_one_is_walked(model: cw.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk runs no more operations for five layers than for two."""
    walks: list[int] = []
    walk = walking._Walk._walk

    def counting(*given: Any) -> Any:
        walks.append(1)
        return walk(*given)

    monkeypatch.setattr(walking._Walk, "_walk", counting)
    counts = []
    for one in (model, captured(5)):
        walks.clear()
        walking.memory_layout(layout_of(one, 2, 20), torch.device("cpu"))
        counts.append(len(walks))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("role", ["batch", "positions"])
def test_findings_of_other_shapes_are_those_that_are_found_anew(model: cw.Model, role: str) -> None:
    """Whatever shapes were asked before, a shape gets the answers that it gets alone."""
    names = [record.name for record in model.program.records]

    def known(program: Any, batch: int, length: int) -> list[bool]:
        symbols = model.program.symbols_of({"input_ids": (batch, length)})
        layout = Layout(program, symbols)
        if role == "batch":
            found = Independence(layout, layout.batch_dim, layout.batch_symbols)
        else:
            found = Independence(layout, layout.pos_dim, layout.position_symbols)
        return [found.known(name) for name in names]

    shared = replace(model.program)
    for shape in (*SHAPES, *reversed(SHAPES)):
        assert known(shared, *shape) == known(replace(model.program), *shape), shape


def test_another_pair_makes_no_cells(model: cw.Model) -> None:
    """Cells are those of the pair before, in runs of another length too; another choice has its own."""

    def swept(length: int, head: Any = ":") -> Any:
        given = {"input_ids": torch.zeros(1, length, dtype=torch.long)}
        sites = cw.sites("z", layer=":", head=head)
        return model.sweep(sites, base=given, source=given, metric=cw.logit_diff(answer=3, wrong=5))

    first = swept(7)
    assert swept(7).cells is first.cells
    assert swept(9).cells is first.cells
    assert len(swept(7, head=0).cells) == 2
    assert swept(7, head=[0]).spreads[0].axes != swept(7, head=0).spreads[0].axes


def test_cells_along_positions_are_those_of_the_length(model: cw.Model) -> None:
    """A selector of all positions stands for others where there are more of them."""
    counts = []
    for length in (5, 8):
        given = {"input_ids": torch.zeros(1, length, dtype=torch.long)}
        sites = cw.sites("resid_pre", layer=":", pos=":")
        sweep = model.sweep(sites, base=given, source=given, metric=cw.logit_diff(answer=3, wrong=5))
        counts.append(len(sweep.cells))
    assert counts == [10, 16]


def test_rules_of_one_form_are_one_and_constants_keep_their_signs(model: cw.Model) -> None:
    """Layers share rules; 0.0 and -0.0 are two constants."""
    records = [one for one in model.program.records if one.op == "layer_norm"]
    assert compile_rule(records[0]) is compile_rule(records[2])
    scaled = next(one for one in model.program.records if one.op == "mul" and len(one.args) == 2)
    plus, minus = (
        compile_rule(replace(scaled, args=(scaled.args[0], zero), kwargs={})) for zero in (0.0, -0.0)
    )
    values = [torch.ones(1)]
    assert torch.signbit(minus(*values)).all()
    assert not torch.signbit(plus(*values)).any()

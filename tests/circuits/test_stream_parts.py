"""Parts and constant add up to the stream wherever it is read, whatever the form of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.circuits import stream_parts
from conewise.circuits.replaced_parts import EdgeFacts, edge_facts
from conewise.circuits.stream_parts import HeadShares
from conewise.errors import EdgeError
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.runs.run import Run
from conewise.runs.values import reader
from tests.anatomy.made import LENGTH, WORDS, stacked
from tests.anatomy.named_architectures import NAMED
from tests.anatomy.test_names import FORMS
from tests.circuits.edge_models import model_of, run_of, stirred
from tests.laws.modules import inputs_of as drawn_inputs
from tests.laws.modules import network, without_fast_path
from tests.sweeps.test_dimensions import choices

Read = Callable[[str], Any]
UNCHANGED = ["pre_norm", "parallel", "mlp_first", "attention_only", "sandwich", "scaled_branches", "adapted"]
CARRIED = ["post_norm", "normed_stream", "scaled_stream", "parallel_with_a_sum_kept"]


def ids(seed: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (batch, LENGTH), generator=generator)


@functools.cache
def form(name: str) -> Model:
    flow, parts, _, _ = FORMS[name]
    return cw.capture(stirred(stacked(flow, **parts)), ids=ids(0))


def run_of_form(name: str, seed: int) -> Run:
    return form(name).run(ids=ids(seed))


def check_readers(facts: EdgeFacts, base: Read, source: Read, batch_dims: Any) -> None:
    """What readers make of three streams at once is what each run has."""
    for entry, slots in facts.readers.slots.items():
        streams = [facts.parts.stream(read, entry) for read in (source, base, source)]
        found = facts.readers.values(entry, slots, torch.cat(streams), base)
        for slot, node in slots.items():
            dim = batch_dims[node] or 0
            expected = torch.cat([source(node), base(node), source(node)], dim)
            torch.testing.assert_close(found[slot], expected)


@pytest.mark.parametrize("name", [*UNCHANGED, *CARRIED])
def test_parts_add_up_and_readers_are_what_runs_have(name: str) -> None:
    facts, base, source = edge_facts(form(name)), run_of_form(name, 1), run_of_form(name, 2)
    assert facts.parts.check(base) < 1e-6
    assert facts.parts.is_carried_unchanged == (name in UNCHANGED)
    check_readers(facts, reader(base), reader(source), form(name).program.batch_dims)


@pytest.mark.parametrize("name", ["pre_norm", "sandwich", "post_norm"])
def test_parts_of_stacked_worlds_are_those_of_each(name: str) -> None:
    facts, runs = edge_facts(form(name)), [reader(run_of_form(name, seed)) for seed in (1, 2)]
    program = form(name).program

    def read(node: str) -> Any:
        values = [one(node) for one in runs]
        is_world = node in program.record_of and node in program.varying and isinstance(values[0], Tensor)
        return torch.cat(values, program.batch_dims[node] or 0) if is_world else values[0]

    each = zip(*(facts.parts.by_entry(one) for one in runs), strict=True)
    for (entry, found), expected in zip(facts.parts.by_entry(read), each, strict=True):
        torch.testing.assert_close(found, torch.cat([parts for _, parts in expected], 1))
        torch.testing.assert_close(facts.parts.parts(read, entry), found)
        slots = facts.readers.slots[entry]
        twice = torch.cat([facts.parts.stream(read, entry)] * 2)
        for slot, value in facts.readers.values(entry, slots, twice, read).items():
            torch.testing.assert_close(value, torch.cat([read(slots[slot])] * 2))


def test_a_part_is_the_head_s_share_of_the_output_projection() -> None:
    model, run = form("pre_norm"), run_of_form("pre_norm", 1)
    parts = edge_facts(model).parts.parts(reader(run))
    torch.testing.assert_close(parts[1:3], run["result", 0].movedim(2, 0))
    torch.testing.assert_close(parts[3], run["mlp_out", 0])
    torch.testing.assert_close(parts[0], run["resid_pre", 0])


@pytest.mark.parametrize("name", ["post_norm", "sandwich"])
def test_a_norm_on_the_way_has_the_scale_of_the_run(name: str) -> None:
    """By hand: a share less its mean, over the spread of the whole, times the weight."""
    model, run = form(name), run_of_form(name, 1)
    facts, layer = edge_facts(model), model.module.layers[0]

    def normed(share: Tensor, whole: Tensor, norm: nn.LayerNorm) -> Tensor:
        spread = (whole.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        return (share - share.mean(-1, keepdim=True)) / spread * norm.weight

    parts = facts.parts.parts(reader(run), facts.components.reader("m0").entry)
    for head in range(2):
        share = run["result", 0][:, :, head]
        if name == "post_norm":
            expected = normed(share, run["resid_mid", 0], layer.ln1)
        else:
            expected = normed(share, layer.attn.o(run["z", 0].flatten(2)), layer.after1)
        torch.testing.assert_close(parts[1 + head], expected.detach())


def test_parts_that_are_carried_are_asked_for_where_the_stream_is_read() -> None:
    facts, read = edge_facts(form("post_norm")), reader(run_of_form("post_norm", 1))
    with pytest.raises(EdgeError, match=r"norms its sums.*Say where with `entry`"):
        facts.parts.parts(read)
    entry = facts.components.reader("a1.h0<q>").entry
    assert len(facts.parts.parts(read, entry)) == facts.components.reader("a1.h0<q>").writers


@pytest.mark.parametrize(
    "given",
    [
        {"inside": "sequence first", "boundary": "sequence first", "packing": "head·batch"},
        {"inside": "flat", "packing": "batch·head"},
        {"packing": "multihead"},
        {"packing": "grouped", "output": "flat, positions first"},
        {"boundary": "unbatched"},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
    ],
    ids=lambda given: ", ".join(map(str, given.values())),
)
def test_batch_and_positions_may_lie_anywhere(given: dict[str, Any]) -> None:
    built = choices(**given)
    with without_fast_path():
        model = cw.capture(network(built), **drawn_inputs(built, 0))
    base, source = (model.run(**drawn_inputs(built, seed)) for seed in (0, 1))
    facts = edge_facts(model)
    facts.parts.check(base)
    check_readers(facts, reader(base), reader(source), model.program.batch_dims)


def test_the_last_position_s_logits_are_read_of_the_whole_stream() -> None:
    module = ARCHITECTURES["gpt2"].make(2)
    model = cw.capture(module, **ARCHITECTURES["gpt2"].example(5), logits_to_keep=1)
    base, source = (model.run(**ARCHITECTURES["gpt2"].example(6, seed)) for seed in (1, 2))
    facts = edge_facts(model)
    facts.parts.check(base)
    assert facts.components.reader("logits").writers == len(facts.components.writers)
    check_readers(facts, reader(base), reader(source), model.program.batch_dims)


# -- a wrong part is noticed -------------------------------------------------------------------


def test_a_forgotten_bias_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadShares, "constant", lambda self, read: torch.zeros_like(read(self.heads.term)))
    with pytest.raises(EdgeError, match=r"do not add up to the stream that m0 reads .*layer 0.*is a0.h1"):
        edge_facts(form("pre_norm")).parts.check(run_of_form("pre_norm", 1))


@pytest.mark.parametrize("name", ["post_norm", "sandwich"])
def test_a_forgotten_norm_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def unscaled(step: Any, rule: Any, stacks: dict[str, Tensor], reading: Read) -> Tensor:
        return stacks[step.carried[0]] if step.is_norm else stepped(step, rule, stacks, reading)

    stepped = stream_parts.stepped
    monkeypatch.setattr(stream_parts, "stepped", unscaled)
    with pytest.raises(EdgeError, match="do not add up to the stream that m0 reads"):
        edge_facts(form(name)).parts.check(run_of_form(name, 1))


def test_a_tolerance_that_is_given_is_kept() -> None:
    with pytest.raises(EdgeError, match=r"and 1e-12 is allowed"):
        edge_facts(form("pre_norm")).parts.check(run_of_form("pre_norm", 1), tolerance=1e-12)


def test_a_slot_that_no_reader_has_is_refused() -> None:
    facts, read = edge_facts(form("pre_norm")), reader(run_of_form("pre_norm", 1))
    entry = facts.components.reader("m0").entry
    with pytest.raises(EdgeError, match=r"no reader 'q' of the stream at .*: it has mlp"):
        facts.readers.values(entry, ["q"], facts.parts.stream(read, entry), read)


# -- architectures -----------------------------------------------------------------------------

MANY = [name for name, one in ARCHITECTURES.items() if name not in {"t5", "mamba", "mobilenet_v2"}]


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_parts_of_any_architecture(name: str) -> None:
    facts, base = edge_facts(model_of(name)), run_of(name, 0)
    assert facts.parts.check(base) < 1e-5
    check_readers(facts, reader(base), reader(run_of(name, 1)), model_of(name).program.batch_dims)


IN_THE_WAY = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "has no 'k' that heads could be told apart in"),
    "llama4": "has no 'q' that heads could be told apart in",
    "jetmoe": "has no 'q' that heads could be told apart in",
    "minimax": "adds to the stream behind the last layer with attention",
    "falcon_h1": r"'model\.layers\.0\.mamba/conv1d'",
    **dict.fromkeys(
        ("jamba", "bamba", "recurrent_gemma", "lfm2", "nemotron_h", "zamba"), "first layer with attention is"
    ),
    **dict.fromkeys(("convbert", "mobilebert"), "has no 'attn_out'"),
    "gemma3n": "has no 'resid_pre'",
    **dict.fromkeys(("xlnet", "swin"), "where batch and positions lie"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # recurrent states that a module keeps
@pytest.mark.parametrize("name", NAMED)
def test_parts_of_architectures_by_name(name: str) -> None:
    case = NAMED[name]
    model = cw.capture(stirred(case.make()), **case.inputs(2, 12))
    stacks = list(dict.fromkeys(layer.stack for layer in model.site_table.model_layers))
    stack = "encoder" if "encoder" in stacks else stacks[0]
    if name in IN_THE_WAY:
        with pytest.raises(EdgeError, match=IN_THE_WAY[name]):
            _ = edge_facts(model, stack).parts
        return
    assert edge_facts(model, stack).parts.check(model.run(**case.inputs(2, 12))) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_parts_that_are_gone_through_in_turns_leave_gradients_as_they_were(name: str) -> None:
    run = run_of(name, 0)
    parts = edge_facts(run.model).parts
    one, other = parts.by_entry(reader(run)), parts.by_entry(reader(run))
    next(one)
    next(other)
    assert torch.is_grad_enabled()
    one.close()  # type: ignore[attr-defined]
    other.close()  # type: ignore[attr-defined]
    assert torch.is_grad_enabled()

"""Programs that tracr compiled: the circuit is known, because somebody wrote it.

tracr makes a transformer of a RASP program, so that what each part of it reads from whom can be told from the
program. The weights lie in `tracr/`; `make test-tracr` compiles them anew and compares.

Base and source are inputs of one length. What depends on the positions and on the length alone is the same in
both, so resampling it changes nothing: the circuit is what depends on the tokens.

**reverse.** Layers 0 to 2 compute where each position has to look, `length - indices - 1`: a0.h0 and m0
count, m1 and m2 subtract. All of that is the same in base and source. The head of layer 3 looks there (q and
k), and takes the token along (v).

**frac_prevs**, the share of `x` so far. m0 writes where the token is `x`; the head of layer 1 takes the mean
over the positions up to its own (q and k: indices).

**sort_unique.** `target_pos` is how many tokens are smaller than the one at a position. The head of layer 0
compares it (q) with all tokens (k), and looks at the smaller ones and at the first position, which alone has
the value 1 (v), in base and source alike: it brings 1 / (1 + count), of which m0 makes the count. The head of
layer 1 looks from each index (q) to where `target_pos` is equal to it (k), and takes the token along (v).

**detect_pattern**, whether `ab` ends here. m0 writes where the token is `a`, and where it is `b`. The head of
layer 1 brings the first of these from the position before (q and k: indices). m1 takes the AND of that and
the second.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.ground_truth import by_conewise, by_hand
from tests.ground_truth.stack import Outputs
from tests.ground_truth.tracr_model import FOLDER, Compiled

CIRCUITS = {
    "reverse": ("input->a3.h0<v>", "a3.h0->logits"),
    "frac_prevs": ("input->m0", "m0->a1.h0<v>", "a1.h0->logits"),
    "sort_unique": (
        "input->a0.h0<q>",
        "input->a0.h0<k>",
        "a0.h0->m0",
        "m0->a1.h0<k>",
        "input->a1.h0<v>",
        "a1.h0->logits",
    ),
    "detect_pattern": ("input->m0", "m0->a1.h0<v>", "m0->m1", "a1.h0->m1", "m1->logits"),
}
# What an edge outside of the circuit may change: attention that is off by 100 / sqrt(8) is not quite 0.
SMALL = 1e-6
THRESHOLD = 1e-3

every_program = pytest.mark.parametrize("program", CIRCUITS)


class Question:
    """A compiled program, examples as base, each with another as its source, and the error of answers."""

    def __init__(self, program: str) -> None:
        self.program = Compiled(program)
        self.module = self.program.module
        self.base = self.program.example_ids
        self.source = self.base.roll(1, 0)
        self.wanted = self.program.example_outputs

    def metric(self, outputs: Outputs) -> Tensor:
        """The squared error of each example, over all positions at which the program has an answer."""
        first = 1 + sum(value is None for value in self.program.examples[0][1])
        return (outputs.logits - self.wanted)[:, first:].square().sum((-1, -2))

    @functools.cached_property
    def effects(self) -> dict[str, float]:
        """What each edge does to the error, by hand."""
        return by_hand.effects(self.module, self.base, self.source, self.metric)


@functools.cache
def question_of(program: str) -> Question:
    return Question(program)


def test_every_program_that_is_kept_is_asked() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(CIRCUITS)


@every_program
def test_the_torch_module_computes_what_tracrs_model_does(program: str) -> None:
    question = question_of(program)
    outputs = question.module(question.base)
    assert torch.allclose(outputs.logits, question.wanted, rtol=0.0, atol=1e-6)
    for decoded, (_, answer) in zip(question.program.decode(outputs), question.program.examples, strict=True):
        for got, value in zip(decoded, answer, strict=True):
            assert value is None or got == pytest.approx(value)


@every_program
def test_cutting_all_edges_or_none_gives_source_or_base(program: str) -> None:
    question = question_of(program)
    module, base, source = question.module, question.base, question.source
    torch.testing.assert_close(by_hand.outputs(module, base, source), module(base))
    every = by_hand.edges(module)
    torch.testing.assert_close(by_hand.outputs(module, base, source, every), module(source))


@every_program
def test_by_hand_the_edges_of_the_program_matter_and_no_others(program: str) -> None:
    question = question_of(program)
    assert {edge for edge, effect in question.effects.items() if abs(effect) > SMALL} == set(
        CIRCUITS[program]
    )
    left = by_hand.left_by_acdc(question.module, question.base, question.source, question.metric, THRESHOLD)
    assert set(left) == set(CIRCUITS[program])


@every_program
def test_the_edges_are_those_of_the_module(program: str) -> None:
    module = question_of(program).module
    assert by_conewise.edges(module) == by_hand.edges(module)


@every_program
def test_the_exact_sweep_finds_the_circuit(program: str) -> None:
    question = question_of(program)
    effects = by_conewise.effects(question.module, question.base, question.source, question.metric)
    assert {edge for edge, effect in effects.items() if abs(effect) > SMALL} == set(CIRCUITS[program])
    assert effects == pytest.approx(question.effects, abs=SMALL)


@every_program
def test_acdc_finds_the_circuit(program: str) -> None:
    question = question_of(program)
    circuit = by_conewise.circuit(question.module, question.base, question.source, question.metric, THRESHOLD)
    assert set(circuit.edges) == set(CIRCUITS[program])
    found = circuit.evaluate(
        base={"ids": question.base}, source={"ids": question.source}, metric=question.metric
    )
    assert found.faithfulness == pytest.approx(1.0, abs=SMALL)
    assert found.completeness == pytest.approx(0.0, abs=SMALL)

"""Induction: the edge from the head that looks one back into the keys of the head that finds the answer.

Each position has to say which token stood before it, and the last one looks for the position that says its
own token. So a head looks one back, and the keys of a later head read what it brings. In the source another
token stands before the answer, and nothing else differs: the way of that token is the circuit.

The head that looks one back looks at its own position a little, so that a position also says its own token,
and the keys take that off again. So the next edge, from the input into the same keys, has a part of the
effect.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import conewise as cw
from tests.ground_truth import by_conewise, by_hand
from tests.ground_truth.induction import Prompts, induction, prompts
from tests.ground_truth.stack import Outputs, Stack

NUMBER = 16


class Scene:
    """The trained model, prompts, and the two heads, told by where they look."""

    def __init__(self) -> None:
        self.model: Stack = induction()
        self.prompts: Prompts = prompts(NUMBER)
        first, second = self._patterns()
        rows = torch.arange(NUMBER)
        one_back = first.diagonal(-1, -2, -1).mean((0, 2))
        to_answer = second[rows, :, -1, self.prompts.at + 1].mean(0)
        self.one_back, self.to_answer = one_back.max().item(), to_answer.max().item()
        self.before, self.finder = f"a0.h{one_back.argmax()}", f"a1.h{to_answer.argmax()}"

    def _patterns(self) -> list[Tensor]:
        """Attention of each layer for the base, [prompt, head, query, key]."""
        found = []
        x = self.model.entry(self.prompts.base)
        for layer in self.model.blocks:
            found.append(layer.attn.pattern(layer.attn.query(x), layer.attn.key(x)))
            x = layer(x)
        return found

    def metric(self, outputs: Outputs) -> Tensor:
        """The logit of the answer."""
        return outputs.logits[:, -1].gather(1, self.prompts.answers[:, None])[:, 0]

    @functools.cached_property
    def effects(self) -> dict[str, float]:
        """What each edge does to the logit, by hand."""
        return by_hand.effects(self.model, self.prompts.base, self.prompts.source, self.metric)

    @property
    def path(self) -> tuple[str, str, str]:
        """What the circuit is: the token, one back, into the keys, out."""
        return (
            f"input->{self.before}<v>",
            f"{self.before}->{self.finder}<k>",
            f"{self.finder}->logits",
        )


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


def test_the_model_knows_what_came_after(scene: Scene) -> None:
    model, asked = scene.model, scene.prompts
    assert torch.equal(model(asked.base).logits[:, -1].argmax(-1), asked.answers)
    assert float((model(asked.source).logits[:, -1].argmax(-1) == asked.answers).float().mean()) < 0.5


def test_one_head_looks_one_back_and_one_at_the_answer(scene: Scene) -> None:
    assert scene.one_back > 0.5
    assert scene.to_answer > 0.8


def test_by_hand_the_edge_into_the_keys_stands_out(scene: Scene) -> None:
    _expect_that_it_stands_out(scene, scene.effects)


def test_the_exact_sweep_shows_the_edge_into_the_keys(scene: Scene) -> None:
    model, asked = scene.model, scene.prompts
    effects = by_conewise.effects(model, asked.base, asked.source, cw.logit(asked.answers))
    _expect_that_it_stands_out(scene, effects)
    assert effects == pytest.approx(scene.effects, abs=1e-4)


def test_acdc_leaves_the_path_alone(scene: Scene) -> None:
    """At a threshold of a thirteenth of the difference, which is 13."""
    asked = scene.prompts
    circuit = by_conewise.circuit(scene.model, asked.base, asked.source, cw.logit(asked.answers), 1.0)
    assert set(circuit.edges) == set(scene.path)


def _expect_that_it_stands_out(scene: Scene, effects: dict[str, float]) -> None:
    """The three edges of the path each carry nearly all of the difference, and no other half of it."""
    base, source = (
        scene.metric(scene.model(ids)).mean() for ids in (scene.prompts.base, scene.prompts.source)
    )
    shares = {edge: effect / float(source - base) for edge, effect in effects.items()}
    assert min(shares[edge] for edge in scene.path) > 0.9
    assert max(share for edge, share in shares.items() if edge not in scene.path) < 0.5
    # Of all that anything in layer 1 reads, this is what matters most.
    assert max((edge for edge in shares if "->a1." in edge), key=lambda edge: shares[edge]) == scene.path[1]

"""Which heads of the tiny model do its task: measured by patching them, and by where they look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import conewise as cw
from conewise.loading import load
from training.held_out import default_prompts
from training.words import NUMBERS, encode

# Where things stand in the aligned prompts: "<bos> When A and B went to the store , S gave a drink to".
FIRST, SECOND, SUBJECT, LAST = 2, 4, 10, 14
PROMPTS = 64
STRONG = 0.05
LOOKS = 0.3


@dataclass(frozen=True)
class Head:
    """One head: what patching it does, and where it looks.

    `restored`: put into the flipped prompts, its value in the right ones brings back this share of the
    logit difference. `without`: the logit difference left when it is replaced by its mean over prompts.
    `looks`: mean attention from the last word, by what it looks at.
    """

    layer: int
    head: int
    restored: float
    without: float
    looks: dict[str, float]

    @property
    def name(self) -> str:
        """Its layer and number, as in `0.2`."""
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True)
class Circuit:
    """What was found on aligned held-out prompts; `mlps` is what the MLP of each layer restores.

    `strongest` are the heads that restore at least `STRONG`, and `weakest` as many of those that restore
    least; accuracies are of all prompts with none, the strongest or the weakest replaced by their means.
    `moved` has, for each head that looks at the answer, its attention from the last word to the answer and
    to the subject's first mention, as it is and with the strong heads of earlier layers patched from the
    flipped prompts.
    """

    heads: tuple[Head, ...]
    mlps: tuple[float, ...]
    prompts: int
    clean: float
    flipped: float
    strongest: tuple[Head, ...]
    weakest: tuple[Head, ...]
    accuracy: float
    without_strongest: float
    without_weakest: float
    moved: dict[str, tuple[float, float, float, float]]


class Measured:
    """The model in a folder, on aligned held-out prompts and on the same ones flipped."""

    def __init__(self, folder: Path, prompts: int = PROMPTS) -> None:
        # Eager attention has its pattern as a value that can be read.
        module = load(folder, attn_implementation="eager").module
        chosen = default_prompts(prompts)
        clean, flipped = (
            torch.tensor([encode(text) for text in texts])
            for texts in ([p.text for p in chosen], [p.flipped for p in chosen])
        )
        self.answers = torch.tensor([NUMBERS[p.answer] for p in chosen])
        self.wrong = torch.tensor([NUMBERS[p.wrong] for p in chosen])
        self.model = cw.capture(module, input_ids=clean)
        self.clean, self.flipped = self.model.run(input_ids=clean), self.model.run(input_ids=flipped)
        self.mean = cw.mean(self.model, [{"input_ids": clean}, {"input_ids": flipped}], per_position=True)
        self.metric = cw.logit_diff(self.answers, self.wrong)
        self.answer_at = torch.where(clean[:, FIRST] == self.answers, FIRST, SECOND)
        self.subject_at = FIRST + SECOND - self.answer_at

    def accuracy(self, heads: Sequence[tuple[int, int]] = ()) -> float:
        """The share of right answers, of all words, with these heads replaced by their means."""
        if not heads:
            return float(self.is_right(self.clean.outputs).mean())
        together = [cw.site("z", layer=layer, head=head) for layer, head in heads]
        sweep = self.model.sweep([together], base=self.clean, source=self.mean, metric=self.is_right)
        return float(sweep.run(progress=False).values[0])

    def is_right(self, outputs: Any) -> Any:
        """For each prompt, whether the likeliest next word is the answer."""
        return (outputs.logits[:, -1].argmax(-1) == self.answers).double()

    def looks(self, run: Any, layer: int, head: int) -> dict[str, float]:
        """Mean attention of a head from the last word, by what it looks at."""
        pattern = run["pattern", layer][:, head]
        rows = torch.arange(len(pattern))
        keys = {"last to answer": self.answer_at, "last to subject before": self.subject_at}
        found = {name: pattern[rows, LAST, key].mean().item() for name, key in keys.items()}
        return found | {"last to subject": pattern[:, LAST, SUBJECT].mean().item()}


def measure(folder: Path) -> Circuit:
    """Patch every head of the model in `folder`, ablate it, and see where it looks."""
    on = Measured(folder)
    sites = cw.sites("z", layer=":", head=":")
    restored = on.model.sweep(sites, base=on.flipped, source=on.clean, metric=on.metric).run(progress=False)
    ablated = on.model.sweep(sites, base=on.clean, source=on.mean, metric=on.metric).run(progress=False)
    mlps = on.model.sweep(
        cw.sites("mlp_out", layer=":"), base=on.flipped, source=on.clean, metric=on.metric
    ).run(progress=False)
    layers, heads = restored.values.shape
    found = [
        Head(
            layer,
            head,
            float(restored.normalised[layer, head]),
            float(ablated.values[layer, head]),
            on.looks(on.clean, layer, head),
        )
        for layer in range(layers)
        for head in range(heads)
    ]
    ranked = sorted(found, key=lambda head: -head.restored)
    strongest = [head for head in ranked if head.restored >= STRONG]
    weakest = sorted(found, key=lambda head: abs(head.restored))[: len(strongest)]
    assert restored.source is not None
    return Circuit(
        tuple(found),
        tuple(mlps.normalised.tolist()),
        len(on.answers),
        float(restored.source[0]),
        float(restored.base[0]),
        tuple(strongest),
        tuple(weakest),
        on.accuracy(),
        on.accuracy([(head.layer, head.head) for head in strongest]),
        on.accuracy([(head.layer, head.head) for head in weakest]),
        _moved(on, found, strongest),
    )


def _moved(
    on: Measured, heads: Sequence[Head], strongest: Sequence[Head]
) -> dict[str, tuple[float, float, float, float]]:
    found = {}
    for head in heads:
        earlier = [other for other in strongest if other.layer < head.layer]
        if head.looks["last to answer"] < LOOKS or not earlier:
            continue
        with on.clean.fork() as world:
            for other in earlier:
                world.patch(cw.site("z", layer=other.layer, head=other.head), on.flipped)
            after = on.looks(world, head.layer, head.head)
        answer, subject = "last to answer", "last to subject before"
        found[head.name] = (head.looks[answer], head.looks[subject], after[answer], after[subject])
    return found

"""What a question has to be, so that it can be asked: looked at before anything is run."""

from __future__ import annotations

import math
from typing import Any

from conewise.errors import Argument, MetricError, MissingSiteError, PromptError, SweepError
from conewise.prompts.tokenized import TokenizedPrompts
from conewise.report.story import PATCHES
from conewise.runs.captured import Captured
from conewise.runs.interventions.corruption import find_embedding
from conewise.runs.metrics import Metric, as_metric

DIRECTIONS = {"denoise": ("corrupted", "clean"), "noise": ("clean", "corrupted")}
"""Which run is the base, and which the source, of each direction."""


def default_direction(patch: str) -> str:
    """What people mean who do not say: put clean values into the corrupted run, and ablate the clean one."""
    return "denoise" if patch == "source" else "noise"


def noise_scale(patch: str, scale: float | None) -> float:
    """The standard deviation of noise, 1 unless given. Raises SweepError where no noise is put in."""
    if scale is not None and patch != "noise":
        raise SweepError(
            Argument("scale", scale),
            " is the standard deviation of noise, and ",
            Argument("patch", patch),
            " adds none. Leave it out, or give ",
            Argument("patch", "noise"),
            ".",
        )
    return 1.0 if scale is None else scale


def expect_asked(
    prompts: TokenizedPrompts, direction: str, patch: str, metric: Any, scale: Any, seed: Any
) -> None:
    """Raise where prompts cannot be asked so: what is known of that before there is a model."""
    if direction not in DIRECTIONS:
        raise SweepError(f"no direction {direction!r}; there are {', '.join(DIRECTIONS)}.")
    if patch not in PATCHES:
        raise SweepError(f"no patch {patch!r}; there are {', '.join(PATCHES)}.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SweepError(f"the seed is {seed!r}; it is a whole number.")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < math.inf:
        raise SweepError(f"scale is {scale!r}; it is the standard deviation of the noise, 0 or more.")
    if isinstance(metric, str):
        prompts.expect_answers(metric)
    else:
        made = as_metric(metric)
        if made.prompts not in {None, len(prompts.pairs)}:
            raise MetricError(
                f"the metric {made.name!r} is made for {made.prompts} prompts, and {len(prompts.pairs)} were "
                "given. Give one answer for all prompts, or one for each."
            )
    if patch == "source":
        expect_two_runs(prompts)


def expect_two_runs(prompts: TokenizedPrompts) -> None:
    """Raise PromptError where clean and corrupted are the same prompts."""
    if prompts.clean == prompts.corrupted:
        raise PromptError(
            "clean and corrupted have the same tokens in every pair, so patching one into the other "
            "changes nothing."
        )


def expect_vocabulary(model: Captured, prompts: TokenizedPrompts) -> None:
    """Raise PromptError where a tokenizer has tokens that the model has not."""
    try:
        known = len(find_embedding(model.program).table)
    except MissingSiteError:
        return
    for number, rows in enumerate(
        zip(prompts.clean, prompts.corrupted, prompts.answers, prompts.wrong_answers, strict=True)
    ):
        above = [token for tokens in rows for token in tokens if token >= known]
        if above:
            raise PromptError(
                f"prompt {number + 1} has the token {above[0]}, and {model.label} knows {known}, from 0: "
                "this is not its tokenizer. Give the one that it was trained with."
            )


def expect_tokens(model: Captured, metric: Metric) -> None:
    """Raise MetricError where a metric reads tokens that the model has not."""
    try:
        known = len(find_embedding(model.program).table)
    except MissingSiteError:
        return
    above = [token for token in metric.tokens if not 0 <= token < known]
    if above:
        raise MetricError(
            f"the metric {metric.name!r} reads the token {above[0]}, which is not in the vocabulary of "
            f"{model.label}: it has {known}, from 0."
        )

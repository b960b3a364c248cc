"""The choices of options: what may be said, and what it is called in the library."""

from __future__ import annotations

from enum import StrEnum


class Patch(StrEnum):
    """What is put at a site."""

    SOURCE = "source"
    ZERO = "zero"
    MEAN = "mean"
    NOISE = "noise"


class Direction(StrEnum):
    """Which run is changed."""

    DENOISE = "denoise"
    NOISE = "noise"


class Metric(StrEnum):
    """What is read off the last position."""

    LOGIT_DIFF = "logit-diff"
    PROB = "prob"
    KL = "kl"

    @property
    def word(self) -> str:
        """Its name in the library."""
        return self.value.replace("-", "_")


class Method(StrEnum):
    """How a circuit is found."""

    ACDC = "acdc"
    EXACT = "exact"


class Ablation(StrEnum):
    """What removed edges carry."""

    RESAMPLE = "resample"
    ZERO = "zero"
    MEAN = "mean"

    @property
    def patch(self) -> str:
        """What a sweep over edges calls it."""
        return "source" if self is Ablation.RESAMPLE else self.value


class Evaluator(StrEnum):
    """How worlds are evaluated."""

    AUTO = "auto"
    WAVEFRONT = "wavefront"
    SERIAL = "serial"

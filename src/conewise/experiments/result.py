"""What an experiment hands back: rows that set the paper, the prediction and the measurement side by side."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from conewise.version import __version__

Number = int | float | Fraction

Progress = Callable[[int, int], None]
"""Called with how many of how many units of work are done."""


def silent(done: int, total: int) -> None:
    """A progress that nobody watches."""
    del done, total


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: as the paper prints it, as the theory predicts it, as it was measured.

    `paper` keeps the printed digits ("2.0057"), because those are what is compared. `exact` rows
    must agree; the others (timings) are reported. Where `paper_predicts`, the printed figure is a
    prediction, a limit say: it is compared with ours, and the measurement stands beside them. `facts` are
    further columns of the table. A `detail` row belongs in files, not on a screen.
    """

    name: str
    paper: str | None
    predicted: Number | None
    measured: Number
    exact: bool = True
    unit: str = ""
    detail: bool = False
    paper_predicts: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def match(self) -> bool | None:
        """Whether measured equals predicted, and the paper in every digit it prints; None for timings."""
        if not self.exact:
            return None
        if self.paper_predicts:
            return self.predicted is not None and prints_as(self.predicted, self.paper or "")
        return self.measured == self.predicted and (
            self.paper is None or prints_as(self.measured, self.paper)
        )

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON takes it; fractions become the nearest float."""
        return {
            "name": self.name,
            **self.facts,
            "paper": None if self.paper is None else printed_number(self.paper),
            "predicted": plain(self.predicted),
            "measured": plain(self.measured),
            "unit": self.unit,
            "exact": self.exact,
            "match": self.match,
        }


@dataclass(frozen=True, slots=True)
class Result:
    """An experiment after its run.

    `compared` says in words what `all_match` stands for; `series` holds what a figure draws and a
    table does not.
    """

    name: str
    title: str
    claim: str
    rows: Sequence[Row]
    compared: str
    notes: Sequence[str] = ()
    seed: int | None = None
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    series: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_match(self) -> bool:
        """Whether every exact row matches."""
        return all(row.match is not False for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON takes it."""
        return {
            "title": self.title,
            "claim": self.claim,
            "all_match": self.all_match,
            "compared": self.compared,
            "rows": [row.as_dict() for row in self.rows],
            "notes": list(self.notes),
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "versions": dict(self.versions),
            "series": dict(self.series),
        }


def printed_number(printed: str) -> int | float:
    """The number that the paper prints."""
    return float(printed) if "." in printed else int(printed)


def prints_as(value: Number, printed: str) -> bool:
    """Whether `value`, rounded to as many decimals as `printed` has, is what is printed."""
    decimals = len(printed.partition(".")[2])
    return round(Fraction(value), decimals) == Fraction(printed)


def plain(value: Number | None) -> int | float | None:
    """A number that JSON knows: whole numbers as int, other fractions as the nearest float."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python, of conewise and of `packages`, and the kind of machine."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    found["conewise"] = __version__
    for package in ("numpy", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found

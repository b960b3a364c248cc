"""Figures that the README quotes are those of the last benchmarks; the tutorial's are those of its code."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text("utf-8")
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text("utf-8")
TUTORIAL = (ROOT / "docs/tutorial.md").read_text("utf-8")


def _section(page: str, title: str) -> str:
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_readme_s_measurements_are_in_the_benchmarks() -> None:
    peers = _section(README, "Beside its peers")
    (seconds,) = re.findall(r"^\| seconds \|(.*)\|$", peers, flags=re.MULTILINE)
    after = peers.rsplit("|\n", 1)[1]
    quoted = re.findall(r"\d[\d,.]*\d", seconds) + re.findall(r"\b(\d[\d,.]*)(?: ms|×| %)", after)
    assert len(quoted) >= 10
    measured = set(re.findall(r"\d[\d,.]*\d|\d", BENCHMARKS))
    assert [figure for figure in quoted if figure not in measured] == []


def test_the_readme_says_what_was_missed() -> None:
    """A miss that the benchmarks mark has its figure in the README too."""
    missed = re.findall(r"(\d[\d.]*)(?:×| %), \*\*missed\*\*", BENCHMARKS)
    assert missed
    assert [figure for figure in missed if figure not in _section(README, "Beside its peers")] == []


def test_what_the_tutorial_says_of_its_numbers_is_in_what_its_code_prints() -> None:
    printed = "".join(re.findall(r"```text\n(.*?)```", TUTORIAL, flags=re.DOTALL))
    prose = re.sub(r"```.*?```", "", TUTORIAL, flags=re.DOTALL).replace("−", "-")
    said = re.findall(r"(?<![\w.])[-+]?\d+\.\d\d\b", prose)
    assert len(said) >= 4
    shown = {number.lstrip("+-") for number in re.findall(r"[-+]?\d+\.\d\d\b", printed)}
    assert [number for number in said if number.lstrip("+-") not in shown] == []

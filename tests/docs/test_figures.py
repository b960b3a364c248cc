"""Figures that pages quote are those of the last benchmarks; the tutorial's are those of its code."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text("utf-8")
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text("utf-8")
EXPERIMENTS = (ROOT / "docs/experiments.md").read_text("utf-8")
PEERS = (ROOT / "docs/beside-peers.md").read_text("utf-8")
TUTORIAL = (ROOT / "docs/tutorial.md").read_text("utf-8")


def _section(page: str, title: str) -> str:
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def _unmeasured(text: str) -> list[str]:
    """The measurements of a text that no benchmark or experiment has: with a unit, or a ratio's sign."""
    quoted = re.findall(r"(?<![\w.,])(\d[\d,.]*)(?: ?(?:ms|s|µs|seconds|times)\b|×| %)", text)
    assert len(quoted) >= 10
    measured = set(re.findall(r"\d[\d,.]*\d|\d", BENCHMARKS + EXPERIMENTS))
    return [figure for figure in quoted if figure not in measured]


def test_the_readme_s_measurements_are_in_the_benchmarks() -> None:
    measured = set(re.findall(r"\d[\d,.]*\d|\d", BENCHMARKS))
    section = _section(README, "Compared with other tools")
    quoted = re.findall(r"[\d.]*\d(?= times)|(?<=target: )\d[\d.]*\d|(?<=target: )\d", section)
    assert len(quoted) >= 8
    assert [figure for figure in quoted if figure not in measured] == []
    headlines = re.findall(r"^- \*\*.*\n(?:  .*\n)*", README, flags=re.MULTILINE)
    assert len(headlines) == 4
    for headline in headlines:
        assert "](benchmarks/README.md#" in headline
        for figure in re.findall(r"\d+\.\d+|\d+,\d+|\d+ seconds", headline):
            assert figure.removesuffix(" seconds") in measured, figure


def test_the_page_on_peers_has_the_measurements_of_the_benchmarks() -> None:
    assert _unmeasured(PEERS) == []
    seconds = re.findall(
        r"^\|[^|]*\|([^|]*)\| .* \|$", _section(PEERS, "Every head and MLP"), flags=re.MULTILINE
    )
    figures = re.findall(r"\d+\.\d+", " ".join(seconds))
    assert len(figures) >= 8
    assert [figure for figure in figures if figure not in BENCHMARKS] == []


def test_the_page_on_peers_says_what_was_missed() -> None:
    """A miss that the benchmarks mark has its figure there."""
    missed = re.findall(r"(\d[\d.]*)(?:×| %), \*\*missed\*\*", BENCHMARKS)
    assert missed
    said = _section(PEERS, "What was missed")
    assert [figure for figure in missed if figure not in said] == []


def test_the_readme_says_what_was_missed_by_most() -> None:
    """Of each row of the benchmarks that has a miss, the worst; of these rows, the three that are worst."""
    rows = re.findall(
        r"^\|.*\| ≥ ([\d.]+)×[^|]*\|([^|]*\*\*missed\*\*[^|]*)\|$", BENCHMARKS, flags=re.MULTILINE
    )
    worst = sorted(
        min(
            (float(figure) / float(wanted), figure, wanted)
            for figure in re.findall(r"([\d.]+)×, \*\*", reached)
        )
        for wanted, reached in rows
    )
    assert len(worst) >= 3
    said = README.split("**Missed targets**", 1)[1].split("\n## ", 1)[0]
    for _, figure, wanted in worst[:3]:
        assert re.search(rf"\b{re.escape(figure)} times[^(]*\(target: {re.escape(wanted)}\)", said), figure
    assert "](docs/beside-peers.md)" in README


def test_what_is_said_of_a_peer_has_a_link_behind_it() -> None:
    """Each cell is a measurement, or leads to the test that asks it."""
    rows = re.findall(r"^\|(.*)\|$", _section(PEERS, "Side by side"), flags=re.MULTILINE)
    header, _, *cells = ([cell.strip() for cell in row.split("|")] for row in rows)
    peers = [at for at, name in enumerate(header) if re.search(r"\d", name)]
    assert len(peers) == 2
    assert len(cells) >= 8
    for row in cells:
        for at in peers:
            is_figure = re.match(r"[\d.]+ m?s\b", row[at]) is not None
            assert is_figure or "](" in row[at], (row[0], header[at])


def test_what_the_readme_says_of_the_tutorial_is_printed_there() -> None:
    said = re.findall(r"\[The tutorial\](?:.|\n)*?\((\d+\.\d+)\)", README)
    assert len(said) == 1
    assert re.search(rf"^ +2 +{said[0]} ", TUTORIAL, flags=re.MULTILINE)


def test_what_the_tutorial_says_of_its_numbers_is_in_what_its_code_prints() -> None:
    printed = "".join(re.findall(r"```text\n(.*?)```", TUTORIAL, flags=re.DOTALL))
    prose = re.sub(r"```.*?```", "", TUTORIAL, flags=re.DOTALL).replace("−", "-")
    said = re.findall(r"(?<![\w.])[-+]?\d+\.\d\d\b", prose)
    assert len(said) >= 4
    shown = {number.lstrip("+-") for number in re.findall(r"[-+]?\d+\.\d\d\b", printed)}
    assert [number for number in said if number.lstrip("+-") not in shown] == []

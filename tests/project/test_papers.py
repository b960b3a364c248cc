"""The papers of the project name what is there: paths, targets, the version, the paper."""

from __future__ import annotations

import ast
import datetime as dt
import re
import tomllib
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import yaml

import conewise
from conewise.loading import load
from tests.project.makefile import ROOT, targets

PAPERS = ["CONTRIBUTING.md", "SECURITY.md", "docs/versioning.md", ".github/PULL_REQUEST_TEMPLATE.md"]


def named_paths(text: str) -> Iterator[str]:
    """What is written as code and is a path: with a folder in front, or the ending of a file behind."""
    for written in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w./-]*/[\w./-]*|[\w.-]+\.(?:py|md|cff|toml|yml|json)", written):
            yield written


def missing(text: str, root: Path = ROOT) -> list[str]:
    """The paths that are named and are not there; a bare name may be a neighbour of what was named before."""
    gone, folder = [], root
    for path in named_paths(text):
        if not (root / path).exists() and not (folder / path).exists() and path not in WRITTEN:
            gone.append(path)
        folder = (root / path).parent
    return gone


WRITTEN = {"dist/"}
"""What commands write."""


def test_every_path_that_is_named_is_there() -> None:
    found = {paper: missing((ROOT / paper).read_text("utf-8")) for paper in PAPERS}
    assert {paper: paths for paper, paths in found.items() if paths} == {}


def test_a_path_that_is_not_there_is_found() -> None:
    text = "`src/conewise/runs/metrics.py`, `gone.py`, `tests/nowhere/`, `README.md`, `make test`, `x / y`"
    assert missing(text) == ["gone.py", "tests/nowhere/"]


def test_every_target_that_is_named_is_there() -> None:
    for paper in PAPERS:
        text = (ROOT / paper).read_text("utf-8")
        named = re.findall(r"`make ([a-z0-9 -]+)`|^make ([a-z0-9-]+)", text, flags=re.MULTILINE)
        assert {target for pair in named for target in " ".join(pair).split()} <= targets()


def test_where_things_go_answers_the_four_questions() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    tree = text[text.index("## Where things go") : text.index("## A test of a law")]
    for question in ("A new metric", "A new kind of site", "A new operation's rule", "A new command"):
        part = re.split(r"^- \*\*", tree[tree.index(f"*{question}*") :], flags=re.MULTILINE)[0]
        assert sum(path.startswith("src/") for path in named_paths(part)) >= 2, question


def test_contributing_is_a_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()) <= 100


def _reads_tensors_alone(call: ast.Call) -> bool:
    """True for `torch.load(..., weights_only=True)`, which runs no code of the file."""
    given = {one.arg: ast.unparse(one.value) for one in call.keywords}
    return ast.unparse(call.func) == "torch.load" and given.get("weights_only") == "True"


def test_what_security_promises_of_code_that_is_loaded_is_so() -> None:
    """No module of ours reads a pickle but the one that takes what a driver sends; remote code is off."""
    readers = set()
    for path in (ROOT / "src" / "conewise").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        tensors_alone = {
            id(one.func) for one in nodes if isinstance(one, ast.Call) and _reads_tensors_alone(one)
        }
        for call in nodes:
            if id(call) in tensors_alone:
                continue
            name = ast.unparse(call) if isinstance(call, ast.Attribute) else ""
            if re.fullmatch(r"(?:cloud)?pickle\.(?:loads?|Unpickler)|torch\.load|(?:np|numpy)\.load", name):
                readers.add(path.relative_to(ROOT / "src" / "conewise").as_posix())
    # The one names these functions, to recognise them in a user's; it calls none.
    assert readers == {"jobs/payload.py", "jobs/code_identity.py"}
    assert signature(load).parameters["trust_remote_code"].default is False


def test_the_citation_has_the_version_and_what_the_package_says_of_itself() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == conewise.__version__
    assert cited["license"] == project["license"]
    assert cited["keywords"] == project["keywords"]
    assert [author["name"] for author in cited["authors"]] == [
        author["name"] for author in project["authors"]
    ]
    dt.date.fromisoformat(cited["date-released"])


def test_the_changelog_has_the_version_below_what_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    first, second, *_ = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (first, second) == ("Unreleased", f"{conewise.__version__} ({cited['date-released']})")


def test_the_paper_is_cited_as_it_is_titled() -> None:
    (paper,) = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["references"]
    (author,) = paper["authors"]
    assert (author["given-names"], author["family-names"]) == ("Abdallah", "Khemais")
    assert paper["title"].startswith("Cost Accounting for Reactive Computational Graphs: Exhaustive Sweeps")
    assert (paper["year"], paper["month"]) == (2026, 7)

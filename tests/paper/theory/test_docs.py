"""The theory's docs and code point at each other: anchors, functions and tests that are named exist."""

import re
from pathlib import Path

from conewise.paper import theory

ROOT = Path(__file__).parents[3]
NAMES = ("theory.md", "backward-locality.md", "beyond-the-paper.md")
PAGES = {name: (ROOT / "docs" / name).read_text("utf-8") for name in NAMES}


def headings(page: str) -> set[str]:
    """The anchors of a page: those of its headings, and those that are written out in front of them."""
    lines = [line.lstrip("# ") for line in page.splitlines() if line.startswith("#")]
    written = set(re.findall(r'<a id="([\w-]+)">', page))
    return written | {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


def test_every_anchor_that_a_docstring_names_is_a_heading() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "src/conewise/paper/theory").rglob("*.py"))
    found = set(re.findall(r"docs/([\w-]+\.md)#([\w-]+)", sources))
    assert len(found) >= 12
    assert [f"{page}#{anchor}" for page, anchor in found if anchor not in headings(PAGES[page])] == []


def test_every_public_function_is_in_the_docs() -> None:
    functions = [name for name in theory.__all__ if not isinstance(getattr(theory, name), type)]
    assert len(functions) >= 60
    assert [name for name in functions if not any(f"`{name}" in page for page in PAGES.values())] == []


def test_every_test_that_the_docs_name_exists() -> None:
    tests = "".join(
        path.read_text("utf-8")
        for folder in ("paper", "laws", "runs", "sweeps")
        for path in ROOT.glob(f"tests/{folder}/**/*.py")
    )
    named = {test for page in PAGES.values() for test in re.findall(r"`(test_\w+)`", page)}
    assert len(named) >= 20
    assert [test for test in sorted(named) if f"def {test}(" not in tests] == []

"""The code in the documentation runs as it stands there, and prints what stands there.

The Python blocks of a page run one after another, as in a notebook, in an empty folder. A block of plain
text that follows one is what it prints; if it raises an error of ours, or warns, that message comes last.
`...` stands for anything, lines may be broken anywhere, last digits may differ.

`<!-- not run: why -->` above a block takes it out; `<!-- slow: why -->` anywhere in a page leaves the page to
`make test-smollm2`.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.metadata
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import conewise
from conewise.errors import ConewiseError
from tests.docs.alike import is_alike
from tests.docs.pages import ROOT, Block, blocks

PAGES = sorted(ROOT.glob("docs/**/*.md"))


def _expected(block: Block) -> str | None:
    """The text that stands below a block, where that is what it prints."""
    page = blocks(block.page)
    after = page[page.index(block) + 1 :]
    return after[0].code if after and after[0].language == "text" else None


def _check(block: Block, printed: str) -> None:
    expected = _expected(block)
    if expected is None:
        return
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    is_as_written = is_alike(expected, printed) or doctest.OutputChecker().check_output(
        expected.strip(), printed.strip(), flags
    )
    assert is_as_written, f"{block.name} printed:\n{printed}\nand the page says:\n{expected}"


def run(block: Block, names: dict[str, Any]) -> str:
    """What a block prints, and the error of ours or the warning that it ends with."""
    printed = io.StringIO()
    code = "\n" * block.line + block.code  # so that an error names the line of the page
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(code, str(block.page), "exec"), names)
    except (ConewiseError, UserWarning) as error:
        if _expected(block) is None:
            raise
        printed.write(f"{type(error).__name__}: {error}")
    return printed.getvalue()


def _as_test(page: Path) -> Any:
    slow = "<!-- slow: " in page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT / "docs"))
    return pytest.param(page, id=name, marks=pytest.mark.slow if slow else pytest.mark.pages)


def _python(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


@pytest.mark.parametrize("page", [_as_test(page) for page in PAGES if _python(page)])
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for block in _python(page):
        if not block.remark.startswith("not run: "):
            _check(block, run(block, names))


def test_every_block_says_what_it_is() -> None:
    unnamed = [block.name for page in PAGES for block in blocks(page) if not block.language]
    assert unnamed == []


def test_a_block_that_is_not_run_says_why() -> None:
    for page in PAGES:
        for block in _python(page):
            assert block.remark == "" or block.remark.startswith(("not run: ", "slow: ")), block.name


def test_the_message_about_weights_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of the error pages that cannot be provoked where the weights are."""

    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    block = _not_run("smollm2")
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    _check(block, run(block, {"cw": conewise}))


def test_the_message_about_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "conewise.loading", raising=False)
    block = _not_run("tiny")
    _check(block, run(block, {"cw": conewise}))


def _not_run(of: str) -> Block:
    """The example of the page on loading that is not run, and has this word."""
    blocks = _python(ROOT / "docs/errors/loading.md")
    (found,) = (one for one in blocks if one.remark and of in one.code)
    return found


class TestTheCheckItself:
    """A page that is wrong is found to be."""

    @pytest.fixture
    def page(self, tmp_path: Path) -> Path:
        return tmp_path / "page.md"

    def _run(self, page: Path, text: str) -> None:
        page.write_text(text, "utf-8")
        names: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("tests.docs.pages.ROOT", page.parent)
            for block in _python(page):
                _check(block, run(block, names))

    def test_what_is_printed_has_to_stand_there(self, page: Path) -> None:
        with pytest.raises(AssertionError, match="the page says"):
            self._run(page, "```python\nprint(2)\n```\n\n```text\n3\n```\n")

    def test_texts_are_alike_up_to_the_last_digit(self) -> None:
        assert is_alike("ρ = 2.723, 1,748 nodes", "ρ = 2.724, 1,748  nodes")
        assert is_alike("a  0.00", "a -0.00")
        assert not is_alike("1,748 nodes", "1,749 nodes")
        assert not is_alike("ρ = 2.72", "ρ = 2.74")
        assert not is_alike("a 1.0", "b 1.0")
        assert not is_alike("1.0", "1.0 2.0")

    def test_dots_stand_for_anything_and_lines_may_be_broken(self, page: Path) -> None:
        self._run(page, "```python\nprint('took 3 s in all')\n```\n\n```text\ntook ...\n  in all\n```\n")

    def test_a_message_has_to_stand_there_word_for_word(self, page: Path) -> None:
        raising = "```python\nimport conewise as cw\nraise cw.ConewiseError('no such thing')\n```\n"
        self._run(page, raising + "\n```text\nConewiseError: no such thing\n```\n")
        with pytest.raises(AssertionError, match="the page says"):
            self._run(page, raising + "\n```text\nConewiseError: no such site\n```\n")

    def test_a_message_that_is_not_raised_is_found(self, page: Path) -> None:
        with pytest.raises(AssertionError, match="the page says"):
            self._run(page, "```python\npass\n```\n\n```text\nConewiseError: no such thing\n```\n")

    def test_an_error_that_no_text_announces_fails(self, page: Path) -> None:
        with pytest.raises(ConewiseError):
            self._run(page, "```python\nimport conewise as cw\nraise cw.ConewiseError\n```\n")

    def test_blocks_of_a_page_share_their_names(self, page: Path) -> None:
        self._run(page, "```python\nx = 1\n```\n\nwords\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n")

"""The reference and the guide to the command line name what is there: all of it, and nothing else."""

from __future__ import annotations

import re
import shlex

import typer

import conewise
from conewise.cli.app import app
from tests.docs.pages import ROOT, Block, blocks, pages

REFERENCE = "".join(page.read_text("utf-8") for page in ROOT.glob("docs/reference/*.md"))
GUIDE = (ROOT / "docs/guides/command-line.md").read_text("utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_public_name_is_in_the_reference_once() -> None:
    assert sorted(re.findall(r"^::: conewise\.(\w+)$", REFERENCE, flags=re.MULTILINE)) == sorted(
        conewise.__all__
    )


def test_every_public_name_is_in_the_table_of_the_reference() -> None:
    table = (ROOT / "docs/reference/index.md").read_text("utf-8")
    assert [name for name in conewise.__all__ if f"`{name}`" not in table] == []


def test_the_guide_lists_every_command() -> None:
    listed = re.findall(r"^\| `conewise (\w+)", GUIDE, flags=re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_the_guide_lists_every_exit_code() -> None:
    told = typer.main.get_command(app).epilog or ""
    codes = re.findall(r"^ +(\d+)  ", told, flags=re.MULTILINE)
    assert codes
    assert re.findall(r"^\| (\d+) \|", GUIDE, flags=re.MULTILINE) == codes


def _lines() -> list[tuple[Block, str]]:
    found = []
    for page in pages():
        for block in blocks(page):
            if block.language == "console":
                found += [(block, line) for line in block.code.replace("\\\n", " ").splitlines()]
    return [(block, line) for block, line in found if line.startswith("conewise ")]


def test_commands_that_are_shown_have_these_options() -> None:
    found = []
    for block, line in _lines():
        _, name, *given = shlex.split(line)
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        unknown = [word for word in given if word.startswith("-") and word not in known and len(word) > 1]
        found += [(block.name, word) for word in unknown]
    assert found == []

"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_an_example_of_the_readme_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it saves what it finds
    exec(compile(code, "README.md", "exec"), {})


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


def test_the_readme_has_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"## Two commands\n```\n(.*?)```", text, flags=re.DOTALL)
    assert re.findall(r"^make \w+", commands, flags=re.MULTILINE) == ["make demo", "make test"]


def test_every_file_that_the_readme_and_the_architecture_link_to_is_there() -> None:
    for page in (ROOT / "README.md", ROOT / "ARCHITECTURE.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (ROOT / target).exists(), f"{page.name} links to {target}"


def test_every_module_that_the_architecture_names_is_there() -> None:
    named = re.findall(
        r"`((?:graph|engine|theory|program|structure|runs|sweeps|checks|report|cli)/[\w./]*)`",
        (ROOT / "ARCHITECTURE.md").read_text("utf-8"),
    )
    assert named
    for module in named:
        assert (ROOT / "src/conewise" / module).exists(), module

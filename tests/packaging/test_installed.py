"""The package in empty environments, on every Python that it names. `make test-wheel` runs it.

A Python that is not on this machine is skipped, and named. Everything comes from the package registry that
pip is set up with: what cannot be had is an error that shows what pip said.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging import numpy_alone
from tests.packaging.conftest import Built
from tests.packaging.environments import Environment
from tests.packaging.interpreters import ROOT, interpreter, named

pytestmark = pytest.mark.slow


def five_lines() -> str:
    """The first example of the README that loads a model."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return next(block for block in blocks if 'cw.load("tiny")' in block)


@pytest.fixture
def empty(version: str, tmp_path: Path) -> Iterator[Environment]:
    """An environment of that Python with pip alone. It is removed: torch with CUDA takes 5 GB."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine: neither on the path, nor with pyenv")
    yield Environment(python, tmp_path)
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("version", named())
def test_the_core_works_with_numpy_alone(empty: Environment, built: Built) -> None:
    empty.install("numpy")
    for file in (built.sdist, built.wheel):
        empty.install("--no-deps", "--force-reinstall", str(file))
        empty.run("python", numpy_alone.__file__)
    code, said = empty.fails("conewise", "demo", "--tiny")
    assert (code, "Traceback" in said) == (2, False), said
    assert "pip install 'conewise[cli]'" in said


@pytest.mark.parametrize("version", named())
def test_the_readme_and_the_demo_work_from_a_clean_environment(empty: Environment, built: Built) -> None:
    """By the README's own command, from the wheel; then from the source distribution."""
    empty.install(f"conewise[all] @ {built.wheel.as_uri()}")
    empty.run("python", "-m", "pip", "check")
    code = empty.work / "five_lines.py"
    code.write_text(five_lines(), encoding="utf-8")
    for file in (None, built.sdist):
        if file is not None:
            empty.install("--no-deps", "--force-reinstall", str(file))
        empty.run("python", str(code))
        empty.run("conewise", "demo", "--tiny")
        page = empty.work / "demo-report" / "index.html"
        assert "<html" in page.read_text(encoding="utf-8")
        shutil.rmtree(page.parent)
        shutil.rmtree(empty.work / "heads", ignore_errors=True)  # where the README's code saved its result

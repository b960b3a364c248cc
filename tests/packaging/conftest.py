"""What is built once for all tests of the package: the source distribution, and a wheel made of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.environments import expect
from tests.packaging.interpreters import ROOT


@dataclass(frozen=True)
class Built:
    """The two files that a release consists of."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both, as a release makes them: the wheel is built from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    expect([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], cwd=folder, minutes=5)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(sdist, wheel)

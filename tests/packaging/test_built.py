"""What a release consists of: small, whole, and with metadata that is true. `make test-wheel` runs it."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser

import pytest

from tests.packaging.conftest import Built
from tests.packaging.interpreters import ROOT

pytestmark = pytest.mark.slow

LARGEST_WHEEL = 2_000_000


def tracked(under: str) -> set[str]:
    """The files of a folder that git knows, as paths from the root."""
    listed = subprocess.run(["git", "ls-files", under], cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in listed.stdout.splitlines() if (ROOT / line).is_file()}


def test_the_wheel_is_small_and_has_every_file_of_the_package_and_no_other(built: Built) -> None:
    assert built.wheel.stat().st_size <= LARGEST_WHEEL
    assert built.wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built.wheel) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    # The types of the pages' scripts are for those who change them.
    assert held == {name.removeprefix("src/") for name in tracked("src") if not name.endswith(".d.ts")}
    assert {"conewise/py.typed", "conewise/models/tiny/model.safetensors"} <= held


def test_the_source_distribution_can_be_tested_and_documented(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "mkdocs.yml",
        "CITATION.cff",
        ".pre-commit-config.yaml",
    }
    assert wanted | tracked(".ci") | tracked(".github") <= held
    assert tracked("src") | tracked("tests") | tracked("docs") | tracked("examples") <= held


def test_the_page_of_the_package_has_absolute_links_alone(built: Built) -> None:
    page = str(metadata(built).get_payload())
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert len(targets) >= 10
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "](https://raw.githubusercontent.com/conewise/conewise/main/docs/images/finding.png)" in page


def metadata(built: Built) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        assert any(one.endswith(".dist-info/licenses/LICENSE") for one in wheel.namelist())
        return Parser().parsestr(wheel.read(name).decode())


def test_the_metadata_says_what_is_needed_where_it_lives_and_its_licence(built: Built) -> None:
    found = metadata(built)
    needed = [one for one in found.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert {one.partition("<")[0].partition(">")[0] for one in needed} == {
        "numpy",
        "rich",
        "safetensors",
        "torch",
    }
    assert {"all", "cli", "hf", "plots", "ray", "tables", "workers"} <= set(
        found.get_all("Provides-Extra", [])
    )
    assert found["License-Expression"] == "MIT"
    assert {one.partition(",")[0] for one in found.get_all("Project-URL", [])} >= {
        "Homepage",
        "Documentation",
        "Changelog",
        "Issues",
    }

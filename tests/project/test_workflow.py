"""CI on the code host, and hooks before a commit: they run what `.ci/run` runs."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.project.makefile import ROOT, steps, targets

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def commands(workflow: Any) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_of_a_workflow_is_a_target(path: Any) -> None:
    found = commands(read(str(path)))
    assert found
    for command in found:
        called = re.fullmatch(r"make ([a-z-]+)(?: [A-Z]+=\S+)*", command)
        assert called is not None, f"{command!r} is not one call of make"
        assert called[1] in targets()


def test_the_host_runs_what_ci_runs_on_every_python_that_the_package_names() -> None:
    workflow = read(".github/workflows/ci.yml")
    assert commands(workflow) == ["make check PYTHON=python"]
    (job,) = workflow["jobs"].values()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [one.rpartition(" ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert job["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"
    uses = {step["uses"].partition("@")[0]: step.get("with", {}) for step in job["steps"] if "uses" in step}
    assert uses["actions/setup-python"]["python-version"] == "${{ matrix.python }}"
    assert job["timeout-minutes"] == 90


def test_the_host_gives_a_workflow_no_more_than_reading() -> None:
    for path in WORKFLOWS:
        workflow = read(str(path))
        assert workflow["permissions"] == {"contents": "read"}
        # YAML 1.1 reads `on` as a truth value.
        assert "pull_request_target" not in workflow[True]


def test_the_hooks_before_a_commit_are_the_linters_of_ci() -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    linters = [step.target for step in steps().STEPS if step.target.startswith(("lint", "types"))]
    assert sorted(hook["entry"] for hook in repository["hooks"]) == sorted(f"make {name}" for name in linters)
    for hook in repository["hooks"]:
        assert (hook["language"], hook["pass_filenames"]) == ("system", False)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_for_issues_asks_for_something(path: Any) -> None:
    template = read(str(path))
    if path.name == "config.yml":
        return
    assert {"name", "description", "body"} <= set(template)
    names = [field["id"] for field in template["body"]]
    assert len(set(names)) == len(names) > 0
    assert any(field.get("validations", {}).get("required") for field in template["body"])

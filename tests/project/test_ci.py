"""CI: every step runs, in order, whatever failed before; the table and the exit code say how it went.

The targets are those of a Makefile that is made up, so that this takes no time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.project.makefile import ROOT, steps, targets

TARGETS = [step.target for step in steps().STEPS]
OUTSIDE = {step.needs for step in steps().STEPS if step.needs}
CLOSING = "==== 12 passed, 1 skipped in 3.45s (0:00:03) ===="


class Checkout:
    """A folder with our `.ci` and with targets that do as they are told; each notes that it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / ".ci", folder / ".ci", ignore=shutil.ignore_patterns("__pycache__"))
        self.recipes = dict.fromkeys((*OUTSIDE, "setup", *TARGETS), "true")

    def start(self) -> subprocess.Popen[str]:
        """Begin to run what CI runs, as CI does: from elsewhere, without standard input."""
        rules = [
            f"{target}:\n\t@echo {target} >> ran.txt\n\t@{recipe}\n"
            for target, recipe in self.recipes.items()
        ]
        (self.folder / "Makefile").write_text("".join(rules), "utf-8")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        return subprocess.Popen(
            ["bash", str(self.folder / ".ci" / "run")],
            cwd="/",
            env={**clean, "CI": "true"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self) -> tuple[int, str]:
        """The exit code and all that was printed."""
        process = self.start()
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    @property
    def ran(self) -> list[str]:
        """The targets that ran, in order."""
        path = self.folder / "ran.txt"
        return path.read_text("utf-8").split() if path.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def rows(out: str) -> dict[str, str]:
    """The results of the table, by step."""
    lines = out[out.rindex("step ") :].splitlines()
    width = lines[0].index("seconds")
    return {line[:width].strip(): line[width + len("seconds") :].strip() for line in lines[1:]}


def test_every_step_runs_from_fast_to_slow(checkout: Checkout) -> None:
    checkout.recipes["test"] = f"echo '{CLOSING}'"
    code, out = checkout.run()
    assert code == 0
    assert [ran for ran in checkout.ran if ran not in OUTSIDE] == ["setup", *TARGETS]
    found = rows(out)
    assert list(found) == ["setup", *(step.name for step in steps().STEPS), "in all"]
    assert found["tests"] == "passed: 12 passed, 1 skipped in 3.45s (0:00:03)"
    assert {result for step, result in found.items() if step != "tests"} == {"passed"}
    assert CLOSING in out


@pytest.mark.parametrize("target", TARGETS)
def test_what_fails_is_said_and_the_rest_runs(checkout: Checkout, target: str) -> None:
    checkout.recipes[target] = "echo 'what is wrong'; exit 3"
    code, out = checkout.run()
    assert code == 1
    assert [ran for ran in checkout.ran if ran not in OUTSIDE] == ["setup", *TARGETS]
    failed = {step for step, result in rows(out).items() if result == "failed: what is wrong"}
    assert failed == {step.name for step in steps().STEPS if step.target == target}
    assert rows(out)["in all"] == "failed"


def test_failed_tests_are_counted(checkout: Checkout) -> None:
    checkout.recipes["test"] = "echo '=== 1 failed, 11 passed in 3.45s ==='; exit 1"
    code, out = checkout.run()
    assert code == 1
    assert rows(out)["tests"] == "failed: 1 failed, 11 passed in 3.45s"


def test_each_run_of_pytest_is_named(checkout: Checkout) -> None:
    checkout.recipes["test-ray"] = (
        "echo '== 2 passed in 1.00s =='; printf '\\033[32m== 3 passed in 2.00s ==\\033[0m\\n'"
    )
    assert rows(checkout.run()[1])["Ray's workers"] == "passed: 2 passed in 1.00s; 3 passed in 2.00s"


def test_without_an_environment_nothing_runs(checkout: Checkout) -> None:
    checkout.recipes["setup"] = "echo 'no index'; exit 1"
    code, out = checkout.run()
    assert code == 1
    assert checkout.ran == ["setup"]
    found = rows(out)
    assert found.pop("setup") == "failed: no index"
    assert found.pop("in all") == "failed"
    assert set(found.values()) == {"not run"}


def test_a_browser_out_of_reach_is_no_failure(checkout: Checkout) -> None:
    checkout.recipes["chromium"] = "echo 'E: Unable to locate package chromium'; exit 100"
    code, out = checkout.run()
    assert code == 0
    assert "test-browser" not in checkout.ran
    said = "skipped: `make chromium` failed: E: Unable to locate package chromium"
    assert rows(out)["browser"] == said


def test_a_browser_that_is_there_and_shows_the_wrong_thing_is_a_failure(checkout: Checkout) -> None:
    checkout.recipes["test-browser"] = "echo '== 1 failed, 90 passed in 9.00s =='; exit 1"
    assert checkout.run()[0] == 1


def test_a_target_that_skips_itself_says_why(checkout: Checkout) -> None:
    checkout.recipes["docs"] = "echo 'skipped: there is no node'"
    code, out = checkout.run()
    assert code == 0
    assert rows(out)["docs and links"] == "skipped: there is no node"


def test_a_target_that_fails_is_not_skipped_whatever_it_says(checkout: Checkout) -> None:
    checkout.recipes["docs"] = "echo 'skipped: there is no node'; exit 1"
    code, out = checkout.run()
    assert code == 1
    assert rows(out)["docs and links"].startswith("failed")


def test_a_step_that_hangs_is_ended_and_the_rest_runs(checkout: Checkout) -> None:
    path = checkout.folder / ".ci" / "steps.py"
    path.write_text(path.read_text("utf-8").replace("LIMIT = 30 * 60", "LIMIT = 1"), "utf-8")
    checkout.recipes["types"] = "sleep 300 & sleep 300"
    code, out = checkout.run()
    assert code == 1
    assert rows(out)["types"].startswith("failed: took more than")
    assert checkout.ran[-1] == TARGETS[-1]


def test_nothing_waits_for_standard_input(checkout: Checkout) -> None:
    checkout.recipes["lint"] = "cat; echo 'nothing was typed'"
    code, out = checkout.run()
    assert (code, "nothing was typed" in out) == (0, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
def test_an_interrupted_run_shows_how_far_it_came(checkout: Checkout, number: int) -> None:
    checkout.recipes["types"] = "sleep 300"
    process = checkout.start()
    while "types" not in checkout.ran:
        time.sleep(0.05)
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    before = dict.fromkeys(("setup", "format and lint", "JavaScript: lint", "JavaScript: tests"), "passed")
    assert rows(out) == {**before, "types": "interrupted", "in all": "interrupted"}


def test_every_step_is_a_target() -> None:
    named = {step.target for step in steps().STEPS} | {step.needs for step in steps().STEPS} - {""}
    assert named <= targets()


def test_make_check_is_what_ci_runs() -> None:
    assert "\ncheck: ## exactly what CI runs\n\tbash .ci/run\n" in (ROOT / "Makefile").read_text("utf-8")


def test_no_linter_and_no_test_is_left_out_that_needs_only_a_registry() -> None:
    """What is left out takes long, or needs what CI has not: a GPU, peers, a hundred megabytes of jax."""
    left_out = {
        "test-smollm2",
        "test-transformer-lens",
        "test-peers",
        "test-tracr",
        "test-architectures",
        "test-laws",
        "test-gpu",
    }
    checks = {name for name in targets() if name.startswith(("test", "lint", "types", "docs"))}
    assert checks - {step.target for step in steps().STEPS} == left_out

"""The version, and the commit where conewise runs from a checkout of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import conewise
from conewise.cli import version_line as module
from conewise.cli.version_line import commit, version_line
from tests.cli.commands import Done, environment

ROOT = Path(__file__).parents[2]

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *words: str) -> str:
    names = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    given = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "init.defaultBranch=main"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *given, *words], cwd=folder, env={**kept, **names}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit that says that it is conewise's."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "conewise"\n', "utf-8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "One")
    return tmp_path


@needs_git
def test_a_checkout_says_its_commit(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "--short", "HEAD")
    assert commit(checkout) == head
    assert version_line(checkout) == f"conewise {conewise.__version__} (commit {head})"


@needs_git
def test_a_tag_does_not_stand_in_for_the_commit(checkout: Path) -> None:
    git(checkout, "tag", "-a", "v9.9.9", "-m", "A release")
    assert commit(checkout) == git(checkout, "rev-parse", "--short", "HEAD")


@needs_git
def test_a_changed_checkout_says_so(checkout: Path) -> None:
    (checkout / "beside.txt").write_text("not tracked", "utf-8")
    assert "changes" not in version_line(checkout)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# one more line\n")
    assert version_line(checkout).endswith(", with changes)")


@needs_git
def test_a_worktree_is_a_checkout(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    beside = tmp_path_factory.mktemp("beside") / "worktree"
    git(checkout, "worktree", "add", "--quiet", str(beside))
    assert commit(beside) == commit(checkout) is not None


@needs_git
def test_git_that_was_told_of_another_repository_is_not_misled(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a hook of another repository, where git sets these."""
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "--quiet")
    expected = commit(checkout)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert commit(checkout) == expected is not None


@needs_git
def test_the_repository_of_another_project_is_not_ours(checkout: Path) -> None:
    """Sources that were copied into a repository do not have that repository's commit."""
    for text in ('[project]\nname = "other"\n', "[tool.x]\n", "not = [toml", ""):
        (checkout / "pyproject.toml").write_text(text, "utf-8")
        assert commit(checkout) is None
    (checkout / "pyproject.toml").unlink()
    assert commit(checkout) is None


@needs_git
def test_a_repository_around_unpacked_sources_is_not_ours(checkout: Path) -> None:
    inner = checkout / "vendored"
    inner.mkdir()
    shutil.copy(checkout / "pyproject.toml", inner)
    assert commit(inner) is None


@needs_git
def test_sources_that_were_unpacked_into_a_repository_do_not_have_its_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "Another project's")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "conewise"\n', "utf-8")
    assert commit(tmp_path) is None


@needs_git
def test_a_repository_without_a_commit_and_a_broken_one_say_the_version_alone(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    git(checkout, "init", "--quiet")
    assert version_line(checkout) == f"conewise {conewise.__version__}"
    shutil.rmtree(checkout / ".git")
    (checkout / ".git").write_text("gitdir: gone\n", "utf-8")
    assert version_line(checkout) == f"conewise {conewise.__version__}"


@needs_git
def test_without_git_the_version_stands_alone(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert version_line(checkout) == f"conewise {conewise.__version__}"


@needs_git
def test_git_that_does_not_answer_is_not_waited_for(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = checkout / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n", "utf-8")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent))
    monkeypatch.setattr(module, "SECONDS", 0.2)
    assert commit(checkout) is None


def test_an_install_says_the_version_alone(tmp_path: Path) -> None:
    assert version_line(tmp_path) == f"conewise {conewise.__version__}"


def test_the_command_says_what_it_runs_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert Done("--version").out == f"conewise {conewise.__version__}\n"


def test_sources_that_are_not_installed_know_their_version(tmp_path: Path) -> None:
    """The number stands in the sources: what is installed beside them says another."""
    sources = tmp_path / "conewise"
    shutil.copytree(ROOT / "src" / "conewise", sources, ignore=shutil.ignore_patterns("__pycache__"))
    text = (sources / "version.py").read_text("utf-8")
    (sources / "version.py").write_text(text.replace(conewise.__version__, "9.8.7", 1), "utf-8")
    code = """if True:
        from conewise.cli.entry import main
        from conewise.paper.experiments.result import versions
        from conewise.files import Format

        print(Format("any", 1).header()["conewise"], versions()["conewise"])
        main(["--version"])
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("9.8.7 9.8.7\nconewise 9.8.7\n", "")


def test_the_number_stands_in_one_place() -> None:
    """What builds the package reads it there, and no other file of ours writes it down as the package's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"] == {"path": "src/conewise/version.py"}


def test_the_version_is_said_also_where_the_command_line_is_not_installed() -> None:
    """`pip install conewise` brings the command without its parser; reports of defects ask for it."""
    code = "import sys; sys.modules['typer'] = None; from conewise.cli.entry import main; main({!r})"
    said, refused = (
        subprocess.run(
            [sys.executable, "-c", code.format(words)],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        for words in (["--version"], ["sites", "tiny"])
    )
    assert (said.returncode, said.stdout) == (0, f"{version_line()}\n")
    assert refused.returncode == 2
    assert "conewise[cli]" in refused.stderr

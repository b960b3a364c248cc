"""Every kind of job, here and by workers: killed, interrupted, begun twice, asked for something else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.circuits import acdc as searching
from conewise.errors import ConewiseError
from conewise.jobs.job import pool_of
from tests.jobs.kinds import KINDS, OTHER, same, stored

pytestmark = [
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _stored_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(searching, "SAVE_EVERY", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def whole(kind: str) -> Any:
    return KINDS[kind].run()


def run(kind: str, workers: Any = None, **how: Any) -> Any:
    with pool_of(workers) as pool:
        return KINDS[kind].run(workers=pool, **how)


def killed_in(kind: str, folder: Path, after: int, workers: Any) -> None:
    """Run a job in a process that is killed when something is done."""

    def kill(done: int, total: int) -> None:
        if done >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            run(kind, workers, out=folder, progress=kill)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it was not killed"


def expect_going_on(kind: str, folder: Path, workers: Any) -> None:
    """A job that was killed goes on to the same result; what is whole is read, whoever asks."""
    total = KINDS[kind].total(whole(kind))
    assert 0 < stored(folder) < total
    told: list[tuple[int, int]] = []
    found = run(kind, workers, out=folder, resume=True, progress=lambda *both: told.append(both))
    assert same(found, whole(kind))
    assert told[-1] == (total, total)
    assert stored(folder) == total
    for by in dict.fromkeys((None, workers)):
        again = run(kind, by, out=folder, resume=True)
        assert again.equals(found)
        assert kind == "search" or again.ledger.resumed == total


def test_a_killed_job_goes_on_to_the_same_result(kind: str, tmp_path: Path) -> None:
    killed_in(kind, tmp_path / "run", KINDS[kind].total(whole(kind)) // 4, None)
    expect_going_on(kind, tmp_path / "run", None)


@pytest.mark.ray
def test_a_killed_job_goes_on_by_workers_and_one_by_workers_here(
    kind: str, fleet: Any, tmp_path: Path
) -> None:
    for name, began, goes_on in (("here", None, fleet), ("workers", 1, None)):
        killed_in(kind, tmp_path / name, KINDS[kind].total(whole(kind)) // 4, began)
        expect_going_on(kind, tmp_path / name, goes_on)


def test_an_interrupted_job_says_how_to_go_on_and_does(kind: str, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run(kind, out=tmp_path, progress=stop)
    total, done = KINDS[kind].total(whole(kind)), stored(tmp_path)
    assert 0 < done < total
    (note,) = caught.value.__notes__
    assert f"{KINDS[kind].unit} are stored in {tmp_path}" in note
    assert "resume=True goes on from there" in note
    assert run(kind, out=tmp_path, resume=True).equals(whole(kind))


def test_a_folder_that_holds_a_job_is_refused_and_left_as_it_is(kind: str, tmp_path: Path) -> None:
    run(kind, out=tmp_path, resume=True)  # nothing is there yet
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    asked: list[tuple[Callable[[], Any], str]] = [
        (lambda: run(kind, out=tmp_path), r"holds a run already.*resume=True"),
        (lambda: run(kind, out=tmp_path, resume=True, metric=OTHER), r"What differs.*\n  metric"),
        (lambda: run(other, out=tmp_path, resume=True), r"What differs|cannot be|is damaged"),
        (lambda: run(kind, resume=True), r"resume=True without `out`: say in which folder"),
    ]
    other = "search" if kind != "search" else "sweep"
    for ask, said in asked if kind != "groups" else (asked[0], asked[1], asked[3]):
        with pytest.raises(ConewiseError, match=rf"(?s){said}"):
            ask()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_two_jobs_in_one_folder_are_refused(kind: str, tmp_path: Path) -> None:
    said: list[str] = []

    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(ConewiseError) as caught:
            run(kind, out=tmp_path, resume=True)
        said.append(str(caught.value))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(kind, out=tmp_path, progress=meanwhile)
    assert said[0].startswith(f"another run is using the store in {tmp_path}")
    assert run(kind, out=tmp_path, resume=True).equals(whole(kind))


def test_a_result_is_opened_again(kind: str, tmp_path: Path) -> None:
    found = whole(kind)
    found.save(tmp_path / "saved")
    assert cw.open(tmp_path / "saved").equals(found)

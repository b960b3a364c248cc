"""Files are written whole or not at all, and in the place of nothing but a file."""

from __future__ import annotations

import os
import socket
import stat
from functools import partial
from pathlib import Path

import pytest

from conewise.files import expect_file, expect_room, is_leftover, write_whole
from tests.laws.interrupting import interrupt, moments_of


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_written_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".html")
    for data in (b"one", b"two, longer"):
        write_whole(path, data)
        assert contents(tmp_path) == {path.name: data}


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    real, link = tmp_path / "kept" / "real.html", tmp_path / "link.html"
    real.parent.mkdir()
    real.write_bytes(b"old")
    link.symlink_to("kept/real.html")
    write_whole(link, b"new")
    assert link.is_symlink()
    assert contents(real.parent) == {"real.html": b"new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link.html"]


def test_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "private.html"
    path.touch(mode=0o600)
    write_whole(path, b"secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # a path may be too long for one


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (Path.mkdir, "a folder"),
        (os.mkfifo, "a pipe"),
        (make_device, "a device"),
        (make_socket, "a socket"),
        (lambda path: path.symlink_to("nowhere"), "a link that leads nowhere"),
        (lambda path: path.symlink_to(path.parent), "a folder"),
    ],
)
def test_what_is_no_regular_file_is_refused_and_stays(
    make: object, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "report.html"
    assert callable(make)
    make(path)
    before = path.lstat()
    for refused in (partial(write_whole, path, b"data"), partial(expect_file, path)):
        with pytest.raises(OSError, match=kind):
            refused()
        assert path.lstat().st_mode == before.st_mode
        assert path.lstat().st_ino == before.st_ino
        assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_a_link_of_the_name_that_was_used_once_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "report.html.partial").symlink_to(victim)
    write_whole(tmp_path / "report.html", b"data")
    assert victim.read_bytes() == b"precious"
    assert (tmp_path / "report.html.partial").is_symlink()


def test_a_name_that_is_taken_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    taken, victim = tmp_path / ".conewise-0.partial", tmp_path / "victim"
    victim.write_bytes(b"precious")
    taken.symlink_to(victim)
    for refused in (partial(write_whole, tmp_path / "x", b"data"), partial(expect_room, tmp_path)):
        with pytest.raises(FileExistsError):
            refused()
        assert taken.is_symlink()
    assert victim.read_bytes() == b"precious"


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert contents(tmp_path) == {"report.html": b"old"}


# A file that was opened and not yet given to anyone is closed with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_leaves_the_old_file_or_the_new_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(b"old")
    seen = set()
    for at in range(1, moments_of(partial(write_whole, path, b"new"), within="conewise") + 1):
        path.write_bytes(b"old")
        assert interrupt(partial(write_whole, path, b"new"), at, within="conewise") == 1
        assert set(contents(tmp_path)) == {"report.html"}
        seen.add(path.read_bytes())
    assert seen == {b"old", b"new"}


def test_what_a_killed_process_left_is_known_by_its_name(tmp_path: Path) -> None:
    assert is_leftover(tmp_path / ".conewise-00ff.partial")
    assert not is_leftover(tmp_path / ".conewise")
    assert not is_leftover(tmp_path / "report.html.partial")


def test_looking_for_room_leaves_a_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / ".conewise").write_bytes(b"the user's own")
    expect_room(tmp_path)
    expect_file(tmp_path / "x.html")
    assert contents(tmp_path) == {".conewise": b"the user's own"}
    with pytest.raises(FileNotFoundError):
        expect_room(tmp_path / "missing")

"""What strangers can do to workers: nothing through the network, nothing by files in the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import conewise as cw
from conewise.errors import FleetError

pytestmark = pytest.mark.ray

OWN = """
    import os, sys, torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

        def forward(self, x):
            return self.second(self.first(x).tanh())

    def path_is_theirs(outputs):
        own = list(dict.fromkeys(map(os.path.abspath, sys.path)))  # Ray repeats the script's folder
        own = [one for one in own if f"{os.sep}ray{os.sep}" not in one]
        assert own == os.environ["THEIRS"].split("|"), own
        return outputs[:, 0]
"""
SCRIPT = """
    import os, sys
    sys.path.append("added/while running")
    os.environ["THEIRS"] = "|".join(dict.fromkeys(map(os.path.abspath, sys.path)))
    import torch, conewise as cw, own_parts

    if __name__ == "__main__":
        model = cw.capture(own_parts.Net(), torch.ones(2, 4))
        sweep = model.sweep(["first", "second"], base=model.run(torch.ones(2, 4)), source="zero",
                            metric=own_parts.path_is_theirs)
        with getattr(cw, sys.argv[1])(workers=1) as workers:
            result = sweep.run(workers=workers)
        assert not result.missing, result.missing
        assert result.equals(sweep.run())
"""
PLANTED = ("cloudpickle", "conewise", "numpy", "torch", "json", "random", "psutil", "site", "multiprocessing")


@pytest.mark.parametrize("kind", ["Processes", "Ray"])
def test_workers_import_what_their_driver_imports_and_nothing_from_the_current_folder(
    kind: str, tmp_path: Path
) -> None:
    script, here = tmp_path / "theirs", tmp_path / "downloaded"
    script.mkdir()
    here.mkdir()
    for name, text in (("own_parts.py", OWN), ("script.py", SCRIPT)):
        (script / name).write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    for name in PLANTED:
        (here / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name}\\n')\nraise ImportError('planted')"
        )
    paths = [str(Path(one).absolute()) for one in sys.path if f"{os.sep}ray{os.sep}" not in one]
    done = subprocess.run(
        [sys.executable, str(script / "script.py"), kind],
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.returncode == 0, done.stderr


def family(number: int) -> dict[int, str]:
    """A process and all that descend from it, by number, with their names."""
    found = {number: Path(f"/proc/{number}/comm").read_text().strip()}
    for children in Path(f"/proc/{number}/task").glob("*/children"):
        for child in children.read_text().split():
            found |= family(int(child))
    return found


def listeners(processes: dict[int, str]) -> dict[str, set[str]]:
    """Addresses, as the kernel's tables have them, at which processes take connections, and who does."""
    sockets = {}
    for number, name in processes.items():
        for file in Path(f"/proc/{number}/fd").iterdir():
            try:
                sockets[str(file.readlink())] = name
            except OSError:
                continue
    found: dict[str, set[str]] = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            who = sockets.get(f"socket:[{inode}]")
            if who is not None and (state == "0A" or table.startswith("udp")):
                found.setdefault(local.partition(":")[0], set()).add(who)
    return found


CLUSTER = """
import os, sys, ray, conewise as cw
with cw.Ray(workers=1) as fleet:
    fleet._connected()
    ray.get(fleet._seat()._actor.forget.remote("nothing"))  # the worker is there
    folder = ray._private.worker._global_node.get_session_dir_path()
    print(ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"], folder, flush=True)
    sys.stdin.read()
assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & os.environ.keys()
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the listeners off /proc")
def test_a_cluster_of_our_own_listens_on_loopback_alone_and_asks_for_a_token() -> None:
    # The address is of a cluster that is not to be joined.
    environment = {**os.environ, "RAY_ADDRESS": "192.0.2.1:6379", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        environment.pop(name, None)
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as script:
        assert script.stdout is not None
        address, token, session = script.stdout.readline().split()
        started = family(script.pid)
        assert {"raylet", "gcs_server"} <= set(started.values())
        found = listeners(started)
        friend = keys_of(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
        strangers = [
            keys_of(address, RAY_AUTH_MODE="disabled"),
            keys_of(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64),
        ]
        folder = Path(session).parents[1]
        mode = folder.stat().st_mode
        script.communicate()
    assert script.returncode == 0
    assert found.keys() <= {"0100007F", "0000000000000000FFFF00000100007F"}, found
    assert "has keys" in friend
    assert not any("has keys" in one for one in strangers), strangers
    assert mode & 0o077 == 0
    assert not folder.exists()


def keys_of(address: str, **settings: str) -> str:
    """What one is told who asks a cluster what it holds, with such settings of Ray."""
    ask = f"from ray._raylet import GcsClient; GcsClient({address!r}).internal_kv_keys(b'', None, timeout=10)"
    done = subprocess.run(
        [sys.executable, "-c", f"{ask}; print('has keys')"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["disabled", "Disabled", "k8s"])
def test_a_cluster_that_asks_for_no_token_is_not_started(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(FleetError, match=f"RAY_AUTH_MODE is '{mode}'.*Unset it"):
        _ = cw.Ray().workers


def test_a_ray_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.__version__", "2.51.2")
    with pytest.raises(FleetError, match=r"Ray 2\.51\.2 is installed.*needs 2\.52 or later"):
        _ = cw.Ray().workers

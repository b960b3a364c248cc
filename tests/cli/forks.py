"""Commands in processes of their own, forked from one that imported torch: `python -m tests.cli.forks`.

Importing torch and transformers is most of what a command on a small model takes. The package itself is
imported by each process anew.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

OTHERS = (
    "torch",
    "torch._dynamo",
    "torch.export",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)


@cache
def server(**environment: str) -> subprocess.Popen[str]:
    """The process that is forked from; there is one for each environment, to the end."""
    command = [sys.executable, "-m", "tests.cli.forks"]
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    process = subprocess.Popen(command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)
    return process


def run(
    words: tuple[str, ...], cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, without a terminal."""
    # Pytest names the test in the environment: with it, each test would start a server of its own.
    forking = server(**{name: text for name, text in environment.items() if name != "PYTEST_CURRENT_TEST"})
    assert forking.stdin is not None
    assert forking.stdout is not None
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        request = {"words": words, "cwd": str(cwd), "streams": [os.devnull, out.name, err.name]}
        print(json.dumps(request), file=forking.stdin, flush=True)
        code = int(forking.stdout.readline())
        said = (Path(stream.name).read_text(encoding="utf-8") for stream in (out, err))
        return subprocess.CompletedProcess(words, code, *said)


def main() -> None:
    """Read requests, a line of JSON each; fork for each, and answer with the exit code."""
    for name in OTHERS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no child writes to what it shares
    answers = os.dup(1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.close(answers)
            become(json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))


def become(request: Mapping[str, Any]) -> None:
    """Be the command that is asked for: its streams, its folder, its words."""
    assert not any(name.partition(".")[0] == "conewise" for name in sys.modules)
    for number, path in enumerate(request["streams"]):
        opened = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    sys.argv[1:] = request["words"]
    runpy.run_module("conewise.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

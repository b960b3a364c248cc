"""What CI runs: targets of the Makefile from fast to slow, and a table of how they ended.

A step that fails does not keep the next from running, so that one run shows all that is wrong; without the
environment that `make setup` makes, nothing runs. What a step needs beside packages (a browser) may be out of
reach: then the step is skipped, and the table says why. Ends with 1 where a step failed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

LIMIT = 30 * 60
"""How many seconds a step may take before it counts as one that hangs."""

_PYTEST = re.compile(r"^=+ (.*\b(?:passed|failed|errors?|no tests ran)\b.* in [\d.]+s.*?) =+$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Step:
    """A target of the Makefile; `needs` is another, which installs what may be out of reach."""

    name: str
    target: str
    needs: str = ""


SETUP = Step("setup", "setup")
STEPS = (
    Step("format and lint", "lint"),
    Step("JavaScript: lint", "lint-js", needs="node"),
    Step("JavaScript: tests", "test-js", needs="node"),
    Step("types", "types"),
    Step("docs and links", "docs"),
    Step("pages and examples", "test-pages"),
    Step("Ray's workers", "test-ray"),
    Step("browser", "test-browser", needs="chromium"),
    Step("wheel", "test-wheel"),
    Step("tests", "test"),
)


@dataclass
class Ended:
    """How a command ended: its exit code, None where it took too long, and the lines that it printed."""

    code: int | None
    lines: list[str] = field(default_factory=list)

    @property
    def pytest(self) -> str:
        """The closing lines of pytest, of every run of it."""
        return "; ".join(found[1] for line in self.lines if (found := _PYTEST.match(line)))

    @property
    def last(self) -> str:
        """The last line that says something; make's own remarks do not."""
        said = (line.strip() for line in reversed(self.lines))
        return next((line for line in said if line and not line.startswith("make")), "")


def main() -> int:
    """Run all steps; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # The table is shown, whoever ends this.
    rows: list[tuple[str, str, float]] = []
    begun = time.monotonic()
    code = 0
    try:
        for step in (SETUP, *STEPS):
            started = time.monotonic()
            rows.append((step.name, "interrupted", 0.0))
            result = run(step)
            rows[-1] = (step.name, result, time.monotonic() - started)
            if result.startswith("failed"):
                code = 1
                if step is SETUP:
                    rows.extend((other.name, "not run", 0.0) for other in STEPS)
                    break
    except KeyboardInterrupt:
        code = 130
    ends = {0: "passed", 1: "failed", 130: "interrupted"}
    rows.append(("in all", ends[code], time.monotonic() - begun))
    print(f"\n{table(rows)}", flush=True)
    return code


def run(step: Step) -> str:
    """Run a step; returns its result in words: `passed`, `failed` or `skipped`, and what is known of it."""
    if step.needs:
        ended = make(step.needs)
        if ended.code != 0:
            return f"skipped: `make {step.needs}` failed: {ended.last}"
    ended = make(step.target)
    if ended.code is None:
        return f"failed: took more than {LIMIT // 60} minutes"
    if ended.code != 0:
        return f"failed: {ended.pytest or ended.last or f'exit code {ended.code}'}"
    if ended.last.startswith("skipped: "):
        return ended.last
    return f"passed: {ended.pytest}" if ended.pytest else "passed"


def make(target: str) -> Ended:
    """Run one target: what it prints is shown as it comes, and kept."""
    print(f"\n==> make {target}", flush=True)
    process = subprocess.Popen(
        ["make", target],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    ended = Ended(None)
    reader = threading.Thread(target=_read, args=(process, ended.lines), daemon=True)
    reader.start()
    try:
        ended.code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if ended.code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # A process that was left behind may hold the pipe open.
        reader.join(10)
    return ended


def _read(process: subprocess.Popen[bytes], lines: list[str]) -> None:
    assert process.stdout is not None
    begun = b""
    while chunk := os.read(process.stdout.fileno(), 65536):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        *whole, begun = (begun + chunk).split(b"\n")
        lines.extend(_text(line) for line in whole)
    lines.append(_text(begun))


def _text(line: bytes) -> str:
    return _COLOURS.sub("", line.decode(errors="replace")).rstrip()


def table(rows: list[tuple[str, str, float]]) -> str:
    """Step, seconds, result: one line each. Results come last, for they are of any length."""
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{'step':<{width}}  seconds  result"]
    lines += [f"{name:<{width}}  {seconds:>7.0f}  {result}" for name, result, seconds in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""The pages that the docs carry to be opened and played with: `make reports` writes them anew."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

from tests.cli.commands import PAIR, Done

FOLDER = Path(__file__).parents[2] / "docs" / "reports"
COMMANDS = {
    "circuit.html": ("circuit", "tiny", *PAIR, "--threshold", "0.5", "--report"),
    "cone.html": ("cone", "tiny", "L0H2", "-o"),
    "cone-smollm2.html": ("cone", "smollm2", "L23H3", "-o"),
}
"""The command that writes each page."""


def write(name: str, folder: Path) -> Path:
    """Write one of the pages into a folder, and return its path."""
    with contextlib.chdir(folder):  # a page tells its command: no folder of this machine
        done = Done(*COMMANDS[name], name)
    if done.code:
        raise RuntimeError(done.err)
    return folder / name


def form(page: Path) -> list[str]:
    """The programs and the style of a page, without what it tells."""
    text = page.read_text("utf-8")
    return re.findall(r"<script>.*?</script>|<style>.*?</style>", text, flags=re.DOTALL)


if __name__ == "__main__":
    for one in COMMANDS:
        sys.stdout.write(f"wrote {write(one, FOLDER)}\n")

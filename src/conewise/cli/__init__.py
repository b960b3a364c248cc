"""The command line: parses, calls one workload, prints. One module for each command or small group of them.

`main` is the installed command. What it needs is imported when it runs: Ctrl-C ends it quietly from the first
moment on, and `conewise --help` does not wait for torch.
"""

from conewise.cli.entry import main

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from conewise.cli.commands import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> "Any":
    if name == "app":
        from conewise.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""All commands, as the parser has them.

What a command needs is imported when it runs, so that `conewise --help` does not wait for torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from conewise.cli.commands import (
    circuit_finding,
    demo,
    inspecting,
    reporting,
    schemas,
    sweeping,
    tasks,
    tracing,
)
from conewise.cli.failing import Commands
from conewise.cli.options import MARKUP, SUBCOMMANDS, help_text

HELP = """Take a trained network apart, and pay only for what each change touches.

\b
  conewise sweep tiny --report ioi.html   every head and MLP, one page
  conewise plan tiny                      what that costs; nothing is run
  conewise sites tiny                     what can be patched

Every command has --help with examples. With --json a command prints one JSON object on stdout and nothing
else there (`conewise schema COMMAND` describes it). Progress and messages go to stderr.
"""

EPILOG = """Exit codes:

\b
    0  all went well
    1  a check failed: verified numbers differ, an experiment does not match
    2  invalid input: the command, a file or a model
   70  an error inside conewise itself; --debug shows where
   74  the output cannot be written: stdout is closed, or its disk is full
  130  interrupted; with --out what is done is kept, and --resume goes on
  141  nobody reads the output any more
"""

app = typer.Typer(
    name="conewise",
    cls=Commands,
    help=help_text(HELP),
    epilog=help_text(EPILOG),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=MARKUP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(given: bool) -> None:
    if given:
        from conewise.cli.version_line import version_line

        print(version_line())
        raise typer.Exit


@app.callback()
def conewise(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version, in a checkout with its commit.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="CONEWISE_DEBUG", help="Show where an error comes from."),
    ] = False,
) -> None:
    """Take a trained network apart, and pay only for what each change touches."""
    del version, debug  # the one is answered at once, the other is read by `Commands`


COMMANDS = (sweeping, circuit_finding, inspecting, tracing, reporting, tasks, demo, schemas)
MODULES = [one.__name__ for one in COMMANDS]
for name, function, text, line in sorted(SUBCOMMANDS, key=lambda one: MODULES.index(one[1].__module__)):
    app.command(name, help=text, short_help=line)(function)

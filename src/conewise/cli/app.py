"""All commands, as the parser has them.

What a command needs is imported when it runs, so that `conewise --help` does not wait for torch.
"""

from __future__ import annotations

import typer

from conewise.cli import (
    circuit_finding,
    demo,
    inspecting,
    reporting,
    schemas,
    steering,
    sweeping,
    tracing,
)
from conewise.cli.failing import Commands
from conewise.cli.options import COMMANDS, MARKUP, help_text

HELP = """Take a trained network apart, and pay only for what each change touches.

Start here:
  conewise sweep tiny --report ioi.html   activation patching: every head and MLP, one page
  conewise plan tiny                      the exact cost of that; nothing is run
  conewise sites tiny                     the sites that can be patched

Every command has --help with examples. With --json a command prints one JSON object on stdout and nothing
else there (`conewise schema COMMAND` describes it). Progress and messages go to stderr.
"""

EPILOG = """
Exit codes:
    0  success
    1  a check failed: verified numbers differ, an experiment does not match
    2  invalid input: the command, a file or a model
   70  internal error (EX_SOFTWARE); --debug shows where
   74  output error (EX_IOERR): stdout is closed, or its disk is full
  130  interrupted (SIGINT); with --out what is done is kept, and --resume goes on
  141  broken pipe (SIGPIPE): nobody reads the output any more
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
    version: bool = typer.Option(
        False,
        "--version",
        help="Show the version, in a checkout with its commit.",
        callback=_show_version,
        is_eager=True,
    ),
    debug: bool = typer.Option(
        False, "--debug", envvar="CONEWISE_DEBUG", help="Show where an error comes from."
    ),
) -> None:
    """Take a trained network apart, and pay only for what each change touches."""
    del version, debug  # the one is answered at once, the other is read by `Commands`


MODULES = [
    one.__name__
    for one in (sweeping, circuit_finding, inspecting, tracing, steering, reporting, demo, schemas)
]
for function, called in sorted(COMMANDS, key=lambda one: MODULES.index(one[0].__module__)):
    doc = help_text(function.__doc__ or "")
    app.command(function.__name__, help=doc, short_help=doc.partition("\n")[0])(called)

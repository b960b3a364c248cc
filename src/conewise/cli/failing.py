"""The ends of commands: errors as one message on stderr, and exit codes as other tools have them."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from conewise.cli import SIGINT, SOFTWARE, USAGE
from conewise.cli.streams import UnwrittenError
from conewise.errors import Argument, ConewiseError, OutOfMemoryError, is_out_of_memory
from conewise.files import lone_surrogate

_COMMAND = "conewise.command"


class CommandError(ConewiseError):
    """Something that the command line itself finds wrong; its message is all that there is to say."""


class Interrupted(KeyboardInterrupt):
    """The person pressed Ctrl-C; the message says what was kept and how to go on."""


class Commands(TyperGroup):
    """The commands, with one way for all of them to fail."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what was typed, for messages and provenance."""
        ctx.meta[_COMMAND] = ["conewise", *args]
        return super().parse_args(ctx, _with_values(args))

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what it raises becomes a message and an exit code."""
        try:
            _expect_utf8(command_of(ctx))
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupted:
            code, said = SIGINT, [str(interrupted) or "interrupted"]
        except UnwrittenError:
            raise
        except Exception as error:
            if {"ClickException", "Exit", "Abort"} & {cls.__name__ for cls in type(error).__mro__}:
                raise  # the parser shows it itself
            if ctx.params.get("debug"):
                traceback.print_exc()
            if is_out_of_memory(error) and not isinstance(error, ConewiseError):
                error = OutOfMemoryError("this command", error)
            if isinstance(error, ConewiseError):
                notes = getattr(error, "__notes__", ())
                code, said = USAGE, [f"error: {error.message(as_option)}", *notes]
            else:
                code, said = (
                    SOFTWARE,
                    [
                        f"error inside conewise: {type(error).__name__}: {error}",
                        "This is a defect: please report it with what `conewise --debug ...` prints.",
                    ],
                )
        print(*said, sep="\n", file=sys.stderr, flush=True)
        raise typer.Exit(code)


@contextmanager
def interruptible(
    folder: Path | None, command: list[str], done: Callable[[], str] | None = None
) -> Iterator[None]:
    """Let Ctrl-C say what was kept in the folder of `--out`, and how to go on; `done` says how much it is."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is None:
            after = f" after {done()}" if done is not None else ""
            raise Interrupted(
                f"interrupted{after}; nothing was kept. With --out DIR what is done is kept, and --resume "
                "goes on from there."
            ) from None
        kept = f"{done()} are kept" if done is not None else "what was done is kept"
        again = command if "--resume" in command else [*command, "--resume"]
        raise Interrupted(f"interrupted: {kept} in {folder}. Go on with:\n  {shell_command(again)}") from None


def _with_values(words: list[str]) -> list[str]:
    """Return what was typed, with a value of `--ray` where no address follows: the parser wants one."""
    follows = [*words[1:], "-"]
    is_bare = [word == "--ray" and after.startswith("-") for word, after in zip(words, follows, strict=False)]
    return ["--ray=local" if bare else word for word, bare in zip(words, is_bare, strict=True)]


def _expect_utf8(words: list[str]) -> None:
    """Refuse an argument whose bytes are not UTF-8: no file or terminal could be given it again."""
    for word in words:
        if lone_surrogate(word) is not None:
            raise CommandError(
                f"the argument {word!a} is not UTF-8. Write it so; a file of another name can be renamed."
            )


def command_of(ctx: typer.Context) -> list[str]:
    """Return what was typed, from `conewise` on."""
    typed: list[str] = ctx.meta.get(_COMMAND, ["conewise"])
    return typed


def shell_command(words: list[str]) -> str:
    """Return a command as it can be pasted into a shell."""
    return shlex.join(words)


_OPTIONS = {"attn_implementation": "attention", "scale": "noise-scale"}
"""Arguments whose options have other names."""


def as_option(argument: Argument) -> str:
    """Return an argument of the library as the command line writes it."""
    if argument.name == "precision":  # each precision is an option by itself
        return f"--{argument.value or 'tf32'}"
    name = _OPTIONS.get(argument.name, argument.name).replace("_", "-")
    if argument.value is None or isinstance(argument.value, bool):
        return f"--no-{name}" if argument.value is False else f"--{name}"
    return f"--{name} {shlex.quote(str(argument.value))}"

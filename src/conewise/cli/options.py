"""Command-line options that several commands share, each declared once with its help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

PROMPTS = "The prompts"
CHANGE = "What is changed and read"
FINDING = "How it is found"
RUNNING = "Running"
OUTPUT = "Output"
LOADING = "The model"


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as the parser takes it: every field of a group is a parameter of its own, in that order."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += _fields(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return called


def _fields(group: Any) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])


MARKUP: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None


def help_text(text: str) -> str:
    """A help text as the parser takes it: paragraphs that it may wrap, and marked ones as they are."""
    paragraphs = [
        paragraph if paragraph.startswith("\b") else " ".join(paragraph.split())
        for paragraph in text.strip().split("\n\n")
    ]
    return literal("\n\n".join(paragraphs))


def literal(text: str) -> str:
    """Text in which brackets are brackets."""
    return text.replace("[", r"\[") if MARKUP else text


class Patch(StrEnum):
    """What is put at a site."""

    SOURCE = "source"
    ZERO = "zero"
    MEAN = "mean"
    NOISE = "noise"


class Direction(StrEnum):
    """Which run is changed."""

    DENOISE = "denoise"
    NOISE = "noise"


class Metric(StrEnum):
    """What is read off the last position."""

    LOGIT_DIFF = "logit-diff"
    PROB = "prob"
    KL = "kl"

    @property
    def word(self) -> str:
        """Its name in the library."""
        return self.value.replace("-", "_")


class Method(StrEnum):
    """How a circuit is found."""

    ACDC = "acdc"
    EXACT = "exact"


class Ablation(StrEnum):
    """What removed edges carry."""

    RESAMPLE = "resample"
    ZERO = "zero"
    MEAN = "mean"

    @property
    def patch(self) -> str:
        """What a sweep over edges calls it."""
        return "source" if self is Ablation.RESAMPLE else self.value


class Evaluator(StrEnum):
    """How worlds are evaluated."""

    AUTO = "auto"
    WAVEFRONT = "wavefront"
    SERIAL = "serial"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder, a hub name, a GGUF file, smollm2-135m or tiny.",
        show_default=False,
    ),
]
Answer = Annotated[
    list[str] | None,
    typer.Option(
        "--answer",
        metavar="TOK",
        help="What should come next in the (clean) prompt: one token, often with a leading space. "
        "Several: repeat it.",
        rich_help_panel=PROMPTS,
        show_default=False,
    ),
]
Wrong = Annotated[
    list[str] | None,
    typer.Option(
        "--wrong",
        metavar="TOK",
        help="What should not come next. Several: repeat it.",
        rich_help_panel=PROMPTS,
        show_default=False,
    ),
]
Pos = Annotated[
    str | None,
    typer.Option(
        "--pos",
        metavar="CHOICE",
        help="Positions that are patched one by one: ':' all, '-1' the last, '2:5' some.",
        rich_help_panel=CHANGE,
    ),
]
ReadMetric = Annotated[
    Metric,
    typer.Option(
        "--metric",
        help="logit-diff: answer less wrong. prob: of the answer. kl: to the clean prediction.",
        rich_help_panel=CHANGE,
    ),
]
Plan = Annotated[
    bool,
    typer.Option("--plan", help="Say what it would cost, and run nothing of it.", rich_help_panel=RUNNING),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        metavar="AMOUNT",
        help="What the run may hold beside the model and the baseline, as '4GiB' or '500MB'.",
        rich_help_panel=RUNNING,
        show_default="2GiB",
    ),
]
Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Show progress on stderr.",
        rich_help_panel=OUTPUT,
        show_default="in a terminal",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write a page that opens without a network (.html), with --json too. It replaces a page of "
        "conewise, and no other file.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", help="For all that is drawn at random.", rich_help_panel=RUNNING),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
]

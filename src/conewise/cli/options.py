"""Command-line options, each declared once with its help, and the groups that commands take of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import typer

C = TypeVar("C", bound=Callable[..., None])

PROMPTS = "The prompts"
CHANGE = "What is changed and read"
FINDING = "How it is found"
RUNNING = "Running"
OUTPUT = "Output"
LOADING = "The model"


SUBCOMMANDS: list[tuple[str, Callable[..., None], str, str]] = []
"""The commands: the name, what the parser calls, the help, and one line of it."""


def subcommand(name: str, text: str, line: str) -> Callable[[C], C]:
    """Make a function a command of this name, with its help and a line about it."""

    def made(function: C) -> C:
        SUBCOMMANDS.append((name, flat(function), help_text(text), line))
        return function

    return made


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


class Source(StrEnum):
    """Where the values come from that are put at a site."""

    RUN = "run"
    ZERO = "zero"
    MEAN = "mean"
    NOISE = "noise"

    @property
    def patch(self) -> str:
        """Its name in a question."""
        return "source" if self is Source.RUN else self.value


class Direction(StrEnum):
    """The run that is changed."""

    DENOISE = "denoise"
    NOISE = "noise"


class Metric(StrEnum):
    """The metric that is read at the last position."""

    LOGIT_DIFF = "logit-diff"
    PROB = "prob"
    PROB_DIFF = "prob-diff"
    KL = "kl"

    @property
    def word(self) -> str:
        """Its name in the library."""
        return self.value.replace("-", "_")


class Method(StrEnum):
    """The method by which a circuit is found."""

    ACDC = "acdc"
    EXACT = "exact"


class Ablation(StrEnum):
    """Where the values come from that removed edges carry."""

    RUN = "run"
    ZERO = "zero"
    MEAN = "mean"

    @property
    def patch(self) -> str:
        """Its name in a sweep over edges."""
        return "source" if self is Ablation.RUN else self.value

    @property
    def ablation(self) -> str:
        """Its name in an evaluation of a circuit."""
        return "resample" if self is Ablation.RUN else self.value


class Evaluator(StrEnum):
    """The evaluator of worlds."""

    AUTO = "auto"
    WAVEFRONT = "wavefront"
    SERIAL = "serial"


def option(panel: str | None, name: str, text: str, *more: str, **how: Any) -> Any:
    """Return the declaration of an option: its panel in the help, its name, its help text, other names."""
    return typer.Option(name, *more, help=literal(text), rich_help_panel=panel, **how)


_model, _prompts, _change, _finding, _running, _output = (
    partial(option, panel) for panel in (LOADING, PROMPTS, CHANGE, FINDING, RUNNING, OUTPUT)
)

# -- options of several groups or commands ---------------------------------------------------------

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
    _prompts(
        "--answer",
        "Correct next token of the clean prompt, often with a leading space. Repeat it for several.",
        metavar="TOK",
    ),
]
Wrong = Annotated[
    list[str] | None,
    _prompts("--wrong", "Wrong next token. Repeat it for several.", metavar="TOK"),
]
Pos = Annotated[
    str | None,
    _change(
        "--pos",
        "Positions to patch one by one: ':' for all, '-1' for the last, '2:5' for a range.",
        metavar="CHOICE",
    ),
]
ReadMetric = Annotated[
    Metric,
    _change(
        "--metric",
        "logit-diff: answer minus wrong. prob: of the answer. prob-diff: of the answer minus that of the "
        "wrong one. kl: from the clean prediction.",
    ),
]
Plan = Annotated[bool, _running("--plan", "Report the exact cost and run nothing.")]
MaxMemory = Annotated[
    str | None,
    _running(
        "--max-memory",
        "Memory limit beside the model and the baseline, such as '4GiB' or '500MB'.",
        metavar="AMOUNT",
        show_default="2GiB",
    ),
]
Progress = Annotated[
    bool | None,
    _output("--progress/--no-progress", "Show progress on stderr.", show_default="in a terminal"),
]
Report = Annotated[
    Path | None,
    _output(
        "--report",
        "Write an HTML report that opens without a network. An older report is replaced, any other file is "
        "not.",
        metavar="FILE",
    ),
]
Seed = Annotated[int, _running("--seed", "Random seed.", metavar="N")]
Json = Annotated[bool, _output("--json", "Print one JSON object and nothing else.")]

# -- groups of options -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadOptions:
    """The loading of MODEL's weights."""

    device: Annotated[
        str | None,
        _model(
            "--device",
            "cpu, cuda, cuda:1, mps; with several (cuda:0,cuda:1), one worker on each.",
            metavar="NAME",
            show_default="cpu",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _model("--dtype", "float32, bfloat16, float16, float64.", metavar="NAME", show_default="as saved"),
    ] = None
    attention: Annotated[
        str | None,
        _model(
            "--attention",
            "eager exposes attention patterns as sites; sdpa is faster.",
            metavar="NAME",
            show_default="the model's own",
        ),
    ] = None
    revision: Annotated[
        str | None, _model("--revision", "Revision of a model on the Hugging Face hub.", metavar="NAME")
    ] = None
    trust_remote_code: Annotated[
        bool, _model("--trust-remote-code", "Allow running Python code that comes with the model.")
    ] = False


@dataclass(frozen=True)
class PairOptions:
    """The prompts, and what the model should say to each."""

    clean: Annotated[
        str | None,
        _prompts("--clean", "The prompt that the model answers correctly.", metavar="TEXT"),
    ] = None
    corrupted: Annotated[
        str | None,
        _prompts(
            "--corrupted",
            "A prompt with as many tokens whose answer differs.",
            metavar="TEXT",
        ),
    ] = None
    answer: Answer = None
    wrong: Wrong = None
    prompts: Annotated[
        Path | None,
        _prompts(
            "--prompts",
            "File of prompt pairs: JSON rows {clean, corrupted, answers, wrong_answers}, JSON lines, or CSV "
            "with these columns and | between answers.",
            metavar="FILE",
        ),
    ] = None
    as_written: Annotated[
        bool,
        _prompts(
            "--as-written", "Accept answers without a leading space even where one seems to be missing."
        ),
    ] = False


@dataclass(frozen=True)
class PromptOptions(PairOptions):
    """The prompts, and how many of them are run together."""

    batch_size: Annotated[
        int | None,
        _prompts(
            "--batch-size",
            "Maximum number of prompts of one length per batch; 256 by default.",
            metavar="N",
            min=1,
        ),
    ] = None


@dataclass(frozen=True)
class SiteChoice:
    """The sites that a sweep patches."""

    sites: Annotated[
        str,
        _change(
            "--sites",
            "Sites to patch, separated by commas: kinds (z: every head, mlp_out: every MLP), parts of kinds "
            "as 'z[layer=2:5, head=0]', or names; see `conewise sites`.",
            metavar="KINDS",
        ),
    ] = "z,mlp_out"


@dataclass(frozen=True)
class EdgeChoice:
    """The edges that a sweep patches."""

    edges: Annotated[
        str,
        _change(
            "--edges",
            "Edges to patch, WRITER->READER, * matches anything: 'a0.*->*', '*->*<k>', 'm?->logits'.",
            metavar="NAMES",
        ),
    ] = "*->*"


@dataclass(frozen=True)
class ChangeOptions:
    """The value that is put at a site or an edge, the run in which it is put, and the metric."""

    pos: Pos = None
    source: Annotated[
        Source,
        _change(
            "--source",
            "The value to patch in: that of the other run, zero, the mean over prompts, or noise.",
        ),
    ] = Source.RUN
    noise_scale: Annotated[
        float | None,
        _change(
            "--noise-scale",
            "Standard deviation of the noise with --source noise.",
            metavar="S",
            show_default="1.0",
        ),
    ] = None
    direction: Annotated[
        Direction | None,
        _change(
            "--direction",
            "denoise: patch the corrupted run with clean values. noise: patch the clean run. "
            "Default: denoise with --source run, noise otherwise.",
        ),
    ] = None
    metric: ReadMetric = Metric.LOGIT_DIFF
    tf32: Annotated[
        bool,
        _running("--tf32", "Use TF32 for float32 matrix products on CUDA: faster, rounds to 10 bits."),
    ] = False
    split: Annotated[
        bool,
        _running(
            "--split",
            "Split float32 matrix products into three bfloat16 parts on CUDA: faster, a few times the error.",
        ),
    ] = False


# The fields of the last base come first.
@dataclass(frozen=True)
class QuestionOptions(ChangeOptions, SiteChoice, PromptOptions):
    """The question of a sweep: the prompts, the sites, the values put there, the metric."""

    unit: ClassVar[str] = "site"


@dataclass(frozen=True)
class EdgeOptions(ChangeOptions, EdgeChoice, PromptOptions):
    """The question of a sweep over edges: the prompts, the edges, the values put there, the metric."""

    unit: ClassVar[str] = "edge"


@dataclass(frozen=True)
class RunOptions:
    """The evaluation of worlds."""

    evaluator: Annotated[
        Evaluator,
        _running(
            "--evaluator",
            "wavefront: all worlds in one batched pass. serial: one by one, bit for bit a full re-run.",
        ),
    ] = Evaluator.AUTO
    max_memory: MaxMemory = None
    seed: Seed = 0


@dataclass(frozen=True)
class FleetOptions:
    """The workers beyond this process."""

    ray: Annotated[
        str | None,
        _running(
            "--ray",
            "Run on Ray workers: of a cluster (auto, ray://head:10001), or without an address of one that is "
            "started on this machine.",
            metavar="[ADDRESS]",
        ),
    ] = None
    workers: Annotated[
        int | None,
        _running(
            "--workers",
            "Number of workers; without --ray, processes on this machine.",
            metavar="N",
            min=1,
        ),
    ] = None
    simulate: Annotated[
        bool,
        _running("--simulate", "With --plan and --workers N: estimate the time with N workers."),
    ] = False


@dataclass(frozen=True)
class MethodOptions:
    """The estimation of effects, in place of computing them."""

    method: Annotated[
        str | None,
        _running(
            "--method",
            "Estimate effects by gradients instead of computing them: atp, atp*, ig, relp or hybrid for "
            "sites; eap, eap-ig, eap-ig-activations, relp or hybrid for edges.",
            metavar="NAME",
        ),
    ] = None
    steps: Annotated[
        int | None,
        _running(
            "--steps",
            "Steps along the line of --method ig, eap-ig and eap-ig-activations.",
            metavar="N",
            min=1,
        ),
    ] = None


@dataclass(frozen=True)
class ResultOptions:
    """The check of a run's numbers, their page, and how many of them are shown."""

    verify: Annotated[
        int,
        _running(
            "--verify",
            "Verify N random cells by full forward passes with hooks; exit code 1 if they differ.",
            metavar="N",
            min=0,
        ),
    ] = 0
    report: Report = None
    top: Annotated[int, _output("--top", "Number of strongest sites to show.", metavar="N", min=1)] = 10
    progress: Progress = None


def folder_of(text: str) -> Path:
    """Return the folder that a text names: an empty one would be the current folder."""
    if not text.strip() or "\0" in text:
        raise typer.BadParameter("it names no folder.")
    return Path(text)


@dataclass(frozen=True)
class StoreOptions:
    """The folder in which a run is kept."""

    out: Annotated[
        Path | None,
        _output(
            "--out",
            "Store the run in this folder while it runs, and the result. `conewise report DIR` makes "
            "a report of it.",
            metavar="DIR",
            parser=folder_of,
        ),
    ] = None
    resume: Annotated[bool, _output("--resume", "Resume the interrupted run in --out.")] = False


@dataclass(frozen=True)
class OutputOptions:
    """The output of a command, while it runs and in the end."""

    quiet: Annotated[bool, _output("--quiet", "Suppress progress output.", "-q")] = False
    json: Json = False


@dataclass(frozen=True)
class PlanOptions(LoadOptions, OutputOptions, FleetOptions, RunOptions):
    """All that a plan takes beside its question."""


@dataclass(frozen=True)
class SweepOptions(
    LoadOptions, OutputOptions, StoreOptions, ResultOptions, MethodOptions, FleetOptions, RunOptions
):
    """All that a sweep takes beside its question."""


@dataclass(frozen=True)
class FindOptions:
    """The search of a circuit: the method, how much is kept, what removed edges carry, the metric."""

    method: Annotated[
        Method,
        _finding(
            "--method",
            "acdc: remove edges one by one while the metric changes little. exact: patch every edge by "
            "itself and keep those with the largest effects.",
        ),
    ] = Method.ACDC
    threshold: Annotated[
        float | None,
        _finding(
            "--threshold",
            "Keep an edge that changes the metric by at least this much.",
            metavar="T",
            show_default="1% of what removing all edges changes",
        ),
    ] = None
    top: Annotated[
        int | None,
        _finding(
            "--top",
            "With --method exact, keep at most this many edges instead of using a threshold.",
            metavar="N",
            min=1,
        ),
    ] = None
    connected: Annotated[
        bool,
        _finding(
            "--connected/--no-connected",
            "With --method exact, keep only edges on a path from the input to the logits.",
        ),
    ] = True
    ablation: Annotated[
        Ablation,
        _finding(
            "--source",
            "Value of removed edges: that of the corrupted prompt, zero, or their mean.",
        ),
    ] = Ablation.RUN
    metric: ReadMetric = Metric.LOGIT_DIFF
    minimality: Annotated[
        bool,
        _finding("--minimality/--no-minimality", "Also evaluate the circuit without each of its edges."),
    ] = True

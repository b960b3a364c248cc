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
        "What should come next in the (clean) prompt: one token, often with a leading space. Several: repeat "
        "it.",
        metavar="TOK",
    ),
]
Wrong = Annotated[
    list[str] | None,
    _prompts("--wrong", "What should not come next. Several: repeat it.", metavar="TOK"),
]
Pos = Annotated[
    str | None,
    _change(
        "--pos",
        "Positions that are patched one by one: ':' all, '-1' the last, '2:5' some.",
        metavar="CHOICE",
    ),
]
ReadMetric = Annotated[
    Metric,
    _change(
        "--metric",
        "logit-diff: answer less wrong. prob: of the answer. kl: to the clean prediction.",
    ),
]
Plan = Annotated[bool, _running("--plan", "Report what it would cost; run nothing.")]
MaxMemory = Annotated[
    str | None,
    _running(
        "--max-memory",
        "What the run may hold beside the model and the baseline, as '4GiB' or '500MB'.",
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
        "Write a page that opens without a network (.html), with --json too. It replaces a page of conewise, "
        "and no other file.",
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
            "cpu, cuda, cuda:1, mps; several, as cuda:0,cuda:1, each have a worker.",
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
            "eager makes the attention patterns sites; sdpa is faster.",
            metavar="NAME",
            show_default="the model's own",
        ),
    ] = None
    revision: Annotated[str | None, _model("--revision", "Of a model on the hub.", metavar="NAME")] = None
    trust_remote_code: Annotated[
        bool, _model("--trust-remote-code", "Run the Python code that a model brings.")
    ] = False


@dataclass(frozen=True)
class PairOptions:
    """The prompts, and what the model should say to each."""

    clean: Annotated[
        str | None,
        _prompts("--clean", "The prompt that the model gets right.", metavar="TEXT"),
    ] = None
    corrupted: Annotated[
        str | None,
        _prompts(
            "--corrupted",
            "Its twin, with equally many tokens, that changes the answer.",
            metavar="TEXT",
        ),
    ] = None
    answer: Answer = None
    wrong: Wrong = None
    prompts: Annotated[
        Path | None,
        _prompts(
            "--prompts",
            "Many pairs: JSON rows {clean, corrupted, answers, wrong_answers}, JSON lines, or CSV with these "
            "columns and | between answers.",
            metavar="FILE",
        ),
    ] = None
    as_written: Annotated[
        bool,
        _prompts("--as-written", "Take answers without a leading space even where one seems to be missing."),
    ] = False


@dataclass(frozen=True)
class PromptOptions(PairOptions):
    """The prompts, and how many of them are run together."""

    batch_size: Annotated[
        int | None,
        _prompts(
            "--batch-size",
            "Prompts of one length that are run together at most; 256 by default.",
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
            "What is patched, separated by commas: kinds (z: every head, mlp_out: every MLP), parts of kinds "
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
            "Which edges, as WRITER->READER with * for anything: 'a0.*->*', '*->*<k>', 'm?->logits'.",
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
            "What is put there: the other run's value, zero, the mean over the prompts, or noise.",
        ),
    ] = Source.RUN
    noise_scale: Annotated[
        float | None,
        _change(
            "--noise-scale", "The standard deviation of --source noise.", metavar="S", show_default="1.0"
        ),
    ] = None
    direction: Annotated[
        Direction | None,
        _change(
            "--direction",
            "denoise: the corrupted run is changed (values come from the clean one). noise: the clean run is "
            "changed. Usual: denoise with --source run, noise otherwise.",
        ),
    ] = None
    metric: ReadMetric = Metric.LOGIT_DIFF
    tf32: Annotated[
        bool,
        _running("--tf32", "Multiply float32 in TF32, on a CUDA device: faster, rounds to 10 bits."),
    ] = False
    split: Annotated[
        bool,
        _running(
            "--split",
            "Multiply float32 in three bfloat16 parts, on a CUDA device: faster, a few times its error.",
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
            "wavefront: all worlds in one pass. serial: one by one, bit for bit a full re-run.",
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
            "Run it on workers of Ray: those of a cluster (auto, ray://head:10001), or, without an address, "
            "of one that is started on this machine.",
            metavar="[ADDRESS]",
        ),
    ] = None
    workers: Annotated[
        int | None,
        _running(
            "--workers",
            "How many workers there are; without --ray, they are processes of this machine.",
            metavar="N",
            min=1,
        ),
    ] = None
    simulate: Annotated[
        bool,
        _running("--simulate", "With a plan and --workers N: what so many workers would take, on paper."),
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
            "Check so many random cells by full forwards with hooks; exit with 1 if they differ.",
            metavar="N",
            min=0,
        ),
    ] = 0
    report: Report = None
    top: Annotated[int, _output("--top", "Show so many of the strongest sites.", metavar="N", min=1)] = 10
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
            "Keep the run there: what is done while it runs, and the result. `conewise report DIR` makes a "
            "page of it.",
            metavar="DIR",
            parser=folder_of,
        ),
    ] = None
    resume: Annotated[bool, _output("--resume", "Go on with the run in --out where it was cut off.")] = False


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
            "acdc: remove edges one after the other where the metric can do without. exact: patch every edge "
            "alone, and keep those with the largest effects.",
        ),
    ] = Method.ACDC
    threshold: Annotated[
        float | None,
        _finding(
            "--threshold",
            "How much an edge has to change the metric to be kept.",
            metavar="T",
            show_default="1% of what removing all edges changes",
        ),
    ] = None
    top: Annotated[
        int | None,
        _finding(
            "--top",
            "With --method exact, keep at most so many edges, and not by a threshold.",
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
            "What removed edges carry: what they do on the corrupted prompt, nothing, or their mean.",
        ),
    ] = Ablation.RUN
    metric: ReadMetric = Metric.LOGIT_DIFF
    minimality: Annotated[
        bool,
        _finding("--minimality/--no-minimality", "Evaluate the circuit without each of its edges too."),
    ] = True

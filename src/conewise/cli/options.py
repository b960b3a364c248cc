"""Command-line options: parameters of commands and fields of dataclasses, explained by their docstrings.

A docstring has sections of options as `--help` shows them. An entry begins with the flags, a word for the
value, and a colon; what stands in brackets at its end is said of the default. The other paragraphs of a
command's docstring are its help.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, wraps
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from conewise.arguments import Count, Positive, Range

C = TypeVar("C", bound=Callable[..., None])

COMMANDS: list[tuple[Callable[..., None], Callable[..., None]]] = []
"""The commands, and what the parser calls for each."""

MARKUP: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None

ENTRY = re.compile(
    r"^    (?P<name>[A-Z_]+|-[^\s:,]+(?:, -[^\s:,]+)*)(?: (?P<value>\S+))?: (?P<text>.*(?:\n {5,}.*)*)",
    re.MULTILINE,
)

SHARED = """
Arguments:
    MODEL: A Hugging Face folder, a hub name, a GGUF file, smollm2-135m or tiny.

The prompts:
    --answer TOK: Correct next token of the clean prompt, often with a leading space. Repeat it for several.
    --wrong TOK: Wrong next token. Repeat it for several.

What is changed and read:
    --pos CHOICE: Positions to patch one by one: ':' for all, '-1' for the last, '2:5' for a range.
    --metric: logit-diff: answer minus wrong. prob: of the answer. prob-diff: of the answer minus that of the
        wrong one. kl: from the clean prediction.

Running:
    --plan: Report the exact cost and run nothing.
    --max-memory AMOUNT: Memory limit beside the model and the baseline, such as '4GiB' or '500MB'. [2GiB]
    --seed N: Random seed.

Output:
    --progress/--no-progress: Show progress on stderr. [in a terminal]
    --report FILE: Write an HTML report that opens without a network. An older report is replaced, any other
        file is not.
    --json: Print one JSON object and nothing else.
"""
"""Options of several groups or commands."""


def command(function: C) -> C:
    """Make a function a command of its name; its docstring has the help and the options of its own."""
    COMMANDS.append((function, flat(function)))
    return function


def flat(function: Callable[..., None]) -> Callable[..., None]:
    """The command as the parser takes it: every field of a group is a parameter of its own, in that order.

    Parameters before the star are arguments, those behind it are options.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(function)
    def called(**given: Any) -> None:
        given = {name: value.value if isinstance(value, StrEnum) else value for name, value in given.items()}
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        function(**given)

    found: list[Parameter] = []
    for name, one in signature(function).parameters.items():
        if name in groups:
            found += _fields(groups[name])
        else:
            is_argument = one.kind is not Parameter.KEYWORD_ONLY
            found.append(_declared(name, hints[name], one.default, is_argument, [function]))
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
    called.__signature__ = Signature(found)  # type: ignore[attr-defined]
    return called


def _fields(group: Any) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        yield _declared(field.name, hints[field.name], default, False, group.__mro__)


def _declared(name: str, hint: Any, default: Any, is_argument: bool, owners: Iterable[Any]) -> Parameter:
    """Return a parameter for the parser, by its type and its entry in the docstring of an owner."""
    kind: Any = hint
    how: dict[str, Any] = {}
    for one in (hint, *get_args(hint)):
        if get_origin(one) is Annotated:
            kind, rule = get_args(one)
            how |= {"min": int(rule.minimum)} if isinstance(rule, Range) else {"parser": rule}
        elif get_origin(one) is Literal:
            kind = make_enum(name, {word: word for word in get_args(one)})
            default = kind(default) if isinstance(default, str) else default
    if kind is not hint and type(None) in get_args(hint):
        kind |= None
    documented = (entries(one.__doc__ or "").get(name) for one in owners)
    panel, flags, value, text = next(filter(None, documented), None) or entries(SHARED).get(name, NO_ENTRY)
    shown = re.search(r" \[([^]]*)\]$", text)
    if shown is not None:
        text = text[: shown.start()]
    if shown is not None or is_argument:
        how["show_default"] = shown is not None and shown[1]
    if kind is typer.Context:
        made: Any = kind
    elif is_argument:
        metavar = name.upper() if default is Parameter.empty else None
        made = Annotated[kind, typer.Argument(help=literal(text), metavar=metavar, **how)]
    else:
        flags = flags or [f"--{name.replace('_', '-')}"]
        made = Annotated[
            kind, typer.Option(*flags, help=literal(text), metavar=value, rich_help_panel=panel, **how)
        ]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=made)


Entry = tuple[str | None, list[str], str | None, str]
make_enum: Callable[..., Any] = StrEnum
NO_ENTRY: Entry = (None, [], None, "")


@cache
def entries(doc: str) -> dict[str, Entry]:
    """Return the options that a docstring explains, by name: panel, flags, word for the value, text."""
    found: dict[str, Entry] = {}
    for block in cleandoc(doc).split("\n\n"):
        title, _, body = block.partition(":\n")
        for one in ENTRY.finditer(body):
            flags = [] if one["name"].isupper() else one["name"].split(", ")
            name = (flags[0] if flags else one["name"]).partition("/")[0].strip("-").replace("-", "_").lower()
            panel = None if title in ("Arguments", "Options") else title
            found[name] = (panel, flags, one["value"], " ".join(one["text"].split()))
    return found


def help_text(doc: str) -> str:
    """Return a help text as the parser takes it: paragraphs that it may wrap, and sections as they are."""
    paragraphs = []
    for block in cleandoc(doc).split("\n\n"):
        title, colon, body = block.partition(":\n")
        if colon and body.startswith(" "):
            paragraphs += [] if ENTRY.match(body) else [f"\b\n{title}:\n{body}"]
        else:
            paragraphs.append(" ".join(block.split()))
    return literal("\n\n".join(paragraphs))


def literal(text: str) -> str:
    """Text in which brackets are brackets."""
    return text.replace("[", r"\[") if MARKUP else text


def folder_of(text: str) -> Path:
    """Return the folder that a text names: an empty one would be the current folder."""
    if not text.strip() or "\0" in text:
        raise typer.BadParameter("it names no folder.")
    return Path(text)


# -- groups of options -----------------------------------------------------------------------------

Metric = Literal["logit-diff", "prob", "prob-diff", "kl"]
Direction = Literal["denoise", "noise"]
Evaluator = Literal["auto", "wavefront", "serial"]


@dataclass(frozen=True)
class LoadOptions:
    """The loading of MODEL's weights.

    The model:
        --device NAME: cpu, cuda, cuda:1, mps; with several (cuda:0,cuda:1), one worker on each. [cpu]
        --dtype NAME: float32, bfloat16, float16, float64. [as saved]
        --attention NAME: eager exposes attention patterns as sites; sdpa is faster. [the model's own]
        --revision NAME: Revision of a model on the Hugging Face hub.
        --trust-remote-code: Allow running Python code that comes with the model.
    """

    device: str | None = None
    dtype: str | None = None
    attention: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class PairOptions:
    """The prompts, and what the model should say to each.

    The prompts:
        --clean TEXT: The prompt that the model answers correctly.
        --corrupted TEXT: A prompt with as many tokens whose answer differs.
        --prompts FILE: File of prompt pairs: JSON rows {clean, corrupted, answers, wrong_answers}, JSON
            lines, or CSV with these columns and | between answers.
        --as-written: Accept answers without a leading space even where one seems to be missing.
    """

    clean: str | None = None
    corrupted: str | None = None
    answer: list[str] | None = None
    wrong: list[str] | None = None
    prompts: Path | None = None
    as_written: bool = False


@dataclass(frozen=True)
class ChangeOptions(PairOptions):
    """The value that is put at a site or an edge, the run in which it is put, and the metric.

    The prompts:
        --batch-size N: Maximum number of prompts of one length per batch; 256 by default.

    What is changed and read:
        --source: The value to patch in: that of the other run, zero, the mean over prompts, or noise.
        --noise-scale S: Standard deviation of the noise with --source noise. [1.0]
        --direction: denoise: patch the corrupted run with clean values. noise: patch the clean run. Default:
            denoise with --source run, noise otherwise.

    Running:
        --tf32: Use TF32 for float32 matrix products on CUDA: faster, rounds to 10 bits.
        --split: Split float32 matrix products into three bfloat16 parts on CUDA: faster, a few times the
            error.
    """

    batch_size: Positive | None = None
    pos: str | None = None
    source: Literal["run", "zero", "mean", "noise"] = "run"
    noise_scale: float | None = None
    direction: Direction | None = None
    metric: Metric = "logit-diff"
    tf32: bool = False
    split: bool = False


@dataclass(frozen=True)
class QuestionOptions(ChangeOptions):
    """The question of a sweep: the prompts, the sites, the values put there, the metric.

    What is changed and read:
        --sites KINDS: Sites to patch, separated by commas: kinds (z: every head, mlp_out: every MLP), parts
            of kinds as 'z[layer=2:5, head=0]', or names; see `conewise sites`.
    """

    unit: ClassVar[str] = "site"
    sites: str = "z,mlp_out"


@dataclass(frozen=True)
class EdgeOptions(ChangeOptions):
    """The question of a sweep over edges: the prompts, the edges, the values put there, the metric.

    What is changed and read:
        --edges NAMES: Edges to patch, WRITER->READER, * matches anything: 'a0.*->*', '*->*<k>', 'm?->logits'.
    """

    unit: ClassVar[str] = "edge"
    edges: str = "*->*"


@dataclass(frozen=True)
class RunOptions:
    """The evaluation of worlds.

    Running:
        --evaluator: wavefront: all worlds in one batched pass. serial: one by one, bit for bit a full re-run.
    """

    evaluator: Evaluator = "auto"
    max_memory: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class FleetOptions:
    """The workers beyond this process.

    Running:
        --ray [ADDRESS]: Run on Ray workers: of a cluster (auto, ray://head:10001), or without an address of
            one that is started on this machine.
        --workers N: Number of workers; without --ray, processes on this machine.
        --simulate: With --plan and --workers N: estimate the time with N workers.
    """

    ray: str | None = None
    workers: Positive | None = None
    simulate: bool = False


@dataclass(frozen=True)
class ResultOptions:
    """The check of a run's numbers, their page, and how many of them are shown.

    Running:
        --verify N: Verify N random cells by full forward passes with hooks; exit code 1 if they differ.

    Output:
        --top N: Number of strongest sites to show.
    """

    verify: Count = 0
    report: Path | None = None
    top: Positive = 10
    progress: bool | None = None


@dataclass(frozen=True)
class StoreOptions:
    """The folder in which a run is kept.

    Output:
        --out DIR: Store the run in this folder while it runs, and the result. `conewise report DIR` makes a
            report of it.
        --resume: Resume the interrupted run in --out.
    """

    out: Annotated[Path, folder_of] | None = None
    resume: bool = False


@dataclass(frozen=True)
class OutputOptions:
    """The output of a command, while it runs and in the end.

    Output:
        --quiet, -q: Suppress progress output.
    """

    quiet: bool = False
    json: bool = False


@dataclass(frozen=True)
class PlanOptions(LoadOptions, OutputOptions, FleetOptions, RunOptions):
    """All that a plan takes beside its question."""


@dataclass(frozen=True)
class SweepOptions(LoadOptions, OutputOptions, StoreOptions, ResultOptions, FleetOptions, RunOptions):
    """All that a sweep takes beside its question.

    Running:
        --method NAME: Estimate effects by gradients instead of computing them: atp, atp*, ig, relp or hybrid
            for sites; eap, eap-ig, eap-ig-activations, relp or hybrid for edges.
        --steps N: Steps along the line of --method ig, eap-ig and eap-ig-activations.
    """

    method: str | None = None
    steps: Positive | None = None


@dataclass(frozen=True)
class FindOptions:
    """The search of a circuit: the method, how much is kept, what removed edges carry, the metric.

    How it is found:
        --method: acdc: remove edges one by one while the metric changes little. exact: patch every edge by
            itself and keep those with the largest effects.
        --threshold T: Keep an edge that changes the metric by at least this much. [1% of what removing all
            edges changes]
        --top N: With --method exact, keep at most this many edges instead of using a threshold.
        --connected/--no-connected: With --method exact, keep only edges on a path from the input to the
            logits.
        --source: Value of removed edges: that of the corrupted prompt, zero, or their mean.
        --minimality/--no-minimality: Also evaluate the circuit without each of its edges.
    """

    method: Literal["acdc", "exact"] = "acdc"
    threshold: float | None = None
    top: Positive | None = None
    connected: bool = True
    source: Literal["run", "zero", "mean"] = "run"
    metric: Metric = "logit-diff"
    minimality: bool = True


@dataclass(frozen=True)
class SearchOptions(LoadOptions, OutputOptions, StoreOptions, FleetOptions, FindOptions):
    """All that a search takes beside its prompts."""

    plan: bool = False
    max_memory: str | None = None
    report: Path | None = None
    progress: bool | None = None

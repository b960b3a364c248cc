"""Groups of command-line options: loading, prompts, questions, running, output, searching."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from conewise.cli.options import (
    CHANGE,
    FINDING,
    LOADING,
    OUTPUT,
    PROMPTS,
    RUNNING,
    Ablation,
    Answer,
    Direction,
    Evaluator,
    Json,
    MaxMemory,
    Method,
    Metric,
    Patch,
    Pos,
    Progress,
    ReadMetric,
    Report,
    Seed,
    Wrong,
    literal,
)


@dataclass(frozen=True)
class LoadOptions:
    """How the weights of MODEL are loaded."""

    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="cpu, cuda, cuda:1, mps; several, as cuda:0,cuda:1, each have a worker.",
            rich_help_panel=LOADING,
            show_default="cpu",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="float32, bfloat16, float16, float64.",
            rich_help_panel=LOADING,
            show_default="as saved",
        ),
    ] = None
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            metavar="NAME",
            help="eager makes the attention patterns sites; sdpa is faster.",
            rich_help_panel=LOADING,
            show_default="the model's own",
        ),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="NAME",
            help="Of a model on the hub.",
            rich_help_panel=LOADING,
            show_default=False,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the Python code that a model brings.", rich_help_panel=LOADING
        ),
    ] = False


@dataclass(frozen=True)
class PairOptions:
    """The prompts, and what the model should say to each."""

    clean: Annotated[
        str | None,
        typer.Option(
            "--clean",
            metavar="TEXT",
            help="The prompt that the model gets right.",
            rich_help_panel=PROMPTS,
            show_default=False,
        ),
    ] = None
    corrupted: Annotated[
        str | None,
        typer.Option(
            "--corrupted",
            metavar="TEXT",
            help="Its twin, with equally many tokens, that changes the answer.",
            rich_help_panel=PROMPTS,
            show_default=False,
        ),
    ] = None
    answer: Answer = None
    wrong: Wrong = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Many pairs: JSON rows {clean, corrupted, answers, wrong_answers}, JSON lines, or CSV with "
            "these columns and | between answers.",
            rich_help_panel=PROMPTS,
            show_default=False,
        ),
    ] = None
    as_written: Annotated[
        bool,
        typer.Option(
            "--as-written",
            help="Take answers without a leading space even where one seems to be missing.",
            rich_help_panel=PROMPTS,
        ),
    ] = False


@dataclass(frozen=True)
class PromptOptions(PairOptions):
    """The prompts, and how many of them are run together."""

    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            min=1,
            help="Prompts of one length that are run together at most; 256 by default.",
            rich_help_panel=PROMPTS,
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class SiteChoice:
    """Which sites a sweep patches."""

    sites: Annotated[
        str,
        typer.Option(
            "--sites",
            metavar="KINDS",
            help=literal(
                "What is patched, separated by commas: kinds (z: every head, mlp_out: every MLP), parts of "
                "kinds as 'z[layer=2:5, head=0]', or names; see `conewise sites`."
            ),
            rich_help_panel=CHANGE,
        ),
    ] = "z,mlp_out"


@dataclass(frozen=True)
class EdgeChoice:
    """Which edges a sweep patches."""

    edges: Annotated[
        str,
        typer.Option(
            "--edges",
            metavar="NAMES",
            help="Which edges, as WRITER->READER with * for anything: 'a0.*->*', '*->*<k>', 'm?->logits'.",
            rich_help_panel=CHANGE,
        ),
    ] = "*->*"


@dataclass(frozen=True)
class ChangeOptions:
    """What is put at a site or an edge, in which run, and what is read."""

    pos: Pos = None
    patch: Annotated[
        Patch,
        typer.Option(
            "--patch",
            help="What is put there: the source run's value, zero, the mean over the prompts, or noise.",
            rich_help_panel=CHANGE,
        ),
    ] = Patch.SOURCE
    noise_scale: Annotated[
        float | None,
        typer.Option(
            "--noise-scale",
            metavar="S",
            help="The standard deviation of --patch noise.",
            rich_help_panel=CHANGE,
            show_default="1.0",
        ),
    ] = None
    direction: Annotated[
        Direction | None,
        typer.Option(
            "--direction",
            help="denoise: the corrupted run is changed (values come from the clean one). noise: the clean "
            "run is changed. Usual: denoise with --patch source, noise otherwise.",
            rich_help_panel=CHANGE,
            show_default=False,
        ),
    ] = None
    metric: ReadMetric = Metric.LOGIT_DIFF
    tf32: Annotated[
        bool,
        typer.Option(
            "--tf32",
            help="Multiply float32 in TF32, on a CUDA device: faster, rounds to 10 bits.",
            rich_help_panel=RUNNING,
        ),
    ] = False
    split: Annotated[
        bool,
        typer.Option(
            "--split",
            help="Multiply float32 in three bfloat16 parts, on a CUDA device: faster, a few times its error.",
            rich_help_panel=RUNNING,
        ),
    ] = False


# The fields of the last base come first.
@dataclass(frozen=True)
class QuestionOptions(ChangeOptions, SiteChoice, PromptOptions):
    """What a sweep is about: the prompts, the sites, what is put there and what is read."""


@dataclass(frozen=True)
class EdgeOptions(ChangeOptions, EdgeChoice, PromptOptions):
    """What a sweep over edges is about: the prompts, the edges, what is put there and what is read."""


@dataclass(frozen=True)
class RunOptions:
    """How worlds are evaluated."""

    evaluator: Annotated[
        Evaluator,
        typer.Option(
            "--evaluator",
            help="wavefront: all worlds in one pass. serial: one by one, bit for bit a full re-run.",
            rich_help_panel=RUNNING,
        ),
    ] = Evaluator.AUTO
    max_memory: MaxMemory = None
    seed: Seed = 0


@dataclass(frozen=True)
class FleetOptions:
    """Who runs it beyond this process."""

    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="[ADDRESS]",
            help="Run it on workers of Ray: those of a cluster (auto, ray://head:10001), or, without an "
            "address, of one that is started on this machine.",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="How many workers there are; without --ray, they are processes of this machine.",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="With a plan and --workers N: what so many workers would take, on paper.",
            rich_help_panel=RUNNING,
        ),
    ] = False


@dataclass(frozen=True)
class MethodOptions:
    """Whether effects are computed or estimated."""

    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="Estimate effects by gradients instead of computing them: atp, atp*, ig, relp or hybrid "
            "for sites; eap, eap-ig, eap-ig-activations, relp or hybrid for edges.",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help="Steps along the line of --method ig, eap-ig and eap-ig-activations.",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class ResultOptions:
    """What is done with the numbers of a run, and how much of them is shown."""

    verify: Annotated[
        int,
        typer.Option(
            "--verify",
            metavar="N",
            min=0,
            help="Check so many random cells by full forwards with hooks; exit with 1 if they differ.",
            rich_help_panel=RUNNING,
        ),
    ] = 0
    report: Report = None
    top: Annotated[
        int,
        typer.Option(
            "--top", metavar="N", min=1, help="Show so many of the strongest sites.", rich_help_panel=OUTPUT
        ),
    ] = 10
    progress: Progress = None


def folder_of(text: str) -> Path:
    """The folder that a text names: an empty one would be the current folder."""
    if not text.strip() or "\0" in text:
        raise typer.BadParameter("it names no folder.")
    return Path(text)


@dataclass(frozen=True)
class StoreOptions:
    """Where a run is kept."""

    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Keep the run there: what is done while it runs, and the result. `conewise report DIR` "
            "makes a page of it.",
            rich_help_panel=OUTPUT,
            show_default=False,
            parser=folder_of,
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run in --out where it was cut off.", rich_help_panel=OUTPUT
        ),
    ] = False


@dataclass(frozen=True)
class OutputOptions:
    """What a command prints while it runs and in the end."""

    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Say nothing while it runs, but for notes.", rich_help_panel=OUTPUT
        ),
    ] = False
    json: Json = False


@dataclass(frozen=True)
class FindOptions:
    """How a circuit is found: the method, how much is kept, what removed edges carry, what is read."""

    method: Annotated[
        Method,
        typer.Option(
            "--method",
            help="acdc: remove edges one after the other where the metric can do without. exact: patch every "
            "edge alone, and keep those with the largest effects.",
            rich_help_panel=FINDING,
        ),
    ] = Method.ACDC
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            metavar="T",
            help="How much an edge has to change the metric to be kept.",
            rich_help_panel=FINDING,
            show_default="1% of what removing all edges changes",
        ),
    ] = None
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            metavar="N",
            min=1,
            help="With --method exact, keep at most so many edges, and not by a threshold.",
            rich_help_panel=FINDING,
            show_default=False,
        ),
    ] = None
    connected: Annotated[
        bool,
        typer.Option(
            "--connected/--no-connected",
            help="With --method exact, keep only edges on a path from the input to the logits.",
            rich_help_panel=FINDING,
        ),
    ] = True
    ablation: Annotated[
        Ablation,
        typer.Option(
            "--ablation",
            help="What removed edges carry: what they do on the corrupted prompt, nothing, or their mean.",
            rich_help_panel=FINDING,
        ),
    ] = Ablation.RESAMPLE
    metric: ReadMetric = Metric.LOGIT_DIFF
    minimality: Annotated[
        bool,
        typer.Option(
            "--minimality/--no-minimality",
            help="Evaluate the circuit without each of its edges too.",
            rich_help_panel=FINDING,
        ),
    ] = True

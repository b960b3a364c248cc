"""From options to a question that can be planned and run, and what is printed of it before it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from conewise.asking.written_sites import chosen_edges, selected
from conewise.cli.options.choices import Direction, Metric, Patch
from conewise.cli.options.prompt_options import PairOptions
from conewise.cli.options.question_options import EdgeOptions, QuestionOptions
from conewise.cli.questions.loading import ModelName, captured, model_json
from conewise.cli.terminal.failing import CommandError
from conewise.cli.terminal.output import Status

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.locations.selectors import SelectorLike
    from conewise.model import Model
    from conewise.models.loaded import Loaded
    from conewise.prompts.pairs import Pair
    from conewise.prompts.questions import Question
    from conewise.prompts.tokenized import TokenizedPrompts

EXAMPLE = (
    "conewise {command} smollm2-135m --clean 'When Mary and John went to the store, John gave a drink to' "
    "--corrupted 'When Mary and John went to the store, Mary gave a drink to' "
    "--answer ' Mary' --wrong ' John'"
)


def pairs_of(name: str, options: PairOptions, needed: Sequence[str], command: str = "sweep") -> list[Pair]:
    """The pairs of prompts: those of the options, of the file, or those that come with the model.

    `needed` are the options that one pair takes; `command` is what an example is of.
    """
    from conewise.prompts.pairs import Pair, read_pairs

    answers, wrong = tuple(options.answer or ()), tuple(options.wrong or ())
    written = {
        "--clean": options.clean,
        "--corrupted": options.corrupted,
        "--answer": answers,
        "--wrong": wrong,
    }
    for option, value in written.items():
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise CommandError(f"{option} is an empty text. Give one with something in it, or leave it out.")
    given = [option for option, value in written.items() if value]
    if options.prompts is not None:
        if given:
            raise CommandError(f"--prompts and {given[0]} both say what is asked; leave one of them out.")
        return read_pairs(options.prompts, needs_both="--corrupted" in needed)
    if not given and name == "tiny":
        from conewise.models.tiny import PROMPTS

        return read_pairs(PROMPTS)
    missing = [option for option in needed if not written[option]]
    if missing:
        what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise CommandError(
            f"{what if given else 'no prompts'}. Give a pair of prompts with its answers, or a file of "
            f"them with --prompts FILE. For one:\n  {EXAMPLE.format(command=command)}"
        )
    assert options.clean is not None
    return [Pair(options.clean, options.corrupted or options.clean, answers, wrong, "the options")]


def needed_options(metric: Metric, *, reads_both: bool) -> list[str]:
    """What has to be said of a pair of prompts, for what is read of which runs."""
    needed = ["--clean", "--corrupted"] if reads_both else ["--clean"]
    needed += ["--answer"] if metric is not Metric.KL else []
    return needed + (["--wrong"] if metric is Metric.LOGIT_DIFF else [])


def ask(
    model: ModelName, options: QuestionOptions | EdgeOptions, seed: int, status: Status
) -> tuple[Loaded, Question]:
    """Load the model, read the prompts in its tokens, and make the question."""
    reads_both = options.patch is Patch.SOURCE or options.direction is Direction.DENOISE
    command = "edges" if isinstance(options, EdgeOptions) else "sweep"
    pairs = pairs_of(model.name, options, needed_options(options.metric, reads_both=reads_both), command)
    if options.tf32 and options.split:
        raise CommandError("--tf32 and --split both say how float32 is multiplied; leave one of them out.")
    from conewise.prompts.expectations import default_direction, noise_scale

    scale = noise_scale(options.patch.value, options.noise_scale)
    is_last = isinstance(options, QuestionOptions) or options.pos is None
    loaded, prompts, graph = read_prompts(
        model,
        pairs,
        options,
        options.metric,
        status,
        reads_both=options.patch is Patch.SOURCE,
        reads_last=is_last,  # an edge into the logits has a position of its own
        batch_size=options.batch_size,
    )
    from conewise.prompts.questions import Question

    if isinstance(options, EdgeOptions):
        sites: SelectorLike = chosen_edges(options.edges, options.pos, graph, prompts.lengths)
    else:
        sites = selected(options.sites, options.pos, graph)
    return loaded, Question(
        graph,
        prompts,
        sites,
        options.direction.value if options.direction else default_direction(options.patch.value),
        options.patch.value,
        options.metric.word,
        scale,
        seed,
        "tf32" if options.tf32 else "split" if options.split else None,
    )


def read_prompts(
    model: ModelName,
    pairs: Sequence[Pair],
    options: PairOptions,
    metric: Metric,
    status: Status,
    *,
    reads_both: bool,
    reads_last: bool = True,
    batch_size: int | None = None,
) -> tuple[Loaded, TokenizedPrompts, Model]:
    """Load the model, read the prompts in its tokens, and capture it with one of them.

    `reads_both`: what one run has is put into the other, so they have to differ. `reads_last`: as `captured`.
    """
    loaded = model.load(status)
    from conewise.prompts.expectations import expect_two_runs
    from conewise.prompts.tokenized import tokenize

    prompts = tokenize(
        pairs,
        loaded.tokenizer,
        batch_size=batch_size,
        as_written=options.as_written,
        progress=status.counter("prompts read"),
    )
    for note in prompts.notes:
        status.warn(note)
    prompts.expect_answers(metric.word)
    if reads_both:
        expect_two_runs(prompts)
    # Two prompts show what many would: a capture computes its example.
    example = [prompts.clean[number] for number in prompts.groups[0][:2]]
    return loaded, prompts, captured(loaded, example, status, reads_last=reads_last)


def question_json(loaded: Loaded, question: Question) -> dict[str, Any]:
    """The question as the JSON of `plan` and `sweep` has it."""
    from conewise.prompts.tokenized import METRICS

    return {
        "model": model_json(loaded, question.model),
        "question": {
            "direction": question.direction,
            "base": question.base,
            "source": question.source,
            "patch": question.patch,
            "metric": question.metric,
            "metric_in_words": METRICS[question.metric],
            "prompts": len(question.prompts.pairs),
            "lengths": sorted(set(question.prompts.lengths)),
            "batches": len(question.prompts.groups),
            "seed": question.seed,
        },
        "notes": list(question.prompts.notes),
    }


def show_question(console: Console, loaded: Loaded, question: Question, unit: str = "site") -> None:
    """The question, for people: the first pair, what is changed (`unit`s, one by one), what is read."""
    from conewise.prompts.tokenized import METRICS

    show_prompts(console, loaded, question)
    ways = {"denoise": "denoising", "noise": "noising"}
    way = ways[question.direction] if question.source else f"ablation in the {question.base} run"
    put = {
        "source": f"the {question.source} run's values are put into the {question.base} run",
        "zero": f"{unit}s are set to zero",
        "mean": f"{unit}s are set to their mean over prompts and positions",
        "noise": f"Gaussian noise of standard deviation {question.scale:g} is added to {unit}s",
    }[question.patch]
    console.print(f"  {way}: {put}, one {unit} at a time")
    console.print(f"  metric: {METRICS[question.metric]}, at the last position\n")


def show_prompts(console: Console, loaded: Loaded, question: Question) -> None:
    """The first pair, and what of it is the base and the source."""
    from rich.markup import escape

    from conewise.texts.tokenizing import token_texts

    pair, count = question.prompts.pairs[0], len(question.prompts.pairs)
    lengths = sorted(set(question.prompts.lengths))
    many = f"{count} pairs of prompts" if count > 1 else "1 pair of prompts"
    console.print(
        f"[bold]{escape(loaded.name)}[/bold], {many} of {' or '.join(map(str, lengths))} tokens"
        + (", the first:" if count > 1 else ":")
    )
    for name in ("clean", "corrupted"):
        if name == question.base or question.source is not None:
            role = "base" if name == question.base else "source"
            console.print(f"  {f'{name} ({role})':<18} {escape(getattr(pair, name))}")
    answers = {
        name: ", ".join(
            map(repr, token_texts(question.prompts.tokenizer, getattr(question.prompts, name)[0]))
        )
        for name in ("answers", "wrong_answers")
    }
    if answers["answers"]:
        wrong = f", not {answers['wrong_answers']}" if answers["wrong_answers"] else ""
        console.print(f"  {'answer':<18} {escape(answers['answers'] + wrong)}")

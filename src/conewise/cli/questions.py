"""From options to a question that can be planned and run, and what is told of it before it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conewise.cli.failing import CommandError
from conewise.cli.loading import Named, captured, told_model
from conewise.cli.options import Direction, Metric, Patch, QuestionOptions
from conewise.cli.selecting import selected
from conewise.cli.showing import Teller
from conewise.errors import PromptError

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.models.load import Loaded
    from conewise.prompts.pairs import Pair
    from conewise.prompts.questions import Question

EXAMPLE = (
    "conewise sweep smollm2-135m --clean 'When Mary and John went to the store, John gave a drink to' "
    "--corrupted 'When Mary and John went to the store, Mary gave a drink to' "
    "--answer ' Mary' --wrong ' John'"
)


def pairs_of(name: str, options: QuestionOptions) -> list[Pair]:
    """The pairs that are asked: those of the options, of the file, or those that come with the model."""
    from conewise.prompts.pairs import Pair, read_pairs

    answers, wrong = tuple(options.answer or ()), tuple(options.wrong or ())
    written = {
        "--clean": options.clean,
        "--corrupted": options.corrupted,
        "--answer": answers,
        "--wrong": wrong,
    }
    given = [option for option, value in written.items() if value]
    if options.prompts is not None:
        if given:
            raise CommandError(f"--prompts and {given[0]} both say what is asked; leave one of them out.")
        return read_pairs(options.prompts)
    if not given and name == "tiny":
        from conewise.models.tiny import PROMPTS

        return read_pairs(PROMPTS)
    missing = [option for option in _needed(options) if not written[option]]
    if missing:
        what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise CommandError(
            f"{what if given else 'no prompts'}. Give a pair of prompts with its answers, or a file of "
            f"them with --prompts FILE. For one:\n  {EXAMPLE}"
        )
    assert options.clean is not None
    return [Pair(options.clean, options.corrupted or options.clean, answers, wrong, "the options")]


def _needed(options: QuestionOptions) -> list[str]:
    reads_both = options.patch is Patch.SOURCE or options.direction is Direction.DENOISE
    needed = ["--clean", "--corrupted"] if reads_both else ["--clean"]
    needed += ["--answer"] if options.metric is not Metric.KL else []
    return needed + (["--wrong"] if options.metric is Metric.LOGIT_DIFF else [])


def ask(model: Named, options: QuestionOptions, seed: int, tell: Teller) -> tuple[Loaded, Question]:
    """Load the model, read the prompts in its tokens, and make the question."""
    pairs = pairs_of(model.name, options)
    loaded = model.load(tell)
    from conewise.prompts.prompts import asked
    from conewise.prompts.questions import Question, usual_direction

    prompts = asked(
        pairs,
        loaded.tokenizer,
        batch_size=options.batch_size,
        as_written=options.as_written,
        progress=tell.counting("prompts read"),
    )
    for note in prompts.notes:
        tell.warn(note)
    prompts.expect_answers(options.metric.word)
    if options.patch is Patch.SOURCE and prompts.clean == prompts.corrupted:
        raise PromptError(
            "clean and corrupted have the same tokens in every pair, so patching one into the other "
            "changes nothing."
        )
    # Two prompts show what many would: a capture computes its example.
    example = [prompts.clean[number] for number in prompts.groups[0][:2]]
    graph = captured(loaded, example, tell, reads_last=True)
    return loaded, Question(
        graph,
        prompts,
        selected(options.sites, options.pos, graph),
        options.direction.value if options.direction else usual_direction(options.patch.value),
        options.patch.value,
        options.metric.word,
        options.noise_scale,
        seed,
        "tf32" if options.tf32 else None,
    )


def told_question(loaded: Loaded, question: Question) -> dict[str, Any]:
    """What is asked, as the JSON of `plan` and `sweep` says it."""
    from conewise.prompts.prompts import METRICS

    return {
        "model": told_model(loaded, question.model),
        "question": {
            "direction": question.direction,
            "base": question.base,
            "source": question.source,
            "patch": question.patch,
            "metric": question.metric,
            "metric_in_words": METRICS[question.metric],
            "prompts": len(question.asked.pairs),
            "lengths": sorted(set(question.asked.lengths)),
            "batches": len(question.asked.groups),
            "seed": question.seed,
        },
        "notes": list(question.asked.notes),
    }


def show_question(console: Console, loaded: Loaded, question: Question) -> None:
    """What is asked, for people: the first pair, what is changed, what is read."""
    from rich.markup import escape

    from conewise.prompts.prompts import METRICS
    from conewise.prompts.tokenizing import told_tokens

    pair, count = question.asked.pairs[0], len(question.asked.pairs)
    lengths = sorted(set(question.asked.lengths))
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
        name: ", ".join(map(repr, told_tokens(question.asked.tokenizer, getattr(question.asked, name)[0])))
        for name in ("answers", "wrong_answers")
    }
    if answers["answers"]:
        wrong = f", not {answers['wrong_answers']}" if answers["wrong_answers"] else ""
        console.print(f"  {'answer':<18} {escape(answers['answers'] + wrong)}")
    ways = {"denoise": "denoising", "noise": "noising"}
    way = ways[question.direction] if question.source else f"ablation in the {question.base} run"
    put = {
        "source": f"the {question.source} run's values are put into the {question.base} run",
        "zero": "sites are set to zero",
        "mean": "sites are set to their mean over prompts and positions",
        "noise": f"Gaussian noise of standard deviation {question.scale:g} is added to sites",
    }[question.patch]
    console.print(f"  {way}: {put}, one site at a time")
    console.print(f"  metric: {METRICS[question.metric]}, at the last position\n")

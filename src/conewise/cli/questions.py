"""From options to a question that can be planned and run, and what is told of it before it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conewise.cli.failing import CommandError
from conewise.cli.loading import Named, captured, told_model
from conewise.cli.options import Direction, Metric, Patch
from conewise.cli.selecting import selected
from conewise.cli.showing import Teller
from conewise.errors import PromptError

if TYPE_CHECKING:
    from rich.console import Console

    from conewise.models.load import Loaded
    from conewise.prompts.pairs import Pair
    from conewise.prompts.questions import Question

DEFAULT_SITES = "z,mlp_out"
EXAMPLE = (
    "conewise sweep smollm2-135m --clean 'When Mary and John went to the store, John gave a drink to' "
    "--corrupted 'When Mary and John went to the store, Mary gave a drink to' "
    "--answer ' Mary' --wrong ' John'"
)


@dataclass(frozen=True)
class Wanted:
    """The options of `sweep` and `plan` that say what is asked."""

    model: Named
    clean: str | None
    corrupted: str | None
    answers: tuple[str, ...]
    wrong: tuple[str, ...]
    prompts: Path | None
    as_written: bool
    batch_size: int | None
    sites: str
    pos: str | None
    patch: Patch
    noise_scale: float
    direction: Direction | None
    metric: Metric
    seed: int
    tf32: bool

    def pairs(self) -> list[Pair]:
        """The pairs that are asked: those of the options, of the file, or those that come with the model."""
        from conewise.prompts.pairs import Pair, read_pairs

        written = {
            "--clean": self.clean,
            "--corrupted": self.corrupted,
            "--answer": self.answers,
            "--wrong": self.wrong,
        }
        given = [option for option, value in written.items() if value]
        if self.prompts is not None:
            if given:
                raise CommandError(f"--prompts and {given[0]} both say what is asked; leave one of them out.")
            return read_pairs(self.prompts)
        if not given and self.model.name == "tiny":
            from conewise.models.tiny import PROMPTS

            return read_pairs(PROMPTS)
        missing = [option for option in self._needed() if not written[option]]
        if missing:
            what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            raise CommandError(
                f"{what if given else 'no prompts'}. Give a pair of prompts with its answers, or a file of "
                f"them with --prompts FILE. For one:\n  {EXAMPLE}"
            )
        assert self.clean is not None
        return [Pair(self.clean, self.corrupted or self.clean, self.answers, self.wrong, "the options")]

    def _needed(self) -> list[str]:
        needed = ["--clean"]
        needed += ["--corrupted"] if self.patch is Patch.SOURCE or self.direction is Direction.DENOISE else []
        needed += ["--answer"] if self.metric is not Metric.KL else []
        return needed + (["--wrong"] if self.metric is Metric.LOGIT_DIFF else [])

    def ask(self, tell: Teller) -> tuple[Loaded, Question]:
        """Load the model, read the prompts in its tokens, and make the question."""
        pairs = self.pairs()
        loaded = self.model.load(tell)
        from conewise.prompts.prompts import asked
        from conewise.prompts.questions import Question, usual_direction

        prompts = asked(
            pairs,
            loaded.tokenizer,
            batch_size=self.batch_size,
            as_written=self.as_written,
            progress=tell.counting("prompts read"),
        )
        for note in prompts.notes:
            tell.warn(note)
        prompts.expect_answers(self.metric.word)
        if self.patch is Patch.SOURCE and prompts.clean == prompts.corrupted:
            raise PromptError(
                "clean and corrupted have the same tokens in every pair, so patching one into the other "
                "changes nothing."
            )
        # Two prompts show what many would: a capture computes its example.
        model = captured(
            loaded, [prompts.clean[number] for number in prompts.groups[0][:2]], tell, reads_last=True
        )
        direction = self.direction.value if self.direction else usual_direction(self.patch.value)
        return loaded, Question(
            model,
            prompts,
            selected(self.sites, self.pos, model),
            direction,
            self.patch.value,
            self.metric.word,
            self.noise_scale,
            self.seed,
            "tf32" if self.tf32 else None,
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

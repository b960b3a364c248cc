"""`conewise task`: prompts of one of the field's tasks, well-formed for a model's tokenizer."""

from __future__ import annotations

from typing import Annotated

import typer

from conewise.cli import options as opt
from conewise.cli.options import LoadOptions, OutputOptions, subcommand
from conewise.cli.output import Status, print_json
from conewise.cli.questions import ModelName

HELP = """Print prompts of a task as JSON, as the other commands read them with --prompts.

A row has clean, corrupted, answers, wrong_answers and template.

Tasks: ioi, greater_than, gendered_pronoun, country_capital, arithmetic, mcqa, subject_verb. Every row is
well-formed for the model's tokenizer: both prompts have equally many tokens, and an answer is one token.
--split train and --split test share no template.

\b
Examples:
  conewise task ioi tiny --n 20
  conewise task ioi smollm2-135m --n 100 > pairs.json
  conewise task greater_than ./my-model --split test
"""


@subcommand("task", HELP, "Print prompts of one of the field's tasks.")
def task(
    name: Annotated[str, typer.Argument(metavar="TASK", help="The task, for one: ioi.")],
    model: opt.Model,
    n: Annotated[int, typer.Option("--n", metavar="N", help="How many rows.")] = 100,
    split: Annotated[
        str, typer.Option("--split", metavar="SPLIT", help="all, train or test, by template.")
    ] = "all",
    seed: opt.Seed = 0,
    *,
    output: OutputOptions,
    loading: LoadOptions,
) -> None:
    """Print the rows of a task; see `HELP`."""
    loaded = ModelName(model, loading).load(Status(output.quiet))
    from conewise.text.tasks import make

    rows = make(name.replace("-", "_"), loaded, n, seed=seed, split=split)
    print_json("task", {"task": name, "model": model, "prompts": rows})

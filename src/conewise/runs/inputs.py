"""Texts, tokens and answers as inputs of a model and of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from conewise.errors import InputMismatchError, MetricError, MissingSiteError, PromptError, describe
from conewise.program.records import TOKEN_KEEPING, Input, Program, Ref
from conewise.runs.captured import Captured
from conewise.runs.metrics import Metric, expect_apart, logit_diff, one_number, prob
from conewise.text.tokens import AnswerReader, token_ids


def is_text(given: object) -> TypeGuard[str | Sequence[str]]:
    """True if this is a text, or a list of texts: prompts as people write them."""
    return isinstance(given, str) or (
        isinstance(given, list | tuple) and len(given) > 0 and all(isinstance(one, str) for one in given)
    )


def text_inputs(model: Captured, texts: str | Sequence[str]) -> dict[str, Tensor]:
    """The model's inputs for a text, or for several texts of one length, a row for each.

    Texts are tokenised as the tokenizer does by default, with the special tokens that it adds. A model that
    was captured with an `attention_mask` gets one that hides nothing. Raises PromptError where the model was
    captured without its tokenizer, where a text has no tokens, or where several have different numbers of
    them.
    """
    expect_tokenizer(model)
    name = text_input(model.program)
    tokens = tokens_of(model.tokenizer, texts)
    leaves = {leaf.name: leaf for leaf in model.program.inputs}
    found = {name: tokens.to(leaves[name].device, leaves[name].dtype)}
    if (mask := leaves.get("attention_mask")) is not None:
        found["attention_mask"] = torch.ones(tokens.shape, dtype=mask.dtype, device=mask.device)
    return found


def with_tokens(
    model: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments of a run with tokens where texts were given: `run("...")`, `run(input_ids="...")`."""
    if len(args) == 1 and is_text(args[0]):
        if (named := text_input(model.program)) in kwargs:
            raise InputMismatchError(
                f"a text was given, which is read as {named!r}, and {named!r} as well; leave one of them out."
            )
        return (), {**text_inputs(model, args[0]), **kwargs}
    if len(args) == 1 and isinstance(args[0], Mapping) and reads_encodings(model, args[0]):
        return (), encoded(model, {**args[0], **kwargs})
    kwargs = encoded(model, kwargs)
    if not any(isinstance(value, str | list | tuple) for value in kwargs.values()):
        return args, kwargs
    # A text under another name may be a setting of the module, which is part of the graph.
    leaves = {leaf.name for leaf in model.program.inputs}
    for name, value in kwargs.items():
        if name in leaves and is_text(value):
            if name != (named := text_input(model.program)):
                raise PromptError(f"{name!r} is no input for texts; this model reads them as {named!r}.")
            made = text_inputs(model, value)
            return args, {**made, **kwargs, name: made[name]}
    return args, kwargs


def reads_encodings(model: Captured, given: Mapping[str, Any]) -> bool:
    """True if these are what a tokenizer returns, and the model reads its token ids under that name."""
    return "input_ids" in given and any(leaf.name == "input_ids" for leaf in model.program.inputs)


def encoded(model: Captured, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inputs as a tokenizer returns them: lists of token ids are rows of a tensor.

    An attention mask that hides nothing is left out where the model was captured without one.
    """
    if not reads_encodings(model, given) or is_text(given["input_ids"]):
        return given
    leaves = {leaf.name: leaf for leaf in model.program.inputs}
    found = {
        name: _rows_of(value, leaves[name]) if name in leaves else value for name, value in given.items()
    }
    mask = found.get("attention_mask")
    if mask is not None and "attention_mask" not in leaves and bool(torch.as_tensor(mask).all()):
        del found["attention_mask"]
    return found


def _rows_of(given: Any, leaf: Input) -> Any:
    """A list of numbers, or of lists of them, as a tensor [prompt, position]; anything else as it is."""
    if not isinstance(given, list | tuple):
        return given
    try:
        rows = torch.tensor(given, dtype=leaf.dtype, device=leaf.device)
    except (TypeError, ValueError):
        return given
    return rows[None] if rows.ndim == 1 else rows


def tokens_of(tokenizer: Any, texts: str | Sequence[str]) -> Tensor:
    """Texts as tokens [prompt, position]; see `text_inputs`."""
    rows = [texts] if isinstance(texts, str) else list(texts)
    found = []
    for number, text in enumerate(rows):
        tokens = token_ids(tokenizer, text)
        if not tokens:
            raise PromptError(f"prompt {number + 1}, {text!r}, has no tokens; give a text.")
        found.append(tokens)
    lengths = [len(tokens) for tokens in found]
    if len(set(lengths)) > 1:
        shown = AnswerReader(tokenizer).shown
        other = next(number for number, length in enumerate(lengths) if length != lengths[0])
        raise PromptError(
            f"the prompts have {min(lengths)} to {max(lengths)} tokens, and a batch has one length. Run them "
            "apart, or ask about all of them at once with `model.ask(...)`.\n"
            f"  prompt 1:  {shown(found[0])}\n  prompt {other + 1}:  {shown(found[other])}"
        )
    return torch.tensor(found, dtype=torch.long)


def expect_tokenizer(model: Captured) -> None:
    """Raise PromptError where a model has no tokenizer at hand, and texts cannot be read."""
    if model.tokenizer is None:
        raise PromptError(
            f"{model.name} was captured without its tokenizer, so texts cannot be given to it. Load it with "
            "one: `cw.load(name)`, or capture it with one: `cw.capture(module, ..., tokenizer=tokenizer)`; "
            "or give tokens: `model.run(input_ids=...)`."
        )


def text_input(program: Program) -> str:
    """The input that token ids are given as: `input_ids`, or the only input of integers."""
    integers = [leaf.name for leaf in program.inputs if not leaf.dtype.is_floating_point]
    named = [name for name in integers if name.rpartition(".")[2] == "input_ids"]
    found = named or integers
    if len(found) != 1 or "." in found[0]:
        raise PromptError(
            f"{program.module_name} has no one input that texts could be given as: its inputs are "
            f"{', '.join(leaf.name for leaf in program.inputs)}. Give them as tensors."
        )
    return found[0]


def inputs_like(model: Captured, given: Any, what: str = "inputs") -> Mapping[str, Any]:
    """Inputs that were given as a mapping or as texts. Raises PromptError for anything else."""
    if is_text(given):
        return text_inputs(model, given)
    if not isinstance(given, Mapping):
        raise PromptError(
            f"{what} are a text, a list of texts, or the model's inputs as for `model.run` "
            f"({{'input_ids': ...}}), and {describe(given)} is none of them."
        )
    return given


@dataclass(frozen=True, slots=True)
class Embedding:
    """The node that holds the embeddings of an input's tokens, and the table that they come from."""

    node: str
    input: str
    table: Tensor

    @property
    def deviation(self) -> float:
        """The standard deviation of the table's numbers."""
        return float(self.table.detach().float().std())


def find_embedding(program: Program) -> Embedding:
    """The first look-up of the token ids in a table of embeddings.

    Token ids are the input named `input_ids`, or else the first input of integers. Raises
    MissingSiteError where they are not looked up in a table.
    """
    integers = [leaf.name for leaf in program.inputs if not leaf.dtype.is_floating_point]
    named = [name for name in integers if name.rpartition(".")[2] == "input_ids"]
    tables = program.source_values
    for tokens in (named or integers)[:1]:
        ids = {tokens}
        for record in program.records:
            first, second = (*record.args, None, None)[:2]
            if record.op == "embedding" and isinstance(first, Ref) and first.name in tables:
                if isinstance(second, Ref) and second.name in ids:
                    return Embedding(record.name, tokens, tables[first.name])
            elif record.op in TOKEN_KEEPING and isinstance(first, Ref) and first.name in ids:
                ids.add(record.name)
    raise MissingSiteError(
        f"no embedding of tokens in {program.module_name}: its inputs are "
        f"{', '.join(leaf.name for leaf in program.inputs)}, and no token ids among them are looked up in a "
        "table. Make the corrupted run yourself: patch a fork of the clean one, and sweep with that as base."
    )


Tokens = Sequence[Sequence[int]]


def token_rows(rows: Tokens, device: object = None) -> Tensor:
    """Tokens [prompt, position] as a model takes them. All rows have one length."""
    return torch.tensor([list(row) for row in rows], dtype=torch.long, device=device)  # type: ignore[arg-type]


def answer_diff(answers: Tokens, wrong: Tokens, *, name: str = "logit_diff") -> Metric:
    """The mean logit of each prompt's answers less that of its wrong answers, at the last position.

    With one answer and one wrong answer for each prompt this is `logit_diff`. A token that is given twice is
    one answer; one that is on both sides raises MetricError.
    """
    answers, wrong = _sets(answers), _sets(wrong)
    given = {"answers": _rows(answers, "answers"), "wrong answers": _rows(wrong, "wrong answers")}
    prompts = one_number(given)
    expect_apart(answers, wrong)
    if all(len(tokens) == 1 for tokens in (*answers, *wrong)):
        return logit_diff([one for (one,) in answers], [one for (one,) in wrong], name=name)

    def compute(logits: Tensor) -> Tensor:
        return _mean(logits, answers) - _mean(logits, wrong)

    def among(columns: Mapping[int, int]) -> Metric:
        return answer_diff(_mapped(answers, columns), _mapped(wrong, columns), name=name)

    def of_prompts(numbers: Sequence[int]) -> Metric:
        own, others = ([rows[number] for number in numbers] for rows in (answers, wrong))
        return answer_diff(own, others, name=name)

    linear = tuple(
        tuple((token, sign / len(row)) for row, sign in ((right, 1.0), (other, -1.0)) for token in row)
        for right, other in zip(answers, wrong, strict=True)
    )
    return Metric(
        name,
        compute,
        described=("logit_diff", [list(row) for row in answers], [list(row) for row in wrong]),
        tokens=tuple(token for row in (*answers, *wrong) for token in row),
        among=among,
        prompts=prompts,
        of_prompts=of_prompts,
        linear=linear,
    )


def answer_prob(answers: Tokens, *, name: str = "prob") -> Metric:
    """The probability that one of each prompt's answers comes next.

    With one answer for each prompt this is `prob`. A token that is given twice is one answer.
    """
    answers = _sets(answers)
    prompts = _rows(answers, "answers")
    if all(len(tokens) == 1 for tokens in answers):
        return prob([one for (one,) in answers], name=name)

    def compute(logits: Tensor) -> Tensor:
        index, counts = _index(answers, logits)
        picked = logits.float().log_softmax(-1).gather(-1, index).exp()
        return torch.where(counts, picked, 0.0).sum(-1)

    return Metric(
        name,
        compute,
        described=("prob", [list(row) for row in answers]),
        copies=1,
        prompts=prompts,
        of_prompts=lambda numbers: answer_prob([answers[number] for number in numbers], name=name),
    )


def _sets(tokens: Tokens) -> list[list[int]]:
    """Each prompt's tokens, each once."""
    return [list(dict.fromkeys(row)) for row in tokens]


def _rows(tokens: Tokens, what: str) -> int:
    """For how many prompts there are tokens, each at least one. Raises MetricError."""
    if not len(tokens) or not all(len(row) for row in tokens):
        raise MetricError(
            f"{what} are a list of tokens for each prompt, each of at least one, and these are {tokens!r}."
        )
    return len(tokens)


def _mean(logits: Tensor, tokens: Tokens) -> Tensor:
    """The mean logit of each prompt's tokens: [world, prompt]."""
    index, counts = _index(tokens, logits)
    picked = logits.gather(-1, index).float()
    return torch.where(counts, picked, 0.0).sum(-1) / counts.sum(-1)


def _index(tokens: Tokens, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens as an index [world, prompt, answer] into logits, and which of them count [prompt, answer]."""
    if len(tokens) != logits.shape[1]:
        raise MetricError(f"answers for {len(tokens)} prompts, and this run has {logits.shape[1]}.")
    most = max(map(len, tokens))
    rows = torch.tensor([[*row, *[row[0]] * (most - len(row))] for row in tokens], device=logits.device)
    counts = torch.tensor(
        [[place < len(row) for place in range(most)] for row in tokens], device=logits.device
    )
    return rows.expand(logits.shape[0], -1, -1), counts


def _mapped(tokens: Tokens, columns: Mapping[int, int]) -> list[list[int]]:
    return [[columns[token] for token in row] for row in tokens]

"""Texts, tokens and answers as inputs of a model and of its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from conewise.errors import InputMismatchError, MissingSiteError, PromptError, describe
from conewise.program.records import TOKEN_KEEPING, Input, Program, Ref
from conewise.runs.captured import Captured
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
    return token_inputs(model, tokens_of(model.tokenizer, texts), text_input(model.program))


def token_inputs(model: Captured, tokens: Tensor, name: str) -> dict[str, Tensor]:
    """The model's inputs for tokens [prompt, position], and a mask that hides nothing where it takes one."""
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


def token_rows(rows: Sequence[Sequence[int]], device: object = None) -> Tensor:
    """Tokens [prompt, position] as a model takes them. All rows have one length."""
    return torch.tensor([list(row) for row in rows], dtype=torch.long, device=device)  # type: ignore[arg-type]

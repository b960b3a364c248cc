"""Metrics: numbers read off a model's outputs, for a stack of worlds at once.

Each says which output and which positions it reads; one that reads the last position alone does not pay
for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.errors import MetricError, describe
from conewise.identity.digests import inputs_digest
from conewise.identity.keyed import Keyed, expect_key
from conewise.program.streaming import described_fields, field_names, output_names
from conewise.program.tensors import brought
from conewise.structure.axes.outputs import Outputs

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A number for each prompt of each world.

    `compute` takes the output `output` as [world, prompt, ...] (only the last position, as
    [world, prompt, vocabulary], where `last` is true) and returns [world, prompt]. With `whole`, it takes
    instead all outputs of one world, in the module's own structure, and returns [prompt] or one number.

    A metric that reads the logits of a few `tokens` only says so, and `among(columns)` is the same metric
    for logits of which column `columns[token]` is that of a token: the others need not be computed.
    `linear` says how it is a sum of logits: (token, coefficient) of each, one row for all prompts or one for
    each; empty where it is none. `copies` says how many copies of what it reads it makes, for the plan's
    memory. `prompts` says for how many prompts it has answers, targets or a reference; None where any number
    will do. Where it is a number, `of_prompts(numbers)` is the same metric for some of these prompts, by
    number, in that order.
    """

    name: str
    compute: Callable[..., Any]
    output: str = "logits"
    last: bool = True
    whole: bool = False
    described: tuple[Any, ...] = ()
    tokens: tuple[int, ...] = ()
    among: Callable[[Mapping[int, int]], Metric] | None = None
    copies: int = 0
    prompts: int | None = None
    linear: tuple[tuple[tuple[int, float], ...], ...] = ()
    of_prompts: Callable[[Sequence[int]], Metric] | None = None


Token = int | Sequence[int] | Tensor


def logit_diff(answer: Token, wrong: Token, *, name: str = "logit_diff") -> Metric:
    """logit(answer) − logit(wrong) at the last position; one token for all prompts, or one for each."""
    answer, wrong = _tokens(answer, "answer"), _tokens(wrong, "wrong")

    def compute(logits: Tensor) -> Tensor:
        return _picked(logits, answer, "answer") - _picked(logits, wrong, "wrong")

    def among(columns: Mapping[int, int]) -> Metric:
        return logit_diff([columns[t] for t in answer], [columns[t] for t in wrong], name=name)

    def of_prompts(numbers: Sequence[int]) -> Metric:
        return logit_diff(_some(answer, numbers), _some(wrong, numbers), name=name)

    prompts = one_number({"answer tokens": _prompts(answer), "wrong tokens": _prompts(wrong)})
    count = max(len(answer), len(wrong))
    pairs = zip(_repeated(answer, count), _repeated(wrong, count), strict=True)
    return Metric(
        name,
        compute,
        described=("logit_diff", answer, wrong),
        tokens=(*answer, *wrong),
        among=among,
        prompts=prompts,
        linear=tuple(((right, 1.0), (other, -1.0)) for right, other in pairs),
        of_prompts=of_prompts,
    )


def logit(token: Token, *, name: str = "logit") -> Metric:
    """The logit of a token at the last position."""
    tokens = _tokens(token, "token")

    def compute(logits: Tensor) -> Tensor:
        return _picked(logits, tokens, "token")

    def among(columns: Mapping[int, int]) -> Metric:
        return logit([columns[t] for t in tokens], name=name)

    return Metric(
        name,
        compute,
        described=("logit", tokens),
        tokens=tuple(tokens),
        among=among,
        prompts=_prompts(tokens),
        linear=tuple(((one, 1.0),) for one in tokens),
        of_prompts=lambda numbers: logit(_some(tokens, numbers), name=name),
    )


def prob(token: Token, *, name: str = "prob") -> Metric:
    """The probability of a token at the last position."""
    tokens = _tokens(token, "token")

    def compute(logits: Tensor) -> Tensor:
        return _picked(_wide(logits).log_softmax(-1), tokens, "token").exp()

    return Metric(
        name,
        compute,
        described=("prob", tokens),
        copies=1,
        prompts=_prompts(tokens),
        of_prompts=lambda numbers: prob(_some(tokens, numbers), name=name),
    )


def last_position(stack: Tensor) -> Tensor:
    """[world, prompt, vocabulary] at the last position of a stack, where it has positions."""
    return stack.select(2, stack.shape[2] - 1) if stack.ndim > 3 else stack


def kl_to(run: Any, *, name: str = "kl") -> Metric:
    """KL(p_run ‖ p) of the next-token distribution at the last position, `run` the reference."""
    return _kl_to(_wide(last_logits(run)).log_softmax(-1), name)


def _kl_to(reference: Tensor, name: str) -> Metric:
    """KL divergence from distributions [prompt, vocabulary], given as logarithms."""

    def compute(logits: Tensor) -> Tensor:
        if logits.shape[1] != reference.shape[0]:
            raise MetricError(
                f"kl_to: the reference run has {reference.shape[0]} prompts, and this run {logits.shape[1]}."
            )
        ours, theirs = _wide(logits).log_softmax(-1), reference.to(logits.device)
        # A token of no probability adds nothing, whatever the other says of it.
        apart = torch.where(theirs.isneginf(), 0.0, theirs.exp() * (theirs - ours))
        found: Tensor = apart.sum(-1)
        return found

    return Metric(
        name,
        compute,
        described=("kl_to", inputs_digest({"": reference})[:16]),
        copies=4,
        prompts=reference.shape[0],
        of_prompts=lambda numbers: _kl_to(reference[list(numbers)], name),
    )


def last_logits(run: Any) -> Tensor:
    """The logits of a run at the last position: [prompt, vocabulary]."""
    return last_position(_logits_of(run))[0]


def _logits_of(run: Any) -> Tensor:
    """The logits of a run as a stack of one world."""
    program = run.model.program
    names = field_names(program, "logits") or output_names(program)
    if len(names) != 1:
        raise MetricError(
            f"the logits are to be read, and the run's outputs are {described_fields(program)}."
        )
    outputs = Outputs(program)
    (value,) = run.demand(names)
    return outputs.arranged(names[0], value, 1, outputs.prompts(run.inputs))


def cross_entropy(targets: Tensor, *, name: str = "cross_entropy") -> Metric:
    """The mean cross-entropy of `targets` [prompt, pos] over their positions; −100 is left out.

    Position t of the logits is compared with `targets[:, t]`: shift them yourself.
    """
    if getattr(targets, "ndim", None) != 2:
        raise MetricError(f"cross_entropy: targets are tokens [prompt, pos], and this is {_shape(targets)}.")

    def compute(logits: Tensor) -> Tensor:
        if logits.shape[1:3] != targets.shape:
            raise MetricError(
                f"cross_entropy: targets have shape {tuple(targets.shape)}, the logits have "
                f"{tuple(logits.shape[1:3])} (prompts, positions)."
            )
        worlds = logits.shape[0]
        wanted = targets.to(logits.device).expand(worlds, *targets.shape)
        losses = torch.nn.functional.cross_entropy(
            _wide(logits).flatten(0, 2), wanted.flatten(), reduction="none", ignore_index=-100
        ).view(wanted.shape)
        counted = (wanted != -100).sum(-1).clamp(min=1)
        return losses.sum(-1) / counted

    return Metric(
        name,
        compute,
        last=False,
        described=("cross_entropy", inputs_digest({"": targets})[:16]),
        copies=1,
        prompts=targets.shape[0],
        of_prompts=lambda numbers: cross_entropy(targets[list(numbers)], name=name),
    )


def metric(function: Callable[[Any], Any], *, key: str, name: str | None = None) -> Metric:
    """A function of the module's outputs as a metric, under a key of its own: see `conewise.intervention`."""
    if not callable(function):
        raise MetricError(f"a metric is a function of the module's outputs, not {describe(function)}.")
    keyed = Keyed(function, expect_key(key, MetricError))
    return Metric(name or keyed.__name__, keyed, last=False, whole=True)


def as_metric(given: Any) -> Metric:
    """A metric as it is, or a plain function of the module's outputs as a metric."""
    if isinstance(given, Metric):
        return given
    if callable(given):
        name = getattr(given, "__name__", "metric")
        return Metric("metric" if name == "<lambda>" else name, given, last=False, whole=True)
    raise MetricError(
        f"a metric is `logit_diff(...)`, `prob(...)`, ... or a function of the module's outputs, and "
        f"{given!r} is neither."
    )


def expect_prompts(metric: Metric, prompts: int, where: str, total: int | None = None) -> None:
    """Raise MetricError where a metric has answers for another number of prompts than a run has.

    0 is a number of prompts that is not known. `total`: how many all runs have together.
    """
    if prompts and metric.prompts not in {None, prompts}:
        together = f" of the {total} in all batches" if total not in {None, prompts} else ""
        raise MetricError(
            f"the metric {metric.name!r} is made for {metric.prompts} prompts, and {where} has {prompts}. "
            f"Give one answer for all prompts, or one for each{together}."
        )


def one_number(found: Mapping[str, int | None]) -> int | None:
    """The number of prompts that all parts of a metric are made for; None is any. Raises MetricError."""
    known = {number for number in found.values() if number is not None}
    if len(known) > 1:
        counts = " and ".join(f"{number} {what}" for what, number in found.items())
        raise MetricError(f"{counts}; give one for all prompts, or one for each.")
    return next(iter(known), None)


def measured(metric: Metric, stack: Tensor) -> Tensor:
    """The metric as [world, prompt] in float64, of a stack [world, prompt, position, ...] of its output.

    Raises MetricError when it returns something else, or NaN.
    """
    return fetched(metric, applied(metric, stack))


def applied(metric: Metric, stack: Tensor) -> Tensor:
    """The metric of a stack, where it was computed: not yet looked at, so that no device is waited for."""
    worlds, batch = stack.shape[:2]
    if metric.last:
        stack = last_position(stack)
    found = metric.compute(stack)
    if not isinstance(found, torch.Tensor) or found.shape != (worlds, batch):
        raise MetricError(
            f"the metric {metric.name!r} returned {_shape(found)}; expected one number for each prompt of "
            f"each world: shape ({worlds}, {batch})."
        )
    return found


def measured_whole(metric: Metric, outputs: Any, batch: int) -> Tensor:
    """A function of all outputs of one world, as [1, prompt] in float64; see `applied_whole`."""
    return fetched(metric, applied_whole(metric, outputs, batch))


def applied_whole(metric: Metric, outputs: Any, batch: int) -> Tensor:
    """A function of all outputs of one world, as [1, prompt]; one number stands for all. Not yet looked at.

    A batch of 0 prompts is one of which it is not known how many it has: then the function says.
    """
    found = metric.compute(outputs)
    if isinstance(found, int | float):
        found = torch.tensor(found)
    if isinstance(found, torch.Tensor) and found.ndim == 0:
        found = found.expand(batch or 1)
    if isinstance(found, torch.Tensor) and found.ndim == 1 and not batch:
        batch = len(found)
    if not isinstance(found, torch.Tensor) or found.shape != (batch,):
        raise MetricError(
            f"the metric {metric.name!r} returned {_shape(found)}; expected one number, or one for each of "
            f"the {batch} prompts: shape ({batch},)."
        )
    return found[None]


def fetched(metric: Metric, found: Tensor) -> Tensor:
    """Numbers of a metric on the CPU, in float64. Raises MetricError where one is NaN."""
    numbers = found.detach().to("cpu", torch.float64, copy=True)  # the function may write to its own again
    if torch.isnan(numbers).any():
        raise MetricError(
            f"the metric {metric.name!r} is NaN in {int(numbers.isnan().sum())} of {numbers.numel()} cases. "
            "Look for NaN in the source's values, or for a division by zero in the metric."
        )
    return numbers


def _wide(logits: Tensor) -> Tensor:
    """Logits in their own precision, in single where they have less."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _picked(logits: Tensor, token: Token, what: str) -> Tensor:
    """Logits [world, prompt, vocabulary] at one token for all prompts, or at one for each."""
    tokens = torch.as_tensor(token).reshape(-1)
    if logits.ndim != 3:
        raise MetricError(
            f"{what} tokens are picked from logits [world, prompt, vocabulary], and these have shape "
            f"{tuple(logits.shape)}. Give a function of the module's outputs as the metric."
        )
    if len(tokens) not in {1, logits.shape[1]}:
        raise MetricError(
            f"{len(tokens)} {what} tokens for {logits.shape[1]} prompts; give one for all, or one for each."
        )
    unknown = [token for token in tokens.tolist() if not 0 <= token < logits.shape[-1]]
    if unknown:
        raise MetricError(f"{what} token {unknown[0]} is not in the vocabulary of {logits.shape[-1]}.")
    if len(tokens) == 1:
        return logits.select(-1, int(tokens[0]))
    index = (
        brought(tokens, logits.device).expand(logits.shape[1])[None, :, None].expand(logits.shape[0], -1, 1)
    )
    return logits.gather(-1, index)[..., 0]


def _tokens(token: Token, what: str) -> list[int]:
    """Tokens as plain numbers: one for all prompts, or one for each. Raises MetricError for what are none."""
    try:
        found = torch.as_tensor(token)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if found is not None and not found.numel():
        raise MetricError(f"{what}: no tokens; give one for all prompts, or one for each.")
    if found is None or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise MetricError(
            f"{what}: a token is its number in the vocabulary, and {describe(token)} is none. Look it up "
            "with `tokenizer.convert_tokens_to_ids(...)`."
        )
    numbers: list[int] = found.reshape(-1).tolist()
    return numbers


def _prompts(tokens: Sequence[int]) -> int | None:
    """For how many prompts there are tokens: one is for any number of them."""
    return len(tokens) if len(tokens) > 1 else None


def _repeated(tokens: list[int], count: int) -> list[int]:
    """Tokens for so many prompts, where there is one for all or one for each."""
    return tokens * count if len(tokens) == 1 else tokens


def _some(tokens: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """The tokens of some prompts; one for all stays one for all."""
    return list(tokens) if len(tokens) == 1 else [tokens[number] for number in numbers]


def _shape(found: Any) -> str:
    shape = getattr(found, "shape", None)
    return f"a {type(found).__name__}" if shape is None else f"shape {tuple(shape)}"

"""Metrics in words: of tokens, of all logits, of sites, and of functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from conewise.anatomy.padding import aligned
from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import Place, PlaceLike, Places, as_place, expect_few
from conewise.arguments import Count, checked, has_items
from conewise.errors import MetricError, PromptError, describe
from conewise.jobs.digests import inputs_digest
from conewise.jobs.identity import Keyed, expect_key
from conewise.program.tensors import brought, copy_of
from conewise.program.walk import described_fields, field_names, output_names
from conewise.runs.metrics import (
    Metric,
    Reference,
    T,
    Vector,
    as_numbers,
    at_run,
    bound,
    left_over,
    one_number,
    positioned,
    shape_of,
)
from conewise.text.tokens import AnswerReader
from conewise.threads import own_settings

Position = int | Sequence[int] | Tensor | None
Token = int | str | Collection[Any] | Tensor
"""A token, or one for each prompt; or a set of tokens, or a list with several for each prompt."""
Tokens = Sequence[Sequence[int]]
"""The tokens of each prompt, each at least one; one row is for all prompts."""


# -- of tokens -------------------------------------------------------------------------------------


@checked
def logit_diff(
    answer: Token,
    wrong: Token,
    *,
    over: Literal["mean", "logsumexp"] = "mean",
    pos: Position = None,
    name: str = "logit_diff",
) -> Metric:
    """logit(answer) − logit(wrong) at the last position; one token for all prompts, or one for each.

    Tokens are ids, or texts of one token (" Mary"), which the model's tokenizer reads. Several answers are
    given as a set, `{5, 7}`, or as a list for each prompt, `[[5, 7], [3]]`. Their logits are averaged; with
    `over="logsumexp"` they are combined into the logit of any of them.

    The last position is the last position that is not padding, by the attention mask. `pos` gives another
    position, for all prompts or one for each. It counts columns of the batch from 0, padding included; −1 is
    each prompt's last position. If attention is not causal, `pos` is required.
    """
    return _of_tokens("logit_diff", (answer, wrong), name, pos, over)


@checked
def logit(token: Token, *, pos: Position = None, name: str = "logit") -> Metric:
    """The logit of a token at the last position, or at `pos`: see `logit_diff`."""
    return _of_tokens("logit", (token,), name, pos)


@checked
def prob(token: Token, *, pos: Position = None, name: str = "prob") -> Metric:
    """The probability of a token at the last position, or at `pos`: see `logit_diff`.

    For a set of tokens, this is the probability of any of them.
    """
    return _of_tokens("prob", (token,), name, pos)


@checked
def prob_diff(answer: Token, wrong: Token, *, pos: Position = None, name: str = "prob_diff") -> Metric:
    """The probability of the answer minus that of the wrong answer; several of each as in `logit_diff`."""
    return _of_tokens("prob_diff", (answer, wrong), name, pos)


def _of_tokens(kind: str, given: Sequence[Token], name: str, pos: Position, over: str = "mean") -> Metric:
    """A metric of one kind; of tokens as people write them: an answer, and perhaps a wrong one."""
    if any(map(_has_texts, given)):

        def of_text(tokenizer: Any) -> Metric:
            reader = AnswerReader(tokenizer)
            read = [
                _numbered(one, lambda text: reader.token(text, "", f"the metric {name!r}")) for one in given
            ]
            return _of_tokens(kind, read, name, pos, over)

        return _awaiting(name, given, of_text)
    labels = ("answer", "wrong") if len(given) > 1 else ("token",)
    if kind == "logit":
        given = [_tokens(given[0], "token")]  # of one token: there is no logit of any of several
    sides = [_as_sets(tokens, label) for tokens, label in zip(given, labels, strict=True)]
    return read_at(_of_rows(kind, sides, labels, name, over), pos)


def _of_rows(kind: str, sides: Sequence[Tokens], labels: Sequence[str], name: str, over: str) -> Metric:
    """A metric of each prompt's tokens: those of the first side, less those of the second where there is one.

    A logit of several is their mean, or the logit of any of them; a probability is that of any of them.
    """
    is_logit, is_single = kind.startswith("logit"), all(len(row) == 1 for side in sides for row in side)
    plural = (
        f"{label} tokens" if is_single else {"wrong": "wrong answers"}.get(label, "answers")
        for label in labels
    )
    prompts = one_number({what: _prompts(side) for what, side in zip(plural, sides, strict=True)})
    every = [list(side) * (prompts or 1) if len(side) == 1 else side for side in sides]
    if len(sides) > 1:
        expect_apart(*every)

    def compute(logits: Tensor) -> Tensor:
        known = logits if is_logit else _wide(logits).log_softmax(-1)
        found = []
        for side, label in zip(sides, labels, strict=True):
            if is_single:
                picked = _picked(known, [token for (token,) in side], label)
                found.append(picked if is_logit else picked.exp())
                continue
            index, counts = _index(side, known)
            several = _wide(known.gather(-1, index))
            if not is_logit:
                found.append(torch.where(counts, several.exp(), 0.0).sum(-1))
            elif over == "logsumexp":
                found.append(torch.where(counts, several, -math.inf).logsumexp(-1))
            else:
                found.append(torch.where(counts, several, 0.0).sum(-1) / counts.sum(-1))
        return found[0] if len(found) == 1 else found[0] - found[1]

    def among(columns: Mapping[int, int]) -> Metric:
        there = [[[columns[token] for token in row] for row in side] for side in sides]
        return _of_rows(kind, there, labels, name, over)

    def of_prompts(numbers: Sequence[int]) -> Metric:
        return _of_rows(kind, [_some(side, numbers) for side in sides], labels, name, over)

    is_linear = is_logit and (is_single or over == "mean")
    is_flat = is_single and kind != "prob_diff"
    described = [[token for (token,) in side] if is_flat else [list(row) for row in side] for side in sides]
    return Metric(
        name,
        compute,
        described=(kind, *described, *(() if over == "mean" or is_single else (over,))),
        tokens=tuple(token for side in sides for row in side for token in row) if is_logit else (),
        among=among if is_logit else None,
        copies=0 if is_logit else 1,
        prompts=prompts,
        linear=tuple(
            tuple(
                (token, sign / len(row))
                for row, sign in zip(rows, (1.0, -1.0), strict=False)
                for token in row
            )
            for rows in zip(*every, strict=True)
        )
        if is_linear
        else (),
        of_prompts=of_prompts,
    )


@checked
def log_prob(answer: Any, *, name: str = "log_prob") -> Metric:
    """The log probability of an answer of one or several tokens at the end of the prompts.

    `answer` is a list of tokens, [t1, t2, ...], or a text, for all prompts; or a list of these, one for each.
    Prompts have to be run with their answers appended; any padding has to be on the left. The result is the
    sum over the answer's tokens, each conditioned on those before it.
    """
    if _has_texts(answer):

        def of_text(tokenizer: Any) -> Metric:
            texts = [answer] if isinstance(answer, str) else list(answer)
            return log_prob([tokenizer.encode(one, add_special_tokens=False) for one in texts], name=name)

        return _awaiting(name, (answer,), of_text)
    rows = _as_sets(answer, "answer", once=False) if _has_sets(answer) else [_tokens(answer, "answer")]
    longest = max(map(len, rows))

    def compute(logits: Tensor) -> Tensor:
        if logits.ndim != 4 or logits.shape[2] <= longest:
            raise MetricError(
                f"{name!r} reads the logits in front of an answer of {longest} tokens, and the output has "
                f"shape {tuple(logits.shape[1:])}. Run prompts with their answers, and keep all logits."
            )
        if len(rows) not in {1, logits.shape[1]}:
            raise MetricError(f"answers for {len(rows)} prompts, and this run has {logits.shape[1]}.")
        tail = _wide(logits[:, :, -longest - 1 : -1]).log_softmax(-1)
        index = torch.full((len(rows), longest), -1, device=logits.device)
        for number, row in enumerate(rows):
            index[number, longest - len(row) :] = torch.tensor(row, device=logits.device)
        if int(index.max()) >= logits.shape[-1]:
            raise MetricError(f"token {int(index.max())} is not in the vocabulary of {logits.shape[-1]}.")
        wanted = index.expand(logits.shape[0], logits.shape[1], longest)
        picked = tail.gather(-1, wanted.clamp_min(0)[..., None])[..., 0]
        return torch.where(wanted < 0, 0.0, picked).sum(-1)

    def behind(mask: Tensor) -> Metric:
        if not bool(mask[:, -longest - 1 :].all()):
            raise MetricError(f"{name!r} reads the end of each prompt: pad on the left.")
        return made

    made = Metric(
        name,
        compute,
        last=False,
        described=("log_prob", rows),
        copies=2,
        prompts=_prompts(rows),
        of_prompts=lambda numbers: log_prob(_some(rows, numbers), name=name),
        shown=behind,
        ends_in=tuple(map(tuple, rows)),
    )
    return made


def _awaiting(name: str, given: Sequence[Any], of_text: Callable[[Any], Metric]) -> Metric:
    """A metric of texts, which awaits the tokenizer of a model."""

    def compute(_: Tensor) -> Tensor:
        raise MetricError(f"the metric {name!r} is of texts, and is read in a model that has its tokenizer.")

    return Metric(name, compute, described=tuple(given), of_text=of_text)


def _has_texts(given: Any) -> bool:
    return isinstance(given, str) or (
        isinstance(given, list | tuple | set | frozenset) and any(map(_has_texts, given))
    )


def _numbered(given: Any, token: Callable[[str], int]) -> Any:
    """Tokens as they were given, texts among them by their numbers."""
    if isinstance(given, str):
        return token(given)
    if isinstance(given, list | tuple | set | frozenset):
        return type(given)(_numbered(one, token) for one in given)
    return given


def _has_sets(given: Any) -> bool:
    """True if some prompt has several tokens: a set, or a list in a list."""
    return isinstance(given, set | frozenset) or (
        isinstance(given, list | tuple)
        and any(isinstance(one, list | tuple | set | frozenset | range) for one in given)
    )


def _as_sets(given: Any, what: str, *, once: bool = True) -> list[list[int]]:
    """The tokens of each prompt, each `once`; those of one set are for all prompts."""
    if not _has_sets(given):
        return [[one] for one in _tokens(given, what)]
    rows = [given] if isinstance(given, set | frozenset) else given
    found = [_tokens(sorted(row) if isinstance(row, set | frozenset) else row, what) for row in rows]
    return [list(dict.fromkeys(row)) for row in found] if once else found


def _tokens(token: Token, what: str) -> list[int]:
    """Tokens as plain numbers: one for all prompts, or one for each. Raises MetricError for what are none."""
    try:
        with own_settings():
            found = torch.as_tensor(expect_few(token))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if found is not None and not found.numel():
        raise MetricError(f"{what}: no tokens; give one for all prompts, or one for each.")
    if found is None or found.is_meta or found.layout is not torch.strided or not _is_whole(found):
        raise MetricError(
            f"{what}: a token is its number in the vocabulary, and {describe(token)} is none. Look it up "
            'with `tokenizer.encode(" Mary", add_special_tokens=False)`.'
        )
    numbers: list[int] = found.reshape(-1).tolist()
    return numbers


def _is_whole(given: Tensor) -> bool:
    return not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)


def expect_apart(answers: Tokens, wrong: Tokens) -> None:
    """Raise MetricError where a prompt has a token among its answers and among its wrong answers."""
    for number, (own, others) in enumerate(zip(answers, wrong, strict=True)):
        both = sorted(set(own) & set(others))
        if both:
            of = f"prompt {number + 1} has " if len(answers) > 1 else ""
            raise MetricError(
                f"{of}the token {both[0]} as answer and as wrong answer: their difference says nothing. Give "
                "different tokens."
            )


def _picked(logits: Tensor, tokens: Sequence[int], what: str) -> Tensor:
    """Logits [world, prompt, vocabulary] at one token for all prompts, or at one for each."""
    if logits.ndim != 3:
        raise MetricError(
            f"{what} tokens are picked from logits [world, prompt, vocabulary], and these have shape "
            f"{tuple(logits.shape)}. Give a function of the module's outputs as the metric."
        )
    if len(tokens) not in {1, logits.shape[1]}:
        raise MetricError(
            f"{len(tokens)} {what} tokens for {logits.shape[1]} prompts; give one for all, or one for each."
        )
    unknown = [token for token in tokens if not 0 <= token < logits.shape[-1]]
    if unknown:
        which = "the token" if what == "token" else f"{what} token"
        raise MetricError(f"{which} {unknown[0]} is not in the vocabulary of {logits.shape[-1]}.")
    if len(tokens) == 1:
        return logits.select(-1, tokens[0])
    index = brought(torch.tensor(tokens), logits.device)[None, :, None]
    return logits.gather(-1, index.expand(logits.shape[0], -1, 1))[..., 0]


def _index(tokens: Tokens, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens as an index [world, prompt, answer] into logits, and which of them count [prompt, answer]."""
    if len(tokens) not in {1, logits.shape[1]}:
        raise MetricError(f"answers for {len(tokens)} prompts, and this run has {logits.shape[1]}.")
    if (highest := max(map(max, tokens))) >= logits.shape[-1]:
        raise MetricError(f"the token {highest} is not in the vocabulary of {logits.shape[-1]}.")
    most = max(map(len, tokens))
    rows = torch.tensor([[*row, *[row[0]] * (most - len(row))] for row in tokens], device=logits.device)
    counts = torch.tensor([[at < len(row) for at in range(most)] for row in tokens], device=logits.device)
    return rows.expand(*logits.shape[:2], -1), counts


def _wide(logits: Tensor) -> Tensor:
    """Logits in their own precision, in single where they have less."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _prompts(rows: Sequence[object]) -> int | None:
    """For how many prompts there are rows: one is for any number of them."""
    return len(rows) if len(rows) > 1 else None


def _some(rows: Sequence[T], numbers: Sequence[int]) -> list[T]:
    """The rows of some prompts; one for all stays one for all."""
    return list(rows) if len(rows) == 1 else [rows[number] for number in numbers]


def read_at(metric: Metric, pos: Position) -> Metric:
    """A metric at a position that is given, for all prompts or one for each; None leaves it as it is."""
    if pos is None:
        return metric
    try:
        with own_settings():
            given = torch.as_tensor(expect_few(pos))
        at = tuple(int(one) for one in given.reshape(-1).tolist())
    except (TypeError, ValueError, RuntimeError, OverflowError):
        at = ()
    if not at or not _is_whole(given):
        raise MetricError(f"pos is a position, or a list with one for each prompt, not {describe(pos)}.")
    among, of_prompts = metric.among, metric.of_prompts

    def some(numbers: Sequence[int]) -> Metric:
        return read_at(metric if of_prompts is None else of_prompts(numbers), _some(at, numbers))

    return replace(
        metric,
        pos=at,
        prompts=one_number({"answers": metric.prompts, "positions": _prompts(at)}),
        among=None if among is None else lambda columns: read_at(among(columns), at),
        of_prompts=some,
    )


# -- of all logits ---------------------------------------------------------------------------------


@checked
def kl_to(run: Any, *, pos: Position = None, name: str = "kl") -> Metric:
    """KL(p_run ‖ p) of the next-token distributions at the last position, with `run` as the reference.

    Each run is read at its own last position, or both at `pos`: see `logit_diff`.
    """
    logits = last_logits(run, pos)
    with run.checked_once():
        return read_at(_kl_to(_wide(logits).log_softmax(-1), name, Reference(run)), pos)


def _kl_to(reference: Tensor, name: str, made_with: Reference) -> Metric:
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
        of_prompts=lambda numbers: _kl_to(reference[list(numbers)], name, made_with),
        reference=made_with,
    )


def last_logits(run: Any, pos: Position = None) -> Tensor:
    """The logits of a run at the last position that its mask shows, or at `pos`: [prompt, vocabulary]."""
    if not hasattr(run, "demand"):
        raise MetricError(f"the reference is a run, `model.run(...)`, and {describe(run)} is none.")
    program = run.model.program
    names = field_names(program, "logits") or output_names(program)
    if len(names) != 1:
        raise MetricError(
            f"the logits are to be read, and the run's outputs are {described_fields(program)}."
        )
    outputs, found = Outputs(program), Metric("logits", lambda logits: logits)
    read, prompts = at_run(read_at(found, pos), run.model, run.inputs, names[0]), outputs.prompts(run.inputs)
    (value,) = run.demand(names)
    return positioned(read, outputs.arranged(names[0], value, 1, prompts))[0]


@checked
def cross_entropy(
    targets: Tensor | None = None, *, labels: Tensor | None = None, name: str = "cross_entropy"
) -> Metric:
    """The mean cross-entropy of `targets` [prompt, pos] over their positions, excluding those equal to −100.

    Logits at position t are compared with `targets[:, t]`, or with `labels[:, t + 1]` as in Hugging Face
    models: `labels=input_ids` gives the language modelling loss. Positions hidden by the attention mask are
    excluded too. Padding targets, after a prompt's last token, have to be −100.
    """
    if (targets is None) == (labels is None):
        raise MetricError(
            "cross_entropy takes `targets`, shifted already, or `labels`, which are shifted here: give one."
        )
    if labels is not None:
        if labels.ndim != 2 or labels.shape[1] < 2:
            raise MetricError(
                f"cross_entropy: labels are tokens [prompt, pos] of at least two positions, and this is "
                f"{shape_of(labels)}."
            )
        targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    assert targets is not None
    if targets.ndim != 2:
        raise MetricError(
            f"cross_entropy: targets are tokens [prompt, pos], and this is {shape_of(targets)}."
        )
    _tokens(targets, "targets")
    targets = copy_of(targets).long()
    if len(without := (targets == -100).all(-1).nonzero()):
        raise MetricError(
            f"cross_entropy: prompt {int(without[0])} has no target, so its mean is over nothing: all are "
            "-100, or hidden by the attention mask. Leave this prompt out."
        )
    counted = targets[targets != -100]
    lowest, highest = int(counted.min()), int(counted.max())
    first = int((targets != -100).any(0).int().argmax())

    def compute(logits: Tensor) -> Tensor:
        if logits.shape[1:3] != targets.shape:
            raise MetricError(
                f"cross_entropy: targets have shape {tuple(targets.shape)}, the logits have "
                f"{tuple(logits.shape[1:3])} (prompts, positions)."
            )
        worlds, _, _, vocabulary = logits.shape
        if lowest < 0 or highest >= vocabulary:
            unknown = lowest if lowest < 0 else highest
            raise MetricError(f"target token {unknown} is not in the vocabulary of {vocabulary}.")
        wanted = targets.to(logits.device).expand(worlds, *targets.shape)
        losses = torch.nn.functional.cross_entropy(
            _wide(logits).flatten(0, 2), wanted.flatten(), reduction="none", ignore_index=-100
        ).view(wanted.shape)
        return losses.sum(-1) / (wanted != -100).sum(-1)

    return Metric(
        name,
        compute,
        last=False,
        described=("cross_entropy", inputs_digest({"": targets})[:16]),
        copies=1,
        prompts=targets.shape[0],
        of_prompts=lambda numbers: cross_entropy(targets[list(numbers)], name=name),
        rows=targets.shape[1] - first if first else 0,
        ending=lambda count: cross_entropy(targets[:, -count:], name=name),
        shown=lambda mask: cross_entropy(
            targets.masked_fill(~aligned(mask, targets.shape[1]).to(targets.device), -100), name=name
        ),
    )


# -- functions, and sites --------------------------------------------------------------------------


@checked
def metric(
    function: Callable[..., Any],
    *,
    key: str | None = None,
    reads: PlaceLike | Places | Sequence[PlaceLike | Places] = (),
    size: Count | None = None,
    name: str | None = None,
) -> Metric:
    """Make a metric from a function of the module's outputs, and of the values at sites.

    It is called for each world, as `function(outputs, *values)`, with one value for each site in `reads`: a
    tensor [prompt, ...] in the site's own axes, e.g. [prompt, query, key] for one head's pattern. A function
    that takes exactly as many arguments as there are sites is called as `function(*values)`, and the outputs
    are not computed. It returns one number, or one for each prompt, or with `size` a vector for each prompt,
    [prompt, size].

    `key` identifies the function in stored runs, so that they can be resumed: see `conewise.intervention`.
    """
    wanted = function if key is None else Keyed(function, expect_key(key, MetricError))
    called = getattr(function, "__name__", "metric")
    named = name or ("metric" if called == "<lambda>" else called)
    places = _places(reads)
    if not places and size is None:
        return Metric(named, wanted, last=False, whole=True)
    whole = not places or _arguments(function, len(places))

    def compute(*given: Any) -> Any:
        if whole:
            return wanted(*given)
        rows = [as_numbers(named, wanted(*own), given[0].shape[1], size) for own in zip(*given, strict=True)]
        return torch.stack(rows)

    def vector(_: Sequence[Mapping[str, int]]) -> Vector | None:
        return None if size is None else Vector(named, ("entry",), (tuple(range(size)),))

    return Metric(
        named,
        compute,
        last=not whole,
        whole=whole,
        described=("function", wanted, *map(str, places)),
        reads=places,
        vector=vector,
    )


def _arguments(function: Callable[..., Any], places: int) -> bool:
    """True if a function takes the outputs too. Raises MetricError where it takes another number."""
    try:
        taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    if any(one.kind is one.VAR_POSITIONAL for one in taken):
        return True
    ordered = [one for one in taken if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    least = sum(one.default is one.empty for one in ordered)
    if least <= places + 1 <= len(ordered):
        return True
    if least <= places <= len(ordered):
        return False
    raise MetricError(
        f"a metric that reads {places} site{'s' if places > 1 else ''} is a function of the outputs and of "
        f"{places} value{'s' if places > 1 else ''}, or of the latter alone, and "
        f"{getattr(function, '__name__', 'this one')!r} takes {len(ordered)} arguments."
    )


@checked
def read(
    site: PlaceLike,
    *,
    direction: Tensor | Sequence[float] | None = None,
    norm: bool = False,
    name: str | None = None,
) -> Metric:
    """Read the value at a site as a metric: `read(cw.site("resid_post", layer=10, pos=-1))`.

    Axes that the site does not index become axes of a vector; in this example, the features of the stream.
    With `direction` [d], the metric is the dot product with a vector along the last axis; with [k, d], it is
    the dot product with each of k vectors; with `norm`, it is the norm along the last axis. A site can also
    be given as a metric directly; the metric then has all its values. Positions are columns of the batch; a
    position counted from the end must be a token, not padding, in every prompt.
    """
    place = as_place(site)
    if direction is not None and norm:
        raise MetricError("a direction, or the norm: the norm of one number is its size. Leave one out.")
    along = None if direction is None else _direction(direction)
    wanted = name or str(place)

    def compute(value: Tensor) -> Tensor:
        if along is not None:
            taken: Tensor = value @ along.to(value.device, value.dtype).movedim(-1, 0)
            return taken
        return torch.linalg.vector_norm(_wide(value), dim=-1) if norm else value

    def vector(lengths: Sequence[Mapping[str, int]]) -> Vector | None:
        axes = {axis: numbers for axis, numbers in left_over(place, lengths[0]).items() if axis != "batch"}
        if along is not None or norm:
            if not axes:
                raise MetricError(f"{place} is one number, which has no direction and no norm.")
            last, numbers = axes.popitem()
            if along is not None and along.shape[-1] != len(numbers):
                raise MetricError(
                    f"the direction has {along.shape[-1]} numbers, and {place} has {len(numbers)} along "
                    f"{last!r}. Give a vector of {len(numbers)}."
                )
            if along is not None and along.ndim > 1:
                axes["direction"] = tuple(range(len(along)))
        return Vector(wanted, tuple(axes), tuple(axes.values())) if axes else None

    how = ("norm",) if norm else () if along is None else (inputs_digest({"": along})[:16],)
    return Metric(
        wanted, compute, described=("read", str(place), *how), copies=1, reads=(place,), vector=vector
    )


def _direction(given: Any) -> Tensor:
    """A direction [d], or several [k, d]. Raises MetricError for what is none."""
    try:
        with own_settings():
            found = torch.as_tensor(given).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise MetricError(f"a direction is a vector of numbers, and {describe(given)} is none.") from None
    if found.ndim not in {1, 2} or not found.numel() or found.is_complex() or found.dtype == torch.bool:
        raise MetricError(f"a direction is a vector [d], or several [k, d], and this is {shape_of(found)}.")
    if not torch.isfinite(found).all():
        raise MetricError("the direction has numbers that are not finite.")
    return found if found.is_floating_point() else found.double()


def _places(given: Any) -> tuple[Place, ...]:
    """The places that a metric reads, one by one."""
    is_one = isinstance(given, str | Place) or (
        isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int)  # ("z", 2)
    )
    if not is_one and (not has_items(given) or isinstance(given, bytes)):
        raise MetricError(f"a metric reads a site, or a list of them, and {describe(given)} is neither.")
    found: list[Place] = []
    for one in [given] if is_one else given:
        found += list(one) if isinstance(one, Places) else [one if isinstance(one, Place) else as_place(one)]
    return tuple(found)


def as_metric(given: Any, model: Any = None) -> Metric:
    """A metric as it is, or a plain function of the module's outputs as a metric."""
    if isinstance(given, Place):
        given = read(given)
    if isinstance(given, Metric):
        if given.of_text is None or model is None:
            return given if model is None else bound(given, model)
        if model.tokenizer is None:
            raise PromptError(
                f"the metric {given.name!r} is of texts, and {model.name} has no tokenizer to read them "
                "with. Give token ids, or load the model with `cw.load(...)`."
            )
        return given.of_text(model.tokenizer)
    if isinstance(given, Places):
        raise MetricError(
            f"{len(given)} sites are {len(given)} metrics: give a list of them, or a function that reads "
            "them, `cw.metric(function, reads=[...])`."
        )
    if callable(given):
        name = getattr(given, "__name__", "metric")
        return Metric("metric" if name == "<lambda>" else name, given, last=False, whole=True)
    raise MetricError(
        "a metric is `logit_diff(...)`, `prob(...)`, ..., a site, or a function of the module's outputs, and "
        f"{given!r} is none of these."
    )


def takes_rows(function: Callable[..., Any]) -> bool:
    """True if a function has an argument `rows`: in a question it gets the pairs that are its prompts."""
    try:
        return "rows" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def as_metrics(given: Any, model: Any) -> tuple[Metric, ...]:
    """One metric or several, of which sites in several layers are one each."""
    listed = given if isinstance(given, list | tuple) and not isinstance(given, Places) else [given]
    flattened = [one for item in listed for one in (item if isinstance(item, Places) else [item])]
    return tuple([as_metric(one, model) for one in flattened])

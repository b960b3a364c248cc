"""Metrics: numbers read off a model's outputs, for a stack of worlds at once.

Each says which output and which positions it reads; one that reads one position of each prompt does not pay
for those in front of it. Padding is never read: the last position is the last one that the mask shows.
"""

from __future__ import annotations

import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from conewise.anatomy.attention import attention_argument
from conewise.anatomy.axes import resolved
from conewise.anatomy.padding import aligned, length_of, reads_ahead, shown_positions
from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import EdgePlace, Place, PlaceLike, Places, SourcedPlace, as_place, expect_few
from conewise.anatomy.sites import Located
from conewise.arguments import Count, checked, has_items
from conewise.errors import MetricError, PromptError, WeightsChangedError, describe
from conewise.jobs.digests import inputs_digest
from conewise.jobs.identity import Keyed, expect_key
from conewise.program.records import ATTENTION, Program
from conewise.program.rehearsal import with_numbers
from conewise.program.tensors import brought, copy_of
from conewise.program.walk import described_fields, field_names, output_names
from conewise.templates import heading, note, shown
from conewise.text.tokens import AnswerReader
from conewise.threads import own_settings

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Metric:
    """A number for each prompt of each world.

    `compute` takes the output `output` as [world, prompt, ...] (only one position of each prompt, as
    [world, prompt, vocabulary], where `last` is true) and returns [world, prompt]. With `whole`, it takes
    instead all outputs of one world, in the module's own structure, and returns [prompt] or one number.

    That position is `pos`, one for all prompts or one for each, or the last one that the attention mask shows
    where `pos` is None. `at_run` finds it in a run, as the number of positions `behind` it. A metric that
    reads all positions is `shown(mask)` where some are padding.

    A metric that reads the logits of a few `tokens` only says so, and `among(columns)` is the same metric
    for logits of which column `columns[token]` is that of a token: the others need not be computed.
    `linear` says how it is a sum of logits: (token, coefficient) of each, one row for all prompts or one for
    each; empty where it is none. `copies` says how many copies of what it reads it makes, for the plan's
    memory. `prompts` says for how many prompts it has answers, targets or a reference; None where any number
    will do. Where it is a number, `of_prompts(numbers)` is the same metric for some of these prompts, by
    number, in that order. `reference` is what a run that it compares with was computed with.

    A metric of texts is none yet: `of_text(tokenizer)` is it.

    `ends_in`: the tokens with which prompts have to end, one row for all or one for each.

    A metric that `reads` sites is of their values: `compute` takes, for each of them, the part that its place
    means, as [world, prompt, ...], and with `whole` all outputs of one world in front of them, which are
    [prompt, ...] then. `found` is where a model has them. It may be a vector: then `vector` gives its axes
    behind [world, prompt], of the lengths of the sites.
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
    pos: tuple[int, ...] | None = None
    behind: tuple[int, ...] = ()
    shown: Callable[[Tensor], Metric] | None = None
    reference: Reference | None = None
    of_text: Callable[[Any], Metric] | None = None
    reads: tuple[Place, ...] = ()
    found: tuple[Located, ...] = ()
    vector: Callable[[Sequence[Mapping[str, int]]], Vector | None] | None = None
    ends_in: tuple[tuple[int, ...], ...] = ()

    def __repr__(self) -> str:
        return f"Metric {self.name}: {self._formula()}"

    def _repr_html_(self) -> str:
        count = (
            "any number of prompts"
            if self.prompts is None
            else f"{self.prompts:,} prompt{'s' if self.prompts > 1 else ''}"
        )
        return shown(heading(f"Metric {self.name}", self._formula()), note(f"For {count}."))

    def _formula(self) -> str:
        """The computation, as far as it is known."""
        if self.of_text is not None:
            return f"of {', '.join(map(_brief, self.described))}, as the model's tokenizer reads them"
        if self.reads:
            kind = self.described[0] if self.described else "a function"
            outputs = "all outputs and " if self.whole else ""
            return f"{kind} of {outputs}{', '.join(map(str, self.reads))}"
        if self.whole:
            return "a function of all outputs"
        last = "the last position" if self.pos is None else f"position {_brief(self.pos)}"
        where = f"of {self.output} at {last if self.last else 'all positions'}"
        if self.linear and all(row == self.linear[0] for row in self.linear):
            terms = []
            for token, weight in self.linear[0]:
                factor = "" if abs(weight) == 1 else f"{abs(weight):g} "
                terms.append(f"{'+' if weight > 0 else '−'} {factor}logit({token})")
            return f"{' '.join(terms).removeprefix('+ ')}, {where}"
        return f"{self.described[0] if self.described else 'a function'} {where}"


class Reference:
    """The weights and the graph that a run was computed with. In a worker, which has copies, it is empty."""

    def __init__(self, run: Any = None) -> None:
        self._model: Callable[[], Any] = (lambda: None) if run is None else weakref.ref(run.model)
        if run is not None:
            self._weights = run.made_with
            self._changes, self._sites = run.model.graph.changes, run.model.changed_sites

    def expect_current(self, metric: str) -> None:
        """Raise WeightsChangedError or MetricError where the run's model now computes something else."""
        model = self._model()
        if model is None:
            return
        again = "Make it again from a new run: `cw.kl_to(model.run(...))`."
        if model.graph.changes != self._changes and (sites := self._sites or model.changed_sites):
            raise MetricError(
                f"the metric {metric!r} compares with a run from before the graph of {model.name} was "
                f"changed, at {', '.join(map(repr, sites[:3]))}. {again}"
            )
        if names := model.weights.changed(self._weights.whole, model.weights.contents().whole):
            raise WeightsChangedError(
                f"the metric {metric!r} compares with a run from before the weights of {model.name} were "
                f"written to: {names}. {again} To compare with the old weights on purpose, give it a run of "
                "a capture of a copy of the module that has them."
            )

    @property
    def is_current(self) -> bool:
        """True if the run's model still computes what it did."""
        try:
            self.expect_current("")
        except (MetricError, WeightsChangedError):
            return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return Reference, ()


Position = int | Sequence[int] | Tensor | None
Token = int | str | Collection[Any] | Tensor
"""A token, or one for each prompt; or a set of tokens, or a list with several for each prompt."""
Tokens = Sequence[Sequence[int]]


def _of_text(name: str, make: Callable[..., Metric], *given: Any) -> Metric | None:
    """Return a metric that awaits the tokenizer of a model, where some tokens are texts; else None."""
    if not any(map(_has_texts, given)):
        return None

    def of_text(tokenizer: Any) -> Metric:
        reader = AnswerReader(tokenizer)

        def tokens(one: Any) -> Any:
            if isinstance(one, str):
                return reader.token(one, "", f"the metric {name!r}")
            return type(one)(map(tokens, one)) if isinstance(one, list | tuple | set | frozenset) else one

        return make(*map(tokens, given))

    def compute(_: Tensor) -> Tensor:
        raise MetricError(f"the metric {name!r} is of texts, and is read in a model that has its tokenizer.")

    return Metric(name, compute, described=given, of_text=of_text)


def _has_texts(given: Any) -> bool:
    return isinstance(given, str) or (
        isinstance(given, list | tuple | set | frozenset) and any(map(_has_texts, given))
    )


_LISTS = (list, tuple, set, frozenset, range)


def _has_sets(*given: Any) -> bool:
    """True if some prompt has several tokens: a set, or a list in a list."""
    return any(
        isinstance(one, set | frozenset)
        or (isinstance(one, list | tuple) and any(isinstance(own, _LISTS) for own in one))
        for one in given
    )


def _as_sets(given: Any, what: str) -> list[list[int]]:
    """The tokens of each prompt; those of one set are for all prompts."""
    if isinstance(given, set | frozenset):
        return [_tokens(sorted(given), what)]
    rows = given if _has_sets(given) else _tokens(given, what)
    return [_tokens(sorted(row) if isinstance(row, set | frozenset) else row, what) for row in rows]


def _brief(given: object) -> str:
    """Tokens or positions as they were given; of many the first few."""
    listed = list(given) if isinstance(given, list | tuple) else [given]
    more = ", ..." if len(listed) > 3 else ""
    return ", ".join(map(repr, listed[:3])) + more


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

    Tokens are numbers, or texts (" Mary") that the tokenizer of the model reads, each of one token. Several
    answers are a set, `{5, 7}`, or a list in the list of prompts, `[[5, 7], [3]]`: their logits are averaged,
    or `over="logsumexp"`, which is the logit of any of them.

    The last position is the last one that the attention mask shows. `pos` is another one, for all prompts or
    one for each: from 0 it counts the columns of the batch, padding included; −1 is each prompt's last. Where
    attention is not causal, `pos` has to be given.
    """
    awaiting = _of_text(
        name, lambda one, other: logit_diff(one, other, over=over, pos=pos, name=name), answer, wrong
    )
    if awaiting is not None:
        return awaiting
    if _has_sets(answer, wrong):
        sets = _as_sets(answer, "answer"), _as_sets(wrong, "wrong")
        return read_at(answer_diff(*sets, name=name, over=over), pos)
    answer, wrong = _tokens(answer, "answer"), _tokens(wrong, "wrong")

    def compute(logits: Tensor) -> Tensor:
        return _picked(logits, answer, "answer") - _picked(logits, wrong, "wrong")

    def among(columns: Mapping[int, int]) -> Metric:
        return logit_diff([columns[t] for t in answer], [columns[t] for t in wrong], name=name)

    def of_prompts(numbers: Sequence[int]) -> Metric:
        return logit_diff(_some(answer, numbers), _some(wrong, numbers), name=name)

    prompts = one_number({"answer tokens": _prompts(answer), "wrong tokens": _prompts(wrong)})
    count = max(len(answer), len(wrong))
    pairs = list(zip(_repeated(answer, count), _repeated(wrong, count), strict=True))
    expect_apart([[right] for right, _ in pairs], [[other] for _, other in pairs])
    made = Metric(
        name,
        compute,
        described=("logit_diff", answer, wrong),
        tokens=(*answer, *wrong),
        among=among,
        prompts=prompts,
        linear=tuple(((right, 1.0), (other, -1.0)) for right, other in pairs),
        of_prompts=of_prompts,
    )
    return read_at(made, pos)


@checked
def logit(token: Token, *, pos: Position = None, name: str = "logit") -> Metric:
    """The logit of a token at the last position, or at `pos`: see `logit_diff`."""
    if (awaiting := _of_text(name, lambda one: logit(one, pos=pos, name=name), token)) is not None:
        return awaiting
    tokens = _tokens(token, "token")

    def compute(logits: Tensor) -> Tensor:
        return _picked(logits, tokens, "token")

    def among(columns: Mapping[int, int]) -> Metric:
        return logit([columns[t] for t in tokens], name=name)

    made = Metric(
        name,
        compute,
        described=("logit", tokens),
        tokens=tuple(tokens),
        among=among,
        prompts=_prompts(tokens),
        linear=tuple(((one, 1.0),) for one in tokens),
        of_prompts=lambda numbers: logit(_some(tokens, numbers), name=name),
    )
    return read_at(made, pos)


@checked
def prob(token: Token, *, pos: Position = None, name: str = "prob") -> Metric:
    """The probability of a token at the last position, or at `pos`: see `logit_diff`.

    Of a set of tokens it is the probability of any of them.
    """
    if (awaiting := _of_text(name, lambda one: prob(one, pos=pos, name=name), token)) is not None:
        return awaiting
    if _has_sets(token):
        return read_at(answer_prob(_as_sets(token, "token"), name=name), pos)
    tokens = _tokens(token, "token")

    def compute(logits: Tensor) -> Tensor:
        return _picked(_wide(logits).log_softmax(-1), tokens, "token").exp()

    made = Metric(
        name,
        compute,
        described=("prob", tokens),
        copies=1,
        prompts=_prompts(tokens),
        of_prompts=lambda numbers: prob(_some(tokens, numbers), name=name),
    )
    return read_at(made, pos)


@checked
def prob_diff(answer: Token, wrong: Token, *, pos: Position = None, name: str = "prob_diff") -> Metric:
    """The probability of the answer less that of the wrong one, or of any of several: see `logit_diff`."""
    awaiting = _of_text(name, lambda one, other: prob_diff(one, other, pos=pos, name=name), answer, wrong)
    if awaiting is not None:
        return awaiting
    made = answer_prob_diff(_as_sets(answer, "answer"), _as_sets(wrong, "wrong"), name=name)
    return read_at(made, pos)


@checked
def log_prob(answer: Any, *, name: str = "log_prob") -> Metric:
    """The log probability of an answer of one token or several, with which the prompts end.

    `answer` are its tokens, [t1, t2, ...], one answer for all prompts, or a list of these, one for each; or a
    text, or several. Prompts are run with their answers behind them, padded on the left where at all. The sum
    is over the answer's tokens, each given those in front of it.
    """
    if _has_texts(answer):

        def of_text(tokenizer: Any) -> Metric:
            texts = [answer] if isinstance(answer, str) else list(answer)
            return log_prob([tokenizer.encode(one, add_special_tokens=False) for one in texts], name=name)

        def compute(_: Tensor) -> Tensor:
            raise MetricError(f"the metric {name!r} is of texts, and is read in a model with a tokenizer.")

        return Metric(name, compute, described=(answer,), of_text=of_text)
    rows = _as_sets(answer, "answer") if _has_sets(answer) else [_tokens(answer, "answer")]
    longest = max(map(len, rows))

    def compute_of(logits: Tensor) -> Tensor:
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
        compute_of,
        last=False,
        described=("log_prob", rows),
        copies=2,
        prompts=_prompts([0] * len(rows)),
        of_prompts=lambda numbers: log_prob(
            rows if len(rows) == 1 else [rows[n] for n in numbers], name=name
        ),
        shown=behind,
        ends_in=tuple(map(tuple, rows)),
    )
    return made


def answer_diff(answers: Tokens, wrong: Tokens, *, name: str = "logit_diff", over: str = "mean") -> Metric:
    """The mean logit of each prompt's answers less that of its wrong answers, at the last position.

    Over "logsumexp" it is the logarithm of the sum of their exponentials. One row is for all prompts.

    With one answer and one wrong answer for each prompt this is `logit_diff`. A token that is given twice is
    one answer; one that is on both sides raises MetricError.
    """
    answers, wrong = _sets(answers), _sets(wrong)
    _ = _rows(answers, "answers"), _rows(wrong, "wrong answers")
    prompts = one_number({"answers": _prompts(answers), "wrong answers": _prompts(wrong)})
    most = max(len(answers), len(wrong))
    answers, wrong = (rows * most if len(rows) == 1 else rows for rows in (answers, wrong))
    expect_apart(answers, wrong)
    if all(len(tokens) == 1 for tokens in (*answers, *wrong)):
        return logit_diff([one for (one,) in answers], [one for (one,) in wrong], name=name)

    def compute(logits: Tensor) -> Tensor:
        return _pooled(logits, answers, over) - _pooled(logits, wrong, over)

    def among(columns: Mapping[int, int]) -> Metric:
        return answer_diff(_mapped(answers, columns), _mapped(wrong, columns), name=name, over=over)

    def of_prompts(numbers: Sequence[int]) -> Metric:
        if most == 1:
            return made
        own, others = ([rows[number] for number in numbers] for rows in (answers, wrong))
        return answer_diff(own, others, name=name, over=over)

    linear = tuple(
        tuple((token, sign / len(row)) for row, sign in ((right, 1.0), (other, -1.0)) for token in row)
        for right, other in zip(answers, wrong, strict=True)
    )
    described: tuple[Any, ...] = ("logit_diff", [list(row) for row in answers], [list(row) for row in wrong])
    made = Metric(
        name,
        compute,
        described=described if over == "mean" else (*described, over),
        tokens=tuple(token for row in (*answers, *wrong) for token in row),
        among=among,
        prompts=prompts,
        of_prompts=of_prompts,
        linear=linear if over == "mean" else (),
    )
    return made


def answer_prob(answers: Tokens, *, name: str = "prob") -> Metric:
    """The probability that one of each prompt's answers comes next.

    With one answer for each prompt this is `prob`. A token that is given twice is one answer.
    """
    answers = _sets(answers)
    _ = _rows(answers, "answers")
    if all(len(tokens) == 1 for tokens in answers):
        return prob([one for (one,) in answers], name=name)

    def compute(logits: Tensor) -> Tensor:
        return _probability(_wide(logits).log_softmax(-1), answers)

    return Metric(
        name,
        compute,
        described=("prob", [list(row) for row in answers]),
        copies=1,
        prompts=_prompts(answers),
        of_prompts=lambda numbers: answer_prob(_some(answers, numbers), name=name),
    )


def answer_prob_diff(answers: Tokens, wrong: Tokens, *, name: str = "prob_diff") -> Metric:
    """The probability of any of each prompt's answers less that of any wrong one. One row is for all."""
    answers, wrong = _sets(answers), _sets(wrong)
    _ = _rows(answers, "answers"), _rows(wrong, "wrong answers")
    prompts = one_number({"answers": _prompts(answers), "wrong answers": _prompts(wrong)})
    most = max(len(answers), len(wrong))
    expect_apart(*(rows * most if len(rows) == 1 else rows for rows in (answers, wrong)))

    def compute(logits: Tensor) -> Tensor:
        known = _wide(logits).log_softmax(-1)
        return _probability(known, answers) - _probability(known, wrong)

    return Metric(
        name,
        compute,
        described=("prob_diff", answers, wrong),
        copies=1,
        prompts=prompts,
        of_prompts=lambda numbers: answer_prob_diff(
            _some(answers, numbers), _some(wrong, numbers), name=name
        ),
    )


def _probability(known: Tensor, tokens: Tokens) -> Tensor:
    """The probability of any of each prompt's tokens, of the logarithms of all: [world, prompt]."""
    index, counts = _index(tokens, known)
    return torch.where(counts, known.gather(-1, index).exp(), 0.0).sum(-1)


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


def _pooled(logits: Tensor, tokens: Tokens, over: str) -> Tensor:
    """The mean logit of each prompt's tokens, or the logit of any of them: [world, prompt]."""
    index, counts = _index(tokens, logits)
    picked = _wide(logits.gather(-1, index))
    if over == "logsumexp":
        return torch.where(counts, picked, -math.inf).logsumexp(-1)
    return torch.where(counts, picked, 0.0).sum(-1) / counts.sum(-1)


def _index(tokens: Tokens, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens as an index [world, prompt, answer] into logits, and which of them count [prompt, answer]."""
    if len(tokens) not in {1, logits.shape[1]}:
        raise MetricError(f"answers for {len(tokens)} prompts, and this run has {logits.shape[1]}.")
    if (highest := max(map(max, tokens))) >= logits.shape[-1]:
        raise MetricError(f"the token {highest} is not in the vocabulary of {logits.shape[-1]}.")
    most = max(map(len, tokens))
    rows = torch.tensor([[*row, *[row[0]] * (most - len(row))] for row in tokens], device=logits.device)
    counts = torch.tensor(
        [[place < len(row) for place in range(most)] for row in tokens], device=logits.device
    )
    return rows.expand(*logits.shape[:2], -1), counts


def _mapped(tokens: Tokens, columns: Mapping[int, int]) -> list[list[int]]:
    return [[columns[token] for token in row] for row in tokens]


@checked
def kl_to(run: Any, *, pos: Position = None, name: str = "kl") -> Metric:
    """KL(p_run ‖ p) of the next-token distribution at the last position, `run` the reference.

    The last position of each run is its own; `pos` is another one, in both: see `logit_diff`.
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
    outputs = Outputs(program)
    read = at_run(read_at(Metric("logits", lambda logits: logits), pos), run.model, run.inputs, names[0])
    (value,) = run.demand(names)
    return _positioned(read, outputs.arranged(names[0], value, 1, outputs.prompts(run.inputs)))[0]


@checked
def cross_entropy(
    targets: Tensor | None = None, *, labels: Tensor | None = None, name: str = "cross_entropy"
) -> Metric:
    """The mean cross-entropy of `targets` [prompt, pos] over their positions; −100 is left out.

    Position t of the logits is compared with `targets[:, t]`, or, as Hugging Face's models do it, with
    `labels[:, t + 1]`: `labels=input_ids` is the loss of language modelling. Positions that the attention
    mask hides are left out too; a target that is padding, behind a prompt's last token, is −100.
    """
    if (targets is None) == (labels is None):
        raise MetricError(
            "cross_entropy takes `targets`, shifted already, or `labels`, which are shifted here: give one."
        )
    if labels is not None:
        if labels.ndim != 2 or labels.shape[1] < 2:
            raise MetricError(
                f"cross_entropy: labels are tokens [prompt, pos] of at least two positions, and this is "
                f"{_shape(labels)}."
            )
        ends = torch.full_like(labels[:, :1], -100)
        targets = torch.cat([labels[:, 1:], ends], 1)
    assert targets is not None
    if targets.ndim != 2:
        raise MetricError(f"cross_entropy: targets are tokens [prompt, pos], and this is {_shape(targets)}.")
    _tokens(targets, "targets")
    targets = copy_of(targets).long()
    if len(without := (targets == -100).all(-1).nonzero()):
        raise MetricError(
            f"cross_entropy: prompt {int(without[0])} has no target, so its mean is over nothing: all are "
            "-100, or hidden by the attention mask. Leave this prompt out."
        )
    counted = targets[targets != -100]
    lowest, highest = int(counted.min()), int(counted.max())

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
        shown=lambda mask: cross_entropy(
            targets.masked_fill(~aligned(mask, targets.shape[1]).to(targets.device), -100), name=name
        ),
    )


@checked
def metric(
    function: Callable[..., Any],
    *,
    key: str | None = None,
    reads: PlaceLike | Places | Sequence[PlaceLike | Places] = (),
    size: Count | None = None,
    name: str | None = None,
) -> Metric:
    """A function of the module's outputs, and of the values at sites, as a metric.

    It is called as `function(outputs, *values)` for one world at a time, with a value for each place that it
    `reads`, [prompt, ...] in the natural axes of what the place means. A function that takes as many
    arguments as there are places is called as `function(*values)`: then outputs are not computed. It returns
    one number, or one for each prompt; or, where `size` says how many, a vector for each, [prompt, size].

    `key` identifies it in stores, so that a run can be resumed: see `conewise.intervention`.
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
        rows = [_as_numbers(named, wanted(*own), given[0].shape[1], size) for own in zip(*given, strict=True)]
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


# ------------------------------------------------------------------------------------------
# Metrics of sites: numbers read inside the model. What lies behind the last site is not computed.


@dataclass(frozen=True, slots=True)
class Vector:
    """The axes of a metric that is several numbers: `coordinates` are the numbers along each of `axes`."""

    name: str
    axes: tuple[str, ...]
    coordinates: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return tuple(map(len, self.coordinates))

    @property
    def size(self) -> int:
        """The count of the numbers."""
        return math.prod(self.shape)

    @property
    def names(self) -> list[str]:
        """A name for each of its numbers."""
        found = []
        for at in itertools.product(*self.coordinates):
            where = ", ".join(f"{axis}={number}" for axis, number in zip(self.axes, at, strict=True))
            found.append(f"{self.name}[{where}]" if where else self.name)
        return found


@checked
def read(
    site: PlaceLike,
    *,
    direction: Tensor | Sequence[float] | None = None,
    norm: bool = False,
    name: str | None = None,
) -> Metric:
    """The value at a site as a metric: `read(cw.site("resid_post", layer=10, pos=-1))`.

    What no number of the place selects is an axis of a vector: of that place the features of the stream. With
    `direction` [d] it is the product with a vector along the last axis, with [k, d] that with each of k
    vectors; with `norm` the length along the last axis. A site itself is a metric too, that of all its
    values. Positions are columns of the batch; one that is counted from the end has to be a token of every
    prompt.
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
        axes = {axis: numbers for axis, numbers in _left(place, lengths[0]).items() if axis != "batch"}
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
        raise MetricError(f"a direction is a vector [d], or several [k, d], and this is {_shape(found)}.")
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


def _left(place: Place, lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The axes that no number of a place selects, and the numbers of what is left along each."""
    found = {}
    for axis, length in lengths.items():
        part = place.part.get(axis, slice(None))
        if not isinstance(part, int):
            numbers = range(length)[part] if isinstance(part, slice) else part
            found[axis] = tuple(number % length for number in numbers)
    return found


def bound(metric: Metric, model: Any) -> Metric:
    """A metric with where a model has the sites that it reads. Raises what says why one is not there."""
    if not metric.reads:
        return metric
    found = tuple([_found(metric, place, model) for place in metric.reads])
    cut = all("pos" in place.part for place in metric.reads) and not metric.whole
    return replace(metric, found=found, last=cut)


def _found(metric: Metric, place: Place, model: Any) -> Located:
    if isinstance(place, EdgePlace | SourcedPlace):
        raise MetricError(f"{place} is no site whose value a metric could read. Give the site itself.")
    found: Located = model.locate(place)
    if found.result is not None:
        raise MetricError(
            f"no node holds {place}: it is z times the output weights. Read `z` of that head, with those "
            "weights as `direction`, or `attn_out`, the sum over heads."
        )
    if "batch" in place.part:
        raise MetricError(
            f"{place} selects prompts, and a metric has numbers for each of them: leave that out."
        )
    if "batch" not in found.view.axes and not model.program.dimensions.is_unbatched:
        axes = ", ".join(found.view.axes)
        raise MetricError(
            f"the metric {metric.name!r} reads {place}, whose axes are {axes}: it is not known which numbers "
            "are which prompt's. Read a site that has the axis 'batch'."
        )
    return found


def sites_at_run(metric: Metric, model: Any, inputs: Mapping[str, Tensor]) -> Metric:
    """A metric of sites with its positions counted from the end of a run with these inputs.

    A position from the end is that of each prompt, behind which there may be padding. Raises MetricError for
    padding.
    """
    if not metric.reads:
        return metric
    found = []
    for place, one in zip(metric.reads, metric.found, strict=True):
        part, at = dict(one.part), one.part.get("pos")
        length, mask = None, None
        if at is not None or {"query_pos", "key_pos"} & part.keys():
            length = length_of(model.program, inputs, one.node)
            mask = shown_positions(model.program, inputs, one.node, one.site.stack)
        if mask is not None and length is not None:
            shown = aligned(mask, length).all(0).tolist()
            for axis in {"pos", "query_pos", "key_pos"} & part.keys():
                own = _left(Place("", part={axis: _listed(part[axis])}), {axis: length})[axis]
                if _is_from_end(part[axis]) and not all(shown[number] for number in own):
                    raise MetricError(
                        f"{place}: its position is counted from the end of the batch, where some prompt has "
                        "padding. Pad on the left, so that the last position is that of every prompt, or "
                        "give prompts of one length at a time."
                    )
        if at is not None and length is not None:
            numbers = _left(replace(place, part={"pos": _listed(at)}), {"pos": length})
            if isinstance(at, int) and not -length <= at < length:
                raise MetricError(f"{place}: there is no position {at}, of {length}.")
            behind = [number - length for number in numbers["pos"]]
            part["pos"] = behind[0] if isinstance(at, int) else behind
        found.append(replace(one, part=part))
    return replace(metric, found=tuple(found))


def _listed(part: Any) -> Any:
    """A part of an axis as several numbers, where it is one."""
    return [part] if isinstance(part, int) else part


def _is_from_end(given: Any) -> bool:
    if isinstance(given, slice):
        return any(one is not None and one < 0 for one in (given.start, given.stop)) or given.stop is None
    return any(one < 0 for one in ([given] if isinstance(given, int) else given or ()))


def values_of_sites(metric: Metric, presented: Callable[[Located], Tensor], prompts: int) -> list[Tensor]:
    """The values that a metric reads at its sites, each [world, prompt, ...].

    `presented` gives the value of a site as [world, *axes]: the natural ones of the site.
    """
    found = []
    for one in metric.found:
        shown = presented(one)
        value = shown[(slice(None), *resolved(one.view.axes, one.part, shown.shape[1:]))]
        if "batch" in one.view.axes:
            value = value.movedim(1 + one.part_axes.index("batch"), 1)
        else:
            value = value.unsqueeze(1)
        if prompts and value.shape[1] != prompts:
            raise MetricError(
                f"the metric {metric.name!r} reads {value.shape[1]} rows of {one.site.name}, and the run has "
                f"{prompts} prompts: it is not known which rows are which prompt's."
            )
        found.append(value)
    return found


def applied_to_sites(
    metric: Metric, presented: Callable[[Located], Tensor], prompts: int, outputs: Any = None
) -> Tensor:
    """A metric of sites as [world, prompt, ...], where it was computed; with `whole`, of one world.

    Then `outputs` are that world's outputs.
    """
    values = values_of_sites(metric, presented, prompts)
    if metric.whole:
        found = metric.compute(outputs, *(value[0] for value in values))
        size = metric.vector([]) if metric.vector is not None else None
        return _as_numbers(metric.name, found, prompts, None if size is None else size.size)[None]
    numbers = metric.compute(*values)
    if not isinstance(numbers, torch.Tensor) or numbers.shape[:2] != values[0].shape[:2]:
        raise MetricError(
            f"the metric {metric.name!r} returned {_shape(numbers)}; expected numbers for each prompt of "
            f"each world: shape {tuple(values[0].shape[:2])}, ..."
        )
    return numbers


def _as_numbers(name: str, found: Any, prompts: int, size: int | None) -> Tensor:
    """Return what a function of one world returned, as [prompt] or [prompt, size]."""
    if isinstance(found, int | float):
        found = torch.tensor(found, dtype=torch.float64)
    more = () if size is None else (size,)
    if isinstance(found, torch.Tensor) and found.shape == more:
        found = found.expand(prompts or 1, *more)
    if not isinstance(found, torch.Tensor) or found.shape != (prompts or len(found), *more):
        what = "one number, or one for each of" if size is None else f"a vector of {size}, or one for each of"
        said = " A vector needs `size=`, how many numbers it has." if size is None else ""
        raise MetricError(
            f"the metric {name!r} returned {_shape(found)}; expected {what} the {prompts} prompts: shape "
            f"({', '.join(map(str, (prompts, *more)))},).{said}"
        )
    return found


def flat(found: Tensor) -> Tensor:
    """Numbers [world, prompt, ...] of a metric as [world, entry, prompt]: of one number, one entry."""
    return found.flatten(2).movedim(1, 2) if found.ndim > 2 else found[:, None]


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
    if not at or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
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


def at_run(metric: Metric, model: Any, inputs: Mapping[str, Tensor], output: str) -> Metric:
    """A metric with the positions that it reads of a run with these inputs, where `output` is what it reads.

    Raises MetricError where that is not known, or where a position is padding or is not there.
    """
    if metric.reference is not None:
        metric.reference.expect_current(metric.name)
    if metric.reads:
        return sites_at_run(metric, model, inputs)
    if metric.whole:
        return metric
    program = model.program
    mask = shown_positions(program, inputs, output)
    if metric.ends_in:
        _expect_end(metric, program, inputs)
    if not metric.last:
        return metric if mask is None or metric.shown is None else metric.shown(mask)
    if metric.pos is None:
        _expect_causal(metric, model, inputs, output)
    if mask is None and metric.pos in {None, (-1,)}:
        return metric
    outputs = Outputs(program)
    if not outputs.has_positions(output):
        return metric
    prompts = outputs.prompts(inputs) or (1 if mask is None else mask.shape[0])
    expect_prompts(metric, prompts, "this run")
    length = length_of(program, inputs, output)
    if length is None:
        raise MetricError(
            f"the metric {metric.name!r} reads position {metric.pos}, and it is not known how many positions "
            "this model has. Give a function of the module's outputs as the metric."
        )
    shown = torch.ones(1, length, dtype=torch.bool) if mask is None else aligned(mask, length).cpu()
    given = metric.pos or (-1,)
    # A metric of several samples has the positions of its prompts again and again.
    wanted = given * (prompts // len(given)) if prompts % len(given) == 0 else given
    rows = [row.nonzero().reshape(-1).tolist() for row in shown.expand(prompts, -1)]
    behind = tuple(
        length - 1 - _position(metric, one, row, length, number)
        for number, (one, row) in enumerate(zip(wanted, rows, strict=True))
    )
    return replace(metric, behind=behind if any(behind) else ())


def _expect_end(metric: Metric, program: Program, inputs: Mapping[str, Tensor]) -> None:
    """Raise MetricError where the prompts do not end in the tokens of the metric."""
    leaves = [leaf.name for leaf in program.inputs if leaf.name.rpartition(".")[2] == "input_ids"]
    ids = inputs[leaves[0]].tolist() if leaves else []
    rows = metric.ends_in * (len(ids) if len(metric.ends_in) == 1 else 1)
    for number, (own, row) in enumerate(zip(ids, rows, strict=False)):
        if own[len(own) - len(row) :] != list(row):
            raise MetricError(
                f"the metric {metric.name!r} is of the answer {list(row)}, and prompt {number} ends in "
                f"{own[len(own) - len(row) :]}. Run each prompt with its answer behind it."
            )


def _position(metric: Metric, wanted: int, shown: list[int], length: int, prompt: int) -> int:
    """A position of one prompt, counted from 0, padding included; `shown` are those that are no padding."""
    if not shown:
        raise MetricError(f"the attention mask hides all of prompt {prompt}: {metric.name!r} reads nothing.")
    if wanted < 0 and -wanted <= len(shown):
        return shown[wanted]
    if wanted in shown:
        return wanted
    what = "padding" if 0 <= wanted < length else "not there"
    raise MetricError(
        f"the metric {metric.name!r} reads position {wanted} of prompt {prompt}, which is {what}: its tokens "
        f"are at {shown[0]} to {shown[-1]}. Positions count from 0 over the batch, padding included, or from "
        "-1, each prompt's last."
    )


def _expect_causal(metric: Metric, model: Any, inputs: Mapping[str, Tensor], output: str) -> None:
    """Raise MetricError where the last position is nothing special. Tried once for a model and an output."""
    known: dict[str, bool] = vars(model).setdefault("_reads_ahead", {})
    length = length_of(model.program, inputs, output)
    if output not in known and length is not None and length > 1:
        known[output] = (
            not _is_causal_language_model(model)
            and Outputs(model.program).has_positions(output)
            and with_numbers()(reads_ahead)(model.graph, model.program, inputs, output)
        )
    if known.get(output):
        raise MetricError(
            f"the metric {metric.name!r} does not say which position it reads, and attention is not causal "
            f"in {model.name}: positions see tokens behind them, and the last one predicts nothing that "
            "comes next. Say it, `pos=...`: that of the mask token, say, or one for each prompt."
        )


def _is_causal_language_model(model: Any) -> bool:
    """True where the module's class and every fused attention say so: then nothing has to be tried."""
    attentions = [record for record in model.program.records if record.op == ATTENTION]
    return (
        model.name.endswith(("ForCausalLM", "LMHeadModel"))
        and bool(attentions)
        and all(attention_argument(record, "is_causal") for record in attentions)
    )


def most_behind(metric: Metric, program: Any, inputs: Mapping[str, Tensor], output: str) -> int:
    """Bound the positions behind the first one that a metric reads of a run, at a glance."""
    if metric.whole or not metric.last:
        return 0
    if metric.reads:
        furthest = [0]
        for one in metric.found:
            length = length_of(program, inputs, one.node) or 1
            part = one.part["pos"]
            numbers = _left(Place("", part={"pos": _listed(part)}), {"pos": length})
            furthest += [length - 1 - number for number in numbers["pos"]]
        return max(furthest)
    mask, given = shown_positions(program, inputs, output), metric.pos or (-1,)
    if mask is None and set(given) == {-1}:
        return 0
    length, hidden = length_of(program, inputs, output) or 1, 0
    if mask is not None:
        if min(given) < -1:
            return length - 1
        hidden = int(aligned(mask, length).flip(1).int().argmax(1).max())
    return min(length - 1, max(length - 1 - one if one >= 0 else hidden - 1 - one for one in given))


def nodes_read(program: Program, metric: Metric) -> tuple[str, ...]:
    """Return the nodes that a metric reads. Raise MetricError for an output that is not there."""
    everything = output_names(program)
    if metric.reads:
        if not metric.found:
            raise MetricError(f"the metric {metric.name!r} reads sites of a model, and is not of one yet.")
        own = tuple(dict.fromkeys(one.node for one in metric.found))
        return tuple(dict.fromkeys((*everything, *own))) if metric.whole else own
    if metric.whole:
        return everything
    named = field_names(program, metric.output) or everything
    if len(named) != 1:
        raise MetricError(
            f"the metric {metric.name!r} reads {metric.output!r}, and the model's outputs are "
            f"{described_fields(program)}."
        )
    return named


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


def expect_prompts(metric: Metric, prompts: int, where: str, total: int | None = None) -> None:
    """Raise MetricError where a metric has answers for another number of prompts than a run has.

    0 is a number of prompts that is not known. `total`: how many all runs have together.
    """
    if prompts and metric.prompts not in {None, prompts}:
        together = f" of the {total} in all batches" if total not in {None, prompts} else ""
        raise MetricError(
            f"the metric {metric.name!r} is made for {metric.prompts} prompts, and {where} has {prompts}. "
            f"Give one answer for all prompts, or one for each{together}; several answers of one prompt are "
            "a set, `{5, 7}`, or a list in the list, `[[5, 7]]`."
        )


def one_number(found: Mapping[str, int | None]) -> int | None:
    """The number of prompts that all parts of a metric are made for; None is any. Raises MetricError."""
    known = {number for number in found.values() if number is not None}
    if len(known) > 1:
        counts = " and ".join(f"{number} {what}" for what, number in found.items())
        raise MetricError(f"{counts}; give one for all prompts, or one for each.")
    return next(iter(known), None)


def expect_apart(answers: Sequence[Sequence[int]], wrong: Sequence[Sequence[int]]) -> None:
    """Raise MetricError where a prompt has a token among its answers and among its wrong answers."""
    for number, (own, others) in enumerate(zip(answers, wrong, strict=True)):
        both = sorted(set(own) & set(others))
        if both:
            of = f"prompt {number + 1} has " if len(answers) > 1 else ""
            raise MetricError(
                f"{of}the token {both[0]} as answer and as wrong answer: their difference says nothing. Give "
                "different tokens."
            )


def measured(metric: Metric, stack: Tensor) -> Tensor:
    """The metric as [world, prompt] in float64, of a stack [world, prompt, position, ...] of its output.

    Raises MetricError when it returns something else, or NaN.
    """
    return fetched(metric, applied(metric, stack))


def applied(metric: Metric, stack: Tensor) -> Tensor:
    """The metric of a stack, where it was computed: not yet looked at, so that no device is waited for."""
    worlds, batch = stack.shape[:2]
    if metric.last:
        stack = _positioned(metric, stack)
    found = metric.compute(stack)
    if not isinstance(found, torch.Tensor) or found.shape != (worlds, batch):
        raise MetricError(
            f"the metric {metric.name!r} returned {_shape(found)}; expected one number for each prompt of "
            f"each world: shape ({worlds}, {batch})."
        )
    return found


def _positioned(metric: Metric, stack: Tensor) -> Tensor:
    """[world, prompt, vocabulary] at the position of each prompt, where a stack has positions.

    It may have the last positions alone: they are counted from the end.
    """
    if stack.ndim < 4:
        return stack
    last, furthest = stack.shape[2] - 1, max(metric.behind, default=0)
    if furthest > last:
        raise MetricError(
            f"the metric {metric.name!r} reads a position with {furthest} others behind it, and the output "
            f"has the last {last + 1} alone. Capture the model without `logits_to_keep`, or pad on the left."
        )
    if len(set(metric.behind)) < 2:
        return stack.select(2, last - furthest)
    rows = brought(torch.tensor([last - one for one in metric.behind]), stack.device)
    index = rows.reshape(1, -1, *[1] * (stack.ndim - 2)).expand(*stack.shape[:2], 1, *stack.shape[3:])
    return stack.gather(2, index).squeeze(2)


def measured_whole(metric: Metric, outputs: Any, batch: int) -> Tensor:
    """A function of all outputs of one world, as [1, prompt] in float64; see `applied_whole`."""
    return fetched(metric, applied_whole(metric, outputs, batch))


def applied_whole(metric: Metric, outputs: Any, batch: int) -> Tensor:
    """A function of all outputs of one world, as [1, prompt]; one number stands for all. Not yet looked at.

    A batch of 0 prompts is one of which it is not known how many it has: then the function says.
    """
    found = metric.compute(outputs)
    if isinstance(found, int | float):
        found = torch.tensor(found, dtype=torch.float64)
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
    """Numbers of a metric on the CPU, in float64. Raises MetricError where one is complex or NaN."""
    if found.is_complex():
        raise MetricError(
            f"the metric {metric.name!r} returned complex numbers ({found.dtype}), and a metric is real. "
            "Return `.real`, `.imag` or `.abs()` of them."
        )
    numbers = found.detach().to("cpu", torch.float64, copy=True)  # the function may write to its own again
    if torch.isnan(numbers).any():
        raise MetricError(
            f"the metric {metric.name!r} is NaN in {int(numbers.isnan().sum())} of {numbers.numel()} cases. "
            "Look for NaN in the source's values, for a division by zero in the metric, or for padded "
            "prompts, of which eager attention in float64 makes NaN: load the model with "
            'attn_implementation="sdpa", or in float32.'
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
        which = "the token" if what == "token" else f"{what} token"
        raise MetricError(f"{which} {unknown[0]} is not in the vocabulary of {logits.shape[-1]}.")
    if len(tokens) == 1:
        return logits.select(-1, int(tokens[0]))
    index = (
        brought(tokens, logits.device).expand(logits.shape[1])[None, :, None].expand(logits.shape[0], -1, 1)
    )
    return logits.gather(-1, index)[..., 0]


def _tokens(token: Token, what: str) -> list[int]:
    """Tokens as plain numbers: one for all prompts, or one for each. Raises MetricError for what are none."""
    try:
        with own_settings():
            found = torch.as_tensor(expect_few(token))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if found is not None and not found.numel():
        raise MetricError(f"{what}: no tokens; give one for all prompts, or one for each.")
    if (
        found is None
        or found.is_meta
        or found.layout is not torch.strided
        or found.is_floating_point()
        or found.is_complex()
        or found.dtype == torch.bool
    ):
        raise MetricError(
            f"{what}: a token is its number in the vocabulary, and {describe(token)} is none. Look it up "
            "with `tokenizer.convert_tokens_to_ids(...)`."
        )
    numbers: list[int] = found.reshape(-1).tolist()
    return numbers


def _prompts(tokens: Sequence[object]) -> int | None:
    """For how many prompts there are tokens: one is for any number of them."""
    return len(tokens) if len(tokens) > 1 else None


def _repeated(tokens: list[int], count: int) -> list[int]:
    """Tokens for so many prompts, where there is one for all or one for each."""
    return tokens * count if len(tokens) == 1 else tokens


def _some(tokens: Sequence[T], numbers: Sequence[int]) -> list[T]:
    """The tokens of some prompts; one for all stays one for all."""
    return list(tokens) if len(tokens) == 1 else [tokens[number] for number in numbers]


def _shape(found: Any) -> str:
    shape = getattr(found, "shape", None)
    return f"a {type(found).__name__}" if shape is None else f"shape {tuple(shape)}"

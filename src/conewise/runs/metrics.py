"""Metrics: numbers read off a model's outputs and sites, for a stack of worlds at once.

Each says which output and which positions it reads; one that reads one position of each prompt does not pay
for those in front of it. Padding is never read: the last position is the last one that the mask shows. The
metrics that come with the package are in `metric_words.py`.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from conewise.anatomy.attention import attention_argument
from conewise.anatomy.axes import resolved
from conewise.anatomy.padding import aligned, length_of, reads_ahead, shown_positions
from conewise.anatomy.placements import Outputs
from conewise.anatomy.places import EdgePlace, Place, SourcedPlace
from conewise.anatomy.sites import Located
from conewise.errors import MetricError, WeightsChangedError
from conewise.program.records import ATTENTION, Program
from conewise.program.rehearsal import with_numbers
from conewise.program.tensors import brought
from conewise.program.walk import described_fields, field_names, output_names
from conewise.templates import heading, note, shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Metric:
    """A number for each prompt of each world.

    `compute` takes the output `output` as [world, prompt, ...] and returns [world, prompt]. If `last` is
    true, it takes only one position of each prompt, as [world, prompt, vocabulary]. With `whole`, it takes
    instead all outputs of one world, in the module's own structure, and returns [prompt] or one number.

    That position is `pos`, one for all prompts or one for each, or the last position that the attention mask
    shows if `pos` is None. `at_run` finds it in a run, as the number of positions `behind` it. A metric that
    reads all positions is `shown(mask)` if some are padding. If it reads no position before the last `rows`,
    it is `ending(count)` for logits of only that many last positions.

    A metric that reads only the logits of a few `tokens` lists them, and `among(columns)` is the same metric
    for logits reduced to these tokens, `columns[token]` being a token's column. `linear` has the (token,
    coefficient) pairs of a metric that is a sum of logits, one row for all prompts or one for each; it is
    empty for others. `copies` is the number of copies that it makes of its inputs, for the plan's memory.

    `prompts` is the number of prompts for which it has answers, targets or a reference; None if it takes any
    number. If it is a number, `of_prompts(numbers)` is the same metric for some of these prompts, by number,
    in that order. `reference` holds the weights and the graph of a run that it compares with.

    A metric given in texts is incomplete until it has a tokenizer: `of_text(tokenizer)` is the metric.
    `ends_in`: the tokens with which prompts have to end, one row for all or one for each.

    A metric with `reads` reads these sites: `compute` takes the value of each, as [world, prompt, ...]. With
    `whole`, it takes instead all outputs of one world, followed by the values, as [prompt, ...]. `found` has
    the sites as located in a model. The metric can be a vector: then `vector` gives its axes after [world,
    prompt], from the lengths of the sites.
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
    rows: int = 0
    ending: Callable[[int], Metric] | None = None
    reference: Reference | None = None
    of_text: Callable[[Any], Metric] | None = None
    reads: tuple[Place, ...] = ()
    found: tuple[Located, ...] = ()
    vector: Callable[[Sequence[Mapping[str, int]]], Vector | None] | None = None
    ends_in: tuple[tuple[int, ...], ...] = ()

    @property
    def is_of_output(self) -> bool:
        """True if it reads one output, and no site."""
        return not self.reads and not self.whole

    def __repr__(self) -> str:
        return f"Metric {self.name}: {self._formula()}"

    def _repr_html_(self) -> str:
        count = "any number of prompts"
        if self.prompts is not None:
            count = f"{self.prompts:,} prompt{'s' if self.prompts > 1 else ''}"
        return shown(heading(f"Metric {self.name}", self._formula()), note(f"For {count}."))

    def _formula(self) -> str:
        """The computation, as far as it is known."""
        kind = self.described[0] if self.described else "a function"
        if self.of_text is not None:
            return f"of {', '.join(map(_brief, self.described))}, as the model's tokenizer reads them"
        if self.reads:
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
        return f"{kind} {where}"


def _brief(given: object) -> str:
    """Tokens or positions as they were given; of many the first few."""
    listed = list(given) if isinstance(given, list | tuple) else [given]
    return ", ".join(map(repr, listed[:3])) + (", ..." if len(listed) > 3 else "")


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


# -- what a metric reads ---------------------------------------------------------------------------


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


def left_over(place: Place, lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The axes that no number of a place selects, and the numbers of what is left along each."""
    return {
        axis: numbers_along(place.part.get(axis, slice(None)), length)
        for axis, length in lengths.items()
        if not isinstance(place.part.get(axis), int)
    }


def numbers_along(part: Any, length: int) -> tuple[int, ...]:
    """The numbers that a part of an axis of this length selects, from 0."""
    given = [part] if isinstance(part, int) else range(length)[part] if isinstance(part, slice) else part
    return tuple(number % length for number in given)


# -- where it reads it in a run --------------------------------------------------------------------


def at_run(metric: Metric, model: Any, inputs: Mapping[str, Tensor], output: str) -> Metric:
    """A metric with the positions that it reads of a run with these inputs, where `output` is what it reads.

    Raises MetricError where that is not known, or where a position is padding or is not there.
    """
    if metric.reference is not None:
        metric.reference.expect_current(metric.name)
    if metric.reads:
        found = [
            _site_at_run(place, one, model.program, inputs)
            for place, one in zip(metric.reads, metric.found, strict=True)
        ]
        return replace(metric, found=tuple(found))
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
    outputs = Outputs(program)
    if (mask is None and metric.pos in {None, (-1,)}) or not outputs.has_positions(output):
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


def _site_at_run(place: Place, one: Located, program: Program, inputs: Mapping[str, Tensor]) -> Located:
    """A site that is read, with its positions counted from the end of the run.

    A position from the end is that of each prompt, behind which there may be padding. Raises MetricError for
    padding.
    """
    part: dict[str, Any] = dict(one.part)
    own = {"pos", "query_pos", "key_pos"} & one.part.keys()
    length = length_of(program, inputs, one.node) if own else None
    if length is None:
        return one
    mask = shown_positions(program, inputs, one.node, one.site.stack)
    shown = [True] * length if mask is None else aligned(mask, length).all(0).tolist()
    for axis in own:
        if _is_from_end(part[axis]) and not all(shown[n] for n in numbers_along(part[axis], length)):
            raise MetricError(
                f"{place}: its position is counted from the end of the batch, where some prompt has "
                "padding. Pad on the left, so that the last position is that of every prompt, or "
                "give prompts of one length at a time."
            )
    if (at := part.get("pos")) is not None:
        if isinstance(at, int) and not -length <= at < length:
            raise MetricError(f"{place}: there is no position {at}, of {length}.")
        behind = tuple(number - length for number in numbers_along(at, length))
        part["pos"] = behind[0] if isinstance(at, int) else behind
    return replace(one, part=part)


def _is_from_end(given: Any) -> bool:
    if isinstance(given, slice):
        return any(one is not None and one < 0 for one in (given.start, given.stop)) or given.stop is None
    return any(one < 0 for one in ([given] if isinstance(given, int) else given or ()))


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
    """Raise MetricError where the last position is nothing special. Tried once for a model and an output.

    Nothing is tried where the module's class and every fused attention say that it is causal.
    """
    known: dict[str, bool] = vars(model).setdefault("_reads_ahead", {})
    length = length_of(model.program, inputs, output)
    if output not in known and length is not None and length > 1:
        attentions = [record for record in model.program.records if record.op == ATTENTION]
        is_causal = (
            model.name.endswith(("ForCausalLM", "LMHeadModel"))
            and bool(attentions)
            and all(attention_argument(record, "is_causal") for record in attentions)
        )
        known[output] = (
            not is_causal
            and Outputs(model.program).has_positions(output)
            and with_numbers()(reads_ahead)(model.graph, model.program, inputs, output)
        )
    if known.get(output):
        raise MetricError(
            f"the metric {metric.name!r} does not say which position it reads, and attention is not causal "
            f"in {model.name}: positions see tokens behind them, and the last one predicts nothing that "
            "comes next. Say it, `pos=...`: that of the mask token, say, or one for each prompt."
        )


def most_behind(metric: Metric, program: Any, inputs: Mapping[str, Tensor], output: str) -> int:
    """Bound the positions behind the first one that a metric reads of a run, at a glance."""
    if metric.rows:
        return min(metric.rows, length_of(program, inputs, output) or 1) - 1
    if metric.whole or not metric.last:
        return 0
    if metric.reads:
        furthest = [0]
        for one in metric.found:
            length = length_of(program, inputs, one.node) or 1
            furthest += [length - 1 - number for number in numbers_along(one.part["pos"], length)]
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


# -- applied to values -----------------------------------------------------------------------------


def applied(
    metric: Metric,
    prompts: int,
    stack: Tensor | None = None,
    presented: Callable[[Located], Tensor] | None = None,
    outputs: Any = None,
) -> Tensor:
    """A metric as [world, prompt, ...], where it was computed; no device is waited for.

    `stack` is the output that it is of as [world, prompt, position, ...], `presented(site)` the value of a
    site that it reads as [world, *axes], and `outputs` are all of one world, which a metric that is `whole`
    takes. A batch of 0 prompts is one of which it is not known how many it has: then the function says.
    """
    values = (
        [] if presented is None else [_value_of(metric, one, presented(one), prompts) for one in metric.found]
    )
    if metric.whole:
        size = None if metric.vector is None else metric.vector([])
        found = metric.compute(outputs, *(value[0] for value in values))
        return as_numbers(
            metric.name, found, prompts, None if size is None else size.size, of_sites=bool(metric.reads)
        )[None]
    if metric.reads:
        found, expected = metric.compute(*values), tuple(values[0].shape[:2])
        what = f"numbers for each prompt of each world: shape {expected}, ..."
    else:
        assert stack is not None
        expected = tuple(stack.shape[:2])
        found = metric.compute(positioned(metric, stack) if metric.last else stack)
        what = f"one number for each prompt of each world: shape {expected}."
    if not isinstance(found, Tensor) or (found.shape[:2] if metric.reads else found.shape) != expected:
        raise MetricError(f"the metric {metric.name!r} returned {shape_of(found)}; expected {what}")
    return found


def _value_of(metric: Metric, one: Located, shown: Tensor, prompts: int) -> Tensor:
    """The part of a site's value [world, *axes] that a metric reads, as [world, prompt, ...]."""
    value = shown[(slice(None), *resolved(one.view.axes, one.part, shown.shape[1:]))]
    has_batch = "batch" in one.view.axes
    value = value.movedim(1 + one.part_axes.index("batch"), 1) if has_batch else value.unsqueeze(1)
    if prompts and value.shape[1] != prompts:
        raise MetricError(
            f"the metric {metric.name!r} reads {value.shape[1]} rows of {one.site.name}, and the run has "
            f"{prompts} prompts: it is not known which rows are which prompt's."
        )
    return value


def as_numbers(
    name: str, found: Any, prompts: int, size: int | None = None, *, of_sites: bool = True
) -> Tensor:
    """Return what a function of one world returned, as [prompt] or [prompt, size]; one stands for all."""
    if isinstance(found, int | float):
        found = torch.tensor(found, dtype=torch.float64)
    more = () if size is None else (size,)
    if isinstance(found, Tensor) and found.shape == more:
        found = found.expand(prompts or 1, *more)
    if not isinstance(found, Tensor) or found.shape != (prompts or len(found), *more):
        what = "one number, or one for each of" if size is None else f"a vector of {size}, or one for each of"
        said = " A vector needs `size=`, how many numbers it has." if size is None and of_sites else ""
        raise MetricError(
            f"the metric {name!r} returned {shape_of(found)}; expected {what} the {prompts} prompts: shape "
            f"({', '.join(map(str, (prompts, *more)))},).{said}"
        )
    return found


def positioned(metric: Metric, stack: Tensor) -> Tensor:
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


def flat(found: Tensor) -> Tensor:
    """Numbers [world, prompt, ...] of a metric as [world, entry, prompt]: of one number, one entry."""
    return found.flatten(2).movedim(1, 2) if found.ndim > 2 else found[:, None]


def shape_of(found: Any) -> str:
    """The shape of what was given, for a message."""
    shape = getattr(found, "shape", None)
    return f"a {type(found).__name__}" if shape is None else f"shape {tuple(shape)}"

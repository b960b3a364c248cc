"""Interventions: what is put into a site, given what is there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from conewise.errors import PatchError, describe
from conewise.identity.digests import inputs_digest
from conewise.identity.keyed import Keyed, expect_key
from conewise.locations.located import Located
from conewise.locations.places import Place
from conewise.locations.sites import WHERE
from conewise.program.tensors import Tensor, copy_of, full_like, zeros_like
from conewise.program.weights import Sums
from conewise.runs.baseline import baseline
from conewise.runs.captured import Captured
from conewise.runs.interventions.filling import (
    added,
    averaged,
    first_blind,
    has_nan,
    noised,
    resampled,
    spread_out,
    spread_over,
    stacked,
)
from conewise.runs.reading import Intervening, Reading
from conewise.runs.text_inputs import is_text, text_inputs

PartsOf = Callable[[Reading], Tensor]
"""What the writers of a model put into its residual stream in a run: [writer, batch, pos, d_model]."""

WORDS = ("zero", "mean")
"""Interventions that are given as a word."""


@dataclass(frozen=True, slots=True, eq=False)
class Intervention(Intervening):
    """`part(place, base)` is what a world puts at `place` of the run `base`; `name` says what it is.

    `described` is all that it depends on: equal ones mean the same intervention. With `is_function`, the part
    is a function of what would have been there: in a world that patches several places, that need not be
    what stands in the base. `runs` are those that it reads; `begin`, where there is one, is called with the
    bits of the weights before a sweep reads parts.

    `whole(site, base)`, where there is one, is the value of a whole site, of which parts are taken, many at
    once. With `is_run` it is a run's own value, in which NaN is refused.

    `value` is a tensor or a number that is put in every base alike, and `scale · shift` is added to what is
    there: many of them are put in at once. Both have the shape of the last axes of the part.

    `expect_kind(place, located)` raises for sites that it is not for, before anything runs, and
    `expect_base(cells, base)` for places, those of each world, at which nothing meaningful can be put into
    that base.

    `written(parts_of, base)` is what writers put into the residual stream instead of their own parts, where
    edges are patched: `parts_of(run)` are the parts of a run, [writer, batch, pos, d_model].
    """

    name: str
    part: Callable[[Place, Reading], Tensor | Callable[[Tensor], Tensor]]
    described: tuple[Any, ...] = ()
    is_function: bool = False
    runs: tuple[Reading, ...] = ()
    begin: Callable[[Sums], None] | None = None
    whole: Callable[[Place, Reading], Tensor] | None = None
    is_run: bool = False
    written: Callable[[PartsOf, Reading], Tensor] | None = None
    value: Tensor | float | None = None
    shift: Tensor | None = None
    scale: float = 1.0
    expect_kind: Callable[[Place, Located], None] | None = None
    expect_base: Callable[[Sequence[Sequence[Place]], Reading], None] | None = None

    @property
    def how(self) -> str:
        """How it is put in: see `SourcedPlace`."""
        if self.value is not None:
            return "value"
        return "shift" if self.shift is not None else "function" if self.is_function else "whole"

    def for_world(self, place: Place, base: Reading) -> Tensor | Callable[[Tensor], Tensor]:
        """What a patch at `place` of a fork of `base` is."""
        if self.expect_kind is not None:
            self.expect_kind(place, base.model.locate(place))
        if self.expect_base is not None:
            self.expect_base([[place]], base)
        if self.begin is not None:
            self.begin(base.model.weights.contents().whole)
        part = self.part(place, base)
        return copy_of(part) if isinstance(part, Tensor) else part


def intervention(function: Callable[[Tensor], Tensor], *, key: str) -> Keyed:
    """A function of what would have been there, under a key of its own.

    A stored sweep goes on only if what it puts in is the same. A plain function is identified by its code
    and by all that it reads: globals, closures, helper modules, weights. Where that cannot be known for
    certain (it reads a file, an iterator, a foreign object), storing is refused, and the key says it
    instead: equal keys mean the same function. Give another key whenever it means something else.

    It can be given wherever the function can: as `source`, and to `world.patch`.
    """
    if not callable(function):
        raise PatchError(
            f"an intervention is a function of what would have been there, not {describe(function)}."
        )
    return Keyed(function, expect_key(key, PatchError))


def add(vector: Tensor, scale: float = 1.0) -> Intervention:
    """Add `scale · vector` to the site: steering. The vector has the site's last axis, or its whole shape."""
    if not isinstance(vector, Tensor):
        raise PatchError(f"cw.add takes a tensor, which it adds to what is there, not {describe(vector)}.")
    scale, vector = _as_scale(scale), copy_of(vector)
    return Intervention(
        f"add(scale={scale})",
        lambda place, _: lambda present: added(present, vector, scale, str(place)),
        ("add", scale, vector),
        is_function=True,
        written=lambda parts_of, base: added(parts_of(base), vector, scale, "what is written"),
        shift=vector,
        scale=scale,
    )


def masked() -> Intervention:
    """Take −∞: at `attn_scores`, that hides a key from a query, and the softmax goes over the other keys.

    Attention from query to key is then none, and the weights of the others sum up to one again, as in the
    knock-outs of Geva et al. (2023). A query that sees no other key is refused: nothing would be left.
    """
    return Intervention(
        "masked",
        _hidden,
        ("masked",),
        whole=_hidden,
        expect_kind=_expect_scores,
        expect_base=_expect_other_keys,
    )


def _hidden(place: Place, base: Reading) -> Tensor:
    return full_like(base.read(place), -math.inf)


def _expect_scores(place: Place, found: Located) -> None:
    kind = found.site.kind
    if kind in WHERE and kind.removeprefix("cross_") != "attn_scores":
        raise PatchError(
            f"cw.masked() hides scores from the softmax, and {place} holds {WHERE[kind]}. Mask attn_scores: "
            'cw.sites("attn_scores", layer=":", query_pos=-1, key_pos=":").'
        )


def _expect_other_keys(cells: Sequence[Sequence[Place]], base: Reading) -> None:
    """Raise PatchError where a world hides all keys that a query sees."""
    sites: dict[Place, list[list[Place]]] = {}
    for places in cells:
        here: dict[Place, list[Place]] = {}
        for place in places:
            here.setdefault(Place(place.name, place.layer, place.stack), []).append(place)
        for site, own in here.items():
            sites.setdefault(site, []).append(own)
    for site, groups in sites.items():
        axes = base.model.locate(site).view.axes
        keys = axes.index("key_pos") if "key_pos" in axes else len(axes) - 1
        blind = first_blind(base.read(site), axes, keys, [[place.part for place in own] for own in groups])
        if blind is not None:
            raise PatchError(
                f"{' + '.join(map(str, groups[blind]))} hides all keys that a query sees, so that there is "
                "nothing to attend to. Leave it out: in a causal model the first query sees the first key "
                "alone, so choose query_pos from 1 on."
            )


def constant(given: Tensor | float) -> Intervention:
    """Take a tensor or a number, the same for all of the part's axes that it does not have."""
    if isinstance(given, Tensor):
        value: Tensor | float = copy_of(given)
        name = f"tensor {tuple(given.shape)}"
    else:
        value, name = given, f"{given:g}"

    def part(place: Place, base: Reading) -> Tensor:
        return spread_over(value, base.read(place), str(place))

    return Intervention(name, part, ("value", value), value=value)


def _as_scale(scale: object) -> float:
    number = _as_number(scale)
    if number is None or not math.isfinite(number):
        raise PatchError(f"cw.add multiplies its vector by a finite number, not by {describe(scale)}.")
    return number


def _as_number(given: object) -> float | None:
    """A plain number, whatever kind of number was given; None for what is none."""
    if isinstance(given, Tensor) and given.ndim == 0:
        given = given.item()
    if isinstance(given, bool):
        return None
    if isinstance(given, int | float):
        return given
    return float(given) if isinstance(given, Real) else None


def noise(scale: float, seed: int = 0) -> Intervention:
    """Add Gaussian noise of standard deviation `scale`.

    It is the same for the same seed, place and inputs, on every device and however the worlds are evaluated.
    """

    def part(place: Place, base: Reading) -> Callable[[Tensor], Tensor]:
        drawn = f"{seed}/{place}/{inputs_digest(base.inputs)}"
        return lambda present: noised(present, scale, drawn)

    def written(parts_of: PartsOf, base: Reading) -> Tensor:
        return noised(parts_of(base), scale, f"{seed}/parts/{inputs_digest(base.inputs)}")

    return Intervention(
        f"noise(scale={scale}, seed={seed})", part, ("noise", scale, seed), is_function=True, written=written
    )


def resample(run: Reading, seed: int = 0) -> Intervention:
    """Take for each prompt the values of another prompt of `run`, the same one at every place.

    Where `run` has as many prompts as the base, no prompt gets those of its own row; else they are drawn with
    replacement.
    """

    def part(place: Place, base: Reading) -> Tensor:
        axes = base.model.locate(place).part_axes
        if "batch" not in axes:
            raise PatchError(
                f"{place} has no prompts to exchange: its axes are {', '.join(axes) or 'none'}. Resample a "
                "place that has all of the batch."
            )
        return resampled(run.read(place), base.read(place), axes.index("batch"), str(seed))

    def written(parts_of: PartsOf, base: Reading) -> Tensor:
        return resampled(parts_of(run), parts_of(base), 1, str(seed))

    described = ("resample", seed, run)
    return Intervention(f"resample(seed={seed})", part, described, runs=(run,), written=written)


def mean(model: Captured, dataset: Iterable[Any], *, per_position: bool = False) -> Intervention:
    """Take the mean over a dataset: over its prompts and positions, or `per_position` over prompts alone.

    The dataset is a list of the model's inputs, or anything that can be gone through again. It is streamed,
    one batch in memory at a time: once for each kind of site that is asked for, for all layers together. A
    model that was captured with its tokenizer takes texts of any lengths.
    """
    batches = list(dataset) if isinstance(dataset, Iterator) else dataset
    if isinstance(batches, str):
        batches = [batches]
    if isinstance(batches, list | tuple) and any(map(is_text, batches)):
        batches = [text_inputs(model, one) if is_text(one) else one for one in batches]
    over = ("batch",) if per_position else ("batch", "pos")
    means: dict[str, Tensor] = {}
    made_with: list[Sums] = []

    def begin(weights: Sums) -> None:
        """Forget the means of other weights."""
        if made_with != [weights]:
            means.clear()
            made_with[:] = [weights]

    def gather(place: Place) -> None:
        wanted = _alike(model, place)
        sums: dict[str, tuple[Tensor, int]] = {}
        for batch in batches:
            run = baseline(model, (), batch, wanted)
            for one in wanted:
                axes = model.locate(one).view.axes
                sums[str(one)] = averaged(sums.get(str(one)), run.read(one), axes, over, str(one))
        if not sums:
            raise PatchError("the mean over a dataset without a batch: give at least one.")
        means.update({name: total / count for name, (total, count) in sums.items()})

    def part(place: Place, base: Reading) -> Tensor:
        whole = Place(place.name, place.layer, place.stack)
        if str(whole) not in means:
            gather(whole)
        return spread_out(means[str(whole)], base.read(whole), base.model.locate(place).view.axes, place.part)

    def written(parts_of: PartsOf, base: Reading) -> Tensor:
        present = parts_of(base)
        total: tuple[Tensor, int] | None = None
        axes = ("writer", "batch", "pos", "d_model")
        for batch in batches:
            total = averaged(total, parts_of(baseline(model, (), batch)), axes, over, "what is written")
        if total is None:
            raise PatchError("the mean over a dataset without a batch: give at least one.")
        return spread_out(total[0] / total[1], present, axes, {})

    described = ("mean", per_position, batches, model)
    return Intervention("mean over a dataset", part, described, begin=begin, whole=part, written=written)


def _alike(model: Captured, place: Place) -> list[Place]:
    """The place, and those of its kind in the other layers."""
    if place.layer is None:
        return [place]
    return [Place(place.name, layer, place.stack) for layer in model.sites.layers(place.name, place.stack)]


def as_intervention(given: Any, model: Captured) -> Intervention:
    """What people may give as `source`: a run, "zero", "mean", an intervention, or a function."""
    if isinstance(given, Intervention):
        return given
    if isinstance(given, Reading):
        return _from(given, model)
    if given is None:
        return Intervention("none", _nothing, ("none",))
    if isinstance(given, str) and given == "zero":
        return Intervention("zero", _zeros, ("zero",), whole=_zeros, written=_nothing_written)
    if isinstance(given, str) and given == "mean":
        return Intervention("mean", _own_mean, ("mean",), whole=_own_mean, written=_mean_written)
    if callable(given):
        name = getattr(given, "__name__", "function")
        written = partial(_function_written, given)
        return Intervention(name, lambda *_: given, ("function", given), is_function=True, written=written)
    if isinstance(given, Tensor):
        raise PatchError(
            "a sweep's source is no tensor: its places differ. Give the tensor to cells of its own, "
            "`cw.cell(place, source=tensor)`."
        )
    raise PatchError(
        f"cannot patch with {given!r}: source is a run, 'zero', 'mean', `noise(...)`, `add(...)`, "
        "`resample(...)`, `mean(...)` or a function of what would have been there."
    )


def as_own(given: Any, model: Captured) -> Intervention:
    """What people may give as the source of a cell: what a sweep takes, a tensor, or a number."""
    if isinstance(given, Tensor):
        return constant(given)
    number = _as_number(given)
    if number is not None:
        return constant(number)
    if not isinstance(given, str | Intervention | Reading) and not callable(given):
        raise PatchError(
            f"a cell cannot have {describe(given)} as its source: give a tensor, a number, a run, 'zero', "
            "'mean', an intervention such as `cw.add(...)`, or a function of what would have been there."
        )
    return as_intervention(given, model)


def _nothing(place: Place, _: Reading) -> Tensor:
    raise PatchError(f"no source for {place}: give the sweep one, `source=...`, or the cell its own.")


def _from(source: Reading, model: Captured) -> Intervention:
    if source.model is not model:
        raise PatchError(
            f"the source is a run of another model ({source.model.name}); base and source must be runs of "
            f"the same captured model ({model.name})."
        )

    def part(place: Place, _: Reading) -> Tensor:
        value = source.read(place)
        if has_nan(value):
            raise PatchError(f"the source's value at {place} has NaN in it; nothing was patched.")
        return value

    return Intervention(
        "source",
        part,
        ("source",),
        runs=(source,),
        whole=lambda place, _: source.read(place),
        is_run=True,
        written=lambda parts_of, _: parts_of(source),
    )


def _zeros(place: Place, base: Reading) -> Tensor:
    return zeros_like(base.read(place))


def _nothing_written(parts_of: PartsOf, base: Reading) -> Tensor:
    return zeros_like(parts_of(base))


def _mean_written(parts_of: PartsOf, base: Reading) -> Tensor:
    """The mean of each writer's part over the base's own prompts and positions."""
    own = parts_of(base)
    return own.mean((1, 2), keepdim=True).expand_as(own)


def _function_written(function: Callable[[Tensor], Tensor], parts_of: PartsOf, base: Reading) -> Tensor:
    own = parts_of(base)
    changed = [function(part.clone()) for part in own]
    for part, present in zip(changed, own, strict=True):
        shape = getattr(part, "shape", None), getattr(part, "dtype", None)
        if shape != (present.shape, present.dtype):
            raise PatchError(
                f"the function for what is written returned {describe(part)}; it has to return a tensor of "
                f"shape {tuple(present.shape)}, {present.dtype} (batch, pos, d_model)."
            )
    return stacked(changed)


def _own_mean(place: Place, base: Reading) -> Tensor:
    """The site's mean over the base's own prompts and positions."""
    found = base.model.locate(place)
    return found.mean(base._present(found), base._sizes, place)

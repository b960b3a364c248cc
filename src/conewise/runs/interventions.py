"""Interventions: what is put into a site, given what is there."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, overload

import torch

from conewise.anatomy.axes import Selection, resolved
from conewise.anatomy.padding import hides_some, shown_entries, shown_rows
from conewise.anatomy.places import Place, SourcedPlace
from conewise.anatomy.selectors import Sources
from conewise.anatomy.sites import WHERE, Located
from conewise.arguments import NonNegative, checked, expect
from conewise.errors import NAN_OF_PADDING, PatchError, SweepError, describe
from conewise.jobs.digests import inputs_digest
from conewise.jobs.identity import Keyed, expect_key
from conewise.program.tensors import Tensor, copy_of, has_nan, mean_of, recording, sum_of
from conewise.program.weights import Sums
from conewise.runs.captured import Captured
from conewise.runs.inputs import inputs_like
from conewise.runs.reading import Intervening, Reading
from conewise.runs.run import baseline

PartsOf = Callable[[Reading], Tensor]
"""The parts that writers put into the residual stream in a run: [writer, batch, pos, d_model]."""

PARTS = ("writer", "batch", "pos", "d_model")
"""The axes of what writers put into the stream."""

WORDS = ("zero", "mean")
"""Interventions that are given as a word."""


@dataclass(frozen=True, slots=True, eq=False)
class Intervention(Intervening):
    """An intervention: `part(place, base)` is the value that a world puts at `place` of the run `base`.

    `name` describes it, and `described` is everything that it depends on: equal ones mean the same
    intervention. With `is_function`, the part is a function of the unpatched value: in a world that patches
    several places, this can differ from the value in the base. `runs` are the runs that it reads, and `model`
    computes the runs that it makes itself; `begin`, if there is one, is called with the bits of the weights
    before a sweep reads parts.

    `whole(site, base)`, if there is one, is the value of a whole site, from which parts are taken, many at
    once. With `is_run` it is a run's own value, in which NaN is refused.

    `value` is a tensor or a number that is the same in every base, and `scale · shift` is added to the
    present value: many of them are applied at once. Both have the shape of the last axes of the part.

    `expect_kind(place, located)` raises for unsuitable sites, before anything runs, and `expect_base(cells,
    base)` raises for the places of each world at which nothing meaningful can be put into that base.

    `written(parts_of, base, entry)` is the value that writers put into the residual stream instead of their
    own parts, if edges are patched: `parts_of(run)` are the parts of a run, [writer, batch, pos, d_model],
    and `entry` is a value of the stream that they are in.
    """

    name: str
    part: Callable[[Place, Reading], Tensor | Callable[[Tensor], Tensor]]
    described: tuple[Any, ...] = ()
    is_function: bool = False
    runs: tuple[Reading, ...] = ()
    begin: Callable[[Sums], None] | None = None
    whole: Callable[[Place, Reading], Tensor] | None = None
    is_run: bool = False
    written: Callable[[PartsOf, Reading, str], Tensor] | None = None
    value: Tensor | float | None = None
    shift: Tensor | None = None
    scale: float = 1.0
    expect_kind: Callable[[Place, Located], None] | None = None
    expect_base: Callable[[Sequence[Sequence[Place]], Reading], None] | None = None
    model: Captured | None = None
    by_layer: Mapping[int, Intervention] | None = None

    def expect_model(self, model: Captured) -> None:
        """Raise OtherModelError if it reads runs of another model."""
        for own in (*([] if self.model is None else [self.model]), *(run.model for run in self.runs)):
            model.expect_own(f"the source, {self.name}, is one", own)

    @property
    def how(self) -> str:
        """The way in which it is put in: see `SourcedPlace`."""
        if self.value is not None:
            return "value"
        return "shift" if self.shift is not None else "function" if self.is_function else "whole"

    def for_world(self, place: Place, base: Reading) -> Tensor | Callable[[Tensor], Tensor]:
        """Return the patch at `place` of a fork of `base`."""
        self.expect_model(base.model)
        if self.expect_kind is not None:
            self.expect_kind(place, base.model.locate(place))
        if self.expect_base is not None:
            self.expect_base([[place]], base)
        if self.begin is not None:
            self.begin(base.model.weights.contents().whole)
        part = self.part(place, base)
        for run in self.runs:
            base.expect_same_weights(run)
        return copy_of(part) if isinstance(part, Tensor) else part


@checked
def intervention(function: Callable[[Tensor], Tensor], *, key: str) -> Keyed:
    """Wrap a function of the value at a site as an intervention, identified by a key.

    A stored sweep resumes only if its interventions are the same. A plain function is identified by its code
    and everything that it reads: globals, closures, helper modules, weights. If the identity is not certain
    (the function reads a file, an iterator, an object of another library), storing raises an error; give a
    key then. Equal keys stand for the same function, so change the key whenever the function changes.

    Use the result wherever a function is accepted: as `source`, and in `world.patch`.
    """
    return Keyed(function, expect_key(key, PatchError))


@overload
def add(vector: Tensor | Mapping[int, Tensor], scale: float = 1.0) -> Intervention: ...
@overload
def add(vector: Tensor | Mapping[int, Tensor], scale: Sequence[float]) -> Sources: ...
@checked
def add(
    vector: Tensor | Mapping[int, Tensor], scale: float | Sequence[float] = 1.0
) -> Intervention | Sources:
    """Add `scale · vector` to the site (steering). The vector has the site's last axis, or its whole shape.

    A mapping has a vector for each layer, `{3: v3, 4: v4}`: each site gets the vector of its layer. A list of
    scales adds an axis `scale` to a sweep, with a world for each scale at each site: `model.sweep(sites,
    base=base, source=cw.add(vector, scale=[-1, 0, 2]), metric=metric)`.
    """
    if isinstance(scale, Sequence):
        return _by_scale(vector, scale)
    if isinstance(vector, Mapping):
        return _by_layer({layer: add(one, scale) for layer, one in vector.items()}, scale)
    _expect_dense(vector, "the vector to add")
    if vector.is_complex():
        raise PatchError(
            f"the vector to add is {vector.dtype}, and its imaginary part would be lost; give a real one, "
            "`vector.real`."
        )
    with recording():
        live = vector.clone() if vector.requires_grad else copy_of(vector)

    def change(present: Tensor, where: object = "what is written") -> Tensor:
        expect_fits(live, present, where, "vector to add")
        return present + scale * live.to(present.device, present.dtype)

    found = changing(f"add(scale={scale})", change, ("add", scale, live.detach()))
    part = lambda place, _: partial(change, where=place)  # noqa: E731
    return replace(found, part=part, shift=live.detach(), scale=scale)


def changing(name: str, change: Callable[[Tensor], Tensor], described: Sequence[Any]) -> Intervention:
    """An intervention by a function of what is there, the same one at every place."""
    return Intervention(
        name,
        lambda *_: change,
        tuple(described),
        is_function=True,
        written=lambda parts_of, base, _: change(parts_of(base)),
    )


def _by_layer(parts: Mapping[int, Intervention], scale: float) -> Intervention:
    """Each site's own, by its layer. Raises PatchError for a site of another layer."""

    def part(place: Place, base: Reading) -> Any:
        return at_layer(found, place).part(place, base)

    described = [("add", scale), *((layer, own.shift) for layer, own in sorted(parts.items()))]
    found = Intervention(
        f"add(scale={scale}) by layer",
        part,
        tuple(itertools.chain(*described)),
        is_function=True,
        by_layer=dict(parts),
    )
    return found


def at_layer(given: Any, place: Place) -> Any:
    """What is put at a place: where there is a vector for each layer, that of its own."""
    parts = getattr(given, "by_layer", None)
    if parts is None:
        return given
    if place.layer not in parts:
        known = ", ".join(map(str, sorted(parts)))
        raise PatchError(f"there is no vector to add at {place}: those given are for the layers {known}.")
    return parts[place.layer]


def _by_scale(vector: Tensor | Mapping[int, Tensor], scales: Sequence[float]) -> Sources:
    """The vector at several scales. Raises PatchError for none, and for one that is named twice."""
    numbers = [expect("scale", one, "float") for one in scales]
    labels = [f"{one:g}" for one in numbers]
    if not numbers or len(set(labels)) < len(labels):
        raise PatchError(f"scale={list(scales)!r}: give at least one scale, and each once.")
    return Sources({label: add(vector, one) for label, one in zip(labels, numbers, strict=True)}, "scale")


def _expect_dense(value: Tensor, what: str) -> None:
    """Raise PatchError for a tensor without numbers of its own (device 'meta'), or in a sparse layout."""
    if value.is_meta or value.layout is not torch.strided:
        kind = "lies on the device 'meta', and has no numbers" if value.is_meta else f"is {value.layout}"
        raise PatchError(f"{what} {kind}; give a dense tensor with values, `value.to_dense()`.")


def expect_fits(
    value: Tensor,
    present: Tensor | Hole,
    where: object,
    what: str = "value",
    *,
    is_cast: bool = True,
    of: str = "",
) -> None:
    """Raise PatchError where a tensor does not have the last axes of a part, each as long or of length 1.

    Unless it `is_cast`, it has to have the part's dtype, and lie where the part does.
    """
    shape = tuple(present.shape)
    behind = shape[max(len(shape) - value.ndim, 0) :]
    if len(behind) != value.ndim or any(
        one not in (1, b) for one, b in zip(value.shape, behind, strict=True)
    ):
        axes = f" ({present.axes})" if isinstance(present, Hole) else ""
        raise PatchError(
            f"{of}the {what} at {where} has shape {tuple(value.shape)}, and the place has {shape}{axes}. "
            "Give one of that shape, or of its last axes: it is the same for all axes before."
        )
    if not is_cast and present.dtype not in {None, value.dtype}:
        raise PatchError(
            f"the {what} at {where} is {value.dtype}, and the place has {present.dtype}. Convert it first, "
            f"`value.to({present.dtype})`: nothing is cast."
        )
    if not is_cast and present.device not in {None, value.device}:
        raise PatchError(
            f"the {what} at {where} lies on {value.device}, and the place on {present.device}. Move it "
            f"first, `value.to({str(present.device)!r})`: nothing is moved."
        )


@dataclass(frozen=True, slots=True)
class Hole:
    """A part to be filled: its shape, its axes in words, its dtype and device where known."""

    shape: tuple[int, ...]
    axes: str
    dtype: torch.dtype | None
    device: torch.device | None


def masked() -> Intervention:
    """Patch in −∞: at `attn_scores`, this hides a key from a query, and the softmax runs over the other keys.

    The query then does not attend to the key, and its other weights sum to one, as in the attention knockout
    of Geva et al. (2023). A query that sees no other key raises an error.
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
    return torch.full_like(base.read(place), -math.inf)


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
        blind = _first_blind(base.read(site), axes, keys, [[place.part for place in own] for own in groups])
        if blind is not None:
            raise PatchError(
                f"{' + '.join(map(str, groups[blind]))} hides all keys that a query sees, so that there is "
                "nothing to attend to. Leave it out: in a causal model the first query sees the first key "
                "alone, so choose query_pos from 1 on."
            )


def _first_blind(
    scores: Tensor, axes: Sequence[str], keys: int, groups: Sequence[Sequence[Selection]]
) -> int | None:
    """The first group of parts that together hide all keys that some query sees; None where none does.

    A key is seen where its score is not as low as masks make it. `keys` is the dimension of the keys.
    """
    seen = scores > torch.finfo(scores.dtype).min / 2
    sole = seen & (seen.sum(keys, keepdim=True) == 1)
    flags = []
    for parts in groups:
        if len(parts) == 1 and isinstance(parts[0].get(axes[keys]), int):
            flags.append(sole[resolved(axes, parts[0], scores.shape)].any())
            continue
        left = seen.clone()
        for part in parts:
            left[resolved(axes, part, scores.shape)] = False
        flags.append((seen.any(keys) & ~left.any(keys)).any())
    return next((number for number, flag in enumerate(torch.stack(flags).tolist()) if flag), None)


def constant(given: Tensor | float) -> Intervention:
    """Take a tensor or a number, the same for all of the part's axes that it does not have."""
    if isinstance(given, Tensor):
        _expect_dense(given, "the value")
        value: Tensor | float = copy_of(given)
        name = f"tensor {tuple(given.shape)}"
    else:
        value, name = given, f"{given:g}"

    def part(place: Place, base: Reading) -> Tensor:
        """The value at all of a part, whose last axes are the value's: nothing is cast or moved."""
        present = base.read(place)
        if not isinstance(value, Tensor):
            return torch.full_like(present, value)
        expect_fits(value, present, place, is_cast=False)
        return value.expand_as(present).clone()

    return Intervention(name, part, ("value", value), value=value)


def _as_number(given: object) -> float | None:
    """A plain number, whatever kind of number was given; None for what is none."""
    if isinstance(given, Tensor) and given.ndim == 0:
        given = given.item()
    if isinstance(given, bool):
        return None
    if isinstance(given, int) and abs(given) >= 2**63:  # more than torch takes as a whole number
        try:
            return float(given)
        except OverflowError:
            raise PatchError(f"{describe(given)} is larger than any finite number.") from None
    if isinstance(given, int | float):
        return given
    return float(given) if isinstance(given, Real) else None


@checked
def noise(scale: NonNegative, seed: int = 0) -> Intervention:
    """Add Gaussian noise of standard deviation `scale`.

    The same seed, site and inputs give the same noise, on every device and in every order of evaluation.
    """

    def part(place: Place, base: Reading) -> Callable[[Tensor], Tensor]:
        drawn = f"{seed}/{place}/{inputs_digest(base.inputs)}"
        return lambda present: _noised(present, scale, drawn)

    def written(parts_of: PartsOf, base: Reading, _: str) -> Tensor:
        return _noised(parts_of(base), scale, f"{seed}/parts/{inputs_digest(base.inputs)}")

    return Intervention(
        f"noise(scale={scale}, seed={seed})", part, ("noise", scale, seed), is_function=True, written=written
    )


def _noised(part: Tensor, scale: float, seed: str) -> Tensor:
    return part + (scale * noise_of(part.shape, seed)).to(part.device, part.dtype)


def noise_of(shape: Sequence[int], seed: str) -> Tensor:
    """Gaussian noise of deviation 1, on the CPU; the same for the same shape and seed."""
    return torch.randn(tuple(shape), generator=_generator(seed), dtype=torch.float32, device="cpu")


def _generator(seed: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))


@checked
def resample(run: Reading, seed: int = 0) -> Intervention:
    """Replace the values of each prompt by those of another prompt of `run`, the same one at every place.

    If `run` has as many prompts as the base, no prompt receives those of its own row; else prompts are drawn
    with replacement.
    """

    def part(place: Place, base: Reading) -> Tensor:
        axes = base.model.locate(place).part_axes
        if "batch" not in axes:
            raise PatchError(
                f"{place} has no prompts to exchange: its axes are {', '.join(axes) or 'none'}. Resample a "
                "place that has all of the batch."
            )
        return _resampled(run.read(place), base.read(place), axes.index("batch"), str(seed))

    def written(parts_of: PartsOf, base: Reading, _: str) -> Tensor:
        return _resampled(parts_of(run), parts_of(base), 1, str(seed))

    return Intervention(
        f"resample(seed={seed})",
        part,
        ("resample", seed, run),
        runs=(run,),
        expect_base=partial(_expect_shown, run, lambda shown, base: _resampled(shown, base, 0, str(seed))),
        written=written,
    )


def _resampled(part: Tensor, present: Tensor, batch: int, seed: str) -> Tensor:
    """A prompt of `part` for each of `present`: not the one of the same row, where both have as many.

    `batch` is the dimension of the prompts.
    """
    count, wanted = part.shape[batch], present.shape[batch]
    generator = _generator(seed)
    if count != wanted:
        drawn = torch.randint(0, count, (wanted,), generator=generator)
        return part.index_select(batch, drawn.to(part.device))
    if count < 2:
        return part
    return part.roll(1 + int(torch.randint(0, count - 1, (1,), generator=generator)), batch)


@checked
def mean(model: Captured, dataset: Iterable[Any], *, per_position: bool = False) -> Intervention:
    """Patch in the mean over a dataset: over its prompts and positions, or `per_position` over prompts alone.

    The dataset is a list of the model's inputs, or another iterable that can be iterated several times. One
    batch is in memory at a time, and the dataset is read once for each kind of site, for all layers together.
    A model that was captured with its tokenizer accepts texts of any lengths.
    """
    batches = list(dataset) if isinstance(dataset, Iterator) else dataset
    if isinstance(batches, Mapping | Tensor):
        raise PatchError(
            f"a dataset is a list of batches of the model's inputs, [{{'input_ids': ...}}], or of texts, not "
            f"{describe(batches)}."
        )
    batch_of = partial(inputs_like, model, what="the batches of a dataset")
    if isinstance(batches, list | tuple):
        batches = [batch_of(one) for one in batches]
    if isinstance(batches, list | tuple):  # what is written to them later is not what was meant
        batches = [
            {name: copy_of(value) if isinstance(value, Tensor) else value for name, value in one.items()}
            if isinstance(one, Mapping)
            else one
            for one in batches
        ]
    over = ("batch",) if per_position else ("batch", "pos")
    means: dict[str, Tensor] = {}
    made_with: list[Any] = []

    def begin(weights: Sums) -> None:
        """Forget the means of other weights, and of a graph that was changed since."""
        now = [weights, model.graph.changes]
        if made_with != now:
            means.clear()
            made_with[:] = now

    def averages(read: Callable[[Reading], Mapping[str, Averaged]], keep: Any = None) -> dict[str, Tensor]:
        """The means over the dataset of what is read of the run of each of its batches."""
        sums: dict[str, tuple[Tensor, Tensor | int]] = {}
        for batch in batches:
            for name, one in read(baseline(model, (), batch_of(batch), keep)).items():
                sums[name] = _averaged(sums.get(name), one, over, name)
        if not sums:
            raise PatchError("the mean over a dataset without a batch: give at least one.")
        for name, (total, _) in sums.items():
            if has_nan(total):
                raise PatchError(
                    f"the mean of {name} is NaN: a token of the dataset has NaN there. {NAN_OF_PADDING}"
                )
        return {name: total / count for name, (total, count) in sums.items()}

    def read_of(place: Place, run: Reading) -> Averaged:
        found, value = model.locate(place), run.read(place)
        return value, found.view.axes, found.shown(value, model.program, run.inputs)

    def part(place: Place, base: Reading) -> Tensor:
        whole = Place(place.name, place.layer, place.stack)
        if str(whole) not in means:
            wanted = _alike(model, whole)
            means.update(averages(lambda run: {str(one): read_of(one, run) for one in wanted}, wanted))
        present, axes, shown = read_of(whole, base)
        mean = _known(means[str(whole)], present, shown, str(place))
        return mean[resolved(axes, place.part, present.shape)].clone()

    def written(parts_of: PartsOf, base: Reading, entry: str) -> Tensor:
        def of(run: Reading) -> dict[str, Averaged]:
            parts = parts_of(run)
            return {what: (parts, PARTS, shown_entries(model.program, run.inputs, PARTS, parts.shape, entry))}

        what = "what is written"
        present, _, shown = of(base)[what]
        return _known(averages(of)[what], present, shown, what)

    described = ("mean", per_position, batches, model)
    return Intervention(
        "mean over a dataset", part, described, begin=begin, whole=part, written=written, model=model
    )


Averaged = tuple[Tensor, Sequence[str], Tensor | None]
"""A value, its axes, and which of its entries count, where some are padding."""


def _averaged(
    before: tuple[Tensor, Tensor | int] | None, one: Averaged, over: Sequence[str], where: str
) -> tuple[Tensor, Tensor | int]:
    """A running sum over the axes `over`, which stay as dimensions of size 1, and how many there were."""
    value, axes, shown = one
    dims = [dim for dim, axis in enumerate(axes) if axis in over]
    total = value.sum(dims, keepdim=True, dtype=torch.float64)
    count: Tensor | int = math.prod(value.shape[dim] for dim in dims)
    if shown is not None:
        total, count = sum_of(value, dims, shown)
    if before is None:
        return total, count
    if before[0].shape != total.shape:
        raise PatchError(
            f"the mean of {where} at each position: one batch of the dataset is shaped {tuple(value.shape)}, "
            f"another leaves {tuple(before[0].shape)}. Give batches of one length."
        )
    return before[0] + total, before[1] + count


def _known(total: Tensor, present: Tensor, shown: Tensor | None, where: str) -> Tensor:
    """A mean over a dataset, spread over what is `present` in a base; `shown` are entries of no padding.

    Raises PatchError where no prompt of the dataset has a token at a position that the base shows.
    """
    mean = total.to(present.dtype).expand_as(present).clone()
    if not has_nan(mean):
        return mean
    if has_nan(mean if shown is None else torch.where(shown, mean, 0)):
        raise PatchError(
            f"the mean of {where} at each position: the base has a token where all prompts of the dataset "
            "have padding. Give a dataset whose prompts reach as far, padded on the same side."
        )
    return mean.nan_to_num()


def _alike(model: Captured, place: Place) -> list[Place]:
    """The place, and those of its kind in the other layers."""
    if place.layer is None:
        return [place]
    return [Place(place.name, layer, place.stack) for layer in model.sites.layers(place.name, place.stack)]


def as_intervention(given: Any, model: Captured) -> Intervention:
    """Return the intervention for a `source`: a run, "zero", "mean", an intervention, or a function."""
    if isinstance(given, Intervention):
        given.expect_model(model)
        return given
    if isinstance(given, Reading):
        return _from(given, model)
    if given is None:
        return Intervention("none", _nothing, ("none",))
    if isinstance(given, str) and given == "zero":
        return Intervention("zero", _zeros, ("zero",), whole=_zeros, written=_nothing_written)
    if isinstance(given, str) and given == "mean":
        return Intervention("mean", _own_mean, ("mean",), whole=_own_mean, written=_mean_written)
    if isinstance(given, Sources):
        raise PatchError(
            f"{given!r} are an axis of a sweep, `model.sweep(..., source=...)`; here one source is meant."
        )
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
    """Return the intervention for the source of a cell: what a sweep takes, a tensor, or a number."""
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
    model.expect_own("the source is a run", source.model)

    def part(place: Place, _: Reading) -> Tensor:
        value = source.read(place)
        if has_nan(value):
            raise PatchError(
                f"the source's value at {place} has NaN in it; nothing was patched. {NAN_OF_PADDING}"
            )
        return value

    return Intervention(
        "source",
        part,
        ("source",),
        runs=(source,),
        whole=lambda place, _: source.read(place),
        is_run=True,
        expect_base=partial(_expect_shown, source, lambda shown, _: shown),
        written=lambda parts_of, *_: parts_of(source),
    )


def _expect_shown(
    source: Reading,
    chosen: Callable[[Tensor, Tensor], Tensor],
    cells: Sequence[Sequence[Place]],
    base: Reading,
) -> None:
    """Raise PatchError where padding of the source would be put in place of a token of the base.

    `chosen(rows, base_rows)` are the source's rows that the base's prompts get. At attention patterns and
    scores, where each position is read with all others, both have to be padded alike.
    """
    program, seen = base.model.program, set[tuple[str, str]]()
    if not any(hides_some(program, run.inputs) for run in (base, source)):
        return
    for place in (place for places in cells for place in places):
        found = base.model.locate(place)
        key = found.node, repr(dict(place.part))
        if key in seen or not {"pos", "key_pos"} & set(found.view.axes):
            continue
        seen.add(key)
        stack = found.site.stack or found.site.name
        own, given = (shown_rows(program, run.inputs, found.node, stack) for run in (base, source))
        given = chosen(given, own)
        missing = own != given if "key_pos" in found.view.axes else own & ~given
        axes, part = ("batch", "pos"), {a: place.part[a] for a in ("batch", "pos") if a in place.part}
        put = torch.zeros_like(missing)
        put[resolved(axes, part, missing.shape)] = True
        if bool((put & missing).any()):
            prompt, pos = (put & missing).nonzero()[0].tolist()
            raise PatchError(
                f"{place}: the attention masks of base and source differ, and at position {pos} of prompt "
                f"{prompt} padding would stand for a token. Pad both to the same lengths, or patch positions "
                "at which both have tokens: with padding on the left, pos=-1."
            )


def _zeros(place: Place, base: Reading) -> Tensor:
    return torch.zeros_like(base.read(place))


def _nothing_written(parts_of: PartsOf, base: Reading, _: str) -> Tensor:
    own = parts_of(base)
    return own.new_zeros(()).expand_as(own)


def _mean_written(parts_of: PartsOf, base: Reading, entry: str) -> Tensor:
    """The mean of each writer's part over the base's own prompts and positions."""
    own = parts_of(base)
    return mean_of(own, PARTS, shown_entries(base.model.program, base.inputs, PARTS, own.shape, entry))


def _function_written(
    function: Callable[[Tensor], Tensor], parts_of: PartsOf, base: Reading, _: str
) -> Tensor:
    own = parts_of(base)
    changed = [function(part.clone()) for part in own]
    for part, present in zip(changed, own, strict=True):
        shape = getattr(part, "shape", None), getattr(part, "dtype", None)
        if shape != (present.shape, present.dtype):
            raise PatchError(
                f"the function for what is written returned {describe(part)}; it has to return a tensor of "
                f"shape {tuple(present.shape)}, {present.dtype} (batch, pos, d_model)."
            )
    return torch.stack(changed)


def _own_mean(place: Place, base: Reading) -> Tensor:
    """The site's mean over the base's own prompts and positions, padding left out."""
    found = base.model.locate(place)
    return found.mean(base._present(found), base._sizes, place, base.model.program, base.inputs)


PartShape = Callable[[Located], Sequence[int]]
"""The shape of a place's part, in runs of one shape."""
Inputs = Mapping[str, Tensor]


class OwnSources(Sequence[Intervention]):
    """Interventions by number. The same object is one source, wherever it is given."""

    def __init__(self, model: Captured) -> None:
        self._model = model
        self.given: list[Any] = []
        self._put: list[Intervention] = []
        self._known: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._put)

    def __getitem__(self, number: Any) -> Any:
        return self._put[number]

    def of(self, source: Any) -> Intervention:
        """Return the intervention of a source that was numbered."""
        return self._put[self.number(source)]

    def number(self, source: Any) -> int:
        """The number of a source that was given before."""
        return self._known[_key(source)]

    def sourced(self, place: Place, source: Any, label: str) -> SourcedPlace:
        """The place with that source. An empty label stands for what the source is called."""
        number = self._known.get(_key(source))
        if number is None:
            put = as_own(source, self._model)
            _expect_usable(put, label or put.name)
            number = self._known[_key(source)] = len(self._put)
            self.given.append(source)  # kept, so that its id is no other's
            self._put.append(put)
        put = self._put[number]
        tensor = put.value if put.value is not None else put.shift
        size = tensor.numel() if isinstance(tensor, Tensor) else 1
        return SourcedPlace(
            place.name, place.layer, place.stack, place.part, number, label or put.name, put.how, size
        )

    def expect_fitting(
        self, places: Iterable[SourcedPlace], shape_of: PartShape, inputs: Inputs, of: str = ""
    ) -> None:
        """Raise PatchError where what is put in does not fit its place, in a base of these inputs.

        What functions and interventions make of what is there is known when it is there. `of` says of which
        base.
        """
        for given in self.given:
            if isinstance(given, Reading):
                _expect_alike(given, inputs, of)
        seen: set[Any] = set()
        holes: dict[Any, Hole] = {}
        for place in places:
            put = self._put[place.number]
            if put.value is None and put.shift is None:
                continue
            part = tuple(
                (axis, _plain(index)) for axis, index in place.part.items() if type(index) is not int
            )
            key = place.name, place.layer, place.stack, tuple(place.part), part
            if (key, place.number) not in seen:
                seen.add((key, place.number))
                if key not in holes:
                    holes[key] = self._hole(place, shape_of)
                value = put.value if put.value is not None else put.shift
                what = "vector to add" if put.value is None else "value"
                if isinstance(value, Tensor):
                    expect_fits(value, holes[key], place, what, is_cast=put.value is None, of=of)
                elif value is not None:
                    _expect_number(value, holes[key].dtype, place)

    def _hole(self, place: Place, shape_of: PartShape) -> Hole:
        found, program = self._model.locate(place), self._model.program
        leaves = (leaf for leaf in program.inputs if leaf.name == found.node)
        record = program.record_of.get(found.node) or next(leaves, None)
        dtype, device = (None, None) if record is None else (record.dtype, record.device)
        return Hole(tuple(shape_of(found)), ", ".join(found.part_axes), dtype, device)


def _expect_usable(put: Intervention, label: str) -> None:
    """Raise PatchError for a source that can be put in nowhere."""
    value = put.value if put.value is not None else put.shift
    if isinstance(value, Tensor) and value.is_meta:
        raise PatchError(f"the tensor of {label!r} lies on the device 'meta', and has no numbers.")
    if isinstance(value, Tensor) and has_nan(value):
        raise PatchError(f"the tensor of {label!r} has NaN in it; nothing was patched.")


def _key(source: Any) -> Any:
    """Return the key of a source: texts and numbers are what they are, all else is its own."""
    return (type(source), source) if isinstance(source, str | int | float) else id(source)


def _expect_alike(given: Reading, inputs: Inputs, of: str) -> None:
    for name, value in inputs.items():
        other = given.inputs.get(name)
        if other is not None and other.shape != value.shape:
            raise SweepError(
                f"{of}base and the run that a cell has as its source differ in shape: {name!r} is "
                f"{tuple(value.shape)} in the base and {tuple(other.shape)} in the run. Pad or cut the "
                "prompts to one length."
            )


def _expect_number(number: float, dtype: torch.dtype | None, place: Place) -> None:
    if number != number:
        raise PatchError(f"the value at {place} is NaN; nothing was patched.")
    if dtype is not None and not dtype.is_floating_point and number != int(number):
        raise PatchError(f"the value at {place} is {number}, and the place has {dtype}: give a whole number.")
    most = math.inf
    if dtype is not None and dtype is not torch.bool:
        most = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    if most < abs(number) < math.inf:
        raise PatchError(f"the value at {place} is {number:g}, and {dtype} holds at most {most:g}.")


def _plain(index: Any) -> Any:
    return (index.start, index.stop, index.step) if isinstance(index, slice) else tuple(index)

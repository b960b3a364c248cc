"""Interventions: what is put into a site, given what stands there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conewise.errors import PatchError
from conewise.frontends.torch.filling import added, averaged, has_nan, noised, permuted
from conewise.frontends.torch.tensors import Tensor, mean_of, zeros_like
from conewise.workloads.places import Place

if TYPE_CHECKING:
    from conewise.workloads.model import Model
    from conewise.workloads.run import Run


@dataclass(frozen=True, slots=True, eq=False)
class Intervention:
    """`part(place, base)` is what world puts at `place` of the run `base`; `name` says what it is."""

    name: str
    part: Callable[[Place, Run], Tensor | Callable[[Tensor], Tensor]]
    described: tuple[Any, ...] = ()


def add(vector: Tensor, scale: float = 1.0) -> Intervention:
    """Add `scale · vector` to the site: steering. The vector has the site's last axis, or its whole shape."""
    return Intervention(
        f"add(scale={scale})",
        lambda place, base: added(base[place], vector, scale, str(place)),
        ("add", scale),
    )


def noise(scale: float, seed: int = 0) -> Intervention:
    """Add Gaussian noise of standard deviation `scale`; the same for the same seed and place."""
    return Intervention(
        f"noise(scale={scale}, seed={seed})",
        lambda place, base: noised(base[place], scale, f"{seed}/{place}"),
        ("noise", scale, seed),
    )


def resample(run: Run, seed: int = 0) -> Intervention:
    """Take the values of another prompt of `run`, drawn for each prompt and the same for the same seed."""
    return Intervention(
        f"resample(seed={seed})",
        lambda place, _: permuted(run[place], f"{seed}"),
        ("resample", seed),
    )


def mean(
    model: Model, dataset: Iterable[Mapping[str, Any]], places: Iterable[Place] | None = None
) -> Intervention:
    """Take the mean over a dataset's prompts and positions; the dataset is streamed, one batch in memory.

    The means of a place are computed when it is first asked for, unless `places` names them beforehand.
    """
    batches = list(dataset)
    cache: dict[str, Tensor] = {}

    def means(wanted: Iterable[Place]) -> None:
        wanted = list(wanted)
        sums: dict[str, tuple[Any, int]] = {}
        for batch in batches:
            run = model.run(**batch)
            for place in wanted:
                sums[str(place)] = averaged(sums.get(str(place)), run[place])
        cache.update({name: total / count for name, (total, count) in sums.items()})

    if places is not None:
        means(places)

    def part(place: Place, base: Run) -> Tensor:
        if str(place) not in cache:
            means([place])
        return cache[str(place)].to(base[place].dtype).expand_as(base[place]).clone()

    return Intervention(f"mean over {len(batches)} batches", part, ("mean", len(batches)))


def as_intervention(given: Any, model: Model) -> Intervention:
    """What people may give as `source`: a run, "zero", "mean", an intervention, or a function."""
    from conewise.workloads.run import Run  # noqa: PLC0415  # a run makes interventions, and is one

    if isinstance(given, Intervention):
        return given
    if isinstance(given, Run):
        if given.model is not model:
            raise PatchError(
                f"the source is a run of another model ({given.model.name}); base and source must be runs of "
                f"the same captured model ({model.name})."
            )

        def from_run(place: Place, base: Run) -> Tensor:
            part: Tensor = given[place]
            if has_nan(part):
                raise PatchError(f"the source's value at {place} has NaN in it; nothing was patched.")
            return part

        return Intervention("source", from_run, ("source",))
    if isinstance(given, str) and given == "zero":
        return Intervention("zero", lambda place, base: zeros_like(base[place]), ("zero",))
    if isinstance(given, str) and given == "mean":

        def own_mean(place: Place, base: Run) -> Tensor:
            return mean_of(base[place], base.model.locate(place).part_axes)

        return Intervention("mean", own_mean, ("mean",))
    if callable(given):
        return Intervention(getattr(given, "__name__", "function"), lambda place, base: given, ("function",))
    raise PatchError(
        f"cannot patch with {given!r}: source is a run, 'zero', 'mean', `noise(...)`, `add(...)`, "
        "`resample(...)` or a function of what would have been there."
    )

"""The sources that cells of a sweep have of their own: numbered, and looked at before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.errors import PatchError, SweepError
from conewise.locations.located import Located
from conewise.locations.places import Place, SourcedPlace
from conewise.program.tensors import Tensor
from conewise.runs.captured import Captured
from conewise.runs.interventions.filling import has_nan, is_tail
from conewise.runs.interventions.interventions import Intervention, as_own
from conewise.runs.reading import Reading

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
        """What a source that was numbered is taken for."""
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
        holes: dict[Any, _Hole] = {}
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
                _expect_fitting(place, put, holes[key], of)

    def _hole(self, place: Place, shape_of: PartShape) -> _Hole:
        found, program = self._model.locate(place), self._model.program
        leaves = (leaf for leaf in program.inputs if leaf.name == found.node)
        record = program.record_of.get(found.node) or next(leaves, None)
        dtype, device = (None, None) if record is None else (record.dtype, record.device)
        return _Hole(tuple(shape_of(found)), ", ".join(found.part_axes), dtype, device)


@dataclass(frozen=True, slots=True)
class _Hole:
    """What has to be filled: the shape of a part, its axes in words, its dtype and device where known."""

    shape: tuple[int, ...]
    axes: str
    dtype: torch.dtype | None
    device: torch.device | None


def _expect_fitting(place: SourcedPlace, put: Intervention, hole: _Hole, of: str) -> None:
    """Raise PatchError where a value or a shift does not fit."""
    dtype, device = hole.dtype, hole.device
    if put.value is not None and not isinstance(put.value, Tensor):
        _expect_number(put.value, dtype, place)
        return
    value = put.value if isinstance(put.value, Tensor) else put.shift
    assert value is not None
    if not is_tail(value.shape, hole.shape):
        raise PatchError(
            f"{of}the {'value' if put.shift is None else 'vector to add'} at {place} has shape "
            f"{tuple(value.shape)}, and the place has {hole.shape} ({hole.axes}). Give one of that shape, "
            "or of its last axes: it is the same for all axes before."
        )
    if put.shift is None and dtype is not None and value.dtype != dtype:
        raise PatchError(
            f"the value at {place} is {value.dtype}, and the place has {dtype}. Convert it first, "
            f"`value.to({dtype})`: nothing is cast."
        )
    if put.shift is None and device is not None and value.device != device:
        raise PatchError(
            f"the value at {place} lies on {value.device}, and the place on {device}. Move it first, "
            f"`value.to({str(device)!r})`: nothing is moved."
        )


def _expect_usable(put: Intervention, label: str) -> None:
    """Raise PatchError for a source that can be put in nowhere."""
    value = put.value if put.value is not None else put.shift
    if isinstance(value, Tensor) and value.is_meta:
        raise PatchError(f"the tensor of {label!r} lies on the device 'meta', and has no numbers.")
    if isinstance(value, Tensor) and has_nan(value):
        raise PatchError(f"the tensor of {label!r} has NaN in it; nothing was patched.")


def _key(source: Any) -> Any:
    """What tells sources apart: texts and numbers are what they are, all else is its own."""
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

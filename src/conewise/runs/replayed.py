"""Runs on a CUDA device that are replayed: all values of a forward, without Python.

The first run of a shape is eager. The second is too, and is recorded as a CUDA graph, whose values are
compared with the eager ones: where one bit differs, or the computation cannot be recorded, no run of that
shape is replayed. A replay ends with a copy of all values, in memory of the run's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conewise.jobs.digests import numerics
from conewise.program.records import SIZES, Program
from conewise.program.sizes import has_unbacked
from conewise.program.streaming import Streamed
from conewise.program.tensors import Tensor, computing
from conewise.program.walk import bitwise_same, stream
from conewise.reactive.graph import Graph
from conewise.sweeps.execution.cuda_graph import GraphPool, Record, Replayed, copy_all

MOST_BYTES = 256 << 20
"""A run whose values take more is not replayed: the device is at work longer than the host."""

SHAPES = 4
"""Graphs of so many shapes are kept."""

WORD = 8
ALIGNED = 512
"""Values lie at multiples of so many bytes, as torch's own do: kernels are chosen by that."""

NEVER = "never"


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in the memory of all values; `at` and `stride` count elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    at: int


class ReplayedRun:
    """The values of `names` in runs of one shape, recorded with `record`; `keeps` are never copied."""

    def __init__(
        self, graph: Graph, names: Sequence[str], sources: Mapping[str, Any], keeps: set[int], record: Record
    ) -> None:
        self._graph, self.names, self._keeps = graph, names, keeps
        self._templates: list[Any] = []
        self._dtypes: dict[torch.dtype, None] = {}
        self.numbers = graph.numbers(names)
        self._sizes = sources[SIZES]
        slots = {name: value.clone() for name, value in sources.items() if isinstance(value, Tensor)}
        self._replayed = Replayed(self._act, slots, record)

    def _act(self, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = stream(self._graph, {**slots, SIZES: self._sizes}, self.names)
        places: dict[int, tuple[int, Tensor]] = {}
        self._templates = []
        self._bytes, self._dtypes = 0, {}
        for name in self.names:
            self._templates.append(self._placed(values[name], places))
        device = next(iter(slots.values())).device
        arena = torch.empty(self._bytes // WORD, dtype=torch.int64, device=device)
        held = arena.view(torch.uint8)
        parts = [(held[at : at + len(own)], own) for at, own in places.values()]
        for wide in (True, False):
            of = [pair for pair in parts if (len(pair[1]) % WORD == 0) == wide]
            words = torch.int64 if wide else torch.uint8
            copy_all([place.view(words) for place, _ in of], [own.view(words) for _, own in of])
        return {"": arena}

    def _placed(self, value: Any, places: dict[int, tuple[int, Tensor]]) -> Any:
        """What stands for a value: views of tensors that are computed, all else as it is."""
        if isinstance(value, tuple | list):
            return type(value)([self._placed(one, places) for one in value])
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        address = storage.data_ptr()
        if address in self._keeps:
            return value
        if address not in places:
            own = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            places[address] = self._bytes, own
            self._bytes += -(-max(len(own), 1) // ALIGNED) * ALIGNED
        self._dtypes[value.dtype] = None
        at = places[address][0] // value.itemsize + int(value.storage_offset())
        return _View(value.dtype, tuple(value.shape), value.stride(), at)

    def values(self, sources: Mapping[str, Any]) -> list[Any]:
        """The values for these inputs, in memory that nothing else writes to."""
        given = {name: value for name, value in sources.items() if isinstance(value, Tensor)}
        arena = self._replayed.run(given)[""].clone()
        of = {dtype: arena.view(dtype) for dtype in self._dtypes}
        as_strided = torch.as_strided
        return [
            as_strided(of[one.dtype], one.shape, one.stride, one.at) if type(one) is _View else _made(one, of)
            for one in self._templates
        ]


def _made(template: Any, of: Mapping[torch.dtype, Tensor]) -> Any:
    if type(template) is _View:
        return of[template.dtype].as_strided(template.shape, template.stride, template.at)
    if isinstance(template, tuple | list):
        return type(template)([_made(one, of) for one in template])
    return template


class Replays:
    """The recorded runs of a model, by shape, settings, and where the weights lie."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self._graph = graph
        self._record: Record | None = None
        self._known: OrderedDict[Any, ReplayedRun | str] = OrderedDict()
        self._weights = [source.value for source in program.sources]
        self._device = next(iter(program.devices), torch.device("cpu"))
        self._are_recorded = can_be_recorded(program)

    def are_recorded(self, size: int) -> bool:
        """True if runs whose values take so many bytes are recorded."""
        return self._are_recorded and size <= MOST_BYTES

    def key(self, sources: Mapping[str, Any], addresses: tuple[int, ...]) -> Any:
        """What kernels are chosen by: equal ones can be replayed."""
        given = [(n, v.shape, v.stride(), v.dtype) for n, v in sources.items() if isinstance(v, Tensor)]
        attention: Any = torch.backends.cuda
        settings = (
            *(attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled()),
            *(attention.math_sdp_enabled(), attention.cudnn_sdp_enabled()),
            *numerics(self._device).values(),
        )
        return self._graph.changes, addresses, sources[SIZES], *given, settings

    def values(self, key: Any, sources: Mapping[str, Any]) -> dict[int, Any] | None:
        """The values of a run by the numbers of their nodes, replayed; None where it has to be computed."""
        known = self._known.get(key)
        if not isinstance(known, ReplayedRun):
            return None
        self._known.move_to_end(key)
        with computing():
            return dict(zip(known.numbers, known.values(sources), strict=True))

    def computed(self, key: Any, sources: Mapping[str, Any], values: Callable[[], Mapping[str, Any]]) -> None:
        """Take note of a run that was computed; the second of a shape is recorded, and compared."""
        if key not in self._known:
            self._known[key] = ""
        elif self._known[key] == "":
            self._known[key] = self._recorded(sources, values()) or NEVER
        while len(self._known) > SHAPES:
            self._known.popitem(last=False)

    def _recorded(self, sources: Mapping[str, Any], values: Mapping[str, Any]) -> ReplayedRun | None:
        keeps = {weight.untyped_storage().data_ptr() for weight in self._weights}
        try:
            if self._record is None:
                self._record = recorder(self._device)
            with computing():
                made = ReplayedRun(self._graph, tuple(values), sources, keeps, self._record)
                again = made.values(sources)
        except Exception:  # noqa: BLE001  # whatever a device says: runs are computed as before
            return None
        return made if all(map(bitwise_same, again, values.values())) else None


def can_be_recorded(program: Program) -> bool:
    """True if all lies on one CUDA device, and nothing asks the device for a number on the way."""
    devices = {record.device for record in program.records} | {leaf.device for leaf in program.inputs}
    devices |= {source.value.device for source in program.sources}
    devices.discard(None)
    if any(isinstance(source.value, Streamed) for source in program.sources):
        return False
    if len(devices) != 1 or next(iter(devices)).type != "cuda":  # type: ignore[union-attr]
        return False
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return not any(
        any(map(has_unbacked, record.shape or ())) or set(tags) & set(getattr(record.target, "tags", ()))
        for record in program.records
    )


def recorder(device: torch.device) -> Record:
    """Records graphs into a pool of their own, which outlives each of them."""
    pool = GraphPool(device)
    pool.reserve(ALIGNED)  # torch frees a pool of which no graph is left
    return pool.record

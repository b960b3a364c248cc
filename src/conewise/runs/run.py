"""A run: the baseline of a captured model for one input, and what is read off it as a whole."""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from conewise.anatomy.places import Place, PlaceLike
from conewise.arguments import as_bytes, has_items
from conewise.errors import PatchError, SweepError, WeightsChangedError
from conewise.jobs.digests import numerics
from conewise.program.records import SIZES, Program
from conewise.program.sizes import has_unbacked
from conewise.program.streaming import Streamed
from conewise.program.tensors import Tensor, computing, copy_of
from conewise.program.walk import bitwise_same, described_fields, output_names, run_sources, stream
from conewise.program.weights import Contents, Sums
from conewise.reactive.graph import Graph
from conewise.reactive.world import World
from conewise.runs.captured import Captured
from conewise.runs.glance import next_tokens, shown_map, shown_next
from conewise.runs.inputs import with_tokens
from conewise.runs.reading import Reading
from conewise.sweeps.execution.cuda_graph import GraphPool, Record, Replayed, copy_all
from conewise.templates import folded, heading, shown, table


class Run(Reading):
    """The baseline for one input. It never changes; another input requires another run."""

    def __init__(
        self, model: Captured, world: World | None, sizes: tuple[int, ...], inputs: Mapping[str, Tensor]
    ) -> None:
        super().__init__(model, world, sizes)
        self._inputs = inputs
        self._changed = ""
        self._given_to_world: dict[str, Any] = {}
        self._invalidated = 0
        if world is not None:
            self._begin()
            self._given_to_world = {name: world[name] for name in world.patched}
            self._invalidated = self.ledger.count("invalidated")

    def _begin(self) -> None:
        """Note what the weights and the inputs hold now: the values are of these."""
        self._weights = self.model.weights.contents()
        self._lend(list(self._inputs), list(self._inputs.values()))

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """The inputs of the run, by name."""
        return self._inputs

    @property
    def made_with(self) -> Contents:
        """The contents of the weights when the run was computed."""
        return self._weights

    def _check_bits(self, weights: Contents | None = None) -> None:
        super()._check_bits(weights)
        if weights is None:
            self._expect_same(self._weights.glance, self.model.weights.glance())
        else:
            self._expect_same(self._weights.whole, weights.whole)

    def _expect_same(self, old: Sums, new: Sums) -> None:
        if not self._changed and old != new:
            # Forks may hold values of both: the run stays refused, even if the weights are put back.
            self._changed = self.model.weights.changed(old, new)
        if self._changed:
            raise WeightsChangedError(
                f"the weights of {self.model.name} were written to after this run: {self._changed}. Its "
                "values are those of the old weights: run again, `model.run(...)`."
            )

    def _expect_own_world(self) -> None:
        """Raise PatchError where the engine's world of this run was patched, which few jobs would see."""
        given = self._given_to_world
        if not given or self.ledger.count("invalidated") == self._invalidated:
            return
        names = [name for name in self.world.patched if name not in given]
        names += [name for name, value in given.items() if self.world[name] is not value]
        if names:
            raise PatchError(
                f"{', '.join(map(repr, names[:3]))} was changed in `run.world`, which holds what the run "
                "computed. Patch a fork: `with run.fork() as world: world.patch(place, value)`. "
                "`run.world.restore(...)` takes the change back."
            )
        self._invalidated = self.ledger.count("invalidated")

    def _check_lent(self) -> None:
        super()._check_lent()
        self._expect_own_world()
        self._expect_same(self._weights.writes, self.model.weights.writes())

    def __repr__(self) -> str:
        given = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.inputs.items())
        return f"Run of {self.model.name} on {given}"

    def _repr_html_(self) -> str:
        rows = [(name, str(tuple(value.shape)), str(value.dtype)) for name, value in self.inputs.items()]
        known = heading(
            "", f"Outputs: {described_fields(self.model.program)}. A site's value: run[kind, layer]"
        )
        inputs = folded("Inputs and outputs", table(rows, ("input", "shape", "dtype")), known)
        return shown(
            heading(f"Run of {self.model.name}"), shown_next(next_tokens(self)), shown_map(self), inputs
        )


KEEP_ALL_BYTES = 1 << 30
"""A run keeps every value while they are estimated to take no more than this; see `Model.run`."""

Keep = Iterable[PlaceLike] | str | int | None


def baseline(model: Captured, args: Sequence[Any], kwargs: Mapping[str, Any], keep: Keep = None) -> Run:
    """The module's outputs for one input, and every site's value; see `Model.run` for `keep`."""
    model.weights.expect_captured()
    inputs = bound(model, args, kwargs)
    if keep is None and replays_of(model, inputs) is not None:  # the host would be waited for
        return InputRun(model, inputs, is_marked=True)
    return Run(model, computed(model, inputs, keep), sizes_of(model, inputs), inputs)


def bound(model: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Inputs by name, as copies of what was given; texts as tokens.

    Raises InputMismatchError where they do not fit, PromptError where texts cannot be read.
    """
    args, kwargs = with_tokens(model, args, kwargs)
    inputs = {name: copy_of(value) for name, value in model.signature.bind(args, kwargs).items()}
    sizes_of(model, inputs)
    model.expect_known_ids(inputs)
    return inputs


def sizes_of(model: Captured, inputs: dict[str, Tensor]) -> tuple[int, ...]:
    """The sizes of a run with these inputs."""
    sizes: tuple[int, ...] = run_sources(model.program, inputs)[SIZES]
    return sizes


def computed(model: Captured, inputs: dict[str, Tensor], keep: Keep = None) -> World:
    """The world of these inputs, its outputs computed; it holds what `keep` says."""
    sources = run_sources(model.program, inputs)
    outputs = output_names(model.program)
    budget = _budget(keep)
    if keep is None or budget is not None:
        fits = sum(model.estimated_bytes(inputs).values()) <= (budget or KEEP_ALL_BYTES)
        keep = "all" if fits else keep or list(model.site_table.kinds) or "all"
    if isinstance(keep, str) and keep == "all":
        world = World(model.graph)
        for name, value in sources.items():
            world.set(name, value)
        replays = replays_of(model, inputs)
        key = None if replays is None else replays.key(sources, model.weights.addresses())
        found = None if replays is None else replays.values(key, sources)
        if found is not None:
            world._take(found)
            return world
        with computing():
            world.demand(outputs)
        if replays is not None:
            replays.computed(key, sources, lambda: world._computed(model.support(outputs)))
        return world
    if budget is not None:
        wanted = _that_fit(model, budget, inputs) | set(outputs)
    else:
        wanted = model.read_by_patches_at(_kept(model, keep)) | set(outputs)
    with computing():
        values = stream(model.graph, sources, wanted)
    return World.partial(model.graph, values | sources)


def replays_of(model: Captured, inputs: Mapping[str, Tensor]) -> Replays | None:
    """The recorded runs of a model, which lie with it; None where a run of these inputs is not recorded."""
    found: Replays | None = vars(model).get(_REPLAYS)
    if found is None:
        found = vars(model)[_REPLAYS] = Replays(model.program, model.graph)
    return found if found.are_recorded(sum(model.estimated_bytes(dict(inputs)).values())) else None


_REPLAYS = "_replayed_runs"


def _that_fit(model: Captured, budget: int, inputs: Mapping[str, Tensor]) -> set[str]:
    """Nodes whose values are estimated to take no more than `budget`, what patches read first."""
    first = model.read_by_patches_at(_kept(model, list(model.site_table.kinds)))
    wanted: set[str] = set()
    for name, size in sorted(model.estimated_bytes(inputs).items(), key=lambda item: item[0] not in first):
        if size <= budget:
            budget -= size
            wanted.add(name)
    return wanted


def _kept(model: Captured, keep: object) -> list[PlaceLike]:
    """The places of `keep`, kinds spelled out."""
    keep = keep.tolist() if type(keep).__name__ == "ndarray" else keep  # type: ignore[attr-defined]
    if isinstance(keep, str | bytes | Place | Tensor | Mapping) or not has_items(keep):
        raise PatchError(
            f"keep is 'all', a list of places, an amount of memory or None, and {keep!r} is none of them."
        )
    listed = list(keep)
    if len(listed) == 2 and isinstance(listed[1], int):
        raise PatchError(f"keep is a list of places: write keep=[{tuple(listed)!r}].")
    kinds = model.site_table.kinds
    places: list[PlaceLike] = []
    for place in listed:
        if isinstance(place, str) and place in kinds:
            places += [site.name for site in model.site_table if site.kind == place]
        else:
            places.append(place)
    return places


def _budget(keep: object) -> int | None:
    """The bytes that `keep` allows, or None where it is no amount of memory."""
    if isinstance(keep, int) and not isinstance(keep, bool):
        return as_bytes(keep)
    if not isinstance(keep, str) or keep == "all":
        return None
    try:
        return as_bytes(keep)
    except SweepError:
        return None


FEW = 0.2
"""The largest share of the operations that is computed alone, for masks and first positions."""


class InputRun(Run):
    """The baseline for one input, which is computed when a value of it is first read, bit for bit.

    One that is marked is of the weights that were there when it was made, and as precise as products were
    then.
    """

    def __init__(self, model: Captured, inputs: dict[str, Tensor], *, is_marked: bool = False) -> None:
        self._given = inputs
        self._early: dict[str, Any] = {}
        self._early_of = 0
        super().__init__(model, None, sizes_of(model, inputs), inputs)
        self._precision: tuple[str, bool] | None = None
        if is_marked:
            self._weights = model.weights.contents()
            self._precision = _precision()

    @property
    def is_computed(self) -> bool:
        """True if all of it was computed."""
        return self._world is not None

    def is_of(self, weights: Sums) -> bool:
        """True if nothing was read of it that was computed with other weights than these."""
        return not self._is_of_weights or self._weights.whole == weights

    @property
    def _is_of_weights(self) -> bool:
        return self._precision is not None or self._world is not None or bool(self._early)

    def _begin(self) -> None:
        made = None if self._precision is None else self._weights
        super()._begin()
        if made is not None:
            now, self._weights = self._weights, made
            self._expect_same(made.whole, now.whole)

    @property
    def made_with(self) -> Contents:
        """The contents of the weights when the run was computed; it is computed where it was not."""
        if not self._is_of_weights:
            _ = self.world
        return self._weights

    @property
    def world(self) -> World:
        """The world of the run, all of whose outputs are computed."""
        if self._world is None:
            if not self._early:
                self._begin()
            with _as_precise(self._precision):
                self._world = computed(self.model, self._given)
        return self._world

    def _values(self, nodes: tuple[str, ...]) -> tuple[Any, ...]:
        if self._early_of != self.model.graph.changes:
            self._early, self._early_of = {}, self.model.graph.changes
        if self._world is None and len(self.model.support(nodes)) < FEW * len(self.model.program.records):
            if not all(node in self._early for node in nodes):
                if not self._early:
                    self._begin()
                sources = run_sources(self.model.program, self._given)
                with computing(), _as_precise(self._precision):
                    found = stream(self.model.graph, sources, nodes)
                self._early |= {node: found[node] for node in nodes if node in found}
            if all(node in self._early for node in nodes):
                return tuple(self._early[node] for node in nodes)
        return super()._values(nodes)

    def _check_bits(self, weights: Contents | None = None) -> None:
        if self._is_of_weights:
            super()._check_bits(weights)

    def _check_lent(self) -> None:
        if self._is_of_weights:
            super()._check_lent()


def _precision() -> tuple[str, bool]:
    """Return the settings by which products are rounded: of matrices, of convolutions."""
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@contextmanager
def _as_precise(wanted: tuple[str, bool] | None) -> Iterator[None]:
    """While it lasts, products are as precise as is wanted."""
    before = _precision()
    if wanted is None or wanted == before:
        yield
        return
    try:
        torch.set_float32_matmul_precision(wanted[0])
        torch.backends.cudnn.allow_tf32 = wanted[1]
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


class PassRun(Reading):
    """A run whose values a pass computed, together with others: equal to its own up to rounding.

    `values` are these, by the graph's own names; what is not among them is read of `run`.
    """

    def __init__(self, run: InputRun, values: Mapping[str, Any]) -> None:
        super().__init__(run.model, None, run._sizes, run)
        self._run, self.values = run, values
        weights = run.model.program.source_values
        # Values that are still to be computed are read one by one.
        is_computed = isinstance(values, dict)
        self._known: Mapping[str, Any] = {**weights, **values} if is_computed else ChainMap(values, weights)  # type: ignore[arg-type]

    @property
    def world(self) -> World:
        """The world of the run itself."""
        return self._run.world

    def _values(self, nodes: tuple[str, ...]) -> tuple[Any, ...]:
        known = self._known
        if all(node in known for node in nodes):
            return tuple([known[node] for node in nodes])
        return tuple(known[node] if node in known else self._run._values((node,))[0] for node in nodes)


# -- runs on a CUDA device that are replayed, without Python -----------------------------------------
#
# The first run of a shape is eager. The second is too, and is recorded as a CUDA graph, whose values are
# compared with the eager ones: where one bit differs, or the computation cannot be recorded, no run of that
# shape is replayed. A replay ends with a copy of all values, in memory of the run's own.

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

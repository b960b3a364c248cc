"""A captured model: any `nn.Module` as a reactive graph, with names for its sites."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from conewise.capture.export import export
from conewise.capture.fidelity import compare
from conewise.capture.foreign import within_memory
from conewise.checks.verify import Verification, verify
from conewise.engine.world import World
from conewise.errors import InexactCaptureWarning, PatchError, SweepError, describe
from conewise.identity.digests import program_digest
from conewise.markup import heading, table
from conewise.program.build import build_graph, run_sources
from conewise.program.records import SIZES, Program
from conewise.program.streaming import described_fields, output_names, stream
from conewise.program.tensors import Tensor, computing, copy_of, mean_of
from conewise.program.weights import Weights
from conewise.runs.run import Run
from conewise.sites.head_result import AXES as RESULT_AXES
from conewise.sites.head_result import HeadResult
from conewise.sites.listing import Listing
from conewise.sites.places import Place, PlaceLike, as_place
from conewise.sites.sites import Site, SiteTable
from conewise.structure.views import View
from conewise.sweeps.plan import as_bytes

KEEP_ALL_BYTES = 1 << 30
"""A run keeps every value while they are estimated to take no more than this; see `Model.run`."""


@dataclass(frozen=True, slots=True)
class Located:
    """A place found in a model: the node, how its value is shown, and which part is meant."""

    site: Site
    view: View
    part: Mapping[str, Any]

    @property
    def node(self) -> str:
        """The node of the graph whose value it is, or from which it is computed."""
        return self.site.node

    @property
    def result(self) -> HeadResult | None:
        """How it is computed, where no node holds it."""
        return self.site.result

    @property
    def z_view(self) -> View:
        """How the node's own value is shown, where the site is computed from it."""
        assert self.site.view is not None
        return self.site.view

    @property
    def part_axes(self) -> tuple[str, ...]:
        """The axes that are left of the part: those that no single number selects."""
        return tuple(axis for axis in self.view.axes if not isinstance(self.part.get(axis), int))

    def read(self, value: Tensor, sizes: Sequence[int]) -> Tensor:
        """The part that is meant of the node's value, in natural axes."""
        return self.view.read(value, self.part, sizes)

    def replaced(self, value: Tensor, part: Tensor, sizes: Sequence[int], place: Place) -> Tensor:
        """A copy of the node's value with the part replaced."""
        self.expect(part, self.read(value, sizes), place)
        return self.view.replace(value, self.part, part, sizes)

    def mean(self, value: Tensor, sizes: Sequence[int], place: Place) -> Tensor:
        """The site's mean over batch and positions, at every place of the part that is meant."""
        try:
            shown = mean_of(self.view.present(value, sizes), self.view.axes)
        except ValueError as error:
            raise PatchError(
                f"{place} has no mean over batch and positions: it holds {error}. Give the value itself."
            ) from None
        plain = View(self.view.axes, tuple((axis,) for axis in self.view.axes), {})
        return plain.read(shown, self.part).clone()

    def is_same_place(self, other: Located) -> bool:
        """Whether both are the same part of the same site, whatever name it was found by."""
        return self.site is other.site and dict(self.part) == dict(other.part)

    def expect(self, part: object, present: Tensor, place: Place) -> None:
        """Refuse a part of another shape, dtype or device: nothing is cast, moved or broadcast."""
        expected = f"shape {tuple(present.shape)}, {present.dtype}, on {present.device}"
        axes = ", ".join(self.part_axes)
        if not isinstance(part, Tensor):
            raise PatchError(
                f"the function for {place} returned {describe(part)}; it has to return a tensor of "
                f"{expected} ({axes})."
            )
        if (part.shape, part.dtype, part.device) != (present.shape, present.dtype, present.device):
            raise PatchError(
                f"the value for {place} has shape {tuple(part.shape)}, {part.dtype}, on {part.device}; the "
                f"place has {expected} ({axes}). Convert it first: nothing is cast, moved or broadcast."
            )


class Model:
    """A module as a graph of its operations, with the module's own weights.

    The module is only read: no hook, buffer or attribute is left on it. The graph holds its
    tensors themselves, so a later change of a weight in place is a change of the model: runs that were made
    before are refused from then on, and new ones have the new weights. A module whose tensors were replaced
    by others (`module.w = nn.Parameter(...)`, `load_state_dict(..., assign=True)`, `module.to(dtype)`) is to
    be captured again, and says so. `fidelity` says how the graph compares with the module on the example.
    """

    def __init__(
        self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, batch_dim: int | None = None
    ) -> None:
        """See `capture`."""
        exported = export(module, args, kwargs, batch_dim=batch_dim)
        self.module = module
        self.name = exported.program.module_name
        self.program: Program = exported.program
        self.signature = exported.signature
        self.batch_is_fixed = exported.fixed
        self.graph = build_graph(self.program)
        self.weights = Weights(self.program, module)
        self.fidelity = compare(module, exported, self.graph)
        if not self.fidelity.bitwise:
            warnings.warn(
                f"{self.name} was captured, but the graph is {self.fidelity}.",
                InexactCaptureWarning,
                stacklevel=3,
            )
        self._table = SiteTable(self.program)
        self._shapes: dict[str, tuple[Any, ...] | None] = {r.name: r.shape for r in self.program.records}
        self._shapes |= {i.name: i.shape for i in self.program.inputs}
        self._supports: dict[tuple[str, ...], frozenset[int]] = {}
        self._bytes: dict[tuple[tuple[int, ...], ...], dict[str, int]] = {}

    @cached_property
    def sites(self) -> Listing:
        """Every place that can be patched: a table to print, to search, to turn into a DataFrame."""
        note = "" if self.fidelity.bitwise else f"The graph is {self.fidelity}."
        return Listing(self._table, self.graph, self.program, note)

    def locate(self, place: PlaceLike) -> Located:
        """Find a place. Raises MissingSiteError with the reason, or with the nearest names."""
        place = as_place(place)
        site = self._table.find(place.name, place.layer, place.stack)
        if site.result is not None:
            view = View(RESULT_AXES, tuple((axis,) for axis in RESULT_AXES), {})
        else:
            view = site.view or self._plain_view(site.node)
        view.index(place.part)
        return Located(site, view, place.part)

    @within_memory("this run")
    def run(self, /, *args: Any, keep: Iterable[PlaceLike] | str | int | None = None, **kwargs: Any) -> Run:
        """The baseline for one input: the module's outputs, and every site's value.

        `keep` says which values stay in memory. "all": all of them. A list of places (a bare kind
        such as "z" is all of its layers): just what patches at these places will read. A number of
        bytes, or text like "500MB": as many as are estimated to fit, those that patches at the
        model's named sites read before the others; the outputs always stay. None: all that fits into
        1 GiB, else what patches at the named sites read. What is not kept is computed again when it
        is asked for; results do not depend on `keep`.
        """
        self.weights.expect_captured()
        inputs = {name: copy_of(value) for name, value in self.signature.bind(args, kwargs).items()}
        sources = run_sources(self.program, inputs)
        sizes: tuple[int, ...] = sources[SIZES]
        outputs = output_names(self.program)
        budget = _budget(keep)
        if keep is None or budget is not None:
            fits = sum(self._estimated_bytes(inputs).values()) <= (budget or KEEP_ALL_BYTES)
            keep = "all" if fits else keep or list(self._table.kinds) or "all"
        if keep == "all":
            world = World(self.graph)
            for name, value in sources.items():
                world.set(name, value)
            with computing():
                world.demand(outputs)
            return Run(self, world, sizes, inputs)
        if budget is not None:
            wanted = self._that_fit(budget, inputs) | set(outputs)
        else:
            wanted = self.read_by_patches_at(self._kept(keep)) | set(outputs)
        with computing():
            values = stream(self.graph, sources, wanted)
        return Run(self, World.partial(self.graph, values | sources), sizes, inputs)

    def _that_fit(self, budget: int, inputs: Mapping[str, Tensor]) -> set[str]:
        """Nodes whose values are estimated to take no more than `budget`, what patches read first."""
        first = self.read_by_patches_at(self._kept(list(self._table.kinds)))
        wanted: set[str] = set()
        for name, size in sorted(
            self._estimated_bytes(inputs).items(), key=lambda item: item[0] not in first
        ):
            if size <= budget:
                budget -= size
                wanted.add(name)
        return wanted

    def _kept(self, keep: object) -> list[PlaceLike]:
        """The places of `keep`, kinds spelled out."""
        if isinstance(keep, str | Place) or not isinstance(keep, Iterable):
            raise PatchError(
                f"keep is 'all', a list of places, an amount of memory or None, and {keep!r} is none of them."
            )
        listed = list(keep)
        if len(listed) == 2 and isinstance(listed[1], int):
            raise PatchError(f"keep is a list of places: write keep=[{tuple(listed)!r}].")
        kinds = self._table.kinds
        places: list[PlaceLike] = []
        for place in listed:
            if isinstance(place, str) and place in kinds:
                places += [site.name for site in self._table if site.kind == place]
            else:
                places.append(place)
        return places

    def read_by_patches_at(self, places: Iterable[PlaceLike]) -> set[str]:
        """The nodes whose baseline values patches at these places read.

        These are the sites, and what their cones read from outside of them.
        """
        nodes, found = self.graph.table, [self.locate(place) for place in places]
        needed = self.support(output_names(self.program))
        wanted = {place.node for place in found}
        changed = set(self.graph.numbers(wanted))
        changed.update(self.graph.number(f.result.projection.name) for f in found if f.result is not None)
        # A projection under a patched `result` is computed again, so its own inputs are read too.
        again = changed - set(self.graph.numbers(wanted))
        for site in set(self.graph.numbers(wanted)) | again:
            cone = nodes.cone([site]) & needed
            reads = {read for reader in cone | (again & {site}) for read in nodes.inputs[reader]} - cone
            wanted.update(self.graph.names(read for read in reads if nodes.rules[read] is not None))
        return wanted

    def support(self, nodes: tuple[str, ...], cut: Collection[str] = ()) -> frozenset[int]:
        """The numbers of all nodes that these depend on, themselves included, not past those of `cut`."""
        if cut:
            return frozenset(self.graph.table.support(self.graph.numbers(nodes), self.graph.numbers(cut)))
        if nodes not in self._supports:
            self._supports[nodes] = frozenset(self.graph.table.support(self.graph.numbers(nodes), ()))
        return self._supports[nodes]

    def identity_parts(self) -> tuple[object, ...]:
        """All that is computed: the operations, and the bits of the weights."""
        values = {source.name: source.value for source in self.program.sources}
        return (self.name, program_digest(self.program), values)

    def sweep(self, sites: Any, *, base: Any, source: Any, metric: Any, precision: str | None = None) -> Any:
        """Patch every one of `sites` in a world of its own, and read `metric` there; see `Sweep`."""
        from conewise.sweeps.sweep import Sweep  # noqa: PLC0415  # a sweep is made of a model's runs

        return Sweep(self, sites, base=base, source=source, metric=metric, precision=precision)

    def verify(self, *, seed: int = 0, samples: int = 3) -> Verification:
        """Check the graph against the module itself, on random inputs; see `Verification`."""
        with within_memory("verifying this model"):
            return verify(self, seed=seed, samples=samples)

    def _plain_view(self, node: str) -> View:
        """A view of one axis for each dimension: batch, pos, and dim2, dim3, ... for the others."""
        shape = self._shapes[node]
        if shape is None:
            raise PatchError(
                f"the value of {node!r} is several tensors, not one, so it cannot be read or patched as a "
                "site. Use the site that takes the part you mean from it."
            )
        dimensions = self.program.dimensions
        roles = dict.fromkeys(dimensions.batch, "batch") | dict.fromkeys(dimensions.positions, "pos")
        axes: list[str] = []
        for dim, size in enumerate(shape):
            role = roles.get(str(size), f"dim{dim}")
            axes.append(role if role not in axes else f"dim{dim}")
        return View(tuple(axes), tuple((axis,) for axis in axes), {})

    def _estimated_bytes(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """An upper estimate of what the value of each operation takes, views counted as copies."""
        given = {name: tuple(value.shape) for name, value in inputs.items()}
        key = tuple(given.values())
        if key not in self._bytes:
            sizes = self.program.sizes
            symbols = sizes.symbols_of({leaf.name: leaf.shape for leaf in self.program.inputs}, given)
            elements: dict[tuple[Any, ...], int] = {}
            found: dict[str, int] = {}
            for record in self.program.records:
                if record.shape is not None and record.dtype is not None:
                    if record.shape not in elements:
                        elements[record.shape] = math.prod(sizes.value(n, symbols) for n in record.shape)
                    found[record.name] = elements[record.shape] * record.dtype.itemsize
            self._bytes[key] = found
        return self._bytes[key]

    def __repr__(self) -> str:
        kinds = ", ".join(self._table.kinds) or "modules and operations only"
        return (
            f"Model of {self.name}: {len(self.program.records)} operations, "
            f"{len(self.program.sources)} weights and constants, sites: {kinds}"
            f"{'' if self.fidelity.bitwise else f'; {self.fidelity}'}"
        )

    def _repr_html_(self) -> str:
        inputs = ", ".join(leaf.name for leaf in self.program.inputs)
        shape = f"fixed ({self.batch_is_fixed.splitlines()[0]})" if self.batch_is_fixed else "any"
        rows = [
            ("operations", f"{len(self.program.records):,}"),
            ("weights and constants", f"{len(self.program.sources):,}"),
            ("inputs", inputs),
            ("outputs", described_fields(self.program)),
            ("batch size", shape),
            ("kinds of sites", ", ".join(self._table.kinds) or "modules and operations only"),
            ("the graph is", str(self.fidelity)),
        ]
        return heading(f"Model of {self.name}") + table(rows) + heading("", "All sites: model.sites")


def _budget(keep: object) -> int | None:
    """The bytes that `keep` allows, or None where it is no amount of memory."""
    if isinstance(keep, int) and not isinstance(keep, bool):
        return keep
    if not isinstance(keep, str) or keep == "all":
        return None
    try:
        return as_bytes(keep)
    except SweepError:
        return None


def capture(module: Any, /, *args: Any, batch_dim: Any = None, **kwargs: Any) -> Model:
    """Turn any `nn.Module` into a graph, as it computes for an example like these arguments.

    The batch may vary from run to run, and the number of positions too where the module allows it.
    Which dimension of the inputs is the batch is read off the computation, as far as that tells; say it
    with `batch_dim` where it does not (a module whose own `forward` takes `batch_dim` gets it instead).
    Hugging Face models are captured with `use_cache=False`; give `logits_to_keep=1` to compute the last
    position's logits only. Raises CaptureError with torch's reason and what to do, where the module is not
    one graph.
    """
    if batch_dim is not None and "batch_dim" in inspect.signature(module.forward).parameters:
        kwargs, batch_dim = {**kwargs, "batch_dim": batch_dim}, None
    with within_memory("capturing this module"):
        return Model(module, args, kwargs, batch_dim=batch_dim)

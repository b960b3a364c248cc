"""A captured model: any `nn.Module` as a reactive graph, with names for its sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conewise.engine.world import World
from conewise.errors import PatchError
from conewise.frontends.torch.build import build_graph, run_sources
from conewise.frontends.torch.export import export
from conewise.frontends.torch.records import SIZES, Program, Ref
from conewise.frontends.torch.result import AXES as RESULT_AXES
from conewise.frontends.torch.result import HeadResult
from conewise.frontends.torch.sites import Site, SiteTable
from conewise.frontends.torch.streaming import stream
from conewise.frontends.torch.tensors import Tensor, computing, storage_bytes
from conewise.frontends.torch.views import View
from conewise.workloads.listing import Listing
from conewise.workloads.places import Place, PlaceLike, as_place
from conewise.workloads.run import Run
from conewise.workloads.verify import Verification, verify

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

    def expect(self, part: Tensor, present: Tensor, place: Place) -> None:
        """Refuse a part of another shape, dtype or device: nothing is cast, moved or broadcast."""
        found = (tuple(part.shape), part.dtype, part.device)
        expected = (tuple(present.shape), present.dtype, present.device)
        if found != expected:
            raise PatchError(
                f"the value for {place} has shape {found[0]}, {found[1]}, on {found[2]}; the place has shape "
                f"{expected[0]}, {expected[1]}, on {expected[2]} ({', '.join(self.part_axes)}). Convert it "
                "first: nothing is cast, moved or broadcast."
            )


class Model:
    """A module as a graph of its operations, with the module's own weights.

    The module is only read: no hook, buffer or attribute is left on it. The graph holds its
    tensors themselves, so a later change of a weight in place is a change of the model.
    """

    def __init__(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        exported = export(module, args, kwargs)
        self.module = module
        self.name = exported.program.module_name
        self.program: Program = exported.program
        self.signature = exported.signature
        self.batch_is_fixed = exported.fixed
        self.graph = build_graph(self.program)
        self._table = SiteTable(self.program)
        self._supports: dict[tuple[str, ...], frozenset[int]] = {}

    @property
    def sites(self) -> Listing:
        """Every place that can be patched: a table to print, to search, to turn into a DataFrame."""
        return Listing(self._table, self.graph, self.program)

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

    def run(self, *args: Any, keep: Iterable[PlaceLike] | str | None = None, **kwargs: Any) -> Run:
        """The baseline for one input: the module's outputs, and every site's value.

        `keep` says which values stay in memory. None: all of them, if they are estimated to take
        at most 1 GiB, else those that patches at the model's named sites read. "all": all. A list of
        places: just what patches at these places will read. What is not kept is computed again when
        it is asked for; results do not depend on `keep`.
        """
        inputs = self.signature.bind(args, kwargs)
        sources = run_sources(self.program, inputs)
        sizes: tuple[int, ...] = sources[SIZES]
        if keep is None and self._estimated_bytes(inputs) > KEEP_ALL_BYTES:
            keep = [site.name for site in self._table if site.kind not in {"op", "module", "module input"}]
        outputs = [out.name for out in self.program.outputs if isinstance(out, Ref)]
        if keep is None or keep == "all":
            world = World(self.graph)
            for name, value in sources.items():
                world.set(name, value)
            with computing():
                world.demand(outputs)
            return Run(self, world, sizes, inputs)
        if isinstance(keep, str):
            raise PatchError(f"keep is 'all', a list of places or None, and {keep!r} is none of these.")
        wanted = self.read_by_patches_at(keep) | set(outputs)
        with computing():
            values = stream(self.program, sources, wanted)
        return Run(self, World.partial(self.graph, values | sources), sizes, inputs)

    def read_by_patches_at(self, places: Iterable[PlaceLike]) -> set[str]:
        """The nodes whose baseline values patches at these places read.

        These are the sites, and what their cones read from outside of them.
        """
        table, nodes = self.graph.table, {self.locate(place).node for place in places}
        needed = set(self.support(tuple(out.name for out in self.program.outputs if isinstance(out, Ref))))
        wanted = set(nodes)
        for node in nodes:
            number = self.graph.number(node)
            cone = table.cone([number]) & needed
            frontier = {site for reader in cone for site in table.inputs[reader]} - cone
            wanted.update(self.graph.names(site for site in frontier if table.rules[site] is not None))
        return wanted

    def support(self, nodes: tuple[str, ...]) -> frozenset[int]:
        """The numbers of all nodes that these depend on, themselves included."""
        if nodes not in self._supports:
            self._supports[nodes] = frozenset(self.graph.table.support(self.graph.numbers(nodes), ()))
        return self._supports[nodes]

    def verify(self, *, seed: int = 0, samples: int = 3) -> Verification:
        """Check the graph against the module itself, on random inputs; see `Verification`."""
        return verify(self, seed=seed, samples=samples)

    def _plain_view(self, node: str) -> View:
        """A view of one axis for each dimension: batch, pos, and dim2, dim3, ... for the others."""
        shape = next((r.shape for r in self.program.records if r.name == node), None)
        if shape is None:
            shape = next((i.shape for i in self.program.inputs if i.name == node), None)
        if shape is None:
            raise PatchError(
                f"the value of {node!r} is several tensors, not one, so it cannot be read or patched as a "
                "site. Use the site that takes the part you mean from it."
            )
        roles = {
            symbol: ("batch", "pos")[dim]
            for symbol, (_, dim) in self.program.sizes.symbols.items()
            if dim < 2
        }
        axes: list[str] = []
        for dim, size in enumerate(shape):
            role = roles.get(str(size), f"dim{dim}")
            axes.append(role if role not in axes else f"dim{dim}")
        return View(tuple(axes), tuple((axis,) for axis in axes), {})

    def _estimated_bytes(self, inputs: Mapping[str, Tensor]) -> int:
        """An upper estimate of what all values take: every record's tensor, views counted as copies."""
        given = {name: tuple(value.shape) for name, value in inputs.items()}
        shapes = {leaf.name: leaf.shape for leaf in self.program.inputs}
        symbols = self.program.sizes.symbols_of(shapes, given)
        total = storage_bytes(list(inputs.values()))
        for record in self.program.records:
            if record.shape is not None and record.dtype is not None:
                elements = 1
                for size in record.shape:
                    elements *= self.program.sizes.value(size, symbols)
                total += elements * record.dtype.itemsize
        return total

    def __repr__(self) -> str:
        table = self._table
        kinds = ", ".join(table.kinds) or "modules and operations only"
        return (
            f"Model of {self.name}: {len(self.program.records)} operations, "
            f"{len(self.program.sources)} weights and constants, sites: {kinds}"
        )


def capture(module: Any, *args: Any, **kwargs: Any) -> Model:
    """Turn any `nn.Module` into a graph, as it computes for an example like these arguments.

    The batch dimension may vary from run to run, and the sequence dimension too where the module
    allows it. Hugging Face models are captured with `use_cache=False`; give `logits_to_keep=1` to
    compute the last position's logits only. Raises CaptureError with torch's reason and what to
    do, where the module is not one graph.
    """
    return Model(module, args, kwargs)

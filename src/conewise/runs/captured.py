"""A captured module: its program, its graph, its sites. What runs, sweeps and checks are made of."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from conewise.capturing.export import Exported, export
from conewise.capturing.fidelity import compare
from conewise.errors import InexactCaptureWarning, PatchError
from conewise.identity.digests import program_digest
from conewise.locations.head_result import AXES as RESULT_AXES
from conewise.locations.listing import Listing
from conewise.locations.located import Located
from conewise.locations.places import PlaceLike, as_place
from conewise.locations.sites import SiteTable
from conewise.locations.spliced import Spliced
from conewise.markup import heading, table
from conewise.phases import shown_phases
from conewise.program.build import build_graph
from conewise.program.records import Program
from conewise.program.sizes import has_unbacked
from conewise.program.streaming import described_fields, output_names
from conewise.program.tensors import Tensor
from conewise.program.weights import Weights
from conewise.status_line import status_line
from conewise.structure.axes.views import View

BEHIND_KEPT = 256
"""How many answers of `Captured.behind` are kept."""


class Captured:
    """A module as a graph of its operations, with the module's own weights: all of a model but what it does.

    The module is only read: no hook, buffer or attribute is left on it. The graph holds its
    tensors themselves, so a later change of a weight in place is a change of the model: runs that were made
    before are refused from then on, and new ones have the new weights. A module whose tensors were replaced
    by others (`module.w = nn.Parameter(...)`, `load_state_dict(..., assign=True)`, `module.to(dtype)`) is to
    be captured again, and says so. `fidelity` says how the graph compares with the module on the example.
    `tokenizer` reads texts that are given as inputs; None where it was captured without one. `label` is the
    model as the user named it.
    """

    def __init__(
        self,
        module: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        batch_dim: int | None = None,
        tokenizer: Any = None,
        label: str = "",
    ) -> None:
        """See `conewise.capture`."""
        with status_line(f"capturing {type(module).__name__}") as doing:
            doing("exporting")
            exported = export(module, args, kwargs, batch_dim=batch_dim)
            self.tokenizer, self.label = tokenizer, label or exported.program.module_name
            self._batch_dim = batch_dim
            self._hold(module, exported, SiteTable, doing)
        self.phases = doing.seconds()
        """The seconds that capturing took: exporting, building, comparing, weights."""

    def _hold(
        self,
        module: Any,
        exported: Exported,
        sites_of: Callable[[Program], SiteTable],
        doing: Callable[[str], None],
    ) -> None:
        """Be the captured model of a module that was exported; `sites_of` finds the sites of its program."""
        doing("building")
        self.module = module
        self.name = exported.program.module_name
        self.program: Program = exported.program
        self.signature = exported.signature
        self.batch_is_fixed = exported.fixed
        self.graph = build_graph(self.program)
        self.weights = Weights(self.program, module)
        doing("comparing")
        self.fidelity = compare(module, exported, self.graph)
        doing("weights")
        if self.weights.are_on_gpu:
            self.weights.whole_contents()  # loads what reads them there
        doing("building")
        self.site_table = sites_of(self.program)
        self.splices: Mapping[str, Spliced] = MappingProxyType({})
        self.spliced_into: tuple[Captured, Mapping[str, Any]] | None = None
        """The model that a dictionary was spliced into, and what `splice` was given; None without one."""
        if not self.fidelity.bitwise:
            warnings.warn(
                f"{self.name} was captured, but the graph is {self.fidelity}.",
                InexactCaptureWarning,
                stacklevel=4,
            )
        self._behind: OrderedDict[tuple[tuple[str, ...], ...], tuple[str, ...]] = OrderedDict()
        self._supports: dict[tuple[str, ...], frozenset[int]] = {}
        self._bytes: dict[tuple[tuple[int, ...], ...], dict[str, int]] = {}

    @cached_property
    def sites(self) -> Listing:
        """Every place that can be patched: a table to print, to search, to turn into a DataFrame."""
        note = "" if self.fidelity.bitwise else f"The graph is {self.fidelity}."
        return Listing(self.site_table, self.graph, self.program, note)

    def locate(self, place: PlaceLike) -> Located:
        """Find a place. Raises MissingSiteError with the reason, or with the nearest names."""
        place = as_place(place)
        site = self.site_table.find(place.name, place.layer, place.stack)
        if site.result is not None:
            view = View(RESULT_AXES, tuple((axis,) for axis in RESULT_AXES), {})
        else:
            view = site.view or self._plain_view(site.node)
        view.index(place.part)
        return Located(site, view, place.part)

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

    def behind(self, nodes: Collection[str], targets: Collection[str]) -> tuple[str, ...]:
        """The records that depend on `nodes` and that `targets` depend on, in order."""
        key = tuple(sorted(set(nodes))), tuple(sorted(set(targets)))
        if key not in self._behind:
            cone = self.graph.table.cone(self.graph.numbers(key[0]))
            needed = cone & self.support(key[1])
            self._behind[key] = self.graph.names(self.graph.table.sorted(needed))
            while len(self._behind) > BEHIND_KEPT:
                self._behind.popitem(last=False)
        return self._behind[key]

    def identity_parts(self) -> tuple[object, ...]:
        """All that is computed: the operations, and the bits of the weights."""
        return (self.name, program_digest(self.program), dict(self.program.source_values))

    def _plain_view(self, node: str) -> View:
        """A view of one axis for each dimension: batch, pos, and dim2, dim3, ... for the others."""
        shape = self.program.shapes[node]
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

    def estimated_bytes(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """An upper estimate of what the value of each operation takes, views counted as copies.

        Values whose sizes depend on values, as the rows that a router chose, are not in it.
        """
        given = {name: tuple(value.shape) for name, value in inputs.items()}
        key = tuple(given.values())
        if key not in self._bytes:
            sizes = self.program.sizes
            symbols = self.program.symbols_of(given)
            elements: dict[tuple[Any, ...], int] = {}
            found: dict[str, int] = {}
            for record in self.program.records:
                if record.shape is None or record.dtype is None:
                    continue
                if not any(map(has_unbacked, record.shape)):
                    if record.shape not in elements:
                        elements[record.shape] = math.prod(sizes.value(n, symbols) for n in record.shape)
                    found[record.name] = elements[record.shape] * record.dtype.itemsize
            self._bytes[key] = found
        return self._bytes[key]

    def __repr__(self) -> str:
        kinds = ", ".join(self.site_table.kinds) or "modules and operations only"
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
            ("kinds of sites", ", ".join(self.site_table.kinds) or "modules and operations only"),
            ("the graph is", str(self.fidelity)),
            ("captured in", shown_phases(self.phases)),
        ]
        return heading(f"Model of {self.name}") + table(rows) + heading("", "All sites: model.sites")

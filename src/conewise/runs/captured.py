"""A captured module: its program, its graph, its sites. What runs, sweeps and checks are made of."""

from __future__ import annotations

import inspect
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from conewise.anatomy.axes import View
from conewise.anatomy.listing import Listing
from conewise.anatomy.places import Place, PlaceLike, Spliced, as_place
from conewise.anatomy.sites import AXES as RESULT_AXES
from conewise.anatomy.sites import Located, SiteTable
from conewise.errors import (
    GraphChangedError,
    InexactCaptureWarning,
    InputMismatchError,
    ModuleChangedError,
    OtherModelError,
    PatchError,
    warn,
)
from conewise.jobs.digests import program_digest
from conewise.program.calls import Signature, hugging_face_defaults, normal_call
from conewise.program.export import Exported, Fidelity, compare, distinct, expect_plain, export, unwrapped
from conewise.program.kept import Entry, NotKeptError, Shelf, put_tensor, tensors_of
from conewise.program.module_state import ModuleState, Unbuilt, changed_beside, digest_of_state
from conewise.program.records import TOKEN_KEEPING, Program, Ref
from conewise.program.sizes import has_unbacked
from conewise.program.streamed_modules import with_streams
from conewise.program.streaming import reads_of
from conewise.program.tensors import Tensor
from conewise.program.walk import between, bitwise_same, build_graph, described_fields, output_names
from conewise.program.weights import Weights
from conewise.status import shown_phases, status_line
from conewise.templates import heading, table
from conewise.threads import Turn, one_module, own_settings

BEHIND_KEPT = 256
"""The number of answers of `Captured.behind` that are kept."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a step makes of a model: a module, what it computes, its sites, and how to make that again.

    `reasons`: why the module may compute otherwise than the program. `at` is the node or the edge of the
    graph at which a block was put in; None where something else was done.
    """

    module: Any
    program: Program
    sites_of: Callable[[Program], SiteTable]
    again: Callable[[], Program]
    reasons: tuple[str, ...] = ()
    at: str | tuple[str, tuple[str, ...]] | None = None


class Captured:
    """A module as a graph of its operations, with the module's own weights; the base class of `Model`.

    The module is only read: no hook, buffer or attribute is left on it. The graph shares the module's
    tensors. An in-place change of a weight therefore changes the model: runs that were computed before are
    refused from then on, and new runs use the new weights. If tensors of the module are replaced (`module.w =
    nn.Parameter(...)`, `load_state_dict(..., assign=True)`, `module.to(dtype)`), an error asks for a new
    capture. `fidelity` reports how the graph compares with the module on the example. `tokenizer` reads texts
    that are given as inputs; None if the model has none. `label` is the user's name for the model.
    """

    origin: str = ""
    """The origin of the weights, in words; empty where a module was captured."""

    _max_memory: int | None = None
    """The bytes that streamed weights and computations may take together; None where nothing says."""

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
        self.module = with_streams(unwrapped(module))
        self.name = type(self.module).__name__
        self.tokenizer, self.label = tokenizer, label or self.name
        self._batch_dim = batch_dim
        self._turn = Turn()
        self._capture(args, kwargs)

    _shelf: Shelf | None = None
    """The place of the model's programs in the cache folder; None where they are not kept."""
    _kept: Entry | None = None
    """The entry that the program came from; None where the module was traced."""
    _build: Callable[[], Any] | None = None
    """Builds the module, where this is left until it is needed."""
    _module: Any = None
    state: ModuleState | Unbuilt
    _tokenizer: Any = None
    _read_tokenizer: Callable[[], Any] | None = None
    """Reads the tokenizer, where this is left until it is needed."""

    @property
    def _has_tokenizer(self) -> bool:
        """True if it has one; it is not read for this."""
        return self._read_tokenizer is not None or self._tokenizer is not None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, which reads texts that are given as inputs; None if the model has none."""
        if self._read_tokenizer is not None:
            self.tokenizer = self._read_tokenizer()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer, self._read_tokenizer = tokenizer, None

    @property
    def module(self) -> Any:
        """The module. If its program and weights came from the cache, it is built when it is first read."""
        if self._module is None and self._build is not None:
            with one_module():
                self._take(self._build())
        return self._module

    @module.setter
    def module(self, module: Any) -> None:
        self._module = module

    @property
    def _is_unbuilt(self) -> bool:
        """True while the module is left to be built when it is first read."""
        return self._module is None and self._build is not None

    def _take(self, module: Any) -> None:
        """Have a module that was built now, with the tensors of the program in the places of its own."""
        if self._kept is None:
            self._module = module
            return
        state = ModuleState(module, self.name, self._is_same_program)
        for source in self.program.sources:
            for path in (source.name, *source.aliases):
                put_tensor(module, path, source.value)
        self._module = module
        try:
            if digest_of_state(module) != self._kept.found["state"] and not self._is_same_program(()):
                raise ModuleChangedError(self.name, ["its code, or what that reads, since it was kept"])
        except BaseException:
            self._module = None
            raise
        self.state = state
        self.weights.attach(module, state)

    def _capture(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        with one_module(), status_line(f"capturing {self.name}") as doing:
            doing("exporting")
            if not self._read_kept(args, kwargs, doing):
                digest = "" if self._shelf is None else digest_of_state(self.module)
                exported = export(self.module, args, kwargs, batch_dim=self._batch_dim)
                self._hold(self.module, exported, SiteTable, doing)
                if self._shelf is not None:
                    doing("keeping")
                    self._keep(self._shelf, exported, digest)
        self.phases = doing.seconds()
        """The seconds that capturing took: exporting, building, comparing, weights, keeping."""

    def _keep(self, shelf: Shelf, exported: Exported, digest: str) -> None:
        facts = {
            "fidelity": asdict(self.fidelity),
            "fixed": exported.fixed,
            "reasons": exported.reasons,
            "state": digest,
            "defaults": hugging_face_defaults(
                self.module, exported.signature.forward, last_position_only=False
            ),
        }
        shelf.keep(exported.signature.example, exported.program, facts, self.module)

    def _read_kept(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], doing: Callable[[str], None]
    ) -> bool:
        """Be what was captured in an earlier process, where that was kept and is right; else do nothing."""
        if self._shelf is None:
            return False
        module, some = self._module, self._shelf.any()
        if some is None or (module is None and some.needs_module):
            return False
        forward = some.forward if module is None else inspect.signature(module.forward)
        try:
            call = distinct(normal_call(forward, args, {**some.found["defaults"], **kwargs}))
            entry = self._shelf.find(call)
            if entry is None:
                return False
            if module is None:
                program = entry.program(entry.values(self._shelf.mapped, self._shelf.device))
            else:
                expect_plain(module)
                if digest_of_state(module) != entry.found["state"]:
                    return False
                program = entry.program(tensors_of(module))
            given = {name: tuple(one.shape) for name, one in call.leaves()[0] if isinstance(one, Tensor)}
            program.symbols_of(given)
            fidelity = Fidelity(**entry.fidelity)
        except (NotKeptError, InputMismatchError, KeyError, TypeError):
            return False
        exported = Exported(
            program, Signature(forward, call), entry.found["fixed"], tuple(entry.found["reasons"])
        )
        with warnings.catch_warnings(record=True) as warned:
            self._hold(module, exported, SiteTable, doing, kept=fidelity)
        if self.fidelity.bitwise != fidelity.bitwise:
            return False  # it is traced again
        self._kept = entry
        for one in warned:
            warn(one.message if isinstance(one.message, Warning) else str(one.message), one.category)
        return True

    @own_settings()
    def _hold(
        self,
        module: Any,
        exported: Exported,
        sites_of: Callable[[Program], SiteTable],
        doing: Callable[[str], None],
        again: Callable[[], Program] | None = None,
        kept: Fidelity | None = None,
    ) -> None:
        """Be the captured model of a module that was exported; `sites_of` finds the sites of its program.

        `again` makes the program of one with a dictionary once more, with the dictionary as it is then.
        `kept` is what was found when the module was traced, where that was in an earlier process: it is
        trusted where the module is None, not built yet, and compared again where it is there.
        """
        doing("building")
        self._module = module
        self.name = exported.program.module_name
        self.program: Program = exported.program
        self.signature = exported.signature
        self.batch_is_fixed = exported.fixed
        self.graph = build_graph(self.program)
        self._built = tuple(self.graph.table.rules), tuple(self.graph.table.inputs)
        self._again = again
        streamed = reads_of(self.program)
        if streamed.stream is not None:
            streamed.stream.order = streamed.order(self.program.record_of)
        self.state = (
            Unbuilt(lambda: self.module)
            if module is None
            else ModuleState(module, self.name, self._is_same_program)
        )
        self.weights = Weights(self.program, module, self.state)
        example = exported.signature.example
        self.expect_known_ids(exported.signature.bind(example.args, example.kwargs))
        doing("comparing")
        self.fidelity = kept if module is None and kept is not None else compare(module, exported, self.graph)
        if again is None:
            self.state.expect_stateless()
        doing("weights")
        if self.weights.are_on_gpu:
            self.weights.whole_contents()  # loads what reads them there
        doing("building")
        self.site_table = sites_of(self.program)
        self.splices: Mapping[str, Spliced] = MappingProxyType({})
        self.operated_from: tuple[Captured, Any] | None = None
        """The model that this one was made of, and the step that did so; None where it was captured."""
        if not self.fidelity.bitwise:
            warn(f"{self.name} was captured, but the graph is {self.fidelity}.", InexactCaptureWarning)
        self._behind: OrderedDict[tuple[tuple[str, ...], tuple[str, ...]], tuple[str, ...]] = OrderedDict()
        self._supports: dict[tuple[int, tuple[str, ...]], frozenset[int]] = {}
        self._bytes: dict[tuple[tuple[int, ...], ...], dict[str, int]] = {}

    def _made_of(self, step: Any, made: Made, doing: Callable[[str], None]) -> Self:
        """The model that a step makes of this one, which stays as it is."""
        model = object.__new__(type(self))
        model.tokenizer, model.label, model._batch_dim = self.tokenizer, self.label, self._batch_dim
        model.origin, model._max_memory, model._turn = self.origin, self._max_memory, Turn()
        exported = Exported(made.program, self.signature, self.batch_is_fixed, made.reasons)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InexactCaptureWarning)  # the capture said so
            model._hold(made.module, exported, made.sites_of, doing, made.again)
        model.splices, model.operated_from = self.splices, (self, step)
        return model

    @property
    def _put_in(self) -> tuple[str, ...]:
        """The names of the modules that steps have put in beside the module's own."""
        before = None if self.operated_from is None else self.operated_from[0]
        if before is None:
            return ()
        return (
            *before._put_in,
            *(name for name in self.module._modules if name not in before.module._modules),
        )

    @cached_property
    def sites(self) -> Listing:
        """Every place that can be patched, as a table to print, to search, or to convert to a DataFrame."""
        note = "" if self.fidelity.bitwise else f"The graph is {self.fidelity}."
        return Listing(self.site_table, self.graph, self.program, note)

    @cached_property
    def _tables(self) -> dict[str, int]:
        """The rows of the tables that each input is looked up in as it is: vocabularies, positions."""
        limits: dict[str, int] = {}
        inputs = {leaf.name: leaf.name for leaf in self.program.inputs if not leaf.dtype.is_floating_point}
        for record in self.program.records:
            first, second = (*record.args, None, None)[:2]
            if record.op == "embedding" and isinstance(second, Ref) and second.name in inputs:
                table = self.program.source_values.get(getattr(first, "name", ""))
                if table is not None:
                    name = inputs[second.name]
                    limits[name] = min(len(table), limits.get(name, len(table)))
            elif record.op in TOKEN_KEEPING and isinstance(first, Ref) and first.name in inputs:
                inputs[record.name] = inputs[first.name]
        return limits

    def expect_known_ids(self, inputs: Mapping[str, Any]) -> None:
        """Raise InputMismatchError if inputs hold ids that the model's tables do not have."""
        for name, rows in self._tables.items():
            ids = inputs.get(name)
            if isinstance(ids, Tensor) and ids.numel() and ids.device.type != "meta":
                low, high = (int(end) for end in ids.aminmax())
                if low < 0 or high >= rows:
                    raise InputMismatchError(
                        f"{name!r} holds the id {low if low < 0 else high}, and {self.name} knows {rows}, "
                        f"from 0 to {rows - 1}. Tokenize with the model's own tokenizer."
                    )

    @property
    def is_captured(self) -> bool:
        """True once the model is a graph; a model from `cw.load` is captured when it is first used."""
        return True

    def _capture_for(self, given: Any) -> None:
        """Capture a model that was loaded, with the first inputs that it is given: here nothing waits."""

    def locate(self, place: PlaceLike) -> Located:
        """Find a place: one value. Raises MissingSiteError with the reason, or with the nearest names."""
        place = as_place(place)
        site = self.site_table.find(place.name, place.layer, place.stack)
        if site.result is not None:
            if site.result.projection.name in self.changed_sites:
                self.expect_program(f"read or patch {place}, which is computed from the output projection")
            view = View(RESULT_AXES, tuple((axis,) for axis in RESULT_AXES), {})
        else:
            view = site.view or self._plain_view(site.node)
        view.index(place.part)
        return Located(site, view, place.part)

    def each_call(self, places: Sequence[Place]) -> tuple[Place, ...]:
        """Return the places to patch, with every call of a module that is called several times."""
        table = self.site_table
        if not table.has_repeated_calls:
            return tuple(places)
        return tuple(
            place if name == place.name else replace(place, name=name)
            for place in places
            for name in (table.calls(place.name) if place.layer is None else (place.name,))
        )

    @property
    def changed_sites(self) -> tuple[str, ...]:
        """The sites of the graph whose rules or inputs differ from those of the program.

        `graph.redefine`, grafts and removals change them. Runs, their forks and serial sweeps call the
        graph's rules, and so use the changes. Everything else is computed from the program, and calls
        `expect_program` first.
        """
        graph = self.graph
        if not graph.changes:
            return ()
        now = zip(graph.table.rules, graph.table.inputs, strict=True)
        built = zip(*self._built, strict=True)
        changed = (
            number for number, (one, other) in enumerate(zip(now, built, strict=False)) if one != other
        )
        return graph.names(changed)

    def _budget(self, asked: int | None) -> int | None:
        """The bytes that a job may take: those that were asked for, or what streamed weights leave."""
        stream = reads_of(self.program).stream
        if asked is not None or self._max_memory is None or stream is None:
            return asked
        return max(1, self._max_memory - stream.ring.size - self.weights.held_bytes)

    def expect_own(self, what: str, of: Captured) -> None:
        """Raise OtherModelError if `what`, such as "base is a run", belongs to another captured model."""
        if of is not self:
            raise OtherModelError(what, of.name, self.name)

    def expect_program(self, what: str) -> None:
        """Raise GraphChangedError if the graph differs from the program, which is needed to do `what`."""
        if sites := self.changed_sites:
            raise GraphChangedError(what, self.name, sites)

    def read_by_patches_at(self, places: Iterable[PlaceLike]) -> set[str]:
        """The nodes whose baseline values patches at these places read.

        These are the sites, and what their cones read from outside of them.
        """
        nodes = self.graph.table
        found = [self.locate(place) for place in self.each_call([as_place(place) for place in places])]
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
        """Return the numbers of all nodes that `nodes` depend on, themselves included, stopping at `cut`."""
        if cut:
            return frozenset(self.graph.table.support(self.graph.numbers(nodes), self.graph.numbers(cut)))
        key = self.graph.changes, nodes
        if key not in self._supports:
            self._supports[key] = frozenset(self.graph.table.support(self.graph.numbers(nodes), ()))
        return self._supports[key]

    def behind(self, nodes: Collection[str], targets: Collection[str]) -> tuple[str, ...]:
        """The records that depend on `nodes` and that `targets` depend on, in order."""
        key = tuple(sorted(set(nodes))), tuple(sorted(set(targets)))
        if key not in self._behind:
            self._behind[key] = tuple(one.name for one in between(self.program, *key, cut=False))
            while len(self._behind) > BEHIND_KEPT:
                self._behind.popitem(last=False)
        return self._behind[key]

    def _is_same_program(self, changed: Collection[str]) -> bool:
        """True if what was captured, traced again, gives the same program, with the same constants.

        `changed` says where the module changed. Of one with a dictionary only the dictionary is traced again.
        """
        try:
            if self._again is None:
                call = self.signature.example
                again = export(self.module, call.args, call.kwargs, batch_dim=self._batch_dim).program
            elif changed_beside(self.module, self._put_in, changed):
                return False
            else:
                again = self._again()
        except ModuleChangedError:
            raise  # of the model that the dictionary was put into: it says what changed there
        except Exception:  # noqa: BLE001  # a module raises whatever it likes
            return False
        held, now = self.program.source_values, again.source_values
        return (
            program_digest(again) == program_digest(self.program)
            and held.keys() == now.keys()
            and all(value is now[name] or bitwise_same(value, now[name]) for name, value in held.items())
        )

    def identity_parts(self) -> tuple[object, ...]:
        """Return everything that determines the computation: the operations, and the bits of the weights."""
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
        """Return an upper estimate of the bytes of each operation's value, counting views as copies.

        Values whose sizes depend on other values, such as the rows that a router selected, are not included.
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

    @property
    def n_layers(self) -> int:
        """The number of layers that were found, added over all stacks."""
        return len(self.site_table.model_layers)

    @property
    def n_heads(self) -> int:
        """The number of attention heads of a layer; 0 if heads were not distinguished."""
        found = next((site for site in self.site_table if site.kind == "z"), None)
        length = None if found is None or found.view is None else found.view.lengths.get("head")
        return length if isinstance(length, int) else 0

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

"""Values of a captured model for one input, by site; nobody may write to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from conewise.anatomy.places import Place, PlaceLike, as_place
from conewise.anatomy.sites import Located
from conewise.arguments import expect
from conewise.errors import PatchError, WeightsChangedError
from conewise.jobs.identity import Keyed
from conewise.program.tensors import Tensor, as_constant, computing, recording, writes_to
from conewise.program.walk import (
    assembled,
    bitwise_same,
    described_fields,
    field_names,
    field_of,
    output_names,
    partly_assembled,
)
from conewise.program.weights import Contents, Sums, bits_of
from conewise.reactive.ledger import Ledger
from conewise.reactive.world import World
from conewise.runs.captured import Captured
from conewise.threads import one_thread

Part = Tensor | Callable[[Tensor], Tensor]


def new_part(part: Part, present: Tensor, found: Located, place: Place) -> Tensor:
    """Return what replaces `present`: the tensor `part`, or the result of the function `part`.

    A function gets a copy, which it may write to. Raise PatchError where the shape, dtype or device differs.
    """
    made = part if isinstance(part, Tensor) else part(present.clone())
    found.expect(made, present, place)
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """One patch: a part of a site's value, and what replaces it. `parameters`: what gradients go to in it."""

    place: Place
    found: Located
    part: Part
    parameters: tuple[Tensor, ...] = ()

    @property
    def node(self) -> str:
        """The node of the graph whose value or rule the edit changes."""
        result = self.found.result
        return self.found.node if result is None else result.projection.name

    @property
    def covers(self) -> bool:
        """True if nothing of the node's own value is left."""
        return isinstance(self.part, Tensor) and not self.place.part and self.found.result is None

    @property
    def described(self) -> str:
        """The replacement of the part, in words."""
        if isinstance(self.part, Tensor):
            return f"a tensor of shape {tuple(self.part.shape)}"
        return f"the function {getattr(self.part, '__name__', self.part)}"

    def applied(self, value: Tensor, sizes: tuple[int, ...], idle: set[Edit] | None = None) -> Tensor:
        """Return a copy of `value` with the part replaced; add the edit to `idle` if that changes nothing.

        Where torch records, gradients go through it.
        """
        present = self.found.read(value, sizes)
        part = new_part(self.part, present, self.found, self.place)
        if idle is not None:
            (idle.add if bitwise_same(part, present) else idle.discard)(self)
        return self.found.view.replace(value, self.found.part, part, sizes)


def of_values(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Return the edits that change the value of their node, and not what is computed from it."""
    return tuple(edit for edit in edits if edit.found.result is None)


def applied_in_turn(
    edits: Iterable[Edit], value: Tensor, sizes: tuple[int, ...], idle: set[Edit] | None = None
) -> Tensor:
    """Return a copy of `value` with the parts replaced, one after another.

    A plain function of its arguments: a rule that held its world would keep it from being dropped.
    """
    for edit in edits:
        value = edit.applied(value, sizes, idle)
    return value


class Lent:
    """Values by name, with what they held when they were lent.

    Raises PatchError for one that was written to since.
    """

    def __init__(self) -> None:
        self._lent: dict[str, tuple[Any, int, Sums, int]] = {}

    def lend(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Note what these hold now."""
        sums = bits_of(values)
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            known = self._lent.get(name)
            if known is not None and known[0] is value and known[2][known[3]] != sums[place]:
                raise _written(name)
            self._lent[name] = value, writes_to(value), sums, place

    def check_writes(self) -> None:
        """Look for writes that torch counts."""
        for name, (value, writes, _, _) in self._lent.items():
            if writes_to(value) != writes:
                raise _written(name)

    def check_bits(self) -> None:
        """Look for any writes: every bit is read."""
        if self._lent:
            now = bits_of([value for value, *_ in self._lent.values()])
            for (name, (_, _, sums, place)), found in zip(self._lent.items(), now, strict=True):
                if sums[place] != found:
                    raise _written(name)

    def clear(self) -> None:
        """Forget what was lent."""
        self._lent.clear()


def _written(name: str) -> PatchError:
    return PatchError(
        f"the value of {name!r} was written to after it was read from here. It is the cached value that "
        "others are computed from: run again, and write to a copy, `run[...].clone()`, or patch the site in "
        "a fork."
    )


@one_thread
class Values:
    """Values of a captured model, by site; the module's outputs, in the module's own structure.

    The returned tensor is the cached value, or a view of it: read it, do not write to it. The next reading
    detects a write and raises an error.
    """

    def __init__(
        self, model: Captured, world: World | None, sizes: tuple[int, ...], parent: Values | None = None
    ) -> None:
        """`world` is None for a reading that makes it when it is asked for."""
        self.model, self._turn = model, model._turn
        self._world = world
        self._sizes = sizes
        self._parent = parent
        self._edits: dict[str, list[Edit]] = {}
        self._changes = 0
        self._lent = Lent()
        self._trusted = 0

    @property
    def world(self) -> World:
        """The world of the engine that holds the values."""
        assert self._world is not None
        return self._world

    @contextmanager
    def checked_once(self) -> Iterator[None]:
        """Check for writes to weights and to returned values now and at the end, instead of at every reading.

        This also applies to the forks of this object: a loop over many forks is faster inside.
        """
        with self._checked_once(self._check_bits):
            yield

    @contextmanager
    def _checked_once(self, begin: Callable[[], None] | None = None) -> Iterator[None]:
        """The same for short work: at the beginning only writes that torch counts are looked for."""
        if self._is_trusted:  # whoever trusts has looked before, and looks at every bit in the end
            yield
            self._check_lent()
            return
        (begin or self._check_lent)()
        self.model.weights.expect_captured()
        try:
            with self.trusted():
                yield
        except Exception:
            self._check_bits()  # what was written to may be why
            raise
        self._check_bits()
        self.model.weights.expect_captured()

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """Suspend the checks for writes; the caller checks before and after."""
        trusted = self._trusted
        try:
            self._trusted = trusted + 1
            yield
        finally:
            self._trusted = trusted

    def check(self, now: Contents | None = None) -> None:
        """Read every bit of the weights, and raise WeightsChangedError if they differ from those of this run.

        Values that were returned are checked too: PatchError if one was written to.

        Each run of a sweep calls this at its start and at its end. Elsewhere, every reading checks torch's
        counters of writes, and the bits are read whenever something was computed: all of them on a GPU and
        for models of up to 8 MiB, else a sample. `now`: the contents of the weights, if they were just read.
        """
        self._check_bits(self.model.weights.whole_contents() if now is None else now)

    @property
    def _is_trusted(self) -> bool:
        """True if whoever reads looks for writes before and after all that is read."""
        return self._trusted > 0 or (self._parent is not None and self._parent._is_trusted)

    def _computed(self) -> int:
        """The number of values that were computed here and in the worlds above so far."""
        above = 0 if self._parent is None else self._parent._computed()
        return above + self.ledger.count("recomputed")

    def demand(self, nodes: str | Iterable[str]) -> tuple[Any, ...]:
        """Return the values at nodes of the graph, by the graph's own names; a single name is accepted."""
        return self._values(node_names(nodes))

    def __getitem__(self, place: PlaceLike) -> Any:
        """The value at a place, in the site's natural axes."""
        found = self.model.locate(as_place(place))
        (value,) = self._values((found.node,))
        self._lend([found.node], [value])
        read = self._shown(found, self._held(found, value))
        self._report((found.node if found.result is None else found.result.projection.name,))
        return read

    def read(self, place: PlaceLike) -> Tensor:
        """Return the value at a place without the check for writes, which costs a pass over the value."""
        found = self.model.locate(as_place(place))
        return self._shown(found, self._present(found))

    def value_at(self, node: str) -> Any:
        """Return the value at one node of the graph, without warnings about patches that do not affect it."""
        return self._values((node,))[0]

    @property
    @one_thread
    def outputs(self) -> Any:
        """The module's outputs."""
        names = output_names(self.model.program)
        values = self.demand(names)
        self._lend(names, values)
        return assembled(self.model.program, dict(zip(names, values, strict=True)), self._sizes)

    def __getattr__(self, name: str) -> Any:
        """A field of the outputs by its name, `run.logits`; only that field is computed."""
        if name.startswith("_") or "model" not in vars(self):
            raise AttributeError(name)
        program = self.model.program
        names = field_names(program, name)
        if names is None:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}, and neither have the module's outputs "
                f"({described_fields(program)}). All outputs together are `.outputs`; a site's value is "
                "`run[...]`."
            )
        values = self.demand(names)
        self._lend(names, values)
        found = dict(zip(names, values, strict=True))
        return field_of(partly_assembled(program, found, self._sizes), name)

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """The inputs of the underlying run."""
        assert self._parent is not None
        return self._parent.inputs

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Every patch in force in this world, those of parent worlds first."""
        above = () if self._parent is None else self._parent.edits
        return (*above, *(edit for edits in self._edits.values() for edit in edits))

    def identity_parts(self) -> tuple[object, ...]:
        """Return everything that the values depend on."""
        return (self.model, dict(self.inputs), [(str(edit.place), edit.part) for edit in self.edits])

    @property
    def made_with(self) -> Contents:
        """The contents of the weights when the underlying run was computed."""
        assert self._parent is not None
        return self._parent.made_with

    def expect_same_weights(self, other: Values) -> None:
        """Raise WeightsChangedError if another run of the model was computed with other weights."""
        if changed := self.model.weights.changed(self.made_with.whole, other.made_with.whole):
            raise WeightsChangedError(
                f"the weights of {self.model.name} were written to between these two runs: {changed}. What "
                "is taken from one is not what the other would compute: run both again, `model.run(...)`."
            )

    @property
    def ledger(self) -> Ledger:
        """The ledger of this world: what it invalidated, recomputed and reused."""
        return self.world.ledger

    def _values(self, nodes: tuple[str, ...]) -> tuple[Any, ...]:
        """The values at nodes; does not warn of patches without effect."""
        if self._is_trusted:
            return self._demanded(nodes)
        self._check_lent()
        self.model.weights.expect_captured()
        before = self._computed()
        with self._read_inside():
            values = self._demanded(nodes)
        if self._computed() != before:
            self._check_bits()
        return values

    def _read_inside(self) -> AbstractContextManager[None]:
        """Look for no writes in this world and those above: whoever reads here looks before and after."""
        return self.trusted() if self._parent is None else self._parent._read_inside()

    @property
    def _is_recorded(self) -> bool:
        """True if something with parameters is patched here or above: values have gradients by them."""
        return self._parent is not None and self._parent._is_recorded

    def _evaluating(self) -> AbstractContextManager[None]:
        """The context in which values of this world are computed and read."""
        return recording() if self._is_recorded else computing()

    def _shown(self, found: Located, value: Tensor) -> Tensor:
        """Return the part of a site's value that is meant."""
        if not self._is_recorded:
            return found.read(value, self._sizes)
        with recording():
            return found.read(value, self._sizes)

    def _demanded(self, nodes: tuple[str, ...]) -> tuple[Any, ...]:
        if self._parent is not None and self._is_recorded:
            plan = self.world.plan(nodes)
            if len(plan.own) < len(plan):  # computed there, where perhaps nothing is recorded
                self._parent._values(plan.sites[: len(plan) - len(plan.own)])
            self.world.lend = as_constant
        with self._evaluating():
            return self.world.demand(nodes)

    def _present(self, found: Located) -> Tensor:
        """The whole site's value here, before a part of it is selected."""
        (value,) = self._values((found.node,))
        return self._held(found, value)

    def _held(self, found: Located, value: Tensor) -> Tensor:
        """Return what the site holds when its node has this value: the value, or what is computed from it."""
        if found.result is None:
            return value
        weight = as_constant(self._values((found.result.weight,))[0])
        with self._evaluating():
            result = found.result.read(value, weight, found.z_view, self._sizes)
            for edit in self._result_edits(found.result.projection.name):
                result = edit.applied(result, self._sizes)
        return result

    def _edits_at(self, node: str) -> tuple[Edit, ...]:
        """All edits at a node of the graph that are in force here, in the order they were made."""
        above = () if self._parent is None else self._parent._edits_at(node)
        return (*above, *self._edits.get(node, ()))

    def _result_edits(self, projection: str) -> Sequence[Edit]:
        return [edit for edit in self._edits_at(projection) if edit.found.result is not None]

    def _edited(self) -> frozenset[str]:
        """The nodes at which an edit is in force here."""
        above: frozenset[str] = frozenset() if self._parent is None else self._parent._edited()
        return above | self._edits.keys()

    def _covers(self, node: str) -> bool:
        """True if the node's whole value is given here, and reads nothing."""
        return any(edit.covers for edit in self._edits_at(node))

    def _stamp(self) -> tuple[int, ...]:
        """Another one whenever what is patched here, or in a world above, is another."""
        above = (self.model.graph.changes,) if self._parent is None else self._parent._stamp()
        return (*above, self._changes)

    def _settle(self) -> None:
        """Hand over to the engine what was patched since the last time."""

    def _report(self, nodes: tuple[str, ...]) -> None:
        """Warn of patches of this world that have no effect on the values at `nodes`."""

    def _lend(self, names: Sequence[str], values: Sequence[Any]) -> None:
        self._lent.lend(names, values)

    def _check_lent(self) -> None:
        """Look for writes that torch counts: to what was lent, and to the weights."""
        self._lent.check_writes()

    def _check_bits(self, weights: Contents | None = None) -> None:
        """Look for any writes; `weights` are what these hold, where every bit of them was just read."""
        if self._parent is None:
            self._check_lent()
            self._lent.check_bits()
        else:  # the parent looks for writes to the weights
            self._lent.check_writes()
            self._lent.check_bits()
            self._parent._check_bits(weights)


def node_names(nodes: str | Iterable[str]) -> tuple[str, ...]:
    """Names of nodes as they are given to `demand`: one, or several."""
    given = expect("nodes", nodes, "str | Iterable[str]")
    return (given,) if isinstance(given, str) else tuple(given)


def reader(run: Values) -> Callable[[str], Any]:
    """Return what reads the values of a run by the graph's own names, each once; it warns of no patch."""
    # Not by `value_at`: whoever reads so has the model's turn, and asking for it takes longer than reading.
    return functools.cache(lambda node: run._values((node,))[0])


# -- the parameters that a patch has: those that autograd would find gradients for -----------------

LOOKED_AT = 256
"""So many items of a container that a function reads are looked at."""


def parameters_of(patch: Any) -> tuple[Tensor, ...]:
    """Return the tensors that require a gradient in a patch, each once.

    They are the tensor itself, the parameters of a module, and what a function reads of these two: in its
    closure, its defaults, the globals that it names, the object that it is a method of, and in lists and
    dictionaries there.
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    queue = [patch]
    while queue:
        one = queue.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.requires_grad:
                found[id(one)] = one
        elif isinstance(one, nn.Module):
            found |= {id(own): own for own in one.parameters() if own.requires_grad}
        else:
            queue += _read_by(one)
    return tuple(found.values())


def trained_by(patch: Any, module: nn.Module) -> tuple[Tensor, ...]:
    """The parameters of a patch, without the weights of the module that it is a patch of: constants."""
    found = parameters_of(patch)
    if not found:
        return ()
    weights = set(map(id, module.parameters()))
    return tuple(one for one in found if id(one) not in weights)


def _read_by(one: Any) -> list[Any]:
    """Return what a function or a container holds, as far as tensors may be in it."""
    if isinstance(one, FunctionType):
        held: list[Any] = [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        for cell in one.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # it is not bound yet
                continue
        known = one.__globals__
        named = (known[name] for name in _names(one.__code__) if name in known)
        # Functions of other files are not looked into: they lead through all of a library.
        held += [value for value in named if getattr(value, "__globals__", known) is known]
        return [value for value in held if isinstance(value, _LOOKED_INTO)]
    if isinstance(one, partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, MethodType):
        return [one.__func__, one.__self__]
    if isinstance(one, Keyed):
        return [one.function]
    if isinstance(one, Mapping):
        return list(one.values())[:LOOKED_AT]
    if isinstance(one, list | tuple):
        return list(one[:LOOKED_AT])
    if callable(one) and not isinstance(one, type):
        held = list(getattr(one, "__dict__", {}).values())
        return [value for value in held if isinstance(value, Tensor | nn.Module)]
    return []


def _names(code: CodeType) -> Iterator[str]:
    """The globals that code names, that of functions inside of it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


_LOOKED_INTO = (Tensor, nn.Module, FunctionType, partial, MethodType, Keyed, list, tuple, dict)

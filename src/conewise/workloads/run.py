"""A run: the baseline world of a captured model for one input; a run's fork is where patches are made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from conewise.engine.ledger import Ledger
from conewise.engine.world import World
from conewise.errors import NoEffectWarning, PatchError
from conewise.frontends.torch.records import Ref
from conewise.frontends.torch.streaming import assembled
from conewise.frontends.torch.tensors import (
    Tensor,
    computing,
    mean_of,
    same_bits,
    zeros_like,
)
from conewise.workloads.places import Place, PlaceLike, as_place

if TYPE_CHECKING:
    from conewise.workloads.model import Located, Model

Part = Tensor | Callable[[Tensor], Tensor]


class Reading:
    """Values of a captured model, by site; the module's outputs, in the module's own structure.

    What is returned is the cached value, or a view of it: read it, do not write to it.
    """

    def __init__(self, model: Model, world: World, sizes: tuple[int, ...]) -> None:
        self.model = model
        self.world = world
        self._sizes = sizes

    def demand(self, nodes: Iterable[str]) -> tuple[Any, ...]:
        """The values at nodes of the graph, by the graph's own names."""
        with computing():
            return self.world.demand(tuple(nodes))

    def __getitem__(self, place: PlaceLike) -> Any:
        """The value at a place, in the site's natural axes."""
        found = self.model.locate(as_place(place))
        (value,) = self.demand([found.node])
        if found.result is not None:
            (weight,) = self.demand([found.result.weight])
            value = found.result.read(value, weight, found.z_view, self._sizes)
        return found.read(value, self._sizes)

    @property
    def outputs(self) -> Any:
        """What the module would return."""
        names = [out.name for out in self.model.program.outputs if isinstance(out, Ref)]
        return assembled(self.model.program, dict(zip(names, self.demand(names), strict=True)))

    def __getattr__(self, name: str) -> Any:
        """A field of the outputs by its name: `run.logits`."""
        if name.startswith("_"):
            raise AttributeError(name)
        outputs = self.outputs
        if isinstance(outputs, Mapping) and name in outputs:
            return outputs[name]
        if hasattr(outputs, name) and not isinstance(outputs, Tensor):
            return getattr(outputs, name)
        fields = ", ".join(outputs) if isinstance(outputs, Mapping) else f"one {type(outputs).__name__}"
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}, and neither have the module's outputs ({fields}). "
            "All outputs together are `.outputs`; a site's value is `run[...]`."
        )

    @property
    def ledger(self) -> Ledger:
        """What this world invalidated, recomputed and reused."""
        return self.world.ledger

    def fork(self) -> RunWorld:
        """A world in which sites can be patched; it shares all other values with this one."""
        return RunWorld(self)


class Run(Reading):
    """The baseline for one input. It never changes; another input is another run."""

    def __init__(
        self, model: Model, world: World, sizes: tuple[int, ...], inputs: Mapping[str, Tensor]
    ) -> None:
        super().__init__(model, world, sizes)
        self.inputs = inputs

    def __repr__(self) -> str:
        given = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.inputs.items())
        return f"Run of {self.model.name} on {given}"


@dataclass(frozen=True, slots=True)
class Edit:
    """One patch: which part of a node's value, and what takes its place."""

    place: Place
    found: Located
    part: Part

    def applied(self, value: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """A copy of `value` with the part replaced."""
        part = self.part if isinstance(self.part, Tensor) else self.part(self.found.read(value, sizes))
        return self.found.replaced(value, part, sizes, self.place)


class RunWorld(Reading):
    """A run in which something is patched. Use it in a `with` block, or just drop it; forks nest.

    Patches of several parts of one value add up. A part that is not patched is what it would have
    been in this world: if it lies downstream of another patch, it is computed anew.
    """

    def __init__(self, parent: Reading) -> None:
        super().__init__(parent.model, parent.world.fork(), parent._sizes)
        self._parent = parent
        self._edits: dict[str, list[Edit]] = {}
        self._standing: set[str] = set()
        self._is_settled = True
        self._unchanged: dict[str, Edit] = {}

    def patch(self, place: PlaceLike, value: Reading | Tensor | str | Callable[[Tensor], Tensor]) -> None:
        """Replace (a part of) a site's value.

        `value`: another run, whose value at the same place is taken; a tensor of exactly the
        part's shape, dtype and device; "zero"; "mean" (over the batch and the positions of the
        part); or a function from what the part would have been to what it shall be.
        """
        place = as_place(place)
        found = self.model.locate(place)
        if found.result is not None:
            self._patch_result(place, found, value)
            return
        (own,) = self._parent.demand([found.node])
        present = found.read(own, self._sizes)
        part = self._part(place, found, value, present)
        if isinstance(part, Tensor):
            found.expect(part, present, place)
        self._edits.setdefault(found.node, []).append(Edit(place, found, part))
        self._is_settled = False

    def restore(self, place: PlaceLike) -> None:
        """Take back all patches that were made at exactly this place."""
        place = as_place(place)
        node = self.model.locate(place).node
        left = [edit for edit in self._edits.get(node, ()) if edit.place != place]
        if len(left) == len(self._edits.get(node, ())):
            standing = ", ".join(str(edit.place) for edits in self._edits.values() for edit in edits)
            raise PatchError(f"{place} is not patched in this world. Patched here: {standing or 'nothing'}.")
        if left:
            self._edits[node] = left
        else:
            del self._edits[node]
        self._is_settled = False

    def demand(self, nodes: Iterable[str]) -> tuple[Any, ...]:
        """The values at nodes of the graph, under the patches; warns of a patch without effect."""
        nodes = tuple(nodes)
        self._settle()
        values = super().demand(nodes)
        self._report(nodes)
        return values

    def _part(self, place: Place, found: Located, value: Any, present: Tensor) -> Part:
        if isinstance(value, Reading):
            if value.model is not self.model:
                raise PatchError(
                    f"the patch at {place} comes from a run of another model ({value.model.name}); both "
                    f"runs must be of the same captured model ({self.model.name})."
                )
            part: Part = value[place]
            return part
        if isinstance(value, Tensor):
            return value
        if value == "zero":
            return zeros_like(present)
        if value == "mean":
            return mean_of(present, found.part_axes)
        if callable(value):
            return value  # type: ignore[no-any-return]
        raise PatchError(
            f"cannot patch {place} with {value!r}. A patch is another run, a tensor, 'zero', 'mean' or a "
            "function of what would have been there."
        )

    def _patch_result(self, place: Place, found: Located, value: Any) -> None:
        """`result` is no node: let another rule compute the output projection."""
        assert found.result is not None
        present = self._parent[place]
        part = self._part(place, found, value, present)
        if not isinstance(part, Tensor):
            part = part(present)
        found.expect(part, present, place)
        projection = found.result.projection.name
        if projection in self._edits or projection in self._standing:
            raise PatchError(
                f"{place}: the output projection of this layer is patched already in this world. Patch its "
                "z instead, or fork once more."
            )
        batch, positions, heads = self._parent[Place(place.name, place.layer, place.stack)].shape[:3]
        rule = found.result.replaced(dict(place.part), part, heads, (batch, positions))
        self.world.patch_rule(projection, rule)

    def _settle(self) -> None:
        """Hand the patches to the engine.

        A value that no other patch reaches is patched with a value: it is not computed again. One
        that another patch reaches is patched with a function of what it is then.
        """
        if self._is_settled:
            return
        graph = self.model.graph
        numbers = {graph.number(node): node for node in self._edits}
        for node in self._standing - set(self._edits):
            self.world.restore(node)
        for number in graph.table.sorted(numbers):
            node = numbers[number]
            edits = self._edits[node]
            others = [other for other in numbers if other != number]
            covers = next((i for i in reversed(range(len(edits))) if not edits[i].place.part), None)
            is_given = covers is not None and isinstance(edits[covers].part, Tensor)
            if is_given or number not in graph.table.cone(others):
                (own,) = self._parent.demand([node])
                with computing():
                    self.world.patch(node, self._applied(node, own))
            else:
                self.world.patch(node, lambda own, node=node: self._applied(node, own))
        self._standing = set(self._edits)
        self._is_settled = True

    def _applied(self, node: str, own: Tensor) -> Tensor:
        value = own
        for edit in self._edits[node]:
            value = edit.applied(value, self._sizes)
        if same_bits(value, own):
            self._unchanged[node] = self._edits[node][-1]
        else:
            self._unchanged.pop(node, None)
        return value

    def _report(self, nodes: tuple[str, ...]) -> None:
        support = self.model.support(nodes)
        for node, edits in self._edits.items():
            if self.model.graph.number(node) not in support:
                warnings.warn(
                    f"the patch at {edits[-1].place} has no effect on what was asked for: it does not depend "
                    f"on {node!r}.",
                    NoEffectWarning,
                    stacklevel=4,
                )
        for node, edit in self._unchanged.items():
            if node in self._edits:
                warnings.warn(
                    f"the patch at {edit.place} changes nothing: its value is the old one, bit for bit.",
                    NoEffectWarning,
                    stacklevel=4,
                )

    def __enter__(self) -> RunWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.world.close()

    def __repr__(self) -> str:
        places = ", ".join(str(edit.place) for edits in self._edits.values() for edit in edits)
        return f"RunWorld over {self._parent!r}, patched at {places or 'nothing'}"

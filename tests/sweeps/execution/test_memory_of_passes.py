"""The memory that is read off a pass is no less than what following it takes, in torch's own blocks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conewise.sweeps.execution.fills import PassFills, Values
from conewise.sweeps.execution.wavefront import Wavefront
from conewise.sweeps.planning.memory import NodeSizes, measured
from conewise.sweeps.planning.passes import PassProgram
from conewise.sweeps.planning.schedule import Ranges
from conewise.sweeps.planning.shapes import ShapeFacts
from tests.sweeps.execution.test_wavefront import KINDS, LENGTH, Scene, built, scenes

KNOWN = [kind for kind in KINDS if kind not in {"summed", "turned"}]
"""The kinds whose operations are torch's own, and whose values lie in memory as their dimensions say.

A stack of others that is put together anew lies otherwise than the module's own value, and what then shows
it as one dimension is a copy that is not counted.
"""


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all blocks that operations make, until each goes; `ours` were there before."""

    def __init__(self, ours: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.is_counting = True
        self._known = {one.untyped_storage().data_ptr() for one in ours}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and self.is_counting:  # an index has one dimension
                self._note(leaf.untyped_storage())
        return made

    def _note(self, block: torch.UntypedStorage) -> None:
        place, size = block.data_ptr(), block.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(block, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live -= size


@dataclass
class Uncounted:
    """The fills of a scene: what worlds put in is held by them, and is not the pass's."""

    scene: Scene
    held: Held

    def write(self, node: str, stack: Tensor, worlds: Ranges, values: object, sizes: Sequence[int]) -> None:
        self.held.is_counting = False
        self.scene.write(node, stack, worlds, values, sizes)
        self.held.is_counting = True


def predicted(scene: Scene, program: PassProgram) -> PassProgram:
    facts = ShapeFacts(scene.program, {"b": scene.batch, "t": LENGTH}, torch.device("cpu"), ())
    patched = frozenset(node for own in scene.worlds for node in own)
    sizes = NodeSizes(facts, facts.costs, scene.regions, patched, None, lambda _: False)
    return measured(program, sizes, reading=0)


def taken(scene: Scene, program: PassProgram, base: Mapping[str, Any]) -> tuple[int, list[int]]:
    """The most that following a pass holds; and what was taken beyond what was held before.

    The latter from each step that is said to take something up to the next such step.
    """
    leaves = [leaf for leaf in tree_leaves(list(base.values())) if isinstance(leaf, Tensor)]
    held, rises, before = Held(leaves), list[int](), 0
    most = 0

    def room_for(_: int) -> None:
        nonlocal before, most
        rises.append(held.peak - before)
        most = max(most, held.peak)
        before = held.peak = held.live

    wavefront, fills = Wavefront(scene.program, scene.layout), Uncounted(scene, held)
    wavefront.run(
        program, base.__getitem__, cast("PassFills", scene), cast("Values", scene)
    )  # constants are kept
    with held:
        wavefront.run(program, base.__getitem__, cast("PassFills", fills), cast("Values", scene), room_for)
        room_for(0)
    return most, rises[1:]


@given(scenes(KNOWN))
def test_a_pass_takes_no_more_than_was_read_off_it(scene: Scene) -> None:
    program, base = predicted(scene, built(scene)), scene.base()
    most, rises = taken(scene, program, base)
    takes = [(step, said) for step, said in zip(program.steps, program.rises, strict=True) if said]
    for (step, said), rise in zip(takes, rises, strict=False):
        assert rise <= said, step
    assert most <= program.peak

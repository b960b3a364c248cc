"""Patches of a model that writes: what changes in each forward of the module's own `generate`.

With a cache of keys and values, a forward computes the positions that are new in it. A patch acts on those of
them that it is meant for, by their numbers in the whole sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conewise.checks.hooking import Spot, let_dictionaries_act_last
from conewise.errors import PatchError
from conewise.locations.located import Located
from conewise.locations.places import Place
from conewise.program.records import Program, SizeRef
from conewise.runs.edit import Part, new_part
from conewise.structure.axes.selections import resolved


@dataclass(frozen=True, slots=True)
class Step:
    """What a forward computes: positions `start` to `stop` of so many `rows`; the prompt ends at `prompt`."""

    start: int
    stop: int
    rows: int
    prompt: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPatch:
    """A patch at the positions that it is meant for, in whichever forward they are computed.

    `value` is a function of what would have been there, or a tensor: the place's part, at the positions that
    the place names. `is_new`: where the place names none, at those behind the prompt alone.
    """

    place: Place
    found: Located
    value: Part
    is_new: bool
    has_sizes: bool = field(init=False)
    """Whether the view of its value depends on the sizes of a run."""
    is_whole: bool = field(init=False)
    """Whether the value is a function of a node's value as it lies."""
    _known: dict[tuple[Any, ...], tuple[Any, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        view = self.found.view
        lies_so = view.packing == tuple((axis,) for axis in view.axes)
        has_sizes = any(isinstance(length, SizeRef) for length in view.lengths.values())
        object.__setattr__(self, "has_sizes", has_sizes)
        object.__setattr__(self, "is_whole", lies_so and not self.place.part and callable(self.value))

    def positions(self, step: Step) -> Sequence[int]:
        """The positions of a step that are patched, counted from the start of the sequence."""
        chosen, first = self.place.part.get("pos"), step.start
        if chosen is None:
            return range(max(first, step.prompt) if self.is_new else first, step.stop)
        if isinstance(chosen, int):
            return [chosen] if first <= chosen < step.stop else []
        if isinstance(chosen, slice):
            return [at for at in range(*chosen.indices(step.stop)) if at >= first]
        return [at for at in chosen if first <= at < step.stop]

    def applied(self, value: Tensor, step: Step, sizes: Sequence[int]) -> Tensor:
        """A node's value in a step, with the patch in it."""
        at = self.positions(step)
        if not at:
            return value
        is_all = len(at) == step.stop - step.start
        if is_all and self.is_whole:
            return new_part(self.value, value, self.found, self.place)
        fresh = value.clone()
        shown = self.found.view.present(fresh, sizes)
        index = self._index([position - step.start for position in at], is_all, shown.shape)
        present = shown[index]
        part = self.value if callable(self.value) else self._given(at, present)
        shown[index] = new_part(part, present, self.found, self.place)
        return fresh

    def _index(self, at: Sequence[int], is_all: bool, shape: Sequence[int]) -> tuple[Any, ...]:
        """An index into a step's value in natural axes: the same in most steps, so it is kept."""
        key = (None if is_all else tuple(at), tuple(shape))
        if key not in self._known:
            chosen = self.place.part.get("pos")
            pos = at[0] if isinstance(chosen, int) else slice(None) if is_all else tuple(at)
            self._known[key] = resolved(self.found.view.axes, {**self.place.part, "pos": pos}, shape)
        return self._known[key]

    def _given(self, at: Sequence[int], present: Tensor) -> Tensor:
        """What was given for these positions; a row for each that a search keeps of a prompt."""
        assert isinstance(self.value, Tensor)
        new, axes = self.value, self.found.part_axes
        chosen = self.place.part["pos"]
        if "pos" in axes:
            named = range(*chosen.indices(at[-1] + 1)) if isinstance(chosen, slice) else chosen
            assert not isinstance(named, int)
            order = {position: place for place, position in enumerate(named)}
            index = torch.tensor([order[position] for position in at], device=new.device)
            new = new.index_select(axes.index("pos"), index)
        if "batch" in axes and new.ndim == present.ndim:
            dim = axes.index("batch")
            times, rest = divmod(present.shape[dim], new.shape[dim])
            if times > 1 and not rest:
                new = new.repeat_interleave(times, dim)
        return new


class Steps:
    """Hooks on a module that patch it while it writes; they are gone when the block ends, however it ends."""

    def __init__(self, module: nn.Module, program: Program, prompt: int) -> None:
        self._module, self._program, self._prompt = module, program, prompt
        self._step = Step(0, 0, 0, prompt)
        self._sizes: tuple[int, ...] = ()
        self._counted: list[_Counted] = []

    @contextmanager
    def patched(self, patches: Mapping[Spot, Sequence[StepPatch]]) -> Iterator[None]:
        """Let the patches act, each at its spot, in the order in which they were given."""
        # Hooks act while their thread is in it: not for other threads, nor if an interruption leaves one.
        live: list[int] = []
        handles: list[Any] = []
        try:
            handles.append(self._module.register_forward_pre_hook(self._begin(live), with_kwargs=True))
            for spot, own in patches.items():
                part = self._module.get_submodule(spot.boundary.call.path)
                hook = _Counted(self, spot, own, live)
                self._counted.append(hook)
                if spot.boundary.is_output:
                    handles.append(part.register_forward_hook(hook))
                else:
                    handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
                let_dictionaries_act_last(part)
            live.append(threading.get_ident())
            yield
        finally:
            live.clear()
            try:
                _remove(handles)
            except BaseException:  # interrupted: once more, for nothing may stay on the user's module
                _remove(handles)
                raise

    def _begin(self, live: Sequence[int]) -> Callable[..., None]:
        """A hook on the whole module: which positions the forward that begins computes."""

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if threading.get_ident() not in live:
                return
            named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
            given = next((one for one in (*named, *args) if isinstance(one, Tensor) and one.ndim > 1), None)
            if given is None:
                raise PatchError(
                    "generate called the module without `input_ids` or `inputs_embeds`, so it cannot be told "
                    "which positions it computes. Patches while it writes need one of them."
                )
            start, (rows, length) = _past(kwargs), given.shape[:2]
            self._step = Step(start, start + length, rows, self._prompt)
            for hook in self._counted:
                hook.calls = 0
            self._sizes = ()

        return begin

    @property
    def step(self) -> Step:
        """The forward that is under way."""
        return self._step

    @property
    def sizes(self) -> tuple[int, ...]:
        """The program's sizes, if it ran on what is computed in this step alone."""
        if not self._sizes:
            known, step = self._program.dimensions, self._step
            symbols = {
                symbol: step.rows if symbol in known.batch else step.stop - step.start
                for symbol in self._program.sizes.symbols
            }
            self._sizes = self._program.sizes.of(symbols)
        return self._sizes


class _Counted:
    """A hook at one call of a module in each forward of the whole."""

    def __init__(self, steps: Steps, spot: Spot, patches: Sequence[StepPatch], live: Sequence[int]) -> None:
        self.steps, self.spot, self.patches, self.live = steps, spot, patches, live
        self.calls = 0

    def __call__(self, _: nn.Module, first: Any, second: Any) -> Any:
        """What goes on from here; None where nothing is changed."""
        if threading.get_ident() not in self.live:
            return None
        number, self.calls = self.calls, self.calls + 1
        boundary = self.spot.boundary
        if number != boundary.call.call:
            return None
        step = self.steps.step
        whole = second if boundary.is_output else (first, second)
        value = self.spot.read(whole)
        if not isinstance(value, Tensor):
            raise PatchError(
                f"generate calls {str(boundary.call)!r} otherwise than it was captured, and what is patched "
                "there is no tensor. Capture the module as generate calls it."
            )
        new = value
        for patch in self.patches:
            new = patch.applied(new, step, self.steps.sizes if patch.has_sizes else ())
        return None if new is value else self.spot.replaced(whole, new)


def _past(kwargs: Mapping[str, Any]) -> int:
    """How many positions were computed before, and are in the cache."""
    cache = kwargs.get("past_key_values")
    if cache is not None and hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    if isinstance(cache, tuple) and cache:
        return int(cache[0][0].shape[-2])
    at = kwargs.get("cache_position")
    return int(at[0]) if isinstance(at, Tensor) and at.numel() else 0


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()

"""A surgery: steps that make a model of a model, as a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from conewise.anatomy.places import PlaceLike, Places, as_place
from conewise.arguments import checked
from conewise.errors import SurgeryError
from conewise.model import Model
from conewise.runs.splicing import SpliceStep, splice_step
from conewise.surgery.files import read, write
from conewise.surgery.plan import SurgeryPlan, plan
from conewise.surgery.steps import Compact, Graft, Prune, Redefine, Step, Weight
from conewise.templates import heading, shown, table


@checked
@dataclass(frozen=True)
class Surgery:
    """Changes of a network, one after the other, that any model of the architecture can be given.

        surgery = cw.Surgery().prune(cw.site("z", layer=1, head=2)).graft(("resid_post", 2), adapter)
        operated = surgery.apply(model)

    A surgery is a value: each method returns a longer one, `undo()` one without its last step. `apply` makes
    a new model, and leaves the one that it is given, and its module, as they are. Each step finds its place
    in the model as the steps before it have left it.
    """

    steps: tuple[Step | SpliceStep, ...] = ()

    def prune(self, place: PlaceLike | Places, *, value: Any = "zero", over: Any = None) -> Surgery:
        """Take something out: a head, neurons, channels, a whole value, all that a layer adds to the stream.

        `place` is a site or a part of one, or the path of a layer. It is replaced by `value`: "zero", a
        number, a tensor that fits the part, or "mean": its mean over the inputs `over`, or over the
        example of the capture. What nothing needs any more is removed.
        """
        places = place if isinstance(place, Places) else (as_place(place),)
        return self._with(*(Prune(one, value, over) for one in places))

    def graft(
        self, at: PlaceLike | tuple[PlaceLike, PlaceLike], block: Callable[..., Any], *, name: str = ""
    ) -> Surgery:
        """Put a block behind a value x, whose readers read block(x) instead: a module or a function.

        `at` is a site, or an edge: a site, and who reads it there, as a module's path or a site. The
        block's module and its sites, `name.input` and `name.output`, are found by the `name`.
        """
        match at:
            case (site, reader) if not isinstance(reader, int):
                return self._with(Graft(as_place(site), block, as_place(reader), name))
            case _:
                return self._with(Graft(as_place(at), block, None, name))

    def redefine(
        self, what: PlaceLike, rule: Callable[..., Any] | None = None, *, weight: Tensor | None = None
    ) -> Surgery:
        """Let a submodule, or the operation of a site, be computed by another rule, or with another weight.

        A submodule's new rule is called as the old one was. That of a site receives what the old one read,
        weights excepted. `weight` replaces the weight of the module at that path.
        """
        place = as_place(what)
        if (rule is None) == (weight is None):
            raise SurgeryError(f"redefine {place} by a rule, or with `weight=`: one of the two.")
        if weight is not None:
            path = place.name if place.name.endswith((".weight", ".bias")) else f"{place.name}.weight"
            return self._with(Weight(path, weight))
        return self._with(Redefine(place, rule))

    def splice(
        self,
        place: PlaceLike,
        dictionary: Any = None,
        *,
        encode: Callable[..., Any] | None = None,
        decode: Callable[..., Any] | None = None,
        reads: PlaceLike | None = None,
        name: str = "sae",
        also: Sequence[str] = (),
        skips: bool | None = None,
    ) -> Surgery:
        """Put a dictionary at a place; see `Model.splice`."""
        return self._with(splice_step(place, dictionary, encode, decode, reads, name, also, skips))

    def compact(self) -> Surgery:
        """Remove the rows and columns of weights that serve nothing but what was pruned to zero.

        Heads, neurons and channels that are left are numbered anew. Keys and values that heads share stay
        until all of these are pruned. The outputs are those with zeros, up to the order of sums, and
        `to_module()` is smaller by what was removed.
        """
        return self._with(Compact())

    def undo(self) -> Surgery:
        """The surgery without its last step."""
        if not self.steps:
            raise SurgeryError("there is no step to undo: this surgery is empty.")
        return Surgery(self.steps[:-1])

    def apply(self, model: Model) -> Model:
        """The model that the surgery makes of this one. Raises SurgeryError where a step does not fit."""
        model._capture_for(None)
        for number, step in enumerate(self.steps):
            with self._telling(number):
                for part in step.parts(model):
                    model = part.operated(model)
        return model

    def plan(self, model: Model) -> SurgeryPlan:
        """The costs of the surgery on a model: what each step makes invalid, and what is computed again.

        In the steps' own order with a demand of the outputs after each, on copies of their own, in one batch,
        and in the best and the worst order of grafts. What is put in is captured; no run is computed.
        """
        model._capture_for(None)
        return plan(model, self.steps, self._telling)

    def save(self, folder: str | Path) -> None:
        """Write the surgery: its steps as text, code by its name, weights in safetensors."""
        write(self.steps, folder)

    @classmethod
    def load(cls, folder: str | Path) -> Surgery:
        """Read a surgery that was saved. Code is imported by its name: load what you trust."""
        return cls(read(folder))

    @contextmanager
    def _telling(self, number: int) -> Iterator[None]:
        """Say which step of several does not fit."""
        try:
            yield
        except SurgeryError as error:
            if len(self.steps) == 1:
                raise
            raise SurgeryError(f"step {number} ({self.steps[number]}): {error}") from error

    def _with(self, *steps: Step | SpliceStep) -> Surgery:
        return Surgery((*self.steps, *steps))

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step | SpliceStep]:
        return iter(self.steps)

    def __str__(self) -> str:
        lines = (f"  {number}. {step}" for number, step in enumerate(self.steps))
        return "\n".join(["Surgery of nothing" if not self.steps else "Surgery", *lines])

    def __repr__(self) -> str:
        steps = "; ".join(map(str, self.steps[:3])) + ("; ..." if len(self.steps) > 3 else "")
        return f"Surgery of {len(self.steps)} steps: {steps}" if self.steps else "Surgery of nothing"

    def _repr_html_(self) -> str:
        rows = [(str(number), str(step)) for number, step in enumerate(self.steps)]
        return shown(
            heading("Surgery", f"of {len(rows)} steps"), table(rows, ("step", "what it does"), numbers=(0,))
        )

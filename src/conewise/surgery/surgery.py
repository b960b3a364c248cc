"""A surgery: steps that make a model of a model, as a value.

As files it is its steps by name, code by where it is imported from, and weights in safetensors.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conewise.anatomy.places import Place, PlaceLike, Places, as_place
from conewise.arguments import checked
from conewise.errors import FormatError, SurgeryError, describe
from conewise.files import as_path, read_json, write_whole
from conewise.model import Model
from conewise.runs.splicing import SpliceStep, splice_step
from conewise.surgery.plan import SurgeryPlan, plan
from conewise.surgery.steps import Compact, Graft, Prune, Redefine, Step, Weight
from conewise.templates import heading, shown, table


@checked
@dataclass(frozen=True)
class Surgery:
    """A sequence of changes to a network, which can be applied to any model of the architecture.

        surgery = cw.Surgery().prune(cw.site("z", layer=1, head=2)).graft(("resid_post", 2), adapter)
        operated = surgery.apply(model)

    A surgery is immutable: each method returns a new one with another step, and `undo()` one without the
    last step. `apply` returns a new model and changes neither the given model nor its module. Each step is
    applied to the result of the steps before it.
    """

    steps: tuple[Step | SpliceStep, ...] = ()

    def prune(self, place: PlaceLike | Places, *, value: Any = "zero", over: Any = None) -> Surgery:
        """Remove a head, neurons, channels, a whole value, or everything that a layer adds to the stream.

        `place` is a site or a part of one, or the path of a layer. It is replaced by `value`: "zero", a
        number, a tensor that fits the part, or "mean": its mean over the inputs `over`, or over the example
        of the capture. Parts that are no longer needed are removed.
        """
        places = place if isinstance(place, Places) else (as_place(place),)
        return self._with(*(Prune(one, value, over) for one in places))

    def graft(
        self, at: PlaceLike | tuple[PlaceLike, PlaceLike], block: Callable[..., Any], *, name: str = ""
    ) -> Surgery:
        """Insert a block, a module or a function, after a value x; its readers then read block(x).

        `at` is a site, or an edge: a site and its reader, as a module's path or a site. The block's module
        and its sites, `name.input` and `name.output`, are found by the `name`.
        """
        match at:
            case (site, reader) if not isinstance(reader, int):
                return self._with(Graft(as_place(site), block, as_place(reader), name))
            case _:
                return self._with(Graft(as_place(at), block, None, name))

    def redefine(
        self, what: PlaceLike, rule: Callable[..., Any] | None = None, *, weight: Tensor | None = None
    ) -> Surgery:
        """Replace the computation of a submodule or a site by `rule`, or a module's weight by `weight`.

        The rule of a submodule is called with the submodule's arguments, that of a site with the inputs of
        the operation except weights. With `weight`, `what` is the path of the module.
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
        """Splice a dictionary in at a place; see `Model.splice`."""
        return self._with(splice_step(place, dictionary, encode, decode, reads, name, also, skips))

    def compact(self) -> Surgery:
        """Remove the rows and columns of weights that only serve parts that were pruned to zero.

        The remaining heads, neurons and channels are renumbered. Shared keys and values stay until all heads
        that share them are pruned. The outputs equal those with zeros, up to the order of sums, and
        `to_module()` is smaller by the removed weights.
        """
        return self._with(Compact())

    def undo(self) -> Surgery:
        """Return the surgery without its last step."""
        if not self.steps:
            raise SurgeryError("there is no step to undo: this surgery is empty.")
        return Surgery(self.steps[:-1])

    def apply(self, model: Model) -> Model:
        """Return the model after the surgery. Raises SurgeryError if a step does not fit."""
        model._capture_for(None)
        for number, step in enumerate(self.steps):
            with self._telling(number):
                for part in step.parts(model):
                    model = part.operated(model)
        return model

    def plan(self, model: Model) -> SurgeryPlan:
        """Return the costs of the surgery on a model: the records that each step invalidates and recomputes.

        Costs are counted in the steps' own order with a demand of the outputs after each, on separate copies,
        in one batch, and in the best and the worst order of grafts. The inserted parts are captured; no run
        is computed.
        """
        model._capture_for(None)
        return plan(model, self.steps, self._telling)

    def save(self, folder: str | Path) -> None:
        """Save the surgery: its steps as text, code by its name, weights in safetensors."""
        write(self.steps, folder)

    @classmethod
    def load(cls, folder: str | Path) -> Surgery:
        """Load a saved surgery. This imports code by name: only load files that you trust."""
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


STEPS, WEIGHTS = "surgery.json", "weights.safetensors"
VERSION = 1
KINDS: Mapping[str, type[Step]] = {
    "prune": Prune,
    "graft": Graft,
    "redefine": Redefine,
    "weight": Weight,
    "compact": Compact,
}


def write(steps: tuple[Any, ...], folder: str | Path) -> None:
    """Write the steps of a surgery into a folder."""
    where, tensors = as_path(folder), dict[str, Tensor]()
    kinds = {kind: name for name, kind in KINDS.items()}
    listed = []
    for number, step in enumerate(steps):
        if type(step) not in kinds:
            raise SurgeryError(
                f"step {number} ({step}) cannot be written: a dictionary has files of its own. Leave it out, "
                "and splice it into the operated model."
            )
        given = {
            name: _written(value, f"{number}.{name}", tensors, step) for name, value in vars(step).items()
        }
        listed.append({"step": kinds[type(step)], **given})
    where.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}, where / WEIGHTS
    )
    write_whole(where / STEPS, json.dumps({"version": VERSION, "steps": listed}, indent=2).encode())


def read(folder: str | Path) -> tuple[Step, ...]:
    """The steps of a surgery that was written: code is imported by its name, and gets the weights."""
    where = as_path(folder)
    try:
        found = read_json(where / STEPS)
        tensors = load_file(where / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise FormatError(
            f"{where} holds no surgery: {STEPS} and {WEIGHTS} are expected there ({error})."
        ) from error
    if (
        not isinstance(found, dict)
        or found.get("version") != VERSION
        or not isinstance(found.get("steps"), list)
    ):
        raise FormatError(f"{where / STEPS} was written by another version of conewise.")
    return tuple(_step(number, one, tensors, where) for number, one in enumerate(found["steps"]))


def _step(number: int, one: Any, tensors: Mapping[str, Tensor], where: Path) -> Step:
    if not isinstance(one, dict) or one.get("step") not in KINDS:
        raise FormatError(f"{where / STEPS}: step {number} is none that is known: {', '.join(KINDS)}.")
    given = {name: _read(value, tensors) for name, value in one.items() if name != "step"}
    try:
        return KINDS[one["step"]](**given)
    except TypeError as error:
        raise FormatError(
            f"{where / STEPS}: step {number} has other parts than it should: {error}."
        ) from error


def _written(value: Any, key: str, tensors: dict[str, Tensor], step: Step) -> Any:
    """A part of a step as JSON; its tensors go beside it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors[key] = value
            return {"tensor": key}
        case Place():
            part = {axis: _index(index) for axis, index in value.part.items()}
            return {"place": value.name, "layer": value.layer, "stack": value.stack, "part": part}
        case nn.Module():
            for name, tensor in value.state_dict().items():
                tensors[f"{key}/{name}"] = tensor
            return {**_module(value, step), "weights": key, "training": value.training}
    name, home = getattr(value, "__name__", ""), getattr(value, "__module__", None) or "torch"
    if callable(value) and getattr(import_module(home), name, None) is value:
        return {"function": f"{home}:{name}"}
    raise SurgeryError(
        f"{step} cannot be written: {describe(value)} has no name that it could be imported by. Define it at "
        "the top of a module."
    )


def _index(index: Any) -> Any:
    return {"slice": [index.start, index.stop, index.step]} if isinstance(index, slice) else index


def _module(value: nn.Module, step: Step) -> dict[str, Any]:
    """The class of a module by its name, and what it was made with: its attributes of the same names."""
    kind = type(value)
    if getattr(import_module(kind.__module__), kind.__qualname__, None) is not kind:
        raise SurgeryError(f"{step} cannot be written: {kind.__qualname__} cannot be imported by its name.")
    named = f"{kind.__module__}:{kind.__qualname__}"
    if kind is nn.Sequential:
        return {"module": named, "parts": [_module(part, step) for part in value.children()]}
    arguments = {}
    for name, one in inspect.signature(kind).parameters.items():
        if name in {"device", "dtype"} or one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD}:
            continue
        found = getattr(value, name, one.default)
        if isinstance(found, Tensor) or (found is None and name == "bias"):
            found = found is not None
        if not isinstance(found, None | bool | int | float | str | tuple | list):
            raise SurgeryError(
                f"{step} cannot be written: what {named} was made with as {name!r} is no plain value that "
                "the module keeps by this name."
            )
        arguments[name] = list(found) if isinstance(found, tuple) else found
    return {"module": named, "arguments": arguments}


def _read(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "place" in value:
        part = {
            axis: slice(*one["slice"])
            if isinstance(one, dict)
            else tuple(one)
            if isinstance(one, list)
            else one
            for axis, one in value["part"].items()
        }
        return Place(value["place"], value["layer"], value["stack"], MappingProxyType(part))
    if "function" in value:
        return _imported(value["function"])
    key = f"{value['weights']}/"
    own = {name.removeprefix(key): tensor for name, tensor in tensors.items() if name.startswith(key)}
    made = _made(value)
    for dtype in {tensor.dtype for tensor in own.values() if tensor.is_floating_point()}:
        made = made.to(dtype)
    made.load_state_dict(own)
    return made.train(value["training"])


def _made(value: Mapping[str, Any]) -> nn.Module:
    if "parts" in value:
        return nn.Sequential(*map(_made, value["parts"]))
    made: nn.Module = _imported(value["module"])(**value["arguments"])
    return made


def _imported(name: str) -> Any:
    home, _, what = name.partition(":")
    try:
        return getattr(import_module(home), what)
    except (ImportError, AttributeError) as error:
        raise FormatError(f"the surgery names {name}, which cannot be imported here: {error}.") from error

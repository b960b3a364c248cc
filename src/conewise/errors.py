"""The errors of Conewise, in one tree.

    ConewiseError
    ├── GraphError             the graph cannot be built or changed as asked
    │   ├── UnknownSiteError       a name that no site has
    │   ├── DuplicateSiteError     a name that is taken
    │   ├── UnknownEdgeError       two sites that no edge joins
    │   ├── CycleError             a change that would close a cycle
    │   ├── ArityError             a rule that does not take that many inputs
    │   ├── BlockError             a block without exactly one input and one output
    │   ├── GradientError          a gradient that cannot be built, or that a change would falsify
    │   ├── InUseError             a part that something else still depends on
    │   ├── GraphChangedError      a captured model whose graph has left its program
    │   └── BusyError              a change or a demand in the middle of another
    ├── WorldError             the values cannot be changed or read as asked
    │   ├── NotPatchedError        a restore where nothing is patched
    │   ├── NoValueError           a source that has no value
    │   ├── OpError                a rule that raised while it was computed
    │   ├── SitesNotKeptError      a ledger that keeps tallies, asked for sites
    │   └── ClosedWorldError       a world that was dropped
    ├── CaptureError           the module cannot be captured, or run, as asked
    │   ├── ControlFlowError       what is computed depends on the values of tensors
    │   ├── RandomnessError        random numbers are drawn
    │   ├── InputMismatchError     inputs that do not fit what was captured
    │   └── ModuleChangedError     a module that is no longer what was captured: hooks, `forward`, settings
    ├── SiteError              the places of a captured model, and what is put there
    │   ├── MissingSiteError       a place that the model has not
    │   ├── NotAPlaceError         something that names no place
    │   ├── DictionaryError        a dictionary that cannot be read, or spliced in where it was meant to go
    │   ├── SurgeryError           a surgery that a model does not allow
    │   └── PatchError             a value that cannot be put where it was meant to go
    │       └── WeightsChangedError    weights that are not those of a run, or of the capture
    ├── MetricError            a metric that cannot be read off the outputs
    ├── SweepError             a sweep that cannot be planned, run or resumed as asked
    │   ├── BudgetError            more memory than `max_memory` allows
    │   ├── IdentityError          something of which a change would go unseen
    │   ├── OtherModelError        a run, a mean or a resample of another captured model
    │   └── FleetError             workers that cannot be had, or cannot be sent what a sweep needs
    ├── EdgeError              edges that a model does not have, or whose parts cannot be separated
    ├── DecompositionError     a stream or logits that cannot be taken apart as asked
    ├── CircuitError           a circuit that cannot be made, read, compared or evaluated as asked
    ├── FormatError            a file of a format that another version of conewise wrote
    ├── LoadError              a model that cannot be loaded
    ├── PromptError            prompts that cannot be read, or asked of a model
    ├── OutOfMemoryError       something that takes more memory than there is
    ├── MissingPackageError    a package that is not installed here
    ├── TheoryError            a question that the closed forms have no answer to
    ├── UnknownExperimentError a name that no experiment has
    └── ArgumentError          an argument of a type or a size that the function does not take

Each message says what was found, what was expected, and what to do. Where it speaks of an argument, it holds
an `Argument`: Python shows `max_memory=300`, and the command line its own option, `--max-memory 300`.

Python's own errors are raised where Python asks for them (an attribute or a key that is not there), by ops
(which are rules: in a world they become an OpError), and by `compat`, as the libraries do that it stands in
for. Warnings are here too. An exception that another module defines does not reach the caller.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that a message speaks of: its name in Python, and the value to give it, if one is meant."""

    name: str
    value: object = None

    def __str__(self) -> str:
        return f"`{self.name}`" if self.value is None else f"{self.name}={self.value!r}"


Piece = str | Argument
"""A part of a message."""


def write(pieces: Iterable[Piece], written: Callable[[Argument], str] = str) -> str:
    """A message as one text, with every argument as `written` writes it; by default as Python does."""
    return "".join(written(piece) if isinstance(piece, Argument) else str(piece) for piece in pieces)


NAN_OF_PADDING = (
    "A model may put out NaN for padded prompts: eager attention in float64 does, at positions that see "
    'nothing, and from there it spreads to tokens. Load the model with attn_implementation="sdpa" or in '
    "float32, or give prompts of one length."
)
"""A cause of NaN that nobody put in."""


class ConewiseError(Exception):
    """The base class of all errors that Conewise raises.

    Its arguments are the message: one string, or several pieces, each a string or an `Argument`.
    """

    def __str__(self) -> str:
        return self.message()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the message mentions, in order."""
        return tuple(piece for piece in self.args if isinstance(piece, Argument))

    def message(self, written: Callable[[Argument], str] = str) -> str:
        """Return the message, with each argument formatted by `written`, by default as Python code."""
        return write(self.args, written)


class GraphError(ConewiseError):
    """The graph cannot be built or changed as asked."""


class UnknownSiteError(GraphError):
    """No site of the graph has this name."""

    def __init__(self, site: object, known: Collection[str]) -> None:
        self.site = site
        self.near = nearest_names(str(site), known)
        nearest = f" Nearest: {', '.join(self.near)}." if self.near else ""
        super().__init__(
            f"no site {site!r} in this graph of {len(known)} sites.{nearest} "
            "List them all with `graph.sites`."
        )


class DuplicateSiteError(GraphError):
    """The name is already in use."""

    def __init__(self, site: str) -> None:
        self.site = site
        super().__init__(
            f"the graph already has a site {site!r}; names are unique. Choose another name, or "
            f"change the rule that stands there with `graph.redefine({site!r}, rule)`."
        )


class UnknownEdgeError(GraphError):
    """No edge joins these two sites."""

    def __init__(self, reader: str, site: str, inputs: Sequence[str], readers: Sequence[str]) -> None:
        self.edge = (site, reader)
        reads = ", ".join(inputs) or "nothing: it is a source"
        read_by = ", ".join(readers) or "no site"
        super().__init__(
            f"no edge {site!r} -> {reader!r}: {reader!r} reads {reads}, and {site!r} is read by "
            f"{read_by}. An edge is written (input, reader)."
        )


class CycleError(GraphError):
    """The change would close a cycle; `cycle` lists its sites, the first one repeated last."""

    def __init__(self, cycle: Sequence[str]) -> None:
        self.cycle = tuple(cycle)
        shown = list(cycle)
        if len(shown) > 12:
            shown = [*shown[:6], f"... {len(shown) - 11} more ...", *shown[-5:]]
        super().__init__(
            f"this would close a cycle: {' -> '.join(shown)}. A graph stays acyclic; nothing was "
            "changed. Choose inputs that do not depend on the site that reads them."
        )


class ArityError(GraphError):
    """The rule does not accept this number of inputs."""

    def __init__(self, site: str, takes: str, given: Sequence[str]) -> None:
        self.site = site
        super().__init__(
            f"the rule of {site!r} takes {takes}, but {len(given)} "
            f"{'is' if len(given) == 1 else 'are'} given: {', '.join(given) or 'none'}. "
            "List one input site for each argument of the rule, in order."
        )


class BlockError(GraphError):
    """The block does not have exactly one input, one output, and at least one node between them."""


class GradientError(GraphError):
    """A gradient cannot be built, or a change of the graph would invalidate it."""


class InUseError(GraphError):
    """Another part of the graph still depends on this part."""


class GraphChangedError(GraphError):
    """The graph of a captured model was changed, and the request is computed from its program."""

    def __init__(self, what: str, model: str, sites: Sequence[str]) -> None:
        more = f" and {len(sites) - 3} more" if len(sites) > 3 else ""
        super().__init__(
            f"cannot {what}: the graph of {model} was changed after the capture, at "
            f"{', '.join(map(repr, sites[:3]))}{more}, and this is computed from the captured operations or "
            "by the module, which do not have the change. `model.run(...)`, its forks (`run.fork()`, "
            "`world.patch(...)`) and sweeps of sites follow the changed graph. For anything else make the "
            "change in the module and capture that, or undo it: `graph.redefine` with the old rule and "
            "inputs, `graph.remove(graft)`."
        )


class BusyError(GraphError):
    """A change or a demand started during another one, or another thread uses the model."""

    def __init__(self, action: str, during: str = "demand") -> None:
        if during == "demand":
            why = (
                "a demand over the same graph is running. A rule computes a value from its inputs and "
                "changes nothing; make the change before or after the demand."
            )
        elif during == "use":
            why = (
                "another thread uses the same model, or something that was made of it. One thread at a time "
                "does so: wait until the other is done, or capture the module once more for this thread, "
                "which shares the weights."
            )
        else:
            why = (
                "a change of the same graph, or of a world over it, is being made. A graph and its worlds "
                "are used by one thread at a time: call it after the change."
            )
        super().__init__(f"{action} was called while {why}")


class WorldError(ConewiseError):
    """The values of a world cannot be changed or read as requested."""


class NotPatchedError(WorldError):
    """A restore was requested for a site or an edge without a patch."""

    def __init__(self, what: str, patched: Iterable[str]) -> None:
        here = ", ".join(patched) or "nothing"
        super().__init__(
            f"{what} is not patched in this world, so there is nothing to restore. Patched here: {here}."
        )


class NoValueError(WorldError):
    """A demand depends on a source without a value."""

    def __init__(self, site: str) -> None:
        self.site = site
        super().__init__(
            f"the source {site!r} has no value. Give it one with `world.set({site!r}, value)`, or "
            f"a default for every world with `graph.source({site!r}, value)`."
        )


class OpError(WorldError):
    """A rule raised an error. The site stays invalid; every other value is unchanged."""

    def __init__(self, site: str, inputs: Sequence[tuple[str, object]], cause: BaseException) -> None:
        self.site = site
        self.inputs = tuple(name for name, _ in inputs)
        described = ", ".join(f"{name}: {describe(value)}" for name, value in inputs) or "no inputs"
        super().__init__(
            f"the rule of {site!r} raised {type(cause).__name__}: {cause}. Its inputs were "
            f"({described}). {site!r} stays invalid and all other values stay; repair the rule "
            f"(`graph.redefine`) or its inputs, then demand again."
        )


class SitesNotKeptError(WorldError, ValueError):
    """The sites were requested from a ledger that keeps tallies only."""


class ClosedWorldError(WorldError):
    """The world was dropped, or its parent was."""

    def __init__(self) -> None:
        super().__init__(
            "this world is closed: its `with` block ended, or its parent was closed. Its values are "
            "gone; fork its parent again. (To keep a fork's changes, `commit()` it before the end.)"
        )


class CaptureError(ConewiseError):
    """The module cannot be captured as requested."""


class ControlFlowError(CaptureError):
    """The control flow of the module depends on the values of tensors."""

    def __init__(self, module: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{module} chooses what to compute by the values of its tensors, so it is not one "
            f"graph. torch.export says: {reason}\n"
            "Make the choice outside of the module, write it as tensor arithmetic (`torch.where`, "
            "a mask), or use `torch.cond`; or capture the submodule that holds no such choice."
        )


class RandomnessError(CaptureError):
    """The module draws random numbers, so no two runs of it are equal."""

    def __init__(self, module: str, ops: tuple[str, ...]) -> None:
        self.ops = ops
        super().__init__(
            f"{module} draws random numbers or updates running statistics in: {', '.join(ops)}. "
            "A graph computes the same value each time it is asked. Call `module.eval()` first; "
            "if the module draws on purpose, give it the random tensor as an input."
        )


class InputMismatchError(CaptureError):
    """The inputs of a run do not fit the program that was captured."""


class ModuleChangedError(CaptureError):
    """The module no longer computes what was captured: its hooks, its `forward` or a setting changed."""

    def __init__(self, model: str, changes: Sequence[str]) -> None:
        more = f"; and {len(changes) - 4} more" if len(changes) > 4 else ""
        super().__init__(
            f"{model} was changed after the capture: {'; '.join(changes[:4])}{more}. The captured model "
            "computes what the module did before. Undo the change, or capture the module again: "
            "`cw.capture(module, ...)`."
        )


class SiteError(ConewiseError):
    """A place of a captured model is invalid, or a value does not fit there."""


class MissingSiteError(SiteError):
    """The captured model has no such site; the message gives the reason if it is known."""


class NotAPlaceError(SiteError, TypeError):
    """The value does not name a place, e.g. because it has the wrong type or the layer is not a number."""


class DictionaryError(SiteError):
    """A dictionary cannot be read, or does not fit the place at which it is spliced in."""


class SurgeryError(SiteError):
    """The model does not allow a surgery: the replacement does not fit, or its place no longer exists."""


class MetricError(ConewiseError):
    """A metric cannot be computed from the outputs, or does not return numbers."""


class SweepError(ConewiseError):
    """A sweep cannot be planned, run or resumed as requested."""


class BudgetError(SweepError):
    """The work needs more memory than `max_memory`, however it is split; `least` is what would fit."""

    def __init__(self, taken: str, budget: str, least: int) -> None:
        self.least = least
        super().__init__(
            f"{taken}, more than the budget of {budget}. The least that would do is ",
            Argument("max_memory", least),
            ".",
        )


class IdentityError(SweepError):
    """A dependency of a stored sweep cannot be identified reliably, because it can change.

    `what` describes it, and `where` gives its location as a path of names from the value that was examined.
    """

    def __init__(self, where: str, what: str, *message: str | Argument) -> None:
        self.where, self.what = where, what
        super().__init__(*(message or [f"{where}: {what}" if where else what]))


class FleetError(SweepError):
    """Workers are unavailable, or cannot receive what a sweep needs."""


class EdgeError(ConewiseError):
    """The model does not have these edges, or the parts of a stream cannot be separated."""


class DecompositionError(ConewiseError):
    """A residual stream, logits or attention cannot be decomposed as requested."""


class CircuitError(ConewiseError):
    """A circuit cannot be created, read, compared or evaluated as requested."""


class FormatError(ConewiseError):
    """A file has the format of another version of conewise, which this version does not read."""


class PatchError(SiteError):
    """A value cannot be patched into the requested place."""


class OtherModelError(SweepError, PatchError, CircuitError, DictionaryError):
    """A run, or an intervention that reads runs, belongs to another captured model.

    Sweeps, patches, circuits and dictionaries refuse it alike, so it is a subclass of the error of each.
    """

    def __init__(self, what: str, found: str, expected: str) -> None:
        found = f"another capture of {found}" if found == expected else found
        super().__init__(
            f"{what} of another model ({found}); both have to be of the same captured model ({expected}). "
            "Make it with that one, `model.run(...)`."
        )


class WeightsChangedError(PatchError):
    """The weights differ from those of a run, or from those that were captured."""


class NoEffectWarning(UserWarning):
    """A patch does not change any requested value."""


class InexactCaptureWarning(UserWarning):
    """A captured graph does not reproduce its module's outputs bit for bit."""


class UnhookedWarning(UserWarning):
    """Cells cannot be re-run by hooks on the module, and were compared with the captured program."""


class UnusedWeightsWarning(UserWarning):
    """Weights of a file have no place in the model that its config describes."""


class NonFiniteWeightsWarning(UserWarning):
    """Weights of a file are NaN or infinite, and so are the values computed from them."""


class PromptWarning(UserWarning):
    """The texts were read in a way that can affect the result."""


class LoadError(ConewiseError):
    """A model cannot be loaded: not found, damaged, of an unknown kind, or not safe to read."""


class PromptError(ConewiseError):
    """Prompts and answers cannot be read, or do not suit this model."""


class OutOfMemoryError(ConewiseError):
    """The work needs more memory than is available to this process."""

    def __init__(self, doing: str, cause: BaseException) -> None:
        said = (str(cause).strip().splitlines() or [""])[0]
        super().__init__(
            f"there is not enough memory for {doing} ({type(cause).__name__}{f': {said}' if said else ''}). "
            "Close other programs, or raise the limit of this one (`ulimit -v`); load the model in another "
            "dtype (",
            Argument("dtype", "bfloat16"),
            " takes half); sweep fewer prompts at a time, or with less ",
            Argument("max_memory"),
            ".",
        )


class MissingPackageError(ConewiseError, ImportError):
    """A required package is not installed. `extra` is the extra of conewise that installs it, "" for none."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package, self.extra = package, extra
        whose = f"the extra {extra}" if extra else "conewise"
        what = f"conewise[{extra}]" if extra else "conewise"
        super().__init__(
            f"{package} is not installed here. It comes with {whose}, {purpose}: pip install '{what}'"
        )


class TheoryError(ConewiseError, ValueError):
    """The closed forms do not cover the question."""


class ArgumentError(ConewiseError, TypeError, ValueError):
    """An argument has the wrong type, or is outside of the range that the function accepts."""


class UnknownExperimentError(ConewiseError, ValueError):
    """No experiment has this name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        super().__init__(
            f"no experiment {name!r}. There are {', '.join(known)}, and all for every one: "
            f"`conewise reproduce {known[0]} {known[1]}`, `conewise reproduce all`."
        )


def nearest_names(name: str, known: Collection[str], cutoff: float = 0.5) -> tuple[str, ...]:
    """Up to three of `known` that look like `name`. Large graphs are narrowed down by length first."""
    if len(known) > 20_000:
        similar = (other for other in known if abs(len(other) - len(name)) <= 1)
        known = list(itertools.islice(similar, 20_000))
    return tuple(difflib.get_close_matches(name, known, n=3, cutoff=cutoff))


def nearest(name: str, known: Collection[str], cutoff: float = 0.5) -> str:
    """The end of a message about a name that is not there: the names like it, or nothing."""
    near = nearest_names(name, known, cutoff)
    return f" Nearest: {', '.join(near)}." if near else ""


def warn(message: str | Warning, category: type[Warning] | None = None) -> None:
    """Warn at the line outside of conewise that asked."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith("conewise.") and name not in {"contextlib", "torch.utils._contextlib"}:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory ran out, in any of the ways of the libraries."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    said = str(error).lower()
    return isinstance(error, OSError | RuntimeError | ImportError) and any(
        words in said
        for words in ("can't allocate memory", "cannot allocate memory", "failed to map segment", "bad_alloc")
    )


def describe(value: object) -> str:
    """A value in a few words: its type, and its shape and dtype where it has them."""
    kind = type(value).__name__
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None:
            return f"{kind} of shape {tuple(shape)}" + (f", {dtype}" if dtype else "")
        text = repr(value)
    except Exception:  # noqa: BLE001 - a value that cannot be shown must not hide the error that shows it
        return kind
    return f"{kind} {text if len(text) <= 40 else text[:37] + '...'}"

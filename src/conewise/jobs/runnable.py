"""The base of every job that a model returns: `plan()` reports its cost, `run()` computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from conewise.arguments import as_bytes, checked
from conewise.errors import ArgumentError
from conewise.jobs.pool import Pool
from conewise.jobs.progress import Shown
from conewise.templates import heading
from conewise.threads import Turn, one_thread

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class How:
    """The options of a run; see `Runnable.run`."""

    out: str | Path | None = None
    resume: bool = False
    max_memory: int | None = None
    workers: int | str | Pool | None = None
    progress: Shown = None
    check_weights: Literal["sample", "full"] = "sample"


@checked
@one_thread
class Runnable(ABC, Generic[R_co]):
    """A job on a model, which is computed when `run` is called."""

    @property
    @abstractmethod
    def _turn(self) -> Turn:
        """The turn of the thread that uses the model."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}: `plan()` reports what it takes, `run()` computes it"

    def _repr_html_(self) -> str:
        return heading("Job", repr(self))

    @abstractmethod
    def plan(self, max_memory: int | str | None = None) -> Any:
        """Return the cost of the job; nothing is computed."""

    @abstractmethod
    def _run(self, how: How, *args: Any, **own: Any) -> R_co:
        """Run it; `own` are the options that only this kind of job has."""

    def run(
        self,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        max_memory: int | str | None = None,
        workers: int | str | Pool | None = None,
        progress: bool | Callable[[int, int], None] | None = None,
        check_weights: Literal["sample", "full"] = "sample",
        **own: Any,
    ) -> R_co:
        """Compute the job, and return its result, which `save` writes to a folder and `cw.open` reads.

        `out`: a folder, in which everything is stored as soon as it is computed; with `resume=True` an
        interrupted run continues there. `max_memory`: the limit on memory besides the model and the runs, as
        a number of bytes or a text such as "4GiB". `workers`: the workers that compute beyond this process: a
        number of processes, "ray" for a Ray cluster on this machine, the address of one, `cw.Processes(...)`
        or `cw.Ray(...)`. `progress`: True shows a bar on stderr, False nothing; None shows one if stderr is a
        terminal or a notebook and the run takes more than a second; a function is called with (done, total).
        `check_weights`: by default, changes of the weights are detected by torch's counters of writes and a
        sample of the bits; "full" reads every bit before and after, as jobs that are stored or sent to
        workers do. `own` are the options specific to this kind of job, documented with it.
        """
        if own:
            parameters = [*signature(Runnable.run).parameters, *signature(self._run).parameters]
            options = [name for name in parameters if name not in {"self", "how", "own"}]
            if unknown := [name for name in own if name not in options]:
                raise ArgumentError(f"`run` has no option {unknown[0]!r} here; it has {', '.join(options)}.")
        return self._run(How(out, resume, as_bytes(max_memory), workers, progress, check_weights), **own)

"""A seat: one worker, and what it was told. Whoever carries the calls is another's business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from conewise.errors import FleetError
from conewise.fleets.jobs import Work
from conewise.fleets.shares import Share


class Seat(ABC):
    """Tells a worker all that a share needs, each once, and gives it shares.

    `published` has what was put where workers find it, by key. Calls are carried out in the order in which
    they are made.
    """

    def __init__(self, name: str, published: Mapping[str, Any]) -> None:
        self.name, self._published = name, published
        self._told: set[Any] = set()
        self._works: Sequence[tuple[Work, str]] = ()

    @abstractmethod
    def call(self, method: str, *given: Any) -> None:
        """Have the worker do something, and do not wait for it."""

    @abstractmethod
    def run(self, key: str, share: Share) -> None:
        """Have the worker run a share; something comes back of it."""

    def begin(self, works: Sequence[tuple[Work, str]]) -> None:
        """Tell it of the models of some work, by their keys: all that comes behind the shares of one."""
        self._works = works
        for _, model in works:
            if model not in self._told:
                self.call("prepare", model, self._published[model])
                self._told.add(model)

    def submit(self, share: Share) -> None:
        """Give it a share, and tell it before what it does not know of its job."""
        work, model = self._works[share.job or 0]
        if (work.key,) not in self._told:
            self.call("know_job", work.key, model, self._published[work.key])
            self._told.add((work.key,))
        if share.batch in work.plans and (work.key, share.batch) not in self._told:
            self.call("know_plan", work.key, share.batch, work.plans[share.batch])
            self._told.add((work.key, share.batch))
        self.run(work.key, share)

    def forget(self, works: Sequence[Work]) -> None:
        """Jobs have ended."""
        for work in works:
            if (work.key,) in self._told:
                self.call("forget", work.key)
        keys = {work.key for work in works}
        self._told = {one for one in self._told if not (isinstance(one, tuple) and one[0] in keys)}

    def forget_model(self, key: str) -> None:
        """A model is not needed any more."""
        if key in self._told:
            self._told.discard(key)
            self.call("forget_model", key)


def is_number(given: object) -> bool:
    """Whether it is a number, and not a truth."""
    return isinstance(given, int | float) and not isinstance(given, bool)


def expect_counts(**given: object) -> None:
    """Raise FleetError where something that was given is no whole number of 1 or more."""
    for name, count in given.items():
        is_count = isinstance(count, int) and not isinstance(count, bool) and 0 < count < 1 << 16
        if count is not None and not is_count:
            raise FleetError(f"{name} is a number of 1 or more, not {count!r}.")

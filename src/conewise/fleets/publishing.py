"""What a driver puts where its workers find it: recipes of models, and what is asked of them, by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conewise.fleets.jobs import Work
from conewise.fleets.recipe import Recipe, recipe_of

KEPT = 2
"""How many models workers keep, beside those that they are at work with."""


class Published:
    """Recipes and payloads by key. With `source`, workers load weights from there; `how` says how.

    `put` puts something where workers find it, and returns what they find it by.
    """

    def __init__(self, source: str | None, how: Mapping[str, Any]) -> None:
        self.by_key: dict[str, Any] = {}
        self._source, self._how = source, dict(how)
        self._models: list[str] = []

    def begin(
        self, works: Sequence[Work], put: Callable[[Any], Any], forget_model: Callable[[str], None]
    ) -> list[tuple[Work, str]]:
        """Publish some work, each with the key of its model. Models that have long been idle are dropped."""
        known = {id(work.model): work.model_key for work in {id(one.model): one for one in works}.values()}
        keys = [known[id(work.model)] for work in works]
        for work, key in zip(works, keys, strict=True):
            if key not in self.by_key:
                recipe: Recipe = recipe_of(work.model, self._source, **self._how)
                self.by_key[key] = put(recipe)
            self.by_key[work.key] = put(work.asked)
        used = list(dict.fromkeys(keys))
        idle = [one for one in self._models if one not in used]
        for key in idle[: max(0, len(idle) - KEPT)]:
            del self.by_key[key]
            forget_model(key)
        self._models = [*idle[max(0, len(idle) - KEPT) :], *used]
        return list(zip(works, keys, strict=True))

    def end(self, works: Sequence[Work]) -> None:
        """Some work has ended."""
        for work in works:
            self.by_key.pop(work.key, None)

    def clear(self) -> None:
        """Nobody is there any more."""
        self.by_key.clear()
        self._models.clear()

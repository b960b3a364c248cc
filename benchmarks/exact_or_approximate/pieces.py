"""Pieces of a long computation, kept on disk as they are done: what is there is not computed again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import conewise as cw
from conewise.files import write_whole
from conewise.sweeps.storage.archive import is_result

Numbers = npt.NDArray[np.float64]


def say(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Effects:
    """Effects [cell, prompt] by name; `flops` is what computing them took."""

    names: tuple[str, ...]
    per_prompt: Numbers
    flops: int

    @property
    def mean(self) -> Numbers:
        """The mean over prompts, as circuits are scored."""
        return np.asarray(self.per_prompt.mean(-1))

    def at(self, names: tuple[str, ...]) -> Numbers:
        """The mean effects of some cells."""
        number = {name: at for at, name in enumerate(self.names)}
        return self.mean[[number[name] for name in names]]

    def of_prompts(self, some: slice) -> Effects:
        """The same of some prompts, with their share of the work."""
        own = self.per_prompt[:, some]
        return Effects(self.names, own, self.flops * own.shape[-1] // self.per_prompt.shape[-1])


def joined(parts: list[Effects]) -> Effects:
    """Effects of the same cells for one slice of prompts after the other."""
    assert all(one.names == parts[0].names for one in parts)
    return Effects(
        parts[0].names,
        np.concatenate([one.per_prompt for one in parts], -1),
        sum(one.flops for one in parts),
    )


def united(parts: Sequence[Effects]) -> Effects:
    """Effects of the cells of all parts, for the same prompts; a cell of several parts is there once."""
    rows: dict[str, Numbers] = {}
    for part in parts:
        for name, row in zip(part.names, part.per_prompt, strict=True):
            rows.setdefault(name, row)
    return Effects(tuple(rows), np.stack(list(rows.values())), sum(part.flops for part in parts))


@dataclass(frozen=True)
class Pieces:
    """A folder of results; each is computed once, however often the script is stopped and started.

    `read` has those that were read by this process.
    """

    folder: Path
    read: dict[str, Effects] = field(default_factory=dict)

    def expect(self, question: Mapping[str, Any]) -> None:
        """Raise ValueError where the folder holds pieces of another question than this."""
        before = self.facts("question", lambda: dict(question))
        for name, value in json.loads(json.dumps(question)).items():
            if before.get(name) != value:
                raise ValueError(
                    f"{self.folder} holds pieces of another question: {name} was {before.get(name)!r}, and "
                    f"is {value!r}. Give another folder."
                )

    def sweep(self, name: str, sweep: Callable[[], Any]) -> Effects:
        """The effects of an exact sweep, which goes on where it was stopped."""
        store = self.folder / f"{name}.store"
        return self._kept(
            name, lambda: sweep().run(out=store, resume=True, max_memory="1.5GiB", progress=False)
        )

    def attribution(self, name: str, attribution: Callable[[], Any]) -> Effects:
        """The effects by gradients."""
        return self._kept(name, attribution)

    def facts(self, name: str, compute: Callable[[], Any]) -> Any:
        """Plain values, as JSON."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            say(f"{name} ...")
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(compute(), indent=1).encode())
        return json.loads(path.read_text("utf-8"))

    def _kept(self, name: str, compute: Callable[[], Any]) -> Effects:
        if name in self.read:
            return self.read[name]
        folder = self.folder / name
        if not is_result(folder):
            say(f"{name} ...")
            started = time.perf_counter()
            compute().save(folder)
            say(f"{name}: {time.perf_counter() - started:.1f} s")
        result: Any = cw.open(folder)
        effects = result.per_prompt[0] - result.base_per_prompt[0]
        self.read[name] = Effects(
            tuple(cell.name for cell in result.cells),
            np.asarray(effects.numpy(), dtype=np.float64),
            int(result.plan.flops),
        )
        return self.read[name]

"""Facts about a model that sweeps need, found once: its outputs by name, where it lives, how fast it is."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any

from conewise.identity.digests import home, inputs_digest, program_digest
from conewise.identity.fingerprint import fingerprint
from conewise.program.records import Record, Ref
from conewise.program.streaming import assembled
from conewise.program.weights import Sums
from conewise.runs.captured import Captured
from conewise.structure.outputs import Outputs
from conewise.sweeps.planning.fusing import find_fusions
from conewise.sweeps.planning.shown import Lying


class Facts:
    """`outputs`: the output nodes; `fields`: those that have a name; `read`: how metrics read them.

    `rates`: operations a second, measured.

    `keeps_apart` says of nodes, in runs of a shape, whether the rows of a batch stay apart there, `lying` how
    values lie in memory; both are found when they are asked for. `fusions` are chains that one kernel
    computes.
    """

    def __init__(self, model: Captured) -> None:
        program = model.program
        self.outputs = tuple(dict.fromkeys(out.name for out in program.outputs if isinstance(out, Ref)))
        named: Any = assembled(program, {name: name for name in self.outputs}, program.sizes.expressions)
        items = named.items() if hasattr(named, "items") else ()
        self.fields: dict[str, str] = {key: value for key, value in items if isinstance(value, str)}
        self.read = Outputs(program)
        self.records: dict[str, Record] = {record.name: record for record in program.records}
        self.device, self.dtype = home(program)
        self.keeps_apart: dict[tuple[str, tuple[int, ...]], bool] = {}
        self.lying: dict[tuple[tuple[str, int], ...], Lying] = {}
        self.rates: dict[str, float] = {}
        self.fusions = find_fusions(program, self.device)
        self._model, self._digest = model, ("", "")
        self._digest_of: Sums | None = None
        self._found_with: Sums | None = None

    def expect_weights(self, now: Sums) -> bool:
        """Forget what was found out with other weights than these; whether it was with these."""
        is_same = self._found_with == now
        if not is_same:
            self.keeps_apart.clear()
            self._found_with = now
        return is_same

    @property
    def fingerprint(self) -> str:
        """A digest of architecture and weights: another one is another model."""
        return self.digests(self._model.weights.whole_contents().whole)[0]

    def digests(self, weights: Sums) -> tuple[str, str]:
        """The fingerprint, and a digest of what is no part of it: constants, buffers that are not saved.

        `weights`: their bits, which were just read.
        """
        if self._digest_of != weights:
            saved = self._model.module.state_dict()
            rest = {
                source.name: source.value
                for source in self._model.program.sources
                if saved.keys().isdisjoint((source.name, *source.aliases))
            }
            self._digest = fingerprint(self._model.module), inputs_digest(rest) if rest else ""
            self._digest_of = weights
        return self._digest

    @cached_property
    def program(self) -> str:
        """A digest of what is computed, whatever the weights are."""
        return program_digest(self._model.program)


_FACTS: weakref.WeakKeyDictionary[Captured, Facts] = weakref.WeakKeyDictionary()


def facts_of(model: Captured) -> Facts:
    """The facts about a model, found at the first call."""
    if model not in _FACTS:
        _FACTS[model] = Facts(model)
    return _FACTS[model]

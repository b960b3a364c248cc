"""Facts about a model that sweeps need, found once: its outputs by name, where it lives, how fast it is."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from conewise.frontends.torch.bits import Sums
from conewise.frontends.torch.digests import home
from conewise.frontends.torch.fingerprint import fingerprint
from conewise.frontends.torch.fusing import find_fusions
from conewise.frontends.torch.outputs import Outputs
from conewise.frontends.torch.records import Record, Ref
from conewise.frontends.torch.shown import Lying
from conewise.frontends.torch.streaming import assembled

if TYPE_CHECKING:
    from conewise.workloads.model import Model


class Facts:
    """`outputs`: the output nodes; `fields`: those that have a name; `read`: how metrics read them.

    `rates`: operations a second, measured.

    `keeps_apart` says of nodes, in runs of a shape, whether the rows of a batch stay apart there, `lying` how
    values lie in memory; both are found when they are asked for. `fusions` are chains that one kernel
    computes.
    """

    def __init__(self, model: Model) -> None:
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
        self._module, self._weights = model.module, model.weights
        self._digest: tuple[Sums, str] | None = None
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
        return self.fingerprint_of(self._weights.whole_contents().whole)

    def fingerprint_of(self, weights: Sums) -> str:
        """The digest, where the weights were just read."""
        if self._digest is None or self._digest[0] != weights:
            self._digest = weights, fingerprint(self._module)
        return self._digest[1]


_FACTS: weakref.WeakKeyDictionary[Model, Facts] = weakref.WeakKeyDictionary()


def facts_of(model: Model) -> Facts:
    """The facts about a model, found at the first call."""
    if model not in _FACTS:
        _FACTS[model] = Facts(model)
    return _FACTS[model]

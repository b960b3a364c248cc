"""A run with hooks: each function is called once, in the order of computation, and what it leaves stands.

Functions are called between the demands of the engine, and not in the middle of one: so they may read other
runs of the model, as most patching hooks do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from conewise.compat.hooks.hook_table import Change, HookTable
from conewise.locations.located import Located
from conewise.locations.places import as_place
from conewise.program.tensors import Tensor, computing, same_bits
from conewise.runs.backward.gradients import node_of
from conewise.runs.edit import new_part
from conewise.runs.reading import Reading
from conewise.runs.run import Run


def hooked(run: Run, table: HookTable, changes: Mapping[str, Change]) -> Reading:
    """The values of a run in which named values are `changes` of what they are; the run stays as it is."""
    model = run.model
    reading = Reading(model, run.world.fork(), run._sizes, run)
    edits = [(as_place(place), change) for place, change in table.edits(changes)]
    located = {place: model.locate(place) for place, _ in edits}
    numbers = {place: model.graph.number(node_of(found)) for place, found in located.items()}
    order = {number: i for i, number in enumerate(model.graph.table.sorted(set(numbers.values())))}
    with run.checked_once():
        # Stable: at one node, what stands first in the table comes first.
        for place, change in sorted(edits, key=lambda edit: order[numbers[edit[0]]]):
            found, present = located[place], reading.read(place)
            changed = new_part(change, present.detach(), found, place)
            if not same_bits(changed, present):
                value = _replaced(reading, found, present, changed.detach())
                reading.world.patch(node_of(found), value)
    return reading


def _replaced(reading: Reading, found: Located, present: Tensor, changed: Tensor) -> Tensor:
    """The value of the node at which a site is changed."""
    value: Tensor = reading.demand([node_of(found)])[0]
    with computing():
        if found.result is None:
            return found.view.replace(value, {}, changed, reading._sizes)
        added: torch.Tensor = (changed - present).sum(2)
        added = added.transpose(0, 1) if found.result.is_pos_first else added
        return value + added.reshape(value.shape)

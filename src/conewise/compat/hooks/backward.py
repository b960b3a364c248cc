"""Logits whose backward pass calls functions with the gradients of named values, as backward hooks do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from conewise.compat.hooks.hook_points import HookPoint
from conewise.compat.hooks.hook_table import Change, HookTable
from conewise.locations.located import Located
from conewise.locations.places import as_place
from conewise.program.streaming import field_names
from conewise.runs.backward.gradients import node_of, shown_gradient
from conewise.runs.backward.tape import Tape
from conewise.runs.edit import Edit, applied_in_turn
from conewise.runs.run import Run

Tensor = torch.Tensor


def recorded_logits(
    run: Run, table: HookTable, changes: Mapping[str, Change], points: Mapping[str, HookPoint]
) -> Tensor:
    """The logits of a run under `changes`, recorded from the embedding on; weights are constants.

    When something of them is differentiated, `points` are called with the gradients by their values.
    """
    model = run.model
    edits: dict[str, list[Edit]] = {}
    for place, change in table.edits(changes):
        where = as_place(place)
        edit = Edit(where, model.locate(where), change)
        edits.setdefault(edit.node, []).append(edit)
    start = model.locate(table.embed).node
    tape = Tape(model, lambda node: run.demand([node])[0], run._sizes, lambda node: edits.get(node, ()))
    hooked = {name: model.locate(place) for name, place in table.places(points).items()}
    nodes = list(dict.fromkeys([start, *(node_of(found) for found in hooked.values())]))
    logits = field_names(model.program, "logits") or ()
    # What is changed and not computed again is given: the embedding itself, and what does not depend on it.
    again = {*model.behind([start], [*logits, *nodes, *edits])}
    given: dict[str, Tensor] = {}
    for node, own in edits.items():
        if node not in again:
            given[node] = applied_in_turn(own, run.demand([node])[0], tape.sizes)
    values = tape.record(nodes, logits, given=given, keep=[node for node in edits if node in again])
    for name, found in hooked.items():
        values[node_of(found)].register_hook(_called(points[name], tape, found))
    recorded: Tensor = values[logits[0]]
    return recorded


def _called(point: HookPoint, tape: Tape, found: Located) -> Callable[[Tensor], Tensor | None]:
    def hook(gradient: Tensor) -> Tensor | None:
        shown = found.view.present(shown_gradient(tape, found, gradient), tape.sizes)
        changed: Any = None
        for handle in tuple(point.bwd_hooks):
            made = handle.function(shown.clone() if changed is None else changed, hook=point)
            changed = changed if made is None else made[0] if isinstance(made, tuple) else made
        if changed is None:
            return None
        if found.result is not None:
            raise ValueError(
                f"the gradients by {point.name} are those by one sum, for every head the same: they are "
                "read, and not changed."
            )
        return found.view.replace(gradient, {}, changed, tape.sizes)

    return hook

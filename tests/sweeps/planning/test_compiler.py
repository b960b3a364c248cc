"""The compiler over a program written by hand: it needs no model, no run and no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from conewise.anatomy.axes import View
from conewise.anatomy.places import Place
from conewise.anatomy.sites import Located, Site
from conewise.errors import SweepError
from conewise.program.records import SIZES, Program, Ref
from conewise.reactive.graph import Graph
from conewise.sweeps.planning.compiler import Compilation
from conewise.sweeps.planning.patching import Patching
from conewise.sweeps.planning.plan import Compiled, SweepPlan
from conewise.sweeps.planning.shapes import ShapeFacts
from conewise.sweeps.planning.spec import Conditions, ReadOut, StandingEdit, StoredCut, SweepSpec
from tests.sweeps.handmade import WIDTH, B, Handmade, T, numbers

aten = torch.ops.aten
LENGTH = 4
BYTES = LENGTH * WIDTH * 8
"""Of one value of one world."""

VIEW = View(("batch", "pos", "d"), (("batch",), ("pos",), ("d",)), {})
CELLS: list[tuple[Place, ...]] = [
    (Place("b"),),
    *((Place("a", None, "", {"pos": pos}),) for pos in range(LENGTH)),
    (Place("a"), Place("b")),
]


def chain() -> Program:
    """Four products behind each other, and one beside them that nothing reads."""
    made = Handmade(x=(B, T, WIDTH))
    weight = made.source("weight", numbers(WIDTH, WIDTH))
    for name, read in (("a", "x"), ("b", "a"), ("c", "b"), ("beside", "b"), ("d", "c")):
        made.record(name, aten.linear.default, Ref(read), weight, shape=(B, T, WIDTH))
    return made.program("d")


def locate(place: Place) -> Located:
    return Located(Site(place.name, "op", place.name, VIEW), VIEW, place.part)


def compilation(
    cells: Sequence[tuple[Place, ...]] = CELLS, is_function: bool = False, **conditions: Any
) -> Compilation:
    program = chain()
    graph = Graph()
    for name in (SIZES, "weight", "x"):
        graph.source(name)
    for record in program.records:
        graph.node(record.name, record.target, record.inputs)
    names = tuple(f"cell {number}" for number in range(len(cells)))
    return Compilation(
        Patching(graph, cells, ("d",), locate, is_function=is_function),
        ShapeFacts(program, {"b": 1, "t": LENGTH}, torch.device("cpu"), ()),
        SweepSpec(tuple(cells), names, (), is_function=is_function, from_run=True),
        ReadOut(("d",), last=()),
        Conditions(**conditions),
    )


def planned(**given: Any) -> tuple[Compiled, SweepPlan]:
    """The steps of a plan, and the plan with its costs."""
    plan = compilation(**given).plan()
    assert plan.compiled is not None
    plan.check()
    return plan.compiled, plan


def compiled(cells: Sequence[tuple[Place, ...]] = CELLS, **conditions: Any) -> Compiled:
    return planned(cells=cells, **conditions)[0]


def test_each_world_computes_what_its_patches_reach_and_no_more() -> None:
    """Of what is replaced whole nothing is computed; where a part of `a` is put, all behind it is."""
    found, costs = planned()
    cells = {node: {found.order[world] for start, stop in worlds for world in range(start, stop)}
             for node, worlds in found.steps}  # fmt: skip
    assert cells == {"b": {1, 2, 3, 4}, "c": {*range(6)}, "d": {*range(6)}}
    assert costs.node_evaluations == 4 + 6 + 6
    assert costs.full_evaluations == 4 * 6, "beside is in the support of no metric"


def test_a_function_of_a_value_is_made_of_what_is_computed() -> None:
    """Where a and b are both patched, b is computed first, and then changed."""
    _, costs = planned(is_function=True)
    assert costs.node_evaluations == 5 + 6 + 6


def test_worlds_stand_in_the_order_of_their_first_patch() -> None:
    assert compiled().order == (1, 2, 3, 4, 5, 0)


def test_places_become_a_few_tables() -> None:
    tables = compiled().fills
    by_site = {(table.node, table.axes): (table.worlds, table.index) for table in tables}
    assert by_site[("a", ("pos",))] == ((0, 1, 2, 3), ((0, 1, 2, 3),))
    assert by_site[("a", ())] == ((4,), ())
    assert len(tables) == len(by_site) + 1, "b is the first place of one world and the second of another"


def test_a_budget_cuts_worlds_into_passes() -> None:
    whole, costs = planned()
    assert [one.worlds for one in whole.passes] == [6]
    half, less = planned(max_memory=costs.peak_bytes - 1)
    assert [one.worlds for one in half.passes] == [3, 3]
    assert less.peak_bytes < costs.peak_bytes
    assert less.node_evaluations == costs.node_evaluations
    with pytest.raises(SweepError, match="one world alone takes"):
        compiled(max_memory=BYTES)


def test_a_stored_run_goes_on_as_it_was_cut() -> None:
    found = compiled(cut=StoredCut("wavefront", (1, 2, 3)))
    assert [one.worlds for one in found.passes] == [1, 2, 3]
    with pytest.raises(SweepError, match="the stored run was cut into chunks that take"):
        compiled(cut=StoredCut("wavefront", (1, 2, 3)), max_memory=BYTES)


def test_what_cannot_be_stacked_is_serial() -> None:
    assert compiled(obstacle="rows mix").passes == ()
    assert compiled(evaluator="serial").passes == ()
    with pytest.raises(SweepError, match="cannot run as a wavefront: rows mix"):
        compiled(obstacle="rows mix", evaluator="wavefront")


def test_a_cell_that_the_metric_does_not_see_is_refused() -> None:
    with pytest.raises(SweepError, match="the metric does not depend on 1 of 2 cells, cell 1 for one"):
        compiled([(Place("a"),), (Place("beside"),)])


def test_edits_of_the_base_downstream_are_made_again() -> None:
    edit = StandingEdit(0, "c", covers=True, is_function=False, site=("c", None, ""))
    found, costs = planned(edits=(edit,))
    assert costs.node_evaluations == 6, "what stands in the base is not computed, nor what leads to it alone"
    (again,) = (table for table in found.fills if table.edit is not None)
    assert (again.node, again.worlds) == ("c", tuple(range(6)))
    upstream = replace(edit, node="x", site=("x", None, ""))
    assert all(table.edit is None for table in compiled(edits=(upstream,)).fills)


def test_equal_sweeps_are_compiled_alike_and_come_back_from_plain_values() -> None:
    found = compiled()
    assert compiled() == found
    assert Compiled.from_plain(found.to_plain()) == found

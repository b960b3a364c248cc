"""The memory of a pass, read off its instructions: against a walk that holds real blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given

from conewise.sweeps.planning.memory import Memory, NodeSizes, measured
from conewise.sweeps.planning.passes import PassProgram, Put, Read, Step
from tests.sweeps.planning.test_build_pass import Scene, built, scenes


@dataclass
class Sizes(NodeSizes):
    """Every value takes one byte for each world and position."""

    positions: int = 4
    spaces: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    flat: tuple[str, ...] = ()
    parts: dict[str, int] = field(default_factory=dict)

    def value(self, node: str, rows: int | None) -> int:
        return self.positions if rows is None else rows

    def repeated(self, node: str, rows: int | None) -> int:
        return 0

    def workspace(self, node: str, rows: int | None) -> int:
        return self.spaces.get(node, 0)

    def scratch(self, node: str, rows: int | None, kernel: str, worlds: int) -> int:
        return 0

    def of_edges(self, node: str, worlds: int) -> int:
        return 0

    def part(self, node: str) -> int:
        return self.parts.get(node, 0)

    def alias(self, node: str) -> str | None:
        return self.aliases.get(node)

    def is_scattered(self, node: str, rows: int | None, count: int) -> bool:
        return node in self.flat and rows is not None


def of_chain(worlds: int, length: int) -> PassProgram:
    """One patched node, then a chain of others; each is dropped when the next is there."""
    everyone = ((0, worlds),)
    steps = [Step("n0", put=Put("n0", everyone))]
    for number in range(1, length + 1):
        read = f"n{number - 1}"
        steps.append(Step(f"n{number}", everyone, None, (Read(read, None, True),), drop=(read,)))
    return PassProgram(worlds, tuple(steps), (Read(f"n{length}", None, True),))


def test_a_chain_holds_two_values_of_all_worlds() -> None:
    assert measured(of_chain(5, 3), Sizes(), reading=0).peak == 2 * 4 * 5


def test_a_workspace_is_taken_while_its_step_runs_and_no_longer() -> None:
    found = measured(of_chain(5, 3), Sizes(spaces={"n2": 100}), reading=0)
    assert found.peak == 2 * 4 * 5 + 100 * 5
    assert found.rises == (20, 20, 520, 20)


def test_a_view_takes_no_memory_of_its_own() -> None:
    found = measured(of_chain(5, 3), Sizes(aliases={"n1": "n0", "n2": "n1"}), reading=0)
    assert found.rises == (20, 0, 0, 20)
    assert found.peak == 40


def test_what_is_put_in_and_what_metrics_take_is_counted() -> None:
    found = measured(of_chain(5, 1), Sizes(), reading=7, put=50)
    assert found.reading == 7 * 5
    assert found.peak == 50 + 4 * 5 + 7 * 5


def test_a_block_goes_when_nothing_holds_it() -> None:
    memory = Memory()
    one = memory.take(10)
    memory.hold(one)
    memory.release(one)
    assert memory.live == 10
    memory.release(one)
    other = memory.take(4)
    assert (memory.live, memory.peak) == (4, 10)
    memory.release(other)
    assert memory.live == 0


@given(scenes())
def test_a_pass_never_holds_less_than_one_step_needs(scene: Scene) -> None:
    program = measured(built(scene), Sizes(), reading=0)
    assert len(program.rises) == len(program.steps)
    for step in program.steps:
        stacked = sum(1 for read in step.reads if read.stacked)
        assert program.peak >= 4 * step.count * (1 + bool(stacked)) * bool(step.worlds)
    assert program.peak <= 4 * len(scene.worlds) * 4 * len(program.steps)


def cut(worlds: int, rows: int | None) -> PassProgram:
    """One node that worlds put into and keep the last positions of, then a view of it."""
    everyone = ((0, worlds),)
    steps = (
        Step("n0", put=Put("n0", everyone, rows=rows)),
        Step("n1", everyone, rows, (Read("n0", rows, True, rows),), drop=("n0",)),
    )
    return PassProgram(worlds, steps, (Read("n1", rows, True, rows),))


def test_the_last_positions_are_shown_and_what_is_longer_is_kept() -> None:
    found = measured(cut(5, 2), Sizes(aliases={"n1": "n0"}), reading=0)
    assert (found.rises, found.peak) == ((20, 0), 20)


def test_a_view_that_makes_one_dimension_of_the_last_positions_is_a_copy() -> None:
    """They do not lie together; of all positions they do."""
    sizes = Sizes(aliases={"n1": "n0"}, flat=("n1",))
    assert measured(cut(5, 2), sizes, reading=0).rises == (20, 10)
    assert measured(cut(5, None), sizes, reading=0).rises == (20, 0)


def test_the_last_positions_of_one_dimension_are_a_copy() -> None:
    assert measured(cut(5, 2), Sizes(flat=("n0",)), reading=0).rises == (30, 10)


def test_worlds_that_are_written_again_are_taken_out_where_they_stand_apart() -> None:
    """A copy of the stack; the worlds that are written, where these are not one range; what they put in."""
    everyone, parts = ((0, 5),), {"n1": 3}
    for places, apart in ((((0, 3),), 0), (((0, 2), (4, 5)), 3 * 4)):
        put = Put("n1", (), places, places)
        steps = (
            Step("n0", put=Put("n0", everyone)),
            Step("n1", everyone, None, (Read("n0", None, True),), put=put, drop=("n0",)),
        )
        program = PassProgram(5, steps, (Read("n1", None, True),))
        assert measured(program, Sizes(parts=parts), reading=0).rises == (20, 20 + 20 + apart + 3 * 3)

"""The page on coverage lists the zoo as it is, and no cell of it says that something differs."""

from __future__ import annotations

from tests.frontends.torch.coverage_table import COLUMNS, KINDS, PAGE, Row, page
from tests.frontends.torch.zoo import ZOO


def table() -> list[list[str]]:
    lines = PAGE.read_text().split("## Sites")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_the_page_lists_every_architecture_of_the_zoo() -> None:
    heading, _, *rows = table()
    assert tuple(heading) == COLUMNS
    assert [(row[0], row[1]) for row in rows] == [(name, case.model) for name, case in ZOO.items()]


def test_everything_on_the_page_is_equal() -> None:
    for row in table()[2:]:
        found = dict(zip(COLUMNS, row, strict=True))
        attention = ZOO[row[0]].attention
        for column in ("eager", "sdpa"):
            expected = (
                "equal" if column in attention or (attention == ("",) and column == "eager") else "none"
            )
            assert found[column] == expected, row
        assert (found["bf16"], found["patch"], found["batch"]) == ("equal", "equal", "any"), row
        assert float(found["rows"]) <= 1e-5, row


def test_a_page_is_made_of_its_rows() -> None:
    cells = ("one", "OneModel", *["equal"] * (len(COLUMNS) - 2))
    text = page({"one": Row(cells, ("z", "rot_q"), ("`pattern`: fused",))})
    assert "| one | OneModel | equal |" in text
    plus = ["+" if kind == "z" else "" for kind in KINDS]
    assert f"| {' | '.join(['one', *plus, '`rot_q`'])} |" in text
    assert "- **one**: `pattern`: fused." in text

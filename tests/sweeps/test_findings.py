"""What was found, how sure that is, and what it cost, in sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conewise.anatomy.places import Place
from conewise.report.story import Story
from conewise.sweeps.findings import certainty, cost, finding
from conewise.sweeps.result import Result
from tests.sweeps.small import model, sweep_over


@pytest.fixture(scope="module")
def result() -> Result:
    return sweep_over(model()).run(verify=2)


def with_effects(result: Result, effects: list[float], span: float = 1.0, **changes: Any) -> Result:
    """The same result with these effects of its six cells: heads 0.0, 0.1, 1.0, 1.1, MLPs 0 and 1."""
    base = torch.zeros(1, dtype=torch.float64)
    table = torch.tensor([effects], dtype=torch.float64)
    return replace(result, table=table, base=base, source=base + span, **changes)


def test_a_finding_names_the_sites_with_the_largest_shares(result: Result) -> None:
    found = finding(with_effects(result, [0.0, 0.25, 0.5, -0.2, 0.01, 0.0]))
    assert found == (
        f"Head 1.0 alone accounts for 50% of the difference in {result.metrics[0]} (base 0, source 1); "
        "head 0.1 accounts for 25%; head 1.1 has the opposite effect, 20%."
    )


def test_what_is_as_good_as_another_prompt_is_told_last(result: Result) -> None:
    found = finding(with_effects(result, [0.0, 0.0, 0.5, 0.0, 1.01, 0.0]))
    assert found.startswith("Head 1.0 alone accounts for 50% of")
    assert found.endswith("; MLP 0 accounts for all of it, as any change of the words would.")


@pytest.mark.parametrize(("base", "verb"), [("corrupted", "restores"), ("clean", "removes")])
def test_the_verb_is_that_of_the_direction(result: Result, base: str, verb: str) -> None:
    story = Story("tiny", base=base, source="clean" if base == "corrupted" else "corrupted")
    found = finding(with_effects(result, [0.0, 0.0, 0.5, 0.0, 0.0, 0.0], story=story))
    assert found.startswith(f"Head 1.0 alone {verb} 50% of the difference")


def test_without_a_source_there_are_amounts(result: Result) -> None:
    found = finding(replace(with_effects(result, [0.0, -2.0, 1.0, 0.0, 0.0, 0.0]), source=None))
    assert found == f"Head 0.1 moves {result.metrics[0]} most, by -2 (base 0); head 1.0 by +1."


def test_nothing_found_is_said(result: Result) -> None:
    assert finding(with_effects(result, [0.0] * 6)) == f"No site changes {result.metrics[0]} (base 0)."
    assert finding(with_effects(result, [float("nan")] * 6)).startswith("Nothing is known of ")


def test_how_sure_it_is(result: Result) -> None:
    prompts = result.per_prompt.shape[-1]
    assert certainty(result).startswith(f"{prompts} prompts; 95% interval of ")
    assert certainty(result).endswith("; 2 random sites were run again, and agree.")
    assert "not verified yet" in certainty(replace(result, verification=None))
    assert "approximate (atp)" in certainty(replace(result, method="atp"))


def test_what_it_cost(result: Result) -> None:
    assert cost(result).startswith(f"6 worlds, {result.ledger.node_evaluations:,} node evaluations, ")


def test_the_name_of_a_site_is_written_as_it_is(result: Result) -> None:
    assert finding(with_effects(result, [0.0, 0.0, 0.0, 0.0, 0.0, 2.0])).startswith("MLP 1 alone ")
    part = result.spreads[0]
    renamed = replace(
        part, cells=tuple(replace(cell, places=(Place("sae.latents"),)) for cell in part.cells[:4])
    )
    found = finding(with_effects(replace(result, spreads=(renamed, result.spreads[1])), [0.5, 0, 0, 0, 0, 0]))
    assert found.startswith("sae.latents alone accounts for 50% of")

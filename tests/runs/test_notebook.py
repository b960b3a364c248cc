"""A real notebook, executed by a real kernel: what is stored under each cell."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parents[2]

CELLS = {
    "setup": """
        import warnings
        warnings.simplefilter("ignore")  # tqdm's, which misses its widgets
        import torch
        from conewise import status
        from tests.sweeps.small import model, prompts, slow_metric, sweep_over
        status.PATIENCE = 600
        small = model()
        bases = [{"input_ids": prompts(number, 2)} for number in range(8)]
        sweep = sweep_over(small, base=bases, source="zero", metric=slow_metric)
    """,
    "slow capture": """
        status.PATIENCE = 0
        _ = model()
    """,
    "bar": "result = sweep.run(evaluator='serial', progress=True)",
    "unwatched": "_ = sweep.run(evaluator='serial', progress=False)",
    "long": """
        from conewise.jobs import progress
        progress.PATIENCE = 0.05
        _ = sweep.run(evaluator='serial')
    """,
    "short": """
        progress.PATIENCE = 600
        _ = sweep.run(evaluator='serial')
    """,
    "cut off": """
        try:
            with progress.bar(True, 10, torch.device("cpu")) as tell:
                tell(4)
                1 / 0
        except ZeroDivisionError:
            pass
    """,
    "model": "small",
    "sites": "small.sites",
    "plan": "sweep.plan()",
    "result": "result",
    "figure": "result.plot()",
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[Any]]:
    sources = [dedent(source).strip() for source in CELLS.values()]
    cells = [new_code_cell(source) for source in sources]  # type: ignore[no-untyped-call]
    notebook = new_notebook(cells=cells)  # type: ignore[no-untyped-call]
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}})
    kernel = client.create_kernel_manager()
    kernel.transport = "ipc"
    client.execute()
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def data(outputs: list[Any]) -> Any:
    (output,) = outputs
    return output.data


def test_a_capture_is_one_output_with_its_phases(outputs: dict[str, list[Any]]) -> None:
    (line,) = outputs["slow capture"]
    assert line.output_type == "display_data"
    assert line.data["text/plain"].startswith("capturing GPT2LMHeadModel: exporting ")


@pytest.mark.parametrize("name", ["bar", "long"])
def test_a_bar_is_one_output_that_ends_full(outputs: dict[str, list[Any]], name: str) -> None:
    (bar,) = outputs[name]
    assert bar.output_type == "display_data"
    assert bar.data["text/plain"].startswith("sweeping 48/48 cells in 0:0")
    assert '<progress value="48" max="48"' in bar.data["text/html"]


@pytest.mark.parametrize("name", ["setup", "unwatched", "short"])
def test_nothing_is_shown_that_nobody_waits_for(outputs: dict[str, list[Any]], name: str) -> None:
    assert outputs[name] == []


def test_a_bar_says_where_a_run_was_cut_off(outputs: dict[str, list[Any]]) -> None:
    assert data(outputs["cut off"])["text/plain"].startswith("sweeping stopped at 4/10 cells")


@pytest.mark.parametrize("name", ["model", "sites", "plan", "result"])
def test_things_are_shown_as_tables(outputs: dict[str, list[Any]], name: str) -> None:
    shown = data(outputs[name])
    assert "<table>" in shown["text/html"]
    assert shown["text/plain"]


def test_a_figure_is_shown_as_a_figure(outputs: dict[str, list[Any]]) -> None:
    shown = data(outputs["figure"])
    drawn = shown["application/vnd.plotly.v1+json"]
    assert [trace["type"] for trace in drawn["data"]] == ["heatmap", "bar"]

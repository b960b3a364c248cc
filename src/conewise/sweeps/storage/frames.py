"""Results as tidy tables, and as Parquet files."""

from __future__ import annotations

import io
from typing import Any

from conewise.anatomy.places import EdgePlace
from conewise.anatomy.selectors import has_one_writer
from conewise.extras import needs
from conewise.program.tensors import Tensor
from conewise.sweeps.storage.codec import unpacked
from conewise.sweeps.storage.result_data import ResultData

with needs("tables"):
    import pandas as pd

TYPES: dict[str, str] = {
    "site": "str",
    "kind": "str",
    "layer": "Int64",
    "head": "Int64",
    "pos": "Int64",
    "metric": "str",
    "value": "float64",
    "base": "float64",
    "source": "float64",
    "effect": "float64",
    "normalised": "float64",
}
"""The columns of a result's table, in order; missing is <NA> in the numbers of places and NaN in values."""


def frame(result: ResultData) -> pd.DataFrame:
    """One row for each metric and cell, averaged over prompts."""
    return _frame(result, result.table, result.base, result.source)


def prompts_frame(result: ResultData) -> pd.DataFrame:
    """One row for each prompt, metric and cell; base and source are missing where they are not known."""
    base, source = result.base_per_prompt, result.source_per_prompt
    frames = []
    for prompt in range(result.per_prompt.shape[-1]):
        one = _frame(
            result,
            result.per_prompt[..., prompt],
            None if base is None else base[:, prompt],
            None if source is None else source[:, prompt],
        )
        one.insert(len(one.columns), "prompt", prompt)
        frames.append(one)
    return pd.concat(frames, ignore_index=True)


def _ends(name: str) -> tuple[str, str]:
    """Writer and reader of an edge, by its name."""
    writer, _, reader = name.partition("->")
    return writer, reader.partition("@")[0]


def _other_axes(result: ResultData) -> dict[str, tuple[list[Any], str]]:
    """A column for each axis that not every table has, by name: its numbers or labels, and of what type."""
    known = {"site", "edge", "pair", "kv_head", *TYPES}
    found: dict[str, tuple[list[Any], str]] = {}
    for part, start in result.parts():
        axes = dict.fromkeys(axis for cell in part.cells for axis in cell.at)
        for axis in dict.fromkeys((*axes, *part.labels)):
            if axis in known:
                continue
            values, _ = found.setdefault(axis, ([None] * len(result.cells), "Int64"))
            named = part.labels.get(axis)
            for number, cell in enumerate(part.cells):
                at = cell.at.get(axis, number if axis in part.axes[:1] else None)
                values[start + number] = named[at] if named is not None and at is not None else at
            if named is not None:
                found[axis] = [None if one is None else str(one) for one in values], "str"
    return found


def _frame(result: ResultData, table: Tensor, base: Tensor | None, source: Tensor | None) -> pd.DataFrame:
    cells, metrics = result.cells, result.metrics
    places: dict[str, list[Any]] = {
        "site": [cell.name for cell in cells],
        "kind": [cell.kind for cell in cells],
        "layer": [cell.at.get("layer") for cell in cells],
        "head": [cell.at.get("head", cell.at.get("kv_head")) for cell in cells],
        "pos": [cell.at.get("pos") for cell in cells],
    }
    columns: dict[str, list[Any]] = {name: column * len(metrics) for name, column in places.items()}
    columns["metric"] = [name for name in metrics for _ in cells]
    columns["value"] = table.flatten().tolist()
    for name, runs in (("base", base), ("source", source)):
        known = [None] * len(metrics) if runs is None else runs.tolist()
        columns[name] = [value for value in known for _ in cells]
    extra = _other_axes(result)
    found = pd.DataFrame(columns).astype({name: kind for name, kind in TYPES.items() if name in columns})
    found["effect"] = found["value"] - found["base"]
    span = found["source"] - found["base"]
    found["normalised"] = found["effect"] / span.where(span != 0)
    ordered = found[list(TYPES)]
    for name, (values, kind) in extra.items():
        place = ordered.columns.get_loc("metric")
        assert isinstance(place, int)
        ordered.insert(place, name, pd.Series(values * len(metrics), dtype=kind, index=ordered.index))
    if result.method:
        ordered = ordered.assign(method=pd.Series(result.method, dtype="str", index=ordered.index))
    if any(isinstance(place, EdgePlace) for cell in cells for place in cell.places[:1]):
        is_edge = [has_one_writer(cell.places) for cell in cells]
        ends = [
            _ends(name) if one else (None, None) for name, one in zip(places["site"], is_edge, strict=True)
        ]
        for at, (name, column) in enumerate((("writer", 0), ("reader", 1)), start=1):
            texts = pd.Series([end[column] for end in ends] * len(metrics), dtype="str", index=ordered.index)
            ordered.insert(at, name, texts)
    return ordered


with needs("tables"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

_MOST_VALUES = 10**8
"""Values of single prompts that are read where nothing says how many there are."""


def values_of(result: ResultData) -> bytes:
    """The file, for a result."""
    table = pa.Table.from_pandas(frame(result), preserve_index=False)
    prompts = pa.array(result.per_prompt.flatten(0, 1).tolist(), pa.list_(pa.float64()))
    written = io.BytesIO()
    pq.write_table(table.append_column("per_prompt", prompts), written)
    return written.getvalue()


def read_values(values: bytes, rows: int, prompts: int | None) -> tuple[Tensor, Tensor]:
    """The values [row], and those of each prompt [row, prompt], of a table that must have so many.

    How much there is to read is looked at first: a small file can hold any number of equal values. Where the
    number of prompts is not known, it is bounded. Raises ValueError and OSError for what cannot be.
    """
    try:
        return _read(values, rows, prompts)
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def _read(values: bytes, rows: int, prompts: int | None) -> tuple[Tensor, Tensor]:
    file = pq.ParquetFile(io.BytesIO(values))
    found = file.metadata
    if found.num_rows != rows:
        raise ValueError(f"it has {found.num_rows:,} rows, and its manifest tells of {rows:,} values")
    held = {"value": 0, "per_prompt": 0}
    for group in range(found.num_row_groups):
        for place in range(found.num_columns):
            column = found.row_group(group).column(place)
            name = column.path_in_schema.partition(".")[0]
            if name in held:
                held[name] += column.num_values
    of_prompts = held["per_prompt"]
    is_whole = of_prompts == rows * prompts if prompts is not None else 0 < of_prompts <= _MOST_VALUES
    if held["value"] != rows or of_prompts % rows or not is_whole:
        raise ValueError(
            f"it has {held['value']:,} values, and {of_prompts:,} of single prompts, in {rows:,} rows"
        )
    table = file.read(columns=list(held))
    single = pc.list_flatten(table["per_prompt"].combine_chunks())
    columns = {"value": table["value"], "per_prompt": single}
    for name, column in columns.items():
        if column.type != pa.float64() or column.null_count or len(column) != held[name]:
            raise ValueError(f"{name} is not a column of {held[name]:,} numbers")
    lengths = pc.list_value_length(table["per_prompt"])
    if pc.count_distinct(lengths).as_py() != 1:
        raise ValueError("the values are not all of equally many prompts")
    flat = [unpacked(column.to_numpy().tobytes(), (-1,)) for column in columns.values()]
    return flat[0], flat[1].reshape(rows, -1)

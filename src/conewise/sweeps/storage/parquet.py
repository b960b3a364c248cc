"""The values of a result as a Parquet file: its table, with one more column for the values of each prompt."""

from __future__ import annotations

import io

from conewise.extras import needs
from conewise.program.tensors import Tensor
from conewise.sweeps.storage.frames import frame
from conewise.sweeps.storage.result_data import ResultData
from conewise.sweeps.storage.tensor_packing import unpacked

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

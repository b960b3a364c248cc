"""Results on disk: a folder with the values as Parquet, and a manifest as JSON that says all about them.

`values.parquet` is the table of `Result.to_dataframe()` with one more column, `per_prompt`, so that other
programs read it as it is. The manifest is written last: a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conewise.errors import SweepError
from conewise.frontends.torch.packing import from_rows
from conewise.frontends.torch.tensors import Tensor
from conewise.workloads import store
from conewise.workloads.files import conewise_version, write_whole
from conewise.workloads.frames import frame
from conewise.workloads.places import Index, Place
from conewise.workloads.plan import SweepPlan
from conewise.workloads.result import CellCheck, Result, SweepLedger
from conewise.workloads.selectors import Cell, Spread

MANIFEST, VALUES = "manifest.json", "values.parquet"
KIND = "conewise result"
FORMAT = 1


def save(result: Result, folder: Path) -> Path:
    """Write a result to a folder that holds none yet; the folder's other files stay as they are."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (MANIFEST, VALUES):
            if (folder / name).exists():
                raise SweepError(
                    f"{folder} holds {name} already; it was left as it is. Save to another folder, or delete "
                    "the old result first."
                )
        values = _values(result)
        write_whole(folder / VALUES, values)
        manifest = _manifest(result, hashlib.sha256(values).hexdigest())
        text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(folder / MANIFEST, f"{text}\n".encode())
    except OSError as error:
        raise SweepError(f"the result cannot be saved in {folder}: {error.strerror or error}.") from None
    return folder


def is_result(folder: Path) -> bool:
    """Whether a folder was written by `save`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == KIND


def load_result(folder: str | Path) -> Result:
    """The result that was saved in a folder, equal to it bit for bit. It has no model at hand.

    Raises SweepError when there is none, or when it is damaged or of a newer version.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    try:
        values = (folder / VALUES).read_bytes()
    except OSError as error:
        raise _damaged(folder, f"{VALUES} cannot be read ({error.strerror})") from None
    if hashlib.sha256(values).hexdigest() != manifest.get("values_sha256"):
        raise _damaged(folder, f"{VALUES} does not have the checksum that {MANIFEST} tells")
    try:
        return _result(manifest, pq.read_table(io.BytesIO(values)))
    except (KeyError, TypeError, ValueError, AttributeError, pa.ArrowException) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be understood ({type(error).__name__}: {error})") from None


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / store.FILE).is_file():
            raise SweepError(
                f"{folder} holds the store of a sweep, and no saved result. Make the same sweep and call "
                f"`sweep.run(out={str(folder)!r}, resume=True)`: what is stored is not computed again. Then "
                "save the result."
            )
        raise SweepError(f"{folder} holds no saved result: there is no {MANIFEST} in it.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise SweepError(f"{path} is not the manifest of a saved result.")
    if not isinstance(manifest.get("format"), int) or manifest["format"] > FORMAT:
        raise SweepError(
            f"{folder} has the format {manifest.get('format')}, and this version of conewise reads up to "
            f"{FORMAT}. Load it with the version that wrote it (conewise {manifest.get('conewise')})."
        )
    return manifest


def _damaged(folder: Path, what: str) -> SweepError:
    return SweepError(f"the result in {folder} is damaged: {what}. Put a sound copy in its place.")


def _values(result: Result) -> bytes:
    table = pa.Table.from_pandas(frame(result), preserve_index=False)
    prompts = pa.array(result.per_prompt.flatten(0, 1).tolist(), pa.list_(pa.float64()))
    written = io.BytesIO()
    pq.write_table(table.append_column("per_prompt", prompts), written)
    return written.getvalue()


def _manifest(result: Result, checksum: str) -> dict[str, Any]:
    return {
        "kind": KIND,
        "format": FORMAT,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv) if sys.argv and sys.argv[0] else None,
        "conewise": conewise_version(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "sweep": dict(result.provenance),
        "plan": asdict(result.plan),
        "measured": asdict(result.ledger),
        "verification": None if result.verification is None else asdict(result.verification),
        "metrics": list(result.metrics),
        # Hexadecimal, because a metric may be infinite, which JSON cannot say.
        "base": _exact(result.base),
        "source": _exact(result.source),
        "base_per_prompt": _exact(result.base_per_prompt),
        "source_per_prompt": _exact(result.source_per_prompt),
        "parts": [_part(part) for part in result.spreads],
        "values_sha256": checksum,
    }


def _result(manifest: Mapping[str, Any], table: pa.Table) -> Result:
    spreads = tuple(_spread(part, number) for number, part in enumerate(manifest["parts"]))
    metrics, cells = tuple(manifest["metrics"]), sum(len(spread.cells) for spread in spreads)
    values = from_rows(table["value"].to_pylist()).reshape(len(metrics), cells)
    prompts = from_rows(table["per_prompt"].to_pylist()).reshape(len(metrics), cells, -1)
    plan, base = dict(manifest["plan"]), _tensor(manifest["base"])
    if base is None:
        raise ValueError("the base has no metrics")
    verification = manifest["verification"]
    return Result(
        SweepPlan(**{**plan, "chunks": tuple(plan["chunks"])}),
        SweepLedger(**manifest["measured"]),
        spreads,
        metrics,
        values,
        prompts,
        base,
        _tensor(manifest["source"]),
        manifest["sweep"],
        None if verification is None else CellCheck(**verification),
        base_per_prompt=_tensor(manifest["base_per_prompt"]),
        source_per_prompt=_tensor(manifest["source_per_prompt"]),
    )


def _exact(numbers: Tensor | None) -> Any:
    """Nested lists of numbers with all their bits, as text."""
    return None if numbers is None else _mapped(numbers.tolist(), float.hex)


def _tensor(numbers: Any) -> Tensor | None:
    return None if numbers is None else from_rows(_mapped(numbers, float.fromhex))


def _mapped(numbers: Any, function: Any) -> Any:
    return [_mapped(item, function) for item in numbers] if isinstance(numbers, list) else function(numbers)


def _part(spread: Spread) -> dict[str, Any]:
    return {
        "name": spread.name,
        "axes": list(spread.axes),
        "coordinates": [list(along) for along in spread.coordinates],
        "cells": [
            {"at": dict(cell.at), "places": [_place(place) for place in cell.places]} for cell in spread.cells
        ],
    }


def _spread(part: Mapping[str, Any], number: int) -> Spread:
    cells = tuple(
        Cell(tuple(map(_as_place, cell["places"])), number, MappingProxyType(cell["at"]))
        for cell in part["cells"]
    )
    return Spread(part["name"], tuple(part["axes"]), tuple(map(tuple, part["coordinates"])), cells)


def _place(place: Place) -> dict[str, Any]:
    return {
        "name": place.name,
        "layer": place.layer,
        "stack": place.stack,
        "part": {axis: _index(index) for axis, index in place.part.items()},
    }


def _as_place(given: Mapping[str, Any]) -> Place:
    part = {axis: _as_index(index) for axis, index in given["part"].items()}
    return Place(given["name"], given["layer"], given["stack"], MappingProxyType(part))


def _index(index: Index) -> Any:
    if isinstance(index, slice):
        return {"slice": [index.start, index.stop, index.step]}
    return index if isinstance(index, int) else list(index)


def _as_index(index: Any) -> Index:
    if isinstance(index, dict):
        return slice(*index["slice"])
    return tuple(index) if isinstance(index, list) else int(index)

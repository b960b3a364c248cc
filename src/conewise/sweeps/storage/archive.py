"""Results on disk: a folder with the values as Parquet, and a manifest as JSON that says all about them.

`values.parquet` is the table of `Result.to_dataframe()` with one more column, `per_prompt`, so that other
programs read it as it is. The manifest is written last: a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conewise.anatomy.places import EdgePlace, Place, SourcedPlace
from conewise.anatomy.selectors import Cell, Spread
from conewise.errors import Argument, SweepError
from conewise.files import KIND, Format, read_json, write_whole
from conewise.jobs import store
from conewise.program.foreign import within_memory
from conewise.program.tensors import Tensor
from conewise.runs.metrics import Vector
from conewise.sweeps.execution.reading import SweepLedger
from conewise.sweeps.planning.plan import PlanCosts, SweepPlan
from conewise.sweeps.storage.codec import decoded, from_rows, plain
from conewise.sweeps.storage.result_data import CellCheck, Missing, ResultData

MANIFEST, VALUES = "manifest.json", "values.parquet"
FORMAT = Format("conewise result", 1)

_SEALED = (
    *("metrics", "base", "source", "base_per_prompt", "source_per_prompt"),
    *("parts", "values_sha256", "method", "missing"),
)
"""The parts of a manifest that its own checksum is over; the rest is about how the result came about."""

_LARGEST = 2**31
"""No coordinate of a site is as large as this: pages have 32 bits for each."""


def save(
    result: ResultData,
    folder: Path,
    *,
    unfinished: bool = False,
    trace: Mapping[str, Any] | None = None,
) -> Path:
    """Write a result to a folder that holds none yet; the folder's other files stay as they are.

    The manifest is written last. Values without one were left by a process that died while it saved: they
    are replaced where they are the same, or where `unfinished` says that they are. `trace` is what a causal
    trace has beside its result.
    """
    from conewise.sweeps.storage.frames import values_of  # noqa: PLC0415  # needs pyarrow

    try:
        folder.mkdir(parents=True, exist_ok=True)
        values = values_of(result)
        taken = [name for name in (MANIFEST, VALUES) if (folder / name).exists()]
        if taken == [VALUES] and (unfinished or (folder / VALUES).read_bytes() == values):
            taken = []
        if taken:
            raise SweepError(
                f"{folder} holds {taken[0]} already; it was left as it is. Save to another folder, or delete "
                "the old result first."
            )
        write_whole(folder / VALUES, values)
        manifest = _manifest(result, hashlib.sha256(values).hexdigest(), trace)
        text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(folder / MANIFEST, f"{text}\n".encode())
    except OSError as error:
        raise SweepError(f"the result cannot be saved in {folder}: {error.strerror or error}.") from None
    return folder


def is_result(folder: Path) -> bool:
    """Return whether a folder was written by `save`, to its end; what is there may be damaged."""
    if (folder / MANIFEST).is_file() and (folder / VALUES).is_file():
        return True
    try:
        manifest = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get(KIND) == FORMAT.kind


def read_result(folder: str | Path) -> ResultData:
    """The result that was saved in a folder, equal to it bit for bit. It has no model at hand.

    Raises SweepError when there is none, or when it is damaged; FormatError for one of a newer version.
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
        with within_memory(f"the result in {folder}"):
            result = _result(folder, manifest, values)
    except KeyError as error:
        raise _damaged(folder, f"{MANIFEST} cannot be understood: something in it has no {error}") from None
    except ValueError as error:
        raise _damaged(folder, f"{MANIFEST} cannot be understood: {error}") from None
    # Last, because what is wrong in particular says more.
    if manifest.get("sha256") != _checksum(manifest):
        raise _damaged(folder, f"{MANIFEST} does not have the checksum that it was written with")
    return result


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        if store.is_store(folder):
            raise SweepError(
                f"{folder} holds the store of a sweep, and no saved result. Run the same sweep with this "
                "folder as ",
                Argument("out"),
                " and with ",
                Argument("resume", True),
                ": what is stored is not computed again. Then save the result.",
            )
        raise SweepError(f"{folder} holds no saved result: there is no {MANIFEST} in it.")
    try:
        manifest = read_json(path)
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get(KIND) != FORMAT.kind:
        raise SweepError(f"{path} is not the manifest of a saved result.")
    try:
        FORMAT.expect(manifest, str(path))
    except ValueError as error:
        raise _damaged(folder, f"{MANIFEST} cannot be understood: {error}") from None
    return manifest


def _damaged(folder: Path, what: str) -> SweepError:
    return SweepError(f"the result in {folder} is damaged: {what}. Put a sound copy in its place.")


def trace_in(folder: Path) -> Mapping[str, Any] | None:
    """Return what a causal trace has beside its result, of a folder that `read_result` has read."""
    found = _read_manifest(folder).get("trace")
    return found if isinstance(found, Mapping) else None


def _manifest(result: ResultData, checksum: str, trace: Mapping[str, Any] | None) -> dict[str, Any]:
    whole = {
        **FORMAT.header(),
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv) if sys.argv and sys.argv[0] else None,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "sweep": dict(result.provenance),
        "plan": result.plan.costs(),
        "measured": asdict(result.ledger),
        "verification": None if result.verification is None else asdict(result.verification),
        "metrics": list(result.metrics),
        **({"approximate": True, "method": result.method} if result.method else {}),
        **({"missing": [asdict(one) for one in result.missing]} if result.missing else {}),
        **({"vectors": [asdict(one) for one in result.vectors]} if result.vectors else {}),
        # Hexadecimal, because a metric may be infinite, which JSON cannot say.
        "base": _exact(result.base),
        "source": _exact(result.source),
        "base_per_prompt": _exact(result.base_per_prompt),
        "source_per_prompt": _exact(result.source_per_prompt),
        "parts": [_part(part) for part in result.spreads],
        "values_sha256": checksum,
        **({} if trace is None else {"trace": dict(trace)}),
    }
    return {**whole, "sha256": _checksum(whole)}


def _checksum(manifest: Mapping[str, Any]) -> str:
    """A checksum over what the numbers of a result are, and what they are of."""
    sealed = {name: manifest.get(name) for name in _SEALED}
    sealed |= {name: manifest[name] for name in ("trace", "vectors") if name in manifest}  # 0.1.0 had none
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def _result(folder: Path, manifest: Mapping[str, Any], values: bytes) -> ResultData:
    """The result; every count and type is looked at. Raises KeyError and ValueError for what cannot be."""
    from conewise.sweeps.storage.frames import read_values  # noqa: PLC0415  # needs pyarrow

    parts = manifest["parts"]
    if not isinstance(parts, list) or not parts:
        raise ValueError("parts is not a list of at least one")
    spreads = tuple(_spread(part, number) for number, part in enumerate(parts))
    metrics: tuple[str, ...] = decoded(manifest["metrics"], tuple[str, ...], "metrics")
    if not metrics or len(set(metrics)) < len(metrics):
        raise ValueError("metrics is not a list of at least one, each of its own name")
    cells = sum(len(spread.cells) for spread in spreads)
    base_per_prompt = _tensor(manifest["base_per_prompt"], "base_per_prompt", len(metrics), None)
    source_per_prompt = _tensor(manifest["source_per_prompt"], "source_per_prompt", len(metrics), None)
    base = _tensor(manifest["base"], "base", len(metrics))
    if base is None:
        raise ValueError("base has no metrics")
    try:
        known = None if base_per_prompt is None else base_per_prompt.shape[-1]
        table, per_prompt = read_values(values, len(metrics) * cells, known)
    except (ValueError, OSError) as error:
        raise _damaged(folder, f"{VALUES} cannot be understood: {error}") from None
    prompts = per_prompt.shape[-1]
    if source_per_prompt is not None and source_per_prompt.shape[-1] != prompts:
        found = source_per_prompt.shape[-1]
        raise ValueError(f"source_per_prompt is of {found} prompts, and the values are of {prompts}")
    sweep = manifest["sweep"]
    if not isinstance(sweep, dict):
        raise ValueError("sweep is not an object")
    return ResultData(
        SweepPlan(**decoded(manifest["plan"], PlanCosts, "plan").costs()),
        decoded(manifest["measured"], SweepLedger, "measured"),
        spreads,
        metrics,
        table.reshape(len(metrics), cells),
        per_prompt.reshape(len(metrics), cells, -1),
        base,
        _tensor(manifest["source"], "source", len(metrics)),
        sweep,
        decoded(manifest["verification"], CellCheck | None, "verification"),
        base_per_prompt=base_per_prompt,
        source_per_prompt=source_per_prompt,
        method=decoded(manifest.get("method", ""), str, "method"),
        missing=decoded(manifest.get("missing", []), tuple[Missing, ...], "missing"),
        vectors=_vectors(manifest, metrics),
    )


def _vectors(manifest: Mapping[str, Any], metrics: Sequence[str]) -> tuple[Vector, ...]:
    """The axes of each metric, where some are vectors. Raises ValueError where they are not those named."""
    found: tuple[Vector, ...] = decoded(manifest.get("vectors", []), tuple[Vector, ...], "vectors")
    if any(len(one.axes) != len(one.coordinates) for one in found) or (
        found and sum(one.size for one in found) != len(metrics)
    ):
        raise ValueError("vectors do not have as many numbers as there are metrics")
    return found


def _exact(numbers: Tensor | None) -> Any:
    """Nested lists of numbers with all their bits, as text."""
    return None if numbers is None else _mapped(numbers.tolist(), float.hex)


def _tensor(numbers: Any, where: str, *shape: int | None) -> Tensor | None:
    """The tensor of nested lists of numbers as text; None is of any length."""
    return None if numbers is None else from_rows(_numbers(numbers, where, shape))


def _numbers(value: Any, where: str, shape: Sequence[int | None]) -> Any:
    if not shape:
        try:
            return float.fromhex(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{where} holds {value!r:.40}, where a number as text is expected") from None
    if not isinstance(value, list) or len(value) != (len(value) if shape[0] is None else shape[0]):
        raise ValueError(f"{where} is not a list of {'numbers' if shape[0] is None else shape[0]}")
    return [_numbers(item, where, shape[1:]) for item in value]


def _mapped(numbers: Any, function: Any) -> Any:
    return [_mapped(item, function) for item in numbers] if isinstance(numbers, list) else function(numbers)


def _part(spread: Spread) -> dict[str, Any]:
    known = {name: plain(getattr(spread, name)) for name in ("name", "axes", "coordinates", "labels", "ends")}
    cells = [{"at": dict(cell.at), "places": [_place(one) for one in cell.places]} for cell in spread.cells]
    return {name: one for name, one in known.items() if one or name not in {"labels", "ends"}} | {
        "cells": cells
    }


def _spread(part: Any, number: int) -> Spread:
    where = f"parts[{number}]"
    _expect(isinstance(part, dict), f"{where} is not an object")
    own: list[Any] = part["cells"]
    _expect(isinstance(own, list), f"{where}.cells is not a list")
    found: Spread = decoded({**part, "cells": []}, Spread, where)
    sizes, axes = [len(along) for along in found.coordinates], found.axes
    count = math.prod(sizes)
    _expect(
        len(axes) == len(sizes) and count == len(own) > 0,
        f"{where} has {len(own)} cells, and {count} in its {len(axes)} axes",
    )
    for axis, named in found.labels.items():
        is_alike = axis in axes and len(named) == sizes[axes.index(axis)]
        _expect(is_alike, f"{where} has {len(named)} labels along {axis!r}")
    cells = tuple([_cell(cell, number, f"{where}.cells[{at}]") for at, cell in enumerate(own)])
    found = replace(found, cells=cells)
    is_alike = not found.ends or len(found.pairs()) == count
    _expect(is_alike, f"{where} has {count} cells, and {len(found.ends)} in pairs")
    return found


def _cell(cell: Any, number: int, where: str) -> Cell:
    _expect(isinstance(cell, dict), f"{where} is not an object")
    at, places = decoded(cell["at"], Mapping[str, int], f"{where}.at"), cell["places"]
    _expect(all(-_LARGEST <= index < _LARGEST for index in at.values()), f"{where} is at no such numbers")
    _expect(isinstance(places, list) and len(places) > 0, f"{where} has no list of places")
    return Cell(tuple([_as_place(one, f"{where}.places[{n}]") for n, one in enumerate(places)]), number, at)


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def _place(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = plain(place, whole=True)
    if isinstance(place, SourcedPlace):
        found["source"] = found.pop("number")
    return found


def _as_place(given: Any, where: str) -> Place:
    _expect(isinstance(given, dict), f"{where} is not an object")
    kind: type[Place] = EdgePlace if "edge" in given else Place
    if "source" in given:
        kind, given = SourcedPlace, {**given, "number": given["source"]}
    found: Place = decoded(given, kind, where)
    return found

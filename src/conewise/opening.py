"""`cw.open`: the result of any job, from the folder that its `save` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from conewise.arguments import checked
from conewise.attributing.approximation import Approximation
from conewise.circuits.circuit import Circuit
from conewise.circuits.circuit_files import CIRCUIT
from conewise.circuits.tracing import Trace
from conewise.errors import SweepError
from conewise.files import as_path, is_there
from conewise.generation.result import TEXTS, WrittenTexts, load_texts
from conewise.sweeps.result import Result, load_result
from conewise.sweeps.storage.archive import is_result, trace_in
from conewise.sweeps.training import Fitted, is_fit, load_fit


@checked
def open(folder: str | Path) -> Result | Trace | Circuit | Fitted | WrittenTexts:  # noqa: A001 - as said
    """Open a result that `result.save(folder)` wrote: equal to the original, bit for bit.

    The return value is a `Result`; an `Approximation` if values are estimated; a `Trace`; `Fitted`
    interventions; `WrittenTexts`; or a `Circuit`, from the folder of a search or from a circuit's file
    (.json, .pt). It holds no model. Raises SweepError if the folder holds no result or a damaged one,
    CircuitError for a damaged circuit, and FormatError for a file that a newer version wrote.
    """
    path = as_path(folder)
    is_file = path.suffix in {".json", ".pt"} and is_there(path, Path.is_file)
    if is_file or (not is_result(path) and is_there(path / CIRCUIT, Path.is_file)):
        return Circuit.load(path)
    if is_fit(path):
        return load_fit(path)
    if not is_result(path) and is_there(path / TEXTS, Path.is_file):
        return load_texts(path)
    found = load_result(path)
    if found.method:
        held = {one.name: getattr(found, one.name) for one in fields(Result)}
        about = found.origin.get("attribution")
        exact = about.get("exact", ()) if isinstance(about, Mapping) else ()
        return Approximation(**held, exact=tuple(map(str, exact)))
    if (settings := trace_in(path)) is None:
        return found
    try:
        return Trace.of(found, settings)
    except ValueError as error:
        raise SweepError(f"the trace in {path} cannot be understood: {error}.") from None

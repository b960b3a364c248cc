"""What a name or a folder stands for: a model with its weights, or the saved result of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

from conewise.arguments import checked
from conewise.errors import SweepError
from conewise.files import as_path, is_there
from conewise.models.load import KNOWN, Loaded
from conewise.sweeps.result import Result, load_result
from conewise.sweeps.storage.archive import is_result


@overload
def load(name: Literal["smollm2-135m", "tiny"], **how: Any) -> Loaded: ...
@overload
def load(name: str | Path, **how: Any) -> Loaded | Result: ...
@checked
def load(name: str | Path, **how: Any) -> Loaded | Result:
    """A model by its name, folder or GGUF file; or a `Result`, from a folder that `result.save` wrote.

    How a model is loaded: `dtype` ("float32", torch.bfloat16; as it was saved, unless given), `device`
    ("cuda"), `revision` of a name on the hub, `attn_implementation` ("eager" has attention scores as values),
    `trust_remote_code` (code beside the weights is run; off), `progress`, called with what is being done.
    A result is loaded as it is. Where a type checker should know which of the two it is, call
    `conewise.models.load.load` or `conewise.sweeps.result.load_result`.
    """
    folder = as_path(name)
    if str(name) in KNOWN or not is_there(folder, Path.is_dir) or not is_result(folder):
        from conewise.models.load import load as load_model  # noqa: PLC0415  # needs transformers

        return load_model(name, **how)
    if how:
        raise SweepError(
            f"{folder} holds a saved result, which is loaded as it is: leave out {', '.join(how)}."
        )
    return load_result(folder)

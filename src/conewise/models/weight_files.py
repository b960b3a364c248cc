"""Which files a model's weights may be read from: safetensors, in the model's own folder.

transformers reads what an index or a configuration names: another format, which may be a pickle, or a file
that lies elsewhere. So these names are looked at before it does.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import safe_open

from conewise.capturing.foreign import brief
from conewise.errors import LoadError
from conewise.reading import read_json

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_SAFE, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Find = Callable[[str], Path | None]
"""Where a file of the model lies, by its name there; None where the model has none of that name."""


@dataclass(frozen=True)
class WeightCount:
    """How many weights the files of a model hold, and in how many bytes."""

    tensors: int
    size: int


def check_weights(where: str, find: Find, named: object, *, is_folder: bool) -> WeightCount | None:
    """How many weights a model has; one is refused whose weights are not safetensors of its own.

    `named` is the file that the configuration says they are in, mostly None. The result is None where there
    are no weights: that is left for transformers to say. Raises LoadError.
    """
    found = _first_file(where, find, named)
    if found is None:
        return None
    if not found.name.endswith(_INDEX_SUFFIX):
        with safe_open(found, framework="pt") as weights:
            return WeightCount(len(weights.keys()), found.stat().st_size)
    files, size = _indexed(where, found)
    if not is_folder:  # transformers downloads them from the hub, all at once
        return None if size is None else WeightCount(len(files), size)
    shards = [shard for name in set(files) if (shard := find(name)) is not None]
    return WeightCount(len(files), sum(shard.stat().st_size for shard in shards))


def _first_file(where: str, find: Find, named: object) -> Path | None:
    """The file of the weights, or the index of them; None where there is none."""
    if named is None:
        return find(WEIGHTS) or find(INDEX)
    return find(_expect_own(where, "config.json", named, (_SAFE, _INDEX_SUFFIX)))


def check_dtypes(where: str, find: Find, named: object, module: Any) -> None:
    """Refuse whole numbers and 8-bit floats in the place of the floats of a module. Raises LoadError.

    transformers casts them. They are quantised weights, which mean nothing without their scales, and a
    configuration that says how to read them would have said so.
    """
    found = _first_file(where, find, named)
    if found is None or getattr(module.config, "quantization_config", None) is not None:
        return
    names = {found.name} if not found.name.endswith(_INDEX_SUFFIX) else set(_indexed(where, found)[0])
    floats = [name for name, one in module.named_parameters() if one.is_floating_point() and one.itemsize > 1]
    for file in sorted(names):
        if (path := find(file)) is None:
            continue
        with safe_open(path, framework="pt") as weights:
            dtypes = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
        for name, dtype in dtypes.items():
            if dtype in _FLOATS:
                continue
            # The base of a model and the model with its head name one weight with a prefix, or without.
            if any(f".{own}".endswith(f".{name}") or f".{name}".endswith(f".{own}") for own in floats):
                raise LoadError(
                    f"{where}: {name} in {file} is {dtype}, and the model computes with floats. These look "
                    "like quantised weights, and config.json has no quantization_config that says how to "
                    "read them. Fetch the model in float32, float16 or bfloat16, or with its whole config."
                )


_FLOATS = {"F64", "F32", "F16", "BF16"}


def files_in(folder: Path) -> Find:
    """The files of a folder. One that a link leads out of it is refused, but in the hub's own cache."""

    def find(name: str) -> Path | None:
        path = folder / name
        if not path.is_file():
            return None
        _expect_inside(folder, path)
        return path

    return find


def _indexed(where: str, index: Path) -> tuple[list[str], int | None]:
    """The files of the weights that an index names, all of which may be read; and their bytes, if known."""
    try:
        found: Any = read_json(index)
        names = list(found["weight_map"].values())
        size = (found.get("metadata") or {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{where}: {index.name} cannot be understood ({brief(error)}). It is JSON that maps each weight "
            'to its file: {"weight_map": {...}}. Fetch or save the model again.'
        ) from None
    files = [_expect_own(where, index.name, name, (_SAFE,)) for name in names]
    return files, size if type(size) is int else None


def _expect_own(where: str, by: str, name: object, suffixes: tuple[str, ...]) -> str:
    """The name, which is that of a file in the model's folder with one of these endings, or refused."""
    if not isinstance(name, str) or not name.endswith(suffixes):
        raise LoadError(
            f"{where}: {by} names {name!r} as a file of weights, and they are read from safetensors alone. "
            "Another format may be a pickle, which can run code when it is read. Save the model again with "
            "`module.save_pretrained(folder)`."
        )
    leaves = any(
        path.is_absolute() or path.drive or ".." in path.parts
        for path in (PurePosixPath(name), PureWindowsPath(name))
    )
    if leaves:
        raise LoadError(
            f"{where}: {by} names {name!r}, which lies outside of the model's folder, and nothing is read "
            "from there. Put the file into the folder, and its plain name into the index."
        )
    return name


def _expect_inside(folder: Path, path: Path) -> None:
    home, target = _real(folder), _real(path)
    if not any(target.is_relative_to(one) for one in (home, *_blobs(home))):
        raise LoadError(
            f"{path} is a link to {target}, outside of the folder {folder}, and nothing is read from there. "
            "Put the file itself into the folder, or give the folder in which all of its files lie."
        )


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _blobs(folder: Path) -> tuple[Path, ...]:
    """Where the files of a folder lie that is a snapshot in the hub's cache: its blobs, and the shared ones.

    The cache is CACHE/models--NAME/snapshots/COMMIT, and its files are links to CACHE/models--NAME/blobs,
    which may be links to CACHE/blobs.
    """
    repository = folder.parent.parent
    is_snapshot = folder.parent.name == "snapshots" and repository.name.startswith("models--")
    return (repository / "blobs", repository.parent / "blobs") if is_snapshot else ()


def check_adapter(where: str, find: Find, *, is_folder: bool) -> None:
    """Refuse an adapter that would be left out, or whose weights are not safetensors. Raises LoadError.

    An adapter lies beside a model and changes its numbers; transformers applies it where peft is installed.
    """
    if find(_ADAPTER) is None:
        return
    if importlib.util.find_spec("peft") is None:
        why = "which would be left out: the package peft, which applies adapters, is not installed here"
    elif not is_folder:
        why = "and the model that it changes is looked for elsewhere"
    elif find(_ADAPTER_WEIGHTS) is None:
        why = f"without {_ADAPTER_WEIGHTS}: its weights may be a pickle, which can run code when it is read"
    else:
        return
    raise LoadError(
        f"{where} holds an adapter ({_ADAPTER}), {why}. Merge it into its model once, and give the merged "
        "one: `PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)`."
    )

"""Files of a model, checked before anything is built from them: the cache folder, the hub, weights, settings.

Weights are safetensors. transformers builds what a configuration says, however large, and finds out
afterwards that the weights do not fit: one of a thousand million layers would keep it busy for days.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from weakref import WeakKeyDictionary

from safetensors import safe_open
from torch.nn.modules.module import (
    Module,
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from conewise.errors import LoadError
from conewise.extras import Late, expect, needs
from conewise.files import cache_folder, read_json
from conewise.program.foreign import brief

expect("hf", "transformers")  # named before the packages that it brings
with needs("hf"):
    from filelock import FileLock, Timeout

# -- the cache folder ----------------------------------------------------------------------

# Written last into an entry: the checksum of each of its files.
RECORD = "complete.json"


def cached(key: str, make: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """The entry `key`, made by `make(folder)` where it is not there yet or is damaged; `progress` says so.

    Of several processes that want one entry at the same time, one makes it and the others wait.
    Whatever `make` raises passes through, and leaves no entry.
    """
    parent = cache_folder() / "models"
    entry = parent / key
    if flaw(entry) is None:
        return entry
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(parent / f"{key}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("another process is converting this model: waiting for it")
            lock.acquire()
        try:
            wrong = flaw(entry)
            if wrong is not None:
                if entry.exists():
                    progress(f"the model in the cache is damaged ({wrong}): it is made again")
                _make(entry, make)
        finally:
            lock.release()
    except OSError as error:
        raise LoadError(
            f"the cache folder {parent} cannot be written: {error}. Make room there, or name another "
            "folder in the environment variable CONEWISE_CACHE."
        ) from error
    return entry


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    """Make `entry`. The caller holds its lock, so whatever stands there is a dead process's."""
    partial = entry.with_name(entry.name + ".partial")
    for leftover in (partial, entry):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
    partial.mkdir()
    try:
        make(partial)
        _seal(partial)
        partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _seal(folder: Path) -> None:
    """Write the record, and wait until all is on the disk: a rename must not arrive before its files."""
    checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    (folder / RECORD).write_text(json.dumps({"sha256": checksums}, indent=1), encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def flaw(entry: Path) -> str | None:
    """Return what is wrong with an entry, in words; None where it is whole.

    It is whole when it has its record, and in it just the files that the record lists, each with its
    checksum. All is read, which takes about a second for a gigabyte.
    """
    try:
        record = read_json(entry / RECORD)
        checksums = record["sha256"]
        if not isinstance(checksums, dict) or not checksums:
            return f"{RECORD} lists no files"
        held = {path.name for path in entry.iterdir() if not path.name.startswith(".")} - {RECORD}
        if held != set(checksums):
            return f"{min(held ^ set(checksums))} is missing, or was added"
        for name, checksum in checksums.items():
            if _checksum(entry / name) != checksum:
                return f"{name} does not have the checksum that it was written with"
    except OSError as error:
        return f"{Path(error.filename or RECORD).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{RECORD} cannot be understood: {brief(error)}"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


expect("hf", "huggingface_hub")
_hub: Any = Late("hf", "huggingface_hub")
_errors: Any = Late("hf", "huggingface_hub.errors")


def get_session() -> Any:
    """The client that the hub is asked with."""
    return _hub.get_session()


# What its client raises where no connection comes about. By name, for it has changed the library it uses.
_NOT_REACHED = {"ConnectError", "ConnectTimeout", "ProxyError"}


def why_not_reached() -> str | None:
    """Why the hub cannot be reached from here; None where it can.

    It is asked once, with the client and the patience that downloads have: those ask again and again for
    each file, which is right on a bad line and takes half a minute without any. A hub that is slow, or that
    refuses, is reached.
    """
    if _hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(_hub.constants.ENDPOINT, timeout=_hub.constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - whatever else goes wrong, downloads find out and say so
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & _NOT_REACHED:
            return f"no connection to {_hub.constants.ENDPOINT}: {error}"
    return None


def file_of(name: str, file: str, revision: str | None, *, local_only: bool) -> Path | None:
    """A file of a model of the hub, among earlier downloads or downloaded now; None where it has none."""
    how: dict[str, Any] = {"revision": revision, "local_files_only": local_only}
    try:
        return Path(_hub.hf_hub_download(name, file, **how))
    except _errors.LocalEntryNotFoundError:
        if local_only:
            return None
        raise
    except _errors.EntryNotFoundError:
        return None


def answer(error: BaseException) -> str:
    """Return the answer of the hub in a few words."""
    match error:
        case _errors.GatedRepoError():  # it is a RepositoryNotFoundError too
            return "there, access has to be asked for on the model's page; then log in with `hf auth login`"
        case _errors.RepositoryNotFoundError():
            return "there is no such model there, or a private one, for which to log in with `hf auth login`"
        case _errors.RevisionNotFoundError():
            return "the model there has no such revision"
    return brief(error)


INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_SAFE, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Find = Callable[[str], Path | None]
"""Returns the path of a file of the model by its name there; None where the model has none of that name."""


@dataclass(frozen=True)
class WeightCount:
    """The number of weights in the files of a model, and the bytes that they take."""

    tensors: int
    size: int


def check_weights(where: str, find: Find, named: object, *, is_folder: bool) -> WeightCount | None:
    """Count the weights of a model; refuse one whose weights are not safetensors of its own.

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
    """Return the folders that a snapshot in the hub's cache links to: its own blobs, and the shared ones.

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


# -- the configuration ----------------------------------------------------------------------

# Settings of which a configuration makes lists as long as they say, and more than any model has.
_COUNTS = re.compile(r"(num|n)_(\w+_)?(layers?|labels|classes|embeddings|queries|heads?|blocks|experts)")
_MOST = 10_000_000

# What every model has at least one of, where it says how many; as configurations write it, and as they are
# asked for it: other names of the same settings (`n_layer`, `d_model`) answer to these.
_AT_LEAST_ONE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
_WRITTEN = (*_AT_LEAST_ONE, "n_layer", "n_head", "n_embd")


def check_settings(where: str, path: Path) -> None:
    """Refuse a `config.json` that is not one, or has numbers that would be lists without end."""
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"{where}: config.json cannot be read ({brief(error)}). It is a JSON object of the model's "
            "settings; fetch it or save the model again."
        ) from None
    if not isinstance(settings, dict):
        raise LoadError(
            f"{where}: config.json holds {type(settings).__name__}, where an object of settings is expected. "
            "Fetch it or save the model again."
        )
    for name in _WRITTEN:
        if type(settings.get(name)) is int and settings[name] < 1:
            raise _impossible(where, name, settings[name], "it is 1 or more")
    for name, value in _numbers(settings):
        if _COUNTS.fullmatch(name) and value > _MOST:
            raise _impossible(where, name, value, f"no model has more than {_MOST:,}")


def check_counts(where: str, config: Any, held: WeightCount | None) -> None:
    """Refuse a configuration without layers, heads or width, or of far more layers than there are weights."""
    for part in (config, config.get_text_config()):
        for name in _AT_LEAST_ONE:
            value = getattr(part, name, None)
            if isinstance(value, int) and value < 1:
                raise _impossible(where, name, value, "it is 1 or more")
        layers = getattr(part, "num_hidden_layers", None)
        # Layers may share weights; but not hundreds of them.
        if held is not None and isinstance(layers, int) and layers > 100 + 10 * held.tensors:
            raise _impossible(
                where, "num_hidden_layers", layers, f"there are {held.tensors:,} weights in all"
            )


@contextmanager
def bounded(where: str, held: WeightCount | None) -> Iterator[None]:
    """Stop this thread where it builds far more than there are weights for. Raises LoadError.

    What is counted are modules, and the numbers in their parameters and buffers. What is put in the place of
    another counts as far as it is larger: transformers makes weights without memory first, then with it, and
    registers a tied one again each time it ties it.
    """
    if held is None:
        yield
        return
    thread, built, is_on = threading.get_ident(), Counter[str](), False
    places = WeakKeyDictionary[Module, Counter[str]]()
    most = {
        "modules": 1_000 + 500 * held.tensors,
        "parameters": 10_000_000 + 8 * held.size,  # the most that are packed into a byte are four
        "numbers in buffers": 2**28 + 8 * held.size,
    }

    def add(what: str, owner: Module, name: str, count: int) -> None:
        if not is_on or threading.get_ident() != thread:
            return
        at = places.setdefault(owner, Counter())
        built[what] += max(0, count - at[name])
        at[name] = max(count, at[name])
        if built[what] > most[what]:
            raise LoadError(
                f"{where}: config.json describes a model of more than {most[what]:,} {what}, and there are "
                f"{held.tensors:,} weights for it, in {held.size:,} bytes. It is damaged, or belongs to "
                "other weights: fetch or save the model again."
            )

    def tensors(what: str) -> Callable[[Module, str, Any], None]:
        return lambda owner, name, one: add(what, owner, name, 0 if one is None else one.numel())

    # They count only inside of `try`: one that an interruption keeps from being removed does nothing.
    hooks = (
        register_module_module_registration_hook(lambda owner, name, _: add("modules", owner, name, 1)),
        register_module_parameter_registration_hook(tensors("parameters")),
        register_module_buffer_registration_hook(tensors("numbers in buffers")),
    )
    try:
        is_on = True
        yield
    finally:
        is_on = False
        for hook in hooks:
            hook.remove()


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Every whole number in nested settings, by the name of the setting."""
    waiting: list[Any] = [settings]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield from ((name, value) for name, value in item.items() if type(value) is int)
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _impossible(where: str, name: str, value: int, why: str) -> LoadError:
    shown = f"{value:,}" if abs(value) < 10**30 else f"a number of {len(str(abs(value))):,} digits"
    return LoadError(
        f"{where}: config.json says {name} = {shown}, and {why}. Write the number that the weights were "
        "saved with, or fetch the model again."
    )

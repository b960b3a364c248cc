"""Captured programs in the cache folder, so that the next process need not trace the module again.

An entry is one safetensors file: the program as JSON in its header, and the constants that are in no weights
file as tensors. Nothing is unpickled: operations are looked up by name among torch's own, sizes are rebuilt
from a list of known expressions, and an entry that gives anything else, or whose checksum is wrong, counts as
none. Its name is a digest of all that determines the program.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions as torch_sizes

from conewise.errors import WeightsChangedError
from conewise.files import cache_folder, write_whole
from conewise.program.calls import Call
from conewise.program.lowering import WriteThrough
from conewise.program.records import (
    Dimensions,
    Input,
    LazySpec,
    ModuleCall,
    ModulePort,
    Program,
    Record,
    Ref,
    SizeRef,
    Source,
)
from conewise.program.sizes import SizeTable
from conewise.program.walk import bitwise_same
from conewise.version import __version__

FORMAT = 1
MOST_BYTES = 256 << 20
"""The entries together take no more than this; the ones that were used longest ago go first."""

MOST_CONSTANTS = 64 << 20
"""A program with larger constants is not kept."""

Value = Callable[[str], Any]
"""The tensor of a module, or of a weights file, by its name; None where there is none."""


class NotKeptError(Exception):
    """A program cannot be kept, or an entry does not give one; the reason is for developers."""


# -- values as JSON --------------------------------------------------------------------------
# Plain values and lists stand for themselves. Any other value is a row [kind, *parts] of a table, behind the
# rows of its parts, and {"row": its number} wherever it is: once, for many layers have few shapes and paths.

_FUNCTIONS = {
    f"operator.{one}": getattr(operator, one)
    for one in ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg")
}


def _operation(target: Any) -> str:
    named = next((name for name, function in _FUNCTIONS.items() if function is target), None)
    if named is None and not (isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"):
        raise NotKeptError(f"the operation {target}")
    return named or str(target)


@cache
def _target(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    space, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, packet), overload) if space == "aten" else None
    if not isinstance(found, torch._ops.OpOverload):
        raise NotKeptError(f"no operation {name}")
    return found


def _written(write: WriteThrough) -> list[Any]:
    packet = getattr(write.target, "overloadpacket", write.target)
    return [write.target, write.position, write.__name__ == str(packet.__name__)]


def _symbol(name: str, assumptions: Mapping[str, bool]) -> Any:
    if not (name.isascii() and name.isidentifier()):
        raise NotKeptError("a symbol without a name")
    return sympy.Symbol(name, **{str(one): bool(is_so) for one, is_so in assumptions.items()})


def _assumptions(symbol: Any) -> dict[str, bool]:
    return {name: is_so for name, is_so in symbol.assumptions0.items() if is_so is not None}


def _sizes(symbols: Mapping[str, Any], expressions: Sequence[Any], relations: Sequence[Any]) -> SizeTable:
    if not all(one.isascii() and one.isidentifier() for one in symbols):
        raise NotKeptError("a symbol without a name")
    table = SizeTable()
    table.__setstate__({"symbols": symbols, "expressions": expressions, "relations": relations})
    return table


def _of_torch(name: str, kind: type) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, kind):
        raise NotKeptError(f"no {kind.__name__} {name}")
    return found


def _fields_of(value: Any) -> list[Any]:
    return [getattr(value, one.name) for one in fields(value) if one.init]


_Kind = tuple[type, Callable[[Any], Iterable[Any]], Callable[..., Any]]
"""A class, the parts of a value of it, and what makes one of parts."""

_KINDS: dict[str, _Kind] = {
    "tuple": (tuple, list, lambda *parts: parts),
    "dict": (dict, lambda value: map(list, value.items()), lambda *pairs: dict(pairs)),
    "frozenset": (frozenset, sorted, lambda *parts: frozenset(parts)),
    "float": (float, lambda value: [str(value)], float),
    "slice": (slice, lambda value: [value.start, value.stop, value.step], slice),
    "device": (torch.device, lambda value: [str(value)], torch.device),
    "op": (torch._ops.OpOverload, lambda value: [_operation(value)], _target),
    "function": (type(len), lambda value: [_operation(value)], _target),
    "write": (
        WriteThrough,
        _written,
        lambda target, position, has_views: WriteThrough(target, position, has_views=has_views),
    ),
    "spec": (LazySpec, lambda value: [str(value), value.text], LazySpec),
    "sizes": (SizeTable, lambda value: value.__getstate__().values(), _sizes),
    "symbol": (sympy.Symbol, lambda value: [str(value), _assumptions(value)], _symbol),
    "integer": (sympy.Integer, lambda value: [int(value)], sympy.Integer),
    "rational": (sympy.Rational, lambda value: [int(value.p), int(value.q)], sympy.Rational),
    "truth": (type(sympy.true), lambda value: [bool(value)], lambda value: sympy.true & value),
}
_kind: Any
for _kind in (torch.dtype, torch.memory_format, torch.layout):
    _KINDS[_kind.__name__] = (_kind, lambda value: [str(value)[6:]], partial(_of_torch, kind=_kind))
for _kind in (Dimensions, Input, ModuleCall, ModulePort, Program, Record, Ref, SizeRef, Source):
    _KINDS[_kind.__name__] = _kind, _fields_of, _kind
for _name in ("Add", "Mul", "Pow", "Max", "Min", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not"):
    _KINDS[f"sympy.{_name}"] = getattr(sympy, _name), lambda value: value.args, getattr(sympy, _name)
for _name, _kind in vars(torch_sizes).items():
    if (
        isinstance(_kind, type)
        and issubclass(_kind, sympy.Basic)
        and _kind.__module__ == torch_sizes.__name__
    ):
        _KINDS[f"torch.{_name}"] = _kind, lambda value: value.args, _kind
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items()}
_NAMES[type(sympy.false)] = "truth"


class _Writer:
    """Writes values as JSON; `tensor` returns the parts of one."""

    def __init__(self, tensor: Callable[[Tensor], Sequence[Any]] | None = None) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._tensor = tensor

    def put(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in {bool, int, str} or (kind is float and math.isfinite(value)):
            return value
        if kind is list:
            return list(map(self.put, value))
        if isinstance(value, sympy.Rational):  # zero, one and a half have classes of their own
            kind = sympy.Integer if value.is_Integer else sympy.Rational
        if isinstance(value, Tensor) and self._tensor is not None:
            row = ["tensor", *map(self.put, self._tensor(value))]
        elif kind in _NAMES:
            row = [_NAMES[kind], *map(self.put, _KINDS[_NAMES[kind]][1](value))]
        else:
            raise NotKeptError(f"a {kind.__name__}")
        key = json.dumps(row)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return {"row": self._numbers[key]}


def _read_rows(rows: Iterable[Any], tensor: Callable[..., Tensor]) -> Any:
    """Return the value of the last row; `tensor` makes one of its parts."""
    made: list[Any] = []

    def value(found: Any) -> Any:
        if type(found) is dict:
            return made[found["row"]]
        return list(map(value, found)) if type(found) is list else found

    for kind, *parts in rows:
        read = tensor if kind == "tensor" else _KINDS[kind][2]
        made.append(read(*map(value, parts)))
    return made[-1]


def encoded(program: Program, is_own: Callable[[Source], bool]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a program as JSON has it, and the constants that no module has: those that are not `is_own`."""
    sources = {id(one.value): one for one in program.sources}
    kept = [one for one in program.sources if not is_own(one)]
    if sum(one.value.nbytes for one in kept) > MOST_CONSTANTS:
        raise NotKeptError("constants of many bytes")

    def tensor(value: Tensor) -> list[Any]:
        if id(value) not in sources:
            raise NotKeptError("a tensor that is no source")
        one = sources[id(value)]
        form = [value.requires_grad, list(value.shape), list(value.stride()), value.dtype, value.device]
        return [one.name, is_own(one), *form]

    spec = program.output_spec
    writer = _Writer(tensor)
    if not isinstance(spec, LazySpec):
        program = replace(program, output_spec=LazySpec(str(spec), pytree.treespec_dumps(spec)))
    writer.put(program)
    weights = {one.name: [is_own(one), one.is_parameter, one.value.requires_grad] for one in program.sources}
    found = {"rows": writer.rows, "weights": weights, "name": program.module_name}
    return found, {one.name: one.value.detach().cpu().contiguous().clone() for one in kept}


def decoded(found: Mapping[str, Any], own: Value, kept: Mapping[str, Tensor]) -> Program:
    """Return the program that was encoded, with the tensors that are there now: a module's own, and others.

    Raises NotKeptError where these have another dtype, shape or device than they had.
    """

    def tensor(name: str, is_own: bool, has_gradient: bool, *form: Any) -> Tensor:
        value = own(name) if is_own else kept[name].to(form[-1])
        if not isinstance(value, Tensor) or form != (
            *(list(value.shape), list(value.stride()), value.dtype, value.device),
        ):
            raise NotKeptError(f"{name} is another kind of tensor")
        if value.requires_grad != has_gradient:
            raise NotKeptError(f"{name} is not trained as it was")
        return value

    program = _read_rows(found["rows"], tensor)
    if not isinstance(program, Program):
        raise NotKeptError("no program")
    return program


# -- how it is called ------------------------------------------------------------------------


def _signature(forward: inspect.Signature) -> list[Any]:
    """The arguments of a forward; a default is None where it is no plain value, for then it is not read."""
    rows = []
    for name, one in forward.parameters.items():
        has_default = one.default is not inspect.Parameter.empty
        plain = one.default if isinstance(one.default, bool | int | float | str | None) else None
        rows.append([name, one.kind.name, has_default, plain if has_default else None])
    return rows


def _forward(rows: Sequence[Any]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                getattr(inspect.Parameter, kind),
                default=value if has_default else inspect.Parameter.empty,
            )
            for name, kind, has_default, value in rows
        ]
    )


_THRESHOLDS = ("window", "chunk", "position", "length", "block", "size", "stride", "span")


def thresholds(config: Any) -> list[int]:
    """The numbers of a configuration that a length may be compared with, as a window of attention is."""
    found: set[int] = set()
    waiting = [("", config)]
    for name, value in waiting:
        if isinstance(value, dict):
            waiting.extend((str(key), inner) for key, inner in value.items())
        elif isinstance(value, list):
            waiting.extend((name, inner) for inner in value)
        elif type(value) is int and any(word in name for word in _THRESHOLDS):
            found.add(value)
    return sorted(found)


def example_key(call: Call, limits: Sequence[int]) -> str:
    """What a trace may see of an example: its constants, and of tensors all but values and exact sizes.

    Of a size it is: whether it is 1, which sizes are equal, and how it compares with `limits`.
    """
    named, spec = call.leaves()
    sizes: dict[int, int] = {1: -1}
    rows: list[Any] = [str(spec)]
    writer = _Writer()
    for name, value in named:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_nested:
                raise NotKeptError("an example that is not dense")
            dims = [
                [sizes.setdefault(n, len(sizes)), sum(n >= one for one in limits), n in limits]
                for n in value.shape
            ]
            rows.append([name, str(value.dtype), str(value.device), value.requires_grad, dims])
        else:
            rows.append([name, writer.put(value)])
    rows.append(writer.rows)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


# -- the folder of entries -------------------------------------------------------------------


@cache
def _sources() -> str:
    """A digest of the files that say how a module becomes a program."""
    package = Path(__file__).parent.parent
    held = (
        "errors.py",
        "program/*.py",
        "anatomy/wiring.py",
        "anatomy/dimensions.py",
        "anatomy/placements.py",
    )
    files = [file for pattern in held for file in sorted(package.glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def settings(device: torch.device) -> dict[str, Any]:
    """Versions, and the settings of this process that a trace may see."""
    found: dict[str, Any] = {
        "format": FORMAT,
        "conewise": __version__,
        "sources": _sources(),
        "python": sys.version,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "device": str(device),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        found["processor"] = torch.cuda.get_device_name(device)
    return found


@dataclass(frozen=True)
class Entry:
    """A captured program as it lies in the cache, not yet bound to tensors."""

    path: Path
    found: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def fidelity(self) -> dict[str, Any]:
        """The fields of the `Fidelity` that was found when the module was traced."""
        return {**self.found["fidelity"], "reasons": tuple(self.found["fidelity"]["reasons"])}

    @property
    def forward(self) -> inspect.Signature:
        """The arguments that the module's forward takes; annotations are left out."""
        return _forward(self.found["forward"])

    @property
    def needs_module(self) -> bool:
        """True if the module has to be built, for not all tensors lie in files, or Python has changed it."""
        own = [name for name, (is_own, *_) in self.found["program"]["weights"].items() if is_own]
        held = {*self.found["files"], *self.tensors}
        if not held.issuperset(own) or not set(self.found["names"]).issuperset(own):
            return True
        stamps: dict[str, Any] = self.found["modules"]
        # A module of Python that is there may have other functions in it than its file.
        return any(_is_imported(name) or not _is_as_it_was(stamp) for name, stamp in stamps.items())

    def program(self, own: Value) -> Program:
        """The program, over a module's own tensors. Raises NotKeptError where they do not fit."""
        try:
            return decoded(self.found["program"], own, self.tensors)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise NotKeptError(f"{self.path.name} is damaged") from error

    def values(self, mapped: Mapping[str, Tensor], device: torch.device) -> Value:
        """The tensors of a module that is not built, from the weights files and the entry."""

        def value(name: str) -> Any:
            _, is_parameter, has_gradient = weights[name]
            held = (mapped if name in files else self.tensors)[name].to(device)
            return nn.Parameter(held, requires_grad=has_gradient) if is_parameter else held

        weights, files = self.found["program"]["weights"], set(self.found["files"])
        return value


class Shelf:
    """The entries of one model: those whose names begin with its key.

    `key` holds what determines the program and is known before it is called. `weights` are the files in
    which its tensors lie by name, which are mapped, as transformers does. All lie on one device.
    """

    def __init__(
        self, key: Mapping[str, Any], config: Any, weights: Sequence[Path], device: torch.device
    ) -> None:
        self._key, self._limits, self._weights = dict(key), thresholds(config), tuple(weights)
        self.device = device

    @property
    def _folder(self) -> Path:
        return cache_folder() / "captures"

    def _name(self) -> str:
        text = json.dumps([self._key, settings(self.device)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def any(self) -> Entry | None:
        """Some entry of the model: what all of them share can be read off it."""
        with suppress(OSError):
            for path in sorted(self._folder.glob(f"{self._name()}-*.safetensors")):
                if (entry := _read(path)) is not None:
                    return entry
        return None

    def find(self, call: Call) -> Entry | None:
        """The entry for an example like that of `call`, if there is one."""
        with suppress(OSError, NotKeptError):
            return _read(self._path(call))
        return None

    def _path(self, call: Call) -> Path:
        return self._folder / f"{self._name()}-{example_key(call, self._limits)}.safetensors"

    @cached_property
    def mapped(self) -> dict[str, Tensor]:
        """The tensors of the weights files by name."""
        found: dict[str, Tensor] = {}
        for path in self._weights:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        return found

    def keep(self, call: Call, program: Program, facts: Mapping[str, Any], module: nn.Module) -> None:
        """Write an entry, as far as there is room and the program can be kept; nothing is raised."""
        with suppress(NotKeptError, OSError, SafetensorError, ValueError, TypeError, RecursionError):
            if any(one.device != self.device for one in (*module.parameters(), *module.buffers())):
                raise NotKeptError("it was moved")
            path = self._path(call)
            own, held = (
                tensors_of(module),
                {**dict(module.named_parameters()), **dict(module.named_buffers())},
            )
            weights = {id(value) for value in held.values()}
            if any(own(s.name) is not s.value and id(s.value) in weights for s in program.sources):
                raise NotKeptError("a weight by another name")
            found, tensors = encoded(program, lambda one: own(one.name) is one.value)
            again = decoded(json.loads(json.dumps(found)), own, tensors)
            if encoded(again, lambda one: one.name not in tensors)[0] != found:
                return
            in_files = self._in_files(program)
            beside = [one for one in program.sources if one.name not in in_files and one.name not in tensors]
            if sum(one.value.nbytes for one in beside) <= MOST_CONSTANTS and len(program.devices) <= 1:
                tensors |= {one.name: one.value.detach().cpu().contiguous().clone() for one in beside}
            parts = {type(part).__module__ for part in module.modules()} - {"torch"}
            parts = {name for name in parts if not name.startswith("torch.")}
            text = json.dumps(
                {
                    "program": found,
                    "forward": _signature(inspect.signature(module.forward)),
                    "files": sorted(in_files),
                    "names": sorted(held),
                    "modules": {one: _stamp(one) for one in sorted(parts)},
                    "tensors": _checksum(tensors),
                    **facts,
                }
            )
            metadata = {"entry": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, save(tensors, metadata))
            _make_room(self._folder, path)

    def _in_files(self, program: Program) -> frozenset[str]:
        """The sources that lie in the weights files by their own names, with the same bits."""
        found, mapped = set(), self.mapped
        for one in program.sources:
            held = mapped.get(one.name)
            if held is None or (held.dtype, held.shape) != (one.value.dtype, one.value.shape):
                continue
            if one.value.is_contiguous() and bitwise_same(held.to(one.value.device), one.value.detach()):
                found.add(one.name)
        return frozenset(found)


def tensors_of(module: nn.Module) -> Value:
    """The tensors of a module by their names."""

    def own(name: str) -> Any:
        found: Any = module
        for step in name.split("."):
            found = getattr(found, step, None)
        return found

    return own


def header_digest(path: Path) -> str:
    """A digest of the header of a safetensors file: the names, dtypes, shapes and places of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return hashlib.sha256(file.read(min(length, 100_000_000))).hexdigest()


def put_tensor(module: nn.Module, path: str, value: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer of a module, which has the same bits."""
    *steps, last = path.split(".")
    owner = module.get_submodule(".".join(steps))
    table: dict[str, Any] = owner._parameters if last in owner._parameters else owner._buffers
    own = table.get(last)
    if own is value:
        return
    if own is None or not bitwise_same(own.detach(), value.detach()):
        raise WeightsChangedError(
            f"{path!r} of the module is not what this model has computed with: its files were written to "
            "since. Load the model again."
        )
    table[last] = value


def _stamp(module: str) -> list[Any] | None:
    """The file that a module of Python was, or would be, imported from: its path, size and time."""
    held = sys.modules.get(module)
    file = getattr(held, "__file__", None)
    return None if file is None else [file, *_file_stamp(Path(file))]


def _is_imported(name: str) -> bool:
    """True if a module of Python is in use in this process."""
    return name in sys.modules


def _is_as_it_was(stamp: list[Any] | None) -> bool:
    """True if a file of Python is the one that it was; what is none, as builtins, does not change."""
    if stamp is None:
        return True
    try:
        return _file_stamp(Path(stamp[0])) == stamp[1:]
    except OSError:
        return False


def _file_stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        total.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _read(path: Path) -> Entry | None:
    """The entry of a file; None where there is none, or one that is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        text = metadata["entry"]
        if hashlib.sha256(text.encode()).hexdigest() != metadata["sha256"]:
            return None
        found = json.loads(text)
        if _checksum(tensors) != found["tensors"]:
            return None
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
    with suppress(OSError):
        os.utime(path)  # it was used now
    return Entry(path, found, tensors)


def _make_room(folder: Path, newest: Path) -> None:
    """Remove the entries that were used longest ago, until the others fit; never the newest."""
    found = []
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    room = MOST_BYTES
    for _, size, path in sorted(found, reverse=True):
        room -= size
        if room < 0 and path != newest:
            path.unlink(missing_ok=True)

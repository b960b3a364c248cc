"""Libraries: whether code belongs to an installed package, and to which version of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
import sysconfig
from functools import cache
from pathlib import Path, PurePath
from types import ModuleType

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OWN = Path(__file__).resolve().parents[1]


@cache
def library_of_file(file: str) -> str:
    """The library and version that a file of code belongs to; empty for a user's own code.

    Python's own modules are of Python's version. An installed package is its version and the checksums that
    it was installed with, so that another build of one version is another library. A package that is
    installed "editable" is the user's own.
    """
    if file.startswith("<frozen "):
        return _python()
    if not file or file.startswith("<"):
        return ""
    path = Path(file).resolve()
    if path.is_relative_to(_OWN):
        return "conewise"
    for index, part in enumerate(path.parts[:-1]):
        if part in _INSTALLED:
            return _package(path.parts[index + 1])
    return _python() if any(path.is_relative_to(root) for root in _standard()) else ""


def library_of_module(module: ModuleType) -> str:
    """The library and version of a module; empty for a user's own."""
    if module.__name__ == "__main__":
        return ""
    if module.__name__ in sys.builtin_module_names:
        return _python()
    file = getattr(module, "__file__", None)
    if file:
        return library_of_file(file)
    roots = [str(root) for root in getattr(module, "__path__", ())]
    return library_of_file(str(PurePath(roots[0], "__init__.py"))) if roots else ""


def library_of_name(module: str) -> str:
    """The library and version of a module by its name; empty for a user's own, and where there is none."""
    found = sys.modules.get(module)
    return library_of_module(found) if isinstance(found, ModuleType) else ""


def _python() -> str:
    return f"python {sys.version_info.major}.{sys.version_info.minor}"


@cache
def _standard() -> tuple[Path, ...]:
    found = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib"))
    return tuple(Path(path).resolve() for path in found if path)


@cache
def _package(entry: str) -> str:
    """The package that an entry of the folder of installed packages belongs to; empty where none says so."""
    name = entry.partition(".")[0]
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        named = _distributions().get(name)
        if not named:
            return ""
        found = importlib.metadata.distribution(named[0])
    return f"{name} {found.version}{_checksum(found)}"


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _checksum(distribution: importlib.metadata.Distribution) -> str:
    """A digest of the checksums of the installed code, as the installer noted them."""
    lines = (distribution.read_text("RECORD") or "").splitlines()
    code = sorted(line for line in lines if line.partition(",")[0].endswith(_CODE) and ",sha" in line)
    return f" {hashlib.sha256(chr(10).join(code).encode()).hexdigest()[:8]}" if code else ""


_CODE = (".py", ".so", ".pyd", ".dylib", ".dll")

"""Packages that are used where they are installed: they come with extras, `pip install 'conewise[hf]'`.

They are imported where they are first used, and each time inside `needs(extra)`:

    with needs("plots"):
        import plotly.graph_objects as go

`pyproject.toml` says which versions; `docs/install.md` says what works without.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from conewise.errors import MissingPackageError


@dataclass(frozen=True, slots=True)
class Extra:
    """The purpose of an extra, to follow on its name; the packages imported of it; the extras it brings."""

    purpose: str
    packages: tuple[str, ...]
    brings: tuple[str, ...] = ()


EXTRAS: Mapping[str, Extra] = MappingProxyType(
    {
        "": Extra(
            "which needs it for all but graphs, worlds, ops and theory",
            ("numpy", "rich", "safetensors", "torch"),
        ),
        "hf": Extra(
            "which loads models and their tokenizers",
            ("accelerate", "filelock", "gguf", "huggingface_hub", "tokenizers", "transformers"),
        ),
        "tables": Extra("which makes and saves tables", ("pandas", "pyarrow")),
        "plots": Extra("which draws figures and pages", ("jinja2", "markupsafe", "plotly")),
        "workers": Extra("which sends sweeps to other processes", ("cloudpickle",)),
        "ray": Extra("which sends sweeps to other machines", ("ray",), brings=("workers",)),
        "cli": Extra(
            "which is the command line and all that it needs",
            ("typer",),
            brings=("hf", "plots", "tables", "workers"),
        ),
    }
)
"""The extras that are packages of their own, by name; "" is what conewise always comes with."""


@contextmanager
def needs(extra: str = "") -> Iterator[None]:
    """Import inside this block what comes with an extra, or with conewise itself.

    Raises MissingPackageError where that is not installed; it says how to install it. What else cannot be
    imported is left as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        for name in (extra, ""):
            if package in EXTRAS[name].packages:
                raise MissingPackageError(package, name, EXTRAS[name].purpose) from None
        raise


class Late:
    """A package of an extra that is imported when something of it is first read: some take a second."""

    def __init__(self, extra: str, package: str) -> None:
        self._extra, self._package = extra, package

    def __getattr__(self, name: str) -> Any:
        with needs(self._extra):
            return getattr(importlib.import_module(self._package), name)


def expect(extra: str, *packages: str) -> None:
    """Raise MissingPackageError where one of these packages, or anything of the extra, is not installed.

    Nothing is imported: for what another library imports, and for what is needed at the end of a long run.
    """
    found = EXTRAS[extra]
    whole = (*found.packages, *(one for name in found.brings for one in EXTRAS[name].packages))
    for package in packages or whole:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(package, extra, EXTRAS[extra].purpose)

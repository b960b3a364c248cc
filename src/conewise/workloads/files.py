"""Files that are written whole or not at all, and the version that writes them."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there with all its bytes, or not at all, whenever the process dies."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def conewise_version() -> str:
    """The installed version of this library."""
    try:
        return importlib.metadata.version("conewise")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

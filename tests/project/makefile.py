"""The targets of the Makefile, and those that CI runs."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def targets() -> frozenset[str]:
    """The targets that `make` takes by name."""
    text = (ROOT / "Makefile").read_text("utf-8")
    return frozenset(re.findall(r"^([a-z0-9][a-z0-9-]*):(?!=)", text, flags=re.MULTILINE))


@cache
def steps() -> ModuleType:
    """`.ci/steps.py`, which no package holds."""
    spec = importlib.util.spec_from_file_location("ci_steps", ROOT / ".ci" / "steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # A dataclass looks its module up.
    spec.loader.exec_module(module)
    return module

"""What names say of values: whether they lead to them, and whose they are."""

from __future__ import annotations

import sys
import types

import numpy as np
import torch

from conewise.identity.instances import BUILT_IN
from conewise.identity.libraries import library_of_file, library_of_name

LITERAL = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
"""Types whose values are their text."""


def home_of(kind: type) -> str:
    """The name of the module that a class says it is of; a few classes say something else."""
    name: object = kind.__module__
    return name if isinstance(name, str) else ""


def reached(module: object, path: str) -> object:
    """What is found by the name of a module and a path in it; None where nothing is."""
    found: object = sys.modules.get(str(module))
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def is_data(value: object) -> bool:
    """Whether something that a library has may be a number of the user's, put there."""
    return type(value) in (*LITERAL, *BUILT_IN) or isinstance(value, torch.Tensor | np.ndarray)


def is_foreign(value: object) -> bool:
    """Whether something that a library has is a function of the user's own: one that was put there."""
    if not isinstance(value, types.FunctionType):
        return False
    # A method that a library generated has no file, and the names of its module.
    made_in = str(value.__globals__.get("__name__"))
    return not library_of_file(value.__code__.co_filename) and not library_of_name(made_in)

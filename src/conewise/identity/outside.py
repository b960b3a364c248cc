"""What reads or runs something that is no part of the program: a file, the environment, text as code."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import sys

import numpy as np
import torch

_NAMED: dict[str, object] = {
    "open": builtins.open,
    "eval": builtins.eval,
    "exec": builtins.exec,
    "compile": builtins.compile,
    "globals": builtins.globals,
    "input": builtins.input,
    "__import__": builtins.__import__,
    "os.environ": os.environ,
    "sys.argv": sys.argv,
    "sys.modules": sys.modules,
    "json.load": json.load,
    "pickle.load": pickle.load,
    "torch.load": torch.load,
    "numpy.load": np.load,
    "numpy.memmap": np.memmap,
}

OUTSIDE = {id(value): name for name, value in _NAMED.items()}
"""By object: whatever name a function has for it."""

NAMES_OUTSIDE = frozenset(
    {
        "environ",
        "from_pretrained",
        "fromfile",
        "genfromtxt",
        "getenv",
        "import_module",
        "imread",
        "load_dataset",
        "load_file",
        "load_library",
        "loadtxt",
        "read_bytes",
        "read_csv",
        "read_json",
        "read_parquet",
        "read_text",
        "safe_open",
        "urlopen",
    }
)
"""By the name of an attribute, of whatever object."""

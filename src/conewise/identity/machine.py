"""The machine: what the last bits of a result depend on beside the sweep, and how much memory is held."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from conewise.version import __version__


def machine(device: torch.device) -> dict[str, Any]:
    """What a run that is kept on disk goes on with: versions, settings and hardware."""
    return {
        "conewise": _series(__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **numerics(device),
    }


def numerics(device: torch.device) -> dict[str, Any]:
    """Settings and hardware that choose kernels, and with them the rounding: equal here, equal bits."""
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "float32 products": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        found["processor"] = torch.cuda.get_device_name(device)
        found["TF32 in convolutions"] = torch.backends.cudnn.allow_tf32
    else:
        found["processor"] = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    return found


def _series(version: str) -> str:
    """The releases of which each goes on with the stores of the others: 0.1 for 0.1.3.

    They compute the same bits. What is no release, as 0.2.0.dev1, is by itself.
    """
    found = re.fullmatch(r"(\d+\.\d+)\.\d+", version)
    return version if found is None else found[1]


def memory_held(device: torch.device) -> int:
    """Bytes held now: by tensors on a GPU, by the process elsewhere (its peak, where that is all it says).

    0 on systems that say neither.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource  # noqa: PLC0415  # not on every system
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_free(device: torch.device) -> int | None:
    """Bytes that could be held beside what is held now; None on systems that do not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    lines = meminfo.read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)

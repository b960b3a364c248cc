"""Captured models against their modules on a GPU: `PYTHONPATH=src python -m tests.gpu.verify_coverage`.

Needs torch, numpy and transformers, and minutes. Every architecture of the zoo, eager and sdpa, in float32
and bfloat16, is captured on the device and verified there, and a few are swept and their cells verified.
What was found goes to `tests/gpu/coverage.json`, which `make coverage` puts into docs/coverage.md; all that
did not pass is printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import conewise as cw
from conewise.model import Model
from tests.program.zoo import ZOO, Case

FOUND = Path(__file__).with_name("coverage.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LARGER = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
CASES = {
    **ZOO,
    "llama_larger": Case("LlamaConfig", "LlamaForCausalLM", LARGER, lengths=(20, 128)),
    "gpt2_larger": Case(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_layer": 4, "n_head": 16, "n_embd": 1024, "vocab_size": 8192, "n_positions": 512},
        lengths=(20, 128),
    ),
}
"""The zoo, and two models with heads of the usual size."""
SWEPT = ("gpt2", "llama", "mistral", "bert", "llama_larger")


@dataclass(frozen=True)
class Setting:
    """One way to make and run one architecture."""

    name: str
    attention: str
    dtype: str
    device: torch.device

    def model(self) -> Model:
        case = CASES[self.name]
        module = case.make(self.attention, DTYPES[self.dtype]).to(self.device)
        return cw.capture(module, **self.example(1, case.lengths[0]))

    def example(self, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(seed)
        given = CASES[self.name].example(batch, length, DTYPES[self.dtype])
        moved: dict[str, Any] = tree_map(
            lambda one: one.to(self.device) if isinstance(one, Tensor) else one, given
        )
        return moved

    def described(self) -> dict[str, str]:
        return {"architecture": self.name, "attention": self.attention or "eager", "dtype": self.dtype}


def settings(names: list[str], device: torch.device) -> Iterator[Setting]:
    for name in names:
        for attention in CASES[name].attention:
            for dtype in DTYPES:
                yield Setting(name, attention, dtype, device)


def verified(setting: Setting, model: Model) -> dict[str, Any]:
    """What `Model.verify` says, and how far the graph is from the module at every length of the case."""
    check = model.verify(n=1)
    apart = {
        f"{batch}x{length}": _apart(model, setting.example(batch, length, seed=1))
        for batch, length in zip((3, 2, 1, 4), CASES[setting.name].lengths, strict=False)
    }
    return {
        "passed": bool(check),
        "bitwise": check.bitwise,
        "worst": check.worst,
        "excess": None if check.bitwise else check.excess,
        "row_deviation": check.row_deviation,
        "on_example": str(model.fidelity),
        "apart": apart,
        "said": str(check),
    }


@torch.no_grad()
def _apart(model: Model, given: dict[str, Any]) -> dict[str, Any]:
    """The largest difference from the module, the largest output, and whether the module equals itself."""
    constants = {"use_cache": False} if "use_cache" in model.signature.example.kwargs else {}
    once, twice = (tree_leaves(model.module(**given, **constants)) for _ in range(2))
    ours = tree_leaves(model.run(**given).outputs)
    return {
        "bitwise": all(map(torch.equal, ours, once)),
        "largest": max(
            float((one.double() - other.double()).abs().max()) for one, other in zip(ours, once, strict=True)
        ),
        "of": max(float(one.abs().max()) for one in once),
        "repeats": all(map(torch.equal, once, twice)),
    }


def swept(setting: Setting, model: Model) -> dict[str, Any]:
    """Heads and MLP outputs of all layers, by wavefront and serially, and what their `verify()` says."""
    length = CASES[setting.name].lengths[0]
    base, source = (model.run(**setting.example(2, length, seed)) for seed in (1, 2))
    sites = cw.sites("z", layer=":", head=":") + cw.sites("mlp_out", layer=":")
    sweep = model.sweep(sites, base=base, source=source, metric=cw.logit_diff(answer=3, wrong=4))
    found: dict[str, Any] = {}
    for evaluator in ("wavefront", "serial"):
        result = sweep.run(evaluator=evaluator)
        check = result.verify(n=12)
        wrong = _with_an_error(result)
        found[evaluator] = {
            "passed": bool(check),
            "cells": check.cells,
            "hooked": check.hooked,
            "relative": check.relative,
            "tolerance": check.tolerance,
            "own_error": check.own_error,
            "said": str(check),
            "an error of 5 % is found": not wrong.verify(n=len(result.cells)),
        }
    return found


def _with_an_error(result: Any) -> Any:
    """The same result, with one cell off by 5 % of the largest value."""
    values = result.per_prompt.clone()
    values[0, 0, 0] += 0.05 * float(values.abs().max())
    return replace(result, per_prompt=values)


def tried(setting: Setting) -> dict[str, Any]:
    """All that is found out about one setting; an error is a finding, too."""
    row: dict[str, Any] = setting.described()
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = setting.model()
            row |= verified(setting, model)
            if setting.name in SWEPT:
                row["sweeps"] = swept(setting, model)
        except Exception as error:  # noqa: BLE001
            row |= {
                "passed": False,
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-2000:],
            }
    row["warnings"] = [str(one.message) for one in caught if issubclass(one.category, UserWarning)][:5]
    row["seconds"] = round(time.perf_counter() - start, 2)
    return row


def is_good(row: dict[str, Any]) -> bool:
    """Whether the model and all of its sweeps passed, and an error would have been found."""
    sweeps = row.get("sweeps", {}).values()
    return bool(row["passed"]) and all(one["passed"] and one["an error of 5 % is found"] for one in sweeps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="architectures, with commas; all unless given")
    parser.add_argument("--device", default="cuda", help="the device; `cpu` tries the script itself")
    parser.add_argument("--out", type=Path, default=FOUND, help="where the findings go")
    parser.add_argument("--seconds", type=float, default=500, help="begin nothing new after so long")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    device = torch.device(options.device)
    names = [name for name in options.only.split(",") if name] or list(CASES)
    start, rows, left_out = time.perf_counter(), [], []
    for setting in settings(names, device):
        if time.perf_counter() - start > options.seconds:
            left_out.append(setting.described())
            continue
        row = tried(setting)
        rows.append(row)
        state = "equal" if row.get("bitwise") else row.get("error") or f"up to {row['worst']:.2g} apart"
        mark = "ok  " if is_good(row) else "FAIL"
        where = " ".join(setting.described().values())
        sys.stdout.write(f"{mark} {where}: {state} ({row['seconds']} s)\n")
        sys.stdout.flush()
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "rows": rows,
        "left_out": left_out,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for row in rows:
        if not is_good(row):
            sys.stdout.write(json.dumps(row, indent=1) + "\n")
    good = sum(map(is_good, rows))
    sys.stdout.write(f"{good} of {len(rows)} good, {len(left_out)} left out; {options.out}\n")


if __name__ == "__main__":
    main()

"""Every sweep against TransformerLens itself: `ours` here, then `theirs` where TransformerLens is installed.

python -m tests.compat.against_transformer_lens ours FOLDER
python against_transformer_lens.py theirs FOLDER

Two environments, as both libraries pin their own versions of torch. Not collected as a test.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODELS = ("gpt2", "llama")
TOLERANCE = 1e-5
"""Batched kernels against single ones, on metrics of order 1."""


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 5] - logits[:, -1, 9]).mean()


def ours(folder: Path) -> None:
    """Save the models, the prompts and what our sweeps find."""
    import conewise.compat.transformer_lens as patching  # noqa: PLC0415  # theirs runs without it
    from tests.sweeps.tiny import VOCABULARY, prompts, tiny  # noqa: PLC0415

    for name in MODELS:
        model: Any = tiny(name)
        model.module.save_pretrained(folder / name)
        _tokenizer(VOCABULARY).save_pretrained(folder / name)
        clean, corrupted = prompts(2, seed=1), prompts(2, seed=2)
        found = {"clean": clean, "corrupted": corrupted}
        for sweep in (one for one in patching.__all__ if one.startswith("get_act_patch")):
            found[sweep] = getattr(patching, sweep)(model, corrupted, model.run(input_ids=clean), metric)
        torch.save(found, folder / f"{name}.pt")


def _tokenizer(size: int) -> Any:
    """TransformerLens wants one; its words are never read."""
    import tokenizers  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    library: Any = transformers
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0")
    special = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "w0")
    return library.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **special)


def theirs(folder: Path) -> None:
    """Compare what theirs find; ends with an error where shapes or numbers differ."""
    import transformer_lens.patching as patching  # type: ignore[import-not-found]  # noqa: PLC0415
    from transformer_lens.model_bridge import (  # type: ignore[import-not-found]  # noqa: PLC0415
        TransformerBridge,
    )
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    for name in MODELS:
        path = str(folder / name)
        module: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        module.eval()
        bridge = TransformerBridge.boot_transformers(path, hf_model=module, device="cpu").eval()
        found = torch.load(folder / f"{name}.pt")
        clean, corrupted = found.pop("clean"), found.pop("corrupted")
        with torch.no_grad():
            _, cache = bridge.run_with_cache(clean)
            for sweep, own in found.items():
                other = getattr(patching, sweep)(bridge, corrupted, cache, metric)
                assert other.shape == own.shape, (name, sweep, other.shape, own.shape)
                apart = float((other - own).abs().max())
                print(f"{name:6} {sweep:48} {list(own.shape)!s:16} largest difference {apart:.1e}")  # noqa: T201
                assert apart <= TOLERANCE, (name, sweep)


if __name__ == "__main__":
    {"ours": ours, "theirs": theirs}[sys.argv[1]](Path(sys.argv[2]))

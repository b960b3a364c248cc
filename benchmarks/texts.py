"""`python -m benchmarks.texts`: texts of many patched worlds, against plain hooks on the module's `generate`.

SmolLM2's shape with random weights: a vector added behind each of 30 layers with five strengths, a prompt of
8 tokens, 20 more, greedy. `--shape 8B`: 32 layers of Llama's 8B shape in bfloat16, 50 tokens. Rows:

- `one by one`: a hook and a `generate` for each world (some are timed, and scaled);
- `by hand`: all worlds as one batch of `generate`, a hook in each layer that changes that layer's rows.

Tokens are compared; where rounding decides between two tokens, texts may part, and the share that is equal is
printed.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import conewise as cw
from benchmarks.harness import at_least, print_table, seconds

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
}
SCALES, LENGTH = (-8.0, -4.0, 4.0, 8.0, 16.0), 8


@contextmanager
def hooks(module: Any, layers: Any, change: Any) -> Iterator[None]:
    """Change the output of some layers: `change(layer, hidden)`."""
    handles = [
        module.model.layers[layer].register_forward_hook(
            lambda _, __, out, layer=layer: (
                change(layer, out) if isinstance(out, torch.Tensor) else (change(layer, out[0]), *out[1:])
            )
        )
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="SmolLM2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", type=int, default=3, help="how many worlds are timed one by one")
    given = parser.parse_args()
    is_large = given.shape == "8B"
    n = given.tokens or (50 if is_large else 20)
    torch.manual_seed(0)
    with torch.device(given.device):
        torch.set_default_dtype(torch.bfloat16 if is_large else torch.float32)
        config = LlamaConfig(**SHAPES[given.shape], eos_token_id=None, pad_token_id=0, bos_token_id=1)
        module: Any = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(5, 1000, (1, LENGTH), device=given.device)
    model = cw.capture(module, input_ids=ids)
    layers, vector = range(config.num_hidden_layers), torch.randn(config.hidden_size, device=given.device)
    vector = (vector / vector.norm()).to(module.dtype)
    worlds = len(layers) * len(SCALES)
    scales = torch.tensor(SCALES, device=given.device, dtype=module.dtype)[:, None, None]
    options: dict[str, Any] = {"max_new_tokens": n, "do_sample": False, "use_cache": True}

    def written(prompt: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return found[:, LENGTH:]

    def ours() -> Any:
        job = model.sweep(
            cw.sites("resid_post", layer=":"), base=ids, source=cw.add(vector, scale=list(SCALES)), generate=n
        )
        return job.run(progress=False)

    def by_hand() -> torch.Tensor:
        def change(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            new = hidden.clone()
            new[layer * len(SCALES) : (layer + 1) * len(SCALES)] += scales * vector
            return new

        with hooks(module, layers, change):
            return written(ids.expand(worlds, -1))

    def alone(number: int) -> torch.Tensor:
        layer, scale = divmod(number, len(SCALES))
        with hooks(module, [layer], lambda _, hidden: hidden + SCALES[scale] * vector):
            return written(ids)

    def fenced(action: Any) -> float:
        def whole() -> None:
            action()
            if ids.is_cuda:
                torch.cuda.synchronize()

        gc.collect()
        return seconds(whole)

    sample = [int(number) for number in torch.linspace(0, worlds - 1, given.alone)]
    texts = ours()
    tokens, hand = texts.ids[1:, 0], by_hand().cpu()
    print(f"equal to by hand: {int((tokens == hand).all(1).sum())} of {worlds}", flush=True)
    same = sum(torch.equal(tokens[number], alone(number)[0].cpu()) for number in sample)
    print(
        f"equal one by one: {same} of {len(sample)}; rows of layers {texts.ledger.node_evaluations:,} of "
        f"{worlds * len(layers) * (LENGTH + n - 1):,}",
        flush=True,
    )
    times = [
        (fenced(ours), fenced(by_hand), fenced(lambda: [alone(number) for number in sample]) / len(sample))
        for _ in range(given.rounds)
    ]
    mine, batched, one = (min(series) for series in zip(*times, strict=True))
    note = f"{worlds} worlds, {n} tokens: {mine:.3f} s"
    large, many = (40.0, 1.5) if ids.is_cuda else (6.0, 1.0)
    print_table(
        f"Texts of {given.shape} on {given.device}",
        [
            at_least("one by one", one * worlds / mine, large, f"{note}, {one * worlds:.1f} s (scaled)"),
            at_least("by hand", batched / mine, many, f"{note}, {batched:.3f} s"),
        ],
    )


if __name__ == "__main__":
    main()

"""`python -m benchmarks.generation`: steering while a model writes, against plain hooks on the same module.

The shape of GPT-2 small, random weights, a prompt of 20 tokens, 20 more, greedy, with the cache. Rows:

- `steer_one`: a vector added in one layer, at all positions;
- `steer_all`: a vector added in every layer, and one head of each scaled;
- `latents`: 512 latents of a dictionary of 4,096 in the middle of the model, each patched in a world of its
  own, against a hooked forward for each (some are timed, and scaled).

Answers are compared: tokens are equal, and the sampled latents agree with their hooked forwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from benchmarks.harness import Line, at_least, at_most, interleaved, print_table, seconds

Tensor = torch.Tensor
LENGTH, NEW, ANSWER, WRONG = 20, 20, 3, 5
LATENTS, SWEPT, LAYER = 4_096, 512, 5


@contextmanager
def hooked(*hooks: tuple[Any, bool, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Plain hooks, as people write them: (module, whether on its output, change)."""
    handles = []
    for part, is_output, change in hooks:
        if is_output:
            handles.append(
                part.register_forward_hook(
                    lambda _, __, out, change=change: (
                        (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
                    )
                )
            )
        else:
            handles.append(
                part.register_forward_pre_hook(lambda _, args, change=change: (change(args[0]), *args[1:]))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def steering(model: cw.Model, module: Any, rounds: int) -> list[Line]:
    """Tokens that are written under patches, against plain hooks."""
    ids = torch.randint(0, 50_000, (1, LENGTH))
    width, heads = module.config.n_embd, module.config.n_head
    vector = torch.randn(width)
    options: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}

    def add(value: Tensor) -> Tensor:
        return value + vector

    def scale(value: Tensor) -> Tensor:
        new = value.clone().unflatten(-1, (heads, -1))  # type: ignore[no-untyped-call]
        new[..., 3, :] *= 2
        return new.flatten(-2)

    blocks = module.transformer.h
    cases: dict[str, tuple[list[Any], list[Any]]] = {
        "steer_one": ([(("resid_post", LAYER), add)], [(blocks[LAYER], True, add)]),
        "steer_all": (
            [
                patch
                for layer in range(len(blocks))
                for patch in (
                    (("resid_post", layer), add),
                    (cw.site("z", layer=layer, head=3), lambda part: part * 2),
                )
            ],
            [hook for block in blocks for hook in ((block, True, add), (block.attn.c_proj, False, scale))],
        ),
    }
    lines = []
    for name, (patches, hooks) in cases.items():

        def ours(patches: list[Any] = patches) -> Tensor:
            return model.generate(ids, NEW, patches, **options).ids

        def theirs(hooks: list[Any] = hooks) -> Tensor:
            with hooked(*hooks):
                found: Tensor = module.generate(
                    ids, max_new_tokens=NEW, attention_mask=torch.ones_like(ids), **options
                )
            return found

        assert torch.equal(ours(), theirs())
        mine, plain = interleaved(ours, theirs, rounds=rounds)
        lines.append(
            at_most(name, mine / plain, 1.1, f"{NEW} tokens: {mine:.3f} s, plain hooks {plain:.3f} s")
        )
    return lines


def latents(model: cw.Model, module: Any, rounds: int, forwards: int) -> Line:
    """A sweep over latents, against a hooked forward for each."""
    width = module.config.n_embd
    into, out = torch.randn(width, LATENTS) / width**0.5, torch.randn(LATENTS, width) / LATENTS**0.5
    made = model.splice(
        ("resid_post", LAYER), encode=lambda x: torch.relu(x @ into), decode=lambda z: z @ out
    )
    base, source = (made.run(input_ids=torch.randint(0, 50_000, (1, LENGTH))) for _ in range(2))
    swept = made.active("sae", base, top=SWEPT)
    sweep = made.sweep(
        cw.sites("sae.latents", latent=swept),
        base=base,
        source=source,
        metric=cw.logit_diff(answer=ANSWER, wrong=WRONG),
    )
    other, ids = source["sae.latents"], base.inputs["input_ids"]

    def by_hand(latent: int) -> float:
        def change(value: Tensor) -> Tensor:
            encoded = torch.relu(value @ into)
            error = value - encoded @ out
            encoded[..., latent] = other[..., latent]
            return encoded @ out + error

        with torch.no_grad(), hooked((module.transformer.h[LAYER], True, change)):
            logits = module(input_ids=ids, use_cache=False).logits[0, -1]
        return float(logits[ANSWER] - logits[WRONG])

    sample = swept[:: max(1, len(swept) // forwards)]
    result = sweep.run(progress=False)
    found = dict(zip(swept, result.values.tolist(), strict=True))
    assert all(abs(found[one] - by_hand(one)) < 1e-4 for one in sample)
    times = [
        (seconds(lambda: sweep.run(progress=False)), seconds(lambda: list(map(by_hand, sample))))
        for _ in range(rounds)
    ]
    ours, theirs = (min(series) for series in zip(*times, strict=True))
    theirs *= len(swept) / len(sample)
    note = f"{len(swept)} latents: {ours:.2f} s, hooked {theirs:.1f} s ({len(sample)} timed, scaled)"
    return at_least("latents", theirs / ours, 2, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--forwards", type=int, default=16, help="how many hooked forwards are timed")
    given = parser.parse_args()
    torch.manual_seed(0)
    module: Any = GPT2LMHeadModel(GPT2Config()).eval()  # type: ignore[no-untyped-call]
    model = cw.capture(module, input_ids=torch.randint(0, 50_000, (1, LENGTH)))
    lines = steering(model, module, given.rounds)
    lines.append(latents(model, module, max(1, given.rounds // 3), given.forwards))
    print_table("Steering and latents", lines)


if __name__ == "__main__":
    main()

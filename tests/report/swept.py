"""A real sweep of a small model with several parts, metrics and prompts, for the tests of its page."""

from __future__ import annotations

from functools import cache

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import conewise as cw
from conewise.report.folded import Folded
from conewise.report.folding import fold
from conewise.report.story import Story, TokenizedPair
from conewise.sweeps.result import Result

LAYERS, HEADS, LENGTH, PROMPTS = 4, 4, 6, 3
HOSTILE = "</script><script>alert(1)</script><!--\u2028<b>&amp;\"'"
"""A prompt that would run, hide or break a page that took it for anything but text."""


@cache
def swept() -> tuple[Result, Story, Folded]:
    """Heads, MLPs and residual streams by position, by two metrics, verified; its story; its cones."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS, n_head=HEADS, n_embd=32, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    module = GPT2LMHeadModel(config).eval()  # type: ignore[no-untyped-call]
    clean, corrupted = (
        torch.randint(0, 50, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    model = cw.capture(module, input_ids=clean)
    base = model.run(input_ids=corrupted)
    sweep = model.sweep(
        cw.sites("z", layer=":", head=":")
        + cw.sites("mlp_out", layer=":")
        + cw.sites("resid_pre", layer=":", pos=":"),
        base=base,
        source=model.run(input_ids=clean),
        metric=[cw.logit_diff(answer=7, wrong=9), cw.prob(7)],
    )
    result = sweep.run(verify=4)
    return result, story(), fold(model, result.cells, targets=sweep.targets(), base=base)


def story() -> Story:
    """What the sweep is about; the first prompt is hostile."""
    tokens = (*HOSTILE.partition("("), "a", " b", " c")
    pairs = [
        TokenizedPair(HOSTILE, HOSTILE[::-1], tokens, (*tokens[:-1], " d"), (" <i>right",), (" wrong</i>",))
    ]
    pairs += [TokenizedPair(f"prompt {n}", f"other {n}", ("p",) * 6, ("o",) * 6) for n in range(1, PROMPTS)]
    return Story(
        "small<model>",
        tuple(pairs),
        metric="how much likelier 7 is than 9",
        command="conewise sweep small --clean '<script>'",
        seed=11,
        forwards_timed=5,
        forward_seconds=0.5,
    )

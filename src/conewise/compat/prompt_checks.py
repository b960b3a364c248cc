"""How a model answers a prompt: the rank, logit and probability of each token of the answer."""

from __future__ import annotations

import torch

from conewise.compat.hooked_model import HookedModel


def test_prompt(
    prompt: str,
    answer: str | list[str],
    model: HookedModel,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Print how likely a model finds an answer, token by token; of several, the first token of each.

    A space is put in front of an answer that has none, unless it is said otherwise.
    """
    answers = [answer] if isinstance(answer, str) else list(answer)
    if prepend_space_to_answer:
        answers = [one if one.startswith(" ") else f" {one}" for one in answers]
    tokens = model.to_tokens(prompt, prepend_bos=prepend_bos)
    shown = model.to_str_tokens(prompt, prepend_bos=prepend_bos)
    ranks: list[list[tuple[str, int]]] = []
    if print_details:
        print("Tokenized prompt:", shown)
        split = [model.to_str_tokens(one, prepend_bos=False) for one in answers]
        print("Tokenized answer:" if len(answers) == 1 else "Tokenized answers:", split)
    for one in answers:
        wanted = model.to_tokens(one, prepend_bos=False)[0]
        wanted = wanted if len(answers) == 1 else wanted[:1]
        logits = model.reading(torch.cat([tokens[0], wanted])[None]).logits[0]
        found = []
        for place, token in enumerate(wanted.tolist()):
            at = logits[tokens.shape[1] - 1 + place]
            rank = int((at > at[token]).sum())
            found.append((model.to_single_str_token(token), rank))
            if print_details:
                print(_line(f"Rank: {rank:<8}", model, at, token))
                for number, other in enumerate(at.topk(min(top_k, len(at))).indices.tolist()):
                    print(_line(f"Top {number}th token.", model, at, other))
        ranks.append(found)
    print("Ranks of the answer tokens:", ranks[0] if len(answers) == 1 else ranks)


test_prompt.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test by its name


def _line(what: str, model: HookedModel, logits: torch.Tensor, token: int) -> str:
    prob = float(logits.softmax(-1)[token])
    text = model.to_single_str_token(token)
    return f"{what} Logit: {float(logits[token]):5.2f} Prob: {prob:6.2%} Token: |{text}|"

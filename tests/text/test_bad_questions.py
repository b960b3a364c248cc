"""Bad questions: each is refused when it is made, by an error of ours that says why; nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import conewise as cw
from conewise.model import Model
from tests.text.plain import pairs, tiny
from tests.text.test_ask import model

ROW = pairs(1)[0]
TWO = [pairs(3)[0], pairs(3)[1]]  # of two lengths


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ROW.items() if key != name}


PROMPTS: list[tuple[Any, str]] = [
    ([], "no prompts"),
    (pd.DataFrame(), "no prompts"),
    (pd.DataFrame({"text": ["a"]}), "has no field 'clean'"),
    (None, "prompts are a file, a table or a list of rows"),
    (7, "prompts are a file"),
    ("no-such-file.json", "cannot be read"),
    (Path("no/such/file.csv"), "cannot be read"),
    ({}, "has no field 'clean'"),
    ([{}], "row 1 has no field 'clean'"),
    ([None], "row 1 is null"),
    ([[ROW]], "row 1 is a list"),
    ([ROW, 3], "row 2 is a number"),
    (["When John gave a drink to"], "a clean and a corrupted prompt are expected"),
    ("When John gave a drink to", "a clean and a corrupted prompt are expected"),
    (without("clean"), "has no field 'clean'"),
    (without("corrupted"), "has no field 'corrupted'"),
    (without("answers"), "has no answers"),
    (without("wrong_answers"), "has no wrong_answers"),
    ({**ROW, "clean": ""}, "is empty"),
    ({**ROW, "clean": 3}, "is a number; a text is expected"),
    ({**ROW, "clean": "a \ud800 b"}, "surrogate"),
    ({**ROW, "corrupted": ROW["clean"] + " the store"}, "clean has 15 tokens and corrupted 17"),
    ({**ROW, "corrupted": ROW["clean"]}, "the same tokens in every pair"),
    ({**ROW, "answers": []}, "has no answers"),
    ({**ROW, "answers": [""]}, "an empty text"),
    ({**ROW, "answers": [3]}, "holds a number"),
    ({**ROW, "answers": 3}, "a text or a list of texts is expected"),
    ({**ROW, "answers": ["the store"]}, "is not one token"),
    ({**ROW, "answers": ["wombat"]}, "not in the vocabulary"),
    ({**ROW, "wrong_answers": ROW["answers"]}, "among its answers and among its wrong answers"),
    ({**ROW, "answer": " Mary"}, "twice, under two names"),
]

ASKED: list[tuple[dict[str, Any], str]] = [
    ({"metric": "accuracy"}, "no metric 'accuracy'"),
    ({"metric": 3}, "is none of these"),
    ({"metric": None}, "is none of these"),
    ({"metric": cw.logit([1, 2, 3])}, "is made for 3 prompts, and 2 were given"),
    ({"metric": cw.logit(10_000)}, "not in the vocabulary|10000"),
    ({"source": "swap"}, "'swap' is none of them"),
    ({"source": cw.masked()}, "is none of them"),
    ({"direction": "up"}, "no direction 'up'"),
    ({"precision": "half"}, "half"),
    ({"precision": "tf32"}, "CUDA|cuda|float32"),
    ({"batch_size": 0}, "a batch size of 0"),
    ({"batch_size": "many"}, "`batch_size` is str 'many'; expected a whole number"),
    ({"sites": ""}, "names none"),
    ({"sites": "zz"}, "zz"),
    ({"sites": "z[layer=99]"}, "99"),
    ({"sites": "z[layer=x]"}, "cannot read"),
    ({"sites": "z[pos=0]"}, "a position does not mean the same"),
    ({"sites": cw.site("z", layer=0, head=1, pos=2)}, "a position does not mean the same"),
    ({"sites": [cw.site("z", layer=0, head=99)]}, "99"),
    ({"sites": cw.sites("z", layer=":", head="9:")}, "chooses nothing"),
    ({"sites": cw.sites("zz", layer=":")}, "zz"),
    ({"sites": []}, "over no sites"),
    ({"sites": 3}, "no place"),
    ({"sites": "q9->m0"}, "edge|q9"),
]


@pytest.fixture(autouse=True)
def _nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was run")

    model()
    monkeypatch.setattr("conewise.text.questions.baseline", refuse)
    monkeypatch.setattr("conewise.runs.run.computed", refuse)


@pytest.mark.parametrize(("prompts", "said"), PROMPTS, ids=[str(n) for n in range(len(PROMPTS))])
def test_prompts_that_cannot_be_asked(prompts: Any, said: str) -> None:
    with pytest.raises(cw.ConewiseError, match=said):
        model().ask(prompts)


@pytest.mark.parametrize(("asked", "said"), ASKED, ids=[str(n) for n in range(len(ASKED))])
def test_what_cannot_be_asked_of_prompts(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(cw.ConewiseError, match=said):
        model().ask(TWO, **asked)


@pytest.mark.parametrize(
    ("module", "has_tokenizer", "said"),
    [
        (torch.nn.Linear(2, 2), False, r"there is none. Load it with `cw.load\(...\)`"),
        (torch.nn.Linear(2, 2), True, "reads no tokens"),
    ],
)
def test_who_cannot_be_asked(module: Any, has_tokenizer: bool, said: str) -> None:
    tokenizer = tiny().tokenizer if has_tokenizer else None
    with pytest.raises(cw.ConewiseError, match=said):
        Model._loaded(module, tokenizer, "one", "made for a test").ask(TWO)

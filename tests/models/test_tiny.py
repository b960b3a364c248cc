"""The tiny model does its task, a few of its heads do it, and its training is reproducible."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import Tensor

import conewise as cw
from conewise.errors import LoadError
from conewise.models import tiny
from training.held_out import NEW_NAMES, NEW_TEMPLATES, held_out_prompts, score
from training.language import (
    HELD_OUT_TEMPLATES,
    NAMES,
    TEMPLATES,
    Teller,
    held_out_pairs,
    training_split,
    vocabulary,
    words,
)
from training.tiny import Settings, new_module, trained, write
from training.words import encode

ROWS: list[dict[str, Any]] = json.loads(tiny.PROMPTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def loaded() -> Any:
    return cw.load("tiny")


class Asked:
    """The shipped prompts, as a sweep takes them."""

    def __init__(self, loaded: Any) -> None:
        def read(texts: Sequence[str]) -> Tensor:
            found: Tensor = loaded.tokenizer(texts, return_tensors="pt")["input_ids"]
            return found

        def token(text: str) -> int:
            (found,) = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
            return int(found)

        clean = read([row["clean"] for row in ROWS])
        corrupted = read([row["corrupted"] for row in ROWS])
        self.answers = torch.tensor([token(row["answers"][0]) for row in ROWS])
        self.wrong = torch.tensor([token(row["wrong_answers"][0]) for row in ROWS])
        self.model = cw.capture(loaded.module, input_ids=clean)
        self.clean = self.model.run(input_ids=clean)
        self.corrupted = self.model.run(input_ids=corrupted)
        self.metric = cw.logit_diff(self.answers, self.wrong)
        # At each position, the mean over prompts and counterfactuals: it says nothing about who acts.
        self.mean = cw.mean(self.model, [{"input_ids": clean}, {"input_ids": corrupted}], per_position=True)

    def accuracy(self, ablated: Sequence[tuple[int, int]]) -> float:
        """The share of right answers, of all words, with these heads at their means."""
        heads = [cw.site("z", layer=layer, head=head) for layer, head in ablated]
        sweep = self.model.sweep([heads], base=self.clean, source=self.mean, metric=self._is_right)
        return float(sweep.run().values[0])

    def _is_right(self, outputs: Any) -> Tensor:
        right: Tensor = outputs.logits[:, -1].argmax(-1) == self.answers
        return right.double()


@pytest.fixture(scope="module")
def asked(loaded: Any) -> Asked:
    return Asked(loaded)


# -- the task ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", held_out_prompts())
def test_the_card_says_how_well_it_does_on_held_out_prompts(loaded: Any, name: str) -> None:
    card = ModelCard.load(tiny.FOLDER / "README.md").data.eval_results
    told = {one.metric_type: one.metric_value for one in card if one.dataset_name == name}
    measured = score(loaded.module, held_out_prompts()[name])
    # Other kernels may round a near tie the other way: two prompts in a thousand.
    assert told["accuracy"] == pytest.approx(measured.accuracy, abs=0.002)
    assert told["logit_diff"] == pytest.approx(measured.logit_diff, abs=0.01)


@pytest.mark.parametrize("name", [NEW_NAMES, NEW_TEMPLATES])
def test_it_does_its_task_on_names_and_templates_that_it_never_saw(loaded: Any, name: str) -> None:
    assert score(loaded.module, held_out_prompts()[name]).accuracy > 0.99


def test_a_prompt_is_held_out_if_its_pair_of_names_is() -> None:
    for prompts in held_out_prompts().values():
        assert all(frozenset({p.answer, p.wrong}) in held_out_pairs() for p in prompts[:100] if p.flipped)


def test_no_training_text_holds_a_held_out_pair_of_names_or_a_held_out_template() -> None:
    teller = Teller(training_split(), seed=1)
    for _ in range(3000):
        prompt = teller.any()
        names = {word for word in words(prompt.text) if word in NAMES} | {prompt.answer}
        assert not {frozenset(pair) for pair in combinations(names, 2)} & held_out_pairs()
    assert not set(TEMPLATES) & set(HELD_OUT_TEMPLATES)


def test_words_of_held_out_templates_are_all_known() -> None:
    slots = {*"ABPSTV", "{", "}"}
    assert {word for text in HELD_OUT_TEMPLATES for word in words(text)} - slots <= set(vocabulary())


# -- the heads ---------------------------------------------------------------------------------


def test_a_sweep_finds_the_heads_that_do_it(asked: Asked) -> None:
    """Patching shows a few heads; without these it cannot answer, without as many others it can."""
    heads = cw.sites("z", layer=":", head=":")
    result = asked.model.sweep(heads, base=asked.corrupted, source=asked.clean, metric=asked.metric).run()
    assert result.verify(n=4).ok
    restored = result.normalised
    ranked = [
        (int(place) // restored.shape[1], int(place) % restored.shape[1])
        for place in restored.flatten().abs().argsort(descending=True)
    ]
    few = [head for head in ranked if restored[head] >= 0.05]
    assert 1 <= len(few) <= len(ranked) // 3
    assert set(few) == heads_of_the_card()
    assert asked.accuracy(few) < 0.2
    assert asked.accuracy(ranked[-len(few) :]) > 0.9


def heads_of_the_card() -> set[tuple[int, int]]:
    """The heads of which the card's table says that they restore at least 5%."""
    card = (tiny.FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+)\.(\d+) \| (-?[\d.]+)% ", card, flags=re.MULTILINE)
    return {(int(layer), int(head)) for layer, head, restored in rows if float(restored) >= 5}


def test_the_counterfactuals_turn_the_answer_round(asked: Asked) -> None:
    for run, expected in ((asked.clean, asked.answers), (asked.corrupted, asked.wrong)):
        assert run.logits[:, -1].argmax(-1).equal(expected)


# -- the files ---------------------------------------------------------------------------------


def test_its_prompts_are_held_out_and_of_one_length_with_answers_of_one_token(loaded: Any) -> None:
    lengths = set()
    for row in ROWS:
        assert row.keys() == {"clean", "corrupted", "answers", "wrong_answers"}
        lengths |= {len(loaded.tokenizer(row[kind])["input_ids"]) for kind in ("clean", "corrupted")}
        (answer,), (wrong,) = row["answers"], row["wrong_answers"]
        for text in (answer, wrong):
            assert len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"]) == 1
        assert frozenset({answer.strip(), wrong.strip()}) in held_out_pairs()
        assert "<unk>" not in loaded.tokenizer.tokenize(row["clean"] + answer)
    assert len(ROWS) == 16
    assert len(lengths) == 1
    first = [
        row["clean"].index(row["answers"][0]) < row["clean"].index(row["wrong_answers"][0]) for row in ROWS
    ]
    assert sum(first) == 8  # the answer is named first as often as second


def test_its_weights_are_safetensors_and_small() -> None:
    held = {path.name: path.stat().st_size for path in tiny.FOLDER.iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= held.keys()
    assert not [name for name in held if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert sum(held.values()) < 4e6


def test_a_word_is_a_token_and_an_unknown_word_is_seen_as_one(loaded: Any) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer.tokenize("Mary gave it to John.") == ["Mary", "gave", "it", "to", "John", "."]
    assert tokenizer.tokenize("Mary gave a zebra to mary") == ["Mary", "gave", "a", "<unk>", "to", "<unk>"]
    text = "When Mary and John went to the store, John gave a drink to"
    assert tokenizer(text)["input_ids"] == encode(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer("Mary gave a zebra")["input_ids"]) == "<bos> Mary gave a <unk>"


def test_rows_of_a_padded_batch_are_answered_as_when_alone(loaded: Any) -> None:
    texts = [ROWS[0]["clean"], "Then Tom and Anna went to the lake. It was late. Anna gave a ring to"]
    batch = loaded.tokenizer(texts, return_tensors="pt", padding=True)
    together = loaded.module(**batch).logits[:, -1]
    for row, text in enumerate(texts):
        alone = loaded.module(**loaded.tokenizer(text, return_tensors="pt")).logits[0, -1]
        torch.testing.assert_close(together[row], alone, rtol=1e-4, atol=1e-4)


def test_it_goes_on_with_a_text_until_the_sentence_ends(loaded: Any) -> None:
    prompt = loaded.tokenizer(ROWS[0]["clean"], return_tensors="pt")
    told = loaded.module.generate(**prompt, max_new_tokens=8, do_sample=False)[0]
    assert loaded.tokenizer.decode(told, skip_special_tokens=True) == f"{ROWS[0]['clean']} Mary."


# -- loading -----------------------------------------------------------------------------------


def test_it_loads_without_a_network_a_cache_or_a_home(tmp_path: Any) -> None:
    script = (
        "import socket\n"
        "def refuse(*_, **__): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        "import conewise as cw\n"
        "loaded = cw.load('tiny')\n"
        "print(loaded.label, loaded.origin, sep=': ')"
    )
    places = {
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hub"),
        "CONEWISE_CACHE": str(tmp_path / "cache"),
    }
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=places, cwd=tmp_path
    )
    assert told.stdout == "tiny: the tiny model that comes with conewise\n"
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_its_name_does_not_hide_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cw.load("tiny").origin == "the tiny model that comes with conewise"
    with pytest.raises(LoadError, match="is not a model: it has no config"):
        cw.load("./tiny")


def test_it_has_no_revision() -> None:
    with pytest.raises(LoadError, match="'tiny' is not a hub name, so it has no revision 'main'"):
        cw.load("tiny", revision="main")


def test_known_names_are_told_where_a_name_is_unknown(tmp_path: Any) -> None:
    with pytest.raises(LoadError, match=r"'openai-community/gpt2', 'smollm2-135m' or 'tiny'\."):
        cw.load(tmp_path / "nothing")
    with pytest.raises(LoadError, match=r"Did you mean 'tiny'\?"):
        cw.load("./tinny")


# -- training ----------------------------------------------------------------------------------


def test_training_gives_the_same_weights_again_and_others_with_another_seed(tmp_path: Any) -> None:
    once, again, other = (
        trained(Settings(steps=3, batch=8, seed=seed), say=lambda line: None) for seed in (0, 0, 1)
    )
    for name, weight in once.state_dict().items():
        assert weight.equal(again.state_dict()[name]), name
    assert not all(weight.equal(other.state_dict()[name]) for name, weight in once.state_dict().items())
    sooner = trained(Settings(steps=2, batch=8), say=lambda line: None)
    assert not any(
        weight.equal(sooner.state_dict()[name])
        for name, weight in once.named_parameters()
        if weight.ndim == 2
    )
    for folder, module in (("once", once), ("again", again)):
        write(module, tmp_path / folder)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("once", "again")]
    assert files[0] == files[1]


def test_what_is_shipped_beside_the_weights_is_what_training_writes(tmp_path: Any) -> None:
    write(new_module(), tmp_path)
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "prompts.json",
    ):
        assert json.loads((tmp_path / name).read_text()) == json.loads((tiny.FOLDER / name).read_text()), name
    shapes = [
        {name: weight.shape for name, weight in load_file(folder / "model.safetensors").items()}
        for folder in (tmp_path, tiny.FOLDER)
    ]
    assert shapes[0] == shapes[1]

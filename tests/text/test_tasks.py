"""Tasks as prompts: what is well-formed, held out, and what the command prints."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import conewise as cw
from conewise.errors import PromptError
from conewise.model import Model
from conewise.text import tasks
from conewise.text.prompts import Pair, as_pairs, tokenize
from conewise.text.tasks import TASKS, Words, is_well_formed, templates_of
from tests.cli.commands import Done

CLEAN, CORRUPTED = (
    f"When Mary and John went to the store, {one} gave a drink to" for one in ("John", "Mary")
)


@cache
def tiny() -> Model:
    return cw.load("tiny")


class Digits:
    """A tokenizer that splits numbers into digits, as SmolLM2's does, and keeps every other character."""

    unk_token_id = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(one) for one in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_rows_are_tokens_of_equal_length_with_answers_of_one_token() -> None:
    rows = cw.tasks.ioi(tiny(), n=50, seed=0)
    read = tokenize(as_pairs(rows), tiny().tokenizer)
    assert len({(row["clean"], row["corrupted"]) for row in rows}) == 50
    assert not read.notes
    assert [len(one) for one in read.clean] == [len(one) for one in read.corrupted]
    assert len(set(read.lengths)) > 1


def test_a_seed_says_which_rows() -> None:
    assert cw.tasks.ioi(tiny(), n=5, seed=1) == cw.tasks.ioi(tiny(), n=5, seed=1)
    assert cw.tasks.ioi(tiny(), n=5, seed=1) != cw.tasks.ioi(tiny(), n=5, seed=2)


def test_more_rows_than_there_are_end_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the few rows are found, and far more that are asked for do not keep one waiting."""
    for words, few in (
        ("HE", ["John"]),
        ("SHE", ["Mary", "Anna"]),
        ("PLACES", ["store"]),
        ("THINGS", ["book"]),
    ):
        monkeypatch.setattr(tasks, words, few)
    every = 3 * 2 * 2 * len(TASKS["ioi"].templates)  # pairs of names in both orders, and who acts
    assert len(cw.tasks.ioi(tiny(), n=every)) == every
    with pytest.raises(PromptError, match=f"{every} well-formed prompts of the task 'ioi' were found"):
        cw.tasks.ioi(tiny(), n=10_000_000)


def test_train_and_test_share_no_template() -> None:
    of = {
        split: {row["template"] for row in cw.tasks.ioi(tiny(), n=20, split=split)}
        for split in ("train", "test")
    }
    assert of["train"] & of["test"] == set()
    for task in TASKS.values():
        train, test = (templates_of(task, split) for split in ("train", "test"))
        assert {**train, **test} == templates_of(task, "all")
        assert test


@pytest.mark.parametrize(
    ("clean", "corrupted", "answer", "well_formed"),
    [
        (CLEAN, CORRUPTED, " Mary", True),
        (CLEAN, CLEAN, " Mary", False),  # nothing is corrupted
        (CLEAN, f"{CORRUPTED} to", " Mary", False),  # longer
        (CLEAN, CORRUPTED.replace("drink", "xylophone"), " Mary", False),  # an unknown word
        (CLEAN, CORRUPTED, " Xerxes", False),
    ],
)
def test_what_is_well_formed(clean: str, corrupted: str, answer: str, *, well_formed: bool) -> None:
    draft = Pair(clean, corrupted, (answer,), (" John",))
    assert is_well_formed(draft, Words(tiny().tokenizer)) is well_formed


def test_greater_than_asks_for_one_digit_where_numbers_are_split() -> None:
    for row in cw.tasks.greater_than(Digits(), n=20):
        tens = int(row["clean"].split("to")[0].strip()[-2]) if "from" in row["clean"] else None
        assert all(len(one) == 1 for one in (*row["answers"], *row["wrong_answers"]))
        if tens is not None and "the year" not in row["clean"]:
            assert sorted(row["answers"]) == [str(one) for one in range(tens + 1, 10)]


def test_a_task_that_a_tokenizer_cannot_write_says_so() -> None:
    with pytest.raises(PromptError, match=r"0 well-formed prompts of the task 'mcqa'.*n=3 were asked for"):
        cw.tasks.mcqa(tiny(), n=3)
    with pytest.raises(PromptError, match="no task 'chess'; there are ioi, greater_than"):
        cw.tasks.make("chess", tiny())
    with pytest.raises(PromptError, match="no split 'dev'"):
        cw.tasks.ioi(tiny(), split="dev")


def test_the_small_model_does_its_task() -> None:
    found = cw.tasks.measure(tiny(), cw.tasks.ioi(tiny(), n=20))
    assert (found.prompts, found.accuracy, found.corrupted) == (20, 1.0, 0.0)
    assert "100% of 20 prompts right" in str(found)


def test_the_command_prints_rows_that_other_commands_read() -> None:
    printed = json.loads(Done("task", "ioi", "tiny", "--n", "3").out)
    assert printed["prompts"] == cw.tasks.ioi(tiny(), n=3)
    assert len(as_pairs(printed)) == 3


def test_rows_of_the_benchmark_are_read_as_its_circuit_track_reads_them() -> None:
    ioi = {
        "prompt": "Mary and John left, and John gave it to",
        "template": "{} and {} left",
        "metadata": {"indirect_object": "Mary", "subject": "John"},
        "choices": ["Mary", "John"],
        "answerKey": 0,
        "abc_counterfactual": {"prompt": "Ann and Bob left, and Eve gave it to", "answerKey": 0},
        "s2_io_flip_counterfactual": {"prompt": "Mary and John left, and Mary gave it to"},
    }
    letters = {"label": ["A", "B"], "text": ["red", "blue"]}
    mcqa = {
        "prompt": "Which?",
        "choices": letters,
        "answerKey": 1,
        "symbol_counterfactual": {"prompt": "What?", "choices": letters, "answerKey": 0},
    }
    sums = {"prompt": "1+2=", "label": 3, "random_counterfactual": {"prompt": "4+5=", "label": 9}}
    one, two, three = as_pairs([ioi, mcqa, sums])
    assert (one.clean, one.corrupted) == (ioi["prompt"], "Mary and John left, and Mary gave it to")
    assert (one.answers, one.wrong_answers, one.template) == ((" Mary",), (" John",), "{} and {} left")
    assert (two.corrupted, two.answers, two.wrong_answers) == ("What?", ("B",), ("A",))
    assert (three.corrupted, three.answers, three.wrong_answers) == ("4+5=", ("3",), ("9",))
    for wrong in ({"answerKey": 7}, {"symbol_counterfactual": "What?"}):
        with pytest.raises(PromptError, match=r"row 1, field '\w+' is"):
            as_pairs([{**mcqa, **wrong}])


def test_rows_come_back_from_the_csv_of_eap_ig(tmp_path: Path) -> None:
    rows = cw.tasks.ioi(tiny(), n=5)
    path = cw.tasks.write_csv(rows, tiny(), tmp_path / "ioi.csv")
    assert path.read_text().startswith("clean,corrupted,correct_idx,incorrect_idx\n")
    one, other = (tokenize(as_pairs(given), tiny().tokenizer) for given in (rows, path))
    assert (one.clean, one.answers, one.wrong_answers) == (other.clean, other.answers, other.wrong_answers)
    other.expect_answers("logit_diff")
    assert cw.tasks.write_csv(rows, tiny(), tmp_path / "new" / "ioi.csv").is_file()
    with pytest.raises(PromptError, match="the prompts cannot be written to"):
        cw.tasks.write_csv(rows, tiny(), path / "ioi.csv")
    for given in ("Mary", -1, True, 3.7, float("inf"), [[3]]):
        with pytest.raises(PromptError, match=r"field 'correct_idx' is .*; it is the number of a token"):
            as_pairs([{**rows[0], "correct_idx": given}])
    beyond = as_pairs([{**rows[0], "correct_idx": 1000, "incorrect_idx": "[7, 7]"}])
    with pytest.raises(
        PromptError, match="has the token 1,000 among its answers, and this model's tokenizer"
    ):
        tokenize(beyond, tiny().tokenizer)
    assert beyond[0].ids[1] == (7,)

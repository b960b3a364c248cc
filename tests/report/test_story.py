import json

import pytest

from conewise.errors import SweepError
from conewise.report.story import Story, TokenizedPair
from conewise.text.tokens import token_texts

PAIR = TokenizedPair(
    "Ann gave Bob", "Bob gave Bob", ("Ann", " gave", " Bob"), ("Bob", " gave", " Bob"), (" it",), (" him",)
)


def test_a_story_comes_back_from_json_as_it_was() -> None:
    story = Story(
        "tiny",
        (PAIR, TokenizedPair("line\u2028end", noised=(1, 2))),
        metric="a difference",
        command="conewise sweep tiny",
        seed=3,
        forwards_timed=4,
        forward_seconds=0.25,
    )
    assert Story.from_json(story.to_json()) == story


def test_a_story_of_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    told = json.loads(Story("tiny", (PAIR,)).to_json())
    told["weather"] = "fine"
    told["prompts"][0]["mood"] = "good"
    assert Story.from_json(json.dumps(told)) == Story("tiny", (PAIR,))


@pytest.mark.parametrize("text", ["", "[]", "3", '{"prompts": 3}', "{}", '{"model": "m", "prompts": [{}]}'])
def test_what_is_no_story_is_refused(text: str) -> None:
    with pytest.raises(SweepError, match="not the story of a sweep"):
        Story.from_json(text)
    if text.startswith("{"):
        whole = {"kind": "conewise story", "format": 1, **json.loads(text)}
        with pytest.raises(SweepError, match="not the story of a sweep: the story"):
            Story.from_json(json.dumps(whole))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"base": "dirty"}, "base and source are each one of clean, corrupted"),
        ({"patch": "nonsense"}, "one of source, zero, mean, noise"),
        ({"patch": "zero"}, "a source is named when the patch is 'source'"),
        ({"source": None}, "a source is named when the patch is 'source'"),
    ],
)
def test_a_story_that_contradicts_itself_is_refused(given: dict[str, str | None], said: str) -> None:
    with pytest.raises(SweepError, match=said):
        Story("tiny", **given)  # type: ignore[arg-type]


def test_the_direction_says_which_run_is_changed_and_what_is_put_there() -> None:
    assert "runs the corrupted prompt" in Story("m").direction
    assert "on the clean prompt" in Story("m").direction
    zeroed = Story("m", base="clean", source=None, patch="zero").direction
    assert "runs the clean prompt" in zeroed
    assert "zero" in zeroed


def test_prompts_differ_where_their_tokens_do_and_where_one_is_longer() -> None:
    assert PAIR.differing == {0}
    assert TokenizedPair("", "", ("a", "b"), ("a", "c", "d")).differing == {1, 2}
    assert TokenizedPair("one prompt alone", clean_tokens=("one",)).differing == frozenset()


def test_a_token_that_is_no_whole_character_is_shown_as_the_tokenizer_writes_it() -> None:
    class Words:
        def decode(self, ids: list[int]) -> str:
            return {0: " Ann", 1: "\ufffd", 2: ""}[ids[0]]

        def convert_ids_to_tokens(self, number: int) -> str:
            return f"<{number}>"

    assert token_texts(Words(), [0, 1, 2]) == (" Ann", "<1>", "<2>")

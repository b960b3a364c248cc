from typing import Any

import pytest

from conewise.errors import PromptError
from conewise.text.prompts import Pair, TokenizedPrompts, tokenize
from conewise.text.tokens import subject_positions
from tests.runs.spelling import byte_level, word_level

CLEAN = "When Mary and John went to the store, John gave a drink to"
LONG = Pair(CLEAN, CLEAN.replace("John gave", "Mary gave"), (" Mary",), (" John",))
SHORT = Pair("When John gave a letter to", "When Mary gave a letter to", (" Mary", " her"), (" John",))


def test_prompts_are_grouped_by_length_and_keep_their_own_order() -> None:
    found = tokenize([LONG, SHORT, LONG, SHORT, SHORT], byte_level())
    assert found.groups == ((1, 3, 4), (0, 2))
    assert found.lengths == tuple(len(found.clean[group[0]]) for group in found.groups)
    assert found.lengths[0] < found.lengths[1]
    (short, long) = found.inputs("clean")
    assert short["input_ids"].tolist() == [list(found.clean[number]) for number in (1, 3, 4)]
    assert long["input_ids"].shape == (2, found.lengths[1])
    assert [pair.clean for pair in found.tokenized_pairs()] == [pair.clean for pair in found.pairs]


def test_a_group_is_no_larger_than_the_batch_size() -> None:
    assert tokenize([LONG, SHORT, SHORT, SHORT], byte_level(), batch_size=2).groups == ((1, 2), (3,), (0,))
    with pytest.raises(PromptError, match="a batch size of 0"):
        tokenize([LONG], byte_level(), batch_size=0)


def test_tokens_are_told_as_text() -> None:
    (told,) = tokenize([LONG], byte_level()).tokenized_pairs()
    assert "".join(told.clean_tokens) == LONG.clean
    assert (told.answers, told.wrong_answers) == ((" Mary",), (" John",))
    (told,) = tokenize([LONG], word_level()).tokenized_pairs()
    assert told.clean_tokens[:3] == ("<s>", "When", "Mary")


def answer(text: str, clean: str = CLEAN, **how: Any) -> TokenizedPrompts:
    return tokenize([Pair(clean, clean, (text,))], byte_level(), **how)


def test_an_answer_is_taken_as_written_where_it_is_one_token() -> None:
    assert answer(" Mary").tokenized_pairs()[0].answers == (" Mary",)
    assert answer(" Mary").notes == ()
    assert answer("Mary", clean='She said: "').tokenized_pairs()[0].answers == ("Mary",)


def test_a_space_is_added_or_removed_where_only_then_an_answer_is_one_token_and_a_note_says_so() -> None:
    found = answer("John")
    assert found.tokenized_pairs()[0].answers == (" John",)
    assert found.notes == ("prompt 1, field 'answers': 'John' was read as ' John', which is one token",)


def test_a_word_that_would_be_glued_to_the_prompt_is_refused_unless_it_is_meant() -> None:
    with pytest.raises(
        PromptError, match=r"'Mary' and ' Mary' are both a token.*ends in 'to'.*Write ' Mary'"
    ):
        answer("Mary")
    assert answer("Mary", as_written=True).tokenized_pairs()[0].answers == ("Mary",)


def test_an_answer_that_is_given_twice_counts_once_and_a_note_says_so() -> None:
    found = tokenize([Pair(CLEAN, CLEAN, (" John", " Mary", "John"), (" her", " her"))], byte_level())
    (told,) = found.tokenized_pairs()
    assert (told.answers, told.wrong_answers) == ((" John", " Mary"), (" her",))
    assert found.notes[1:] == (
        "prompt 1, field 'answers': 'John' is the same token as ' John', and counts once",
        "prompt 1, field 'wrong_answers': ' her' is the same token as ' her', and counts once",
    )


def test_an_answer_of_several_tokens_is_refused_with_what_it_splits_into() -> None:
    with pytest.raises(
        PromptError, match=r"' Mary John' is not one token.*\[ Mary\] \[ John\].*\[Mary\] \[ John\]"
    ):
        answer(" Mary John")


def test_an_answer_that_is_not_in_the_vocabulary_is_refused() -> None:
    for text in ("Zebra", " Zebra"):
        with pytest.raises(PromptError, match=r"'.?Zebra' is not in the vocabulary"):
            tokenize([Pair("John gave", "Mary gave", (text,))], word_level())


def test_an_unknown_word_in_a_prompt_is_noted() -> None:
    (note,) = tokenize([Pair("John gave Zebra", "Mary gave a", ("to",))], word_level()).notes
    assert "prompt 1, field 'clean'" in note
    assert "[<unk>]" in note


def test_prompts_of_different_lengths_are_refused_with_lengths_and_tokens() -> None:
    with pytest.raises(PromptError) as raised:
        tokenize([LONG, Pair("John gave a drink to", "John gave to", (), (), "p.csv, line 3")], byte_level())
    for words in ("p.csv, line 3: clean has", "tokens and corrupted", "[ gave] [ a] [ drink] [ to]"):
        assert words in str(raised.value)


def test_what_a_metric_reads_has_to_be_there() -> None:
    found = tokenize([LONG, Pair("When John", "When Mary", (" to",))], byte_level())
    found.expect_answers("prob")
    with pytest.raises(
        PromptError, match="prompt 2 has no wrong_answers, and the metric logit_diff reads them"
    ):
        found.expect_answers("logit_diff")
    with pytest.raises(PromptError, match="no metric 'loss'"):
        found.expect_answers("loss")


def test_an_answer_that_is_wrong_as_well_is_refused() -> None:
    found = tokenize([Pair("When John", "When Mary", (" to", " a"), (" a",))], byte_level())
    with pytest.raises(PromptError, match="' a' among its answers and among its wrong answers"):
        found.expect_answers("logit_diff")


def test_no_prompts_and_no_tokenizer_are_refused() -> None:
    with pytest.raises(PromptError, match="no prompts"):
        tokenize([], byte_level())
    with pytest.raises(PromptError, match="no tokenizer"):
        tokenize([LONG], None)


@pytest.mark.parametrize("tokenizer", [byte_level, word_level])
def test_a_subject_is_found_wherever_it_stands(tokenizer: object) -> None:
    assert callable(tokenizer)
    made = tokenizer()
    (told,) = tokenize([Pair(CLEAN, CLEAN)], made).tokenized_pairs()
    for subject in ("John", " John", "Mary and John"):
        words = set(subject.split())
        standing = subject_positions(CLEAN, subject, made)
        shown = [told.clean_tokens[at].strip() for at in standing]
        assert set(shown) == words
        assert len(standing) == {"John": 2, "Mary and John": 3}[subject.strip()]


def test_a_subject_that_does_not_stand_in_the_prompt_is_refused() -> None:
    with pytest.raises(PromptError, match="'Paul' does not stand in the prompt"):
        subject_positions(CLEAN, "Paul", byte_level())
    with pytest.raises(PromptError, match="the subject is empty"):
        subject_positions(CLEAN, "  ", byte_level())


class PanicException(BaseException):
    """As the library `tokenizers` raises it, which is written in Rust; its class cannot be imported."""


class Broken:
    """A tokenizer that was made, and fails when it is used."""

    is_fast = True

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *_: object, **__: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [Exception("bare"), PanicException("no entry"), TypeError("'>'"), RecursionError()]
)
def test_a_tokenizer_that_fails_when_it_is_used_is_said_to_be_damaged(error: BaseException) -> None:
    said = (
        rf"tokenizer of this model .*{type(error).__name__}.*Its files are damaged, or do not belong together"
    )
    with pytest.raises(PromptError, match=said):
        tokenize([LONG], Broken(error))
    with pytest.raises(PromptError, match=said):
        subject_positions(CLEAN, "John", Broken(error))


def test_a_tokenizer_that_is_interrupted_is_not() -> None:
    with pytest.raises(KeyboardInterrupt):
        tokenize([LONG], Broken(KeyboardInterrupt()))


def test_half_of_a_surrogate_pair_has_no_tokens() -> None:
    for pair in (Pair("a\ud800", "b"), Pair(CLEAN, CLEAN, ("\udce9",))):
        with pytest.raises(
            PromptError, match=r"half of a surrogate pair, .u.*no character and has no tokens"
        ):
            tokenize([pair], byte_level())

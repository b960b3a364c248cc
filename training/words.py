"""The tokenizer of the tiny model: each word is a token."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from training.language import BOS, EOS, PAD, UNK, vocabulary, words

NUMBERS = {word: number for number, word in enumerate(vocabulary())}


def tokenizer(max_length: int) -> Any:
    """A tokenizer that makes one token of each word and mark, `<unk>` of a word that it does not know.

    A text begins with `<bos>`, as a continued text does not. Padding goes to the left, so that the last
    position of every row is its last word.
    """
    core = Tokenizer(models.WordLevel(NUMBERS, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, NUMBERS[BOS])]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace(Regex(r"^(?![.,])"), " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # Not typed.
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=core,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def encode(text: str) -> list[int]:
    """A text as the tokenizer encodes it, without the tokenizer: the tests compare the two."""
    return [NUMBERS[BOS], *(NUMBERS.get(word, NUMBERS[UNK]) for word in words(text))]

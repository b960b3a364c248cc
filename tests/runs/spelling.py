"""Two small tokenizers: one whose words carry the space before them, and one of whole words."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = (
    "When",
    "Mary",
    "and",
    "John",
    "went",
    "to",
    "the",
    "store",
    ",",
    "gave",
    "a",
    "drink",
    "letter",
    "her",
)


@cache
def byte_level() -> Any:
    """Every word is a token with a space in front; Mary and to are tokens without it as well."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(["x", *WORDS])] * 50 + ["Mary", "to", "When"] * 50, trainer)
    return fast(tokenizer_object=tokenizer)


@cache
def word_level() -> Any:
    """Words are tokens, spaces are not; other words are unknown; a token is added in front."""
    vocabulary = {word: number for number, word in enumerate(["<s>", "<unk>", *WORDS])}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return fast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def fast(**given: Any) -> Any:
    library: Any = transformers
    return library.PreTrainedTokenizerFast(**given)

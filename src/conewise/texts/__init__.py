"""Texts as tokens: a tokenizer called safely, answers of one token, where words stand in a prompt."""

"""The model card of the tiny model: every number in it is measured by the run that writes it."""

from __future__ import annotations

import datetime as dt
import platform
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from huggingface_hub import EvalResult, ModelCardData

from conewise.loading import load
from training import language
from training.circuit import LOOKS, STRONG, Circuit, Head, measure
from training.held_out import NEW_TEMPLATES, Score, held_out_prompts, score

EXAMPLE = """\
```python
import conewise as cw

loaded = cw.load("tiny")
prompt = loaded.tokenizer("When Mary and John went to the store, John gave a drink to", return_tensors="pt")
answer = loaded.module(**prompt).logits[0, -1].argmax()
assert loaded.tokenizer.decode(answer) == "Mary"
```"""


def write_card(folder: Path, settings: Any, seconds: float) -> None:
    """Measure the model in `folder`, and write README.md beside it."""
    module = load(folder).module
    scores = {name: score(module, prompts) for name, prompts in held_out_prompts().items()}
    blocks = [
        _front(scores),
        *_what(module),
        *_scores(scores),
        *_circuit(measure(folder)),
        *_training(settings, seconds),
    ]
    (folder / "README.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def _prose(text: str, indent: str = "") -> str:
    joined = " ".join(text.split())
    return textwrap.fill(
        joined, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _item(text: str) -> str:
    return _prose(text, indent="  ")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _front(scores: Mapping[str, Score]) -> str:
    """The card's metadata, in the form that the Hugging Face hub reads."""
    measured = {
        name: {"accuracy": round(one.accuracy, 4), "logit_diff": round(one.logit_diff, 3)}
        for name, one in scores.items()
    }
    about = ModelCardData(
        model_name="conewise-tiny",
        eval_results=[
            EvalResult("text-generation", "held-out", name, metric, value, dataset_config=name)
            for name, metrics in measured.items()
            for metric, value in metrics.items()
        ],
        language="en",
        license="mit",
        library_name="transformers",
        pipeline_tag="text-generation",
    )
    return f"---\n{about.to_yaml()}\n---"


def _what(module: Any) -> list[str]:
    config = module.config
    return [
        "# tiny",
        _prose(f"""
            A language model of {module.num_parameters():,} parameters that comes with conewise, for demos,
            tests and examples that need no download. It reads and writes {config.vocab_size} words, and
            knows one thing: when two people are mentioned and one of them gives something, it is to the
            other (indirect object identification, Wang et al., 2022)."""),
        EXAMPLE,
        _prose(f"""
            A Llama: {config.num_hidden_layers} layers of {config.num_attention_heads} heads, width
            {config.hidden_size}, {config.intermediate_size} neurons a layer, rotary positions, tied
            embeddings, float32."""),
        _prose(f"""
            **Words.** Each word and mark is a token, upper and lower case told apart; the tokenizer puts
            `<bos>` in front of a text. A word that it does not know becomes `<unk>`, which
            `tokenizer.tokenize(text)` shows. Names: {", ".join(language.NAMES)}. Places:
            {", ".join(language.PLACES)}. Things: {", ".join(language.THINGS)}. Verbs:
            {", ".join(language.VERBS)}."""),
        _prose("""
            **Not for** anything else: it knows no other words and no other sentences, and what is found in
            it says little about models that were trained on human text."""),
    ]


def _scores(scores: Mapping[str, Score]) -> list[str]:
    return [
        "## How well it does",
        _prose(f"""
            A prompt counts as right when the answer is the likeliest of all words. Every prompt here has
            a held-out pair of names and, where it names a place and a thing, a held-out pair of these:
            {len(language.held_out_pairs())} of the {len(language.all_pairs())} pairs of names never occur
            in one training text, in whatever roles, and {len(language.held_out_fillings())} of the
            {len(language.PLACES) * len(language.THINGS)} pairs of a place and a thing never in one
            sentence. In "{NEW_TEMPLATES}", the {len(language.HELD_OUT_TEMPLATES)} sentence templates are
            held out as well."""),
        _table(
            ("held-out prompts", "number", "accuracy", "logit difference"),
            [
                (name, str(one.prompts), f"{one.accuracy:.1%}", f"{one.logit_diff:.2f}")
                for name, one in scores.items()
            ],
        ),
        _prose("""
            The logit difference is the mean of logit(answer) − logit(the one who acts). `prompts.json`
            holds 16 such prompts, all of one length, each with its counterfactual: the other one acts, so
            that the answer is the other one too."""),
    ]


def _circuit(found: Circuit) -> list[str]:
    looks = ("last to answer", "last to subject", "last to subject before")
    ranked = sorted(found.heads, key=lambda head: -head.restored)
    return [
        "## Which heads do it",
        _prose(f"""
            On {found.prompts} held-out prompts shaped like the one above, the logit difference is
            {found.clean:.2f}, and {found.flipped:.2f} in the counterfactual ones. *Restored*: how much of
            that comes back when the output of one head in the prompts is put into the counterfactuals.
            *Without it*: the logit difference with that output replaced by its mean over all these prompts,
            position by position. The others are mean attention weights: from the last word (`to`) to the
            answer, to the one who acts, and to the first mention of that one."""),
        _table(
            ("head", "restored", "without it", "to → answer", "to → actor", "to → actor before"),
            [
                (
                    head.name,
                    f"{head.restored:.1%}",
                    f"{head.without:.2f}",
                    *(f"{head.looks[name]:.2f}" for name in looks),
                )
                for head in ranked
            ],
        ),
        "\n".join(_roles(found)),
        _prose(f"""
            The MLPs of the layers restore {", ".join(f"{share:.1%}" for share in found.mlps)}. With
            {_names(found.strongest)} (all that restore at least {STRONG:.0%}) replaced by their means
            together, accuracy on these prompts is {found.without_strongest:.1%}; with the weakest,
            {_names(found.weakest)}, it is {found.without_weakest:.1%}; with none, {found.accuracy:.1%}."""),
    ]


def _roles(found: Circuit) -> list[str]:
    """What the numbers say, in words: by rules alone, so that it is true of whatever was trained."""
    said = []
    if actors := [head for head in found.strongest if head.looks["last to subject"] >= LOOKS]:
        said.append(f"- **Who acts** (attention from the last word to the one who acts): {_names(actors)}.")
    if movers := [head for head in found.heads if head.looks["last to answer"] >= LOOKS]:
        said.append(f"- **Name movers** (attention from the last word to the answer): {_names(movers)}.")
    if found.moved:
        changes = "; ".join(
            f"{name}: {a:.2f} → {c:.2f} and {b:.2f} → {d:.2f}" for name, (a, b, c, d) in found.moved.items()
        )
        said.append(f"""- **The name movers are steered**: when the strong heads of earlier layers have their
            output of the counterfactuals, attention to the answer, and attention to the first mention of the
            one who acts, become others. {changes}.""")
    return list(map(_item, said)) or ["No head stands out."]


def _names(heads: Iterable[Head]) -> str:
    return ", ".join(head.name for head in heads) or "none"


def _training(settings: Any, seconds: float) -> list[str]:
    libraries = (torch, transformers, tokenizers)
    versions = ", ".join(f"{library.__name__} {library.__version__}" for library in libraries)
    chosen = ", ".join(f"{name} = {value}" for name, value in asdict(settings).items())
    return [
        "## Training",
        _prose(f"""
            `make train-tiny`: {settings.steps} steps of {settings.batch} texts drawn afresh, {seconds:.0f}
            seconds of CPU time on one thread, on {dt.datetime.now(dt.UTC).date()}; {versions}, Python
            {platform.python_version()}, {platform.machine()}. {chosen}. The same versions on the same kind
            of machine give the same weights, bit for bit."""),
        _prose(f"""
            It is trained as a language model, on every word of texts made from {len(language.TEMPLATES)}
            templates and further sentences. So that counting names does not suffice, most texts have more
            people than two: another pair, one of whom may be the one who acts; somebody who is mentioned on
            the way, or owns what is given; a third person who acts too. One word in a hundred is read as
            `<unk>`."""),
        _prose("""
            The language, the size of the model and the settings were chosen after about fifty trial runs, by
            accuracy on other prompts of the same held-out pairs and templates, and for a clear division of
            work among the heads: in other runs that did the task as well, one head alone restored nearly
            all, and others little. So the accuracies are not those of a single blind trial, and the circuit
            is one of several that such training gives."""),
    ]

"""The glossary has the words that public names are made of."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import conewise as cw
from conewise.checks.cell_check import CellCheck
from conewise.checks.verify import Verification
from conewise.circuits.circuit.comparison import Comparison
from conewise.circuits.circuit.decision import Decision
from conewise.circuits.tracing import Trace
from conewise.decomposing.attention_patterns import AttentionPatterns
from conewise.decomposing.decomposition import Decomposition
from conewise.decomposing.lens import Lens
from conewise.decomposing.logit_attribution import LogitAttribution
from conewise.locations.listing import Listing
from conewise.locations.selectors import Cell, Selector, Spread
from conewise.prompts.answer import Answer
from conewise.prompts.held_out import HeldOut
from conewise.prompts.questions import Question
from conewise.runs.backward.backward_cost import BackwardCost
from conewise.runs.reading import RunWorld
from conewise.sweeps.statistics import Statistics

PAGE = Path(__file__).parents[2] / "docs" / "GLOSSARY.md"

# What public functions and methods return, besides what is public itself.
RETURNED = (
    *(AttentionPatterns, Lens),
    BackwardCost,
    *(Cell, CellCheck, Comparison, Decision, Decomposition, Listing, LogitAttribution, RunWorld, Selector),
    *(Spread, Trace, Verification),
    *(Answer, HeldOut, Question, Statistics),
)

# Words of plain English and of Python, and those of the field, that mean here what they mean everywhere.
PLAIN = frozenset(
    {
        "after", "along", "array", "attach", "away", "bitwise", "both", "by", "bytes", "check", "checked",
        "at", "choices", "clear", "close", "compare", "computed", "conewise", "coordinates", "count",
        "dataframe", "default", "discard", "dot", "equals", "error", "estimated", "excess", "facts", "fixed",
        "ask", "attribute", "described", "folder", "inside", "where", "forward", "scale", "seconds", "seed",
        "function", "hooked", "inputs", "interpreted", "interval", "is", "largest", "list", "load",
        "log", "made", "method", "only", "second",
        "may", "message", "missing", "module", "name", "names", "not", "note", "notes", "number",
        "numbers", "of", "off", "ok", "once", "output", "outputs", "own", "param", "params",
        "partial", "passed", "per", "plot", "precision", "read", "relative", "removal",
        "remove", "rerouted", "round", "row", "rows", "samples", "save", "select", "set", "shape",
        "signature", "size", "strongest", "subject", "table", "take", "text", "to", "trusted",
        "why", "from", "full", "planned", "json", "max", "rerun", "unchecked", "unguard", "unlisten",
        "value", "values", "weights", "worst", "has", "image", "patterns", "tensor", "texts", "top",
    }
)  # fmt: skip
FIELD = frozenset(
    {"attention", "token", "causal", "cross", "diff", "entropy", "kl", "logit", "prob", "clean", "corrupted"}
)


def defined() -> frozenset[str]:
    """The words that the page explains: set in bold where they are, in italics on the way, or as code."""
    text = PAGE.read_text("utf-8")
    found = re.findall(r"^\*\*([^*]+)\*\*", text, flags=re.MULTILINE) + re.findall(r"\*(\w[\w ]*)\*", text)
    return frozenset(word.lower() for phrase in found for word in re.split(r"[ -]", phrase))


def words(name: str) -> list[str]:
    """The words of a name: `patch_edge` is patch and edge, `ConewiseError` conewise and error."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def stems(word: str) -> Iterator[str]:
    """A word, and what it may be a form of."""
    yield word
    for ending, instead in (
        ("s", ""),
        ("es", ""),
        ("es", "is"),
        ("ed", ""),
        ("d", ""),
        ("ing", ""),
        ("ed", "e"),
    ):
        if word.endswith(ending):
            yield word.removesuffix(ending) + instead


def attributes(kind: type) -> set[str]:
    """The public attributes of a class: of the class itself, and those that its constructor sets."""
    found = {name for name in vars(kind) if not name.startswith("_")}
    found |= {name for name in getattr(kind, "__annotations__", {}) if not name.startswith("_")}
    if "__init__" in vars(kind) and not is_dataclass(kind):
        tree = ast.parse(textwrap.dedent(inspect.getsource(vars(kind)["__init__"])))
        found |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and not node.attr.startswith("_")
        }
    return found


def public() -> Iterator[str]:
    """Every public name, and every public attribute of a public class: `World.patch_edge`."""
    named: dict[str, Any] = {name: getattr(cw, name) for name in cw.__all__}
    named |= {kind.__name__: kind for kind in RETURNED}
    for name, value in named.items():
        yield name
        if inspect.isclass(value):
            own = [kind for kind in value.__mro__ if kind.__module__.startswith("conewise")]
            yield from (f"{name}.{attribute}" for kind in own for attribute in sorted(attributes(kind)))


def unexplained(name: str) -> list[str]:
    """The words of a name that are neither on the page nor plain."""
    known = defined() | PLAIN | FIELD
    return [word for word in words(name.rpartition(".")[2]) if known.isdisjoint(stems(word))]


@pytest.mark.parametrize("name", sorted(set(public())))
def test_a_public_name_is_made_of_words_that_are_explained(name: str) -> None:
    unknown = unexplained(name)
    assert not unknown, f"docs/GLOSSARY.md does not say what {', '.join(unknown)} is"


def test_a_word_that_is_not_explained_is_found() -> None:
    assert unexplained("World.patch_twirl") == ["twirl"]
    assert unexplained("StandingWorld") == ["standing"]
    assert unexplained("World.patched_edges") == []


def test_a_word_is_explained_once() -> None:
    heads = re.findall(r"^\*\*([^*]+)\*\*", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    assert sorted(heads) == sorted(set(heads))


def test_a_word_that_is_explained_is_not_called_plain() -> None:
    heads = set(re.findall(r"^\*\*([^*]+)\*\*", PAGE.read_text("utf-8"), flags=re.MULTILINE))
    assert heads.isdisjoint(PLAIN | FIELD), sorted(heads & (PLAIN | FIELD))

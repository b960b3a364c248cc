"""Markup is made by templates, which escape what is put into them; nowhere by formatting texts."""

import ast
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from conewise import templates as markup
from conewise.templates import asset, macro, rendered

PACKAGE = Path(__file__).parents[1] / "src" / "conewise"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# What looks like a tag and makes none: what an earlier page is known by, and the name of a size in a digest.
ALLOWED = {"paper/experiments/page.py": ["<title></title>"], "jobs/digests.py": ["<size >"]}
TAG = re.compile(r"</?[a-zA-Z][a-zA-Z0-9]*(\s[^<>]*)?/?>|<[a-z]+ [a-z-]+=")


def formatted(source: str) -> list[str]:
    """The f-strings of a module that hold tags."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
            if TAG.search(text):
                found.append(text)
    return found


def test_an_f_string_with_a_tag_is_found() -> None:
    assert formatted("f'<td>{cell}</td>'") == ["<td></td>"]
    assert formatted("f'<a href={link}>'") == ["<a href=>"]
    assert formatted("f'{a} < {b}, {c} -> {d}'; '<td>'") == []


def test_no_markup_is_made_by_formatting() -> None:
    found = {path: formatted((PACKAGE / path).read_text(encoding="utf-8")) for path in MODULES}
    assert {path: texts for path, texts in found.items() if texts} == ALLOWED


def test_every_template_is_found_and_escapes() -> None:
    assert rendered("report/legend.html", keys=[(Markup("<b>"), "<i>")]) == (
        '<ul class="cw-keys" aria-label="Legend"><li><b>&lt;i&gt;</li></ul>'
    )
    assert isinstance(macro("markup.html", "heading", "<b>", "&"), Markup)


def test_every_page_is_the_document_that_has_the_policy() -> None:
    found = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.html")}
    whole = {path.name for path, text in found.items() if re.search(r"<html|<!doctype|<head>", text)}
    assert whole == {"document.html"}
    assert 'http-equiv="Content-Security-Policy" content="{{ policy }}"' in asset("report/document.html")
    pages = {path.name for path, text in found.items() if '{% extends "report/document.html" %}' in text}
    assert pages == {"sweep.html", "circuit.html", "wave_page.html", "page.html", "figure.html", "study.html"}


def test_a_value_that_is_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="keys"):
        rendered("report/legend.html")


def test_what_a_notebook_shows_is_text_that_can_be_put_together() -> None:
    both = markup.heading("<b>", "a") + "<br>" + markup.verdict(True, "b & c")
    assert type(both) is str
    assert both == (
        "<div><strong>&lt;b&gt;</strong> a</div><br>"
        '<div><strong style="color:#2e9e5b">✓</strong> b &amp; c</div>'
    )
    assert markup.progress(1, 2, "<") == (
        '<div>sweeping <progress value="1" max="2" style="vertical-align:middle"></progress> &lt;</div>'
    )

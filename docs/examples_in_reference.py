"""Puts the examples of `docs/reference/by-example.md` where the reference explains their names."""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import Path
from typing import Any

import griffe

PAGE = Path(__file__).parent / "reference" / "by-example.md"
_SECTION = re.compile(r"^### (?P<names>`[^\n]*)\n(?P<body>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)


def examples(text: str) -> dict[str, str]:
    """The code of the page by the names in its headings, with what it prints."""
    found = {}
    for section in _SECTION.finditer(text):
        body = re.sub(r"^<!--.*-->\n", "", section["body"], flags=re.MULTILINE).strip()
        for name in re.findall(r"`([\w.]+)`", section["names"]):
            found[name] = body
    return found


class Examples(griffe.Extension):
    """Adds to the docstring of each public name its example."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """The package is loaded: every name that the page has an example of is there."""
        if pkg.path != "conewise":
            return
        homes = _homes(pkg)
        for name, body in examples(PAGE.read_text(encoding="utf-8")).items():
            first, _, rest = name.partition(".")
            path, own = homes[first]
            home = pkg[path]
            found = home[own] if own in home.members else home
            found = _member(pkg, found, rest) if rest else found
            told = found.docstring.value if found.docstring else ""
            lead = "**Example**, after [the lines that all begin with](by-example.md):"
            found.docstring = griffe.Docstring(f"{told}\n\n{lead}\n\n{body}\n", parent=found)


def _member(pkg: griffe.Module, owner: Any, name: str) -> Any:
    """A member of a class, or of the first of its bases in this package that has it."""
    if name in owner.members:
        return owner.members[name]
    for base in owner.bases:
        path = str(getattr(base, "canonical_path", base))
        if path.startswith("conewise."):
            with contextlib.suppress(KeyError):
                return _member(pkg, pkg[path.removeprefix("conewise.")], name)
    raise KeyError(f"{owner.path} has no {name}, which {PAGE.name} has an example of")


def _homes(pkg: griffe.Module) -> dict[str, tuple[str, str]]:
    """Where each public name is defined, and its name there, read off the package's own tables."""
    homes, names = (ast.literal_eval(str(pkg[table].value)) for table in ("_NAMES_BY_HOME", "_NAMES"))
    return {one: (home, names.get(one, one)) for home, those in homes.items() for one in those.split()}

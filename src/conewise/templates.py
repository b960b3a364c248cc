"""HTML and SVG from templates with every value escaped, notebook tables, texts and colours of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from conewise.extras import needs

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

LIGHT = "RdBu"
"""ColorBrewer's red to blue, white between, by the name that plotly has for it."""

# From the colour of a dark page outwards: 0 is dark, both ends are light. Red and blue, as on a light page.
DARK = (
    (255, 210, 194),
    (247, 155, 128),
    (214, 95, 77),
    (141, 55, 51),
    (35, 39, 46),
    (43, 84, 120),
    (63, 138, 192),
    (131, 191, 227),
    (207, 232, 247),
)

RISING = "Blues"
"""White to blue, for shares between 0 and 1."""


def escaped(text: str) -> str:
    """Return a text for a label of plotly, which takes tags in labels for its own."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def visible(text: str) -> str:
    """Return a token with its spaces and line ends made visible."""
    return "".join(visible_parts(text))


def visible_parts(text: str) -> tuple[str, str]:
    """Return a sign for the space in front of a token, or for an empty one; and the rest of the token."""
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return "·" if text.startswith(" ") else "" if text else "∅", text.removeprefix(" ")


def asset(path: str) -> str:
    """The text of a file of the package."""
    return files("conewise").joinpath(path).read_text(encoding="utf-8")


def rendered(path: str, **values: object) -> Markup:
    """The template at `path` with these values in it. A value that it names and is not given is an error."""
    with needs("plots"):
        from markupsafe import Markup  # noqa: PLC0415 - only where something is drawn

    return Markup(_environment().get_template(path).render(values))


def macro(path: str, name: str, *values: object) -> Markup:
    """Return what one macro of the template at `path` makes of these values."""
    made: Markup = getattr(_environment().get_template(path).module, name)(*values)
    return made


@cache
def _environment() -> Environment:
    with needs("plots"):
        from jinja2 import Environment, FunctionLoader, StrictUndefined  # noqa: PLC0415 - as above

    found = Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["g"] = "{:g}".format
    return found


VERDICTS = {True: ("#2e9e5b", "✓"), False: ("#e0483e", "✗")}
"""Colour and sign of what held and of what did not; both colours stand out on white and on black."""

TEMPLATE = "markup.html"


def heading(title: str, words: str = "") -> str:
    """A line of what is shown: its title in bold, if it has one, then the rest in plain words."""
    return str(macro(TEMPLATE, "heading", title, words))


def verdict(ok: bool, words: str) -> str:
    """A line that says whether something held; the sign says it to those who do not see the colour."""
    return str(macro(TEMPLATE, "verdict", *VERDICTS[ok], words))


def progress(done: int, total: int, words: str) -> str:
    """A bar that is so far, and where that is in words."""
    return str(macro(TEMPLATE, "progress", done, total, words))


def table(rows: Iterable[Sequence[str]], columns: Sequence[str] = (), *, numbers: Iterable[int] = ()) -> str:
    """Rows of text as a table. `columns` are its headings; `numbers` says which columns are aligned right.

    Without headings, the first text of a row is what the row is about.
    """
    return str(macro(TEMPLATE, "table", rows, columns, frozenset(numbers)))

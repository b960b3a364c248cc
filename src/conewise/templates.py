"""Templates: HTML and SVG with values put in, each of them escaped unless it is markup already.

They are files of the package, named by their path in it ("report/cone.html"), and so are style sheets and
scripts. Jinja2 is imported where something is made of them.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from conewise.extras import needs

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def asset(path: str) -> str:
    """The text of a file of the package."""
    return files("conewise").joinpath(path).read_text(encoding="utf-8")


def rendered(path: str, **values: object) -> Markup:
    """The template at `path` with these values in it. A value that it names and is not given is an error."""
    with needs("plots"):
        from markupsafe import Markup  # noqa: PLC0415 - only where something is drawn

    return Markup(_environment().get_template(path).render(values))


def macro(path: str, name: str, *values: object) -> Markup:
    """What one macro of the template at `path` makes of these values."""
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

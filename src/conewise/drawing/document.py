"""A page in one file: its styles, its scripts and its data inside, and a policy that lets nothing else run.

What a page shows (prompts, names of sites and models) is other people's text. In HTML it is escaped; in data
it cannot end the element that holds it; and scripts run by the hash of their text alone, so that what
slipped through both would still not run. No address can be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence

from conewise.extras import needs
from conewise.templates import rendered

with needs("plots"):
    from markupsafe import Markup


def inert(value: object) -> Markup:
    """JSON that has no character with a meaning in HTML, and none that ends a line of a script."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def policy(scripts: Sequence[str]) -> Markup:
    """The Content-Security-Policy of a page that runs these scripts, and fetches nothing.

    Plotly sets styles of its own, and draws heatmaps as images that it makes itself: hence `style-src` and
    `img-src`.
    """
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return Markup(
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def document(
    template: str,
    title: str,
    *,
    styles: Sequence[str],
    early: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: Mapping[str, object] | None = None,
    **values: object,
) -> str:
    """A whole page: `template`, which extends "drawing/document.html", with `values` in its body.

    `early` scripts stand in the head, `scripts` at the end; `data` are values by the id of the element that
    holds them as JSON. Styles and scripts are our own, and stand there as they are.
    """
    page = rendered(
        template,
        title=title,
        policy=policy([*early, *scripts]),
        style=Markup("".join(styles)),
        early=[Markup(script) for script in early],
        scripts=[Markup(script) for script in scripts],
        data={name: inert(value) for name, value in (data or {}).items()},
        **values,
    )
    return f"{page}\n"

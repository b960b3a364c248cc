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
from html import escape
from importlib.resources import files


def asset(name: str, room: str = "conewise.drawing") -> str:
    """The text of a file that stands in a folder of the package."""
    return files(room).joinpath(name).read_text(encoding="utf-8")


def inert(value: object) -> str:
    """JSON that has no character with a meaning in HTML, and none that ends a line of a script."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def policy(scripts: Sequence[str]) -> str:
    """The Content-Security-Policy of a page that runs these scripts, and fetches nothing.

    Plotly sets styles of its own, and draws heatmaps as images that it makes itself: hence `style-src` and
    `img-src`.
    """
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def document(
    title: str,
    body: str,
    *,
    styles: Sequence[str],
    early: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: Mapping[str, object] | None = None,
) -> str:
    """A whole page. `body` is HTML, everything else is text and data.

    `early` scripts stand in the head, `scripts` at the end; `data` are values by the id of the element that
    holds them as JSON.
    """
    held = "".join(
        f'<script type="application/json" id="{escape(name)}">{inert(value)}</script>\n'
        for name, value in (data or {}).items()
    )
    head = "".join(f"<script>{script}</script>\n" for script in early)
    foot = "".join(f"<script>{script}</script>\n" for script in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy([*early, *scripts])}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>
{"".join(styles)}
</style>
{head}</head>
<body>
{body}
{held}{foot}</body>
</html>
"""

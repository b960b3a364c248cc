"""A page in one file: its styles, its scripts and its data inside, and a policy that lets nothing else run.

What a page shows (prompts, names of sites and models) is other people's text. In HTML it is escaped; in data
it cannot end the element that holds it; and scripts run by the hash of their text alone, so that what
slipped through both would still not run. No address can be fetched.

A page opens from disk, where a browser imports no modules, so `script` joins those that it needs into one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conewise.errors import ConewiseError
from conewise.extras import needs
from conewise.files import expect_replaceable, write_whole
from conewise.report.story import Story, TokenizedPair
from conewise.sweeps.storage.result_data import ResultData
from conewise.templates import asset, rendered, visible_parts

with needs("plots"):
    from markupsafe import Markup

# Statements of JavaScript modules, which `script` joins.
IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.[^"]*)";\n', flags=re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) (\w+))", flags=re.MULTILINE)
COMMENT = re.compile(
    r"^ *//[^\n]*\n|^ */\*\*(?:(?!\*/).)*\*/\n|/\*\* @.*?\*/ ?", flags=re.MULTILINE | re.DOTALL
)
OTHER = re.compile(r"^(?:import|export)\b.*", flags=re.MULTILINE)


def inert(value: object) -> Markup:
    """Return JSON that has no character with a meaning in HTML, and none that ends a line of a script."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def policy(scripts: Sequence[str]) -> Markup:
    """Return the Content-Security-Policy of a page that runs these scripts, and fetches nothing.

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
    """Return a whole page: `template`, which extends "report/document.html", with `values` in its body.

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


def write_document(path: str | Path, page: str, error: type[ConewiseError]) -> Path:
    """Write a page to a file, whole or not at all, and return its path. Raises `error` where it cannot be."""
    path = Path(path)
    with writing_page(path, error):
        write_whole(path, page.encode())
    return path


@contextmanager
def writing_page(path: Path, error: type[ConewiseError]) -> Iterator[None]:
    """Make the folder of a page, refuse to replace what is no page, and raise `error` for what goes wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        expect_replaceable(path)
        yield
    except (OSError, ValueError) as found:  # no file can have such a name: ValueError
        why = getattr(found, "strerror", None) or found
        raise error(f"the page cannot be written to {path}: {why}. Name another file.") from None


def script(path: str, read: Callable[[str], str] = asset) -> str:
    """Join the JavaScript module at `path` and all that it imports into one script without global names.

    The sources, `javascript/`, are plain modules: node runs their tests, TypeScript checks their types. Each
    becomes a function that returns what the module exports, after those that it imports. Comments on lines
    of their own, and types, are left out.

    Raises ValueError where modules import each other, or import and export in other ways than
    `import { name } from "./other.js"` and `export` before a function, a constant or a class.
    """
    joined: dict[str, str] = {}
    _join(path, read, joined, ())
    bodies = "\n".join(joined.values())
    if re.search(r"</script|<!--", bodies, flags=re.IGNORECASE):
        raise ValueError(f"{path} has text in it that would end the element of a script.")
    return f'"use strict";\n(() => {{\nconst modules = {{}};\n{bodies}\n}})();\n'


def _join(path: str, read: Callable[[str], str], joined: dict[str, str], above: tuple[str, ...]) -> None:
    if path in above:
        raise ValueError(f"modules import each other: {' → '.join((*above, path))}.")
    if path in joined:
        return
    text = COMMENT.sub("", read(path))
    imports = []
    for names, where in IMPORT.findall(text):
        other = posixpath.normpath(posixpath.join(posixpath.dirname(path), where))
        _join(other, read, joined, (*above, path))
        imports.append(f'const {{ {_names(names)} }} = modules["{other}"];\n')
    exports = EXPORT.findall(text)
    body = EXPORT.sub("", IMPORT.sub("", text)).strip()
    if found := OTHER.search(body):
        raise ValueError(f"{path} has a line that cannot be joined: {found[0]}")
    returned = f"\nreturn {{ {', '.join(exports)} }};" if exports else ""
    joined[path] = f'modules["{path}"] = (() => {{\n{"".join(imports)}{body}{returned}\n}})();'


def _names(listed: str) -> str:
    """Return the names of an import as a destructuring: `a as b` is `a: b` there."""
    names = (" ".join(name.split()) for name in listed.split(",") if name.strip())
    return ", ".join(name.replace(" as ", ": ") for name in names)


# -- parts of several pages --------------------------------------------------------------------------


def origin(
    story: Story | None, rows: Sequence[tuple[str, str]], made_at: datetime | None = None
) -> dict[str, Any]:
    """Return where a page comes from: the model, `rows`, its date, and the command that repeats it."""
    seed = None if story is None else story.seed
    own = [("model", story.model)] if story is not None else []
    drawn = [("seed", str(seed))] if seed is not None else []
    made = [("page made", (made_at or datetime.now(UTC)).strftime("%d %B %Y, %H:%M UTC"))]
    return {"command": story and story.command, "rows": [*own, *rows, *drawn, *made]}


SHOWN_PROMPTS = 2
"""The number of prompts that are shown at once; the others are a click away."""

MOST_PROMPTS = 200
"""The most prompts that a page writes out."""


def prompt_pairs(
    story: Story, result: ResultData | None = None, roles: tuple[str, str] = ("changed", "gives the values")
) -> dict[str, Any]:
    """Return the prompts of a story: the first, the rest, the number left out; with a result, its values.

    `roles` are what is said of the base and of the source.
    """
    pairs = [_pair(pair, at, story, result, roles) for at, pair in enumerate(story.prompts[:MOST_PROMPTS])]
    return {
        "first": pairs[:SHOWN_PROMPTS],
        "rest": pairs[SHOWN_PROMPTS:],
        "unwritten": max(len(story.prompts) - MOST_PROMPTS, 0),
    }


def _pair(
    pair: TokenizedPair, prompt: int, story: Story, result: ResultData | None, roles: tuple[str, str]
) -> dict[str, Any]:
    runs = []
    for name in ("clean", "corrupted"):
        text, own = getattr(pair, name), getattr(pair, f"{name}_tokens")
        marked = pair.differing
        if pair.noised and name == "corrupted":
            text, own, marked = text or pair.clean, own or pair.clean_tokens, marked | set(pair.noised)
        if text or own:
            role = roles[0] if name == story.base else roles[1] if name == story.source else ""
            tokens = [_token(token, differs=place in marked) for place, token in enumerate(own)]
            runs.append({"name": name, "role": role, "text": text, "tokens": tokens})
    answers = (("right", pair.answers), ("wrong", pair.wrong_answers))
    values = []
    if result is not None and len(story.prompts) == result.per_prompt.shape[-1] > 1:
        both = (("base", result.base_per_prompt), ("source", result.source_per_prompt))
        values = [(name, number(float(own[0, prompt]))) for name, own in both if own is not None]
    return {
        "number": prompt + 1 if len(story.prompts) > 1 else None,
        "runs": runs,
        "answers": [(kind, list(map(_token, words))) for kind, words in answers if words],
        "values": values,
    }


def _token(text: str, *, differs: bool = False) -> dict[str, str | bool]:
    sign, rest = visible_parts(text)
    return {"sign": sign, "text": rest, "differs": differs}


def number(value: float) -> str:
    """Return a number for people to read; NaN and infinities are named."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.5g}".replace("-", "−")

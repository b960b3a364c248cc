"""Modules of JavaScript joined into one script: a page opens from disk, where a browser imports nothing.

The sources, `javascript/`, are plain modules: node runs their tests, TypeScript checks their types. A page
gets those that its first module needs, each once and after what it imports, as a function that returns what
the module exports. Comments that have lines of their own, and types, are left out.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from conewise.templates import asset

IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.[^"]*)";\n', flags=re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) (\w+))", flags=re.MULTILINE)
COMMENT = re.compile(
    r"^ *//[^\n]*\n|^ */\*\*(?:(?!\*/).)*\*/\n|/\*\* @.*?\*/ ?", flags=re.MULTILINE | re.DOTALL
)
OTHER = re.compile(r"^(?:import|export)\b.*", flags=re.MULTILINE)


def script(path: str, read: Callable[[str], str] = asset) -> str:
    """The module at `path` and all that it imports, as one script that has no names of its own.

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
    taken = []
    for names, where in IMPORT.findall(text):
        other = posixpath.normpath(posixpath.join(posixpath.dirname(path), where))
        _join(other, read, joined, (*above, path))
        taken.append(f'const {{ {_names(names)} }} = modules["{other}"];\n')
    given = EXPORT.findall(text)
    body = EXPORT.sub("", IMPORT.sub("", text)).strip()
    if found := OTHER.search(body):
        raise ValueError(f"{path} has a line that cannot be joined: {found[0]}")
    returned = f"\nreturn {{ {', '.join(given)} }};" if given else ""
    joined[path] = f'modules["{path}"] = (() => {{\n{"".join(taken)}{body}{returned}\n}})();'


def _names(listed: str) -> str:
    """What an import lists, as a destructuring: `a as b` is `a: b` there."""
    names = (" ".join(name.split()) for name in listed.split(",") if name.strip())
    return ", ".join(name.replace(" as ", ": ") for name in names)

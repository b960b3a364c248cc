"""The page that lists every module with the first line of its docstring: `python -m tests.docs.modules`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "conewise"
PAGE = ROOT / "docs" / "modules.md"


def page() -> str:
    """The page as it should be."""
    lines = ["# Modules", "", "Every module of the package, and the first line of its docstring.", ""]
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    for folder in folders:
        paths = sorted(folder.glob("*.py"), key=lambda path: (path.name != "__init__.py", path.name))
        room = folder.relative_to(PACKAGE.parent).as_posix()
        lines += [f"## `{room}/`", "", "| module | what it is |", "|---|---|"]
        lines += [f"| `{path.name}` | {_first_line(path)} |" for path in paths]
        lines.append("")
    return "\n".join(lines)


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert text, f"{path} has no docstring"
    return text.splitlines()[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

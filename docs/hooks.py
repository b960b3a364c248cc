"""What the site needs beside the pages of `docs/`: pages that live elsewhere, and links between all of them.

Pages are written for the code host first, where they are read as files: their links are relative paths in the
repository. Here each becomes the path of a page of the site, or plain text where the site has no such page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

BORROWED = {
    "architecture.md": "ARCHITECTURE.md",
    "benchmarks.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "engine.md": "src/conewise/reactive/README.md",
    "examples.md": "examples/README.md",
    "security.md": "SECURITY.md",
    "tiny.md": "src/conewise/models/tiny/README.md",
}
"""Pages of the site that are files outside of `docs/`."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})")
_ITEM = re.compile(r"^(?:[-*+]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the borrowed pages, and the notebooks as files to download."""
    for name, path in BORROWED.items():
        files.append(File.generated(config, name, content=_text(path)))
    for path in sorted(ROOT.glob("examples/notebooks/*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Point links into the site, and set lists and tables off, as Python-Markdown wants them."""
    name = page.file.src_uri
    if name == "examples.md":
        markdown += _sources()
    path = BORROWED.get(name, f"docs/{name}")
    return "".join(_prose(part, name, path) if is_prose else part for part, is_prose in _parts(markdown))


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _sources() -> str:
    """The example scripts, each under a heading of its name."""
    scripts = sorted(ROOT.glob("examples/*.py"))
    return "".join(f"\n## {one.name}\n\n```python\n{one.read_text('utf-8')}```\n" for one in scripts)


def _parts(markdown: str) -> list[tuple[str, bool]]:
    """The text in turns outside and inside of fenced code."""
    parts: list[tuple[list[str], bool]] = [([], True)]
    fence = ""
    for line in markdown.splitlines(keepends=True):
        found = _FENCE.match(line)
        if not fence and found:
            fence = found[2]
            parts.append(([line], False))
        elif fence:
            parts[-1][0].append(line)
            if line.strip() == fence:
                fence = ""
                parts.append(([], True))
        else:
            parts[-1][0].append(line)
    return [("".join(lines), is_prose) for lines, is_prose in parts]


def _prose(text: str, name: str, path: str) -> str:
    return _LINK.sub(lambda found: _link(found, name, path), _set_off(text))


def _set_off(text: str) -> str:
    """With an empty line before each list and table that follows a paragraph directly."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        before = lines[-1] if lines else "\n"
        is_paragraph = (
            bool(before.strip()) and not before.startswith((" ", "|", "#")) and not _ITEM.match(before)
        )
        if is_paragraph and (_ITEM.match(line) or line.startswith("|")) and not _continues(lines):
            lines.append("\n")
        lines.append(line)
    return "".join(lines)


def _continues(lines: list[str]) -> bool:
    """Whether the last line belongs to an item of a list, though it is not indented."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if _ITEM.match(line):
            return True
    return False


def _link(found: re.Match[str], name: str, path: str) -> str:
    image, shown, target = found.groups()
    if "://" in target or target.startswith(("#", "mailto:")):
        return found[0]
    file, _, anchor = target.partition("#")
    there = _page_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), file)), anchor)
    if there is None:
        return shown
    return f"{image}[{shown}]({posixpath.relpath(there, posixpath.dirname(name) or '.')})"


def _page_of(path: str, anchor: str) -> str | None:
    """Where the site has what is at this path of the repository."""
    after = f"#{anchor}" if anchor else ""
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + after
    if path == "README.md":
        return "index.md"
    if path in {"examples", "examples/notebooks"}:
        return "examples.md"
    if path.startswith("examples/") and path.endswith(".py"):
        return "examples.md#" + posixpath.basename(path).replace(".", "")
    if path.startswith("examples/notebooks/"):
        return "notebooks/" + posixpath.basename(path)
    return next((page + after for page, source in BORROWED.items() if source == path), None)

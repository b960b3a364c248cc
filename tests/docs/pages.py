"""The pages that people read, as text: their links, their headings, their blocks of code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]

_LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
_IMAGE = re.compile(r"<(?:img|source)[^>]*?\bsrc(?:set)?=\"([^\"]+)\"")
_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<language>[^\n`]*)$")
_COMMENT = re.compile(r"^<!-- (.*) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """Fenced code: its language, its text, its line in the page, and a comment that stands just above it."""

    page: Path
    line: int
    language: str
    code: str
    remark: str

    @property
    def name(self) -> str:
        """Where it is, for the name of a test."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page that is part of the documentation, on the code host or on the site."""
    loose = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
    loose += ["benchmarks/README.md", "examples/README.md"]
    inner = ["src/conewise/reactive/README.md", "src/conewise/models/tiny/README.md"]
    return sorted([*(ROOT / page for page in (*loose, *inner)), *ROOT.glob("docs/**/*.md")])


def _split(page: Path) -> tuple[tuple[str, ...], tuple[Block, ...]]:
    return _split_text(page, page.read_text(encoding="utf-8"))


@cache
def _split_text(page: Path, text: str) -> tuple[tuple[str, ...], tuple[Block, ...]]:
    """The lines of prose (empty where code is), and the blocks of code."""
    prose: list[str] = []
    blocks: list[Block] = []
    opened: tuple[int, re.Match[str]] | None = None
    code: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, code = (number, fence), []
        elif opened is not None and line.strip() == opened[1]["marks"]:
            above = next((before for before in reversed(prose[: opened[0] - 1]) if before.strip()), "")
            remark = _COMMENT.match(above.strip())
            inner = "".join(f"{one[len(opened[1]['indent']) :]}\n" for one in code)
            language = opened[1]["language"].strip()
            blocks.append(Block(page, opened[0], language, inner, remark[1] if remark else ""))
            opened = None
        elif opened is not None:
            code.append(line)
        prose.append("" if fence or opened is not None else line)
    assert opened is None, f"{page}: code begins in line {opened[0]} and does not end"
    return tuple(prose), tuple(blocks)


def blocks(page: Path) -> tuple[Block, ...]:
    """The fenced blocks of a page."""
    return _split(page)[1]


def links(page: Path) -> list[str]:
    """What a page links to, images included; not what stands in code."""
    prose = re.sub(r"`[^`\n]*`", "``", "\n".join(_split(page)[0]))
    return [*_LINK.findall(prose), *_IMAGE.findall(prose)]


def anchors(page: Path) -> frozenset[str]:
    """The anchors that code hosts make of the headings of a page, and those that it has of its own."""
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for line in _split(page)[0]:
        found.update(re.findall(r'<a id="([\w-]+)"></a>', line))
        heading = re.match(r"#{1,6} +(.*?) *#*$", line)
        if heading:
            shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return frozenset(found)


def broken(page: Path) -> Iterator[str]:
    """What is wrong with the links of a page. Links to other hosts are looked at and not followed."""
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme or link.startswith("//"):
            if parts.scheme != "https" or "." not in (parts.hostname or ""):
                yield f"{link}: not an address of the form https://host/..."
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if parts.path.startswith("/") or not target.is_relative_to(ROOT):
            yield f"{link}: leads out of the repository"
        elif not target.exists():
            yield f"{link}: there is no such file"
        elif parts.fragment and (target.suffix != ".md" or parts.fragment not in anchors(target)):
            yield f"{link}: no heading has this anchor"

"""The built site: links lead somewhere, public names are found, and nothing is fetched from elsewhere.

python -m tests.docs.built SITE
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import conewise

_FETCHED = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


@dataclass
class Found:
    """What a page links to, what it loads, and the anchors that it has."""

    links: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)
    anchors: set[str] = field(default_factory=set)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = Found()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.found.anchors.update(given[name] for name in ("id", "name") if name in given)
        loads = tag in {"script", "img", "iframe", "source", "video"} or "stylesheet" in given.get("rel", "")
        for name in ("href", "src"):
            if name in given and not given[name].startswith(("data:", "javascript:", "mailto:")):
                (self.found.loads if loads else self.found.links).add(given[name])


def read(page: Path) -> Found:
    """What is in one page."""
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader.found


def broken(site: Path) -> Iterator[str]:
    """What is wrong with the links of a built site."""
    found = {page: read(page) for page in sorted(site.rglob("*.html"))}
    for page, here in found.items():
        if page.name == "404.html":  # made for a server's root
            continue
        for link in sorted(here.links | here.loads):
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                if link in here.loads:
                    yield f"{page.relative_to(site)}: loads {link} from elsewhere"
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path not in {"", "."} else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{page.relative_to(site)}: {link} leads nowhere"
            elif parts.fragment and target in found:
                known = found[target].anchors
                if unquote(parts.fragment) not in known and not parts.fragment.startswith("__"):
                    yield f"{page.relative_to(site)}: no anchor for {link}"


def fetched(site: Path) -> Iterator[str]:
    """What styles fetch from elsewhere: fonts, pictures, other styles."""
    for style in sorted(site.rglob("*.css")):
        for address in _FETCHED.findall(style.read_text(encoding="utf-8")):
            yield f"{style.relative_to(site)}: loads {address} from elsewhere"


def unfound(site: Path) -> Iterator[str]:
    """Public names that a search does not find in the reference, as the title of a part of it."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {
        word
        for part in index["docs"]
        if part["location"].startswith("reference/")
        for word in re.split(r"\W+", part["title"])
    }
    yield from (f"no search finds conewise.{name}" for name in conewise.__all__ if name not in titles)


def main(site: Path) -> int:
    """Say what is wrong; 1 when something is."""
    site = site.resolve()
    pages = list(site.rglob("*.html"))
    problems = [*broken(site), *fetched(site), *unfound(site)]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    links = sum(len(read(page).links) for page in pages)
    sys.stdout.write(f"{site.name}: {len(pages)} pages, {links} links, {len(problems)} broken\n")
    return 1 if problems or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

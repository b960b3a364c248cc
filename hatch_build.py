"""Builds the package's page from the README: there, links and pictures have to be absolute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/conewise/conewise"
RAW = "https://raw.githubusercontent.com/conewise/conewise/main/"


def absolute(readme: str) -> str:
    """Return the README with every relative link leading to the code host, and pictures to their files."""
    pictures = re.sub(r"(!\[[^\]]*\]\()(?!https?://)", rf"\g<1>{RAW}", readme)
    return re.sub(r"((?<!!)\[[^\[\]]*\]\()(?!https?://|#)", rf"\g<1>{REPOSITORY}/blob/main/", pictures)


class ReadmeHook(MetadataHookInterface):
    """Gives the metadata of the package its readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the README with absolute links into the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text)}

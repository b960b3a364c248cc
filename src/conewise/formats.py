"""Formats: what a file says that it is, so that one of another version is told from a damaged one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conewise.errors import FormatError
from conewise.version import __version__

KIND, VERSION, WRITER = "kind", "format", "conewise"
"""Where a file says what it is, of which version, and which conewise wrote it."""

MOST = 1_000
"""No format ever gets as far: a larger number was not written by any conewise."""


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file. `version` is the one that is written; all from `oldest` to it are read.

    A version goes up where a reader of the one before would misread the file, or could not read it. What is
    added, and may be ignored, leaves it as it is: names that are not known are not looked at.
    """

    kind: str
    version: int
    oldest: int = 1

    def header(self, *, writer: bool = True) -> dict[str, Any]:
        """What a file of this kind begins with; without `writer`, equal values have equal files for ever."""
        own = {KIND: self.kind, VERSION: self.version}
        return {**own, WRITER: __version__} if writer else own

    def expect(self, found: Any, name: str) -> Mapping[str, Any]:
        """What was read from the file `name`, which is of this kind, and of a version that is read.

        Raises as `expect_version`, and ValueError for what is no such file at all.
        """
        if not isinstance(found, Mapping):
            raise ValueError("it is not an object")
        if found.get(KIND) != self.kind:
            known = found.get(KIND)
            said = f"says that it is {known!r:.40}" if isinstance(known, str) else "does not say what it is"
            raise ValueError(f"it {said}, where {KIND}: {self.kind!r} is expected")
        version = found.get(VERSION)
        self.expect_version(version, name, found.get(WRITER))
        return found

    def expect_version(self, version: object, name: str, writer: object = None) -> None:
        """Raise FormatError for a version that is not read; `writer` is the conewise that wrote it, if known.

        What cannot be a version raises ValueError, which says so in a few words: the file is damaged.
        """
        if type(version) is not int or not 1 <= version <= MOST:
            raise ValueError(f"its {VERSION} is {version!r:.40}, where a whole number from 1 is expected")
        if self.oldest <= version <= self.version:
            return
        known = f" {writer:.20}" if isinstance(writer, str) else ""
        read = f"{self.oldest} to {self.version}" if self.oldest < self.version else f"{self.version}"
        if version > self.version:
            remedy = f"A newer conewise{known} wrote it: `pip install -U conewise`, then it can be read"
        else:
            remedy = f"An older conewise{known} wrote it, which can still read it"
        raise FormatError(
            f"{name} is a {self.kind!r} of format {version}, and conewise {__version__} reads format "
            f"{read}. It was left as it is. {remedy}."
        )

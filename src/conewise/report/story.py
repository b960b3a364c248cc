"""The story of a sweep: what it is about, in words.

A result holds numbers and digests. A story holds what they are about: the prompts with their tokens, which of
them is changed and where the values come from, the metric in words, the command that repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from conewise.errors import SweepError
from conewise.files import Format, parse_json, write_whole
from conewise.sweeps.storage.codec import decoded

STORY = "story.json"
"""The file of a story, in the folder of its result."""

FEW = 2
"""The number of tokens at a position that are written out, where prompts have different ones."""

BUSY = 2.0
"""Forwards of one kind that differ by more than this factor were not timed on a quiet machine."""


class JsonRecord:
    """Plain data as JSON and back: the base of dataclasses that have a file beside a result.

    `FORMAT` is that of the file, `CALLED` what it is in messages.
    """

    __slots__ = ()
    FORMAT: ClassVar[Format]
    CALLED: ClassVar[str]
    INDENT: ClassVar[int | None] = None

    def to_json(self) -> str:
        """Return all of it as JSON."""
        whole = {**self.FORMAT.header(), **asdict(self)}  # type: ignore[call-overload]
        return json.dumps(whole, indent=self.INDENT, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, name: str = "this text") -> Self:
        """Read what `to_json` wrote. Raises SweepError for any other text, FormatError for a newer one.

        `name` says in messages what the text is.
        """
        try:
            return cls.of(cls.FORMAT.expect(parse_json(text), name))
        except ValueError as error:
            why = f"it is not JSON ({error})" if isinstance(error, json.JSONDecodeError) else error
            raise SweepError(f"this is not {cls.CALLED}: {why}.") from None

    @classmethod
    def of(cls, data: Any) -> Self:
        """Return what plain data stand for. Raises ValueError where they stand for nothing of the kind."""
        found: Self = decoded(data, cls, cls.CALLED)
        return found

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read it from a file beside a result; None where there is none, a SweepError where it is damaged."""
        if not path.exists():
            return None
        try:
            return cls.from_json(path.read_text(encoding="utf-8"), str(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SweepError) as error:
            raise SweepError(
                f"the run in {path.parent} is damaged: {path.name} cannot be understood ({error}). Put a "
                "sound copy in its place, or delete it: the result itself can be read."
            ) from None


RUNS = ("clean", "corrupted")
PATCHES = ("source", "zero", "mean", "noise")
"""The value that takes the place of a site's own: the source run's, zeros, the mean over prompts, noise."""


@dataclass(frozen=True, slots=True)
class TokenizedPair:
    """A prompt, its counterfactual, and what the model should say to each.

    `clean_tokens` and `corrupted_tokens` are the tokens as text, one for each position; `corrupted` may be
    empty where there is no second prompt. `noised` are the positions whose embeddings have noise added in the
    corrupted run, as causal tracing does it.
    """

    clean: str
    corrupted: str = ""
    clean_tokens: tuple[str, ...] = ()
    corrupted_tokens: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    wrong_answers: tuple[str, ...] = ()
    noised: tuple[int, ...] = ()

    @property
    def differing(self) -> frozenset[int]:
        """The positions at which the two prompts have different tokens, or only one of them has any."""
        one, other = self.clean_tokens, self.corrupted_tokens
        if not one or not other:
            return frozenset()
        shared = min(len(one), len(other))
        apart = {place for place in range(shared) if one[place] != other[place]}
        return frozenset(apart | set(range(shared, max(len(one), len(other)))))


@dataclass(frozen=True, slots=True)
class Story(JsonRecord):
    """The question of a sweep as plain data: JSON both ways.

    `model` is the model as the user named it. `prompts` are in the order of the result's prompts. `base` is
    the run that is changed and `source` the one that the values come from, each "clean" or "corrupted";
    `source` is None where `patch` is not "source". `metric` says in words what the first metric measures.
    `forward_seconds` is the time that one full forward of all prompts took, the mean of `forwards_timed` of
    them; 0 means that none was timed. `forward_range` are the shortest and the longest of these times.
    """

    FORMAT = Format("conewise story", 1)
    CALLED = "the story of a sweep"
    INDENT = 2

    model: str
    prompts: tuple[TokenizedPair, ...] = ()
    base: str = "corrupted"
    source: str | None = "clean"
    patch: str = "source"
    metric: str = ""
    command: str | None = None
    seed: int | None = None
    forwards_timed: int = 0
    forward_seconds: float | None = None
    forward_range: tuple[float, float] | None = None
    title: str | None = None

    def __post_init__(self) -> None:
        if self.base not in RUNS or self.source not in (*RUNS, None):
            raise SweepError(
                f"the story of a sweep from {self.source!r} to {self.base!r}: base and source are each one "
                f"of {', '.join(RUNS)}, and source may be None."
            )
        if self.patch not in PATCHES:
            raise SweepError(f"the patch {self.patch!r} in a story; it is one of {', '.join(PATCHES)}.")
        if (self.source is None) == (self.patch == "source"):
            raise SweepError(
                f"a story with the patch {self.patch!r} and the source {self.source!r}: a source is named "
                "when the patch is 'source', and None otherwise."
            )

    @property
    def was_busy(self) -> bool:
        """True if the machine had other things to do: forwards of one kind took very different times."""
        return self.forward_range is not None and self.forward_range[1] > BUSY * self.forward_range[0]

    @property
    def unit(self) -> str:
        """The word for what the result has one value of in each cell: a prompt, or a sample of the noise."""
        return "sample" if any(pair.noised for pair in self.prompts) else "prompt"

    @property
    def direction(self) -> str:
        """A sentence that says which run is changed, and how."""
        put = {
            "source": f"one site given the value that it has on the {self.source} prompt",
            "zero": "one site set to zero",
            "mean": "one site set to its mean over the prompts",
            "noise": "noise added to one site",
        }[self.patch]
        return f"Each world runs the {self.base} prompt with {put}."

    def position_tokens(self) -> tuple[str, ...]:
        """The token at each position of the base prompts; of several prompts the first few: "Mary/Tom/…".

        Empty where prompts have different lengths: then a position has no token.
        """
        rows = [pair.clean_tokens if self.base == "clean" else pair.corrupted_tokens for pair in self.prompts]
        rows = [row or pair.clean_tokens for row, pair in zip(rows, self.prompts, strict=True)]
        if len({len(row) for row in rows}) != 1:
            return ()
        return tuple(_together(column) for column in zip(*rows, strict=True))


def _together(tokens: Sequence[str]) -> str:
    """The tokens that prompts have at a position, as one text."""
    found = list(dict.fromkeys(tokens))
    if len(found) == 1:
        return found[0]
    return "/".join(
        [*(token.strip() or token for token in found[:FEW]), *(["…"] if len(found) > FEW else [])]
    )


def write_story(folder: Path, story: Story) -> None:
    """Write a story beside a result. Raises SweepError, and leaves what is there, where another one is."""
    path, text = folder / STORY, f"{story.to_json()}\n".encode()
    try:
        if path.exists() and path.read_bytes() != text:
            raise SweepError(
                f"{folder} holds {STORY} already; it was left as it is. Save to another folder, or delete "
                "the old result first."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise SweepError(f"the story cannot be saved in {folder}: {error.strerror or error}.") from None


def read_story(folder: Path) -> Story | None:
    """Read the story beside a result; None where there is none. Raises SweepError where it is damaged."""
    return Story.read(folder / STORY)

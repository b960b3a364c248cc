"""Sites as they are written in text: kinds, parts of kinds, names; and edges by pattern."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from conewise.errors import Argument, SiteError
from conewise.locations.edges import Edges
from conewise.locations.places import Place
from conewise.locations.selectors import AXES, Choice, Selectors, as_selectors, chosen, sites

if TYPE_CHECKING:
    from conewise.model import Model

PATTERN = "a0.*->*<k>"
"""Edges as people write them: from the heads of layer 0 into keys."""

_NAME = re.compile(r"\s*(?P<name>[^\[\],]+?)\s*(?:\[(?P<part>[^\[\]]*)\])?\s*(?:,|$)")
_CHOICE = re.compile(r"-?\d+|-?\d*:-?\d*(?::-?\d*)?")


def selected(text: str, pos: str | None, model: Model) -> Selectors:
    """Sites by their names, every layer and head of a kind unless its part says otherwise.

    `pos` chooses positions of all of them.
    """
    found: Selectors | None = None
    for name, part in written(text):
        choices = _usual(model, name, pos) | part
        selector = as_selectors(sites(name, stack="", **choices))
        found = selector if found is None else found + selector
    if found is None:
        raise SiteError(
            Argument("sites"), " names none; write, for one, ", Argument("sites", "z,mlp_out"), "."
        )
    return found


def chosen_edges(text: str, pos: str | None, model: Model, lengths: Collection[int]) -> Edges:
    """The edges that a pattern stands for, at the positions `pos` of prompts of these lengths."""
    writer, arrow, reader = (word.strip() for word in text.partition("->"))
    if not arrow or not (writer or reader):
        raise SiteError(
            f"{text!r} {'names no component' if arrow else 'has no arrow'}; write WRITER->READER with * for "
            f"anything, as {PATTERN!r}.",
        )
    if pos is None:
        return model.edges().select(writer=writer or "*", reader=reader or "*")
    choice = as_choice(pos)
    picked = {length: chosen(choice, length, "pos", "the edges") for length in sorted(set(lengths))}
    positions = next(iter(picked.values()))
    if len(picked) > 1:
        from_end = {tuple(one - length for one in along) for length, along in picked.items()}
        if len(from_end) > 1:
            raise SiteError(
                Argument("pos", pos),
                f": the prompts have {' or '.join(map(str, picked))} tokens, so that a position does not "
                "mean the same in all of them. Count from the end (-1 is the last), give prompts of one "
                "length, or leave ",
                Argument("pos"),
                " out.",
            )
        positions = list(next(iter(from_end)))
    return model.edges(pos=positions).select(writer=writer or "*", reader=reader or "*")


def written(text: str) -> list[tuple[str, dict[str, Choice]]]:
    """Names, each with what is chosen of its parts."""
    found, at = [], 0
    while at < len(text.rstrip()):
        match = _NAME.match(text, at)
        if match is None:
            raise SiteError(
                f"cannot read the sites {text!r} from {text[at:]!r} on. Write kinds or names separated by "
                "commas, each with a part if you like: z,mlp_out or 'z[layer=2:5, head=0],mlp_out'."
            )
        found.append((match["name"], _part(match["part"], match[0].strip(" ,"))))
        at = match.end()
    return found


def _part(text: str | None, where: str) -> dict[str, Choice]:
    choices: dict[str, Choice] = {}
    for item in (text or "").split(",") if text and text.strip() else ():
        axis, _, choice = (word.strip() for word in item.partition("="))
        if axis not in AXES or not _CHOICE.fullmatch(choice):
            raise SiteError(
                f"cannot read {item.strip()!r} in {where!r}. A part is AXIS=CHOICE: the axis one of "
                f"{', '.join(AXES)}, the choice a number or a slice like ':' or '2:5'."
            )
        choices[axis] = as_choice(choice)
    return choices


def as_choice(text: str) -> Choice:
    """A number where it is one, so that results do not have an axis for it; else a slice as written."""
    bare = text.strip()
    return int(bare) if re.fullmatch(r"-?\d{1,18}", bare) else bare  # more digits are out of any range


def _usual(model: Model, name: str, pos: str | None) -> dict[str, Choice]:
    """What is chosen along each axis where nothing is said: every layer, every head."""
    layers = model.sites.layers(name) if name in model.sites.kinds else ()
    first = model.each_call([Place(name, layers[0] if layers else None)])[0]
    axes = model.locate(first).view.axes
    choices: dict[str, Choice] = {"layer": ":"} if layers else {}
    choices |= {axis: ":" for axis in ("head", "kv_head") if layers and axis in axes}
    if pos is not None:
        if "pos" not in axes:
            raise SiteError(
                Argument("pos", pos), f": {name} has no positions; its axes are {', '.join(axes)}."
            )
        choices["pos"] = as_choice(pos)
    return choices

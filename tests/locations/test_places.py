"""Places, as people write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import conewise as cw
from conewise.locations.places import as_place


def test_a_place_shows_as_it_was_written() -> None:
    assert str(cw.site("z", layer=2, head=1)) == "z[layer=2, head=1]"
    assert str(cw.site("z", layer=2, stack="decoder")) == "z[layer=2, stack='decoder']"
    assert str(cw.site("lm_head")) == "lm_head"
    assert str(cw.site("z", layer=0, pos=slice(1, None), head=[0, 2])) == "z[layer=0, pos=1:, head=[0, 2]]"
    assert str(cw.site("z", layer=0, pos=slice(None, 8, 2))) == "z[layer=0, pos=:8:2]"


def test_any_kind_of_number_is_a_number() -> None:
    expected = cw.site("z", layer=1, head=[0, 2])
    heads: Any
    for heads in ((0, 2), range(0, 3, 2), np.array([0, 2]), torch.tensor([0, 2])):
        assert cw.site("z", layer=1, head=heads) == expected
    number: Any = torch.tensor(2)
    assert cw.site("z", layer=number - 1, head=number) == cw.site("z", layer=1, head=2)


def test_equal_places_have_equal_hashes() -> None:
    places = [
        cw.site("z", layer=1, head=[0, 2], pos=slice(3)),
        cw.site("z", layer=1, pos=slice(3), head=(0, 2)),
        as_place(("z", 1)),
        cw.site("z", layer=1),
        cw.site("z", layer=1, head=2),
    ]
    assert len(set(places)) == 3


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"head": "1"}, "head is a number, a slice or a list of numbers, and '1' is none"),
        ({"head": 1.0}, "and 1.0 is none"),
        ({"head": True}, "and True is none"),
        ({"head": [0, 1.5]}, "none of these"),
        ({"pos": None}, "and None is none"),
        ({"layer": "2"}, "layer is a number, not '2'"),
        ({"layer": True}, "layer is a number, not True"),
    ],
)
def test_what_is_no_number_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cw.site("z", **{"layer": 0, **part})


@pytest.mark.parametrize("given", [3, ("z", 1, 2), ("z", True), ("z", "1"), None, 2.0])
def test_what_is_no_place_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match=r"a place is a site's name, a pair \(kind, layer\) or `site"):
        as_place(given)

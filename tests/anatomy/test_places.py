"""Places, as people write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import conewise as cw
from conewise.anatomy.places import as_place
from tests.sweeps.small import model as small_model
from tests.sweeps.small import prompts


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
        ({"head": {0: 1}}, "none of these"),
        ({"head": slice("a")}, "none of these"),
        ({"layer": "2"}, "layer is a number, a slice or a list of numbers, and '2' is none"),
        ({"layer": True}, "layer is a number, a slice or a list of numbers, and True is none"),
        ({"layer": []}, "layer has to name one layer or several different ones"),
        ({"layer": [1, 1]}, "layer has to name one layer or several different ones"),
        (
            {"layer": slice(2, None)},
            r"layer=slice\(2, None, None\) has no end that is known here",
        ),
    ],
)
def test_what_is_no_number_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cw.site("z", **{"layer": 0, **part})


@pytest.mark.parametrize(
    "layers", [range(2), [0, 1], np.array([0, 1]), torch.tensor([0, 1]), slice(0, 2), "0:2", (np.int64(0), 1)]
)
def test_several_layers_are_places_that_one_world_patches_together(layers: Any) -> None:
    together: Any = cw.site("z", layer=layers, head=range(1), pos="1:3")
    each = tuple(cw.site("z", layer=layer, head=[0], pos=slice(1, 3)) for layer in (0, 1))
    assert tuple(together) == each
    model = small_model()
    given: dict[str, Any] = {
        "base": model.run(input_ids=prompts(1, 2)),
        "source": model.run(input_ids=prompts(2, 2)),
        "metric": cw.logit_diff(1, 2),
    }
    found = model.sweep(together, **given).run()
    assert len(found.cells) == 1
    for written in ([together], [[together]], [each], cw.cell(together, source=given["source"])):
        assert torch.equal(model.sweep(written, **given).run().table, found.table)
    with given["base"].fork() as world:
        world.patch(together, given["source"])
        logits = world.outputs.logits[:, -1]
        assert torch.allclose((logits[:, 1] - logits[:, 2]).double(), found.per_prompt[0, 0], atol=1e-6)
    with pytest.raises(TypeError, match="are 2 places, and one is meant here: take them apart"):
        given["base"].read(together)


@pytest.mark.parametrize("given", [3, ("z", 1, 2), ("z", True), ("z", "1"), None, 2.0])
def test_what_is_no_place_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match=r"a place is a site's name, a pair \(kind, layer\) or `site"):
        as_place(given)

"""Components by the names that people have for them, wherever a site or an edge is accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import conewise as cw
from conewise.anatomy.places import Place, as_place, component_name, edge_name
from conewise.errors import ConewiseError, NotAPlaceError, SiteError
from conewise.model import Model

CLEAN, CORRUPTED = (
    f"When Mary and John went to the store, {who} gave a drink to" for who in ("John", "Mary")
)
ROW = {"clean": CLEAN, "corrupted": CORRUPTED, "answers": [" Mary"], "wrong_answers": [" John"]}
GIVEN: dict[str, Any] = {
    "base": CORRUPTED,
    "source": CLEAN,
    "metric": cw.logit_diff(" Mary", " John"),
}
PLACES = {
    "z[layer=2, head=1]": cw.site("z", layer=2, head=1),
    "L2H1": cw.site("z", layer=2, head=1),
    "blocks.2.attn.hook_z[head=1]": cw.site("z", layer=2, head=1),
    "blocks.2.attn.hook_z": cw.site("z", layer=2),
}
EDGES = {
    "L0H2->m1": "a0.h2->m1",
    "z[layer=0, head=2] -> mlp_out[layer=1]": "a0.h2->m1",
    "L0H2->L1H3<v>": "a0.h2->a1.h3<v>",
    "z[layer=0, head=2]->v[layer=1, head=3]": "a0.h2->a1.h3<v>",
    "blocks.0.hook_mlp_out->blocks.1.attn.hook_q[head=3]": "m0->a1.h3<q>",
    "resid_pre[layer=0]->logits": "input->logits",
}


@cache
def model() -> Model:
    found = cw.load("tiny")
    found.run(CLEAN)
    return found


def forked(place: Any) -> Any:
    with model().run(CORRUPTED).fork() as world:
        world.patch(place, "zero")
        return world.logits


def swept(sites: Any, **given: Any) -> Any:
    return model().sweep(sites, **{**GIVEN, **given}).run(progress=False).values.flatten()


DOORS: dict[str, Callable[[Any], Any]] = {
    "a run": lambda place: model().run(CLEAN)[place],
    "a fork": forked,
    "keep": lambda place: model().run(CLEAN, keep=[place])[place],
    "a sweep": swept,
    "a sweep of a list": lambda place: swept([place, ("mlp_out", 0)]),
    "a cell": lambda place: swept([cw.cell(place, source="zero")], source=None),
    "pairs": lambda place: swept(cw.pairs([place, ("mlp_out", 0)])),
    "attribution": lambda place: model().attribute(place, **GIVEN).run(progress=False).values.flatten(),
    "gradients": lambda place: next(iter(model().run(CLEAN).gradients(GIVEN["metric"], [place]).values())),
    "a question": lambda place: model().ask(ROW, sites=[place]).run(progress=False).values.flatten(),
    "generation": lambda place: model().generate(CLEAN, 2, [(place, "zero")]).ids,
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("door", DOORS)
def test_a_component_has_its_names_wherever_a_site_is_accepted(door: str, name: str) -> None:
    assert torch.equal(DOORS[door](name), DOORS[door](PLACES[name]))


EDGE_DOORS: dict[str, Callable[[str], Any]] = {
    "a sweep": lambda name: swept([name]),
    "attribution": lambda name: model().attribute([name], **GIVEN, method="eap").run(progress=False).values,
    "a table": lambda name: list(model().edges()[name]),
    "a selection": lambda name: list(
        model().edges().select(writer=name.partition("->")[0], reader=name.partition("->")[2])
    ),
    "a path": lambda name: model().paths(*name.split("->"), **GIVEN).cells[0].name,
    "a circuit": lambda name: cw.Circuit.made(model(), [name]).edges,
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("door", EDGE_DOORS)
def test_the_ends_of_edges_have_the_same_names(door: str, name: str) -> None:
    found, expected = EDGE_DOORS[door](name), EDGE_DOORS[door](EDGES[name])
    assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


def test_a_place_is_read_back_from_how_it_is_shown() -> None:
    for place in (
        cw.site("z", layer=2, head=1),
        cw.site("z", layer=2, head=[0, 2], pos="1:3"),
        cw.site("resid_pre", layer=0, stack="encoder", pos=-1),
        cw.site("lm_head"),
    ):
        assert as_place(str(place)) == place


def test_slices_in_a_name_are_many_sites() -> None:
    assert torch.equal(swept("z[layer=1:3, head=:]"), swept(cw.sites("z", layer="1:3", head=":")))
    assert torch.equal(swept(["z[layer=2, head=:]"]), swept([cw.sites("z", layer=2, head=":")]))
    assert repr(cw.sites("L2H1")) == repr(cw.sites("z", layer=2, head=1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: cw.site("z[layer=2]", layer=3), "says layer already"),
        (lambda: cw.sites("L2H1", head=":"), "says head already"),
        (lambda: as_place("z[layer=two]"), "cannot read 'layer=two'"),
        (lambda: as_place("z[layer=2, layer=3]"), "cannot read 'layer=3'"),
        (lambda: as_place("z[layer=2,, head=1]"), "cannot read ', head=1'"),
    ],
)
def test_names_that_cannot_be_read_say_where(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConewiseError, match=said) as caught:
        make()
    assert isinstance(caught.value, NotAPlaceError | SiteError)


def test_other_names_stay_as_they_are() -> None:
    for name in ("model.layers.0.mlp", "a0.h2", "m*", "logits", "L", "LayerNorm", "path#1"):
        assert component_name(name) == name
        assert as_place(name) == Place(name)
    assert edge_name("L0H*->L1H3<*>@7") == "a0.h*->a1.h3<*>@7"

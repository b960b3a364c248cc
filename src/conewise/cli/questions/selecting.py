"""One site as it is written on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conewise.asking.written_sites import written
from conewise.cli.terminal.failing import CommandError
from conewise.locations.places import Place, site

if TYPE_CHECKING:
    from conewise.model import Model


def placed(text: str, model: Model) -> Place:
    """One site as `conewise cone` takes it: 'z[layer=1, head=2]', or a name."""
    found = written(text)
    if len(found) != 1:
        raise CommandError(f"{text!r} is not one site; write, for one, 'z[layer=1, head=2]'.")
    ((name, part),) = found
    for axis, choice in part.items():
        if not isinstance(choice, int):
            raise CommandError(f"{text!r}: {axis}={choice} is no single number, and a site has one cone.")
    layer = part.pop("layer", None)
    if layer is None and name in model.sites.kinds:
        layers = model.sites.layers(name)
        raise CommandError(
            f"{name!r} is a kind of site, in layers {layers[0]} to {layers[-1]}; say which, for one "
            f"'{name}[layer={layers[0]}]'."
        )
    assert layer is None or isinstance(layer, int)
    place = site(
        name,
        layer=layer,
        stack="",
        **{axis: choice for axis, choice in part.items() if isinstance(choice, int)},
    )
    for one in model.each_call([place]):
        model.locate(one)  # says what is wrong with it
    return place

"""Which latents of a dictionary are active in a run."""

from __future__ import annotations

import torch

from conewise.errors import DictionaryError, nearest_names
from conewise.locations.places import Index, site
from conewise.runs.captured import Captured
from conewise.runs.reading import Reading


@torch.no_grad()
def active(
    model: Captured, name: str, run: Reading, *, most: int | None = None, pos: Index | None = None
) -> tuple[int, ...]:
    """The numbers of the latents that are not zero in a run, the strongest first; see `Model.active`."""
    if name not in model.splices:
        near = ", ".join(nearest_names(str(name), list(model.splices)) or model.splices) or "none"
        raise DictionaryError(
            f"no dictionary {name!r} in {model.name}; there is {near}. `model.splice(place, ..., "
            f"name={name!r})` returns a model that has it."
        )
    model.expect_own("the run is one", run.model)
    if most is not None and most < 1:
        raise DictionaryError(f"most={most!r}: give how many latents to take at most, 1 or more, or nothing.")
    latents = run.read(site(f"{name}.latents") if pos is None else site(f"{name}.latents", pos=pos))
    strength = latents.abs().flatten(0, -2).amax(0) if latents.ndim > 1 else latents.abs()
    order = torch.argsort(strength, descending=True, stable=True).tolist()
    found = order[: int((strength > 0).sum())]
    return tuple(found if most is None else found[:most])

"""Modules and classes: of a library, by name; of the user, by all that they have."""

from __future__ import annotations

import types

from conewise.identity.instances import BESIDE
from conewise.identity.libraries import library_of_module, library_of_name
from conewise.identity.names import home_of, is_foreign, reached
from conewise.identity.short_text import short
from conewise.identity.walk import Walk


def module_text(walk: Walk, value: types.ModuleType) -> str:
    """A module of a library, by its name; of the user's, by all that it has."""
    library = library_of_module(value)
    if library:
        return f"{value.__name__} of {library}"
    own = {name: item for name, item in vars(value).items() if not name.startswith("__")}
    return short(f"module {value.__name__}", walk.attributes(own))


def class_text(walk: Walk, value: type) -> str:
    """A class of a library, by its name and what was put into it; of the user's, by all that it has."""
    library = library_of_name(home_of(value))
    if library and reached(value.__module__, value.__qualname__) is value:
        changed = {name: item for name, item in vars(value).items() if is_foreign(item)}
        return short(f"{value.__module__}.{value.__qualname__} of {library}", walk.attributes(changed))
    own = {name: item for name, item in vars(value).items() if name not in BESIDE}
    above = (type(value), *value.__bases__)
    parts = [walk.at(f"class {index}", one) for index, one in enumerate(above)]
    return short(f"class {value.__name__}", f"{', '.join(parts)}: {walk.attributes(own)}")

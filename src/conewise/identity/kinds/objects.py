"""Instances: by their class, and by all that they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from conewise.identity.instances import BUILT_IN, attributes_of, contents_of, is_python
from conewise.identity.libraries import library_of_name
from conewise.identity.names import home_of
from conewise.identity.short_text import sha, short
from conewise.identity.walk import Walk

_TABLES = {("pandas.core.frame", "DataFrame"), ("pandas", "DataFrame"), ("pandas", "Series")}
_TABLES |= {("pandas.core.series", "Series")}


def object_text(walk: Walk, value: Any) -> str:
    """An instance: its class, and all that it holds."""
    kind = type(value)
    if home_of(kind).startswith("conewise.") and hasattr(kind, "identity_parts"):
        return short(kind.__name__, walk.items(value.identity_parts()))
    if (home_of(kind), kind.__name__) in _TABLES:
        return short(kind.__name__, walk.items(_columns(value)))
    library = library_of_name(home_of(kind))
    if library and hasattr(kind, "__next__"):
        return used_up_text(walk, value)
    parts = [walk.at("class", kind)]
    if isinstance(value, BUILT_IN):
        parts.append(walk.at("contents", contents_of(value)))
    parts.append(walk.attributes(attributes_of(value)))
    if any(not is_python(one) for one in kind.__mro__ if one is not object and one not in BUILT_IN):
        parts.append(_reduced(walk, value))
    return short(kind.__name__, ", ".join(parts))


def _reduced(walk: Walk, value: Any) -> str:
    """What pickling would keep of an object that is not made in Python."""
    try:
        found = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - pickling raises whatever the object does
        found = None
    if found is None:
        kind = f"{home_of(type(value))}.{type(value).__qualname__}"
        raise walk.refused(f"a {kind}, of which the inside cannot be seen")
    if isinstance(found, str):
        return found
    function, arguments, *rest = found
    state, items, pairs = [*rest, None, None, None][:3]
    listed = (function, arguments, state, list(items or ()), [list(pair) for pair in pairs or ()])
    walk.keep(listed)
    return walk.at("state", listed)


def _columns(table: Any) -> Iterator[object]:
    """A table or a column of pandas as lists: what it keeps beside them is its own matter."""
    yield table.index.tolist()
    for index, name in enumerate(table.columns if hasattr(table, "columns") else [table.name]):
        column = table.iloc[:, index] if hasattr(table, "columns") else table
        yield [name, str(column.dtype), column.tolist()]


def graph_text(walk: Walk, value: fx.GraphModule) -> str:
    """A graph module of torch, by its code and what it holds."""
    own = {**value._parameters, **value._buffers, **value._modules}
    return short(f"graph {sha(value.code)}", walk.attributes(own))


def used_up_text(walk: Walk, value: object) -> str:
    """What can be read once is refused."""
    raise walk.refused(f"a {type(value).__name__}, which is used up as it is read")

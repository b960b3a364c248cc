"""A model's configuration, looked at before anything is built from it.

transformers builds what a configuration says, however large, and finds out afterwards that the weights do not
fit. A configuration of a thousand million layers would keep it busy for days.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook

from conewise.errors import LoadError
from conewise.frontends.torch.foreign import told
from conewise.reading import read_json

# Settings of which a configuration makes lists as long as they say, and more than any model has.
_COUNTS = re.compile(r"(num|n)_(\w+_)?(layers?|labels|classes|embeddings|queries|heads?|blocks|experts)")
_MOST = 10_000_000

# What every model has at least one of, where it says how many; as configurations write it, and as they are
# asked for it: other names of the same settings (`n_layer`, `d_model`) answer to these.
_AT_LEAST_ONE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
_WRITTEN = (*_AT_LEAST_ONE, "n_layer", "n_head", "n_embd")


def check_settings(where: str, path: Path) -> None:
    """Refuse a `config.json` that is not one, or has numbers that would be lists without end."""
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"{where}: config.json cannot be read ({told(error)}). It is a JSON object of the model's "
            "settings; fetch it or save the model again."
        ) from None
    if not isinstance(settings, dict):
        raise LoadError(
            f"{where}: config.json holds {type(settings).__name__}, where an object of settings is expected. "
            "Fetch it or save the model again."
        )
    for name in _WRITTEN:
        if type(settings.get(name)) is int and settings[name] < 1:
            raise _impossible(where, name, settings[name], "it is 1 or more")
    for name, value in _numbers(settings):
        if _COUNTS.fullmatch(name) and value > _MOST:
            raise _impossible(where, name, value, f"no model has more than {_MOST:,}")


def check_counts(where: str, config: Any, tensors: int | None) -> None:
    """Refuse a configuration without layers, heads or width, or of far more layers than there are weights."""
    for part in (config, config.get_text_config()):
        for name in _AT_LEAST_ONE:
            value = getattr(part, name, None)
            if isinstance(value, int) and value < 1:
                raise _impossible(where, name, value, "it is 1 or more")
        layers = getattr(part, "num_hidden_layers", None)
        # Layers may share weights; but not hundreds of them.
        if tensors is not None and isinstance(layers, int) and layers > 100 + 10 * tensors:
            raise _impossible(where, "num_hidden_layers", layers, f"there are {tensors:,} weights in all")


@contextmanager
def bounded(where: str, tensors: int | None) -> Iterator[None]:
    """Stop this thread where it builds far more modules than there are weights for. Raises LoadError."""
    if tensors is None:
        yield
        return
    most, thread, built, is_on = 1_000 + 500 * tensors, threading.get_ident(), 0, False

    def count(*_: Any) -> None:
        nonlocal built
        built += threading.get_ident() == thread
        if is_on and built > most:
            raise LoadError(
                f"{where}: config.json describes a model of more than {most:,} modules, and there are "
                f"{tensors:,} weights for it. It is damaged, or belongs to other weights: fetch or save the "
                "model again."
            )

    # It counts only inside of `try`: one that an interruption keeps from being removed does nothing.
    hook = register_module_module_registration_hook(count)
    try:
        is_on = True
        yield
    finally:
        is_on = False
        hook.remove()


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Every whole number in nested settings, by the name of the setting."""
    waiting: list[Any] = [settings]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield from ((name, value) for name, value in item.items() if type(value) is int)
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _impossible(where: str, name: str, value: int, why: str) -> LoadError:
    shown = f"{value:,}" if abs(value) < 10**30 else f"a number of {len(str(abs(value))):,} digits"
    return LoadError(
        f"{where}: config.json says {name} = {shown}, and {why}. Write the number that the weights were "
        "saved with, or fetch the model again."
    )

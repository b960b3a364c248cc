"""A model's configuration, looked at before anything is built from it.

transformers builds what a configuration says, however large, and finds out afterwards that the weights do not
fit. A configuration of a thousand million layers would keep it busy for days.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn.modules.module import (
    Module,
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from conewise.errors import LoadError
from conewise.files import read_json
from conewise.models.weight_files import WeightCount
from conewise.program.foreign import brief

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
            f"{where}: config.json cannot be read ({brief(error)}). It is a JSON object of the model's "
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


def check_counts(where: str, config: Any, held: WeightCount | None) -> None:
    """Refuse a configuration without layers, heads or width, or of far more layers than there are weights."""
    for part in (config, config.get_text_config()):
        for name in _AT_LEAST_ONE:
            value = getattr(part, name, None)
            if isinstance(value, int) and value < 1:
                raise _impossible(where, name, value, "it is 1 or more")
        layers = getattr(part, "num_hidden_layers", None)
        # Layers may share weights; but not hundreds of them.
        if held is not None and isinstance(layers, int) and layers > 100 + 10 * held.tensors:
            raise _impossible(
                where, "num_hidden_layers", layers, f"there are {held.tensors:,} weights in all"
            )


@contextmanager
def bounded(where: str, held: WeightCount | None) -> Iterator[None]:
    """Stop this thread where it builds far more than there are weights for. Raises LoadError.

    What is counted are modules, and the numbers in their parameters and buffers. What is put in the place of
    another counts as far as it is larger: transformers makes weights without memory first, then with it, and
    registers a tied one again each time it ties it.
    """
    if held is None:
        yield
        return
    thread, built, is_on = threading.get_ident(), Counter[str](), False
    places = WeakKeyDictionary[Module, Counter[str]]()
    most = {
        "modules": 1_000 + 500 * held.tensors,
        "parameters": 10_000_000 + 8 * held.size,  # the most that are packed into a byte are four
        "numbers in buffers": 2**28 + 8 * held.size,
    }

    def add(what: str, owner: Module, name: str, count: int) -> None:
        if not is_on or threading.get_ident() != thread:
            return
        at = places.setdefault(owner, Counter())
        built[what] += max(0, count - at[name])
        at[name] = max(count, at[name])
        if built[what] > most[what]:
            raise LoadError(
                f"{where}: config.json describes a model of more than {most[what]:,} {what}, and there are "
                f"{held.tensors:,} weights for it, in {held.size:,} bytes. It is damaged, or belongs to "
                "other weights: fetch or save the model again."
            )

    def tensors(what: str) -> Callable[[Module, str, Any], None]:
        return lambda owner, name, one: add(what, owner, name, 0 if one is None else one.numel())

    # They count only inside of `try`: one that an interruption keeps from being removed does nothing.
    hooks = (
        register_module_module_registration_hook(lambda owner, name, _: add("modules", owner, name, 1)),
        register_module_parameter_registration_hook(tensors("parameters")),
        register_module_buffer_registration_hook(tensors("numbers in buffers")),
    )
    try:
        is_on = True
        yield
    finally:
        is_on = False
        for hook in hooks:
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

"""Models of transformers are traced once: the next of the same class and configuration gets the same program.

Tracing takes half a second or more, and most tests ask for one of a few small models. A program is kept as
`conewise.program.kept` keeps it for other processes, under all that determines it there, and more. Modules of
our own, those with hooks, those that were captured before and large ones are traced each time; and so are all
in the folders whose subject this is, `TRACED`.
"""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from conewise.program.calls import Call, Signature, hugging_face_defaults, normal_call
from conewise.program.export import (
    Exported,
    distinct,
    expect_plain,
    expect_values,
    export,
    tensor_leaves,
)
from conewise.program.kept import (
    NotKeptError,
    decoded,
    encoded,
    example_key,
    settings,
    tensors_of,
    thresholds,
)
from conewise.program.module_state import digest_of_state
from conewise.runs import captured

TRACED = ("tests/program/", "tests/models/", "tests/packaging/", "tests/gpu/", "tests/devices/")
MOST_BYTES = 1 << 20
"""Weights of a model whose program is kept."""

_kept: dict[str, tuple[Any, ...]] = {}
_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def exported_once(
    module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **how: Any
) -> Exported:
    """`export`, or what it returned for a module that is the same but for its weights."""
    is_seen = module in _seen
    _seen.add(module)
    if is_seen or not _is_of_transformers(module):
        return export(module, args, kwargs, **how)
    expect_plain(module)
    expect_values(module, tensor_leaves((tuple(args), dict(kwargs or {}))))
    forward = inspect.signature(module.forward)
    defaults = hugging_face_defaults(module, forward, last_position_only=False)
    call = distinct(normal_call(forward, args, {**defaults, **(kwargs or {})}))
    try:
        key = _key(module, call, how)
    except NotKeptError:
        return export(module, args, kwargs, **how)
    own = tensors_of(module)
    if key not in _kept:
        made = export(module, args, kwargs, **how)
        try:
            _kept[key] = (
                *encoded(made.program, lambda one: own(one.name) is one.value),
                made.fixed,
                made.reasons,
            )
        except NotKeptError:
            _kept[key] = ()
        return made
    if not _kept[key]:
        return export(module, args, kwargs, **how)
    found, constants, fixed, reasons = _kept[key]
    return Exported(decoded(found, own, constants), Signature(forward, call), fixed, reasons)


def _is_of_transformers(module: nn.Module) -> bool:
    parts, tensors = list(module.modules()), [*module.parameters(), *module.buffers()]
    return (
        type(module).__module__.startswith("transformers.models.")
        and all(type(one).__module__.startswith(("torch.nn.modules.", "transformers.")) for one in parts)
        and not any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in parts)
        and all(one.device.type == "cpu" and type(one) in (nn.Parameter, torch.Tensor) for one in tensors)
        and sum(one.nbytes for one in tensors) <= MOST_BYTES
    )


def _key(module: nn.Module, call: Call, how: Mapping[str, Any]) -> str:
    """All that determines a program: code, settings, configuration, tensors but for their values, inputs."""
    config: Any = module.config
    configs: list[tuple[str, Any]] = [
        (path, one.config) for path, one in module.named_modules() if hasattr(one, "config")
    ]
    numbers: dict[int, int] = {}
    tensors = [
        (
            name,
            str(one.dtype),
            list(one.shape),
            one.stride(),
            one.requires_grad,
            numbers.setdefault(id(one), len(numbers)),
        )
        for named in (module.named_parameters, module.named_buffers)
        for name, one in named(remove_duplicate=False)
    ]
    told = [(path, one.to_dict(), str(getattr(one, "_attn_implementation", ""))) for path, one in configs]
    return json.dumps(
        [
            f"{type(module).__module__}.{type(module).__qualname__}",
            digest_of_state(module),
            [one.training for one in module.modules()],
            told,
            tensors,
            example_key(call, thresholds(config.to_dict())),
            [list(one.shape) for _, one in call.leaves()[0] if isinstance(one, torch.Tensor)],
            settings(torch.device("cpu")),
            [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()],
            sorted(how.items()),
        ],
        default=str,
    )


def of_test(item: pytest.Item) -> None:
    """Let captures of this test be traced, or be those that were traced before."""
    captured.export = export if item.nodeid.startswith(TRACED) else exported_once  # type: ignore[attr-defined]

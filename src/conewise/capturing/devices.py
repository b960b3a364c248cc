"""Where a module's weights and inputs lie: what cannot be captured because of that is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from conewise.errors import CaptureError


def expect_values(module: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
    """Raise CaptureError where weights have no values, though the inputs have: they were offloaded.

    accelerate leaves such weights on the meta device, and brings each to where it is used, at every forward.
    """
    if all(value.is_meta for value in inputs):
        return
    held = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers()])
    missing = [name for name, tensor in held.items() if tensor.is_meta]
    if not missing:
        return
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    shown = ", ".join(map(repr, missing[:3])) + more
    raise CaptureError(
        f"{len(missing)} of the {len(held)} weights of {type(module).__name__} have no values: {shown} lie "
        f"on the meta device. {_why(module)}A graph holds the weights themselves, so they have to be in "
        "memory all the while. Load the model onto one device (`device_map='cpu'`, `device_map='cuda'`), or "
        "onto several GPUs that hold all of it: a `device_map` without 'disk', and with 'cpu' only for a "
        "whole model. Parts on the CPU that are to be computed there are dispatched by "
        "`accelerate.dispatch_model(..., main_device='cpu')`."
    )


def _why(module: nn.Module) -> str:
    for one in module.modules():
        hook = vars(one).get("_hf_hook")
        if any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))):
            return "They were offloaded by accelerate, which loads each when it is used. "
    return "Nothing was loaded into them. "


def expect_one_device(module: nn.Module, inputs: Sequence[torch.Tensor], failure: BaseException) -> None:
    """Raise CaptureError where a capture failed, and inputs lie where no weight does."""
    weights = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    given = {value.device for value in inputs}
    if not weights or not given or given <= weights:
        return
    (first, *others) = sorted(map(str, weights))
    where = ", ".join([first, *others])
    raise CaptureError(
        f"the inputs of {type(module).__name__} lie on {', '.join(sorted(map(str, given)))}, and its weights "
        f"on {where}. Nothing is moved silently: give inputs on the device of the weights, as in "
        f"`inputs.to({first!r})`, or move the module. torch.export says: {failure}"
    ) from failure

"""Where a module's weights and inputs lie: what cannot be captured because of that is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from conewise.errors import CaptureError, describe


def expect_values(module: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
    """Raise CaptureError where weights have no values, though the inputs have: they were offloaded.

    accelerate leaves such weights on the meta device, and brings each to where it is used, at every forward.
    """
    inputs = list(inputs)
    held = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers()])
    for value in inputs:
        if value.layout is not torch.strided or value.is_nested:
            raise CaptureError(f"the example holds {describe(value)}, {value.layout}; give a dense tensor.")
        if value.is_meta and held and not any(tensor.is_meta for tensor in held.values()):
            device = str(next(iter(held.values())).device)
            raise CaptureError(
                f"the inputs of {type(module).__name__} lie on meta, and its weights on {device}: they have "
                f"no values. Move them: `inputs.to({device!r})`, or give others."
            )
    if all(value.is_meta for value in inputs):
        return
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


def expect_plain(module: nn.Module) -> None:
    """Raise CaptureError where weights are tensors that wrap others, as those that torchao quantised."""
    held: Iterable[tuple[str, object]] = (*module.named_parameters(), *module.named_buffers())
    for name, tensor in held:
        if is_traceable_wrapper_subclass(tensor):
            kind = type(tensor)
            raise CaptureError(
                f"the weight {name!r} of {type(module).__name__} is a {kind.__module__}.{kind.__qualname__}, "
                "which wraps other tensors: quantised or distributed weights. A graph holds plain tensors, "
                "whose bits it reads to notice changes. Load the model without that, in bfloat16 for one."
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

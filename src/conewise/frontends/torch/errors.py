"""The errors of the torch frontend.

CaptureError             the module cannot be captured
├── ControlFlowError         its control flow depends on the values of tensors
├── RandomnessError          it draws random numbers: dropout in training mode, for example
└── InputMismatchError       the inputs of a run do not fit the captured program
MissingSiteError         the captured model has no such site
"""

from __future__ import annotations


class CaptureError(Exception):
    """The module cannot be captured as asked."""


class ControlFlowError(CaptureError):
    """The module decides what to compute by looking at the values of tensors."""

    def __init__(self, module: str, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{module} chooses what to compute by the values of its tensors, so it is not one "
            f"graph. torch.export says: {reason}\n"
            "Make the choice outside of the module, write it as tensor arithmetic (`torch.where`, "
            "a mask), or use `torch.cond`; or capture the submodule that holds no such choice."
        )


class RandomnessError(CaptureError):
    """The module draws random numbers, so that no two runs of it are equal."""

    def __init__(self, module: str, ops: tuple[str, ...]) -> None:
        self.ops = ops
        super().__init__(
            f"{module} draws random numbers or updates running statistics in: {', '.join(ops)}. "
            "A graph computes the same value each time it is asked. Call `module.eval()` first; "
            "if the module draws on purpose, give it the random tensor as an input."
        )


class InputMismatchError(CaptureError):
    """The inputs of a run do not fit the program that was captured."""


class MissingSiteError(Exception):
    """The captured model has no such site; the message says why, where that is known."""

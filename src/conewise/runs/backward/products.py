"""What the products of an operation's gradient read, as torch's autograd saves it; and those products.

Torch saves, for the gradient by one input alone, what that gradient reads: inputs, the output, or something
that was made of inputs on the way. A product is then a function of that and of the incoming gradient, and is
computed with everything else made unreadable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from conewise.program.tensors import recordable, recording
from conewise.reactive.vjp import GRADIENT, OUTPUT, Read, Vjp

Tensor = torch.Tensor
Rule = Callable[..., Any]
REFUSED = ("cannot have requires_grad True", "Autograd not support dtype")
"""How torch says that there is no gradient by an input: an average beside the weights, whole numbers."""


class Parts(tuple[Any, ...]):
    """The gradient of a value that is several tensors: one for each, None where nothing flows."""

    __slots__ = ()

    def __add__(self, other: object) -> Parts:
        """Part by part, and not one behind the other."""
        assert isinstance(other, Parts)
        return Parts(b if a is None else a if b is None else a + b for a, b in zip(self, other, strict=True))


class TorchRule:
    """A rule over tensors, whose vector-Jacobian products are those of torch's autograd.

    What they read is found out on `values`, one for each input, and holds for values of their shapes.
    """

    def __init__(
        self, rule: Rule, values: Sequence[Any], reads: Sequence[tuple[Read, ...] | None] | None = None
    ) -> None:
        self.rule = rule
        self.reads = tuple(reads_of(rule, values) if reads is None else reads)
        self.vjps = tuple(
            None if found is None else Vjp(_product(rule, index, found, values), found)
            for index, found in enumerate(self.reads)
        )

    def __call__(self, *values: Any) -> Any:
        """What the rule computes."""
        return self.rule(*values)


def reads_of(rule: Rule, values: Sequence[Any]) -> list[tuple[Read, ...] | None]:
    """For each input what the product towards it reads; None where it has no gradient."""
    return [_reads(rule, values, index) for index in range(len(values))]


def _reads(rule: Rule, values: Sequence[Any], index: int) -> tuple[Read, ...] | None:
    if not any(_is_differentiable(tensor) for tensor in _tensors(values[index])):
        return None
    copies = [_copied(value) for value in values]
    try:
        output, saved = _recorded(rule, copies, index)
    except RuntimeError as error:
        if any(reason in str(error) for reason in REFUSED):
            return None
        raise
    if not any(tensor.requires_grad for tensor in _tensors(output)):
        return None
    owners: dict[int, Read] = {_place(tensor): OUTPUT for tensor in _tensors(output)}
    owners |= {_place(tensor): at for at, value in enumerate(copies) for tensor in _tensors(value)}
    found = {owners[_place(tensor)] for tensor in saved if _place(tensor) in owners}
    if made := [at for at, tensor in enumerate(saved) if _place(tensor) not in owners and tensor.numel()]:
        found |= {other for other in range(len(values)) if _changes(rule, values, index, other, saved, made)}
    return (GRADIENT, *sorted(found, key=lambda read: (isinstance(read, str), read)))


def _changes(
    rule: Rule, values: Sequence[Any], index: int, other: int, saved: Sequence[Tensor], made: Sequence[int]
) -> bool:
    """Whether something that is made on the way depends on another input."""
    if not any(_is_differentiable(tensor) for tensor in _tensors(values[other])):
        return False
    for change in (torch.neg, _random):
        copies = [_copied(value, change if at == other else None) for at, value in enumerate(values)]
        _, again = _recorded(rule, copies, index)
        if len(again) != len(saved) or any(not _same(saved[at], again[at]) for at in made):
            return True
    return False


def _recorded(rule: Rule, values: list[Any], index: int) -> tuple[Any, list[Tensor]]:
    """What a rule returns, and what is saved for its gradient by one input."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    values[index] = _leaf(values[index])
    with recording(), saved_tensors_hooks(pack, lambda tensor: tensor):
        return rule(*values), saved


def _product(rule: Rule, index: int, reads: tuple[Read, ...], values: Sequence[Any]) -> Callable[..., Any]:
    """The gradient by one input, as a function of what it reads; every other number is NaN in it."""

    def product(*given: Any) -> Any:
        known = dict(zip(reads, given, strict=True))
        inputs = [known[at] if at in known else _unreadable(value) for at, value in enumerate(values)]
        leaf = inputs[index] = _leaf(inputs[index])
        output: Any = None

        def unpack(tensor: Tensor) -> Tensor:
            """The output is the one that is given: a patch may stand there."""
            if OUTPUT in known:
                for own, patched in zip(_tensors(output), _tensors(known[OUTPUT]), strict=True):
                    if _place(tensor) == _place(own) and tensor.shape == own.shape:
                        return patched.detach()
            return tensor

        with recording(), saved_tensors_hooks(lambda tensor: tensor, unpack):
            output = rule(*inputs)
            return _pulled_back(output, leaf, known[GRADIENT])

    return product


def _pulled_back(output: Any, leaf: Any, gradient: Any) -> Any:
    """The gradient by a leaf, or by each of several."""
    gradients = gradient if isinstance(gradient, Parts) else (gradient,)
    pairs = [
        (tensor, torch.as_tensor(one, dtype=tensor.dtype, device=tensor.device).expand_as(tensor))
        for tensor, one in zip(_tensors(output), gradients, strict=True)
        if one is not None and tensor.requires_grad
    ]
    leaves = [tensor for tensor in _tensors(leaf) if tensor.requires_grad]
    found: Sequence[Tensor | None] = (
        torch.autograd.grad(
            [tensor for tensor, _ in pairs], leaves, [one for _, one in pairs], allow_unused=True
        )
        if pairs
        else [None] * len(leaves)
    )
    if isinstance(leaf, Tensor):
        (only,) = found
        return torch.zeros_like(leaf) if only is None else only
    remaining = iter(found)
    return Parts(next(remaining) if tensor.requires_grad else None for tensor in _tensors(leaf))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_mapped(one, change) for one in value) if isinstance(value, tuple | list) else value


def _copied(value: Any, change: Callable[[Tensor], Tensor] | None = None) -> Any:
    """A copy that shares memory with nothing else; its numbers changed, where they are any."""
    return _mapped(value, lambda one: (change(one) if change and _is_differentiable(one) else one).clone())


def _leaf(value: Any) -> Any:
    def leaf(tensor: Tensor) -> Tensor:
        found: Tensor = recordable(tensor).detach()
        return found.requires_grad_() if _is_differentiable(found) else found

    return _mapped(value, leaf)


def _unreadable(value: Any) -> Any:
    return _mapped(value, lambda one: torch.full_like(one, torch.nan) if _is_differentiable(one) else one)


def _random(tensor: Tensor) -> Tensor:
    generator = torch.Generator(tensor.device).manual_seed(tensor.numel())
    return torch.empty_like(tensor).normal_(generator=generator)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

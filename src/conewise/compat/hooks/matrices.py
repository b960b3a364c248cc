"""W_Q and its like: the module's own weights, in the layout of TransformerLens.

Which rows of a fused projection belong to which head is not guessed: the numbers of its outputs are sent
through the graph to where the heads are apart, and read there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from conewise.errors import MissingSiteError
from conewise.locations.places import Place
from conewise.model import Model
from conewise.program.records import Record, Ref
from conewise.runs.run import Run
from conewise.structure.attention.attention import weight_of
from conewise.structure.attention.operand_axes import projection_above, through_layout
from conewise.structure.wiring.wiring import Wiring

Tensor = torch.Tensor

DIGITS = 128
"""Numbers of outputs are sent in digits of this base, which every float type holds exactly."""


class Matrices:
    """The weights of each layer, by what they make: `made("q", 3)`, and what reads z and post.

    `probe()` is a run of the model, with the weights that it has now.
    """

    def __init__(self, model: Model, probe: Callable[[], Run]) -> None:
        self.model, self.probe = model, probe
        self._known: dict[tuple[str, int], tuple[Record, Tensor]] = {}

    @cached_property
    def _wiring(self) -> Wiring:
        return Wiring(self.model.program)

    def made(self, kind: str, layer: int) -> tuple[Tensor, Tensor]:
        """The weight that makes q, k, v, pre or pre_linear, and its bias (zeros where there is none).

        [head, d_model, d_head] and [head, d_head] for heads, [d_model, d_mlp] and [d_mlp] for neurons.
        """
        record, numbers = self._projection(kind, layer)
        weight, bias = self._of(record)
        flat = numbers.reshape(-1)
        columns = weight[:, flat].reshape(weight.shape[0], *numbers.shape)
        return columns.movedim(0, -2), bias[flat].reshape(numbers.shape)

    def out_of_heads(self, layer: int) -> tuple[Tensor, Tensor]:
        """W_O of a layer, [head, d_head, d_model], and its bias."""
        with _named("W_O", layer):
            heads, width = self.probe().read(Place("z", layer)).shape[-2:]
            weight, bias = self._of(self.head_projection(layer))
        return weight.reshape(heads, width, -1), bias

    def out_of_neurons(self, layer: int) -> tuple[Tensor, Tensor]:
        """W_out of a layer, [d_mlp, d_model], and its bias."""
        return self._of(self.neuron_projection(layer))

    def head_projection(self, layer: int) -> Record:
        """The product of z with W_O. Raises AttributeError where there is none."""
        with _named("W_O", layer):
            found = self.model.site_table.find("result", layer)
        assert found.result is not None
        return found.result.projection

    def neuron_projection(self, layer: int) -> Record:
        """The product of neurons with W_out. Raises AttributeError where there is none."""
        with _named("W_out", layer):
            node = self.model.site_table.find("post", layer).node
        for reader, _ in through_layout(self._wiring, node, None):
            if self._wiring.is_linear(reader):
                return reader
        raise AttributeError(f"layer {layer} has no W_out: nothing multiplies its neurons with one matrix.")

    def _projection(self, kind: str, layer: int) -> tuple[Record, Tensor]:
        """The projection that a site's value comes out of, and which of its outputs is where."""
        if (kind, layer) not in self._known:
            with _named(_WRITTEN[kind], layer):
                node = self.model.site_table.find(kind, layer).node
            record = projection_above(self._wiring, node)
            if record is None:
                raise AttributeError(
                    f"layer {layer} has no {_WRITTEN[kind]}: {kind!r} does not come out of one projection."
                )
            self._known[kind, layer] = record, self._numbers(record, Place(kind, layer))
        return self._known[kind, layer]

    def _numbers(self, record: Record, place: Place) -> Tensor:
        probe = self.probe()
        (value,) = probe.demand([record.name])
        outputs = value.shape[-1]
        numbers, power = torch.zeros((), dtype=torch.long, device=value.device), 1
        while power < outputs:
            digit = (torch.arange(outputs, device=value.device) // power) % DIGITS
            with probe.fork() as world:
                world.patch(record.name, digit.to(value.dtype).expand_as(value).contiguous())
                numbers = numbers + power * world.read(place)[0, 0].round().long()
            power *= DIGITS
        return numbers

    def _of(self, record: Record) -> tuple[Tensor, Tensor]:
        """The weight of a projection as [in, out], and its bias."""
        found = weight_of(self._wiring, record)
        if found is None:
            raise AttributeError(f"the weight of {record.name!r} ({record.op}) is not known as one matrix.")
        name, out_in = found
        weight = self._value(name)
        weight = weight.T if out_in else weight
        at = {"linear": 2, "addmm": 0}.get(record.op)
        given: Any = record.args[at] if at is not None and at < len(record.args) else None
        given = record.kwargs.get("bias", given) if record.op == "linear" else given
        bias = self._value(given.name) if isinstance(given, Ref) else weight.new_zeros(weight.shape[1])
        return weight, bias

    def _value(self, name: str) -> Tensor:
        sources = self.model.program.source_values
        value = sources[name] if name in sources else self.probe().demand([name])[0]
        found: Tensor = value.detach()
        return found


_WRITTEN = {"q": "W_Q", "k": "W_K", "v": "W_V", "pre": "W_in", "pre_linear": "W_in"}


@contextmanager
def _named(matrix: str, layer: int) -> Iterator[None]:
    """Errors of a site that is not there, as those of a matrix that is not there."""
    try:
        yield
    except MissingSiteError as error:
        raise AttributeError(f"layer {layer} has no {matrix}: {error}") from error


def stacked(of_layer: Callable[[int], Tensor], layers: int) -> Tensor:
    """One tensor for all layers, the layer first. Raises AttributeError where these differ in shape."""
    parts = [of_layer(layer) for layer in range(layers)]
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        raise AttributeError(
            f"the layers differ in shape ({', '.join(map(str, sorted(shapes)))}), so there is no stack of "
            "them. Read them layer by layer: `model.blocks[0].attn.W_Q`."
        )
    return torch.stack(parts)

"""How batch, positions and features lie in the values of a residual stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from conewise.errors import EdgeError
from conewise.locations.sites import SiteTable
from conewise.structure.axes.views import View
from conewise.structure.components.components import Components

Tensor = torch.Tensor
_KINDS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")


class StreamViews:
    """The views of the stream's values: those of sites, and of values that have the shape of a site's."""

    def __init__(self, sites: SiteTable, components: Components) -> None:
        shapes, by_shape = components.program.shapes, {}
        self._views: dict[str, View] = {}
        for layer in components.layers:
            for kind in _KINDS:
                if kind in layer.nodes:
                    site = sites.find(kind, layer.number, layer.stack)
                    if site.view is None or set(site.view.axes) - {"batch"} != {"pos", "d_model"}:
                        raise _unknown(site.node, f"layer {layer.number}")
                    self._views[site.node] = by_shape[shapes.get(site.node)] = site.view
        for entry in components.entries:
            if entry not in self._views:
                if shapes.get(entry) not in by_shape:
                    raise _unknown(entry, components.layer_of(entry))
                self._views[entry] = by_shape[shapes.get(entry)]

    def needs_sizes(self, node: str) -> bool:
        """Whether the sizes of a run are needed to show a value."""
        return any(not isinstance(length, int) for length in self._views[node].lengths.values())

    def shown(self, node: str, stack: Tensor, sizes: Sequence[int] = ()) -> Tensor:
        """[n, batch, pos, d_model] of n values of a node; the batch is 1 where the model has none."""
        view = self._views[node]
        shown = view.present(stack, sizes, leading=1)
        return shown if "batch" in view.axes else shown.unsqueeze(1)

    def as_node(self, node: str, stream: Tensor) -> Tensor:
        """A stream [batch, pos, d_model] in the form of the node's own value."""
        view = self._views[node]
        lengths = dict(zip(("batch", "pos", "d_model"), stream.shape, strict=True))
        if "batch" not in view.axes:
            stream = stream.squeeze(0)
        order = [view.axes.index(axis) for packed in view.packing for axis in packed]
        shape = [math.prod(lengths[axis] for axis in packed) for packed in view.packing]
        return stream.permute(order).reshape(shape)


def _unknown(node: str, where: str) -> EdgeError:
    return EdgeError(
        f"{where}: where batch and positions lie in the residual stream at {node!r} is not known, so its "
        "parts cannot be shown by position."
    )

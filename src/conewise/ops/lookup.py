"""Lookup: rows of a table by integer index, as an embedding does."""

from __future__ import annotations

from typing import Any

import numpy as np

from conewise.graph.vjp import GRADIENT, Vjp
from conewise.ops.op import Op, expect_gradient, expect_integers, parametric


@parametric
def embedding(*, size: int | None = None) -> Op:
    """The rows of a table (rows, d) at integer indices of any shape: table[ids].

    The gradient of the table needs to know how many rows there are. Told so (`size`), it reads the
    indices and the incoming gradient; otherwise the table as well.
    """

    def forward(table: Any, ids: Any) -> Any:
        if np.ndim(table) != 2 or size not in (None, np.shape(table)[0]):
            asked = "rows, d" if size is None else f"{size}, d"
            raise ValueError(f"embedding takes a table of shape ({asked}), and got {np.shape(table)}.")
        expect_integers("embedding", "indices", ids, below=np.shape(table)[0])
        return table[ids]

    def back(g: Any, ids: Any, rows: int) -> Any:
        expect_gradient(g, (*np.shape(ids), *np.shape(g)[-1:]))
        if np.ndim(g) == 0:
            raise ValueError(
                "the incoming gradient of an embedding is a single number; end the loss in a sum."
            )
        table = np.zeros((rows, g.shape[-1]), g.dtype)
        np.add.at(table, ids, g)
        return table

    if size is not None:
        vjp = Vjp(lambda g, ids: back(g, ids, size), (GRADIENT, 1))
    else:
        vjp = Vjp(lambda g, ids, table: back(g, ids, len(table)), (GRADIENT, 1, 0))
    return Op("embedding", forward, (vjp, None))

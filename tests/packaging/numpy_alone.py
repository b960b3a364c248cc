"""What works with numpy and nothing else: run in an environment that has no more.

Graphs, worlds, closed forms and ops. The rest says what it lacks.
"""

from __future__ import annotations

import importlib.metadata
import sys

import numpy as np

import conewise as cw
from conewise.paper import theory


def main() -> None:
    """Compute with every part of the core; an assertion fails where one does not work."""
    others = {one.metadata["Name"].lower() for one in importlib.metadata.distributions()}
    assert others <= {"conewise", "numpy", "pip", "setuptools", "wheel"}, others

    g = cw.Graph()
    g.source("x", np.array([[1.0, 2.0]]))
    g.source("w", np.array([[1.0, 0.0], [0.0, 3.0]]), param=True)
    g.node("h", cw.ops.matmul, ["x", "w"])
    g.node("y", cw.ops.tanh, ["h"])
    g.node("loss", cw.ops.mean(), ["y"])
    base = cw.World(g)
    found = base.demand("loss")
    with base.fork() as world:
        world.patch("h", np.zeros((1, 2)))
        assert world.demand("loss") == 0.0
        assert world.ledger.recomputed == ["y", "loss"]
    assert base.demand("loss") == found

    reverse = cw.gradients(g, "loss", ["w"])
    assert base.demand(reverse["w"]).shape == (2, 2)
    assert theory.limit_ratio(q=1.0, profile="input-heavy") == 3.0
    assert theory.sweep_ratio([1] * 320) > 1

    said = ""
    try:
        _ = cw.capture
    except cw.ConewiseError as error:
        said = str(error)
    assert said.startswith("torch is not installed here."), said
    assert not {"torch", "pandas", "rich"} & set(sys.modules)


if __name__ == "__main__":
    main()

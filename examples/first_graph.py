"""A reactive graph: change a value, and only what depends on it is computed again."""

import conewise as cw

graph = cw.Graph()
graph.source("x", 3.0)
graph.source("w", 2.0, param=True)
graph.node("h", lambda x, w: x * w, ["x", "w"])
graph.node("left", lambda h: h + 1, ["h"])
graph.node("right", lambda h: h * h, ["h"])
graph.node("y", lambda left, right: left + right, ["left", "right"])

base = cw.World(graph)
print("baseline:", base.demand("y"), "computed:", ", ".join(base.ledger.recomputed))

# A fork shares every value with its parent, and owns only what its changes reach.
with base.fork() as world:
    world.patch("left", 100.0)
    print("left patched:", world.demand("y"), "computed:", ", ".join(world.ledger.recomputed))
    assert world.ledger.recomputed == ["y"]  # the cone of `left`; h and right were reused

# What a change costs is known before it is made.
for site in graph.sites:
    print(f"  a patch at {site:5} recomputes {graph.cone(site)}")

# Grafts change the graph itself, for every world: here every reader of h sees it through a block.
graft = graph.graft_after("h", cw.chain(lambda value: -value))
print("grafted after h:", base.demand("y"))
graph.remove(graft)
assert base.demand("y") == 43.0

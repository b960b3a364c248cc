"""Every public function, with impossible and extreme arguments: a right answer, or an error that explains.

Each argument of a call that works is replaced, in turn, by each of `ODD`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import conewise as cw
from conewise.errors import ConewiseError
from conewise.paper import ops, theory
from conewise.paper.theory import ChangeAt, Estimate
from tests.laws.cost_scenes import line, lopsided

NAN, INF = math.nan, math.inf

ODD: tuple[Callable[[], Any], ...] = (
    *(
        (lambda value=value: value)
        for value in (
            *(None, True, -1, 0, 1, 2, 7, 0.5, -0.0, 1e308, -1e308, 1e-320, 5e-324, NAN, INF, -INF),
            *(10**400, -(10**400), 10**5000, Fraction(1, 3), Fraction(10**400), Fraction(1, 10**400), 3j),
            *(np.int64(3), np.int64(2**62), np.uint8(255), np.float32(2.5), np.longdouble("1e4000")),
            *(np.bool_(True), np.array(3), np.array([1, 2, 3]), np.array([[1.0]]), np.array(["n1"])),
            *("x", "n1", "", b"n1", [], (), {}, [1], [0, 1], [1, 2, 3], [2.0, 1.0, 0.0], [1e308] * 3),
            *([1e-320] * 3, [1e308, 1e-320, 1e308], [10**400] * 3, [NAN] * 3, ["n1"], ["n1", "n1"]),
            *([["n1"]], [["n1", "n2"], ["n2"]], [[]], [None], [object()], {"n1": 1}, {"n1", "n2"}),
            *(dict.fromkeys(["n1", "n2", "n3"], 1e308), dict.fromkeys(["n1", "n2", "n3"], 1e-320)),
            *(dict.fromkeys(["n1", "n2", "n3"], 0), dict.fromkeys(["n1", "n2", "n3"], 10**400)),
            *([("n1", 1)], [("n1", 1e308), ("n2", 1e308)], [(("n1", "n2"), 1), ("n1", -1)], [("n1", "n2")]),
            *(
                [(1, 2, 3)] * 5,
                [(1.0, 2.0)] * 5,
                [(0, 0, 0)] * 5,
                [(1, 1e308, 1e308), (1, 2, 1), (0, 3, 1)] * 2,
            ),
            *(Decimal(2), object(), len, range(3)),
        )
    ),
    lambda: iter([3, 2, 1]),
    lambda: line(nodes=3),
    lambda: line(nodes=1),
    cw.Graph,
)

WEIGHTS = {"n1": 1, "n2": Fraction(1, 2), "n3": 0.25}
SAMPLES = [(c, n, 2.0 * c + n + 3.0 + 0.1 * (c * n % 3)) for n in (10, 20, 30) for c in (1, 5, 9)]
FIT = theory.calibrate(SAMPLES)
BELOW_ZERO = theory.Calibration(
    Estimate(1.0, 0, 1, 1), Estimate(-0.9, 0, -1, 1), Estimate(-5.0, 0, -6, 1), 0.5
)
ESTIMATE = Estimate(1.0, 0.1, 0.9, 1.1)
GRAFTS = [("n1", 2), (("n2", "n3"), 0.5)]
CHANGES = [ChangeAt("n1", "rule"), ChangeAt(("n2", "n3"), "value")]
PROFILE: dict[str, Any] = {"profile": [1, 2, 3], "terminal": 1}


def on_graph(**arguments: Any) -> dict[str, Any]:
    return {"graph": line(nodes=3), **arguments}


def smooth() -> cw.Graph:
    """The same line, of rules that have gradients."""
    graph = cw.Graph()
    graph.source("x", 0.5)
    for number, before in ((1, "x"), (2, "n1"), (3, "n2")):
        graph.node(f"n{number}", ops.tanh, [before])
    return graph


EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "batched_cost": [on_graph(grafts=GRAFTS, demand="n3", weights=WEIGHTS)],
    "best_change_order": [on_graph(changes=CHANGES)],
    "best_order": [on_graph(grafts=GRAFTS, demand="n3", weights=WEIGHTS)],
    "best_patch_order": [on_graph(patches=["n1", "n2"])],
    "best_width": [{"right": 0.75, "launch": 5, "world": 1}, {"right": Fraction(9, 10), "launch": 20}],
    "blueprint": [{"architecture": "llama", "layers": 2, "heads": 2}],
    "branch_order": [{"branches": [(3, 1), (2.5, 2)]}],
    "calibrate": [{"samples": SAMPLES, "intercept": True, "confidence": 0.9}],
    "calibrate_stacks": [{"samples": [(9, 1, 1.9), (5, 1, 1.1), (1, 2, 0.41)], "confidence": 0.9}],
    "change_extremes": [on_graph(changes=CHANGES, demand="n3", weights=WEIGHTS)],
    "changed_cost": [on_graph(changes=CHANGES, demand="n3", order=[1, 0], weights=WEIGHTS)],
    "comparable_pairs": [on_graph()],
    "compiled_ceiling": [{"a": 1, "launch": 0.25, "mean_fraction": 0.5}],
    "compiled_ratio": [
        {"cones": [1, 2], "nodes": 3, "a": 1, "beta": 0.5, "runs": 2, "launch": 0.5, "launches": 2},
        {"cones": [1, 2], "nodes": 3, "a": 1, "beta": 0.5, "launches": None},
    ],
    "dense_joint_ratio": [{"forward": 2, "share": 1, "stale": 0.5}],
    "disturbed": [on_graph(changes=CHANGES, demand="n3")],
    "demand_size": [on_graph(patch=["n1"], demand="n3")],
    "downstream_fractions": [PROFILE, {"profile": line(nodes=3), "sites": ["n1"], "demand": "n3"}],
    "edge_cost": [on_graph(readers=[theory.ReaderAt("n1", "n2", 2, 3)], demand="n3", weights=WEIGHTS)],
    "edge_count": [{"layers": 3, "heads": 4, "kv_heads": 2, "mlp": True, "parallel": True}],
    "edge_limit": [{"layer": 2, "nodes": 3}],
    "effective_index": [{"rho": 1.5}],
    "encoder_cone": [{"layers": 3, "heads": 2, "layer": 2, "site": "mlp"}],
    "encoder_nodes": [{"layers": 3, "heads": 2}],
    "encoder_ratio": [{"layers": 3, "heads": 2, "readout": True}],
    "full_cost": [on_graph(demand="n2", weights=WEIGHTS)],
    "gpt2_cone": [{"layers": 3, "heads": 2, "layer": 2, "site": "head"}],
    "gpt2_nodes": [{"layers": 3, "heads": 2}],
    "gpt2_ratio": [{"layers": 3, "heads": 2, "readout": False}],
    "greedy_cost": [
        on_graph(readers=["n1", "n2"], visits=[1, 0], kept=[0], demand="n3", weights=WEIGHTS, correction=0.5)
    ],
    "incomparable_pairs": [{"layers": 9, "span": 2, "every": 4}],
    "interleaved_cost": [on_graph(grafts=GRAFTS, order=[1, 0], demand="n3", weights=WEIGHTS)],
    "isolated_cost": [on_graph(grafts=GRAFTS, demand="n3", weights=WEIGHTS)],
    "joint_cost": [on_graph(sites=["n1"], demand=["n3"], weights=WEIGHTS)],
    "joint_ratio": [on_graph(sites=["n1"], demand=["n3"], weights=WEIGHTS)],
    "karamata_index": [{"profile": [1, 4, 9, 17], "confidence": 0.95}],
    "layered_ratio": [
        {**PROFILE, "sites": 2},
        {**PROFILE, "sites": [1, [0, 2.0], 1]},
    ],
    "layered_training_ratio": [{**PROFILE, "sites": 2}, {**PROFILE, "sites": [1, [1, 2.0], 1]}],
    "least_squares": [
        {"rows": [(1, x) for x in range(4)], "targets": [1, 2, 3, 5], "confidence": 0.5, "lags": 1},
        {"rows": [(1e308, 0), (0, 1e308), (1e308, 1e308)], "targets": [1e150, -1e150, 1e150]},
        {"rows": [(1e-320, 0), (0, 1e-320), (1e-320, 1e-320)], "targets": [1e-320, 0, 1e-318]},
    ],
    "limit_ratio": [{"q": 1, "profile": "input-heavy"}, {"q": 1, "profile": "output-heavy"}],
    "mean_fraction": [PROFILE, {"profile": line(nodes=3), "sites": ["n1"], "weights": WEIGHTS}],
    "order_extremes": [on_graph(grafts=GRAFTS, demand="n3", weights=WEIGHTS)],
    "overcount": [on_graph(grafts=GRAFTS, order=[0, 1], demand="n3", weights=WEIGHTS)],
    "patch_extremes": [on_graph(patches=["n1", "n2"], demand="n3", weights=WEIGHTS)],
    "patched_cost": [on_graph(patches=["n1", "n2"], demand="n3", order=[1, 0], weights=WEIGHTS)],
    "position_limit": [{"q": 1, "profile": "input-heavy", "shared": 0.5, "causal": True}],
    "restored_cost": [on_graph(sites=["n1", ["n2"]], demand="n3", weights=WEIGHTS)],
    "reverse_cost": [{"graph": smooth(), "sites": ["n1", ["n2"]], "loss": "n3", "wrt": ["n1"]}],
    "row_costs": [
        on_graph(
            sites=[("n1", 0), ("n2", 1)],
            positions=2,
            mixes={"n2": ["n1"]},
            demand="n3",
            rows="all",
            causal=True,
            computed="row by row",
        )
    ],
    "saturating_worlds": [{"launch": 20, "world": 2, "share": 0.1}],
    "sites_limit": [
        {"q": 1, "p": 2, "profile": "input-heavy", "sites": "output-heavy"},
        {"q": 0.5, "p": 2, "profile": "output-heavy", "sites": "input-heavy"},
        {"q": 0.5, "p": 2, "profile": "output-heavy", "sites": "output-heavy"},
    ],
    "skip_layers": [{"layers": 9, "span": 2, "every": 4, "kind": "added"}],
    "skip_limits": [{"share": 0.5, "span": 2}],
    "skip_ratio": [{"profile": [1, 2, 3], "span": 2, "every": 3, "terminal": 1}],
    "skip_training_ratio": [{"profile": 3, "span": 2, "every": 3, "terminal": 0.5}],
    "speculation": [{"candidates": 7, "width": 3, "right": Fraction(2, 3)}],
    "speculation_bound": [{"right": 0.75, "launch": 5, "world": 1}],
    "speculation_gain": [{"width": 3, "right": 0.75, "launch": 5, "world": 1}],
    "stack_edge_cost": [
        {
            "layers": 3,
            "heads": 4,
            "kv_heads": 2,
            "mlp": True,
            "parallel": False,
            "layer": 9,
            "full": 40,
            "between": dict.fromkeys(["q", "k", "v", "mlp", "logits"], 2),
            "below": dict.fromkeys(["q", "k", "v", "mlp", "logits"], 0.5),
        }
    ],
    "stack_launches": [on_graph(sites=["n1", ["n2"]], at_once=2, demand="n3", weights=WEIGHTS)],
    "stack_peak": [on_graph(sites=["n1", ["n2"]], order=["n2", "n3"], demand="n3", weights=WEIGHTS)],
    "stale": [on_graph(patch=["n1", "n2"], demand="n3")],
    "sweep_cost": [on_graph(sites=["n1", ["n2"]], demand="n3", weights=WEIGHTS)],
    "sweep_costs": [on_graph(sites=["n1", ["n2"]], demand="n3", weights=WEIGHTS)],
    "sweep_ratio": [PROFILE, {"profile": line(nodes=3), "sites": ["n1"], "weights": WEIGHTS}],
    "training_cone": [on_graph(site="n2", loss="n3")],
    "training_cost": [on_graph(sites=["n1"], loss="n3", weights=WEIGHTS)],
    "training_from_forward": [{"forward": 3, "nodes": 3}, {"forward": 9.0, "nodes": 3}],
    "training_ratio": [
        {**PROFILE, "local": [1, 1, 2]},
        {"profile": line(nodes=3), "sites": ["n1"], "loss": "n3", "weights": WEIGHTS},
    ],
    "transformer_cone": [{"layers": 3, "heads": 2, "layer": 2, "site": "head"}],
    "transformer_nodes": [{"layers": 3, "heads": 2}],
    "transformer_ratio": [{"layers": 3, "heads": 2, "readout": False}],
    "wave_size": [on_graph(site="n1", already=["n2", "n3"])],
    "wallclock_ceiling": [{"a": 0.042, "beta": 0.0054, "mean_fraction": 0.5}],
    "wallclock_ratio": [{"cones": [1, 2], "nodes": 3, "a": 1, "beta": 0.5, "intercept": 0.25}],
}
CALLS: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
    name: (getattr(theory, name), examples) for name, examples in EXAMPLES.items()
}
STACKS = theory.calibrate_stacks([(9, 1, 1.9), (5, 1, 1.1), (1, 2, 0.41)])
METHODS: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
    "Calibration.ratio": (
        lambda cones, nodes: [fit.ratio(cones, nodes) for fit in (FIT, BELOW_ZERO)],
        [{"cones": [1, 2], "nodes": 3}],
    ),
    "Calibration.seconds": (
        lambda cone, nodes: [fit.seconds(cone, nodes) for fit in (FIT, BELOW_ZERO)],
        [{"cone": 2, "nodes": 3}],
    ),
    "Calibration, of odd estimates": (
        lambda a, beta: theory.Calibration(Estimate(a, 0, 0, 0), Estimate(beta, 0, 0, 0), None, 1.0).ceiling,
        [{"a": 1.0, "beta": 0.5}],
    ),
    "ChangeAt": (
        lambda at, kind, inputs: theory.changed_cost(line(nodes=3), [ChangeAt(at, kind, inputs)]),
        [{"at": "n3", "kind": "redefine", "inputs": ("n1",)}],
    ),
    "RowStack": (
        lambda layers, positions, keys, queries, mixed, terminal, causal, demand, first, how: theory.RowStack(
            layers, positions, keys, queries, mixed, terminal, causal
        ).ratio(demand, first, computed=how),
        [
            {
                **dict.fromkeys(["layers", "positions", "keys", "queries", "mixed", "terminal"], 3),
                "causal": True,
                "demand": "last",
                "first": 1,
                "how": "from the first on",
            }
        ],
    ),
    "StackClock.seconds": (STACKS.seconds, [{"launches": 3, "work": 2}]),
    "StackClock.enough_worlds": (STACKS.enough_worlds, [{"node": 2, "share": 0.1}]),
    "StackClock, of odd estimates": (
        lambda launch, work: theory.StackClock(Estimate(launch, 0, 0, 0), Estimate(work, 0, 0, 0), 1.0).rate,
        [{"launch": 1.0, "work": 0.5}],
    ),
    "ReaderAt": (
        lambda entry, site, writers, parts: theory.edge_cost(
            line(nodes=3), [theory.ReaderAt(entry, site, writers, parts)]
        ),
        [{"entry": "n1", "site": "n2", "writers": 2, "parts": 3}],
    ),
    "GraftAt": (
        lambda at, size, weights: theory.GraftAt(at, size, weights).reach,
        [
            {"at": "n1", "size": 3, "weights": None},
            {"at": "n1", "size": lopsided(), "weights": {"prepared": 1, "first": 0.5, "last": 1e308}},
        ],
    ),
}

NEVER_BELOW_1 = ("ratio", "ceiling", "limit", "training_from_forward")
NEVER_ABOVE_1 = ("fraction",)
MAY_BE_NEGATIVE = ("least_squares", "calibrate", "karamata_index")


def numbers(result: Any) -> Iterator[Any]:
    """Every number in what a function returned."""
    if isinstance(result, int | float | Fraction | np.number):
        yield result
    elif isinstance(result, Mapping):
        yield from (number for value in result.values() for number in numbers(value))
    elif isinstance(result, tuple | list | frozenset):
        yield from (number for value in result for number in numbers(value))
    elif is_dataclass(result):
        yield from (number for field in fields(result) for number in numbers(getattr(result, field.name)))


def complaint(name: str, call: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong with how `call` takes these arguments, if anything is."""
    try:
        found = list(numbers(call(**arguments)))
    except ConewiseError as error:
        return None if len(str(error)) > 20 else f"says only {error}"
    except Exception as error:  # noqa: BLE001 - any other is what this test is for
        return f"raises {error!r}"
    wrong = [number for number in found if not isinstance(number, bool | int | float | Fraction)]
    if wrong:
        return f"returns {type(wrong[0])}"
    if not all(isinstance(number, int | Fraction) or math.isfinite(number) for number in found):
        return f"returns {found}"
    about = name.rpartition(".")[2]
    if min(found, default=0) < 0 and not any(part in about for part in MAY_BE_NEGATIVE):
        return f"returns {min(found)}, below 0"
    if any(part in about for part in NEVER_BELOW_1) and min(found, default=1) < 1:
        return f"returns {min(found)}, below 1"
    if any(part in about for part in NEVER_ABOVE_1) and max(found, default=1) > 1:
        return f"returns {max(found)}, above 1"
    return None


def test_every_public_function_is_tried() -> None:
    functions = {name for name in theory.__all__ if not isinstance(getattr(theory, name), type)}
    assert functions == set(CALLS)


@pytest.mark.parametrize("name", [*CALLS, *METHODS])
def test_odd_arguments_get_a_right_answer_or_an_error_that_explains(name: str) -> None:
    call, examples = (CALLS | METHODS)[name]
    complaints = []
    for example in examples:
        call(**example)
        for argument in example:
            for odd in ODD:
                found = complaint(name, call, {**example, argument: (value := odd())})
                if found is not None:
                    shown = "a long number" if isinstance(value, int) and abs(value) > 2**70 else repr(value)
                    complaints.append(f"{argument} = {shown}: {found}")
    assert complaints == []

"""One file of each format, and what is in them as JSON: `python -m tests.golden.formats.made` writes them.

They go into a folder that is named for the version, and are never written again: what one version wrote is
what the later ones have to read. The model is a gate of two bits with weights of whole numbers, so that
every number comes out the same, in all its bits, on every machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import conewise as cw
from conewise.anatomy.selectors import Selectors
from conewise.attributing.approximation import Approximation
from conewise.circuits.circuit import Circuit
from conewise.circuits.evaluation import Evaluation
from conewise.cli.folders import SEARCH, FoundCircuit, StoredRun, write_run
from conewise.model import Model
from conewise.report.circuit import Curve, CurvePoint
from conewise.report.folded import Folded
from conewise.report.folding import fold
from conewise.report.inside import Inside, LensTable, Likely, Pattern
from conewise.report.story import Story, TokenizedPair
from conewise.sweeps.sweep import Sweep
from tests.ground_truth.gates import ANSWER, FIRST, ONE, QUERY, SECOND, gate
from tests.ground_truth.stack import of_weights
from tests.jobs.search_cases import stored_decisions

FOLDER = Path(__file__).parent

# The files, in the folder of a version.
RESULT, STORE, ATTRIBUTED, FOUND = "result", "store", "attributed", "found"
PLAN, EAP, EXPECTED = "plan.json", "eap.json", "expected.json"

QUESTION = {"model": "or", "sites": ["z", "mlp_out"], "metric": "logit"}
COMMAND = ["conewise", "sweep", "or", "--out", "store"]
STORY = Story(
    "or",
    (TokenizedPair("1 0 ?", "0 0 ?", ("1", "0", "?"), ("0", "0", "?"), ("1",), ("0",), (1,)),),
    metric="the gate's answer",
    command="conewise sweep or",
    seed=3,
    forwards_timed=2,
    forward_seconds=0.25,
)
INSIDE = Inside(
    (("1", "0", "?"),),
    numbers=(0,),
    patterns=(Pattern(0, 1, -0.5, 0, ((1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.25, 0.25, 0.5))),),
    lenses=(LensTable(0, ("input", "layer 0"), tuple(((Likely(text, 0.75),),) * 3 for text in "ab")),),
)
CURVE = Curve((CurvePoint(1.0, 3, 1.0), CurvePoint(0.0, 13)), "logit", 1.0)


def model() -> Model:
    """A gate that answers 0, 5, 8 and 14; where its heads look is 0 or 1, and nothing between."""
    weights = {name: value.clone() for name, value in gate("and").state_dict().items()}
    weights["layers.0.attn.query.weight"] *= 4
    weights["layers.0.attn.out.weight"][FIRST] *= 2
    weights["layers.0.attn.out.weight"][SECOND] *= 3
    weights["layers.0.mlp.2.weight"][ANSWER] = torch.tensor([2.0, 1.0])
    weights["unembed.weight"] = torch.zeros(2, weights["unembed.weight"].shape[1])
    weights["unembed.weight"][0, ANSWER] = weights["unembed.weight"][1, FIRST] = 1.0
    weights["unembed.weight"][1, ONE] = 0.25
    return cw.capture(of_weights(weights, heads=2, is_causal=False), _ids((0, 0)))


def _ids(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor([[first, second, QUERY] for first, second in pairs])


def sites() -> Selectors:
    return (
        cw.sites("z", layer=":", head=":")
        + cw.sites("mlp_out", layer=":")
        + cw.sites("resid_pre", layer=":", pos=":")
    )


def sweep(captured: Model) -> Sweep:
    """One batch of two prompts, two metrics."""
    return captured.sweep(
        sites(),
        base={"ids": _ids((1, 0), (0, 1))},
        source={"ids": _ids((0, 0), (1, 1))},
        metric=[cw.logit(0), cw.logit_diff(0, 1)],
    )


def long_sweep(captured: Model) -> Sweep:
    """Two batches: it can be cut off after the first."""
    return captured.sweep(
        sites(),
        base=[{"ids": _ids((1, 0))}, {"ids": _ids((1, 1))}],
        source=[{"ids": _ids((0, 0))}, {"ids": _ids((0, 1))}],
        metric=cw.logit(0),
    )


def attribute(captured: Model, **options: Any) -> Approximation:
    """Edges by gradients."""
    return captured.attribute(captured.edges(), **pair(), method="eap").run(**options)


def search(captured: Model, *, speculative: bool = True, **options: Any) -> Circuit:
    return captured.find_circuit(**pair(), threshold=0.25, speculative=speculative).run(**options)


def evaluate(circuit: Circuit) -> Evaluation:
    return circuit.evaluate(**pair(), minimality=True)


def pair() -> dict[str, Any]:
    return {"base": {"ids": _ids((1, 0))}, "source": {"ids": _ids((0, 0))}, "metric": cw.logit(0)}


def after(count: int) -> Any:
    """A progress that stops a run when so many are done."""

    def stop(done: int, total: int) -> None:
        del total
        if done >= count:
            raise KeyboardInterrupt

    return stop


def written(numbers: Any) -> Any:
    """Tensors and tuples as JSON has them."""
    if isinstance(numbers, torch.Tensor):
        return numbers.tolist()
    return json.loads(json.dumps(numbers))


def folded_facts(folded: Folded) -> dict[str, Any]:
    return {
        "model": folded.model,
        "parts": [part.label for part in folded.parts],
        "cones": [[list(cone.names), list(cone.recomputed)] for cone in folded.cones],
        "node_evaluations": folded.node_evaluations,
    }


def decisions(circuit: Circuit) -> list[list[Any]]:
    return [[one.edge, one.kept, one.change] for one in circuit.log]


def make(folder: Path) -> None:
    """Write all files into a new folder."""
    folder.mkdir()
    captured = model()
    made = sweep(captured)
    result, plan = made.run(verify=3), made.plan()
    folded = fold(captured, made.cells)
    write_run(folder / RESULT, result, STORY, folded, INSIDE)
    (folder / PLAN).write_text(plan.to_json(), encoding="utf-8")

    StoredRun(folder / STORE, resume=False).begin(QUESTION, COMMAND)
    stopped(lambda: long_sweep(captured).run(out=folder / STORE, progress=after(6)))
    long = long_sweep(captured).run()

    attributed = attribute(captured, out=folder / ATTRIBUTED)
    attributed.save(folder / ATTRIBUTED)

    stopped(lambda: search(captured, out=folder / FOUND / SEARCH, speculative=False, progress=after(4)))
    circuit = search(captured)
    evaluation = evaluate(circuit)
    FoundCircuit(circuit, evaluation, CURVE, STORY).write(folder / FOUND)
    circuit.save(folder / EAP, format="eap")
    kept = stored_decisions(folder / FOUND / SEARCH)

    expected = {
        "result": {
            "metrics": list(result.metrics),
            "cells": [cell.name for cell in result.cells],
            "table": written(result.table),
            "per_prompt": written(result.per_prompt),
            "base": written(result.base),
            "source": written(result.source),
            "costs": written(result.plan.costs()),
            "node_evaluations": result.ledger.node_evaluations,
        },
        "folded": folded_facts(folded),
        "plan": {"costs": written(plan.costs()), "table": written(result.table)},
        "store": {"stored": 6, "cells": 12, "table": written(long.table)},
        "attributed": {
            "cells": [cell.name for cell in attributed.cells],
            "table": written(attributed.table),
            "method": attributed.method,
        },
        "circuit": {
            "edges": list(circuit.edges),
            "scores": dict(circuit.scores or {}),
            "threshold": circuit.threshold,
            "faithfulness": evaluation.faithfulness,
            "minimality": evaluation.minimality,
        },
        "search": {"kept": kept, "decisions": decisions(circuit)},
    }
    (folder / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def stopped(run: Any) -> None:
    """Run something until it stops itself."""
    try:
        run()
    except KeyboardInterrupt:
        return
    raise AssertionError("it ran to its end")


def main(arguments: Sequence[str]) -> int:
    """Write the files of this version; 1 where they are there already."""
    folder = Path(arguments[0]) if arguments else FOLDER / cw.__version__
    if folder.exists():
        sys.stderr.write(f"{folder} is there already: what a version wrote is never written again.\n")
        return 1
    torch.set_num_threads(1)
    sys.argv = ["made"]  # results say what command made them
    make(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`conewise schema`: JSON Schemas of what commands print with --json.

Each object is written once, by the names of its properties. An object has all of them and no others, but for
those that are named as optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from inspect import getdoc
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from conewise.cli.failing import CommandError
from conewise.cli.options import subcommand
from conewise.cli.output import print_as_json
from conewise.errors import nearest_names

HELP = """Print the JSON Schema (draft 2020-12) of what a command prints with --json.

\b
Examples:
  conewise schema sweep
  conewise schema plan > plan.schema.json
"""

Schema = dict[str, Any]


def _plain(kind: str, description: str = "", **rules: Any) -> Schema:
    return {"type": kind, **rules, **({"description": description} if description else {})}


_text, _flag, _integer, _number = (
    partial(_plain, kind) for kind in ("string", "boolean", "integer", "number")
)
_count, _positive = partial(_integer, minimum=0), partial(_integer, minimum=1)
_amount = partial(_number, minimum=0)


def _one_of(*values: str | None, description: str = "") -> Schema:
    return {"enum": list(values), **({"description": description} if description else {})}


def _maybe(schema: Schema) -> Schema:
    """Return the schema of the same value or null."""
    return {**schema, "type": [schema["type"], "null"]}


def _list(items: Schema, description: str = "", **rules: Any) -> Schema:
    return _plain("array", description, items=items, **rules)


def _by_name(values: Schema, description: str = "") -> Schema:
    return _plain("object", description, additionalProperties=values)


def _object(
    properties: Schema, description: str = "", *, optional: set[str] | None = None, **rules: Any
) -> Schema:
    """Return the schema of an object with these properties and no others, required but for `optional`."""
    required = [name for name in properties if name not in (optional or ())]
    closed = {"properties": properties, "required": required, "additionalProperties": False}
    return _plain("object", description, **{**closed, **rules})


def _shared(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _of(kind: Any, **more: Schema) -> Schema:
    """Return the schema of a dataclass as JSON, with `more` properties; its docstring explains the fields."""
    hints = get_type_hints(kind)
    return _object({one.name: _typed(hints[one.name]) for one in fields(kind)} | more, getdoc(kind) or "")


def _typed(hint: Any) -> Schema:
    """Return the schema of values of a type. A float may be null: JSON has no NaN, and no infinity."""
    origin, kinds = get_origin(hint), [kind for kind in get_args(hint) if kind is not NoneType]
    if origin is UnionType:
        found = _typed(kinds[0])
        return found if kinds[0] is float else _maybe(found)
    if origin is tuple:
        return _list(_typed(kinds[0]))
    if origin in (dict, Mapping):
        return _by_name(_typed(kinds[1]))
    return _maybe(_number()) if hint is float else {str: _text, bool: _flag, int: _integer}[hint]()


def _derived(name: str) -> Schema:
    """Return the schema of what is printed as the dataclass that it is."""
    from conewise.checks.verify import Verification
    from conewise.circuits.evaluation import Evaluation
    from conewise.sweeps.execution.reading import SweepLedger
    from conewise.sweeps.planning.plan import PlanCosts
    from conewise.sweeps.storage.result_data import CellCheck

    if name == "plan":
        return _of(PlanCosts, ratio=_maybe(_number("full_evaluations / node_evaluations.")))
    if name == "verification":
        return _of(CellCheck, ok=_flag("True if nothing was wrong."), passed=_flag("And nothing unchecked."))
    return _of({"evaluation": Evaluation, "measured": SweepLedger, "verify": Verification}[name])


_ABLATION = ("resample", "zero", "mean")
_HASH = "^[0-9a-f]{64}$"

SHARED: dict[str, Schema] = {
    "cell": _object(
        {
            "site": _text("The site's name."),
            "kind": _text("Its kind."),
            "layer": _maybe(_integer("Its layer.")),
            "head": _maybe(_integer("Its head.")),
            "pos": _maybe(_integer("Its position.")),
            "value": _maybe(_number("The metric with this site patched; null where it is infinite.")),
            "effect": _maybe(_number("value − base.")),
            "normalised": _maybe(_number("0 for the base, 1 for the source.")),
        }
    ),
    "experiment": _object(
        {
            "title": _text(),
            "claim": _text(),
            "all_match": _flag("True if every exact figure matches."),
            "compared": _text("What that stands for."),
            "rows": _list(
                _object(
                    {
                        "name": _text("What it is."),
                        "paper": _maybe(_number("As the paper prints it.")),
                        "predicted": _maybe(_number("By the theory.")),
                        "measured": _maybe(_number("By the run.")),
                        "unit": _text(),
                        "exact": _flag("True if it has to match."),
                        "match": _maybe(_flag("True if it does; null for timings.")),
                    },
                    "A figure; further columns are facts of its own.",
                    additionalProperties=True,
                ),
                minItems=1,
            ),
            "notes": _list(_text()),
            "seed": _maybe(_integer()),
            "seconds": _amount("Of the run."),
            "versions": _by_name(_text()),
            "series": _plain("object", "What its figure draws."),
        }
    ),
    "model": _object(
        {
            "name": _text("The model as it was named."),
            "source": _text("Where its weights came from."),
            "fingerprint": _text("SHA-256 of architecture and weights.", pattern=_HASH),
            "device": _text("Where it ran."),
            "dtype": _text("Of its weights."),
        }
    ),
    "question": _object(
        {
            "direction": _one_of(
                "denoise", "noise", description="denoise changes the corrupted run, noise the clean one."
            ),
            "base": _one_of("clean", "corrupted", description="The run that is changed."),
            "source": _one_of(
                *("clean", "corrupted", "zero", "mean", "noise"),
                description="What is put at a site: the values of a run, or none of a run.",
            ),
            "metric": _one_of("logit_diff", "prob", "prob_diff", "kl"),
            "metric_in_words": _text("What the metric says."),
            "prompts": _positive("Number of pairs of prompts."),
            "lengths": _list(
                _positive(), "Numbers of tokens of the prompts, each once.", minItems=1, uniqueItems=True
            ),
            "batches": _positive("Number of groups of prompts that were run together."),
            "seed": _integer("Random seed."),
        }
    ),
}
"""Parts that several commands print, by name."""

_ASKED: Schema = {
    "model": _shared("model"),
    "question": _shared("question"),
    "notes": _list(_text(), "What is worth knowing of how the prompts were read."),
}
_FILES = _object({"out": _maybe(_text("The folder of the run.")), "report": _maybe(_text("The page."))})
_VERIFICATION: Schema = {"anyOf": [_shared("verification"), {"type": "null"}]}
_SWEPT: Schema = {
    "base": _maybe(_number("The metric in the base.")),
    "source": _maybe(_number("The metric in the source.")),
    "cells": _list(_shared("cell"), "Every cell, the strongest effect first.", minItems=1),
    "measured": _shared("measured"),
    "method": _maybe(_text("How effects were estimated; null where every one was computed in its world.")),
    "full_forwards": _object(
        {
            "timed": _count("Number of full forwards of all prompts that were timed."),
            "seconds": _maybe(_number("The mean of them.")),
        }
    ),
    "verification": _VERIFICATION,
    "provenance": _object(
        {
            "command": _maybe(_text("What repeats it.")),
            "conewise": _text("Its version."),
            "versions": _by_name(_text(), "Of what the numbers depend on."),
        }
    ),
    "files": _FILES,
}
_SIMULATION: Schema = {
    "workers": _positive("Number of workers."),
    "shares": _positive("Number of shares that the sweep is cut into."),
    "makespan_seconds": _amount("Until the last worker is done."),
    "one_worker_seconds": _amount("Of one worker."),
    "balance": _amount("The busiest worker over the mean."),
    "worth_having": _positive("More workers would hardly help."),
    "setup_seconds": _amount("Of capturing the model, on each worker."),
    "baseline_seconds": _amount("Of baselines, on all workers together."),
}
_FOUND: Schema = {
    "method": _text("How it was found."),
    "threshold": _maybe(_number("What an edge had to change to be kept; null where edges were counted.")),
    "source": _one_of(*_ABLATION, description="What removed edges carry."),
    "edges": _list(
        _object(
            {
                "edge": _text("Its name: writer, arrow, reader."),
                "score": _maybe(
                    _number("What patching or removing it changed; null where it was not scored.")
                ),
            }
        ),
        "The edges of the circuit, in graph order.",
    ),
    "nodes": _list(_text(), "The components that they join."),
    "graph": _object(
        {"writers": _positive(), "readers": _positive(), "edges": _positive()},
        "All that there is in the model.",
    ),
    "evaluation": _shared("evaluation"),
    "curve": _list(
        _object({"threshold": _number(), "edges": _positive(), "faithfulness": _maybe(_number())}),
        "Circuits of falling thresholds.",
    ),
    "seconds": _number("What the search took."),
    "files": _FILES,
    "provenance": _object({"command": _text(), "conewise": _text()}),
}
_STAGES = _list(
    _object({"stage": _text(), "edges": _integer(), "node_evaluations": _integer()}),
    "Of ACDC, in the order of visits.",
)

COMMANDS: dict[str, Schema] = {
    "circuit": _object(
        {
            **_ASKED,
            "plan": {
                "type": "object",
                "properties": {"worlds": _positive(), "node_evaluations": _count(), "stages": _STAGES},
                "required": ["worlds", "node_evaluations"],
                "description": "With --plan: what the search takes. Of --method exact as `conewise plan` "
                "prints it.",
            },
            "simulation": {
                "type": "object",
                "properties": {
                    "workers": _SIMULATION["workers"],
                    "batch_worlds": _positive(
                        "Of ACDC: worlds of a batch where guesses fail; others are wider."
                    ),
                    "batch_seconds": _amount("What such a batch takes, cut into parts."),
                    "one_worker_batch_seconds": _amount("What it takes whole."),
                    "gain": _amount("How many times as fast a narrow batch is."),
                    "worth_having": _SIMULATION["worth_having"],
                },
                "required": ["workers", "worth_having"],
                "description": "With --plan --simulate: what workers would gain. Of --method exact as "
                "`conewise plan` prints it.",
            },
            **_FOUND,
        },
        optional={"plan", "simulation", *_FOUND},
        oneOf=[{"required": ["plan"]}, {"required": list(_FOUND)}],
    ),
    "cone": _object(
        {
            "model": _text("The model as it was named."),
            "site": _text("The site."),
            "node_evaluations": _count("Nodes that a patch there recomputes."),
            "full_evaluations": _count("Nodes of a full run."),
            "flops": _count("Of the recomputed nodes."),
            "full_flops": _count("Of a full run."),
            "reused": _count("Values that are read as they are."),
            "parts": _list(
                _object(
                    {
                        "row": _text("The layer, or what stands before and after the layers."),
                        "part": _text("What it is."),
                        "layer": _maybe(_integer("The layer.")),
                        "nodes": _count("Its nodes."),
                        "recomputed": _count("Of them, in the cone."),
                        "reused": _count("Of them, read as they are."),
                        "is_patched": _flag("True if the site lies here."),
                    }
                ),
                minItems=1,
            ),
            "file": _maybe(_text("The drawing.")),
        }
    ),
    "demo": _object({**_ASKED, "plan": _shared("plan"), **_SWEPT}),
    "edges": _object(
        {**_ASKED, "plan": _shared("plan"), "simulation": _object(_SIMULATION), **_SWEPT},
        optional={"simulation", *_SWEPT},
        oneOf=[{"not": {"required": ["cells"]}}, {"required": list(_SWEPT)}],
    ),
    "plan": _object(
        {**_ASKED, "plan": _shared("plan"), "simulation": _object(_SIMULATION)}, optional={"simulation"}
    ),
    "task": _object(
        {
            "task": _text("The task."),
            "model": _text("The model whose tokenizer the prompts are made for."),
            "prompts": _list(
                _object(
                    {
                        "clean": _text(),
                        "corrupted": _text(),
                        "answers": _list(_text(), minItems=1),
                        "wrong_answers": _list(_text(), minItems=1),
                        "template": _text("The number of the template."),
                    }
                ),
                minItems=1,
            ),
        }
    ),
    "report": _object(
        {
            "run": _text("The folder of the run."),
            "report": _text("The page."),
            "bytes": _positive(),
            "cells": _count("Number of cells that it shows."),
            "metrics": _list(_text(), minItems=1),
            "has_story": _flag("True if it tells the prompts."),
            "has_cones": _flag("True if it draws cones."),
            "plan": _shared("plan"),
            "edges": _count(
                "Of a circuit: the number of its edges. Such a page has no cells, cones or plan."
            ),
        },
        optional={"cells", "has_cones", "plan", "edges"},
        oneOf=[{"required": ["cells", "has_cones", "plan"]}, {"required": ["edges"]}],
    ),
    "reproduce": _object({}, "An object with a key for each experiment.", minProperties=1),
    "sites": _object(
        {
            "model": _text("The model as it was named."),
            "kinds": _list(_text(), "The kinds of a transformer that it has."),
            "sites": _list(
                _object(
                    {
                        "name": _text("Its name."),
                        "kind": _text("Its kind."),
                        "layer": _maybe(_integer("Its layer.")),
                        "head": _maybe(_integer("Its number of heads.")),
                        "pos": _flag("True if positions can be chosen."),
                        "shape": _text("Its axes, with the lengths that no run changes."),
                        "cone": _count("The number of nodes that depend on it."),
                        "node": _text("The node of the graph that it is."),
                    }
                )
            ),
        }
    ),
    "sweep": _object({**_ASKED, "plan": _shared("plan"), **_SWEPT}),
    "trace": _object(
        {
            "model": _shared("model"),
            "prompt": _text("The prompt."),
            "tokens": _list(_text(), "Its tokens as text."),
            "subject": _list(_count(), "The positions that noise is put on.", minItems=1),
            "answers": _list(_text()),
            "wrong_answers": _list(_text()),
            "metric": _one_of("logit_diff", "prob"),
            "clean": _maybe(_number("The metric without noise.")),
            "corrupted": _maybe(_number("The metric with noise and nothing restored.")),
            "noise": _amount("Its standard deviation."),
            "n": _positive("How often it was drawn."),
            "window": _positive("Layers restored together."),
            "seed": _integer(),
            "notes": _ASKED["notes"],
            "kind": _text("The kind of state."),
            "layers": _list(_integer()),
            "positions": _list(_integer()),
            "values": _list(
                _list(_maybe(_number())), "The metric with each state restored: [layer][position]."
            ),
            "plan": _shared("plan"),
            "measured": _shared("measured"),
            "verification": _VERIFICATION,
            "report": _maybe(_text("The page.")),
        }
    ),
    "verify": _object(
        {
            "model": _text("The model as it was named."),
            "fingerprint": SHARED["model"]["properties"]["fingerprint"],
            "ok": _flag("True if all held."),
            "seed": _integer("Random seed."),
        }
    ),
}
"""The objects that commands print, but for `command`, which has the command's name."""


def schema_of(command: str) -> Schema:
    """Return the whole schema of a command: its own, and the shared parts that it refers to."""
    own = COMMANDS[command]
    if command == "reproduce":
        from conewise.paper.experiments import NAMES

        own = {**own, "properties": dict.fromkeys(NAMES, _shared("experiment"))}
    else:
        whole = _derived(command) if command == "verify" else _object({})
        properties = {"command": {"const": command}, **own["properties"], **whole["properties"]}
        required = ["command", *own["required"], *whole["required"]]
        own = {**whole, **own, "properties": properties, "required": required}
    used: Schema = {}
    waiting: list[Any] = [own]
    while waiting:
        item = waiting.pop()
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        if isinstance(item, dict) and isinstance(item.get("$ref"), str):
            name = item["$ref"].rpartition("/")[2]
            if name not in used:
                used[name] = SHARED[name] if name in SHARED else _derived(name)
                waiting.append(used[name])
    shared = {"$defs": dict(sorted(used.items()))} if used else {}
    title = f"What `conewise {command} --json` prints"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **own, **shared}


@subcommand("schema", HELP, "Print the JSON Schema of a command.")
def schema(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="sweep, plan, ...", show_default=False)],
) -> None:
    """Print a command's schema; see `HELP`."""
    known = sorted(COMMANDS)
    if command not in known:
        near = nearest_names(command, known)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise CommandError(f"no schema of {command!r}; there are {', '.join(known)}.{hint}")
    print_as_json(schema_of(command))

"""`conewise schema`: JSON Schemas of what commands print with --json.

Each object is written once, a line for each property: its name (with ? where it may be missing), its kind,
    and
what it says. A kind with ? may be null, with [] is a list, with [+] one that has something in it, with [!]
one without double items, and with {} an object of such values by name; @plan is the shared part "plan". The
properties of an object are indented; of an open one there may be others. `...asked` stands for all lines of
that block. Dataclasses that are printed as they are have their schemas from their fields.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from inspect import cleandoc, getdoc
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from conewise.cli.failing import CommandError
from conewise.cli.options import command
from conewise.cli.output import print_as_json
from conewise.errors import nearest_names

Schema = dict[str, Any]

KINDS: dict[str, Schema] = {
    "text": {"type": "string"},
    "flag": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "count": {"type": "integer", "minimum": 0},
    "positive": {"type": "integer", "minimum": 1},
    "amount": {"type": "number", "minimum": 0},
    "hash": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "anything": {"type": "object"},
}

SHARED = {
    "cell": """
        site text: The site's name.
        kind text: Its kind.
        layer integer?: Its layer.
        head integer?: Its head.
        pos integer?: Its position.
        value number?: The metric with this site patched; null where it is infinite.
        effect number?: value − base.
        normalised number?: 0 for the base, 1 for the source.
    """,
    "experiment": """
        title text
        claim text
        all_match flag: True if every exact figure matches.
        compared text: What that stands for.
        rows open[+]: Figures; further columns are facts of their own.
            name text: What it is.
            paper number?: As the paper prints it.
            predicted number?: By the theory.
            measured number?: By the run.
            unit text
            exact flag: True if it has to match.
            match flag?: True if it does; null for timings.
        notes text[]
        seed integer?
        seconds amount: Of the run.
        versions text{}
        series anything: What its figure draws.
    """,
    "model": """
        name text: The model as it was named.
        source text: Where its weights came from.
        fingerprint hash: SHA-256 of architecture and weights.
        device text: Where it ran.
        dtype text: Of its weights.
    """,
    "question": """
        direction denoise|noise: denoise changes the corrupted run, noise the clean one.
        base clean|corrupted: The run that is changed.
        source clean|corrupted|zero|mean|noise: What is put at a site: the values of a run, or none of a run.
        metric logit_diff|prob|prob_diff|kl
        metric_in_words text: What the metric says.
        prompts positive: Number of pairs of prompts.
        lengths positive[!]: Numbers of tokens of the prompts, each once.
        batches positive: Number of groups of prompts that were run together.
        seed integer: Random seed.
    """,
    "simulation": """
        workers positive: Number of workers.
        shares positive: Number of shares that the sweep is cut into.
        makespan_seconds amount: Until the last worker is done.
        one_worker_seconds amount: Of one worker.
        balance amount: The busiest worker over the mean.
        worth_having positive: More workers would hardly help.
        setup_seconds amount: Of capturing the model, on each worker.
        baseline_seconds amount: Of baselines, on all workers together.
    """,
}
"""Parts that several commands print, by name."""

BLOCKS = {
    "asked": """
        model @model
        question @question
        notes text[]: What is worth knowing of how the prompts were read.
    """,
    "files": """
        files object
            out text?: The folder of the run.
            report text?: The page.
    """,
    "steered": """
        finding? text: The best cell in a sentence.
        best? text?: The cell with the largest effect among those that stay fluent.
        unpatched? text[]: What the unpatched model writes, for each prompt.
        cells? object[+]: Layer by layer, the strengths of each in their order.
            name text: The site and the strength.
            effect number: The mean score less that of the unpatched texts.
            perplexity number?: That under the unpatched model, over that of its own texts.
            interval number?[]: Of the effect over prompts; null with one.
            divergence integer[]: The first token that differs; -1 where none does.
            texts text[]: What was written, for each prompt.
        measured? @measured
        verification? object?
            texts count: Number of texts that were written again.
            wrong count: Number of those that differ.
            named text[]: Those.
            ok flag: True if none does.
        report? text?: The page.
    """,
    "swept": """
        base number?: The metric in the base.
        source number?: The metric in the source.
        cells @cell[+]: Every cell, the strongest effect first.
        measured @measured
        method text?: How effects were estimated; null where every one was computed in its world.
        full_forwards object
            timed count: Number of full forwards of all prompts that were timed.
            seconds number?: The mean of them.
        verification @verification?
        provenance object
            command text?: What repeats it.
            conewise text: Its version.
            versions text{}: Of what the numbers depend on.
        ...files
    """,
    "found": """
        method text: How it was found.
        threshold number?: What an edge had to change to be kept; null where edges were counted.
        source resample|zero|mean: What removed edges carry.
        edges object[]: The edges of the circuit, in graph order.
            edge text: Its name: writer, arrow, reader.
            score number?: What patching or removing it changed; null where it was not scored.
        nodes text[]: The components that they join.
        graph object: All that there is in the model.
            writers positive
            readers positive
            edges positive
        evaluation @evaluation
        curve object[]: Circuits of falling thresholds.
            threshold number
            edges positive
            faithfulness number?
        seconds number: What the search took.
        provenance object
            command text
            conewise text
        ...files
    """,
}

COMMANDS = {
    "circuit": """
        ...asked
        plan? open: With --plan: the cost of the search; of --method exact as `conewise plan` prints it.
            worlds positive
            node_evaluations count
            stages? object[]: Of ACDC, in the order of visits.
                stage text
                edges integer
                node_evaluations integer
        simulation? open: With --plan --simulate; of --method exact as `conewise plan` prints it.
            workers positive: Number of workers.
            batch_worlds? positive: Of ACDC: worlds of a batch where guesses fail; others are wider.
            batch_seconds? amount: What such a batch takes, cut into parts.
            one_worker_batch_seconds? amount: What it takes whole.
            gain? amount: How many times as fast a narrow batch is.
            worth_having positive: More workers would hardly help.
        ...found?
    """,
    "cone": """
        model text: The model as it was named.
        site text: The site.
        node_evaluations count: Nodes that a patch there recomputes.
        full_evaluations count: Nodes of a full run.
        flops count: Of the recomputed nodes.
        full_flops count: Of a full run.
        reused count: Values that are read as they are.
        parts object[+]
            row text: The layer, or what stands before and after the layers.
            part text: What it is.
            layer integer?: The layer.
            nodes count: Its nodes.
            recomputed count: Of them, in the cone.
            reused count: Of them, read as they are.
            is_patched flag: True if the site lies here.
        file text?: The drawing.
    """,
    "demo": """
        ...asked
        plan @plan
        ...swept
    """,
    "edges": """
        ...asked
        plan @plan
        simulation? @simulation
        ...swept?
    """,
    "plan": """
        ...asked
        plan @plan
        simulation? @simulation
    """,
    "report": """
        run text: The folder of the run.
        report text: The page.
        bytes positive
        metrics text[+]
        has_story flag: True if it tells the prompts.
        cells? count: Number of cells that it shows.
        has_cones? flag: True if it draws cones.
        plan? @plan
        edges? count: Of a circuit: the number of its edges. Such a page has no cells, cones or plan.
    """,
    "reproduce": "",
    "sites": """
        model text: The model as it was named.
        kinds text[]: The kinds of a transformer that it has.
        sites object[]
            name text: Its name.
            kind text: Its kind.
            layer integer?: Its layer.
            head integer?: Its number of heads.
            pos flag: True if positions can be chosen.
            shape text: Its axes, with the lengths that no run changes.
            cone count: The number of nodes that depend on it.
            node text: The node of the graph that it is.
    """,
    "steer": """
        model @model
        prompts text[+]
        kind text: The kind of site.
        scales number[+]
        count text[+]: The words that score.
        plan anything: What it takes: texts, passes, rows, FLOPs and bytes.
        ...steered
    """,
    "sweep": """
        ...asked
        plan @plan
        ...swept
    """,
    "task": """
        task text: The task.
        model text: The model whose tokenizer the prompts are made for.
        prompts object[+]
            clean text
            corrupted text
            answers text[+]
            wrong_answers text[+]
            template text: The number of the template.
    """,
    "trace": """
        model @model
        prompt text: The prompt.
        tokens text[]: Its tokens as text.
        subject count[+]: The positions that noise is put on.
        answers text[]
        wrong_answers text[]
        metric logit_diff|prob
        clean number?: The metric without noise.
        corrupted number?: The metric with noise and nothing restored.
        noise amount: Its standard deviation.
        n positive: How often it was drawn.
        window positive: Layers restored together.
        seed integer
        notes text[]: What is worth knowing of how the prompt was read.
        kind text: The kind of state.
        layers integer[]
        positions integer[]
        values number?[][]: The metric with each state restored: [layer][position].
        plan @plan
        measured @measured
        verification @verification?
        report text?: The page.
    """,
    "verify": """
        model text: The model as it was named.
        fingerprint hash: SHA-256 of architecture and weights.
        ok flag: True if all held.
        seed integer: Random seed.
    """,
}
"""The objects that commands print, but for `command`, which has the command's name."""

INSTEAD = {
    "circuit": ["plan", "...found"],
    "edges": ["", "...swept"],
    "report": ["cells has_cones plan", "edges"],
    "steer": ["", "...steered"],
}
"""Properties that stand in the place of each other."""

LINE = re.compile(r"( *)(\w+)(\??) (\S+?)(?:: (.*))?")
SUFFIX = re.compile(r"\?|\[.?\]|\{\}")


def parsed(text: str) -> Schema:
    """Return the schema of an object that is written in lines."""
    return _object(list(_lines(text, "")), 0, is_open=False)


def _lines(text: str, optional: str) -> Iterator[tuple[str, ...]]:
    """Yield (indent, name, "?" where it may be missing, kind, description) of lines, blocks spread out."""
    for line in cleandoc(text).splitlines():
        if line.startswith("..."):
            name = line.strip(".?")
            yield from _lines(BLOCKS[name], optional or line[3 + len(name) :])
        elif found := LINE.fullmatch(line):
            indent, name, may_miss, kind, said = found.groups()
            yield indent, name, may_miss or ("" if indent else optional), kind, said or ""


def _object(lines: list[tuple[str, ...]], depth: int, *, is_open: bool) -> Schema:
    """Return the schema of an object with the properties of these lines, of which some have their own."""
    found: Schema = {"type": "object", "properties": {}, "required": []}
    starts = [at for at, (indent, *_) in enumerate(lines) if len(indent) == depth]
    for at, end in itertools.pairwise([*starts, len(lines)]):
        _, name, may_miss, kind, said = lines[at]
        inner = lines[at + 1 : end]
        found["properties"][name] = _kind(kind, inner, depth) | ({"description": said} if said else {})
        found["required"] += [] if may_miss else [name]
    return found if is_open else {**found, "additionalProperties": False}


def _kind(kind: str, inner: list[tuple[str, ...]], depth: int) -> Schema:
    """Return the schema of a kind with its suffixes; `inner` are the lines of its properties."""
    word = SUFFIX.split(kind)[0]
    if word in ("object", "open"):
        found = _object(inner, depth + 4, is_open=word == "open")
    elif word.startswith("@"):
        found = {"$ref": f"#/$defs/{word[1:]}"}
    else:
        found = dict(KINDS.get(word) or {"enum": word.split("|")})
    for suffix in SUFFIX.findall(kind):
        if suffix == "?":
            found = _maybe(found)
        elif suffix == "{}":
            found = {"type": "object", "additionalProperties": found}
        else:
            rules = {"[+]": {"minItems": 1}, "[!]": {"minItems": 1, "uniqueItems": True}}
            found = {"type": "array", "items": found, **rules.get(suffix, {})}
    return found


def _together(words: str) -> Schema:
    """Return the rule that these properties are there, all of them; without any, that no cells are."""
    if words.startswith("..."):
        return {"required": [name for indent, name, *_ in _lines(words, "") if not indent]}
    return {"required": words.split()} if words else {"not": {"required": ["cells"]}}


def _maybe(schema: Schema) -> Schema:
    """Return the schema of the same value or null."""
    if "type" not in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


# -- dataclasses ------------------------------------------------------------------------------------


def _derived(name: str) -> Schema:
    """Return the schema of what is printed as the dataclass that it is."""
    from conewise.checks.verify import Verification
    from conewise.circuits.evaluation import Evaluation
    from conewise.sweeps.execution.reading import SweepLedger
    from conewise.sweeps.planning.plan import PlanCosts
    from conewise.sweeps.storage.result_data import CellCheck

    kinds: dict[str, Any] = {
        "evaluation": Evaluation,
        "measured": SweepLedger,
        "plan": PlanCosts,
        "verification": CellCheck,
        "verify": Verification,
    }
    more = {
        "plan": "ratio number?: full_evaluations / node_evaluations.",
        "verification": "ok flag: True if nothing was wrong.\npassed flag: And nothing unchecked.",
    }
    kind, found = kinds[name], parsed(more.get(name, ""))
    hints = get_type_hints(kind)
    own = {one.name: _typed(hints[one.name]) for one in fields(kind)}
    required = [*own, *found["required"]]
    properties = own | found["properties"]
    return {**found, "properties": properties, "required": required, "description": getdoc(kind) or ""}


def _typed(hint: Any) -> Schema:
    """Return the schema of values of a type. A float may be null: JSON has no NaN, and no infinity."""
    origin, kinds = get_origin(hint), [kind for kind in get_args(hint) if kind is not NoneType]
    if origin is UnionType:
        found = _typed(kinds[0])
        return found if kinds[0] is float else _maybe(found)
    if origin is tuple:
        return {"type": "array", "items": _typed(kinds[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _typed(kinds[1])}
    names = {str: "text", bool: "flag", int: "integer", float: "number"}
    return _maybe(KINDS["number"]) if hint is float else dict(KINDS[names[hint]])


def schema_of(name: str) -> Schema:
    """Return the whole schema of a command: its own, and the shared parts that it refers to."""
    own = parsed(COMMANDS[name])
    if name == "reproduce":
        from conewise.paper.experiments import NAMES

        experiment = {"$ref": "#/$defs/experiment"}
        own |= {"properties": dict.fromkeys(NAMES, experiment), "minProperties": 1}
        own["description"] = "An object with a key for each experiment."
    else:
        whole = _derived(name) if name == "verify" else {"properties": {}, "required": []}
        properties = {"command": {"const": name}, **own["properties"], **whole["properties"]}
        required = ["command", *own["required"], *whole["required"]]
        own = {**whole, **own, "properties": properties, "required": required}
    if name in INSTEAD:
        own["oneOf"] = [_together(words) for words in INSTEAD[name]]
    used: Schema = {}
    waiting: list[Any] = [own]
    while waiting:
        item = waiting.pop()
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        if isinstance(item, dict) and isinstance(item.get("$ref"), str):
            part = item["$ref"].rpartition("/")[2]
            if part not in used:
                used[part] = parsed(SHARED[part]) if part in SHARED else _derived(part)
                waiting.append(used[part])
    shared = {"$defs": dict(sorted(used.items()))} if used else {}
    title = f"What `conewise {name} --json` prints"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **own, **shared}


@command
def schema(command: str) -> None:
    """Print the JSON Schema (draft 2020-12) of what a command prints with --json.

    Examples:
      conewise schema sweep
      conewise schema plan > plan.schema.json

    Options:
        COMMAND: sweep, plan, ...
    """
    known = sorted(COMMANDS)
    if command not in known:
        near = nearest_names(command, known)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise CommandError(f"no schema of {command!r}; there are {', '.join(known)}.{hint}")
    print_as_json(schema_of(command))

"""Random surgeries followed by a random workload, by the library and by hand.

`python -m tests.surgery.sequences 500` runs so many over all networks and says what differs.
"""

from __future__ import annotations

import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import ConewiseError
from conewise.model import Model
from conewise.program.records import Program
from conewise.surgery.plan import difference, measured
from tests.surgery.networks import HEADS, INNER, NETWORKS, WIDTH, Bottleneck, Network, rule_named
from tests.surgery.oracle import Act, operated, outputs, returned, with_columns

Step = tuple[Callable[[cw.Surgery], cw.Surgery], Act | None]
TOLERANCE = 1e-9
"""Of the largest number: everything is in double precision, and sums may be taken in another order."""


@cache
def plain(name: str) -> Model:
    network = NETWORKS[name]
    return cw.capture(network.make(), **network.example(0, 3, 7))


def pruned_heads(network: Network, draw: random.Random) -> Step:
    layer, head = draw.randrange(network.layers), draw.randrange(HEADS)
    columns = range(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
    place = cw.site("z", layer=layer, head=head, stack=network.stack)
    return lambda s: s.prune(place), Act("in", network.z.format(layer), with_columns(columns))


def pruned_neurons(network: Network, draw: random.Random) -> Step:
    layer, neurons = draw.randrange(network.layers), draw.sample(range(INNER), 5)
    place, value = cw.site("post", layer=layer, neuron=neurons, stack=network.stack), draw.choice([0.0, 0.5])
    act = Act("in", network.neurons.format(layer), with_columns(neurons, value))
    return lambda s: s.prune(place, value=value), act


def pruned_whole(network: Network, draw: random.Random) -> Step:
    path = draw.choice(network.outs).format(draw.randrange(network.layers))
    return lambda s: s.prune(path), Act("out", path, torch.zeros_like)


def pruned_features(network: Network, draw: random.Random) -> Step:
    path = draw.choice(network.outs).format(draw.randrange(network.layers))
    features = draw.sample(range(network.width), 3)
    axis = f"dim{network.dim % 3 if network.dim < 0 else network.dim}"
    place = replace(cw.site(path), part={axis: features})
    return lambda s: s.prune(place), Act("out", path, with_columns(features, dim=network.dim))


def grafted(network: Network, draw: random.Random) -> Step:
    path = draw.choice((*network.outs, *network.streams)).format(draw.randrange(network.layers))
    block = Bottleneck(network.width, draw.randrange(99), network.dim)
    if draw.random() < 0.3:
        return lambda s: s.graft(path, lambda x: 2 * x), Act("out", path, lambda x: 2 * x)
    return lambda s: s.graft(path, block), Act("out", path, block)


def grafted_inside(network: Network, draw: random.Random) -> Step:
    """At what heads or neurons write, which a module shows as its input alone."""
    kind, paths, width = draw.choice([("z", network.z, WIDTH), ("post", network.neurons, INNER)])
    layer = draw.randrange(network.layers)
    place, block = cw.site(kind, layer=layer, stack=network.stack), Bottleneck(width, draw.randrange(99))
    return lambda s: s.graft(place, block), Act("in", paths.format(layer), block)


def grafted_on_edge(network: Network, draw: random.Random) -> Step:
    writer, reader = draw.choice(network.edges)
    layer = network.layers - 1 if "{}" not in reader else draw.randrange(network.layers)
    writer, reader = writer.format(layer), reader.format(layer)
    if network.stack:
        writer = f"{reader}.input"
    block = Bottleneck(network.width, draw.randrange(99))
    return lambda s: s.graft((writer, reader), block), Act("in", reader, block)


def redefined(network: Network, draw: random.Random) -> Step:
    path, name = draw.choice(network.rules)
    layer, rule = draw.randrange(network.layers), rule_named(name, network.width, draw.randrange(99))
    last, path = network.last.get(path, "").format(layer), path.format(layer)
    return lambda s: s.redefine(path, rule), Act("module", path, rule, last)


def reweighted(network: Network, draw: random.Random) -> Step:
    path = draw.choice(network.weights).format(draw.randrange(network.layers))
    old: Tensor = network.make().get_submodule(path).weight  # type: ignore[assignment]
    new = (
        torch.randn(old.shape, generator=torch.Generator().manual_seed(draw.randrange(99)), dtype=old.dtype)
        / 4
    )
    return lambda s: s.redefine(path, weight=new), Act("weight", path, new)


def spliced(network: Network, draw: random.Random) -> Step:
    path = draw.choice(network.outs).format(draw.randrange(network.layers))
    generator = torch.Generator().manual_seed(draw.randrange(99))
    wide = torch.randn(network.width, 20, generator=generator, dtype=torch.float64)
    name = f"sae{draw.randrange(10**6)}"
    return lambda s: s.splice(
        path, encode=lambda x: (x @ wide).relu(), decode=lambda z: z @ wide.T / 9, name=name
    ), None


KINDS: dict[str, Callable[[Network, random.Random], Step]] = {
    "prune heads": pruned_heads,
    "prune neurons": pruned_neurons,
    "prune a value": pruned_whole,
    "prune features": pruned_features,
    "graft": grafted,
    "graft inside": grafted_inside,
    "graft on an edge": grafted_on_edge,
    "redefine": redefined,
    "weight": reweighted,
    "splice": spliced,
}


def allowed(network: Network) -> list[str]:
    """The kinds that a network has places for."""
    lacking = set() if network.z else {"prune heads", "prune neurons", "graft inside", "splice"}
    return [kind for kind in KINDS if kind not in lacking and (network.edges or kind != "graft on an edge")]


@dataclass
class Sequence:
    """A surgery, as the library and as the oracle is given it, and what was drawn."""

    surgery: cw.Surgery
    acts: list[Act | None]
    kinds: list[str]

    def applied(self, model: Model) -> tuple[Model, list[Act]]:
        """The operated model, and what was done. Steps whose place an earlier one has taken are left out."""
        done: list[Act] = []
        for step, act in zip(self.surgery, self.acts, strict=True):
            try:
                model = cw.Surgery((step,)).apply(model)
            except ConewiseError as error:
                if not any(why in str(error) for why in GONE):
                    raise
                continue
            done += [] if act is None else [act]
        return model, done


GONE = (
    "gone since",
    "no edge from",
    "was pruned",
    "was redefined",
    "nothing reads",
    "nothing that it reads",
    "no weight",
)


def drawn(name: str, seed: int) -> Sequence:
    """A random surgery of a network, undone in part."""
    network, draw = NETWORKS[name], random.Random(f"{name} {seed}")
    steps: list[tuple[str, Step]] = []
    surgery = cw.Surgery()
    for _ in range(draw.randint(1, 5)):
        if steps and draw.random() < 0.15:
            steps.pop()
            surgery = surgery.undo()
            continue
        kind = draw.choice(allowed(network))
        steps.append((kind, KINDS[kind](network, draw)))
        surgery = steps[-1][1][0](surgery)
    return Sequence(surgery, [act for _, (_, act) in steps], [kind for kind, _ in steps])


def metric(outputs: Any) -> Tensor:
    """One number for each row."""
    logits: Tensor = outputs.logits
    last = logits if logits.ndim == 2 else logits[:, -1]
    return last[:, 1] - last[:, 0]


def compare(name: str, seed: int) -> str:
    """Run a random workload of a random surgery, both ways; what differs, in words, if anything does."""
    network, draw = NETWORKS[name], random.Random(f"workload {name} {seed}")
    sequence = drawn(name, seed)
    before = plain(name)
    given = network.example(seed + 1)
    untouched = outputs(before.module, given)
    made, acts = sequence.applied(before)
    theirs = operated(network.make(), acts)
    base, expected = made.run(**given), outputs(theirs, given)
    if far := apart(base.logits, expected):
        return f"outputs are {far:.2g} apart"
    if not torch.equal(outputs(before.module, given), untouched):
        return "the module was changed"
    if draw.random() < 0.3:
        programs = programs_of(before, made)
        inputs = before.signature.bind((), given)
        planned = [difference(*pair).recomputed for pair in pairwise(programs)]
        whole = difference(programs[0], programs[-1]).recomputed
        if measured(programs, inputs) != (tuple(planned), whole):
            return f"the ledger counts {measured(programs, inputs)}, and the plan {planned}, {whole}"
    is_compact = draw.random() < 0.4
    if is_compact:
        try:
            made = cw.Surgery().compact().apply(made)
        except ConewiseError as error:
            if not any(why in str(error) for why in ("serves pruned entries alone", "is shared")):
                raise
            is_compact = False
        base = made.run(**given)
        if far := apart(base.logits, expected):
            return f"outputs without the columns are {far:.2g} apart"
        with torch.no_grad():
            if not torch.equal(made.to_module()(**given).logits, base.logits):
                return "the compact module is not the compact model"
    path = draw.choice(network.outs).format(draw.randrange(network.layers))
    work = draw.choice(["sweep", "serial sweep", "fork", "gradient", "verify", *["heads"] * bool(network.z)])
    if work == "heads" and not is_compact:
        return by_heads(made, theirs, network, given, seed)
    try:
        made.locate(path)
    except ConewiseError:
        path = ""  # it was pruned or redefined
    if work in {"verify", "heads"} or not path:
        return "" if made.verify(n=1).ok else f"verify: {made.verify(n=1)}"
    return WORK[work](made, theirs, network, path, given, seed)


def programs_of(start: Model, made: Model) -> list[Program]:
    """The programs of a model, and of all that steps have made of it."""
    found, model = [made.program], made
    while model is not start:
        assert model.operated_from is not None
        model = model.operated_from[0]  # type: ignore[assignment]
        found.insert(0, model.program)
    return found


def apart(one: Tensor, other: Tensor) -> float:
    """The distance, of the largest number; 0 where it is rounding."""
    if one.shape != other.shape:
        return float("inf")
    far = float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))
    return 0.0 if far <= TOLERANCE else far


def patched(theirs: nn.Module, path: str, value: Callable[[Tensor], Tensor], given: dict[str, Any]) -> Tensor:
    """The metric of the network with a value replaced there, by one more hook."""
    with torch.no_grad():
        return metric(returned(operated(theirs, [Act("out", path, value)]), given))


def by_sweep(
    made: Model,
    theirs: nn.Module,
    network: Network,
    path: str,
    given: dict[str, Any],
    seed: int,
    how: str = "",
) -> str:
    other = network.example(seed + 2)
    seen: list[Tensor] = []

    def see(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x

    outputs(operated(theirs, [Act("out", path, see)]), other)
    job = made.sweep([path], base=made.run(**given), source=made.run(**other), metric=metric)
    result = job.run(evaluator="serial") if how else job.run()
    expected = patched(theirs, path, lambda _: seen[0], given)
    if far := apart(result.per_prompt[0].reshape(-1), expected):
        return f"{how} sweep of {path} is {far:.2g} apart"
    checked = result.verify(n=1)
    if not checked.ok:
        return f"a sweep fails its check: {checked}"
    if result.ledger.node_evaluations != result.plan.node_evaluations:
        return "the ledger is not what the plan said"
    return ""


def by_heads(made: Model, theirs: nn.Module, network: Network, given: dict[str, Any], seed: int) -> str:
    """A sweep over the heads of a layer, or over neurons, each replaced by that of another run."""
    draw = random.Random(seed)
    kind, paths, count, width = draw.choice(
        [("z", network.z, HEADS, WIDTH), ("post", network.neurons, 3, INNER)]
    )
    layer, other = draw.randrange(network.layers), network.example(seed + 2)
    place = cw.site(kind, layer=layer, stack=network.stack)
    path, each = paths.format(layer), width // HEADS if kind == "z" else 1
    try:
        made.locate(place)
    except ConewiseError:
        return ""  # it was pruned or redefined
    seen: list[Tensor] = []

    def see(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x

    def put(x: Tensor, number: int) -> Tensor:
        x, part = x.clone(), slice(number * each, (number + 1) * each)
        x[..., part] = seen[0][..., part]
        return x

    outputs(operated(theirs, [Act("in", path, see)]), other)
    if not seen:
        return ""  # nothing calls it any more
    axis = {"head": ":"} if kind == "z" else {"neuron": [0, 1, 2]}
    cells = cw.sites(kind, layer=layer, stack=network.stack, **axis)
    result = made.sweep(cells, base=made.run(**given), source=made.run(**other), metric=metric).run()
    found = result.per_prompt.reshape(count, -1)
    for number in range(count):
        act = Act("in", path, partial(put, number=number))
        with torch.no_grad():
            expected = metric(returned(operated(theirs, [act]), given))
        if far := apart(found[number], expected):
            return f"{kind} {number} of layer {layer} is {far:.2g} apart"
    checked = result.verify(n=2)
    return "" if checked.ok else f"a sweep of {kind} fails its check: {checked}"


def by_fork(
    made: Model, theirs: nn.Module, network: Network, path: str, given: dict[str, Any], seed: int
) -> str:
    with made.run(**given).fork() as world:
        world.patch(path, lambda x: x * 0.5 + 1)
        found = metric(world.outputs)
    far = apart(found, patched(theirs, path, lambda x: x * 0.5 + 1, given))
    return f"a fork at {path} is {far:.2g} apart" if far else ""


def by_gradient(
    made: Model, theirs: nn.Module, network: Network, path: str, given: dict[str, Any], seed: int
) -> str:
    held: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        held.append(x.detach().requires_grad_())
        return held[-1].clone()

    total = metric(returned(operated(theirs, [Act("out", path, keep)]), given)).sum()
    (expected,) = torch.autograd.grad(total, held[-1])
    found = made.run(**given).gradients(metric, [path])[path]
    far = apart(found, expected) if bool(expected.any()) else float(found.abs().max())
    return f"the gradient at {path} is {far:.2g} apart" if far else ""


WORK: dict[str, Callable[..., str]] = {
    "sweep": by_sweep,
    "serial sweep": partial(by_sweep, how="serial"),
    "fork": by_fork,
    "gradient": by_gradient,
}


def failures(seeds: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int, str, list[str]]]:
    """What goes wrong: network, seed, why, steps."""
    for name, seed in seeds:
        try:
            why = compare(name, seed)
        except ConewiseError as error:
            why = f"refused: {error}"
        except Exception as error:  # noqa: BLE001  # a bare error is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            why = f"BARE {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        if why:
            yield name, seed, why, drawn(name, seed).kinds


def main(count: int, first: int = 0) -> None:
    """Run so many sequences and print what differs."""
    warnings.simplefilter("ignore")
    names, found = list(NETWORKS), Counter[str]()
    seeds = ((names[number % len(names)], first + number) for number in range(count))
    for name, seed, why, kinds in failures(seeds):
        found[why.split(":")[0][:40]] += 1
        sys.stdout.write(f"{name} {seed}: {why}\n    {kinds}\n")
    sys.stdout.write(f"{count} sequences: {sum(found.values())} not equal {dict(found)}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

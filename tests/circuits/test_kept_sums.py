"""Circuits and groups of edges with up to all edges removed, in three precisions, as sums of kept parts.

The oracle is plain PyTorch: the module itself, and a copy of it in float64. A world is right where it is as
near to the copy's as the module's own sums of kept parts are, up to a few times.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import conewise as cw
from conewise.model import Model
from conewise.models.architectures import ARCHITECTURES
from conewise.runs.run import Run
from tests.circuits.removed_oracle import KINDS, Gemma3, Parts, Plain
from tests.circuits.test_evaluation import evaluate

METRIC = cw.logit_diff(answer=3, wrong=5)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
FLOORS = {"float32": 1e-5, "bfloat16": 0.03, "float64": 2e-6}
"""What rounding may do to a metric at least, relative to the largest logit; norms may be in float32."""

Edge = tuple[str, str]


@dataclass(frozen=True)
class Scene:
    """A captured model with prompts, and its module and a copy in float64 in plain PyTorch."""

    model: Model
    plains: tuple[Plain, Plain]
    ids: Tensor
    other: Tensor
    dtype: str

    @classmethod
    def made(cls, name: str, dtype: str, seed: int, layers: int = 2) -> Scene:
        if name == "tiny":
            name, module = "llama", cw.load("tiny").module
        else:
            found = ARCHITECTURES[name]
            settings = {**found.settings, **{k: 64 for k in ("sliding_window",) if k in found.settings}}
            module = replace(found, settings=settings).make(layers, seed)
            generator = torch.Generator().manual_seed(seed + 1)
            with torch.no_grad():
                for parameter in module.parameters():  # larger than initial weights are: edges do something
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        module = module.to(DTYPES[dtype])
        vocabulary = 135  # the tiny model has no more
        ids, other = torch.randint(
            0, vocabulary, (2, 2, 3 + seed % 5), generator=torch.Generator().manual_seed(seed)
        )
        kind = Gemma3 if name == "gemma3" else KINDS[name]
        plains = kind(module), kind(copy.deepcopy(module).double())
        return cls(cw.capture(module, input_ids=ids), plains, ids, other, dtype)

    def wrong(self, found: np.ndarray, worlds: list[Tensor], what: str) -> str:
        """What is wrong with a metric [prompt], given the logits of the module's own sums and the copy's."""
        own, true = ((one[:, -1, 3] - one[:, -1, 5]).double().numpy() for one in worlds)
        scale = max(float(worlds[1][:, -1].abs().max()), 1e-3)
        allowed = 4 * np.abs(own - true).max() + FLOORS[self.dtype] * scale
        is_nothing = not worlds[1].any()
        if np.abs(found - true).max() <= allowed and not (is_nothing and found.any()):
            return ""
        return f"{what}: {found} where sums of kept parts give {true}, in the module's dtype {own}"


def ablated(parts: Parts, ablation: str) -> Parts:
    if ablation == "zero":
        return {name: torch.zeros_like(part) for name, part in parts.items()}
    if ablation == "mean":
        return {name: part.mean((0, 1), keepdim=True).expand_as(part) for name, part in parts.items()}
    return parts


def wrong_circuits(name: str, dtype: str, seed: int) -> Iterator[str]:
    """For each world of random circuits what is wrong with it, or nothing: from none to all kept."""
    scene, rng = Scene.made(name, dtype, seed), np.random.default_rng(seed)
    edges = scene.plains[0].edges()
    base, source = (scene.model.run(input_ids=ids) for ids in (scene.ids, scene.other))
    for ablation in ("zero", "mean", "resample"):
        parts = [ablated(plain.forward(scene.other)[1], ablation) for plain in scene.plains]
        for share in (0.0, 0.05, 0.5, 0.95):
            gone = {reader for _, reader in edges if rng.random() < share / 2}
            kept = {edge for edge in edges if edge[1] not in gone and rng.random() < 1 - share}
            names = [f"{writer}->{reader}" for writer, reader in kept]
            found = evaluate(
                scene.model,
                names,
                base=base,
                source=carried(scene.model, ablation, source),
                metric=METRIC,
                minimality=False,
            ).per_prompt
            worlds = {
                "circuit": set(edges) - kept,
                "complement": kept,
                "ablated": set(edges),
                "full": set[Edge](),
            }
            for world, lost in worlds.items():
                logits = [
                    plain.forward(scene.ids, lost, own)[0]
                    for plain, own in zip(scene.plains, parts, strict=True)
                ]
                what = f"{name} {dtype} {seed}: {world} of {len(kept)} of {len(edges)} edges, {ablation}"
                yield scene.wrong(np.array(found[world]), logits, what)


def wrong_groups(name: str, dtype: str, seed: int) -> Iterator[str]:
    """For each world of a sweep of groups of edges into one layer, by either evaluator, what is wrong."""
    scene, rng = Scene.made(name, dtype, seed), np.random.default_rng(seed)
    edges = scene.plains[0].edges()
    base, source = (scene.model.run(input_ids=ids) for ids in (scene.ids, scene.other))
    by_reader: dict[str, list[Edge]] = {}
    for edge in edges:
        by_reader.setdefault(edge[1], []).append(edge)
    groups = [by_reader["logits"], [edge for edge in edges if edge[1].startswith("a1.")]]
    for at in rng.integers(len(by_reader), size=8):
        own = list(by_reader.values())[at]
        chosen = rng.permutation(len(own))[: rng.choice([1, (len(own) + 1) // 2, len(own)])]
        groups.append([own[n] for n in chosen])
    for ablation in ("zero", "mean", "resample"):
        given = source if ablation == "resample" else ablation
        cells = [[f"{writer}->{reader}" for writer, reader in group] for group in groups]
        sweep = scene.model.sweep(cells, base=base, source=given, metric=METRIC)
        found = [sweep.run(evaluator=how).per_prompt.numpy() for how in ("auto", "serial")]
        for number, group in enumerate(groups):
            logits = [swept(plain, scene, group, ablation) for plain in scene.plains]
            for values in found:
                what = f"{name} {dtype} {seed}: {len(group)} edges into {group[0][1]}, {ablation}"
                yield scene.wrong(values[0, number], logits, what)


def carried(model: Model, ablation: str, source: Run) -> Any:
    """What removed edges carry, as `evaluate` takes it."""
    if ablation == "mean":
        return cw.mean(model, [dict(source.inputs)])
    return source if ablation == "resample" else ablation


def swept(plain: Plain, scene: Scene, group: list[Edge], ablation: str) -> Tensor:
    """The logits where readers of a group see the base's parts but for lost ones, and all others live."""
    base = plain.forward(scene.ids)[1]
    given = ablated(plain.forward(scene.other)[1] if ablation == "resample" else base, ablation)
    readers, lost = {reader for _, reader in group}, set(group)
    chosen = {
        (writer, reader): given[writer] if (writer, reader) in lost else base[writer]
        for writer, reader in plain.edges()
        if reader in readers
    }
    return plain.forward(scene.ids, chosen, by_edge=chosen)[0]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "bfloat16"),
        ("gemma3", "float32"),
        ("gemma2", "float64"),
        ("gpt2", "bfloat16"),
        ("gpt_neox", "float32"),
    ],
)
def test_circuits_with_any_share_of_edges_removed_are_sums_of_kept_parts(name: str, dtype: str) -> None:
    found = list(wrong_circuits(name, dtype, 0))
    assert len(found) == 48
    assert not list(filter(None, found))


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("gemma2", "float32")])
def test_groups_of_edges_up_to_all_of_a_reader_are_sums_of_kept_parts(name: str, dtype: str) -> None:
    found = list(wrong_groups(name, dtype, 0))
    assert len(found) == 60
    assert not list(filter(None, found))


def test_nothing_is_left_where_all_edges_of_the_tiny_model_carry_nothing() -> None:
    """RMSNorm of what rounding leaves would be a stream of full size."""
    scene = Scene.made("tiny", "bfloat16", 0)
    base = scene.model.run(input_ids=scene.ids)
    nothing = evaluate(scene.model, [], base=base, metric=METRIC, source="zero")
    assert (nothing.ablated, nothing.circuit) == (0.0, 0.0)
    into = [f"{writer}->{reader}" for writer, reader in scene.plains[0].edges() if reader == "logits"]
    result = scene.model.sweep([into], base=base, source="zero", metric=METRIC).run()
    assert result.values.tolist() == [0.0]
    assert result.verify()


@pytest.mark.parametrize("name", ["tiny", "gemma2"])
def test_a_search_decides_by_sums_of_kept_parts(name: str) -> None:
    """Each decision of ACDC with nothing in place of removed edges, in bfloat16, from the one before it."""
    scene = Scene.made(name, "bfloat16", 2)
    plain = scene.plains[1]
    nothing = ablated(plain.forward(scene.ids)[1], "zero")

    def metric(removed: set[Edge]) -> float:
        logits = plain.forward(scene.ids, removed, nothing)[0][:, -1]
        return float((logits[:, 3] - logits[:, 5]).mean())

    base = scene.model.run(input_ids=scene.ids)
    log = scene.model.find_circuit(base=base, metric=METRIC, threshold=0.5, source="zero").run().log
    removed: set[Edge] = set()
    scale = float(plain.forward(scene.ids)[0][:, -1].abs().max())
    assert len({one.kept for one in log}) == 2
    for one in log[:120]:
        writer, _, reader = one.edge.partition("->")
        after = metric(removed | {(writer, reader)})
        assert one.change == pytest.approx(after - metric(removed), abs=4 * FLOORS["bfloat16"] * scale)
        removed |= set() if one.kept else {(writer, reader)}


def test_a_circuit_of_all_edges_is_the_base_bit_for_bit_and_one_of_none_the_source() -> None:
    for name in ("llama", "gemma2"):
        scene = Scene.made(name, "bfloat16", 1)
        every = [f"{writer}->{reader}" for writer, reader in scene.plains[0].edges()]
        base, source = (scene.model.run(input_ids=ids) for ids in (scene.ids, scene.other))
        found = evaluate(scene.model, every[::2], base=base, source=source, metric=METRIC, minimality=False)
        for world, run in (("full", base), ("ablated", source)):
            assert found.per_prompt[world] == tuple((run.logits[:, -1, 3] - run.logits[:, -1, 5]).tolist())

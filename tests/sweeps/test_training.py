"""Fits against the same training by plain hooks, and on a model that computes with a known variable."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import ArgumentError, BudgetError, ConewiseError, PatchError, PromptError, SweepError
from tests.sweeps.tiny import HEADS, LENGTH, hooks, prompts, tiny

STEPS, COUNT, WIDTH = 6, 6, 32
BASE, SOURCE = prompts(COUNT, seed=1), prompts(COUNT, seed=2)
LABELS = SOURCE[:, 0]
SITES_FROM_END = cw.sites("resid_post", layer=":", pos=-1)
EXAMPLES = [(BASE[n], SOURCE[n], int(LABELS[n])) for n in range(COUNT)]
RATE = 0.02


def fitted(intervention: Any, sites: Any, name: str = "gpt2", **options: Any) -> Any:
    given = {"steps": STEPS, "batch": COUNT, "held_out": EXAMPLES, "learning_rate": RATE, **options}
    return tiny(name).fit(intervention, sites, EXAMPLES, **given)


# -- the same by hooks ---------------------------------------------------------------------------------


def drawn(*shape: int, width: int) -> Tensor:
    """The directions that a fit of seed 0 begins with."""
    found: Tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) / width**0.5
    return found


def by_hooks(
    name: str, kind: str, layer: int, index: tuple[Any, ...], start: list[Tensor], change: Any
) -> Any:
    """Train one intervention by hooks; its losses, and its logits on all examples in the end."""
    own = [value.clone().requires_grad_() for value in start]
    optimizer = torch.optim.Adam(own, lr=RATE)
    seen: list[Tensor] = []

    def look(whole: Tensor) -> Tensor:
        seen.append(whole.clone())
        return whole

    with hooks(name, {(kind, layer): look}) as module, torch.no_grad():
        module(input_ids=SOURCE, use_cache=False)

    def put(whole: Tensor) -> Tensor:
        mine, theirs = (
            one.view(COUNT, LENGTH, HEADS, -1) if kind == "z" else one for one in (whole, seen[0])
        )
        made = mine.clone()
        made[index] = change(own, mine[index], theirs[index])
        return made.reshape(whole.shape)

    losses = []
    with hooks(name, {(kind, layer): put}) as module, torch.enable_grad():
        for _ in range(STEPS):
            logits = module(input_ids=BASE, use_cache=False).logits[:, -1]
            loss = nn.functional.cross_entropy(logits, LABELS)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        last = module(input_ids=BASE, use_cache=False).logits[:, -1].detach()
    for weight in module.parameters():
        weight.grad = None
    return losses, last, [value.detach() for value in own]


def rotated(own: list[Tensor], base: Tensor, source: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(own[0]).Q
    return base + (source - base) @ basis @ basis.T


def shifted(own: list[Tensor], base: Tensor, _: Tensor) -> Tensor:
    return base + own[0]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_rotations_of_all_places_are_those_trained_one_by_one_by_hooks(name: str) -> None:
    found = fitted(cw.rotation(2), cw.sites("resid_post", layer=":", pos=[0, 3, -1]), name).run()
    start = drawn(9, WIDTH, 2, width=WIDTH)
    assert found.axes == ("layer", "pos")
    assert found.accuracy.shape == (3, 3)
    for number, place in enumerate(found.places):
        index = (slice(None), place.part["pos"])
        losses, logits, _ = by_hooks(name, "resid_post", place.layer, index, [start[number]], rotated)
        torch.testing.assert_close(found.losses[:, number], torch.tensor(losses), rtol=2e-4, atol=2e-4)
        accuracy = (logits.argmax(-1) == LABELS).double().mean()
        assert abs(float(found.accuracy.reshape(-1)[number] - accuracy)) < 1e-9
    assert float(found.losses[0].mean() - found.losses[-1].mean()) > 0.01, "nothing was learned"


def test_heads_and_whole_sites_train_beside_each_other() -> None:
    sites = cw.sites("z", layer=[0, 2], head=":", pos=-1) + cw.sites("mlp_out", layer=1)
    found = fitted(cw.rotation(1), sites).run()
    wide = WIDTH // HEADS
    heads, whole = drawn(8, wide, 1, width=wide), drawn(1, WIDTH, 1, width=WIDTH)
    for number, place in enumerate(found.places):
        at_head = place.name == "z"
        index = (slice(None), LENGTH - 1, place.part["head"]) if at_head else (slice(None),)
        start = heads[number] if at_head else whole[0]
        losses, _, _ = by_hooks("gpt2", place.name, place.layer, index, [start], rotated)
        torch.testing.assert_close(found.losses[:, number], torch.tensor(losses), rtol=2e-4, atol=2e-4)


def test_edits_without_a_source_are_those_trained_by_hooks() -> None:
    site, index = cw.site("resid_post", layer=1, pos=2), (slice(None), 2)
    start = drawn(1, WIDTH, 2, width=WIDTH)[0]
    q = torch.linalg.qr(start).Q
    signs = torch.diagonal(q.T @ start).sign()  # the one that has a positive diagonal
    begun = [start, q * signs, torch.zeros(2)]

    def same_signs(own: list[Tensor], base: Tensor, source: Tensor) -> Tensor:
        del source
        basis: Tensor
        basis, factor = torch.linalg.qr(own[0])
        basis = basis * factor.diagonal().sign()
        return base + (base @ own[1] + own[2] - base @ basis) @ basis.T

    found = fitted(cw.low_rank(2), site).run()
    losses, _, own = by_hooks("gpt2", "resid_post", 1, index, begun, same_signs)
    torch.testing.assert_close(found.losses[:, 0], torch.tensor(losses), rtol=2e-4, atol=2e-4)
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))
    found = fitted(cw.add(vector, 0.5), site).run()
    losses, _, own = by_hooks("gpt2", "resid_post", 1, index, [0.5 * vector], shifted)
    torch.testing.assert_close(found.losses[:, 0], torch.tensor(losses), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(found[site].parameters["vector"], own[0], rtol=1e-3, atol=1e-3)


# -- a planted variable --------------------------------------------------------------------------------

CLASSES, STREAM = 7, 40


class Step(nn.Module):
    """One layer of the planted model: keeps some of the stream, and adds a function of another part."""

    keep: Tensor
    read: Tensor
    bias: Tensor
    write: Tensor

    def __init__(self, keep: Tensor, read: Tensor, bias: Tensor, write: Tensor) -> None:
        super().__init__()
        for name, value in {"keep": keep, "read": read, "bias": bias, "write": write}.items():
            self.register_buffer(name, value)

    def forward(self, stream: Tensor) -> Tensor:
        return stream @ self.keep + torch.relu(stream @ self.read + self.bias) @ self.write


class Planted(nn.Module):
    """Adds two numbers modulo 7: the sum is a point of a circle in a plane of the stream, after layer 1."""

    def __init__(self) -> None:
        super().__init__()
        n, generator = CLASSES, torch.Generator().manual_seed(0)
        turn = torch.linalg.qr(torch.randn(STREAM, STREAM, generator=generator)).Q
        first, second, plane, out = (
            turn[:n],
            turn[n : 2 * n],
            turn[2 * n : 2 * n + 2],
            turn[2 * n + 2 : 3 * n + 2],
        )
        angles = 2 * math.pi * torch.arange(n) / n
        circle = torch.stack([angles.cos(), angles.sin()], 1)
        pairs = [(a, b) for a in range(n) for b in range(n)]
        self.plane = plane
        self.embed = nn.Embedding.from_pretrained(torch.cat([first, second]))  # type: ignore[no-untyped-call]
        seen = torch.stack([first[a] + second[b] for a, b in pairs])
        sums = torch.stack([circle[(a + b) % n] for a, b in pairs])
        gone = torch.eye(STREAM) - plane.T @ plane
        near = float(torch.cos(torch.tensor(2 * math.pi / n)))
        self.layers = nn.ModuleList(
            [
                Step(torch.eye(STREAM), torch.zeros(STREAM, 1), torch.zeros(1), torch.zeros(1, STREAM)),
                Step(torch.eye(STREAM), 1.0 * seen.T, torch.tensor(-1.0), sums @ plane),
                Step(gone, plane.T @ circle.T, torch.tensor(-near), out / (1 - near)),
            ]
        )
        self.unembed = nn.Linear(STREAM, n, bias=False)
        self.unembed.weight.data.copy_(8 * out)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embed(tokens + torch.tensor([0, CLASSES])).sum(1)
        for layer in self.layers:
            stream = layer(stream)
        logits: Tensor = self.unembed(stream)
        return logits


@cache
def planted() -> tuple[Planted, Any]:
    module = Planted().eval()
    return module, cw.capture(module, tokens=torch.tensor([[1, 2], [3, 4]]))


def interchanges(count: int, seed: int) -> list[tuple[Any, Any, int]]:
    pairs = torch.randint(0, CLASSES, (count, 2, 2), generator=torch.Generator().manual_seed(seed))
    return [({"tokens": b[None]}, {"tokens": s[None]}, int(s.sum() % CLASSES)) for b, s in pairs]


def test_a_planted_plane_is_found_and_other_layers_are_not() -> None:
    module, model = planted()
    tokens = torch.cartesian_prod(torch.arange(CLASSES), torch.arange(CLASSES))
    assert bool((module(tokens).argmax(1) == tokens.sum(1) % CLASSES).all()), "the model does its task"
    layers = [f"layers.{n}" for n in range(3)]
    fit = model.fit(
        cw.rotation(2), layers, interchanges(256, 1), steps=150, batch=32, learning_rate=0.02,
        held_out=interchanges(400, 2),
    )  # fmt: skip
    found = fit.run()
    accuracy = dict(zip(found.names, found.accuracy.tolist(), strict=True))
    assert accuracy["layers.1"] >= 0.99
    assert max(accuracy["layers.0"], accuracy["layers.2"]) <= 0.6
    assert found.best.place == "layers.1"
    basis = found.best.basis
    overlap = torch.linalg.svdvals(module.plane @ basis)
    assert float(overlap.min()) > 0.95, "the plane itself, and not another one that does as well"
    one = interchanges(1, 9)[0]
    source = model.run(**one[1])
    with model.run(**one[0]).fork() as world:
        world.patch("layers.1", found.best(source))
        assert int(world.outputs.argmax()) == one[2]


# -- the job -------------------------------------------------------------------------------------------


SITES = cw.sites("resid_post", layer=":", pos=[2, -1])
KINDS: dict[str, Any] = {
    "rotation": lambda: cw.rotation(2),
    "boundless": cw.boundless,
    "learned_mask": cw.learned_mask,
    "low_rank": lambda: cw.low_rank(1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_that_was_cut_off_goes_on_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole = fitted(KINDS[kind](), SITES, batch=4).run()
    again = fitted(KINDS[kind](), SITES, batch=4)
    seen = 0

    def stop(done: int, total: int) -> None:
        nonlocal seen
        seen = max(seen, done)
        if done == 3:
            raise KeyboardInterrupt

    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("conewise.sweeps.training.SAVE_EVERY", -1.0)
        with pytest.raises(KeyboardInterrupt):
            again.run(out=tmp_path / "fit", progress=stop)
    with pytest.raises(SweepError, match="resume=True"):
        again.run(out=tmp_path / "fit")
    with pytest.raises(SweepError, match="stopped at step"):
        cw.open(tmp_path / "fit")
    with pytest.raises(SweepError, match="something else: seed"):
        fitted(KINDS[kind](), SITES, batch=4, seed=5).run(out=tmp_path / "fit", resume=True)
    found = again.run(out=tmp_path / "fit", resume=True)
    assert found.equals(whole)
    opened = cw.open(tmp_path / "fit")
    assert opened.equals(whole)
    assert repr(opened) == repr(whole)


def test_worlds_are_cut_to_fit_the_memory_and_train_the_same() -> None:
    fit = fitted(cw.rotation(2), SITES)
    whole, plan = fit.run(), fit.plan()
    assert plan.passes >= 1
    small = fit.plan(max_memory=plan.peak_bytes // 3)
    assert small.passes > plan.passes
    assert small.peak_bytes <= plan.peak_bytes // 3
    found = fit.run(max_memory=plan.peak_bytes // 3)
    torch.testing.assert_close(found.losses, whole.losses, rtol=1e-4, atol=1e-4)
    with pytest.raises(BudgetError, match="one world of a step"):
        fit.run(max_memory=1000)


@pytest.mark.filterwarnings("ignore::conewise.errors.NoEffectWarning")
def test_what_is_trained_is_a_patch_with_the_accuracy_that_was_counted() -> None:
    model = tiny("gpt2")
    for kind in KINDS.values():
        found = fitted(kind(), SITES).run()
        base, source = model.run(input_ids=BASE), model.run(input_ids=SOURCE)
        for number, place in enumerate(found.places):
            trained = found[place]
            with base.fork() as world:
                world.patch(place, trained(source) if trained.kind.takes_source else trained())
                right = (world.logits[:, -1].argmax(-1) == LABELS).double().mean()
            assert float(right) == pytest.approx(float(found.accuracy.reshape(-1)[number]))
    assert list(found.to_dataframe().columns) == ["site", "accuracy", "loss", "training_loss"]


def test_examples_of_several_lengths_and_texts_of_labels() -> None:
    short = [(BASE[n, :4], SOURCE[n, :4], int(LABELS[n])) for n in range(4)]
    model = tiny("gpt2")
    found = model.fit(cw.rotation(1), SITES_FROM_END, [*EXAMPLES, *short], steps=4, batch=4).run()
    assert bool(torch.isfinite(found.losses).all())
    assert found.held_out == 2


def test_fixed_changes_are_what_they_say() -> None:
    model, generator = tiny("gpt2"), torch.Generator().manual_seed(6)
    rows = torch.linalg.qr(torch.randn(WIDTH, 3, generator=generator)).Q.T
    base, source = model.run(input_ids=BASE), model.run(input_ids=SOURCE)
    here, there = base["resid_post", 1], source["resid_post", 1]
    vector = 3 * rows[0] + rows[1]
    unit = vector / vector.norm()
    expected = {
        cw.subspace(rows, source): here + (there - here) @ rows.T @ rows,
        cw.project_out(vector): here - (here @ unit)[..., None] * unit,
        cw.project_out(torch.stack([rows[0], vector])): here - here @ rows[:2].T @ rows[:2],
        cw.multiply(0.5): here * 0.5,
        cw.multiply(vector): here * vector,
    }
    for patch, value in expected.items():
        with base.fork() as world:
            world.patch(("resid_post", 1), patch)
            torch.testing.assert_close(world["resid_post", 1], value, rtol=1e-5, atol=1e-5)
    result = model.sweep(
        cw.cells(SITES, source_at=lambda place: cw.project_out(rows[place.layer])),
        base=base, metric=cw.logit_diff(5, 9),
    ).run(verify=3)  # fmt: skip
    assert result.axes == ("layer", "pos")


def wrong() -> list[tuple[Any, type[ConewiseError], str]]:
    model, rows = tiny("gpt2"), torch.ones(2, WIDTH)
    run = model.run(input_ids=BASE)
    odd = [(BASE[0], SOURCE[0, :3], 1)]
    return [
        (lambda: cw.rotation(0), ArgumentError, "at least 1"),
        (lambda: cw.rotation(2, start=rows), PatchError, "not orthonormal: their products are off by"),
        (lambda: cw.rotation(3, start=torch.eye(WIDTH)[:2]),
         PatchError, "`start` has 2 directions, and k is 3"),
        (lambda: cw.subspace(rows, run), PatchError, "torch.linalg.qr"),
        (lambda: cw.project_out(rows), PatchError, "depend on each other"),
        (lambda: cw.project_out(torch.zeros(WIDTH)), PatchError, "are zero"),
        (lambda: fitted(cw.rotation(40), SITES), PatchError, "has 40 directions, and .* has 32 features"),
        (lambda: fitted(cw.rotation(1, start=torch.eye(5)[:1]), SITES), PatchError, "for 5 features"),
        (lambda: fitted(cw.noise(0.1), SITES), PatchError, "nothing to learn"),
        (lambda: fitted(cw.rotation(1), cw.sites("resid_post", layer=0, d=[1, 2])), PatchError, "leave that"),
        (lambda: fitted(cw.rotation(1), cw.sites("pattern", layer=0)), PatchError, "last axis is features"),
        (lambda: fitted(cw.rotation(1), [[("mlp_out", 0), ("mlp_out", 1)]]), PatchError, "one place for"),
        (lambda: model.fit(cw.rotation(1), SITES, odd), PromptError, "differ in shape"),
        (lambda: model.fit(cw.rotation(1), SITES, [BASE[0]]), PromptError, "write .base, source, label."),
        (lambda: model.fit(cw.rotation(1), SITES, [(BASE[0], SOURCE[0], 1.5)]), PromptError, "is a token"),
        (lambda: model.fit(cw.rotation(1), SITES, [(BASE[0], SOURCE[0], 9999)]), PromptError, "has 61"),
        (lambda: model.fit(cw.rotation(1), SITES, []), PromptError, "no examples"),
        (lambda: fitted(cw.rotation(1), SITES).run(workers=2), ArgumentError, "one process"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(18))
def test_bad_input_is_refused_with_a_sentence(number: int) -> None:
    asked, error, message = wrong()[number]
    with pytest.raises(error, match=message):
        asked()

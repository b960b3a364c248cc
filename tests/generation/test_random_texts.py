"""Random sweeps over texts: each against that world alone, by plain hooks on the module's own `generate`.

`TEXTS` in the environment says how many texts are compared; by default a few of each family.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

import conewise as cw
from tests.generation.alone import (
    DEPTH,
    FAMILIES,
    HEADS,
    WIDTH,
    captured,
    padded,
    prompts,
    written_alone,
)
from tests.generation.test_encoder_decoder import STACKS, alone, model_of, path_of

NAMES = (*FAMILIES, "T5")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"eos_token_id": list(range(30, 45))},
)
Change = Callable[[Tensor], Tensor]


def drawn_sources(drawn: random.Random, width: int) -> Iterator[tuple[Any, Change]]:
    """What a sweep puts in, and the same as a plain function."""
    vector = torch.randn(width, generator=torch.Generator().manual_seed(drawn.randrange(10**6)))
    kind = drawn.choice(("add", "add", "zero", "function"))
    if kind == "add":
        for scale in drawn.sample((-8.0, -3.0, 1.0, 4.0, 9.0), 2):
            yield cw.add(vector, scale), lambda value, scale=scale: value + scale * vector  # type: ignore[misc]
    elif kind == "zero":
        yield "zero", torch.zeros_like
    else:
        yield (lambda value: value * -2 + vector), lambda value: value * -2 + vector


def one_sweep(name: str, drawn: random.Random, n: int) -> Iterator[tuple[list[int], list[int], str]]:
    """The texts of a random sweep, and what each world writes alone."""
    rows = prompts([drawn.randrange(3, 9) for _ in range(drawn.choice((1, 1, 2, 3)))], drawn.randrange(10**6))
    options, seed = drawn.choice(OPTIONS), drawn.randrange(1000)
    places: tuple[Literal["all", "new"], ...] = ("all", "all", "new")
    pos, stack = drawn.choice(places), drawn.choice(STACKS)
    is_pair = name == "T5"
    kind = "resid_post" if is_pair else drawn.choice(("resid_post", "resid_pre", "z"))
    layers = sorted(drawn.sample(range(DEPTH), drawn.choice((1, 2, 3))))
    size, head = WIDTH // HEADS, drawn.randrange(HEADS)
    sources = list(drawn_sources(drawn, size if kind == "z" else WIDTH))
    model = model_of("T5") if is_pair else captured(name)
    more = {"stack": stack} if is_pair else {"head": head} if kind == "z" else {}
    cells: list[Any] = []
    changes: list[tuple[int, Change]] = []
    for layer in layers:
        for source, change in sources:
            cells.append(cw.cell(cw.site(kind, layer=layer, **more), source=source))
            changes.append((layer, change))
    job = model.sweep(cells, base=padded(rows), generate=cw.writing(n, seed=seed, pos=pos, **options))
    texts = job.run()
    for _ in range(6):
        world, number = drawn.randrange(len(cells) + 1), drawn.randrange(len(rows))
        row = rows[number]
        first = 1 if is_pair else len(row)
        layer, change = changes[world - 1]
        step = [0]

        def act(value: Tensor, change: Change = change, first: int = first, step: list[int] = step) -> Tensor:
            """The change, at the positions that are meant: first the prompt is shown, then each token."""
            start, step[0] = step[0], step[0] + value.shape[1]
            new = change(value) if kind != "z" else value.clone()
            if kind == "z":
                part = slice(head * size, (head + 1) * size)
                new[..., part] = change(value[..., part])
            if pos == "new":
                keep = max(0, min(first - start, value.shape[1]))
                new = torch.cat([value[:, :keep], new[:, keep:]], 1)
            return new

        where = (
            f"{name} {kind} {layer} {stack if is_pair else ''} {pos} {options} world {world} prompt {number}"
        )
        if is_pair:
            is_read = stack == "encoder"
            unchanged = is_read and pos == "new"
            path = path_of(name, stack, layer) if world and not unchanged else None
            torch.manual_seed(seed)
            own = alone(name, row, path, change if is_read else act, seed=seed, n=n, **options)
        else:
            path, projection = FAMILIES[name][3:]
            site = {
                "resid_post": (f"{path}.{layer}", "output"),
                "resid_pre": (f"{path}.{layer}", "input"),
                "z": (f"{path}.{layer}.{projection}", "input"),
            }[kind]
            own = written_alone(model.module, row, n, [(*site, act)] if world else [], seed, **options)
        yield [token for token in texts.ids[world, number].tolist() if token >= 0], own, where


def test_random_worlds_write_what_they_write_alone() -> None:
    wanted, compared, wrong = int(os.environ.get("TEXTS", "54")), 0, []
    drawn = random.Random(int(os.environ.get("SEED", "0")))
    names = itertools.cycle(NAMES)
    while compared < wanted:
        name = next(names)
        for found, own, where in one_sweep(name, drawn, drawn.randrange(4, 10)):
            compared += 1
            if found != own:
                wrong.append(f"{where}: {found}, alone {own}")
    assert not wrong, f"{len(wrong)} of {compared}:\n" + "\n".join(wrong)

"""The figures of "How it works", of a real plan. To write them anew: `python -m tests.docs.how_it_works`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import conewise as cw
from conewise.report.folded import Folded
from conewise.report.folding import fold, group
from conewise.report.sketch import COLOURS, KEYS, Paint, folded_sketch, literal_style

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
SITE = "z[layer=1, head=2]"

Bar = tuple[int, int, int]
"""A world, and the columns from which to which something is true of it."""


@dataclass(frozen=True)
class Scene:
    """The sweep of the README: all heads of the tiny model, each in a world of its own."""

    sweep: cw.Sweep
    model: cw.Model
    base: cw.Run

    @classmethod
    def made(cls) -> Scene:
        """The same at every call: trained weights, fixed prompts."""
        loaded = cw.load("tiny")
        texts = [f"When Mary and John went to the store, {who} gave a drink to" for who in ("John", "Mary")]
        tokenizer: Any = loaded.tokenizer
        clean, corrupted = tokenizer(texts, return_tensors="pt").input_ids.split(1)
        mary, john = tokenizer.convert_tokens_to_ids(["Mary", "John"])
        model = cw.capture(loaded.module, input_ids=clean)
        base, source = model.run(input_ids=corrupted), model.run(input_ids=clean)
        heads, metric = cw.sites("z", layer=":", head=":"), cw.logit_diff(answer=mary, wrong=john)
        return cls(model.sweep(heads, base=base, source=source, metric=metric), model, base)

    @cached_property
    def plan(self) -> cw.SweepPlan:
        """What the sweep will compute."""
        return self.sweep.plan()

    @cached_property
    def folded(self) -> Folded:
        """The model by layer, with the cones of the sweep's cells."""
        return fold(self.model, self.sweep.cells, targets=self.sweep.targets(), base=self.base)

    @cached_property
    def columns(self) -> list[tuple[str, str]]:
        """Every node that one full evaluation computes, with the row of the model that it is drawn in."""
        graph = self.model.graph
        wanted = {graph.name(one) for one in self.model.support(self.sweep.targets())}
        return [
            (name, part.row)
            for part in group(self.model.program)
            for name in part.nodes
            if name in wanted and not graph.is_source(name)
        ]

    def computed(self) -> Iterator[Bar]:
        """What the plan computes, world by world."""
        assert self.plan.compiled is not None
        worlds = dict(self.plan.compiled.steps)
        for world in range(self.plan.worlds):
            here = [any(a <= world < b for a, b in worlds.get(node, ())) for node, _ in self.columns]
            at = 0
            for is_computed, run in groupby(here):
                length = len(list(run))
                if is_computed:
                    yield world, at, at + length
                at += length

    def patched(self) -> list[int]:
        """For each world, the column of the node that it patches."""
        assert self.plan.compiled is not None
        places = [self.sweep.cells[cell].places[0] for cell in self.plan.compiled.order]
        names = [node for node, _ in self.columns]
        return [names.index(self.model.locate(place).node) for place in places]


def wave(scene: Scene) -> str:
    """One patch in two steps: what becomes invalid, and what is computed when the answer is asked for."""
    folded, sketch = scene.folded, folded_sketch(scene.folded)
    cone = folded.cone(SITE)
    nodes = [part.nodes for part in folded.parts]
    lost = {
        at: Paint(lost=count / nodes[at] if count else 0.0, is_site=at in cone.at)
        for at, count in enumerate(cone.invalidated)
    }
    done = {
        at: Paint(
            done=count / nodes[at] if count else 0.0,
            text=str(count or ""),
            is_site=at in cone.at,
            is_reused=cone.reused[at] > 0,
        )
        for at, count in enumerate(cone.recomputed)
    }
    invalid, computed, full = sum(cone.invalidated), cone.node_evaluations, folded.full_evaluations
    titles = (
        f"1. A head is patched: {invalid} values become invalid. Nothing is computed.",
        f"2. The answer is asked for: {computed} of {full} nodes are computed, each once.",
    )
    keys = [
        (classes, meaning)
        for name, classes, meaning in KEYS
        if name in {"site", "lost", "done", "reused", "kept"}
    ]
    width, high = sketch.width, sketch.height
    parts = []
    for at, (title, paints) in enumerate(zip(titles, (lost, done), strict=True)):
        y = 24 + at * (high + 30)
        below = keys if at else ()
        drawn = str(sketch.svg(f"wave{at}", title, paints, keys=below)).lstrip()
        place = f'x="0" y="{y:g}" width="{width:g}" height="{high + (24 if below else 0):g}"'
        parts += [
            f'<text class="cw-label" x="44" y="{y - 6:g}">{title}</text>',
            drawn.replace("<svg ", f"<svg {place} ", 1),
        ]
    return _framed(width, 2 * high + 84, " ".join(titles), literal_style(), parts)


LEFT, TOP, WIDE, ROW = 112, 44, 540, 13


def stack(scene: Scene) -> str:
    """All worlds of a sweep over all nodes: what is computed is a stair that grows with depth."""
    columns, plan = scene.columns, scene.plan
    unit = WIDE / len(columns)
    high = plan.worlds * ROW
    parts, at = [], 0
    for row, members in groupby(columns, key=lambda column: column[1]):
        count = len(list(members))
        x, wide = LEFT + at * unit, count * unit
        shown = f"layer {row}" if row.isdigit() else ""
        parts += [
            f'<rect class="kept" x="{x:.1f}" y="{TOP}" width="{wide - 1.5:.1f}" height="{high}"/>',
            f'<text class="soft" x="{x + wide / 2:.1f}" y="{TOP - 8}" text-anchor="middle">{shown}</text>',
        ]
        at += count
    bars = list(scene.computed())
    for world, start, end in bars:
        place = f'x="{LEFT + start * unit:.1f}" y="{TOP + world * ROW + 1}"'
        parts.append(f'<rect class="done" {place} width="{(end - start) * unit:.1f}" height="{ROW - 2}"/>')
    patched = scene.patched()
    for world, column in enumerate(patched):
        x, y = LEFT + (column + 0.5) * unit, TOP + (world + 0.5) * ROW
        parts.append(f'<path class="site" d="M{x - 5:.1f},{y:g} l5,-5 l5,5 l-5,5 z"/>')
    starts = [world for world, column in enumerate(patched) if world == 0 or patched[world - 1] != column]
    for layer, (first, after) in enumerate(zip(starts, [*starts[1:], plan.worlds], strict=True)):
        y = TOP + (first + after) / 2 * ROW + 4
        parts.append(
            f'<text class="soft" x="{LEFT - 8}" y="{y:g}" text-anchor="end">heads of layer {layer}</text>'
        )
        x = LEFT + (patched[first] + 0.5) * unit
        parts.append(f'<text class="ink" x="{x:.1f}" y="{TOP + high + 18}">a stack of {after}</text>')
    area = sum(end - start for _, start, end in bars)
    assert area == plan.node_evaluations
    told = (
        f"{area:,} of {plan.full_evaluations:,} cells are computed ({plan.ratio:.2f} times fewer), "
        f"by {plan.launches} operations"
    )
    axes = f"{plan.worlds} worlds (rows), {len(columns)} nodes (columns)"
    parts += [
        f'<text class="ink" x="{LEFT}" y="18">{axes}</text>',
        f'<text class="ink" x="{LEFT}" y="{TOP + high + 40}">{told}</text>',
    ]
    y = TOP + high + 52
    for x, drawn, meaning in (
        (LEFT, f'<path class="site" d="M{LEFT},{y + 6} l5,-5 l5,5 l-5,5 z"/>', "patched"),
        (LEFT + 84, f'<rect class="done" x="{LEFT + 76}" y="{y}" width="16" height="11"/>', "computed"),
        (
            LEFT + 182,
            f'<rect class="kept" x="{LEFT + 174}" y="{y}" width="16" height="11"/>',
            "read from the one base run",
        ),
    ):
        parts += [drawn, f'<text class="soft" x="{x + 16}" y="{y + 10}">{meaning}</text>']
    return _framed(LEFT + WIDE + 36, y + 20, told, _style(), parts)


def _style() -> str:
    """Light and dark in literal colours, as those of the other drawings."""

    def sheet(shade: int) -> str:
        names = {
            "ground": "page",
            "kept": "box",
            "done": "done",
            "site": "site",
            "ink": "ink",
            "soft": "soft",
        }
        rules = " ".join(f".{name} {{ fill:{COLOURS[colour][shade]} }}" for name, colour in names.items())
        return f"{rules} .site {{ stroke:{COLOURS['page'][shade]} }}"

    sizes = ".ink { font-size:12px } .soft { font-size:11px }"
    return f"{sizes} {sheet(0)}\n@media (prefers-color-scheme: dark) {{ {sheet(1)} }}\n"


def _framed(width: float, height: float, label: str, style: str, parts: list[str]) -> str:
    """A drawing that stands alone: its size, its name for those who hear it, its ground."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
    ground = '<rect class="ground cw-ground" width="100%" height="100%"/>'
    opened = f'{head} aria-label="{label}" font-family="system-ui, sans-serif" font-size="11">'
    return "\n".join([opened, f"<style>{style}</style>{ground}", *parts, "</svg>", ""])


def figures() -> dict[str, str]:
    """The figures by the names of their files."""
    scene = Scene.made()
    return {"wave.svg": wave(scene), "stack.svg": stack(scene)}


if __name__ == "__main__":
    for name, drawn in figures().items():
        (FIGURES / name).write_text(drawn, encoding="utf-8")

"""The sites of a model as a table: to print, to search, to turn into a DataFrame."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from conewise.anatomy.axes import View
from conewise.anatomy.sites import AXES as RESULT_AXES
from conewise.anatomy.sites import DICTIONARY, WHERE, WHERE_IN_DICTIONARY, Site, SiteTable, runs_of
from conewise.arguments import checked
from conewise.errors import Argument, Piece, write
from conewise.extras import needs
from conewise.program.records import Program
from conewise.reactive.graph import Graph, cone_sizes
from conewise.templates import columns, heading, table

COLUMNS = ("name", "kind", "layer", "head", "pos", "shape", "cone", "node")
SUMMARY = ("kind", "layers", "heads", "axes", "cone", "where it lies")
WHOLE = "`model.sites.to_dataframe()`"
"""The call that lists every site, in Python."""


@checked
class Listing:
    """Every place that can be patched, with its kind, layer, axes, shape and cone size.

    `head` is the number of heads where the site has them (of keys and values: their own number),
    `pos` says whether positions can be selected, `cone` is how many operations depend on it. A `note` on the
    model, where it has one, is its last line.
    """

    def __init__(self, table: SiteTable, graph: Graph, program: Program, note: str = "") -> None:
        self._table = table
        self._graph = graph
        self._program = program
        self._note = note

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._table)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of a transformer that this model has."""
        return self._table.kinds

    def layers(self, kind: str, stack: str = "") -> tuple[int, ...]:
        """The layers that have this kind."""
        return self._table.layers(kind, stack)

    @cached_property
    def _cones(self) -> dict[str, int]:
        return cone_sizes(self._graph)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each site."""
        for site in self._table:
            yield {
                "name": site.name,
                "kind": site.kind,
                "layer": site.layer,
                "head": self._heads(site),
                "pos": site.view is not None and any("pos" in axis for axis in site.view.axes),
                "shape": self.shape_of(site),
                "cone": self._cones[site.node],
                "node": site.node,
            }

    def to_dataframe(self) -> Any:
        """The table as a pandas DataFrame."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        frame = pd.DataFrame(list(self.rows()), columns=list(COLUMNS))
        return frame.astype({"layer": "Int64", "head": "Int64"})

    def _heads(self, site: Site) -> int | None:
        if site.view is None:
            return None
        for axis in ("head", "kv_head"):
            if axis in site.view.axes:
                length = site.view.lengths.get(axis)
                if isinstance(length, int):
                    return length
                dim = next(d for d, packed in enumerate(site.view.packing) if axis in packed)
                size = (self._program.shapes[site.node] or ())[dim]
                return size if isinstance(size, int) else None
        return None

    def shape_of(self, site: Site) -> str:
        """The axes of a site's value in words, with the lengths that no run changes."""
        shape = self._program.shapes[site.node]
        if site.result is not None:
            return "[" + ", ".join(RESULT_AXES) + "]"
        if site.view is not None:
            return "[" + ", ".join(self._sized(site.view, shape or ())) + "]"
        return "several values" if shape is None else "[" + ", ".join(map(str, shape)) + "]"

    def _sized(self, view: View, shape: tuple[Any, ...]) -> Iterator[str]:
        """The axes of a view, with their lengths where no run changes them."""
        for axis in view.axes:
            dim = next(d for d, packed in enumerate(view.packing) if axis in packed)
            length = view.lengths.get(axis, shape[dim] if len(view.packing[dim]) == 1 else None)
            yield f"{axis}={length}" if isinstance(length, int) else axis

    def _summary(self) -> list[tuple[str, ...]]:
        """One line for each kind and each site of a dictionary: layers, heads, axes, cones, where it lies."""
        by_kind: dict[tuple[str, str], list[Site]] = {}
        for site in self._table:
            if site.layer is not None:
                by_kind.setdefault((site.stack, site.kind), []).append(site)
        lines: list[tuple[str, ...]] = []
        for (stack, kind), sites in by_kind.items():
            layers = sorted(site.layer for site in sites if site.layer is not None)
            cones = sorted(self._cones[site.node] for site in sites)
            heads = self._heads(sites[0])
            lines.append(
                (
                    f"{stack}.{kind}" if stack else kind,
                    _spans(layers),
                    "" if heads is None else str(heads),
                    self.shape_of(sites[0]),
                    _span(cones),
                    WHERE.get(kind.removeprefix("cross_"), ""),
                )
            )
        for site in self._table:
            if site.kind == DICTIONARY:
                where = WHERE_IN_DICTIONARY[site.name.rpartition(".")[2]]
                cone = str(self._cones[site.node])
                lines.append((site.name, "", "", self.shape_of(site), cone, where))
        return lines

    def missing(self) -> list[tuple[str, str, tuple[Piece, ...]]]:
        """The kinds that are not there: which, in which layers, and why in the first of these."""
        by_reason: dict[tuple[str, str], tuple[tuple[Piece, ...], dict[str, None], dict[int, None]]] = {}
        for (kind, stack, layer), reason in self._table.missing.items():
            alike = re.sub(r"\d+", "#", write(reason))  # but for the numbers of nodes
            _, kinds, layers = by_reason.setdefault((stack, alike), (reason, {}, {}))
            kinds[f"{stack}.{kind}" if stack else kind] = None
            layers[layer] = None
        return [
            (", ".join(kinds), _spans(sorted(layers)), reason) for reason, kinds, layers in by_reason.values()
        ]

    def _not_there(self, written: Callable[[Argument], str] = str) -> list[str]:
        return [
            f"not there: {kinds} (layer {layers}): {write(reason, written)}."
            for kinds, layers, reason in self.missing()
        ]

    def __str__(self) -> str:
        return self.text()

    def text(self, whole: str = WHOLE, written: Callable[[Argument], str] = str) -> str:
        """The kinds as a table of text, and how many sites have none; `whole` is what lists all of them.

        `written` writes arguments that would make other kinds be there.
        """
        lines = [SUMMARY, *self._summary()]
        text = columns(lines)
        text.insert(1, "-" * max(map(len, text)))
        if len(lines) == 1:
            text = [self._no_kinds()]
        return "\n".join([*text, *self._not_there(written), *self._last(whole)])

    def _last(self, whole: str) -> list[str]:
        """The other sites in number, and the note."""
        return [self._others(whole), *([self._note] if self._note else [])]

    def _others(self, whole: str) -> str:
        """Describe how many sites have no kind."""
        modules = sum(site.kind.startswith("module") for site in self._table)
        operations = sum(site.kind == "op" for site in self._table)
        return (
            f"and {modules} module inputs and outputs by path, {operations} inputs and operations by name: "
            f"{whole} lists all."
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = self._summary()
        kinds = table(lines, SUMMARY, numbers=(2, 4)) if lines else heading("", self._no_kinds())
        missing = "".join(heading("", line) for line in self._not_there())
        last = "".join(heading("", line) for line in self._last(WHOLE))
        return heading(f"{len(self):,} sites") + kinds + missing + last

    def _no_kinds(self) -> str:
        """Why no site of the model has a kind."""
        why = self._table.why_no_kinds
        return f"{why[:1].upper()}{why[1:]}: this model's sites are its modules and operations."


def _spans(numbers: list[int]) -> str:
    """Ascending numbers in short: 0-3, 5."""
    return ", ".join(map(_span, runs_of(numbers)))


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]}-{numbers[-1]}"

"""The result of a sweep: the metric in every world, in natural axes, with its cost and its provenance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from conewise.anatomy.places import EdgePlace
from conewise.anatomy.selectors import Cell, Spread
from conewise.arguments import Count, Seed, checked, shown_bytes
from conewise.errors import SweepError, WeightsChangedError
from conewise.program.tensors import Tensor
from conewise.program.walk import bitwise_same
from conewise.report.story import read_story, write_story
from conewise.runs.metrics import Vector
from conewise.status import shown_phases
from conewise.sweeps.batches import base_story
from conewise.sweeps.findings import certainty, cost, finding, heatmaps, strong
from conewise.sweeps.recheck import recheck
from conewise.sweeps.statistics import LEVEL, RESAMPLES, Statistics, statistics_of
from conewise.sweeps.storage.archive import read_result
from conewise.sweeps.storage.result_data import CellCheck, ResultData
from conewise.templates import beside, folded, heading, lead, note, shown, table, verdict
from conewise.threads import Turn, one_thread

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

    from conewise.circuits.circuit import Circuit
    from conewise.circuits.curve import FaithfulnessCurve
    from conewise.report.story import Story
    from conewise.runs.captured import Captured


SHOWN = 5
"""The number of prompts that a notebook shows."""


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Result(ResultData):
    """The result of a sweep: values by cell, in the order of the sites. See `ResultData` for its fields."""

    # -- in natural axes -----------------------------------------------------------------------

    @property
    def values(self) -> Tensor:
        """The first metric: in natural axes for one selector, flat for a sum of several.

        If the metric is a vector, its own axes follow those of the cells.
        """
        return self._of_metric(self.table)

    @property
    def effect(self) -> Tensor:
        """The first metric minus its value in the base, shaped like `values`."""
        return self._of_metric(self.table - self.base[:, None])

    @property
    def normalised(self) -> Tensor:
        """The first metric on a scale with 0 for the base and 1 for the source, shaped like `values`."""
        if self.source is None:
            raise SweepError("nothing to normalise by: the values did not come from a source run.")
        span = self.source - self.base
        if not bool(span[self._rows(None)].all()):
            raise SweepError("nothing to normalise by: base and source have the same value of the metric.")
        return self._of_metric((self.table - self.base[:, None]) / span[:, None])

    @property
    def normalized(self) -> Tensor:
        """The same as `normalised`."""
        return self.normalised

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of `values`: those of the selector, or "cell" if there are several; then a vector's."""
        cells = self.spreads[0].axes if len(self.spreads) == 1 else ("cell",)
        own = self.vectors[0].axes if self.vectors else ()
        return (*cells, *(f"metric_{axis}" if axis in cells else axis for axis in own))

    @property
    def coordinates(self) -> dict[str, list[int] | list[str]]:
        """The coordinates along each of the axes: numbers, or labels if there are any."""
        own = self.vectors[0].coordinates if self.vectors else ()
        found: dict[str, list[int] | list[str]] = {}
        if len(self.spreads) > 1:
            found["cell"] = [cell.name for cell in self.cells]
        else:
            part = self.spreads[0]
            for axis, along in zip(part.axes, part.coordinates, strict=True):
                found[axis] = list(part.labels[axis]) if axis in part.labels else list(along)
        return found | dict(zip(self.axes[len(found) :], map(list, own), strict=True))

    def distances(self) -> Result:
        """Return the result with each vector metric as one number: its distance from the base.

        There is one distance for each prompt. Scalar metrics are unchanged. Text, figures and pages of a
        result with vectors show these distances.
        """
        if not self.vectors:
            return self
        if self.base_per_prompt is None:
            raise SweepError("the base's values of single prompts are not known, so distances are not.")
        base = self.base_per_prompt
        whole = [self.per_prompt, base[:, None], self.source_per_prompt]
        found: list[Tensor | None] = []
        for numbers in whole:
            if numbers is None:
                found.append(None)
                continue
            shaped = numbers if numbers.ndim == 3 else numbers[:, None]
            rows = [
                (shaped[own] - base[own][:, None]).norm(dim=0) if vector.axes else shaped[own.start]
                for vector, own in self._each_metric()
            ]
            found.append(torch.stack(rows))
        per_prompt, own_base, source = found
        assert per_prompt is not None
        assert own_base is not None
        return replace(
            self,
            metrics=tuple(f"distance of {one.name}" if one.axes else one.name for one in self.vectors),
            vectors=(),
            table=per_prompt.mean(-1),
            per_prompt=per_prompt,
            base=own_base[:, 0].mean(-1),
            base_per_prompt=own_base[:, 0],
            source=None if source is None else source[:, 0].mean(-1),
            source_per_prompt=None if source is None else source[:, 0],
        )

    def matrix(self, *, metric: str | None = None) -> Tensor:
        """Return effects of pairs as a symmetric matrix, [cell, cell], after `cw.pairs(sites)`.

        The diagonal has the effects of single cells if the sweep had them, else NaN. `ends` of the result's
        part names these cells, in order.
        """
        part = self._pairs()
        row = self._number(metric)
        effects = self.table[row] - self.base[row]
        one, other = torch.tensor(part.pairs(), dtype=torch.long).reshape(-1, 2).unbind(1)
        found = effects.new_full((len(part.ends), len(part.ends)), math.nan)
        found[one, other] = effects
        found[other, one] = effects
        return found

    def interactions(self, *, metric: str | None = None) -> Tensor:
        """Return effects of pairs minus the effects of both single cells, as a matrix [cell, cell].

        The diagonal is 0. If an entry is 0, the two effects add up. It needs `cw.pairs(sites, singles=True)`.
        """
        part = self._pairs()
        if len(part.cells) != len(part.ends) * (len(part.ends) + 1) // 2:
            raise SweepError(
                "interactions are effects of pairs less those of single cells, and this sweep had no single "
                "cells. Sweep over `cw.pairs(sites, singles=True)`."
            )
        found = self.matrix(metric=metric)
        single = found.diagonal().clone()
        found = found - single[:, None] - single[None, :]
        found.fill_diagonal_(0.0)
        return found

    def _pairs(self) -> Spread:
        if len(self.spreads) != 1 or not self.spreads[0].ends:
            raise SweepError("a matrix is of pairs: sweep over `cw.pairs(sites)`, and nothing else.")
        return self.spreads[0]

    def metric(self, name: str) -> Tensor:
        """Return one of several metrics, by its name, shaped like `values`."""
        return self._of_metric(self.table, name)

    def select(self, metric: str) -> Result:
        """Return the result of one of several metrics, as if it had been read alone."""
        rows = self._rows(metric)
        own: dict[str, Any] = {
            name: None if found is None else found[rows] for name, found in self.numbers.items()
        }
        vectors = tuple(one for one in self.vectors if one.name == metric and one.axes)
        return replace(self, metrics=self.metrics[rows], vectors=vectors, **own)

    def __getitem__(self, part: str | int) -> Tensor:
        """One selector's part of the first metric, by its kind or its number, in its natural axes."""
        found = [
            (spread, start)
            for number, (spread, start) in enumerate(self.parts())
            if part in (spread.name, number)
        ]
        if len(found) == 1:
            spread, start = found[0]
            return self.table[0][start : start + len(spread.cells)].reshape(spread.shape)
        names = ", ".join(f"{number}: {spread.name}" for number, spread in enumerate(self.spreads))
        if found:
            raise SweepError(f"several parts of this result are named {part!r}; choose by number of {names}.")
        raise SweepError(f"no part {part!r} in this result; its parts are {names}.")

    def _shaped(self, row: Tensor) -> Tensor:
        return row.reshape(self.spreads[0].shape) if len(self.spreads) == 1 else row

    def _of_metric(self, table: Tensor, metric: str | None = None) -> Tensor:
        """A metric of `table`, [metric, cell]: in the natural axes of the cells, then those of a vector."""
        one, rows = self._found(metric)
        found = [self._shaped(row) for row in table[rows]]
        return torch.stack(found, -1).reshape(*found[0].shape, *one.shape) if one.axes else found[0]

    def _found(self, metric: str | None) -> tuple[Vector, slice]:
        """A metric and its rows, the first unless it is named; a number of a vector has a name too."""
        for one, rows in self._each_metric():
            if metric in {None, one.name}:
                return one, rows
        row = self._number(metric)
        return Vector(self.metrics[row], (), ()), slice(row, row + 1)

    def _rows(self, metric: str | None) -> slice:
        return self._found(metric)[1]

    def _number(self, metric: str | None) -> int:
        """The number of a metric, the first unless it is named; of a vector, of its first number."""
        if metric is None:
            return 0
        if metric in self.metrics:
            return self.metrics.index(metric)
        for one, rows in self._each_metric():
            if one.name == metric:
                return int(rows.start)
        raise SweepError(f"no metric {metric!r} in this result; there are {', '.join(self._metric_names())}.")

    # -- over prompts --------------------------------------------------------------------------

    @property
    def effect_by_prompt(self) -> Tensor:
        """Return the effect on the first metric for each prompt.

        It is shaped like `values`, with prompts as the last axis. A prompt's effect is its value minus its
        own value in the base.
        """
        effects = self._effects(0)
        return effects.reshape(*self.values.shape, effects.shape[-1])

    def statistics(
        self,
        metric: str | None = None,
        *,
        level: float = LEVEL,
        resamples: int = RESAMPLES,
        seed: Seed = 0,
    ) -> Statistics:
        """Compute mean, standard error, Student's t interval and permutation p of each effect, over prompts.

        `metric` is by default the first; see `Statistics`. `resamples` and `seed` are those of the
        permutation test. Raises SweepError if there is only one prompt.
        """
        row = self._number(metric)
        found = statistics_of(self._effects(row), level=level, resamples=resamples, seed=seed)
        return found.shaped(self._shaped)

    def _effects(self, row: int) -> Tensor:
        """A metric's effect for each cell and prompt."""
        if self.base_per_prompt is None:
            raise SweepError("the base's values of single prompts are not known, so effects of them are not.")
        return self.per_prompt[row] - self.base_per_prompt[row]

    # -- as a table, as a figure, as files -----------------------------------------------------

    def to_dataframe(self, *, per_prompt: bool = False, statistics: bool = False) -> pd.DataFrame:
        """Return a tidy table: one row for each metric and cell, averaged over prompts.

        Its columns are site, kind, layer, head, pos, metric, value, base, source, effect and normalised;
        entries that a cell does not have are missing. With `per_prompt` there is a row for each prompt, and
        its number in the column `prompt`. With `statistics` there are the columns sem, low, high and p of the
        effect over prompts, see `statistics`.
        """
        from conewise.sweeps.storage.frames import frame, prompts_frame  # noqa: PLC0415  # needs pandas

        if per_prompt and statistics:
            raise SweepError("statistics are over prompts, and per_prompt has a row for each: leave out one.")
        found = prompts_frame(self) if per_prompt else frame(self)
        if statistics:
            made = [statistics_of(self._effects(row)) for row in range(len(self.metrics))]
            for name in ("sem", "low", "high", "p"):
                found[name] = [value for one in made for value in getattr(one, name).tolist()]
        return found

    def to_xarray(self) -> Any:
        """Return an `xarray.Dataset` with the axes of `values`: the value and the effect of each metric.

        The values of the base and the source are attributes of each. It needs xarray, which no extra
        installs.
        """
        xarray = import_module("xarray")
        found: dict[str, Any] = {}
        coordinates: dict[str, Any] = {}
        for name in self._metric_names():
            one, rows = self.select(name), self._rows(name)
            base = self.base[rows].tolist() if one.vectors else float(self.base[rows.start])
            ends: dict[str, Any] = {"base": base}
            if self.source is not None:
                ends["source"] = self.source[rows].tolist() if one.vectors else float(self.source[rows.start])
            found[name] = (one.axes, one.values.numpy(), ends)
            found[f"{name}_effect"] = (one.axes, one.effect.numpy(), ends)
            coordinates |= one.coordinates
        return xarray.Dataset(found, coords=coordinates)

    def plot(self, *, metric: str | None = None) -> Figure:
        """Draw the effects (value − base) of a metric, by default the first, as a Plotly figure.

        Two axes give a heatmap, one axis a row of bars; added selectors are drawn side by side. Positions are
        labelled by their tokens if these are known: from a question, or from a model with its tokenizer.
        """
        from conewise.sweeps.plots import figure  # noqa: PLC0415  # needs plotly

        chosen = self if metric is None else self.select(metric)
        return figure(chosen.distances(), self.position_tokens())

    def plot_intervals(self, top: int = 12, *, metric: str | None = None) -> Figure:
        """Draw the largest effects over prompts: a dot for each prompt, the mean and its interval.

        The interval is that of `statistics`. Raises SweepError if there is only one prompt.
        """
        from conewise.sweeps.plots import intervals  # noqa: PLC0415  # needs plotly

        if not hasattr(top, "__index__") or top < 1:
            raise SweepError(f"top is {top!r}; it is how many cells are drawn, at least 1.")
        row = self._number(metric)
        places = {id(cell): at for at, cell in enumerate(self.cells)}
        chosen = [cell for cell, _, _ in self.strongest(metric, top)]
        effects = self._effects(row)[[places[id(cell)] for cell in chosen]]
        return intervals([cell.name for cell in chosen], effects, statistics_of(effects), self.metrics[row])

    def save_image(self, path: str | Path, *, metric: str | None = None) -> Path:
        """Save the figure as PNG, SVG, PDF, JPEG or WebP, by the ending of `path`; needs kaleido."""
        from conewise.runs.figures import save_image  # noqa: PLC0415  # needs plotly

        return save_image(self.plot(metric=metric), path)

    def position_tokens(self) -> tuple[str, ...]:
        """Return the token at each position, if known; none if prompts have different lengths."""
        if self.story is not None:
            found: tuple[str, ...] = self.story.position_tokens()
            return found
        if self.sweep is None or self.sweep.batches > 1:
            return ()
        return base_story(self.sweep.batch(0).base).position_tokens()

    def circuit(
        self,
        *,
        top: int | None = None,
        threshold: float | None = None,
        connected: bool = True,
        select: str = "absolute",
        metric: str | None = None,
        model: Captured | None = None,
    ) -> Circuit:
        """Return the circuit of the edges with the largest effects, after a sweep over edges: see `Circuit`.

        It has at most `top` edges, or those of at least `threshold`. `connected` and `select` are as in
        `Circuit.from_scores`: with select="signed" helpful edges come first. The scores are the effects on a
        metric, by default the first. A loaded result holds no model: give it as `model`.
        """
        from conewise.circuits.circuit import Circuit  # noqa: PLC0415  # for circuits alone

        own, scores = self._model_for_circuits(model), self._edge_scores(metric)
        name = self.metrics[0 if metric is None else self._number(metric)]
        return Circuit.from_scores(
            own,
            scores,
            top=top,
            threshold=threshold,
            connected=connected,
            select=select,
            helps=self._helps(name),
        )

    def curve(
        self,
        prompts: Any = None,
        *,
        base: Any = None,
        source: Any = None,
        metric: Any = None,
        sizes: Sequence[float] | None = None,
        select: str | None = None,
        greedy: bool = False,
        model: Captured | None = None,
        max_memory: int | str | None = None,
    ) -> FaithfulnessCurve:
        """Compute the faithfulness of circuits of growing size, ranked by the effects of this result.

        This is the curve of the circuit benchmark: circuits keep growing shares of all edges, ranked once by
        signed and once by absolute effects, or only by `select`, "signed" or "absolute". `sizes` are other
        shares, or counts. Edges on no path to the logits are dropped; with `greedy` circuits grow from the
        logits. Effects of heads and MLPs ("z", "result", "mlp_out") rank nodes, each with all its outgoing
        edges; effects of their features in the stream ("result" and "mlp_out" along `d`) rank neurons.

        Circuits are evaluated on `prompts`, pairs of any lengths, or with `base` and `source`: see
        `Circuit.evaluate`. `metric` names the metric that ranks and evaluates, by default the first. If
        `metric` is a metric object, it is used for the evaluation, and the first metric ranks.
        """
        from conewise.circuits.curve import curve_by_effects  # noqa: PLC0415  # for circuits alone

        row = self._number(metric) if isinstance(metric, str) else 0
        wanted = self.metrics[row] if metric is None or isinstance(metric, str) else metric
        if prompts is None and isinstance(wanted, str) and self.sweep is not None:
            wanted = self.sweep.metrics[row]
        return curve_by_effects(
            self._model_for_circuits(model),
            self.cells,
            (self.table[row] - self.base[row]).double().cpu().numpy() * self._helps(self.metrics[row]),
            {"prompts": prompts, "base": base, "source": source, "metric": wanted, "max_memory": max_memory},
            select=select,
            sizes=sizes,
            greedy=greedy,
            method=self.method or "exact effects",
        )

    def _model_for_circuits(self, model: Captured | None) -> Captured:
        own = model if model is not None or self.sweep is None else self.sweep.model
        if own is None:
            raise SweepError(
                "a loaded result has no model at hand, which a circuit is one of; give it with `model=`."
            )
        return own

    def _helps(self, metric: str) -> float:
        """The sign of the effect of an edge that helps: in the corrupted run it brings the answer back."""
        from conewise.circuits.curve import helpful_sign  # noqa: PLC0415  # for circuits alone

        is_removal = self.story is None or self.story.base != "corrupted"
        return helpful_sign(metric, is_removal=is_removal)

    def _edge_scores(self, metric: str | None) -> dict[str, float]:
        """The effect of each edge, by name."""
        row = self._number(metric)
        effects = (self.table[row] - self.base[row]).tolist()
        scores: dict[str, float] = {}
        for cell, effect in zip(self.cells, effects, strict=True):
            place = cell.places[0]
            if len(cell.places) != 1 or not isinstance(place, EdgePlace) or place.also or place.live:
                raise SweepError(
                    f"{cell.name} is no single edge, and circuits are made of these: sweep over "
                    "`model.edges()`."
                )
            scores[place.edge] = effect
        return scores

    def save(self, folder: str | Path) -> Path:
        """Save the values (Parquet) and a manifest (JSON) to a folder; `cw.open(folder)` reads them.

        A description of the question, if known, is saved with them.
        """
        from conewise.sweeps.storage.archive import save  # noqa: PLC0415  # needs pyarrow

        folder = Path(folder)
        if self.story is not None:
            write_story(folder, self.story)
        return save(self, folder)

    def report(self, path: str | Path, *, story: Story | None = None) -> Path:
        """Write the result as an HTML page, one file that opens offline, and return its path.

        It is the page that `conewise report` writes. If the sweep is available, the page also draws the cone
        of every site, the attention of the strongest heads and the lens on the first prompts. `story`
        describes the question: the prompts, their tokens, the metric in words. Results of `model.ask` already
        have one. If the file cannot be written or is not a regular file, SweepError is raised and nothing is
        overwritten.
        """
        from conewise.report.folding import fold  # noqa: PLC0415  # for pages alone
        from conewise.report.inside import inside_of  # noqa: PLC0415  # for pages alone
        from conewise.report.page import expect_page, write_page  # noqa: PLC0415  # needs plotly

        expect_page(path)
        story = self.story if story is None else story
        folded, inside, sweep = None, None, self.sweep
        if sweep is not None and not sweep.model.changed_sites:
            base = sweep.batch(0).base
            inside = inside_of(base, self.distances(), story)
            folded = fold(
                sweep.model, sweep.cells, targets=sweep.targets(), base=base, whole=not sweep.is_function
            )
        return write_page(path, self.distances(), story, folded, inside)

    def equals(self, other: Result) -> bool:
        """Return True if both have the same cells and metrics, and equal numbers in every bit.

        The cost of computing the numbers is not compared; the method of approximate results is.
        """
        numbers = zip(self.numbers.values(), other.numbers.values(), strict=True)
        alike = (self.spreads, self.metrics, self.method) == (other.spreads, other.metrics, other.method)
        return alike and all(
            one is other if one is None or other is None else bitwise_same(one, other)
            for one, other in numbers
        )

    @property
    def _turn(self) -> Turn | None:
        return None if self.sweep is None else self.sweep.model._turn

    @one_thread
    def verify(self, n: int = 32, seed: int = 0) -> CellCheck:
        """Run `n` random cells again as plain full forwards of the original module, with hooks."""
        sweep = self.sweep
        if self.method:
            raise SweepError(
                f"these values are approximate ({self.method}), and are not those of the module with hooks. "
                "`check` computes some of them exactly, `cw.compare` takes an exact result beside."
            )
        if sweep is None:
            raise SweepError("a loaded result has no model at hand; run its sweep again to verify it.")
        self._expect_weights(sweep.model)
        return recheck(self, sweep.rerun(), n, seed, is_serial=self.plan.evaluator == "serial")

    def _expect_weights(self, model: Captured) -> None:
        """Raise WeightsChangedError where the weights are no longer those that this was computed with."""
        now = model.weights.whole_contents().whole
        if self.weights is not None and (changed := model.weights.changed(self.weights, now)):
            raise WeightsChangedError(
                f"the weights of {model.name} were written to after this result was made: {changed}. What is "
                "computed now does not say whether it is right. Put the old weights back, or run it again."
            )

    # -- as text -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{self._summary()}\n  {finding(self.distances())}"

    def _summary(self) -> str:
        """The metrics, the sites and the cost, in a line."""
        shown = ", ".join(f"{part.name}{list(part.shape)}" for part in self.spreads)
        resumed = f", {self.ledger.resumed} cells resumed" if self.ledger.resumed else ""
        planned, peak = shown_bytes(self.plan.peak_bytes), self.ledger.peak_bytes
        memory = "" if peak is None else f", peak memory {shown_bytes(peak)} (planned {planned})"
        which = f"Result, approximate ({self.method})," if self.method else "Result"
        return (
            f"{which} of {', '.join(self._metric_names())} over {shown}: {len(self.cells)} cells, "
            f"{self.plan.evaluator}, {self.ledger.seconds:.3g} s{resumed}{memory}"
        )

    def __str__(self) -> str:
        if self.vectors:
            return str(self.distances())
        lines = [finding(self), f"  {certainty(self)}", *(f"  {one}" for one in self.missing)]
        for name in self.metrics:
            lines.append(f"  {name}: {self._ends(name)}; the largest effects:")
            for cell, effect, value in self.strongest(name):
                lines.append(f"    {effect:+.6g}  {cell.name}  ({value:.6g})")
        return "\n".join([*lines, *self._costs()])

    def _costs(self) -> list[str]:
        """The cost, as the last lines of the text."""
        phases = [f"  time: {shown_phases(self.ledger.phases)}"] if self.ledger.phases else []
        return [f"  {self._summary()}", *phases]

    def _repr_html_(self) -> str:
        if self.vectors:
            return self.distances()._repr_html_()
        maps = heatmaps(self, 0, self.position_tokens())
        colours = (
            f"Effect on {self.metrics[0]}: blue raises it, red lowers it; the strongest colour is from "
            f"{strong(self, 0):.3g} on."
        )
        tables = []
        for name in self.metrics:
            rows = [
                (cell.name, f"{effect:+.6g}", f"{value:.6g}") for cell, effect, value in self.strongest(name)
            ]
            tables.append(heading(name, f"{self._ends(name)}; the largest effects:"))
            tables.append(table(rows, ("site", "effect", "value"), numbers=(1, 2)))
        check = self.verification
        costs = [cost(self), *self._costs()]
        return shown(
            lead(finding(self)),
            note(certainty(self)),
            beside(*maps),
            note(colours),
            self._asked_html(),
            folded("The largest effects", *tables),
            "" if check is None else verdict(check.ok, str(check)),
            folded("What it cost", *map(note, costs)),
        )

    def _asked_html(self) -> str:
        """The prompts, where they are known."""
        story = self.story
        if story is None or not story.prompts:
            return ""
        rows = [
            (pair.clean, pair.corrupted, ", ".join(pair.answers), ", ".join(pair.wrong_answers))
            for pair in story.prompts[:SHOWN]
        ]
        more = len(story.prompts) - len(rows)
        left = [note(f"and {more:,} more")] if more > 0 else []
        return folded("The prompts", table(rows, ("clean", "corrupted", "answer", "wrong answer")), *left)

    def _ends(self, metric: str) -> str:
        """Return the value of a metric in the base and, where there is one, in the source."""
        row = self._number(metric)
        source = "" if self.source is None else f", source {float(self.source[row]):.6g}"
        return f"base {float(self.base[row]):.6g}{source}"

    def _metric_names(self) -> list[str]:
        """The name of each metric: of a vector it is one."""
        return [one.name for one, _ in self._each_metric()]

    def strongest(self, metric: str | None = None, top: Count = 5) -> list[tuple[Cell, float, float]]:
        """Return the cells with the largest absolute effects on a metric, as tuples (cell, effect, value).

        If the metric is a vector, effect and value are both its distance from that of the base.
        """
        if self.vectors and metric not in self.metrics:
            own, told = self._metric_at(self._number(metric))[0], self.distances()
            return told.strongest(told.metrics[self.vectors.index(own)], top)
        row = self._number(metric)
        cells, base = self.cells, float(self.base[row])
        values = self.table[row].tolist()
        gone = {number for one in self.missing for number in one.cells}
        there = [number for number in range(len(cells)) if number not in gone]
        order = sorted(there, key=lambda number: -abs(values[number] - base))
        return [(cells[number], values[number] - base, values[number]) for number in order[:top]]


def load_result(folder: str | Path) -> Result:
    """The result that was saved in a folder, equal to it bit for bit, with its story where it has one.

    It has no model at hand. Raises SweepError when there is none, or when it is damaged; FormatError for one
    of a newer version.
    """
    found = read_result(folder)
    held = {one.name: getattr(found, one.name) for one in fields(found)}
    return Result(**{**held, "story": read_story(Path(folder))})

"""What the worlds of a sweep wrote, and what is read off their texts."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from conewise.anatomy.places import PlaceLike, as_place
from conewise.arguments import Count, Samples, Seed, checked, expect
from conewise.errors import InputMismatchError, SweepError, describe
from conewise.extras import needs
from conewise.files import Format, as_path, parse_json, write_whole
from conewise.sweeps.execution.reading import SweepLedger
from conewise.templates import TEMPLATE, Heatmap, asset, heading, lead, macro, note, shown
from conewise.text.tokens import token_ids

if TYPE_CHECKING:
    import pandas as pd

TEXTS, NUMBERS = "texts.json", "texts.safetensors"
FORMAT = Format("conewise texts", 1)
SHOWN = 24
"""The number of texts that a notebook shows."""
BATCH = 64
"""The number of texts that a judge, or the unpatched model, reads at once."""


@dataclass(frozen=True)
class TextCheck:
    """Texts that were written again, each alone, by hooks on the module: how many, and how many differ."""

    texts: int
    wrong: int
    named: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if all are the same, token by token."""
        return not self.wrong

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        if self.ok:
            return f"{self.texts} texts written again by hooks on the module alone: all equal"
        named = ", ".join(self.named)
        return f"{self.wrong} of {self.texts} texts differ from hooks on the module alone: {named}"


@checked
@dataclass(frozen=True, eq=False, repr=False)
class WrittenTexts:
    """The texts of a sweep. Arrays have the sweep's axes, then one for the prompts where there are several.

    `ids` has the tokens [world, prompt, n], -1 behind the end of a text, and `said` their log probabilities
    in the world that wrote them; world 0 is the unpatched one. `judgements` are numbers that `judged` added.
    """

    name: str
    axes: tuple[str, ...]
    coordinates: Mapping[str, Sequence[Any]]
    cells: tuple[str, ...]
    prompts: tuple[str, ...]
    ids: Tensor
    said: Tensor
    written: tuple[tuple[str, ...], ...]
    plan: Any = None
    ledger: SweepLedger = field(default_factory=SweepLedger)
    judgements: Mapping[str, Tensor] = field(default_factory=dict)
    verification: TextCheck | None = None
    sweep: Any = None

    @classmethod
    def of(cls, sweep: Any, plan: Any, ledger: SweepLedger, numbers: Tensor) -> WrittenTexts:
        """The texts of numbers [world, tokens and log probabilities, n, prompt]."""
        ids, said = numbers[:, 0].transpose(1, 2).long(), numbers[:, 1].transpose(1, 2)
        tokenizer = sweep.model.tokenizer
        rows = [[[token for token in text if token >= 0] for text in world] for world in ids.tolist()]
        spreads = sweep.spreads
        if len(spreads) == 1:
            axes = spreads[0].axes
            along = {axis: spreads[0].labels_of(number) for number, axis in enumerate(axes)}
        else:
            axes, along = ("cell",), {"cell": [cell.name for cell in sweep.cells]}
        return cls(
            sweep.model.label or sweep.model.name,
            tuple(axes),
            along,
            tuple(cell.name for cell in sweep.cells),
            tuple(decoded(tokenizer, row.tolist()) for row in sweep.prompts.rows),
            ids,
            said,
            tuple(tuple(decoded(tokenizer, row) for row in world) for world in rows),
            plan,
            ledger,
            sweep=sweep,
        )

    # -- in natural axes -----------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes, without that of the prompts."""
        return tuple(len(self.coordinates[axis]) for axis in self.axes)

    def _shaped(self, values: Tensor) -> Tensor:
        """[cell, prompt, ...] in natural axes; the prompts' axis is there if there are several."""
        own = (len(self.prompts),) if len(self.prompts) > 1 else ()
        return values.reshape(*self.shape, *own, *values.shape[2:])

    @property
    def texts(self) -> np.ndarray[Any, Any]:
        """What was written in each world."""
        return np.array(self.written[1:], dtype=object).reshape(self.divergence.shape)

    @property
    def base(self) -> tuple[str, ...]:
        """What the unpatched model wrote, for each prompt."""
        return self.written[0]

    @property
    def tokens(self) -> Tensor:
        """The tokens that were written, n along the last axis; -1 stands behind the end of a text."""
        return self._shaped(self.ids[1:])

    @property
    def log_probs(self) -> Tensor:
        """The log probability of each token in the world that wrote it; NaN behind the end of a text."""
        return self._shaped(self.said[1:])

    @property
    def divergence(self) -> Tensor:
        """The number of the first token that differs from the unpatched text's; -1 where none does."""
        return self._shaped(self._divergence())

    def _divergence(self) -> Tensor:
        differs = self.ids[1:] != self.ids[:1]
        first = differs.int().argmax(-1)
        return torch.where(differs.any(-1), first, torch.full_like(first, -1))

    # -- numbers of texts ----------------------------------------------------------------------

    def repetition(self, n: Count = 3) -> Tensor:
        """The share of a text's n-grams of tokens that stood in it before: 0 where none is repeated."""
        return self._shaped(self._repetition(n)[1:])

    def _repetition(self, n: int) -> Tensor:
        if n < 1:
            raise InputMismatchError(f"n={n}: an n-gram has 1 token or more.")
        return torch.tensor([[_repeated(text, n) for text in world] for world in self.ids.tolist()])

    def perplexity(self) -> Tensor:
        """The perplexity of each text under the unpatched model: it rises where a patch breaks the language.

        The prompt and the text are read in one pass for each batch of texts. NaN where nothing was written.
        """
        return self._shaped(self._perplexity()[1:])

    @torch.no_grad()
    def _perplexity(self) -> Tensor:
        sweep = self._own_sweep("its perplexity")
        device = sweep.prompts.ids.device
        worlds, texts, n = self.ids.shape
        flat, found = self.ids.reshape(-1, n), torch.full((worlds * texts,), math.nan, dtype=torch.float64)
        with sweep.model_alone():
            for start in range(0, len(flat), BATCH):
                rows = flat[start : start + BATCH].to(device)
                is_there = rows >= 0
                said = sweep.said(rows, torch.arange(start, start + len(rows), device=device) % texts)
                mean = (said * is_there).sum(-1) / is_there.sum(-1)
                found[start : start + len(rows)] = mean.neg().exp().double().cpu()
        return found.reshape(worlds, texts)

    def kl(self) -> Tensor:
        """How far each world's predictions lie from the unpatched ones, at each token of the unpatched text.

        The Kullback–Leibler divergence of the patched from the unpatched distribution, n along the last axis;
        NaN behind the end. The unpatched text is read in every world, in one pass for some worlds at a time.
        """
        sweep, base = self._own_sweep("the divergence"), self.ids[:1]
        found = torch.full(self.ids.shape, math.nan, dtype=torch.float64)
        own: Tensor | None = None
        for worlds, logits, _ in sweep.forced(base.expand(self.ids.shape)):
            said = torch.log_softmax(logits, -1)
            own = said[:1] if own is None else own
            found[worlds] = (own.exp() * (own - said)).sum(-1).double().cpu()
        found = found.masked_fill(base < 0, math.nan)
        return self._shaped(found[1:])

    def log_prob_of(self, continuation: str | Sequence[str] | Tensor) -> Tensor:
        """The log probability of a given continuation in each world: one for all prompts, or one each.

        A continuation is text, as it follows the prompt, or tokens [n] or [prompt, n].
        """
        sweep = self._own_sweep("the log probability")
        tokens = _continuations(continuation, sweep.model.tokenizer, len(self.prompts))
        found = torch.empty(self.ids.shape[:2], dtype=torch.float64)
        for worlds, logits, _ in sweep.forced(tokens.expand(len(found), *tokens.shape)):
            here = tokens.to(logits.device).expand(logits.shape[:-1])
            said = torch.log_softmax(logits, -1).gather(-1, here.clamp(min=0)[..., None])[..., 0]
            found[worlds] = (said * (here >= 0)).sum(-1).double().cpu()
        return self._shaped(found[1:])

    def probe(self, place: PlaceLike, reading: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        """A probe's reading at every token that was written, n along the last axis; NaN behind the end.

        `reading` is a direction, with which values at the place are multiplied; or a function of them,
        [world, prompt, n, ...] to [world, prompt, n]. They are what the world's patches left. `[0]` of
        `probes` is the unpatched text's.
        """
        return self._shaped(self.probes(place, reading)[1:])

    def probes(self, place: PlaceLike, reading: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        """The readings of `probe` as [world, prompt, n]; world 0 is unpatched."""
        sweep = self._own_sweep("a probe's reading")
        found = torch.full(self.ids.shape, math.nan, dtype=torch.float64)
        for worlds, _, values in sweep.forced(self.ids, as_place(place)):
            if isinstance(reading, Tensor):
                read = values.flatten(3) @ reading.flatten().to(values.device, values.dtype)
            else:
                read = reading(values)
            if not isinstance(read, Tensor) or read.shape != values.shape[:3]:
                raise InputMismatchError(
                    f"a probe returns a number for each token, {tuple(values.shape[:3])}, and this one "
                    f"returned {describe(read)}."
                )
            found[worlds] = read.double().cpu()
        return found.masked_fill(self.ids < 0, math.nan)

    def judge(self, function: Callable[[list[str]], Any]) -> Tensor:
        """Read numbers off the texts: `function` takes a list of texts and returns a number for each."""
        return self._shaped(self._judged(function)[1:])

    def _judged(self, function: Callable[[list[str]], Any]) -> Tensor:
        flat = [text for world in self.written for text in world]
        found: list[float] = []
        for start in range(0, len(flat), BATCH):
            some = flat[start : start + BATCH]
            given = function(some)
            numbers = (
                torch.as_tensor(given, dtype=torch.float64).flatten().tolist() if given is not None else []
            )
            if len(numbers) != len(some):
                raise InputMismatchError(
                    f"a judge of texts returns a number for each of them: {len(some)} were given, and "
                    f"{describe(given)} came back."
                )
            found += numbers
        return torch.tensor(found, dtype=torch.float64).reshape(len(self.written), -1)

    def judged(self, judges: Any) -> WrittenTexts:
        """The same texts with what judges say of them, by name, as columns of the table."""
        named = (
            judges
            if isinstance(judges, Mapping)
            else {
                getattr(one, "__name__", "judge"): one
                for one in (judges if isinstance(judges, list | tuple) else [judges])
            }
        )
        found = dict(self.judgements)
        for name, function in named.items():
            if not callable(function):
                raise InputMismatchError(
                    f"with `generate` a metric is a function of texts, and {describe(function)} is none. "
                    "Metrics of logits are for sweeps without `generate`."
                )
            found[str(name)] = self._judged(function)
        return replace(self, judgements=found)

    def _own_sweep(self, what: str) -> Any:
        if self.sweep is None:
            raise SweepError(
                f"these texts were loaded and hold no model, so {what} cannot be computed again."
            )
        return self.sweep

    # -- checked -------------------------------------------------------------------------------

    def verify(self, n: Samples = 8, *, seed: Seed = 0) -> TextCheck:
        """Write so many random texts again, each alone: by hooks on the module, and its own `generate`."""
        sweep = self._own_sweep("they")
        worlds, texts, _ = self.ids.shape
        picked = torch.randperm(worlds * texts, generator=torch.Generator().manual_seed(seed))[:n].tolist()
        wrong = []
        for number in picked:
            world, text = divmod(number, texts)
            want = [token for token in self.ids[world, text].tolist() if token >= 0]
            if sweep.alone(world, text) != want:
                wrong.append(self._named(world, text))
        return TextCheck(len(picked), len(wrong), tuple(wrong))

    def _named(self, world: int, text: int) -> str:
        cell = self.cells[world - 1] if world else "unpatched"
        return cell if len(self.prompts) == 1 else f"{cell}, prompt {text}"

    # -- as a table, as a page, as files -------------------------------------------------------

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each text: its cell and coordinates, prompt, text, and the numbers read off it."""
        with needs("tables"):
            import pandas as pd  # noqa: PLC0415

        worlds, texts, _ = self.ids.shape
        places = list(np.ndindex(*self.shape))
        rows: list[dict[str, Any]] = []
        divergence, repeated = self._divergence(), self._repetition(3)
        for world in range(worlds):
            at = {} if not world else dict(zip(self.axes, places[world - 1], strict=True))
            for text in range(texts):
                said = self.said[world, text]
                rows.append(
                    {
                        "site": self.cells[world - 1] if world else "unpatched",
                        **{axis: self.coordinates[axis][at[axis]] if at else None for axis in self.axes},
                        "prompt": text,
                        "text": self.written[world][text],
                        "tokens": int((self.ids[world, text] >= 0).sum()),
                        "divergence": int(divergence[world - 1, text]) if world else -1,
                        "log_prob": float(said.nansum()),
                        "repetition": float(repeated[world, text]),
                        **{name: float(found[world, text]) for name, found in self.judgements.items()},
                    }
                )
        return pd.DataFrame(rows)

    def study(self, wanted: Callable[[list[str]], Any], *, most_perplexity: float = 2.0) -> SteeringStudy:
        """Weigh what steering brings against what it breaks: see `SteeringStudy`.

        `wanted` gives a number for each text, higher for more of the effect that is wanted. A cell counts as
        fluent while its perplexity under the unpatched model is at most `most_perplexity` times that of the
        unpatched texts.
        """
        effect, perplexity = self._judged(wanted), self._perplexity()
        return SteeringStudy(
            self, effect, perplexity, expect("most_perplexity", most_perplexity, "PositiveNumber")
        )

    def equals(self, other: object) -> bool:
        """True for the same texts of the same cells, with the same log probabilities bit for bit."""
        return (
            isinstance(other, WrittenTexts)
            and (self.cells, self.prompts, self.written) == (other.cells, other.prompts, other.written)
            and torch.equal(self.ids, other.ids)
            and torch.equal(self.said.nan_to_num(1.0), other.said.nan_to_num(1.0))
        )

    def __repr__(self) -> str:
        changed = int((self._divergence() >= 0).sum())
        total = len(self.cells) * len(self.prompts)
        return (
            f"WrittenTexts of {self.name}: {total:,} texts ({' × '.join(self.axes)}), {changed:,} differ "
            f"from the unpatched one\n  unpatched: {self.base[0]!r}"
        )

    def _repr_html_(self) -> str:
        changed = int((self._divergence() >= 0).sum())
        total = len(self.cells) * len(self.prompts)
        words = f"{changed:,} of {total:,} texts differ from what the unpatched model writes"
        return shown(lead(words), heading("WrittenTexts", self.name), self.side_by_side(), self._more(total))

    def _more(self, total: int) -> str:
        left = total - SHOWN
        return note(f"and {left:,} more: `to_dataframe()` has all") if left > 0 else note("")

    def side_by_side(self, cells: Sequence[int] | None = None) -> str:
        """HTML: the texts of some cells below each other, with what differs from the unpatched one marked."""
        chosen = range(len(self.cells)) if cells is None else cells
        pairs = list(itertools.product(chosen, range(len(self.prompts))))
        divergence, rows = self._divergence(), [("unpatched", "", self.written[0][0], "")]
        for cell, text in pairs[:SHOWN]:
            at, own, other = int(divergence[cell, text]), self.written[cell + 1][text], self.written[0][text]
            same = _alike(own, other)
            rows.append(
                (self._named(cell + 1, text), "same" if at < 0 else f"token {at}", own[:same], own[same:])
            )
        return str(macro(TEMPLATE, "differing", rows))

    def save(self, folder: str | Path) -> Path:
        """Write the texts to a folder, which `cw.open` opens again; without the model."""
        from safetensors.torch import save as to_bytes  # noqa: PLC0415

        path = as_path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if any((path / name).exists() for name in (TEXTS, NUMBERS)):
            raise SweepError(f"{path} holds texts already; it was left as it is. Save to another folder.")
        numbers = {"ids": self.ids.contiguous(), "said": self.said.contiguous()}
        judged = {f"judgement.{name}": found.contiguous() for name, found in self.judgements.items()}
        write_whole(path / NUMBERS, to_bytes({**numbers, **judged}))
        said = {
            **FORMAT.header(),
            "name": self.name,
            "axes": self.axes,
            "coordinates": {axis: list(along) for axis, along in self.coordinates.items()},
            "cells": self.cells,
            "prompts": self.prompts,
            "written": self.written,
            "ledger": asdict(self.ledger),
        }
        write_whole(path / TEXTS, (json.dumps(said, indent=1, ensure_ascii=False) + "\n").encode())
        return path


def load_texts(folder: Path) -> WrittenTexts:
    """Read what `save` wrote. Raises SweepError where something is missing or damaged."""
    from safetensors.torch import load as from_bytes  # noqa: PLC0415

    try:
        said = FORMAT.expect(parse_json((folder / TEXTS).read_bytes().decode()), str(folder / TEXTS))
        numbers = from_bytes((folder / NUMBERS).read_bytes())
        judged = {
            name.removeprefix("judgement."): one
            for name, one in numbers.items()
            if name.startswith("judgement.")
        }
        found = WrittenTexts(
            str(said["name"]),
            tuple(said["axes"]),
            {axis: list(along) for axis, along in said["coordinates"].items()},
            tuple(said["cells"]),
            tuple(said["prompts"]),
            numbers["ids"],
            numbers["said"],
            tuple(map(tuple, said["written"])),
            ledger=SweepLedger(**said["ledger"]),
            judgements=judged,
        )
        if found.ids.shape[:2] != (len(found.cells) + 1, len(found.prompts)):
            shape = tuple(found.ids.shape)
            raise SweepError(
                f"the texts in {folder} are damaged: {shape} tokens of {len(found.cells)} cells."
            )
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise SweepError(f"the texts in {folder} cannot be read: {error}.") from None
    except Exception as error:
        if type(error).__module__.startswith("safetensors"):
            raise SweepError(f"the texts in {folder} are damaged: {error}.") from None
        raise
    return found


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Tokens as text; as numbers where there is no tokenizer."""
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def _continuations(given: Any, tokenizer: Any, prompts: int) -> Tensor:
    """Tokens [prompt, n] of what is to follow each prompt; -1 behind the end."""
    if isinstance(given, Tensor):
        found = given if given.ndim == 2 else given[None].expand(prompts, -1)
    else:
        texts = [given] * prompts if isinstance(given, str) else list(given)
        if tokenizer is None or not all(isinstance(one, str) for one in texts):
            raise InputMismatchError("a continuation is text, where there is a tokenizer, or tokens [n].")
        rows = [token_ids(tokenizer, one, add_special_tokens=False) for one in texts]
        width = max(map(len, rows), default=0)
        found = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])
    if len(found) != prompts or not found.numel() or found.is_floating_point():
        raise InputMismatchError(
            f"continuations of shape {tuple(found.shape)} were given for {prompts} prompts: one token or "
            "more for all of them, or for each."
        )
    return found


def _alike(one: str, other: str) -> int:
    """The number of characters that two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _repeated(tokens: Sequence[int], n: int) -> float:
    own = [token for token in tokens if token >= 0]
    grams = Counter(tuple(own[start : start + n]) for start in range(len(own) - n + 1))
    total = sum(grams.values())
    return 1 - len(grams) / total if total else 0.0


@dataclass(frozen=True, eq=False, repr=False)
class SteeringStudy:
    """What steering brings, and what it breaks: an effect and a perplexity for each cell, over the prompts.

    `scores` and `perplexities` are [world, prompt], world 0 unpatched. The best cell is that with the largest
    mean effect among those that stay fluent.
    """

    texts: WrittenTexts
    scores: Tensor
    perplexities: Tensor
    most_perplexity: float

    @property
    def effect(self) -> Tensor:
        """The mean score of each cell less that of the unpatched texts, in the sweep's axes."""
        return (self.scores[1:] - self.scores[:1]).mean(-1).reshape(self.texts.shape)

    @property
    def lost(self) -> Tensor:
        """The perplexity of each cell over that of the unpatched texts, geometric means over prompts."""
        logs = self.perplexities.log()
        return (logs[1:].nanmean(-1) - logs[0].nanmean()).exp().reshape(self.texts.shape)

    @property
    def best(self) -> int | None:
        """The number of the best cell; None where no cell is fluent."""
        effect, fluent = self.effect.flatten(), self.lost.flatten() <= self.most_perplexity
        if not bool(fluent.any()):
            return None
        return int(torch.where(fluent, effect, torch.full_like(effect, -math.inf)).argmax())

    def interval(self, cell: int, level: float = 0.95) -> tuple[float, float]:
        """The interval of a cell's mean effect over prompts, by Student's t; NaN with one prompt."""
        from conewise.sweeps.statistics import statistics_of  # noqa: PLC0415

        effects = self.scores[cell + 1] - self.scores[0]
        if len(effects) < 2:
            return math.nan, math.nan
        found = statistics_of(effects[None], level=level)
        return float(found.low[0]), float(found.high[0])

    def finding(self) -> str:
        """The best cell in a sentence."""
        best = self.best
        if best is None:
            return (
                f"no cell stays fluent: each has over {self.most_perplexity:g} times the unpatched perplexity"
            )
        low, high = self.interval(best)
        sure = (
            ""
            if math.isnan(low)
            else f" (95 % interval {low:.3g} to {high:.3g} over {len(self.texts.prompts)} prompts)"
        )
        return (
            f"{self.texts.cells[best]} changes the score by {float(self.effect.flatten()[best]):+.3g}{sure}, "
            f"at {float(self.lost.flatten()[best]):.2f} times the unpatched perplexity"
        )

    def __repr__(self) -> str:
        return f"SteeringStudy of {self.texts.name}: {self.finding()}"

    def _repr_html_(self) -> str:
        return shown(*self._parts())

    def _parts(self) -> list[str]:
        """The finding, the effect and the perplexity as pictures, texts of the best cells."""
        effect, lost = self.effect, self.lost
        return [
            lead(self.finding()),
            self._picture("score, patched less unpatched", effect),
            self._picture("log2 of the perplexity, patched over unpatched", lost.log2()),
            note(
                f"Perplexity of what was written, under the unpatched model; up to {self.most_perplexity:g}× "
                "is fluent."
            ),
            self._strongest(),
        ]

    def _picture(self, title: str, values: Tensor) -> str:
        texts = self.texts
        rows = values.reshape(texts.shape[0], -1) if len(texts.shape) > 1 else values.reshape(-1, 1)
        lines = [str(one) for one in texts.coordinates[texts.axes[0]]]
        others = [[str(one) for one in texts.coordinates[axis]] for axis in texts.axes[1:]]
        columns = [" ".join(one) for one in itertools.product(*others)] if others else [""]
        told = [[f"{value:.3g}" for value in row] for row in rows.tolist()]
        return Heatmap(
            rows.tolist(), lines, columns, told, texts.axes[0], " × ".join(texts.axes[1:]), title
        ).html()

    def _strongest(self, top: int = 8) -> str:
        """Texts of the cells with the largest effects, fluent ones first, beside the unpatched one."""
        return self.texts.side_by_side(cells=self.order()[:top])

    def order(self) -> list[int]:
        """The cells, those with the largest effects first; behind all fluent ones, the others."""
        effect, lost = self.effect.flatten(), self.lost.flatten()
        return sorted(
            range(len(effect)), key=lambda at: (float(lost[at]) > self.most_perplexity, -float(effect[at]))
        )

    def report(self, path: str | Path) -> Path:
        """Write a page: the finding, strength by layer as pictures, texts side by side."""
        from conewise.report.document import document, write_document  # noqa: PLC0415  # needs the extra `plots`

        with needs("plots"):
            from markupsafe import Markup  # noqa: PLC0415
        page = document(
            "report/study.html",
            f"Steering {self.texts.name}",
            styles=[asset("report/theme.css"), asset("report/page.css")],
            body=[Markup(part) for part in self._parts()],
        )
        return write_document(as_path(path), page, SweepError)

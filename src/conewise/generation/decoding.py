"""Many worlds write together: one pass of the module for each new token, with a row for each that differs.

A world is a text that is being written with the patches of one cell. Worlds that wrote the same so far differ
behind their first patch only, so each layer computes and caches one row for all that cannot differ there. A
text that diverges gets rows of its own, in every layer; one that has ended leaves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from conewise.checks.hooking import Boundary, Hook, hooks_on
from conewise.errors import CaptureError, PatchError
from conewise.generation.recorded import LEAST_STEPS, SlotStep, has_slots, pays
from conewise.program.calls import forward_parameters
from conewise.program.records import ModuleCall, Program
from conewise.runs.generate import SiteReader, Step, StepPatch, encoder_of, is_in
from conewise.sweeps.execution.cuda_graph import Record

Numbers = NDArray[np.int64]
PROBED = ((2, 4), (3, 4))
"""Rows and tokens of the forwards that show which tensors between layers have a row for each text."""


# -- what is written -------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellPatch:
    """A patch of one cell: the hook at which the module shows the value, and the patch in each prompt.

    `of` makes the patch for a prompt of so many tokens. Where it adds a vector, `shift` is that and its
    scale: cells that do so at one place are patched together.
    """

    hook: Hook
    of: Callable[[int], StepPatch]
    shift: tuple[Tensor, float] | None = None
    is_zero: bool = False

    @property
    def is_known(self) -> bool:
        """True if it is no function of the user's, which might do something else each time."""
        return self.shift is not None or self.is_zero


@dataclass(frozen=True)
class Prompts:
    """Prompts of any lengths: tokens and a mask, [prompt, column].

    They are padded in front, as texts go on from their ends; those that an encoder reads, behind.
    """

    ids: Tensor
    mask: Tensor

    @property
    def rows(self) -> list[Tensor]:
        """The tokens of each."""
        return [ids[mask.bool()] for ids, mask in zip(self.ids, self.mask, strict=True)]

    def behind(self) -> Prompts:
        """The same prompts, padded behind."""
        order = self.mask.argsort(dim=1, descending=True, stable=True)
        return Prompts(self.ids.gather(1, order), self.mask.gather(1, order))

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each."""
        return [int(length) for length in self.mask.sum(1)]


@dataclass(frozen=True)
class Texts:
    """Tokens that were written, [cell, prompt, n], and their log probabilities; -1 and NaN behind the end.

    Row 0 is the unpatched text. `layer_rows` counts rows of layers that were computed: [step], the prompt's
    step in positions.
    """

    tokens: Numbers
    log_probs: NDArray[np.float64]
    layer_rows: tuple[int, ...]


# -- which layers there are ------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """The layers of a decoder, by path, and the tensors between them that have a row for each text.

    With no `paths`, rows cannot be shared. `before` are the modules that begin in front of the first layer.
    `cached` is the bytes that the cache takes for one token of one row, in all layers.
    """

    paths: tuple[str, ...] = ()
    per_row: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    cached: int = 0

    def level(self, boundary: Boundary) -> int:
        """The number of the first layer that sees what is patched there; those behind the last, the last."""
        path, last = boundary.call.path, len(self.paths)
        for number, layer in enumerate(self.paths):
            if path == layer:
                return number + boundary.is_output
            if path.startswith(f"{layer}."):
                return number
        holds_layers = not path or any(layer.startswith(f"{path}.") for layer in self.paths)
        if holds_layers:
            return last if boundary.is_output else 0
        return 0 if path in self.before else last


def _states(module: Any) -> dict[tuple[nn.Module, str], Any]:
    """Tensors that modules have as plain attributes, and where they have none."""
    return {
        (part, name): value
        for part in module.modules()
        for name, value in vars(part).items()
        if value is None or isinstance(value, Tensor)
    }


@torch.no_grad()
def layers_of(module: Any) -> Layers:
    """Find the layers of a module by two small forwards; none where rows cannot be told apart for certain.

    Raises CaptureError where a module keeps something of each text by itself, and not in the cache.
    """
    before, rows = _states(module), {rows for rows, _ in PROBED}
    try:
        return _layers_of(module)
    finally:
        now = _states(module)
        changed = [at for at, value in now.items() if value is not before.get(at, value)]
        shapes = {name: tuple(getattr(now[at, name], "shape", ())) for at, name in changed}
        kept = [name for name, shape in shapes.items() if shape and shape[0] in rows]
        for at, name in changed:
            setattr(at, name, before[at, name])
        if kept:
            raise CaptureError(
                f"{type(module).__name__} keeps something of each text in its own modules ({kept[0]!r}), and "
                "not in the cache, so that texts cannot be told apart. Write one at a time with "
                "`model.generate`."
            )


def _layers_of(module: Any) -> Layers:
    lists = [
        (name, found)
        for name, found in module.named_modules()
        if encoder_of(module) is None
        and isinstance(found, nn.ModuleList)
        and len(found)
        and len(set(map(type, found))) == 1
    ]
    for name, found in sorted(lists, key=lambda one: -sum(p.numel() for p in one[1].parameters())):
        paths = tuple(f"{name}.{number}" for number in range(len(found)))
        seen = [_probe(module, paths, rows, length) for rows, length in PROBED]
        if all(one is not None for one in seen):
            layers = _compared(paths, [one for one in seen if one is not None])
            if layers is not None:
                return layers
    cache = _forward(module, *PROBED[0]).get("past_key_values")
    return Layers(cached=_bytes_of(cache) // (PROBED[0][0] * PROBED[0][1]))


@dataclass
class _Seen:
    """What a forward showed: its rows, the tensors that each layer got, and the bytes of the cache."""

    rows: int
    before: list[str] = field(default_factory=list)
    given: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    is_chain: bool = True
    output: Tensor | None = None
    cached: int = 0


def _forward(module: Any, rows: int, length: int) -> Any:
    device = next(module.parameters()).device
    ids = (torch.arange(rows * length, device=device) % 7 + 1).reshape(rows, length)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    return module(**inputs_for(module, ids, mask, None))


def _probe(module: Any, paths: Sequence[str], rows: int, length: int) -> _Seen | None:
    """Look at one forward; None where the layers are not called once each, one behind another."""
    seen = _Seen(rows)

    def enter(whole: Any) -> None:
        leaves, _ = _leaves(whole)
        tensors = {keystr(at): leaf for at, leaf in leaves if isinstance(leaf, Tensor)}
        first = next(iter(tensors.values()), None)
        if seen.given:
            seen.is_chain &= first is not None and first is seen.output
        seen.given.append({at: tuple(one.shape) for at, one in tensors.items()})

    def leave(whole: Any) -> None:
        seen.output = (
            whole
            if isinstance(whole, Tensor)
            else next((one for one in whole if isinstance(one, Tensor)), None)
        )

    def begin(path: str, _: Any) -> None:
        if not seen.given:
            seen.before.append(path)

    hooks: list[tuple[Boundary, Callable[[Any], Any]]] = []
    for path in paths:
        hooks += [(_boundary(path), enter), (_boundary(path, is_output=True), leave)]
    inside = tuple(f"{path}." for path in paths)
    for path, _ in module.named_modules():
        if path and path not in paths and not path.startswith(inside):
            hooks.append((_boundary(path), partial(begin, path)))
    try:
        with hooks_on(module, hooks):
            found = _forward(module, rows, length)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None
    cache = found.get("past_key_values")
    held = getattr(cache, "layers", None)
    if held is None or len(held) != len(paths) or not all(hasattr(one, "reorder_cache") for one in held):
        return None
    seen.cached = _bytes_of(cache) // (rows * length)
    return seen if seen.is_chain and len(seen.given) == len(paths) else None


def _leaves(whole: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The arguments of a call, by way; a cache is one of them, whatever it holds."""
    return tree_flatten_with_path(whole, is_leaf=lambda one: not isinstance(one, tuple | list | dict))


def _boundary(path: str, *, is_output: bool = False) -> Boundary:
    return Boundary(ModuleCall(path, 0), is_output)


def _bytes_of(cache: Any) -> int:
    parts = [cache, *(getattr(cache, f"{one}_attention_cache", None) for one in ("self", "cross"))]
    layers = [layer for part in parts for layer in getattr(part, "layers", ())]
    held = (value for layer in layers for value in vars(layer).values())
    return sum(value.nbytes for value in held if isinstance(value, Tensor))


def _compared(paths: tuple[str, ...], seen: Sequence[_Seen]) -> Layers | None:
    """The tensors that have a row for each text; None where some grow with the rows in another way."""
    few, many = seen
    per_row: set[str] = set()
    for one, other in zip(few.given, many.given, strict=True):
        if one.keys() != other.keys():
            return None
        for at, shape in one.items():
            if shape == other[at]:
                continue
            if shape[0] != few.rows or other[at] != (many.rows, *shape[1:]):
                return None
            per_row.add(at)
    return Layers(paths, frozenset(per_row), frozenset(few.before), few.cached)


def inputs_for(module: Any, ids: Tensor, mask: Tensor, cache: Any) -> dict[str, Any]:
    """The arguments of a forward over tokens that are not yet in the cache; the mask is for all.

    With an encoder, it reads the tokens too.
    """
    known = forward_parameters(module)
    given = {
        "input_ids": ids,
        "attention_mask": mask,
        "past_key_values": cache,
        "use_cache": True,
        "return_dict": True,
    }
    if "position_ids" in known:
        at = (mask.long().cumsum(-1) - 1).clamp(min=0)
        given["position_ids"] = at[:, -ids.shape[1] :]
    if "logits_to_keep" in known:
        given["logits_to_keep"] = 1
    return given | ({} if encoder_of(module) is None else {"decoder_input_ids": ids})


def decoder_start(module: Any) -> int:
    """The token that a decoder begins with."""
    names = ("decoder_start_token_id", "bos_token_id")
    found = (getattr(one, name, None) for name in names for one in (module.generation_config, module.config))
    return int(next(token for token in found if token is not None))


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Level:
    """The rows that a layer computes: `of` has each world's row, `by` the world that stands for a row."""

    of: Numbers
    by: Numbers

    def __len__(self) -> int:
        return len(self.by)


def _levels(texts: Numbers, cells: Numbers, first: Numbers, count: int) -> list[_Level]:
    """The rows of each level: one for all that wrote the same text and are not patched in front of it."""
    found = []
    for level in range(count):
        _, by, of = np.unique(
            texts * (len(first) + 1) + np.where(first[cells] <= level, cells + 1, 0),
            return_index=True,
            return_inverse=True,
        )
        found.append(_Level(of.reshape(-1), by))
    return found


class _Worlds:
    """The worlds that still write: their cells, prompts and texts, and the rows of each level."""

    def __init__(self, prompts: Prompts, first: Sequence[int], levels: int) -> None:
        texts = len(prompts.ids)
        self.first, self._count = np.array(first, dtype=np.int64), levels
        self.cells = np.repeat(np.arange(len(first), dtype=np.int64), texts)
        self.prompts = np.tile(np.arange(texts, dtype=np.int64), len(first))
        self.texts = self.prompts.copy()
        self.levels = _levels(self.texts, self.cells, self.first, levels)
        self._between: dict[tuple[int, int], Tensor | None] = {}
        self.layout = 0
        """Changes whenever the rows of some level do."""

    def __len__(self) -> int:
        return len(self.cells)

    def go_on(self, tokens: Numbers, is_writing: NDArray[np.bool_]) -> list[Tensor | None]:
        """Let worlds go on with tokens, or leave; the old row of each new one, by level. None: as it is."""
        before, left = self.levels, np.flatnonzero(is_writing)
        _, texts = np.unique(np.stack([self.texts, tokens])[:, left], axis=1, return_inverse=True)
        self.cells, self.prompts = self.cells[left], self.prompts[left]
        self.texts = texts.reshape(-1).astype(np.int64)
        self.levels = _levels(self.texts, self.cells, self.first, self._count)
        found = [_index(old.of[left[new.by]], len(old)) for old, new in zip(before, self.levels, strict=True)]
        if len(left) < len(tokens) or any(rows is not None for rows in found):
            self._between.clear()
            self.layout += 1
        return found

    def apart(self) -> list[Tensor | None]:
        """Give each world a row of its own in every level, from now on; the old row of each, by level."""
        rows = np.arange(len(self), dtype=np.int64)
        found = [_index(level.of, len(level)) for level in self.levels]
        self.texts, self.levels = rows, [_Level(rows, rows)] * self._count
        self._between.clear()
        self.layout += 1
        return found

    def between(self, level: int, of: int, device: torch.device) -> Tensor | None:
        """Return the row at level `of` that each row at a later level comes from; None: the same."""
        if (level, of) not in self._between:
            rows = _index(self.levels[of].of[self.levels[level].by], len(self.levels[of]))
            self._between[level, of] = None if rows is None else rows.to(device)
        return self._between[level, of]


def _index(rows: Numbers, count: int) -> Tensor | None:
    is_same = len(rows) == count and bool((rows == np.arange(count)).all())
    return None if is_same else torch.from_numpy(rows)


Patches = Sequence[tuple[int, CellPatch]]
"""Patches at one hook, with the number of the cell that each belongs to."""


@dataclass(frozen=True)
class _Group:
    """A patch, and the rows of a level that it is for; all are of prompts of one length."""

    rows: Tensor
    patch: StepPatch
    length: int


def _added(like: StepPatch, shifts: Sequence[tuple[tuple[Tensor, float] | None, int]]) -> StepPatch:
    """A patch that adds to each row its own vector; `shifts` has them with how many rows each is for."""
    each = [one for one, count in shifts if one is not None for _ in range(count)]
    stacked: Tensor | None = None

    def add(present: Tensor) -> Tensor:
        nonlocal stacked
        if stacked is None:
            rows = torch.stack([scale * vector.to(present.device, present.dtype) for vector, scale in each])
            stacked = rows.reshape(len(each), *[1] * (present.ndim - rows.ndim), *rows.shape[1:])
        return present + stacked

    return StepPatch(like.place, like.found, add, is_new=like.is_new, when=like.when)


# -- the loop --------------------------------------------------------------------------------------


class Decoding:
    """Writes the texts of cells: each is a list of patches, and the unpatched text comes first.

    `seed` starts the random numbers of each text, as if it was written alone. With `record`, steps that are
    alike are recorded, and replayed.
    """

    def __init__(
        self,
        module: Any,
        program: Program,
        layers: Layers,
        prompts: Prompts,
        cells: Sequence[Sequence[CellPatch]],
        n: int,
        seed: int,
        record: Record | None = None,
    ) -> None:
        self.module, self._program, self.layers, self.prompts, self.n = module, program, layers, prompts, n
        self._record = record
        self._every = [[], *cells]
        self.last = len(layers.paths)
        first = [min((self._level(one) for one in own), default=self.last + 1) for own in self._every]
        self.worlds = _Worlds(prompts, first, self.last + 1)
        self._encoder, self._seed = encoder_of(module), seed
        # What an encoder reads is no part of the text.
        self._reads, self._width = prompts.lengths, prompts.ids.shape[1]
        self._lengths = self._reads
        self.layer_rows: list[int] = []
        self._step, self._forced = 0, 0
        self._generators: dict[tuple[int, int], torch.Generator] = {}
        self._groups: dict[tuple[int, Hook], tuple[int, list[_Group]]] = {}

    def _level(self, patch: CellPatch) -> int:
        return self.layers.level(patch.hook.boundary) if self.layers.paths else 0

    def run(self, options: Mapping[str, Any]) -> Texts:
        """Write, by the module's own `generate` with its options."""
        rows = torch.from_numpy(self.worlds.levels[0].by)
        prompt = torch.from_numpy(self.worlds.prompts)[rows].to(self.prompts.ids.device)
        with hooks_on(self.module, self._actions()):
            found: Texts = self.module.generate(
                input_ids=self.prompts.ids[prompt],
                attention_mask=self.prompts.mask[prompt],
                custom_generate=self._loop,
                **{**options, "max_new_tokens": self.n, "use_cache": True},
            )
        return found

    @torch.no_grad()
    def forced(self, tokens: Tensor, readers: Sequence[SiteReader] = ()) -> Tensor:
        """Read tokens [cell, prompt, n] behind the prompts, in one pass; the logits that predict each.

        Each world has its row; -1 stands behind the end of a text. Readers keep what patches left.
        """
        n, worlds = tokens.shape[-1], self.worlds
        worlds.apart()
        self._forced, given = n, self._reading(tokens.reshape(-1, n).to(self.prompts.ids.device))
        actions = self._actions(is_apart=True)
        for one in readers:
            actions.append((one.hook.boundary, partial(self._read, one)))
        with hooks_on(self.module, actions):
            logits: Tensor = self.module(**given).logits[:, -n - 1 : -1].float()
        return logits.reshape(*tokens.shape, -1)

    def _reading(self, tokens: Tensor) -> dict[str, Any]:
        """The arguments of a forward over the prompts and tokens behind them."""
        at, written = torch.from_numpy(self.worlds.prompts).to(tokens.device), tokens.clamp(min=0)
        ids, mask = self.prompts.ids[at], self.prompts.mask[at]
        if self._encoder is None:
            mask = torch.cat([mask, (tokens >= 0).long()], 1)
            given = inputs_for(self.module, torch.cat([ids, written], 1), mask, None)
        else:
            start = written.new_full((len(written), 1), decoder_start(self.module))
            given = inputs_for(self.module, ids, mask, None)
            given["decoder_input_ids"], self._width = torch.cat([start, written], 1), 1
        if "logits_to_keep" in given:
            given["logits_to_keep"] = tokens.shape[1] + 1
        return {**given, "use_cache": False}

    def _read(self, reader: SiteReader, whole: Any) -> None:
        reader.keep(whole, self._step_of(reader.hook, self._width, len(self.worlds), 0))

    def _loop(
        self,
        module: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **given: Any,
    ) -> Texts:
        """Write token after token; what `generate` calls in place of its own loop."""
        cache, worlds, device = given.get("past_key_values"), self.worlds, input_ids.device
        if cache is None or not hasattr(cache, "reorder_cache"):
            raise CaptureError(
                f"{type(module).__name__} writes with {type(cache).__name__ if cache else 'no cache'}, whose "
                "rows cannot be told apart. Texts are swept over models with a cache of keys and values; "
                "write one text at a time with `model.generate`."
            )
        shape = (len(self._every), len(self.prompts.ids), self.n)
        tokens, log_probs = np.full(shape, -1, dtype=np.int64), np.full(shape, np.nan)
        # What each world was given and wrote, [world, column]; those that have ended leave.
        at = torch.from_numpy(worlds.prompts).to(device)
        ids, mask = self.prompts.ids[at], self.prompts.mask[at]
        read: dict[str, Any] = {}
        if self._encoder is not None:
            ids = input_ids[torch.from_numpy(worlds.levels[0].of).to(device)]
            mask, self._width = torch.ones_like(ids), ids.shape[1]
            self._lengths = [self._width] * len(self._reads)
            read = {
                "encoder_outputs": tuple(given["encoder_outputs"][:1]),
                "attention_mask": given["attention_mask"],
            }
        fresh, slots = ids, None
        goes_on = np.ones(len(worlds), dtype=bool)
        for step in range(self.n):
            self._step = step
            if slots is None and self._record is not None and self._can_record(step, cache):
                rows, columns = worlds.apart(), self._width + self.n - 1
                rows = rows[: self.last] if self.layers.paths else rows * len(cache.layers)
                slots = SlotStep(module, cache, rows, mask[:, :-1], columns)
                logits = slots.record(fresh, self._width + step - 1, self._record)
            elif slots is not None:
                logits = slots.logits(fresh, self._width + step - 1)
            else:
                top = torch.from_numpy(worlds.levels[0].by).to(device)
                own = inputs_for(module, fresh[top], mask[top], cache)
                if read:
                    del own["input_ids"]
                outputs = module(**{**own, **read})
                logits = outputs.logits[:, -1].float()
                del outputs
            self.layer_rows.append(sum(map(len, worlds.levels[: self.last or 1])) * fresh.shape[1])
            chosen, said = self._chosen(logits, ids, logits_processor, generation_config.do_sample)
            ids = torch.cat([ids, chosen[:, None]], 1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            fresh = chosen[:, None]
            now = chosen.cpu().numpy()
            cells, texts = worlds.cells[goes_on], worlds.prompts[goes_on]
            tokens[cells, texts, step] = now[goes_on]
            log_probs[cells, texts, step] = said.double().cpu().numpy()[goes_on]
            is_writing = self._is_writing(ids, stopping_criteria) & goes_on
            if not is_writing.any() or step == self.n - 1:
                break
            if slots is not None:  # each keeps its row, to the end
                goes_on = is_writing
                continue
            goes_on = is_writing[is_writing]
            kept = torch.from_numpy(np.flatnonzero(is_writing)).to(device)
            rows = worlds.go_on(now, is_writing)
            if len(kept) < len(ids):
                ids, mask, fresh = ids[kept], mask[kept], fresh[kept]
            self._reorder(cache, rows, device)
            if read and rows[0] is not None:
                (hidden,), at = read["encoder_outputs"], rows[0].to(device)
                read = {"encoder_outputs": (hidden[at],), "attention_mask": read["attention_mask"][at]}
        return Texts(tokens, log_probs, tuple(self.layer_rows))

    def _can_record(self, step: int, cache: Any) -> bool:
        """True if this step and all behind it are alike, and replaying them pays."""
        if not step or self.n - step < LEAST_STEPS:
            return False
        patches = [patch for own in self._every for patch in own]
        for length in {*self._reads}:
            for patch in patches:
                steps = (self._step_of(patch.hook, length, 1, at) for at in range(step, self.n))
                acts = {bool(patch.of(length).positions(one)) for one in steps}
                if len(acts) > 1 or (True in acts and not patch.is_known):
                    return False
        layers = len(cache.layers)
        return has_slots(cache, self._width + self.n - 1) and pays(self.module, len(self.worlds), layers)

    def _chosen(self, logits: Tensor, ids: Tensor, processors: Any, do_sample: bool) -> tuple[Tensor, Tensor]:
        """The next token of each world, and its log probability."""
        level, device = self.worlds.levels[-1], logits.device
        of, by = (torch.from_numpy(one).to(device) for one in (level.of, level.by))
        scores = logits
        if len(processors):
            # Each text by itself, without the padding in front of it, as if it was written alone.
            scores = torch.empty_like(logits)
            at = defaultdict(list)
            for row, world in enumerate(level.by):
                at[self._lengths[self.worlds.prompts[world]]].append(row)
            for length, rows in at.items():
                some = torch.tensor(rows, device=device)
                own = ids[by[some], self._width - length :]
                scores[some] = processors(own, logits[some]).to(scores.dtype)
        if do_sample:
            share = torch.softmax(scores, -1)
            drawn = [
                torch.multinomial(share[row], 1, generator=self._generator(world, device))
                for world, row in enumerate(level.of)
            ]
            chosen = torch.cat(drawn)
        else:
            chosen = scores.argmax(-1)[of]
        said = torch.log_softmax(logits, -1)
        return chosen, said[of, chosen]

    def _generator(self, world: int, device: torch.device) -> torch.Generator:
        key = int(self.worlds.cells[world]), int(self.worlds.prompts[world])
        if key not in self._generators:
            self._generators[key] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[key]

    def _is_writing(self, ids: Tensor, criteria: Any) -> NDArray[np.bool_]:
        """Which worlds go on: each that wrote the same is asked once, without the padding in front."""
        found = np.ones(len(self.worlds), dtype=bool)
        for length in set(self._lengths):
            own = np.flatnonzero(np.array(self._lengths)[self.worlds.prompts] == length)
            if len(own):
                rows = torch.from_numpy(own).to(ids.device)
                is_done = criteria(ids[rows, self._width - length :], None)
                found[own] = ~is_done.cpu().numpy()
        return found

    def _reorder(self, cache: Any, rows: Sequence[Tensor | None], device: torch.device) -> None:
        """Give each layer's cache the rows that it has from now on."""
        if not self.layers.paths:
            if rows[0] is not None:
                cache.reorder_cache(rows[0].to(device))
            return
        for layer, index in zip(cache.layers, rows, strict=False):
            if index is not None:
                layer.reorder_cache(index.to(device))

    # -- hooks ---------------------------------------------------------------------------------

    def _actions(self, *, is_apart: bool = False) -> list[tuple[Boundary, Callable[[Any], Any]]]:
        """What acts in each forward: rows are selected in front of layers, then patches act.

        Where worlds lie apart, none are selected.
        """
        found: list[tuple[Boundary, Callable[[Any], Any]]] = []
        by_hook: dict[Hook, list[tuple[int, CellPatch]]] = defaultdict(list)
        for cell, own in enumerate(self._every):
            for patch in own:
                by_hook[patch.hook].append((cell, patch))
        behind: dict[str, tuple[Hook | None, list[tuple[int, CellPatch]]]] = {}
        paths = () if is_apart else self.layers.paths
        for hook in list(by_hook):
            boundary = hook.boundary
            if boundary.is_output and boundary.call.path in paths:
                behind[boundary.call.path] = hook, by_hook.pop(hook)
        for level, path in enumerate(paths[1:], start=1):
            hook_patches = behind.get(paths[level - 1], (None, []))
            found.append((_boundary(path), partial(self._enter, level, *hook_patches)))
        if paths:
            act = partial(self._leave, len(paths), *behind.get(paths[-1], (None, [])))
            found.append((_boundary(paths[-1], is_output=True), act))
        for hook, patches in by_hook.items():
            level = self.layers.level(hook.boundary) if self.layers.paths else 0
            found.append((hook.boundary, partial(self._act, hook, level, patches)))
        return found

    def _enter(self, level: int, hook: Hook | None, patches: Patches, whole: Any) -> Any:
        """Select the rows of a layer from those of the one before, and patch what that one put out."""
        device = self.prompts.ids.device
        rows, top = self.worlds.between(level, level - 1, device), self.worlds.between(level, 0, device)
        if rows is None and top is None and hook is None:
            return None
        leaves, shape = _leaves(whole)
        values = [leaf for _, leaf in leaves]
        hidden = next(number for number, leaf in enumerate(values) if isinstance(leaf, Tensor))
        if top is not None:
            for number, (at, leaf) in enumerate(leaves):
                is_own = number != hidden and isinstance(leaf, Tensor) and leaf.shape[0] > 1
                if is_own and keystr(at) in self._per_row:
                    values[number] = leaf[top.to(leaf.device)]
        new = values[hidden] if rows is None else values[hidden][rows.to(values[hidden].device)]
        values[hidden] = new if hook is None else self._patched(new, level, hook, patches)
        return tree_unflatten(values, shape)

    @property
    def _per_row(self) -> frozenset[str]:
        return self.layers.per_row

    def _leave(self, level: int, hook: Hook | None, patches: Patches, whole: Any) -> Any:
        """Select the rows behind the last layer from its own, and patch what it put out."""
        rows = self.worlds.between(level, level - 1, self.prompts.ids.device)
        if rows is None and hook is None:
            return None
        value = whole if isinstance(whole, Tensor) else whole[0]
        new = value if rows is None else value[rows.to(value.device)]
        new = new if hook is None else self._patched(new, level, hook, patches)
        return new if isinstance(whole, Tensor) else type(whole)((new, *whole[1:]))

    def _act(self, hook: Hook, level: int, patches: Patches, whole: Any) -> Any:
        value = hook.read(whole)
        if not isinstance(value, Tensor):
            raise PatchError(
                f"generate calls {str(hook.boundary.call)!r} otherwise than it was captured, and what is "
                "patched there is no tensor. Capture the module as generate calls it."
            )
        new = self._patched(value, level, hook, patches)
        return None if new is value else hook.replaced(whole, new)

    def _patched(self, value: Tensor, level: int, hook: Hook, patches: Patches) -> Tensor:
        """A value with the patches of all cells in it, each in its own rows."""
        count, new = len(self.worlds.levels[level]), value
        if value.shape[0] % count:
            raise PatchError(
                f"{patches[0][1].of(self._reads[0]).place} has no dimension for the texts in front, so "
                "that texts cannot be patched apart. Patch another place, or write one text at a time with "
                "`model.generate`."
            )
        for group in self._grouped(level, hook, patches, value.device):
            step = self._step_of(hook, group.length, len(group.rows), self._step)
            if not group.patch.positions(step):
                continue
            new = value.clone(memory_format=torch.contiguous_format) if new is value else new
            apart = new if value.shape[0] == count else new.view(count, -1, *value.shape[1:])
            part = apart[group.rows]
            changed = group.patch.applied(part if apart is new else part.flatten(0, 1), step)
            apart[group.rows] = changed.reshape(part.shape)
        return new

    def _grouped(self, level: int, hook: Hook, patches: Patches, device: torch.device) -> list[_Group]:
        """The rows of each patch, those of vectors added at one place together; kept for a layout."""
        layout, found = self._groups.get((level, hook), (-1, []))
        if layout == self.worlds.layout:
            return found
        worlds, rows = self.worlds, self.worlds.levels[level]
        cells, lengths = worlds.cells[rows.by], np.array(self._reads)[worlds.prompts[rows.by]]
        together: dict[Any, list[tuple[CellPatch, Numbers]]] = defaultdict(list)
        several = Counter(cell for cell, _ in patches)
        for number, (cell, patch) in enumerate(patches):
            own = np.flatnonzero((cells == cell) & (worlds.first[cell] <= level))
            for length in np.unique(lengths[own]).tolist():
                some, place = own[lengths[own] == length], patch.of(length).place
                is_one = patch.shift is not None and several[cell] == 1
                key = number if not is_one or patch.shift is None else (str(place), patch.shift[0].shape)
                together[key, length].append((patch, some))
        found = []
        for (_, length), group in together.items():
            made, at = group[0][0].of(length), torch.from_numpy(np.concatenate([some for _, some in group]))
            if len(group) > 1:
                made = _added(made, [(patch.shift, len(some)) for patch, some in group])
            found.append(_Group(at.to(device), made, length))
        self._groups[level, hook] = worlds.layout, found
        return found

    def _step_of(self, hook: Hook, length: int, rows: int, step: int) -> Step:
        """The positions of a step's forward, counted from the first token of a prompt of that length."""
        width, gap = self._width, self._width - length
        if is_in(hook.boundary.call.path, self._encoder):
            return Step(self._program, 0, self.prompts.ids.shape[1], rows, length)
        if self._encoder is not None:
            gap, length = 0, width
        start, stop = (0, width + self._forced) if step == 0 else (width + step - 1, width + step)
        return Step(self._program, start - gap, stop - gap, rows, length)

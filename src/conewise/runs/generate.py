"""Steering while a model writes: the module's own `generate`, with patches at places of a captured model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from conewise.anatomy.axes import View, resolved
from conewise.anatomy.places import Place, PlaceLike, Places, as_place
from conewise.anatomy.sites import Located
from conewise.arguments import expect, has_items
from conewise.checks.hooking import Hook, HookedModule, hooks_on, reshaped
from conewise.errors import CaptureError, ConewiseError, InputMismatchError, PatchError, describe
from conewise.program.export import eager
from conewise.program.records import Program, SizeRef
from conewise.program.tensors import copy_of
from conewise.program.walk import run_sources, stream
from conewise.runs.captured import Captured
from conewise.runs.interventions import Intervention
from conewise.runs.reading import Reading
from conewise.runs.values import Edit, Part, new_part
from conewise.templates import heading, shown, table
from conewise.text.tokens import token_ids
from conewise.threads import one_module

When = Callable[[int], bool]
"""Says in which steps a patch acts: 0 computes the prompt, 1 the first token that was written."""


@dataclass(frozen=True)
class Step:
    """The positions of a forward: `start` to `stop` of so many `rows`; the prompt ends at `prompt`."""

    program: Program
    start: int
    stop: int
    rows: int
    prompt: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The program's sizes, if it ran on what is computed in this step alone."""
        batch, table = self.program.dimensions.batch, self.program.sizes
        length = self.stop - self.start
        return table.of({symbol: self.rows if symbol in batch else length for symbol in table.symbols})


class StepPatch:
    """A patch at the positions that it is meant for, in whichever forward they are computed.

    `value` is a function of what would have been there, or a tensor: the place's part, at the positions that
    the place names. `is_new`: where the place names none, at those behind the prompt alone. `when`: at those
    positions alone that are first computed in a step for whose number it is true.
    """

    def __init__(
        self, place: Place, found: Located, value: Part, *, is_new: bool, when: When | None = None
    ) -> None:
        self.place, self.found, self.value, self.is_new, self.when = place, found, value, is_new, when
        view = found.view
        self._has_sizes = any(isinstance(length, SizeRef) for length in view.lengths.values())
        lies_so = view.packing == tuple((axis,) for axis in view.axes)
        self._is_whole = lies_so and not place.part and callable(value)
        self._edits: dict[tuple[int, ...] | None, Edit] = {}

    def positions(self, step: Step) -> Sequence[int]:
        """The positions of a step that are patched, counted from the start of the sequence."""
        found = self._chosen(step)
        if self.when is None:
            return found
        # The step in which a position is first computed, whether a cache keeps it from then on or not.
        return [at for at in found if self.when(max(0, at - step.prompt + 1))]

    def _chosen(self, step: Step) -> Sequence[int]:
        """The positions of a step that the place names."""
        chosen, first = self.place.part.get("pos"), step.start
        if chosen is None:
            return range(max(first, step.prompt) if self.is_new else first, step.stop)
        if isinstance(chosen, int):
            return [chosen] if first <= chosen < step.stop else []
        if isinstance(chosen, slice):
            return [at for at in range(*chosen.indices(step.stop)) if at >= first]
        return [at for at in chosen if first <= at < step.stop]

    def applied(self, value: Tensor, step: Step) -> Tensor:
        """A node's value in a step, with the patch in it."""
        at = self.positions(step)
        if not at:
            return value
        is_all = len(at) == step.stop - step.start
        if is_all and self._is_whole:
            return new_part(self.value, value, self.found, self.place)
        edit = self._edit([position - step.start for position in at], is_all=is_all)
        if not callable(self.value):
            edit = replace(edit, part=partial(self._given, self.value, at))
        return edit.applied(value, step.sizes if self._has_sizes else ())

    def _edit(self, at: Sequence[int], *, is_all: bool) -> Edit:
        """The edit of a step's value: the same in most steps, so it is kept."""
        key = None if is_all else tuple(at)
        if key not in self._edits:
            is_one = isinstance(self.place.part.get("pos"), int)
            pos = at[0] if is_one else slice(None) if is_all else tuple(at)
            found = replace(self.found, part={**self.place.part, "pos": pos})
            self._edits[key] = Edit(self.place, found, self.value)
        return self._edits[key]

    def _given(self, new: Tensor, at: Sequence[int], present: Tensor) -> Tensor:
        """Return what was given for these positions; a row for each that a search keeps of a prompt."""
        axes, chosen = self.found.part_axes, self.place.part["pos"]
        if "pos" in axes:
            named = range(*chosen.indices(at[-1] + 1)) if isinstance(chosen, slice) else chosen
            assert not isinstance(named, int)
            order = {position: place for place, position in enumerate(named)}
            index = torch.tensor([order[position] for position in at], device=new.device)
            new = new.index_select(axes.index("pos"), index)
        if "batch" in axes and new.ndim == present.ndim:
            dim = axes.index("batch")
            times, rest = divmod(present.shape[dim], new.shape[dim])
            if times > 1 and not rest:
                new = new.repeat_interleave(times, dim)
        return new


def encoder_of(module: Any) -> str | None:
    """The path of the encoder of a module that reads with one and writes with a decoder; else None."""
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return None
    encoder = module.get_encoder()
    return next(str(path) for path, one in module.named_modules() if one is encoder)


def is_in(path: str, outer: str | None) -> bool:
    """True if a module lies in another one, or is it."""
    return outer is not None and (path == outer or path.startswith(f"{outer}."))


def _patched(
    module: nn.Module,
    program: Program,
    reading: Step,
    start: int,
    patches: Mapping[Hook, Sequence[StepPatch]],
    readings: Sequence[SiteReader] = (),
) -> AbstractContextManager[None]:
    """Let patches act while a module writes, each at its hook, in the order in which they were given.

    Values are read behind them.

    An encoder reads the prompt, all of it and once: this is the step `reading`. What is written stands behind
    the first `start` positions of the others.
    """
    step, encoder = reading, encoder_of(module)

    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note which positions the forward that begins computes."""
        nonlocal step
        named = (kwargs.get(name) for name in ("decoder_input_ids", "input_ids", "inputs_embeds"))
        given = next((one for one in (*named, *args) if isinstance(one, Tensor) and one.ndim > 1), None)
        if given is None:
            raise PatchError(
                "generate called the module without `input_ids` or `inputs_embeds`, so it cannot be told "
                "which positions it computes. Patches while it writes need one of them."
            )
        first, (rows, length) = past_length(kwargs), given.shape[:2]
        step = Step(program, first, first + length, rows, start)

    def act(hook: Hook, own: Sequence[StepPatch], whole: Any) -> Any:
        value = new = hook.read(whole)
        if not isinstance(value, Tensor):
            raise PatchError(
                f"generate calls {str(hook.boundary.call)!r} otherwise than it was captured, and what is "
                "patched there is no tensor. Capture the module as generate calls it."
            )
        for patch in own:
            new = patch.applied(new, now(hook))
        return None if new is value else hook.replaced(whole, new)

    def now(hook: Hook) -> Step:
        return reading if is_in(hook.boundary.call.path, encoder) else step

    def keep(one: SiteReader, whole: Any) -> None:
        one.keep(whole, now(one.hook))

    actions = [(one.boundary, partial(act, one, own)) for one, own in patches.items()]
    return hooks_on(module, [*actions, *((one.hook.boundary, partial(keep, one)) for one in readings)], begin)


def past_length(kwargs: Mapping[str, Any]) -> int:
    """Return the number of positions that were computed before, and are in the cache."""
    cache = kwargs.get("past_key_values")
    if cache is not None and hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    if isinstance(cache, tuple) and cache:
        return int(cache[0][0].shape[-2])
    at = kwargs.get("cache_position")
    return int(at[0]) if isinstance(at, Tensor) and at.numel() else 0


class SiteReader:
    """What stands at a place in all forwards of a module that writes, put together along the positions."""

    def __init__(self, model: Captured, place: Place) -> None:
        self.place, found = place, model.locate(place)
        self.hook = hooks_for(model, {found.node: place}, is_read=True)[found.node]
        self._found = found if self.hook.shape is None else _as_shown(model, place, found)
        if found.result is not None:
            raise PatchError(f"{place} is computed from z, and no module shows it while it writes. Read z.")
        self._parts: list[tuple[Step, Tensor]] = []

    def keep(self, whole: Any, step: Step) -> None:
        """Keep what a forward shows."""
        value = self.hook.read(whole)
        if not isinstance(value, Tensor):
            raise PatchError(
                f"{self.place}: generate calls {str(self.hook.boundary.call)!r} otherwise than it was "
                "captured, and what is read there is no tensor. Capture the module as generate calls it."
            )
        self._parts.append((step, self._found.view.present(value.detach().clone(), step.sizes)))

    def value(self) -> Tensor:
        """All positions; in attention, what a token could not see yet is 0."""
        axes = self._found.view.axes
        along = next((axes.index(axis) for axis in ("pos", "query_pos") if axis in axes), None)
        if along is None or not self._parts:
            raise PatchError(f"{self.place} has no positions, so nothing was read of it step by step.")
        length = max(step.stop for step, _ in self._parts)
        first = self._parts[0][1]
        shape = list(first.shape)
        shape[along] = length
        keys = axes.index("key_pos") if "key_pos" in axes else None
        if keys is not None:
            shape[keys] = max(part.shape[keys] for _, part in self._parts)
        found = first.new_zeros(shape)
        for step, part in self._parts:
            into = found.narrow(along, step.start, part.shape[along])
            if keys is not None:
                into = into.narrow(keys, max(0, step.stop - part.shape[keys]), part.shape[keys])
            into.copy_(part)
        return found[resolved(axes, self.place.part, found.shape)]


Prompt = str | Sequence[str] | Tensor | Mapping[str, Any]
Patches = Mapping[PlaceLike, Any] | Iterable[tuple[PlaceLike, Any]]
Positions = Literal["all", "new"]

OPTIONS = {
    "do_sample": "bool | None",
    "temperature": "PositiveNumber | None",
    "top_k": "Count | None",
    "top_p": "Share | None",
    "min_p": "Share | None",
    "repetition_penalty": "PositiveNumber | None",
    "num_beams": "Samples",
    "num_return_sequences": "Samples",
}
"""The checks of options of the module's own `generate`, which does not look at all of them itself."""


@dataclass(frozen=True, slots=True, repr=False)
class Written:
    """Generated text: `ids` are the prompts and the generated tokens, `new` are the generated tokens only.

    `texts` are the generated tokens as text, one for each row, if there was a tokenizer; else None.
    `returned` is the return value of the module's own `generate`. `written["resid_post", 2]` is the value
    that was read there during generation, at all positions that were computed: those of the prompt and of the
    generated tokens except the last one.
    """

    ids: Tensor
    prompt: int
    texts: tuple[str, ...] | None
    returned: Any
    values: Mapping[Place, Tensor] = field(default_factory=dict)

    def __getitem__(self, at: PlaceLike) -> Tensor:
        """What was read at a place, as the model wrote."""
        place = as_place(at)
        if place not in self.values:
            known = ", ".join(map(str, self.values)) or "nothing"
            raise InputMismatchError(
                f"{place} was not read while the model wrote; read was {known}. Name it: "
                "`model.generate(..., read=[...])`."
            )
        return self.values[place]

    @property
    def new(self) -> Tensor:
        """The generated tokens, [row, token]."""
        return self.ids[:, self.prompt :]

    @property
    def text(self) -> str:
        """The generated text, if there is one row."""
        if self.texts is None or len(self.texts) != 1:
            why = (
                "there is no tokenizer"
                if self.texts is None
                else f"there are {len(self.texts)} of them, `texts`"
            )
            raise InputMismatchError(f"no single text was written: {why}.")
        return self.texts[0]

    def beside(self, other: Written) -> WrittenPair:
        """Return this text and another text of the same prompts side by side, e.g. unpatched and patched."""
        if len(self.ids) != len(other.ids):
            raise InputMismatchError(
                f"texts of {len(self.ids)} and of {len(other.ids)} rows cannot stand side by side: generate "
                "both from the same prompts."
            )
        return WrittenPair(self, other)

    def _rows(self) -> list[str]:
        """The text of each row, or its tokens where there is no tokenizer."""
        return list(self.texts) if self.texts is not None else [str(row) for row in self.new.tolist()]

    def __repr__(self) -> str:
        rows = self._rows()
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        return f"Written, {self.new.shape[1]} tokens: {rows[0] if rows else ''!r}{more}"

    def _repr_html_(self) -> str:
        return shown(
            heading("Written", f"{self.new.shape[1]} tokens"),
            table([[one] for one in self._rows()], ["text"]),
        )

    def __str__(self) -> str:
        return "\n".join(self.texts) if self.texts is not None else str(self.new.tolist())


@dataclass(frozen=True, slots=True, repr=False)
class WrittenPair:
    """Two generations from the same prompts; see `Written.beside`."""

    first: Written
    second: Written

    def __repr__(self) -> str:
        return f"1: {self.first!r}\n2: {self.second!r}"

    def _repr_html_(self) -> str:
        rows = list(zip(self.first._rows(), self.second._rows(), strict=True))
        return shown(table(rows, ("first", "second")))


def generate(
    model: Captured,
    prompt: Prompt,
    n: int,
    patches: Patches,
    pos: Positions,
    tokenizer: Any,
    when: When | None,
    options: Any,
    read: Any = (),
) -> Written:
    """Generate up to `n` tokens after a prompt, with patches; see `Model.generate`."""
    module = expect_writes(model)
    options = checked_options(n, pos, options)
    if isinstance(prompt, Tensor) and "attention_mask" in options:
        prompt = {"input_ids": prompt, "attention_mask": options.pop("attention_mask")}
    given = prompt_inputs(model, prompt, tokenizer)
    if twice := sorted(given.keys() & options.keys()):
        raise InputMismatchError(
            f"{twice[0]!r} is part of the prompt, and an option too; leave out the option."
        )
    if "stop_strings" in options:
        if tokenizer is None:
            raise InputMismatchError(
                "`stop_strings` are looked for in texts, and there is no tokenizer: give one, "
                "`generate(..., tokenizer=...)`."
            )
        options["tokenizer"] = tokenizer
    model.expect_known_ids(given)
    mask, (rows, length) = given["attention_mask"], given["input_ids"].shape
    encoder = encoder_of(module)
    start = length if encoder is None else int(given.get("decoder_input_ids", mask[:, :1]).shape[1])
    hidden = expect_padded_in_front(mask) if encoder is None else not bool(mask.bool().all())
    made = [
        step_patch(model, place, value, is_new=pos == "new", when=when)
        for at, value in _pairs(patches)
        for place in model.each_call([as_place(at)])
    ]
    hooks = hooks_for(model, {one.found.node: one.place for one in made})
    reads = [one for one in made if is_in(hooks[one.found.node].boundary.call.path, encoder)]
    by_token = made if encoder is None else reads
    named = next((one.place for one in by_token if "pos" in one.place.part), None)
    if hidden and named is not None:
        raise PatchError(
            f"{named}: the prompts have different lengths and padding in front, so that a position is "
            "another token in each. Give one prompt at a time, or leave out pos."
        )
    for patch in made:
        expect_reached(patch.place, length if patch in reads else start + n - 1)
    readings = [SiteReader(model, place) for at in _places(read) for place in model.each_call([at])]
    if readings and (options.get("num_beams") or 1) > 1:
        raise InputMismatchError(
            "a search by beams reorders its rows, so that values read on the way are not those of the texts: "
            "leave out `num_beams`, or `read`."
        )
    by_hook: dict[Hook, list[StepPatch]] = {}
    for patch in made:
        hook = hooks[patch.found.node]
        by_hook.setdefault(hook, []).append(patch if hook.shape is None else as_shown(model, patch))
    with (
        refusing_options(options),
        one_module(),
        _patched(
            module, model.program, Step(model.program, 0, length, rows, length), start, by_hook, readings
        ),
        eager(module),
        naming_dtypes(module),
    ):
        returned = module.generate(**given, **{**decoding_defaults(module), **options, "max_new_tokens": n})
    ids = returned if isinstance(returned, Tensor) else returned.sequences
    texts = None
    if tokenizer is not None:
        texts = tuple(tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True))
    return Written(ids, start, texts, returned, {one.place: one.value() for one in readings})


def checked_options(n: int, pos: Positions, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `generate`. Raises InputMismatchError or PatchError for one that means nothing."""
    if n < 1:
        raise InputMismatchError(f"n={n}: give how many tokens to write at most, 1 or more.")
    if str(pos) not in ("all", "new"):
        raise PatchError(f"pos is 'all' (the prompt and what is written) or 'new', not {pos!r}.")
    if "max_new_tokens" in options:
        raise InputMismatchError("n says how many tokens to write at most: leave out max_new_tokens.")
    for option in OPTIONS.keys() & options.keys():
        expect(option, options[option], OPTIONS[option])
    return dict(options)


def expect_padded_in_front(mask: Any) -> bool:
    """Raise InputMismatchError for prompts that are padded behind; return True for those padded in front."""
    hidden = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.bool().all())
    if hidden and not bool(mask[:, -1].bool().all()):
        raise InputMismatchError(
            "the prompts are padded on the right, so that the model would go on from padding. Pad them on "
            "the left, or give texts, which are padded so."
        )
    return hidden


def expect_writes(model: Captured) -> Any:
    """Return the module of a model that can write. Raises CaptureError where it has no `generate`."""
    model.expect_program("generate")
    model.weights.expect_captured()
    module: Any = model.module
    if not callable(getattr(module, "generate", None)):
        raise CaptureError(
            f"{model.name} has no `generate` of its own, as Hugging Face's language models have. Write a "
            "loop over `model.run(...)`, and patch a fork of each run."
        )
    return module


@contextmanager
def refusing_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Tell of options that the module's `generate` itself refuses, which it does by bare errors."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        raised_in = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
        if (
            isinstance(error, ConewiseError)
            or not options
            or not raised_in.startswith("transformers.generation")
        ):
            raise
        given = ", ".join(
            f"{name}={describe(value)}" for name, value in options.items() if name != "tokenizer"
        )
        raise InputMismatchError(f"the module's `generate` does not take {given}: {error}") from error


@contextmanager
def naming_dtypes(module: Any) -> Iterator[None]:
    """Name the dtypes of a module that has several, where it raises since they do not go together."""
    try:
        yield
    except RuntimeError as error:
        weights = {one.dtype: name for name, one in module.named_parameters() if one.is_floating_point()}
        if isinstance(error, ConewiseError) or "dtype" not in str(error) or len(weights) < 2:
            raise
        found = ", ".join(f"{name} {dtype}" for dtype, name in weights.items())
        raise CaptureError(
            f"the module's own `generate` raised {error}. Its weights have several dtypes ({found}). Bring "
            "the module to one, such as `module.to(torch.float32)`, and capture it again."
        ) from error


def decoding_defaults(module: Any) -> dict[str, Any]:
    """Greedy; and a token to pad with where the model names none, which `generate` would say each time."""
    config = getattr(module, "generation_config", None)
    found: dict[str, Any] = {"do_sample": False}
    end = getattr(config, "eos_token_id", None)
    if getattr(config, "pad_token_id", None) is None and end is not None:
        found["pad_token_id"] = end[0] if isinstance(end, list | tuple) else end
    return found


def prompt_inputs(model: Captured, prompt: Any, tokenizer: Any) -> dict[str, Any]:
    """The prompt as the module's `generate` takes it: token ids, and a mask."""
    if isinstance(prompt, Tensor):
        given: dict[str, Any] = {"input_ids": prompt}
    elif isinstance(prompt, Mapping):
        given = dict(prompt)
    elif has_items(prompt):
        given = _tokens(model, [prompt] if isinstance(prompt, str) else list(prompt), tokenizer)
    else:
        given = {"input_ids": prompt}  # says what is wrong
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputMismatchError(
            f"a prompt is text, token ids [batch, pos], or inputs with `input_ids`; {describe(ids)} was "
            "given."
        )
    if (
        ids.dtype == torch.bool
        or ids.is_complex()
        or ids.is_quantized
        or ids.is_meta
        or ids.layout is not torch.strided
        or ids.is_nested
    ):
        raise InputMismatchError(
            f"`input_ids` is {ids.dtype}, {ids.layout}, on {ids.device}; give a dense tensor of token ids."
        )
    mask = given.setdefault("attention_mask", torch.ones_like(ids))
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise InputMismatchError(
            f"`attention_mask` is {describe(mask)}; expected a tensor of shape {tuple(ids.shape)}."
        )
    return given


def _tokens(model: Captured, texts: list[Any], tokenizer: Any) -> dict[str, Any]:
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputMismatchError(
            "a prompt is text, several texts, token ids [batch, pos], or inputs by name."
        )
    if tokenizer is None:
        raise InputMismatchError(
            "the prompt is text, and there is no tokenizer to read it: give one, `generate(..., "
            "tokenizer=...)`, or token ids."
        )
    found = [token_ids(tokenizer, text) for text in texts]
    length, pad = max(map(len, found)), tokenizer.pad_token_id
    if pad is None and any(len(ids) < length for ids in found):
        raise InputMismatchError(
            "the prompts have different lengths, and the tokenizer has no token to pad with: set "
            "`tokenizer.pad_token = tokenizer.eos_token`, or give one prompt at a time."
        )
    # What is written goes on from the end of each prompt: the padding stands in front, but for an encoder.
    is_read = encoder_of(model.module) is not None
    gaps = [(0, length - len(ids)) if is_read else (length - len(ids), 0) for ids in found]
    rows = [(own, before, behind) for own, (before, behind) in zip(found, gaps, strict=True)]
    ids = torch.tensor([[pad] * before + list(own) + [pad] * behind for own, before, behind in rows])
    mask = torch.tensor([[0] * before + [1] * len(own) + [0] * behind for own, before, behind in rows])
    device = next(iter(model.module.parameters())).device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _pairs(patches: Patches) -> list[tuple[PlaceLike, Any]]:
    if not has_items(patches):
        raise PatchError(
            f"patches are pairs (place, value), or a mapping of places, not {describe(patches)}."
        )
    found: list[Any] = list(patches.items()) if isinstance(patches, Mapping) else list(patches)
    for one in found:
        if not isinstance(one, tuple) or len(one) != 2:
            raise PatchError(
                f"patches are pairs (place, value), or a mapping of places; {describe(one)} is none."
            )
    return [(one, value) for at, value in found for one in (at if isinstance(at, Places) else (at,))]


def _places(read: Any) -> list[Place]:
    """The places that are read: one, several layers of one, or a list of these."""
    listed = read if isinstance(read, list | tuple) and not _is_pair(read) else [read]
    return [place for at in listed for place in (at if isinstance(at, Places) else (as_place(at),))]


def _is_pair(given: Any) -> bool:
    """True for a place that is written as a kind and its layer."""
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int)


def step_patch(
    model: Captured, place: Place, value: Any, *, is_new: bool, when: When | None = None
) -> StepPatch:
    """A patch of a model that writes. Raises PatchError where it is not said what stands where."""
    found = model.locate(place)
    if found.result is not None or "pos" not in found.view.axes:
        raise PatchError(
            f"{place} cannot be patched while the model writes: "
            + (
                "it is computed from z, and no hook on the module shows it. Patch z."
                if found.result is not None
                else f"it has no positions; its axes are {', '.join(found.view.axes)}."
            )
        )
    pos = place.part.get("pos")
    bounds = (
        (pos.start, pos.stop, pos.step) if isinstance(pos, slice) else (pos,) if isinstance(pos, int) else pos
    )
    if any(bound is not None and bound < 0 for bound in bounds or ()):
        raise PatchError(
            f"{place}: positions count from 0 here, because the sequence grows while the model writes: -1 "
            "would be another position in each step. For what is written, leave out pos and say "
            "pos='new'."
        )
    return StepPatch(place, found, _value(model, place, found, value), is_new=is_new, when=when)


def expect_reached(place: Place, count: int) -> None:
    """Raise PatchError where a place names positions that none of so many is."""
    pos = place.part.get("pos")
    first = pos.start if isinstance(pos, slice) else pos if isinstance(pos, int | None) else max(pos)
    if first is not None and first >= count:
        raise PatchError(
            f"{place}: the model computes at most {count} positions here, from 0 to {count - 1}: those of "
            "the prompt and of what is written, but for the last token. Name one of them, or write more."
        )


def as_shown(model: Captured, patch: StepPatch) -> StepPatch:
    """The patch of a value that the module shows in another shape: with a dimension for each of its axes."""
    found = _as_shown(model, patch.place, patch.found)
    return StepPatch(patch.place, found, patch.value, is_new=patch.is_new, when=patch.when)


def _as_shown(model: Captured, place: Place, found: Located) -> Located:
    view, known = found.view, model.program.dimensions
    axes = tuple(axis for packed in view.packing for axis in packed)
    shape = model.program.shapes[reshaped(model.program, found.node) or ""] or ()
    symbols = {"batch": known.batch, "pos": known.positions}
    if len(shape) != len(axes) or any(
        str(size) not in symbols[axis] for axis, size in zip(axes, shape, strict=True) if axis in symbols
    ):
        raise _unshown(model, place)
    return replace(found, view=View(view.axes, tuple((axis,) for axis in axes), {}))


def _value(model: Captured, place: Place, found: Located, value: Any) -> Any:
    """A function of what would have been there, or a tensor for the positions that the place names."""
    if isinstance(value, str) and value == "zero":
        return torch.zeros_like
    if isinstance(value, Intervention) and value.described[:1] == ("add",):
        return value.part(place, NO_RUN)
    if isinstance(value, Reading):
        model.expect_own(f"the patch at {place} comes from a run", value.model)
        part = value.read(place)
        value.check(model.weights.contents())
        return _fixed(place, found, part)
    if isinstance(value, Tensor):
        return _fixed(place, found, copy_of(value))
    if callable(value):
        return value
    shown = value.name if isinstance(value, Intervention) else describe(value)
    raise PatchError(
        f"cannot patch {place} with {shown} while the model writes. A patch is `cw.add(...)`, 'zero', a "
        "function of what would have been there, or, at positions that the place names, a tensor or another "
        "run."
    )


NO_RUN: Any = None
"""The run that `cw.add` reads: none."""


def _fixed(place: Place, found: Located, value: Tensor) -> Tensor:
    """A value for the positions that a place names. Raises PatchError where it names none, or others."""
    pos = place.part.get("pos")
    if pos is None or (isinstance(pos, slice) and pos.stop is None):
        raise PatchError(
            f"{place} has more positions with every token that is written, and the value is for "
            f"{tuple(value.shape)}: say at which it is meant, as in `site({place.name!r}, ..., pos=3)`, or "
            "give a function."
        )
    axes = found.part_axes
    if value.ndim != len(axes):
        raise PatchError(
            f"the value for {place} has shape {tuple(value.shape)}; the place has the axes "
            f"({', '.join(axes)})."
        )
    if not isinstance(pos, int):
        count = len(range(pos.stop)[pos]) if isinstance(pos, slice) else len(pos)
        if value.shape[axes.index("pos")] != count:
            raise PatchError(
                f"the value for {place} has {value.shape[axes.index('pos')]} positions, and the place names "
                f"{count}."
            )
    return value


def hooks_for(model: Captured, places: Mapping[str, Place], *, is_read: bool = False) -> dict[str, Hook]:
    """Find the hooks at which the module shows places, by node: once, on the example; they are kept.

    What `is_read` only need not be where a change of it reaches all who read it.
    """
    known: dict[str, Hook] = vars(model).setdefault("_read_hooks" if is_read else "_hooks", {})
    wanted = [node for node in places if node not in known]
    if wanted:
        example = model.signature.example
        inputs = model.signature.bind(example.args, example.kwargs)
        with torch.no_grad():
            values = stream(model.graph, run_sources(model.program, inputs), wanted)
        module = HookedModule(model.module, model.program, model.signature)
        found = module.find(values, inputs)
        if is_read and (rest := {node: one for node, one in values.items() if node not in found}):
            found |= module.find(rest, inputs, dict.fromkeys(rest, ()))
        known |= {node: hook for node, hook in found.items() if hook.way is not None}
    for node, place in places.items():
        if node not in known:
            raise _unshown(model, place)
    return {node: known[node] for node in places}


def _unshown(model: Captured, place: Place) -> PatchError:
    """The error for a place that no hook on the module can change."""
    why = next((f" ({one.unhooked})" for one in model.splices.values() if one.unhooked), "")
    return PatchError(
        f"{place} cannot be patched while the model writes: no module of {model.name} shows it, all of it "
        f"and nothing else{why}, so that no hook can change it. Choose a place that goes into a module or "
        "comes out of one, such as resid_post, mlp_out, attn_out, z."
    )

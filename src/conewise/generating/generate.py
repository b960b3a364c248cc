"""Steering while a model writes: the module's own `generate`, with patches at places of a captured model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from conewise.checks.hooking import HookedModule, Spot
from conewise.errors import CaptureError, InputMismatchError, PatchError, describe
from conewise.generating.steps import StepPatch, Steps
from conewise.locations.located import Located
from conewise.locations.places import Place, PlaceLike, as_place
from conewise.program.build import run_sources
from conewise.program.streaming import stream
from conewise.program.tensors import copy_of, zeros_like
from conewise.runs.captured import Captured
from conewise.runs.interventions.interventions import Intervention
from conewise.runs.reading import Reading
from conewise.texts.tokenizing import token_ids

Prompt = str | Sequence[str] | Tensor | Mapping[str, Any]
Patches = Mapping[PlaceLike, Any] | Iterable[tuple[PlaceLike, Any]]
Positions = Literal["all", "new"]


@dataclass(frozen=True, slots=True)
class Written:
    """What a model wrote: `ids` are the prompts and what follows them, `new` are the tokens that follow.

    `texts` are those tokens as text, one for each row, where there was a tokenizer; else None. `returned` is
    what the module's own `generate` returned.
    """

    ids: Tensor
    prompt: int
    texts: tuple[str, ...] | None
    returned: Any

    @property
    def new(self) -> Tensor:
        """The tokens that were written: [row, token]."""
        return self.ids[:, self.prompt :]

    @property
    def text(self) -> str:
        """The text that was written, where there is one row."""
        if self.texts is None or len(self.texts) != 1:
            why = (
                "there is no tokenizer"
                if self.texts is None
                else f"there are {len(self.texts)} of them, `texts`"
            )
            raise InputMismatchError(f"no single text was written: {why}.")
        return self.texts[0]

    def __str__(self) -> str:
        return "\n".join(self.texts) if self.texts is not None else str(self.new.tolist())


def generate(
    model: Captured,
    prompt: Prompt,
    n: int,
    patches: Patches,
    positions: Positions,
    tokenizer: Any,
    options: Any,
) -> Written:
    """Write up to `n` tokens behind a prompt, with patches; see `Model.generate`."""
    module: Any = model.module
    if not callable(getattr(module, "generate", None)):
        raise CaptureError(
            f"{model.name} has no `generate` of its own, as Hugging Face's language models have. Write a "
            "loop over `model.run(...)`, and patch a fork of each run."
        )
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise CaptureError(
            f"{model.name} reads with an encoder and writes with a decoder: which positions a patch is meant "
            "for is not defined there. Patch runs of it: `model.run(...).fork()`."
        )
    if n < 1:
        raise InputMismatchError(f"n={n}: give how many tokens to write at most, 1 or more.")
    if positions not in {"all", "new"}:
        raise PatchError(f"positions is 'all' (the prompt and what is written) or 'new', not {positions!r}.")
    given = _inputs(model, prompt, tokenizer)
    length = int(given["input_ids"].shape[1])
    steps = Steps(module, model.program, length)
    made = [_patch(model, place, value, is_new=positions == "new") for place, value in _pairs(patches)]
    spots = _spots(model, made)
    by_spot: dict[Spot, list[StepPatch]] = {}
    for patch in made:
        by_spot.setdefault(spots[patch.found.node], []).append(patch)
    with steps.patched(by_spot):
        returned = module.generate(**given, **{**_defaults(module), **options, "max_new_tokens": n})
    ids = returned if isinstance(returned, Tensor) else returned.sequences
    texts = None
    if tokenizer is not None:
        texts = tuple(tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True))
    return Written(ids, length, texts, returned)


def _defaults(module: Any) -> dict[str, Any]:
    """Greedy; and a token to pad with where the model names none, which `generate` would say each time."""
    config = getattr(module, "generation_config", None)
    found: dict[str, Any] = {"do_sample": False}
    end = getattr(config, "eos_token_id", None)
    if getattr(config, "pad_token_id", None) is None and end is not None:
        found["pad_token_id"] = end[0] if isinstance(end, list | tuple) else end
    return found


def _inputs(model: Captured, prompt: Prompt, tokenizer: Any) -> dict[str, Any]:
    """The prompt as the module's `generate` takes it: token ids, and a mask."""
    if isinstance(prompt, Tensor):
        given: dict[str, Any] = {"input_ids": prompt}
    elif isinstance(prompt, Mapping):
        given = dict(prompt)
    else:
        given = _tokens(model, [prompt] if isinstance(prompt, str) else list(prompt), tokenizer)
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise InputMismatchError(
            f"a prompt is text, token ids [batch, pos], or inputs with `input_ids`; {describe(ids)} was "
            "given."
        )
    return {"attention_mask": torch.ones_like(ids), **given}


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
    # What is written goes on from the end of each prompt: the padding stands in front.
    missing = [length - len(ids) for ids in found]
    ids = torch.tensor([[pad] * gap + list(own) for gap, own in zip(missing, found, strict=True)])
    mask = torch.tensor([[0] * gap + [1] * (length - gap) for gap in missing])
    device = next(iter(model.module.parameters())).device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _pairs(patches: Patches) -> list[tuple[PlaceLike, Any]]:
    found: list[Any] = list(patches.items()) if isinstance(patches, Mapping) else list(patches)
    for one in found:
        if not isinstance(one, tuple) or len(one) != 2:
            raise PatchError(
                f"patches are pairs (place, value), or a mapping of places; {describe(one)} is none."
            )
    return found


def _patch(model: Captured, at: PlaceLike, value: Any, *, is_new: bool) -> StepPatch:
    """A patch of a model that writes. Raises PatchError where it is not said what stands where."""
    place = as_place(at)
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
            "positions='new'."
        )
    return StepPatch(place, found, _value(model, place, found, value), is_new)


def _value(model: Captured, place: Place, found: Located, value: Any) -> Any:
    """A function of what would have been there, or a tensor for the positions that the place names."""
    if isinstance(value, str) and value == "zero":
        return zeros_like
    if isinstance(value, Intervention) and value.described[:1] == ("add",):
        return value.part(place, _NO_RUN)
    if isinstance(value, Reading):
        if value.model is not model:
            raise PatchError(f"the patch at {place} comes from a run of another model ({value.model.name}).")
        return _fixed(place, found, value.read(place))
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


_NO_RUN: Any = None
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


def _spots(model: Captured, patches: Sequence[StepPatch]) -> dict[str, Spot]:
    """Where the module shows the nodes that are patched: found once, on the example, and kept."""
    known: dict[str, Spot] = vars(model).setdefault("_spots", {})
    wanted = [node for node in dict.fromkeys(patch.found.node for patch in patches) if node not in known]
    if wanted:
        example = model.signature.example
        inputs = model.signature.bind(example.args, example.kwargs)
        with torch.no_grad():
            values = stream(model.graph, run_sources(model.program, inputs), wanted)
        module = HookedModule(model.module, model.program, model.signature)
        known |= module.spots(module.find(values, inputs), inputs)
    for patch in patches:
        if patch.found.node not in known:
            why = next((f" ({one.unhooked})" for one in model.splices.values() if one.unhooked), "")
            raise PatchError(
                f"{patch.place} cannot be patched while the model writes: no module of {model.name} shows "
                f"it, all of it and nothing else{why}, so that no hook can change it. Choose a place that "
                "goes into a module or comes out of one, such as resid_post, mlp_out, attn_out, z."
            )
    return {patch.found.node: known[patch.found.node] for patch in patches}

"""A model that writes under patches, against full forwards under the same patches, token by token."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.anatomy.places import as_place
from conewise.errors import (
    CaptureError,
    InexactCaptureWarning,
    InputMismatchError,
    ModuleChangedError,
    NoEffectWarning,
    PatchError,
    WeightsChangedError,
)
from conewise.model import Model
from tests.program.small_llama import small_llama, small_tokenizer
from tests.runs.small_dictionary import Autoencoder
from tests.runs.state import assert_untouched, state_of
from tests.sweeps import small
from tests.sweeps.captured import small as zoo

COUNT, PROMPT = 6, 5
ENDLESS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}


@cache
def model() -> Model:
    return small.model()


@cache
def spliced() -> Model:
    return model().splice(("resid_pre", 1), Autoencoder(16, 40))


def prompts(vocabulary: int = small.VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (2, PROMPT), generator=torch.Generator().manual_seed(3))


def vector(width: int) -> Tensor:
    return 4 * torch.randn(width, generator=torch.Generator().manual_seed(0))


def by_forwards(
    captured: Model, ids: Tensor, patches: Any, positions: str = "all", count: int = COUNT
) -> Tensor:
    """The same tokens, each by a full forward of all before it, patched."""
    length = ids.shape[1]
    for _ in range(count):
        with captured.run(input_ids=ids).fork() as world, warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)
            for at, value in patches:
                place = as_place(at)
                part = dict(place.part)
                if positions == "new" and "pos" not in part:
                    if ids.shape[1] == length:
                        continue
                    part["pos"] = slice(length, None)
                if isinstance(part.get("pos"), tuple):
                    part["pos"] = [pos for pos in part["pos"] if pos < ids.shape[1]]  # type: ignore[union-attr]
                world.patch(cw.site(place.name, layer=place.layer, **part), value)  # type: ignore[call-overload]
            ids = torch.cat([ids, world.logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


def patches_of(width: int) -> dict[str, list[Any]]:
    steer = vector(width)
    return {
        "steered": [(("resid_post", 0), lambda part: part + steer)],
        "several": [(("mlp_out", 0), torch.zeros_like), (("z", 1), lambda part: part * -3)],
        "a head": [(cw.site("z", layer=0, head=1), lambda part: part * -5)],
        "some positions": [(cw.site("resid_post", layer=0, pos=[3, 6, 7]), lambda part: part + 9 * steer)],
        "one position": [(cw.site("resid_post", layer=0, pos=2), lambda part: part + 9 * steer)],
        "from a position on": [
            (cw.site("resid_post", layer=0, pos=slice(4, None)), lambda part: part + steer)
        ],
    }


@pytest.mark.parametrize("positions", ["all", "new"])
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_what_is_written_is_what_patched_full_forwards_write(name: str, positions: Any) -> None:
    captured = model() if name == "gpt2" else zoo("llama")
    ids, plain = prompts(), None
    changed = 0
    for patches in patches_of(16 if name == "gpt2" else 64).values():
        found = captured.generate(ids, COUNT, patches, pos=positions, **ENDLESS)
        assert torch.equal(found.ids, by_forwards(captured, ids, patches, positions))
        assert torch.equal(found.new, found.ids[:, PROMPT:])
        plain = captured.generate(ids, COUNT, **ENDLESS).ids if plain is None else plain
        changed += not torch.equal(found.ids, plain)
    assert changed >= 4


@pytest.mark.parametrize("positions", ["all", "new"])
def test_a_stream_that_the_module_shows_in_another_shape_is_steered(positions: Any) -> None:
    captured, ids = zoo("opt"), prompts()
    width = captured.module.config.hidden_size
    ways: list[list[tuple[Any, Any]]] = [
        [(("resid_post", 1), cw.add(vector(width)))],
        [(cw.site("resid_post", layer=0, pos=3), "zero"), (("resid_post", 2), lambda value: value * -2)],
    ]
    for patches in ways:
        written = captured.generate(ids, COUNT, patches, pos=positions, **ENDLESS)
        assert torch.equal(written.ids, by_forwards(captured, ids, patches, positions))
    base, source = captured.run(input_ids=ids), captured.run(input_ids=ids.flip(1))
    sites = cw.sites("resid_post", layer=":", pos=-1)
    check = captured.sweep(sites, base=base, source=source, metric=cw.logit_diff(1, 2)).run().verify()
    assert (check.ok, check.hooked) == (True, 3)


def test_no_patch_is_the_modules_own_generate_and_its_options_pass_through() -> None:
    ids, module = prompts(), model().module
    for options in (
        {"do_sample": True, "top_k": 5},
        {"num_beams": 3},
        {"use_cache": False},
        {"min_length": 8},
    ):
        torch.manual_seed(0)
        found = model().generate(ids, COUNT, **ENDLESS, **options)
        torch.manual_seed(0)
        wanted = module.generate(
            ids,
            max_new_tokens=COUNT,
            **{"do_sample": False, **ENDLESS, **options},
            attention_mask=torch.ones_like(ids),
        )
        assert torch.equal(found.ids, wanted)
        assert found.texts is None


def test_with_and_without_the_cache_and_by_beams_the_same_is_written() -> None:
    ids, patches = prompts(), patches_of(16)["steered"]
    found = model().generate(ids, COUNT, patches, **ENDLESS)
    assert torch.equal(found.ids, model().generate(ids, COUNT, patches, use_cache=False, **ENDLESS).ids)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(found.ids, model().generate(given, COUNT, dict(patches), **ENDLESS).ids)
    run = model().run(input_ids=prompts())
    fixed = [(cw.site("resid_post", layer=0, pos=[1, 2]), run["resid_post", 0][:, 1:3] + vector(16))]
    one = model().generate(ids, COUNT, fixed, num_beams=2, **ENDLESS)
    place, value = fixed[0]
    rows = [
        model().generate(ids[row], COUNT, [(place, value[row])], num_beams=2, **ENDLESS).ids
        for row in (slice(0, 1), slice(1, 2))
    ]
    assert torch.equal(one.ids, torch.cat(rows))


def test_values_of_another_run_and_vectors() -> None:
    ids = prompts()
    other = model().run(input_ids=ids.flip(0))
    place = cw.site("resid_post", layer=0, pos=[0, 4])
    expected = by_forwards(model(), ids, [(place, other[place])])
    assert torch.equal(model().generate(ids, COUNT, [(place, other)], **ENDLESS).ids, expected)
    assert torch.equal(model().generate(ids, COUNT, [(place, other[place])], **ENDLESS).ids, expected)
    steer = vector(16)
    added = model().generate(ids, COUNT, [(("resid_post", 0), cw.add(steer, 2.0))], **ENDLESS)
    assert torch.equal(
        added.ids, by_forwards(model(), ids, [(("resid_post", 0), lambda part: part + 2.0 * steer)])
    )
    zero = model().generate(ids, COUNT, [(("mlp_out", 0), "zero")], **ENDLESS)
    assert torch.equal(zero.ids, by_forwards(model(), ids, [(("mlp_out", 0), "zero")]))


@pytest.mark.parametrize("positions", ["all", "new"])
def test_latents_are_steered_while_it_writes(positions: Any) -> None:
    ids, captured = prompts(), spliced()
    assert torch.equal(
        captured.generate(ids, COUNT, **ENDLESS).ids, model().generate(ids, COUNT, **ENDLESS).ids
    )
    patches: list[Any] = [(cw.site("sae.latents", latent=[1, 5]), lambda part: part + 20)]
    found = captured.generate(ids, COUNT, patches, pos=positions, **ENDLESS)
    assert torch.equal(found.ids, by_forwards(captured, ids, patches, positions))
    assert not torch.equal(found.ids, model().generate(ids, COUNT, **ENDLESS).ids)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_on_the_module_whatever_ends_it(error: type[BaseException]) -> None:
    module = model().module
    before, calls = state_of(module), []

    def failing(part: Tensor) -> Tensor:
        calls.append(part)
        if len(calls) == 3:
            raise error
        return part

    with pytest.raises(error):
        model().generate(prompts(), COUNT, [(("resid_post", 0), failing), (("z", 1), "zero")], **ENDLESS)
    assert_untouched(module, before)
    model().generate(prompts(), 2, [(("resid_post", 0), "zero")], **ENDLESS)
    assert_untouched(module, before)


def test_prompts_are_texts_where_there_is_a_tokenizer() -> None:
    loaded = cw.load("tiny")
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    captured = cw.capture(loaded.module, input_ids=ids)
    found = captured.generate(TEXT, 5, tokenizer=loaded.tokenizer, eos_token_id=None)
    assert torch.equal(found.ids, captured.generate(ids, 5, eos_token_id=None).ids)
    assert found.text == str(found) == loaded.tokenizer.decode(found.new[0], skip_special_tokens=True)
    two = captured.generate([TEXT, f"So {TEXT}"], 5, tokenizer=loaded.tokenizer, eos_token_id=None)
    assert two.texts is not None
    assert len(two.texts) == 2
    with pytest.raises(InputMismatchError, match=r"there are 2 of them"):
        _ = two.text
    with pytest.raises(InputMismatchError, match="there is no tokenizer to read it"):
        model().generate(TEXT, 5)


TEXT = "When Mary and John went to the store, John gave a drink to"


def test_what_cannot_be_done_is_refused_before_anything_is_written() -> None:
    ids, run = prompts(), model().run(input_ids=prompts())

    def refused(
        error: type[Exception], message: str, patches: Any = (), prompt: Any = ids, n: int = 2, **how: Any
    ) -> None:
        with pytest.raises(error, match=message):
            model().generate(prompt, n, patches, **how)

    refused(PatchError, "positions count from 0", [(cw.site("resid_post", layer=0, pos=-1), "zero")])
    refused(
        PatchError, "positions count from 0", [(cw.site("resid_post", layer=0, pos=slice(-2, None)), "zero")]
    )
    mask = torch.ones_like(ids)
    refused(InputMismatchError, "does not take foo=.*not used by the model", foo=1)
    refused(InputMismatchError, "'attention_mask' is part of the prompt, and an option too",
            prompt={"input_ids": ids, "attention_mask": mask}, attention_mask=mask)  # fmt: skip
    refused(InputMismatchError, "'input_ids' is part of the prompt, and an option too", input_ids=ids)
    refused(InputMismatchError, "`attention_mask` is int 3; expected a tensor of shape", attention_mask=3)
    refused(InputMismatchError, "`attention_mask` is Tensor of shape", attention_mask=mask[:, :2])
    refused(InputMismatchError, "there is no tokenizer: give one", stop_strings=["a"])
    refused(PatchError, "more positions with every token", [(("resid_post", 0), run)])
    refused(PatchError, "more positions with every token", [(("resid_post", 0), torch.ones(2, 5, 16))])
    refused(PatchError, "has 3 positions, and the place names 2",
            [(cw.site("resid_post", layer=0, pos=[0, 1]), torch.ones(2, 3, 16))])  # fmt: skip
    refused(PatchError, "has the axes", [(cw.site("resid_post", layer=0, pos=0), torch.ones(16))])
    refused(PatchError, "computed from z", [(("result", 0), "zero")])
    refused(PatchError, "no module of GPT2LMHeadModel shows it", [(("resid_mid", 0), "zero")])
    refused(PatchError, "cannot patch resid_post.* with noise", [(("resid_post", 0), cw.noise(1.0))])
    refused(PatchError, "cannot patch resid_post.* with float 3.0", [(("resid_post", 0), 3.0)])
    refused(PatchError, "another model", [(cw.site("z", layer=0, pos=0), spliced().run(input_ids=ids))])
    refused(PatchError, "patches are pairs", ["resid_post"])
    refused(PatchError, "it has to return a tensor of", [(("resid_post", 0), lambda part: None)])
    refused(PatchError, "has shape", [(("resid_post", 0), lambda part: part[:, :0])])
    refused(PatchError, "pos is 'all'", pos="some")
    refused(InputMismatchError, "n=0", n=0)
    refused(InputMismatchError, r"token ids \[batch, pos\]", prompt=ids[0])
    refused(InputMismatchError, "a prompt is text", prompt=[])
    refused(cw.ConewiseError, "no site", [("resid_poost", "zero")])
    plain = cw.capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4))
    with pytest.raises(CaptureError, match="has no `generate` of its own"):
        plain.generate(ids, 2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "'transformer.h.0.mlp.c_proj.weight' .*another kind of tensor": lambda part: part.c_proj.double(),
    "was replaced by another tensor": lambda part: setattr(
        part.c_proj, "weight", nn.Parameter(part.c_proj.weight.detach() * 2)
    ),
    "a forward hook on 'transformer.h.0.mlp' was added": lambda part: part.register_forward_hook(
        lambda _, __, out: out * 2
    ),
    "act": lambda part: setattr(part, "act", nn.Tanh()),
}


@pytest.mark.parametrize("said", list(CHANGES))
def test_a_module_that_was_changed_after_the_capture_writes_nothing(said: str) -> None:
    own = small.model()
    CHANGES[said](own.module.transformer.h[0].mlp)
    with pytest.raises((WeightsChangedError, ModuleChangedError), match=said):
        own.generate(prompts(), 2)


def test_a_patch_from_a_run_with_other_weights_is_refused() -> None:
    own = small.model()
    run = own.run(input_ids=prompts())
    own.module.transformer.h[0].mlp.c_proj.weight.data.mul_(2)
    with pytest.raises(WeightsChangedError, match=r"after this run: 'transformer.h.0.mlp.c_proj.weight'"):
        own.generate(prompts(), 2, patches=[(cw.site("mlp_out", layer=1, pos=2), run)])


def test_dtypes_that_do_not_go_together_are_named() -> None:
    module = small.module()
    module.transformer.ln_f.double()
    with pytest.warns(InexactCaptureWarning):
        own = cw.capture(module, input_ids=prompts())
    with pytest.raises(
        CaptureError, match=r"several dtypes \(.*float32, .*ln_f.bias torch.float64\).*to one"
    ):
        own.generate(prompts(), 2)


def test_stop_strings_end_the_text_and_a_mask_may_stand_beside_the_ids() -> None:
    ids = torch.tensor([[1, 2, 5]])
    llama = cw.capture(small_llama(), input_ids=ids, tokenizer=small_tokenizer())
    whole = llama.generate(ids, 8)
    cut = llama.generate(ids, 8, stop_strings=[whole.text[2:4]])
    assert cut.new.shape[1] < whole.new.shape[1]
    assert torch.equal(cut.new, whole.new[:, : cut.new.shape[1]])
    masked = llama.generate(ids, 3, attention_mask=torch.ones_like(ids)).ids
    assert torch.equal(masked, whole.ids[:, : masked.shape[1]])
    assert torch.equal(llama.generate(ids, 8, use_cache=False).ids, whole.ids)

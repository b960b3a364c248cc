"""Dictionaries spliced into captured models, against the same dictionaries put there by hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conewise as cw
from conewise.errors import (
    DictionaryError,
    EdgeError,
    MissingSiteError,
    ModuleChangedError,
    NoEffectWarning,
    UnhookedWarning,
    WeightsChangedError,
)
from conewise.model import Model
from tests.runs.small_dictionary import Autoencoder, by_hand
from tests.runs.state import assert_untouched, state_of
from tests.sweeps import small
from tests.sweeps.captured import inputs
from tests.sweeps.captured import small as zoo

D, LATENTS = 16, 40
PLACE = ("resid_post", 0)
METRIC = cw.logit_diff(answer=7, wrong=9)


@cache
def plain() -> Model:
    return small.model()


@cache
def spliced() -> Model:
    return plain().splice(PLACE, Autoencoder(D, LATENTS))


def logits(module: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(input_ids=ids, use_cache=False).logits
    return found


def test_the_outputs_are_those_without_the_dictionary_bit_for_bit() -> None:
    ids = small.prompts(1, 3)
    assert torch.equal(spliced().run(input_ids=ids).logits, plain().run(input_ids=ids).logits)
    assert torch.equal(logits(spliced().module, ids), logits(plain().module, ids))
    known = spliced().splices["sae"]
    assert (known.deviation, known.latents, known.unhooked) == (0.0, LATENTS, "")
    assert known.missed > 0
    assert spliced().fidelity.bitwise
    assert spliced().verify()


def test_the_model_and_its_module_stay_as_they_are() -> None:
    module = small.module()
    model = cw.capture(module, input_ids=small.prompts(0, 2))
    before, sites, records = state_of(module), len(model.sites), len(model.program.records)
    dictionary = Autoencoder(D, LATENTS)
    own = state_of(dictionary)
    made = model.splice(PLACE, dictionary)
    made.sweep(
        "sae.latents", base=made.run(input_ids=small.prompts(1)), source="zero", metric=METRIC
    ).run().verify()
    assert_untouched(module, before)
    assert_untouched(dictionary, own)
    assert (len(model.sites), len(model.program.records), dict(model.splices)) == (sites, records, {})
    with pytest.raises(MissingSiteError):
        model.locate("sae.latents")
    assert made.module is not module
    assert all(
        one is other for one, other in zip(module.parameters(), made.module.parameters(), strict=False)
    )


@pytest.mark.parametrize("at", [None, 2, -1])
def test_a_patched_latent_is_what_a_hook_by_hand_makes_of_it(at: int | None) -> None:
    model, ids = spliced(), small.prompts(1, 2)
    dictionary = Autoencoder(D, LATENTS)
    base, other = model.run(input_ids=ids), model.run(input_ids=small.prompts(2, 2))
    where: dict[str, Any] = {} if at is None else {"pos": at}
    rows: Any = slice(None) if at is None else at
    for value, change in _changes(other["sae.latents"]).values():

        def by_latent(latents: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            latents[:, rows, 3] = change(latents)[:, rows, 3]
            return latents

        with base.fork() as world, by_hand(plain().module, "transformer.h.0", dictionary, by_latent):
            world.patch(cw.site("sae.latents", latent=3, **where), other if value is None else value)
            assert torch.allclose(world.logits, logits(plain().module, ids), rtol=0, atol=1e-6)
            assert not torch.equal(world.logits, base.logits)


def _changes(other: Tensor) -> dict[str, tuple[Any, Callable[[Tensor], Tensor]]]:
    return {
        "ablated": ("zero", torch.zeros_like),
        "steered": (lambda part: part + 3, lambda latents: latents + 3),
        "patched": (None, lambda _: other),
    }


def test_the_error_term_is_of_the_latents_as_encoded() -> None:
    """One that is computed from the patched latents takes back what the patch did."""
    model, ids = spliced(), small.prompts(1, 2)
    base = model.run(input_ids=ids)
    with base.fork() as world:
        world.patch("sae.latents", "zero")
        for name in ("sae.error", "sae.input"):
            with pytest.warns(NoEffectWarning):
                assert torch.equal(world[name], base[name])
        moved = world["sae.output"] - base["sae.output"]
        assert torch.allclose(moved, world["sae.reconstruction"] - base["sae.reconstruction"], atol=1e-6)
        assert float(moved.norm()) > 1
        # What was called the value at the place is what the rest of the model reads.
        names: list[Any] = [
            PLACE,
            ("resid_pre", 1),
            "transformer.h.0",
            "transformer.h.1.input",
            "blocks.0.hook_resid_post",
        ]
        for place in names:
            assert torch.equal(world[place], world["sae.output"])
    with (
        base.fork() as world,
        by_hand(plain().module, "transformer.h.0", Autoencoder(D, LATENTS), change_error=torch.zeros_like),
    ):
        world.patch("sae.error", "zero")
        assert torch.allclose(world["sae.output"], base["sae.reconstruction"], atol=1e-5)
        assert torch.allclose(world.logits, logits(plain().module, ids), atol=1e-5)


def test_all_latents_are_swept_at_once_and_one_by_one() -> None:
    model = spliced()
    base, source = (model.run(input_ids=small.prompts(seed, 2)) for seed in (1, 2))
    sites = cw.sites("sae.latents", latent=":", pos=":")
    sweep = model.sweep(sites, base=base, source=source, metric=METRIC)
    assert "wavefront" in str(sweep.plan())
    result = sweep.run()
    assert result.spreads[0].axes == ("pos", "latent")
    assert result.values.shape == (small.LENGTH, LATENTS)
    serial = sweep.run(evaluator="serial")
    assert torch.allclose(result.values, serial.values, atol=1e-6)
    checked = result.verify(30)
    assert checked.passed
    assert checked.hooked == 30
    assert serial.verify(10).largest_deviation == 0


def test_active_latents_are_those_that_are_not_zero() -> None:
    model = spliced()
    base = model.run(input_ids=small.prompts(1, 2))
    latents = base["sae.latents"]
    found = model.active("sae", base)
    assert sorted(found) == latents.flatten(0, 1).amax(0).nonzero().flatten().tolist()
    strengths = [float(latents[..., one].max()) for one in found]
    assert strengths == sorted(strengths, reverse=True)
    assert model.active("sae", base, top=3) == found[:3]
    assert set(model.active("sae", base, pos=-1)) == set(latents[:, -1].amax(0).nonzero().flatten().tolist())
    result = model.sweep(
        cw.sites("sae.latents", latent=found[:5]), base=base, source="zero", metric=METRIC
    ).run()
    assert result.spreads[0].coordinates == (found[:5],)


@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_other_architectures(name: str) -> None:
    """With grouped queries; with norms behind the sums."""
    model = zoo(name)
    dictionary = Autoencoder(64, 24, top=6)
    made = model.splice(("mlp_out", 1), dictionary)
    base, source = (made.run(**inputs(name, seed=seed)) for seed in (1, 2))
    assert torch.equal(base.logits, model.run(**inputs(name)).logits)
    result = made.sweep(
        cw.sites("sae.latents", latent=":") + cw.sites("sae.latents", latent=[1, 2], pos=":") + ["sae.error"],
        base=base,
        source=source,
        metric=lambda outputs: outputs.logits[:, -1, 3] - outputs.logits[:, -1, 5],
    ).run(verify=6)
    checked = result.verify(20)
    assert checked.passed
    assert checked.hooked == 20


def test_a_transcoder_reads_one_place_and_writes_another() -> None:
    dictionary, ids = Autoencoder(D, LATENTS, seed=1), small.prompts(1, 2)
    model = plain().splice(("mlp_out", 0), dictionary, reads="transformer.h.0.mlp.input", name="tc")
    base, source = model.run(input_ids=ids), model.run(input_ids=small.prompts(2, 2))
    assert torch.equal(base.logits, plain().run(input_ids=ids).logits)
    assert torch.equal(base["tc.latents"], dictionary.encode(base["transformer.h.0.mlp.input"]))
    with (
        base.fork() as world,
        by_hand(
            plain().module,
            "transformer.h.0.mlp",
            dictionary,
            lambda latents: latents * 2,
            read="transformer.h.0.mlp",
        ),
    ):
        world.patch("tc.latents", lambda latents: latents * 2)
        assert torch.allclose(world.logits, logits(plain().module, ids), rtol=0, atol=1e-6)
    # What is read is patched too: the transcoder has to see it, and so has the hook that checks it.
    sites: list[Any] = [
        "transformer.h.0.ln_2",
        "tc.input",
        "tc.error",
        cw.site("tc.latents", latent=2, pos=-1),
        ("z", 0),
    ]
    checked = model.sweep(sites, base=base, source=source, metric=METRIC).run().verify(5)
    assert checked.passed
    assert checked.hooked == 5


def test_there_may_be_a_dictionary_in_every_layer() -> None:
    model = spliced()
    for layer, name in ((1, "last"), (0, "mlp")):
        model = model.splice(
            ("resid_post" if layer else "mlp_out", layer), Autoencoder(D, 20, seed=layer), name=name
        )
    assert list(model.splices) == ["sae", "last", "mlp"]
    assert model.name == "GPT2LMHeadModel with sae, last, mlp"
    base = model.run(input_ids=small.prompts(1, 2))
    assert torch.equal(base.logits, plain().run(input_ids=small.prompts(1, 2)).logits)
    sites: list[Any] = [cw.sites(f"{name}.latents", latent=[0, 3, 7]) for name in model.splices]
    together: list[Any] = [[f"{name}.latents" for name in model.splices]]
    with base.fork() as world:
        world.patch("mlp.latents", "zero")
        result = model.sweep(
            [*sites, *together, ("resid_post", 0)], base=world, source="zero", metric=METRIC
        ).run()
        assert result.verify(11).passed


def test_a_place_that_no_module_shows_is_checked_by_the_program() -> None:
    model = plain().splice(("resid_mid", 0), Autoencoder(D, 20))
    assert "no module shows resid_mid" in model.splices["sae"].unhooked
    base = model.run(input_ids=small.prompts(1))
    result = model.sweep(["sae.latents", ("mlp_out", 1)], base=base, source="zero", metric=METRIC).run()
    with pytest.warns(UnhookedWarning):
        checked = result.verify(2)
    assert (checked.ok, checked.hooked, checked.interpreted) == (True, 1, 1)


def test_a_sweep_over_latents_is_stored_and_taken_up_again(tmp_path: Path) -> None:
    def swept(model: Model) -> Any:
        base, source = (model.run(input_ids=small.prompts(seed)) for seed in (1, 2))
        return model.sweep(cw.sites("sae.latents", latent=":"), base=base, source=source, metric=METRIC)

    first = swept(spliced()).run(out=tmp_path / "run")
    again = swept(plain().splice(PLACE, Autoencoder(D, LATENTS))).run(out=tmp_path / "run", resume=True)
    assert first.equals(again)
    with pytest.raises(cw.ConewiseError, match="weights"):
        swept(plain().splice(PLACE, Autoencoder(D, LATENTS, seed=1))).run(out=tmp_path / "run", resume=True)
    with pytest.raises(cw.ConewiseError):
        swept(plain().splice(("mlp_out", 0), Autoencoder(D, LATENTS))).run(out=tmp_path / "run", resume=True)
    first.save(tmp_path / "saved")
    loaded = cw.open(tmp_path / "saved")
    assert first.equals(loaded)


def test_functions_may_hold_their_weights_in_any_way() -> None:
    dictionary = Autoencoder(D, 20)
    weight, back = torch.randn(D, 20), torch.randn(20, D)
    ways: dict[str, tuple[Any, Any]] = {
        "methods": (dictionary.encode, dictionary.decode),
        "closures over a module": (lambda x: dictionary.encode(x) * 1, lambda z: dictionary.decode(z) * 1),
        "closures over tensors": (lambda x: torch.relu(x @ weight), lambda z: z @ back),
    }
    ids = small.prompts(1)
    for encode, decode in ways.values():
        model = plain().splice(PLACE, encode=encode, decode=decode)
        base = model.run(input_ids=ids)
        with torch.no_grad():
            assert torch.equal(base["sae.latents"], encode(base["sae.input"]))
        assert model.sweep("sae.latents", base=base, source="zero", metric=METRIC).run().verify(1).passed


def test_what_does_not_fit_is_refused_at_once() -> None:
    model, fits = plain(), Autoencoder(D, 20)

    def refused(message: str, place: Any = PLACE, dictionary: Any = fits, **how: Any) -> None:
        with pytest.raises(DictionaryError, match=message):
            (how.pop("model", model)).splice(place, dictionary, **how)

    refused(
        r"encode, given a tensor of shape \(3, 5, 16\).* raises RuntimeError", dictionary=Autoencoder(12, 20)
    )
    refused(
        r"decode makes shape \(3, 5, 12\) of latents of shape \(3, 5, 20\), and resid_post",
        dictionary=Autoencoder(D, 20, d_out=12),
    )
    refused(
        "encode makes Tensor of shape .* It has to return latents along the last",
        encode=lambda x: x.flatten(1),
    )
    refused("it has to return one tensor", encode=lambda x: (x, x))
    refused("encode returns something that does not depend", encode=lambda x: torch.ones(3, 5, 20))
    refused("encode cannot be captured", encode=lambda x: fits.encode(x) if x.sum() > -1 else x)
    refused(r"decode returns torch.float64 on cpu, and resid_post", decode=lambda z: fits.decode(z).double())
    refused("has the functions `encode` and `decode`", dictionary=object())
    refused("there is no decode", dictionary=None, encode=fits.encode)
    refused("a whole value", cw.site("resid_post", layer=0, pos=-1))
    refused("no single value of the model is result", ("result", 0))
    refused("torch.int64", "input_ids")
    refused("is a word", name="sae.0")
    refused("is a part of GPT2LMHeadModel already", name="transformer")
    refused("there is a dictionary 'sae' in this model already, at resid_post", model=spliced())
    refused("a transcoder reads before it writes", ("mlp_out", 0), reads=("resid_post", 1), name="tc")
    refused("finite", decode=lambda z: fits.decode(z) * torch.inf)
    with pytest.raises(MissingSiteError):
        model.splice("resid_poost", fits)
    base = spliced().run(input_ids=small.prompts(1))
    with pytest.raises(DictionaryError, match="no dictionary 'tc'"):
        spliced().active("tc", base)
    with pytest.raises(DictionaryError, match="top=0"):
        spliced().active("sae", base, top=0)
    with pytest.raises(DictionaryError, match="another model"):
        spliced().active("sae", model.run(input_ids=small.prompts(1)))


def test_a_written_weight_of_a_dictionary_is_noticed() -> None:
    dictionary = Autoencoder(D, 20)
    model = plain().splice(PLACE, dictionary)
    base = model.run(input_ids=small.prompts(1))
    with torch.no_grad():
        dictionary.w_dec[0, 0] += 1
    with pytest.raises(WeightsChangedError, match="w_dec"):
        _ = base["sae.reconstruction"]


class Remembering(Autoencoder):
    """Counts its calls and keeps its latents, as dictionaries in training do."""

    calls, scale = 0, 1.0
    latents: Tensor | None = None

    def encode(self, value: Tensor) -> Tensor:
        self.calls += 1
        self.latents = super().encode(value) * self.scale
        return self.latents


class _Halves:
    """The same as an object of no class of torch."""

    def __init__(self) -> None:
        self.inner = Remembering(D, LATENTS)
        self.encode, self.decode = self.inner.encode, self.inner.decode


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # torch's, of the export
@pytest.mark.parametrize("kind", ["module", "functions", "second"])
def test_a_dictionary_that_remembers_is_no_other_one_and_one_with_another_scale_is(kind: str) -> None:
    dictionary = Remembering(D, LATENTS) if kind != "functions" else _Halves()
    held = dictionary.inner if isinstance(dictionary, _Halves) else dictionary
    model = plain().splice(PLACE, dictionary)
    if kind == "second":
        model = model.splice(("mlp_out", 1), Autoencoder(D, LATENTS, seed=1), name="other")
    ids = small.prompts(1)
    sites = cw.sites("sae.latents", latent=[0, 1])
    for _ in range(2):  # the checks run the dictionary, which then holds something else
        result = model.sweep(sites, base={"input_ids": ids}, source="zero", metric=METRIC).run(verify=1)
        assert result.verify(1).ok
    held.scale = 2.0
    with pytest.raises(ModuleChangedError, match=r"scale: .*2\.0"):
        model.run(input_ids=ids)


SCALE = 1.0


def test_what_a_function_of_a_dictionary_reads_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Autoencoder(D, LATENTS)
    model = plain().splice(PLACE, encode=lambda value: held.encode(value) * SCALE, decode=held.decode)
    ids = small.prompts(1)
    model.run(input_ids=ids)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    with pytest.raises(ModuleChangedError, match=r"SCALE: 1\.0 → 2\.0"):
        model.run(input_ids=ids)


def test_edges_are_there_where_a_dictionary_belongs_to_an_mlp_and_are_refused_elsewhere() -> None:
    ids, other = small.prompts(1, 2), small.prompts(2, 2)
    model = plain().splice(("mlp_out", 0), Autoencoder(D, 20))
    found, wanted = (
        one.sweep(
            one.edges(), base=one.run(input_ids=ids), source=one.run(input_ids=other), metric=METRIC
        ).run()
        for one in (model, plain())
    )
    assert torch.allclose(found.values, wanted.values, rtol=0, atol=1e-6)
    base = spliced().run(input_ids=ids)
    with pytest.raises(
        EdgeError, match=r"has dictionaries in it \(sae\).* take the edges of the model before"
    ):
        spliced().edges()
    with pytest.raises(EdgeError, match="has dictionaries in it"):
        spliced().paths("a0.h0", "logits", base=base, source="zero", metric=METRIC)


def test_a_sequence_of_modules_goes_on_as_it_was() -> None:
    """Its modules are gone through in turn, and a dictionary in a copy of it is none of them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    model = cw.capture(module, torch.randn(5, 4)).splice("1", Autoencoder(6, 12))
    given = torch.randn(3, 4)
    base = model.run(given)
    with torch.no_grad():
        assert torch.equal(base.outputs, module(given))
        assert torch.equal(model.module(given), module(given))
    assert model.fidelity.bitwise
    result = model.sweep(
        cw.sites("sae.latents", latent=":"), base=base, source="zero", metric=lambda out: out[:, 0]
    ).run()
    assert result.verify(5).passed


class Chain(nn.Module):
    """Goes through whatever modules it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, value: Tensor) -> Tensor:
        for part in self.children():
            value = part(value)
        return value


def test_a_module_that_meets_the_dictionary_by_itself_is_refused() -> None:
    model = cw.capture(Chain(), torch.randn(5, 4))
    with pytest.raises(DictionaryError, match="goes through all modules in it"):
        model.splice("one", Autoencoder(4, 12))

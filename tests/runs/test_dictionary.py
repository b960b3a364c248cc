"""Dictionaries read from files in the layout of SAE Lens, against the formulas of their architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import conewise as cw
from conewise.errors import DictionaryError, UnusedWeightsWarning
from tests.sweeps import small

D, LATENTS = 16, 24


def drawn() -> dict[str, Tensor]:
    """Weights of all architectures, by the names in the file."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "W_enc": (D, LATENTS), "W_dec": (LATENTS, D), "b_dec": (D,), "W_skip": (D, D),
        **dict.fromkeys(("b_enc", "b_gate", "b_mag", "r_mag", "threshold"), (LATENTS,)),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


PLAIN = ("W_enc", "b_enc", "W_dec", "b_dec")
NAMES = {
    "standard": PLAIN,
    "topk": PLAIN,
    "jumprelu": (*PLAIN, "threshold"),
    "gated": ("W_enc", "b_gate", "b_mag", "r_mag", "W_dec", "b_dec"),
    "transcoder": PLAIN,
    "skip_transcoder": (*PLAIN, "W_skip"),
    "jumprelu_transcoder": (*PLAIN, "threshold"),
}


def written(folder: Path, architecture: str = "standard", leave_out: str = "", **settings: Any) -> Path:
    weights = drawn()
    held = {name: weights[name] for name in NAMES.get(architecture, PLAIN) if name != leave_out}
    save_file(held, folder / "sae_weights.safetensors")
    known = {"architecture": architecture, "d_in": D, "d_sae": LATENTS, "dtype": "float32", **settings}
    (folder / "cfg.json").write_text(json.dumps(known), "utf-8")
    return folder


def expected(
    architecture: str, value: Tensor, *, centred: bool, k: int = 3, rescaled: bool = False
) -> Tensor:
    """The latents, each computed by itself."""
    w = drawn()
    read = value - w["b_dec"] if centred else value
    found = torch.zeros(*value.shape[:-1], LATENTS)
    for at in torch.cartesian_prod(*(torch.arange(size) for size in value.shape[:-1])).reshape(
        -1, value.ndim - 1
    ):
        row = read[tuple(at)]
        pre = torch.stack([row @ w["W_enc"][:, i] for i in range(LATENTS)])
        if architecture == "gated":
            strength = pre * w["r_mag"].exp() + w["b_mag"]
            found[tuple(at)] = torch.where(pre + w["b_gate"] > 0, strength.clamp(min=0), 0)
            continue
        pre = pre + w["b_enc"]
        if rescaled:
            pre = pre * w["W_dec"].square().sum(1).sqrt()
        if architecture == "topk":
            kept = pre.argsort(descending=True)[:k].tolist()
            pre = torch.stack([pre[i] if i in kept else torch.tensor(0.0) for i in range(LATENTS)])
        if "jumprelu" in architecture:
            pre = torch.where(pre > w["threshold"], pre, 0)
        found[tuple(at)] = pre.clamp(min=0)
    return found


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("architecture", sorted(NAMES))
def test_latents_are_those_of_the_architecture(architecture: str, centred: bool, tmp_path: Path) -> None:
    folder = written(
        tmp_path, architecture, apply_b_dec_to_input=centred, k=3, metadata={"hook_name": "here"}
    )
    read = cw.dictionary(folder)
    value = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1))
    latents = read.encode(value)
    assert torch.allclose(latents, expected(architecture, value, centred=centred), atol=1e-5)
    assert torch.allclose(read.decode(latents), latents @ drawn()["W_dec"] + drawn()["b_dec"], atol=1e-5)
    assert torch.equal(read(value), read.decode(latents, value))
    skipped = value @ drawn()["W_skip"].T if "skip" in architecture else torch.zeros(())
    assert torch.allclose(read(value), read.decode(latents) + skipped, atol=1e-5)
    assert read.latents == LATENTS
    assert (read.reads if "transcoder" in architecture else read.place) == "here"
    assert architecture in repr(read)


def test_older_files_and_topk_by_length(tmp_path: Path) -> None:
    value = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1))
    old: dict[str, Any] = {
        "hook_point": "blocks.0.hook_resid_post",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 4},
    }
    read = cw.dictionary(written(tmp_path, **old))
    assert read.place == "blocks.0.hook_resid_post"
    assert torch.allclose(read.encode(value), expected("topk", value, centred=True, k=4), atol=1e-5)
    read = cw.dictionary(written(tmp_path, "topk", k=3, rescale_acts_by_decoder_norm=True), dtype="float64")
    latents = read.encode(value.double())
    wanted = expected("topk", value, centred=True, rescaled=True).double()
    assert torch.allclose(latents, wanted, atol=1e-4)
    lengths = drawn()["W_dec"].double().norm(dim=1)
    assert torch.allclose(
        read.decode(latents), (latents / lengths) @ drawn()["W_dec"].double() + drawn()["b_dec"]
    )
    weights = {**{name: drawn()[name] for name in PLAIN}, "log_threshold": drawn()["threshold"].abs().log()}
    written(tmp_path, "jumprelu")
    save_file(weights, tmp_path / "sae_weights.safetensors")
    assert torch.allclose(cw.dictionary(tmp_path).threshold, drawn()["threshold"].abs())


def test_a_dictionary_is_spliced_in_at_its_place(tmp_path: Path) -> None:
    read = cw.dictionary(written(tmp_path, "jumprelu", hook_name="blocks.0.hook_resid_post"))
    model = small.model()
    made = model.splice(read.place, read)
    base = made.run(input_ids=small.prompts(1))
    assert torch.equal(base.logits, model.run(input_ids=small.prompts(1)).logits)
    assert torch.equal(base["sae.latents"], read.encode(base["resid_post", 0]))
    about = {"hook_name": "transformer.h.0.ln_2", "hook_name_out": "blocks.0.hook_mlp_out"}
    coder = cw.dictionary(written(tmp_path, "skip_transcoder", metadata=about))
    made = made.splice(coder.place, coder, name="tc")
    base = made.run(input_ids=small.prompts(1))
    assert torch.equal(base.logits, model.run(input_ids=small.prompts(1)).logits)
    assert torch.equal(base["tc.latents"], coder.encode(base["transformer.h.0.ln_2"]))


def test_a_release_is_taken_from_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept = tmp_path / "models--someone--saes"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    folder = kept / "snapshots" / "abc" / "layer_0" / "width_16k"
    folder.mkdir(parents=True)
    own = cw.dictionary(written(folder, "jumprelu"))
    found = cw.dictionary("someone/saes", "layer_0/width_16k")
    assert torch.equal(found.W_enc, own.W_enc)
    with pytest.raises(DictionaryError, match="cannot be had from the hub or its cache"):
        cw.dictionary("nobody/saes", "layer_0")


def test_a_release_has_the_name_that_sae_lens_has_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder on this machine, by the releases that are known here, or by SAE Lens's own table."""
    own = cw.dictionary(written(_folder(tmp_path / "gemma-saes" / "blocks.1.hook_resid_post"), "standard"))
    monkeypatch.chdir(tmp_path)
    assert torch.equal(cw.dictionary("gemma-saes", "blocks.1.hook_resid_post").W_dec, own.W_dec)
    asked: list[tuple[str, str]] = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns[0]))
        return str(_folder(tmp_path / "hub"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    written(_folder(tmp_path / "hub" / "blocks.8.hook_resid_pre"), "standard")
    written(_folder(tmp_path / "hub" / "v5_32k_layer_3"), "standard")
    written(_folder(tmp_path / "hub" / "at" / "12"), "standard")
    cw.dictionary("gpt2-small-res-jb", "blocks.8.hook_resid_pre")
    cw.dictionary("gpt2-small-resid-mid-v5-32k", "blocks.3.hook_resid_mid")
    with pytest.raises(DictionaryError, match="no release that is known here: gpt2-small-res-jb, "):
        cw.dictionary("mine", "blocks.8")
    lens = _folder(tmp_path / "packages" / "sae_lens")
    (lens / "__init__.py").write_text("")
    table = "SAE_LOOKUP:\n  mine:\n    repo_id: me/mine\n    saes:\n    - id: blocks.8\n      path: at/12\n"
    (lens / "pretrained_saes.yaml").write_text(table)
    monkeypatch.syspath_prepend(lens.parent)
    cw.dictionary("mine", "blocks.8")
    assert asked == [
        ("jbloom/GPT2-Small-SAEs-Reformatted", "blocks.8.hook_resid_pre/*"),
        ("jbloom/GPT2-Small-OAI-v5-32k-resid-mid-SAEs", "v5_32k_layer_3/*"),
        ("me/mine", "at/12/*"),
    ]
    with pytest.raises(
        DictionaryError, match=r"no dictionary 'blocks.9' in the release 'mine'; near it is blocks"
    ):
        cw.dictionary("mine", "blocks.9")


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_what_is_no_dictionary_is_refused(tmp_path: Path) -> None:
    def refused(message: str, **how: Any) -> None:
        with pytest.raises(DictionaryError, match=message):
            cw.dictionary(tmp_path, **how)

    with pytest.raises(DictionaryError, match=r"holds no dictionary: cfg.json and .* found: no such folder"):
        cw.dictionary(tmp_path / "nowhere")
    refused("holds no dictionary: .* found: nothing")
    refused_settings: dict[str, dict[str, Any]] = {
        "the architecture 'temporal' is not read here": {"architecture": "temporal"},
        "the activation 'tanh-relu'": {"activation_fn": "tanh-relu"},
        "normalised by 'layer_norm'": {"normalize_activations": "layer_norm"},
        "finetuning_scaling_factor": {"finetuning_scaling_factor": True},
        "a single head": {"hook_head_index": 3},
        "says d_sae is 25, and the weights have 24": {"d_sae": 25},
        "k is 0": {"architecture": "topk"},
        "k is 99": {"architecture": "topk", "k": 99},
        "lacks b_enc; it holds W_dec, W_enc, b_dec": {"leave_out": "b_enc"},
    }
    for message, settings in refused_settings.items():
        written(tmp_path, **settings)
        refused(message)
    written(tmp_path)
    refused("dtype is one of torch's", dtype="float12")
    save_file(
        {**{n: drawn()[n] for n in PLAIN}, "W_dec": torch.ones(LATENTS + 1, D)},
        tmp_path / "sae_weights.safetensors",
    )
    refused(r"W_dec has shape \(25, 16\)")
    save_file(
        {**{n: drawn()[n] for n in PLAIN}, "b_dec": torch.full((D,), torch.nan)},
        tmp_path / "sae_weights.safetensors",
    )
    refused("b_dec holds torch.float32 that are not all finite")
    (tmp_path / "sae_weights.safetensors").write_bytes(b"not this")
    refused("cannot be read: ")
    (tmp_path / "cfg.json").write_text("[]", "utf-8")
    refused("holds a list")
    (tmp_path / "cfg.json").write_text("{", "utf-8")
    refused("cannot be read")


@pytest.mark.parametrize(
    "setting",
    [
        {"d_in": [4]},
        {"d_sae": {}},
        {"architecture": []},
        {"activation_fn": {}},
        {"normalize_activations": []},
    ],
)
def test_a_setting_that_is_a_list_is_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path) / "cfg.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **setting}), "utf-8")
    with pytest.raises(
        DictionaryError, match=rf"says {next(iter(setting))} is .*, and one value is expected"
    ):
        cw.dictionary(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "setting"),
    [
        ("topk", {"k": True}),
        ("standard", {"apply_b_dec_to_input": "yes"}),
        ("standard", {"apply_b_dec_to_input": 1}),
        ("standard", {"rescale_acts_by_decoder_norm": "no"}),
        ("standard", {"finetuning_scaling_factor": "no"}),
    ],
)
def test_truths_are_no_numbers_and_texts_are_no_truths(
    architecture: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(DictionaryError, match=r"k is True|says \w+ is .*, and true or false is expected"):
        cw.dictionary(written(tmp_path, architecture, **setting))


def test_weights_that_the_architecture_does_not_have_are_told(tmp_path: Path) -> None:
    path = written(tmp_path) / "sae_weights.safetensors"
    save_file({**load_file(path), "threshold": torch.ones(LATENTS)}, path)
    with pytest.warns(UnusedWeightsWarning, match=r"holds threshold, which .*'standard' does not have"):
        cw.dictionary(tmp_path)


def test_weights_in_which_nothing_is_computed_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "standard")
    path = tmp_path / "sae_weights.safetensors"
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in load_file(path).items()}, path)
    with pytest.raises(
        DictionaryError, match=r"is torch\.float8_e4m3fn, in which nothing is computed: give dtype"
    ):
        cw.dictionary(tmp_path)
    assert cw.dictionary(tmp_path, dtype="float32").W_enc.dtype == torch.float32

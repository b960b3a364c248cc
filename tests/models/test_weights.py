"""Weights are read from safetensors in the model's own folder, whatever an index or a link says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, hf_api

from conewise.errors import LoadError
from conewise.loading import load
from conewise.models.model_files import INDEX, WEIGHTS, why_not_reached
from tests.models.fake_hub import COMMIT, serving
from tests.program.small_llama import small_llama, small_tokenizer


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder whose weights are five files and an index."""
    folder = tmp_path / "sharded"
    small_llama().save_pretrained(folder, max_shard_size="20KB")
    assert (folder / INDEX).is_file()
    return folder


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A folder whose weights are one file."""
    small_llama().save_pretrained(tmp_path / "single")
    return tmp_path / "single"


def renamed(index: Path, name: Any, *, every: bool = False) -> None:
    """Let the index name another file for its first weight, or for every one."""
    told = json.loads(index.read_text())
    weights = list(told["weight_map"])
    told["weight_map"] |= dict.fromkeys(weights if every else weights[:1], name)
    index.write_text(json.dumps(told))


def weights_of(module: Any) -> dict[str, Any]:
    return {name: weight.tolist() for name, weight in module.state_dict().items()}


# What an index names.


@pytest.mark.parametrize("every", [False, True])
def test_an_index_that_names_a_pickle_is_refused(
    sharded: Path, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(small_llama().state_dict(), sharded / "evil.bin")
    renamed(sharded / INDEX, "evil.bin", every=every)
    read: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *args, **_: read.append(args))
    with pytest.raises(LoadError, match=r"index.json names 'evil.bin' as a file of weights.*can run code"):
        load(sharded)
    assert read == []


@pytest.mark.parametrize("name", ["../outside.safetensors", "{}", "a/../../outside.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_refused(sharded: Path, name: str) -> None:
    outside = sharded.parent / "outside.safetensors"
    (sharded / "model-00001-of-00005.safetensors").rename(outside)
    (sharded / "a").mkdir()
    told = json.loads((sharded / INDEX).read_text())
    told["weight_map"] = {
        weight: name.format(outside) if file == "model-00001-of-00005.safetensors" else file
        for weight, file in told["weight_map"].items()
    }
    (sharded / INDEX).write_text(json.dumps(told))
    with pytest.raises(LoadError, match=r"outside.safetensors', which lies outside of the model's folder"):
        load(sharded)


@pytest.mark.parametrize(
    "name", ["C:\\x.safetensors", "..\\x.safetensors", 3, None, ["x"], "", "x.SAFETENSORS"]
)
def test_an_index_that_names_anything_else_is_refused(sharded: Path, name: Any) -> None:
    renamed(sharded / INDEX, name)
    with pytest.raises(LoadError, match=r"model.safetensors.index.json names "):
        load(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000, '{"weight_map": {"a":'])
def test_an_index_that_is_none_says_so(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(LoadError, match=r"index.json cannot be understood .*\"weight_map\""):
        load(sharded)


def test_a_configuration_may_name_safetensors_of_its_own_alone(sharded: Path) -> None:
    path = sharded / "config.json"
    config = json.loads(path.read_text())
    renamed(sharded / INDEX, "evil.bin")
    (sharded / INDEX).rename(sharded / "mine.safetensors.index.json")
    for name, said in (
        ("mine.safetensors.index.json", r"mine.safetensors.index.json names 'evil.bin'"),
        ("adapter_model.bin", r"config.json names 'adapter_model.bin' as a file of weights"),
        ("../model.safetensors", r"config.json names '../model.safetensors', which lies outside"),
    ):
        path.write_text(json.dumps({**config, "transformers_weights": name}))
        (sharded / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(LoadError, match=said):
            load(sharded)


# Links.


def test_links_that_stay_in_the_folder_are_followed(single: Path) -> None:
    (single / "kept").mkdir()
    (single / WEIGHTS).rename(single / "kept" / "weights")
    (single / WEIGHTS).symlink_to("kept/weights")
    assert weights_of(load(single).module) == weights_of(small_llama())
    (single.parent / "link").symlink_to(single)
    assert weights_of(load(single.parent / "link").module) == weights_of(small_llama())


def test_a_link_that_leaves_the_folder_is_refused(single: Path, sharded: Path) -> None:
    (single / WEIGHTS).rename(single.parent / "outside.safetensors")
    (single / WEIGHTS).symlink_to("../outside.safetensors")
    with pytest.raises(LoadError, match=r"model.safetensors is a link to .*outside.safetensors, outside of"):
        load(single)
    shard = sharded / "model-00002-of-00005.safetensors"
    shard.rename(sharded.parent / "shard.safetensors")
    shard.symlink_to(sharded.parent / "shard.safetensors")
    with pytest.raises(LoadError, match=r"is a link to .*shard.safetensors, outside of the folder"):
        load(sharded)
    (sharded / "sub").symlink_to(sharded.parent)
    shard.unlink()
    renamed(sharded / INDEX, "sub/shard.safetensors", every=True)
    with pytest.raises(LoadError, match=r"is a link to .*shard.safetensors, outside of the folder"):
        load(sharded)


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_blobs_and_nowhere_else(
    sharded: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "cache" / "models--some--one"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    shared = tmp_path / "cache" / "blobs" / "00"
    shared.mkdir(parents=True)
    for number, path in enumerate(sorted(sharded.iterdir())):
        blob = repository / "blobs" / str(number)
        if number % 2:
            path.rename(shared / str(number))
            blob.symlink_to(f"../../blobs/00/{number}")
        else:
            path.rename(blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert weights_of(load(snapshot).module) == weights_of(small_llama())

    shard = snapshot / "model-00001-of-00005.safetensors"
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(outside)
    with pytest.raises(LoadError, match=r"is a link to .*outside.safetensors, outside of the folder"):
        load(snapshot)


# Adapters.


def test_an_adapter_is_not_left_out_and_not_read_from_a_pickle(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (single / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(
        LoadError, match=r"holds an adapter .* would be left out: the package peft.*merge_and"
    ):
        load(single)
    torch.save({}, single / "adapter_model.bin")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    with pytest.raises(LoadError, match=r"without adapter_model.safetensors: its weights may be a pickle"):
        load(single)


# The hub.


NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def hub_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let the hub be at an address, with a cache of its own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def at(address: str) -> None:
        huggingface_hub.close_session()
        monkeypatch.setattr(constants, "ENDPOINT", address)
        # Each has a client of its own, which keeps the address that was there when it was made.
        monkeypatch.setattr(hf_api.api, "endpoint", address)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        pattern = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", pattern)

    yield at
    huggingface_hub.close_session()


def test_without_a_network_a_hub_name_fails_at_the_first_try(
    hub_at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_at(NOWHERE)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(LoadError) as error:
        load("nobody/nothing")
    assert "and the hub itself (no connection to http://127.0.0.1:1: " in str(error.value)
    assert "hf download NAME --local-dir FOLDER" in str(error.value)
    assert waited == []


def test_whatever_else_is_wrong_with_the_hub_is_left_to_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def head(self, *_: Any, **__: Any) -> None:
            raise TimeoutError("reading took too long")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("conewise.models.model_files.get_session", Session)
    assert why_not_reached() is None


def test_models_of_the_hub_are_checked_alike_and_found_again_without_it(
    hub_at: Callable[[str], None], tmp_path: Path
) -> None:
    for name in ("sound", "evil", "outside", "adapter"):
        folder = tmp_path / "hub" / "some" / name
        small_llama().save_pretrained(folder, max_shard_size="60KB")
        small_tokenizer().save_pretrained(folder)
    renamed(tmp_path / "hub/some/evil" / INDEX, "evil.bin")
    renamed(tmp_path / "hub/some/outside" / INDEX, "../one/outside.safetensors")
    (tmp_path / "hub/some/adapter/adapter_config.json").write_text("{}")

    with serving(tmp_path / "hub") as address:
        hub_at(address)
        sound = load("some/sound")
        for name, said in {
            "some/evil": r"index.json names 'evil.bin' as a file of weights",
            "some/outside": r"outside.safetensors', which lies outside of the model's folder",
            "some/adapter": r"some/adapter holds an adapter",
            "some/none": r"and the hub itself \(there is no such model there, or a private one",
        }.items():
            with pytest.raises(LoadError, match=said):
                load(name)
    assert sound.origin == f"the Hugging Face hub, some/sound at {COMMIT}"
    assert weights_of(sound.module) == weights_of(small_llama())

    snapshot = tmp_path / "cache/models--some--sound/snapshots" / COMMIT
    assert (snapshot / INDEX).is_symlink()
    assert weights_of(load(snapshot).module) == weights_of(small_llama())
    hub_at(NOWHERE)
    again = load("some/sound")
    assert again.origin == sound.origin
    assert weights_of(again.module) == weights_of(small_llama())
    with pytest.raises(LoadError, match=r"no connection to http://127.0.0.1:1"):
        load("some/new")

"""Captures are kept in the cache folder: another process has the same program, or traces again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

import conewise as cw
from conewise.errors import ModuleChangedError, WeightsChangedError
from conewise.jobs.digests import program_digest
from conewise.model import Model
from conewise.program import kept
from tests.program.small_llama import small_llama

IDS = torch.tensor([[3, 9, 4, 17, 8, 2, 30]])

FIRST = """
import sys, torch, conewise as cw
cw.load(sys.argv[1]).run(input_ids=torch.tensor({ids}))
"""
SECOND = """
import sys, torch, conewise as cw
from conewise.program.module_state import digest_of_state
model = cw.load(sys.argv[1])
ids = torch.tensor({ids})
base, source = model.run(input_ids=ids), model.run(input_ids=ids.roll(1, 1))
sites, metric = cw.sites("resid_post", layer=":"), cw.logit_diff(3, 5)
result = model.sweep(sites, base=base, source=source, metric=metric).run()
print("transformers" in sys.modules, "torch._dynamo" in sys.modules, "exporting" in model.phases)
print(result.values.flatten().tolist())
print(base.outputs.logits.double().sum().item(), type(base.outputs).__name__, "transformers" in sys.modules)
same = digest_of_state(model.module) == model._kept.found["state"]
print(model.verify(n=1).ok, model._is_unbuilt, same)
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a cache in which its capture is."""
    made = tmp_path_factory.mktemp("captured")
    small_llama().save_pretrained(made / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONEWISE_CACHE", str(made / "cache"))
        assert traced(cw.load(made / "model"))
    return made


@pytest.fixture
def folder(captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(captured, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("CONEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "model"


def entries(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache" / "captures").glob("*.safetensors"))


def as_in_another_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model whose module is not built: as where transformers' modules were not imported."""
    monkeypatch.setattr(kept, "_is_imported", lambda _: False)
    return cw.load(folder)


def traced(model: Model, ids: torch.Tensor = IDS) -> bool:
    """True if the first run of a model traced its module."""
    model.run(input_ids=ids)
    return model._kept is None


def test_another_process_has_the_program_without_transformers(folder: Path) -> None:
    first = cw.capture(cw.load(folder), input_ids=IDS)
    base, source = first.run(input_ids=IDS), first.run(input_ids=IDS.roll(1, 1))
    metric = cw.logit_diff(3, 5)
    sites = cw.sites("resid_post", layer=":")
    expected = first.sweep(sites, base=base, source=source, metric=metric).run()
    command = [sys.executable, "-c", SECOND.format(ids=IDS.tolist()), str(folder)]
    # The entry is a process' own: what other tests left in this one, such as settings, is part of a digest.
    shutil.rmtree(folder.parent / "cache")
    given: dict[str, Any] = {"text": True, "env": {**os.environ, "PYTHONHASHSEED": "7"}}
    first_process = [sys.executable, "-c", FIRST.format(ids=IDS.tolist()), str(folder)]
    _, lines = (subprocess.check_output(one, **given).splitlines() for one in (first_process, command))
    assert lines[0] == "False False True"
    assert json.loads(lines[1]) == expected.values.flatten().tolist()
    total = base.outputs.logits.double().sum().item()
    assert lines[2] == f"{total} CausalLMOutputWithPast True"
    assert lines[3] == "True False True"


def test_the_program_is_the_same_and_runs_are_equal_bit_for_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cw.capture(cw.load(folder), input_ids=IDS)
    second = as_in_another_process(folder, monkeypatch)
    assert not traced(second)
    assert second._is_unbuilt
    assert program_digest(second.program) == program_digest(first.program)
    for ids in (IDS, IDS[:, :3], torch.cat([IDS, IDS + 1])):
        ours, theirs = second.run(input_ids=ids), first.run(input_ids=ids)
        assert torch.equal(ours.outputs.logits, theirs.outputs.logits)
        assert torch.equal(ours["z", 1], theirs["z", 1])
    assert second._is_unbuilt
    assert second.site_table.kinds == first.site_table.kinds
    assert second.fidelity == first.fidelity


def test_a_module_that_is_built_later_has_the_tensors_of_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = as_in_another_process(folder, monkeypatch)
    base = model.run(input_ids=IDS)
    held = dict(model.module.named_parameters())
    assert all(source.value is held[source.name] for source in model.program.sources if source.is_parameter)
    with torch.no_grad():
        held["model.layers.1.mlp.up_proj.weight"].add_(1)
    with pytest.raises(WeightsChangedError, match="up_proj"):
        base["resid_post", 1]
    model.module.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ModuleChangedError, match="hook"):
        model.run(input_ids=IDS)


def test_a_module_that_was_changed_before_is_traced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not traced(cw.load(folder))
    changed = cw.load(folder)
    changed.module.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    assert traced(changed)
    smaller = cw.load(folder)
    smaller.module.model.layers[1].self_attn.scaling = 2.0
    assert traced(smaller)
    llama: Any = transformers.models.llama.modeling_llama.LlamaMLP
    own = llama.forward
    monkeypatch.setattr(llama, "forward", lambda self, x: 2 * own(self, x))
    assert traced(cw.load(folder))


def test_options_and_configurations_have_entries_of_their_own(folder: Path) -> None:
    options: dict[str, Any]
    for options in ({"dtype": "float64"}, {"attn_implementation": "eager"}, {"split_groups": True}):
        assert traced(cw.load(folder, **options)), options
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert traced(cw.load(folder))


def test_lengths_on_two_sides_of_a_number_of_the_configuration_have_entries_of_their_own(
    folder: Path,
) -> None:
    assert not traced(cw.load(folder), IDS[:, :5])
    assert traced(cw.load(folder), torch.arange(40)[None])  # the hidden size is 32
    assert traced(cw.load(folder), torch.cat([IDS] * 7))  # as many prompts as positions
    assert len(entries(folder)) == 3


@pytest.mark.parametrize("damage", ["cut", "bits", "other", "program", "missing"])
def test_a_damaged_entry_is_ignored_and_written_again(folder: Path, damage: str) -> None:
    (path,) = entries(folder)
    whole = path.read_bytes()
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    match damage:
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "bits":
            path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        case "other":
            path.write_bytes(b"not a file of tensors")
        case "program":
            save_file(tensors, path, {**metadata, "entry": metadata["entry"].replace("1e-05", "1e-04")})
        case "missing":
            save_file(tensors, path, {})
    assert traced(cw.load(folder))
    assert not traced(cw.load(folder))


def test_what_an_entry_names_is_looked_up_among_the_operations_of_torch_alone() -> None:
    for target in (
        "os.system",
        "aten.__class__.mro",
        "aten.add",
        "quantized.add.default",
        "operator.attrgetter",
    ):
        with pytest.raises((kept.NotKeptError, ValueError, AttributeError)):
            kept._target(target)
    symbol = [["dict"], ["symbol", "__import__('os')", {"row": 0}]]
    for rows in ([["eval", "1"]], symbol, [["torch.__builtins__", 1]], [["dtype", "load"]], [["tuple"]]):
        with pytest.raises((kept.NotKeptError, KeyError)):
            kept.decoded({"rows": rows}, lambda name: name, {})


def test_there_is_room_for_so_many_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = entries(folder)
    monkeypatch.setattr(kept, "MOST_BYTES", first.stat().st_size * 3 // 2)
    assert traced(cw.load(folder, dtype="float64"))
    (second,) = entries(folder)
    assert second != first


def test_a_cache_that_cannot_be_written_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "file").touch()
    monkeypatch.setenv("CONEWISE_CACHE", str(folder.parent / "file"))
    assert traced(cw.load(folder))

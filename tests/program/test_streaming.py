"""Weights that stream: the same bits as resident ones, moved as the plan says, from files and from memory."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import conewise as cw
from conewise.errors import ConewiseError, LoadError, PatchError, SweepError
from conewise.program.streamed_modules import stream_memory
from conewise.program.streaming import Ring, Streamed, WeightStream, reads_of, side_by_side

MET = cw.logit_diff(3, 5)


def _llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM
    return model(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    _llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[cw.Model, cw.Model]:
    """The model with streamed weights, and with resident ones."""
    streamed, resident = cw.load(folder, weights="stream"), cw.load(folder)
    return streamed, resident


def _stream(model: cw.Model) -> WeightStream:
    found = reads_of(model.program).stream
    assert found is not None
    return found


def _sweep(model: cw.Model, sites: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    base, source = (torch.randint(0, 64, (1, 6), generator=generator) for _ in range(2))
    return model.sweep(sites, base={"input_ids": base}, source={"input_ids": source}, metric=MET)


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
def test_a_sweep_has_the_bits_of_resident_weights(models: tuple[cw.Model, cw.Model], evaluator: str) -> None:
    streamed, resident = models
    assert _stream(streamed).total > 2 * _stream(streamed).ring.size  # it has to make room, again and again

    for sites in (cw.sites("z", layer=":", head=":"), cw.sites("mlp_out", layer="2:")):
        found, expected = (_sweep(model, sites).run(evaluator=evaluator) for model in (streamed, resident))

        assert torch.equal(found.values, expected.values)
        assert torch.equal(found.base, expected.base)


@pytest.mark.parametrize("evaluator", ["serial", "wavefront"])
@pytest.mark.parametrize("layers", [":", "3:"])
def test_as_many_bytes_are_moved_as_planned(
    models: tuple[cw.Model, cw.Model], evaluator: str, layers: str
) -> None:
    sweep = _sweep(models[0], cw.sites("z", layer=layers, head=":"))
    plan = sweep.plan(evaluator=evaluator)

    assert sweep.run(evaluator=evaluator).ledger.moved_bytes == plan.moved_bytes > 0
    assert "weights moved" in str(plan)
    assert _sweep(models[1], cw.sites("z", layer=layers, head=":")).plan().moved_bytes == 0


def test_the_first_run_of_a_sweep_moves_no_more_than_the_next(folder: Path) -> None:
    sweep = _sweep(cw.load(folder, weights="stream"), cw.sites("z", layer="2:", head=":"))

    first, second = (sweep.run(evaluator="wavefront").ledger.moved_bytes for _ in range(2))

    assert first == second == sweep.plan(evaluator="wavefront").moved_bytes


def test_one_pass_over_the_weights_does_base_source_and_all_worlds(
    models: tuple[cw.Model, cw.Model],
) -> None:
    stream = _stream(models[0])
    table = sum(one.nbytes for one in stream.weights if "embed" in one.name)

    result = _sweep(models[0], cw.sites("z", layer=":", head=":")).run(evaluator="wavefront")

    assert result.ledger.moved_bytes == stream.total - table  # each matrix once; of the table, rows


def test_a_stored_sweep_has_the_bits_of_one_that_is_not(
    models: tuple[cw.Model, cw.Model], tmp_path: Path
) -> None:
    sweep = _sweep(models[0], cw.sites("z", layer=":", head=":"))

    stored = sweep.run(out=tmp_path / "out")

    assert torch.equal(stored.values, sweep.run().values)
    assert sweep.run(out=tmp_path / "out", resume=True).ledger.resumed == 16


def test_a_sweep_is_checked_by_the_module_whose_weights_stream(models: tuple[cw.Model, cw.Model]) -> None:
    assert models[0].fidelity.bitwise
    assert models[0].verify()
    assert _sweep(models[0], cw.sites("z", layer=":", head=0)).run().verify(n=2)


def test_one_pass_over_the_weights_checks_all_cells(models: tuple[cw.Model, cw.Model]) -> None:
    stream, moved = _stream(models[0]), []
    result = _sweep(models[0], cw.sites("z", layer=":", head=":")).run()
    for n in (2, 12):
        before = stream.moved
        check = result.verify(n=n)
        moved.append(stream.moved - before)
        assert check.passed
        assert check.hooked == n

    assert moved[1] <= 1.1 * moved[0]
    assert result.verify(n=12).largest_deviation == (
        _sweep(models[1], cw.sites("z", layer=":", head=":")).run().verify(n=12).largest_deviation
    )


def test_tasks_that_wait_for_each_other_at_weights_fail_together(models: tuple[cw.Model, cw.Model]) -> None:
    module, stream, ids = models[0].module, _stream(models[0]), torch.arange(6)[None]

    def task(number: int) -> Any:
        with torch.no_grad():
            return module(ids + number).logits if number < 3 else module("no ids")

    expected = [task(number) for number in range(3)]
    found = side_by_side(stream, [partial(task, number) for number in range(3)])
    assert all(map(torch.equal, found, expected))
    with pytest.raises(Exception, match="str"):
        side_by_side(stream, [partial(task, number) for number in (0, 3, 1)])


def test_the_reference_of_a_streamed_model_streams_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cw.load(folder, weights="stream", dtype="bfloat16")
    result = _sweep(model, cw.sites("z", layer=":", head=":")).run()
    whole = 4 * sum(one.numel() for one in model.module.parameters())
    monkeypatch.setattr("conewise.checks.verify.memory_free", lambda _: whole * 2 // 3)

    check = result.verify(n=4)

    assert check.reference == "float32"
    assert check.passed


def test_gradients_ask_for_the_weights_again_on_the_way_back(models: tuple[cw.Model, cw.Model]) -> None:
    generator = torch.Generator().manual_seed(1)
    base, source = ({"input_ids": torch.randint(0, 64, (1, 6), generator=generator)} for _ in range(2))

    found, expected = (
        model.attribute(cw.sites("z", layer=":", head=":"), base=base, source=source, metric=MET).run()
        for model in models
    )

    assert torch.equal(found.values, expected.values)


def test_a_module_in_memory_streams_and_stays_as_it_was(models: tuple[cw.Model, cw.Model]) -> None:
    module = _llama()
    before = dict(module.named_parameters())

    made = stream_memory(module, torch.device("cpu"))

    assert all(one is before[name] for name, one in module.named_parameters())
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(made(ids).logits, module(ids).logits)
    again = copy.deepcopy(made)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, module(ids).logits)


def test_a_copy_of_a_stream_has_a_ring_of_its_own(models: tuple[cw.Model, cw.Model]) -> None:
    weight = next(one for one in models[0].module.parameters() if isinstance(one, Streamed))

    again = pickle.loads(pickle.dumps(weight))

    assert again.stream is not weight.stream
    with torch.no_grad():
        assert torch.equal(again + 0, weight + 0)


def test_a_streamed_weight_cannot_be_written_to(models: tuple[cw.Model, cw.Model]) -> None:
    weight = next(one for one in models[0].module.parameters() if isinstance(one, Streamed))

    with torch.no_grad(), pytest.raises(PatchError, match="is streamed, and was to be written to"):
        weight.add_(1)


def test_views_of_weights_hold_no_memory_of_the_ring(models: tuple[cw.Model, cw.Model]) -> None:
    streamed, resident = (dict(model.module.named_parameters()) for model in models)
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        view, expected = streamed[name].t()[3:9], resident[name].t()[3:9]
        for other in streamed.values():
            other + 0  # whatever lay in the ring does so no more

        assert isinstance(view, Streamed)
        assert torch.equal(view + 0, expected)


def test_a_file_that_ends_early_is_told_and_the_rest_goes_on(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    model = cw.load(tmp_path, weights="stream")
    sweep = _sweep(model, cw.sites("z", layer=":", head=0))
    sweep.run()
    weights.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(ConewiseError):
        sweep.run()
    weights.write_bytes(whole[:-9])
    with pytest.raises(LoadError, match="cut short"):
        cw.load(tmp_path, weights="stream")


def test_a_budget_is_for_streamed_models() -> None:
    with pytest.raises(LoadError, match="loaded whole"):
        cw.load("tiny", max_memory="1GiB")


def test_what_the_ring_leaves_of_a_budget_is_for_the_passes(folder: Path) -> None:
    with pytest.raises(LoadError, match="two layers of this model's weights"):
        cw.load(folder, weights="stream", max_memory=1000)
    model = cw.load(folder, weights="stream", max_memory="128KiB")
    sweep = _sweep(model, cw.sites("z", layer=":", head=":"))

    plan = sweep.plan()

    assert plan.max_memory is not None
    assert plan.max_memory + _stream(model).ring.size < 128 << 10
    assert plan.peak_bytes <= plan.max_memory
    assert len(plan.chunks) > 1
    result = sweep.run()
    assert result.ledger.moved_bytes == plan.moved_bytes
    assert result.plan.chunks == plan.chunks


def test_products_in_parts_are_refused(models: tuple[cw.Model, cw.Model]) -> None:
    inputs = {"input_ids": torch.arange(6)[None]}

    with pytest.raises(SweepError):
        models[0].sweep("z", base=inputs, source="zero", metric=MET, precision="split")


def test_the_ring_never_lays_two_weights_over_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        sizes = torch.randint(1, 4000, (12,), generator=generator).tolist()
        ring = Ring(sizes, int(torch.randint(9000, 20000, (1,), generator=generator)))
        moved = 0
        for _ in range(40):
            numbers = list(set(torch.randint(0, 12, (2,), generator=generator).tolist()))
            moves = ring.want(numbers)
            moved += sum(sizes[number] for number, _ in moves)
            assert all(number in ring for number in numbers)
            spans = sorted(
                (ring.where(one), ring.where(one) + sizes[one]) for one in range(12) if one in ring
            )
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
            assert spans[-1][1] <= ring.size
        assert ring.moved == moved


LAYERS = {f"model.layers.{number}": "cpu" if number < 2 else "disk" for number in range(4)}
MAP = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu") | LAYERS


def _offloaded(how: str, folder: Path, other: Path) -> Any:
    accelerate: Any = pytest.importorskip("accelerate")
    auto: Any = transformers.LlamaForCausalLM
    match how:
        case "memory":
            accelerate.cpu_offload(module := _llama(), torch.device("cpu"))
        case "disk":
            accelerate.disk_offload(module := _llama(), other, execution_device=torch.device("cpu"))
        case _:
            module = auto.from_pretrained(folder, device_map=MAP, offload_folder=other).eval()
    return module


@pytest.mark.parametrize("how", ["memory", "disk", "map"])
def test_what_accelerate_offloaded_streams_from_where_it_keeps_it(
    models: tuple[cw.Model, cw.Model], folder: Path, tmp_path: Path, how: str
) -> None:
    module = _offloaded(how, folder, tmp_path)
    before = {name: (id(one), one.device) for name, one in module.named_parameters()}

    model = cw.capture(module, input_ids=torch.arange(12).view(2, 6))

    assert {name: (id(one), one.device) for name, one in module.named_parameters()} == before
    assert model.fidelity.bitwise
    assert model.verify()
    sites = cw.sites("z", layer=":", head=":")
    found, expected = (_sweep(one, sites).run() for one in (model, models[1]))
    assert torch.equal(found.values, expected.values)
    assert found.ledger.moved_bytes == found.plan.moved_bytes > 0


def test_a_map_of_devices_loads_a_model_as_transformers_does(
    models: tuple[cw.Model, cw.Model], folder: Path
) -> None:
    pytest.importorskip("accelerate")
    sites = cw.sites("z", layer=":", head=":")
    expected = _sweep(models[1], sites).run()

    for where, streams in (("auto", 0), (MAP, 2 * 7)):
        model = cw.load(folder, device_map=where)

        held = [one for one in model.module.parameters() if isinstance(one, Streamed)]
        assert len(held) == streams
        assert torch.equal(_sweep(model, sites).run().values, expected.values)
    with pytest.raises(LoadError, match="what it offloads streams"):
        cw.load(folder, device_map="auto", device="cpu")


@pytest.mark.parametrize("weights", [None, "stream"])
def test_a_package_that_quantised_weights_need_is_named(folder: Path, tmp_path: Path, weights: Any) -> None:
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("it is installed")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    told = json.loads((tmp_path / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(told))

    with pytest.raises(LoadError, match=r"requires bitsandbytes.*A package that its quantised weights"):
        cw.load(tmp_path, weights=weights)

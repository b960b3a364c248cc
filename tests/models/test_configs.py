"""Configurations that no model has are refused before anything is built; failures of others are told."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from conewise.errors import ArgumentError, ConewiseError, LoadError, OutOfMemoryError, is_out_of_memory
from conewise.loading import load
from conewise.models.model_files import WeightCount, bounded
from conewise.program.foreign import brief, translating, within_memory
from tests.damage import DEEP, LONG
from tests.doors import limited
from tests.program.small_llama import small_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_llama(layers=1).save_pretrained(tmp_path)
    return tmp_path


def with_settings(folder: Path, **settings: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers = 1,000,000,000, and no model has more than"),
        ({"num_hidden_layers": 10**6}, r"num_hidden_layers = 1,000,000, and there are 11 weights in all"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers = -1, and it is 1 or more"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers = 0, and it is 1 or more"),
        ({"num_attention_heads": 0}, r"num_attention_heads = 0, and it is 1 or more"),
        ({"num_attention_heads": -4}, r"num_attention_heads = -4, and it is 1 or more"),
        ({"num_labels": 10**9}, r"num_labels = 1,000,000,000, and no model has more than 10,000,000"),
        ({"num_hidden_layers": 10**40}, r"num_hidden_layers = a number of 41 digits, and no model has"),
        ({"hidden_size": 0}, r"hidden_size = 0, and it is 1 or more"),
        ({"vocab_size": 10**9}, r"describes a model of more than 10,.* parameters"),
        ({"num_hidden_layers": "many"}, r"cannot be loaded"),
        ({"architectures": ["pipeline", 3]}, r"cannot be loaded"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(settings: Any, said: str, folder: Path) -> None:
    with limited(), pytest.raises(LoadError, match=said):
        load(with_settings(folder, **settings))


@pytest.mark.parametrize(
    "text", ["", "[]", "3", DEEP, LONG, f'{{"num_hidden_layers": {LONG}}}', r'{"a": "\ud800"}']
)
def test_a_configuration_that_is_none_is_refused(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"config.json (cannot be read|holds)"):
        load(folder)


def test_what_is_built_without_end_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the setting is called that it follows from."""

    def endless(self: nn.Module, config: Any) -> None:
        nn.Module.__init__(self)
        self.all = nn.ModuleList()
        while True:
            self.all.append(nn.Identity())

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", endless)
    with (
        limited(),
        pytest.raises(LoadError, match=r"describes a model of more than 6,500 modules, and there are 11"),
    ):
        load(folder)


def test_what_takes_far_more_memory_than_there_are_weights_for_is_stopped(folder: Path) -> None:
    """Before any of it is taken: transformers fills in what does not fit, and only then says so."""
    with pytest.raises(LoadError, match=r"a model of more than 10,.* parameters, and there are 11 weights"):
        load(with_settings(folder, vocab_size=2_000_000))
    with (
        pytest.raises(LoadError, match=r"more than 268,.* numbers in buffers"),
        bounded("here", WeightCount(1, 1)),
    ):
        nn.Module().register_buffer("mask", torch.empty(2**15, 2**14, device="meta"))


def test_what_is_put_in_its_own_place_again_does_not_count_again() -> None:
    made = nn.Linear(2_000, 4_000, device="meta")
    with bounded("here", WeightCount(1, 1)):
        for _ in range(10):
            made.weight = nn.Parameter(torch.empty(4_000, 2_000, device="meta"))
    with (
        pytest.raises(LoadError, match="more than 10,000,008 parameters"),
        bounded("here", WeightCount(1, 1)),
    ):
        made.weight = nn.Parameter(torch.empty(6_000, 2_000, device="meta"))


def test_modules_of_other_threads_do_not_count() -> None:
    def build() -> None:
        nn.Sequential(*[nn.Identity() for _ in range(1_600)])

    with bounded("here", WeightCount(1, 1)):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    with pytest.raises(LoadError, match="more than 1,500 modules"), bounded("here", WeightCount(1, 1)):
        build()
    build()


def test_a_device_and_a_dtype_without_numbers_are_refused(folder: Path) -> None:
    with pytest.raises(
        LoadError, match=r"moved to the device 'meta' .*shapes and no numbers.*there are: cpu"
    ):
        load(folder, device="meta")
    for dtype in ("int8", "bool", "complex64", "float8_e4m3fn"):
        with pytest.raises(LoadError, match=rf"no model computes in {dtype}. Usual dtypes: float32"):
            load(folder, dtype=dtype)


def test_names_that_cannot_be_paths_are_refused() -> None:
    for name in ("a" * 5_000 + "/b/c", "./" + "a" * 5_000, "~nobody-of-that-name/x"):
        with pytest.raises(LoadError, match="there is no file or folder"):
            load(name)
    with pytest.raises(ArgumentError, match="expected a path"):
        load("./a\0b")


# Whatever others raise.


class PanicException(BaseException):
    """As `tokenizers` raises it; its class cannot be imported."""


@pytest.mark.parametrize(
    "error", [Exception("bare"), PanicException("no entry"), RecursionError(), KeyError("x")]
)
def test_whatever_is_raised_is_told_as_one_error(error: BaseException) -> None:
    telling = translating(lambda cause: LoadError(f"it failed: {brief(cause)}"))
    with pytest.raises(LoadError, match=rf"it failed: {type(error).__name__}") as raised, telling:
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), LoadError("ours"), GeneratorExit()])
def test_what_is_ours_or_stops_the_program_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, translating(lambda _: LoadError("another")):
        raise error
    assert raised.value is error


SHORT = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried"),
    torch.OutOfMemoryError("CUDA out of memory."),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", SHORT, ids=lambda error: type(error).__name__)
def test_want_of_memory_is_told_from_damage(error: Exception) -> None:
    error.add_note("how to go on")
    said = r"not enough memory for this .*`ulimit -v`.*`max_memory`"
    with pytest.raises(OutOfMemoryError, match=said) as raised, within_memory("this"):
        raise error
    assert raised.value.__notes__ == ["how to go on"]
    with pytest.raises(OutOfMemoryError), translating(lambda _: LoadError("damaged"), doing="this"):
        raise error
    assert isinstance(raised.value, ConewiseError)


def test_other_errors_are_not_want_of_memory() -> None:
    assert not any(map(is_out_of_memory, [OSError(errno.ENOENT, "x"), RuntimeError("shapes"), ValueError()]))
    with pytest.raises(RuntimeError, match="shapes"), within_memory("this"):
        raise RuntimeError("shapes")

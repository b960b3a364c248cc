"""Compile RASP programs with tracr, and keep the weights where tests without jax read them.

    python -m tests.ground_truth.tracr_programs           # writes tests/ground_truth/tracr
    python -m tests.ground_truth.tracr_programs --check   # compiles anew, and compares with what is there

It needs the packages in `tracr-constraints.txt`; `make test-tracr` has them in an environment of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tracr.compiler import compiling, lib
from tracr.rasp import rasp

FOLDER = Path(__file__).parent / "tracr"
BOS, PAD = "BOS", "PAD"
EXAMPLES = 12

Array = NDArray[Any]


@dataclass(frozen=True)
class Program:
    """A RASP program, the tokens that it is compiled for, and how long its inputs are."""

    expression: Any
    tokens: tuple[str | int, ...]
    length: int
    is_distinct: bool = False  # no input has a token twice

    def examples(self) -> list[tuple[str | int, ...]]:
        """Some inputs, always the same ones."""
        every: Iterable[tuple[str | int, ...]] = itertools.product(self.tokens, repeat=self.length)
        if self.is_distinct:
            every = itertools.permutations(self.tokens, self.length)
        return random.Random(0).sample(list(every), EXAMPLES)


PROGRAMS = {
    "reverse": Program(lib.make_reverse(rasp.tokens), (1, 2, 3), 3),
    "frac_prevs": Program(lib.make_frac_prevs(rasp.tokens == "x"), tuple("wxyz"), 4),
    "sort_unique": Program(lib.make_sort_unique(rasp.tokens, rasp.tokens), (1, 2, 3, 4), 3, is_distinct=True),
    "detect_pattern": Program(lib.detect_pattern(rasp.tokens, "ab"), tuple("abc"), 4),
}
_NAMES = {
    "attn/query": "attn.query",
    "attn/key": "attn.key",
    "attn/value": "attn.value",
    "attn/linear": "attn.out",
    "mlp/linear_1": "mlp.0",
    "mlp/linear_2": "mlp.2",
}


def compiled(program: Program) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays and the texts of a program's files.

    Arrays: the weights, named as in `tracr_model.py`; `examples.ids` [example, pos], and
    `examples.outputs` [example, pos, value], what tracr's model then has in the output's directions.
    """
    model = compiling.compile_rasp_to_model(
        program.expression, set(program.tokens), program.length, compiler_bos=BOS, compiler_pad=PAD
    )
    unembed, values = _unembedding(program, model)
    arrays = {**_weights(model.params), "unembed.weight": unembed}
    ids, outputs, examples = [], [], []
    for tokens in program.examples():
        answer = model.apply([BOS, *tokens])
        wanted = program.expression(tokens)
        _expect_alike(tokens, answer.decoded[1:], wanted)
        ids.append(model.input_encoder.encode([BOS, *tokens]))
        outputs.append(np.array(answer.transformer_output[0]) @ unembed.T)
        examples.append({"tokens": tokens, "answer": [*map(float, wanted)] if values is None else wanted})
    arrays |= {"examples.ids": np.array(ids), "examples.outputs": np.array(outputs)}
    said = {
        "heads": model.model_config.num_heads,
        "vocabulary": list(model.input_encoder.encoding_map),
        "values": values,
        "examples": examples,
    }
    assert not model.model_config.layer_norm
    assert not model.model_config.causal
    return arrays, said


def _weights(params: Any) -> dict[str, Array]:
    found = {
        "embed.weight": np.array(params["token_embed"]["embeddings"]),
        "positions.weight": np.array(params["pos_embed"]["embeddings"]),
    }
    for module, parts in params.items():
        if not module.startswith("transformer/layer_"):
            continue
        layer, part = module.removeprefix("transformer/layer_").split("/", 1)
        assert not parts["b"].any(), f"{module} has a bias, and tracr_model.py has none"
        found[f"layers.{layer}.{_NAMES[part]}.weight"] = np.array(parts["w"]).T.copy()
    return found


def _unembedding(program: Program, model: Any) -> tuple[Array, list[Any] | None]:
    """What reads the output's directions off the stream, and their values; none for a number."""
    label, labels = program.expression.label, model.residual_labels
    if label in labels:
        directions, values = [label], None
    else:
        values = list(model.output_encoder.encoding_map)
        directions = [f"{label}:{value}" for value in values]
    rows = [labels.index(direction) for direction in directions]
    return np.eye(len(labels), dtype=np.float32)[rows], values


def _expect_alike(tokens: Sequence[str | int], decoded: Sequence[Any], wanted: Sequence[Any]) -> None:
    """The compiled model says what RASP's interpreter does, but where that has no value."""
    for got, value in zip(decoded, wanted, strict=True):
        assert value is None or abs(got - value) < 1e-5, f"{tokens}: {decoded}, and not {wanted}"


def write(folder: Path) -> None:
    """Compile every program into two files of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, program in PROGRAMS.items():
        arrays, said = compiled(program)
        save_file(arrays, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(said) + "\n", encoding="utf-8")


def differences(folder: Path) -> list[str]:
    """What tracr compiles otherwise than it stands in the files of `folder`."""
    found = []
    for name, program in PROGRAMS.items():
        arrays, said = compiled(program)
        kept = load_file(folder / f"{name}.safetensors")
        found += [f"{name}: {array}" for array in sorted(arrays.keys() ^ kept.keys())]
        for array in sorted(arrays.keys() & kept.keys()):
            # Weights are equal; what jax computes with them may be rounded otherwise on another machine.
            tolerance = 1e-5 if array == "examples.outputs" else 0.0
            if arrays[array].shape != kept[array].shape or not np.allclose(
                arrays[array], kept[array], rtol=0.0, atol=tolerance
            ):
                found.append(f"{name}: {array}")
        if not _is_alike(
            json.loads(json.dumps(said)), json.loads((folder / f"{name}.json").read_text("utf-8"))
        ):
            found.append(f"{name}: {name}.json")
    return found


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two texts of JSON say the same, up to the last digits of numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-5
    return type(one) is type(other) and bool(one == other)


def main() -> int:
    """Write the files, or compare with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compile anew, and compare")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    if not options.check:
        write(options.folder)
        return 0
    found = differences(options.folder)
    for line in found:
        sys.stderr.write(f"compiled otherwise than kept: {line}\n")
    if not found:
        sys.stdout.write(f"{len(PROGRAMS)} programs are compiled as they are kept in {options.folder}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

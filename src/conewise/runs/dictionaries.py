"""Dictionaries from files: sparse autoencoders and transcoders in the layout that SAE Lens writes.

A folder holds `cfg.json`, which says what is computed, and `sae_weights.safetensors`. Nothing else is read,
and that library is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from conewise.arguments import checked
from conewise.errors import DictionaryError, UnusedWeightsWarning, nearest_names, warn
from conewise.extras import needs
from conewise.files import as_path, is_there, read_json
from conewise.program.foreign import brief, translating

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"

_ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "standard": ("W_enc", "b_enc", "W_dec", "b_dec"),
    "topk": ("W_enc", "b_enc", "W_dec", "b_dec"),
    "jumprelu": ("W_enc", "b_enc", "W_dec", "b_dec", "threshold"),
    "gated": ("W_enc", "b_gate", "b_mag", "r_mag", "W_dec", "b_dec"),
    "transcoder": ("W_enc", "b_enc", "W_dec", "b_dec"),
    "skip_transcoder": ("W_enc", "b_enc", "W_dec", "b_dec", "W_skip"),
    "jumprelu_transcoder": ("W_enc", "b_enc", "W_dec", "b_dec", "threshold"),
    "jumprelu_skip_transcoder": ("W_enc", "b_enc", "W_dec", "b_dec", "threshold", "W_skip"),
}
"""The weights of each architecture."""


class Dictionary(nn.Module):
    """A sparse autoencoder or a transcoder: `encode` maps a value to latents, and `decode` maps them back.

    `place` is the site that it was trained for, under the name in its file; '' if the file names none. A
    transcoder reads at `reads` and writes at its place. A transcoder with a skip connection (`skips`) decodes
    latents and the value that was read.
    """

    W_enc: Tensor
    W_dec: Tensor
    b_enc: Tensor
    b_dec: Tensor
    b_gate: Tensor
    b_mag: Tensor
    r_mag: Tensor
    W_skip: Tensor
    threshold: Tensor

    def __init__(
        self, weights: Mapping[str, Tensor], *, top: int = 0, is_centred: bool, is_rescaled: bool = False
    ) -> None:
        """`is_centred`: b_dec is taken off what is read. `is_rescaled`: latents count by decoder length."""
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        self.top, self.is_centred, self.is_rescaled = top, is_centred, is_rescaled
        self.architecture = self.place = self.reads = ""

    @property
    def latents(self) -> int:
        """The number of latents."""
        return int(self.W_dec.shape[0])

    def encode(self, value: Tensor) -> Tensor:
        """Return the latents [..., latent] of a value [..., d]."""
        read = value - self.b_dec if self.is_centred else value
        if "r_mag" in self._parameters:
            is_open = read @ self.W_enc + self.b_gate > 0
            strength = read @ (self.W_enc * self.r_mag.exp()) + self.b_mag
            return strength.relu() * is_open.to(strength.dtype)
        strength = read @ self.W_enc + self.b_enc
        if self.is_rescaled:
            strength = strength * self.W_dec.norm(dim=-1)
        if self.top:
            kept, at = strength.topk(self.top, dim=-1)
            return torch.zeros_like(strength).scatter(-1, at, kept.relu())
        if "threshold" in self._parameters:
            return strength.relu() * (strength > self.threshold).to(strength.dtype)
        return strength.relu()

    @property
    def skips(self) -> bool:
        """True if there is a skip connection."""
        return "W_skip" in self._parameters

    def decode(self, latents: Tensor, read: Tensor | None = None) -> Tensor:
        """Return the value [..., d] that latents [..., latent] represent, with the skip connection."""
        if self.is_rescaled:
            latents = latents / self.W_dec.norm(dim=-1)
        made: Tensor = latents @ self.W_dec + self.b_dec
        return made if read is None or not self.skips else made + read @ self.W_skip.T

    def forward(self, value: Tensor) -> Tensor:
        """Return the reconstruction of a value."""
        return self.decode(self.encode(value), value)

    def __repr__(self) -> str:
        where = f" from {self.reads}" if self.reads else ""
        where += f" at {self.place}" if self.place else ""
        return (
            f"Dictionary ({self.architecture}){where}: {self.latents:,} latents, {self.W_enc.shape[0]} wide"
        )


@checked
def dictionary(
    folder: str | Path,
    id: str | None = None,  # noqa: A002  # as SAE Lens calls it
    *,
    dtype: str | torch.dtype | None = None,
    device: Any = None,
) -> Dictionary:
    """Load a dictionary in SAE Lens's format: a folder with `cfg.json` and `sae_weights.safetensors`.

    With an `id`, the first argument is a folder on this machine that holds a folder of that name, or a
    repository of Hugging Face's hub, "owner/name", or SAE Lens's name of a release: "gpt2-small-res-jb". Some
    releases are known here, all of them if SAE Lens is installed. Files in this machine's hub cache are not
    downloaded again.

    Architectures: standard, topk, jumprelu, gated, and transcoders, with a skip connection or without.
    Weights keep their saved dtype unless `dtype` is given, and are placed on `device`; a dictionary needs the
    dtype and the device of its place. Raises DictionaryError if the folder holds something else, or a
    dictionary that is not a function of one value.
    """
    where = as_path(folder) if id is None else _folder_of(str(folder), id)
    settings = _settings(where)
    architecture = _architecture(where, settings)
    weights = _weights(where, architecture, _dtype(dtype), device)
    _expect_shapes(where, weights, settings, architecture)
    kept = settings.get("activation_fn_kwargs")
    top = settings.get("k") or (kept if isinstance(kept, dict) else {}).get("k") or 0
    is_count = isinstance(top, int) and not isinstance(top, bool)
    if architecture == "topk" and not (is_count and 0 < top <= weights["W_dec"].shape[0]):
        raise DictionaryError(f"{where / CONFIG}: topk keeps k latents, and k is {top!r}.")
    made = Dictionary(
        weights,
        top=top if architecture == "topk" else 0,
        is_centred=_is_centred(settings, architecture),
        is_rescaled=bool(settings.get("rescale_acts_by_decoder_norm", False)),
    )
    hook, out = (str(settings.get(name) or "") for name in ("hook_name", "hook_name_out"))
    made.architecture = architecture
    made.place, made.reads = (out, hook) if "transcoder" in architecture else (hook, "")
    return made.eval()


RELEASES: Mapping[str, tuple[str, str]] = {
    "gpt2-small-res-jb": ("jbloom/GPT2-Small-SAEs-Reformatted", ""),
    "gpt2-small-res-jb-feature-splitting": ("jbloom/GPT2-Small-Feature-Splitting-Experiment-Layer-8", ""),
    "gpt2-small-resid-post-v5-128k": ("jbloom/GPT2-Small-OAI-v5-128k-resid-post-SAEs", "v5_128k_layer_"),
    "gpt2-small-resid-mid-v5-32k": ("jbloom/GPT2-Small-OAI-v5-32k-resid-mid-SAEs", "v5_32k_layer_"),
    "gpt2-small-resid-mid-v5-128k": ("jbloom/GPT2-Small-OAI-v5-128k-resid-mid-SAEs", "v5_128k_layer_"),
}
"""Releases that are in the layout of SAE Lens: their repositories, and how folders begin that end in a layer.

Without a beginning, an id is the name of the folder.
"""


def _folder_of(release: str, name: str) -> Path:
    """The folder of a release's dictionary. Raises DictionaryError where it cannot be had."""
    name = name.strip("/")
    if is_there(as_path(release) / name, Path.is_dir):
        return as_path(release) / name
    repository, folder = (release, name) if release.count("/") == 1 else _of_release(release, name)
    with needs("hf"):
        from huggingface_hub import snapshot_download  # noqa: PLC0415  # slow, and needed for the hub alone

    try:
        found = Path(snapshot_download(repository, allow_patterns=[f"{folder}/*"]))
    except Exception as error:  # it raises whatever it likes
        raise DictionaryError(
            f"{repository} cannot be had from the hub or its cache: {brief(error)}."
        ) from error
    return found / folder


def _of_release(release: str, name: str) -> tuple[str, str]:
    """The repository and the folder of a dictionary of a release, by a table: SAE Lens's, or the one here."""
    if release in RELEASES:
        repository, begins = RELEASES[release]
        layer = re.match(r"blocks\.(\d+)\.", name)
        return repository, f"{begins}{layer[1]}" if begins and layer else name
    spec = find_spec("sae_lens")
    tables = [
        Path(where) / "pretrained_saes.yaml" for where in (spec and spec.submodule_search_locations) or ()
    ]
    for table in tables:
        if is_there(table, Path.is_file):
            import yaml  # noqa: PLC0415  # SAE Lens needs it itself

            known = yaml.safe_load(table.read_text())
            found = known.get("SAE_LOOKUP", known).get(release)
            paths = {one["id"]: one["path"] for one in (found or {}).get("saes", ())}
            if found is not None and name in paths:
                return found["repo_id"], paths[name]
            if found is not None:
                near = ", ".join(nearest_names(name, list(paths)) or list(paths)[:3])
                raise DictionaryError(
                    f"no dictionary {name!r} in the release {release!r}; near it is {near}."
                )
    raise DictionaryError(
        f"{release!r} is no folder with {name!r} in it, no repository of the hub, 'owner/name', "
        f"and no release that is known here: {', '.join(RELEASES)}. The page of a release says which "
        "repository it is; a folder on this machine needs no id."
    )


_SINGLE = frozenset(
    {
        *(
            "architecture",
            "activation_fn",
            "activation_fn_str",
            "normalize_activations",
            "d_in",
            "d_sae",
            "k",
        ),
        *("hook_name", "hook_point", "hook_name_out"),
    }
)
"""Settings that are a number, a text, or nothing."""
_FLAGS = ("apply_b_dec_to_input", "rescale_acts_by_decoder_norm", "finetuning_scaling_factor")
"""Settings that are true, false, or nothing."""


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of `cfg.json`, with those of the model beside them."""
    if not all(is_there(folder / name, Path.is_file) for name in (CONFIG, WEIGHTS)):
        there = (
            ", ".join(sorted(path.name for path in folder.iterdir())[:8])
            if is_there(folder, Path.is_dir)
            else "no such folder"
        )
        raise DictionaryError(
            f"{str(folder)[:200]} holds no dictionary: {CONFIG} and {WEIGHTS} are expected there, as SAE "
            f"Lens writes them; found: {there or 'nothing'}. Give a dictionary of another layout as "
            "functions: `splice(place, encode=..., decode=...)`."
        )
    try:
        found = read_json(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise DictionaryError(f"{folder / CONFIG} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise DictionaryError(
            f"{folder / CONFIG} holds a {type(found).__name__}, and settings by name are expected."
        )
    about = found.get("metadata")
    settings = {**(about if isinstance(about, dict) else {}), **found}
    for name, value in settings.items():
        if name in _SINGLE and isinstance(value, list | dict):
            raise DictionaryError(
                f"{folder / CONFIG} says {name} is {value!r:.80}, and one value is expected."
            )
    for name in _FLAGS:
        if not isinstance(value := settings.get(name), bool | None):
            raise DictionaryError(
                f"{folder / CONFIG} says {name} is {value!r:.80}, and true or false is expected."
            )
    for old, new in (("hook_point", "hook_name"), ("activation_fn_str", "activation_fn")):
        settings.setdefault(new, settings.get(old))
    return settings


def _architecture(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the architecture. Raises DictionaryError where that is not computed here."""
    found = settings.get("architecture") or "standard"
    activation = settings.get("activation_fn") or "relu"
    if found == "standard" and activation == "topk":
        found = "topk"
    refused = {
        f"the architecture {found!r}": found not in _ARCHITECTURES,
        f"the activation {activation!r}": activation not in {"relu", "topk"},
        f"activations that are normalised by {settings.get('normalize_activations')!r}": (
            settings.get("normalize_activations") not in {None, False, "none"}
        ),
        "latents that are scaled after training (finetuning_scaling_factor)": bool(
            settings.get("finetuning_scaling_factor")
        ),
        "a single head (hook_head_index)": settings.get("hook_head_index") is not None,
    }
    for what, is_so in refused.items():
        if is_so:
            raise DictionaryError(
                f"{folder / CONFIG}: {what} is not read here; known are {', '.join(_ARCHITECTURES)}, of "
                "values as they are. Fold it into the weights before they are saved, or give functions: "
                "functions: `splice(place, encode=..., decode=...)`."
            )
    return str(found)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise DictionaryError(f"dtype is one of torch's, such as 'float32' or 'bfloat16', not {dtype!r}.")
    return found


def _weights(folder: Path, architecture: str, dtype: torch.dtype | None, device: Any) -> dict[str, Tensor]:
    path, names = folder / WEIGHTS, _ARCHITECTURES[architecture]

    def broken(error: BaseException) -> DictionaryError:
        return DictionaryError(f"{path} cannot be read: {brief(error)}.")

    with translating(broken, doing=f"the dictionary in {folder}"), safe_open(path, framework="pt") as file:
        there = set(file.keys())
        has_log = "threshold" in names and "threshold" not in there and "log_threshold" in there
        stored = {name: "log_threshold" if has_log and name == "threshold" else name for name in names}
        missing = [name for name in stored.values() if name not in there]
        if missing:
            raise DictionaryError(
                f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(there)) or 'nothing'}."
            )
        found = {name: file.get_tensor(own).to(device=device, dtype=dtype) for name, own in stored.items()}
    if unused := sorted(there - set(stored.values())):
        warn(
            f"{path} holds {', '.join(unused)[:200]}, which the architecture {architecture!r} does not have: "
            f"left out. Look whether {CONFIG} names the architecture that the weights were saved from.",
            UnusedWeightsWarning,
        )
    if has_log:
        found["threshold"] = found["threshold"].exp()
    return found


def _is_centred(settings: Mapping[str, Any], architecture: str) -> bool:
    """True if b_dec is taken off what is read, as in autoencoders, unless they say otherwise."""
    said = settings.get("apply_b_dec_to_input")
    return "transcoder" not in architecture if said is None else bool(said)


def _expect_shapes(
    folder: Path, weights: Mapping[str, Tensor], settings: Mapping[str, Any], architecture: str
) -> None:
    """Raise DictionaryError where weights do not fit together, or are no numbers."""
    width, count = weights["W_enc"].shape if weights["W_enc"].ndim == 2 else (0, 0)
    out = weights["W_dec"].shape[-1] if weights["W_dec"].ndim == 2 else 0
    shapes = {"W_enc": (width, count), "W_dec": (count, out), "b_dec": (out,), "W_skip": (out, width)}
    for name, weight in weights.items():
        wanted = shapes.get(name, (count,))
        if tuple(weight.shape) != wanted or not width or not out:
            raise DictionaryError(
                f"{folder / WEIGHTS}: {name} has shape {tuple(weight.shape)}, and W_enc [d, latents], W_dec "
                "[latents, d] and a bias for each are expected."
            )
        if weight.is_floating_point() and weight.dtype.itemsize < 2:
            raise DictionaryError(
                f"{folder / WEIGHTS}: {name} is {weight.dtype}, in which nothing is computed: give "
                "dtype='float32'."
            )
        if not weight.is_floating_point() or not bool(weight.isfinite().all()):
            raise DictionaryError(
                f"{folder / WEIGHTS}: {name} holds {weight.dtype} that are not all finite numbers."
            )
    if _is_centred(settings, architecture) and out != width:
        raise DictionaryError(
            f"{folder / CONFIG} says that b_dec is taken off what is read (apply_b_dec_to_input), and b_dec "
            f"is {out} wide where what is read is {width} wide."
        )
    said = {"d_in": width, "d_sae": count}
    for name, size in said.items():
        if settings.get(name) not in {None, size}:
            raise DictionaryError(
                f"{folder / CONFIG} says {name} is {settings[name]!r}, and the weights have {size}."
            )

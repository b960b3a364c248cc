"""The same sweep by the documented ways of other libraries; each returns one value for each site."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from benchmarks.by_hand import Pair, Site
from benchmarks.cases import Case


class PeerCase:
    """A module of a peer's own, and the pair of prompts that it sweeps now; see `Case`."""

    source: Any = None

    def __init__(self, module: Any, pair: Pair, sites: list[Site]) -> None:
        self.module, self._sites = module, sites
        self.layers, self.heads = module.config.num_hidden_layers, module.config.num_attention_heads
        self.take(pair)

    def take(self, pair: Pair) -> None:
        self.clean, self.corrupted = pair.source, pair.base
        self.answer, self.wrong = pair.answer, pair.wrong

    def difference(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, self.answer] - logits[:, -1, self.wrong]

    def all_sites(self) -> list[Site]:
        return self._sites


class TransformerLens:
    """TransformerLens's own sweep helpers: all heads over all positions, then whole MLP outputs."""

    def __init__(self, case: Case | PeerCase) -> None:
        _stand_in_for_datasets()
        from transformer_lens.model_bridge import TransformerBridge

        self.case = case
        self.model = TransformerBridge.boot_transformers(
            "gpt2", hf_model=case.module, tokenizer=_no_words(case.module.config.vocab_size)
        )
        self.read_source()

    def read_source(self) -> None:
        with torch.no_grad():
            _, self.cache = self.model.run_with_cache(self.case.clean)

    def new_pair(self, pair: Pair) -> torch.Tensor:
        """A sweep of a pair that was not seen before, its clean run included."""
        self.case.take(pair)
        self.read_source()
        return self.run()

    def run(self) -> torch.Tensor:
        from transformer_lens import patching

        def metric(logits: torch.Tensor) -> torch.Tensor:
            return self.case.difference(logits)[0]

        with torch.no_grad():
            heads = patching.get_act_patch_attn_head_out_all_pos(
                self.model, self.case.corrupted, self.cache, metric
            )
            mlps = patching.generic_activation_patch(
                self.model,
                self.case.corrupted,
                self.cache,
                metric,
                patch_setter=_whole_layer,
                activation_name="mlp_out",
                index_axis_names=("layer",),
            )
        return torch.cat([heads.flatten(), mlps.flatten()])


def _stand_in_for_datasets() -> None:
    """Let TransformerLens be imported where `datasets` is not installed: a sweep reads none."""
    if importlib.util.find_spec("datasets") is not None:
        return
    for name in ("datasets", "datasets.arrow_dataset", "datasets.iterable_dataset", "datasets.load"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for each in ("Dataset", "IterableDataset", "load_dataset"):
            setattr(module, each, type(each, (), {}))
        sys.modules[name] = module


def _no_words(vocabulary: int) -> Any:
    """A tokenizer that nobody will use: the helpers are given token ids, but ask for one."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = {f"<{place}>": place for place in range(vocabulary)}
    end = f"<{vocabulary - 1}>"
    plain = Tokenizer(models.WordLevel(words, unk_token=end))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token=end, eos_token=end, unk_token=end, pad_token=end
    )
    folder = tempfile.mkdtemp()  # it is loaded from disk once more
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def _whole_layer(activation: torch.Tensor, index: Any, clean: torch.Tensor) -> torch.Tensor:
    activation[...] = clean
    return activation


class NNsight:
    """nnsight: one trace for each site, or many sites as invokes of one trace."""

    def __init__(self, case: Case | PeerCase) -> None:
        from nnsight import NNsight as Wrapped
        from nnsight.modeling.transformers import TransformersModel

        self.case = case
        self.batching = TransformersModel(
            case.module, task="text-generation", tokenizer=_no_words(case.module.config.vocab_size)
        )
        self.model = Wrapped(case.module)
        self.width = case.module.config.hidden_size // case.heads
        self.z: list[torch.Tensor]
        self.mlp: list[torch.Tensor]
        self.read_source()

    def read_source(self) -> None:
        with torch.no_grad(), self.model.trace(self.case.clean, use_cache=False, logits_to_keep=1):
            z, mlp = list().save(), list().save()  # noqa: C408  # a literal has no `save`
            for layer in range(self.case.layers):
                block = self.model.transformer.h[layer]
                z.append(block.attn.c_proj.input)
                mlp.append(block.mlp.output)
        self.z, self.mlp = z, mlp

    def new_pair(self, pair: Pair, chunk: int, *, last: bool = False) -> torch.Tensor:
        """A sweep of a pair that was not seen before, its clean run included; see `invoked`."""
        self.case.take(pair)
        self.read_source()
        return self.invoked(chunk, last=last)

    def one_by_one(self, sites: list[tuple[str, int, int]]) -> torch.Tensor:
        found = []
        for kind, layer, head in sites:
            part = slice(head * self.width, (head + 1) * self.width)
            z, whole, ids = self.z[layer], self.mlp[layer], self.case.corrupted
            with torch.no_grad(), self.model.trace(ids, use_cache=False, logits_to_keep=1):
                block = self.model.transformer.h[layer]
                if kind == "z":
                    block.attn.c_proj.input[..., part] = z[..., part]
                else:
                    block.mlp.output = whole
                logits = self.model.output.logits.save()
            found.append(self.case.difference(logits))
        return torch.cat(found)

    def invoked(self, chunk: int, *, last: bool = False) -> torch.Tensor:
        """All sites as invokes of one trace, `chunk` at a time: nnsight runs them as one batch.

        As documented, or with the model told to compute the logits of the `last` position only.
        """
        sites = self.case.all_sites()
        return torch.cat(
            [self._together(sites[start : start + chunk], last) for start in range(0, len(sites), chunk)]
        )

    def _together(self, sites: list[tuple[str, int, int]], last: bool) -> torch.Tensor:
        ids, width = self.case.corrupted, self.width
        found: list[Any] = []
        wanted = {"logits_to_keep": 1} if last else {}
        with torch.no_grad(), self.batching.trace(use_cache=False, **wanted) as tracer:
            logits = list().save()  # noqa: C408  # a literal has no `save`
            for kind, layer, head in sites:
                with tracer.invoke(ids):
                    block = self.batching.transformer.h[layer]
                    if kind == "z":
                        part = slice(head * width, (head + 1) * width)
                        block.attn.c_proj.input[..., part] = self.z[layer][..., part]
                    else:
                        block.mlp.output = self.mlp[layer]
                    logits.append(self.batching.output.logits[:, -1:])
        found += [self.case.difference(one) for one in logits]
        return torch.cat(found)

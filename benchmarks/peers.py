"""The same sweep by the documented ways of other libraries; each returns one value for each site."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from benchmarks.cases import Case


class TransformerLens:
    """TransformerLens's own sweep helpers: all heads over all positions, then whole MLP outputs."""

    def __init__(self, case: Case) -> None:
        from transformer_lens.model_bridge import TransformerBridge

        self.case = case
        self.model = TransformerBridge.boot_transformers(
            "gpt2", hf_model=case.module, tokenizer=_no_words(case.module.config.vocab_size)
        )
        with torch.no_grad():
            _, self.cache = self.model.run_with_cache(case.clean)

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

    def __init__(self, case: Case) -> None:
        from nnsight import NNsight as Wrapped
        from nnsight.modeling.transformers import TransformersModel

        self.case = case
        self.batching = TransformersModel(
            case.module, task="text-generation", tokenizer=_no_words(case.module.config.vocab_size)
        )
        self.model = Wrapped(case.module)
        self.width = case.module.config.hidden_size // case.heads
        self.z = [case.source["z", layer].flatten(2) for layer in range(case.layers)]
        self.mlp = [case.source["mlp_out", layer] for layer in range(case.layers)]

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

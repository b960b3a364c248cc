"""Names of TransformerLens models that are not here, and what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping

INSTEAD: Mapping[str, str] = {
    "all_composition_scores": "multiply `QK` and `OV`, which are FactoredMatrix",
    "boot_transformers": "load the model with `cw.load(name, attn_implementation='eager')`",
    "cache_all": "use `run_with_cache`",
    "cache_some": "use `run_with_cache(names_filter=...)`",
    "center_unembed": "weights stay as the module has them",
    "center_writing_weights": "weights stay as the module has them",
    "check_hooks_to_add": "every hook may be added",
    "cpu": "load the model where it shall be: `cw.load(name, device='cpu')`",
    "cuda": "load the model where it shall be: `cw.load(name, device='cuda')`",
    "enable_compatibility_mode": "weights stay as the module has them; hook names are those of the mode",
    "fold_layer_norm": "weights stay as the module has them; norms are applied with their gains",
    "fold_value_biases": "weights stay as the module has them",
    "freeze_attention_patterns": "hook 'attn.hook_pattern' with a function that returns the patterns to keep",
    "generate": "use `model.module.generate(tokens, ...)`, the module's own",
    "init_weights": "the module comes with weights",
    "input_to_embed": "use `model.embed(tokens)`",
    "load_and_process_state_dict": "weights stay as the module has them",
    "load_state_dict": "load them into `model.module`, and make the HookedModel anew",
    "mod_dict": "hook points are in `hook_dict`, modules in `model.module.named_modules()`",
    "mps": "load the model where it shall be: `cw.load(name, device='mps')`",
    "process_weights_": "weights stay as the module has them",
    "refactor_factored_attn_matrices": "weights stay as the module has them",
    "sample_datapoint": "datasets are loaded with the library `datasets`",
    "set_tokenizer": "give the tokenizer when the model is made: `HookedModel(module, tokenizer)`",
    "set_ungroup_grouped_query_attention": "keys and values keep their own heads; repeat them with "
    "`repeat_interleave`",
    "setup": "nothing is left to set up",
    "state_dict": "use `model.module.state_dict()`",
    "to": "load the model where it shall be, `cw.load(name, device=..., dtype=...)`",
    "train": "a captured module stays in eval mode",
    "train_step": "train `model.module`, and make the HookedModel anew",
}


def reason_for(name: str) -> str:
    """What to say of a name that a HookedModel does not have."""
    if name in INSTEAD:
        return f"a HookedModel has no {name!r}: {INSTEAD[name]}."
    return (
        f"a HookedModel has no {name!r}. The module itself is `model.module`, the captured model "
        "`model.captured`; docs/transformer-lens.md lists what there is."
    )

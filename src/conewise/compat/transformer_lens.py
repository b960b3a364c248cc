"""What a TransformerLens notebook imports, over captured models: an import and the model's line change.

    import conewise as cw
    from conewise.compat.transformer_lens import HookedModel
    import conewise.compat.transformer_lens as patching      # and as utils

    model = HookedModel(cw.load("gpt2", attn_implementation="eager"))
    clean_logits, clean_cache = model.run_with_cache(clean_tokens)
    patching.get_act_patch_resid_pre(model, corrupted_tokens, clean_cache, metric)      # [layer, pos]

The names are those of `transformer_lens`, `transformer_lens.patching` and `transformer_lens.utils`.
"""

from __future__ import annotations

from conewise.compat.activation_cache import ActivationCache
from conewise.compat.hook_points import HookPoint
from conewise.compat.hook_table import get_act_name
from conewise.compat.hooked_model import HookedModel
from conewise.compat.hooked_text import lm_accuracy, lm_cross_entropy_loss
from conewise.compat.hooked_weights import HookedConfig
from conewise.compat.matrices import FactoredMatrix
from conewise.compat.patching import (
    generic_activation_patch,
    get_act_patch_attn_head_all_pos_every,
    get_act_patch_attn_head_by_pos_every,
    get_act_patch_attn_head_k_all_pos,
    get_act_patch_attn_head_k_by_pos,
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_attn_head_out_by_pos,
    get_act_patch_attn_head_pattern_all_pos,
    get_act_patch_attn_head_pattern_by_pos,
    get_act_patch_attn_head_pattern_dest_src_pos,
    get_act_patch_attn_head_q_all_pos,
    get_act_patch_attn_head_q_by_pos,
    get_act_patch_attn_head_v_all_pos,
    get_act_patch_attn_head_v_by_pos,
    get_act_patch_attn_out,
    get_act_patch_block_every,
    get_act_patch_mlp_out,
    get_act_patch_resid_mid,
    get_act_patch_resid_pre,
    layer_head_dest_src_pos_pattern_patch_setter,
    layer_head_pattern_patch_setter,
    layer_head_pos_pattern_patch_setter,
    layer_head_vector_patch_setter,
    layer_pos_head_vector_patch_setter,
    layer_pos_patch_setter,
    make_df_from_ranges,
)
from conewise.compat.patching_result import PatchingResult
from conewise.compat.prompt_checks import test_prompt
from conewise.compat.slices import Slice, to_numpy

__all__ = [
    "ActivationCache",
    "FactoredMatrix",
    "HookPoint",
    "HookedConfig",
    "HookedModel",
    "PatchingResult",
    "Slice",
    "generic_activation_patch",
    "get_act_name",
    "get_act_patch_attn_head_all_pos_every",
    "get_act_patch_attn_head_by_pos_every",
    "get_act_patch_attn_head_k_all_pos",
    "get_act_patch_attn_head_k_by_pos",
    "get_act_patch_attn_head_out_all_pos",
    "get_act_patch_attn_head_out_by_pos",
    "get_act_patch_attn_head_pattern_all_pos",
    "get_act_patch_attn_head_pattern_by_pos",
    "get_act_patch_attn_head_pattern_dest_src_pos",
    "get_act_patch_attn_head_q_all_pos",
    "get_act_patch_attn_head_q_by_pos",
    "get_act_patch_attn_head_v_all_pos",
    "get_act_patch_attn_head_v_by_pos",
    "get_act_patch_attn_out",
    "get_act_patch_block_every",
    "get_act_patch_mlp_out",
    "get_act_patch_resid_mid",
    "get_act_patch_resid_pre",
    "layer_head_dest_src_pos_pattern_patch_setter",
    "layer_head_pattern_patch_setter",
    "layer_head_pos_pattern_patch_setter",
    "layer_head_vector_patch_setter",
    "layer_pos_head_vector_patch_setter",
    "layer_pos_patch_setter",
    "lm_accuracy",
    "lm_cross_entropy_loss",
    "make_df_from_ranges",
    "test_prompt",
    "to_numpy",
]

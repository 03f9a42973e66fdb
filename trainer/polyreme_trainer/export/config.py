"""Configuration files as plain data: the whole model in Kimi-VL's form, its text part in DeepSeek-V3's.

The fields are those of the released configurations of Kimi-VL-A3B, Moonlight-16B-A3B, DeepSeek-V3 and Kimi-K2.
``rms_norm_eps`` must be stated: the readers' default is 1e-6, not 1e-5.
"""

from __future__ import annotations

from typing import Any

from polyreme_api.batch import IGNORED_TARGET, TokenIds, TokenizerFile
from polyreme_planner.shapes import DecoderShape, ModelShape, VisionShape

POSITIONS_MAX = 131_072
"""Context length of Kimi-VL [tokens]; rotary positions have no table, so no weight depends on it."""


def text_config(shape: DecoderShape, *, tokens: TokenIds | None = None, dtype: str = "float32") -> dict[str, Any]:
    """Describe the decoder as ``DeepseekV3ForCausalLM`` (sigmoid router, interleaved rotary)."""
    ids = {} if tokens is None else {"eos_token_id": tokens.end, "pad_token_id": tokens.pad}
    return ids | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "first_k_dense_replace": shape.dense_layers,
        "intermediate_size": shape.dense_ffn_width,
        "moe_intermediate_size": shape.expert_ffn_width,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "n_shared_experts": shape.shared_experts,
        "moe_layer_freq": 1,
        "n_group": shape.expert_groups,
        "topk_group": shape.groups_per_token,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": shape.routed_scaling,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.value_dim,
        "rope_theta": shape.rope_theta,
        **_rotary(shape),
        "rope_interleave": True,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "initializer_range": shape.initializer_range,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def yarn_config(shape: DecoderShape) -> dict[str, Any] | None:
    """Return YaRN's numbers under the names of a configuration; None for plain positions."""
    if shape.yarn_factor == 1:
        return None
    return {
        "factor": shape.yarn_factor,
        "original_max_position_embeddings": shape.yarn_positions,
        "beta_fast": shape.yarn_beta_fast,
        "beta_slow": shape.yarn_beta_slow,
        "mscale": shape.yarn_mscale,
        "mscale_all_dim": shape.yarn_mscale_all_dim,
    }


def _rotary(shape: DecoderShape) -> dict[str, Any]:
    """Describe the positions; older readers only know ``rope_scaling``, and some of them only ``type``."""
    yarn = yarn_config(shape)
    if yarn is None:
        plain = {"rope_type": "default", "rope_theta": shape.rope_theta}
        return {"rope_parameters": plain, "max_position_embeddings": POSITIONS_MAX}
    return {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": shape.rope_theta, **yarn},
        "rope_scaling": {"type": "yarn", "rope_type": "yarn", "rope_theta": shape.rope_theta, **yarn},
        "max_position_embeddings": round(shape.yarn_factor * shape.yarn_positions),
    }


def vision_config(shape: VisionShape) -> dict[str, Any]:
    """Describe the tower as MoonViT."""
    return {
        "model_type": "moonvit",
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn_width,
        "patch_size": shape.patch_px,
        "merge_kernel_size": [shape.merge, shape.merge],
        "init_pos_emb_height": shape.position_rows,
        "init_pos_emb_width": shape.position_rows,
    }


def model_config(shape: ModelShape, *, tokens: TokenIds, dtype: str = "float32") -> dict[str, Any]:
    """Describe the whole model as ``KimiVLForConditionalGeneration``."""
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "vision_config": vision_config(shape.vision),
        "text_config": text_config(shape.decoder, tokens=tokens, dtype=dtype),
        "ignore_index": IGNORED_TARGET,
        "media_placeholder_token_id": tokens.media,
        "eos_token_id": tokens.end,
        "pad_token_id": tokens.pad,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "vocab_size": shape.decoder.vocabulary,
    }


def generation_config(tokens: TokenIds) -> dict[str, Any]:
    """Describe how answers are decoded: greedily, as in the evaluation of a run."""
    return {"do_sample": False, "eos_token_id": tokens.end, "pad_token_id": tokens.pad}


def preprocessor_config(shape: VisionShape, tokenizer: TokenizerFile, *, image_token: str) -> dict[str, Any]:
    """Describe how images become patches, under the names of Kimi-VL's processor; ``polyreme_processor`` reads it."""
    return {
        "processor_class": "PolyremeProcessor",
        "image_processor_type": "PolyremeImageProcessor",
        "patch_size": shape.patch_px,
        "merge_kernel_size": [shape.merge, shape.merge],
        "in_token_limit": tokenizer.image_tokens_max * shape.merge**2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_token": image_token,
        "pixel_version": tokenizer.pixel_version,
    }

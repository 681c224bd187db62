"""Tiny multimodal models made from their configuration classes, each with a prompt that has an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from tests._support.tiny import VOCAB, randomise_

IMAGE = VOCAB - 1
"""The token that stands for a part of an image."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": 16,
    "patch_size": 4,
}
_QWEN: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 4, "intermediate_size": 40}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_TYPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "gemma3": ({}, {"model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4}, 4),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", "projection_dim": 32}, {}, 16),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", "head_dim": 8}, {"vision_feature_layer": -1}, 4),
    "internvl": (
        {"model_type": "qwen2"},
        {"image_size": [16, 16], "patch_size": [4, 4]},
        {"image_seq_length": 4},
        4,
    ),
    "aya_vision": (
        {"model_type": "cohere2"},
        {"model_type": "siglip_vision_model"},
        {"adapter_layer_norm_eps": 1e-6},
        4,
    ),
    "qwen2_vl": (_MROPE, _QWEN | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, {}, 4),
    "qwen2_5_vl": (
        _MROPE,
        _QWEN | {"hidden_size": 32, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
        {},
        4,
    ),
    "qwen3_vl": (
        _MROPE,
        _QWEN
        | {"hidden_size": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {},
        4,
    ),
    "idefics3": ({"model_type": "llama"}, {}, {"scale_factor": 2}, 4),
    "qwen3_5": (
        {
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"],
            **{
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            },
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
            },
        },
        _QWEN | {"hidden_size": 32, "out_hidden_size": 64, "num_position_embeddings": 16},
        {},
        4,
    ),
    "qwen3_vl_moe": (
        _MROPE | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
        _QWEN
        | {
            **{"hidden_size": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
            "num_position_embeddings": 16,
        },
        {},
        4,
    ),
    "smolvlm": ({"model_type": "llama"}, {}, {"scale_factor": 2}, 4),
    "paligemma": (
        {"model_type": "gemma"},
        {"model_type": "siglip_vision_model", "projection_dim": 64},
        {"projection_dim": 64},
        16,
    ),
    "gemma4": (
        {
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 0,
        },
        {"num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 64},
        {"audio_config": None},
        4,
    ),
}
"""Type -> values of text_config, of vision_config and of the rest, and the tokens of the image."""
REFUSED = "aya_vision"
"""A type whose class leaves out the factor of the logits that its tower has as a causal LM."""
TOWERS = tuple(name for name in _TYPES if name != REFUSED)


def tiny_tower(model_type: str) -> PreTrainedModel:
    """Return a randomised multimodal model in float32 and eval mode."""
    text, vision, other, _ = _TYPES[model_type]
    names = dict.fromkeys(("image_token_id", "image_token_index"), IMAGE)
    if model_type.startswith("qwen"):
        names = {
            "image_token_id": IMAGE,
            "video_token_id": IMAGE - 1,
            "vision_start_token_id": IMAGE - 2,
            "vision_end_token_id": IMAGE - 3,
        }
    config = AutoConfig.for_model(model_type, text_config=TEXT | text, vision_config=VISION | vision, **names, **other)
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    randomise_(model, 0)
    return model.eval()  # type: ignore[no-any-return]


def prompt(model_type: str) -> dict[str, Tensor]:
    """Return the arguments of a forward pass over text and one image."""
    count = _TYPES[model_type][3]
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(3, VOCAB - 8, (1, 9), generator=generator)
    start = torch.full((1, 1), IMAGE - 2 if model_type.startswith("qwen") else 5)
    ids = torch.cat([words[:, :3], start, torch.full((1, count), IMAGE), words[:, 3:]], dim=1)
    pixels: Any = torch.randn(1, 3, 16, 16, generator=generator)
    more: dict[str, Any] = {}
    if model_type in ("idefics3", "smolvlm"):
        pixels = pixels[None]
    if model_type == "mistral3":
        more["image_sizes"] = torch.tensor([[16, 16]])
    if model_type.startswith("qwen"):
        pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        more["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        more["mm_token_type_ids"] = (ids == IMAGE).int()
    if model_type == "gemma4":
        pixels = torch.rand(1, 16, 3 * 4 * 4, generator=generator)
        more["image_position_ids"] = torch.cartesian_prod(torch.arange(4), torch.arange(4))[None]
    return {"input_ids": ids, "pixel_values": pixels, **more}

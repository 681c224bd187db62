"""Tiny multimodal models with a processor, to serve: a real one of Transformers, around the byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast

from tests._support.tiny import randomise_
from tests._support.tokenizer import BOS, EOS, PAD, tiny_tokenizer
from tests._support.towers import TEXT, VISION

PROMPTS = {"gemma3": "ab<start_of_image> what is it", "idefics3": "ab<image> what is it"}
"""Type -> a text with the place of an image."""
TOKENS: dict[str, dict[str, str]] = {
    "gemma3": {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"},
    "idefics3": {
        "image": "<image>",
        "fake": "<fake_token_around_image>",
        "end": "<end_of_utterance>",
        "whole": "<global-img>",
    },
}
"""Type -> the tokens that its processor needs."""


def picture() -> Image.Image:
    """Return an image of noise, as large as the tiny vision towers read."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))


def write_served(model_type: str, folder: Path) -> Path:
    """Write a randomised model with the names of the hub, its processor and its tokenizer."""
    names = TOKENS[model_type]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer,
        **{"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "model_max_length": 100_000},
        extra_special_tokens={f"{name}_token": token for name, token in names.items()},
    )
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])  # of which vLLM makes one in front of an image
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    text: dict[str, Any] = TEXT | {"head_dim": 32, "sliding_window": 64}
    vision = dict(VISION)
    if model_type == "gemma3":
        more = {"mm_tokens_per_image": 4, "image_token_index": ids["image"]}
        more |= {"boi_token_index": ids["boi"], "eoi_token_index": ids["eoi"]}
        vision["model_type"] = "siglip_vision_model"
    else:
        more = {"scale_factor": 2, "image_token_id": ids["image"]}
        text["model_type"] = "llama"
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **more)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    randomise_(model, 0)
    model.save_pretrained(folder)
    if model_type == "gemma3":
        file = folder / "model.safetensors"
        renamed = {
            name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in load_file(file).items()
        }
        save_file(renamed, file, metadata={"format": "pt"})
    _processor(model_type, tokenizer).save_pretrained(folder)
    return folder


def _processor(model_type: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    if model_type == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        images: Any = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        return Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=4)
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    size = {"longest_edge": 16}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    return Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=4)

"""A checkpoint that brings its own code: layers that are called with positional arguments and return tuples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests._support.tokenizer import tiny_tokenizer

CONFIG = """
from transformers import PretrainedConfig

class PlankConfig(PretrainedConfig):
    model_type = "plank"
    attribute_map = {"num_hidden_layers": "n_layers"}

    def __init__(self, vocab_size=384, hidden_size=32, n_layers=6, kinds=None, by_depth=False, **kwargs):
        self.vocab_size, self.hidden_size, self.n_layers, self.by_depth = vocab_size, hidden_size, n_layers, by_depth
        self.kinds = kinds or ["add", "gate"] * (n_layers // 2)
        super().__init__(**kwargs)
"""
MODEL = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_plank import PlankConfig

class PlankBlock(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.number, self.gated = number, config.kinds[number] == "gate"
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, scale, shift):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        y = self.mix(past).tanh() * scale + shift
        return (x * y.sigmoid() if self.gated else x + y, None)

class PlankForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = PlankConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stack = nn.ModuleList([PlankBlock(config, i) for i in range(config.n_layers)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, labels=None, **kwargs):
        x = self.embed(input_ids)
        scale = self.config.n_layers**-0.5 if self.config.by_depth else 0.5
        for block in self.stack:
            x, _ = block(x, scale, 0.1)
        return CausalLMOutput(logits=self.head(x))
"""


def write_remote(folder: Path, **values: Any) -> Path:
    """Write a checkpoint of random weights with its code; ``values`` are of its configuration."""
    folder.mkdir()
    (folder / "configuration_plank.py").write_text(CONFIG)
    (folder / "modeling_plank.py").write_text(MODEL)
    auto = {"AutoConfig": "configuration_plank.PlankConfig", "AutoModelForCausalLM": "modeling_plank.PlankForCausalLM"}
    config = {"model_type": "plank", "architectures": ["PlankForCausalLM"], "auto_map": auto, "n_layers": 6, **values}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"embed.weight": (384, 32), "head.weight": (384, 32)}
    for i in range(6):
        shapes |= {f"stack.{i}.mix.weight": (32, 32), f"stack.{i}.mix.bias": (32,)}
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer().save_pretrained(folder)
    return folder

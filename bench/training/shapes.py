"""Configurations without weights, of which speed and memory depend alone."""

from __future__ import annotations

from transformers import LlamaConfig

SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_2 = {
    "7B": LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
    "13B": LlamaConfig(
        vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=40,
    ),
}  # fmt: skip
SHAPES = {
    "tiny": LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=20, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32,
    ),
    **LLAMA_2,
}  # fmt: skip
"""Values of --shapes; "tiny" tries a command."""
SEVENTY = LlamaConfig(
    vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8,
)  # fmt: skip

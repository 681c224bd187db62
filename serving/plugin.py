"""What vLLM's ``vllm.general_plugins`` entry point calls in each of its processes."""

from __future__ import annotations

ARCHITECTURES = {
    f"Pruned{name}ForCausalLM": f"pyprune.serving.vllm_model:Pruned{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
"""Architecture name in config.json -> where vLLM finds its class, imported only when a checkpoint asks for it."""


def register() -> None:
    """Tell vLLM about the pruned architectures and Transformers about their configurations.

    vLLM may call this several times in one process; calling it again changes nothing.
    """
    from vllm import ModelRegistry

    import pyprune.modeling  # noqa: F401  (registers the configurations with AutoConfig)

    known = ModelRegistry.get_supported_archs()
    for name, target in ARCHITECTURES.items():
        if name not in known:
            ModelRegistry.register_model(name, target)

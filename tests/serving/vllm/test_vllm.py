"""Exported checkpoints give Transformers' log probabilities in real vLLM in float32; damaged ones are refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from transformers import AutoModelForCausalLM

from pyprune.checkpoint.save import save_checkpoint
from pyprune.families import all_families
from pyprune.modeling import pruned_config_class
from tests._support.answers import PARALLEL
from tests._support.models import TINY, VOCAB, one_of_each
from tests._support.served import (
    ANY_VLLM,
    DAMAGE,
    NEW_TOKENS,
    OPT_SIZES,
    TOP,
    Answer,
    Case,
    compare,
    damp_,
    everything,
    narrower,
    opt_per_layer,
    per_layer,
    prompts,
    run_program,
    skipping,
    skipping_and_narrower,
    uniform,
    write_case,
)
from tests._support.tiny import randomise_, shareable
from tests._support.tokenizer import tiny_tokenizer

pytestmark = ANY_VLLM

CASES = {
    "llama": Case("llama-head-dim", uniform(96), "LlamaForCausalLM"),
    "llama-as-mistral": Case("llama", uniform(70), "MistralForCausalLM"),
    "qwen2-as-llama": Case("qwen2", uniform(96), "LlamaForCausalLM"),
    "qwen3": Case("qwen3-tied", uniform(72), "Qwen3ForCausalLM"),
    "skipped-blocks": Case("llama-head-dim", skipping, "PrunedLlamaForCausalLM"),
    "llama-bias-per-layer": Case("llama-mha-bias", per_layer, "PrunedLlamaForCausalLM"),
    "llama-compensated": Case("llama-head-dim", per_layer, "PrunedLlamaForCausalLM", compensated=True),
    "mistral-compensated": Case("mistral", narrower, "LlamaForCausalLM", compensated=True),
    "qwen2-compensated": Case("qwen2-tied", per_layer, "PrunedQwen2ForCausalLM", compensated=True),
    "qwen3-compensated": Case("qwen3", skipping_and_narrower, "PrunedQwen3ForCausalLM", compensated=True),
    "opt-hidden": Case("opt", lambda plan: plan.keep_hidden(range(4, 100)), "PrunedOPTForCausalLM"),
    "opt-per-layer": Case("opt", opt_per_layer, "PrunedOPTForCausalLM"),
    "opt-skipped-blocks": Case("opt-untied", skipping, "PrunedOPTForCausalLM"),
}
CASES |= {
    "granite-bias-everything": Case("granite-tied-bias", everything, "PrunedGraniteForCausalLM"),
    "starcoder2-window-everything": Case("starcoder2-tied", everything, "PrunedStarcoder2ForCausalLM"),
    "starcoder2-compensated": Case(
        "starcoder2-no-bias", skipping_and_narrower, "PrunedStarcoder2ForCausalLM", compensated=True
    ),
    "phi-tied-everything": Case("phi-tied", everything, "PrunedPhiForCausalLM"),
    "gemma3-compensated": Case("gemma3-untied", skipping_and_narrower, "PrunedGemma3ForCausalLM", compensated=True),
    "olmo2-tied-bias-everything": Case("olmo2-tied-bias", everything, "PrunedOlmo2ForCausalLM"),
    "olmo2-compensated": Case("olmo2", skipping_and_narrower, "PrunedOlmo2ForCausalLM", compensated=True),
}
LAYERED = {name: family for name in one_of_each() if (family := all_families()[TINY[name][0]]).vllm_layer}
LLAMA_LAYER = LAYERED["llama"].vllm_layer
CASES |= {f"{name}-per-layer": Case(name, per_layer, family.pruned_model) for name, family in LAYERED.items()}
COMPILED = ["opt-per-layer", *(f"{name}-per-layer" for name, x in LAYERED.items() if x.vllm_layer != LLAMA_LAYER)]
"""One of each layer class that test_features.py does not compile in a server."""
SHARED = {
    name: Case(name, shareable, all_families()[TINY[name][0]].pruned_model)
    for name in ("opt", "phi", "gemma3", "starcoder2")
}
"""The decoder layers of the plugin that are not LLaMA's with other parts: each splits its own matrices. LLaMA's and
OLMo 2's, whose norms run over the heads of all ranks, are shared in test_features.py, on servers."""
OPT_350M = "opt-350m-layout"
DAMAGED = [(name, kind) for name in ("mistral-per-layer", "opt-per-layer") for kind in DAMAGE]
"""vLLM's LLaMA-like models and its OPT are two classes of ours; each must look at the files by itself."""
NOT_BUILT: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-tensor": ("llama-per-layer", {"tensor": 4}, "layers 0,2 have 2 query heads, which 4 tensor parallel ranks"),
    "opt-tensor": ("opt-per-layer", {"tensor": 2}, "layer 2 has 1 query head, which 2 tensor parallel ranks"),
    "llama-stages": ("skipped-blocks", {"stages": 4}, "pipeline parallel rank 0 would hold only layer 0, and"),
    "opt-stages": (
        "opt-skipped-blocks",
        {"stages": 2, "partition": "1,3"},
        "The layers are divided 1,3; attention is in 1-3.",
    ),
    "uncompiled-stages": (
        "llama-per-layer",
        {"stages": 2, "compiled": False},
        "pipeline_parallel_size is 2 and the model is not compiled, which ends vLLM",
    ),
    "draft-kinds": (
        "gemma3-per-layer",
        {"draft": True},
        "this one has full_attention and sliding_attention, whose caches vLLM keeps apart. Add --disable-hybrid-kv",
    ),
    "streamed": (  # its weights are not in the folder that is compared
        "mistral-per-layer-truncated",
        {"streamed": "s3://bucket/model", "draft": True},
        "layer 0 has 2 query and 2 KV heads",
    ),
    "float16": ("gemma3-per-layer", {"dtype": "float16"}, "vLLM does not run gemma3_text in float16. Numerical"),
    "adapters": ("llama-per-layer", {"int8": True}, "int8 product on this CPU takes no adapters (--enable-lora)."),
    "draft-stages": (
        "llama-per-layer",
        {"draft": True, "stages": 2},
        "pipeline_parallel_size is 2, and vLLM cannot build a draft model in a pipeline",
    ),
    "draft": ("mistral-per-layer", {"draft": True}, "layer 0 has 2 query and 2 KV heads, layer 1 has 4 and 2."),
}
"""What cannot be served like this: the folder, the ranks, and what the message says."""
FIRST = ("llama", "llama-per-layer")
"""A stock export and one with sizes per layer, which the first tier serves."""


def in_tiers(names: Iterable[str]) -> list[ParameterSet]:
    """The names as parameters, all but :data:`FIRST` in the second tier."""
    return [pytest.param(name, marks=[] if name in FIRST else pytest.mark.second) for name in names]


def _write_opt_350m(out: Path) -> None:
    """The norm after the block, and embeddings of another size: compaction refuses it, the plugin need not."""
    layers = {0: {"num_attention_heads": 2}, 1: {"skip": ["attention"]}, 2: {"ffn_dim": 24, "skip": []}}
    sizes = OPT_SIZES | {"word_embed_proj_dim": 64, "ffn_dim": 40, "head_dim": 32, "num_hidden_layers": 3}
    config = pruned_config_class("opt")(
        vocab_size=VOCAB, max_position_embeddings=512, do_layer_norm_before=False, per_layer_config=layers, **sizes
    )
    model = AutoModelForCausalLM.from_config(config)
    randomise_(model, 0)
    damp_(model)
    save_checkpoint(model.eval(), tiny_tokenizer(), out, plan=None, provenance={})


def _run_vllm(
    models: Sequence[Path], damaged: Sequence[Path] = (), environment: Mapping[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """What vLLM makes of the prompts, and how it refuses: one engine after the other, in another process than this."""
    job = {
        "models": [str(folder) for folder in models],
        "damaged": [str(folder) for folder in damaged],
        "prompts": prompts(),
        "new_tokens": NEW_TOKENS,
        "top": TOP,
        **more,
    }
    replies: dict[str, Any] = run_program("vllm_child.py", job, **(environment or {}))
    return replies


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def served(root: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every case exported and served, and damaged copies of two of them; of the first tier its own cases alone."""
    if request.config.getoption("tier") != "all":
        for name in FIRST:
            write_case(CASES[name], root / name)
        return _run_vllm([root / name for name in FIRST], reload=True)
    for name, case in CASES.items():
        write_case(case, root / name)
    _write_opt_350m(root / OPT_350M)
    for name, kind in DAMAGED:
        DAMAGE[kind](Path(shutil.copytree(root / name, root / f"{name}-{kind}")))
    models = [root / name for name in (*CASES, OPT_350M)]
    built = {name: {"model": str(root / case), **ranks} for name, (case, ranks, _) in NOT_BUILT.items()}
    return _run_vllm(models, [root / f"{name}-{kind}" for name, kind in DAMAGED], built=built, reload=True)


@pytest.fixture(scope="module")
def compiled(root: Path, served: dict[str, Any]) -> dict[str, Any]:
    """Some of the same exports, run as plain `vllm serve` does: compiled."""
    return _run_vllm([root / name for name in COMPILED], compiled=True)


@pytest.fixture(scope="module")
def shared(root: Path) -> dict[str, Any]:
    """Two ranks that share the layers of each model."""
    for name, case in SHARED.items():
        write_case(case, root / f"shared-{name}")
    return _run_vllm([root / f"shared-{name}" for name in SHARED], environment=PARALLEL, ranks=2)


@pytest.mark.parametrize("name", in_tiers([*CASES, OPT_350M]))
def test_served_log_probabilities_are_transformers(name: str, root: Path, served: dict[str, Any]) -> None:
    answers: list[Answer] = served[str(root / name)]
    compare(root / name, prompts(), answers[: len(prompts())])


@pytest.mark.second
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_log_probabilities_are_transformers(name: str, root: Path, compiled: dict[str, Any]) -> None:
    compare(root / name, prompts(), compiled[str(root / name)])


@pytest.mark.second
@pytest.mark.parametrize("name", SHARED)
def test_log_probabilities_of_two_ranks_are_transformers(name: str, root: Path, shared: dict[str, Any]) -> None:
    compare(root / f"shared-{name}", prompts(), shared[str(root / f"shared-{name}")])


@pytest.mark.parametrize("name", in_tiers([*CASES, OPT_350M]))
def test_weights_that_vllm_loads_again_are_all_there(name: str, root: Path, served: dict[str, Any]) -> None:
    answers: list[Answer] = served[str(root / name)]
    compare(root / name, prompts(), answers[len(prompts()) :])


@pytest.mark.second
@pytest.mark.parametrize(("name", "kind"), DAMAGED)
def test_damaged_checkpoint_is_refused(
    name: str, kind: str, root: Path, tmp_path: Path, served: dict[str, Any]
) -> None:
    file = DAMAGE[kind](Path(shutil.copytree(root / name, tmp_path / "again")))
    message = served[str(root / f"{name}-{kind}")]
    assert message.startswith(f"CheckpointError: {root / f'{name}-{kind}' / file} ")


@pytest.mark.second
@pytest.mark.parametrize("name", NOT_BUILT)
def test_ranks_that_cannot_hold_the_layers_are_refused_before_one_is_built(
    name: str, root: Path, served: dict[str, Any]
) -> None:
    case, _, said = NOT_BUILT[name]
    message = served[name]
    assert message.startswith(f"ConfigError: {root / case} cannot be served like this: ")
    assert said in message

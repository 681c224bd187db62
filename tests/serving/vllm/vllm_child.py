"""Greedy generation by real vLLM, log probabilities as JSON on stdout: a program that test_vllm.py and others run.

stdin: {"models": [folder, ...], "damaged": [folder, ...], "prompts": [[token id, ...], ...], "new_tokens": n, "top": k}
and perhaps "dtype" (default: float32), "compiled": true (default: eager), "ranks": n of tensor parallelism, "reload":
true (every model answers once more, after its weights were wiped and vLLM was asked to load them again) and "built":
{name: {"model": folder, "tensor": ranks, "stages": ranks, "partition": layers per rank, "draft": bool, "dtype": name,
"streamed": URI of the weights, "compiled": bool}}, of which the model class alone is built, and "attempted": [folder,
...], of which each may end in an error
stdout: {folder: [{"tokens": [generated], "prompt": [logprob of prompt[1:]], "top": [{token: logprob}]}, ...]}, and for
a damaged folder and what is built the error instead: {folder or name: "Type: message"}, or null when there was none;
for an attempted one either of the two
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO
from unittest import mock


def main() -> None:
    replies, job = read_job()
    attempted: list[str] = job.get("attempted", [])
    _load_classes([*job["models"], *attempted])
    # First of all: an engine keeps the environment variables that it has seen.
    answers: dict[str, Any] = {name: _built(**case) for name, case in job.get("built", {}).items()}
    answers |= {model: _answers(model, job) for model in job["models"]}
    answers |= {model: _attempt(model, job) for model in attempted}
    json.dump(answers | {model: _refusal(model, job) for model in job["damaged"]}, replies)
    replies.close()


def read_job() -> tuple[TextIO, Any]:
    """(Where to write the replies, what is asked on stdin); whatever else is printed goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies, json.load(sys.stdin)


def _load_classes(models: list[str]) -> None:
    """Import the model classes here; vLLM would start a process for each of them only to look at it."""
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for folder in models:
        [name] = json.loads((Path(folder) / "config.json").read_text())["architectures"]
        if name in ModelRegistry.models:  # others run on layers of Transformers
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _attempt(model: str, job: dict[str, Any]) -> list[dict[str, Any]] | str:
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        return _answers(model, job)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    gc.collect()  # an engine that failed would end the groups of the next one when it is freed
    cleanup_dist_env_and_memory()
    return message


def _refusal(model: str, job: dict[str, Any]) -> str | None:
    found = _attempt(model, job)
    return found if isinstance(found, str) else None


def _built(
    model: str,
    tensor: int = 1,
    stages: int = 1,
    partition: str | None = None,
    draft: bool = False,
    dtype: str = "float32",
    streamed: str = "",
    compiled: bool = True,
    int8: bool = False,
) -> str | None:
    """How the class refuses to be built in a rank; no rank is there, so that nothing else can come of it.

    With ``int8`` its weights are said to be, and adapters on them asked for.
    """
    import torch
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.config import CompilationMode

    config = AutoConfig.from_pretrained(model)
    if int8:
        config.quantization_config = {"format": "int-quantized"}
    facts: dict[str, Any] = {"dtype": getattr(torch, dtype), "model_weights": streamed}
    model_config = SimpleNamespace(model=model, hf_config=config, **facts)
    parallel = SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    whole = SimpleNamespace(
        model_config=model_config,
        parallel_config=parallel,
        compilation_config=SimpleNamespace(mode=CompilationMode.VLLM_COMPILE if compiled else CompilationMode.NONE),
        use_v2_model_runner=False,
        lora_config=SimpleNamespace() if int8 else None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=SimpleNamespace(
            uses_draft_model=lambda: draft, draft_model_config=model_config, target_parallel_config=parallel
        ),
    )
    try:
        with mock.patch.dict(os.environ, {"VLLM_PP_LAYER_PARTITION": partition} if partition else {}):
            ModelRegistry.models[config.architectures[0]].load_model_cls()(vllm_config=whole)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def engine(model: str, **options: Any) -> Iterator[Any]:
    """vLLM's engine in this process, eager unless told otherwise, with room for a few tiny sequences."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    given = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, **options}
    try:
        yield LLM(model=model, kv_cache_memory_bytes=64 * 2**20, **given)
    finally:
        cleanup_dist_env_and_memory()


def _answers(model: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["new_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=job["top"],
        prompt_logprobs=0,
    )
    prompts = job["prompts"]
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    with engine(
        model,
        dtype=job.get("dtype", "float32"),
        enforce_eager=not job.get("compiled"),
        tensor_parallel_size=job.get("ranks", 1),
        max_model_len=256,
        max_num_seqs=len(prompts),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    ) as llm:
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        if job.get("reload"):
            llm.apply_model(_wipe)
            llm.collective_rpc("reload_weights")
            outputs += llm.generate(inputs, sampling, use_tqdm=False)
            prompts = [*prompts, *prompts]
    return [plain_answer(prompt, out) for prompt, out in zip(prompts, outputs, strict=True)]


def _wipe(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


def plain_answer(prompt: Sequence[int], output: Any) -> dict[str, Any]:
    """An answer of vLLM's with its log probabilities, as plain data."""
    answer = output.outputs[0]
    pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return {
        "tokens": list(answer.token_ids),
        "prompt": [entry[token].logprob for token, entry in pairs],
        "top": [{str(token): entry.logprob for token, entry in step.items()} for step in answer.logprobs],
    }


if __name__ == "__main__":
    main()

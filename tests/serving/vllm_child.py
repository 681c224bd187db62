"""Greedy generation by real vLLM, log probabilities as JSON on stdout: a program that test_vllm.py and others run.

stdin: {"models": [folder, ...], "damaged": [folder, ...], "prompts": [[token id, ...], ...], "new_tokens": n, "top": k}
and perhaps "dtype" (default: float32)
stdout: {folder: [{"tokens": [generated], "prompt": [logprob of prompt[1:]], "top": [{token: logprob}]}, ...]}, and for
a damaged folder the error instead: {folder: "Type: message"}, or null when there was none
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    _load_classes(job["models"])
    answers: dict[str, Any] = {model: _answers(model, job) for model in job["models"]}
    json.dump(answers | {model: _refusal(model, job) for model in job["damaged"]}, replies)
    replies.close()


def _load_classes(models: list[str]) -> None:
    """Import the model classes here; vLLM would start a process for each of them only to look at it."""
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for folder in models:
        [name] = json.loads((Path(folder) / "config.json").read_text())["architectures"]
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _refusal(model: str, job: dict[str, Any]) -> str | None:
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        _answers(model, job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        cleanup_dist_env_and_memory()
    return None


def _answers(model: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=model,
        dtype=job.get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=len(job["prompts"]),
        kv_cache_memory_bytes=64 * 2**20,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["new_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=job["top"],
        prompt_logprobs=0,
    )
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    del llm
    cleanup_dist_env_and_memory()
    return [_plain(prompt, out) for prompt, out in zip(job["prompts"], outputs, strict=True)]


def _plain(prompt: list[int], output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return {
        "tokens": list(answer.token_ids),
        "prompt": [entry[token].logprob for token, entry in pairs],
        "top": [{str(token): entry.logprob for token, entry in step.items()} for step in answer.logprobs],
    }


if __name__ == "__main__":
    main()

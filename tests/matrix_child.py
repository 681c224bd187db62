"""Compare a checkpoint in vLLM with Transformers; matrix.py runs it in the environment of one vLLM release.

    python matrix_child.py FOLDER

Prints a line of JSON for each step, {"step": name, ...}; a step that fails has "error" and is the last one. It imports
nothing of tests/, which is not installed there.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

PROMPTS = [[5, 9, 3, 7, 4], [11, 4] * 20, list(range(3, 90))]
NEW_TOKENS = 8


def main(folder: str) -> None:
    """Take the steps in turn."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print goes to stderr

    def say(step: str, **facts: Any) -> None:
        replies.write(json.dumps({"step": step, **facts}) + "\n")
        replies.flush()

    versions = {name: version(name) for name in ("torch", "transformers")}
    step = "loads"
    try:
        answers = _in_vllm(folder)
        say(step, versions=versions)
        step = "log probabilities"
        say(step, difference=_difference(folder, answers), prompts=PROMPTS, tokens=[a["tokens"] for a in answers])
    except BaseException as error:
        say(step, versions=versions, error=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        raise


def _in_vllm(folder: str) -> list[dict[str, Any]]:
    """Greedy tokens, and the log probability of every prompt token but the first and of every new token."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=32 * 2**20,
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1, prompt_logprobs=0
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = []
    for prompt, output in zip(PROMPTS, llm.generate(prompts, sampling, use_tqdm=False), strict=True):
        new = output.outputs[0]
        pairs = [*zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        pairs += zip(new.token_ids, new.logprobs, strict=True)
        found.append({"tokens": list(new.token_ids), "logprobs": [entry[token].logprob for token, entry in pairs]})
    return found


def _difference(folder: str, answers: list[dict[str, Any]]) -> float:
    """The largest difference from Transformers' log probabilities, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    import pyprune.modeling  # noqa: F401  (registers the pruned architectures with the Auto classes)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([*prompt, *answer["tokens"]])
        with torch.no_grad():
            expected = model(tokens[None]).logits[0].log_softmax(-1)
        own = expected[range(len(tokens) - 1), tokens[1:]]
        apart = (own - torch.tensor(answer["logprobs"])).abs().max()
        worst = float(torch.maximum(apart, torch.tensor(worst)))  # not a number where one of both is none
    return worst


if __name__ == "__main__":
    main(sys.argv[1])

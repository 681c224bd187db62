"""What people turn on in vLLM's engine, one model after the other: a program that test_family_features.py runs.

stdin: {"models": {name: {"folder": folder, "adapter": folder}}, "drafts": {name: {"dense": folder, "draft": folder,
"options": of the engine}},
"prompts": [[token id, ...], ...], "long": [token id, ...], "letters": [token id, ...], "schema": of an answer in JSON,
"chunk": tokens of a step, "new_tokens": n, "top": k}
stdout: {"models": {name: {"plain": answers, "adapted": answers, "long": [{"tokens", "cached"}, ...], "several":
[{"tokens", "log_probabilities"}, ...], "json": text}}, "drafts": {name: {"tokens": [[generated], ...], "drafted": n,
"accepted": n}}}; answers are those of vllm_child.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vllm_child import engine, plain_answer, read_job


def main() -> None:
    replies, job = read_job()
    models = {name: _answers(**case, job=job) for name, case in job["models"].items()}
    drafts = {name: _drafted(**case, job=job) for name, case in job["drafts"].items()}
    json.dump({"models": models, "drafts": drafts}, replies)
    replies.close()


def _answers(folder: str, adapter: str, job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    greedy = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True)
    with_probabilities = SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, logprobs=job["top"], prompt_logprobs=0
    )
    drawn = SamplingParams(temperature=1, seed=5, n=3, max_tokens=job["new_tokens"], ignore_eos=True, logprobs=0)
    schema = StructuredOutputsParams(json=job["schema"])
    in_json = SamplingParams(temperature=1, seed=1, max_tokens=100, structured_outputs=schema)
    options = {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": job["chunk"],
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "disable_log_stats": True,
    }
    with engine(folder, **options, enable_lora=True, max_lora_rank=8) as llm:

        def ask(prompts: Sequence[Sequence[int]], sampling: Any, **more: Any) -> Any:
            return llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False, **more)

        prompts, adapted = job["prompts"], LoRARequest("adapter", 1, adapter)
        long = [ask([job["long"]], greedy)[0] for _ in range(2)]

        def answered(**more: Any) -> list[dict[str, Any]]:
            # One by one: vLLM 0.32 on a CPU ends where several ask an adapter for the probabilities of their prompts.
            return [plain_answer(p, ask([p], with_probabilities, **more)[0]) for p in prompts]

        found = {
            "plain": answered(),
            "adapted": answered(lora_request=adapted),
            "long": [{"tokens": list(x.outputs[0].token_ids), "cached": x.num_cached_tokens} for x in long],
            "several": [_with_probabilities(out) for out in ask(prompts[1:2], drawn)[0].outputs],
            "json": ask([job["letters"]], in_json)[0].outputs[0].text,
        }
    return found


def _with_probabilities(output: Any) -> dict[str, Any]:
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return {"tokens": list(output.token_ids), "log_probabilities": [step[token].logprob for token, step in pairs]}


def _drafted(dense: str, draft: str, options: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=4 * job["new_tokens"], ignore_eos=True)
    speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    with engine(dense, speculative_config=speculation, disable_log_stats=False, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
        counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {
        "tokens": [list(out.outputs[0].token_ids) for out in outputs],
        "drafted": counted["vllm:spec_decode_num_draft_tokens"],
        "accepted": counted["vllm:spec_decode_num_accepted_tokens"],
    }


if __name__ == "__main__":
    main()

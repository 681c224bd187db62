"""Greedy answers of real vLLM to a text and to a text with an image, as JSON on stdout; test_towers.py runs it.

stdin: {"models": {folder: text with the place of an image}, "text": text, "new_tokens": n, "top": k}
stdout: {folder: [answer to the text, answer about the image]}; an answer as of vllm_child.py, with the "ids" of its
prompt
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests._support.served_towers import picture
from tests.serving.vllm.vllm_child import engine, plain_answer, read_job


def main() -> None:
    replies, job = read_job()
    answers = {folder: _answers(folder, text, job) for folder, text in job["models"].items()}
    json.dump(answers, replies)
    replies.close()


def _answers(folder: str, text: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, logprobs=job["top"], prompt_logprobs=0
    )
    prompts: list[Any] = [{"prompt": job["text"]}, {"prompt": text, "multi_modal_data": {"image": picture()}}]
    options: dict[str, Any] = {"enable_prefix_caching": False, "disable_log_stats": True}
    with engine(folder, max_model_len=256, limit_mm_per_prompt={"image": 1}, **options) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [{**plain_answer(out.prompt_token_ids, out), "ids": list(out.prompt_token_ids)} for out in outputs]


if __name__ == "__main__":
    main()

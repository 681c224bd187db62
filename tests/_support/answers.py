"""Requests to servers: completions with log probabilities, which Transformers computes too; JSON and tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NEW_TOKENS, TOP = 6, 4
"""Tokens of an answer, and most likely tokens of each of its positions."""
TOLERANCE = 1e-5
"""Of log probabilities in float32."""
PARALLEL = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Environment for several ranks on a CPU: by itself vLLM gives each a memory node of its own."""

LIGHT: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "room": {"enum": ["kitchen", "attic"]}},
    "required": ["on", "room"],
    "additionalProperties": False,
}
"""A schema of answers in JSON."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""For tiny tokenizers."""
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "switch", "parameters": LIGHT, "strict": True}}
JSON_FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "light", "schema": LIGHT}}
"""As chats ask for them."""

Answer = dict[str, Any]
"""{"tokens": [generated], "prompt": [log probability of prompt[1:]], "top": [{token: log probability}]}"""


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Draw token ids of prompts of these lengths, without special ones; equal lengths give equal prompts."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def chat_request(model: str, **options: Any) -> dict[str, Any]:
    """Make a request to /v1/chat/completions for an answer in a form that the options ask for.

    Drawn at random: a greedy random model might write blanks for ever.

    Args:
        model: its name on the server.
        options: such as response_format or tools.
    """
    messages = [{"role": "user", "content": "Switch the light."}]
    return {"model": model, "messages": messages, "temperature": 1, "seed": 1, "max_tokens": 600, **options}


def is_light(text: str | None) -> bool:
    """Check whether an answer is JSON that follows the schema :data:`LIGHT`."""
    try:
        answer = json.loads(text or "")
    except ValueError:
        return False
    if not isinstance(answer, dict) or set(answer) != {"on", "room"}:
        return False
    return isinstance(answer["on"], bool) and answer["room"] in LIGHT["properties"]["room"]["enum"]


def completion_request(model: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Make a request to /v1/completions for a greedy answer with log probabilities of prompt and new tokens.

    Args:
        model: its name on the server.
        prompt: token ids.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": TOP,
        "prompt_logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }


def answer_in(reply: dict[str, Any], prompt: Sequence[int]) -> Answer:
    """Read the reply to :func:`completion_request`."""
    [choice] = reply["choices"]
    asked = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
    return {
        "tokens": choice["token_ids"],
        "prompt": [entry[str(token)]["logprob"] for token, entry in asked],
        "top": [
            {name.removeprefix("token_id:"): value for name, value in step.items()}
            for step in choice["logprobs"]["top_logprobs"]
        ],
    }


@torch.no_grad()
def log_probabilities(model: Any, tokens: Sequence[int]) -> Tensor:
    """Compute those of every next token after each of these with Transformers: float32 [tokens, vocabulary]."""
    return model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]


def below_most_likely(rows: Tensor, tokens: Sequence[int]) -> float:
    """How far the log probability of a token is below its position's largest, at most: 0 for a greedy answer.

    Args:
        rows: log probabilities [tokens, vocabulary].
        tokens: one for each row.
    """
    chosen = rows[range(len(tokens)), list(tokens)]
    return float((rows.amax(-1) - chosen).max())


def served_and_expected(expected: Tensor, prompt: Sequence[int], answer: Answer) -> tuple[Tensor, Tensor]:
    """The log probabilities of an answer and the same ones of Transformers, float32, one dimension each.

    Args:
        expected: :func:`log_probabilities` of the prompt and the answer's tokens.
        prompt: token ids.
        answer: its log probabilities of prompt tokens and of the most likely tokens of each new position are compared.
    """
    pairs = list(zip(answer["prompt"], expected[range(len(prompt) - 1), list(prompt[1:])].tolist(), strict=True))
    for row, top in zip(expected[len(prompt) - 1 : -1], answer["top"], strict=True):
        pairs += [(value, float(row[int(token)])) for token, value in top.items()]
    served, own = zip(*pairs, strict=True)
    return torch.tensor(served), torch.tensor(own)

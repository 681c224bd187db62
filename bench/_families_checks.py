"""What bench/families.py asks of a server; each answer is compared with Transformers in float32."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench._answers import (
    JSON_FORM,
    TOLERANCE,
    TOOL,
    answer_in,
    below_most_likely,
    chat_request,
    completion_request,
    is_light,
    log_probabilities,
    random_prompts,
    served_and_expected,
)
from bench._soak_client import Outcome, Request, send_all
from bench._tiny import VOCAB
from bench.soak import at_rest, metric
from pyprune.errors import PypruneError, shown
from pyprune.serving.engines import EngineError
from pyprune.serving.load.capacity import NOT_COMPILED
from pyprune.serving.load.server import Server
from pyprune.serving.widths import KV_BLOCK_TOKENS

POSITIONS, CHUNK = 131_072, 512
"""Tokens of the longest sequence, and of one step of the engine."""
LENGTHS, LONG = (2, 9, 40, 150), 3_000
"""Tokens of the prompts; one of the short ones is longer than a block."""
STREAMED, SEVERAL, CANCELLED_AFTER = 12, 2, 2
ANSWER_S, COUNTED_S = 300.0, 60.0


class WrongAnswer(PypruneError):
    """A server did not answer as it should; the message is the reason in the table."""


@dataclass
class Asked:
    """A server, and what its model says in Transformers.

    Attributes:
        server: that is asked.
        model: of the same checkpoint, in float32.
        difference: the largest between log probabilities so far.
    """

    server: Server
    model: Any
    difference: float = 0.0

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """A completion.

        Raises:
            EngineError: the server has ended, or gave none.
        """
        text = self.server.post(path, body, timeout=ANSWER_S)
        if text is None:
            self.server.check()
            raise EngineError(f"The server gave no answer to {shown(body)} ({path}).")
        reply: dict[str, Any] = json.loads(text)
        return reply

    def chat(self, **options: Any) -> dict[str, Any]:
        """The message that answers another, in a form that the options ask for."""
        reply = self.post(chat_request(self.server.model, **options), "/v1/chat/completions")
        return dict(reply["choices"][0]["message"])

    def choices(self, prompt: Sequence[int], new_tokens: int, **options: Any) -> list[dict[str, Any]]:
        """The answers to a prompt, greedy unless said otherwise and never ended by a token."""
        asked = {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, **options}
        reply = self.post({"model": self.server.model, "return_token_ids": True, **asked})
        return list(reply["choices"])

    def compare(self, served: Tensor, expected: Tensor) -> None:
        """Note how far log probabilities are apart."""
        self.difference = max(self.difference, float((served - expected).abs().max()))

    def greedy(self, prompt: Sequence[int], tokens: Sequence[int], what: str) -> None:
        """Refuse tokens that are not the most likely ones.

        Raises:
            WrongAnswer: with what they are of.
        """
        rows = log_probabilities(self.model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        gap = below_most_likely(rows, tokens)
        if not gap <= TOLERANCE:
            raise WrongAnswer(f"{what}: a token is {gap:.1e} less likely than the most likely one")

    def counted(self, name: str) -> float:
        """The value of one of the server's metrics."""
        return metric(self.server.get("/metrics") or "", name)


def check_compiled(asked: Asked) -> None:
    """The model was compiled: nothing of that is to be seen in the answers."""
    mode = asked.server.facts.compilation
    if mode in (None, NOT_COMPILED):
        raise WrongAnswer(f"vLLM did not compile the model; its compilation mode is {mode}")


def check_log_probabilities(asked: Asked) -> None:
    """Of prompt tokens and of the most likely new ones, over short prompts and one that is read in chunks."""
    for prompt in random_prompts((*LENGTHS, LONG), VOCAB):
        answer = answer_in(asked.post(completion_request(asked.server.model, prompt)), prompt)
        asked.compare(
            *served_and_expected(log_probabilities(asked.model, [*prompt, *answer["tokens"]]), prompt, answer)
        )
        asked.greedy(prompt, answer["tokens"], f"prompt of {len(prompt)} tokens")
    if not asked.difference <= TOLERANCE:
        raise WrongAnswer(f"log probabilities differ by {asked.difference:.1e}")


def check_prefix_cache(asked: Asked) -> None:
    """A long prompt that is asked twice is read from the cache the second time, all but the last blocks of it."""
    [prompt] = random_prompts([LONG + 1], VOCAB)
    hits = "vllm:prefix_cache_hits_total"
    before = asked.counted(hits)
    first = asked.choices(prompt, STREAMED)[0]["token_ids"]
    asked.greedy(prompt, first, "long prompt")
    if asked.choices(prompt, STREAMED)[0]["token_ids"] != first:
        raise WrongAnswer("a prompt from the cache has another answer")
    block = KV_BLOCK_TOKENS
    least = LONG // block * block - 2 * block  # of a sliding window, vLLM finds a block less
    if not _until(lambda: asked.counted(hits) - before >= least):
        raise WrongAnswer(f"{asked.counted(hits) - before:.0f} of {len(prompt)} tokens came from the prefix cache")


def check_stream(asked: Asked) -> None:
    """A stream brings the tokens of the answer."""
    [prompt] = random_prompts([41], VOCAB)
    outcome = _sent(asked, Request(tuple(prompt), STREAMED))
    if outcome.status != "finished":
        raise WrongAnswer(f"stream: {outcome.error}")
    asked.greedy(prompt, outcome.tokens, "stream")
    if list(outcome.tokens) != asked.choices(prompt, STREAMED)[0]["token_ids"]:
        raise WrongAnswer("a stream brings other tokens than the same answer in one piece")


def check_several(asked: Asked) -> None:
    """Several answers to one prompt, drawn at random, differ and have the probabilities of Transformers."""
    [prompt] = random_prompts([10], VOCAB)
    choices = asked.choices(prompt, STREAMED, n=SEVERAL, temperature=1, seed=5, logprobs=1)
    if len({tuple(choice["token_ids"]) for choice in choices}) != SEVERAL:
        raise WrongAnswer(f"n={SEVERAL}: the answers are the same, or not as many")
    for choice in choices:
        tokens = choice["token_ids"]
        rows = log_probabilities(asked.model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        asked.compare(torch.tensor(choice["logprobs"]["token_logprobs"]), rows[range(len(tokens)), tokens])
    if not asked.difference <= TOLERANCE:
        raise WrongAnswer(f"n={SEVERAL}: log probabilities differ by {asked.difference:.1e}")


def check_schema(asked: Asked) -> None:
    """A chat's answer is JSON that keeps to a schema."""
    answer = asked.chat(response_format=JSON_FORM)["content"]
    if not is_light(answer):
        raise WrongAnswer(f"JSON schema: the answer is {shown(answer)}")


def check_tool(asked: Asked) -> None:
    """A tool that the client names is called, with arguments as its schema says."""
    name = TOOL["function"]["name"]
    named = {"type": "function", "function": {"name": name}}
    calls = asked.chat(tools=[TOOL], tool_choice=named).get("tool_calls") or []
    found = [call["function"] for call in calls]
    if not found or any(call["name"] != name or not is_light(call["arguments"]) for call in found):
        raise WrongAnswer(f"tool: the calls are {shown(found)}")


def check_cancelled(asked: Asked) -> None:
    """A request ends soon after its client hangs up, and others are answered."""
    generated = "vllm:generation_tokens_total"
    before = asked.counted(generated)
    cancelled, prompt = random_prompts([20, 42], VOCAB)
    long = POSITIONS - 100
    outcome = _sent(asked, Request(tuple(cancelled), long, CANCELLED_AFTER))
    if outcome.status != "cancelled":
        raise WrongAnswer(f"a request that was to be cancelled: {outcome.status} {outcome.error}")
    asked.greedy(prompt, asked.choices(prompt, STREAMED)[0]["token_ids"], "after a cancelled request")
    if any(at_rest(asked.server)["gauges"].values()):
        raise WrongAnswer("a cancelled request still runs after a minute")
    # So many that a busy machine, which sees late that nobody listens, is not through half of them by then.
    if asked.counted(generated) - before > long / 2:
        raise WrongAnswer("a cancelled request ran to its end")


Check = Callable[[Asked], None]
CHECKS: dict[str, Check] = {
    "compiled": check_compiled,
    "log probabilities": check_log_probabilities,
    "prefix cache": check_prefix_cache,
    "stream": check_stream,
    "n": check_several,
    "JSON schema": check_schema,
    "tool": check_tool,
    "cancelled": check_cancelled,
}
"""What a server is asked, in this order."""


def _sent(asked: Asked, request: Request) -> Outcome:
    """What becomes of one streamed request."""
    outcomes: list[Outcome] = []
    asyncio.run(send_all(asked.server.url, asked.server.model, [request], 1, outcomes.append))
    return outcomes[0]


def _until(reached: Callable[[], bool]) -> bool:
    """Whether something comes true within a minute: metrics are counted a moment after the answer."""
    end = time.monotonic() + COUNTED_S
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True

"""Checks of a server's answers: each is compared with Transformers in float32. And the ways to serve a family."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench._machine import metric
from pyprune.checkpoint.load import load_model
from pyprune.errors import PypruneError, shown
from pyprune.serving.load.capacity import NOT_COMPILED
from pyprune.serving.load.server import Server, server_environment
from pyprune.serving.widths import KV_BLOCK_TOKENS
from tests._support.answers import (
    JSON_FORM,
    PARALLEL,
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
from tests._support.families_made import (
    ADAPTED,
    INT8,
    POSITIONS,
    Made,
    write_adapters,
    write_changeable,
    write_cut,
    write_draft,
    write_int8,
)
from tests._support.rounded import round_inputs_, with_weights_of
from tests._support.tiny import VOCAB, last_of
from tests.serving.soak import at_rest
from tests.serving.soak_client import Outcome, Request, send_all

CHUNK, CACHE_BYTES = 512, 2**30
"""Tokens of one step of the engine, and the size of its key-value cache."""
LENGTHS, LONG = (2, 9, 40, 150), 3_000
"""Tokens of the prompts; one of the short ones is longer than a block."""
STREAMED, SEVERAL, CANCELLED_AFTER, DRAFTED = 12, 2, 2, 32
ROUNDING, EQUAL = 0.6, 0.1
"""Limits of a model in int8: the root mean square distance from Transformers with weights and inputs rounded alike, as
a share of what rounding the inputs changes, and the least share of equal log probabilities of short prompts. An input
near the middle of two steps is rounded to either, and later values differ too: 0.04 to 0.44 were measured. With another
rule of rounding nothing is equal."""
APART = 0.1
"""Least difference between the log probabilities of two models that must differ."""
ANSWER_S, COUNTED_S = 300.0, 60.0


class WrongAnswer(PypruneError):
    """A server did not answer as it should; the message is the reason."""


@dataclass
class Asked:
    """A server, and its model in Transformers.

    Attributes:
        server: the server to ask.
        model: of the same checkpoint, in float32.
        folder: of the checkpoint.
        other: folder of a checkpoint that answers are compared with as well, as in families_made.py.
        difference: the largest between log probabilities so far; None = none were compared.
        rounding: how far answers in int8 are from what they should be, as a share of what rounding the inputs changes.
        equal: share of the log probabilities in int8 that are what they should be.
    """

    server: Server
    model: Any
    folder: Path = Path()
    other: Path | None = None
    difference: float | None = None
    rounding: float | None = None
    equal: float | None = None

    def figures(self) -> str:
        """Return the largest difference, or those of a model in int8."""
        if self.rounding is not None:
            return f"{self.rounding:.2f} ({self.equal:.0%} equal)"
        return "-" if self.difference is None else f"{self.difference:.1e}"

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """Return the server's answer.

        Raises:
            pyprune.serving.engines.EngineError: the server has ended, or gave none.
        """
        reply: dict[str, Any] = json.loads(self.server.post(path, body, timeout=ANSWER_S))
        return reply

    def chat(self, **options: Any) -> dict[str, Any]:
        """Return the message that answers another, in the form that the options request."""
        reply = self.post(chat_request(self.server.model, **options), "/v1/chat/completions")
        return dict(reply["choices"][0]["message"])

    def choices(self, prompt: Sequence[int], new_tokens: int, **options: Any) -> list[dict[str, Any]]:
        """Return the answers to a prompt, greedy by default and never ended by a token."""
        asked = {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, **options}
        reply = self.post({"model": self.server.model, "return_token_ids": True, **asked})
        return list(reply["choices"])

    def compare(self, served: Tensor, expected: Tensor) -> None:
        """Record the largest difference between log probabilities."""
        apart = (served - expected).abs().max()
        # torch's maximum is not a number where one of both is none, unlike max().
        self.difference = float(torch.maximum(apart, torch.tensor(self.difference or 0.0)))

    def refuse_difference(self, what: str = "") -> None:
        """Refuse log probabilities that differ by more than rounding does.

        Raises:
            WrongAnswer: its message begins with ``what``.
        """
        if self.difference is not None and not self.difference <= TOLERANCE:
            raise WrongAnswer(f"{what}log probabilities differ by {self.difference:.1e}")

    def compare_model(self, model: Any, name: str, lengths: Sequence[int]) -> None:
        """Compare greedy answers of another model of the server, as :func:`_compare_all` does."""
        other = replace(self, model=model)
        try:
            _compare_all(other, name, lengths)
        finally:
            self.difference = other.difference

    def greedy(self, prompt: Sequence[int], tokens: Sequence[int], what: str) -> None:
        """Refuse tokens that are not the most likely ones.

        Raises:
            WrongAnswer: its message begins with ``what``.
        """
        rows = log_probabilities(self.model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        gap = below_most_likely(rows, tokens)
        if not gap <= TOLERANCE:
            raise WrongAnswer(f"{what}: a token is {gap:.1e} less likely than the most likely one")

    def counted(self, name: str) -> float:
        """Return the value of one of the server's metrics."""
        return metric(self.server.metrics(), name)


def check_compiled(asked: Asked) -> None:
    """The model was compiled, which the answers do not show."""
    mode = asked.server.facts.compilation
    if mode in (None, NOT_COMPILED):
        raise WrongAnswer(f"vLLM did not compile the model; its compilation mode is {mode}")


def check_log_probabilities(asked: Asked) -> None:
    """Log probabilities agree for prompt tokens and new ones, over short prompts and one that is read in chunks."""
    _compare_all(asked, asked.server.model, (*LENGTHS, LONG))


def check_adapters(asked: Asked) -> None:
    """The checkpoint with adapters answers as the merged checkpoint, which differs from the plain one."""
    merged, _ = load_model(asked.other or asked.folder)
    _refuse_alike(asked.model, merged, "the recovery changed nothing")
    asked.compare_model(merged, ADAPTED, LENGTHS)


def check_draft(asked: Asked) -> None:
    """A draft changes no token, and more than half of its proposed tokens are accepted."""
    for prompt in random_prompts(LENGTHS, VOCAB):
        asked.greedy(prompt, asked.choices(prompt, DRAFTED)[0]["token_ids"], f"prompt of {len(prompt)} tokens")
    proposed, accepted = (asked.counted(f"vllm:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))
    if not accepted > proposed / 2 > 0:
        raise WrongAnswer(f"{accepted:.0f} of {proposed:.0f} tokens of the draft were accepted")


def check_changed_weights(asked: Asked) -> None:
    """After a file was changed and the server was asked to read it again, the new weights answer."""
    name = last_of(asked.model, {(0, "attention")})[0].name
    file = asked.folder / "model.safetensors"
    weights = load_file(file)
    weights[name] *= 2
    save_file(weights, file, {"format": "pt"})
    changed, _ = load_model(asked.folder, verify=False)
    _refuse_alike(asked.model, changed, "the changed weights change nothing")
    asked.post({"method": "reload_weights"}, "/collective_rpc")
    asked.compare_model(changed, asked.server.model, LENGTHS)


def check_int8(asked: Asked) -> None:
    """Log probabilities in int8 agree with Transformers with the same weights and inputs rounded alike."""
    plain = asked.other or asked.folder
    exact, rounded = (with_weights_of(load_model(plain)[0], asked.model) for _ in range(2))
    round_inputs_(rounded, INT8)
    parts = []
    for prompt in random_prompts((*LENGTHS, LONG), VOCAB):
        answer = answer_in(asked.post(completion_request(asked.server.model, prompt)), prompt)
        tokens = [*prompt, *answer["tokens"]]
        served, expected = served_and_expected(log_probabilities(rounded, tokens), prompt, answer)
        unrounded = served_and_expected(log_probabilities(exact, tokens), prompt, answer)[1]
        parts.append(torch.stack([served - expected, unrounded - expected]))
    off, changed = torch.cat(parts, dim=1).square().mean(1).sqrt().tolist()
    short = torch.cat([part[0] for part in parts[: len(LENGTHS)]])
    asked.rounding, asked.equal = off / changed, float((short.abs() <= TOLERANCE).float().mean())
    if not asked.rounding <= ROUNDING:
        raise WrongAnswer(f"int8: answers are off by {asked.rounding:.2f} of what rounding the inputs changes")
    if not asked.equal >= EQUAL:
        raise WrongAnswer(f"int8: {asked.equal:.0%} of the log probabilities are equal")


def _compare_all(asked: Asked, name: str, lengths: Sequence[int]) -> None:
    """Compare greedy answers of a model of the server with those of :attr:`Asked.model`.

    Args:
        asked: records the largest difference.
        name: of the model on the server.
        lengths: of the prompts, in tokens.
    """
    for prompt in random_prompts(lengths, VOCAB):
        answer = answer_in(asked.post(completion_request(name, prompt)), prompt)
        asked.compare(
            *served_and_expected(log_probabilities(asked.model, [*prompt, *answer["tokens"]]), prompt, answer)
        )
        asked.greedy(prompt, answer["tokens"], f"prompt of {len(prompt)} tokens")
    asked.refuse_difference()


def _refuse_alike(one: Any, other: Any, what: str) -> None:
    """Refuse two models that answer alike: they would prove nothing."""
    [prompt] = random_prompts([LENGTHS[-1]], VOCAB)
    apart = float((log_probabilities(one, prompt) - log_probabilities(other, prompt)).abs().max())
    if apart < APART:
        raise WrongAnswer(f"{what}: log probabilities differ by {apart:.1e}")


def check_prefix_cache(asked: Asked) -> None:
    """A long prompt is read from the cache the second time, except its last blocks."""
    [prompt] = random_prompts([LONG + 1], VOCAB)
    hits = "vllm:prefix_cache_hits_total"
    before = asked.counted(hits)
    first = asked.choices(prompt, STREAMED)[0]["token_ids"]
    asked.greedy(prompt, first, "long prompt")
    if asked.choices(prompt, STREAMED)[0]["token_ids"] != first:
        raise WrongAnswer("a prompt from the cache has another answer")
    block = KV_BLOCK_TOKENS
    least = LONG // block * block - 2 * block  # with a sliding window, vLLM finds a block less
    if not _until(lambda: asked.counted(hits) - before >= least):
        raise WrongAnswer(f"{asked.counted(hits) - before:.0f} of {len(prompt)} tokens came from the prefix cache")


def check_stream(asked: Asked) -> None:
    """A stream has the tokens of the answer."""
    [prompt] = random_prompts([41], VOCAB)
    outcome = _sent(asked, Request(tuple(prompt), STREAMED))
    if outcome.status != "finished":
        raise WrongAnswer(f"stream: {outcome.error}")
    asked.greedy(prompt, outcome.tokens, "stream")
    if list(outcome.tokens) != asked.choices(prompt, STREAMED)[0]["token_ids"]:
        raise WrongAnswer("a stream brings other tokens than the same answer in one piece")


def check_several(asked: Asked) -> None:
    """Several sampled answers to one prompt differ and have the probabilities of Transformers."""
    [prompt] = random_prompts([10], VOCAB)
    choices = asked.choices(prompt, STREAMED, n=SEVERAL, temperature=1, seed=5, logprobs=1)
    if len({tuple(choice["token_ids"]) for choice in choices}) != SEVERAL:
        raise WrongAnswer(f"n={SEVERAL}: the answers are the same, or not as many")
    for choice in choices:
        tokens = choice["token_ids"]
        rows = log_probabilities(asked.model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        asked.compare(torch.tensor(choice["logprobs"]["token_logprobs"]), rows[range(len(tokens)), tokens])
    asked.refuse_difference(f"n={SEVERAL}: ")


def check_schema(asked: Asked) -> None:
    """A chat's answer is JSON that keeps to a schema."""
    answer = asked.chat(response_format=JSON_FORM)["content"]
    if not is_light(answer):
        raise WrongAnswer(f"JSON schema: the answer is {shown(answer)}")


def check_tool(asked: Asked) -> None:
    """A tool that the client names is called, with arguments that match its schema."""
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
    # A busy machine notices late that the client left, but not after half of that many tokens.
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
    "adapters": check_adapters,
    "draft": check_draft,
    "changed weights": check_changed_weights,
    "int8": check_int8,
}
"""Name -> check of a server."""
COMPARED = ("compiled", "log probabilities")
OF_ONE_RANK = (*COMPARED, "prefix cache", "stream", "n", "JSON schema", "tool", "cancelled")


@dataclass(frozen=True)
class Mode:
    """A way to serve.

    Attributes:
        sample: the family that `make test-all` serves in this way.
        words: options of `pyprune serve`.
        checks: names in :data:`CHECKS`, in this order.
        parallel: whether it has several ranks.
        write: writes the checkpoint to serve, as in families_made.py.
    """

    sample: str
    words: tuple[str, ...] = ()
    checks: tuple[str, ...] = COMPARED
    parallel: bool = False
    write: Callable[[str, Path], Made] = write_cut


MODES = {
    "compiled": Mode("opt", checks=OF_ONE_RANK),
    "tensor parallel 2": Mode("llama", ("--tensor-parallel-size", "2"), parallel=True),
    "pipeline parallel 2": Mode("phi", ("--pipeline-parallel-size", "2"), parallel=True),
    "adapters": Mode("qwen3", checks=("log probabilities", "adapters"), write=write_adapters),
    "draft": Mode("gemma3_text", checks=("compiled", "draft"), write=write_draft),
    "changed weights": Mode("stock", checks=("compiled", "changed weights"), write=write_changeable),
    "int8": Mode("olmo2", checks=("compiled", "int8"), write=write_int8),
}


def ask(made: Made, mode: Mode) -> Asked:
    """Serve a checkpoint and run the checks of the mode; the result has the figures.

    Raises:
        pyprune.serving.engines.EngineError: the server did not start, or ended.
        WrongAnswer: a check fails.
    """
    model, _ = load_model(made.folder, quantised=True)
    words = ["--dtype", "float32", "--max-model-len", POSITIONS, "--max-num-batched-tokens", CHUNK]
    words += ["--kv-cache-memory-bytes", CACHE_BYTES, "--max-num-seqs", 8, "--uvicorn-log-level", "warning"]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", *mode.words, *made.words]
    command = [sys.executable, "-m", "pyprune", "serve", str(made.folder), *map(str, words)]
    parallel = PARALLEL if mode.parallel else {}
    environment = {**server_environment(), "HF_HUB_OFFLINE": "1", **parallel, **made.environment}
    with Server(command, str(made.folder), environment=environment) as server:
        asked = Asked(server, model, made.folder, made.other)
        for name in mode.checks:
            CHECKS[name](asked)
    return asked


def _sent(asked: Asked, request: Request) -> Outcome:
    """Send one streamed request and return its outcome."""
    outcomes: list[Outcome] = []
    asyncio.run(send_all(asked.server.url, asked.server.model, [request], 1, outcomes.append))
    return outcomes[0]


def _until(reached: Callable[[], bool]) -> bool:
    """Check whether something becomes true within a minute: metrics are counted a moment after the answer."""
    end = time.monotonic() + COUNTED_S
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True

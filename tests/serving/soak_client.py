"""Clients of a server: requests that are drawn, sent several at a time, and some cancelled in their stream."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyprune.serving.speed.results import FIRST_TOKEN_ID

SILENCE_S = 600.0
"""A server that sends nothing for this long has failed the request."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompt: token ids.
        new_tokens: to generate, whatever ends the text.
        cancel_after: tokens after which the client hangs up; None = it reads to the end.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    cancel_after: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a request.

    Attributes:
        request: the request.
        status: finished, cancelled (by the client), or failed.
        tokens: ids that came.
        error: why it failed.
    """

    request: Request
    status: Literal["finished", "cancelled", "failed"]
    tokens: tuple[int, ...]
    error: str = ""


def draw_requests(
    count: int, prompt_tokens: range, new_tokens: range, vocab_size: int, cancelled: float, seed: int
) -> list[Request]:
    """Draw requests of mixed lengths: random token ids, and an exact share of them to cancel.

    Args:
        count: of the requests.
        prompt_tokens: lengths of prompts.
        new_tokens: lengths of answers.
        vocab_size: ids are below it.
        cancelled: share that is cancelled at a random token between the first token and the last.
        seed: the same requests again.
    """
    source = random.Random(seed)
    hang_up = set(source.sample(range(count), round(cancelled * count)))
    found = []
    for number in range(count):
        prompt = tuple(source.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(source.choice(prompt_tokens)))
        tokens = source.choice(new_tokens)
        after = source.randrange(1, tokens) if number in hang_up else None
        found.append(Request(prompt, tokens, after))
    return found


async def send_all(
    url: str, model: str, requests: Sequence[Request], concurrency: int, ended: Callable[[Outcome], None]
) -> None:
    """Send requests, several at a time, and report each as soon as it ends.

    Args:
        url: of the server.
        model: its name there.
        requests: in the order in which they are sent.
        concurrency: requests in flight.
        ended: called with every outcome.
    """
    import aiohttp

    waiting = iter(requests)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        clients = (_client(session, url, model, waiting, ended) for _ in range(concurrency))
        await asyncio.gather(*clients)


async def _client(
    session: Any, url: str, model: str, waiting: Iterator[Request], ended: Callable[[Outcome], None]
) -> None:
    """Send the next request when the last one has ended."""
    for request in waiting:
        ended(await _send(session, url, model, request))


async def _send(session: Any, url: str, model: str, request: Request) -> Outcome:
    import aiohttp

    tokens: list[int] = []
    try:
        async with session.post(f"{url}/v1/completions", json=_body(model, request)) as reply:
            if reply.status != 200:
                return Outcome(request, "failed", (), f"status {reply.status}: {(await reply.text())[:300]}")
            async for line in reply.content:
                tokens += _tokens(line)
                if request.cancel_after is not None and len(tokens) >= request.cancel_after:
                    reply.close()  # the connection, so that the server sees it
                    return Outcome(request, "cancelled", tuple(tokens))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return Outcome(request, "failed", tuple(tokens), f"{type(error).__name__}: {error}"[:300])
    if len(tokens) != request.new_tokens:
        return Outcome(request, "failed", tuple(tokens), f"{len(tokens)} tokens came, {request.new_tokens} were asked")
    return Outcome(request, "finished", tuple(tokens))


def _body(model: str, request: Request) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def _tokens(line: bytes) -> list[int]:
    """Return the tokens of a line of the stream.

    Raises:
        ValueError: the line is an error of the server's, or no JSON.
    """
    text = line.strip().removeprefix(b"data:").strip()
    if not text or text == b"[DONE]":
        return []
    chunk = json.loads(text)
    if "choices" not in chunk:
        raise ValueError(str(chunk)[:300])
    return [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]

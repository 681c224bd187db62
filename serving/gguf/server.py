"""Run a llama.cpp server of one GGUF file in this process, and send it requests over the loopback interface."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pyprune.errors import CheckpointError, MissingDependencyError, PypruneError

ANSWER_TIMEOUT_S = 3600.0
ERRORS = 1
"""llama.cpp's level of messages: errors alone, on stderr."""


class LlamaCppError(PypruneError):
    """llama.cpp refused a request; the message has its answer."""


def llama_cpp_installed() -> bool:
    """Return whether llama.cpp (the package xllamacpp) can be imported, without importing it."""
    return find_spec("xllamacpp") is not None


class LlamaServer:
    """One GGUF file loaded by llama.cpp.

    Use it as a context manager: leaving the block stops the server and frees the model.

    Args:
        path: the file.
        slots: sequences that are computed at once.
        context: tokens of a sequence, prompt and continuation together.
        float32: keep the key-value cache in float32 and leave flash attention out, to compare with another program;
            by default both are llama.cpp's own choice (float16).
        threads: that compute; None = llama.cpp's default, one for each core. They wait for each other in a loop, so
            that on a busy machine fewer can be much faster.

    Raises:
        CheckpointError: llama.cpp does not load the file; its reason is on stderr.
        MissingDependencyError: xllamacpp is not installed.
    """

    def __init__(
        self, path: str | Path, *, slots: int, context: int, float32: bool = False, threads: int | None = None
    ) -> None:
        if not llama_cpp_installed():
            raise MissingDependencyError("xllamacpp", "gguf", "Running llama.cpp")
        import xllamacpp

        asked: Any = xllamacpp.CommonParams()
        asked.model.path = str(path)
        asked.n_parallel, asked.n_ctx, asked.n_threads_http = slots, slots * context, slots + 1
        asked.hostnames, asked.port, asked.ui, asked.verbosity = ["127.0.0.1"], 0, False, ERRORS
        asked.cache_prompt, asked.cache_ram_mib, asked.fit_params = False, 0, False
        if threads is not None:
            asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = threads
        if float32:
            asked.cache_type_k = asked.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            asked.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.slots, self.context = slots, context
        try:
            self._server: Any = xllamacpp.Server(asked)
        except RuntimeError as error:
            raise CheckpointError(
                f"llama.cpp did not load {path} ({error}). What it printed says why: a damaged file, an "
                "architecture that this llama.cpp does not know, or too little memory."
            ) from error

        # llama.cpp hangs when it is stopped before its loop runs, so one request goes through that first.
        self._ask("GET", "/slots")

    def close(self) -> None:
        """Stop the server; safe to call twice."""
        self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer to a request, as plain data.

        Raises:
            LlamaCppError: llama.cpp refused the request.
        """
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        # Not urllib, which would ask a proxy of the user's for the loopback address.
        connection = HTTPConnection(urlsplit(self._server.listening_address).netloc, timeout=ANSWER_TIMEOUT_S)
        with closing(connection):
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        if answer.status != 200:
            raise LlamaCppError(f"llama.cpp refused {path}: {text[:2000].decode('utf-8', errors='replace')}")
        return json.loads(text)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Return the most likely continuation of every prompt; tokens that end a text are never taken.

        Args:
            prompts: token ids.
            new_tokens: length of each continuation.

        Raises:
            LlamaCppError: a prompt was refused, or a continuation has another length.
        """
        asked = {"n_predict": new_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answers = self.post("/completion", prompt=[list(p) for p in prompts], return_tokens=True, **asked)
        answers = answers if isinstance(answers, list) else [answers]
        made = [int(answer["tokens_predicted"]) for answer in answers]
        if made != [new_tokens] * len(prompts):
            raise LlamaCppError(
                f"llama.cpp made {sorted(set(made))} tokens for a prompt where {new_tokens} were asked."
            )
        return [list(answer["tokens"]) for answer in sorted(answers, key=lambda answer: answer["index"])]

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a text, by the tokenizer in the file; names of special tokens in it are text.

        Args:
            text: any.
            add_special: with the tokens that the tokenizer puts around a text.
        """
        return list(self.post("/tokenize", content=text, add_special=add_special, parse_special=False)["tokens"])

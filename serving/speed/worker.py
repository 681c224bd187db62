"""One inference engine in its own process, commanded by JSON lines on stdin and answering on stdout.

Run as ``python -m pyprune.serving.speed.worker``. Two vLLM engines in one process fight over global state, and a dense
and a pruned model must be timed turn by turn, so each gets such a process. Everything the libraries print goes
to stderr (the parent keeps it as a log); only replies reach the original stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from pyprune.errors import PypruneError
from pyprune.serving.speed.results import SHORT_PROMPT_TOKENS


class Runner(ABC):
    """A loaded engine.

    Attributes:
        device: name of the accelerator, None on the CPU.
        build: what the engine was compiled for; None if unknown.
    """

    device: str | None
    build: str | None = None

    def prepare(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:  # noqa: B027
        """Prepare :meth:`generate` for requests of this size; not timed."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        """Generate exactly ``new_tokens`` for each prompt of token ids; return the number of tokens made."""


class VllmRunner(Runner):
    """Greedy generation through vLLM's offline API: no tokenizer, no prefix cache, no end of sentence."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import torch

        accelerator = torch.cuda.is_available()
        if not accelerator:  # a second process would import torch and vLLM once more
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        self.device: str | None = torch.cuda.get_device_name(0) if accelerator else None
        eager = options.get("eager")  # None = compiled on an accelerator
        self._llm = LLM(
            model=options["model"],
            dtype=options["dtype"],
            seed=options["seed"],
            skip_tokenizer_init=True,
            enforce_eager=not accelerator if eager is None else eager,
            enable_prefix_caching=False,
            max_model_len=options["max_length"],
            max_num_seqs=options["max_sequences"],
            max_num_batched_tokens=max(options["max_length"], options["max_sequences"] * SHORT_PROMPT_TOKENS),
            kv_cache_memory_bytes=options["kv_cache_bytes"],
            disable_log_stats=True,
        )

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        """See :class:`Runner`."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class TransformersRunner(Runner):
    """Greedy generation through plain Transformers, left-padded, with the key-value cache."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        import pyprune.modeling  # noqa: F401  (registers the pruned architectures with the Auto classes)
        from pyprune.checkpoint.load import check_filled

        where = "cuda" if torch.cuda.is_available() else "cpu"
        self.device: str | None = torch.cuda.get_device_name(0) if where == "cuda" else None
        dtype = getattr(torch, options["dtype"])
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        model, info = loaded
        check_filled(options["model"], info)
        self._model = model.to(where).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        """See :class:`Runner`."""
        import torch

        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        where = self._model.device
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids.to(where),
                attention_mask=mask.to(where),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        return int((out.shape[1] - width) * len(prompts))


class LlamaCppRunner(Runner):
    """Greedy generation through llama.cpp's server: token ids, no prompt cache, no end of sentence.

    One prompt is sent to a server with a single slot of ``max_length`` tokens, which is loaded at once. Several are
    sent to one with a slot for each, ``max_sequences`` at most. It is loaded when they come, and again when it has too
    few slots or too short ones. llama.cpp divides its cache among the slots: one server for all would hold
    ``max_sequences`` x ``max_length`` tokens. The second shares the mapped file with the first, but not the weights
    that llama.cpp rearranges for its CPU kernels.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        from pyprune.serving.gguf.server import LlamaServer

        self._path = options["model"]
        self._most = int(options["max_sequences"])
        self._single = LlamaServer(self._path, slots=1, context=options["max_length"])
        self._several: LlamaServer | None = None
        self.device, self.build = _llama_cpp_device()

    def prepare(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Load the server of several slots, or load it again with more or longer ones."""
        from pyprune.serving.gguf.server import LlamaServer

        slots, needed = min(len(prompts), self._most), max(map(len, prompts)) + new_tokens
        several = self._several
        if len(prompts) == 1 or (several is not None and several.slots >= slots and several.context >= needed):
            return
        if several is not None:
            several.close()
        self._several = LlamaServer(self._path, slots=slots, context=-(-needed // SLOT_STEP) * SLOT_STEP)
        self._several.generate([prompt[:WARM_TOKENS] for prompt in prompts[:slots]], 1)  # its first answers are slower

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
        """See :class:`Runner`."""
        server = self._single if len(prompts) == 1 or self._several is None else self._several
        return sum(map(len, server.generate(prompts, new_tokens)))


WARM_TOKENS = 8
SLOT_STEP = 256
"""llama.cpp rounds the tokens of a slot up to a multiple of this."""


def _llama_cpp_device() -> tuple[str | None, str]:
    """Return (name of the first accelerator or None, the instruction sets that llama.cpp was built for)."""
    import xllamacpp

    cpu = xllamacpp.ggml_backend_dev_type.GGML_BACKEND_DEVICE_TYPE_CPU
    names = [device["description"] for device in xllamacpp.get_device_info() if device["type"] != cpu]
    return next(iter(names), None), " ".join(xllamacpp.get_system_info().split())


RUNNERS: dict[str, Callable[[Mapping[str, Any]], Runner]] = {
    "vllm": VllmRunner,
    "transformers": TransformersRunner,
    "llamacpp": LlamaCppRunner,
}


def main() -> None:
    """Answer commands until stdin closes: load, generate, quit."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of libraries must not be read as a reply
    runner: Runner | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "quit":
            break
        try:
            if command["op"] == "load":
                runner = RUNNERS[command["engine"]](command)
                _reply(replies, device=runner.device, build=runner.build)
            else:
                _time_request(replies, runner, command)
        except PypruneError as error:  # its message is complete; the log before it is kept
            _reply(replies, error=str(error))
        except Exception as error:  # the parent raises an error with it and the log's tail
            import traceback

            traceback.print_exc()
            _reply(replies, error=f"{type(error).__name__}: {error}")


def _time_request(replies: TextIO, runner: Runner | None, command: Mapping[str, Any]) -> None:
    if runner is None:
        raise RuntimeError("generate was requested before load")
    runner.prepare(command["prompts"], command["new_tokens"])
    start = time.perf_counter()
    tokens = runner.generate(command["prompts"], command["new_tokens"])
    _reply(replies, seconds=time.perf_counter() - start, tokens=tokens)


def _reply(replies: TextIO, **content: Any) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()

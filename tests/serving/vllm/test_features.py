"""What people turn on in vLLM, on real servers: sizes per layer and a stock export answer as Transformers does.

A server takes half a minute to start, so each answers all that fits its options. Int8 is in test_quantise_vllm.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pyprune.checkpoint.load import load_model
from pyprune.cut.compact import compact_
from pyprune.families import family_for
from pyprune.serving.export import export
from pyprune.serving.widths import layer_widths
from tests._support.answers import CHAT_TEMPLATE, JSON_FORM, PARALLEL, TOOL, chat_request, is_light
from tests._support.models import tiny_model
from tests._support.served import (
    REAL_VLLM,
    SIZES,
    TOLERANCE,
    Case,
    assert_greedy,
    compare,
    damp_,
    log_probabilities,
    opt_per_layer,
    prompts,
    recover_with_adapters,
    uniform,
    write_case,
)
from tests._support.server import OPTIONS, Server
from tests._support.tiny import shareable
from tests._support.tokenizer import tiny_tokenizer

pytestmark = REAL_VLLM

VLLM = str(Path(sys.executable).parent / "vllm")
CONTEXT, CHUNK, BLOCK = 131072, 512, 128
"""Tokens of a sequence, of one step of the engine, and of a block of vLLM's cache on a CPU."""
COMPILED = ("--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(CONTEXT))


UNEQUAL = Case("llama", shareable, "PrunedLlamaForCausalLM")
STOCK = Case("llama", uniform(96), "LlamaForCausalLM")
CASES = pytest.mark.parametrize("case", [UNEQUAL, STOCK], ids=["unequal", "stock"])


@dataclass(frozen=True)
class Served:
    """A server, an OpenAI client of it, and the served model in Transformers."""

    server: Server
    client: Any
    model: PreTrainedModel

    def ask(self, prompt: Sequence[int], new: int, **options: Any) -> Any:
        """A completion through the OpenAI client; greedy unless said otherwise, never ended by a token."""
        wanted = {"temperature": 0, "max_tokens": new, "prompt": list(prompt), "model": self.server.model, **options}
        return self.client.completions.create(**wanted, extra_body={"ignore_eos": True, "return_token_ids": True})

    def chat(self, **options: Any) -> Any:
        """A message in answer to another."""
        return self.client.chat.completions.create(**chat_request(self.server.model, **options)).choices[0]

    def answers_right(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """These are the greedy tokens of Transformers."""
        assert_greedy(log_probabilities(self.model, [*prompt, *tokens])[len(prompt) - 1 : -1], tokens)


@contextmanager
def asked_by_client(server: Server, folder: Path) -> Iterator[Served]:
    from openai import OpenAI

    server.wait_until_healthy()
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield Served(server, client, load_model(folder)[0])


def until(reached: Callable[[], bool], patience: float = 300) -> None:
    """Metrics are counted a moment after the answer."""
    end = time.monotonic() + patience
    while not reached() and time.monotonic() < end:
        time.sleep(0.1)
    assert reached()


@pytest.fixture(scope="module", params=[UNEQUAL, STOCK], ids=["unequal", "stock"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Plain `vllm serve`: compiled, with long prompts in chunks, a prefix cache, and tools."""
    root = tmp_path_factory.mktemp("features")
    folder, template = root / "model", root / "template.jinja"
    write_case(request.param, folder, max_position_embeddings=CONTEXT)
    template.write_text(CHAT_TEMPLATE)
    command = [VLLM, "serve", str(folder), "--max-num-batched-tokens", str(CHUNK), "--chat-template", str(template)]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with Server(command, folder, root / "log", options=COMPILED) as server, asked_by_client(server, folder) as served:
        yield served


def test_the_compiled_model_gives_the_log_probabilities_of_transformers(served: Served) -> None:
    assert "Warming up model for the compilation" in served.server.text()
    asked = prompts()
    compare(served.model, asked, [served.server.complete(prompt) for prompt in asked])


def test_a_prompt_of_thousands_of_tokens_is_read_in_chunks_and_then_from_the_cache(served: Served) -> None:
    [prompt] = prompts([3000])
    server = served.server
    hits = server.metric("vllm:prefix_cache_hits_total")
    first = served.ask(prompt, 8).choices[0].token_ids
    served.answers_right(prompt, first)
    assert server.metric("vllm:prefix_cache_hits_total") == hits
    again = served.ask(prompt, 8).choices[0].token_ids
    assert again == first
    until(lambda: server.metric("vllm:prefix_cache_hits_total") - hits == len(prompt) // BLOCK * BLOCK)
    assert f"Chunked prefill is enabled with max_num_batched_tokens={CHUNK}." in server.text()


def test_a_stream_brings_the_same_tokens(served: Served) -> None:
    [prompt] = prompts([40])
    parts = [part.choices[0].token_ids or [] for part in served.ask(prompt, 12, stream=True) if part.choices]
    assert len([part for part in parts if part]) > 1
    tokens = [token for part in parts for token in part]
    assert tokens == served.ask(prompt, 12).choices[0].token_ids
    served.answers_right(prompt, tokens)


def test_several_answers_to_one_prompt_have_the_probabilities_of_transformers(served: Served) -> None:
    [prompt] = prompts([9])
    choices = served.ask(prompt, 6, n=3, temperature=1, seed=5, logprobs=1).choices
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    for choice in choices:
        rows = log_probabilities(served.model, [*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
        own = rows[range(6), choice.token_ids]
        torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs), own, rtol=0, atol=TOLERANCE)


def test_an_answer_keeps_to_a_json_schema(served: Served) -> None:
    answer = served.chat(response_format=JSON_FORM)
    assert answer.finish_reason == "stop"
    assert is_light(answer.message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "switch"}}])
def test_tools_are_called_as_their_schema_says(choice: Any, served: Served) -> None:
    answer = served.chat(tools=[TOOL], tool_choice=choice)
    assert answer.message.tool_calls
    for call in answer.message.tool_calls:
        assert call.function.name == "switch"
        assert is_light(call.function.arguments)


@pytest.mark.parametrize("calls", [True, False], ids=["calls", "answers"])
def test_the_model_chooses_between_a_tool_and_an_answer(calls: bool, served: Served) -> None:
    """A call begins with another token than the answer: a bias against or for that of the answer decides for it."""
    [first] = tiny_tokenizer().encode("N", add_special_tokens=False)
    answer = served.chat(
        tools=[TOOL],
        tool_choice="auto",
        parallel_tool_calls=False,
        logit_bias={str(first): -100 if calls else 100},
        extra_body={"structured_outputs": {"choice": ["No."]}},
    )
    assert answer.finish_reason == ("tool_calls" if calls else "stop")
    if not calls:
        assert answer.message.content == "No."
        assert not answer.message.tool_calls
        return
    [call] = answer.message.tool_calls
    assert call.function.name == "switch"
    assert is_light(call.function.arguments)


def test_a_cancelled_request_stops_and_others_are_answered(served: Served) -> None:
    server, long, several = served.server, CONTEXT - 100, 4
    generated = server.metric("vllm:generation_tokens_total")
    prompt, cancelled = prompts([40, 20])
    # One request: while a tiny model streams, a server on two busy cores takes a minute to accept the next one.
    stream = served.ask(cancelled, long, stream=True, n=several, temperature=1)
    assert next(iter(stream)).choices
    stream.close()
    served.answers_right(prompt, served.ask(prompt, 8).choices[0].token_ids)
    until(lambda: server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0)
    # They are so long that a busy machine, which sees late that nobody listens, is not through half of them by then.
    assert server.metric("vllm:generation_tokens_total") - generated < several * long / 2


def assert_two_ranks_answer_right(
    case: Case, option: str, tmp_path: Path, environment: dict[str, str], options: Sequence[str] = OPTIONS
) -> None:
    folder = tmp_path / "model"
    write_case(case, folder)
    asked = prompts()
    command = [VLLM, "serve", str(folder), option, "2"]
    with Server(command, folder, tmp_path / "log", PARALLEL | environment, options) as server:
        server.wait_until_healthy()
        compare(folder, asked, [server.complete(prompt) for prompt in asked])


NORMED_WIDTH = Case("olmo2", shareable, "PrunedOlmo2ForCausalLM")
"""Its norms run over all heads of a layer, of which each rank has a part."""


@pytest.mark.parametrize("case", [UNEQUAL, STOCK, NORMED_WIDTH], ids=["unequal", "stock", "normed-width"])
def test_two_ranks_share_the_layers(case: Case, tmp_path: Path) -> None:
    assert_two_ranks_answer_right(case, "--tensor-parallel-size", tmp_path, {})


OPT = Case("opt", opt_per_layer, "PrunedOPTForCausalLM")


@pytest.mark.parametrize(
    ("case", "environment"),
    [(UNEQUAL, {}), (STOCK, {}), (OPT, {"VLLM_PP_LAYER_PARTITION": "1,2"})],
    ids=["unequal", "stock", "opt"],
)
def test_two_ranks_of_a_pipeline_have_some_layers_each(case: Case, environment: dict[str, str], tmp_path: Path) -> None:
    """Compiled: eager on a CPU, vLLM 0.32 leaves out the step that makes the buffers between ranks, of any model."""
    compiled = [option for option in OPTIONS if option != "--enforce-eager"]
    assert_two_ranks_answer_right(case, "--pipeline-parallel-size", tmp_path, environment, compiled)


@CASES
def test_the_adapters_of_a_recovery_are_served_unmerged(case: Case, tmp_path: Path) -> None:
    """On the checkpoint that was recovered, they answer as the checkpoint does that they were merged into."""
    folder, recovered = tmp_path / "model", tmp_path / "recovered"
    write_case(case, folder)
    adapters = recover_with_adapters(folder, recovered)
    plain, merged = load_model(folder)[0], load_model(recovered)[0]
    asked = prompts()
    assert not torch.allclose(log_probabilities(plain, asked[-1]), log_probabilities(merged, asked[-1]), atol=0.1)
    command = [VLLM, "serve", str(folder), "--enable-lora", "--lora-modules", f"recovered={adapters}"]
    with Server(command, folder, tmp_path / "log") as server:
        server.wait_until_healthy()
        compare(merged, asked, [server.complete(prompt, "recovered") for prompt in asked])
        compare(plain, asked, [server.complete(prompt) for prompt in asked])


def test_weights_that_were_changed_are_loaded_anew(tmp_path: Path) -> None:
    """In development mode, on a server whose engine and worker are processes of their own."""
    folder, asked = tmp_path / "model", prompts()
    write_case(UNEQUAL, folder)
    with Server([VLLM, "serve", str(folder)], folder, tmp_path / "log", {"VLLM_SERVER_DEV_MODE": "1"}) as server:
        server.wait_until_healthy()
        before = [server.complete(prompt) for prompt in asked]
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.self_attn.o_proj.weight"] *= 2
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        server.post("/collective_rpc", method="reload_weights")
        after = [server.complete(prompt) for prompt in asked]
    assert all(a["prompt"] != b["prompt"] for a, b in zip(before, after, strict=True))
    compare(load_model(folder, verify=False)[0], asked, after)


def test_a_pruned_model_drafts_for_its_own_dense_model(tmp_path: Path) -> None:
    """What is cut contributes little here, so that most of the drafted tokens must be accepted."""
    model = tiny_model("llama", **SIZES)
    damp_(model)
    plan = family_for(model).plan(model.config).with_layer(1, query_heads=[], kv_heads=[]).with_layer(2, ffn=range(24))
    layers: Any = family_for(model).layers(model)
    with torch.no_grad():
        layers[1].self_attn.o_proj.weight.mul_(0.01)
        layers[2].mlp.down_proj.weight[:, 24:].mul_(0.01)
    dense, draft = tmp_path / "dense", tmp_path / "draft"
    export(model, dense, tokenizer=tiny_tokenizer())
    compact_(model, plan)
    written = export(model, draft, plan=plan, tokenizer=tiny_tokenizer())
    assert written.architecture == "PrunedLlamaForCausalLM"
    assert len(set(layer_widths(model.config.to_dict()))) == 3
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    command = [VLLM, "serve", str(dense), "--speculative-config", json.dumps(speculation)]
    with Server(command, dense, tmp_path / "log") as server, asked_by_client(server, dense) as served:
        for prompt in prompts():
            served.answers_right(prompt, served.ask(prompt, 32).choices[0].token_ids)
        until(lambda: server.metric("vllm:spec_decode_num_draft_tokens_total") > 60)
        drafted, accepted = (
            server.metric(f"vllm:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted")
        )
    assert accepted > drafted / 2


def test_a_draft_whose_layers_have_different_heads_is_refused(tmp_path: Path) -> None:
    """vLLM would start, and read past the end of what it prepared for another layer."""
    dense, draft = tmp_path / "dense", tmp_path / "draft"
    write_case(STOCK, dense)
    write_case(UNEQUAL, draft)
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    command = [VLLM, "serve", str(dense), "--speculative-config", json.dumps(speculation)]
    with Server(command, dense, tmp_path / "log") as server:
        assert server.wait_until_it_ends() != 0
        assert server.left_over() == []
        assert f"ConfigError: {draft} cannot be served like this: a draft model needs the same heads" in server.text()

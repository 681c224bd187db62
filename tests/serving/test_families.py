"""Every family with sizes per layer on real servers: compiled, on two ranks, with adapters, as a draft and so on.

Except with a draft and in int8, log probabilities of prompt tokens and of the most likely new tokens are compared with
Transformers' in float32, over short prompts and one of 3,000 tokens that vLLM reads in chunks of 512: 1e-5 at
most. `make test-all` serves one family in each mode, `-m fuzz` the others. The checks themselves are tested without a
server.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pyprune.checkpoint.load import load_model
from pyprune.families import all_families
from pyprune.runtime.records import Json
from pyprune.serving.widths import layer_widths, split_obstacle, stage_obstacle
from tests._support import families_checks
from tests._support.answers import TOP, log_probabilities
from tests._support.families_checks import (
    INT8,
    MODES,
    Asked,
    WrongAnswer,
    ask,
    check_adapters,
    check_changed_weights,
    check_compiled,
    check_draft,
    check_int8,
    check_log_probabilities,
    check_schema,
    check_several,
    check_tool,
)
from tests._support.families_made import (
    STOCK,
    architecture,
    write_adapters,
    write_changeable,
    write_cut,
    write_draft,
    write_int8,
)
from tests._support.rounded import round_inputs_, with_weights_of
from tests._support.served import REAL_VLLM
from tests._support.tiny import tiny_served_model

pytestmark = pytest.mark.second

NAMES = [*(name for name, family in all_families().items() if family.served_by), STOCK]


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_has_sizes_of_its_own_that_two_ranks_can_hold(name: str, tmp_path: Path) -> None:
    write_cut(name, tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    widths = layer_widths(config)
    assert config["architectures"] == [architecture(name)]
    assert len(set(widths)) == (1 if name == STOCK else 4)
    assert split_obstacle(widths, 2) is None
    assert stage_obstacle(widths, [(0, 2), (2, len(widths))]) is None


def test_every_mode_has_a_family_that_the_plugin_serves() -> None:
    assert {mode.sample for mode in MODES.values()} <= set(NAMES)
    assert len(NAMES) >= 12


def test_what_is_no_number_is_no_small_difference(model: PreTrainedModel) -> None:
    asked = Asked(InTransformers(model), model)
    for values in ([0.0, 0.0], [0.0, float("nan")], [0.0, 0.0]):
        asked.compare(torch.tensor(values), torch.zeros(2))
    with pytest.raises(WrongAnswer, match="differ by nan"):
        asked.refuse_difference()


class InTransformers:
    """Answers as a server of this model would."""

    def __init__(self, model: PreTrainedModel, compilation: str | None = "VLLM_COMPILE") -> None:
        self.model_in_memory, self.model = model, "tiny"
        self.facts = SimpleNamespace(compilation=compilation)

    def post(self, path: str, body: Json, timeout: float) -> str:
        assert path == "/v1/completions"
        return json.dumps({"choices": [self._choice(body, rank) for rank in range(body.get("n", 1))]})

    def _choice(self, body: Json, rank: int) -> Json:
        """Each next token is the most likely one; of several answers, the second has the second likely ones."""
        tokens = list(body["prompt"])
        for _ in range(body["max_tokens"]):
            tokens.append(int(log_probabilities(self.model_in_memory, tokens)[-1].topk(rank + 1).indices[rank]))
        rows = log_probabilities(self.model_in_memory, tokens)[:-1]
        own = rows[range(len(rows)), tokens[1:]].tolist()
        first = len(body["prompt"])
        tops = [row.topk(TOP) for row in rows[first - 1 :]]
        asked = [{str(token): {"logprob": value}} for token, value in zip(tokens[1:first], own, strict=False)]
        named = [
            {f"token_id:{i}": v for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)} for top in tops
        ]
        return {
            "token_ids": tokens[first:],
            "prompt_logprobs": [None, *asked],
            "logprobs": {"top_logprobs": named, "token_logprobs": own[first - 1 :]},
        }


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_served_model("llama", 4096)


@torch.no_grad()
def slightly_other() -> PreTrainedModel:
    other = tiny_served_model("llama", 4096)
    other.model.layers[2].mlp.down_proj.weight[3] *= 1.02
    return other


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt that is none: nothing is read in chunks here."""
    monkeypatch.setattr(families_checks, "LONG", 200)


@pytest.mark.usefixtures("shorter")
def test_the_same_model_answers_right(model: PreTrainedModel) -> None:
    found = Asked(InTransformers(model), model)
    for check in (check_compiled, check_log_probabilities, check_several):
        check(found)
    assert found.difference < 2e-6


@pytest.mark.usefixtures("shorter")
@pytest.mark.parametrize("check", [check_log_probabilities, check_several])
def test_a_row_of_one_matrix_that_is_2_percent_off_is_seen(check: Any, model: PreTrainedModel) -> None:
    found = Asked(InTransformers(slightly_other()), model)
    with pytest.raises(WrongAnswer, match="log probabilities differ by"):
        check(found)
    assert found.difference > 1e-5


def test_tokens_that_are_not_the_most_likely_ones_are_seen(model: PreTrainedModel) -> None:
    found, prompt = Asked(InTransformers(model), model), [5, 6, 7]
    [right, other] = found.choices(prompt, 3, n=2)
    found.greedy(prompt, right["token_ids"], "first")
    with pytest.raises(WrongAnswer, match=r"second: a token is .* less likely"):
        found.greedy(prompt, other["token_ids"], "second")


LIT = '{"on": true, "room": "attic"}'


class Chatting:
    """A server that answers every chat with one message."""

    model = "tiny"

    def __init__(self, content: str | None, *calls: tuple[str, str]) -> None:
        named = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
        self.reply = {"choices": [{"message": {"content": content, "tool_calls": named}}]}

    def post(self, path: str, body: Json, timeout: float) -> str:
        assert (path, body["model"]) == ("/v1/chat/completions", "tiny")
        return json.dumps(self.reply)


def test_answers_in_the_asked_form_hold(model: PreTrainedModel) -> None:
    check_schema(Asked(Chatting(LIT), model))
    check_tool(Asked(Chatting(None, ("switch", LIT)), model))


@pytest.mark.parametrize("content", ["", None, "{}", '{"on": 1, "room": "attic"}', LIT[:-1], "[" + LIT + "]"])
def test_answers_in_another_form_are_seen(content: str | None, model: PreTrainedModel) -> None:
    with pytest.raises(WrongAnswer, match="JSON schema: the answer is"):
        check_schema(Asked(Chatting(content), model))
    for calls in ((), (("switch", content or ""),), (("switch", LIT), ("other", LIT))):
        with pytest.raises(WrongAnswer, match="tool: the calls are"):
            check_tool(Asked(Chatting(LIT, *calls), model))


@pytest.mark.parametrize("compilation", ["NONE", None])
def test_a_model_that_was_not_compiled_is_seen(compilation: str | None, model: PreTrainedModel) -> None:
    with pytest.raises(WrongAnswer, match=f"compilation mode is {compilation}"):
        check_compiled(Asked(InTransformers(model, compilation), model))


class Named(InTransformers):
    """The same of several models, by their names on the server."""

    def __init__(self, **models: PreTrainedModel) -> None:
        super().__init__(next(iter(models.values())))
        self.models, self.told, self.counts = models, [], {"draft": 30.0, "accepted": 20.0}
        self.model = next(iter(models))

    def post(self, path: str, body: Json, timeout: float) -> str:
        if path == "/collective_rpc":
            self.told.append(body["method"])
            return "{}"
        self.model_in_memory = self.models[body["model"]]
        return super().post(path, body, timeout)

    def metrics(self) -> str:
        return "".join(f"vllm:spec_decode_num_{name}_tokens_total {count}\n" for name, count in self.counts.items())


@pytest.mark.parametrize("name", ["opt", STOCK])
def test_adapters_must_answer_as_the_merged_model(name: str, tmp_path: Path) -> None:
    made = write_adapters(name, tmp_path)
    plain, merged = load_model(made.folder)[0], load_model(made.other)[0]
    assert {"--enable-lora", f"adapted={made.other / 'adapter'}"} <= set(made.words)
    asked = Asked(Named(tiny=plain, adapted=merged), plain, made.folder, made.other)
    check_adapters(asked)
    assert asked.difference == 0, "compared, with itself"
    with pytest.raises(WrongAnswer, match=r"less likely than|log probabilities differ by"):
        check_adapters(Asked(Named(tiny=plain, adapted=plain), plain, made.folder, made.other))
    with pytest.raises(WrongAnswer, match="the recovery changed nothing"):
        check_adapters(Asked(Named(tiny=plain, adapted=plain), plain, made.folder, made.folder))


@pytest.mark.parametrize("name", ["gemma3_text", STOCK])
def test_a_draft_must_propose_what_the_dense_model_says(name: str, tmp_path: Path) -> None:
    made = write_draft(name, tmp_path)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == [architecture(name)]
    assert ("--disable-hybrid-kv-cache-manager" in made.words) == (name == "gemma3_text")
    dense, draft = load_model(made.folder)[0], load_model(tmp_path / "draft")[0]
    asked = Asked(Named(tiny=dense), dense)
    check_draft(asked)
    prompt = list(range(3, 60))
    apart = (log_probabilities(dense, prompt) - log_probabilities(draft, prompt)).abs().max()
    assert 0 < apart < 0.5, "the draft is nearly the dense model"
    asked.server.counts["accepted"] = 15.0
    with pytest.raises(WrongAnswer, match="15 of 30 tokens of the draft were accepted"):
        check_draft(asked)
    with pytest.raises(WrongAnswer, match="less likely"):
        check_draft(Asked(Named(tiny=slightly_other()), dense))


@pytest.mark.parametrize("name", ["gemma3_text", STOCK])
def test_changed_weights_must_be_those_that_answer(name: str, tmp_path: Path) -> None:
    made = write_changeable(name, tmp_path)
    before = load_model(made.folder)[0]
    server = Named(tiny=before)
    with pytest.raises(WrongAnswer, match=r"less likely than|log probabilities differ by"):
        check_changed_weights(Asked(server, before, made.folder))
    assert server.told == ["reload_weights"]
    server = Named(tiny=load_model(made.folder, verify=False)[0])
    asked = Asked(server, before, write_cut(name, tmp_path / "again").folder)
    check_changed_weights(asked)
    assert asked.difference == 0, "compared, with itself"


@pytest.mark.usefixtures("shorter")
@pytest.mark.parametrize("name", ["opt", STOCK])
def test_int8_must_round_weights_and_inputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_int8(name, tmp_path)
    assert json.loads((made.folder / "config.json").read_text())["architectures"] == [architecture(name)]
    quantised = load_model(made.folder, quantised=True)[0]
    plain, weights_only, rounded = (load_model(made.other)[0] for _ in range(3))
    round_inputs_(with_weights_of(rounded, quantised), INT8)
    asked = Asked(Named(tiny=rounded), quantised, made.folder, made.other)
    check_int8(asked)
    assert (asked.rounding < 1e-3, asked.equal) == (True, 1.0), "compared, with itself"
    for other in (plain, with_weights_of(weights_only, quantised)):
        asked = Asked(Named(tiny=other), quantised, made.folder, made.other)
        with pytest.raises(WrongAnswer, match=r"int8: answers are off by .* of what rounding the inputs changes"):
            check_int8(asked)
        assert asked.rounding > 0.9
    monkeypatch.setattr(families_checks, "ROUNDING", 10.0)
    with pytest.raises(WrongAnswer, match="int8: 0% of the log probabilities are equal"):
        check_int8(asked)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if MODES[mode].sample == name else pytest.mark.fuzz)
        for name, mode in product(NAMES, MODES)
    ],
)
class TestServed:
    """`pytest -m serving -rP` of this file serves every family in every mode and prints the figures."""

    pytestmark = REAL_VLLM

    def test_a_family_on_a_real_server(self, name: str, mode: str, tmp_path: Path) -> None:
        asked = ask(MODES[mode].write(name, tmp_path), MODES[mode])
        print(f"{name}, {mode}: {asked.figures()}")

"""What people turn on in vLLM, for the families with sizes per layer, answered as Transformers does.

Long prompts in chunks, the prefix cache, adapters of a recovery, several answers, answers in JSON, and the pruned model
as the draft of its own dense one. Streams, tools and cancelled requests are the server's, the same for every model:
test_features.py has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyprune.checkpoint.load import load_model
from pyprune.cut.compact import compact_
from pyprune.families import all_families, family_for
from pyprune.serving.export import export
from tests._support.answers import LIGHT, is_light
from tests._support.models import TINY, one_of_each, tiny_model
from tests._support.served import (
    NEW_TOKENS,
    OPT_SIZES,
    REAL_VLLM,
    SIZES,
    TOLERANCE,
    TOP,
    Case,
    assert_greedy,
    compare,
    damp_,
    log_probabilities,
    opt_per_layer,
    per_layer,
    prompts,
    recover_with_adapters,
    run_program,
    write_case,
)
from tests._support.tiny import weaken_
from tests._support.tokenizer import tiny_tokenizer

pytestmark = REAL_VLLM

SERVED = {name: family for name in one_of_each() if (family := all_families()[TINY[name][0]]).served_by}
FAMILIES = {name: family for name, family in SERVED.items() if name != "llama"}
"""LLaMA is asked on servers, in test_features.py."""
NAMES = pytest.mark.parametrize("name", FAMILIES)
NARROW = "llama with fewer heads"
CHUNK, BLOCK = 128, 128
"""Tokens of one step of the engine, and of a block of vLLM's cache on a CPU."""


def _long() -> list[int]:
    """More than three steps, and blocks."""
    [prompt] = prompts([450])
    return prompt


def _write_recovered(name: str, root: Path) -> dict[str, str]:
    """A pruned checkpoint, and the adapters of a recovery that belong on it."""
    folder, recovered = root / name / "model", root / name / "recovered"
    write_case(Case(name, opt_per_layer if name == "opt" else per_layer, FAMILIES[name].pruned_model), folder)
    adapters = recover_with_adapters(folder, recovered)
    return {"folder": str(folder), "adapter": str(adapters)}


def _write_pair(name: str, root: Path) -> dict[str, Any]:
    """A dense model and its draft: what is cut contributes little, so that most drafted tokens must be accepted."""
    model = tiny_model(name, **(OPT_SIZES if name == "opt" else SIZES))
    damp_(model)
    family = family_for(model)
    plan = family.plan(model.config).with_layer(1, query_heads=[], kv_heads=[]).with_layer(2, ffn=[])
    weaken_(model, {(1, "attention"), (2, "mlp")})
    dense, draft = root / name / "dense", root / name / "draft"
    export(model, dense, tokenizer=tiny_tokenizer())
    compact_(model, plan)
    assert export(model, draft, plan=plan, tokenizer=tiny_tokenizer()).architecture == family.pruned_model
    # vLLM keeps the caches of sliding and full attention apart, and a draft of both is refused (test_vllm.py).
    options = {"disable_hybrid_kv_cache_manager": True} if name == "gemma3" else {}
    return {"dense": str(dense), "draft": str(draft), "options": options}


def _write_narrow_pair(root: Path) -> dict[str, Any]:
    """The same of a draft that has half the heads in every layer: its cache has another shape than the dense one's."""
    model = tiny_model("llama", **SIZES)
    damp_(model)
    plan = family_for(model).plan(model.config)
    with torch.no_grad():
        for index, layer in enumerate(family_for(model).layers(model)):
            layer.self_attn.o_proj.weight[:, : 2 * SIZES["head_dim"]].mul_(0.01)
            plan = plan.with_layer(index, query_heads=[2, 3], kv_heads=[1])
    dense, draft = root / NARROW / "dense", root / NARROW / "draft"
    export(model, dense, tokenizer=tiny_tokenizer())
    compact_(model, plan)
    export(model, draft, plan=plan, tokenizer=tiny_tokenizer())
    return {"dense": str(dense), "draft": str(draft), "options": {}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def served(root: Path) -> Any:
    job = {
        "models": {name: _write_recovered(name, root) for name in FAMILIES},
        "drafts": {name: _write_pair(name, root) for name in FAMILIES} | {NARROW: _write_narrow_pair(root)},
        "prompts": prompts(),
        "long": _long(),
        "letters": tiny_tokenizer()("switch")["input_ids"],
        "schema": LIGHT,
        "chunk": CHUNK,
        "new_tokens": NEW_TOKENS,
        "top": TOP,
    }
    return run_program("features_child.py", job)


@NAMES
def test_a_long_prompt_is_read_in_chunks_and_then_from_the_cache(name: str, root: Path, served: Any) -> None:
    first, again = served["models"][name]["long"]
    rows = log_probabilities(load_model(root / name / "model")[0], [*_long(), *first["tokens"]])
    assert_greedy(rows[len(_long()) - 1 : -1], first["tokens"])
    assert again["tokens"] == first["tokens"]
    whole = len(_long()) // BLOCK * BLOCK
    # Of two kinds of attention vLLM keeps two caches, and finds a block less of both.
    assert (first["cached"], again["cached"]) == (0, whole - BLOCK if name == "gemma3" else whole)


@NAMES
def test_several_answers_have_the_probabilities_of_transformers(name: str, root: Path, served: Any) -> None:
    model, prompt = load_model(root / name / "model")[0], prompts()[1]
    answers = served["models"][name]["several"]
    assert len({tuple(answer["tokens"]) for answer in answers}) == 3
    for answer in answers:
        rows = log_probabilities(model, [*prompt, *answer["tokens"]])[len(prompt) - 1 : -1]
        own = rows[range(NEW_TOKENS), answer["tokens"]]
        torch.testing.assert_close(torch.tensor(answer["log_probabilities"]), own, rtol=0, atol=TOLERANCE)


@NAMES
def test_an_answer_keeps_to_a_json_schema(name: str, served: Any) -> None:
    assert is_light(served["models"][name]["json"])


@NAMES
def test_the_adapters_of_a_recovery_are_served_unmerged(name: str, root: Path, served: Any) -> None:
    """On the checkpoint that was recovered, they answer as the checkpoint does that they were merged into."""
    plain, merged = (load_model(root / name / folder)[0] for folder in ("model", "recovered"))
    last = prompts()[-1]
    assert not torch.allclose(log_probabilities(plain, last), log_probabilities(merged, last), atol=0.1)
    compare(merged, prompts(), served["models"][name]["adapted"])
    compare(plain, prompts(), served["models"][name]["plain"])


@pytest.mark.parametrize("name", [*FAMILIES, NARROW])
def test_a_pruned_model_drafts_for_its_own_dense_model(name: str, root: Path, served: Any) -> None:
    model, found = load_model(root / name / "dense")[0], served["drafts"][name]
    for prompt, tokens in zip(prompts(), found["tokens"], strict=True):
        assert len(tokens) == 4 * NEW_TOKENS
        assert_greedy(log_probabilities(model, [*prompt, *tokens])[len(prompt) - 1 : -1], tokens)
    assert found["accepted"] > found["drafted"] / 2 > 10

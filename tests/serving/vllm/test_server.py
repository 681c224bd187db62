"""The real server on loopback: plain `vllm serve` of an unmodified vLLM, and `pyprune serve`.

A start takes half a minute, so every server answers all that is asked of its kind of checkpoint.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests._support.paths import REPO
from tests._support.served import (
    REAL_VLLM,
    Case,
    compare,
    everything,
    flip_a_weight_bit,
    opt_per_layer,
    prompts,
    uniform,
    write_case,
)
from tests._support.server import Server

pytestmark = REAL_VLLM

BIN = Path(sys.executable).parent
VLLM, PYPRUNE = str(BIN / "vllm"), str(BIN / "pyprune")
UNEQUAL = Case("llama", everything, "PrunedLlamaForCausalLM")


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Plain `vllm serve` of other heads, KV heads and FFN width in every layer, and missing blocks."""
    root = tmp_path_factory.mktemp("unequal")
    write_case(UNEQUAL, root / "model")
    with Server([VLLM, "serve", str(root / "model")], root / "model", root / "log") as server:
        yield server.wait_until_healthy()


def test_log_probabilities_are_transformers(unequal: Server) -> None:
    layers = json.loads((Path(unequal.model) / "config.json").read_text())["per_layer_config"]
    assert len({json.dumps(layer, sort_keys=True) for layer in layers.values()}) == 4
    asked = prompts()
    compare(Path(unequal.model), asked, [unequal.complete(prompt) for prompt in asked])


def test_32_concurrent_requests_are_answered_as_one_by_one(unequal: Server) -> None:
    asked = prompts(range(2, 130, 4))
    assert len(asked) == 32
    alone = [unequal.complete(prompt) for prompt in asked]
    with ThreadPoolExecutor(len(asked)) as clients:
        together = list(clients.map(unequal.complete, asked))
    assert [answer["tokens"] for answer in together] == [answer["tokens"] for answer in alone]
    compare(Path(unequal.model), asked, together)


def test_the_endpoints_and_metrics_of_the_documentation_are_there(unequal: Server) -> None:
    """All but those of speculative decoding, which the example of a draft model reads."""
    text = (REPO / "docs" / "operations" / "serving.md").read_text(encoding="utf-8")
    answers = {}
    for path in re.findall(r"^\| `GET (/[\w/]+)` \|", text, flags=re.MULTILINE):
        with urllib.request.urlopen(f"http://127.0.0.1:{unequal.port}{path}", timeout=30) as reply:
            answers[path] = reply.read().decode()
    assert {"/health", "/metrics", "/load", "/version", "/v1/models"} == set(answers)
    assert json.loads(answers["/v1/models"])["data"][0]["id"] == unequal.model
    found = re.findall(r"^# TYPE (\S+)", answers["/metrics"], flags=re.MULTILINE)
    kinds = {name.removesuffix("_total") for name in found}
    named = {name for name in re.findall(r"`(vllm:\w+)`", text) if "spec_decode" not in name}
    assert len(named) > 10
    assert named - kinds == set()


def test_stopping_leaves_no_process(unequal: Server) -> None:
    """Last of this server's tests: it ends it."""
    assert len(unequal.processes()) > 1
    assert unequal.stop() == 0
    assert unequal.left_over() == []


def test_opt_with_a_sliced_hidden_size_and_ctrl_c(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_case(Case("opt", opt_per_layer, "PrunedOPTForCausalLM"), folder)
    asked = prompts()
    with Server([PYPRUNE, "serve", str(folder)], folder, tmp_path / "log") as server:
        server.wait_until_healthy()
        compare(folder, asked, [server.complete(prompt) for prompt in asked])
        assert server.stop(signal.SIGINT) == 0
        assert server.left_over() == []


def test_stock_export_needs_no_plugin(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_case(Case("llama", uniform(96), "LlamaForCausalLM"), folder)
    asked = prompts()
    without = {"VLLM_PLUGINS": ""}
    with Server([PYPRUNE, "serve", str(folder), "--"], folder, tmp_path / "log", without) as server:
        server.wait_until_healthy()
        compare(folder, asked, [server.complete(prompt) for prompt in asked])
        assert server.stop() == 0


BROKEN = """import sys


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pyprune.modeling":
            raise ImportError("no module named 'transformers.something'")


sys.meta_path.insert(0, Finder())
"""


def test_a_plugin_that_cannot_be_imported_leaves_other_models_alone(tmp_path: Path) -> None:
    """As with a Transformers that lacks what pyprune imports: one line with the fix in the log of each process."""
    folder = tmp_path / "model"
    write_case(Case("llama", uniform(96), "LlamaForCausalLM"), folder)
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    [prompt] = prompts([9])
    broken = {"PYTHONPATH": str(tmp_path)}
    with Server([VLLM, "serve", str(folder)], folder, tmp_path / "log", broken) as server:
        server.wait_until_healthy()
        compare(folder, [prompt], [server.complete(prompt)])
        said = [line for line in server.text().splitlines() if "pyprune: the vLLM plugin is off" in line]
    assert said, "nothing was broken"
    assert all("transformers.something" in line and "Other models are not affected" in line for line in said)


def test_damaged_checkpoint_is_refused_at_load(tmp_path: Path) -> None:
    """One bit of one weight: no library notices it, and the model would answer."""
    folder = tmp_path / "model"
    write_case(UNEQUAL, folder)
    damaged = folder / flip_a_weight_bit(folder)
    with Server([VLLM, "serve", str(folder)], folder, tmp_path / "log") as server:
        assert server.wait_until_it_ends() != 0
        assert server.left_over() == []
        assert f"CheckpointError: {damaged} differs from what was written" in server.text()

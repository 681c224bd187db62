"""Servers under load, without vLLM: options, what is read, the order of turns, the tables, and the two processes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.verify import SERVER
from pyprune.cli.base import INTERRUPTED_CODE
from pyprune.config.base import LARGEST_SEED
from pyprune.errors import ConfigError
from pyprune.serving import comparison
from pyprune.serving.checkpoints import Hub, read_checkpoint
from pyprune.serving.engines import COMMAND_TIMEOUT_S, EngineError
from pyprune.serving.load import run as load_run
from pyprune.serving.load.capacity import Capacity, ServerFacts, server_facts
from pyprune.serving.load.client import bench_command, client_environment, counting_obstacle, read_turn, run_client
from pyprune.serving.load.options import (
    DEFAULT_LOADS,
    Load,
    LoadOptions,
    owned_problems,
    parse_loads,
    parse_slo,
)
from pyprune.serving.load.results import LoadReport
from pyprune.serving.load.run import measure_serving
from pyprune.serving.load.server import Server, server_environment
from pyprune.serving.load.table import load_conditions, load_text, server_table, waiting_notes
from pyprune.serving.load.tradeoff import load_tradeoff
from pyprune.serving.stats import SPEED_VARIABLES
from pyprune.serving.vllm.options import parallel_ranks
from pyprune.serving.widths import token_bytes
from tests._support.cli import refused, run
from tests._support.models import tiny_model
from tests._support.served import SIZES, Case, everything, write_case
from tests._support.tokenizer import tiny_tokenizer

LOG = """\
INFO 11-23 12:20:24 [backends.py:1] torch.compile took 12.50 s in total
INFO 11-23 12:20:24 [kv_cache_utils.py:2327] CPU KV cache size: 19,525 tokens, Maximum concurrency for 2,049 tokens \
per request: 9.53x
(EngineCore pid=7) INFO 11-23 12:20:20 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/m', \
max_seq_len=2048, enforce_eager=False, pooler_config=None, compilation_config={'mode': <CompilationMode.VLLM_COMPILE: \
3>, 'cudagraph_mode': <CUDAGraphMode.NONE: 0>}, kernel_config=None
"""
METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{user_specified_block_size="False",block_size="128",engine="0",num_gpu_blocks="9"} 1.0
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, and one with other heads in every layer, of which the first has no attention."""
    root = tmp_path_factory.mktemp("load")
    save_checkpoint(tiny_model("llama", **SIZES), tiny_tokenizer(), root / "dense", plan=None, provenance={})
    write_case(Case("llama", everything, "PrunedLlamaForCausalLM"), root / "pruned")
    return {"dense": root / "dense", "pruned": root / "pruned"}


@pytest.fixture(autouse=True)
def _with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("engines", "vllm.command", "load.run"):
        monkeypatch.setattr(f"pyprune.serving.{module}.vllm_installed", lambda: True)


# --- options -------------------------------------------------------------------------------------


def test_loads_and_service_levels_are_read() -> None:
    assert parse_loads(None, None) == DEFAULT_LOADS
    assert parse_loads("1, 4,4", None) == (Load(1), Load(4))
    assert parse_loads(None, "0.5,2") == (Load(rate=0.5), Load(rate=2.0))
    assert [str(load) for load in (Load(4), Load(rate=0.5))] == ["4 at once", "0.5 requests/s"]
    assert [load.default_requests for load in (Load(1), Load(16), Load(rate=0.5), Load(rate=2.5))] == [8, 32, 8, 25]
    assert parse_slo("ttft:500ms,tpot:0.05s, e2e:3s") == {"ttft": 500.0, "tpot": 50.0, "e2e": 3000.0}
    assert parse_slo(None) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--concurrency", "0"], "--concurrency holds '0'; it takes whole numbers of at least 1"),
        (["--concurrency", "1,x"], "--concurrency holds 'x'"),
        (["--concurrency", ","], "--concurrency is empty"),
        (["--request-rate", "0.0"], "--request-rate holds '0.0'; it takes numbers above 0"),
        (["--request-rate", "1", "--concurrency", "1"], "exclude each other"),
        (["--slo", "ttft:500"], "--slo holds 'ttft:500'; a limit is a time above 0 with its unit"),
        (["--slo", "itl:5ms"], "Unknown metric of --slo 'itl'"),
        (["--slo", "ttft:1s,ttft:2s"], "--slo limits ttft twice"),
        (["--slo", "tpot:9ms", "--new-tokens", "1"], "slo limits tpot, the time of the tokens after the first"),
        (["--kv-gib", "0"], "kv_gib is 0; it must be above 0"),
        (["--requests", "0"], "requests is 0"),
        (["--requests", "8"], "requests is 8; 16 at once need at least as many"),
        (["--prompt-tokens", "0"], "--prompt-tokens holds '0'; it takes whole numbers of at least 1"),
        (
            ["--prompt-tokens", "24,500"],
            "dense reads at most 512 tokens, the load needs 628; lower prompt_tokens (500)",
        ),
        (["--precision", "1"], "precision is 1; it must be at least 0 and below 1"),
        (["--max-repeats", "2"], "max_repeats is 2; it must be at least repeats, which is 3"),
        (["--max-repeats", "9", "--precision", "0"], "max_repeats is 9, but precision is 0, which takes exactly"),
        (["--vllm-args", "'"], "cannot be split into words"),
        (
            ["--vllm-args", "--dtype float32"],
            "vllm_args holds --dtype, which the measurement sets itself; use --dtype of",
        ),
        (
            ["--vllm-args", "--enforce_eager"],
            "holds --enforce-eager, which the measurement sets itself; use --eager of",
        ),
        (
            ["--vllm-args", "--kv-cache-memory=9"],
            "holds --kv-cache-memory, which the measurement sets itself; use --kv-gib",
        ),
        (["--vllm-args", "--enable-prefix-caching"], "sets itself; leave it out"),
        (["--vllm-args", "--disable-log-stats"], "holds --disable-log-stats, with which /metrics counts nothing"),
        (["--vllm-args", "--api-key k"], "holds --api-key, with which the measurement's client does not reach"),
        (["--vllm-args", "--uds /tmp/s"], "holds --uds, with which the measurement's client does not reach"),
        (["--vllm-args", "--max-model-len 256"], "--max-model-len in vllm_args is 256, the load needs 640"),
        (
            ["--eager", "--vllm-args", "--no-enforce-eager"],
            "holds --no-enforce-eager, which the measurement sets itself",
        ),
        (["--vllm-args", "--num-gpu-blocks-override 8"], "holds --num-gpu-blocks-override"),
        (["--engine", "llamacpp"], "--engine llamacpp cannot be combined with --serving"),
        (["--batch-size", "2", "--quantise", "q8_0"], "--batch-size 2, --quantise q8_0 cannot be combined"),
        (["--prompt-tokens", "500"], "dense reads at most 512 tokens, the load needs 628"),
    ],
)
def test_options_of_servers_are_checked(folders: dict[str, Path], options: Sequence[str], said: str) -> None:
    message = refused("bench", folders["pruned"], "--against", folders["dense"], "--serving", *options)
    assert said in " ".join(message.split())


@pytest.mark.parametrize("engine", [("--serving",), ("--engine", "transformers"), ("--engine", "llamacpp")])
def test_what_cannot_be_timed_is_refused_before_perplexities(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: tuple[str, ...]
) -> None:
    if "llamacpp" in engine:
        pytest.importorskip("xllamacpp")
    asked: list[str] = []
    for name in ("loaded_perplexity", "_as_gguf_files"):
        monkeypatch.setattr(f"pyprune.cli.bench.{name}", lambda *given, **_: asked.append(str(given)))
    (tmp_path / "text.txt").write_text("words")
    given = ["bench", folders["pruned"], "--against", folders["dense"], *engine, "--ppl", tmp_path / "text.txt"]
    why = "No architecture of llama.cpp holds" if "llamacpp" in engine else "dense reads at most 512 tokens"
    assert why in " ".join(refused(*given, "--prompt-tokens", "600").split())
    if "--serving" in engine:
        said = " ".join(refused(*given, "--vllm-args", "-tp 3").split())
        assert "3 tensor parallel ranks cannot share" in said
    absent = ["bench", tmp_path / "absent", *given[2:]]
    assert "absent" in refused(*absent)
    assert asked == []


def test_options_of_servers_need_servers(folders: dict[str, Path]) -> None:
    message = refused("bench", folders["pruned"], "--against", folders["dense"], "--slo", "ttft:1s", "--eager")
    assert "--slo, --eager belong to servers; add --serving" in message
    message = refused("bench", folders["pruned"], "--against", folders["dense"], "--requests", "0", "--kv-gib", "0")
    assert "--requests, --kv-gib belong to servers; add --serving" in message


# --- what servers and the client say ----------------------------------------------------------------


def test_what_a_server_says_is_read() -> None:
    assert server_facts(LOG, METRICS) == ServerFacts(128, 2049, 9.53, 12.5, "VLLM_COMPILE", 2048)
    gpu = "Setting kv cache block size to 32 for X backend(s).\nMaximum concurrency for 8 tokens per request: 1,2x"
    assert server_facts(gpu, METRICS).block_tokens == 32
    assert server_facts("", "") == ServerFacts(None, None, None, None)


def test_capacity_counts_the_kv_heads_of_every_layer(folders: dict[str, Path]) -> None:
    dense, pruned = (read_checkpoint(folders[name]).config for name in ("dense", "pruned"))
    assert token_bytes(dense, "bfloat16") == 2 * 32 * 2 * (2 + 2 + 2 + 2)
    assert token_bytes(pruned, "float32") == 2 * 32 * 4 * (0 + 2 + 1 + 2)
    held = Capacity(token_bytes=1000, block_tokens=16, memory=10 * 16_000 + 9, context=40, reported=3.33)
    assert held.sequences == pytest.approx(10 / 3)
    assert held.is_confirmed is True
    assert Capacity(1000, 16, 10 * 16_000, 40, 3.35).is_confirmed is False
    assert Capacity(1000, 16, 10 * 16_000, 40).is_confirmed is None


def test_the_client_is_vllm_s_own_with_every_condition(tmp_path: Path) -> None:
    options = LoadOptions(prompt_tokens=24, new_tokens=5, slo={"ttft": 500.0, "e2e": 2000.0}, seed=7)
    command = bench_command("http://127.0.0.1:9", "/m", Load(4), options, 2, tmp_path)
    assert command[:6] == [sys.executable, "-P", "-m", "pyprune.serving.vllm.launch", "bench", "serve"]
    pairs = dict(pairwise(command))
    wanted = {
        "--model": "/m", "--random-input-len": "24", "--random-output-len": "5", "--num-prompts": "8",
        "--max-concurrency": "4", "--num-warmups": "4", "--temperature": "0",
    }  # fmt: skip
    assert {name: pairs[name] for name in wanted} == wanted
    assert command[command.index("--goodput") + 1 :] == ["ttft:500", "e2el:2000"]
    seeds = {
        dict(pairwise(bench_command("u", "/m", Load(4), replace(options, seed=seed), turn, tmp_path)))["--seed"]
        for seed, turn in ((7, 0), (7, 1), (8, 0), (LARGEST_SEED, 0), (LARGEST_SEED, 1))
    }
    assert len(seeds) == 5, "no two turns share their prompts, of one seed or of two"
    assert all(0 <= int(seed) <= LARGEST_SEED for seed in seeds), "numpy takes no more"
    rate = bench_command("http://127.0.0.1:9", "/m", Load(rate=2.5), LoadOptions(), 0, tmp_path)
    assert rate[rate.index("--request-rate") + 1] == "2.5"
    assert not {"--max-concurrency", "--goodput"} & set(rate)


def test_the_client_asks_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    assert client_environment()["NO_PROXY"] == "example.org,127.0.0.1"


def write_result(content: str, status: int = 0) -> list[str]:
    """A client that writes this to result.json of its folder, says a word and ends."""
    code = (
        f"import sys; open(sys.argv[1] + '/result.json', 'w').write({content!r}); print('a word'); sys.exit({status})"
    )
    return [sys.executable, "-c", code]


def test_what_the_client_wrote_is_read(tmp_path: Path) -> None:
    assert run_client([*write_result('{"failed": 0, "duration": 2}'), str(tmp_path)], tmp_path)["duration"] == 2


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        ("{}", 3, "ended with status 3"),
        ("{", 0, "wrote no result that can be read"),
    ],
)
def test_a_client_that_fails_shows_the_end_of_its_log(tmp_path: Path, content: str, status: int, said: str) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        run_client([*write_result(content, status), str(tmp_path)], tmp_path)
    assert str(caught.value).endswith("a word")


def test_a_client_lives_as_long_as_there_is_progress(tmp_path: Path) -> None:
    """Not as long as a number of seconds says: many requests take their time."""
    code = f"import time; time.sleep(1); open({str(tmp_path / 'result.json')!r}, 'w').write('{{}}')"
    assert run_client([sys.executable, "-c", code], tmp_path, 0.1, iter(range(10**6)).__next__) == {}
    for never in (lambda: None, lambda: ("8.0",)):
        with pytest.raises(EngineError, match=r"got no token from the server for 0 s"):
            run_client([sys.executable, "-c", "import time; time.sleep(1000)"], tmp_path, 0.3, never)


def test_a_result_of_another_release_is_said() -> None:
    with pytest.raises(EngineError, match="KeyError: 'ttfts'"):
        read_turn({}, model="m")


# --- the server's process -------------------------------------------------------------------------

FAKE_SERVER = textwrap.dedent(
    """\
    import sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    LOG, METRICS = sys.argv[1:3]
    asked = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            global asked
            asked += 1
            self.send_response(200 if asked > 2 else 503)
            self.end_headers()
            self.wfile.write(METRICS.encode() if self.path == "/metrics" else b"")

    print(LOG, flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Handler).serve_forever()
    """
)


def test_a_server_is_waited_for_read_and_ended() -> None:
    with Server([sys.executable, "-c", FAKE_SERVER, LOG, METRICS], "model") as server:
        assert server.facts == ServerFacts(128, 2049, 9.53, 12.5, "VLLM_COMPILE", 2048)
        assert server.load_seconds > 0
        assert server.peak_memory_bytes() > 1e6
        assert server.cpu_seconds() >= 0
        server.check()
        with pytest.raises(
            EngineError, match=r"of model answered /v1/completions with status 501: .*Unsupported method"
        ) as caught:
            server.post("/v1/completions", {})
        assert LOG.splitlines()[-1] in str(caught.value), "the end of its log as well"
        assert server.tokens() is None, "this one counts none"
        process = server._process
    assert process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.second
def test_a_server_that_starts_slowly_and_says_so_is_waited_for() -> None:
    """It writes for longer than it may be silent, and then answers; others never do."""
    words = "import time\nfor _ in range({}):\n    print('.', flush=True)\n    time.sleep(0.5)\n"
    counted = METRICS + 'vllm:generation_tokens_total{engine="0",model_name="a b"} 8.0\n'
    with Server([sys.executable, "-c", words.format(20) + FAKE_SERVER, LOG, counted], "model", patience=8) as server:
        assert server.load_seconds > 8
        assert server.tokens() == ('vllm:generation_tokens_total{engine="0",model_name="a b"} 8.0',)
    with pytest.raises(EngineError, match="The server of model wrote nothing and was not healthy for 1 s"):
        Server([sys.executable, "-c", "import time; time.sleep(1000)"], "model", patience=1)
    with pytest.raises(EngineError, match="The server of model was not healthy for 8 s"):
        Server([sys.executable, "-u", "-c", "while True: print('.')"], "model", patience=1)


INTERRUPTING = """
import os, signal, time
def ended(*_):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.5)
    os._exit(0)
signal.signal(signal.SIGTERM, ended)
"""


def test_a_second_interrupt_waits_until_a_server_has_ended() -> None:
    server = Server([sys.executable, "-c", INTERRUPTING + FAKE_SERVER, LOG, METRICS], "model")
    with pytest.raises(KeyboardInterrupt):
        server.close()
    assert server.exit_status() == 0


def test_servers_are_measured_without_the_operators_key_and_quiet_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    found = server_environment()
    assert "VLLM_API_KEY" not in found
    assert (found["VLLM_LOGGING_LEVEL"], found["VLLM_CPU_OMP_THREADS_BIND"]) == ("INFO", "nobind")


def test_a_server_that_ends_shows_the_end_of_its_log() -> None:
    with pytest.raises(EngineError, match=r"The server of model ended with status 4.*\n.*no memory"):
        Server([sys.executable, "-c", "import sys; print('no memory'); sys.exit(4)"], "model")


# --- turns and tables -----------------------------------------------------------------------------


class FakeServers:
    """Stands in for the servers and the client: what was started and measured, in order."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.names = {str(folder): name for name, folder in folders.items()}
        self.up: list[str] = []
        self.most_up = 0
        self.started: list[list[str]] = []
        self.measured: list[tuple[str, str]] = []
        self.asked: list[dict[str, str]] = []
        self.noise = (1.0,)
        self.answers = (4,)
        self.compilation: dict[str, str | None] = dict.fromkeys(folders, "DYNAMO_TRACE_ONCE")
        self.max_model_len: int | None = 44
        self.environments: list[dict[str, str]] = []
        self.ended: list[str] = []
        self.patience: set[float] = set()

    def server(self, command: list[str], model: str, environment: dict[str, str]) -> Any:
        self.environments.append(environment)
        fake, name = self, self.names[model]

        class Up:
            url, load_seconds = "http://127.0.0.1:1", 2.5

            def __init__(self) -> None:
                self.model = model
                self.facts = ServerFacts(128, 256, 3.0, None, fake.compilation[name], fake.max_model_len)

            def check(self) -> None: ...

            def error(self, what: str) -> EngineError:
                return EngineError(f"{what}: the server's log")

            def tokens(self) -> tuple[str, ...]:
                return ("vllm:generation_tokens_total 1",)

            def cpu_seconds(self) -> float:
                return 0.0

            def peak_memory_bytes(self) -> int:
                return 500_000_000

            def ask_to_end(self) -> None:
                fake.ended.append(f"{name} is asked")

            def close(self) -> None:
                fake.up.remove(name)
                fake.ended.append(f"{name} has ended")

        self.started.append(command)
        self.up.append(name)
        self.most_up = max(self.most_up, len(self.up))
        return Up()

    def client(
        self, command: list[str], folder: Path, patience: float, progress: Callable[[], object]
    ) -> dict[str, Any]:
        """Four tokens a request; the pruned model takes 0.8 of the dense one's time."""
        given = dict(pairwise(command))
        self.patience.add(patience)
        assert progress(), "what the server counts is asked"
        name = self.names[given["--model"]]
        assert name in self.up
        self.asked.append(given)
        rated = "--max-concurrency" not in given
        self.measured.append((name, given["--request-rate" if rated else "--max-concurrency"]))
        count = int(given["--num-prompts"])
        turn = sum(1 for one in self.measured if one == self.measured[-1])
        pace = (0.8 if name == "pruned" else 1.0) * (self.noise[turn % len(self.noise)] if name == "pruned" else 1.0)
        return {
            "duration": 2.0 if rated else 2.0 * pace,
            "total_input_tokens": 24 * count,
            "total_output_tokens": 4 * count,
            "request_goodput": 1.5 if "--goodput" in command else None,
            "ttfts": [pace * (0.1 + 0.01 * i) for i in range(count)],
            "itls": [[0.02 * pace] * 3] * count,
            "latencies": [pace * (0.16 + 0.01 * i) for i in range(count)],
            "output_lens": [self.answers[i % len(self.answers)] for i in range(count)],
        }


@pytest.fixture
def fake(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    servers = FakeServers(folders)
    monkeypatch.setattr(load_run, "Server", servers.server)
    monkeypatch.setattr(load_run, "run_client", servers.client)
    monkeypatch.setattr("pyprune.serving.engines.SETTLE_S", 0.0)
    monkeypatch.setattr(load_run, "accelerator_name", lambda: None)
    monkeypatch.setattr(load_run, "available_memory", lambda: 2**60)
    return servers


def test_answers_that_broke_off_do_not_count(fake: FakeServers, folders: dict[str, Path], tmp_path: Path) -> None:
    """The client of vLLM calls them successes: their first token had come."""
    fake.answers = (4, 4, 4, 4, 2)
    with pytest.raises(EngineError, match=r"2 of 10 answers have another length than the 4 tokens.*the server's log"):
        measured(folders, jsonl=tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


def test_requests_that_failed_are_told_with_the_end_of_the_server_s_log() -> None:
    found = {"failed": 2, "num_prompts": 5, "errors": ["", "Bad Request."], "output_lens": [4, 0, 4, 4, 0]}
    assert counting_obstacle(found, 4) == "2 of 5 requests failed: Bad Request"
    assert counting_obstacle({"failed": 0, "output_lens": [4, 4]}, 4) is None
    with Server([sys.executable, "-c", FAKE_SERVER, LOG, METRICS], "model") as server:
        message = str(server.error("Something failed"))
        assert message.startswith("Something failed. Its last log lines:")
        assert LOG.splitlines()[-1] in message


def test_the_files_were_verified_before_the_time_of_a_start_counts(
    fake: FakeServers, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    given, read = [], []
    command, once = load_run.serve_command, load_run.read_once

    def serve_command(folder: Path, words: Sequence[str], *, server: str) -> list[str]:
        given.append(server)
        return command(folder, words, server=server)

    def read_once(checkpoint: Any) -> None:
        read.append(checkpoint.folder)
        once(checkpoint)

    monkeypatch.setattr(load_run, "serve_command", serve_command)
    monkeypatch.setattr(load_run, "read_once", read_once)
    measured(folders)
    assert [environment[SERVER] for environment in fake.environments] == given
    assert len(set(given)) == len(given) == 2
    assert sorted(read) == sorted(folders.values())
    assert not any("VLLM_CPU_KVCACHE_SPACE" in environment for environment in fake.environments), (
        "it would replace kv_gib"
    )


@pytest.mark.parametrize(("verify", "record", "read"), [("1", True, 0), ("0", True, 1), ("1", False, 1)])
def test_weights_are_read_ahead_where_no_verification_has_read_them(
    verify: str, record: bool, read: int, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(folders["pruned"], tmp_path / "model"))
    if not record:
        (folder / "pruning.json").unlink()
    checkpoint = read_checkpoint(folder)
    found: list[Path] = []
    monkeypatch.setattr(load_run, "weight_files", lambda place: found.append(place) or [])
    monkeypatch.setenv("PYPRUNE_VERIFY", verify)
    load_run.read_once(checkpoint)
    assert len(found) == read


def test_figures_of_several_runs_stand_under_conditions_of_their_own(
    fake: FakeServers, folders: dict[str, Path]
) -> None:
    command = ["bench", folders["pruned"], "--against", folders["dense"], "--serving", "--new-tokens", "4"]
    command += ["--prompt-tokens", "24", "--repeats", "1", "--annotate"]
    assert run(*command, "--concurrency", "1,4", "--eager", "--dtype", "float32").exit_code == 0
    assert run(*command, "--concurrency", "2", "--dtype", "bfloat16").exit_code == 0
    kept = read_pruning_json(folders["pruned"]).provenance["speed"]
    modes = {name: "float32" in kept[f"conditions of servers, {name} at once"] for name in ("1", "4", "2")}
    assert modes == {"1": True, "4": True, "2": False}
    assert all(f"output tokens/s, {name} at once, over the dense model's" in kept for name in modes)


def test_what_was_checked_is_what_is_measured(
    fake: FakeServers, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hub id, the revision that vLLM's options name: vLLM takes none of a folder."""
    asked, read = [], load_run.read_checkpoint

    def read_checkpoint(source: Path, *, hub: Hub) -> Any:
        asked.append(hub.revision)
        return read(source, hub=hub)

    monkeypatch.setattr(load_run, "read_checkpoint", read_checkpoint)
    measured(folders, replace(SMALL, vllm_args=("--revision", "v2")))
    assert asked == ["v2", "v2"]


def test_of_a_file_only_what_is_not_replaced_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    given = ("--config", str(path), "--no-enable-prefix-caching", "--max-num-seqs", "8")
    path.write_text("port: 8000\ndtype: float32\nenable-prefix-caching: true\n")
    assert owned_problems(given) == []
    path.write_text("served-model-name: chat\nenforce_eager: true\n")
    assert [problem.split()[2] for problem in owned_problems(given)] == ["--served-model-name,", "--enforce-eager,"]


def test_tokens_and_keys_are_told_to_nobody() -> None:
    given = (
        "--hf-token",
        "a",
        "--max-num-seqs",
        "8",
        "--hf_token=b",
        "--hf-token",
        "--hf-overrides",
        "{}",
        "--api-k",
        "c",
    )
    told = ("--hf-token", "***", "--max-num-seqs", "8", "--hf_token=***", "--hf-token", "--hf-overrides", "{}")
    options = LoadOptions(vllm_args=given)
    assert options.told_args == (*told, "--api-k", "***")
    assert options.to_dict()["vllm_args"] == list(options.told_args)


def test_rates_that_are_near_each_other_are_two_loads() -> None:
    one, other = parse_loads(None, "0.1234567,0.1234568")
    assert str(one) != str(other)
    assert str(Load(rate=0.1)) == "0.1 requests/s"


def test_every_rank_has_a_process_and_a_cache(fake: FakeServers, folders: dict[str, Path]) -> None:
    options = replace(SMALL, vllm_args=("-tp", "2", "--pipeline-parallel-size=2"))
    assert parallel_ranks(options.vllm_args) == 4
    report = measured(folders, options)
    capacity = report.models["dense"].capacity
    assert capacity == Capacity(0, 128, 2**30, 256, 3.0), "what a rank has of a token is the server's to say"
    assert load_conditions(report)["cache"].startswith("1 GiB of key-value cache for each of the 4 ranks of a server")
    row = next(row for row in server_table(report).rows if row[0] == "dense")
    assert row[-3:] == (None, None, "3.00")
    assert "config.json that it holds" not in load_text(report)
    told = report.to_dict()["models"]["dense"]["capacity"]
    assert (told["token_bytes"], told["sequences"], told["confirmed"], told["reported"]) == (None, None, None, 3.0)
    assert "dense, 4 at once: the cache holds 3.0 of these requests" in load_text(report)
    twice = measured(folders, replace(options, vllm_args=("-dp", "2"))).models["dense"].capacity
    assert twice is not None
    assert twice.reported == 6.0, "each of the two engines says what it holds"
    assert measured(folders).models["dense"].capacity is not None


def test_a_length_in_a_file_of_options_is_replaced(fake: FakeServers, folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("max-model-len: 5\n")
    assert measured(folders, replace(SMALL, repeats=1, vllm_args=("--config", str(path)))).turns
    with pytest.raises(ConfigError, match="--max-model-len in vllm_args is 5, the load needs 28"):
        measured(folders, replace(SMALL, repeats=1, vllm_args=("--max-model-len", "5")))


SMALL = LoadOptions(prompt_tokens=24, new_tokens=4, loads=(Load(1), Load(4)), requests=10, repeats=6)


def measured(folders: dict[str, Path], options: LoadOptions = SMALL, **more: Any) -> LoadReport:
    return measure_serving(folders, options, **more)


def test_servers_are_up_side_by_side_and_measured_in_a_drawn_order(fake: FakeServers, folders: dict[str, Path]) -> None:
    report = measured(folders)
    assert report.resident
    assert (fake.most_up, fake.up) == (2, [])
    assert [word.partition(" ")[2] for word in fake.ended] == ["is asked"] * 2 + ["has ended"] * 2, "all end at once"
    pairs = [fake.measured[i : i + 2] for i in range(0, len(fake.measured), 2)]
    assert [pair[0][1] for pair in pairs] == ["1", "4"] * 6, "every load in every round"
    assert all({name for name, _ in pair} == {"dense", "pruned"} for pair in pairs)
    assert {pair[0][0] for pair in pairs} == {"dense", "pruned"}, "each goes first now and then"
    assert [(t.model, t.order) for t in report.turns] == [(name, i) for i, (name, _) in enumerate(fake.measured)]
    first = list(fake.measured)
    fake.measured.clear()
    measured(folders)
    assert fake.measured == first, "the same seed draws the same order"
    for command in fake.started:
        assert command[4] == "serve"
        options = dict(pairwise(command))
        assert options["--kv-cache-memory-bytes"] == str(2**30)
        assert options["--max-model-len"] == "44"
        assert "--no-enable-prefix-caching" in command


@pytest.mark.parametrize("why", ["a GPU", "little memory"])
def test_two_servers_never_share_a_gpu_or_too_little_memory(
    fake: FakeServers, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "a GPU":
        monkeypatch.setattr(load_run, "accelerator_name", lambda: "a GPU")
    else:
        monkeypatch.setattr(load_run, "available_memory", lambda: 2**30)
    report = measured(folders)
    assert not report.resident
    assert (fake.most_up, fake.up) == (1, [])
    assert len(report.turns) == 2 * 2 * 6
    assert len(report.models["dense"].load_seconds) > 1, "each is started when its turn comes"
    assert report.environment["device"] == ("a GPU" if why == "a GPU" else report.environment["cpu"])


def test_figures_are_those_of_the_requests(fake: FakeServers, folders: dict[str, Path]) -> None:
    report = measured(folders)
    load = Load(4)
    assert report.tokens_per_second("dense", load).median == pytest.approx(20)
    assert report.ratio("pruned", load) == pytest.approx(1.25)
    assert report.percentiles("dense", load, "ttft") == pytest.approx([145, 182, 190], abs=2)
    assert report.percentiles("dense", load, "tpot") == pytest.approx([20, 20, 20])
    assert report.percentiles("dense", load, "itl") == pytest.approx([20, 20, 20])
    assert report.percentiles("pruned", load, "e2e") == pytest.approx([0.8 * x for x in (205, 241, 250)], abs=2)
    dense = report.models["dense"].capacity
    assert dense is not None
    assert dense.sequences == 2**30 // (128 * token_bytes(read_checkpoint(folders["dense"]).config, "bfloat16")) / 2
    assert dense.is_confirmed is False


def test_an_interrupted_bench_says_where_its_turns_are(
    fake: FakeServers, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def client(*given: Any) -> dict[str, Any]:
        if len(fake.measured) == 3:
            raise KeyboardInterrupt
        return fake.client(*given)

    monkeypatch.setattr(load_run, "run_client", client)
    turns = tmp_path / "turns.jsonl"
    result = run("bench", folders["pruned"], "--against", folders["dense"], "--serving", "--jsonl", turns,
                 "--prompt-tokens", "24", "--new-tokens", "4")  # fmt: skip
    assert result.exit_code == INTERRUPTED_CODE
    assert f"The samples that were measured are in {turns}." in result.stderr.replace("\n", "")
    assert len(turns.read_text().splitlines()) == 3
    assert fake.up == []


MODES = [
    ((), "DYNAMO_TRACE_ONCE", "compiled (vLLM's own default)"),
    (("-O0",), "NONE", "not compiled, as vLLM's log says"),
    (("-cc.backend", "eager"), "DYNAMO_TRACE_ONCE", "compiled"),
    (("-O1",), None, "not in vLLM's log"),
]


@pytest.mark.parametrize(("given", "logged", "said"), MODES)
def test_the_mode_is_the_one_that_the_log_tells(
    fake: FakeServers, folders: dict[str, Path], given: tuple[str, ...], logged: str | None, said: str
) -> None:
    fake.compilation = dict.fromkeys(folders, logged)
    report = measured(folders, replace(SMALL, repeats=1, vllm_args=given))
    assert load_conditions(report)["mode"] == said
    assert report.to_dict()["models"]["pruned"]["compilation"] == logged


def test_modes_that_differ_are_told_for_each_model(fake: FakeServers, folders: dict[str, Path]) -> None:
    fake.compilation = {"dense": "DYNAMO_TRACE_ONCE", "pruned": "NONE"}
    mode = load_conditions(measured(folders, replace(SMALL, repeats=1)))["mode"]
    assert mode == "dense: compiled (vLLM's own default); pruned: not compiled, as vLLM's log says"


def test_what_a_server_takes_of_a_gpu_is_told_beside_what_was_in_use_before(
    fake: FakeServers, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory_in_use() -> int:
        return 10**9 + sum({"dense": 8, "pruned": 7}[name] * 10**9 for name in fake.up)

    monkeypatch.setattr(load_run, "accelerator_name", lambda: "a GPU")
    monkeypatch.setattr(load_run, "memory_in_use", memory_in_use)
    report = measured(folders, replace(SMALL, repeats=2))
    assert {name: m.gpu_memory for name, m in report.models.items()} == {"dense": 8 * 10**9, "pruned": 7 * 10**9}
    table = server_table(report)
    place = table.columns.index("GPU memory (MB)")
    assert [row[place] for row in table.rows] == ["8,000", "7,000"]
    assert "key-value cache and all" in table.note
    monkeypatch.setattr(load_run, "accelerator_name", lambda: None)
    assert "GPU memory (MB)" not in server_table(measured(folders, replace(SMALL, repeats=1))).columns


def test_conditions_name_the_longest_sequence_and_the_environment(
    fake: FakeServers, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in filter(SPEED_VARIABLES.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)
    once = replace(SMALL, repeats=1)
    assert "environment of the servers" not in load_conditions(measured(folders, once))
    for name, value in {"VLLM_API_KEY": "sk-1", "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0 1",
                        "OMP_NUM_THREADS": "2", "LD_PRELOAD": "", "EDITOR": "vi"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    turns = tmp_path / "turns.jsonl"
    report = measured(folders, once, jsonl=turns)
    conditions = load_conditions(report)
    assert conditions["longest sequence"] == "44 tokens (--max-model-len)"
    assert conditions["environment of the servers"] == (
        "LD_PRELOAD='' OMP_NUM_THREADS=2 VLLM_CPU_OMP_THREADS_BIND='0 1'"
    ), "the cache is sized by an option, and the key is nobody's"
    rows = [json.loads(line) for line in turns.read_text().splitlines()]
    wanted = {"LD_PRELOAD": "", "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "0 1"}
    assert all(row["environment"]["variables"] == wanted for row in rows)
    assert {row["checkpoint"]["max_model_len"] for row in rows} == {44}
    assert report.to_dict()["models"]["dense"]["max_model_len"] == 44


def test_the_longest_sequence_is_the_server_s_own_word_before_ours(fake: FakeServers, folders: dict[str, Path]) -> None:
    once = replace(SMALL, repeats=1)
    fake.max_model_len = 1000
    assert load_conditions(measured(folders, once))["longest sequence"].startswith("1,000 tokens")
    fake.max_model_len = None
    assert load_conditions(measured(folders, once))["longest sequence"].startswith("44 tokens"), "what it was given"


def test_requests_that_wait_for_the_cache_are_said(fake: FakeServers, folders: dict[str, Path]) -> None:
    block = 128 * token_bytes(read_checkpoint(folders["dense"]).config, "bfloat16")
    small = replace(SMALL, repeats=1, kv_gib=3.5 * block / 2**30)
    text = load_text(measured(folders, small))
    assert "dense, 4 at once: the cache holds 3.0 of these requests, the others wait in the server." in text
    assert "1 at once: the cache" not in text
    assert "wait in the server" not in load_text(measured(folders, replace(SMALL, repeats=1)))


@pytest.mark.parametrize(
    ("models", "name"),
    [(["H100", "H100"], "NVIDIA H100"), (["L4", "H100"], "NVIDIA H100 or NVIDIA L4"), ([], "GPU")],
)
def test_a_machine_is_called_by_all_kinds_of_its_gpus(
    models: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, model in enumerate(models):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "information").write_text(f"Model: \t NVIDIA {model}\nIRQ: 5\n")
    monkeypatch.setattr(load_run, "NVIDIA", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert load_run.accelerator_name() == name


def test_requests_that_wait_for_a_place_are_said(fake: FakeServers, folders: dict[str, Path]) -> None:
    once = replace(SMALL, repeats=1)
    said = "4 at once: --max-num-seqs lets a server take {} of these requests at a time, the others wait."
    assert said.format(3) in load_text(measured(folders, replace(once, vllm_args=("--max-num-seqs", "3"))))
    shared = replace(once, vllm_args=("--max_num_seqs=1", "-dp", "2"))
    assert said.format(2) in load_text(measured(folders, shared))
    assert "at a time" not in load_text(measured(folders, replace(once, vllm_args=("--max-num-seqs", "4"))))


def test_what_vllm_lets_in_by_itself_counts_on_a_cpu(
    fake: FakeServers, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = measured(folders, replace(SMALL, repeats=1))
    crowd = replace(report.options, loads=(Load(concurrency=128), Load(concurrency=200)))
    said = "200 at once: without --max-num-seqs a server of vLLM's CPU build takes 128 of these requests at a time"

    def notes(version: str, *given: str) -> str:
        environment = report.environment | {"versions": {"vllm": version}}
        return "\n".join(
            waiting_notes(replace(report, options=replace(crowd, vllm_args=given), environment=environment))
        )

    assert said in notes("0.32.0+cpu")
    assert "128 at once: without" not in notes("0.32.0+cpu")
    assert "without --max-num-seqs" not in notes("0.32.0+cpu", "-tp", "2")
    assert "without --max-num-seqs" not in notes("0.32.0+cpu", "--performance-mode", "throughput")
    assert "without --max-num-seqs" not in notes("0.33.0+cpu"), "not known"
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    assert "without --max-num-seqs" not in notes("0.32.0"), "the default of a GPU goes by its memory"


def test_where_the_log_is_believed_it_says_how_many_wait() -> None:
    """A cache of sliding windows holds more than its layers would without them, and shorter sequences no fewer."""
    windowed = Capacity(token_bytes=1024, block_tokens=128, memory=2**20, context=1024, reported=6.0)
    assert windowed.is_confirmed is False
    assert (windowed.sequences, windowed.held(1024), windowed.held(128)) == (1.0, 6.0, 8.0)
    fewer = replace(windowed, reported=0.5)  # a draft has a part of the cache
    assert (fewer.held(1024), fewer.held(512)) == (0.5, 1.0)
    whole = replace(windowed, reported=1.0)
    assert (whole.held(1024), whole.held(512)) == (1.0, 2.0)


def test_a_turn_may_take_as_long_as_its_requests_take_to_be_sent(fake: FakeServers, folders: dict[str, Path]) -> None:
    measured(folders, replace(SMALL, repeats=1, loads=(Load(rate=0.5),), requests=2000))
    measured(folders, replace(SMALL, repeats=1))
    assert fake.patience == {COMMAND_TIMEOUT_S + 4000, COMMAND_TIMEOUT_S}


def test_under_a_rate_models_are_compared_by_how_long_requests_take(
    fake: FakeServers, folders: dict[str, Path], tmp_path: Path
) -> None:
    result = run(
        "bench", folders["pruned"], "--against", folders["dense"], "--serving", "--request-rate", "2", "--requests",
        "4", "--prompt-tokens", "24", "--new-tokens", "4", "--repeats", "2", "--annotate", "--json",
        tmp_path / "a.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "a.json").read_text())["summary"]
    tokens = [data[name]["2 requests/s"]["tokens_per_second"]["median"] for name in ("dense", "pruned")]
    assert tokens[0] == tokens[1], "what the rate asks for"
    assert data["pruned"]["2 requests/s"]["ratio"] == pytest.approx(1.25)
    assert data["pruned"]["2 requests/s"]["interval"]["low"] == pytest.approx(1.25)
    assert "of mean end-to-end times" in result.stdout.replace("\n", " ")
    kept = read_pruning_json(folders["pruned"]).provenance["speed"]
    assert kept["inverse mean end-to-end time, 2 requests/s, over the dense model's"] == pytest.approx(1.25)
    report = measured(folders, LoadOptions(prompt_tokens=24, new_tokens=4, loads=(Load(rate=2.0),), repeats=1))
    text = load_tradeoff(report, {"dense": 7.0, "pruned": 8.0}, "text").charts[0]
    assert text.x_label == "mean end-to-end time (ms), 2 requests/s, less is better"
    assert text.points["pruned"][0] == pytest.approx(0.8 * text.points["dense"][0])


def test_every_load_is_measured_with_every_length_of_prompts(
    fake: FakeServers, folders: dict[str, Path], tmp_path: Path
) -> None:
    command = ["bench", folders["pruned"], "--against", folders["dense"], "--new-tokens", "4", "--repeats", "1"]
    command += ["--prompt-tokens", "24,96"]
    result = run(*command, "--serving", "--concurrency", "1,4", "--precision", "0", "--json", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    loads = [
        "1 at once, prompts of 24",
        "4 at once, prompts of 24",
        "1 at once, prompts of 96",
        "4 at once, prompts of 96",
    ]
    assert list(json.loads((tmp_path / "a.json").read_text())["summary"]["pruned"]) == loads
    assert sorted({(given["--max-concurrency"], given["--random-input-len"]) for given in fake.asked}) == [
        ("1", "24"), ("1", "96"), ("4", "24"), ("4", "96")
    ]  # fmt: skip
    (length,) = {dict(pairwise(started))["--max-model-len"] for started in fake.started}
    assert int(length) >= 96 + 4, "one server for all lengths"
    assert "24, 96 prompt tokens" in result.stdout
    assert "belong to servers" in refused(*command, "--engine", "transformers")


def test_turns_go_on_until_the_interval_is_narrow_or_the_most_is_reached(
    fake: FakeServers, folders: dict[str, Path]
) -> None:
    quiet = LoadOptions(prompt_tokens=24, new_tokens=4, loads=(Load(1),), requests=3, repeats=2, precision=0.02)
    assert len(measured(folders, quiet).turns) == 2 * 2
    fake.measured.clear()
    fake.noise = (1.0, 1.1)
    assert len(measured(folders, quiet).turns) == 2 * 10


def test_the_command_says_and_keeps_everything(
    fake: FakeServers, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "IDLE_SHARE", -1.0)
    fake.noise = (1.0, 1.1)
    out, samples = tmp_path / "a.json", tmp_path / "a.jsonl"
    result = run(
        "bench", folders["pruned"], "--against", folders["dense"], "--serving", "--eager", "--concurrency", "1,4",
        "--prompt-tokens", "24", "--new-tokens", "4", "--requests", "10", "--slo", "ttft:500ms", "--repeats", "2",
        "--max-repeats", "3", "--dtype", "float32", "--vllm-args", "--max-num-seqs 8 --hf_token s3cret", "--json", out,
        "--jsonl", samples, "--annotate",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    text = result.stdout
    for part in (
        "TTFT p50/p90/p99 (ms)", "TPOT p50/p90/p99 (ms)", "ITL p50/p90/p99 (ms)", "End to end p50/p90/p99 (ms)",
        "Goodput (requests/s)", "1.50 ± 0.00", "Until healthy (s)", "Peak host memory (MB)", "Sequences in 1 GiB",
        "mode: eager (--enforce-eager)", "dtype: float32", "24 prompt tokens", "4 new tokens", "10 (1 at once)",
        "turns: 3 of each model and load", "drawn with seed 0", "TTFT at most 500 ms", "--max-num-seqs 8",
        "Wider than the 2 % that were asked for, with at most 3 turns each: pruned (1 at once), pruned (4 at once)",
        "distrust these figures", "Believe the log",
    ):  # fmt: skip
        assert part in text, part
    record = (folders["pruned"] / "pruning.json").read_text()
    assert not any("s3cret" in kept for kept in (text, out.read_text(), samples.read_text(), record)), "a token"
    assert all("s3cret" in command for command in fake.started)
    data = json.loads(out.read_text())
    assert data["summary"]["pruned"]["4 at once"]["ttft_ms"]["p99"] > 0
    assert data["summary"]["dense"]["1 at once"]["ratio"] == 1
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == len(data["turns"]) == 2 * 2 * 3
    assert all(len(line["requests"]) == 10 and line["options"]["eager"] for line in lines)
    assert [command[command.index("--max-num-seqs") + 1] for command in fake.started] == ["8", "8"]
    assert all("--enforce-eager" in command for command in fake.started)
    kept = read_pruning_json(folders["pruned"]).provenance["speed"]
    assert kept["output tokens/s, 4 at once, over the dense model's"] == pytest.approx(1.25 / 1.1, abs=1e-3)


def test_the_perplexity_is_of_the_revision_that_is_served(
    fake: FakeServers, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    measured_on: list[str] = []

    def read(source: str | Path, *, hub: Hub, **more: Any) -> Any:
        asked.append(hub.revision)
        return read_checkpoint(folders["pruned"] if source == "someone/model" else source, **more)

    monkeypatch.setattr("pyprune.serving.vllm.command.read_checkpoint", read)
    monkeypatch.setattr(load_run, "read_checkpoint", read)
    monkeypatch.setattr("pyprune.cli.bench.loaded_perplexity", lambda path, *_, **__: measured_on.append(path) or 7.0)
    (tmp_path / "text.txt").write_text("words")
    result = run(
        "bench", "someone/model", "--against", folders["dense"], "--serving", "--concurrency", "1", "--prompt-tokens",
        "24", "--new-tokens", "4", "--repeats", "1", "--precision", "0", "--ppl", tmp_path / "text.txt",
        "--vllm-args", "--revision v2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert measured_on == [str(folders["dense"]), str(folders["pruned"])]
    assert "v2" in asked


def test_quality_against_the_speed_of_servers(
    fake: FakeServers, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pyprune.cli.bench.loaded_perplexity", lambda path, *_, **__: 9.5 if path.endswith("pruned") else 7.25
    )
    (tmp_path / "text.txt").write_text("words")
    result = run(
        "bench", folders["pruned"], "--against", folders["dense"], "--serving", "--concurrency", "1,4", "--requests",
        "4", "--prompt-tokens", "24", "--new-tokens", "4", "--repeats", "1", "--precision", "0", "--ppl",
        tmp_path / "text.txt", "--report", tmp_path / "report",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "mode: compiled (vLLM's own default)" in result.stdout
    assert "interval" not in result.stdout
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "| pruned | 9.50 | 10.00 | yes | 10.00 | yes |" in text, "perplexity, and tokens/s under each load"
    assert "| dense | 7.25 | 8.00 | yes | 8.00 | yes |" in text
    for part in ("## Servers under load", "## Servers\n", "output tokens/s, 4 at once", "- mode: compiled"):
        assert part in text, part
    assert (tmp_path / "report" / "report.html").read_text(encoding="utf-8").count("<figure>") == 2


def test_no_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one checkpoint"):
        measure_serving({})

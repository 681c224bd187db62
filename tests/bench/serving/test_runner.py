"""The bench runner hands its options on and prints Markdown on stdout only."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serving import runner
from pyprune.runtime.report import Table


def test_options_reach_the_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: dict[str, object] = {}

    def fake_measure(models: dict[str, str], **options: object) -> str:
        seen.update(options, models=models)
        return "report"

    monkeypatch.setattr(runner, "measure", fake_measure)
    monkeypatch.setattr(runner, "speed_table", lambda report: Table("Speed", ("table",), ((f"of {report}",),)))
    monkeypatch.setattr(runner, "conditions", lambda report: "conditions")
    path = tmp_path / "runs.jsonl"
    assert runner.main(["a=/x", "b=/y=z", "--repeats", "5", "--jsonl", str(path)]) == 0
    assert seen["models"] == {"a": "/x", "b": "/y=z"}
    assert (seen["repeats"], seen["batch_size"], seen["jsonl"]) == (5, 64, path)
    out = capsys.readouterr()
    assert out.out == "| table |\n|---|\n| of report |\n\nconditions\n"


def test_errors_have_no_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert runner.main([f"a={tmp_path}", "--engine", "transformers"]) == 1
    assert "config.json" in capsys.readouterr().err


def test_a_model_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["/x"])
    assert "NAME=FOLDER" in capsys.readouterr().err


def test_a_name_that_stands_for_two_models_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "measure", lambda *_, **__: pytest.fail("it was measured"))
    assert runner.main(["dense=/x", "pruned=/y", "pruned=/z"]) == 2
    assert "every model needs a name of its own" in capsys.readouterr().err

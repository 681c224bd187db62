"""Recovery around the cut: after `pyprune prune`, and as `pyprune recover` on a checkpoint that is cut already."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from bench.quality.steps import kept_share
from pyprune import prune, prune_
from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.record import annotate_checkpoint, read_pruning_json
from pyprune.checkpoint.trained_on import refuse_training_text, training_marks, unmarked_text_warnings
from pyprune.cli.app import app
from pyprune.cli.base import ERROR_CODE
from pyprune.config.recoveries import RECOVERIES
from pyprune.config.run import PruneConfig, ReconstructCheckpointConfig, RecoverCheckpointConfig, StageConfig
from pyprune.data.overlap import SHINGLE
from pyprune.data.sampling import sample_sequences
from pyprune.data.tokens import IGNORED
from pyprune.errors import CheckpointError, ConfigError, DataError, OutputError
from pyprune.families import family_for
from pyprune.methods.registry import read_config
from pyprune.quality.perplexity import perplexity
from pyprune.run import rework
from pyprune.run.recipe import build_config, build_recovery, merge
from pyprune.run.recover import recover_checkpoint
from pyprune.run.rework import ADAPTER
from pyprune.run.text import overlap_warnings
from pyprune.train.distill import Distillation
from tests._support.cli import refused, run
from tests._support.models import tiny_model
from tests._support.plans import axis_plans
from tests._support.text import prose, write_model, write_text
from tests._support.tokenizer import tiny_tokenizer

TRAIN: dict[str, Any] = {"steps": 4, "batch_size": 4, "micro_batch_size": 2, "learning_rate": 3e-3}
DISTILL: dict[str, Any] = {"alpha": 0.8, "hidden": 0.1}
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tiny_model("llama"), tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "instructions.jsonl"
    made = [{"instruction": prose(40, i)[:60], "input": "", "output": prose(40, 50 + i)[:150]} for i in range(40)]
    path.write_text("".join(json.dumps(r) + "\n" for r in made), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def pruned(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on windows of ``text``, then cut to unequal widths, a sliced hidden size and fewer layers."""
    out = tmp_path_factory.mktemp("pruned") / "pruned"
    prune(dense, prune_config(out.parent, text, stages={"before": ["finetune"]}), out=out)
    annotate_checkpoint(out, quality={"ppl": 7.0})
    return out


def prune_config(folder: Path, text: Path, **changes: Any) -> PruneConfig:
    model = tiny_model("llama")
    plan = axis_plans(family_for(model).plan(model.config))["everything"]
    (folder / "plan.json").write_text(plan.to_json())
    base: dict[str, Any] = {
        "method": "none",
        "plan": str(folder / "plan.json"),
        "stages": {"before": []},
        "data": {"source": str(text), "samples": 6, "sequence_length": 200},
        "finetune": TRAIN,
        "recover": {"rank": 2, "train": TRAIN},
    }
    return read_config(merge(base, changes))


def run_config(records: Path, **changes: Any) -> RecoverCheckpointConfig:
    base: dict[str, Any] = {
        "data": {"source": str(records), "samples": 16, "sequence_length": 400, "layout": "instructions"},
        "recover": {"rank": 2, "distill": DISTILL, "train": TRAIN},
    }
    return RecoverCheckpointConfig.from_dict(merge(base, changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def share_kept(before: Path, trained: Path, written: Path) -> float:
    """How much of the change between two checkpoints is in a third one, by projection on it."""
    held = ({name: w.float() for name, w in weights(folder).items()} for folder in (before, trained, written))
    return kept_share(*held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_checkpoint_keeps_what_a_small_recovery_changed(
    dense: Path, records: Path, tmp_path: Path, dtype: str
) -> None:
    """The default: a bfloat16 checkpoint is written in bfloat16, whose numbers are further apart than most updates."""
    half = tmp_path / "half"
    assert run("export", dense, "--out", half, "--dtype", "bfloat16").exit_code == 0
    train = {**TRAIN, "steps": 2, "learning_rate": 1e-4}
    config = run_config(records, recover={"distill": None, "train": train})
    recover_checkpoint(half, replace(config, dtype=dtype), out=tmp_path / "out")
    recover_checkpoint(half, replace(config, export_dtype="float32"), out=tmp_path / "wide")
    assert {w.dtype for w in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert 0.5 < share_kept(half, tmp_path / "wide", tmp_path / "out") < 1.5
    assert run("export", tmp_path / "wide", "--out", tmp_path / "later", "--dtype", "bfloat16").exit_code == 0
    assert 0.5 < share_kept(half, tmp_path / "wide", tmp_path / "later") < 1.5
    nearest = {name: weight.bfloat16() for name, weight in weights(tmp_path / "wide").items()}
    save_file(nearest, tmp_path / "later" / "model.safetensors")
    assert share_kept(half, tmp_path / "wide", tmp_path / "later") < 0.4


def test_held_back_text_that_overlaps_is_warned_of(dense: Path, text: Path, tmp_path: Path) -> None:
    data = {"source": str(text), "samples": 20, "sequence_length": 200, "overlap": 0.5}
    stopped = {"train": {**TRAIN, "early_stop_patience": 2}}
    prune_ = prune_config(
        tmp_path, text, data=data, stages={"after": ["recover"]}, recover=stopped, cut={"reconstruct": "least_squares"}
    )
    said = [warning for warning in prune(dense, prune_, out=tmp_path / "out").warnings if "holds back" in warning]
    assert [warning.split()[3] for warning in said] == [
        "recover.train.early_stop_patience",
        "cut.least_squares.held_back",
    ]
    recover_ = RecoverCheckpointConfig.from_dict({"data": data, "recover": stopped})
    assert len(overlap_warnings(recover_)) == 1
    assert not overlap_warnings(RecoverCheckpointConfig.from_dict({"data": {**data, "overlap": 0.0}}))
    solved = {"data": {**data, "source": str(text)}}
    assert "holds back" in overlap_warnings(ReconstructCheckpointConfig.from_dict(solved))[0]


def test_a_teacher_that_is_the_model_itself_is_refused_before_the_cut(text: Path, tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = prune_config(tmp_path, text, stages={"after": ["recover"]}, recover={"distill": DISTILL})
    samples = torch.randint(3, 300, (4, 32))
    for teacher in (model, copy.copy(model)):
        with pytest.raises(ConfigError, match="shares weights with the student"):
            prune_(model, {"data": samples, "recovery_data": samples}, config, teacher=teacher)
    assert model.config.num_hidden_layers == tiny_model("llama").config.num_hidden_layers, "nothing was cut"


# after pyprune prune


@pytest.mark.parametrize("adapters", ["lora", "none"])
def test_prune_distils_from_the_source_after_the_cut(
    dense: Path, text: Path, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: str
) -> None:
    loaded: list[str] = []
    original = ModelSource.load

    def spy(source: ModelSource, **options: Any) -> Any:
        loaded.append(options["dtype"])
        return original(source, **options)

    monkeypatch.setattr(ModelSource, "load", spy)
    changes = {
        "stages": {"after": ["recover"]},
        "recovery_data": {"source": str(records), "samples": 16, "sequence_length": 400, "layout": "instructions"},
        "recover": {"adapters": adapters, "distill": DISTILL, "train": {"dtype": "bfloat16"}},
    }
    result = prune(dense, prune_config(tmp_path, text, **changes), out=tmp_path / "out")
    (stage,) = result.stages
    assert stage["objective"] == ("lora-distill" if adapters == "lora" else "full-distill")
    assert {"kl", "hidden"} == stage["history"][0]["parts"].keys()
    assert loaded == ["float32", "bfloat16"], "the teacher is read when it is needed, in the training dtype"
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    assert record.provenance["config"]["recover"]["distill"]["hidden"] == 0.1
    model, _ = load_model(tmp_path / "out")
    assert model.config.model_type == "pruned_llama"


def test_an_interrupted_distillation_after_the_cut_resumes_to_the_same_bytes(
    dense: Path, text: Path, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "stages": {"after": ["recover"]},
        "recovery_data": {"source": str(records), "samples": 16, "sequence_length": 400, "layout": "instructions"},
        "recover": {"distill": DISTILL, "dropout": 0.1},
    }
    settings = prune_config(tmp_path, text, **changes)
    prune(dense, settings, out=tmp_path / "straight")
    interrupt(monkeypatch, lambda: prune(dense, settings, out=tmp_path / "again"))
    assert not (tmp_path / "again").exists()
    prune(dense, settings, out=tmp_path / "again", resume=True)
    assert (tmp_path / "straight" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()


def interrupt(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Press Ctrl-C in the sixth micro batch."""
    original, calls = Distillation.terms, [0]

    def terms(self: Distillation, student: PreTrainedModel, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return original(self, student, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "terms", terms)
        with pytest.raises(KeyboardInterrupt):
            run()


def test_in_memory_the_teacher_is_given_and_missing_ones_are_refused_before_the_cut(
    text: Path, records: Path, tmp_path: Path
) -> None:
    settings = prune_config(
        tmp_path, text, stages={"after": ["recover"]}, recover={"distill": DISTILL, "train": {"steps": 2}}
    )
    samples = sample_sequences(tiny_tokenizer(), run_config(records).data)
    data = {"data": torch.zeros(0, 0, dtype=torch.int64), "recovery_data": samples}
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="the model in memory is cut in place"):
        prune_(model, data, settings)
    assert model.config.num_hidden_layers == 4
    again = tiny_model("llama")
    copied = copy.deepcopy(again)
    one = prune_(model, data, settings, teacher=lambda: tiny_model("llama"))
    two = prune_(again, data, settings, teacher=copied)
    for result in (one, two):
        assert result.stages[0]["history"][0]["parts"]["kl"] > 0
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_recover_stage_before_the_cut_distils_between_equal_shapes(text: Path, tmp_path: Path) -> None:
    settings = prune_config(tmp_path, text, stages={"before": ["recover"]}, recover={"distill": DISTILL})
    model = tiny_model("llama")
    samples = sample_sequences(tiny_tokenizer(), settings.data)
    result = prune_(model, {"data": samples}, settings, teacher=tiny_model("llama"))
    assert result.stages[0]["history"][0]["parts"] == {"kl": 0.0, "hidden": 0.0}
    assert len(model.model.layers) == 3


def test_masked_prompts_are_refused_where_every_token_counts(text: Path, records: Path, tmp_path: Path) -> None:
    samples = sample_sequences(tiny_tokenizer(), run_config(records).data)
    settings = PruneConfig(method="elder", ratio=0.5, stages=StageConfig(before=(), after=("regularise",)))
    with pytest.raises(ConfigError, match="masked prompts are for recovery"):
        prune_(tiny_model("llama"), {"data": samples}, settings)
    windows = sample_sequences(tiny_tokenizer(), prune_config(tmp_path, text).data)
    with pytest.raises(ConfigError, match="masked prompts are for recovery"):
        prune_(tiny_model("llama"), {"data": windows, "recovery_data": samples}, settings)


def test_records_that_are_too_short_to_be_known_again_are_warned_of(records: Path) -> None:
    samples = sample_sequences(tiny_tokenizer(), run_config(records).data)
    assert unmarked_text_warnings([samples]) == []
    samples.ids[:, SHINGLE - 1 :] = IGNORED
    assert training_marks([samples]) == ""
    (said,) = unmarked_text_warnings([samples])
    assert said.startswith("All records are shorter than 64 and leave no marks")


# pyprune recover


@pytest.mark.parametrize("adapters", ["lora", "none"])
def test_a_pruned_checkpoint_is_recovered_and_its_record_extended(
    pruned: Path,
    dense: Path,
    text: Path,
    records: Path,
    tmp_path: Path,
    adapters: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = run_config(records, recover={"adapters": adapters})
    report = recover_checkpoint(pruned, config, out=tmp_path / "out", teacher=dense)
    old, new = read_pruning_json(pruned), read_pruning_json(tmp_path / "out", verify_files=True)
    assert new.plan == old.plan
    for key in ("method", "source", "dense_parameters", "config", "report", "architecture", "dtype"):
        assert new.provenance[key] == old.provenance[key]
    (entry,) = new.provenance["recoveries"]
    assert entry["from"] == str(pruned)
    assert entry["teacher"] == str(dense)
    decided = "auto" if adapters == "lora" else "full"  # which is said of trainings of all weights
    train = replace(config.recover.train, memory=decided)
    distill = config.recover.distill
    assert distill is not None
    distill = replace(distill, teacher_placement="device")
    expected = replace(config, recover=replace(config.recover, train=train, distill=distill))
    assert RecoverCheckpointConfig.from_dict(entry["config"]) == expected
    assert entry["report"]["steps"] == report.steps == 4
    assert entry["measured_before"] == {"quality": {"ppl": 7.0}}
    assert "quality" not in new.provenance
    assert f"{report.objective}, 4 steps" in (tmp_path / "out" / "README.md").read_text()
    before, after = weights(pruned), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[n], after[n]) for n in before)
    tokenizer = tiny_tokenizer()
    for source in (text, records):
        seen = "\n\n".join(pipeline_text(source))
        ids = torch.tensor(tokenizer(seen)["input_ids"])
        with pytest.raises(DataError, match="were used to train"):
            refuse_training_text(ModelSource.of(tmp_path / "out").marks, torch.clone(ids), str(source), "this")
    assert not (tmp_path / ".out.work").exists()
    again = recover_checkpoint(tmp_path / "out", config, out=tmp_path / "twice", teacher=dense)
    assert any("training text of this checkpoint already" in w for w in again.warnings)
    assert len(read_pruning_json(tmp_path / "twice").provenance["recoveries"]) == 2
    capsys.readouterr()
    monkeypatch.setattr("pyprune.run.recover.recover", lambda *_, **__: pytest.fail("training"))
    with pytest.raises(pytest.fail.Exception):
        recover_checkpoint(tmp_path / "out", config, out=tmp_path / "not-there", teacher=dense)
    assert "training text of this checkpoint already" in " ".join(capsys.readouterr().err.split()), "before it trains"


def pipeline_text(source: Path) -> list[str]:
    from tests._support.text import read_documents

    return read_documents(str(source))


def test_another_dense_model_than_it_was_made_from_is_a_warning(
    pruned: Path, dense: Path, records: Path, tmp_path: Path
) -> None:
    assert read_pruning_json(pruned).provenance["source_weights"] == ModelSource.of(dense).version
    same = recover_checkpoint(pruned, run_config(records), out=tmp_path / "same", teacher=dense)
    assert not any("differ from those" in warning for warning in same.warnings)
    other = write_model(tiny_model("llama", seed=9), tmp_path / "other")
    found = recover_checkpoint(pruned, run_config(records), out=tmp_path / "out", teacher=other)
    assert any(f"The files of {other} differ from those of the model" in warning for warning in found.warnings)


def test_recovery_of_a_checkpoint_helps(pruned: Path, dense: Path, text: Path, tmp_path: Path) -> None:
    """Perplexity on the dense model's own text, and the divergence from it, fall."""
    train = {"steps": 40, "batch_size": 4, "micro_batch_size": 4, "learning_rate": 3e-3}
    config = RecoverCheckpointConfig.from_dict(
        {
            "data": {"source": str(text), "samples": 40, "sequence_length": 64, "seed": 3},
            "recover": {"adapters": "none", "distill": {"alpha": 0.5}, "train": train},
        }
    )
    report = recover_checkpoint(pruned, config, out=tmp_path / "out", teacher=dense)
    assert report.history[-1].parts["kl"] < 0.9 * report.history[0].parts["kl"]
    found = []
    held_out = torch.tensor(tiny_tokenizer()(prose(400, 7))["input_ids"])[:640]
    for folder in (pruned, tmp_path / "out"):
        model, _ = load_model(folder)
        found.append(perplexity(model, held_out, window=64, batch_size=5, source="held out").perplexity)
    assert found[1] < 0.7 * found[0]


def test_an_interrupted_recovery_leaves_nothing_and_resumes_to_the_same_bytes(
    pruned: Path, dense: Path, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(records, keep_adapter=True)
    recover_checkpoint(pruned, config, out=tmp_path / "straight", teacher=dense)
    interrupt(monkeypatch, lambda: recover_checkpoint(pruned, config, out=tmp_path / "again", teacher=dense))
    assert not (tmp_path / "again").exists()
    other = run_config(records, keep_adapter=True, recover={"distill": {"alpha": 0.5}})
    with pytest.raises(ConfigError, match=r"recover\.distill\.alpha was 0\.8, now 0\.5"):
        recover_checkpoint(pruned, other, out=tmp_path / "again", teacher=dense, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(rework, "save_checkpoint", stopped)  # the adapters are in the work folder by then
        with pytest.raises(KeyboardInterrupt):
            recover_checkpoint(pruned, config, out=tmp_path / "again", teacher=dense, resume=True)
    recover_checkpoint(pruned, config, out=tmp_path / "again", teacher=dense, resume=True)
    first, second = weights(tmp_path / "straight"), weights(tmp_path / "again")
    assert all(torch.equal(first[n], second[n]) for n in first)
    one, other_one = ((tmp_path / name / ADAPTER / ADAPTER_WEIGHTS).read_bytes() for name in ("straight", "again"))
    assert one == other_one


def stopped(*_: Any, **__: Any) -> Never:
    raise KeyboardInterrupt


def test_what_cannot_be_recovered_is_refused_first(pruned: Path, dense: Path, records: Path, tmp_path: Path) -> None:
    config, out = run_config(records), tmp_path / "out"
    with pytest.raises(ConfigError, match="give --teacher"):
        recover_checkpoint(pruned, config, out=out)
    with pytest.raises(ConfigError, match="would not be used"):
        recover_checkpoint(pruned, run_config(records, recover={"distill": None}), out=out, teacher=dense)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    with pytest.raises(OutputError, match="exists already"):
        recover_checkpoint(pruned, config, out=tmp_path / "full", teacher=dense)
    with pytest.raises(CheckpointError, match="nowhere"):
        recover_checkpoint(tmp_path / "nowhere", config, out=out, teacher=dense)
    other = write_model(tiny_model("llama", num_hidden_layers=5), tmp_path / "other")
    with pytest.raises(Exception, match="dense model of"):
        recover_checkpoint(pruned, config, out=out, teacher=other)
    assert not out.exists()


def test_a_checkpoint_without_a_record_is_recovered_on_text(dense: Path, records: Path, tmp_path: Path) -> None:
    config = run_config(records, recover={"distill": None})
    recover_checkpoint(dense, config, out=tmp_path / "out")
    record = read_pruning_json(tmp_path / "out")
    assert record.plan is None
    assert record.provenance["source"] == str(dense)
    assert record.provenance["recoveries"][0]["teacher"] is None


def test_the_command_line_recovers(pruned: Path, dense: Path, records: Path, tmp_path: Path) -> None:
    settings = [part for key, value in TRAIN.items() for part in ("--set", f"recover.train.{key}={value}")]
    base = [
        *("recover", str(pruned), "--teacher", str(dense), "--data", str(records), "--out", str(tmp_path / "out")),
        *("--preset", "alpaca-lora", "--samples", "16", "--sequence-length", "400"),
        *("--set", "recover.train.warmup_steps=0", "--set", "recover.train.dtype=float32"),
        *settings,
    ]
    result = CliRunner().invoke(app, base)
    assert result.exit_code == 0, result.output
    assert "lora-distill" in result.stdout
    assert "kl, first and last step" in result.stdout
    record = read_pruning_json(tmp_path / "out")
    assert record.provenance["recoveries"][0]["config"]["recover"]["distill"]["alpha"] == 0.5
    refused = CliRunner().invoke(app, [*base, "--overwrite", "--set", "recover.distill=null"])
    assert refused.exit_code == ERROR_CODE
    assert "would not be used" in refused.stderr


def test_the_command_line_keeps_the_adapters_for_the_checkpoint_that_was_given(
    pruned: Path, records: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    out, adapter = tmp_path / "out", tmp_path / "out" / ADAPTER
    base = ["recover", pruned, "--data", records, "--samples", "16", "--sequence-length", "400"]
    for key, value in TRAIN.items():
        base += ["--set", f"recover.train.{key}={value}"]
    assert run(*base, "--out", tmp_path / "merged").exit_code == 0
    assert not (tmp_path / "merged" / ADAPTER).exists()
    for more in ([], ["--overwrite"]):
        result = run(*base, "--out", out, "--keep-adapter", *more)
        assert result.exit_code == 0, result.output
        assert f"{adapter}; load them on top of {pruned}" in result.stdout
    files = {path.name for path in adapter.iterdir()}
    assert files == {"adapter_config.json", ADAPTER_WEIGHTS}
    assert {f"{ADAPTER}/{name}" for name in files} <= read_pruning_json(out, verify_files=True).files.keys()
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(pruned)
    merged, alone = weights(out), weights(tmp_path / "merged")
    assert all(torch.equal(merged[name], alone[name]) for name in alone)
    ids = torch.tensor([tiny_tokenizer()(prose(60, 3))["input_ids"][:50]])
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pruned), adapter).double()(ids).logits
        expected, before = (load_model(folder)[0].double()(ids).logits for folder in (out, pruned))
    torch.testing.assert_close(adapted, expected, rtol=0, atol=1e-5)
    assert (adapted - before).abs().max() > 0.1
    message = refused(*base, "--out", tmp_path / "none", "--keep-adapter", "--set", "recover.adapters=none")
    assert "keep_adapter is true, but recover.adapters is 'none'" in message
    assert not (tmp_path / "none").exists()


# presets


@pytest.mark.parametrize("name", list(RECOVERIES))
def test_a_recovery_is_valid_described_and_fits_every_method(name: str) -> None:
    alone = build_recovery(preset=name)
    alone.validate()
    assert RecoverCheckpointConfig.from_dict(alone.to_dict()) == alone
    assert (RECOVERIES[name].__doc__ or "").strip()
    after = build_config(preset="elder-anneal", recovery=name)
    assert after.stages == StageConfig(before=("regularise",), after=("recover",))
    assert after.recovery_data == alone.data
    assert after.recover == alone.recover


def test_the_moreau_recovery_has_the_papers_constants() -> None:
    found = build_recovery(preset="alpaca-lora")
    assert (found.recover.rank, found.recover.alpha, found.data.sequence_length) == (8, 16.0, 256)
    assert (found.recover.train.learning_rate, found.recover.train.batch_size) == (1e-4, 64)
    assert found.recover.train.steps == 1531, "two epochs of 49,000 of the 49,760 records that are not held out"
    assert found.data.layout == "instructions"
    assert found.data.mask_prompt


def test_a_recipe_names_a_recovery_and_options_win_over_it(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("preset: elder\nrecovery: alpaca-lora\nrecover: {rank: 4}\n")
    found = build_config(recipe=recipe, settings=["recover.train.steps=3"])
    assert (found.recover.rank, found.recover.alpha, found.recover.train.steps) == (4, 16.0, 3)
    with pytest.raises(ConfigError, match="Did you mean 'alpaca-lora'"):
        build_config(recovery="alpaca-lor")
    recipe.write_text("recovery: [a]\n")
    with pytest.raises(ConfigError, match="expected the name of a recovery"):
        build_config(recipe=recipe)

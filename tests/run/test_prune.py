"""The whole flow on tiny models: every method, every combination of stages, interruption and replay."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pyprune import make_plan, prune, prune_
from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.trained_on import refuse_training_text
from pyprune.config.run import PruneConfig
from pyprune.cut.compact import compact_
from pyprune.cut.mask import masked
from pyprune.data.sampling import sample_sequences
from pyprune.data.tokens import Batch
from pyprune.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    OutputError,
    PlanError,
    TrainingError,
    UnsupportedModelError,
)
from pyprune.families import family_for
from pyprune.methods.registry import read_config
from pyprune.run import memory as run_memory
from pyprune.run.prune import plan_checkpoint
from pyprune.run.recipe import merge
from pyprune.run.resume import interrupted_run, run_folder
from pyprune.run.text import draw_samples, text_configs
from pyprune.runtime import device
from pyprune.runtime.files import atomic_folder
from pyprune.serving.export import export
from pyprune.train.state import TrainState, save_state
from tests._support.compare import assert_same_logits
from tests._support.interrupt import failing_step
from tests._support.models import tiny_batch, tiny_model
from tests._support.text import write_model, write_text
from tests._support.tokenizer import tiny_tokenizer

TRAIN = {"steps": 3, "batch_size": 2, "micro_batch_size": 1, "learning_rate": 1e-3}
OPTIONS: dict[str, Any] = {
    "method": "elder",
    "ratio": 0.5,
    "data": {"samples": 6, "sequence_length": 32},
    "elder": {"gates": {"first_round_steps": 3, "round_steps": 2, "batch_size": 2}, "train": TRAIN},
    "finetune": TRAIN,
    "recover": {"rank": 2, "train": TRAIN},
}


def options(**changes: Any) -> dict[str, Any]:
    method = changes.get("method", "elder")
    of_method = {"elder": OPTIONS["elder"], "trsp": OPTIONS["elder"], "dress": {"train": TRAIN}}.get(method)
    base = {name: value for name, value in OPTIONS.items() if name != "elder"}
    return merge(base | ({method: of_method} if of_method else {}), changes)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_model(tiny_model("llama"), tmp_path / "dense")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def config(text: Path, **changes: Any) -> PruneConfig:
    merged = options(**changes)
    merged["data"]["source"] = str(text)
    return read_config(merged)


def logits_of(folder: Path) -> torch.Tensor:
    model, _ = load_model(folder)
    with torch.no_grad():
        return model(tiny_batch() % 200 + 3).logits


def test_elder_writes_a_checkpoint_that_holds_everything(model_folder: Path, text: Path, tmp_path: Path) -> None:
    result = prune(model_folder, config(text), out=tmp_path / "out")
    assert len(result.plan.layers) == 2
    assert result.compact is not None
    assert result.compact.architecture == "LlamaForCausalLM"
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    assert record.plan == result.plan
    assert record.provenance["method"] == "elder"
    assert record.provenance["report"]["stages"][0]["action"] == "regularise"
    assert len(record.provenance["report"]["effects"]["cosines_before"]) == 4
    assert not (tmp_path / ".out.work").exists()
    assert torch.isfinite(logits_of(tmp_path / "out")).all()


def test_dress_rounds_and_reports(model_folder: Path, text: Path, tmp_path: Path) -> None:
    result = prune(model_folder, config(text, method="dress", ratio=0.3), out=tmp_path / "out")
    assert len(result.plan.hidden) == 40
    assert any("rounded from 34 up to 40" in note for note in result.notes)
    assert result.effects is not None
    assert result.effects.preserved_ratio is not None
    assert any("missed its target" in w or "no effect" in w.lower() for w in result.warnings)
    assert logits_of(tmp_path / "out").shape[-1] == 384


CASES = {
    "N&N&N": ((), False, ()),
    "R&N&N": (("regularise",), False, ()),
    "R&N&R": (("regularise",), False, ("recover",)),
    "N&N&R": ((), False, ("recover",)),
    "R&P&N": (("regularise",), True, ()),
    "R&P&R": (("regularise",), True, ("recover",)),
    "N&P&R": ((), True, ("recover",)),
    "N&P&N": ((), True, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_eight_cases_are_configurations(case: str, text: Path) -> None:
    before, cut, after = CASES[case]
    model = tiny_model("llama")
    untouched = [p.detach().clone() for p in model.parameters()]
    settings = config(text, method="dress", stages={"before": list(before), "after": list(after), "prune": cut})
    samples = sample_sequences(tiny_tokenizer(), settings.data)
    result = prune_(model, {"data": samples}, settings)
    assert [s["action"] for s in result.stages] == [*before, *after]
    assert (model.config.hidden_size == 24) is cut
    assert (result.compact is None) is not cut
    if not cut:
        changed = any(not torch.equal(a, b) for a, b in zip(untouched, model.parameters(), strict=True))
        assert changed is bool(before or after)


@pytest.mark.parametrize("action", ["finetune", "regularise"])
def test_stages_may_follow_the_cut(action: str, text: Path) -> None:
    model = tiny_model("llama")
    settings = config(text, stages={"before": ["finetune"], "after": [action]}, elder={"layers": [1, 2]})
    samples = sample_sequences(tiny_tokenizer(), settings.data)
    result = prune_(model, {"data": samples}, settings)
    assert [s["name"] for s in result.stages] == ["before-0-finetune", f"after-0-{action}"]
    assert len(model.model.layers) == 2


def test_the_compacted_result_equals_the_masked_regularised_model(text: Path) -> None:
    model = tiny_model("llama")
    settings = config(text, method="dress", stages={"prune": False}, dress={"schedule": "anneal"})
    samples = sample_sequences(tiny_tokenizer(), settings.data)
    result = prune_(model, {"data": samples}, settings)
    assert result.effects is not None
    assert result.effects.preserved_ratio == 0.0
    ids = tiny_batch()
    with torch.no_grad(), masked(model, result.plan):
        expected = model(ids).logits
    compact_(model, result.plan)
    with torch.no_grad():
        assert_same_logits(model(ids).logits, expected)


@pytest.mark.parametrize(("name", "method"), [("llama", "dress"), ("phi", "dress"), ("gemma3", "elder")])
def test_verify_measures_both_sides_of_the_cut(name: str, method: str, text: Path) -> None:
    model = tiny_model(name)
    settings = config(text, method=method, verify=True)
    samples = sample_sequences(tiny_tokenizer(), settings.data)
    result = prune_(model, {"data": samples}, settings)
    assert result.verified is not None
    assert result.verified["compacted_perplexity"] == pytest.approx(result.verified["masked_perplexity"], rel=1e-5)
    assert result.to_dict()["verified"] == result.verified


def _lean(settled: Any, config: Any, *, lean: bool) -> Any:
    return settled(config, lean=True)


def test_an_interrupted_run_resumes_to_the_same_weights(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(text, stages={"after": ["recover"]}, elder={"train": {"steps": 4, "checkpoint_interval": 2}})
    prune(model_folder, settings, out=tmp_path / "straight")

    from pyprune.methods.regularise.elder import penalty as elder

    real = elder.ElderObjective.before_step

    def interrupt(self: Any, model: Any, step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt
        real(self, model, step)

    with monkeypatch.context() as patch:
        patch.setattr(elder.ElderObjective, "before_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune(model_folder, settings, out=tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert (tmp_path / ".again.work" / "decision.json").exists()
    assert settings.recover.train.memory == "auto", "which the run decided"
    assert interrupted_run(tmp_path / "again", settings)

    other = config(text, stages={"after": ["recover"]}, elder={"train": {"steps": 5}})
    with pytest.raises(ConfigError, match=r"elder\.train\.steps was 4, now 5"):
        prune(model_folder, other, out=tmp_path / "again", resume=True)
    assert not interrupted_run(tmp_path / "again", other)

    # Less of the device is free now.
    monkeypatch.setattr(run_memory, "set_memory", partial(_lean, run_memory.set_memory))
    resumed = prune(model_folder, settings, out=tmp_path / "again", resume=True)
    assert [s["action"] for s in resumed.stages] == ["regularise", "recover"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "again")]
    assert weights[0] == weights[1]
    assert not (tmp_path / ".again.work").exists()


@pytest.mark.parametrize("faster", [True, False])
def test_a_run_goes_on_in_the_arithmetic_in_which_it_began(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    """Where the resuming machine is faster in the other dtype, hours of training would be refused."""
    train = {"steps": 4, "checkpoint_interval": 2, "dtype": "auto"}
    settings = config(
        text, stages={"before": [], "after": ["recover"]}, recover={"train": train},
        cut={"reconstruct": "least_squares", "least_squares": {"dtype": "auto"}},
    )  # fmt: skip
    monkeypatch.setattr(device, "computes_bfloat16", lambda place: True)
    monkeypatch.setattr(device, "cpu_is_faster_in_bfloat16", lambda: faster)
    prune(model_folder, settings, out=tmp_path / "straight")

    with failing_step(3, KeyboardInterrupt(), steps=4), pytest.raises(KeyboardInterrupt):
        prune(model_folder, settings, out=tmp_path / "again")
    monkeypatch.setattr(device, "cpu_is_faster_in_bfloat16", lambda: not faster)
    kept = tmp_path / ".again.work" / "arithmetic.json"
    whole = kept.read_text()
    kept.write_text(whole[:-5])
    with pytest.raises(CheckpointError, match=r"arithmetic\.json is damaged"):
        prune(model_folder, settings, out=tmp_path / "again", resume=True)
    kept.write_text(whole)
    resumed = prune(model_folder, settings, out=tmp_path / "again", resume=True)
    assert resumed.stages[0]["resumed_from"] == 2
    assert resumed.reconstruction is not None
    assert resumed.reconstruction["dtype"] == ("bfloat16" if faster else "float32")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "again")]
    assert weights[0] == weights[1]
    assert device.bfloat16_is_faster(torch.device("cpu")) is not faster, "the next run asks this machine"


def test_a_run_with_another_plan_of_the_same_name_is_not_resumed(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(model_folder)
    whole = family_for(model).plan(model.config)
    path = tmp_path / "plan.json"
    path.write_text(whole.drop_layers([1]).to_json())
    settings = config(text, method="none", plan=str(path), stages={"before": []})
    with monkeypatch.context() as patch:
        patch.setattr("pyprune.run.stages.Stages.cut", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prune(model_folder, settings, out=tmp_path / "out")
    path.write_text(whole.drop_layers([2]).to_json())
    with pytest.raises(ConfigError, match=r"plan was '.*', now '"):
        prune(model_folder, settings, out=tmp_path / "out", resume=True)
    path.write_text(whole.drop_layers([1]).to_json())
    assert prune(model_folder, settings, out=tmp_path / "out", resume=True).plan.removed_layers == (1,)


def test_only_text_that_something_reads_is_drawn(text: Path) -> None:
    """Of what nobody reads a missing file would stop the run, and its samples would count as trained on."""
    own = {"source": str(text), "samples": 4, "sequence_length": 16}
    plan: dict[str, Any] = {"method": "none", "plan": "plan.json", "stages": {"before": []}}
    solved = {"reconstruct": "least_squares"}
    cases: list[tuple[dict[str, Any], set[str]]] = [
        (plan, set()),
        ({**plan, "cut": solved}, {"data"}),
        ({**plan, "cut": {**solved, "data": own}}, {"cut.data"}),
        ({**plan, "cut": {**solved, "data": own}, "verify": True}, {"data", "cut.data"}),
        ({**plan, "stages": {"before": [], "after": ["recover"]}, "recovery_data": own}, {"recovery_data"}),
        ({"method": "random", "stages": {"before": [], "after": ["recover"]}, "recovery_data": own}, {"recovery_data"}),
        ({"method": "random", "stages": {"before": [], "after": ["recover"]}}, {"data", "recovery_data"}),
        ({"method": "taylor", "stages": {"before": []}, "cut": {**solved, "data": own}}, {"data", "cut.data"}),
    ]
    for changes, wanted in cases:
        assert set(text_configs(config(text, **changes))) == wanted, changes


def test_a_cut_on_text_of_its_own_needs_no_other(model_folder: Path, text: Path, tmp_path: Path) -> None:
    model, _ = load_model(model_folder)
    path = tmp_path / "plan.json"
    path.write_text(family_for(model).plan(model.config).drop_layers([1]).to_json())
    own = {"source": str(text), "samples": 8, "sequence_length": 32}
    settings = read_config(
        {"method": "none", "plan": str(path), "stages": {"before": []}, "data": {"source": "not-there.txt"},
         "cut": {"reconstruct": "least_squares", "data": own}}
    )  # fmt: skip
    result = prune(model_folder, settings, out=tmp_path / "out")
    assert result.reconstruction is not None
    assert result.reconstruction["tokens"] == 8 * 32


def test_the_model_that_is_read_is_never_replaced(model_folder: Path, text: Path, tmp_path: Path) -> None:
    before = (model_folder / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(model_folder)
    for model in (model_folder, tmp_path / "link"):
        with pytest.raises(OutputError, match="is what the command reads"):
            prune(model, config(text), out=model_folder, overwrite=True)
    with pytest.raises(OutputError, match="is a symbolic link"):
        prune(model_folder, config(text), out=tmp_path / "link", overwrite=True)
    with pytest.raises(OutputError, match="is what the command reads"):
        export(model_folder, model_folder, overwrite=True)
    assert (model_folder / "model.safetensors").read_bytes() == before


def test_a_plan_that_an_interrupted_run_had_reached_is_not_dropped(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have taken hours; training had not begun."""

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    work = tmp_path / ".out.work"
    settings = config(text, method="random", ratio=0.2, ratio_of="parameters", stages={"before": []})
    for stopped_at, reached in (("decide", False), ("cut", True)):
        with monkeypatch.context() as patch:
            patch.setattr(f"pyprune.run.stages.Stages.{stopped_at}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                prune(model_folder, settings, out=tmp_path / "out")
        assert (work / "decision.json").exists() == work.exists() == reached
    with pytest.raises(OutputError, match=r"has kept its plan in .*--resume to continue it, or --overwrite"):
        prune(model_folder, settings, out=tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("pyprune.run.stages.Stages.new_decision", lambda *_: pytest.fail("decided again"))
        prune(model_folder, settings, out=tmp_path / "out", resume=True)
    assert not work.exists()


def test_a_model_in_float64_is_trained_as_it_is() -> None:
    """The options allow lean memory, which bfloat16 weights would have."""
    settings = read_config({**OPTIONS, "elder": {**OPTIONS["elder"], "train": {**TRAIN, "dtype": "auto"}}})
    model = tiny_model().double()
    prune_(model, {"data": tiny_batch(1, 6, 32)}, settings)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_the_last_good_weights_of_a_failed_run_are_nothing_to_continue_from(tmp_path: Path) -> None:
    out, config = tmp_path / "out", PruneConfig(method="elder")
    start = partial(run_folder, out, {}, config, resume=False)

    def fail() -> None:
        with start(overwrite=False) as work:
            save_state(work.path / "regularise", TrainState(0, {}, {}), name="last-good")
            raise TrainingError("a loss is not finite", step=1)

    with pytest.raises(TrainingError):
        fail()
    with (
        pytest.raises(OutputError, match=r"kept the last good weights in .*\. Give --overwrite to drop them and start"),
        start(overwrite=False),
    ):
        pass
    assert not interrupted_run(out, config)
    with start(overwrite=True) as work:
        assert not (work.path / "regularise").exists()


@pytest.mark.parametrize("written", [True, False])
def test_an_interruption_after_the_output_leaves_no_work_folder(written: bool, tmp_path: Path) -> None:
    """There is nothing to resume; before the output, what was reached is kept."""
    out = tmp_path / "out"

    def run() -> None:
        with run_folder(out, {}, PruneConfig(method="elder"), resume=False, overwrite=False) as work:
            (work.path / "decision.json").write_text("{}")
            if written:
                with atomic_folder(out) as part:
                    (part / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert (out.exists(), (tmp_path / ".out.work").exists()) == (written, not written)


def test_an_error_of_the_machine_leaves_no_work_folder(tmp_path: Path) -> None:
    def run() -> None:
        with run_folder(tmp_path / "out", {}, PruneConfig(method="elder"), resume=False, overwrite=False):
            raise MemoryError

    with pytest.raises(MemoryError):
        run()
    assert not (tmp_path / ".out.work").exists()


def test_text_under_its_former_names_is_read_with_a_warning(text: Path) -> None:
    settings = config(text, method="taylor", ratio=0.2, ratio_of="parameters", stages={"before": []})
    samples = tiny_batch(1, 6, 32)
    with pytest.warns(FutureWarning, match="'regularise' is called 'data'"):
        former = prune_(tiny_model("llama"), {"regularise": samples}, settings)
    assert former.plan == prune_(tiny_model("llama"), {"data": samples}, settings).plan


def test_text_under_a_name_that_no_stage_reads_is_refused(model_folder: Path, text: Path) -> None:
    model, tokenizer = load_model(model_folder)
    settings = config(text, method="random", ratio=0.2, ratio_of="parameters", stages={"before": []})
    samples = draw_samples(model, tokenizer, settings)
    with pytest.raises(ConfigError, match="data has 'recovery', which is no use of text; the names are data, cut"):
        prune_(model, {**samples, "recovery": torch.zeros(1, 8, dtype=torch.int64)}, settings)


def test_a_run_with_other_weights_is_not_resumed(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither run would give its result."""

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    settings = config(text, method="random", ratio=0.2, ratio_of="parameters", stages={"before": []})
    with monkeypatch.context() as patch:
        patch.setattr("pyprune.run.stages.Stages.cut", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune(model_folder, settings, out=tmp_path / "out")
    weights = model_folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=r"weights was '.*', now '"):
        prune(model_folder, settings, out=tmp_path / "out", resume=True)
    assert (tmp_path / ".out.work" / "decision.json").exists(), "the run may still be resumed with its own weights"


def test_a_run_with_other_text_is_not_resumed(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates of the old text would meet a reconstruction on the new one."""

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    settings = config(text, stages={"before": []})
    with monkeypatch.context() as patch:
        patch.setattr("pyprune.run.stages.Stages.cut", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune(model_folder, settings, out=tmp_path / "out")
    old = text.read_text()
    write_text(text, seed=31)
    with pytest.raises(ConfigError, match=r"text of this run \(data, cut\.data, recovery_data\) is another"):
        prune(model_folder, settings, out=tmp_path / "out", resume=True)
    text.write_text(old)
    prune(model_folder, settings, out=tmp_path / "out", resume=True)
    assert read_pruning_json(tmp_path / "out").plan is not None


@pytest.mark.parametrize("name", ["run.json", "decision.json"])
def test_an_edited_record_of_an_interrupted_run_is_refused(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    settings = config(text, method="random", ratio=0.2, ratio_of="parameters", stages={"before": []})
    with monkeypatch.context() as patch:
        patch.setattr("pyprune.run.stages.Stages.cut", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune(model_folder, settings, out=tmp_path / "out")
    path = tmp_path / ".out.work" / name
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "notes": ["edited"]}))
    with pytest.raises(CheckpointError, match=f"{name} is damaged .*checksum"):
        prune(model_folder, settings, out=tmp_path / "out", resume=True)


def test_sizes_that_no_stock_architecture_takes_leave_nothing_in_the_way(
    model_folder: Path, text: Path, tmp_path: Path
) -> None:
    """The same plan would be refused again, so that nobody could resume it."""
    unequal = {"method": "random", "ratio": 0.2, "ratio_of": "parameters", "target": "stock", "stages": {"before": []}}
    with pytest.raises(ConfigError, match=r"no stock architecture takes these sizes.*score\.uniform"):
        prune(model_folder, config(text, **unequal), out=tmp_path / "out")
    assert not (tmp_path / ".out.work").exists()
    with pytest.raises(ConfigError, match="no stock architecture takes these sizes"):
        plan_checkpoint(model_folder, config(text, **unequal))


def test_a_refusal_leaves_nothing_behind(model_folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="removes nothing"):
        prune(model_folder, config(text, method="random", ratio=1e-4, stages={"before": []}), out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "text.txt"]


def test_text_too_short_to_be_marked_is_said(model_folder: Path, text: Path, tmp_path: Path) -> None:
    short = prune(model_folder, config(text), out=tmp_path / "short")
    assert any("Sequences of 32 tokens are shorter than 64" in warning for warning in short.warnings)
    long = prune(model_folder, config(text, data={"sequence_length": 64}), out=tmp_path / "long")
    assert not any("shorter than" in warning for warning in long.warnings)


@pytest.mark.parametrize("name", ["run.json", "decision.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"plan": {}}'])
def test_a_damaged_record_of_an_interrupted_run_is_refused(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pyprune.run.stages.snapshot", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prune(model_folder, config(text), out=tmp_path / "out")
    (tmp_path / ".out.work" / name).write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match="start without --resume"):
        prune(model_folder, config(text), out=tmp_path / "out", resume=True)


def test_another_revision_is_another_run(
    model_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.run.stages.snapshot", lambda *a, **k: 1 / 0)  # there is a plan, which is kept
    with pytest.raises(ZeroDivisionError):
        prune(model_folder, config(text), out=tmp_path / "out", revision="main")
    with pytest.raises(ConfigError, match="revision was 'main', now None"):
        prune(model_folder, config(text), out=tmp_path / "out", resume=True)


def test_an_output_that_cannot_be_written_is_one_message(model_folder: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file is no folder that may be written"):
        prune(model_folder, config(text), out=tmp_path / "file" / "out")


@pytest.mark.parametrize("wanted", [None, "float16"])
def test_the_source_dtype_is_kept_unless_another_is_asked_for(tmp_path: Path, wanted: str | None) -> None:
    dense = tiny_model("llama").bfloat16()
    folder = write_model(dense, tmp_path / "dense")
    (tmp_path / "plan.json").write_text(family_for(dense).plan(dense.config).drop_layers([1]).to_json())
    options = {"method": "none", "plan": str(tmp_path / "plan.json"), "stages": {"before": []}}
    prune(folder, read_config({**options, "export_dtype": wanted}), out=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == (wanted or "bfloat16")
    assert {str(t.dtype) for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        f"torch.{wanted or 'bfloat16'}"
    }


def test_resuming_nothing_is_an_error(model_folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no interrupted run to resume"):
        prune(model_folder, config(text), out=tmp_path / "out", resume=True)


def test_plans_are_replayed_from_files_and_checkpoints(model_folder: Path, text: Path, tmp_path: Path) -> None:
    plan = plan_checkpoint(model_folder, config(text)).plan
    (tmp_path / "plan.json").write_text(plan.to_json())
    direct = {"method": "none", "stages": {"before": []}}
    first = prune(model_folder, config(text, plan=str(tmp_path / "plan.json"), **direct), out=tmp_path / "a")
    second = prune(model_folder, config(text, plan=str(tmp_path / "a"), **direct), out=tmp_path / "b")
    assert first.plan == second.plan == plan
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_bad_plans_are_refused(model_folder: Path, text: Path, tmp_path: Path) -> None:
    for content, error in (("{", PlanError), ("", PlanError)):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(error):
            prune(model_folder, config(text, plan=str(tmp_path / "plan.json")), out=tmp_path / "out")
    other = tiny_model("qwen2")
    (tmp_path / "plan.json").write_text(family_for(other).plan(other.config).drop_layers([0]).to_json())
    with pytest.raises(PlanError, match="for model type 'qwen2'"):
        prune(model_folder, config(text, plan=str(tmp_path / "plan.json")), out=tmp_path / "out")
    with pytest.raises(PlanError, match="cannot be read"):
        prune(model_folder, config(text, plan=str(tmp_path / "nowhere.json")), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ratio": 1.0}, ConfigError, "strictly between 0 and 1"),
        ({"ratio": 0.0}, ConfigError, "strictly between 0 and 1"),
        ({"ratio": 0.1}, ConfigError, "removes nothing"),
        ({"method": "eldr"}, ConfigError, "Did you mean 'elder'"),
        ({"method": "none"}, ConfigError, "give a plan"),
        ({"data": {"sequence_length": 4096}}, DataError, "4096"),
        ({"data": {"samples": 100000}}, DataError, "too small"),
        ({"ratio_of": "hidden"}, ConfigError, "use layers or parameters"),
    ],
)
def test_bad_requests_lose_nothing(
    model_folder: Path, text: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prune(model_folder, config(text, **changes), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"   \n", b"too short", b"\x00\x01\x02" * 999, b"\xff\xfe" * 999])
def test_unusable_text_is_refused(model_folder: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError):
        prune(model_folder, config(tmp_path / "bad.txt"), out=tmp_path / "out")


def test_an_existing_output_is_refused_before_anything_is_computed(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(OutputError, match="exists already"):
        prune(tmp_path / "no-model-here", config(text), out=tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "keep"


def test_a_size_no_stock_architecture_takes_is_refused_when_stock_is_asked_for(text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model("opt"), tmp_path / "opt")
    settings = config(text, method="dress", target="stock")
    with pytest.raises(ConfigError, match="cannot divide by the original hidden size"):
        prune(folder, settings, out=tmp_path / "out")
    result = prune(folder, config(text, method="dress"), out=tmp_path / "out")
    assert result.compact is not None
    assert result.compact.architecture == "PrunedOPTForCausalLM"
    assert any("No stock architecture fits" in note for note in result.notes)


def test_unknown_model_types_are_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"model_type": "xlnet"}))
    with pytest.raises(UnsupportedModelError, match="xlnet"):
        prune(tmp_path / "gpt", config(text), out=tmp_path / "out")


def test_a_checkpoint_knows_the_text_it_was_trained_on(model_folder: Path, text: Path, tmp_path: Path) -> None:
    settings = config(text, data={"sequence_length": 200})
    prune(model_folder, settings, out=tmp_path / "out")
    tokenizer = tiny_tokenizer()
    seen = torch.tensor(tokenizer(text.read_text())["input_ids"])
    with pytest.raises(DataError, match="were used to train"):
        refuse_training_text(ModelSource.of(tmp_path / "out").marks, seen, "text.txt", "this")
    unseen = write_text(tmp_path / "other.txt", seed=5).read_text()
    other = torch.tensor(tokenizer(unseen)["input_ids"])
    refuse_training_text(ModelSource.of(tmp_path / "out").marks, other, "other.txt", "this")
    refuse_training_text(ModelSource.of(model_folder).marks, seen, "text.txt", "this")


@pytest.mark.parametrize("method", ["dress", "elder"])
def test_a_plan_without_anything_to_regularise_says_so(method: str, text: Path, tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = family_for(model).plan(model.config)
    path = tmp_path / "heads.json"
    path.write_text(plan.with_layer(0, query_heads=(0, 1, 3, 4)).to_json())
    options = config(text, method=method, plan=str(path))
    result = prune_(model, {"data": tiny_batch(1, 6, 32)}, options)
    assert "no effect" in result.warnings[0].lower()


def test_verify_draws_its_text_for_a_replayed_plan(model_folder: Path, text: Path, tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = tmp_path / "plan.json"
    path.write_text(family_for(model).plan(model.config).drop_layers([1]).to_json())
    options = config(text, method="none", plan=str(path), stages={"before": []}, verify=True)
    result = prune(model_folder, options, out=tmp_path / "out")
    assert result.verified is not None
    assert result.verified["masked_perplexity"] == pytest.approx(result.verified["compacted_perplexity"], rel=1e-5)
    with pytest.raises(ConfigError, match="give samples"):
        prune_(model, {}, options)


def test_make_plan_leaves_the_model_alone(text: Path) -> None:
    model = tiny_model("llama")
    before = [p.detach().clone() for p in model.parameters()]
    settings = config(text)
    plan = make_plan(model, sample_sequences(tiny_tokenizer(), settings.data), settings)
    assert len(plan.removed_layers) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "opt", "phi", "gemma3", "mistral"])
@pytest.mark.parametrize("method", ["elder", "dress", "trsp"])
def test_every_family_runs_through_every_method(name: str, method: str, text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model(name), tmp_path / "dense")
    result = prune(folder, config(text, method=method), out=tmp_path / "out")
    assert result.compact is not None
    assert 0 < result.compact.removed_share < 1
    assert torch.isfinite(logits_of(tmp_path / "out")).all()


@pytest.mark.parametrize("kinds", [(), ("prose", "code")])
def test_a_reconstruction_on_one_kind_of_text_says_so(kinds: tuple[str, ...]) -> None:
    ids = tiny_batch(batch=8, length=16)
    text = replace(Batch.of(ids), kinds=kinds * 4) if kinds else Batch.of(ids)
    stages: dict[str, Any] = {"before": [], "after": []}
    config = read_config({"method": "last", "ratio": 0.5, "cut": {"reconstruct": "least_squares"}, "stages": stages})
    result = prune_(tiny_model("llama"), {"data": text}, config)
    assert result.reconstruction is not None
    assert any("one kind of text" in note for note in result.notes) == (not kinds)

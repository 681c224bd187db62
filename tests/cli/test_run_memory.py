"""A run says what it will hold before it loads anything, decides between full and lean, and refuses what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig, StageConfig, Training
from pyprune.config.train import RecoverConfig, TrainConfig
from pyprune.errors import ConfigError
from pyprune.run.memory import TrainedModels, adopt_lean_dtype, division_of, memory_estimate, memory_of, within_memory
from pyprune.run.recipe import build_config
from pyprune.runtime import processes
from pyprune.runtime.processes import Division
from pyprune.train.memory import TrainingMemory
from tests._support.cli import run, tiny_elder

BFLOAT16 = ("--set", "recover.train.dtype=bfloat16")


def device_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.run.memory.device_memory", lambda device: size)


def peaks(checkpoint: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the tiny run holds in full and in lean memory, bytes."""
    found: dict[str, int] = {}

    def keep(memories: list[tuple[Training, TrainingMemory]], device: object, capacity: int) -> str:
        found.update({training.name: m.total for training, m in memories})
        return "kept"

    sizes = {}
    with monkeypatch.context() as patched:
        patched.setattr("pyprune.run.memory.memory_table", keep)
        for memory in ("full", "lean"):
            arguments = tiny_elder(checkpoint, text, "--dry-run", *BFLOAT16, "--set", f"recover.train.memory={memory}")
            result = run(*arguments)
            assert result.exit_code == 0, result.output
            sizes[memory] = found["recover.train"]
    return sizes


def test_a_dry_run_says_what_the_training_would_hold(checkpoint: Path, text: Path) -> None:
    result = run(*tiny_elder(checkpoint, text, "--dry-run"))
    assert result.exit_code == 0, result.output
    assert "Memory at the peak" in result.stderr
    assert "| recover.train | full |" in result.stderr
    assert "gradients" not in result.stdout


def test_auto_means_the_same_where_nothing_is_looked_at(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on with more processes, or on another machine, has the options that it began with."""
    config = build_config(options={"method": "elder-trained"})
    source = TrainedModels(ModelSource.of(checkpoint))
    found = []
    for size in (2**50, 2**28):
        device_of(size, monkeypatch)
        found.append(within_memory(source, config))
    assert found[0] == found[1] != config
    assert found[0].recover.train.memory == "full"


@pytest.mark.second
def test_auto_takes_lean_where_full_does_not_fit(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effect is in the checkpoint's record, and the weights have only values of bfloat16."""
    sizes = peaks(checkpoint, text, monkeypatch)
    assert sizes["lean"] < sizes["full"]
    device_of((sizes["lean"] + sizes["full"]) // 2, monkeypatch)
    result = run(*tiny_elder(checkpoint, text, "--out", tmp_path / "lean", *BFLOAT16))
    assert result.exit_code == 0, result.output
    assert "Memory is lean" in result.stderr
    assert "| recover.train | lean, steps in backward |" in result.stderr
    config = read_pruning_json(tmp_path / "lean").provenance["config"]
    assert (config["dtype"], config["recover"]["train"]["memory"]) == ("bfloat16", "lean")
    model, _ = load_model(tmp_path / "lean")
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())
    device_of(sizes["full"] * 2, monkeypatch)
    result = run(*tiny_elder(checkpoint, text, "--out", tmp_path / "full", *BFLOAT16))
    assert result.exit_code == 0, result.output
    assert read_pruning_json(tmp_path / "full").provenance["config"]["recover"]["train"]["memory"] == "full"
    model, _ = load_model(tmp_path / "full")
    assert not all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())


@pytest.mark.second
def test_what_the_device_cannot_hold_is_refused_with_what_would_help(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_of(100_000, monkeypatch)
    result = run(
        *tiny_elder(checkpoint, text, "--out", tmp_path / "out", *BFLOAT16, "--set", "recover.train.memory=full")
    )
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert "recover.train would hold" in message
    assert "recover.train.gradient_checkpointing=true" in message
    assert "recover.train.memory=lean" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.second
def test_the_gates_are_looked_at_too(checkpoint: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are learnt before anything else, with gradients through all layers."""
    untrained = ("--set", "stages.after=[]", "--set", "data.sequence_length=32")
    result = run(*tiny_elder(checkpoint, text, "--dry-run", *untrained))
    assert result.exit_code == 0, result.output
    assert "| elder.gates | full |" in result.stderr
    device_of(100_000, monkeypatch)
    result = run(*tiny_elder(checkpoint, text, "--dry-run", *untrained))
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert "elder.gates would hold" in message
    assert "elder.train.gradient_checkpointing=true" in message
    replayed = build_config(options={"method": "elder-trained"}, settings=["elder.layers=[1]", "stages.after=[]"])
    assert replayed.deciding_training() is None


def test_adapters_in_lean_memory_leave_the_training_of_all_weights_as_it_is() -> None:
    lean = ["recover.adapters=lora", "recover.train.dtype=bfloat16", "recover.train.memory=lean"]
    whole = ["stages.after=[recover]", "dress.train.memory=full"]
    assert adopt_lean_dtype(build_config(preset="dress-anneal", settings=[*whole, *lean])).dtype == "float32"
    assert adopt_lean_dtype(build_config(preset="elder-trained", settings=lean)).dtype == "bfloat16"


@pytest.mark.second
def test_a_recovery_is_looked_at_too(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*tiny_elder(checkpoint, text, "--out", tmp_path / "cut")).exit_code == 0
    device_of(9_000_000, monkeypatch)
    settings = {"recover.adapters": "none", "recover.train.steps": 2, "recover.train.batch_size": 2,
                "recover.train.micro_batch_size": 2, "recover.train.dtype": "bfloat16"}  # fmt: skip
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = ["recover", tmp_path / "cut", "--out", tmp_path / "out", *sets, "--set", f"data.source={text}"]
    result = run(*command, "--set", "data.samples=8", "--set", "data.sequence_length=16")
    assert result.exit_code == 0, result.output
    assert "| recover.train | full | 2 x 16 tokens |" in result.stderr
    device_of(50_000, monkeypatch)
    result = run(*command, "--overwrite", "--set", "data.samples=8", "--set", "data.sequence_length=16")
    assert result.exit_code == 2
    assert "recover.train would hold" in result.stderr


@pytest.mark.second
def test_a_dry_run_of_a_recovery_says_what_it_would_hold_and_does_nothing(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.checkpoint.load.ModelSource.load", None)
    command = ["recover", checkpoint, "--dry-run", "--set", f"data.source={text}", "--set", "data.sequence_length=16"]
    before = sorted(tmp_path.rglob("*"))
    for more in ([], ["--out", tmp_path / "out"], ["--teacher", checkpoint]):
        result = run(*command, *more)
        assert result.exit_code == 0, result.output
        assert "Memory at the peak" in result.stderr
        assert "| recover.train | full |" in result.stderr
        assert not result.stdout
    device_of(50_000, monkeypatch)
    result = run(*command, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "recover.train would hold" in result.stderr
    assert sorted(tmp_path.rglob("*")) == before
    result = run(*command[:2])
    assert result.exit_code == 2
    assert "give the folder to create" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("settings", "attention"),
    [
        ([], "sdpa"),
        (["recover.distill={}"], "sdpa"),
        (["recover.adapters=none", "recover.distill={}"], "sdpa"),
        (["data.sequence_length=512", "recovery_data.sequence_length=512"], "eager"),
    ],
)
def test_a_small_run_says_in_one_line_what_it_holds_at_most(
    checkpoint: Path,
    settings: list[str],
    attention: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line is no table, and no training of the run holds more."""
    device_of(2**50, monkeypatch)
    shapes = ModelSource.shapes

    def with_attention(source: ModelSource, dtype: str = "float32") -> Any:
        model = shapes(source, dtype)
        model.set_attn_implementation(attention)
        model.config.max_position_embeddings = 512
        return model

    monkeypatch.setattr(ModelSource, "shapes", with_attention)
    config = build_config(options={"method": "elder-trained", "device": "cpu"}, settings=settings)
    within_memory(TrainedModels(ModelSource.of(checkpoint)), config)
    (line,) = capsys.readouterr().err.splitlines()
    assert "Memory at the peak: at most about" in line
    assert "of 1048576.00 GiB on cpu" in line
    estimate = memory_estimate(TrainedModels(ModelSource.of(checkpoint)), ModelSource.of(checkpoint).shapes(), config)
    _, found = memory_of(TrainedModels(ModelSource.of(checkpoint)), config, torch.device("cpu"), 2**50)
    assert all(memory.total <= estimate for _, memory in found)


SIZES: dict[str, dict[str, int]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
CHECKPOINTED = "recover.train.gradient_checkpointing=true"


@pytest.mark.second
@pytest.mark.parametrize(("size", "recipe", "settings"), [
    ("7B", "llama2-7b-dress", ()), ("7B", "llama2-7b-elder", ()), ("7B", "llama2-7b-trsp", ()),
    ("7B", "llama-7b-moreau", ()), ("13B", "llama2-7b-dress", ()), ("13B", "llama-7b-moreau", (CHECKPOINTED,)),
])  # fmt: skip
def test_the_7b_recipes_fit_on_one_gpu(
    size: str, recipe: str, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLaMA-2's shapes on 76 GiB, from the recipe as it is shipped; of 13B as docs/results/training-memory.md."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    def shapes(source: ModelSource, dtype: str = "float32") -> object:
        sizes = LlamaConfig(vocab_size=32000, **SIZES[size])
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(sizes, dtype=getattr(torch, dtype))

    monkeypatch.setattr(ModelSource, "shapes", shapes)
    monkeypatch.setattr("pyprune.run.memory.resolve_device", lambda name: torch.device("cuda"))
    device_of(76 * 2**30, monkeypatch)
    path = Path(__file__).resolve().parents[2] / "recipes" / "llama" / f"{recipe}.yaml"
    config = build_config(preset=None, recovery=None, recipe=path, options={}, settings=settings)
    found = within_memory(TrainedModels(ModelSource("llama")), config)  # refuses what does not fit
    regularised = [t for t in found.trainings() if t.action == "regularise"]
    assert all(t.train.memory == "lean" for t in regularised)
    assert found.dtype == ("bfloat16" if regularised else "float32")


def test_every_training_is_looked_at_with_its_own_text(checkpoint: Path) -> None:
    train = TrainConfig(batch_size=2, micro_batch_size=2)
    config = PruneConfig(
        method="magnitude", device="cpu", finetune=train, stages=StageConfig(("finetune",), after=("finetune",)),
        data=DataConfig("wikitext2", sequence_length=16), recovery_data=DataConfig("wikitext2", sequence_length=128),
    )  # fmt: skip
    _, found = memory_of(TrainedModels(ModelSource.of(checkpoint)), config, torch.device("cpu"), 2**40)
    assert [memory.length for _, memory in found] == [16, 128]
    assert found[1][1].activations > 2 * found[0][1].activations


def test_lean_means_bfloat16_weights_also_for_a_small_model_and_for_adapters(checkpoint: Path) -> None:
    lean = TrainConfig(dtype="bfloat16", memory="lean")
    for adapters in ("none", "lora"):
        config = PruneConfig(
            method="magnitude", device="cpu", recover=RecoverConfig(adapters=adapters, train=lean),
            stages=StageConfig((), after=("recover",)), data=DataConfig("wikitext2", sequence_length=16),
        )  # fmt: skip
        assert within_memory(TrainedModels(ModelSource.of(checkpoint)), config).dtype == "bfloat16"


def test_trainings_of_the_same_weights_that_differ_in_memory_are_refused() -> None:
    lean = TrainConfig(dtype="bfloat16", memory="lean")
    for other in (TrainConfig(memory="full", dtype="bfloat16"), TrainConfig(dtype="float32")):
        config = PruneConfig(
            method="magnitude", finetune=lean, recover=RecoverConfig(adapters="none", train=other),
            stages=StageConfig(("finetune",), after=("recover",)),
        )  # fmt: skip
        with pytest.raises(ConfigError, match=r"finetune\.memory is 'lean'.*set both alike"):
            config.validate()


def test_a_model_that_fills_half_of_a_device_is_on_the_host(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.runtime.device.agreed_on_bfloat16", None)  # comes back
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "local_count", lambda: 2)  # and share its memory
    source, config = TrainedModels(ModelSource.of(checkpoint)), PruneConfig(method="magnitude", device="cpu")
    weights = sum(p.nbytes for p in source.model.shapes().parameters())
    on_host = Division(torch.device("cpu"), "first")
    for size, expected in ((4 * weights, Division()), (4 * weights - 64, on_host)):
        device_of(size, monkeypatch)
        assert division_of(source, config, "auto") == expected
        assert division_of(source, config, "device") == Division()
        assert division_of(source, config, "host") == on_host
    with pytest.raises(ConfigError, match="placement"):
        division_of(source, config, "gpu")
    monkeypatch.setattr(processes, "count", lambda: 8)
    with pytest.raises(ConfigError, match=r"trsp\.gates\.batch_size is 4, which 8 processes cannot share"):
        division_of(source, build_config(options={"method": "trsp-trained", "device": "cpu"}), "host")


def test_a_placement_for_one_process_is_said_to_be_for_several(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    result = run(*tiny_elder(checkpoint, text, "--out", tmp_path / "out", "--placement", "host"))
    assert result.exit_code == 0, result.output
    assert "--placement host is for several processes (torchrun); this run has one." in " ".join(result.stderr.split())


def test_processes_that_divide_a_model_on_the_host_divide_its_teacher(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "count", lambda: 8)
    config = build_config(options={"method": "elder-trained"})
    device = torch.device("cpu")
    held = [
        memory_of(TrainedModels(ModelSource.of(checkpoint), on_host=on_host), config, device, 2**40)[1][-1][1].teacher
        for on_host in (False, True)
    ]
    assert held[1] < held[0]

"""Checkpoints: they load back, and every way of damaging one is refused with a clear message."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.record import annotate_checkpoint, read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.cut.mask import masked
from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError, OutputError, UnsupportedModelError
from pyprune.families import count_parameters, family_for
from pyprune.plan import PrunePlan
from pyprune.runtime import files
from pyprune.runtime.device import warn_of_slow_dtype
from pyprune.runtime.files import atomic_folder, write_text
from tests._support.cli import run
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.paths import REPO
from tests._support.tokenizer import tiny_tokenizer


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, torch.Tensor, PrunePlan]:
    model = tiny_model("llama-head-dim")
    plan = family_for(model).plan(model.config).drop_layers([1]).with_layer(2, ffn=range(9))
    compact_(model, plan)
    out = tmp_path / "pruned"
    save_checkpoint(model, tiny_tokenizer(), out, plan=plan, provenance={"method": "none", "source": "tiny"})
    with torch.no_grad():
        return out, model(tiny_batch()).logits, plan


def test_a_checkpoint_loads_back_with_its_plan(written: tuple[Path, torch.Tensor, PrunePlan]) -> None:
    out, expected, plan = written
    model, tokenizer = load_model(out)
    with torch.no_grad():
        assert torch.equal(model(tiny_batch()).logits, expected)
    assert tokenizer is not None
    record = read_pruning_json(out, verify_files=True)
    assert record.plan == plan
    assert record.provenance["parameters"] == sum(p.numel() for p in model.parameters())
    card = (out / "README.md").read_text()
    assert plan.summary() in card
    assert "import pyprune.modeling" in card
    assert not list(out.parent.glob(".*"))


def test_only_safetensors_are_written(written: tuple[Path, torch.Tensor, PrunePlan]) -> None:
    out = written[0]
    assert {p.suffix for p in out.iterdir()} <= {".safetensors", ".json", ".md", ".jinja"}


def test_weights_beyond_the_range_of_the_written_dtype_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = 7e4
    with pytest.raises(
        OutputError, match=r"layers\.1\.mlp\.up_proj\.weight holds 7e\+04, beyond the range of torch.float16"
    ):
        save_checkpoint(model, None, tmp_path / "out", plan=None, provenance={}, dtype="float16")
    assert not (tmp_path / "out").exists()
    save_checkpoint(model, None, tmp_path / "out", plan=None, provenance={}, dtype="bfloat16")


def test_a_tied_head_is_stored_once_in_another_dtype(tmp_path: Path) -> None:
    model = tiny_model("llama-head-dim")
    save_checkpoint(model, None, tmp_path / "half", plan=None, provenance={}, dtype="bfloat16")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.dtype == torch.float32
    loaded, tokenizer = load_model(tmp_path / "half")
    assert tokenizer is None
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16().float())


def test_measured_facts_enter_the_card_and_the_record(written: tuple[Path, torch.Tensor, PrunePlan]) -> None:
    out = written[0]
    annotate_checkpoint(out, quality={"perplexity": 12.5})
    assert read_pruning_json(out, verify_files=True).provenance["quality"] == {"perplexity": 12.5}
    assert "| perplexity | 12.5 |" in (out / "README.md").read_text()
    annotate_checkpoint(out, quality={"piqa acc": 0.6})
    assert read_pruning_json(out, verify_files=True).provenance["quality"] == {"perplexity": 12.5, "piqa acc": 0.6}


def test_a_tokenizer_with_several_chat_templates_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    save_checkpoint(tiny_model(), tokenizer, tmp_path / "out", plan=None, provenance={})
    load_model(tmp_path / "out")
    inside = next((tmp_path / "out" / "additional_chat_templates").iterdir())
    inside.write_text("changed")
    load_model(tmp_path / "out")
    assert f"{inside} was edited" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_generation_values_that_transformers_only_reads_are_kept(tmp_path: Path, dtype: str | None) -> None:
    model = tiny_model()
    model.generation_config.temperature = 0.9  # as LLaMA 2 has it: a temperature, and no sampling
    save_checkpoint(model, None, tmp_path / "out", plan=None, provenance={}, dtype=dtype)
    assert model.generation_config.temperature == 0.9
    loaded, _ = load_model(tmp_path / "out")
    assert loaded.generation_config.temperature == 0.9
    assert loaded.generation_config.eos_token_id == 2


def test_a_head_stored_beside_the_embedding_stays_its_own(tmp_path: Path) -> None:
    model = tiny_model("llama-head-dim")
    model.save_pretrained(tmp_path / "dense")
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state["lm_head.weight"] *= 1.5
    save_file(state, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    dense, _ = load_model(tmp_path / "dense")
    assert not dense.config.tie_word_embeddings
    plan = family_for(dense).plan(dense.config).keep_hidden(range(32))
    with torch.no_grad(), masked(dense, plan):
        expected = dense(tiny_batch()).logits
    compact_(dense, plan)
    save_checkpoint(dense, None, tmp_path / "cut", plan=plan, provenance={})
    again, _ = load_model(tmp_path / "cut")
    assert count_parameters(again) == count_parameters(dense)
    with torch.no_grad():
        assert_same_logits(again(tiny_batch()).logits, expected)


def test_a_cut_model_names_no_code_that_is_not_beside_it(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_x.X"}
    compact_(model, family_for(model).plan(model.config).drop_layers([0]))
    save_checkpoint(model, None, tmp_path / "out", plan=None, provenance={})
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_card_stays_ours_after_an_interruption_and_a_change_of_its_form(
    written: tuple[Path, torch.Tensor, PrunePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, card = written[0], written[0] / "README.md"
    with monkeypatch.context() as patch:

        def stops(path: Path, text: str) -> None:
            if path == card:
                raise KeyboardInterrupt
            write_text(path, text)

        patch.setattr("pyprune.checkpoint.record.write_text", stops)
        with pytest.raises(KeyboardInterrupt):
            annotate_checkpoint(folder, quality={"first": 1.0})
    annotate_checkpoint(folder, quality={"second": 2.0})
    assert {"first", "second"} <= set(card.read_text().replace("|", " ").split())
    with monkeypatch.context() as patch:
        patch.setattr("pyprune.checkpoint.record.model_card", lambda record: f"another form: {record.provenance}")
        annotate_checkpoint(folder, quality={"third": 3.0})
    assert card.read_text().startswith("another form")
    annotate_checkpoint(folder, quality={"fourth": 4.0})
    assert "fourth" in card.read_text()


def test_an_edited_card_is_nobodys_damage_and_stays(written: tuple[Path, torch.Tensor, PrunePlan]) -> None:
    card = written[0] / "README.md"
    card.write_text("My own words.\n", encoding="utf-8")
    load_model(written[0])
    annotate_checkpoint(written[0], quality={"perplexity": 3.0})
    assert card.read_text(encoding="utf-8") == "My own words.\n"
    assert read_pruning_json(written[0], verify_files=True).provenance["quality"] == {"perplexity": 3.0}


def test_an_existing_folder_is_refused_and_kept(written: tuple[Path, torch.Tensor, PrunePlan]) -> None:
    out = written[0]
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(OutputError, match="exists already"):
        save_checkpoint(tiny_model(), None, out, plan=None, provenance={})
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    save_checkpoint(tiny_model(), None, out, plan=None, provenance={}, overwrite=True)
    assert read_pruning_json(out, verify_files=True).plan is None
    assert not list(out.parent.glob(".*"))


def test_a_folder_of_something_else_is_never_replaced(written: tuple[Path, torch.Tensor, PrunePlan]) -> None:
    home = written[0]
    (home / "letters").mkdir()
    (home / "letters" / "one.txt").write_text("Dear")
    with pytest.raises(OutputError, match=r"holds letters, which no record of pyprune in it names"):
        save_checkpoint(tiny_model(), None, home, plan=None, provenance={}, overwrite=True)
    assert (home / "letters" / "one.txt").read_text() == "Dear"
    assert read_pruning_json(home, verify_files=True).plan == written[2]
    (home / "letters" / "one.txt").unlink()
    (home / "letters").rmdir()
    save_checkpoint(tiny_model(), None, home, plan=None, provenance={}, overwrite=True)
    assert read_pruning_json(home, verify_files=True).plan is None


@pytest.mark.process
def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(
    written: tuple[Path, torch.Tensor, PrunePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = written[0]
    real = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "part":
            raise KeyboardInterrupt
        return real(self, target)

    before = {p.name: p.read_bytes() for p in out.iterdir()}
    monkeypatch.setattr(files, "exchange", lambda one, other: False)  # where the file system cannot
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(out, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


@pytest.mark.process
def test_readers_find_a_whole_folder_while_it_is_replaced(written: tuple[Path, torch.Tensor, PrunePlan]) -> None:
    """Another process looks for it all the time; for none of them it may be gone."""
    out = written[0]
    look = "import os, sys, time\nend = time.time() + 4\nmissing = seen = 0\nprint('ready', flush=True)\n"
    look += (
        "while time.time() < end:\n    seen += 1\n    missing += not os.path.isfile(sys.argv[1])\nprint(missing, seen)"
    )
    command = [sys.executable, "-c", look, str(out / "config.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        writes = 0
        while reader.poll() is None and writes < 40:
            with atomic_folder(out, overwrite=True) as folder:
                for path in out.iterdir():
                    shutil.copyfile(path, folder / path.name)
            writes += 1
        missing, seen = map(int, reader.communicate()[0].split())
    assert writes > 5
    assert seen > 100
    assert missing == 0


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise failure

    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(type(tokenizer), "save_pretrained", fail)
    expected = OutputError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save_checkpoint(tiny_model(), tokenizer, tmp_path / "out", plan=None, provenance={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.second
def test_a_disk_that_fills_up_while_writing_weights(tmp_path: Path) -> None:
    """A real refusal by the kernel (a file-size limit), in a process of its own."""
    script = f"""
import resource, signal, sys
sys.path.insert(0, {str(REPO)!r})
from pyprune.errors import OutputError
from pyprune.checkpoint.save import save_checkpoint
from tests._support.models import tiny_model
model = tiny_model()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save_checkpoint(model, None, {str(tmp_path / "out")!r}, plan=None, provenance={{}})
except OutputError as error:
    print(error)
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "a file would be larger than this process may write" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_finished_block_is_renamed_and_a_failed_one_is_not(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a" / "x").read_text() == "1"
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "b") as folder:
        1 / 0  # noqa: B018
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def truncate_weights(out: Path) -> None:
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_weight(out: Path) -> None:
    path = out / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def change_the_config(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))


def change_the_plan(out: Path) -> None:
    record = json.loads((out / "pruning.json").read_text())
    record["plan"]["hidden"] = "0-3"
    (out / "pruning.json").write_text(json.dumps(record))


def cut_the_record(out: Path) -> None:
    (out / "pruning.json").write_text((out / "pruning.json").read_text()[:50])


def name_a_file_elsewhere(out: Path) -> None:
    from pyprune.checkpoint.manifest import PruningRecord

    (out / "pruning.json").write_text(PruningRecord(None, {}, {"../secret": "0"}).to_json())


@pytest.mark.parametrize(
    "damage",
    [
        truncate_weights,
        flip_a_weight,
        change_the_config,
        change_the_plan,
        cut_the_record,
        name_a_file_elsewhere,
        lambda out: (out / "model.safetensors").unlink(),
        lambda out: (out / "config.json").unlink(),
    ],
)
def test_damaged_checkpoints_are_refused(written: tuple[Path, torch.Tensor, PrunePlan], damage: Any) -> None:
    damage(written[0])
    with pytest.raises(CheckpointError):
        load_model(written[0])


@pytest.mark.parametrize("damage", [truncate_weights, lambda out: (out / "model.safetensors").write_bytes(b"")])
def test_damaged_weights_are_refused_without_a_record_too(
    written: tuple[Path, torch.Tensor, PrunePlan], damage: Any
) -> None:
    (written[0] / "pruning.json").unlink()
    damage(written[0])
    with pytest.raises(CheckpointError, match="could not be read"):
        load_model(written[0])


def test_missing_weights_are_an_error_not_random_numbers(written: tuple[Path, torch.Tensor, PrunePlan]) -> None:
    out = written[0]
    (out / "pruning.json").unlink()
    state = load_file(out / "model.safetensors")
    removed = "model.layers.0.mlp.up_proj.weight"
    save_file({k: v for k, v in state.items() if k != removed}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(out)


def test_impossible_sizes_in_a_config_are_refused(written: tuple[Path, torch.Tensor, PrunePlan]) -> None:
    out = written[0]
    (out / "pruning.json").unlink()
    config = json.loads((out / "config.json").read_text())
    for sizes, said in (
        ({"num_attention_heads": 3}, "3 query heads do not divide into 2 KV heads"),
        ({"skip": ["head"]}, r"layer 0: skip names \['head'\]; allowed: attention, mlp"),
    ):
        (out / "config.json").write_text(json.dumps(config | {"per_layer_config": {"0": sizes}}))
        with pytest.raises(CheckpointError, match=said):
            load_model(out)


@pytest.mark.parametrize("value", [[], 3, {"0": {"skip": "attention"}}], ids=str)
def test_a_config_with_the_wrong_kind_of_value_is_refused(
    written: tuple[Path, torch.Tensor, PrunePlan], value: Any
) -> None:
    out = written[0]
    (out / "pruning.json").unlink()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"per_layer_config": value}))
    with pytest.raises(CheckpointError, match="value of the wrong kind"):
        load_model(out)
    with pytest.raises(CheckpointError, match="value of the wrong kind"):
        _ = ModelSource.of(out).dtype


HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize("named", [None, "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("matrices", "norms", "stored"),
    [(HALF, HALF, "float16"), (HALF, SINGLE, "float16"), (SINGLE, HALF, "float32"), (torch.float64, HALF, "float16")],
)
def test_the_dtype_of_a_folder_is_that_of_most_of_its_weights(
    named: str | None, matrices: torch.dtype, norms: torch.dtype, stored: str, tmp_path: Path
) -> None:
    """Whatever config.json says: what is written of it would else be larger, or rounded."""
    save_checkpoint(tiny_model("llama"), None, tmp_path / "out", plan=None, provenance={})
    _stored_as(tmp_path / "out", named, lambda weight: norms if weight.dim() == 1 else matrices)
    assert ModelSource.of(tmp_path / "out").dtype == stored


def _stored_as(folder: Path, named: str | None, dtype_of: Callable[[torch.Tensor], torch.dtype]) -> None:
    (folder / "pruning.json").unlink()
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: weight.to(dtype_of(weight)) for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name)
    (folder / "config.json").write_text(json.dumps(config if named is None else config | {"dtype": named}))


@pytest.mark.parametrize("command", [["prune", "--method", "last", "--ratio", "0.25"], ["export"]])
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "loaded"])
def test_what_is_written_has_the_dtype_of_what_was_read(
    command: list[str], streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), tmp_path / "dense", plan=None, provenance={})
    _stored_as(tmp_path / "dense", None, lambda _: HALF)
    if not streamed:
        monkeypatch.setattr("pyprune.run.prune.loading_reason", lambda *_, **__: "In memory.")
    found = run(command[0], tmp_path / "dense", *command[1:], "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert {weight.dtype for weight in load_file(tmp_path / "out" / "model.safetensors").values()} == {HALF}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


def test_a_pickle_that_runs_code_is_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "owned",)

    model = tiny_model()
    model.config.save_pretrained(tmp_path / "bin")
    torch.save({"model.norm.weight": Attack()}, tmp_path / "bin" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="would run its code"):
        load_model(tmp_path / "bin")
    assert not (tmp_path / "owned").exists()


def test_a_bin_with_plain_weights_is_read(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.save_pretrained(tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    loaded, _ = load_model(tmp_path / "bin")
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)


def test_unknown_models_dtypes_and_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UnsupportedModelError, match="Unknown model type 'bert'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(UnsupportedModelError):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="Unknown dtype 'int8'"):
        load_model(tmp_path, dtype="int8")
    for device in ("cuda:99", "gpu", "mps"):
        with pytest.raises(ConfigError, match=f"device is '{device}'"):
            load_model(tmp_path, device=device)
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no file 'x\.gguf'"):
        load_model(tmp_path, gguf_file="x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF0000")
    with pytest.raises(CheckpointError, match="could not be read"):
        load_model(tmp_path, gguf_file="x.gguf")
    for name in ("no-such-folder/", "a/b/c"):
        with pytest.raises(CheckpointError, match="is not a local folder"):
            load_model(name)


def test_gguf_names_the_extra_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").touch()
    monkeypatch.setattr("pyprune.checkpoint.load.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pyprune\[gguf\]"):
        load_model(tmp_path, gguf_file="x.gguf")


def test_remote_code_is_not_run_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    with pytest.raises((CheckpointError, UnsupportedModelError)):
        load_model(tmp_path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.process
@pytest.mark.second
def test_stock_checkpoints_need_no_pyprune(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = family_for(model).plan(model.config).drop_layers([1]).keep_hidden(range(36))
    compact_(model, plan)
    out = save_checkpoint(model, None, tmp_path / "stock", plan=plan, provenance={})
    ids = tiny_batch()
    with torch.no_grad():
        expected = model(ids).logits
    torch.save((ids, expected), tmp_path / "expected.pt")
    script = f"""
import sys, torch
from transformers import AutoModelForCausalLM
ids, expected = torch.load({str(tmp_path / "expected.pt")!r}, weights_only=True)
model = AutoModelForCausalLM.from_pretrained({str(out)!r})
assert torch.equal(model(ids).logits, expected)
assert not any(name.startswith("pyprune") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=tmp_path)
    assert AutoModelForCausalLM.from_pretrained(out).config.head_dim == 8


@pytest.mark.parametrize(
    ("known", "dtype", "device", "warns"),
    [
        ({"avx2": True, "avx512_bf16": False}, "bfloat16", "cpu", True),
        ({"avx512_bf16": True}, "bfloat16", "cpu", False),
        ({"neon": True, "bf16": True}, "bfloat16", "cpu", False),
        ({"avx2": True}, "float32", "cpu", False),
        ({"avx2": True}, "bfloat16", "meta", False),
    ],
)
def test_bfloat16_without_instructions_for_it_is_warned_of(
    known: dict[str, Any], dtype: str, device: str, warns: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    monkeypatch.setattr("pyprune.runtime.device.is_masked", lambda dtype: False)
    warn_of_slow_dtype(dtype, torch.device(device))
    assert ("this CPU has no bfloat16 arithmetic" in capsys.readouterr().err) is warns

"""`pyprune serve DIR ...` hands on what it is given, in order, after checking the folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.errors import CheckpointError
from pyprune.families import family_for
from pyprune.serving.export import export
from pyprune.serving.vllm import command, cpu
from pyprune.serving.vllm.command import serve_command
from tests._support.cli import refused, run
from tests._support.models import tiny_model
from tests._support.served import flip_a_weight_bit
from tests._support.tokenizer import tiny_tokenizer

FLAGS = [
    "--port", "9000", "--max-model-len=2048", "-tp", "2", "-pp=1", "-O3", "-cc.mode=0", "--no-enable-prefix-caching",
    "--lora-modules", "first=adapters/first", "second=adapters/second",
    "--speculative-config", '{"model": "draft", "num_speculative_tokens": 4}', "--served-model-name", "two words", "",
    "--host", "::1", "--middleware", "a.b", "--middleware", "c.d", "--max-num-seqs", "16", "--help=Frontend",
]  # fmt: skip
"""Long and short ones, with a value beside them or after a =, with several values, repeated, JSON, empty."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a record."""
    out = tmp_path_factory.mktemp("served") / "model"
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), out, plan=None, provenance={})
    return out


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that take the place of the process."""
    found: list[list[str]] = []
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    monkeypatch.setattr(os, "execve", lambda _, command, __: found.append(command))
    return found


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        (FLAGS[:-1], FLAGS[:-1]),
        (["--", *FLAGS], FLAGS),
        (["--port", "9000", "--", "--help", "--debug"], ["--port", "9000", "--help", "--debug"]),
        (["--", "--", "--port", "9000"], ["--", "--port", "9000"]),
        (["--debug", "--port", "9000"], ["--port", "9000"]),
        (["--port", "9000", "--debug", "-tp", "2"], ["--port", "9000", "-tp", "2"]),
        ([], []),
    ],
)
def test_the_command_is_what_was_given(
    given: list[str], handed_on: list[str], folder: Path, executed: list[list[str]]
) -> None:
    result = run("serve", folder, *given)
    assert result.exit_code == 0, result.output
    assert executed == [[sys.executable, "-P", "-m", "pyprune.serving.vllm.launch", "serve", str(folder), *handed_on]]


def test_vllm_gets_it(folder: Path, tmp_path: Path) -> None:
    """The command as a user runs it, with a stand-in for vLLM that prints what it was called with."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for path in (package, package.parent, package.parent.parent):
        (path / "__init__.py").touch()
    main = "import json, sys\n\ndef main():\n    print(json.dumps(sys.argv[1:]))\n    sys.exit(0)\n"
    (package / "main.py").write_text(main)
    done = subprocess.run(
        [sys.executable, "-m", "pyprune", "serve", str(folder), *FLAGS[:-1]],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["serve", str(folder), *FLAGS[:-1]]


def test_options_of_vllm_do_not_stand_before_the_folder(folder: Path, executed: list[list[str]]) -> None:
    said = refused("serve", "--port", "9000", folder)
    assert "'--port' stands where the checkpoint folder belongs. Name the folder first" in said
    assert executed == []


def test_help_is_of_pyprune_wherever_it_stands(folder: Path, executed: list[list[str]]) -> None:
    for given in (["--help"], [folder, "--port", "9000", "--help"]):
        output = run("serve", *given).output
        assert "Usage:" in output
        assert "Example: pyprune serve" in output
    assert executed == []


def test_the_folder_is_checked_whatever_is_handed_on(tmp_path: Path, executed: list[list[str]]) -> None:
    folder = tmp_path / "model"
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), folder, plan=None, provenance={})
    assert serve_command(folder, ["--port", "9000"])[-2:] == ["--port", "9000"]
    name = flip_a_weight_bit(folder)
    assert f"{name} differs from what was written" in refused("serve", folder, "--port", "9000", "-tp", "2")
    (folder / "config.json").unlink()
    assert "config.json" in refused("serve", folder, "--port=9000")
    assert executed == []


def test_another_command_refuses_what_it_does_not_know(folder: Path) -> None:
    assert run("inspect", folder, "--port", "9000").exit_code == 2


@pytest.mark.parametrize("ranks", [["-tp", "3"], ["--tensor-parallel-size=3"], ["--tensor_parallel_size", "3"]])
def test_a_stock_model_whose_layers_ranks_cannot_share_is_refused(
    ranks: list[str], folder: Path, executed: list[list[str]]
) -> None:
    said = refused("serve", folder, "--port", "9000", *ranks)
    assert "3 tensor parallel ranks cannot share" in " ".join(said.split())
    assert executed == []
    assert serve_command(folder, ["-tp", "2"])[-2:] == ["-tp", "2"]
    assert serve_command(folder, ["-tp", "two"])[-2:] == ["-tp", "two"], "vLLM says what is wrong with it"


def test_ranks_without_a_memory_node_each_are_warned_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warned(*ranks: str) -> bool:
        capsys.readouterr()
        serve_command(folder, ranks)
        said = " ".join(capsys.readouterr().err.split())
        return "VLLM_CPU_OMP_THREADS_BIND=nobind" in said

    for name in ("VLLM_TARGET_DEVICE", cpu.THREADS_BIND, cpu.SIMULATED, cpu.VISIBLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(cpu, "MEMORY", tmp_path / "status")
    monkeypatch.setattr(command, "vllm_version", lambda: "0.32.0+cpu")
    assert not warned("-tp", "2"), "the system does not say"
    cpu.MEMORY.write_text("Name:\tpython\nMems_allowed:\t1\nMems_allowed_list:\t0\n")
    assert warned("-tp", "2")
    assert warned("-pp", "2")
    assert not warned("-tp", "1")
    for elsewhere in (["--nnodes", "2"], ["-n", "2"], ["--distributed-executor-backend", "ray"]):
        assert not warned("-tp", "2", *elsewhere), "a rank on each machine"
    for here in (["--nnodes", "1"], ["--distributed-executor-backend", "mp"]):
        assert warned("-tp", "2", *here)
    for value, expected in (("0", True), ("1", False), ("", False)):
        monkeypatch.setenv(cpu.SIMULATED, value)
        assert warned("-tp", "2") == expected
    monkeypatch.delenv(cpu.SIMULATED)
    monkeypatch.setenv(cpu.THREADS_BIND, "nobind")
    assert not warned("-tp", "2")
    monkeypatch.delenv(cpu.THREADS_BIND)
    cpu.MEMORY.write_text("Mems_allowed_list:\t0-1,3\n")
    assert not warned("-tp", "2")
    monkeypatch.setenv(cpu.VISIBLE, "1,2")
    assert warned("-tp", "2"), "node 2 is not allowed"
    monkeypatch.setattr(command, "vllm_version", lambda: "0.32.0")
    assert not warned("-tp", "2"), "GPUs have no such rule"


@pytest.mark.parametrize(
    "switch", [["--enforce-eager"], ["-O0"], ["-O", "0"], ["--optimization_level=0"], ["--enable-lora"]]
)
def test_an_uncompiled_pipeline_of_a_stock_model_is_refused_on_a_cpu(
    switch: list[str], folder: Path, executed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would start, and end at the first request."""
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0+cpu")
    said = refused("serve", folder, "-pp", "2", *switch)
    assert "pipeline_parallel_size is 2 and the model is not compiled" in " ".join(said.split())
    assert executed == []
    assert serve_command(folder, ["-pp", "2"])
    assert serve_command(folder, switch)
    assert serve_command(folder, ["-pp", "2", "-O3", "--no-enforce-eager"])
    for off in (["-cc.mode=NONE"], ["--compilation.mode", "0"]):
        assert "is not compiled" in " ".join(refused("serve", folder, "-pp", "2", *off).split())
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert "is not compiled" in " ".join(refused("serve", folder, "-pp", "2").split())
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    if "0" in switch[-1]:
        assert serve_command(folder, ["-pp", "2", *switch, "-cc.mode=3"]), "vLLM goes by the mode"
        assert serve_command(folder, ["-pp", "2", *switch, "-cc", '{"mode": 3}'])
    replaced = ["-cc", '{"mode": 3}', "-cc.backend=inductor"]  # the JSON whole, as vLLM has it
    assert "is not compiled" in " ".join(refused("serve", folder, "-pp", "2", *switch, *replaced).split())
    for more in ("-cc.backend=inductor", "-cc.mode=none", '-cc={"mode": 0}', "-cc.mode=null"):
        assert "is not compiled" in " ".join(refused("serve", folder, "-pp", "2", *switch, more).split())
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_version", lambda: "0.32.0")
    assert serve_command(folder, ["-pp", "2", *switch]), "a GPU runs it"


def test_the_folder_is_called_as_it_was_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These words are the model's name in vLLM's API, as with plain `vllm serve`."""
    monkeypatch.chdir(folder.parent)
    for given in (f"{folder.name}/", f"./{folder.name}", str(folder)):
        assert serve_command(given)[-1] == given


def test_python_code_of_a_hub_id_is_downloaded_where_it_may_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(_: str, *, allow_patterns: list[str], **__: object) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    serve_command("owner/name")
    serve_command("owner/name", ["--trust-remote-code"])
    assert ["*.py" in patterns for patterns in asked] == [False, True]
    assert all("*.tiktoken" in patterns for patterns in asked)


def test_a_rank_without_attention_is_refused_before_the_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    model, _ = load_model(folder)
    plan = family_for(model).plan(model.config)
    first = range(model.config.num_hidden_layers // 2)
    for layer in first:
        plan = plan.with_layer(layer, query_heads=[], kv_heads=[])
    compact_(model, plan)
    export(model, tmp_path / "late", plan=plan)
    assert "vLLM serves no rank without attention" in " ".join(refused("serve", tmp_path / "late", "-pp", "2").split())
    assert serve_command(tmp_path / "late")
    layers = model.config.num_hidden_layers
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", f"{len(first) + 1},{layers - len(first) - 1}")
    assert serve_command(tmp_path / "late", ["-pp", "2"])
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1,1,1,1,1,1")
    assert serve_command(tmp_path / "late", ["-pp", "2"]), "vLLM says what is wrong with the division"


def test_a_wrong_word_for_verification_is_refused_for_every_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    tiny_model("llama").save_pretrained(tmp_path / "without-record")
    monkeypatch.setenv("PYPRUNE_VERIFY", "false")
    for each in (folder, tmp_path / "without-record"):
        assert "PYPRUNE_VERIFY is 'false'" in refused("serve", each)


def downloads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is downloaded from now on, each (id, revision, folder, token); it is this folder every time."""
    asked: list[tuple[Any, ...]] = []

    def download(name: str, *, revision: Any, cache_dir: Any, token: Any, **_: object) -> str:
        asked.append((name, revision, cache_dir, token))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_a_hub_id_is_served_by_its_name_and_in_its_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = downloads(folder, monkeypatch)
    command = serve_command("owner/name", ["--revision", "v2"])
    assert asked == [("owner/name", "v2", None, None)]
    assert command[-5:] == [str(folder), "--revision", "v2", "--served-model-name", "owner/name"]
    assert "owner/name" not in serve_command("owner/name", ["--served-model-name", "chat"])
    assert asked[1] == ("owner/name", None, None, None)


def test_a_folder_that_is_missing_is_not_looked_for_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's model would be served in its place."""
    asked = downloads(folder, monkeypatch)
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    for what in ("serve", "inspect"):
        assert "'./models/chat' is neither a folder nor a hub id" in " ".join(refused(what, "./models/chat").split())
    with pytest.raises(CheckpointError, match="There is no folder 'models/chat'"):
        serve_command(Path("./models/chat"))
    assert asked == []


@pytest.mark.parametrize(("plugins", "said"), [("other", "VLLM_PLUGINS=other,pyprune"), ("", "VLLM_PLUGINS=pyprune")])
def test_a_list_of_plugins_without_this_one_is_refused_where_it_is_needed(
    plugins: str, said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    export(folder, tmp_path / "pruned", target="pruned")
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert f"Set {said}, or unset it." in " ".join(refused("serve", tmp_path / "pruned").split())
    assert serve_command(folder)[-1] == str(folder), "a stock model needs none"
    monkeypatch.setenv("VLLM_PLUGINS", said.removeprefix("VLLM_PLUGINS="))
    assert serve_command(tmp_path / "pruned")[-1] == str(tmp_path / "pruned")


def test_vllms_own_file_of_options_is_read_where_it_decides(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = downloads(folder, monkeypatch)
    file = tmp_path / "options.yaml"
    file.write_text("revision: v2\nserved_model_name: [chat, other]\ndownload-dir: /models\nenforce-eager: true\n")
    command = serve_command("owner/name", ["--config", str(file), "--hf-token", "secret"])
    assert asked == [("owner/name", "v2", "/models", "secret")]
    assert command[-5:] == [str(folder), "--config", str(file), "--hf-token", "secret"]
    serve_command("owner/name", ["--config", str(file), "--revision", "v3"])
    assert asked[1][1] == "v3", "the command line replaces what the file says"
    file.write_text("tensor-parallel-size: 3\n")
    assert "3 tensor parallel ranks cannot share" in " ".join(refused("serve", folder, "--config", file).split())
    for wrong in ("- a list", "{", "revision: {a: 1}"):
        file.write_text(wrong)
        assert serve_command(folder, ["--config", str(file)]), "vLLM says what is wrong with it"


def adapter(folder: Path, layers: int, **sizes: int) -> Path:
    """As PEFT writes those of q_proj and down_proj of a tiny LLaMA."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama", num_hidden_layers=layers, **sizes)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("layers", "sizes", "reason"),
    [
        (4, {}, None),
        (6, {}, "it has layers up to number 5, and this model has 4, numbered from 0"),
        (4, {"intermediate_size": 80}, r"model\.layers\.\d\.mlp\.down_proj reads 80 channels in it and \d+ here"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_an_adapter_of_another_model_is_refused(
    layers: int, sizes: dict[str, int], reason: str | None, as_json: bool, folder: Path, executed: list[list[str]],
    tmp_path: Path,
) -> None:  # fmt: skip
    path = adapter(tmp_path / "adapter", layers, **sizes)
    value = json.dumps({"name": "own", "path": str(path)}) if as_json else f"own={path}"
    words = ["serve", folder, "--", "--enable-lora", "--lora-modules", value, "--port", "9000"]
    if reason is None:
        assert run(*words).exit_code == 0
        assert len(executed) == 1
        return
    said = refused(*words)
    assert re.search(f"the adapter own in .* was trained on another model: {reason}", " ".join(said.split()))
    assert not executed

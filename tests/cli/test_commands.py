"""What each command writes and prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import annotate_checkpoint, read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cli.base import ERROR_CODE, print_next_commands
from pyprune.cli.bench import model_perplexity
from pyprune.cut.compact import compact_
from pyprune.errors import DataError, OutputError
from pyprune.families import count_parameters, family_for
from pyprune.plan import PrunePlan
from pyprune.run import stages
from pyprune.runtime import device
from tests._support.cli import refused, run, tiny_elder, tiny_prune
from tests._support.compiled import graphs, only_traced
from tests._support.models import tiny_model
from tests._support.plans import axis_plans
from tests._support.text import prose, write_model
from tests._support.tokenizer import tiny_tokenizer


def test_prune_writes_what_it_says(pruned: Path) -> None:
    record = read_pruning_json(pruned, verify_files=True)
    assert record.plan is not None
    assert len(record.plan.removed_layers) == 2
    assert record.provenance["config"]["recover"]["train"]["steps"] == 2
    assert [p.name for p in pruned.parent.iterdir()] == [pruned.name], "nothing is left next to the output"


def test_the_trained_form_reconstructs_and_then_trains_on_text_and_logits(
    pruned: Path, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    report = read_pruning_json(pruned).provenance["report"]
    assert any(part["ridge"] for part in report["reconstruction"]["parts"])
    assert [stage["name"] for stage in report["stages"]] == ["after-0-recover"]
    assert all(step["parts"]["kl"] > 0 for step in report["stages"][0]["history"]), "the dense model was listened to"
    folders = {"trained": pruned, "plain": tmp_path / "plain", "solved": tmp_path / "solved"}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(read_pruning_json(pruned).plan.to_dict()))
    untrained = ["--method", "elder-trained", "--plan", plan, "--set", "stages.after=[]"]
    for name, more in {"plain": ["--set", "cut.reconstruct=none"], "solved": []}.items():
        done = run(*tiny_elder(checkpoint, text, *untrained, *more, "--out", folders[name]))
        assert done.exit_code == 0, done.output
    weights = {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}
    written = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(weights["plain"][written], weights["solved"][written])
    assert not torch.equal(weights["solved"][written], weights["trained"][written])


OTHER_TEXT = [
    "--set", "stages.after=[recover]", "--set", "recovery_data={source: TEXT, samples: 5, sequence_length: 16}"
]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--method", "last"], "method 'last' decides without text, and nothing else of this run reads text"),
        (["--plan", "PLAN"], "the plan decides what is removed, and nothing else of this run reads text"),
        (
            ["--method", "last", *OTHER_TEXT],
            "'last' decides without text, and the text of recovery_data is another one",
        ),
        (["--method", "last", "--set", "verify=true"], None),
        (["--method", "taylor"], None),
    ],
)
def test_text_that_nothing_reads_is_said(
    more: list[str], said: str | None, checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(family_for(tiny_model()).plan(tiny_model().config).drop_layers([1]).to_json())
    more = [part.replace("PLAN", str(plan)).replace("TEXT", str(text)) for part in more]
    given = ["--calibration", text, "--samples", "3", "--sequence-length", "24"]
    done = run("prune", checkpoint, *more, *given, "--dry-run")
    assert done.exit_code == 0, done.output
    printed = " ".join(done.output.split())
    assert ("--samples, --sequence-length would do nothing: " in printed) is (said is not None), printed
    assert said is None or said in printed


@pytest.mark.parametrize("faster", [True, False])
def test_by_default_every_stage_computes_in_the_dtype_that_is_faster_here(
    faster: bool, checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves: dict[str, set[bool]] = {"gates": set(), "recover": set(), "solved": set()}

    def seen(module: torch.nn.Module, inputs: Any) -> None:
        stage = "solved" if not torch.is_grad_enabled() else "gates" if gated[0] else "recover"
        if isinstance(module, torch.nn.Linear):
            halves[stage].add(torch.is_autocast_enabled("cpu"))

    gated = [True]
    recover = stages.recover

    def after(*arguments: Any, **options: Any) -> Any:
        gated[0] = False
        return recover(*arguments, **options)

    monkeypatch.setattr(device, "computes_bfloat16", lambda place: True)
    monkeypatch.setattr(device, "cpu_is_faster_in_bfloat16", lambda: faster)
    monkeypatch.setattr(stages, "recover", after)
    sets = ("elder.gates.first_round_steps=2", "elder.gates.round_steps=1", "elder.gates.batch_size=2",
            "recover.train.steps=2", "recover.train.batch_size=2")  # fmt: skip
    settings = [part for option in sets for part in ("--set", option)]
    hook = torch.nn.modules.module.register_module_forward_pre_hook(seen)
    try:
        done = run("prune", checkpoint, "--method", "elder-trained", "--ratio", "0.5", "--calibration", text,
                   "--samples", "4", "--sequence-length", "16", *settings, "--out", tmp_path / "out")  # fmt: skip
    finally:
        hook.remove()
    assert done.exit_code == 0, done.output
    assert halves["gates"] == halves["recover"] == {faster}
    assert (True in halves["solved"]) is faster
    report = read_pruning_json(tmp_path / "out").provenance["report"]
    named = {report["reconstruction"]["dtype"], report["stages"][0]["dtype"]}
    assert named == {"bfloat16" if faster else "float32"}


@pytest.mark.second
@pytest.mark.filterwarnings("default")  # torch's own, while it traces
def test_an_option_compiles_the_layers_that_are_trained(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    before = graphs()
    with only_traced():
        done = run(*tiny_elder(checkpoint, text, "--set", "recover.train.compile=true", "--out", tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert graphs() > before + 1, "only what tries the compiler"
    assert read_pruning_json(tmp_path / "out").provenance["config"]["recover"]["train"]["compile"] is True


@pytest.mark.second
@pytest.mark.parametrize("method", ["dress", "trsp"])
def test_the_other_papers_methods_reconstruct_by_default_too(
    checkpoint: Path, text: Path, tmp_path: Path, method: str
) -> None:
    done = run(*tiny_prune(method, checkpoint, text, "--out", tmp_path / "out"))
    assert done.exit_code == 0, done.output
    report = read_pruning_json(tmp_path / "out").provenance["report"]
    assert any(part["ridge"] for part in report["reconstruction"]["parts"])
    assert [stage["name"] for stage in report["stages"]] == ["after-0-recover"]


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


@pytest.mark.second
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
    assert data["plan"]["version"] == 2
    assert 0 < data["parameters"] < dense["parameters"]


def test_inspect_shows_widths_by_layer_and_what_was_measured(tmp_path: Path) -> None:
    model = tiny_model("opt")
    plan = axis_plans(family_for(model).plan(model.config))["unequal"]
    compact_(model, plan)
    folder = tmp_path / "model"
    facts = {"method": "by hand", "quality": {"ppl-128 text": 9.5}, "speed": {"prompt speedup": 1.25}, "fit": {"a": 1}}
    save_checkpoint(model, tiny_tokenizer(), folder, plan=plan, provenance=facts)
    rows = dict(re.findall(r"\| ([^|]+?) +\| +([^|]+?) +\|", run("inspect", folder).stdout))
    ffn = [len(layer.ffn) for layer in plan.layers]
    assert rows["ffn_dim"] == f"{min(ffn)}-{max(ffn)}"
    assert (rows["quality: ppl-128 text"], rows["speed: prompt speedup"]) == ("9.50", "1.25")
    data = json.loads(run("inspect", folder, "--json", "-").stdout)
    assert [layer["FFN channels"] for layer in data["layers"] if layer["FFN channels"]] == list(filter(None, ffn))


@pytest.mark.parametrize("name", ["llama", "llama-head-dim", "gemma3", "qwen2-tied", "opt", "mistral"])
def test_inspect_prints_the_figures_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    """Files of other programs hold a tied head twice, and buffers; config.json may leave sizes to its class."""
    folder = write_model(tiny_model(name), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    embedding = next(t for n, t in weights.items() if "embed_tokens" in n)
    weights["lm_head.weight"] = weights.get("lm_head.weight", embedding).clone()
    if name not in ("opt", "gemma3"):
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    fields = type(tiny_model(name).config)()
    usual = [key for key, value in config.items() if getattr(fields, key, value) == value and key != "model_type"]
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in usual}))
    model, _ = load_model(folder)
    data = json.loads(run("inspect", folder, "--json", "-").stdout)
    assert data["parameters"] == count_parameters(model)
    heads = [layer["KV heads"] for layer in data["layers"]]
    assert heads == [family_for(model).sizes(model.config).num_key_value_heads] * 4


def test_lines_are_not_written_into_the_report(pruned: Path, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """The report would take the folder's place, and refuse to, after everything was measured."""
    (tmp_path / "out").mkdir()
    said = refused("bench", pruned, "--against", checkpoint, "--engine", "transformers", "--ppl", text, "--report",
                   tmp_path / "out", "--overwrite", "--jsonl", tmp_path / "out" / "turns.jsonl")  # fmt: skip
    assert "for something else" in " ".join(said.split())


def test_eval_measures_and_annotates(pruned: Path, tmp_path: Path) -> None:
    test_text = tmp_path / "test.txt"
    test_text.write_text("Quite different words, which nobody has trained on. " * 40)
    out = tmp_path / "figures.json"
    result = run("eval", pruned, "--ppl", test_text, "--protocol", "ppl-128", "--json", out, "--annotate")
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert {name: value for name, value in found["conditions"].items() if value is not None} == {"dtype": "float32"}
    figures = found["perplexity"]
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
        (ZeroDivisionError("x" * 9000), 1, "Internal error: ZeroDivisionError"),
        (PermissionError(13, "Permission denied", "/some/file"), ERROR_CODE, "Permission denied: '/some/file'"),
        (MemoryError(), ERROR_CODE, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ERROR_CODE, "not enough memory"),
    ]
    for error, code, said in errors:

        def fails(*_: Any, _error: Exception = error) -> None:
            raise _error

        monkeypatch.setattr("pyprune.serving.checkpoints.read_checkpoint", fails)
        result = run("inspect", checkpoint)
        assert result.exit_code == code
        assert said in result.stderr
        assert ("pyprune env" in result.stderr) == said.startswith("Internal")
        assert "Traceback" not in result.stderr
        assert len(result.stderr) < 600


def test_sizes_per_layer_of_another_program_do_not_load_without_pyprune(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    row = re.compile(r"\| loads without pyprune \| +(\w+) ")
    assert row.findall(run("inspect", folder).stdout) == ["yes"]
    config = json.loads((folder / "config.json").read_text())
    config["per_layer_config"] = {"1": {"num_attention_heads": 3}}
    (folder / "config.json").write_text(json.dumps(config))
    assert row.findall(run("inspect", folder).stdout) == ["no"]


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
    assert ("dtype bfloat16, max_tokens 256" in result.stdout) is (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ppl", "t.txt", "--limit", "3", "--batch-size", "2"], "--limit, --batch-size do nothing without --tasks"),
        (["--tasks", "piqa", "--max-tokens", "9", "--split", "x"], "--max-tokens, --split do nothing without --ppl"),
        (["--tasks", "piqa", "--protocol", "ppl-128"], "--protocol does nothing without --ppl"),
    ],
)
def test_eval_refuses_options_that_nothing_reads(checkpoint: Path, options: list[str], words: str) -> None:
    assert words in " ".join(refused("eval", checkpoint, *options).split())


def test_bench_refuses_options_that_nothing_reads(checkpoint: Path) -> None:
    given = ["bench", checkpoint, "--against", checkpoint, "--engine", "transformers"]
    assert "--overwrite does nothing without --report" in " ".join(refused(*given, "--overwrite").split())
    said = " ".join(refused(*given, "--protocol", "ppl-128", "--field", "body").split())
    assert "--protocol, --field do nothing without --ppl" in said


def test_bench_refuses_the_training_text_for_llama_cpp_too(
    pruned: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.serving.gguf.perplexity.gguf_perplexity", lambda *_, **__: pytest.fail("measured"))
    folder, source = tmp_path / "longer", tmp_path / "again"
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), source, plan=None, provenance={})
    assert run(*tiny_elder(source, text, "--sequence-length", "128", "--out", folder)).exit_code == 0
    with pytest.raises(DataError, match="is not a test text"):
        model_perplexity(str(folder), str(tmp_path / "file.gguf"), str(text), "ppl-128", split=None, field=None)


def test_a_part_of_a_text_is_named_in_the_record(pruned: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(prose(900, 44))
    given = ["eval", pruned, "--ppl", other, "--protocol", "ppl-128", "--max-tokens", "512", "--annotate"]
    assert run(*given).exit_code == 0
    assert f"ppl-128 {other} (first 512 tokens)" in read_pruning_json(pruned).provenance["quality"]


def test_figures_do_not_replace_what_a_command_reads(checkpoint: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    said = refused("predict", checkpoint, "--profile", plan, "--json", plan)
    assert "but the command uses" in " ".join(said.split())


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


@pytest.mark.process
def test_bench_prints_the_papers_columns(
    pruned: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    options = ["--engine", "transformers", "--batch-size", "2", "--new-tokens", "2", "--prompt-tokens", "8"]
    out, samples = tmp_path / "speed.json", tmp_path / "samples.jsonl"
    result = run("bench", pruned, "--against", checkpoint, *options, "--repeats", "1", "--max-repeats", "1",
                 "--json", out, "--jsonl", samples)  # fmt: skip
    assert result.exit_code == 0, result.output
    for column in ("PR", "PPL", "Tokens/s", "TI", "Latency (ms)", "Speedup", "Parameters", "Bytes"):
        assert column in result.stdout
    assert json.loads(out.read_text())["summary"]["pruned"]["speedup"] > 0
    assert len(samples.read_text().splitlines()) == 4
    slow = "this CPU has no bfloat16 arithmetic" in result.stderr  # bfloat16 is the command's default
    assert slow == (not torch.cuda.is_available())


@pytest.mark.process
def test_env_prints_versions_and_backends() -> None:
    data = json.loads(run("env", "--json", "-").stdout)
    assert data["backends"]["python"] == "available"
    assert isinstance(data["vllm"], bool)
    text = run("env").stdout
    assert "torch" in text
    assert "ops: cpp" in text


def test_prune_names_the_layers_whose_widths_run_slowly_and_how_to_have_others(tmp_path: Path) -> None:
    dense = write_model(tiny_model("llama", intermediate_size=256), tmp_path / "dense")
    only_ffn = ("prune", dense, "--method", "magnitude", "--ratio", "0.3", "--set", "score.axes=[ffn]")
    said = run(*only_ffn, "--out", tmp_path / "cut")
    assert said.exit_code == 0, said.output
    words = " ".join(said.stderr.split())
    assert "FFN channels are not a multiple of 64. For steps that run well: --set score.ffn_multiple=64." in words
    again = run(*only_ffn, "--set", "score.ffn_multiple=64", "--out", tmp_path / "fast")
    assert again.exit_code == 0, again.output
    assert "slower" not in again.stderr
    odd = run(*only_ffn, "--set", "score.ffn=100", "--set", "score.ranking=local", "--out", tmp_path / "counted")
    assert odd.exit_code == 0, odd.output
    assert "slower than they could be" in " ".join(odd.stderr.split())
    assert "For steps that run well" not in odd.stderr, "a count was given, which steps would only contradict"
    plan = read_pruning_json(tmp_path / "fast").plan
    assert plan is not None
    assert {len(layer.ffn) % 64 for layer in plan.layers} == {0}
    assert any(len(layer.ffn) < 256 for layer in plan.layers)
    channels = ("--method", "magnitude", "--set", "score.axes=[hidden]", "--ratio", "0.25")
    hidden = run("prune", dense, *channels, "--out", tmp_path / "hidden")
    assert hidden.exit_code == 0, hidden.output
    assert "For steps that run well: --set hidden_multiple=64." in " ".join(hidden.stderr.split())
    replayed = run("prune", dense, "--plan", tmp_path / "cut", "--out", tmp_path / "replayed")
    assert "slower than they could be" in " ".join(replayed.stderr.split())
    assert "For steps that run well" not in replayed.stderr


def test_export_names_the_layers_whose_widths_run_slowly(checkpoint: Path, tmp_path: Path) -> None:
    dense = run("export", checkpoint, "--out", tmp_path / "dense")
    assert "slower" not in dense.stderr
    cut = run("prune", checkpoint, "--method", "magnitude", "--ratio", "0.3", "--out", tmp_path / "cut")
    assert cut.exit_code == 0, cut.output
    plan = read_pruning_json(tmp_path / "cut").plan
    assert plan is not None
    index, layer = next((i, x) for i, x in zip(plan.kept_layers, plan.layers, strict=True) if len(x.ffn) % 64)
    said = run("export", tmp_path / "cut", "--out", tmp_path / "served", "--dtype", "bfloat16").stderr
    words = " ".join(said.split())
    assert "slower than they could be in bfloat16" in words
    assert f"{len(layer.ffn)} FFN channels are not a multiple of 64" in words
    assert str(index) in words


@pytest.mark.parametrize(
    ("model_type", "served"),
    [("pruned_llama", True), ("llama", True), ("pruned_smollm3", True), ("pruned_gemma2", False), ("bamba", False)],
)
def test_serving_is_advised_where_vllm_has_a_class(
    model_type: str, served: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    print_next_commands(tmp_path)
    printed = capsys.readouterr().out
    assert f"pyprune eval {tmp_path}" in printed
    assert (f"pyprune serve {tmp_path}" in printed) == served

"""GGUF in: the model is the one that the file's metadata describes, or the file is refused by a key's name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pyprune.checkpoint import gguf_config
from pyprune.checkpoint.load import load_model
from pyprune.errors import CheckpointError, UnsupportedModelError
from tests._support.gguf import write_gguf, write_model_as_gguf
from tests._support.llama_cpp import values_of
from tests._support.models import tiny_model
from tests.serving.gguf.test_gguf import CASES

gguf = pytest.importorskip("gguf")

THETA = 50_000.0


@pytest.fixture(autouse=True)
def _without_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some releases of Transformers cannot read the tiny ones that are written here, of which nothing is asked."""
    monkeypatch.setattr("pyprune.checkpoint.load.load_tokenizer", lambda *_, **__: None)


LONG, SHORT = [1 + i / 2 for i in range(4)], [1 + i / 10 for i in range(4)]
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": THETA, "long_factor": LONG, "short_factor": SHORT,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SCALED = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
ROPE_TENSORS = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, **values}}


def same_model(model: PreTrainedModel, folder: Path) -> float:
    """Relative error of the logits of what load_model makes of x.gguf."""
    ids = torch.randint(3, 100, (1, 90), generator=torch.Generator().manual_seed(1))
    loaded, _ = load_model(folder, gguf_file="x.gguf")
    with torch.no_grad():
        wanted, found = model(ids).logits, loaded(ids).logits
    return float((wanted - found).norm() / wanted.norm())


FOREIGN: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # tiny model, changes of its configuration, metadata, tensors
    "starcoder2": ("starcoder2", rope(), {}, {}),
    "qwen2": ("qwen2", rope(), {}, {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}, SCALED, {}),
    "qwen2 yarn, attention": (
        "qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.5, "beta_fast": 20.0}},
        {**SCALED, "rope.scaling.attn_factor": 1.5 / (1 + 0.1 * math.log(4)), "rope.scaling.yarn_beta_fast": 20.0}, {},
    ),
    "qwen3 linear": (
        "qwen3", rope(rope_type="linear", factor=8.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {},
    ),
    "qwen3 linear, no type": ("qwen3", rope(rope_type="linear", factor=8.0), {"rope.scaling.factor": 8.0}, {}),
    "qwen3 linear, early name": ("qwen3", rope(rope_type="linear", factor=8.0), {"rope.scale_linear": 8.0}, {}),
    "no scaling": ("qwen3", rope(), {"rope.scaling.type": "none", "rope.scaling.factor": 8.0}, {}),
    "phi3": ("phi3", rope(), {}, {}),
    "phi3 window": ("phi3", {"sliding_window": 30, **rope()}, {"attention.sliding_window": 30}, {}),
    "phi3 half": ("phi3", rope(partial_rotary_factor=0.5), {"rope.dimension_count": 4}, {}),
    "phi3 longrope": (
        "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        {"rope.scaling.original_context_length": 64, "rope.scaling.type": "longrope",
         "rope.scaling.attn_factor": math.sqrt(1 + math.log(8) / math.log(64))}, ROPE_TENSORS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_metadata_becomes_the_model_that_it_describes(name: str, tmp_path: Path) -> None:
    model_type, values, keys, tensors = FOREIGN[name]
    model = tiny_model(model_type, **values)
    layer_norm = model_type == "starcoder2"
    norm = "attention.layer_norm_epsilon" if layer_norm else "attention.layer_norm_rms_epsilon"
    eps = model.config.norm_epsilon if layer_norm else model.config.rms_norm_eps
    keys = {"rope.freq_base": THETA, norm: eps, **keys}
    if model_type == "qwen3":
        keys |= {"attention.key_length": model.config.head_dim, "attention.value_length": model.config.head_dim}
    write_model_as_gguf(model, tmp_path / "x.gguf", model_type, keys, tensors)
    assert same_model(model, tmp_path) < 1e-5


OWN = [name for name, case in CASES.items() if case.architecture in ("llama", "qwen2", "qwen3", "gemma3")]
BIASED = ("biases", "qwen2, cut alike")


@pytest.mark.parametrize("name", [name for name in OWN if name not in BIASED])
def test_what_pyprune_writes_it_reads(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, report = case.write(tmp_path)
    report.path.rename(tmp_path / "x.gguf")
    assert same_model(model, tmp_path) < 1e-5
    config: Any = load_model(tmp_path, gguf_file="x.gguf")[0].config
    assert config.max_position_embeddings == model.config.max_position_embeddings


@pytest.mark.parametrize("name", ["linear positions", "gemma3, linear positions", "gemma3"])
def test_without_this_reading_they_would_be_other_models(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, report = CASES[name].write(tmp_path)
    report.path.rename(tmp_path / "x.gguf")
    monkeypatch.setattr("pyprune.checkpoint.configuration.complete_config", lambda config, header: None)
    assert same_model(model, tmp_path) > 1e-3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.key_length", 6), ("attention.scale", 0.5), ("attention.clamp_kqv", 3.0), ("expert_count", 4),
        ("rope.dimension_count", 4), ("rope.scaling.type", "other"), ("rope.scaling.yarn_ext_factor", 0.5),
        ("expert_used_count", 2), ("final_logit_softcapping", 30.0), ("logit_scale", 2.0),
        ("attention.q_lora_rank", 8), ("feed_forward_length", [40, 40, 40, 20]),
    ],
)  # fmt: skip
def test_a_key_that_the_model_cannot_have_is_refused_by_its_name(key: str, value: Any, tmp_path: Path) -> None:
    model = tiny_model("starcoder2")
    write_model_as_gguf(model, tmp_path / "x.gguf", "starcoder2", {"attention.layer_norm_epsilon": 1e-5, key: value})
    with pytest.raises(CheckpointError, match=re.escape(f"starcoder2.{key} =")) as caught:
        load_model(tmp_path, gguf_file="x.gguf")
    assert len(str(caught.value).splitlines()) == 1


def test_keys_that_nobody_knows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"attention.layer_norm_epsilon": 1e-5, "brand.new": 1, ":somebody.made": "x", ":general.license": "mit"}
    write_model_as_gguf(tiny_model("starcoder2"), tmp_path / "x.gguf", "starcoder2", keys)
    load_model(tmp_path, gguf_file="x.gguf")
    said = capsys.readouterr().err
    assert "'somebody.made', 'starcoder2.brand.new'" in said
    assert "license" not in said


def test_frequencies_that_no_scaling_gives_are_refused(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf", extra=["rope_freqs.weight"])  # random ones
    with pytest.raises(CheckpointError, match="no scaling of LLaMA 3 gives"):
        load_model(gguf_folder, gguf_file="x.gguf")


@pytest.mark.parametrize("name", ["phi", "granite", "qwen3, unequal", "unequal"])
def test_an_architecture_that_is_not_read_is_no_damage(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.write(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"architecture '{case.architecture}', which is not read from GGUF"):
        load_model(tmp_path, gguf_file="model.gguf")


def known_to_llama_cpp() -> set[str]:
    """Keys of architectures, read off the table in llama.cpp's library; what is not in it, it leaves out in silence."""
    llama = pytest.importorskip("xllamacpp")
    (library,) = Path(llama.__file__).parent.glob("*.so")
    return {key.decode() for key in re.findall(rb"%s\.([a-z_.0-9]+)", library.read_bytes())}


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_knows_every_key_that_is_written(name: str, tmp_path: Path) -> None:
    _, report = CASES[name].write(tmp_path)
    start = f"{report.architecture}."
    written = {key.removeprefix(start) for key in values_of(report) if key.startswith(start)}
    assert len(written) > 8
    assert written - known_to_llama_cpp() == set()


def test_keys_that_are_read_are_llama_cpp_s() -> None:
    """A key by a name that llama.cpp does not have would never be compared."""
    read = {*gguf_config.COMPARED, *gguf_config.WITHOUT_EFFECT}
    assert read - known_to_llama_cpp() == set()
    assert len(set(gguf_config.llama_cpp_keys())) > 50

"""The command prunes a checkpoint several times larger than the memory that it may have for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from pyprune import pipeline
from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.shards import TensorFiles
from pyprune.plan import PrunePlan
from pyprune.recipe import build_config
from pyprune.streamed import NOTE
from tests._support.text import write_text
from tests._support.tokenizer import tiny_tokenizer

SPARE = 160 << 20
"""Bytes of data that the command may have beyond what its imports take."""
SPARE_GRADIENTS = 2 * SPARE
"""The same for a run that takes gradients: of a layer, and in float64 of one of its matrices."""
LAYERS, HIDDEN, FFN, VOCAB, HEADS = 16, 1024, 4096, 2048, 16
TWIN = 2
"""Layers of the small model whose weights are those of the large one's first layers."""
COUNTS = ("score.ffn=3072", "score.heads=12")
"""What stays in every layer: the choice in a layer then depends on that layer alone."""

CHILD = """
import resource, sys
import transformers.models.llama.modeling_llama
import pyprune.pipeline, pyprune.recipe
from pyprune.cli.app import main

(held,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData:")]
limit = int(held) * 1024 + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
sys.argv[1:2] = []
main()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits what mmap gives by RLIMIT_DATA"),
]


def layer_tensors(index: int) -> dict[str, torch.Tensor]:
    """Random weights of a layer, bfloat16, seeded by its index."""
    generator = torch.Generator().manual_seed(index)
    shapes = dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), (HIDDEN, HIDDEN))
    shapes |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name, shape in shapes.items()
    }
    tensors |= {
        name: torch.ones(HIDDEN, dtype=torch.bfloat16) for name in ("input_layernorm", "post_attention_layernorm")
    }
    return {f"model.layers.{index}.{name}.weight": tensor for name, tensor in tensors.items()}


def outer_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000)
    tensors = {
        name: torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    return tensors | {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}


def write_sharded(folder: Path, layers: int) -> Path:
    """A checkpoint as the hub has them, a shard for each layer, written without ever holding the model."""
    folder.mkdir()
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, tie_word_embeddings=False, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)

    def shards() -> Iterator[dict[str, torch.Tensor]]:
        yield outer_tensors()
        for index in range(layers):
            yield layer_tensors(index)

    where: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(shards(), 1):
        name = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def limited(*arguments: str | Path, spare: int = SPARE) -> subprocess.CompletedProcess[str]:
    """Run the command line with ``spare`` bytes for everything that is not imported."""
    command = [sys.executable, "-c", CHILD, str(spare), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sharded(tmp_path_factory.mktemp("large") / "dense", LAYERS)
    tiny_tokenizer().save_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size > 3 * SPARE
    assert size > 1.5 * SPARE_GRADIENTS
    return folder


def test_a_checkpoint_larger_than_memory_is_decided_on_and_cut(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = limited(
        "prune", large, "--method", "magnitude", "--set", COUNTS[0], "--set", COUNTS[1], "--out", tmp_path / "out"
    )
    assert result.returncode == 0, result.stderr
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    assert NOTE in record.provenance["report"]["notes"]

    twin = write_sharded(tmp_path / "twin", TWIN)
    monkeypatch.setattr(pipeline, "why_loaded", lambda *_, **__: "In memory.")
    config = build_config(options={"method": "magnitude"}, settings=COUNTS)
    small = pipeline.prune(twin, config, out=tmp_path / "small")
    assert record.plan is not None
    assert record.plan.layers[:TWIN] == small.plan.layers

    written = TensorFiles(tmp_path / "out")
    expected = load_file(tmp_path / "small" / "model.safetensors")
    assert len(written.names()) == len(expected) + (LAYERS - TWIN) * 9
    for name, tensor in expected.items():
        assert torch.equal(written.read(name).view(torch.int16), tensor.view(torch.int16)), name
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2, "shards in, shards out"
    model, _ = load_model(tmp_path / "out", dtype="bfloat16")
    assert model.config.num_hidden_layers == LAYERS
    with torch.no_grad():
        assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


def test_candidates_are_measured_with_a_layer_in_memory(large: Path, tmp_path: Path) -> None:
    """SLEB needs the loss without each of them."""
    text = write_text(tmp_path / "text.txt")
    sizes = ["--calibration", text, "--samples", "2", "--sequence-length", "16"]
    result = limited("prune", large, "--method", "sleb", "--ratio", "0.07", *sizes, "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    assert NOTE in record.provenance["report"]["notes"]
    assert record.plan is not None
    assert len(record.plan.layers) == LAYERS - 1


def test_gradients_of_a_checkpoint_larger_than_memory_are_taken(large: Path, tmp_path: Path) -> None:
    sizes = ["--calibration", write_text(tmp_path / "text.txt"), "--samples", "4", "--sequence-length", "64"]
    arguments = ["prune", large, "--method", "taylor", *sizes, "--set", "dtype=bfloat16", "--set", "score.axes=[ffn]"]
    result = limited(*arguments, "--dry-run", spare=SPARE_GRADIENTS)
    assert result.returncode == 0, result.stderr
    plan = PrunePlan.from_json(result.stdout)
    assert all(0 < len(layer.ffn) < FFN for layer in plan.layers)


def test_the_limit_is_one(large: Path, tmp_path: Path) -> None:
    """With the same memory the run that loads the model cannot be done; it says so and leaves nothing."""
    arguments = ["prune", large, "--method", "magnitude", "--set", COUNTS[0], "--set", COUNTS[1], "--trust-remote-code"]
    result = limited(*arguments, "--out", tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert "memory" in result.stderr
    assert "should not" not in result.stderr
    assert not (tmp_path / "out").exists()

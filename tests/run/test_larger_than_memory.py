"""The command prunes a checkpoint three times larger than all the memory that it may have, libraries included."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.shards import TensorFiles
from pyprune.plan import PrunePlan, Sizes
from pyprune.run import prune as pipeline
from pyprune.run.recipe import build_config
from pyprune.run.streamed import NOTE
from tests._support.text import write_text
from tests._support.tokenizer import tiny_tokenizer

LIMIT = 832 << 20
"""Bytes of data that the command may have in all: of these its imports take 440 MiB."""
TIMES = 3
"""How many times larger than that the checkpoint is."""
LAYERS, HIDDEN, FFN, VOCAB, HEADS = 78, 1024, 4096, 2048, 16
DISTINCT = 4
"""Layers whose weights are drawn; those that follow have the same in turn, which takes a tenth of the time."""
TWIN = 2
"""Layers of the small model whose weights are those of the large one's first layers."""
EXPERTS, EXPERT_WIDTH, MIXTURES = 16, 544, 43
"""Experts of a layer of the mixture, their width, and its layers; half of a layer's are solved by their tokens."""
COUNTS = ("score.ffn=1024", "score.heads=4")
"""What stays in every layer, little to write: the choice in a layer then depends on that layer alone."""
GONE, NARROWED, NARROW = range(16, 74), (15, 74, 75, 76, 77), 256
"""Layers that the plan from a file drops; those that it leaves so many FFN channels.

A reconstruction solves the writers from the first change on, each a system of as many unknowns as it has inputs; so
these are few and narrow.
"""

CHILD = """
import resource, sys

limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
sys.argv[1:2] = []
from pyprune.cli.app import main

main()
"""

pytestmark = [
    pytest.mark.second,
    pytest.mark.timeout(600),  # half a minute each, but two gigabytes are read and written on a disk that others use
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits what mmap gives by RLIMIT_DATA"),
    pytest.mark.xdist_group("larger than memory"),  # one checkpoint for all of them
]


@cache
def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Random weights of a layer, bfloat16, by their names inside it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), (HIDDEN, HIDDEN))
    shapes |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name, shape in shapes.items()
    }
    return tensors | {
        name: torch.ones(HIDDEN, dtype=torch.bfloat16) for name in ("input_layernorm", "post_attention_layernorm")
    }


def layer_tensors(index: int) -> dict[str, torch.Tensor]:
    """Weights of a layer by their names in the model."""
    return {f"model.layers.{index}.{name}.weight": tensor for name, tensor in drawn(index % DISTINCT).items()}


def outer_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000)
    tensors = {
        name: torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    return tensors | {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}


def write_sharded(folder: Path, layers: int) -> Path:
    """A checkpoint as the hub has them, a shard for each layer, written without ever holding the model."""
    config = LlamaConfig(intermediate_size=FFN, architectures=["LlamaForCausalLM"], **sizes(layers))
    return write_shards(folder, config, [partial(layer_tensors, index) for index in range(layers)])


def sizes(layers: int) -> dict[str, Any]:
    """Values of a configuration."""
    return {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def write_shards(
    folder: Path, config: PreTrainedConfig, layers: Sequence[Callable[[], dict[str, torch.Tensor]]]
) -> Path:
    """Write the embeddings, the head and each layer to a shard of their own."""
    folder.mkdir()
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    where: dict[str, str] = {}
    size = 0
    for number, make in enumerate((outer_tensors, *layers), 1):
        tensors = make()
        name = f"model-{number:05d}-of-{len(layers) + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def limited(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that may have :data:`LIMIT` bytes of data from its first line on."""
    command = [sys.executable, "-c", CHILD, str(LIMIT), *map(str, arguments)]
    # The stack of every further thread counts as data.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Kernels compiled for every number of tokens that an expert reads; by default up to 1,024 of them, 150 MB.
    environment |= {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    return subprocess.run(command, capture_output=True, text=True, timeout=560, check=False, env=environment)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoint; deleted afterwards, because pytest keeps the folders of three sessions."""
    folder = write_sharded(tmp_path_factory.mktemp("large") / "dense", LAYERS)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > TIMES * LIMIT
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Where a run writes a checkpoint nearly as large."""
    yield tmp_path / "out"
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_a_checkpoint_larger_than_memory_is_decided_on_and_cut(
    large: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = limited("prune", large, "--method", "magnitude", "--set", COUNTS[0], "--set", COUNTS[1], "--out", out)
    assert result.returncode == 0, result.stderr
    record = read_pruning_json(out, verify_files=True)
    assert NOTE in record.provenance["report"]["notes"]

    twin = write_sharded(tmp_path / "twin", TWIN)
    monkeypatch.setattr(pipeline, "loading_reason", lambda *_, **__: "In memory.")
    config = build_config(options={"method": "magnitude"}, settings=COUNTS)
    small = pipeline.prune_checkpoint(twin, config, out=tmp_path / "small")
    assert record.plan is not None
    assert record.plan.layers[:TWIN] == small.plan.layers

    written = TensorFiles(out)
    expected = load_file(tmp_path / "small" / "model.safetensors")
    assert len(written.names()) == len(expected) + (LAYERS - TWIN) * 9
    for name, tensor in expected.items():
        assert torch.equal(written.read(name).view(torch.int16), tensor.view(torch.int16)), name
    assert len(list(out.glob("*.safetensors"))) > 2, "shards in, shards out"
    model, _ = load_model(out, dtype="bfloat16")
    assert model.config.num_hidden_layers == LAYERS
    with torch.no_grad():
        assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


def test_a_plan_is_applied_and_reconstructed_with_two_layers_in_memory(large: Path, tmp_path: Path, out: Path) -> None:
    """Every tensor is the dense one's kept part, but for those of the systems that were solved; verified as well."""
    plan = planned()
    (tmp_path / "plan.json").write_text(plan.to_json())
    sizes = ["--calibration", write_text(tmp_path / "text.txt"), "--samples", "8", "--sequence-length", "32"]
    options = ["--set", "cut.reconstruct=least_squares", "--set", "verify=true"]
    result = limited("prune", large, "--plan", tmp_path / "plan.json", *options, *sizes, "--out", out)
    assert result.returncode == 0, result.stderr
    record = read_pruning_json(out, verify_files=True)
    assert record.plan == plan
    assert NOTE in record.provenance["report"]["notes"]
    verified = record.provenance["report"]["verified"]
    assert verified["compacted_perplexity"] == pytest.approx(verified["masked_perplexity"], rel=1e-2)

    parts = [part for part in record.provenance["report"]["reconstruction"]["parts"] if part["ridge"] is not None]
    assert parts
    assert all(part["after"] < part["before"] for part in parts)
    writers = {"attention": "self_attn.o_proj", "mlp": "mlp.down_proj"}
    solved = {(part["layer"], writers[block]) for part in parts for block in part["blocks"]}
    assert (GONE[0] - 1, "mlp.down_proj") in solved, "it takes over what the layers behind it wrote"
    written = TensorFiles(out)
    for position, layer in enumerate(plan.layers):
        for name, dense in drawn(layer.index % DISTINCT).items():
            got = written.read(f"model.layers.{position}.{name}.weight")
            cut = kept_part(name, dense, NARROW if layer.index in NARROWED else FFN)
            assert got.shape == cut.shape
            assert got.isfinite().all()
            assert torch.equal(got, cut) == ((layer.index, name) not in solved), (layer.index, name)
    assert len(written.names()) == (LAYERS - len(GONE)) * 9 + 3


def planned() -> PrunePlan:
    """The plan by :data:`GONE` and :data:`NARROWED`."""
    plan = PrunePlan.identity("llama", Sizes.decoder(LAYERS, HIDDEN, HEADS, HEADS, HIDDEN // HEADS, FFN, VOCAB))
    for layer in NARROWED:
        plan = plan.with_layer(layer, ffn=range(NARROW))
    return plan.drop_layers(GONE)


def kept_part(name: str, dense: torch.Tensor, width: int) -> torch.Tensor:
    """What a cut to the first FFN channels leaves of a tensor of a layer."""
    if name == "mlp.down_proj":
        return dense[:, :width]
    return dense[:width] if name.startswith("mlp.") else dense


def test_candidates_are_measured_with_a_layer_in_memory(large: Path, tmp_path: Path) -> None:
    """SLEB needs the loss without each of them; eight, because each is a pass through all layers behind it."""
    sizes = ["--calibration", write_text(tmp_path / "text.txt"), "--samples", "2", "--sequence-length", "16"]
    candidates = ["--ratio", "0.02", "--set", f"sleb.keep_first={LAYERS - 9}"]
    result = limited("prune", large, "--method", "sleb", *candidates, *sizes, "--dry-run")
    assert result.returncode == 0, result.stderr
    (gone,) = PrunePlan.from_json(result.stdout).removed_layers
    assert LAYERS - 9 <= gone < LAYERS - 1


def test_gradients_of_a_checkpoint_larger_than_memory_are_taken(large: Path, tmp_path: Path) -> None:
    """The displacements of MoreauPruner alone are larger than memory; a step, because it writes them all."""
    first = LAYERS - 24
    assert (LAYERS - first) * 3 * FFN * HIDDEN * 4 > LIMIT
    plan = decided(large, tmp_path, "moreau", "score.axes=[ffn]", f"score.first_layer={first}", "moreau.steps=1")
    assert all(0 < len(layer.ffn) < FFN for layer in plan.layers if layer.index >= first)
    assert all(len(layer.ffn) == FFN for layer in plan.layers if layer.index < first)


def test_hidden_channels_of_a_checkpoint_larger_than_memory_are_scored_in_rounds(large: Path, tmp_path: Path) -> None:
    """By gradients of every tensor, the embeddings' with them; the second round reads the masked model."""
    plan = decided(large, tmp_path, "taylor", "score.axes=[hidden]", "score.iterations=2")
    assert 0 < len(plan.removed_hidden) < HIDDEN
    assert all(len(layer.ffn) == FFN for layer in plan.layers)


def decided(large: Path, folder: Path, method: str, *settings: str) -> PrunePlan:
    """The plan of a dry run on two sequences of 32 tokens."""
    sizes = ["--calibration", write_text(folder / "text.txt"), "--samples", "2", "--sequence-length", "32"]
    options = [word for setting in ("dtype=bfloat16", *settings) for word in ("--set", setting)]
    result = limited("prune", large, "--method", method, *sizes, *options, "--dry-run")
    assert result.returncode == 0, result.stderr
    return PrunePlan.from_json(result.stdout)


def test_layers_of_a_checkpoint_larger_than_memory_are_merged(large: Path, tmp_path: Path) -> None:
    """Half of the layers in one merge, which is the only one that may be tried."""
    sizes = ["--calibration", write_text(tmp_path / "text.txt"), "--samples", "2", "--sequence-length", "16"]
    half = LAYERS // 2
    one = ["--set", "dtype=bfloat16", "--set", f"laco.merge={half + 1}", "--set", f"laco.lowest={half - 2}"]
    result = limited("prune", large, "--method", "laco", "--ratio", "0.5", *one, *sizes, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert len(PrunePlan.from_json(result.stdout).removed_layers) == half


def expert_tensors(index: int) -> dict[str, torch.Tensor]:
    """Weights of a layer of the mixture; its experts are parts of the dense layers'."""
    dense = drawn(index % DISTINCT)
    tensors = {name: tensor for name, tensor in dense.items() if not name.startswith("mlp.")}
    norm = torch.ones(HIDDEN // HEADS, dtype=torch.bfloat16)
    tensors |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm.clone()}
    tensors["mlp.gate"] = drawn(index % DISTINCT + 1)["mlp.up_proj"][:EXPERTS].clone()
    parts = FFN // EXPERT_WIDTH
    for expert in range(EXPERTS):
        layer = drawn((index + expert // parts) % DISTINCT)
        for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            part = layer[f"mlp.{name}"].split(EXPERT_WIDTH, axis)[expert % parts]
            tensors[f"mlp.experts.{expert}.{name}"] = part.clone()
    return {f"model.layers.{index}.{name}.weight": tensor for name, tensor in tensors.items()}


def test_a_mixture_larger_than_memory_loses_experts_and_is_reconstructed(tmp_path: Path, out: Path) -> None:
    """REAP reads text through all layers, and the experts that stay take over, with two layers in memory."""
    config = Qwen3MoeConfig(
        moe_intermediate_size=EXPERT_WIDTH, num_experts=EXPERTS, num_experts_per_tok=4, head_dim=HIDDEN // HEADS,
        norm_topk_prob=True, architectures=["Qwen3MoeForCausalLM"], **sizes(MIXTURES),
    )  # fmt: skip
    dense = write_shards(tmp_path / "dense", config, [partial(expert_tensors, index) for index in range(MIXTURES)])
    assert sum(path.stat().st_size for path in dense.glob("*.safetensors")) > TIMES * LIMIT
    short = write_text(tmp_path / "text.txt", words=60)  # no more than it reads, or rare experts would have it read on
    text = ["--calibration", short, "--samples", "8", "--sequence-length", "32"]
    result = limited("prune", dense, "--method", "reap", "--ratio", "0.5", *text, "--out", out)
    shutil.rmtree(dense)
    assert result.returncode == 0, result.stderr
    record = read_pruning_json(out, verify_files=True)
    assert record.plan is not None
    assert {len(layer.units("experts")) for layer in record.plan.layers} == {EXPERTS // 2}
    parts = [part for part in record.provenance["report"]["reconstruction"]["parts"] if part["ridge"] is not None]
    assert parts
    assert all(part["after"] < part["before"] for part in parts)


def test_the_limit_is_one(large: Path, out: Path) -> None:
    """With the same memory the run that loads the model cannot be done; it says so and leaves nothing."""
    arguments = ["prune", large, "--method", "magnitude", "--set", COUNTS[0], "--set", COUNTS[1], "--trust-remote-code"]
    result = limited(*arguments, "--out", out)
    assert result.returncode == 2, result.stderr
    assert "memory" in result.stderr
    assert "should not" not in result.stderr
    assert not out.exists()

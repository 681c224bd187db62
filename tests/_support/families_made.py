"""Checkpoints of every family for the tests on real servers, and the options and variables of their servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pyprune.cut.compact import compact_
from pyprune.errors import PypruneError
from pyprune.families import all_families, family_for
from pyprune.plan import PrunePlan
from pyprune.run.recover import recover_checkpoint
from pyprune.run.rework import ADAPTER
from pyprune.runtime.files import write_text
from pyprune.runtime.records import Json
from pyprune.serving.export import export
from tests._support.answers import CHAT_TEMPLATE
from tests._support.tiny import byte_tokenizer, shareable, tiny_served_model, weaken_

STOCK = "stock"
POSITIONS = 131_072
"""Tokens of the longest sequence."""
INT8, ADAPTED = "w8a8-int8", "adapted"
"""Format of rounded weights and inputs; name on the server of the model with its adapters."""
RANK, PROPOSED = 4, 3
RECOVERY = {
    "rank": RANK,
    "alpha": 2 * RANK,
    "train.steps": 6,
    "train.batch_size": 4,
    "train.micro_batch_size": 4,
    "train.learning_rate": 0.01,
}
"""Options that change the answers of a tiny model by a short recovery."""


@dataclass(frozen=True)
class Made:
    """A checkpoint to serve.

    Attributes:
        folder: of the checkpoint.
        words: further options of `pyprune serve`.
        environment: further variables of the server.
        other: folder of a checkpoint that answers are compared with: the one that the adapters were merged into, or
            the one before its weights were rounded.
    """

    folder: Path
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    other: Path | None = None


def architecture(name: str) -> str:
    """Return the architecture that the export of a name must have."""
    return "LlamaForCausalLM" if name == STOCK else all_families()[name].pruned_model


def write_cut(name: str, work: Path) -> Made:
    """Write the tiny model with sizes per layer once.

    Args:
        name: of a family, or "stock".
        work: folder for checkpoints of this name.

    Raises:
        PypruneError: another architecture comes out, or it cannot be cut or exported.
    """
    if not (work / "model").exists():
        model = _dense(name)
        plan = family_for(model).plan(model.config)
        _write(name, model, plan.drop_layers([1]) if name == STOCK else shareable(plan), work / "model")
    return Made(work / "model")


def write_adapters(name: str, work: Path) -> Made:
    """Recover the model of :func:`write_cut`, and serve it with the adapters of the recovery."""
    from pyprune.run.recipe import build_recovery

    folder, out = write_cut(name, work).folder, work / "recovered"
    if not out.exists():
        text = work / "text.txt"
        write_text(text, "".join(f"Line {i} says that {i} and {i % 7} are numbers.\n\n" for i in range(200)))
        data = {"data.source": str(text), "data.samples": 8, "data.sequence_length": 12}
        settings = [f"recover.{key}={value}" for key, value in RECOVERY.items()]
        recover_checkpoint(folder, build_recovery(options={**data, "keep_adapter": True}, settings=settings), out=out)
    words = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTED}={out / ADAPTER}")
    return Made(folder, words, other=out)


def write_draft(name: str, work: Path) -> Made:
    """Write a dense model, and its draft that is cut where the dense model does little."""
    dense, draft = work / "dense", work / "draft"
    if not draft.exists():
        model = _dense(name)
        plan = family_for(model).plan(model.config)
        if name == STOCK:
            gone, plan = {(1, "attention"), (1, "mlp")}, plan.drop_layers([1])
        else:
            gone = {(1, "attention"), (2, "mlp")}
            plan = plan.with_layer(1, query_heads=[], kv_heads=[]).with_layer(2, ffn=[])
        weaken_(model, gone)
        export(model, dense, tokenizer=_tokenizer())
        _write(name, model, plan, draft)
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": PROPOSED}
    words = ["--speculative-config", json.dumps(speculation)]
    if name == "gemma3_text":  # attends in two ways: vLLM keeps two kinds of caches, of which a draft has one
        words.append("--disable-hybrid-kv-cache-manager")
    return Made(dense, tuple(words))


def write_changeable(name: str, work: Path) -> Made:
    """Write a copy of the model whose weights may change, for a server that reads them again."""
    own = work / "changed"
    own.mkdir(exist_ok=True)
    return Made(write_cut(name, own).folder, environment={"VLLM_SERVER_DEV_MODE": "1"})


def write_int8(name: str, work: Path) -> Made:
    """Write the model with weights and inputs of its linear layers in int8; arguments of :func:`write_cut`.

    104 hidden channels, also of the stock model, keep vLLM from the AMX product of a CPU, which takes no float32.
    """
    plain, rounded = work / "plain", work / "int8"
    if not rounded.exists():
        model = _dense(name)
        plan = family_for(model).plan(model.config)
        narrow = plan.drop_layers([1]).keep_hidden(range(104)) if name == STOCK else shareable(plan)
        _write(name, model, narrow, plain)
        export(plain, rounded, quantise=INT8)
    return Made(rounded, other=plain)


def _dense(name: str) -> PreTrainedModel:
    return tiny_served_model("llama" if name == STOCK else name, POSITIONS)


def _tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _write(name: str, model: PreTrainedModel, plan: PrunePlan, folder: Path) -> None:
    """Cut a model and export it."""
    provenance: Json = {"method": "tests"}
    compact_(model, plan)
    written = export(model, folder, plan=plan, tokenizer=_tokenizer(), provenance=provenance)
    if written.architecture != architecture(name):
        raise PypruneError(f"it is exported as {written.architecture}, not {architecture(name)}")

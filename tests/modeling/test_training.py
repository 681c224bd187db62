"""PEFT and Transformers' Trainer take a pruned folder just as they take a dense one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from pyprune import build_config, load_model, prune
from pyprune.families import family_for
from tests._support.models import tiny_batch, tiny_model
from tests._support.text import write_model
from tests._support.tokenizer import tiny_tokenizer


def pruned(name: str, root: Path) -> Path:
    """A narrower MLP in layer 1, and where the family has heads to skip, no attention in layer 2."""
    model = tiny_model(name)
    dense = write_model(model, root / "dense")
    plan = family_for(model).plan(model.config).with_layer(1, ffn=range(8)).with_layer(2, query_heads=[], kv_heads=[])
    (root / "plan.json").write_text(plan.to_json())
    prune(dense, build_config(options={"method": "none", "plan": str(root / "plan.json")}), out=root / "pruned")
    return root / "pruned"


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "opt", "phi"])
def test_peft_s_defaults_adapt_what_they_adapt_of_the_dense_model(name: str, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    folder = pruned(name, tmp_path)

    def adapted(source: Path) -> Any:
        return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(source), peft.LoraConfig(task_type="CAUSAL_LM"))

    model = adapted(folder)
    for number, (_, parameter) in enumerate(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    layer = "layers.0."
    mine, dense = (
        {n for n, _ in m.named_parameters() if layer in n and "lora" in n} for m in (model, adapted(tmp_path / "dense"))
    )
    assert mine == dense != set()
    ids = tiny_batch()
    model.eval()
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    assert torch.equal(again(ids).logits, expected)
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    tiny_tokenizer().save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(load_model(tmp_path / "merged")[0](ids).logits, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(load_model(folder)[0](ids).logits, expected, atol=1e-2), "the adapter must show"


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tiny_batch(seed=index, batch=1, length=24)[0]
        return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_saves_and_resumes(checkpointing: bool, tmp_path: Path) -> None:
    folder = pruned("llama", tmp_path)

    def trainer() -> Trainer:
        options: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 2, "use_cpu": True}
        arguments = TrainingArguments(
            str(tmp_path / "run"), report_to=[], seed=0, gradient_checkpointing=checkpointing, **options
        )
        return Trainer(AutoModelForCausalLM.from_pretrained(folder), arguments, train_dataset=Sequences())

    first = trainer()
    first.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    ids = tiny_batch()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    found = [m.eval()(ids).logits for m in (first.model, resumed.model, saved, load_model(folder)[0])]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[3]), "training must show"


def test_sequences_packed_into_one_row_do_not_see_each_other(tmp_path: Path) -> None:
    model, _ = load_model(pruned("llama", tmp_path))
    ids, positions = tiny_batch(batch=1, length=20), torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        apart = torch.cat([model(input_ids=part).logits for part in (ids[:, :8], ids[:, 8:])], 1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-4)

"""Prune and serve mixtures of experts, and record what each command takes and how fast the result is.

Two made-up Qwen3-MoE models have random weights and the layer sizes of Qwen3-30B-A3B (hidden size 2,048, 128 experts of
768 channels, 8 of them for a token), but 2 and 4 layers and SmolLM2's vocabulary. The third is the mixture made of
SmolLM2 (bench/quality/upcycle.py), as in `bench.quality card`. REAP removes half of the experts by 2,048 tokens, and by
up to 8,192 while an expert saw fewer than 64 of them. Speed depends on sizes alone, so the servers have the cut that is
not reconstructed. Seconds and CPU seconds are of whole commands, and memory is the peak of a command's largest process.
vLLM runs in bfloat16 and llama.cpp in Q8_0, each by turns with the dense model. A command needs what those before it
left in --out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench._texts import load_dense
from bench.quality.card import write_mixture
from bench.quality.commands import command_columns, folders, run_step
from bench.quality.grid import Axis, Case, Grid, Layout, data_option, figure
from pyprune.families import family_for
from pyprune.families.mixtures import chosen_experts
from pyprune.fit.cost import ExactCosts
from pyprune.fit.quantities import Quantity
from pyprune.runtime.records import Json

LAYERS = {"2 layers": 2, "4 layers": 4}
"""Model with the layers of Qwen3-30B-A3B -> how many."""
SIZES = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}
"""Of Qwen3-30B-A3B, as its config.json names them."""
STAND_IN = "made of SmolLM2"
FEWER = {STAND_IN: " --set cut.experts_per_token=8"}
"""Of the mixture whose tokens read more experts than half."""
TEXT = "--samples 4 --sequence-length 512 --calibration DATA/c4_sample/train.jsonl.gz"
CUT = f"prune OUT/MODEL --method METHOD --ratio 0.5FEWER {TEXT} --out OUT/MODEL-METHOD"
TURNS = "--new-tokens 64 --prompt-tokens 512 --repeats 3 --precision 0 --json JSON"
PLAIN = {"prune, not reconstructed": CUT.replace("METHOD", "reap-plain")}
PRUNE = PLAIN | {"prune": CUT.replace("METHOD", "reap")}
SERVE = {
    **{
        f"serve with vLLM, {batch} at once": (
            f"bench OUT/MODEL-reap-plain --against OUT/MODEL --engine vllm --batch-size {batch} {TURNS}"
        )
        for batch in (1, 16)
    },
    "export dense as GGUF": "export OUT/MODEL --format gguf --quantise q8_0 --out OUT/MODEL.gguf",
    "export as GGUF": "export OUT/MODEL-reap-plain --format gguf --quantise q8_0 --out OUT/MODEL-reap-plain.gguf",
    **{
        f"serve with llama.cpp, {batch} at once": (
            f"bench OUT/MODEL-reap-plain.gguf --against OUT/MODEL.gguf --engine llamacpp --batch-size {batch} {TURNS}"
        )
        for batch in (1, 16)
    },
}
STEPS = {"2 layers": PRUNE, "4 layers": PLAIN | SERVE, STAND_IN: PLAIN | SERVE}
"""Model -> step -> the command; words in capitals are replaced."""


class Mixtures:
    """The folder of models and of what the commands write."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.setting: Json = {"ratio": 0.5}
        self.places = folders(options)

    def cases(self) -> list[Case]:
        """Return the commands of each chosen model."""
        return [
            Case({"model": model, "step": step}, task=words.replace("FEWER", FEWER.get(model, "")))
            for model in self.options.model
            for step, words in STEPS[model].items()
            if step in self.options.step
        ]

    def measure(self, case: Case) -> Json:
        """Run one command; of a cut, add the parameters that are stored and those that a token reads."""
        name = case.fields["model"].replace(" ", "-")
        dense = self.options.out / name
        if not dense.exists():
            _write(case.fields["model"], dense, self.options.data)
        found = run_step(case.task.replace("MODEL", name), self.places)
        if case.fields["step"] in PRUNE:
            pruned = Path(case.task.split()[-1].replace("OUT", self.places["OUT"]).replace("MODEL", name))
            report = json.loads((pruned / "pruning.json").read_text(encoding="utf-8"))["provenance"]["report"]
            parts = {part: report[part]["seconds"] for part in ("decision", "reconstruction") if report.get(part)}
            found |= {"parameters": [parameters(dense), parameters(pruned)], "parts": parts}
        return found

    def finish(self, case: Case, later: Sequence[Case]) -> None:
        """Nothing is freed: later commands read what this one wrote."""


def parameters(folder: Path) -> tuple[int, int]:
    """Return the stored parameters of a mixture, and how many of them a token reads."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    costs, plan = ExactCosts.of(config), family_for(config).plan(config)
    return int(costs.predict(Quantity("parameters"), plan)), costs.active(plan, chosen_experts(config))


def _write(model: str, folder: Path, data: Path) -> None:
    """Write the dense mixture of some rows."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    if model == STAND_IN:
        write_mixture(folder, data)
        return
    tokenizer = load_dense(None)[2]
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), num_hidden_layers=LAYERS[model], **SIZES)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _result(row: Json) -> Any:
    found = row["figures"]
    if "parameters" in found:
        stored, read = (
            " -> ".join(f"{count / 1e6:,.0f}M" for count in counts) for counts in zip(*found["parameters"], strict=True)
        )
        parts = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in found["parts"].items())
        return f"{stored} stored, {read} for a token; {parts}"
    if "speedup" in found:
        ratios = {"tokens/s": found["throughput_increase"], "ms of the prompt": 1 / found["speedup"]}
        pairs = {"tokens/s": found["tokens_per_second"], "ms of the prompt": found["prompt_ms"]}
        memory = " -> ".join(f"{size / 1e9:.2f}" for size in found["memory"])
        shown = [f"{a:,.1f} -> {b:,.1f} {name} ({ratios[name]:.2f}x)" for name, (a, b) in pairs.items()]
        return ", ".join([*shown, f"{memory} GB"])
    return None


def _options(parser: argparse.ArgumentParser) -> None:
    data_option(parser)
    parser.add_argument("--out", type=Path, default=Path("out/mixtures"), metavar="DIR", help="for what they write")


GRID = Grid(
    name="mixtures",
    description=__doc__,
    open=lambda options, records, work: Mixtures(options),
    layout=Layout(("model", "step"), partial(command_columns, _result), command=figure("command")),
    axes={"model": Axis([*STEPS]), "step": Axis([*PRUNE, *SERVE])},
    options=_options,
)

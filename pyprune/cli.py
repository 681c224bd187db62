"""The command line: parse options, call the stage that does the work, print what came back.

Everything heavy is imported inside the commands, so that ``pyprune --help`` answers at once. Results go to
stdout, progress and messages to stderr. Exit codes: 0 done, 2 a wrong option or input (one message, no
traceback), 130 stopped with Ctrl-C or SIGTERM, 1 a fault of pyprune itself.
"""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from typer.core import TyperGroup

from pyprune.errors import LONGEST_NAME, CheckpointError, ConfigError, OutputError, PypruneError, shown
from pyprune.interrupts import interruptible
from pyprune.progress import printable, say, warn

if TYPE_CHECKING:
    from pyprune.evaluate import PerplexityResult
    from pyprune.pipeline import PruneResult
    from pyprune.report import Cell
    from pyprune.train import TrainReport

ERROR_CODE = 2
FAILURE_CODE = 1
INTERRUPTED_CODE = 130
PATH_OPTIONS = ("model", "pruned", "folder", "against", "teacher", "ppl", "calibration", "data", "out", "jsonl")
"""Parameters of commands that may name something on the disk, which the file for the figures must not be."""

LONGEST_ARGUMENT = 100_000
"""Characters; an error about a longer one would fill the terminal."""
LONGEST_NUMBER = 20
"""Digits of a whole number."""

P = ParamSpec("P")


class _Commands(TyperGroup):
    """The commands, which refuse an argument that nobody can have meant before any of them repeats it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        longest = max(map(len, args), default=0)
        if longest > LONGEST_ARGUMENT:
            raise typer.BadParameter(f"an argument has {longest:,} characters; at most {LONGEST_ARGUMENT:,} are read")
        names = [arg.partition("=")[0] for arg in args if arg.startswith("-")] + args[:1]
        if max(map(len, names), default=0) > LONGEST_NAME:
            raise typer.BadParameter(f"a command or option has a name of more than {LONGEST_NAME} characters")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="pyprune",
    cls=_Commands,
    help="Structured pruning of causal language models: prune, evaluate, export, serve, measure.\n\n"
    "Start with: pyprune prune MODEL --method elder --ratio 0.25 --out pruned/",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the ``pyprune`` command."""
    app()


def _guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn what stops a command into one message and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with interruptible() as interruption:
            try:
                _check_json_file(kwargs)
                command(*args, **kwargs)
            except (typer.Exit, typer.BadParameter):
                raise
            except (Exception, KeyboardInterrupt) as error:
                if kwargs.get("debug"):
                    traceback.print_exc()
                raise typer.Exit(_explain(error, kwargs, interrupted=interruption.came)) from error

    return run


def _explain(error: BaseException, options: Mapping[str, Any], *, interrupted: bool) -> int:
    """Print what stopped a command; return its exit code."""
    if interrupted or isinstance(error, KeyboardInterrupt):
        say(f"Interrupted. {_kept(options)}", "yellow")
        return INTERRUPTED_CODE
    if not isinstance(error, PypruneError | OSError) and not _lacks_memory(error):
        text = f"{type(error).__name__}: {shown(str(error))}"
        say(f"Error: pyprune failed where it should not ({text}). Please report it with what --debug prints.", "red")
        return FAILURE_CODE
    text = str(error) if isinstance(error, PypruneError | OSError) else f"not enough memory ({shown(str(error))})"
    kept = _kept_of(options)
    say(f"Error: {text}" + (f"\nWhat it had reached is kept ({kept}): --resume continues it." if kept else ""), "red")
    return ERROR_CODE


def _lacks_memory(error: BaseException) -> bool:
    """MemoryError, or what torch raises in its place."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "not enough memory" in text)
    )


def _check_json_file(options: Mapping[str, Any]) -> None:
    """Refuse before any work a file for the figures that may not be written, or that the command uses otherwise."""
    path = options.get("json_file")
    if path is not None and path != "-":
        from pyprune.files import check_figures

        used = [options.get(name) for name in PATH_OPTIONS]
        check_figures(Path(path), *(v for value in used for v in (value if isinstance(value, list) else [value])))


def _kept(options: Mapping[str, Any]) -> str:
    """Say what an interrupted command left behind (outputs appear whole or not at all)."""
    out = options.get("out")
    if out is None:
        return "Nothing was changed."
    if os.path.isfile(out):
        return f"What was finished is in {out}: the same command continues from there."
    kept = _kept_of(options)
    resumable = f" What it had reached is kept ({kept}): the same command with --resume continues from there."
    return f"{out} was not written.{resumable if kept else ''}"


def _kept_of(options: Mapping[str, Any]) -> str | None:
    """What a command that can be resumed has kept; None where there is nothing."""
    out = options.get("out")
    from pyprune.files import work_folder

    # Without the folder nothing more is imported: Ctrl-C may have stopped an import halfway.
    if out is None or "resume" not in options or not os.path.isdir(work_folder(out)):
        return None
    from pyprune.run_folder import kept_of_a_run

    return kept_of_a_run(out)


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write every figure as JSON to FILE (one that pyprune wrote is replaced); - = stdout.",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a model from the hub. Default: its main branch."),
]
GgufFile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Name of a .gguf file inside MODEL; its weights are dequantised. Default: safetensors."
    ),
]
RemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that MODEL brings along. Off unless you give this."),
]
Annotate = Annotated[
    bool,
    typer.Option("--annotate", help="Add the figures to the model card and pruning.json of the pruned checkpoint."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace --out if pyprune wrote all that it holds. Default: refuse.")
]


@app.command()
@_guarded
def prune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id (owner/name).")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to create for the pruned checkpoint. Required.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="elder or trsp (remove layers), dress (remove hidden channels), moreau, moreau_gs, smoothgrad, "
            "taylor, loraprune, wanda, flap, magnitude or random (remove the heads and FFN channels of the smallest "
            "score), none (only apply --plan). Default: elder, or none with --plan alone."
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(help="Share to remove, between 0 and 1; the count is rounded down. Default: 0.25."),
    ] = None,
    ratio_of: Annotated[
        str | None,
        typer.Option(metavar="UNIT", help="Unit of --ratio: layers, hidden or parameters. Default: the method's own."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recipe (YAML or JSON); options on the command line win over it."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Named set of options: elder-recommended, trsp-recommended, dress-recommended (the default of "
            "each method), or the papers' constants: elder, trsp, dress, dress-opt, elder-literal, moreau, moreau_gs, "
            "smoothgrad, taylor, loraprune, wanda, flap; also magnitude, random, moreau-converged.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any option by its dotted name, e.g. elder.train.steps=20. Repeatable."
        ),
    ] = None,
    recovery: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What follows the cut: alpaca-lora (LoRA on Alpaca's instructions) or alpaca-lora-distill (the dense "
            "model as teacher as well). Default: the preset's own.",
        ),
    ] = None,
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform",
            help="Give every layer the same widths, so that a stock architecture fits (scoring methods; all layers are "
            "open). Default: each layer its own.",
        ),
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan (JSON, or a pruned checkpoint) to apply instead of deciding one."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Text to train on: wikitext2, ptb, c4, alpaca, bookcorpus, a datasets id, or a .txt/.jsonl(.gz) "
            "file. Default: wikitext2.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Sequences to draw from it. Default: the preset's.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens in a sequence, at most what MODEL allows. Default: the preset's.")
    ] = None,
    gguf_file: GgufFile = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run of the same options and --out.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan as JSON and its sizes; write nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Prune MODEL and write an ordinary checkpoint folder to --out.

    Example: pyprune prune HuggingFaceTB/SmolLM2-135M --method elder --ratio 0.25 --out pruned/
    """
    if out is None and not dry_run:
        raise typer.BadParameter("give the folder to create, for example --out pruned/", param_hint="--out")
    from pyprune.files import check_output
    from pyprune.recipe import build_config

    if out is not None:
        check_output(out, overwrite=overwrite, reads=[config, model, calibration])

    options = build_config(
        preset=preset,
        recovery=recovery,
        recipe=config,
        options={
            "method": method,
            "ratio": ratio,
            "ratio_of": ratio_of,
            "score.uniform": uniform or None,
            "plan": str(plan) if plan is not None else None,
            "data.source": calibration,
            "data.samples": samples,
            "data.sequence_length": sequence_length,
        },
        settings=set_ or (),
    )
    from pyprune import pipeline

    source: dict[str, Any] = {
        "gguf_file": gguf_file,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    if dry_run:
        found = pipeline.decision_for(model, options, **source)
        say(found.plan.summary(), "bold")
        for warning in found.warnings:
            warn(warning)
        for note in found.notes:
            say(f"Note: {note}", "dim")
        print(found.plan.to_json())
    elif out is not None:
        _print_pruned(pipeline.prune(model, options, out=out, resume=resume, overwrite=overwrite, **source))


@app.command()
@_guarded
def recover(
    pruned: Annotated[str, typer.Argument(metavar="PRUNED", help="Checkpoint folder of a model that is cut already.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to create for the recovered checkpoint.")],
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="DENSE",
            help="The model that PRUNED was cut from, to learn from (logits, and hidden states if asked for). "
            "Default: none, the text alone.",
        ),
    ] = None,
    teacher_gguf_file: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of a .gguf file inside DENSE. Default: safetensors.")
    ] = None,
    teacher_revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of DENSE from the hub. Default: its main branch.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Named set of options: alpaca-lora (MoreauPruner's recovery) or alpaca-lora-distill (with a teacher).",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recipe (YAML or JSON); options on the command line win over it."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any option by its dotted name, e.g. recover.distill.hidden=0.1 or recover.adapters=none. Repeatable.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Text to train on: alpaca, wikitext2, ptb, c4, bookcorpus, a datasets id, or a .txt/.jsonl(.gz) file. "
            "Default: the preset's, else wikitext2.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Sequences to draw from it. Default: the preset's.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens in a sequence, at most what PRUNED allows. Default: the preset's.")
    ] = None,
    trust_remote_code: RemoteCode = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run of the same options and --out.")
    ] = False,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Train a pruned checkpoint on text or instructions, with the dense model as teacher if given, and write another.

    Example: pyprune recover pruned/ --teacher HuggingFaceTB/SmolLM2-135M --preset alpaca-lora-distill --out recovered/
    """
    from pyprune.files import check_output
    from pyprune.recipe import build_recovery

    check_output(out, overwrite=overwrite, reads=[config, pruned, teacher, data])
    options = build_recovery(
        preset=preset,
        recipe=config,
        options={
            "data.source": data,
            "data.samples": samples,
            "data.sequence_length": sequence_length,
            "recover.distill": {} if teacher is not None else None,  # a teacher alone means the default weights
        },
        settings=set_ or (),
    )
    from pyprune.pipeline import recover_checkpoint

    report = recover_checkpoint(
        pruned,
        options,
        out=out,
        teacher=teacher,
        teacher_gguf_file=teacher_gguf_file,
        teacher_revision=teacher_revision,
        trust_remote_code=trust_remote_code,
        resume=resume,
        overwrite=overwrite,
    )
    _print_recovered(report, out)


def _print_recovered(report: TrainReport, out: Path) -> None:
    from pyprune.report import Table, print_table

    first, last = report.history[0], report.history[-1]
    rows: list[tuple[str, Cell]] = [
        ("objective", report.objective),
        ("steps", report.steps),
        ("tokens", report.tokens),
        ("language-model loss, first and last step", f"{first.lm_loss:.4f}, {last.lm_loss:.4f}"),
    ]
    rows += [(f"{name}, first and last step", f"{v:.4g}, {last.parts[name]:.4g}") for name, v in first.parts.items()]
    print_table(Table(f"Wrote {out}", ("", "value"), tuple(rows)))
    for warning in report.warnings:
        warn(warning)
    print(f"Next: pyprune eval {out} --ppl wikitext2\n      pyprune serve {out}")


def _print_pruned(result: PruneResult) -> None:
    from pyprune.report import Table, print_table

    rows: list[tuple[str, Cell]] = [("plan", result.plan.summary())]
    removed = result.plan.removed_layers
    if removed:
        rows.append(("removed layers", ", ".join(map(str, removed))))
    if result.compact is None:
        rows.append(("applied", "no (stages.prune is off): the shapes are dense"))
    else:
        rows += [
            ("parameters before", result.compact.dense_parameters),
            ("parameters after", result.compact.parameters),
            ("share removed", f"{result.compact.removed_share:.2%}"),
            ("architecture", result.compact.architecture),
            ("loads without pyprune", result.compact.stock),
        ]
    if result.effects is not None and result.effects.preserved_ratio is not None:
        rows.append(("preserved |W| of what goes", f"{result.effects.preserved_ratio:.2%}"))
    if result.verified is not None:
        rows += [(name.replace("_", " "), f"{value:.6g}") for name, value in result.verified.items()]
    rows += [("note", note) for note in result.notes]
    print_table(Table(f"Wrote {result.out}", ("", "value"), tuple(rows)))
    print(f"Next: pyprune eval {result.out} --ppl wikitext2\n      pyprune serve {result.out}")


@app.command("eval")
@_guarded
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder (pruned or not) or hub id.")],
    ppl: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Text to measure perplexity on: wikitext2, ptb, c4, a datasets id, or a .txt/.jsonl(.gz) file. "
            "Repeatable.",
        ),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            help="ppl-2048 (windows of 2048 tokens, mean of window losses) or ppl-128 (windows of 128 tokens, "
            "mean over tokens)."
        ),
    ] = "ppl-2048",
    max_tokens: Annotated[
        int | None, typer.Option(help="Use only this many tokens of each text, for a quick look. Default: all.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="lm-eval tasks, comma-separated, e.g. piqa,arc_easy.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Examples of each task, for a quick look. Default: all.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of a task in one forward pass.")] = 8,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16: dtype to compute in.")] = "float32",
    device: Annotated[
        str, typer.Option(help="auto (the GPU when there is one), cpu, cuda or cuda:N: where to compute.")
    ] = "auto",
    gguf_file: GgufFile = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    annotate: Annotate = False,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Measure a model's quality: perplexity by the papers' protocols, and zero-shot tasks through lm-eval.

    Example: pyprune eval pruned/ --ppl wikitext2 --tasks piqa,arc_easy
    """
    names = _names(tasks or "")
    if tasks is not None and not names:
        raise typer.BadParameter("names no task; for example piqa,arc_easy", param_hint="--tasks")
    if not ppl and not names:
        raise typer.BadParameter("give --ppl SOURCE, --tasks A,B, or both", param_hint="--ppl / --tasks")
    from dataclasses import asdict

    from pyprune.evaluate import evaluate_tasks
    from pyprune.load import load_model, warn_of_slow_dtype
    from pyprune.record import check_annotatable
    from pyprune.report import Table
    from pyprune.sources import check_source

    if annotate:
        check_annotatable(model)
    for source in ppl or ():
        check_source(source)
    loaded, tokenizer = load_model(
        model,
        dtype=dtype,
        device=device,
        gguf_file=gguf_file,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    if tokenizer is None:
        raise CheckpointError(f"{model} has no tokenizer files, which text needs; add its tokenizer.json.")
    warn_of_slow_dtype(dtype, loaded.device)
    measured = [
        _perplexity(model, loaded, tokenizer, source, protocol=protocol, max_tokens=max_tokens) for source in ppl or ()
    ]
    scores = evaluate_tasks(loaded, tokenizer, names, limit=limit, batch_size=batch_size) if names else {}
    tables = []
    if measured:
        rows = tuple((r.source, r.protocol, r.perplexity, r.windows, r.tokens) for r in measured)
        tables.append(Table("Perplexity", ("text", "protocol", "PPL", "windows", "tokens"), rows))
    if scores:
        flat = tuple((t, metric, v) for t, values in scores.items() for metric, v in values.items())
        tables.append(Table("Tasks", ("task", "metric", "value"), flat))
    data = {"model": model, "perplexity": [asdict(r) for r in measured], "tasks": scores}
    _output(data, json_file, *tables)  # first: figures that were measured must not be lost to a full disk
    if annotate:
        quality = {f"{r.protocol} {r.source}": round(r.perplexity, 4) for r in measured}
        quality |= {f"{t} {metric}": v for t, values in scores.items() for metric, v in values.items()}
        _annotate(model, quality=quality)


def _perplexity(
    name: str, model: Any, tokenizer: Any, source: str, *, protocol: str, max_tokens: int | None = None
) -> PerplexityResult:
    """Measure one text, unless the checkpoint was trained on it."""
    from pyprune.evaluate import evaluate_perplexity, evaluation_text
    from pyprune.marks import assert_not_trained_on

    text = evaluation_text(tokenizer, source)
    assert_not_trained_on(name, text.token_ids, source)
    return evaluate_perplexity(model, tokenizer, text, protocol=protocol, max_tokens=max_tokens)


@app.command()
@_guarded
def robustness(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id (owner/name) of a dense model.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Presets of scoring methods, comma-separated; also moreau_gs, magnitude and random. smoothgrad gets "
            "the noise draws of moreau.",
        ),
    ] = "taylor,smoothgrad,moreau,moreau-converged",
    ratios: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Shares to remove, between 0 and 1, comma-separated: of the parameters, or with --axes hidden of the "
            "hidden channels.",
        ),
    ] = "0.05,0.1,0.15,0.2",
    variants: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="What is compared with the float32 weights, comma-separated: rounded to bfloat16, float16 or int8, or "
            "moved by a random low-rank update (lora).",
        ),
    ] = "bfloat16,float16,lora,int8",
    axes: Annotated[
        str, typer.Option(metavar="A,B", help="What may go: heads,ffn, or hidden (the paper's channel-wise table).")
    ] = "heads,ffn",
    seeds: Annotated[str, typer.Option(metavar="A,B", help="Seeds of the calibration samples, comma-separated.")] = "0",
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Text to score on: wikitext2, ptb, c4, alpaca, bookcorpus, a datasets id, or a .txt/.jsonl(.gz) "
            "file. Default: wikitext2.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Sequences to draw from it. Default: 10.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens in a sequence. Default: 128.")] = None,
    ppl: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Text to measure perplexity on, as for pyprune eval. Repeatable. Default: wikitext2.",
        ),
    ] = None,
    protocol: Annotated[str, typer.Option(help="Protocol of the perplexities: ppl-128 or ppl-2048.")] = "ppl-128",
    tokens: Annotated[
        int | None, typer.Option(help="Use only this many tokens of each test text. Default: all.")
    ] = None,
    lora_rank: Annotated[int, typer.Option(help="Rank of the update of the variant lora.")] = 8,
    lora_size: Annotated[
        float, typer.Option(help="Its Frobenius norm relative to that of each matrix, between 0 and 1.")
    ] = 0.01,
    lora_seed: Annotated[int, typer.Option(help="Its seed.", metavar="INTEGER")] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any option of all methods by its dotted name, e.g. score.first_layer=2. Repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="JSON lines that keep what is finished (an existing file is continued); tables go beside it as .md.",
        ),
    ] = Path("robustness.jsonl"),
    device: Annotated[
        str, typer.Option(help="auto (the GPU when there is one), cpu, cuda or cuda:N: where to compute.")
    ] = "auto",
    gguf_file: GgufFile = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    theorem: Annotated[
        bool,
        typer.Option("--check-theorem", help="Check MoreauPruner's Theorem 1 on a small function instead; no MODEL."),
    ] = False,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Compare what scoring methods remove from MODEL and from the same model with slightly other weights.

    Each variant is scored once a method, ranked to every ratio and measured as a masked model: perplexity beside the
    pruned float32 model's, and the Jaccard overlap of what goes.

    Example: pyprune robustness HuggingFaceTB/SmolLM2-135M --ppl wikitext2 --tokens 32768 --out robust.jsonl
    """
    if theorem:
        _print_theorem(json_file)
        return
    if model is None:
        raise typer.BadParameter("give a model, or --check-theorem", param_hint="MODEL")
    from pyprune.load import load_model
    from pyprune.robustness import RobustnessConfig, check_robustness, check_rows_file
    from pyprune.sources import check_source
    from pyprune.variants import Adapter

    config = RobustnessConfig(
        methods=_names(methods),
        ratios=tuple(_number(text, "--ratios") for text in _names(ratios)),
        variants=_names(variants),
        seeds=tuple(_whole(text, "--seeds") for text in _names(seeds)),
        axes=_names(axes),  # type: ignore[arg-type]
        texts=tuple(ppl or ("wikitext2",)),
        protocol=protocol,
        max_tokens=tokens,
        adapter=Adapter(lora_rank, lora_size, lora_seed),
        options={"data.source": calibration, "data.samples": samples, "data.sequence_length": sequence_length},
        settings=tuple(set_ or ()),
    )
    config.validate()
    check_rows_file(out)
    if json_file not in (None, "-") and Path(str(json_file)).resolve() == out.with_suffix(".md").resolve():
        raise OutputError(f"--json is {json_file}, where the tables go; name another file.")
    for source in filter(None, (calibration, *config.texts)):
        check_source(source)
    loaded, tokenizer = load_model(
        model, device=device, gguf_file=gguf_file, revision=revision, trust_remote_code=trust_remote_code
    )
    if tokenizer is None:
        raise CheckpointError(f"{model} has no tokenizer files, which text needs; add its tokenizer.json.")
    result = check_robustness(loaded, tokenizer, config, out=out)
    report = result.report()
    _output({"model": model, **result.to_dict()}, json_file, *report.tables, *report.notes)
    say(f"Rows: {out}. Tables: {out.with_suffix('.md')}.", "dim")


def _print_theorem(json_file: str | None) -> None:
    from dataclasses import astuple

    from pyprune.report import Table
    from pyprune.score._theory import CASES, NOTE, check_theorem

    found = [check_theorem(*case) for case in CASES]
    columns = ("beta", "sigma", "rho", "Moreau gradient", "plain gradient", "bound as printed", "bound as proved")
    table = Table("Theorem 1: largest slope found", columns, tuple(astuple(check) for check in found), NOTE)
    _output({"theorem": [vars(check) for check in found]}, json_file, table)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option} has {shown(text)}; give numbers, for example 0.05,0.1.") from None


def _whole(text: str, option: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER):
        raise ConfigError(f"{option} has {shown(text)}; give whole numbers >= 0, for example 0,1.")
    return int(text)


def _annotate(folder: str, **measured: Any) -> None:
    from pyprune.record import annotate_checkpoint

    annotate_checkpoint(folder, **measured)
    say(f"Added to the model card of {folder}.", "dim")


@app.command()
@_guarded
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id (owner/name).")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to create.")],
    target: Annotated[
        str,
        typer.Option(
            help="auto (a stock architecture whenever the sizes allow), stock (refuse otherwise), or pruned "
            "(pyprune's own, with sizes per layer)."
        ),
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16: dtype of the written weights. Default: MODEL's own."),
    ] = None,
    gguf_file: GgufFile = None,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Write MODEL as a safetensors checkpoint that vLLM and Transformers load; a plan stays with it.

    Example: pyprune export folder/ --gguf-file model.gguf --dtype bfloat16 --out dense/
    """
    from pyprune.serving.export import export as write

    report = write(model, out, target=target, dtype=dtype, gguf_file=gguf_file, overwrite=overwrite)  # type: ignore[arg-type]
    size = f"{report.parameters:,} parameters, {report.bytes:,} bytes"
    needs = "stock, loads without pyprune" if report.stock else "loads with pyprune installed"
    print(f"Wrote {report.path}: {report.architecture} ({needs}), {size}.")
    for reason in report.reasons:
        print(f"Not a stock architecture: {reason}")
    for warning in report.warnings:
        warn(warning)


@app.command()
@_guarded
def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM OPTIONS]", help="Options for `vllm serve`, after a --, e.g. -- --port 9000."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a checkpoint with vLLM's OpenAI-compatible server (`vllm serve DIR`).

    Example: pyprune serve pruned/ -- --port 9000 --max-model-len 2048
    """
    from pyprune.serving.export import serve as start

    start(folder, vllm_args or ())


@app.command()
@_guarded
def bench(
    pruned: Annotated[str, typer.Argument(metavar="PRUNED", help="Pruned checkpoint folder.")],
    against: Annotated[
        str, typer.Option(metavar="DENSE", help="Checkpoint folder or hub id to compare with (the baseline).")
    ],
    engine: Annotated[
        str, typer.Option(help="auto (vLLM if installed, else Transformers), vllm or transformers.")
    ] = "auto",
    batch_size: Annotated[int, typer.Option(help="Prompts generated at once (token generation).")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Length in tokens of the one prompt (prompt processing).")] = 2048,
    repeats: Annotated[int, typer.Option(help="Timed turns of each model and column, after a warm-up.")] = 3,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32: dtype of weights and activations.")
    ] = "bfloat16",
    ppl: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Fill the PPL column: wikitext2, ptb, c4, a datasets id, or a text file."),
    ] = None,
    protocol: Annotated[str, typer.Option(help="Protocol of --ppl: ppl-2048 or ppl-128.")] = "ppl-2048",
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = 0,
    jsonl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append every sample to FILE as it is taken (JSON lines).")
    ] = None,
    annotate: Annotate = False,
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Measure PRUNED beside DENSE, turn by turn: token generation and prompt processing.

    Prints the papers' table: PR (share removed), PPL, Tokens/s, TI (throughput increase), Latency, Speedup.

    Example: pyprune bench pruned/ --against HuggingFaceTB/SmolLM2-135M --engine vllm --ppl wikitext2
    """
    from pyprune.files import check_lines
    from pyprune.load import resolve_device, warn_of_slow_dtype
    from pyprune.record import check_annotatable
    from pyprune.serving.engines import choose_engine
    from pyprune.serving.measure import measure
    from pyprune.serving.table import conditions, speed_table
    from pyprune.sources import check_source

    if jsonl is not None:
        check_lines(jsonl)
    choose_engine(engine)  # a missing engine is an error now, not after the perplexities
    warn_of_slow_dtype(dtype, resolve_device("auto"))
    if annotate:
        check_annotatable(pruned)
    models = {"dense": against, "pruned": pruned}
    if ppl:
        check_source(ppl)
    perplexity = {name: _loaded_perplexity(path, ppl, protocol) for name, path in models.items()} if ppl else None
    report = measure(
        models,
        engine=engine,
        batch_size=batch_size,
        new_tokens=new_tokens,
        prompt_tokens=prompt_tokens,
        repeats=repeats,
        dtype=dtype,
        seed=seed,
        jsonl=jsonl,
    )
    text = f"{speed_table(report, perplexity=perplexity)}\n\n{conditions(report)}"
    _output({**report.to_dict(), "perplexity": perplexity}, json_file, text)
    if annotate:
        speed = {
            "throughput increase (TI)": round(report.throughput_increase("pruned"), 4),
            "prompt speedup": round(report.speedup("pruned"), 4),
            "conditions": conditions(report).replace("\n", " "),
        }
        _annotate(pruned, speed=speed)


def _loaded_perplexity(path: str, source: str, protocol: str) -> float:
    from pyprune.load import load_model

    model, tokenizer = load_model(path, device="auto")
    if tokenizer is None:
        raise CheckpointError(f"{path} has no tokenizer files, which text needs; add its tokenizer.json.")
    perplexity = _perplexity(path, model, tokenizer, source, protocol=protocol).perplexity
    del model
    _release_device_memory()  # the engine that follows wants nearly all of it
    return perplexity


def _release_device_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@app.command()
@_guarded
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    json_file: JsonFile = None,
    debug: Debug = False,
) -> None:
    """Print what a checkpoint is: plan, sizes, parameters, bytes, architecture, provenance.

    Example: pyprune inspect pruned/
    """
    from pyprune.record import has_record, read_pruning_json
    from pyprune.report import Table
    from pyprune.serving.checkpoints import read_checkpoint

    checkpoint = read_checkpoint(folder)  # verifies it
    record = read_pruning_json(folder) if has_record(folder) else None
    rows: list[tuple[str, Cell]] = [
        ("architecture", checkpoint.architecture),
        ("loads without pyprune", "no" if checkpoint.architecture.startswith("Pruned") else "yes"),
        ("parameters", checkpoint.parameters),
        ("bytes of weights", checkpoint.bytes),
    ]
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    rows += [(n, checkpoint.config[n]) for n in (*names, "intermediate_size") if checkpoint.config.get(n)]
    if record is None:
        rows.append(("plan", "none (not written by pyprune)"))
    elif record.plan is None:
        rows.append(("plan", "none (not cut)"))
    else:
        rows.append(("plan", record.plan.summary()))
        rows.append(("removed layers", ", ".join(map(str, record.plan.removed_layers)) or "none"))
    provenance = record.provenance if record else {}
    shown_above = {name for name, _ in rows}
    rows += [
        (k, v)
        for k, v in provenance.items()
        if isinstance(v, str | int | float) and k not in shown_above and k != "training_marks"
    ]
    data = {
        "folder": str(folder),
        "architecture": checkpoint.architecture,
        "parameters": checkpoint.parameters,
        "bytes": checkpoint.bytes,
        "plan": record.plan.to_dict() if record and record.plan else None,
        "provenance": provenance,
    }
    _output(data, json_file, Table(str(folder), ("", "value"), tuple(rows)))


@app.command()
@_guarded
def env(json_file: JsonFile = None, debug: Debug = False) -> None:
    """Print versions, the CPU's instruction set, the backend of each operation, and whether vLLM is there."""
    from pyprune.ops import backend_report
    from pyprune.report import Table
    from pyprune.serving.engines import vllm_installed
    from pyprune.serving.stats import environment_record

    record = environment_record()
    data = {**record, "vllm": vllm_installed(), "backends": backend_report()}
    rows: list[tuple[str, str]] = [(name, version) for name, version in record["versions"].items()]
    rows += [
        ("python", record["python"]),
        ("system", record["system"]),
        ("device", f"{record['device']} ({record['cpus']} CPUs)"),
        ("instruction sets", ", ".join(record["isa"]) or "baseline"),
        ("vLLM", "installed" if data["vllm"] else "not installed: pip install 'pyprune[vllm]'"),
        *((f"ops: {name}", text) for name, text in data["backends"].items()),
    ]
    _output(data, json_file, Table("Environment", ("", "value"), tuple(rows)))


def _output(data: Mapping[str, Any], json_file: str | None, *items: Any) -> None:
    """Print tables and texts; write the data to ``json_file`` too ("-" prints it instead)."""
    from pyprune import __version__
    from pyprune.files import WRITTEN_BY, write_text
    from pyprune.report import Table, print_table

    text = json.dumps({WRITTEN_BY: __version__, **data}, indent=2) + "\n"
    if json_file == "-":
        print(text, end="")
        return
    for item in items:
        if isinstance(item, Table):
            print_table(item)
        else:
            print(printable(item))
    if json_file is not None:
        write_text(Path(json_file), text)

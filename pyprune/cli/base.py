"""Share between the commands the common options, the handling of errors, and the printing of results.

Heavy modules are imported inside the commands, so that ``pyprune --help`` answers at once. Results are printed to
stdout, progress and messages to stderr. Exit codes: 0 done, 2 a wrong option or input (one message, no traceback),
130 stopped with Ctrl-C or SIGTERM, 1 a fault of pyprune itself. Once the server of `serve` runs, its exit codes are
those of :mod:`pyprune.serving.vllm.supervise`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import typer

from pyprune.errors import ConfigError, PypruneError, TrainingError, shown
from pyprune.runtime.interrupts import interruptible
from pyprune.runtime.processes import first, join_processes
from pyprune.runtime.progress import bars_as_lines, end_bars, printable, say

ERROR_CODE = 2
FAILURE_CODE = 1
INTERRUPTED_CODE = 130
PATH_OPTIONS = (
    "model", "pruned", "folder", "against", "teacher", "dense", "ppl", "calibration", "data", "out", "jsonl", "report",
    "profile", "target", "plan", "config", "cache",
)  # fmt: skip
"""Parameters of commands that may name a file or folder; the file for the figures must be another one."""
DIVIDED = ("prune", "recover", "reconstruct")
"""Commands that torchrun may start in several processes."""
REVISIONS = {"revision": "model", "teacher_revision": "teacher", "dense_revision": "dense"}
"""Parameters of commands that name a revision on the hub -> the parameter that names the model."""
CONTINUED = ("robustness",)
"""Commands that continue from the rows in their output."""
FLAGS = {"json_file": "--json", "set_": "--set", "file_format": "--format"}
"""Parameters of commands whose options have another name."""
SHARED: dict[str, tuple[str | None, str]] = {
    "annotate": (None, "Add the figures to the model card and pruning.json of the pruned checkpoint."),
    "allow_mismatch": (None, "Use a profile of another machine or version, with a warning."),
    "config": ("FILE", "Recipe (YAML or JSON); options on the command line win over it."),
    "debug": (None, "Show the traceback of an error."),
    "device": (None, "auto (the GPU when there is one), cpu, cuda or cuda:N: where to compute."),
    "field": ("NAME", "Column or .jsonl field with the text of --ppl. Default: text."),
    "gguf_file": ("NAME", "Name of a .gguf file inside MODEL; its weights are dequantised. Default: safetensors."),
    "json_file": ("FILE", "Write every figure as JSON to FILE (one that pyprune wrote is replaced); - = stdout."),
    "overwrite": (None, "Replace --out if pyprune wrote all that it holds. Default: refuse."),
    "resume": (None, "Continue an interrupted run of the same options and --out."),
    "revision": (None, "Branch, tag or commit of a model from the hub. Default: its main branch."),
    "samples": (None, "Sequences to draw from it. Default: the preset's."),
    "sequence_length": (None, "Tokens in a sequence, at most what the model allows. Default: the preset's."),
    "set_": ("KEY=VALUE", "Any option by its dotted name, as pyprune options lists them. Repeatable."),
    "split": (
        "NAME",
        "Split of a hub data set for --ppl. Default: test, or validation, on which results are published.",
    ),
    "trust_remote_code": (None, "Run Python code in MODEL. Default: refuse."),
}
"""Parameters that several commands have: metavar, and help if the command's docstring has no other."""
_ENTRY = re.compile(r"^    (\w+)(?: \(([^)]*)\))?: (.+(?:\n {8}.+)*)", re.MULTILINE)
P = ParamSpec("P")


def guard(command: Callable[P, None]) -> Callable[P, None]:
    """Turn an error or interruption of a command into one message and an exit code, and declare its options.

    Positional parameters are arguments, others are options. Help and the name of the value are those of the docstring's
    section Args, as ``name (METAVAR): help``, else those of :data:`SHARED`.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        written = _written_at(kwargs)
        with interruptible() as interruption:
            try:
                bars_as_lines()
                _check_json_file(kwargs)
                _check_revisions(kwargs)
                with join_processes(command.__name__, may_divide=command.__name__ in DIVIDED):
                    command(*args, **kwargs)
            except (typer.Exit, typer.BadParameter):
                raise
            except (Exception, KeyboardInterrupt) as error:
                if kwargs.get("debug"):
                    traceback.print_exc()
                new = _written_at(kwargs) not in (None, written)
                code = _explain(command.__name__, error, kwargs, interrupted=interruption.came, new=new)
                raise typer.Exit(code) from error

    run.__doc__, _, section = inspect.getdoc(command).partition("\n\nArgs:\n")  # type: ignore[union-attr]
    own = {name: (metavar or None, " ".join(text.split())) for name, metavar, text in _ENTRY.findall(section)}
    entries = SHARED | own
    signature = inspect.signature(command, eval_str=True)
    declared = [_declare(p, *entries[p.name]) if p.name in entries else p for p in signature.parameters.values()]
    setattr(run, "__signature__", signature.replace(parameters=declared))  # noqa: B010 - mypy: a function has none
    return run


def _declare(parameter: inspect.Parameter, metavar: str | None, text: str) -> inspect.Parameter:
    """Declare a parameter to typer."""
    default = ... if parameter.default is parameter.empty else parameter.default
    if parameter.kind is not parameter.KEYWORD_ONLY:
        return parameter.replace(default=typer.Argument(default, metavar=metavar, help=text))
    usual = [f"--{parameter.name.replace('_', '-')}"] if parameter.annotation is bool else []
    flag = [FLAGS[parameter.name]] if parameter.name in FLAGS else usual
    return parameter.replace(default=typer.Option(default, *flag, metavar=metavar, help=text))


def say_what_is_loaded(model: str) -> None:
    """Print the first line of a command, before the libraries are imported, which takes five seconds of a slow core.

    Args:
        model: folder or hub id that is read next.
    """
    say(f"Loading torch and Transformers, then {model}.", "dim")


def _written_at(options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Identify the output that exists; None if none exists, or the command writes none."""
    from pyprune.runtime.files import written_at

    out = options.get("out")
    return None if out is None else written_at(out)


def _explain(command: str, error: BaseException, options: Mapping[str, Any], *, interrupted: bool, new: bool) -> int:
    """Print why a command stopped; return its exit code. ``new``: it had already written its output."""
    end_bars()
    if interrupted or isinstance(error, KeyboardInterrupt):
        say(f"Interrupted. {_kept(command, options, new=new)}", "yellow")
        return INTERRUPTED_CODE
    if not isinstance(error, PypruneError | OSError) and not _lacks_memory(error):
        text = f"{type(error).__name__}: {shown(str(error))}"
        report = "Please report the command, its output with --debug, and that of `pyprune env`."
        say(f"Internal error: {text}. {report}", "red")
        return FAILURE_CODE
    text = str(error) if isinstance(error, PypruneError | OSError) else f"not enough memory ({shown(str(error))})"
    kept = _kept_of(options)
    again = "--resume continues it"
    if isinstance(error, TrainingError):  # values that were not finite
        again = "--resume would end in the same way, so start again with other options and --overwrite"
    say(f"Error: {text}" + (f"\nPartial results were kept ({kept}): {again}." if kept else ""), "red")
    return ERROR_CODE


def _lacks_memory(error: BaseException) -> bool:
    """Check for MemoryError, or the RuntimeError that torch raises in its place."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(f"{what} memory" in text for what in ("out of", "not enough", "can't allocate"))
    )


def _check_json_file(options: Mapping[str, Any]) -> None:
    """Refuse a file for the figures that may not be written, or that the command also uses for something else."""
    path = options.get("json_file")
    if path is not None and path != "-":
        from pyprune.runtime.figures import check_figures

        used = [options.get(name) for name in PATH_OPTIONS]
        check_figures(Path(path), *(v for value in used for v in (value if isinstance(value, list) else [value])))


def _check_revisions(options: Mapping[str, Any]) -> None:
    """Refuse the revision of a folder: nothing would read it, but a record would name it."""
    for name, of in REVISIONS.items():
        revision, source = options.get(name), options.get(of)
        if revision is not None and source is not None and os.path.isdir(source):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is {shown(revision)}, but {shown(str(source))} is a folder, which has no revisions; leave "
                "it out, or name a model of the hub by its id, where no folder has that name."
            )


def _kept(command: str, options: Mapping[str, Any], *, new: bool) -> str:
    """Say what an interrupted command left behind (outputs appear whole or not at all)."""
    out, samples = options.get("out"), options.get("jsonl")
    if out is None and samples is not None and os.path.isfile(samples):
        return f"The samples that were measured are in {samples}."
    if out is None:
        return "Nothing was changed."
    if os.path.isfile(out) and command in CONTINUED:
        return f"Finished rows are in {out}: the same command continues from there."
    if new:
        return f"{out} is written; the steps after it were not done."
    if os.path.isfile(out):
        return f"{out} was not changed."
    kept = _kept_of(options)
    resumable = f" Partial results were kept ({kept}): the same command with --resume continues from there."
    return f"{out} was not written.{resumable if kept else ''}"


def _kept_of(options: Mapping[str, Any]) -> str | None:
    """Describe the partial results of a command that can be resumed; None if there are none."""
    out = options.get("out")
    from pyprune.runtime.files import work_folder

    # If the folder is missing, import nothing more: Ctrl-C may have interrupted an import.
    if out is None or "resume" not in options or not os.path.isdir(work_folder(out)):
        return None
    from pyprune.run.resume import kept_of_a_run

    return kept_of_a_run(out)


def text_options(source: str | None, samples: int | None, sequence_length: int | None) -> dict[str, Any]:
    """Name the options of a text as recipes do; None = not given."""
    return {"data.source": source, "data.samples": samples, "data.sequence_length": sequence_length}


def check_out(out: Path | None, reads: Sequence[Any], *, dry_run: bool, resume: bool, overwrite: bool) -> None:
    """Refuse a run without an output, or with one that cannot be written.

    Args:
        out: the folder to create; may be missing in a dry run.
        reads: files and folders that the command reads; None = not given.
        dry_run: write nothing.
        resume: continue an interrupted run, which a dry run does not.
        overwrite: replace ``out``.
    """
    from pyprune.runtime.files import check_output

    if out is None and not dry_run:
        raise typer.BadParameter("give the folder to create, for example --out pruned/", param_hint="--out")
    if dry_run:
        refuse_beside("--dry-run", {"--resume": resume, "--overwrite": overwrite and out is None})
    if out is not None:
        check_output(out, overwrite=overwrite, reads=reads)


def refuse_unread(needed: str, options: Mapping[str, bool]) -> None:
    """Refuse options that were given without the one that reads them.

    Args:
        needed: the option that is missing.
        options: option, as it is written -> whether it was given.
    """
    refuse_idle(options, f"without {needed}; give {needed}, or leave it out.")


def refuse_beside(present: str, options: Mapping[str, bool]) -> None:
    """Refuse options that have no effect together with another one.

    Args:
        present: the other option.
        options: option, as it is written -> whether it was given.
    """
    refuse_idle(options, f"together with {present}; leave one of them out.")


def refuse_others_beside(context: typer.Context, present: str, *read: str) -> None:
    """Refuse every argument and option that was given together with one that reads only a few.

    Args:
        context: of the command.
        present: the one option, as it is written.
        read: names of the parameters that it reads, its own among them.
    """
    options = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name not in read:
            written = next((word for word in parameter.opts if word.startswith("--")), str(parameter.name).upper())
            options[written] = source is not None and source.name == "COMMANDLINE"
    refuse_beside(present, options)


def refuse_idle(options: Mapping[str, bool], why: str) -> None:
    """Refuse options that were given but have no effect.

    Args:
        options: option, as it is written -> whether it was given.
        why: words of the message after "does nothing".
    """
    if names := given_names(options):
        raise ConfigError(f"{', '.join(names)} {'does' if len(names) == 1 else 'do'} nothing {why}")


def given_names(options: Mapping[str, bool]) -> list[str]:
    """Return the options that were given."""
    return [name for name, is_given in options.items() if is_given]


def refuse_split(split: str | None, sources: Sequence[str]) -> None:
    """Refuse the split of texts that have none: nothing would read it, but a record would name it."""
    if split is None or not sources:
        return
    from pyprune.data.sources import has_splits

    if not any(map(has_splits, sources)):
        named = ", ".join(map(shown, sources))
        raise ConfigError(f"--split is {shown(split)}, but {named} has no splits and is read whole; leave it out.")


def comma_separated(text: str) -> tuple[str, ...]:
    """Return the names in "a, b"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def add_to_record(folder: str, **measured: Any) -> None:
    """Add measured figures to a checkpoint's record and model card, and report it."""
    from pyprune.checkpoint.record import annotate_checkpoint

    annotate_checkpoint(folder, **measured)
    say(f"Added to the record of {folder}, and to its model card unless that was edited.", "dim")


def output(data: Mapping[str, Any], json_file: str | None, *items: Any) -> None:
    """Print tables and texts, and write the data to ``json_file`` ("-" prints only the data)."""
    from pyprune.runtime.figures import WRITTEN_BY
    from pyprune.runtime.files import write_text
    from pyprune.runtime.report import Table, print_table
    from pyprune.runtime.version import VERSION

    text = json.dumps({WRITTEN_BY: VERSION, **data}, indent=2) + "\n"
    if json_file == "-":
        print(text, end="")
        return
    for item in items:
        if isinstance(item, Table):
            print_table(item)
        else:
            print(printable(item))
    if json_file is not None and first():
        write_text(Path(json_file), text)


def print_next_commands(out: Path) -> None:
    """Print the commands that usually follow; not serve, if vLLM does not serve the sizes or the type of a checkpoint.

    Args:
        out: folder of the checkpoint that was written.
    """
    from pyprune.families import find_family, serving_obstacle
    from pyprune.families.prefix import is_pruned_type

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    pruned = is_pruned_type(config["model_type"])
    family = find_family(config["model_type"]) if pruned else None
    served = serving_obstacle(config) is None and not (pruned and not (family and family.served_by))
    print(f"Next: pyprune eval {out} --ppl wikitext2" + f"\n      pyprune serve {out}" * served)

"""Everything that only a GPU can show, in one command of at most 40 minutes.

    make gpu-card
    python -m bench.training.gpu_card --parts kernels,bandwidth           # some parts
    python -m bench.training.gpu_card --small                             # every part in small, on the CPU

For one NVIDIA GPU of 80 GB; nothing is downloaded, and weights are random. Parts:

* kernels: tests/gpu, every Triton kernel against its definition in float64.
* bandwidth: bench/kernels/ops.py without torch.compile, every Triton kernel next to a copy of the same memory. The
  matrices are so large that neither the L2 cache nor launches count (16384 x 11008, all of the groups selected).
* dress, elder, lora, distil: train_step.py, a whole step of this form at LLaMA-2-7B's shapes, 1 x 2048 tokens,
  next to plain PyTorch loops; measured peaks over predicted ones.
* serving: serving_card.py's engines with dense, shorter and unequally narrower models of the same shapes in vLLM. Left
  out where vLLM is missing.

Each part is a separate process with a time limit; the others run whatever becomes of it. Figures are appended to
ops.jsonl, optimizer.jsonl and serving_card.jsonl in --results, with the device's name. The last table says what ran,
what was left out, and why.

--small takes tiny shapes and no GPU: Triton's interpreter for the kernels and two of the ops. Whole steps would take it
minutes, so they run on the CPU's own kernels. Transformers takes the place of vLLM, which needs a minute to start. It
shows that the command works; its figures mean nothing and go to out/gpu-card.

Exit codes: 0 every part ran or was left out, 1 one failed or took too long, 2 a wrong option or no GPU, 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench._card_plans import UNEQUAL
from bench._command import exit_status, last_line, read_names
from pyprune.errors import ConfigError
from pyprune.runtime.progress import say
from pyprune.runtime.report import Table, markdown_table
from pyprune.serving.engines import end_group, vllm_installed

ROOT = Path(__file__).resolve().parents[2]
TRAIN_STEP = "bench.training.train_step"
# A newer or older torch than the one of the lock may warn, which says nothing of the kernels.
KERNELS = ("pytest", "tests/gpu", "-q", "-W", "default", "-p", "no:cacheprovider")
SMALL_KERNELS = (*KERNELS, "-k", "slice_gather")
STEPS = ("dress", "elder", "lora", "distil")
LIMITS = {"kernels": 6.0, "bandwidth": 5.5, **dict.fromkeys(STEPS, 4.0), "serving": 10.0}
"""Minutes of each part; 40 with :data:`PATIENCE` for every one."""
PATIENCE = 20
"""Seconds in which a part that is stopped ends what it started."""
RAN, FAILED, LEFT_OUT = "ran", "failed", "left out"

ARRAYS = ("--rows", "16384", "--cols", "11008", "--dtypes", "float32", "bfloat16")
SMALL_ARRAYS = (
    *("--rows", "16", "--cols", "16", "--dtypes", "float32"),
    *("--ops", "perturb", "slice_gather", "--repeats", "1"),
)
STEP = ("--shapes", "7B", "--batch", "1", "--length", "2048", "--repeats", "3")
SMALL_STEP = ("--shapes", "tiny", "--batch", "1", "--length", "16", "--repeats", "1")
CARD = ("bench.serving.serving_card", "--again", "--part", "engine", "--mode", "compiled")
SERVING = ("--shapes", "7B", "--models", f"25 layers,{UNEQUAL}", "--prompts", "2048", "--repeats", "3")
SMALL_SERVING = (
    *("--shapes", "tiny", "--engine", "transformers", "--models", UNEQUAL),
    *("--prompts", "16", "--generation", "2x4", "--repeats", "1", "--resident", "2"),
)


@dataclass(frozen=True)
class Part:
    """A process to run.

    Attributes:
        name: of the part.
        module: what Python runs, with its arguments.
        records: the file that it appends to; None if it has only its exit status.
        seconds: the limit.
        environment: further variables of its process.
        left_out: the obstacle that keeps it from running; empty if it runs.
    """

    name: str
    module: tuple[str, ...]
    records: Path | None
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of a part.

    Attributes:
        part: its name.
        state: ran, failed or left out.
        seconds: that it took.
        note: the file of its figures, or the reason.
    """

    part: str
    state: str
    seconds: float
    note: str


def parts(names: Sequence[str], results: Path, *, small: bool) -> list[Part]:
    """Return the parts to run, in their order.

    Args:
        names: of the parts.
        results: folder of the records.
        small: on the CPU, at toy size.
    """
    # Tests and benches take whatever GPU they find, so that in small they must find none.
    interpreted = {"TRITON_INTERPRET": "1", "PYPRUNE_GPU_TESTS": "interpreter"}
    environment = {"CUDA_VISIBLE_DEVICES": "", **interpreted} if small else {}

    def part(name: str, file: str, *module: str, left_out: str = "", **more: str) -> Part:
        records = results / file
        words = (*module, "--jsonl", str(records))
        return Part(name, words, records, 60 * LIMITS[name], environment | more, left_out)

    made = [
        Part("kernels", SMALL_KERNELS if small else KERNELS, None, 60 * LIMITS["kernels"], environment),
        part(
            "bandwidth", "ops.jsonl", "bench.kernels.ops", "--no-compile", "--selected", "1",
            *(SMALL_ARRAYS if small else ARRAYS), **({"PYPRUNE_BACKEND": "triton"} if small else {}),
        ),
        *(
            part(form, "optimizer.jsonl", TRAIN_STEP, "--forms", form, *(SMALL_STEP if small else STEP))
            for form in STEPS
        ),
        part(
            "serving", "serving_card.jsonl", *CARD, *(SMALL_SERVING if small else SERVING),
            left_out="" if small or vllm_installed() else "vLLM is not installed",
        ),
    ]  # fmt: skip
    return [one for one in made if one.name in names]


def run(chosen: Iterable[Part]) -> Iterator[Outcome]:
    """Run the parts one after another, also after a failure."""
    for part in chosen:
        say(f"{part.name}: {part.left_out or f'at most {part.seconds / 60:.0f} minutes'}", "bold")
        yield Outcome(part.name, LEFT_OUT, 0.0, part.left_out) if part.left_out else run_part(part)


def run_part(part: Part) -> Outcome:
    """Run one part to its end or its limit, and pass its output on."""
    begin, before = time.monotonic(), len(_lines(part.records))
    process = subprocess.Popen(
        [sys.executable, "-m", *part.module],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **part.environment},
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    said: deque[str] = deque(maxlen=50)
    reader = threading.Thread(target=_pass_on, args=(process, said), daemon=True)
    reader.start()
    try:
        status = process.wait(part.seconds)
        state, note = (RAN, "") if status == 0 else (FAILED, f"ended with status {status}")
    except subprocess.TimeoutExpired:
        state, note = FAILED, f"stopped after its limit of {part.seconds:g} s"
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # so that it ends engines, which have sessions of their own
        end_group(process, PATIENCE)
        reader.join(timeout=5)
    records = [json.loads(line) for line in _lines(part.records)[before:]]
    missed = [f"{r['implementation']}: {r['failed']}" for r in records if "failed" in r]
    if part.records and len(records) == len(missed) and state == RAN:
        state, note = FAILED, "nothing was measured"
    if state == FAILED:
        note = f"{note}: {last_line(''.join(said))}"
    recorded = f"recorded in {part.records.name}: {len(records)}" if part.records else ""
    note = "; ".join(filter(None, (note, recorded, *missed)))
    return Outcome(part.name, state, time.monotonic() - begin, note)


def _lines(path: Path | None) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []


def _pass_on(process: subprocess.Popen[str], said: deque[str]) -> None:
    """Print a process's stderr here, and keep its last lines for the table."""
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            said.append(line)
            sys.stderr.write(line)
            sys.stderr.flush()


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a part."""
    rows = tuple((o.part, o.state, f"{o.seconds:.0f}", o.note or None) for o in outcomes)
    return markdown_table(Table("GPU card", ("part", "", "s", "note"), rows))


def check_gpu() -> None:
    """Refuse a machine without a GPU that torch can use.

    Raises:
        ConfigError: there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"There is no NVIDIA GPU that torch {torch.__version__} can use, so nothing was measured; --small runs "
            "every part in small on the CPU."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print their results; return the exit status."""
    options = _parser().parse_args(arguments)
    results = options.results or ROOT / ("out/gpu-card" if options.small else "bench/results")
    outcomes: list[Outcome] = []

    def measure() -> None:
        if not options.small:
            check_gpu()
        outcomes.extend(run(parts(options.parts, results.absolute(), small=options.small)))

    status = exit_status(measure, "What was measured is recorded; --parts runs the others.")
    if outcomes:
        print("\n" + table(outcomes))
    return status or int(any(o.state == FAILED for o in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", type=partial(read_names, names=list(LIMITS), what="part"), default=list(LIMITS), metavar="A,B",
        help=f"default: {','.join(LIMITS)}",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU, to try the command")
    parser.add_argument(
        "--results", type=Path, metavar="DIR",
        help="folder to append records to (default: bench/results, with --small out/gpu-card)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())

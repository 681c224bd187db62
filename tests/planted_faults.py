"""Plant twenty one-line faults, one after the other, and show which tests find them: `make faults`.

    python -m tests.planted_faults [--tier first|all] [FAULT ...]

It guards the first tier against being emptied: `make test` has to find at least eighteen of the twenty, `make test-all`
all. Each fault is tried with the tests of its area first, as the tier chooses them; one that these do not find is
tried with the whole tier. The file that holds a fault is written back afterwards, whatever happens, and a file with
changes that are not committed is refused.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
LEAST = {"first": 18, "all": 20}
SECONDS = 5400


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        name: of the fault.
        file: where it is planted.
        right: the text that is there, once.
        wrong: what it becomes.
        tests: files and folders below tests/ that are tried first.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: str


FAULTS = (
    Fault(
        "slicing: parts of a fused projection overlap",
        "pyprune/families/base.py",
        "self.step + self.start + c % self.length for c in",
        "self.step + c % self.length for c in",
        "families",
    ),
    Fault(
        "mask: one kept position is zeroed",
        "pyprune/cut/mask.py",
        "removed[list(kept)] = False",
        "removed[list(kept)[1:]] = False",
        "families",
    ),
    Fault(
        "norm: weight is not rescaled after the hidden cut",
        "pyprune/families/scale.py",
        "return 1.0 if row.is_bias else 1 / s",
        "return 1.0",
        "families",
    ),
    Fault(
        "norm over heads: projection is not rescaled",
        "pyprune/families/scale.py",
        'return t if row.width_norm == "input" else 1 / t',
        "return 1.0",
        "families",
    ),
    Fault(
        "cache: skipped attention counts in the first layer",
        "pyprune/modeling/layers.py",
        "self.layer_idx = layer_idx",
        "self.layer_idx = 0 * layer_idx",
        "families",
    ),
    Fault(
        "writer: outputs of removed layers are taken over by nobody",
        "pyprune/cut/steps.py",
        "(kept[-1][2] if kept else lost).append(part)",
        "lost.append(part)",
        "cut",
    ),
    Fault(
        "bias compensation: wrong sign",
        "pyprune/cut/compensate.py",
        "module.bias.copy_(module.bias.double() + output)",
        "module.bias.copy_(module.bias.double() - output)",
        "cut",
    ),
    Fault(
        "penalty: wrong sign",
        "pyprune/methods/regularise/dress/training.py",
        "self.dim, norm, penalty_weight, offset=self.offset",
        "self.dim, norm, -penalty_weight, offset=self.offset",
        "methods/regularise",
    ),
    Fault(
        "soft threshold: groups below it change sign",
        "pyprune/ops/group_soft_threshold/reference.py",
        "removed = norms <= threshold",
        "removed = norms <= -threshold",
        "ops/test_group_soft_threshold.py",
    ),
    Fault(
        "gates: the most important layer goes",
        "pyprune/methods/regularise/elder/gates.py",
        "key=lambda i: (abs(float(self.gates[i])), i)",
        "key=lambda i: (-abs(float(self.gates[i])), i)",
        "methods/regularise",
    ),
    Fault(
        "option ignored: the seed of instruction records",
        "pyprune/data/sampling.py",
        "_rng(config.seed).permutation(usable)",
        "_rng(0).permutation(usable)",
        "data",
    ),
    Fault(
        "option ignored: the teacher's weight in distillation",
        "pyprune/train/distill.py",
        "taught, targets[rows], alpha, temperature)",
        "taught, targets[rows], 0.0 * alpha, temperature)",
        "train",
    ),
    Fault(
        "test text is drawn for training",
        "pyprune/data/sampling.py",
        "free &= ~spans.copies_in(stream)",
        "free &= ~spans.copies_in(stream) | True",
        "data",
    ),
    Fault(
        "losses are shifted by a token",
        "pyprune/train/loss.py",
        "return torch.cat(losses).view_as(ids)[:, :-1]",
        "return torch.cat(losses).view_as(ids)[:, 1:]",
        "quality train",
    ),
    Fault(
        "resume: the objective starts anew",
        "pyprune/train/loop.py",
        'self.objective.load_state_dict(state.tensors.get("objective", {}))',
        'state.tensors.get("objective", {})',
        "methods/regularise train",
    ),
    Fault(
        "half-written folder: placed when the writer fails",
        "pyprune/runtime/files.py",
        "        place(part)\n    finally:\n",
        "    finally:\n        place(part)\n",
        "runtime checkpoint",
    ),
    Fault(
        "swallowed error: a checksum that differs",
        "pyprune/checkpoint/verify.py",
        "if _digest(path) == digest:",
        "if _digest(path) or digest:",
        "checkpoint",
    ),
    Fault(
        "budget: a broken limit counts as kept",
        "pyprune/fit/search.py",
        "return state.budget.broken(attempt.amounts, state.dense | attempt.dense, self.options.slack)",
        "return ()",
        "fit/test_fit.py",
    ),
    Fault(
        "vLLM: every layer has the sizes of the first",
        "serving/vllm/layers.py",
        "whole.layer_config(self.index)",
        "whole.layer_config(0 * self.index)",
        "serving/vllm/test_vllm.py",
    ),
    Fault(
        "GGUF: rotary channels keep their order",
        "serving/gguf/layout.py",
        "[:, order].reshape(values.shape)",
        ".reshape(values.shape)",
        "serving/gguf/test_gguf.py",
    ),
)


@contextmanager
def plant(fault: Fault) -> Iterator[None]:
    """Have the fault in its file for the time of the block."""
    path = REPO / fault.file
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", fault.file], cwd=REPO, check=False).returncode:
        raise SystemExit(f"{fault.file} has changes that are not committed; commit them first.")
    whole = path.read_text(encoding="utf-8")
    if whole.count(fault.right) != 1:
        raise SystemExit(f"{fault.file} has {fault.right!r} {whole.count(fault.right)} times; mend FAULTS.")
    try:
        path.write_text(whole.replace(fault.right, fault.wrong), encoding="utf-8")
        yield
    finally:
        path.write_text(whole, encoding="utf-8")


def first_failure(tier: str, tests: str) -> str | None:
    """Return the first test that fails, or None when all pass."""
    command = [sys.executable, "-m", "pytest", "--tier", tier, "-x", "-q", "-n", "2", "--dist", "loadgroup", "-p"]
    places = [f"tests/{place}" for place in tests.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "no:cacheprovider", *places],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1].removesuffix("@heavy") if found else None


def main() -> int:
    """Try the faults; print a row for each; return 1 when too few were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=sorted(LEAST), default="first")
    parser.add_argument("numbers", nargs="*", type=int, help=f"1 to {len(FAULTS)}; all by default")
    options = parser.parse_args()
    chosen = options.numbers or range(1, len(FAULTS) + 1)
    caught = 0
    print("| fault | found by | seconds |\n|---|---|---:|", flush=True)
    for number in chosen:
        fault, begin = FAULTS[number - 1], time.monotonic()
        with plant(fault):
            test = first_failure(options.tier, fault.tests) or first_failure(options.tier, "")
        caught += test is not None
        print(f"| {number}. {fault.name} | {test or '-'} | {time.monotonic() - begin:.0f} |", flush=True)
    print(f"\n{caught} of {len(chosen)} found by the tier {options.tier!r}.")
    return int(caught < LEAST[options.tier] - len(FAULTS) + len(chosen))


if __name__ == "__main__":
    sys.exit(main())

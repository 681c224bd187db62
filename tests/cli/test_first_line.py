"""What a command prints before it imports what takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import sys
from pyprune.cli import app, base

def first(text, style=""):
    heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
    print(text, heavy)
    raise SystemExit(0)

base.say = first
app.main()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ["prune", "MODEL", "--method", "taylor", "--dry-run"],
        ["recover", "MODEL", "--dry-run"],
        ["reconstruct", "MODEL", "--dense", "DENSE", "--out", "OUT"],
        ["eval", "MODEL", "--ppl", "text.txt"],
        ["fit", "MODEL", "--budget", "memory=1GB", "--out", "OUT"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_prints_what_it_loads_before_it_does(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Loading torch and Transformers, then MODEL. []"

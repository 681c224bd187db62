"""``python -m pyprune.modeling PROGRAM ARGS...``: run a Python program that loads pruned checkpoints by Transformers.

A program that does not import this package reports Transformers as out of date for a pruned architecture. For example:
python -m pyprune.modeling lm_eval --model hf --model_args pretrained=pruned/ --tasks piqa
"""

from __future__ import annotations

import runpy
import sys

import pyprune.modeling  # noqa: F401  (registers the pruned architectures with the Auto classes)


def main() -> None:
    """Run the module that the first argument names, as ``python -m`` does, with the arguments that follow."""
    if len(sys.argv) < 2:
        sys.exit("Give a module to run, for example: python -m pyprune.modeling lm_eval --model hf ...")
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

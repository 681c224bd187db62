"""From a budget to a phone: find the best model that fits a number of bytes, and write it as a file for llama.cpp.

    python examples/budget_to_phone.py HuggingFaceTB/SmolLM2-135M memory@2048=110MB out/phone --weights q8_0

The budget counts the weights in the format of the file and the key/value cache of one context. OUT/fitted is the
checkpoint, OUT/fitted.FORMAT.gguf the file that goes to the device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyprune import fit
from pyprune.fit.options import FitOptions
from pyprune.run.recipe import merge, parse_setting


def main() -> None:
    """Fit, write the file, and print what it takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a dense model")
    parser.add_argument("budget", metavar="BUDGET", help="such as memory@2048=110MB or parameters=100M")
    parser.add_argument("out", metavar="OUT", help="folder for the checkpoint and the file")
    parser.add_argument("--weights", default="q8_0", help="format of the file: q8_0, q4_0, f16, ...")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the search")
    args = parser.parse_args()

    settings = FitOptions().to_dict()
    for setting in args.set:
        settings = merge(settings, parse_setting(setting))
    out = Path(args.out)
    found = fit(
        args.model, args.budget, out=out / "fitted", options=FitOptions.from_dict(settings), weights=args.weights
    )
    for limit in found.budget.limits:
        taken, dense = found.winner.amounts[limit.quantity], found.dense[limit.quantity]
        print(f"{limit}: {limit.write(taken, dense)}, dense {limit.write(dense, dense)}")
    print(f"{found.winner.plan.summary()}; perplexity {found.winner.perplexity:.1f} before training")
    print(f"{found.exported}: {Path(str(found.exported)).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

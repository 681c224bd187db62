"""Prune a model, write the checkpoint, and measure it next to the dense one.

    python examples/prune_and_evaluate.py HuggingFaceTB/SmolLM2-135M wikitext2 out/pruned

TEXT is what the method reads (of a data set of the hub: its training split). The perplexity is measured on --test,
which is TEXT's test split unless you name another text (a file has none): a checkpoint is never measured on text that
shaped it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyprune import build_config, evaluate, prune


def main() -> None:
    """Prune, then evaluate both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a dense model")
    parser.add_argument("text", metavar="TEXT", help="wikitext2, ptb, c4, or a .txt or .jsonl file")
    parser.add_argument("out", metavar="OUT", help="folder to create")
    parser.add_argument("--test", help="text to measure on; default: the test split of TEXT, if it is a data set")
    parser.add_argument("--method", default="taylor", help="any method of `pyprune prune --help`")
    parser.add_argument("--ratio", type=float, default=0.2, help="share to remove")
    parser.add_argument("--protocol", default="ppl-128", help="ppl-2048 or ppl-128")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other option")
    args = parser.parse_args()
    if args.test is None and Path(args.text).exists():
        parser.error(f"{args.text} is a file, which has no test split; name a text to measure on with --test")

    options = {"method": args.method, "ratio": args.ratio, "data.source": args.text}
    config = build_config(options=options, settings=args.set)
    result = prune(args.model, config, out=args.out)
    print(result.plan.summary())

    for name, model in {"dense": args.model, "pruned": args.out}.items():
        (measured,) = evaluate(model, ppl=args.test or args.text, protocol=args.protocol).perplexity
        print(f"{name}: perplexity {measured.perplexity:.2f} on {measured.tokens:,} tokens")


if __name__ == "__main__":
    main()

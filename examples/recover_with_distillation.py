"""Cut a model, then let it learn from the dense one: its next-token distribution and its residual stream.

    python examples/recover_with_distillation.py HuggingFaceTB/SmolLM2-135M wikitext2 out/recovered

OUT/cut holds the model as it was cut, OUT/recovered the model after the recovery. Perplexity is measured on --test,
which is TEXT's test split unless you name another text (a file has none).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyprune import build_config, build_recovery, evaluate, prune, recover

TRAINING = {
    "data.samples": 256,
    "data.sequence_length": 256,
    "recover.distill.alpha": 0.5,  # share of the dense model's distribution in the loss; the text has the rest
    "recover.distill.hidden": 0.1,  # weight of the residual streams
    "recover.train.steps": 50,
    "recover.train.learning_rate": 1e-4,
    "recover.train.batch_size": 8,
    "recover.train.micro_batch_size": 4,
}


def main() -> None:
    """Cut, recover, and measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a dense model")
    parser.add_argument("text", metavar="TEXT", help="text to train on: wikitext2, ptb, c4, or a file")
    parser.add_argument("out", metavar="OUT", help="folder for both checkpoints")
    parser.add_argument("--test", help="text to measure on; default: the test split of TEXT, if it is a data set")
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the parameters to remove")
    parser.add_argument("--protocol", default="ppl-128", help="ppl-2048 or ppl-128")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="options of the recovery")
    args = parser.parse_args()
    if args.test is None and Path(args.text).exists():
        parser.error(f"{args.text} is a file, which has no test split; name a text to measure on with --test")

    cut, recovered = Path(args.out) / "cut", Path(args.out) / "recovered"
    prune(args.model, build_config(options={"method": "magnitude", "ratio": args.ratio}), out=cut)
    config = build_recovery(options={**TRAINING, "data.source": args.text}, settings=args.set)
    recover(cut, config, out=recovered, teacher=args.model)

    for folder in (cut, recovered):
        (measured,) = evaluate(folder, ppl=args.test or args.text, protocol=args.protocol).perplexity
        print(f"{folder.name}: perplexity {measured.perplexity:.2f}")


if __name__ == "__main__":
    main()

"""Make a plan by hand, edit it, replay both, and compare what they cost.

    python examples/edit_a_plan.py HuggingFaceTB/SmolLM2-135M wikitext2 out/plans

A plan says which layers, hidden channels, heads and FFN channels stay. It is JSON: OUT/by-hand.json and OUT/edited.json
can be changed with an editor, and `pyprune prune MODEL --plan FILE --out DIR` replays them as this script does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyprune import PrunePlan, build_config, evaluate, load_model, prune
from pyprune.families import family_for


def drop_middle_layer(model: str) -> PrunePlan:
    """Plan the dense model without the layer in its middle."""
    dense, _ = load_model(model)
    everything = family_for(dense).plan(dense.config)
    return everything.drop_layers([len(everything.layers) // 2])


def halve_last_ffn(plan: PrunePlan) -> PrunePlan:
    """Keep half of the last layer's FFN channels."""
    last = plan.layers[-1]
    return plan.with_layer(last.index, ffn=last.ffn[: len(last.ffn) // 2])


def main() -> None:
    """Write both plans, replay them from their files, and measure both checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a dense model")
    parser.add_argument("text", metavar="TEXT", help="text to measure on: wikitext2, ptb, c4, or a file")
    parser.add_argument("out", metavar="OUT", help="folder for the plans and the checkpoints")
    parser.add_argument("--protocol", default="ppl-128", help="ppl-2048 or ppl-128")
    args = parser.parse_args()

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    first = drop_middle_layer(args.model)
    for name, plan in {"by-hand": first, "edited": halve_last_ffn(first)}.items():
        file = out / f"{name}.json"
        file.write_text(plan.to_json(), encoding="utf-8")
        config = build_config(options={"plan": str(file)})  # no method: the plan is applied as it is
        result = prune(args.model, config, out=out / name)
        (measured,) = evaluate(out / name, ppl=args.text, protocol=args.protocol).perplexity
        removed = result.compact.removed_share if result.compact else 0.0
        print(f"{name}: {result.plan.summary()}; {removed:.1%} removed, perplexity {measured.perplexity:.2f}")


if __name__ == "__main__":
    main()

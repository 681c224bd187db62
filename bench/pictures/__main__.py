"""Write the pictures of the documentation into docs/pictures/, from the records of bench/results/.

    python -m bench.pictures                    # all of them, in seconds
    python -m bench.pictures --plan FILE --command COMMAND   # first record a plan, and the command that printed it

The files are SVG, readable on light and dark pages. The same records give the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench._command import exit_status
from bench.pictures.concepts import axes, exactness, objectives, reconstruction
from bench.pictures.flow import flow
from bench.pictures.plan import append_plan, plan
from bench.pictures.records import charts
from pyprune.runtime.charts import draw_chart
from pyprune.runtime.files import write_text
from pyprune.runtime.svg import Drawing

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"
RESULTS = REPOSITORY / "bench" / "results"


def pictures() -> Mapping[str, Drawing]:
    """Return the name of each file, without its ending, and its picture."""
    measured = {
        name: draw_chart(chart, description=description) for name, (chart, description) in charts(RESULTS).items()
    }
    ideas = {draw.__name__: draw() for draw in (flow, axes, reconstruction, objectives, exactness)}
    return {**ideas, "plan": plan(RESULTS / "plan.jsonl"), **measured}


def write(folder: Path) -> None:
    """Write all pictures into a folder."""
    for name, drawing in pictures().items():
        write_text(folder / f"{name}.svg", drawing.render(standalone=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="a plan to append to bench/results/plan.jsonl")
    parser.add_argument("--command", default="", metavar="COMMAND", help="the command that printed it")
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="DIR", help="folder to write into")
    options = parser.parse_args(arguments)

    def run() -> None:
        if options.plan:
            append_plan(RESULTS / "plan.jsonl", options.plan, options.command)
        options.out.mkdir(parents=True, exist_ok=True)
        write(options.out)

    return exit_status(run, "The same command writes all pictures again.")


if __name__ == "__main__":
    sys.exit(main())

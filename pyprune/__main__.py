"""``python -m pyprune`` and the ``pyprune`` command, which a signal may stop before anything else is imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it without a traceback."""
    try:
        from pyprune.cli.app import main as run
    except KeyboardInterrupt:
        print("Interrupted. Nothing was changed.", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()

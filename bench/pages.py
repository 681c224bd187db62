"""Print what commands print into the pages of the documentation, so that no figure is copied by hand.

    python -m bench.pages                             # all pages
    python -m bench.pages docs/results/names.md       # one page

A page names a command in a code block and, further down, has a place for its output:

    ```sh
    python -m bench.quality card --table
    ```

    <!-- printed -->
    <!-- end -->

What is between these two lines is replaced by what the last line of the code block prints. A method without a page
gets one.
Exit codes: 0 the pages are written, 2 a command failed, and no page was changed by it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from bench._command import exit_status
from pyprune.cli.app import app
from pyprune.errors import PypruneError
from pyprune.methods.registry import get_method, own_methods
from pyprune.runtime.files import write_text
from pyprune.runtime.progress import say

REPO = Path(__file__).resolve().parents[1]
DOCS = REPO / "docs"
METHODS = DOCS / "reference" / "methods"
PRINTED = re.compile(r"(?<=^<!-- printed -->\n)(?:(?!<!-- end -->).*\n)*(?=<!-- end -->$)", re.MULTILINE)
COMMAND = re.compile(r"^(.+)\n```$", re.MULTILINE)
NEW = """# {name}

{summary}

## Values

```sh
pyprune methods {name} --markdown
```

<!-- printed -->
<!-- end -->
"""


@cache
def output_of(command: str) -> str:
    """Return what a command prints, without the blank lines around it.

    Args:
        command: a bench (``python -m MODULE ...``) or ``pyprune ...``, which run in this process; or a program.

    Raises:
        PypruneError: it failed.
    """
    first, *words = shlex.split(command)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if first == "pyprune":
            status = app(words, standalone_mode=False)
        elif first == "python":
            status = _main_of(words[1])(words[2:])
        else:
            done = subprocess.run([first, *words], cwd=REPO, capture_output=True, text=True, check=False)
            status = done.returncode
            print(done.stdout)
    if status:
        raise PypruneError(f"{command!r} ended with {status}; run it to see why.")
    return printed.getvalue().strip()


def _main_of(name: str) -> Callable[[Sequence[str]], int]:
    """Return the main function of a module or package, as ``python -m`` finds it."""
    module = import_module(name)
    found = module if hasattr(module, "main") else import_module(f"{name}.__main__")
    main: Callable[[Sequence[str]], int] = found.main
    return main


def reprint(page: str, output: Callable[[str], str] = output_of) -> str:
    """Return a page with new outputs of its commands.

    Raises:
        PypruneError: an output without a code block before it.
    """

    def new(place: re.Match[str]) -> str:
        before = COMMAND.findall(page[: place.start()])
        if not before:
            raise PypruneError("A page has <!-- printed --> and no code block with a command before it; add the block.")
        return f"\n{output(before[-1])}\n\n"

    return PRINTED.sub(new, page)


def add_pages_of_methods(folder: Path = METHODS) -> None:
    """Write a page for each method that has none."""
    for name in own_methods():
        if not (path := folder / f"{name}.md").exists():
            write_text(path, NEW.format(name=name, summary=get_method(name).summary))


def main(arguments: Sequence[str] | None = None) -> int:
    """Reprint pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="default: all pages of docs/")
    options = parser.parse_args(arguments)

    def run() -> None:
        if not options.pages:
            add_pages_of_methods()
        for path in options.pages or sorted(DOCS.rglob("*.md")):
            page = path.read_text(encoding="utf-8")
            if (new := reprint(page)) != page:
                write_text(path, new)
                say(f"{path}: reprinted")

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())

"""List what the package says to people, from its source: errors, warnings, notes, and the sentences they are made of.

    python -m tests._support.messages              # all, one a line: place, kind, characters, text
    python -m tests._support.messages --longest 50

A value in a message is written as ``{}`` and counts as :data:`VALUE` characters.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
VALUE = 8
"""Characters that a value usually has."""
WORDS = 4
"""Fewest words of a text that is listed."""
MARKUP = re.compile(r"</?[a-z]+[ >]|=\"")
KINDS = {"warn": "warning", "say": "note", "note": "note"}
"""Function that prints -> kind of its text."""


@dataclass(frozen=True)
class Message:
    """A text that the package may print.

    Attributes:
        path: of the file, from the repository.
        line: where the text begins.
        kind: error, warning, note, or text: a sentence that is returned, and printed elsewhere.
        text: with ``{}`` for values.
    """

    path: str
    line: int
    kind: str
    text: str

    @property
    def characters(self) -> int:
        """Return how long the text is with usual values."""
        return len(self.text) + (VALUE - 2) * self.text.count("{}")


def messages(repository: Path = REPO) -> list[Message]:
    """Return every message of the package, by file and line."""
    files = [path for path in (repository / "pyprune").rglob("*.py") if "serving" not in path.parts]
    files += (repository / "serving").rglob("*.py")
    return [
        message
        for path in sorted(files)
        for message in _of(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(repository).as_posix())
    ]


def _of(tree: ast.Module, path: str) -> Iterator[Message]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield from _within(statement, path, "text")


def _within(node: ast.AST, path: str, kind: str) -> Iterator[Message]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return  # has its own turn
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Raise):
        kind = "error"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        kind = KINDS.get(name, "error" if name.endswith("Error") else kind)
    text = _text(node)
    if text is not None:
        if len(text.split()) >= WORDS and not MARKUP.search(text):
            yield Message(path, getattr(node, "lineno", 0), kind, text)
        for value in ast.walk(node):  # what values are made of may be sentences too
            if isinstance(value, ast.FormattedValue):
                yield from _within(value.value, path, kind)
        return
    for child in ast.iter_child_nodes(node):
        yield from _within(child, path, kind)


def _text(node: ast.AST) -> str | None:
    """Return the text of a string, of an f-string, or of a sum of both; None = something else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        if left is None and right is None:
            return None
        return f"{'{}' if left is None else left}{'{}' if right is None else right}"
    return None


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, metavar="N", help="the N longest, longest first")
    options = parser.parse_args()
    listed = messages()
    if options.longest:
        listed = sorted(listed, key=lambda message: -message.characters)[: options.longest]
    for message in listed:
        text = re.sub(r"\s+", " ", message.text)
        print(f"{message.path}:{message.line}: {message.kind}, {message.characters}: {text}")


if __name__ == "__main__":
    main()

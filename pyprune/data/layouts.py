"""Plain text -> documents: recognise the layout of a file, and divide it into documents."""

from __future__ import annotations

import re
from collections.abc import Callable

from pyprune.data.documents import PARAGRAPH, Corpus, Document
from pyprune.data.records import split_lines

WIKITEXT_TITLE = re.compile(r"^ = [^=].* = $")
_NOT_TREEBANK = re.compile(r"^(?! [^\n]+ $)", re.MULTILINE)
"""The first line that is not text between two spaces."""
_WIKIPEDIA_ARTICLE = re.compile(r"<doc [^>]*>\n(.*?)</doc>", re.DOTALL)


def parse_plain(source: str, text: str) -> Corpus:
    """Divide a text by the WikiText or Penn Treebank layout; any other is cut at blank lines.

    Joining by a blank line gives a plain file back unchanged: its evaluation stream is the file itself.

    Args:
        source: the name in errors.
        text: the content of the file.

    Raises:
        DataError: it holds too many documents for memory.
    """
    body = text.removesuffix("\n")
    if WIKITEXT_TITLE.match(_first_line(body)):
        # The rows of the hub's wikitext: a line keeps its end, a blank one is the empty string.
        rows = [line + "\n" if line.strip() else "" for line in split_lines(source, body, "\n")]
    elif not _NOT_TREEBANK.search(body):
        rows = [line.strip() for line in split_lines(source, body, "\n")]
    else:
        rows = split_lines(source, text, PARAGRAPH)
    return Corpus(source, tuple(Document.plain(row) for row in rows))


def _first_line(text: str) -> str:
    """Return the first line that is not blank, or an empty one."""
    at = len(text) - len(text.lstrip())
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    return text[start : end if end >= 0 else len(text)]


def parse_packaged(source: str, file_name: str, text: str) -> Corpus:
    """Read a text that an installed package carries: by the layout of its file name, else as :func:`parse_plain`.

    Args:
        source: the name in errors.
        file_name: without folders.
        text: the content of the file.

    Raises:
        DataError: it holds too many documents for memory.
    """
    if file_name not in _PACKAGED_LAYOUTS:
        return parse_plain(source, text)
    pieces = (piece.strip() for piece in _PACKAGED_LAYOUTS[file_name](text))
    return Corpus(source, tuple(Document.plain(piece) for piece in pieces if piece))


_PACKAGED_LAYOUTS: dict[str, Callable[[str], list[str]]] = {
    "c4.utf8": lambda text: text.split("\n"),
    "multilingual.utf8": lambda text: text.split("\n"),
    "wiki.utf8": _WIKIPEDIA_ARTICLE.findall,
    "tiny.utf8": lambda text: text.split("<|endoftext|>"),
}
"""The files of exllamav3 that are not cut at blank lines."""

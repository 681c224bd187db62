"""The documents of a source, in order, and the text between them in an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

PARAGRAPH = "\n\n"


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
        text: the plain text (an instruction record in the Alpaca prompt layout).
        turns: (role, content) pairs for a chat template; one user turn unless the record is an instruction.
        prompt: of an instruction record, the beginning of ``text`` before the response; else empty.
    """

    text: str
    turns: tuple[tuple[str, str], ...]
    prompt: str = ""

    @classmethod
    def plain(cls, text: str) -> Document:
        """Make a document of plain text."""
        return cls(text, (("user", text),))


@dataclass(frozen=True)
class Corpus:
    """All documents of one source, and the way that evaluation protocols join them.

    Attributes:
        name: the source as the user wrote it.
        documents: in the order of the source.
        joiner: text between two documents in the evaluation stream.
        max_windows: most windows an evaluation uses; None = all.
        instructions: True when the documents are instruction records (they end with the eos token).
    """

    name: str
    documents: tuple[Document, ...]
    joiner: str = PARAGRAPH
    max_windows: int | None = None
    instructions: bool = False

    def text(self) -> str:
        """Return the evaluation stream: every document, join_ids once."""
        return self.joiner.join(document.text for document in self.documents)

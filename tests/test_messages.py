"""What the package says to people: short, and in plain words. The list is of `python -m tests._support.messages`."""

from __future__ import annotations

import re
from pathlib import Path

from tests._support.messages import Message, messages

LONGEST = 220
"""Characters of two lines of 110."""
UNCLEAR = re.compile(
    r"\b(anew|beside|at hand|so many|nowhere|told|ha(s|ve) gone|lies? outside|would go\b(?! on)|stays?\b(?! below)|"
    r"turn one of them|problems more|is there twice)\b"
)
"""Words of the house's own that a reader has to guess, and their like."""
ALLOWED = {"so the answer cannot be told from the prompt"}


def test_a_message_has_two_lines_at_most() -> None:
    long = [f"{m.path}:{m.line}: {m.characters} characters: {m.text}" for m in messages() if m.characters > LONGEST]
    assert not long, "\n".join(long)


def test_a_message_has_plain_words() -> None:
    found = [
        f"{message.path}:{message.line}: {match.group()!r} in: {message.text}"
        for message in messages()
        if (match := UNCLEAR.search(message.text)) and not any(text in message.text for text in ALLOWED)
    ]
    assert not found, "\n".join(found)


def test_the_list_has_errors_warnings_notes_and_what_they_are_made_of(tmp_path: Path) -> None:
    (tmp_path / "pyprune").mkdir()
    (tmp_path / "serving").mkdir()
    (tmp_path / "pyprune" / "a.py").write_text(
        '"""Not a message, but a docstring of a module."""\n'
        "def f(x):\n"
        '    """Neither is the docstring of a function."""\n'
        "    if x:\n"
        '        raise ConfigError(f"x is {x}; it must be 0" + ". Leave it out.")\n'
        '    warn("This is a warning, short.")\n'
        "    say(f\"Wrote {x} and {why or 'the file of the name'}.\")\n"
        '    return "a sentence that another prints"\n'
    )
    listed = messages(tmp_path)
    assert [(m.line, m.kind, m.text) for m in listed] == [
        (5, "error", "x is {}; it must be 0. Leave it out."),
        (6, "warning", "This is a warning, short."),
        (7, "note", "Wrote {} and {}."),
        (7, "note", "the file of the name"),
        (8, "text", "a sentence that another prints"),
    ]
    assert Message("a.py", 1, "note", "Wrote {}.").characters == len("Wrote .") + 8
    assert len(messages()) > 1000

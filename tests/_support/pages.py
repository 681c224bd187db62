"""The pages of the documentation: their blocks of code, links, anchors and sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests._support.paths import REPO

PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")])
_FENCE = re.compile(r"^(?:<!-- (run(?: slow)?) -->\n)?( *)```(\w*)\n(.*?)^\2```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Code of a page. ``run``: "run" or "run slow" where a comment ``<!-- run -->`` before it marks it as runnable."""

    language: str
    text: str
    run: str

    @property
    def lines(self) -> list[str]:
        """Its lines, continued ones joined, without comments."""
        lines = [line.partition("  # ")[0].strip() for line in self.text.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def name_of(page: Path) -> str:
    """Return the path of a page inside the repository."""
    return page.relative_to(REPO).as_posix()


def read(page: Path) -> str:
    """Return the text of a page."""
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [Block(language, text, run) for run, _, language, text in _FENCE.findall(read(page))]


def links(page: Path) -> list[tuple[str, str]]:
    """Return target and anchor of every link and picture of a page, outside of code."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", read(page)))
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"\b(?:src|srcset|href)=\"([^\"]+)\"", text)]
    return [(target.partition("#")[0], target.partition("#")[2]) for target in targets]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub names them (so does the site)."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} (.+?)#*$", _FENCE.sub("", read(page)), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def sentences(page: Path) -> Iterator[str]:
    """Yield the sentences of paragraphs, list entries, headings and cells of tables; code in them is one word."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("\n", read(page)), flags=re.DOTALL)
    text = re.sub(r"^(?: {4,}|\t).*\n(?=\s*\n| {4}|\t)", "\n", text, flags=re.MULTILINE)  # code without a fence
    text = re.sub(r"^.*\|.*$", _cells, text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[*-]|\d+\.|#+|!!!.*) ", "\n\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        plain = re.sub(r"``.+?``|`[^`]*`|https?://\S+", "x", paragraph)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(plain.split()))


def _cells(row: re.Match[str]) -> str:
    return "\n\n" + "\n\n".join(re.split(r"(?<!\\)\|", row.group(0))) + "\n\n"

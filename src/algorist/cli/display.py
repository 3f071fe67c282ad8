"""What a run looks like in a terminal: progress bars, a line per step, the closing table."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from algorist.store.run_log import Display, LongWork, step_line
from algorist.store.safe_text import printable


class TerminalDisplay(Display):
    """Draws a run with rich; on a pipe it prints plain lines: every GRPO step, SFT and evaluations now and then."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=False, highlight=False)
        self._progress: Progress | None = None
        self._tasks: dict[str, Any] = {}
        self._live = self.console.is_terminal
        self._work = LongWork()

    def say(self, text: str) -> None:
        """Print one line above the bars."""
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
        """Show the state of other long work."""
        if self._live:
            self._bar(stage, done, total, "")
        else:
            line = self._work.line(stage, done, total)
            if line:
                self.say(line)

    def finished(self, stage: str) -> None:
        """Take the stage's bar away."""
        self._work.over(stage)
        if self._progress and stage in self._tasks:
            self._progress.remove_task(self._tasks.pop(stage))
            if not self._tasks:
                self._progress.stop()
                self._progress = None

    def close(self) -> None:
        """Take all bars away; a terminal shows its cursor again."""
        for stage in list(self._tasks):
            self.finished(stage)

    def _bar(self, stage: str, done: int, total: int, told: str) -> None:
        if self._progress is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[told]}"),
            )
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._progress.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, told=told)
        self._progress.update(self._tasks[stage], completed=done, told=told)


def closing_table(
    console: Console,
    before: dict[str, Any],
    after: dict[str, Any],
    paired: dict[str, Any],
    names: tuple[str, str] = ("SFT", "GRPO"),
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

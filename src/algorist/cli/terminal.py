"""What verbs show on a terminal: one console that everything is drawn with, bars, a line per step, tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.padding import Padding
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
from rich.text import Text

from algorist.cli.program import COMMAND, as_typed
from algorist.store.run_log import Lines, step_line
from algorist.store.safe_text import SafeStream, json_text, printable

PIPE = 1_000_000
"""Columns where no terminal is: nothing is wrapped, so that a line can be searched for."""
ROOMY = 96
"""Columns from which two intervals and that of their difference fit beside each other."""
CLOSING = ("greedy_accuracy", "lenient_accuracy", "pass@1", "format", "truncated", "mean_tokens")


class Screen(Console):
    """A console whose texts are printable, whoever wrote them, and are no markup."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a text, its lines broken between words; commands as they can be typed, and whole, so that they can be copied."""
        for line in text.split("\n"):
            match = COMMAND.search(line)
            before = line[: match.start()] if match else line
            alone = match and (not before.strip() or (before.endswith(": ") and len(line) > self.width))
            if alone and before.strip():
                self.lines(before.rstrip(), style)
            if alone:
                self.print(f"  {as_typed(line[len(before) :])}", style=style, soft_wrap=True)
            else:
                self.lines(as_typed(line), style)

    @property
    def can_redraw(self) -> bool:
        """Whether a bar can move here: on a terminal. FORCE_COLOR, which notebooks set, only colours a pipe."""
        return self.is_terminal and self.file.isatty()

    def lines(self, text: str, style: str | None = None) -> None:
        """Print a text as it is; where a line is too long, the rest is indented as it is."""
        for line in text.split("\n"):
            indent = len(line) - len(line.lstrip(" ")) if len(line) > self.width else 0
            self.print(
                Padding(line[indent:], (0, 0, 0, indent), expand=False) if indent else line, style=style
            )


def console(*, stderr: bool = False) -> Screen:
    """Return the console for everything that is drawn.

    It writes past ``SafeStream``, which would show the console's own sequences as text.
    """
    stream = sys.stderr if stderr else sys.stdout
    raw = getattr(stream, "rich_proxied_file", stream)
    return Screen(file=raw, width=None if raw.isatty() else PIPE, highlight=False, markup=False, emoji=False)


def say(text: str, style: str | None = None, *, stderr: bool = False) -> None:
    """Print a text on standard output or standard error; see ``Screen.say``."""
    console(stderr=stderr).say(text, style)
    (sys.stderr if stderr else sys.stdout).flush()


def listing(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print rows of the same keys: as a table, or as one JSON array."""
    if as_json:
        print(json_text(rows))
    elif rows:
        console().print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))


@contextmanager
def printing_above(drawn: Console) -> Iterator[None]:
    """While ``drawn`` draws something that moves, let what others print come out above it, in whole lines.

    Rich's own redirection would lie over ``SafeStream`` and send terminals what models print; this one lies under it.
    """
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, SafeStream) and s.isatty()]
    for stream in streams:
        stream.below = cast(TextIO, FileProxy(drawn, stream.rich_proxied_file))
    try:
        yield
    finally:
        for stream in streams:
            stream.below.flush()
            stream.below = stream.rich_proxied_file


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Return a table without a frame; a column of numbers stands to the right."""
    drawn, lines = (
        Table(
            title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1), header_style="bold"
        ),
        list(rows),
    )
    for heading, cells in zip(headings, zip(*lines, strict=True), strict=True):
        number = all(cell[:1] in "+-–0123456789" for cell in cells)
        drawn.add_column(heading, justify="right" if number else "left", overflow="fold")
    for line in lines:
        drawn.add_row(*line)
    return drawn


class TerminalDisplay(Lines):
    """Draws a run with rich; on a pipe it prints plain lines."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__()
        self.console = console(stderr=stderr)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(40 if self.console.width >= ROOMY else 20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            console=self.console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[str, TaskID] = {}
        self._drawing = ExitStack()
        self._live = self.console.can_redraw

    def say(self, text: str) -> None:
        self._work.last = time.monotonic()
        self.console.say(text)

    def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float) -> None:
        """Show a training step: a bar, and a line where one is due; SFT has lines only where no bar can be drawn."""
        line = step_line(stage, step, steps, values, seconds_left, width=self.console.width)
        if self._live:
            self._bar(stage, step, steps, line.split(" · ")[1])
        if (stage == "grpo" or not self._live) and self._work.step_is_due(stage, step, steps):
            self.say(line)

    def progress(self, stage: str, done: int, total: int) -> None:
        if self._live:
            self._bar(stage, done, total)
        else:
            super().progress(stage, done, total)

    def finished(self, stage: str) -> None:
        """Take the stage's bar away."""
        super().finished(stage)
        if stage in self._tasks:
            self._bars.remove_task(self._tasks.pop(stage))
            if not self._tasks:
                self._bars.stop()
                self._drawing.close()

    def close(self) -> None:
        """Take all bars away; a terminal shows its cursor again."""
        for stage in list(self._tasks):
            self.finished(stage)

    def _bar(self, stage: str, done: int, total: int, said: str | None = None) -> None:
        if stage not in self._tasks:
            if not self._tasks:
                self._drawing.enter_context(printing_above(self.console))
                self._bars.start()
            self._tasks[stage] = self._bars.add_task(stage, total=total, said="")
        self._bars.update(self._tasks[stage], completed=done)
        if said is not None:
            self._bars.update(self._tasks[stage], said=said)


def closing_table(
    drawn: Console,
    before: dict[str, Any],
    after: dict[str, Any],
    paired: dict[str, Any],
    names: Sequence[str] = ("SFT", "GRPO"),
    only: Sequence[str] | None = CLOSING,
) -> None:
    """Print two evaluations of the same problems, each with a 95 % interval, and the paired difference.

    Where the terminal is narrow, only the difference has its interval. ``only`` names the metrics; None is all of them.
    """
    roomy = drawn.width >= ROOMY

    def text(interval: Any, name: str) -> str:
        return str(interval.text(name) if roomy else interval.text(name).partition(" [")[0])

    rows = [
        (
            name.replace("_", " "),
            text(before[name], name),
            text(after[name], name),
            paired[name].text(name, signed=True) if name in paired else "",
        )
        for name in only or after
        if name in before and name in after
    ]
    what = "95 % intervals" if roomy else "95 % interval of the difference"
    drawn.print(table(("", *names, "paired difference"), rows, title=f"held-out problems, {what}"))

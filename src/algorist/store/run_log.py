"""Messages of a run while it works: to a display, to a script's standard error, and always to ``training.log``."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from algorist.store.redact import RedactSecrets
from algorist.store.safe_text import one_line, printable

log = logging.getLogger("algorist.store.run_log")

SHOWN = (
    ("loss", "loss {:z.3g}"),
    ("reward", "reward {:z.3f}"),
    ("rewards/correct/mean", "accuracy {:.2f}"),
    ("completions/mean_length", "tokens {:.0f}"),
    ("groups/useful_share", "useful groups {:.2f}"),
    ("rollout/tokens_per_s", "{:.0f} tokens/s"),
)
"""Numbers of a step's line, the most telling first: where it is too long, the last ones go."""
ONLY_LOGGED = (("learning_rate", "learning rate {:.2g}"), ("grad_norm", "gradient norm {:.2g}"))
SAY_EVERY_S = (4.0, 20.0)
"""Seconds without a bar: until the first line of long work, and between later ones."""
MOST_LINES = {"grpo": 200}
"""Most lines for the steps of a stage; of a longer stage, every k-th step has one."""
MOST_OTHERS = 20


class LongWork:
    """Says when a line about long work is due: soon at first, then after a quarter of the time it has taken.

    After a quarter of an hour the gaps grow with that time again: days of work are a few hundred lines.
    """

    def __init__(self) -> None:
        self.last = time.monotonic()
        self._began: dict[str, float] = {}
        self._shown: dict[str, int] = {}

    def step_is_due(self, stage: str, step: int, steps: int, *, bar: bool = False) -> bool:
        """Return whether a training step has a line: the last one, every k-th, k being 1, 2, 5, 10, 20, 50 …, or without a bar the one
        after a long silence."""
        most, before = MOST_LINES.get(stage, MOST_OTHERS), self._shown.get(stage, 0)
        sizes = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
        every = next(size for size in sizes if size * most >= steps)
        due = step // every > before // every or step == steps
        self._shown[stage] = step if due else before
        return due or (not bar and self.line(stage, step, steps) is not None)

    def line(self, stage: str, done: int, total: int) -> str | None:
        """Return the line that is due, or None."""
        now = time.monotonic()
        began = self._began.setdefault(stage, now)
        least, most = SAY_EVERY_S
        if now - self.last < max(min(most, max(least, (now - began) / 4)), (now - began) / 40):
            return None
        return f"{stage} {done}/{total} · {clock(now - began)}"

    def over(self, stage: str) -> None:
        """Forget the stage."""
        self._began.pop(stage, None)
        self._shown.pop(stage, None)


class Display:
    """Display of a run; this one shows nothing. The CLI draws it, ``Lines`` prints it."""

    def say(self, text: str) -> None:
        """Show one line."""

    def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float) -> None:
        """Show the state of a training stage."""

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show the state of long work that is not training."""

    def finished(self, stage: str) -> None:
        """A stage is over."""


class Quiet(Display):
    """A display that shows nothing; the log file has it all."""


class Lines(Display):
    """Prints plain lines on standard error: what is said, training steps, long work every few seconds."""

    def __init__(self) -> None:
        self._work = LongWork()

    def say(self, text: str) -> None:
        """Print one line."""
        print(printable(text), file=sys.stderr, flush=True)
        self._work.last = time.monotonic()

    def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float) -> None:
        """Print a logged step where a line is due."""
        if self._work.step_is_due(stage, step, steps):
            self.say(step_line(stage, step, steps, values, seconds_left))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Print the progress of long work, now and then."""
        line = self._work.line(stage, done, total)
        if line:
            self.say(line)

    def finished(self, stage: str) -> None:
        """Forget the stage."""
        self._work.over(stage)


class Logged(Display):
    """Passes everything on to a display and writes it to the log; of a training stage that is over, a line stays."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self._began: dict[str, float] = {}
        self._last: dict[str, tuple[int, int, dict[str, float]]] = {}

    def say(self, text: str) -> None:
        """Show one line and log it."""
        for line in text.splitlines():
            level = logging.WARNING if line.startswith("warning") else logging.INFO
            log.log(level, "%s", line.removeprefix("warning: "))
        self.display.say(text)

    def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float) -> None:
        """Show a training step and log it."""
        log.info("%s", step_line(stage, step, steps, values, seconds_left, whole=True))
        self._last[stage] = step, steps, values
        self.display.step(stage, step, steps, values, seconds_left)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Pass on; the log says when it is over."""
        self._began.setdefault(stage, time.monotonic())
        self.display.progress(stage, done, total)

    def finished(self, stage: str) -> None:
        """Pass on; say what a training stage did."""
        self.display.finished(stage)
        began, last = self._began.pop(stage, None), self._last.pop(stage, None)
        if began is not None and last is not None:
            step, steps, values = last
            number = f"{steps} steps" if step == steps else f"{step} of {steps} steps"
            shown = SHOWN[1:3] if "reward" in values else SHOWN[:1]
            parts = [form.format(values[key]) for key, form in shown if key in values]
            self.say(", ".join([f"{stage}: {number}", *parts, clock(time.monotonic() - began)]))


def step_line(
    stage: str,
    step: int,
    steps: int,
    values: dict[str, float],
    seconds_left: float,
    *,
    width: int = 10_000,
    whole: bool = False,
) -> str:
    """Return ``grpo 3/120 · loss 0.01 · … · 1:40 left``, at most ``width`` wide; ``whole`` also has what only the log shows."""
    parts = [form.format(values[key]) for key, form in SHOWN if key in values]
    if whole:
        parts += [form.format(values[key]) for key, form in ONLY_LOGGED if key in values]
        parts += [
            f"{key[len('rewards/') : -len('/mean')]} {value:z.3f}"
            for key, value in values.items()
            if key.startswith("rewards/") and key.endswith("/mean")
        ]
    begin, end = f"{stage} {step}/{steps}", f"{clock(seconds_left)} left"
    while parts and len(" · ".join([begin, *parts, end])) > width:
        parts.pop()
    return " · ".join([begin, *parts, end])


def clock(seconds: float) -> str:
    """Return ``1:05`` or ``2:03:04``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """Return ``40 seconds``, ``12 minutes``, ``3.5 hours`` or ``25 days``, for what is not known to the second."""
    units = ((1, "seconds"), (60, "minutes"), (3600, "hours"), (86400, "days"))
    size, unit = next((pair for pair in reversed(units) if seconds >= 1.5 * pair[0]), units[0])
    count = seconds / size
    return f"{count:.1f} {unit}" if size >= 3600 and count < 9.95 else f"{count:.0f} {unit}"


class LogFile:
    """Write the package's log records to ``training.log`` while the run lasts; in the main process only.

    ``early`` are records from before the folder was there. Warnings are said on the ``display`` as well.
    """

    def __init__(
        self,
        folder: Path,
        main: bool = True,
        early: Sequence[logging.LogRecord] = (),
        display: Display | None = None,
    ) -> None:
        self.early = early
        self.handlers: list[logging.Handler] = []
        if main:
            handler = logging.FileHandler(folder / "training.log", encoding="utf-8")
            handler.addFilter(_NoRepeats())
            handler.addFilter(RedactSecrets())
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
            self.handlers = [handler, _Warnings(display or Quiet())]

    def __enter__(self) -> None:
        logger = logging.getLogger("algorist")
        logger.setLevel(logging.INFO)
        for handler in self.handlers:
            logger.addHandler(handler)
            for record in self.early:
                if record.levelno >= handler.level:
                    handler.handle(record)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and self.handlers:
            log.error("the run ended: %s: %s", type(error).__name__, error)
        for handler in self.handlers:
            logging.getLogger("algorist").removeHandler(handler)
            handler.close()


class _Warnings(logging.Handler):
    """Says each warning that a module logs once."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self.display = display.display if isinstance(display, Logged) else display
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = one_line(record.getMessage(), 400)
        if record.name != log.name and text not in self._said:
            self._said.add(text)
            self.display.say(f"warning: {text}")


@contextmanager
def kept_records() -> Iterator[list[logging.LogRecord]]:
    """Keep the package's log records, for a ``LogFile`` that cannot be opened yet."""
    handler = MemoryHandler(0)  # without a target it keeps all
    logging.getLogger("algorist").addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logging.getLogger("algorist").removeHandler(handler)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Log no warnings meanwhile: their content is shown otherwise."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _NoRepeats(logging.Filter):
    """Leave out a line that a module logs and also says."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message differs from the one before."""
        message = record.getMessage().removeprefix("warning: ")
        repeated, self.last = message == self.last, message
        return not repeated

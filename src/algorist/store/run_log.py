"""What a run says while it works: to a display, to a script's standard error, and always to ``training.log``."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from algorist.store.redact import RedactSecrets
from algorist.store.safe_text import printable

log = logging.getLogger("algorist.store.run_log")

SHOWN = (
    ("loss", "loss {:.3f}"),
    ("reward", "reward {:.3f}"),
    ("rewards/correct/mean", "accuracy {:.2f}"),
    ("groups/useful_share", "useful groups {:.2f}"),
    ("completions/mean_length", "tokens {:.0f}"),
    ("learning_rate", "learning rate {:.2g}"),
    ("grad_norm", "gradient norm {:.2g}"),
    ("rollout/tokens_per_s", "{:.0f} tokens/s"),
)
ONLY_LOGGED = ("learning_rate", "grad_norm")
SAY_EVERY_S = (4.0, 20.0)
"""Where no bar can be drawn, long work shows its first line after the first time, and one at least as often as the second."""


class LongWork:
    """Says when a line about long work is due: soon at first, then after a quarter of the time it has taken."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self._began: dict[str, float] = {}

    def line(self, stage: str, done: int, total: int) -> str | None:
        """Return the line that is due, or None."""
        now = time.monotonic()
        began = self._began.setdefault(stage, now)
        least, most = SAY_EVERY_S
        if now - self.last < min(most, max(least, (now - began) / 4)):
            return None
        return f"{stage} {done}/{total} · {clock(now - began)}"

    def over(self, stage: str) -> None:
        """Forget the stage."""
        self._began.pop(stage, None)


class Display:
    """What a run shows; this one shows nothing. The CLI draws it, ``Lines`` prints it."""

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
    """Prints plain lines on standard error: what is said, every logged step, long work every few seconds."""

    def __init__(self) -> None:
        self._work = LongWork()

    def say(self, text: str) -> None:
        """Print one line."""
        print(printable(text), file=sys.stderr, flush=True)
        self._work.last = time.monotonic()

    def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float) -> None:
        """Print a logged step."""
        self.say(step_line(stage, step, steps, values, seconds_left))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Print how far long work is, now and then."""
        line = self._work.line(stage, done, total)
        if line:
            self.say(line)

    def finished(self, stage: str) -> None:
        """Forget the stage."""
        self._work.over(stage)


class Logged(Display):
    """Passes everything on to a display and writes it to the log."""

    def __init__(self, display: Display) -> None:
        self.display = display

    def say(self, text: str) -> None:
        """Show one line and log it."""
        for line in text.splitlines():
            level = logging.WARNING if line.startswith("warning") else logging.INFO
            log.log(level, "%s", line.removeprefix("warning: "))
        self.display.say(text)

    def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float) -> None:
        """Show a training step and log it."""
        log.info("%s", step_line(stage, step, steps, values, seconds_left, whole=True))
        self.display.step(stage, step, steps, values, seconds_left)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Pass on; the log says when it is over."""
        self.display.progress(stage, done, total)

    def finished(self, stage: str) -> None:
        """Pass on."""
        self.display.finished(stage)


def step_line(
    stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float, *, whole: bool = False
) -> str:
    """Return ``grpo 3/120 · loss 0.01 · … · 1:40 left``; ``whole`` also has what only the log shows."""
    told = " · ".join(
        form.format(values[key]) for key, form in SHOWN if key in values and (whole or key not in ONLY_LOGGED)
    )
    return f"{stage} {step}/{steps} · {told} · {clock(seconds_left)} left"


def clock(seconds: float) -> str:
    """Return ``1:05`` or ``2:03:04``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class LogFile:
    """Write the package's log records to ``training.log`` while the run lasts; in the main process only.

    ``early`` are records from before the folder was there.
    """

    def __init__(self, folder: Path, main: bool = True, early: Sequence[logging.LogRecord] = ()) -> None:
        self.early = early
        self.handler: logging.Handler = logging.NullHandler()
        if main:
            self.handler = logging.FileHandler(folder / "training.log", encoding="utf-8")
        self.handler.addFilter(_NoRepeats())
        self.handler.addFilter(RedactSecrets())
        self.handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))

    def __enter__(self) -> None:
        logger = logging.getLogger("algorist")
        logger.setLevel(logging.INFO)
        logger.addHandler(self.handler)
        for record in self.early:
            self.handler.handle(record)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            log.error("the run ended: %s: %s", type(error).__name__, error)
        logging.getLogger("algorist").removeHandler(self.handler)
        self.handler.close()


@contextmanager
def kept_records() -> Iterator[list[logging.LogRecord]]:
    """Keep what the package logs, for a ``LogFile`` that cannot be opened yet."""
    handler = MemoryHandler(0)  # without a target it keeps all
    logging.getLogger("algorist").addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logging.getLogger("algorist").removeHandler(handler)


class _NoRepeats(logging.Filter):
    """Leave out a line that a module logs and also says."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message differs from the one before."""
        told = record.getMessage().removeprefix("warning: ")
        repeated, self.last = told == self.last, told
        return not repeated

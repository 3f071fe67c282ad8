"""The best checkpoint of a GRPO run by held-out accuracy, and the end of a run that collapses or no longer improves.

Everything is found from the lines of ``metrics.jsonl``, so a resumed run decides as the uninterrupted one. ``grpo/best.json`` says which
checkpoint is the best and, when the run was ended, why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from algorist.config.grpo_sections import StopSection
from algorist.diagnosis.causes_optimisation import (
    COLLAPSED,
    ENTROPY_NATS,
    ENTROPY_TIMES,
    HALVED,
    KL_LARGE,
    LEAST_DROP,
    LEAST_ENTROPY,
)
from algorist.store.atomic import replace_text
from algorist.training.checkpoint import load_weights
from algorist.training.processes import Processes

ACCURACY = "eval/greedy_accuracy"
FILE, START = "best.json", "start"
"""The record, and the folder of the policy that the stage began with: it is evaluated too where ``grpo.stop`` may end the run."""
START_LINES = 3
"""Logged lines whose median is a metric's value at the start."""
SHRUNK = 0.2
"""Share of the first mean length below which completions have collapsed."""
CUT, CUT_AT_START = 0.9, 0.5
"""Share of truncated completions that is a collapse, where it was below the second at the start."""


@dataclass(frozen=True)
class Best:
    """The best held-out accuracy so far and the optimizer step that it was measured after."""

    step: int
    accuracy: float

    @property
    def checkpoint(self) -> str:
        """Name of its folder."""
        return f"checkpoint-{self.step}" if self.step else START


class KeepBest(TrainerCallback):
    """Saves and keeps the best checkpoint; ends the run as ``grpo.stop`` says.

    Args:
        folder: The stage's folder.
        stop: Patience and reasons; None never ends a run.
        problems: Held-out problems, for the noise of an accuracy.
        processes: The main one writes and decides.
    """

    def __init__(self, folder: Path, stop: StopSection | None, problems: int, processes: Processes) -> None:
        self.folder, self.stop, self.problems, self.processes = folder, stop, max(1, problems), processes
        self.best: Best | None = None
        self.last: Best | None = None
        self.ended: dict[str, Any] | None = None
        self._start: dict[str, list[float]] = {}
        self._signs: dict[str, int] = {}
        self._unsaved = False

    def begin(self, trainer: Any, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take the lines of the run so far, and let ``trainer`` keep the best checkpoint."""
        trainer.best_checkpoint = lambda: self.best.checkpoint if self.best else ""
        for line in lines:
            if line.get("stage") == "grpo":
                self.see(int(line["step"]), {k: v for k, v in line.items() if isinstance(v, (int, float))})
        self._unsaved = False
        if self.processes.main:
            (self.folder / FILE).unlink(missing_ok=True)  # of evaluations that are done again
        self._write()

    def see(self, step: int, values: Mapping[str, float]) -> None:
        """Take one line of metrics, that of a held-out evaluation included."""
        if self.ended:
            return
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if ACCURACY in values:
            self.last = Best(step, values[ACCURACY])
            if self.best is None or self.last.accuracy > self.best.accuracy:
                self.best, self._unsaved, self._signs = self.last, step > 0, {}
                self._write()
        for name in ("entropy", "completions/mean_length", "completions/clipped_ratio"):
            if name in values and len(self._start.setdefault(name, [])) < START_LINES:
                self._start[name].append(values[name])
        if self.stop is not None and self.best is not None:
            self._judge(self.stop, step, values)

    def _judge(self, stop: StopSection, step: int, values: Mapping[str, float]) -> None:
        assert self.best is not None
        # A policy that was never better does not collapse.
        signs = {} if self.last == self.best else self._signs_of_collapse(values)
        self._signs = {n: first for n, first in self._signs.items() if signs.get(n, " ")}
        shown = {name: text for name, text in signs.items() if text}
        waited = step - self.best.step
        for name, text in shown.items():
            lasts = step - self._signs.setdefault(name, step) >= stop.patience - 1
            if "collapse" in stop.on and lasts and not self.ended:
                self._end(step, "collapse", text)
        if "plateau" in stop.on and ACCURACY in values and waited >= stop.patience and not self.ended:
            why = next(iter(shown.values()), f"no better held-out accuracy for {waited} steps")
            self._end(step, "collapse" if shown else "plateau", why)

    def _signs_of_collapse(self, values: Mapping[str, float]) -> dict[str, str]:
        """Return for each sign that ``values`` has a say in: what shows it, or an empty text when it is not there."""
        assert self.best is not None and self.last is not None
        best, now = self.best.accuracy, self.last.accuracy
        noise = 2 * math.sqrt((best * (1 - best) + now * (1 - now)) / self.problems)
        fell = now < HALVED * best and best - now > max(LEAST_DROP, noise)
        signs = {"accuracy": f"held-out accuracy {best:.3f} → {now:.3f}" if fell else ""}
        for name, start in ((n, sorted(v)[len(v) // 2]) for n, v in self._start.items()):
            value = values.get(name)
            if value is None:
                continue
            if name == "entropy":
                low = start > LEAST_ENTROPY and value < COLLAPSED * start
                gone = low or (value > ENTROPY_TIMES * start and value > start + ENTROPY_NATS)
            elif name.endswith("mean_length"):
                gone = value < SHRUNK * start
            else:
                gone = value > CUT and start < CUT_AT_START
            signs[name] = f"{name} {start:.3g} → {value:.3g}" if gone else ""
        if "kl" in values:
            signs["kl"] = f"kl {values['kl']:.3g} nats per token" if values["kl"] > KL_LARGE else ""
        return signs

    def _end(self, step: int, reason: str, why: str) -> None:
        self.ended = {"step": step, "reason": reason, "why": why}
        self._write()

    def _write(self) -> None:
        if not self.processes.main or self.best is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {
            "checkpoint": self.best.checkpoint,
            "step": self.best.step,
            "greedy_accuracy": self.best.accuracy,
            "ended": self.ended,
        }
        replace_text(self.folder / FILE, json.dumps(told) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Save when this step was evaluated as the best."""
        if self._unsaved:
            self._unsaved, control.should_save = False, True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> Any:
        """Look at a logged line; end the run after a last checkpoint."""
        values = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, (int, float))}
        if "train_runtime" not in values:
            self.see(state.global_step, values)
            if self.stop is not None:
                self.ended = self.processes.from_main(lambda: self.ended)
            if self.ended:
                control.should_save = control.should_training_stop = True
        return control

    def finish(self, trainer: Any, say: Callable[[str], None]) -> None:
        """Take the best weights where the run was ended, and say what became of the best checkpoint."""
        if self.best is None:
            return
        best = f"grpo/{self.best.checkpoint} (held-out accuracy {self.best.accuracy:.3f})"
        if self.ended is None:
            say(f"grpo: the best checkpoint during training is {best}")
            return
        load_weights(trainer, self.folder / self.best.checkpoint)
        say(
            f"grpo: ended after step {self.ended['step']}: {self.ended['reason']}, {self.ended['why']}; grpo/final is the best "
            f"checkpoint, {best}"
        )

"""Rollouts while a run trains: their least and greatest rewards, the best and the worst text, windows of reward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from algorist.store.safe_text import one_line

log = logging.getLogger("algorist.evaluation.rollout_notes")

WINDOW = 50
"""Logged lines in a window of the reward trend (S4.31)."""
CHANGE = 0.1
"""Report a mean that changes by more than this fraction from window to window."""
EXAMPLES_EVERY = 5
"""Logged lines between two pairs of examples in the log file."""


class RolloutNotes:
    """Takes graded rollouts and logged lines of one run; gives more numbers for the line and says what changed.

    Args:
        say: Shows one line on the console.
        samples_every: Steps between two completions on the console; None for none.
    """

    def __init__(self, say: Callable[[str], None], samples_every: int | None = None) -> None:
        self.say, self.samples_every = say, samples_every
        self._shown = 0
        self._latest: Mapping[str, Any] | None = None
        self._lines = 0
        self._ends: dict[str, tuple[float, float]] = {}
        self._best: Mapping[str, Any] | None = None
        self._worst: Mapping[str, Any] | None = None
        self._values: dict[str, list[float]] = {}
        self._failures: dict[str, int] = {}
        self._failed: dict[str, float] = {}

    def on_failures(self, rewards: Iterable[Any], completions: int) -> None:
        """Take how often each reward has failed; the first time is reported.

        Args:
            rewards: With ``__name__``, ``failures`` so far, ``first_failure`` and ``floor``, the value that takes their place.
            completions: How many were rewarded since the last call.
        """
        for reward in rewards:
            before = self._failures.get(reward.__name__, 0)
            new = reward.failures - before
            self._failures[reward.__name__] = reward.failures
            if new:
                name = f"rewards/{reward.__name__}/failures"
                self._failed[name] = self._failed.get(name, 0.0) + new
            if new and not before:
                self.say(
                    f"reward '{reward.__name__}' failed on {new} of {completions} completions ({reward.first_failure}); "
                    f"they get {reward.floor:g}. All of it is in training.log"
                )

    def on_rollouts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the graded rollouts of one generation batch."""
        self._latest = next((row for row in rows if row.get("reward") is not None), None)
        for row in rows:
            self._extend("reward", row.get("reward"))
            for name, value in (row.get("rewards") or {}).items():
                self._extend(f"rewards/{name}", value)
            if row.get("reward") is None:
                continue
            if self._best is None or row["reward"] > self._best["reward"]:
                self._best = row
            if self._worst is None or row["reward"] < self._worst["reward"]:
                self._worst = row

    def on_metrics(self, stage: str, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return ``reward_min``, ``reward_max``, those of each reward and its failures since the last line; say trends and examples."""
        if stage != "grpo":
            return {}
        self._lines += 1
        ends: dict[str, float] = {}
        for name, (low, high) in self._ends.items():
            between = "_" if name == "reward" else "/"  # reward_min is named as TRL's reward_std
            ends |= {f"{name}{between}min": low, f"{name}{between}max": high}
        ends |= self._failed
        self._ends, self._failed = {}, {}
        self._trends(step, values)
        if self._lines % EXAMPLES_EVERY == 0:
            self._examples(step)
        if self.samples_every and self._latest is not None and step - self._shown >= self.samples_every:
            self._shown = step - step % self.samples_every
            row = self._latest
            self.say(
                f"sample at step {step}: reward {row['reward']:.3f}, {row['reason']} · question: {one_line(str(row['question']), 200)}"
                f" · gold: {row['gold']} · completion: {one_line(str(row['completion']), 400)}"
            )
        return ends

    def _extend(self, name: str, value: float | None) -> None:
        if value is None or value != value:
            return
        low, high = self._ends.get(name, (value, value))
        self._ends[name] = (min(low, float(value)), max(high, float(value)))

    def _trends(self, step: int, values: Mapping[str, float]) -> None:
        for name in values:
            if name == "reward" or (name.startswith("rewards/") and name.endswith("/mean")):
                self._values.setdefault(name, []).append(values[name])
        for name, seen in self._values.items():
            if len(seen) < 2 * WINDOW:
                continue
            older, newer = sum(seen[:WINDOW]) / WINDOW, sum(seen[WINDOW:]) / WINDOW
            change = (newer - older) / (abs(older) + 1e-8)
            del seen[:WINDOW]
            if abs(change) > CHANGE:
                verb = "rose" if change > 0 else "fell"
                short = name.removeprefix("rewards/").removesuffix("/mean")
                line = f"step {step}: {short} {verb} from {older:.3f} to {newer:.3f} (means of {WINDOW} logged steps)"
                self.say(line)
                log.info("%s", line)

    def _examples(self, step: int) -> None:
        for kind, row in (("best", self._best), ("worst", self._worst)):
            if row is not None:
                text = one_line(str(row["completion"]), 200)
                log.info(
                    "step %d, %s completion: reward %.3f, %s: %s",
                    step,
                    kind,
                    row["reward"],
                    row["reason"],
                    text,
                )
        self._best = self._worst = None

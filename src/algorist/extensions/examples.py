"""Completions while a run trains: one on the console now and then, the best and the worst in the log; and windows of the reward."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from algorist.store.safe_text import one_line
from algorist.training.extension import Event, Extension, extension

if TYPE_CHECKING:
    from algorist.config.schema import Recipe

log = logging.getLogger("algorist.extensions.examples")

WINDOW = 50
"""Logged lines in a window of the reward trend."""
CHANGE = 0.1
"""Report a mean that changes by more than this fraction from window to window."""
SLOW_S, SLOW = 2.0, 0.5
"""Seconds of a step's rewards, and their share of the step, from which on they are slow."""
EXAMPLES_EVERY = 5
"""Logged lines between two pairs of examples in the log file."""
Row = Mapping[str, Any]


@extension
class Examples(Extension):
    name = "examples"

    @classmethod
    def takes_part(cls, recipe: Recipe) -> bool:
        return recipe.grpo.enabled

    def open(self, run: Any) -> None:
        self.say = run.display.say
        self._shown = self._lines = 0
        self._latest: Row | None = None
        self._best: Row | None = None
        self._worst: Row | None = None
        self._values: dict[str, list[float]] = {}
        self._slow = False

    def seen(self, event: Event) -> None:
        if event.kind == "rollouts":
            self._take([row for row in event.rows if row.get("reward") is not None])
        if event.kind == "metrics" and event.stage == "grpo":
            self._lines += 1
            self._trends(event.step or 0, event.values)
            if self._lines % EXAMPLES_EVERY == 0:
                self._examples(event.step or 0)
            self._sample(event.step or 0)
            self._slow_rewards(event.values)

    def _take(self, paid: Sequence[Row]) -> None:
        self._latest = next(iter(paid), None)
        for row in paid:
            if self._best is None or row["reward"] > self._best["reward"]:
                self._best = row
            if self._worst is None or row["reward"] < self._worst["reward"]:
                self._worst = row

    def _sample(self, step: int) -> None:
        every, row = self.recipe.grpo.samples_every, self._latest
        if every and row is not None and step - self._shown >= every:
            self._shown = step - step % every
            self.say(
                f"sample at step {step}: reward {row['reward']:.3f}, {row['reason']} · question: "
                f"{one_line(str(row['question']), 200)} · gold: {row['gold']} · answer: {one_line(str(row['extracted']), 80)} · "
                f"completion: {one_line(str(row['completion']), 400)}"
            )

    def _slow_rewards(self, values: Mapping[str, float]) -> None:
        """Say once that the rewards take most of a step."""
        rewards, step = values.get("time/reward_s", 0.0), values.get("time/step_s", 0.0)
        if not self._slow and rewards > SLOW_S and rewards > SLOW * step:
            self._slow = True
            self.say(
                f"warning: the rewards take {rewards:.1f} of a step's {step:.1f} s; the machine waits for them. One that is a "
                "function of lists is called once for all completions"
            )

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
                self.say(
                    f"step {step}: {short} {verb} from {older:.3f} to {newer:.3f} (means of {WINDOW} logged steps)"
                )

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

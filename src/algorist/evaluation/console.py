"""One-line results of an evaluation, for the console and the log; and the trend over the evaluations of a run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from algorist.errors import DAMAGED, DataError, check_known
from algorist.evaluation.estimators import Interval, summarise
from algorist.store.stages import EVALUATED

GROUPINGS = ("subject", "level", "dataset", "reason")


def breakdown(
    samples: Sequence[Mapping[str, Any]], by: str, ks: Sequence[int] = (1, 4, 8)
) -> dict[str, dict[str, Interval]]:
    """Return ``summarise`` for each value of the column ``by``, sorted, numbers by size.

    Rows without a value come under ``(none)``.

    Raises:
        DataError: ``by`` is not one of ``GROUPINGS`` or no row has it.
    """
    check_known(by, GROUPINGS, f"cannot break down by '{by}'", "Known: {}", DataError)
    if samples and not any(by in row for row in samples):
        raise DataError(f"the samples have no column '{by}'; evaluate again with a dataset that tells it")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in samples:
        value = row.get(by)
        groups.setdefault("(none)" if value in (None, "") else str(value), []).append(row)
    return {name: summarise(groups[name], ks) for name in sorted(groups, key=_order)}


def _order(name: str) -> tuple[bool, float, str]:
    digits = "".join(c for c in name if c.isdecimal())
    return (name == "(none)", float(digits) if digits else 0.0, name)


_SHARES = (("format", "format"), ("reasoning_present", "reasoning present"), ("truncated", "truncated"))
_MEANS = (
    ("mean_reasoning_characters", "reasoning {:.0f} characters"),
    ("mean_tokens", "{:.0f} tokens"),
    ("reward", "reward {:.2f}"),
)


def lines_of(folder: Path, stage: str, step: int | None, summary: Mapping[str, Interval]) -> list[str]:
    """Return the lines to print for an evaluation: its numbers, and the trend at the end of a stage."""
    numbers = summary_line(stage if step is None else f"{stage}-step-{step}", summary)
    trend = trend_line(folder, stage) if step is None else None
    return [numbers, trend] if trend else [numbers]


def summary_line(name: str, summary: Mapping[str, Interval]) -> str:
    """Return ``eval NAME: accuracy 62.0 % [56.1, 67.5], pass@8 …, format …, reward 1.02 (correct 0.62, …)``."""
    accuracy = summary["greedy_accuracy"]
    parts = [
        f"accuracy {_percent(accuracy.value)} [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}] of {accuracy.n}"
    ]
    if "lenient_accuracy" in summary:
        parts.append(f"lenient {_percent(summary['lenient_accuracy'].value)}")
    parts += [
        f"{key} {_percent(interval.value)}"
        for key, interval in summary.items()
        if "@" in key and key != "maj@1"
    ]
    parts += [f"{text} {_percent(summary[key].value)}" for key, text in _SHARES if key in summary]
    parts += [form.format(summary[key].value) for key, form in _MEANS if key in summary]
    single = {k.removeprefix("rewards/"): v.value for k, v in summary.items() if k.startswith("rewards/")}
    greedy = ", ".join(f"{key} {value:.2f}" for key, value in single.items())
    return f"eval {name}: " + ", ".join(parts) + (f" ({greedy})" if greedy else "")


def trend_line(folder: Path, stage: str) -> str | None:
    """Return the first, best and last greedy accuracy up to the end of ``stage``, from the artifacts in ``folder``.

    The evaluation before the stage counts as the first; None when there are fewer than three to compare, or a damaged one.
    """
    points = _points(folder, stage)
    if len(points) < 3:
        return None
    (first, start), (last, end) = points[0], points[-1]
    best, top = max(points, key=lambda point: point[1])
    return (
        f"trend of {len(points)} evaluations: accuracy first {_percent(start)} ({first}), best {_percent(top)} ({best}), "
        f"last {_percent(end)} ({last})"
    )


def _points(folder: Path, stage: str) -> list[tuple[str, float]]:
    """Return (name, greedy accuracy): the stage before, the steps of ``stage`` in order, its end."""
    points: list[tuple[tuple[int, float], str, float]] = []
    for path in folder.glob("*.json"):
        name, _, step = path.stem.partition("-step-")
        if name not in EVALUATED or (step and not step.isdecimal()) or (step and name != stage):
            continue
        if EVALUATED.index(name) > EVALUATED.index(stage):
            continue
        value = _accuracy(path)
        if value is not None:
            place = (EVALUATED.index(name), float(step) if step else math.inf)
            points.append((place, path.stem, value))
    points.sort()
    before = [point for point in points if point[0][0] < EVALUATED.index(stage)]
    during = [point for point in points if point[0][0] == EVALUATED.index(stage)]
    return [(name, value) for _, name, value in [*before[-1:], *during]]


def _accuracy(path: Path) -> float | None:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))["metrics"]["greedy_accuracy"]["value"]
        return None if value is None else float(value)
    except DAMAGED:
        return None


def solved_question(samples: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the shortest question that every completion answers right, to show what the model can do; None without one."""
    wrong = {row["problem_id"] for row in samples if not row["correct"]}
    right = [str(row["question"]) for row in samples if row["problem_id"] not in wrong]
    return min(right, key=len, default=None)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


# ---- rollouts while a run trains


class RolloutNotes:
    """Takes the graded rollouts of one run; gives more numbers for its logged lines, and says which reward fails or is silent.

    Args:
        say: Shows one line on the console.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._ends: dict[str, tuple[float, float]] = {}
        self._silent: set[str] = set()
        self._failures: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def on_failures(self, rewards: Iterable[Any], completions: int) -> None:
        """Count each reward's failures; the first time is reported.

        Args:
            rewards: With ``__name__``, ``failures`` so far, ``first_failure`` and ``floor``, the value that takes their place.
            completions: How many were rewarded since the last call.
        """
        for reward in rewards:
            before = self._failures[reward.__name__]
            new = reward.failures - before
            self._failures[reward.__name__] = reward.failures
            self._failed[f"rewards/{reward.__name__}/failures"] += new
            if new and not before:
                self.say(
                    f"reward '{reward.__name__}' failed on {new} of {completions} completions ({reward.first_failure}); "
                    f"they get {reward.floor:g}. All of it is in training.log"
                )

    def on_rollouts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the graded rollouts of one generation batch."""
        numbers = {
            name for row in rows for name, value in (row.get("rewards") or {}).items() if value is not None
        }
        for name in (rows[0].get("rewards") or {}) if len(rows) > 1 else ():
            if name not in numbers | self._silent:
                self._silent.add(name)
                self.say(
                    f"warning: reward '{name}' gave no number for any of {len(rows)} completions (None): it counts for none"
                )
        for row in rows:
            self._extend("reward", row.get("reward"))
            for name, value in (row.get("rewards") or {}).items():
                self._extend(f"rewards/{name}", value)

    def on_metrics(self, stage: str) -> dict[str, float]:
        """Return ``reward_min``, ``reward_max``, those of each reward and its failures since the last line."""
        if stage != "grpo":
            return {}
        ends: dict[str, float] = {}
        for name, (low, high) in self._ends.items():
            between = "_" if name == "reward" else "/"  # reward_min is named as TRL's reward_std
            ends |= {f"{name}{between}min": low, f"{name}{between}max": high}
        ends |= {name: float(new) for name, new in self._failed.items() if new}
        self._ends, self._failed = {}, Counter()
        return ends

    def _extend(self, name: str, value: float | None) -> None:
        if value is None or value != value:
            return
        low, high = self._ends.get(name, (value, value))
        self._ends[name] = (min(low, float(value)), max(high, float(value)))

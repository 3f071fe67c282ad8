"""A run as series: per-step counts of its rollouts, its metric lines, its settings. The same for live and stored runs.

``Signals`` is fed with rollout records and metric lines in the order of the steps; ``read_signals`` feeds it from a run
folder, ``diagnosis.diagnose.LiveDiagnosis`` during training.

Windows over them say: what is recent, what was first, whether two of them differ by more than noise.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from algorist.config.yaml_text import read_yaml
from algorist.diagnosis.settings import Settings
from algorist.diagnosis.weights import WeightChange, stage_change
from algorist.errors import CheckpointError, ConfigError
from algorist.prompts.base import Tags
from algorist.store.read import metrics, opened, query
from algorist.store.safe_text import one_line
from algorist.store.stages import STAGES
from algorist_grader.types import MISSING_TAG

UNREADABLE = ("no_answer", *MISSING_TAG.values(), "unparseable_answer", "ambiguous")
END_OF_TURN = re.compile(
    r"<\|(?:im_end|im_start|eot_id|eom_id|end_of_text|endoftext|end|user|assistant|return)\|>"
    r"|<(?:end|start)_of_turn>|</s>|\[/?INST\]|<｜(?:end▁of▁sentence|User|Assistant)｜>"
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SAMPLES_KEPT = 3
ROWS_AT_ONCE = 20_000
_COLUMNS = (
    'step, problem_id, "group", completion, completion_tokens, reward, advantage, correct, reason, extracted, gold, '
    "truncated"
)
_BLOCKS = (
    "SELECT min(step) AS first, max(step) AS last FROM (SELECT step, sum(count(*)) OVER (ORDER BY step) "
    f"// {ROWS_AT_ONCE} AS block FROM rollouts WHERE stage = 'grpo' GROUP BY step) GROUP BY block ORDER BY first"
)
"""The first and last step of blocks of about so many rows, so that memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares over groups; adds up over steps."""

    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Moments:
        """Return the moments of finite values."""
        finite = [v for v in values if math.isfinite(v)]
        return cls(len(finite), sum(finite), sum(v * v for v in finite))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.n + other.n, self.total + other.total, self.squares + other.squares)

    def __sub__(self, other: Moments) -> Moments:
        return Moments(self.n - other.n, self.total - other.total, self.squares - other.squares)

    @property
    def mean(self) -> float:
        """The mean; NaN without values."""
        return self.total / self.n if self.n else math.nan

    @property
    def variance(self) -> float:
        """The variance between groups (0 for fewer than two)."""
        return max(0.0, self.squares - self.total * self.mean) / (self.n - 1) if self.n > 1 else 0.0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The rollouts of one generation batch in numbers: counts of groups and of rollouts, group means as moments;
    ``paid`` is what right completions earned."""

    step: int
    rollouts: int
    groups: int
    all_right: int
    all_wrong: int
    identical: int
    same_reward: int
    truncated: int
    truncated_answered: int
    unreadable: int
    finished_unreadable: int
    end_of_turn: int
    stopped: int
    same_number: int
    same_number_wrong: int
    reasons: Counter[str]
    accuracy: Moments
    reward: Moments
    readable: Moments
    tokens: Moments
    paid: Moments


def make_batch(records: Sequence[Mapping[str, Any]], stops: Sequence[str] = ()) -> BatchStatistics:
    """Count the rollouts of one generation batch.

    Args:
        records: Rows with the columns of ``store.write.SCHEMA``, graded; a group is one (group, problem_id).
        stops: The stop strings that ended completions.
    """
    groups: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for row in records:
        groups.setdefault((row.get("group"), row.get("problem_id")), []).append(row)
    cut = [row for row in records if row.get("truncated")]
    full = [row for row in records if not row.get("truncated")]
    sets = [g for g in groups.values() if len(g) > 1]
    right = [(sum(bool(r.get("correct")) for r in g), len(g)) for g in sets]
    same = [row for row in records if same_number(row.get("extracted"), row.get("gold"))]

    def means(value: Callable[[Mapping[str, Any]], float]) -> Moments:
        return Moments.of(sum(map(value, g)) / len(g) for g in groups.values())

    return BatchStatistics(
        step=int(records[0].get("step") or 0),
        rollouts=len(records),
        groups=len(sets),
        all_right=sum(count == size for count, size in right),
        all_wrong=sum(count == 0 for count, _ in right),
        identical=sum(len({r.get("completion") for r in g}) == 1 for g in sets),
        same_reward=sum(_spread(g) <= 1e-6 for g in sets),
        truncated=len(cut),
        truncated_answered=sum(_has_answer(r) for r in cut),
        unreadable=sum(r.get("reason") in UNREADABLE for r in records),
        finished_unreadable=sum(r.get("reason") in UNREADABLE for r in full),
        end_of_turn=sum(_shows_end(r) for r in records),
        stopped=sum(
            r.get("reason") in UNREADABLE and str(r.get("completion") or "").endswith(tuple(stops))
            for r in full
        ),
        same_number=len(same),
        same_number_wrong=sum(not row.get("correct") for row in same),
        reasons=Counter(str(r.get("reason")) for r in records),
        accuracy=means(lambda r: bool(r.get("correct"))),
        reward=means(_reward),
        readable=means(lambda r: r.get("reason") not in UNREADABLE),
        tokens=means(lambda r: int(r.get("completion_tokens") or 0)),
        paid=Moments.of(_reward(r) for r in records if r.get("correct")),
    )


def missing_tags(reasons: Mapping[str, int], tags: Mapping[str, str]) -> dict[str, int]:
    """Count the completions whose answer block cannot be read for want of a tag, by that tag.

    Args:
        reasons: Grading reason → completions.
        tags: Name of a tag → the tag; a format without tags has boxes.
    """
    usual = {name: name for name in Tags.__dataclass_fields__} | {"answer_close": "}"}
    texts = usual | {name: tag for name, tag in tags.items() if tag}
    return {
        texts[reason.removeprefix("no_")]: n
        for reason in MISSING_TAG.values()
        if (n := reasons.get(reason, 0))
    }


def same_number(answer: Any, gold: Any) -> bool:
    """Return whether an answer holds exactly one number and it is the one of the gold answer, whatever is written around it."""
    one, other = (NUMBER.findall(str(text or "")[:200].replace(",", "")) for text in (answer, gold))
    return len(one) == len(other) == 1 and float(one[0]) == float(other[0])


def _reward(row: Mapping[str, Any]) -> float:
    value = row.get("reward")
    return math.nan if value is None else float(value)


def _spread(group: Sequence[Mapping[str, Any]]) -> float:
    rewards = [v for r in group if math.isfinite(v := _reward(r))]
    return max(rewards) - min(rewards) if rewards else 0.0


def _has_answer(row: Mapping[str, Any]) -> bool:
    # Several answers that differ are no answer for the grader, but the model went on after the first.
    return row.get("extracted") is not None or row.get("reason") == "ambiguous"


def _shows_end(row: Mapping[str, Any]) -> bool:
    return END_OF_TURN.search(row.get("completion") or "") is not None


@dataclass
class Signals:
    """Everything that the causes look at."""

    settings: Settings = field(default_factory=Settings)
    batches: list[BatchStatistics] = field(default_factory=list)
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    weights: dict[str, WeightChange] = field(default_factory=dict)
    bad_steps: dict[str, int] = field(default_factory=dict)
    run: Path | None = None
    """The folder of a run that is read; None while it trains."""
    _samples: dict[str, deque[Mapping[str, Any]]] = field(default_factory=dict)

    def add_rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take the graded rollouts of one generation batch."""
        if not records:
            return
        self.batches.append(make_batch(records, stop_strings(self.settings)))
        best = max((r for r in records if not r.get("correct")), key=_reward, default=None)
        for row in records:
            kinds = {
                "any": True,
                "right": bool(row.get("correct")),
                "wrong": not row.get("correct"),
                "truncated": bool(row.get("truncated")),
                "truncated_answered": bool(row.get("truncated")) and _has_answer(row),
                "unreadable": row.get("reason") in UNREADABLE and not row.get("truncated"),
                "end_of_turn": _shows_end(row),
                "paid": row is best,
            }
            for kind in (k for k, fits in kinds.items() if fits):
                samples = self._samples.setdefault(kind, deque(maxlen=SAMPLES_KEPT))
                if not samples or any(samples[-1].get(key) != row.get(key) for key in ("step", "problem_id")):
                    samples.append(row)

    def add_metrics(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Take one line of metrics; what is not finite becomes None."""
        clean = {
            k: float(v) if isinstance(v, (int, float)) and math.isfinite(v) else None
            for k, v in values.items()
            if v is None or isinstance(v, (int, float))
        }
        self.lines.setdefault(stage, []).append({**clean, "step": step})

    def samples(self, kind: str) -> tuple[str, ...]:
        """Return up to three completions of a kind, as text."""
        return tuple(_shown(row) for row in self._samples.get(kind, ()))

    def series(self, name: str, stage: str = "grpo") -> list[tuple[int, float]]:
        """Return (step, value) of a metric where it was logged and finite."""
        return [(row["step"], row[name]) for row in self.lines.get(stage, ()) if row.get(name) is not None]


def stop_strings(settings: Settings) -> tuple[str, ...]:
    """Return the stop strings of a recipe's rollouts."""
    strings = settings.get("grpo.stop_strings", settings.get("eval.stop_strings"))
    return tuple(map(str, strings)) if isinstance(strings, (list, tuple)) else ()


def _shown(row: Mapping[str, Any], width: int = 240) -> str:
    """Return a completion on one line, its middle left out where it is longer than ``width`` characters."""
    text = one_line(str(row.get("completion") or "")[:4000])
    if len(text) > width:
        text = f"{text[: width // 2]} … {text[-width // 2 :]}"
    read = "nothing" if row.get("extracted") is None else one_line(str(row["extracted"]), 40)
    return (
        f"step {int(row.get('step') or 0)}, problem {one_line(str(row.get('problem_id', '')), 24)}: {text}  "
        f"[read {read}, gold {one_line(str(row.get('gold')), 40)}, {row.get('reason')}, reward {_reward(row):.3g}, "
        f"{int(row.get('completion_tokens') or 0)} tokens]"
    )


def read_signals(run: Path) -> Signals:
    """Read a run folder.

    Raises:
        CheckpointError: There is no run, or a part of it is damaged.
    """
    run = Path(run)
    signals = Signals(settings=read_settings(run), run=run)
    for line in metrics(run):
        if isinstance(line.get("step"), int) and line.get("stage"):
            signals.add_metrics(str(line["stage"]), line["step"], line)
    with opened(run):
        for block in query(run, _BLOCKS):
            rows = query(
                run,
                f"SELECT {_COLUMNS} FROM rollouts WHERE stage = 'grpo' AND step BETWEEN ? AND ?",
                [block["first"], block["last"]],
            )
            by_step: dict[int, list[dict[str, Any]]] = {}
            for row in rows:
                by_step.setdefault(row["step"], []).append(row)
            for step in sorted(by_step):
                signals.add_rollouts(by_step[step])
    for stage in STAGES:
        change = stage_change(run, stage, signals.settings)
        if change is not None:
            signals.weights[stage] = change
        signals.bad_steps[stage] = len(list((run / stage).glob("bad-step-*.pt")))
    return signals


def read_settings(run: Path) -> Settings:
    """Return the values of ``config.yaml``; empty when it is missing.

    Raises:
        CheckpointError: It is not YAML.
    """
    file = run / "config.yaml"
    if not file.is_file():
        return Settings()
    try:
        values = read_yaml(file.read_text(encoding="utf-8"), "it")
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    return Settings(values if isinstance(values, Mapping) else {})


T = TypeVar("T")

MIN_STEPS = 3
"""Fewer steps say nothing about a run."""
MIN_GROUPS = 16
"""Groups in a window: with 16, a share of 0.9 is far from what chance does to a run with a third of useful groups."""
QUARTER = 4
"""The recent window is the last quarter of the steps, the first window the first quarter (at most ``LONGEST_FIRST``)."""
LONGEST_FIRST = 20


def recent(batches: Sequence[BatchStatistics]) -> list[BatchStatistics]:
    """Return the last quarter of the batches, grown to ``MIN_STEPS`` and ``MIN_GROUPS``, those of one counted; empty when there are fewer."""
    count = max(MIN_STEPS, len(batches) // QUARTER)
    while count < len(batches) and sum(b.accuracy.n for b in batches[-count:]) < MIN_GROUPS:
        count += 1
    window = list(batches[-count:])
    return window if len(window) >= MIN_STEPS and sum(b.accuracy.n for b in window) >= MIN_GROUPS else []


def ends(values: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return the first and the last values of a series, not overlapping; empty when it has fewer than 6."""
    count = max(MIN_STEPS, len(values) // QUARTER)
    if len(values) < 2 * count:
        return [], []
    return list(values[: min(count, LONGEST_FIRST)]), list(values[-count:])


def middle(pairs: Sequence[tuple[int, float]]) -> float:
    """Return the median value of (step, value) pairs; NaN without any."""
    return median(v for _, v in pairs) if pairs else math.nan


def last_quarter(pairs: Sequence[tuple[int, float]]) -> float | None:
    """Return the median of the last quarter of (step, value) pairs; None with fewer than ``MIN_STEPS``."""
    return middle(pairs[-max(MIN_STEPS, len(pairs) // QUARTER) :]) if len(pairs) >= MIN_STEPS else None


def pooled(batches: Sequence[BatchStatistics], get: Callable[[BatchStatistics], Moments]) -> Moments:
    """Return the moments of all groups of the batches."""
    return sum((get(b) for b in batches), Moments())


def z_score(before: Moments, after: Moments, *, least_variance: float) -> float:
    """Return (mean after − mean before) in standard errors, with the groups as independent units.

    ``least_variance`` keeps a few equal groups from looking certain.
    """
    if not before.n or not after.n:
        return 0.0
    degrees = before.n + after.n - 2
    inside = before.variance * (before.n - 1) + after.variance * (after.n - 1)
    variance = max(inside / degrees if degrees > 0 else 0.0, least_variance)
    return (after.mean - before.mean) / math.sqrt(variance * (1 / before.n + 1 / after.n))


@dataclass(frozen=True, slots=True)
class Break:
    """The step from which on a series is lower: means before and after, and the difference in standard errors."""

    step: int
    before: float
    after: float
    z: float
    index: int


def steepest_drop(
    batches: Sequence[BatchStatistics],
    get: Callable[[BatchStatistics], Moments],
    *,
    least_variance: float = 0.01,
) -> Break | None:
    """Return where a series falls most surely: everything before a step against everything from it on.

    A run that recovers has a high mean afterwards, so it is not taken for one that broke.
    """
    whole, before = pooled(batches, get), Moments()
    steepest: Break | None = None
    for index in range(1, len(batches) - MIN_STEPS + 1):
        before = before + get(batches[index - 1])
        after = whole - before
        z = z_score(before, after, least_variance=least_variance)
        if after.n and before.n and (steepest is None or z < steepest.z):
            steepest = Break(batches[index].step, before.mean, after.mean, z, index)
    return steepest

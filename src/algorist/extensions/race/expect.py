"""Where a route ends, from what its pilot did: draws of what no short pilot can show, weighed by what it has shown.

A stage moves the level (pass@1) towards a ceiling: ``ceiling + (level − ceiling)·exp(−z·t)``, t in units of the whole run's time. The
ceiling of SFT is the share of demonstrations that are right, of a teacher its own level, of GRPO what a group of samples would solve at the
level that it starts from. How fast, z, is drawn from a wide range, the same draw for all routes: their difference is what counts. A draw
weighs as much as it makes the pilot's changes likely; problems are drawn anew with it, so that the interval has both errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
DRAWS = 4000
LEVEL = 0.9
"""Of the intervals."""
RATES = {"sft": (3.0, 1.5), "grpo": (2.0, 1.0), "teacher": (4.0, 1.5)}
"""z of each learner, mean and spread; below 0 it unlearns nothing, it stands still."""
PASSES = 20.0
"""Passes over the demonstrations after which one more teaches nothing new."""
KNOWN = 0.03
"""Level below which a model is taken to know nothing yet: that SFT has not moved it then says nothing of what follows."""
SURE = 0.95
"""Share of the draws in which a route that is ahead for sure is in front of another."""


@dataclass(frozen=True)
class Part:
    """A stage of a pilot.

    Attributes:
        learner: ``sft``, ``grpo`` or ``teacher``.
        tried, whole: Time of the stage in the pilot and in the run, in units of the run's.
        before, after: Share of right completions of each problem (N,).
        passes: Over the demonstrations in the run, of SFT.
    """

    learner: str
    tried: float
    whole: float
    before: Floats
    after: Floats
    passes: float = 0.0


@dataclass(frozen=True)
class Known:
    """What ceilings follow from.

    Attributes:
        demonstrations: Share of right ones.
        teacher: Share of right completions of the teacher, by problem; None where it is not known.
        group: Completions of a group.
        samples: Completions of each problem.
    """

    demonstrations: float
    teacher: Floats | None
    group: int
    samples: int


@dataclass
class Expected:
    """Pass@1 at the end of each route: the draws of it (D,), and their weights."""

    ends: dict[str, Floats] = field(default_factory=dict)
    weights: Floats = field(default_factory=lambda: np.ones(DRAWS) / DRAWS)

    @property
    def ahead(self) -> str:
        """The route with the highest expected end."""
        return max(self.ends, key=lambda name: float(self.ends[name] @ self.weights))

    def interval(self, name: str, less: str | None = None) -> tuple[float, float, float]:
        """Return mean, low and high (90 %) of a route's end, or of how much it is above another's."""
        values = self.ends[name] - (self.ends[less] if less else 0.0)
        order = np.argsort(values)
        steps = np.cumsum(self.weights[order])
        low, high = (values[order][min(np.searchsorted(steps, p), DRAWS - 1)] for p in (0.05, 0.95))
        return float(values @ self.weights), float(low), float(high)

    def close(self) -> list[str]:
        """Return the routes that cannot be told from the one ahead."""
        first = self.ends[self.ahead]
        return [
            name
            for name, end in self.ends.items()
            if name != self.ahead and float((first > end) @ self.weights) < SURE
        ]


def expect(routes: Mapping[str, Sequence[Part]], known: Known, seed: int = 0) -> Expected:
    """Return the ends of routes; the parts of all have the same problems in the same order."""
    chance = np.random.default_rng(seed)
    z = {name: chance.normal(mean, spread, DRAWS).clip(0) for name, (mean, spread) in RATES.items()}
    some = next(iter(routes.values()))[0].before
    drawn = chance.multinomial(len(some), np.ones(len(some)) / len(some), DRAWS) / len(some)
    spread = chance.uniform(0.3, 3.0, DRAWS)
    taught = chance.uniform(0.5, 1.0, DRAWS) if known.teacher is None else drawn @ known.teacher
    result, log_weights, seen = Expected(), np.zeros(DRAWS), set()

    def moved(part: Part, level: Floats, t: float) -> Floats:
        if part.learner == "sft":
            ceiling, t = np.full(DRAWS, known.demonstrations), t * min(1.0, PASSES / max(PASSES, part.passes))
        else:
            ceiling = solved_by(level, spread, known.group)
            ceiling = np.maximum(ceiling, taught) if part.learner == "teacher" else ceiling
        return ceiling + (level - ceiling) * np.exp(-z[part.learner] * t)

    for name, parts in routes.items():
        level = drawn @ parts[0].before
        for part in parts:
            change = part.after - part.before
            said = part.learner, part.tried, change.tobytes()
            blind = part.learner == "sft" and max(part.before.mean(), part.after.mean()) < KNOWN
            if said not in seen and not blind:
                seen.add(said)
                predicted = moved(part, drawn @ part.before, part.tried) - drawn @ part.before
                error = np.hypot(change.std(), 1 / known.samples**0.5 / 2) / len(change) ** 0.5
                log_weights -= 0.5 * ((change.mean() - predicted) / error) ** 2
            if part is parts[0]:  # what the pilot reached is where the rest of the stage begins
                level = moved(part, drawn @ part.after, part.whole - part.tried)
            else:  # the stage before it will have gone on as well
                level = moved(part, level, part.whole)
        result.ends[name] = level
    weights = np.exp(log_weights - log_weights.max())
    result.weights = weights / weights.sum()
    return result


def solved_by(level: Floats, spread: Floats, group: int) -> Floats:
    """Return the share of problems that one of a group's samples solves, where their pass rates are Beta(level·spread, (1 − level)·spread)."""
    level = level.clip(1e-4, 1 - 1e-4)
    a, b = level * spread, (1 - level) * spread
    none = np.ones_like(level)
    for i in range(group):
        none *= (b + i) / (a + b + i)
    return 1 - none

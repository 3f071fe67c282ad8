"""Expected end of a route, from what its pilot did: draws of what no short pilot can show, weighed by what it has shown.

A stage moves the level (pass@1) towards a ceiling: ``ceiling + (level − ceiling)·exp(−z·t)``, with t the share of the run's time for SFT, and
steps for GRPO and a teacher. The ceiling of SFT is the share of demonstrations that are right, of a teacher its own level, of GRPO what one
of a group's samples solves at the level that it starts from; GRPO learns only from groups whose samples differ, and is as much slower. A
model that knows nothing begins to solve problems late: there SFT goes by a power of t, up to t². How fast, z, is drawn from a wide range, the same draw for all
routes: their difference is what counts. A draw weighs as much as it makes the pilots' changes likely; problems are drawn anew with it, so
that the interval has both errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from algorist.extensions.race.routes import GRPO, SFT, TEACHER

Floats = NDArray[np.float64]
DRAWS, LEAST_DRAWS = 4000, 100
FAST = (1.5, 1.5)
"""z of SFT: median, and spread of its logarithm."""
STEPPED = {GRPO: (0.004, 0.01), TEACHER: (0.01, 0.01)}
"""z of a step: median and scale of Student's t with two degrees; of GRPO that of 34 healthy runs of the forecast's table (-0.015 … 0.014)."""
HARM = -0.005
"""Least z of a step: a healthy run unlearns little."""
SPREADS = (0.3, 3.0)
"""Range of a + b, where the pass rates of problems are Beta(a, b): all or nothing, or rather alike."""
TAUGHT = (0.5, 1.0)
"""Range of the level of a teacher that cannot be sampled here."""
PASSES = 20.0
"""Passes over the demonstrations after which one more teaches nothing new."""
KNOWN = 0.03
"""Level below which a model knows nothing yet: that SFT has not moved it then says nothing of what follows."""
ROUGH = 0.02
"""Error of a predicted change beside that of chance."""
SURE = 0.95
"""Share of the draws in which a route that is ahead for sure is in front of another."""


@dataclass(frozen=True)
class Part:
    """A stage of a pilot.

    Attributes:
        learner: ``sft``, ``grpo`` or ``teacher``.
        tried, whole: Length of the stage in the pilot and in the run: shares of the run's time for SFT, else steps.
        before, after: Share of right completions of each problem (N,).
        passes: Over the demonstrations in the run, of SFT.
    """

    learner: str
    tried: float
    whole: float
    before: Floats
    after: Floats
    passes: float = 0.0


@dataclass
class Expected:
    """Pass@1 at the end of each route: its draws (D,), and their weights."""

    ends: dict[str, Floats] = field(default_factory=dict)
    weights: Floats = field(default_factory=lambda: np.zeros(DRAWS))

    @property
    def ahead(self) -> str:
        """The route with the highest expected end."""
        return max(self.ends, key=lambda name: self.interval(name)[0])

    def interval(self, name: str, less: str | None = None) -> tuple[float, float, float]:
        """Return median, low and high (90 %) of a route's end, or of how much it is above another's."""
        values = self.ends[name] - (self.ends[less] if less else 0.0)
        order = np.argsort(values)
        places = np.searchsorted(np.cumsum(self.weights[order]), (0.5, 0.05, 0.95)).clip(0, DRAWS - 1)
        middle, low, high = values[order][places].tolist()
        return middle, low, high

    def close(self) -> list[str]:
        """Return the routes that cannot be told from the one ahead."""
        first, others = self.ends[self.ahead], [name for name in self.ends if name != self.ahead]
        return [name for name in others if float((first > self.ends[name]) @ self.weights) < SURE]


def expect(
    routes: Mapping[str, Sequence[Part]], right: float, teacher: Floats | None, group: int, seed: int = 0
) -> Expected:
    """Return the ends of routes.

    Args:
        routes: The stages of each pilot; all have the same problems in the same order.
        right: Share of right demonstrations.
        teacher: Share of right completions of the teacher, by problem; None where it is not known.
        group: Completions of a group of GRPO.
        seed: Of the draws.
    """
    chance, result = np.random.default_rng(seed), Expected()
    z = {
        name: (middle + width * chance.standard_t(2, DRAWS)).clip(HARM)
        for name, (middle, width) in STEPPED.items()
    }
    z[SFT] = FAST[0] * np.exp(FAST[1] * chance.normal(size=DRAWS))
    count = len(next(iter(routes.values()))[0].before)
    drawn = chance.multinomial(count, np.ones(count) / count, DRAWS) / count
    spread, late = chance.uniform(*SPREADS, DRAWS), chance.uniform(1, 2, DRAWS)
    recovers = chance.random(DRAWS) < 0.5
    taught = chance.uniform(*TAUGHT, DRAWS) if teacher is None else drawn @ teacher

    def moved(part: Part, level: Floats, length: float) -> Floats:
        speed, goal, t = z[part.learner], taught, np.full(DRAWS, length)
        if part.learner == SFT:
            t, goal = t * min(1.0, PASSES / max(PASSES, part.passes)), np.full(DRAWS, right)
            t = t**late if part.before.mean() < KNOWN else t
        if part.learner == GRPO:
            goal = 1 - alike(1 - level, spread, group)
            speed = speed * (goal - alike(level, spread, group))
        return (goal + (level - goal) * np.exp(-speed * t)).clip(0, 1)

    for name, parts in routes.items():
        before, after = (drawn @ levels for levels in (parts[0].before, parts[0].after))
        # The pilot's end is where the rest of its first stage begins, unless it fell: half of the draws recover from the first steps.
        level = np.where(recovers & (parts[0].after.mean() < parts[0].before.mean()), before, after)
        for part in parts:
            tried = part.tried if part is parts[0] else 0.0
            level = moved(part, level, max(0.0, part.whole - tried))
            change, last = part.after - part.before, max(part.before.mean(), part.after.mean())
            if part.learner != SFT or (last > KNOWN and change.mean() * (right - part.before.mean()) >= 0):
                off = change.mean() - (moved(part, drawn @ part.before, part.tried) - drawn @ part.before)
                result.weights -= 0.5 * off**2 / (change.var() / count + ROUGH**2)
        result.ends[name] = level
    result.weights = weigh(result.weights)
    return result


def weigh(likelihoods: Floats) -> Floats:
    """Return the weights (D,) of draws from their log-likelihoods, tempered until they count as ``LEAST_DRAWS``: where hardly a draw makes
    the pilots' changes likely, one of them would be the whole answer (Kong's effective sample size, 1 / Σ w²).
    """
    power = 1.0
    while True:
        weights = np.exp(power * (likelihoods - likelihoods.max()))
        weights /= weights.sum()
        if 1 / (weights @ weights) >= min(LEAST_DRAWS, len(weights)):
            return weights
        power *= 0.9


def alike(level: Floats, spread: Floats, group: int) -> Floats:
    """Return the probability that all of a group's samples are right, for pass rates Beta(level·spread, (1 − level)·spread)."""
    a, every = level.clip(1e-4, 1 - 1e-4) * spread, np.ones_like(level)
    for i in range(group):
        every *= (a + i) / (spread + i)
    return every

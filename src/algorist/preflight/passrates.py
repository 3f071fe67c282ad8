"""From a few samples per problem to the share of useful groups for any group size.

A group is useful when some of its completions are right and some are wrong. The pass rates of the problems are taken as draws
from a beta distribution, fitted by maximum likelihood to the counts (beta-binomial), because the plain k/n of a few samples
calls every problem that was 0 of 8 hopeless and thereby underrates large groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GROUP_SIZES = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class PassRates:
    """The fitted distribution of pass rates: Beta(a, b)."""

    a: float
    b: float

    def useful_share(self, group_size: int) -> float:
        """Return the expected share of groups of this size with right and wrong completions."""
        all_right = math.exp(_log_beta(self.a + group_size, self.b) - _log_beta(self.a, self.b))
        all_wrong = math.exp(_log_beta(self.a, self.b + group_size) - _log_beta(self.a, self.b))
        return max(0.0, 1.0 - all_right - all_wrong)


def fit_pass_rates(right: Sequence[int], samples: int) -> PassRates:
    """Fit Beta(a, b) to how many of ``samples`` completions were right, per problem.

    Half a right and half a wrong completion are added over all problems, so that nothing right at all is not taken for
    impossible.

    Raises:
        ValueError: No problems, or a count outside 0 … samples.
    """
    if not right or samples < 1 or not all(0 <= k <= samples for k in right):
        raise ValueError(f"expected counts in 0 … {samples}, got {list(right)[:8]}")
    mean = (sum(right) + 0.5) / (len(right) * samples + 1)
    best, fitted = -math.inf, PassRates(mean, 1 - mean)
    for step in range(61):
        # a + b from 0.03 (all or nothing) to 1000 (all problems alike)
        spread = 10 ** (-1.5 + 4.5 * step / 60)
        for shift in (-0.4, -0.2, 0.0, 0.2, 0.4):
            centre = 1 / (1 + math.exp(-(math.log(mean / (1 - mean)) + shift)))
            rates = PassRates(centre * spread, (1 - centre) * spread)
            likelihood = sum(
                _log_beta(rates.a + k, rates.b + samples - k) - _log_beta(rates.a, rates.b) for k in right
            )
            if likelihood > best:
                best, fitted = likelihood, rates
    return fitted


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

"""What each estimator optimises, exactly: the expected step over all groups that a policy of three completions can sample.

    python benchmarks/estimator_audit.py > docs/estimators.md        # ten seconds on one core
    python benchmarks/estimator_audit.py --group-sizes 4             # two seconds

Two problems, each with two logits of its own. Over the tokens ``a`` and ``b`` a completion is ``b``, ``aa`` or ``ab``; the hard problem is
solved by ``aa``, the easy one by ``b`` and ``aa``. A step has one group of G completions for each problem. Groups are enumerated by how
often each completion is in them, with multinomial probabilities in float64, so expectations and variances have no sampling error.
Advantages, losses and weights of tokens are the functions that train (``algorist.objectives``); gradients of objectives are written out
here a second time, in numpy.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorist.objectives import ADVANTAGES, LOSSES, advantage_named, mean_lengths, token_losses, token_weights
from algorist.objectives.reductions import Reduction

Array = NDArray[np.float64]
COMPLETIONS = ("b", "aa", "ab")
LENGTHS = np.array([1, 2, 2])
RIGHT = np.array([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
"""Reward of each completion for the hard and the easy problem."""
START = np.array([[0.5, 0.2], [0.4, 1 / 3]])
"""For each problem the probability of ``b`` first, and of ``a`` after ``a``: pass rates 0.1 and 0.6."""
LONGEST = 2
POSITIVE_WEIGHT = 0.1
SUM: Reduction = "seq-mean-token-sum"
REDUCTIONS: tuple[Reduction, ...] = (
    SUM,
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "token-mean",
    "prompt-mean-token-mean",
)


def logits_of(probabilities: Array) -> Array:
    return np.log(probabilities / (1 - probabilities))


@dataclass(frozen=True, eq=False)
class Policy:
    """Two problems with two logits each: for ``b`` first, and for ``a`` after ``a``."""

    logits: Array

    @property
    def log_probs(self) -> Array:
        """Return log-probs of the tokens, (problem, completion, token); 0 where there is none."""
        yes, no = -np.log1p(np.exp(-self.logits)), -np.log1p(np.exp(self.logits))
        zero = np.zeros(2)
        return np.stack(
            [
                np.stack([yes[:, 0], zero], -1),
                np.stack([no[:, 0], yes[:, 1]], -1),
                np.stack([no[:, 0], no[:, 1]], -1),
            ],
            1,
        )

    @property
    def scores(self) -> Array:
        """Return the gradient of each token's log-prob in the problem's logits, (problem, completion, token, logit)."""
        first, second = (1 / (1 + np.exp(-self.logits))).T
        scores = np.zeros((2, 3, 2, 2))
        scores[:, 0, 0, 0] = 1 - first
        scores[:, 1:, 0, 0] = -first[:, None]
        scores[:, 1, 1, 1], scores[:, 2, 1, 1] = 1 - second, -second
        return scores

    @property
    def probabilities(self) -> Array:
        """Return the probability of each completion, (problem, completion)."""
        return np.exp(self.log_probs.sum(-1))

    def gradient(self, values: Array) -> Array:
        """Return the gradient of Σ_problems E[value of the completion] / 2, (problem, logit)."""
        weighted = self.probabilities * values
        return np.einsum("pc,pck->pk", weighted, self.scores.sum(2)) / 2

    @property
    def pass_rates(self) -> Array:
        return (self.probabilities * RIGHT).sum(1)


NOW = Policy(logits_of(START))
MOVED = Policy(logits_of(START) + np.array([[0.4, 0.4], [-0.4, 0.4]]))
"""The policy after steps on rollouts of ``NOW``; ratios of tokens from 0.7 to 1.4."""


@dataclass(frozen=True, eq=False)
class Groups:
    """All batches of two groups of G completions that ``sampler`` can give.

    Attributes:
        kinds: (M, 2, G), which completion each is.
        chances: (M,), their probabilities, which add up to 1.
    """

    kinds: NDArray[np.int64]
    chances: Array

    @staticmethod
    @cache
    def of(size: int, sampler: Policy = NOW) -> Groups:
        """Enumerate them by counts: the order of a group's completions changes nothing."""
        counts = [(b, aa, size - b - aa) for b in range(size + 1) for aa in range(size + 1 - b)]
        kinds = np.array([np.repeat([0, 1, 2], count) for count in counts])
        chances = [
            [
                math.factorial(size)
                * math.prod(p**n / math.factorial(n) for p, n in zip(problem, count, strict=True))
                for count in counts
            ]
            for problem in sampler.probabilities
        ]
        pairs = np.array(list(itertools.product(range(len(counts)), repeat=2)))
        return Groups(kinds[pairs], np.array(chances[0])[pairs[:, 0]] * np.array(chances[1])[pairs[:, 1]])

    @property
    def mask(self) -> Tensor:
        """(M, 2G, T)."""
        lengths = torch.tensor(LENGTHS[self.kinds]).flatten(1)
        return torch.arange(LONGEST) < lengths[..., None]

    def steps(
        self, loss: str, advantage: str, reduction: Reduction, policy: Policy, sampler: Policy
    ) -> Array:
        """Return what gradient descent on each batch adds to the logits, (M, problem, logit)."""
        batches, _, size = self.kinds.shape

        def per_row(values: Array) -> Tensor:  # (problem, completion, …) → (rows, …)
            rows = np.stack([values[p][self.kinds[:, p]] for p in (0, 1)], 1)
            return torch.tensor(rows).reshape(batches * 2 * size, *rows.shape[3:])

        log_probs = per_row(policy.log_probs).requires_grad_()
        mask = self.mask.flatten(0, 1)
        old = None if policy is sampler else per_row(sampler.log_probs)
        values, _ = token_losses(
            log_probs, advantages_of(self, advantage).flatten(), mask, loss=loss, old_log_probs=old
        )
        total = (values * weights_of(self, reduction).flatten(0, 1)).sum()
        (slopes,) = torch.autograd.grad(total, log_probs)
        shaped = slopes.reshape(batches, 2, size, LONGEST).numpy()
        result = np.zeros((batches, 2, 2))
        for problem in (0, 1):
            of_kind = np.stack(
                [
                    (shaped[:, problem] * (self.kinds[:, problem] == kind)[..., None]).sum(1)
                    for kind in range(3)
                ],
                1,
            )
            result[:, problem] = -np.einsum("mct,ctk->mk", of_kind, policy.scores[problem])
        return result


@cache
def advantages_of(groups: Groups, name: str) -> Tensor:
    """Return the advantages (M, 2, G); ``w_reinforce`` is ``reinforce`` with a weight of positives."""
    weight = POSITIVE_WEIGHT if name == "w_reinforce" else 1.0
    function: Any = advantage_named("reinforce" if name == "w_reinforce" else name)
    rewards = torch.tensor(np.stack([RIGHT[p][groups.kinds[:, p]] for p in (0, 1)], 1))
    if "components_PGK" in inspect.signature(function).parameters:
        own = function
        function = lambda r: own(r, components_PGK=r[..., None], weights_K=torch.ones(1))  # noqa: E731
    values = torch.func.vmap(function)(rewards)
    return values.where(values <= 0, values * weight)


@cache
def weights_of(groups: Groups, reduction: Reduction) -> Tensor:
    """Return the weights of tokens (M, 2G, T), of the whole step at once."""
    size = groups.kinds.shape[2]

    def one(mask: Tensor) -> Tensor:
        denominator: Any = LONGEST if reduction == "seq-mean-token-sum-norm" else None
        if reduction == "prompt-mean-token-mean":
            denominator = mean_lengths(mask.sum(1), size)
        return token_weights(
            mask, reduction, denominator=denominator, like=torch.ones((), dtype=torch.float64)
        )

    return torch.func.vmap(one)(groups.mask)


@dataclass(frozen=True)
class Audit:
    """The expected step of an estimator, and how far single steps are from it.

    Attributes:
        mean: (problem, logit).
        variance: Trace of the covariance.
    """

    mean: Array
    variance: float

    @property
    def noise(self) -> float:
        """Standard deviation of a step over the length of the expected one."""
        return math.sqrt(max(self.variance, 0.0)) / float(np.linalg.norm(self.mean))

    def angle(self, gradient: Array) -> float:
        """Return the angle to the gradient of an objective, in degrees."""
        a, b = self.mean.ravel() / np.linalg.norm(self.mean), gradient.ravel() / np.linalg.norm(gradient)
        return math.degrees(2 * math.atan2(float(np.linalg.norm(a - b)), float(np.linalg.norm(a + b))))

    def factor(self, gradient: Array) -> float:
        """Return the multiple of ``gradient`` that is nearest to the expected step."""
        return float((self.mean * gradient).sum() / (gradient * gradient).sum())


@cache
def audit(
    advantage: str,
    reduction: Reduction = SUM,
    size: int = 8,
    loss: str = "dapo",
    policy: Policy = NOW,
    sampler: Policy = NOW,
) -> Audit:
    """Return expectation and variance of the steps of an estimator over all groups of ``size``."""
    groups = Groups.of(size, sampler)
    steps = groups.steps(loss, advantage, reduction, policy, sampler)
    mean = np.einsum("m,mpk->pk", groups.chances, steps)
    square = float((groups.chances * (steps**2).sum((1, 2))).sum())
    return Audit(mean, square - float((mean**2).sum()))


# ---- objectives, written out once more ---------------------------------------------------------------------------------


def expected_reward(policy: Policy = NOW) -> Array:
    """Return ∇E[R]: the gradient of the mean pass rate."""
    return policy.gradient(RIGHT)


def of_pass_rate(slope: Callable[[float], float]) -> Array:
    """Return the gradient of Σ F(p) / 2 for an F with the derivative ``slope``."""
    return expected_reward() * np.array([slope(p) for p in NOW.pass_rates])[:, None]


def truncated_likelihood(order: int) -> Array:
    """Return the gradient of Σ_{k ≤ order} pass@k / k, the log-likelihood of a right answer cut off after ``order`` terms (MaxRL)."""
    return of_pass_rate(lambda p: sum((1 - p) ** (k - 1) for k in range(1, order + 1)))


def deviation_divided(size: int, eps: float = 1e-4) -> Array:
    """Return the gradient of F_G(p) with F' = E[k(1 - k) / (s_k + ε)] / p(1 - p), k the share of right completions, s_k the group's deviation.

    For large groups F' is 1 / √(p(1 - p)), and F is 2·arcsin √p.
    """

    def slope(p: float) -> float:
        total = 0.0
        for right in range(size + 1):
            share, chance = right / size, math.comb(size, right) * p**right * (1 - p) ** (size - right)
            deviation = math.sqrt(share * (1 - share) * size / (size - 1))
            total += chance * share * (1 - share) / (deviation + eps)
        return total / (p * (1 - p))

    return of_pass_rate(slope)


def per_token_reward() -> Array:
    """Return the gradient of E[(R - b) / length] with b fixed at the pass rate."""
    return NOW.gradient((RIGHT - NOW.pass_rates[:, None]) / LENGTHS)


# ---- the page ----------------------------------------------------------------------------------------------------------

REWARD, LIKELIHOOD, ARCSINE, RATE = (
    "E[R], the pass rate",
    "Σ pass@k / k for k < G, the truncated log-likelihood",
    "F_G(p) per problem, 2·arcsin √p for large G",
    "E[(R − b) / length], b the pass rate",
)
Objective = tuple[str, Callable[[int], Array] | None]
PER_ADVANTAGE: dict[str, Objective] = {
    "leave_one_out": (REWARD, lambda size: expected_reward()),
    "group_centered": (REWARD, lambda size: expected_reward()),
    "reinforce": (REWARD, lambda size: expected_reward()),
    "w_reinforce": (REWARD, lambda size: expected_reward()),
    "maxrl": (LIKELIHOOD, lambda size: truncated_likelihood(size - 1)),
    "group_normalized": (ARCSINE, deviation_divided),
    "batch_normalized": ("nearly E[R]; the divisor is sampled with the rewards", None),
    "reinforce_plus_plus": ("nearly E[R]; baseline and divisor are sampled with the rewards", None),
    "reinforce_plus_plus_baseline": ("nearly E[R]; the divisor is sampled with the rewards", None),
    "per_reward_normalized": ("nearly F_G(p): two divisors, the second of the batch", None),
}
PER_REDUCTION: dict[Reduction, Objective] = {
    SUM: (REWARD, lambda size: expected_reward()),
    "seq-mean-token-sum-norm": ("the same over the longest completion", lambda size: expected_reward()),
    "seq-mean-token-mean": (RATE, lambda size: per_token_reward()),
    "token-mean": ("nearly E[R]; the divisor is sampled with the lengths", None),
    "prompt-mean-token-mean": ("nearly E[R] / mean length per problem", None),
}
NAMED: tuple[tuple[str, str, Reduction], ...] = (
    ("RLOO", "leave_one_out", SUM),
    ("Dr. GRPO", "group_centered", "seq-mean-token-sum-norm"),
    ("REINFORCE, ±1", "reinforce", SUM),
    ("W-REINFORCE", "w_reinforce", SUM),
    ("MaxRL", "maxrl", SUM),
    ("GRPO", "group_normalized", "seq-mean-token-mean"),
    ("DAPO, JustRL", "group_normalized", "token-mean"),
    ("Lite PPO", "batch_normalized", "token-mean"),
    ("ScaleRL", "reinforce_plus_plus_baseline", "prompt-mean-token-mean"),
    ("REINFORCE++", "reinforce_plus_plus", "token-mean"),
)


def in_degrees(angle: float) -> str:
    return "0" if angle < 1e-5 else f"{angle:.1f}°" if angle >= 0.05 else "< 0.1°"


def row(first: str, text: str, audits: Sequence[Audit], truth: Array) -> str:
    angles = " / ".join(in_degrees(one.angle(truth)) for one in audits)
    noises = " / ".join(f"{one.noise:.2f}" for one in audits)
    return f"| {first} | {text} | {angles} | {noises} |"


def checked(name: str, objective: Objective, audits: Sequence[Audit], sizes: Sequence[int]) -> str:
    """Return what is optimised, after the expected step was compared with that objective's own gradient."""
    text, gradient = objective
    if gradient is not None:
        for one, size in zip(audits, sizes, strict=True):
            if one.angle(gradient(size)) > 1e-5:
                raise SystemExit(f"{name} at G = {size} is {one.angle(gradient(size))}° away from {text}")
    return f"{text} ✓" if gradient is not None else text


def table(title: str, rows: Iterable[str], sizes: Sequence[int]) -> list[str]:
    """Return the rows; those that differ in their first cell only share a line."""
    groups = " / ".join(map(str, sizes))
    merged: dict[str, list[str]] = {}
    for line in rows:
        first, _, rest = line.removeprefix("| ").partition(" | ")
        merged.setdefault(rest, []).append(first)
    return [
        f"| {title} | what it optimises | bias at G = {groups} | noise at G = {groups} |",
        "|---|---|---|---|",
        *(f"| {', '.join(firsts)} | {rest}" for rest, firsts in merged.items()),
        "",
    ]


def advantage_rows(sizes: Sequence[int]) -> Iterable[str]:
    missing = set(ADVANTAGES) - set(PER_ADVANTAGE)
    if missing:
        raise SystemExit(f"the audit says nothing of {', '.join(sorted(missing))}; add it to PER_ADVANTAGE")
    for name, objective in PER_ADVANTAGE.items():
        audits = [audit(name, SUM, size) for size in sizes]
        shown = "`reinforce`, `positive_weight: 0.1`" if name == "w_reinforce" else f"`{name}`"
        yield row(shown, checked(name, objective, audits, sizes), audits, expected_reward())


def reduction_rows(sizes: Sequence[int]) -> Iterable[str]:
    for name in REDUCTIONS:
        audits = [audit("leave_one_out", name, size) for size in sizes]
        yield row(f"`{name}`", checked(name, PER_REDUCTION[name], audits, sizes), audits, expected_reward())


def named_rows(sizes: Sequence[int]) -> Iterable[str]:
    for name, advantage, reduction in NAMED:
        audits = [audit(advantage, reduction, size) for size in sizes]
        setting = (
            f"`{'reinforce` × 0.1, `' if advantage == 'w_reinforce' else advantage + '`, `'}{reduction}`"
        )
        yield row(name, setting, audits, expected_reward())


def loss_rows(sizes: Sequence[int]) -> Iterable[str]:
    truth = expected_reward(MOVED)
    for name in LOSSES:
        audits = [audit("leave_one_out", SUM, size, name, MOVED, NOW) for size in sizes]
        parameters = ", ".join(
            f"{k} {v.default}" for k, v in LOSSES.get(name).parameters.items() if k.startswith("clip")
        )
        yield row(f"`{name}`", parameters or "–", audits, truth)


def same_on_policy(size: int = 4) -> float:
    """Return the largest difference between losses, over all advantages and reductions, where the policy is the sampler."""
    worst = 0.0
    for advantage, reduction in itertools.product(PER_ADVANTAGE, REDUCTIONS):
        reference = audit(advantage, reduction, size).mean
        for loss in LOSSES:
            difference = audit(advantage, reduction, size, loss).mean - reference
            worst = max(worst, float(np.abs(difference).max() / np.abs(reference).max()))
    return worst


def page(sizes: Sequence[int]) -> str:
    """Return ``docs/estimators.md``."""
    combinations = len(PER_ADVANTAGE) * len(REDUCTIONS)
    if (worst := same_on_policy()) > 1e-12:
        raise SystemExit(f"losses differ by {worst:.1e} on the policy's own rollouts")
    ratios = np.exp(MOVED.log_probs - NOW.log_probs)[:, [0, 1, 1, 2], [0, 0, 1, 1]]
    lines = f"""# Estimators

What an advantage, an average over tokens and a loss optimise together, computed exactly by
`python benchmarks/estimator_audit.py`.

A policy over two tokens has three completions and two problems with pass rates {NOW.pass_rates[0]:.1f} and \
{NOW.pass_rates[1]:.1f}. All groups are
enumerated in float64 with the functions that train: expectations, not samples.

- **Bias**: angle between the expected step and the gradient of the pass rate. A ✓ says that the expected step is the
  gradient of the objective named.
- **Noise**: standard deviation of a step over the length of the expected one.
- Which biases are 0 holds for any policy with rewards of 0 and 1; degrees and noise are of this one.

## By their names
""".split("\n")
    lines += [
        line.replace("what it optimises", "setting") for line in table("name", named_rows(sizes), sizes)
    ]
    lines += ["## Advantages, summed over tokens", ""]
    lines += table("`grpo.advantage`", advantage_rows(sizes), sizes)
    lines += """Dividing by the group's deviation (GRPO) weighs a problem by about 1 / √(p(1 − p)), so hard and easy problems count
more. MaxRL weighs it by (1 − (1 − p)^(G−1)) / p: hard ones count more, by design. W-REINFORCE and REINFORCE have the
expected direction of RLOO and other noise.

## Averages over tokens, with `leave_one_out`
""".split("\n")
    lines += table("`grpo.reduction`", reduction_rows(sizes), sizes)
    lines += f"""The mean over each completion's tokens (GRPO) makes a right answer worth more the shorter it is, and a wrong one less
bad the longer it is.

## Losses, off policy

On policy all {len(list(LOSSES))} losses have the same expected step (12 digits, {combinations} pairs of advantage and average). Here the
logits moved by 0.4 (ratios {ratios.min():.2f} to {ratios.max():.2f}), with `leave_one_out` and each loss's own clip.
""".split("\n")
    lines += [
        line.replace("what it optimises", "clip") for line in table("`grpo.loss`", loss_rows(sizes), sizes)
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[4, 16])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(page(arguments.group_sizes), end="")


if __name__ == "__main__":
    main()

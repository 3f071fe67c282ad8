"""Quality of a model's completions at GRPO's sampling settings: right answers, useful groups, variety, tags, rewards that fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

from algorist.diagnosis.signals import END_OF_TURN, UNREADABLE, make_batch
from algorist.errors import RewardError
from algorist.evaluation.estimators import share_interval
from algorist.models.load import Policy
from algorist.prompts import PromptFormat
from algorist.rewards import RewardSet
from algorist.rollouts.collect import collect
from algorist.rollouts.engines import ENGINES, make_engine
from algorist.runs.plan import Plan
from algorist.store.write import rows_of
from algorist.training.grpo_setup import sampling_params
from algorist.types import Group, Problem, Rollout

SHOWN = 5
"""Completions that are shown, all of the first problem: their differences are what a group learns from."""


JUDGED = 10
"""Problems below which nothing is said of what a model can and cannot do: too few to judge."""


class Sampler:
    """Samples completions as GRPO would: its settings, its prompt format, its rewards but those that ask for what only a trainer has.

    Raises:
        EngineError: The model cannot be sampled from.
    """

    def __init__(self, plan: Plan, policy: Policy) -> None:
        recipe = plan.recipe
        self.section, self.form = recipe.grpo, plan.form
        name = "auto" if ENGINES.get(self.section.engine).own_device else self.section.engine
        self.rewards = RewardSet([reward for reward in plan.rewards if not reward.needs_trainer])
        self.hangs: dict[str, str] = {}
        policy.model.eval()
        self.engine: Any = make_engine(name, policy.model, policy.tokenizer)
        self._params = sampling_params(self.section, recipe.seed)
        self._collect = partial(collect, self.engine, policy.tokenizer, matcher=recipe.matcher)

    def draw(self, problems: Sequence[Problem], samples: int, until: float | None = None) -> list[Group]:
        """Return the graded, rewarded groups of problems.

        Raises:
            OutOfTime: They were not finished at ``until`` (``time.monotonic``).
        """
        groups = self._collect(problems, self.form, replace(self._params, until=until), samples)
        try:
            return groups if self.hangs else self.rewards.pay(groups)
        except RewardError as error:
            self.hangs = {r.__name__: str(error) for r in self.rewards if repr(r.__name__) in str(error)}
            return groups

    def facts(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return pass rates, useful groups, variety, tags, rewards, truncation, reasons, speed, and some completions."""
        section, samples = self.section, len(groups[0].rollouts)
        flat = [rollout for group in groups for rollout in group.rollouts]
        tokens = sorted(len(rollout.completion_ids) for rollout in flat)
        right = [sum(r.grade is not None and r.grade.correct for r in group.rollouts) for group in groups]
        shown = [
            {
                "completion": r.text,
                "gold": groups[0].problem.answer,
                "reason": r.grade.reason if r.grade else "",
            }
            for r in groups[0].rollouts[:SHOWN]
        ]
        rows = [row for index, group in enumerate(groups) for row in rows_of(group, index=index)]
        counts = make_batch(rows, self._params.stop_strings)
        rates, interval = fit_pass_rates(right, samples), share_interval([k / samples for k in right])
        return {
            "problems": len(groups),
            "samples": samples,
            "judged": len(groups) >= JUDGED,
            "temperature": section.temperature,
            "pass_rate": sum(right) / len(flat),
            "pass_rate_interval": (interval.low, interval.high),
            "all_right": sum(k == samples for k in right) / len(right),
            "all_wrong": sum(k == 0 for k in right) / len(right),
            "useful_share": {
                str(g): round(rates.useful_share(g, right_teach=section.advantage in WITHOUT_BASELINE), 3)
                for g in sorted({section.group_size, *GROUP_SIZES})
            },
            "truncated": sum(r.truncated for r in flat) / len(flat),
            "stopped": counts.stopped / len(flat),
            "same_number": counts.same_number,
            "same_number_wrong": counts.same_number_wrong,
            "reasons": dict(Counter(r.grade.reason for r in flat if r.grade).most_common()),
            "tokens_mean": sum(tokens) / len(tokens),
            "tokens": tokens,
            "tokens_per_second": sum(tokens) / sum({group.seconds for group in groups}),
            "per_problem": {g.problem.id: k / samples for g, k in zip(groups, right, strict=True)},
            "shown": shown,
            **_texts(groups, self.form),
            "rewards": _values(self.rewards, flat, self.hangs),
        }


def sample(
    plan: Plan, problems: Sequence[Problem], policy: Policy, samples: int
) -> tuple[dict[str, Any], list[Group]]:
    """Sample completions of problems; return what ``Sampler.facts`` says of them, and the groups."""
    sampler = Sampler(plan, policy)
    groups = sampler.draw(problems, samples)
    return sampler.facts(groups), groups


def _texts(groups: Sequence[Group], form: PromptFormat) -> dict[str, Any]:
    """Measure the variety of a group's completions, and the tags that they hold.

    A tag is looked for in completions that ended without the length limit: those that were cut off may only not have come to it.
    """
    flat = [rollout for group in groups for rollout in group.rollouts]
    ended = [rollout.text for rollout in flat if not rollout.truncated]
    cut = [rollout.parsed.answer is not None for rollout in flat if rollout.truncated]
    unread = [r.truncated for r in flat if r.grade is not None and r.grade.reason in UNREADABLE]
    tags = form.tags.all()
    if form.prefilled_start and form.tags.reasoning_open:
        tags = tuple(tag for tag in tags if tag != form.tags.reasoning_open)
    different = [len({r.text for r in group.rollouts}) for group in groups]
    sizes = [len(group.rollouts) for group in groups]
    return {
        "identical_groups": sum(count == 1 for count in different) / len(groups),
        "distinct": mean(count / size for count, size in zip(different, sizes, strict=True)),
        "ended": len(ended),
        "ended_unreadable": unread.count(False),
        "unreadable": len(unread),
        "truncated_answered": sum(cut) / max(1, len(cut)),
        "tags": {tag: sum(tag in text for text in ended) / max(1, len(ended)) for tag in tags},
        "well_formed": sum(r.parsed.well_formed for r in flat) / len(flat),
        "broken_characters": sum("\ufffd" in r.text for r in flat) / len(flat),
        "end_of_turn_as_text": sum(END_OF_TURN.search(r.text) is not None for r in flat) / len(flat),
    }


def _values(
    rewards: RewardSet, rollouts: Sequence[Rollout], hangs: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return for each reward its mean, how often it failed and how first."""
    by_reward: dict[str, dict[str, Any]] = {}
    for reward in rewards:
        name = reward.__name__
        known = [value for r in rollouts if (value := r.rewards.get(name)) is not None]
        by_reward[name] = {
            "mean": mean(known) if known else None,
            "failures": reward.failures,
            "completions": len(rollouts),
            "first_failure": hangs.get(name) or reward.first_failure,
            "hangs": name in hangs,
            "low": reward.floor,
        }
    return by_reward


# ---- what an extension may look at before a run. A file of its own: extensions need it, and nothing else of the preflight


@dataclass(frozen=True)
class Look:
    """The policy before any training, and what it solved.

    Attributes:
        plan: The plan of the run.
        policy: The model that was sampled, with its tokenizer.
        problems: Those that were sampled.
        samples: Completions of each problem.
        rates: Share of right completions by the problem's id.
        groups: What was sampled.
        sft: The problems of SFT where it is still to come, so that GRPO will start from another model; else empty.
        say: Shows what is being done.
    """

    plan: Plan
    policy: Policy
    problems: Sequence[Problem]
    samples: int
    rates: Mapping[str, float]
    groups: Sequence[Group]
    sft: Sequence[Problem]
    say: Callable[[str], None]


# ---- from a few samples per problem to the share of useful groups for any group size

GROUP_SIZES = (4, 8, 16, 32)
WITHOUT_BASELINE = ("reinforce", "reinforce_plus_plus")
"""Advantages under which a group of equal rewards teaches too, but one in which all are wrong."""


@dataclass(frozen=True, slots=True)
class PassRates:
    """The fitted distribution of pass rates: Beta(a, b)."""

    a: float
    b: float

    def useful_share(self, group_size: int, *, right_teach: bool = False) -> float:
        """Return the expected share of groups of this size with right and wrong completions; with ``right_teach`` also all right."""
        all_right = math.exp(_log_beta(self.a + group_size, self.b) - _log_beta(self.a, self.b))
        all_wrong = math.exp(_log_beta(self.a, self.b + group_size) - _log_beta(self.a, self.b))
        return max(0.0, 1.0 - all_right * (not right_teach) - all_wrong)


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

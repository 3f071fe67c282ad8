"""What the calls of a rollout batch say: metrics, the end of a run whose tool fails always, turns that lead nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from algorist.errors import TrainingError
from algorist.extensions.environments.reward import REWARD
from algorist.extensions.tools.replies import REFUSED
from algorist.rewards import RewardSet
from algorist.types import ENVIRONMENT, Group, Rollout, Turn

OF_ENVIRONMENT = (ENVIRONMENT, REWARD)


def turn_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of a rollout batch: shares are of calls or of rollouts, seconds of a call."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    calls = _calls(groups)
    ran = [turn for turn in calls if turn.error != REFUSED]
    replies = [turn for r in rollouts for turn in r.turns if turn.source in OF_ENVIRONMENT]
    count = max(1, len(rollouts))
    metrics = {
        "tools/calls_per_rollout": len(calls) / count,
        "tools/called_share": sum(any(t.source not in OF_ENVIRONMENT for t in r.turns) for r in rollouts)
        / count,
        "tools/void_share": sum(map(is_void, rollouts)) / count,
        "tools/unsampled_share": sum(r.sampled_mask.count(False) for r in rollouts)
        / max(1, sum(len(r.completion_ids) for r in rollouts)),
    }
    if calls:
        metrics["tools/refused_share"] = 1 - len(ran) / len(calls)
    if ran:
        metrics["tools/failed_share"] = sum(bool(turn.error) for turn in ran) / len(ran)
        metrics["tools/timeout_share"] = sum(turn.error == "TimeoutError" for turn in ran) / len(ran)
        metrics["tools/call_s"] = sum(turn.seconds for turn in ran) / len(ran)
    if replies:
        answers = [turn for turn in replies if turn.source == ENVIRONMENT]
        metrics["tools/environment_replies_per_rollout"] = len(answers) / count
        metrics["tools/environment_failed_share"] = sum(bool(t.error) for t in replies) / len(replies)
    return metrics


def is_void(rollout: Rollout) -> bool:
    """Whether a rollout ended without a call and without an answer: nothing was asked, nothing was said."""
    return all(turn.source == REWARD for turn in rollout.turns) and rollout.parsed.answer is None


class PaidWithoutVoid(RewardSet):
    """Rewards that void rollouts do not get: they count in no mean, in no judgement of a group, and nothing is learned from them.

    Source: SimpleTIR (2509.02479), which filters trajectories with void turns.
    """

    def pay(self, groups: Sequence[Group], extra: Mapping[str, Any] | None = None) -> list[Group]:
        """Return the groups with their rewards, as those of any recipe; the total of a void rollout is None."""
        paid = super().pay(groups, extra)
        for group in paid:
            group.rollouts[:] = [replace(r, reward=None) if is_void(r) else r for r in group.rollouts]
        return paid


class FailingBatches:
    """Counts for each tool the rollout batches in a row in which every call of it failed."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def see(self, groups: Sequence[Group], most: int) -> None:
        """Take a rollout batch.

        Raises:
            TrainingError: It is the ``most``-th in a row in which every call of a tool failed.
        """
        calls = [turn for turn in _calls(groups) if turn.error != REFUSED]
        for name in {turn.source for turn in calls}:
            errors = [turn.error for turn in calls if turn.source == name]
            self.counts[name] = self.counts.get(name, 0) + 1 if all(errors) else 0
            if self.counts[name] < most:
                continue
            last = next(turn for turn in reversed(calls) if turn.source == name)
            broken = " The tool itself is broken." if last.error == "Crashed" else ""
            raise TrainingError(
                f"every call of {name} failed in {most} rollout batches in a row ({len(errors)} calls in the last one).{broken} The "
                f"last: it got {last.request[:200]!r} and answered {last.reply[:200]!r} ({last.error}). Look at the calls: "
                "algorist inspect RUN --sql 'select turns from rollouts'; correct the tool, teach the model to call it (sft.enabled), "
                "or let it go on: tools.fail_steps=1000000"
            )


def _calls(groups: Sequence[Group]) -> list[Turn]:
    return [t for g in groups for r in g.rollouts for t in r.turns if t.source not in OF_ENVIRONMENT]

"""Causes on signals made by hand, where no run is needed."""

from __future__ import annotations

from algorist.diagnosis.rule import Facts
from algorist.diagnosis.rules import all_rules
from algorist.diagnosis.signals import Signals


def test_a_reward_without_any_value_does_not_stop_the_diagnosis() -> None:
    """The reward rises while answers become wrong; a second reward is never a number."""
    signals = Signals()
    for step in range(12):
        right = step < 6
        rows = [
            {
                "step": step, "group": group, "problem_id": f"p{group}", "completion": "text", "completion_tokens": 4,
                "reward": float(not right) + 0.01 * row, "correct": right, "reason": "equal" if right else "different",
            }
            for group in range(8)
            for row in range(4)
        ]  # fmt: skip
        signals.add_rollouts(rows)
        signals.add_metrics(
            "grpo", step, {"rewards/own/mean": float(step), "rewards/empty/mean": float("nan")}
        )
    finding = all_rules()["reward_hacking"].look(Facts(signals.settings, signals=signals))
    assert finding is not None
    assert "single rewards, first and last step: own 0 → 11" in finding.evidence
    assert len(finding.samples) == 3 and "[read nothing, gold None, different, reward" in finding.samples[0]

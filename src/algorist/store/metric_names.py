"""Names of metrics that runs of former versions wrote, and their names of now: one name per quantity, TRL's where it has one."""

from __future__ import annotations

from typing import Any

FORMER = {
    "reward/total": "reward",
    "completions/mean_tokens": "completions/mean_length",
    "completions/truncated_share": "completions/clipped_ratio",
    "log_probs/sampler_gap_mean": "sampling/sampling_logp_difference/mean",
    "log_probs/sampler_gap_max": "sampling/sampling_logp_difference/max",
    "rollout/seconds": "time/rollout_s",
    "update/seconds": "time/update_s",
    "step_time": "time/step_s",
}
"""Name of then → name of now. ``reward/NAME`` became ``rewards/NAME/mean``; ``frac_reward_zero_std`` was 1 - ``groups/useful_share``."""


def with_names_of_now(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of ``metrics.jsonl`` under the names of now; a quantity that has both names keeps its value of now."""
    if not any(name in FORMER or name.startswith("reward/") for name in line):
        return line
    renamed: dict[str, Any] = {}
    for name, value in line.items():
        if name in FORMER:
            renamed.setdefault(FORMER[name], line.get(FORMER[name], value))
        elif name.startswith("reward/"):
            now = f"rewards/{name.removeprefix('reward/')}/mean"
            renamed.setdefault(now, line.get(now, value))
        elif name != "frac_reward_zero_std" or "groups/useful_share" not in line:
            renamed[name] = value
    return renamed

"""Numbers of a step: means over tokens and completions, added up over parts and processes; and what rollouts say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from algorist.types import Group

_LEAST, _GREATEST = ("_min", "/min"), ("_max", "/max")


class Metrics:
    """Sums and counts by name; a name that ends in ``min`` or ``max`` keeps the extreme instead of the mean."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Count ``values``: (B, T) over the tokens of ``mask``, (B, 1), (B,) or one number over the completions that have tokens."""
        values = torch.as_tensor(values).detach().to(mask.device)
        values = values.expand(mask.shape[0]) if values.dim() == 0 else values
        per_token = values.dim() == 2 and values.shape[1] == mask.shape[1]
        counted = values[mask] if per_token else values.reshape(mask.shape[0])[mask.any(1)]
        counted = counted[~counted.isnan()]
        if counted.numel():
            most = counted.max() if name.endswith(_GREATEST) else None
            total = counted.min() if name.endswith(_LEAST) else most
            exact = counted if counted.device.type != "mps" else counted.cpu()  # Apple's GPU has no float64
            self.add_sum(name, float(exact.double().sum() if total is None else total), counted.numel())

    def add_sum(self, name: str, total: float, count: float) -> None:
        """Count a sum over ``count`` things, or the extreme of them."""
        if name in self.sums:
            before, things = self.sums[name]
            count += things
            if name.endswith(_LEAST):
                total = min(before, total)
            elif name.endswith(_GREATEST):
                total = max(before, total)
            else:
                total += before
        self.sums[name] = (total, count)

    def merge(self, other: Metrics) -> None:
        for name, (total, count) in other.sums.items():
            self.add_sum(name, total, count)

    def values(self) -> dict[str, float]:
        return {
            name: total if name.endswith((*_LEAST, *_GREATEST)) else total / count
            for name, (total, count) in self.sums.items()
        }


def rollout_metrics(groups: Sequence[Group], reward_names: Sequence[str], seconds: float) -> dict[str, float]:
    """Return the metrics of all groups sampled in ``seconds``, under TRL's names."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([float(sum(r.sampled_mask)) for r in rollouts])
    decoded = sum(len(r.completion_ids) for r in rollouts)
    ended = lengths[[not r.truncated for r in rollouts]]
    metrics = {
        "time/rollout_s": seconds,
        "rollout/tokens_per_s": decoded / max(seconds, 1e-9),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": sum(r.truncated for r in rollouts) / len(rollouts),
        "completions/mean_terminated_length": float(ended.mean()) if len(ended) else 0.0,
    }
    rewards = torch.tensor([_number(r.reward) for r in rollouts])
    metrics |= {"reward": float(rewards.nanmean()), "reward_std": _deviation(rewards)}
    for name in reward_names:
        values = torch.tensor([_number(r.rewards.get(name)) for r in rollouts])
        metrics[f"rewards/{name}/mean"] = float(values.nanmean())
        metrics[f"rewards/{name}/std"] = _deviation(values)
    return metrics


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _deviation(values: Tensor) -> float:
    known = values[~values.isnan()]
    return float(known.std()) if len(known) > 1 else math.nan


class Averages:
    """Collects values between two logged lines and gives their means; NaN is left out."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, values: dict[str, float]) -> None:
        """Take the values of one step or rollout batch."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(float(value))

    def take(self) -> dict[str, Any]:
        """Return the mean of each name and forget the values."""
        means = {
            name: sum(known) / len(known)
            for name, values in self._values.items()
            if (known := [v for v in values if not math.isnan(v)])
        }
        self._values.clear()
        return means

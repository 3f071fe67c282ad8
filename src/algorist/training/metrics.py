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
        self._sums: dict[str, tuple[float, float]] = {}
        self._coming: list[tuple[str, Tensor]] = []  # totals and counts that are still on the device

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Count ``values``: (B, T) over the tokens of ``mask``, (B, 1), (B,) or one number over the completions that have tokens.

        The host does not wait for them: they are read when the sums are asked for.
        """
        values = torch.as_tensor(values).detach().to(mask.device)
        if mask.device.type == "mps":  # Apple's GPU has no float64
            values, mask = values.cpu(), mask.cpu()
        values = values.expand(mask.shape[0]) if values.dim() == 0 else values
        per_token = values.dim() == 2 and values.shape[1] == mask.shape[1]
        counts = mask if per_token else mask.any(1)
        if not counts.numel():
            return
        values = values.reshape(counts.shape).double()
        counts = counts & ~values.isnan()
        least, greatest = name.endswith(_LEAST), name.endswith(_GREATEST)
        known = values.masked_fill(~counts, math.inf if least else -math.inf if greatest else 0.0)
        total = known.min() if least else known.max() if greatest else known.sum()
        self._coming.append((name, torch.stack([total, counts.sum()])))

    @property
    def sums(self) -> dict[str, tuple[float, float]]:
        """Sum, or extreme, and count of each name."""
        coming, self._coming = self._coming, []
        numbers = torch.stack([pair for _, pair in coming]).tolist() if coming else []
        for (name, _), (total, count) in zip(coming, numbers, strict=True):
            if count:
                self.add_sum(name, total, count)
        return self._sums

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

    def take(self) -> dict[str, tuple[float, float]]:
        """Return the sums and forget them."""
        sums, self._sums = self.sums, {}
        return sums

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
    """Collects values between two logged lines and gives their means, of seconds (``time/``) their sums; NaN is left out."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, values: dict[str, float]) -> None:
        """Take the values of one step or rollout batch."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(float(value))

    def take(self) -> dict[str, Any]:
        """Return the mean of each name, of seconds the sum, and forget the values."""
        taken, self._values = self._values, {}
        return {
            name: sum(known) / (1 if name.startswith("time/") else len(known))
            for name, values in taken.items()
            if (known := [v for v in values if not math.isnan(v)])
        }

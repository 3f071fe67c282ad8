"""Estimates of KL(policy ‖ reference) per token, from samples of the policy.

Source: Schulman, "Approximating KL Divergence", 2020. With r = p_reference / p_policy, at tokens from the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return -log r: unbiased, high variance, negative for half of the tokens. Shapes (B, T) → (B, T)."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return (log r)² / 2: low variance, biased; its gradient is that of the true KL. Shapes (B, T) → (B, T)."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return r - 1 - log r: unbiased, low variance, never negative; GRPO's penalty. Shapes (B, T) → (B, T)."""
    difference = ref_log_probs - log_probs
    return difference.expm1() - difference

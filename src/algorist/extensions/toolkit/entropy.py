"""Entropy of next-token distributions, without a second tensor of the logits' size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24
"""How many logits are worked on at once: 64 MB in float32."""


class _Entropy(torch.autograd.Function):
    """H = logsumexp(z) - Σ softmax(z)·z, row by row in chunks; dH/dz = -p·(log p + H)."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor) -> Tensor:
        entropy = torch.empty(logits_NV.shape[0], dtype=torch.float32, device=logits_NV.device)
        if logits_NV.dtype == torch.float64:
            entropy = entropy.double()
        for rows in _chunks(logits_NV):
            logp = _log_softmax(logits_NV[rows])
            entropy[rows] = _plogp(logp).sum(-1).neg()
        ctx.save_for_backward(logits_NV, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        logits_NV, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits_NV)
        for rows in _chunks(logits_NV):
            logp = _log_softmax(logits_NV[rows])
            p = logp.exp()
            part = -(_plogp(logp) + p * entropy[rows].unsqueeze(-1)) * grads[0][rows].unsqueeze(-1)
            gradient[rows] = part.to(gradient.dtype)
        return gradient


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def _plogp(logp: Tensor) -> Tensor:
    """Return p·log p, 0 where p is 0 (a logit of -inf)."""
    return torch.where(logp == -torch.inf, torch.zeros_like(logp), logp.exp() * logp)


def _chunks(logits_NV: Tensor) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, logits_NV.shape[-1]))
    return [slice(start, start + step) for start in range(0, logits_NV.shape[0], step)]


def compute_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each next-token distribution, in nats.

    Stable for any logits; a logit of -inf is a token that cannot occur. Besides the logits, which autograd keeps,
    memory is needed for one chunk of positions only, forward and backward.

    Args:
        logits: (…, V), not normalised, any float type; computed in float32 (float64 stays).

    Returns:
        (…), float32 or float64, from 0 to log V.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    return _Entropy.apply(flat).view(logits.shape[:-1])

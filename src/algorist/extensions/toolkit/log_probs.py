"""Log-probabilities of given tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from algorist.extensions.toolkit.entropy import compute_entropy


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log p(label) at each position, without a normalised copy of the logits.

    Args:
        logits: (B, T, V), position t predicts ``labels[:, t]``; computed in float32 (float64 stays).
        labels: (B, T) token ids.
        temperature: Divides the logits; the temperature of sampling.

    Returns:
        (B, T), at most 0.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    of_labels = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return of_labels - torch.logsumexp(scaled, dim=-1)


def get_response_log_probs(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    return_token_entropy: bool = False,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Run a causal model and return the log-probabilities of the labels, at all positions.

    Args:
        model: Takes ``input_ids``, returns an object with ``logits`` (B, T, V).
        input_ids: (B, T) token ids.
        labels: (B, T), ``input_ids`` shifted by one.
        return_token_entropy: Also return the entropy at each position, without gradient.
        attention_mask: (B, T), 0 for padding; not needed when padding stands on the right.
        temperature: The temperature of sampling.

    Returns:
        ``log_probs`` (B, T) and, if asked for, ``token_entropy`` (B, T); prompt and padding included, so mask them.
    """
    extra = {} if attention_mask is None else {"attention_mask": attention_mask}
    logits = model(input_ids=input_ids, **extra).logits
    result = {"log_probs": token_log_probs(logits, labels, temperature)}
    if return_token_entropy:
        with torch.no_grad():
            result["token_entropy"] = compute_entropy(logits / temperature if temperature != 1.0 else logits)
    return result

"""``rollouts/sampling.py`` in MLX: the same uniform number of a token picks the same token, so seeds mean what they mean there."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from algorist.rollouts.base import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-20
_CANDIDATES = 1024
_CHUNK = 128


def choose(
    logits_SV: mx.array,
    uniform_S: Tensor,
    params: SamplingParams,
    early_S: Tensor | None,
    is_stop_V: Tensor,
    ids: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick one token per row; see ``sampling.sample_longer``, whose arguments these are but for the logits.

    Returns:
        Tokens (S,) int64 and their log-probs (S,) float32 at the temperature (1 when greedy), before the filters; torch's, on the CPU.
    """
    scaled_SV = logits_SV.astype(mx.float32)
    if params.temperature not in (0, 1):
        scaled_SV = scaled_SV / params.temperature
    total_S1 = log_total(scaled_SV)
    open_SV, open_total_S1 = scaled_SV, total_S1
    if early_S is not None:
        barred_SV = mx.array((early_S.unsqueeze(-1) & is_stop_V).numpy())
        open_SV = mx.where(barred_SV, -mx.inf, scaled_SV)
        open_total_S1 = log_total(open_SV)
    open_SV = open_SV if ids is None else open_SV[:, :ids]
    if params.temperature == 0:
        token_S1 = mx.argmax(open_SV, axis=-1, keepdims=True)
    else:
        token_S1 = _drawn(open_SV, open_total_S1, mx.array(uniform_S.numpy())[:, None], params)
    log_prob_S1 = mx.take_along_axis(scaled_SV, token_S1, axis=-1) - total_S1
    token_S1 = token_S1.astype(mx.int32)
    mx.eval(token_S1, log_prob_S1)
    return torch.from_numpy(np.array(token_S1))[:, 0].long(), torch.from_numpy(np.array(log_prob_S1))[:, 0]


def log_total(scaled_SV: mx.array) -> mx.array:
    """Return the logsumexp (S, 1), in chunks: one sum over 49k words was off by 1e-4 on a CPU."""
    rows, size = scaled_SV.shape
    padded = mx.pad(scaled_SV, [(0, 0), (0, -size % _CHUNK)], constant_values=-mx.inf)
    of_chunk_SC = mx.logsumexp(padded.reshape(rows, -1, _CHUNK), axis=-1)
    return mx.logsumexp(of_chunk_SC, axis=-1, keepdims=True)


def _drawn(open_SV: mx.array, total_S1: mx.array, uniform_S1: mx.array, params: SamplingParams) -> mx.array:
    if not params.top_k and params.top_p == 1:
        weight_SV = mx.exp(open_SV - total_S1)
        if params.min_p:
            least_S1 = params.min_p * weight_SV.max(axis=-1, keepdims=True)
            weight_SV = mx.where(weight_SV < least_S1, 0.0, weight_SV)
        return pick(weight_SV, uniform_S1)
    size = open_SV.shape[-1]
    count = min(params.top_k or _CANDIDATES, size)
    index_SK = mx.argpartition(-open_SV, count - 1, axis=-1)[:, :count] if count < size else None
    if index_SK is not None and not params.top_k:
        mass_S = mx.exp(mx.take_along_axis(open_SV, index_SK, axis=-1) - total_S1).sum(axis=-1)
        index_SK = None if (mass_S < params.top_p).any().item() else index_SK
    if index_SK is None:
        index_SK = mx.argsort(-open_SV, axis=-1)
    else:
        order_SK = mx.argsort(-mx.take_along_axis(open_SV, index_SK, axis=-1), axis=-1)
        index_SK = mx.take_along_axis(index_SK, order_SK, axis=-1)
    log_prob_SK = mx.take_along_axis(open_SV, index_SK, axis=-1) - total_S1
    weight_SK = candidate_weights(log_prob_SK, params)
    return mx.take_along_axis(index_SK, pick(weight_SK, uniform_S1), axis=-1)


def candidate_weights(log_prob_SK: mx.array, params: SamplingParams) -> mx.array:
    """Return the weights (S, K) of candidates sorted from best to worst; see ``sampling.candidate_weights``."""
    weight_SK = mx.exp(log_prob_SK - log_prob_SK[:, :1])
    if params.top_p < 1:
        mass_SK = weight_SK / weight_SK.sum(axis=-1, keepdims=True) if params.top_k else mx.exp(log_prob_SK)
        removed_SK = mx.cumsum(mass_SK, axis=-1) - mass_SK >= params.top_p
        removed_SK[:, 0] = False
        weight_SK = mx.where(removed_SK, 0.0, weight_SK)
    if params.min_p:
        weight_SK = mx.where(weight_SK < params.min_p, 0.0, weight_SK)
    return weight_SK


def pick(weight_SV: mx.array, uniform_S1: mx.array) -> mx.array:
    """Return (S, 1): the index where the cumulative weight passes ``uniform_S1`` times the total; see ``sampling.pick``."""
    rows, size = weight_SV.shape
    weight_SCK = mx.pad(weight_SV, [(0, 0), (0, -size % _CHUNK)]).reshape(rows, -1, _CHUNK)
    edge_SC = mx.cumsum(weight_SCK.sum(axis=-1), axis=-1)
    target_S1 = uniform_S1 * edge_SC[:, -1:]
    chunk_S1 = mx.minimum((edge_SC <= target_S1).sum(axis=-1, keepdims=True), edge_SC.shape[-1] - 1)
    before_S1 = mx.take_along_axis(edge_SC, mx.maximum(chunk_S1 - 1, 0), axis=-1)
    start_S1 = mx.where(chunk_S1 == 0, 0.0, before_S1)
    sum_SK = mx.cumsum(mx.take_along_axis(weight_SCK, chunk_S1[:, :, None], axis=1)[:, 0], axis=-1)
    rest_S1 = mx.minimum(target_S1 - start_S1, sum_SK[:, -1:] * _BELOW_ONE)
    inner_S1 = mx.minimum((sum_SK <= rest_S1).sum(axis=-1, keepdims=True), _CHUNK - 1)
    return chunk_S1 * _CHUNK + inner_S1

"""Sampling as pure tensor functions: temperature, top-k, top-p, min-p, greedy, and the log-prob that the loss wants.

One uniform number per token decides (inverse of the cumulative distribution), so a row's tokens depend on its own
numbers and logits only: not on the batch around it, on compaction or on the order of admission.

Conventions are those of ``transformers``: temperature, then top-k, then top-p on what is left, then min-p. The captured
log-prob is that of the temperature-scaled distribution before these filters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algorist.errors import EngineError
from algorist.rollouts.base import Prompts, SamplingParams

# A uniform number this close to 1 could round up to the whole mass and pick a token of probability zero.
_BELOW_ONE = 1.0 - 2.0**-20
# Above this vocabulary size the cumulative sum is taken over chunks first, which is several times faster.
_CHUNKED_FROM = 2048
_TOP_P_CANDIDATES = 1024


def draw_uniforms(rows: int, steps: int, seed: int | None) -> Tensor:
    """Return (rows, steps) float32 numbers in [0, 1) on the CPU.

    Args:
        rows: R, all completions asked for, in the order of the prompts.
        steps: Most tokens per completion.
        seed: None takes torch's global CPU generator.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.rand(rows, steps, generator=generator).mul_(_BELOW_ONE)


def sample(
    logits_RV: Tensor,
    uniform_R: Tensor,
    params: SamplingParams,
    *,
    may_wait: bool = True,
    ids: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick one token per row.

    Args:
        logits_RV: Any float type; float32 logits may be overwritten.
        uniform_R: Numbers in [0, 1); unused when greedy.
        params: ``temperature`` (0 is greedy), ``top_k``, ``top_p``, ``min_p``.
        may_wait: The host may look at numbers of the device, which saves top-p most of its sort; not inside a CUDA graph.
        ids: Token ids that the tokenizer has, from 0; those beyond only pad the head and are never picked. None: all.

    Returns:
        Tokens (R,) int64 and their log-probs (R,) float32 at the temperature (1 when greedy), before the filters.
    """
    scaled_RV = logits_RV.float()
    if params.temperature == 0:
        best_R, token_R = scaled_RV[:, :ids].max(dim=-1)
        return token_R, (best_R - scaled_RV.logsumexp(dim=-1))
    if params.temperature != 1:
        scaled_RV.div_(params.temperature)
    if params.top_k or params.top_p < 1:
        return _sample_candidates(scaled_RV, uniform_R, params, may_wait, ids)
    weight_RV = kept_RV = scaled_RV.softmax(dim=-1)
    if ids is not None:
        weight_RV[:, ids:] = 0.0
    if params.min_p:
        kept_RV = weight_RV.masked_fill(weight_RV < params.min_p * weight_RV.amax(-1, keepdim=True), 0.0)
    token_R = pick(kept_RV, uniform_R)
    return token_R, weight_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1).log_()


def sample_longer(
    logits_RV: Tensor,
    uniform_R: Tensor,
    params: SamplingParams,
    early_R: Tensor | None,
    is_stop_V: Tensor,
    ids: int | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """``sample`` without stop tokens in the rows that are still too short (``early_R``, None: none); log-probs stay unfiltered."""
    if early_R is None:
        return sample(logits_RV, uniform_R, params, ids=ids, **how)
    full_RV = logits_RV.float().clone()
    barred_RV = full_RV.masked_fill(early_R.unsqueeze(-1) & is_stop_V, float("-inf"))
    token_R, _ = sample(barred_RV, uniform_R, params, ids=ids, **how)
    scaled_RV = full_RV.div_(params.temperature or 1.0)
    chosen_R = scaled_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1)
    return token_R, chosen_R - scaled_RV.logsumexp(-1)


def _sample_candidates(
    scaled_RV: Tensor, uniform_R: Tensor, params: SamplingParams, may_wait: bool, ids: int | None
) -> tuple[Tensor, Tensor]:
    """Sample from the best tokens only; sorts all of them only where the best do not hold ``top_p``."""
    log_total_R1 = scaled_RV.logsumexp(dim=-1, keepdim=True)
    scaled_RV = scaled_RV[:, :ids]
    vocabulary = scaled_RV.shape[-1]
    count = min(params.top_k or _TOP_P_CANDIDATES, vocabulary)
    complete = bool(params.top_k) or count == vocabulary
    if complete or may_wait:
        value_RK, index_RK = scaled_RV.topk(count, dim=-1)
        complete = complete or not bool(((value_RK - log_total_R1).exp().sum(dim=-1) < params.top_p).any())
    if not complete:
        value_RK, index_RK = scaled_RV.sort(dim=-1, descending=True)
    log_prob_RK = value_RK - log_total_R1
    weight_RK = candidate_weights(log_prob_RK, params)
    place_R1 = pick(weight_RK, uniform_R).unsqueeze(-1)
    return index_RK.gather(-1, place_R1).squeeze(-1), log_prob_RK.gather(-1, place_R1).squeeze(-1)


def candidate_weights(log_prob_RK: Tensor, params: SamplingParams) -> Tensor:
    """Return the weights (R, K) of candidates sorted from best to worst, zero where a filter removes them.

    Top-p keeps the fewest best tokens whose renormalised mass reaches ``top_p``; min-p removes what is less likely than
    ``min_p`` times the best. The best token always stays.
    """
    weight_RK = (log_prob_RK - log_prob_RK[:, :1]).exp_()
    if params.top_p < 1:
        # With top-k the mass is renormalised to the candidates; without it they are the whole distribution.
        mass_RK = weight_RK / weight_RK.sum(-1, keepdim=True) if params.top_k else log_prob_RK.exp()
        before_RK = mass_RK.cumsum(-1) - mass_RK
        removed_RK = before_RK >= params.top_p
        removed_RK[:, 0] = False
        weight_RK = weight_RK.masked_fill(removed_RK, 0.0)
    if params.min_p:
        weight_RK = weight_RK.masked_fill(weight_RK < params.min_p, 0.0)
    return weight_RK


def pick(weight_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return (R,) int64: the index where the cumulative weight passes ``uniform_R`` times the total.

    Args:
        weight_RV: Non-negative, contiguous, at least one positive weight per row; a weight of zero is never picked.
        uniform_R: Numbers in [0, 1).
    """
    rows, size = weight_RV.shape
    chunk = _chunk_size(size)
    if chunk == 0:
        return _pick_flat(weight_RV, uniform_R)
    weight_RCK = weight_RV.view(rows, size // chunk, chunk)
    edge_RC = weight_RCK.sum(dim=-1).cumsum_(dim=-1)
    target_R1 = uniform_R.unsqueeze(-1) * edge_RC[:, -1:]
    chunk_R1 = torch.searchsorted(edge_RC, target_R1, right=True).clamp_(max=edge_RC.shape[-1] - 1)
    start_R1 = edge_RC.gather(-1, (chunk_R1 - 1).clamp_(min=0)).masked_fill_(chunk_R1 == 0, 0.0)
    inner_RK = weight_RCK.gather(1, chunk_R1.unsqueeze(-1).expand(-1, 1, chunk)).squeeze(1)
    sum_RK = inner_RK.cumsum_(dim=-1)
    rest_R1 = torch.minimum(target_R1 - start_R1, sum_RK[:, -1:] * _BELOW_ONE)
    inner_R1 = torch.searchsorted(sum_RK, rest_R1, right=True).clamp_(max=chunk - 1)
    return chunk_R1.mul_(chunk).add_(inner_R1).squeeze(-1)


def _pick_flat(weight_RV: Tensor, uniform_R: Tensor) -> Tensor:
    edge_RV = weight_RV.cumsum(dim=-1)
    target_R1 = uniform_R.unsqueeze(-1) * edge_RV[:, -1:]
    return torch.searchsorted(edge_RV, target_R1, right=True).squeeze(-1).clamp_(max=weight_RV.shape[-1] - 1)


def _chunk_size(size: int) -> int:
    """Return a divisor of ``size`` between 64 and 512, or 0 to go without chunks."""
    if size < _CHUNKED_FROM:
        return 0
    return next((c for c in (128, 256, 64, 512, *range(65, 512)) if size % c == 0), 0)


# ---- left-padded batches of rows that fit a token budget: for the engines that run the model's own forward


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows that run together: their prompts, and for each row which of these prompts it continues."""

    prompts: list[int]
    rows: list[int]
    prompt_of_row: list[int]


def plan_waves(
    prompt_lengths: Sequence[int],
    group_size: int,
    max_new_tokens: int,
    token_budget: int | None,
    context: int | None = None,
) -> list[Wave]:
    """Split the rows into waves whose padded size stays within the budget; longest prompts first.

    Args:
        prompt_lengths: P lengths.
        group_size: Rows per prompt.
        max_new_tokens: Most tokens per completion.
        token_budget: Most cached tokens (rows x (longest prompt + max_new_tokens)); None puts all in one wave.
        context: Most tokens of a row with its padding: a prompt that leaves less than ``max_new_tokens`` waits for none that is shorter.

    Raises:
        EngineError: One row alone is over the budget.
    """
    order = sorted(range(len(prompt_lengths)), key=lambda p: -prompt_lengths[p])
    queue = [(p, p * group_size + g) for p in order for g in range(group_size)]
    waves: list[Wave] = []
    while queue:
        longest = prompt_lengths[queue[0][0]]
        room = len(queue) if token_budget is None else token_budget // (longest + max_new_tokens)
        if room < 1:
            raise EngineError(too_small(token_budget or 0, longest, max_new_tokens))
        if context is not None and longest + max_new_tokens > context:
            room = min(room, sum(prompt_lengths[p] == longest for p, _ in queue))
        taken, queue = queue[:room], queue[room:]
        prompts = list(dict.fromkeys(p for p, _ in taken))
        place = {p: i for i, p in enumerate(prompts)}
        waves.append(Wave(prompts, [row for _, row in taken], [place[p] for p, _ in taken]))
    return waves


def too_small(token_budget: int, prompt_length: int, max_new_tokens: int) -> str:
    """Return the message for a budget that does not hold one row."""
    return (
        f"the token budget is {token_budget}, but one row needs {prompt_length} prompt tokens and {max_new_tokens} new ones "
        f"({prompt_length + max_new_tokens}); raise token_budget, lower max_new_tokens or leave out long prompts"
    )


def left_pad(prompts: Prompts, pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids (P, T) and mask (P, T), both int64, padded on the left."""
    longest = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), longest), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(prompts), longest), dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[i, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


# ---- stop strings: has the newest token just completed one?

_REPLACEMENT = "�"


class StopStrings:
    """Looks for stop strings in the decoded tail of a completion.

    A string of n bytes spans at most n tokens that show, so the last ``window`` tokens suffice. Most tokens are ruled
    out by their own text, once per token id.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str] | None) -> None:
        if decode is None:
            raise EngineError(
                f"stop_strings {list(strings)} need a tokenizer, but the engine was made without one; pass tokenizer="
            )
        if any(not s for s in strings):
            raise EngineError("a stop string is empty; expected at least one character")
        self.strings = tuple(strings)
        self.window = max(len(s.encode()) for s in strings) + 8
        self._decode = decode
        self._last = {s[-1] for s in strings}
        self._ruled_out: dict[int, bool] = {}

    def may_end(self, token: int) -> bool:
        """Return False when ``token`` alone shows that it cannot end a stop string."""
        if any(c.isspace() for c in self._last):
            return True
        if token not in self._ruled_out:
            text = self._decode([token])
            self._ruled_out[token] = bool(text) and _REPLACEMENT not in text and not (self._last & set(text))
        return not self._ruled_out[token]

    def just_ended(self, tail: list[int]) -> bool:
        """Return whether the last token of ``tail`` completes a stop string."""
        if not tail:
            return False
        with_last, before = self._decode(tail), self._decode(tail[:-1])
        return any(with_last.count(s) > before.count(s) for s in self.strings)

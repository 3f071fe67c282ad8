"""Left-padded batches of rows that fit a token budget: for the engines that run the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorist.errors import EngineError
from algorist.rollouts.base import Prompts


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows that run together: their prompts, and for each row which of these prompts it continues."""

    prompts: list[int]
    rows: list[int]
    prompt_of_row: list[int]


def plan_waves(
    prompt_lengths: Sequence[int], group_size: int, max_new_tokens: int, token_budget: int | None
) -> list[Wave]:
    """Split the rows into waves whose padded size stays within the budget; longest prompts first.

    Args:
        prompt_lengths: P lengths.
        group_size: Rows per prompt.
        max_new_tokens: Most tokens per completion.
        token_budget: Most cached tokens (rows x (longest prompt + max_new_tokens)); None puts all in one wave.

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

"""The completions that an optimizer step learns from: lists of tokens, group by group, and numbers per token.

Groups come from ``collect`` and stay groups: a batch knows of each completion which prompt it belongs to, so nothing has to be
found again from tokens. Numbers per token (advantages, log-probs, masks) are tensors (B, T), with T the longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from algorist.types import Group

PER_TOKEN = (
    "advantages", "mask", "sampler_log_probs", "old_log_probs", "policy_weights", "counted", "mean_lengths",
)  # fmt: skip

SMALL_PART = 1024
"""Tokens up to which a part of a step takes more completions than a micro-batch holds, where no number of tokens bounds it."""


@dataclass
class Batch:
    """B completions of P prompts.

    Attributes:
        prompts: P lists of token ids.
        completions: B lists of token ids.
        prompt_of: For each completion the index of its prompt.
        advantages: (B, T); (B,) is the same number for each token of a completion.
        mask: (B, T) bool, the tokens that count in the loss: those that the policy sampled (``Rollout.sampled``).
        sampler_log_probs: (B, T) as the engine gave them, NaN for tokens that were not sampled; or None.
        old_log_probs: (B, T) of the policy that sampled, by the trainer; None where the batch is used for one step only.
        policy_weights: (B, T), factors of the policy's loss: the correction for a sampler that differs; None for 1.
        counted: (B, T), factors of everything that is minimised: a subset of the tokens; None for 1.
        mean_lengths: (B, T), the mean length of the completions of its prompt, those of other steps and processes included; for the
            reduction ``prompt-mean-token-mean``.
        extra: Further numbers per token (B, T) by name: an extension's, for its own term of the loss.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    prompt_of: list[int]
    advantages: Tensor
    mask: Tensor
    sampler_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    policy_weights: Tensor | None = None
    counted: Tensor | None = None
    mean_lengths: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.advantages.dim() == 1:  # one for all tokens of a completion
            self.advantages = self.advantages[:, None].expand(self.mask.shape)

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Group],
        advantages: Tensor,
        *,
        device: torch.device | str = "cpu",
        mask_truncated: bool = False,
    ) -> Batch:
        """Return the batch of all completions of ``groups``.

        Args:
            groups: P groups, of any sizes.
            advantages: (B,), or (P, G) for groups of one size, in the order of the completions: one for all tokens of a completion;
                or (B, T).
            device: Where the tensors go.
            mask_truncated: Completions that the length limit ended do not count.
        """
        rollouts = [(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
        completions = [rollout.completion_ids for _, rollout in rollouts]
        width = max((len(ids) for ids in completions), default=0)
        mask = torch.zeros(len(rollouts), width, dtype=torch.bool)
        for row, (_, rollout) in enumerate(rollouts):
            if not (mask_truncated and rollout.truncated):
                mask[row, : len(rollout.completion_ids)] = torch.tensor(rollout.sampled_mask)
        known = all(rollout.log_probs is not None for _, rollout in rollouts)
        sampler = torch.zeros(len(rollouts), width)
        for row, (_, rollout) in enumerate(rollouts):
            if known and rollout.log_probs is not None:
                values = [float("nan") if v is None else v for v in rollout.log_probs]
                sampler[row, : len(values)] = torch.tensor(values)
        return cls(
            [group.prompt_ids for group in groups],
            completions,
            [index for index, _ in rollouts],
            (advantages if advantages.shape == mask.shape else advantages.flatten()).float().to(device),
            mask.to(device),
            sampler.to(device) if known else None,
        )

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def width(self) -> int:
        """T, the number of columns of the tensors."""
        return self.mask.shape[1]

    def take(self, rows: Sequence[int]) -> Batch:
        """Return the batch of the completions ``rows``, in that order, with no more columns than they need."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.mask.device)
        width = max((len(self.completions[row]) for row in rows), default=0)
        tensors: dict[str, Any] = {
            name: None if (value := getattr(self, name)) is None else value[index, :width]
            for name in PER_TOKEN
        }
        extra = {name: value[index, :width] for name, value in self.extra.items()}
        return replace(
            self,
            completions=[self.completions[row] for row in rows],
            prompt_of=[self.prompt_of[row] for row in rows],
            extra=extra,
            **tensors,
        )

    def cut(self, length: int) -> Batch:
        """Return the batch of the first ``length`` tokens of each completion."""
        tensors: dict[str, Any] = {
            name: None if (value := getattr(self, name)) is None else value[:, :length] for name in PER_TOKEN
        }
        return replace(self, completions=[ids[:length] for ids in self.completions], **tensors)

    def in_group_order(self, rows: Sequence[int]) -> list[int]:
        """Return ``rows`` with the completions of a prompt together, shorter ones first."""
        return sorted(rows, key=lambda row: (self.prompt_of[row], len(self.completions[row]), row))

    def parts(
        self, rows: Sequence[int], *, most_rows: int, most_tokens: int | None = None
    ) -> list[list[int]]:
        """Cut ``rows`` into parts of at most ``most_tokens`` (each prompt once, every completion), or one row.

        Where memory is not planned, at most ``most_rows``; a part of fewer than ``SMALL_PART`` tokens takes more, as each part casts the
        weights and adds to every gradient anew.
        """
        parts: list[list[int]] = []
        used, present = 0, -1
        for row in rows:
            prompt, size = self.prompt_of[row], len(self.completions[row])
            cost = size + (0 if prompt == present else len(self.prompts[prompt]))
            if most_tokens is None:
                fits = bool(parts) and (len(parts[-1]) < most_rows or used + cost <= SMALL_PART)
            else:
                fits = bool(parts) and used + cost <= most_tokens
            if not fits:
                parts.append([])
                used, cost = 0, size + len(self.prompts[prompt])
            parts[-1].append(row)
            used, present = used + cost, prompt
        return parts

    def packed_tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens of ``rows`` with each prompt counted once."""
        prompts = {self.prompt_of[row] for row in rows}
        return sum(len(self.prompts[p]) for p in prompts) + sum(len(self.completions[row]) for row in rows)

    def to(self, device: torch.device | str) -> Batch:
        moved = {name: value.to(device) for name in PER_TOKEN if (value := getattr(self, name)) is not None}
        return replace(self, extra={name: value.to(device) for name, value in self.extra.items()}, **moved)

    def state_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

"""Reorders and trims the buffered micro-batches of a generation, without changing what an optimizer step sees."""

from __future__ import annotations

from typing import Any

import torch

from algorist.training.trl_seam import COMPLETION_TENSORS, PROMPT_TENSORS

Batch = dict[str, Any]


def regroup(batches: list[Batch], window: int) -> list[Batch]:
    """Bring the completions of one prompt together inside each accumulation window.

    Rows stay in their window, so each optimizer step sees the rows it would have seen; only their split into
    micro-batches changes. Groups keep the order of their first row; rows of a group are sorted by length.

    Args:
        batches: Micro-batches of equal row count, as TRL buffers them.
        window: Consecutive micro-batches that share an optimizer step.

    Returns:
        The same number of micro-batches with the same number of rows each.
    """
    result: list[Batch] = []
    for start in range(0, len(batches), window):
        part = batches[start : start + window]
        merged = {key: _join([batch[key] for batch in part]) for key in part[0]}
        order = _group_order(merged)
        size = part[0]["prompt_ids"].shape[0]
        for first in range(0, len(order), size):
            index = order[first : first + size]
            result.append({key: _take(value, index) for key, value in merged.items()})
    return result


def trim(batch: Batch) -> Batch:
    """Cut padding columns that no row of the micro-batch uses; at least one completion column stays."""
    prompt_width = int(batch["prompt_mask"].sum(1).max())
    used = (batch["completion_mask"] != 0).any(0).nonzero()
    completion_width = int(used.max()) + 1 if used.numel() else 1
    columns = batch["completion_ids"].shape[1]
    result = dict(batch)
    for key in PROMPT_TENSORS:
        result[key] = batch[key][:, batch[key].shape[1] - prompt_width :]
    for key in (*COMPLETION_TENSORS, "advantages"):
        value = batch.get(key)
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == columns:
            result[key] = value[:, :completion_width]
    return result


def prompt_keys(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[tuple[int, ...]]:
    """Return one hashable key per row, equal exactly for rows with the same prompt."""
    lengths = prompt_mask.sum(1).tolist()
    return [
        tuple(row[len(row) - int(length) :]) for row, length in zip(prompt_ids.tolist(), lengths, strict=True)
    ]


def _group_order(batch: Batch) -> list[int]:
    keys = prompt_keys(batch["prompt_ids"], batch["prompt_mask"])
    first: dict[tuple[int, ...], int] = {}
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    lengths = batch["completion_mask"].sum(1).tolist()
    return sorted(range(len(keys)), key=lambda row: (first[keys[row]], lengths[row], row))


def _join(values: list[Any]) -> Any:
    head = values[0]
    if isinstance(head, torch.Tensor) and head.dim() > 0:
        return torch.cat(values)
    if isinstance(head, list):
        return [item for value in values for item in value]
    return head


def _take(value: Any, index: list[int]) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value[torch.tensor(index, device=value.device)]
    if isinstance(value, list):
        return [value[i] for i in index]
    return value

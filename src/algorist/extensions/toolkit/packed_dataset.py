"""Supervised data packed into sequences of one length, and batches of it."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# The instruction format of Stanford Alpaca (Apache-2.0), in which such data sets are commonly written.
INSTRUCTION_TEMPLATE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:\n{response}"
)


class PackedSFTDataset(Dataset[dict[str, Tensor]]):
    """All documents one after the other, cut into pieces of ``seq_length``; no padding, the incomplete rest dropped."""

    def __init__(self, token_ids: list[int], seq_length: int) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length is {seq_length}; expected at least 1")
        self.token_ids = torch.tensor(token_ids, dtype=torch.long)
        self.seq_length = seq_length

    def __len__(self) -> int:
        return max(0, len(self.token_ids) - 1) // self.seq_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels``, (seq_length,) each; labels are the inputs one token later."""
        if not 0 <= index < len(self):
            raise IndexError(f"piece {index} of {len(self)}")
        start = index * self.seq_length
        piece = self.token_ids[start : start + self.seq_length + 1]
        return {"input_ids": piece[:-1], "labels": piece[1:]}


def get_packed_sft_dataset(
    tokenizer: Any,
    dataset_path: str | Path,
    seq_length: int,
    shuffle: bool,
    *,
    template: str = INSTRUCTION_TEMPLATE,
    seed: int = 0,
) -> PackedSFTDataset:
    """Read prompts and responses and pack them.

    Args:
        tokenizer: Adds its own special tokens to each document; the end-of-text token is appended.
        dataset_path: JSONL with ``prompt`` and ``response``, also gzipped (``.gz``).
        seq_length: Tokens per piece.
        shuffle: Shuffle the documents before packing.
        template: Text with ``{prompt}`` and ``{response}``.
        seed: Of the shuffle.

    Raises:
        ValueError: A line without ``prompt`` or ``response``; the message names it.
    """
    documents = []
    opener: Any = gzip.open if str(dataset_path).endswith(".gz") else open
    with opener(dataset_path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = json.loads(line)
            if "prompt" not in row or "response" not in row:
                raise ValueError(
                    f"{dataset_path}, line {number}: has {', '.join(row)}; expected prompt and response"
                )
            head, _, tail = template.partition("{response}")
            documents.append(head.replace("{prompt}", row["prompt"]) + row["response"] + tail)
    if shuffle:
        random.Random(seed).shuffle(documents)
    token_ids: list[int] = []
    for text in documents:
        ids = list(tokenizer(text)["input_ids"])
        if tokenizer.eos_token_id is not None and (not ids or ids[-1] != tokenizer.eos_token_id):
            ids.append(tokenizer.eos_token_id)
        token_ids += ids
    return PackedSFTDataset(token_ids, seq_length)


def iterate_batches(dataset: Dataset[Any], batch_size: int, shuffle: bool) -> DataLoader[Any]:
    """Return an iterable over one epoch of batches; the last one may be smaller."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)

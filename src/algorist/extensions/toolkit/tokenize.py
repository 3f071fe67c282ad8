"""Prompts and outputs as tensors, with a mask on the output tokens."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: Any
) -> dict[str, Tensor]:
    """Tokenise prompts and outputs separately, join them, pad on the right, and shift labels by one.

    Separately, so that the border between prompt and output never falls inside a token. The prompt gets the special
    tokens that the tokenizer puts in front (a BOS), the output gets none: an end-of-text token is part of its text.

    Args:
        prompt_strs: B prompts.
        output_strs: B outputs.
        tokenizer: A transformers tokenizer with a padding or an end-of-text token.

    Returns:
        Each (B, longest prompt + output - 1): ``input_ids`` without the last token, ``labels`` without the first, and
        ``response_mask``, True where the label is an output token (not prompt, not padding).

    Raises:
        ValueError: Numbers of prompts and outputs differ, or there is nothing to pad with.
    """
    if len(prompt_strs) != len(output_strs):
        raise ValueError(
            f"{len(prompt_strs)} prompts for {len(output_strs)} outputs; expected the same number"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ValueError(
            "the tokenizer has neither a padding nor an end-of-text token; set tokenizer.pad_token"
        )
    prompts = [_prompt_ids(text, tokenizer) for text in prompt_strs]
    outputs = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in output_strs]
    width = max((len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)), default=0)
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros((len(prompts), width), dtype=torch.bool)
    for row, (p, o) in enumerate(zip(prompts, outputs, strict=True)):
        ids[row, : len(p) + len(o)] = torch.tensor(p + o, dtype=torch.long)
        mask[row, len(p) : len(p) + len(o)] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": mask[:, 1:]}


def _prompt_ids(text: str, tokenizer: Any) -> list[int]:
    ids = list(tokenizer(text)["input_ids"])
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    # Some tokenizers close every text with an end-of-text token; a prompt that ends is no prompt.
    while len(ids) > len(plain) and ids[-1] == tokenizer.eos_token_id and ids[-len(plain) :] != plain:
        ids.pop()
    return ids


# ---- reading the answers of two classic benchmarks from free text

_SENTENCE = re.compile(r"\banswer\s+is\s*:?\s*[(*]*([A-D])\b", re.IGNORECASE)
_ALONE = re.compile(r"\s*[(*]*([A-D])[)*.:]*(?:\s|$)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def parse_mmlu_response(mmlu_example: Mapping[str, Any], model_output: str) -> str | None:
    """Return the option letter that a response chooses, ``"A"`` … ``"D"``, or None.

    Read are "the answer is B", a response that starts with a letter ("B.", "(B) …"), and a response that is one of
    ``mmlu_example["options"]`` word by word. Two different letters are no choice.
    """
    letters = {letter.upper() for letter in _SENTENCE.findall(model_output)}
    if len(letters) == 1:
        return letters.pop()
    if letters:
        return None
    alone = _ALONE.match(model_output)
    if alone and (alone[1] != "A" or not re.match(r"\s*A\s+[a-z]", model_output)):  # not the article
        return alone[1]
    options = [str(option).strip().lower() for option in mmlu_example.get("options", ())]
    said = model_output.strip().rstrip(".").lower()
    return "ABCD"[options.index(said)] if said in options[:4] else None


def parse_gsm8k_response(model_output: str) -> str | None:
    """Return the last number of a response, without commas, or None."""
    numbers = _NUMBER.findall(model_output)
    return numbers[-1].replace(",", "") if numbers else None


# ---- supervised data packed into sequences of one length, and batches of it

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

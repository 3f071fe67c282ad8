"""Prompts and outputs as tensors, with a mask on the output tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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

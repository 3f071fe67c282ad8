"""Modes of a loaded model: its context, and passes without dropout and recomputing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def context_of(model: Any) -> int | None:
    """Return a model's context in tokens, prompt and completion together; None where its configuration has no bound.

    LongRoPE has other frequencies for rows beyond its original context, and one forward takes one choice for all of its rows: the
    original context bounds it, so that each row has those that it has alone.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    first = rope.get("rope_type") == "longrope" and rope["original_max_position_embeddings"]
    bounds = first, getattr(config, "max_position_embeddings", None), getattr(config, "n_positions", None)
    return next((bound for bound in bounds if isinstance(bound, int) and bound > 0), None)


@contextmanager
def eval_mode(model: nn.Module, kind: type[nn.Module] = nn.Module) -> Iterator[None]:
    """Switch dropout and activation checkpointing off, or modules of a ``kind`` only; afterwards each has its own mode again."""
    training = [module for module in model.modules() if module.training and isinstance(module, kind)]
    checkpointing = [module for module in training if getattr(module, "gradient_checkpointing", False)]
    for module in training:
        module.training = False
    for module in checkpointing:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for module in checkpointing:
            module.gradient_checkpointing = True  # type: ignore[assignment]

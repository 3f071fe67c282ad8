"""Modes of a loaded model: its context, and passes without dropout and recomputing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def context_of(model: Any) -> int | None:
    """Return a model's context in tokens, prompt and completion together; None where its configuration has no bound."""
    config = model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return context if isinstance(context, int) and context > 0 else None


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and activation checkpointing off; afterwards each module has its own mode again."""
    training = [module for module in model.modules() if module.training]
    checkpointing = [module for module in training if getattr(module, "gradient_checkpointing", False)]
    model.eval()
    for module in checkpointing:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for module in checkpointing:
            module.gradient_checkpointing = True  # type: ignore[assignment]

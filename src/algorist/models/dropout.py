"""Dropout of a model's own configuration, which an update with rewards must not have."""

from __future__ import annotations

from typing import Any

from torch import nn


def switch_off_dropout(base: Any) -> None:
    """Set every rate of dropout in ``base`` to 0, but an adapter's (``model.lora.dropout``); its configuration stays as it is.

    Rollouts are sampled without it, so that the update would compare log-probs of another model.
    """
    for name, module in base.named_modules():
        if "lora_" in name:
            continue
        rates = [key for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]
        for key in (*rates, *(("p",) if isinstance(module, nn.Dropout) else ())):
            setattr(module, key, 0.0)

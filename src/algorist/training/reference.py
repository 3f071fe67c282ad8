"""The reference of the KL penalty: the policy as it was when the stage began."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "ref"


class Reference:
    """A frozen copy of a policy, or of its adapter where one is trained.

    Args:
        model: The policy before the first step; an adapter gets a frozen copy beside it under the name ``ref``.
    """

    def __init__(self, model: Any) -> None:
        self.model: torch.nn.Module | None = None
        if not hasattr(model, "peft_config"):
            self.model = copy.deepcopy(model).requires_grad_(False).eval()
            return
        trained = model.active_adapter
        model.add_adapter(NAME, model.peft_config[trained])
        for name, parameter in model.named_parameters():
            if f".{trained}." in name:
                model.get_parameter(name.replace(f".{trained}.", f".{NAME}.")).data.copy_(parameter.data)
        _activate(model, trained)

    @contextmanager
    def active(self, policy: Any) -> Iterator[torch.nn.Module | None]:
        """Give the reference as a model; None while the policy itself computes with the reference's adapter."""
        if self.model is not None:
            self.model.to(next(policy.parameters()).device)
            yield self.model
            return
        trained = policy.active_adapter
        _activate(policy, NAME)
        try:
            yield None
        finally:
            _activate(policy, trained)


def _activate(model: Any, adapter: str) -> None:
    """Compute with ``adapter``; which parameters are trained does not change."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.set_adapter(adapter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained and f".{NAME}." not in name)

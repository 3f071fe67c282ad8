"""The KL penalty to a reference: the policy as it was when the stage began.

The penalty is β·r_it·k3(π_θ, π_ref) per token, whose gradient is that of the true KL. Source: DeepSeek-V3.2 (2512.02556).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from algorist.config.section import Section
from algorist.training.extension import Extension, PolicyTrainer, extension

if TYPE_CHECKING:
    import torch

    from algorist.training.batch import Batch
    from algorist.training.objective import LossInputs

NAME = "ref"


class _Keys(Section):
    beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference; 0 loads no reference."""


@extension
class KLPenalty(Extension):
    name, keys, needs_every_row = "reference", {"grpo": _Keys}, True

    def prepare(self, model: Any, trainer: PolicyTrainer) -> None:
        self.reference = Reference(model)
        self.beta = self.recipe.grpo.beta
        self.importance = trainer.objective.loss.importance

    def batch(self, batch: Batch, policy: PolicyTrainer) -> Batch:
        with self.reference.active(policy.unwrapped()) as model:
            log_probs = policy.log_probs_of(batch, model=model)
        return replace(batch, extra={**batch.extra, NAME: log_probs})

    def loss(self, inputs: LossInputs) -> None:
        from algorist.objectives import k3, ratio_of

        log_probs, batch = inputs.inside, inputs.batch
        old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        kl = k3(log_probs, batch.extra[NAME].masked_fill(~batch.mask, 0.0))
        kl = kl * ratio_of(log_probs, old, batch.mask, self.importance)
        inputs.metrics.add("kl", kl, batch.mask)
        inputs.terms.append(self.beta * kl)


class Reference:
    """A frozen copy of a policy, or of its adapter where one is trained.

    Args:
        model: The policy before the first step; an adapter gets a frozen copy beside it under the name ``ref``.
    """

    def __init__(self, model: Any) -> None:
        from algorist.models.sharding import is_sharded

        self.model: torch.nn.Module | None = None
        if not hasattr(model, "peft_config"):
            copied = (
                _sharded_copy(model) if is_sharded(model) else copy.deepcopy(model, _in_compute_type(model))
            )
            self.model = copied.requires_grad_(False).eval()
            return
        trained = model.active_adapter
        model.add_adapter(NAME, model.peft_config[trained])
        for name, parameter in model.named_parameters():
            if trained in (parts := name.split(".")):
                copied = ".".join(NAME if part == trained else part for part in parts)
                model.get_parameter(copied).data.copy_(parameter.data)
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


def _in_compute_type(model: Any) -> dict[int, Any]:
    """Return a memo for ``deepcopy`` with matmul weights in the compute type: autocast would round them so each time, to the same numbers."""
    import torch

    from algorist.models.precision import compute_dtype

    inputs, dtype = model.get_input_embeddings().weight, compute_dtype(model)
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight is not inputs]
    return {id(w): torch.nn.Parameter(w.detach().to(dtype)) for w in weights if w.dtype != dtype}


def _activate(model: Any, adapter: str) -> None:
    """Compute with ``adapter``; which parameters are trained does not change."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.set_adapter(adapter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained and NAME not in name.split("."))


def _sharded_copy(model: Any) -> Any:
    """Return a copy of a model that FSDP2 shards: each process copies its part."""
    from accelerate import init_empty_weights

    from algorist.models.precision import compute_dtype, set_compute, weight_dtype
    from algorist.models.sharding import plain_class
    from algorist.training.distributed import shard

    parts = {name: part.clone() for name, part in model.state_dict().items()}
    with init_empty_weights(include_buffers=False):
        copied = plain_class(model)(model.config)
    set_compute(copied, compute_dtype(model))
    shard(copied.to(weight_dtype(model)), next(iter(parts.values())).device, send=False)
    copied.load_state_dict(parts, assign=True)
    copied.tie_weights()
    return copied

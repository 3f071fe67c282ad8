"""Changes of the weights in an optimizer step by cause, on a fixed sample of those that are trained.

With w the sampled weights before a step, w' after it, η its learning rate, λ the decoupled weight decay, g the gradient before and ĝ after
``max_grad_norm``:

    length     ‖w' − w‖ / ‖w‖            decay      ‖η·λ·w‖ / ‖w‖
    gradient   ‖w' − w + η·λ·w‖ / ‖w‖    clipped    ‖ĝ‖ / ‖g‖, 1 where nothing is cut
    schedule   η / the peak rate
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from algorist.models.sharding import own_part

ELEMENTS = 1 << 15
"""Weights in the sample: a length that is estimated from them is off by about 0.4 %."""
DECOUPLED = ("AdamW", "Lion", "Ademamix", "StableAdamW", "LOMO")
"""Parts of the names of optimisers that take the decay off the weights, not into the gradient."""


class Sample:
    """Places in the trained weights, drawn once; all of them where there are few.

    Args:
        parameters: Those that are trained.
        elements: How many places.
    """

    def __init__(self, parameters: Iterable[Any], elements: int = ELEMENTS) -> None:
        self.parameters = [p for p in parameters if p.requires_grad and own_part(p).numel()]
        sizes = [own_part(p).numel() for p in self.parameters]
        total, start = sum(sizes), 0
        every = torch.arange(total) if total <= elements else _drawn(total, elements)
        self.places: list[Tensor] = []
        for parameter, size in zip(self.parameters, sizes, strict=True):
            inside = every[(every >= start) & (every < start + size)] - start
            self.places.append(inside.to(own_part(parameter).device))
            start += size
        self.counts = torch.tensor([len(places) for places in self.places])

    def take(self, of: Callable[[Any], Any]) -> Tensor | None:
        """Return the sampled elements (N,) of what ``of`` returns for each parameter; None where it returns None for all."""
        parts, known = [], False
        for parameter, places in zip(self.parameters, self.places, strict=True):
            value = of(parameter)
            known |= value is not None
            whole = places.new_empty(0) if value is None else own_part(value.detach()).reshape(-1)
            parts.append(whole[places] if whole.numel() else torch.zeros(len(places), device=places.device))
        return torch.cat([part.to(parts[0].device, torch.float32) for part in parts]) if known else None

    def spread(self, values: list[float]) -> Tensor:
        """Return (N,): the value of each parameter at all of its places."""
        of_places = torch.tensor(values).repeat_interleave(self.counts)
        return of_places.to(self.places[0].device)


def _drawn(total: int, elements: int) -> Tensor:
    return torch.randint(total, (elements,), generator=torch.Generator().manual_seed(0)).sort().values


def length(values: Tensor) -> float:
    """Return the Euclidean length."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


class StepWatch(TrainerCallback):
    """Measures optimizer steps of a trainer, and adds ``ledger/step/…`` to its metrics.

    Args:
        trainer: Of SFT or GRPO.
        every: Steps from one that is measured to the next.
    """

    def __init__(self, trainer: Any, every: int = 1) -> None:
        self.trainer, self.every = trainer, every
        self.sample = Sample(trainer.model.parameters())
        self.before: Tensor | None = None
        self.after: Tensor | None = None
        self.outside = 0.0
        self.raw: float | None = None
        self.clipped: float | None = None

    def on_gradient(self) -> None:
        """Take the gradient before it is cut; a scaler's (float16) is not in the weights' unit."""
        gradient = None if self.trainer.args.fp16 else self.sample.take(lambda p: p.grad)
        self.raw = None if gradient is None else length(gradient)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every:
            return
        gradient = self.sample.take(lambda p: p.grad) if self.raw else None
        self.clipped = None
        if gradient is not None and self.raw:
            self.clipped = min(1.0, length(gradient) / self.raw)
        self.before, self.raw = self.sample.take(lambda p: p), None
        if self.before is not None and self.after is not None and self.every == 1:
            self.outside = length(self.before - self.after)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        before, self.before = self.before, None
        if before is None or not (size := length(before)):
            return
        after = self.sample.take(lambda p: p)
        assert after is not None
        change, self.after = after - before, after
        values = {"length": length(change) / size, "outside": self.outside / size}
        if (shrinks := self._decay()) is not None:
            values |= {"decay": 0.0, "gradient": values["length"]}
            if any(shrinks):
                pull = before * self.sample.spread(shrinks)
                values |= {"decay": length(pull) / size, "gradient": length(change + pull) / size}
        if self.clipped is not None:
            values["clipped"] = self.clipped
        peak = max((group.get("initial_lr", 0.0) for group in self._groups()), default=0.0)
        if peak:
            values["schedule"] = max(float(group["lr"]) for group in self._groups()) / peak
        self.trainer.averages.add({f"ledger/step/{name}": value for name, value in values.items()})

    def _groups(self) -> list[dict[str, Any]]:
        return list(getattr(self.trainer.optimizer, "param_groups", []))

    def _decay(self) -> list[float] | None:
        """Return η·λ for each sampled parameter; None where an optimizer puts its decay into the gradient, or is not known."""
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        groups = self._groups()
        decoupled = any(part in type(optimizer).__name__ for part in DECOUPLED)
        if any(group.get("weight_decay") and not decoupled for group in groups):
            return None
        shrinks = {
            id(p): float(group["lr"]) * float(group.get("weight_decay") or 0.0)
            for group in groups
            for p in group["params"]
        }
        return [shrinks.get(id(p), 0.0) for p in self.sample.parameters]

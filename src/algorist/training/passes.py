"""The passes of an optimizer step: parts of bounded size, in step with the other processes, smaller ones where memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from algorist.models.memory import trim_heap
from algorist.training.batch import Batch
from algorist.training.distributed import SharedPasses, average_gradients, passes_of_all, reminder
from algorist.training.faults import until_it_fits
from algorist.training.lm_head import gradients_in_place
from algorist.training.log_probs import LogProbs
from algorist.training.part_size import tokens_that_fit

T = TypeVar("T")
log = logging.getLogger("algorist.training.passes")


class Loop(Protocol):
    """What passes take of the training loop."""

    args: Any
    accelerator: Any
    section: Any
    model: Any
    model_wrapped: Any
    optimizer: Any


class Passes:
    """Forward and backward passes of the steps of a training.

    Args:
        loop: Has the model as it wraps it, and the recipe's section of the stage.
        log_probs: Computes the log-probs of a part.
        most_rows: Completions of a part where no number of tokens bounds it.
        spare: Gives back memory that is kept between the steps; returns whether there was any.
    """

    def __init__(
        self, loop: Loop, log_probs: LogProbs, *, most_rows: int, spare: Callable[[], bool] = bool
    ) -> None:
        self.loop, self.compute, self.most_rows, self.spare = loop, log_probs, most_rows, spare
        self.part_tokens_before: int | None = None

    @cached_property
    def shared(self) -> SharedPasses | None:
        """Of a model that FSDP2 shards."""
        return SharedPasses.of(self.loop.model_wrapped)

    @cached_property
    def part_tokens(self) -> int | None:
        """Most tokens of one forward and backward; counted at the first, when weights are sharded and the engine has what it keeps.

        A resumed run keeps the size that it had, which decides how sums are rounded, unless less fits now.
        """
        before = self.part_tokens_before
        fit = tokens_that_fit(self.loop.model_wrapped, self.loop.section, self.loop.optimizer)
        return min(fit or before, before) if before else fit

    def state_dict(self) -> dict[str, Any]:
        return {"part_tokens": vars(self).get("part_tokens", self.part_tokens_before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.part_tokens_before = state["part_tokens"]

    def log_probs(self, model: Any, piece: Batch, **ways: Any) -> tuple[Tensor, Tensor | None]:
        """Return what ``LogProbs`` returns, in the types of this training."""
        return self.compute(model, piece, autocast=self.loop.accelerator.autocast, **ways)

    def backward(self, loss: Tensor) -> None:
        self.loop.accelerator.backward(loss)

    def until_they_fit(
        self, model: Any, batch: Batch, rows: Callable[[], Sequence[int]], compute: Callable[[Any], T]
    ) -> T:
        """Return what the passes of a step return; gradients are those of all processes then.

        Under DDP the parts run in the model inside, and the gradients are averaged when all are done: a process that runs out of memory
        does its share again while the others wait for it.

        Args:
            model: The policy as the loop wraps it.
            batch: The step's completions on this process.
            rows: Returns those that need a pass.
            compute: Does the passes with the model that it gets.
        """
        replicated = isinstance(model, DistributedDataParallel)
        policy = model.module if replicated else model
        alone = replicated or self.loop.args.world_size == 1 or self.shared is not None
        result = until_it_fits(
            self.loop, policy, partial(compute, policy), lambda: self._smaller(batch, rows()), alone=alone
        )
        if replicated:
            with reminder("for the gradients of the other processes"):
                average_gradients(policy)
        return result

    def run(self, batch: Batch, rows: Sequence[int], one_pass: Callable[[list[int], bool], None]) -> None:
        """Do ``one_pass`` (rows, idle) for each part of a step."""
        trim_heap(batch.mask.device)
        on_cpu = batch.mask.device.type == "cpu" and self.loop.model_wrapped is self.loop.model
        with gradients_in_place(self.loop.model, on_cpu and self.shared is None):
            for part, idle in self.parts(batch, rows):
                if self.shared is None:
                    one_pass(part, idle)
                else:
                    self.shared.run(partial(one_pass, part, idle))

    def parts(self, batch: Batch, rows: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
        """Yield the parts of a step as (rows, idle), and let gradients be reduced in the last.

        Idle passes over the shortest completion come where other processes have more parts and each pass needs all of them.
        """
        accelerator = self.loop.accelerator
        idle = [min(range(len(batch)), key=lambda row: len(batch.completions[row]))], True
        parts = [(part, False) for part in self._cut(batch, rows)]
        parts += [idle] * (passes_of_all(accelerator, len(parts)) - len(parts))
        if torch.is_grad_enabled() and self.shared and not self.shared.order:
            with torch.no_grad():  # the packed pass is compared here, and not in what is noted
                self.log_probs(self.loop.model_wrapped, batch.take(idle[0]))
            parts.insert(0, idle)
        for number, part in enumerate(parts, start=1):
            accelerator.sync_gradients = number == len(parts)  # DeepSpeed's engine steps then
            yield part

    def _cut(self, batch: Batch, rows: Sequence[int]) -> list[list[int]]:
        return batch.parts(rows, most_rows=self.most_rows, most_tokens=self.part_tokens)

    def _smaller(self, batch: Batch, rows: Sequence[int]) -> bool:
        """Free memory by one step: what is kept between steps, then parts of half the tokens, then a single completion in tiles."""
        smaller = self._smaller_here(batch, rows)
        return smaller if self.shared is None else self.shared.all_smaller(smaller)

    def _smaller_here(self, batch: Batch, rows: Sequence[int]) -> bool:
        if self.spare():
            log.warning("out of memory in the update; the engine keeps nothing between rollouts from now on")
            return True
        largest = max(self._cut(batch, rows), key=batch.packed_tokens)
        tokens = batch.packed_tokens(largest)
        if len(largest) <= 1:
            return self.compute.spare_memory(self.loop.model, tokens)
        self.part_tokens = max(1, tokens // 2)
        log.warning(
            "out of memory with %d tokens (%d completions) in one part of the update; continuing with parts of %d tokens, "
            "same mathematics",
            tokens,
            len(largest),
            self.part_tokens,
        )
        return True

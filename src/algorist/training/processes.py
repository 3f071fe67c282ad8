"""The processes of a run: who reads, writes and decides, and that all stop after the same step."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from algorist.models.attention import FLASH
from algorist.models.load import pick_device
from algorist.models.sharding import is_sharded
from algorist.store.stages import STOP_FILE
from algorist.training.callbacks import StopSignal
from algorist.training.distributed import PATIENCE, of_all, reminder

T = TypeVar("T")
log = logging.getLogger("algorist.training.processes")


@dataclass(frozen=True)
class Processes:
    """The processes of a run; ``Processes()`` is one alone."""

    count: int = 1
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Of this process."""

    @classmethod
    def join(cls, device: str) -> Processes:
        """Meet the other processes that ``accelerate launch`` or ``torchrun`` started; alone without them.

        Raises:
            ConfigError: The recipe's ``device`` is not there. The CPU is taken where the launcher asks for it (``ACCELERATE_USE_CPU``).
        """
        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "yes", "y", "on", "t"}
        place = pick_device("cpu" if on_cpu else device)
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return cls(device=place)
        from accelerate import PartialState

        state = PartialState(cpu=place.type == "cpu", timeout=PATIENCE)
        return cls(state.num_processes, state.process_index, place)

    @property
    def main(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Go on when every process has come here."""
        self.gather(None)

    def from_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the main process and return its result in all; the others wait.

        Raises:
            SystemExit: In the other processes, when the action failed; the main process raises its error.
        """
        if self.count == 1:
            return action()
        message: tuple[Any, bool] = None, False
        if self.main:
            try:
                message = action(), True
            finally:
                of_all(message)
        else:
            with reminder("for the main process"):
                message = of_all(message)[0]
        value, done = message
        if not done:
            time.sleep(10)  # the main process says why and ends, and its launcher ends the others
            raise SystemExit(1)
        return value  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        with reminder("for the other processes"):
            return of_all(value)

    def stop_signal(self, say: Callable[[str], None]) -> StopSignal:
        """Return the callback for Ctrl-C: all processes stop after the same step."""
        return StopSignal(say) if self.count == 1 else _StopTogether(say, self)


class _StopTogether(StopSignal):
    """A signal reaches the processes in different steps; they agree at the end of each.

    ``algorist run -n 2 RECIPE`` asks with a file, because torchrun ends its workers soon after a signal.
    """

    def __init__(self, say: Callable[[str], None], processes: Processes) -> None:
        super().__init__(say)
        self.processes = processes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask every trainer to save and stop when one process was told to."""
        file = os.environ.get(STOP_FILE)
        self.stopped = any(self.processes.gather(self.stopped or bool(file and Path(file).exists())))
        return super().on_step_end(args, state, control, **kwargs)


def model_on(model: Any, device: str | None) -> Any:
    """Return a copy of a policy on ``device`` with its present weights; without one, or of a sharded model, itself."""
    if device is None:
        return model
    if is_sharded(model):
        log.warning("the model is sharded, so it is evaluated in place, not on eval.device=%s", device)
        return model
    known: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        moved = tensor.detach().to(device, copy=True)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        known[id(tensor)] = torch.nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
    copied = copy.deepcopy(model, known)
    kernel = getattr(getattr(copied, "config", None), "_attn_implementation", None)
    if kernel == FLASH and torch.device(device).type != "cuda":
        copied.set_attn_implementation("sdpa")
    return copied

"""One run in several processes: who writes, what is gathered, which random numbers a process samples with.

The main process (rank 0) reads and writes the run folder, evaluates and decides; the others wait for it and take its
answer. Every process samples and updates its own share of each batch. One process alone meets none of this.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from algorist.errors import ConfigError, nearest
from algorist.models.attention import FLASH
from algorist.models.sharding import is_sharded
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.engines import ENGINES
from algorist.training.callbacks import StopSignal

T = TypeVar("T")
log = logging.getLogger("algorist.training.processes")

# The others wait for the main process while it evaluates or saves, and for the slowest while it samples.
_PATIENCE = timedelta(days=1)
REMINDER_S = 180.0
"""A process that waits for others says so after this time, and again after each further time."""
STOP_FILE = "ALGORIST_STOP_FILE"
_SKIP_AT_ONCE = 1 << 20


@contextmanager
def reminder(what: str) -> Iterator[None]:
    """Say every few minutes on standard error that this process waits ``what``, as long as the block takes.

    Nothing is said where no other process takes part, or where memory is too full for a thread.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    done, began = threading.Event(), time.monotonic()

    def remind() -> None:
        while not done.wait(REMINDER_S):
            line = (
                f"process {os.environ.get('RANK', '0')} has been waiting {what} for {(time.monotonic() - began) / 60:.0f} minutes; "
                "if nothing is at work any more, stop the run and continue it with --resume"
            )
            log.warning("%s", line)
            print(line, file=sys.stderr, flush=True)  # only the main process has a log file

    thread = threading.Thread(target=remind, daemon=True)
    with suppress(RuntimeError):  # "can't start new thread"
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()


@dataclass(frozen=True)
class Processes:
    """The processes of a run; ``Processes()`` is one alone."""

    count: int = 1
    rank: int = 0

    @classmethod
    def join(cls, device: torch.device) -> Processes:
        """Meet the other processes that ``accelerate launch`` or ``torchrun`` started; alone without them."""
        if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=device.type == "cpu", timeout=_PATIENCE)
        return cls(state.num_processes, state.process_index)

    @property
    def main(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Go on when every process has come here."""
        if self.count > 1:
            from accelerate.utils import wait_for_everyone

            with reminder("for the other processes"):
                wait_for_everyone()

    def from_main(self, action: Callable[[], T]) -> T:
        """Return what ``action`` returns in the main process; the others wait for it.

        Raises:
            SystemExit: In the other processes, when the action failed: the main process raises and tells.
        """
        if self.count == 1:
            return action()
        from accelerate.utils import broadcast_object_list

        message: list[Any] = [None, False]
        if self.main:
            try:
                message = [action(), True]
            finally:
                broadcast_object_list(message)
        else:
            with reminder("for the main process"):
                broadcast_object_list(message)
        value, done = message
        if not done:
            raise SystemExit(1)
        return value  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        with reminder("for the other processes"):
            return list(gather_object([value]))

    def stop_signal(self, say: Callable[[str], None]) -> StopSignal:
        """Return the callback for Ctrl-C: all processes stop after the same step."""
        return StopSignal(say) if self.count == 1 else _StopTogether(say, self)


class _StopTogether(StopSignal):
    """A signal reaches the processes in different steps; they agree at the end of each.

    ``algorist run -n N`` asks with a file, because torchrun ends its workers soon after a signal.
    """

    def __init__(self, say: Callable[[str], None], processes: Processes) -> None:
        super().__init__(say)
        self.processes = processes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask every trainer to save and stop when one process was told to."""
        asked = os.environ.get(STOP_FILE)
        self.stopped = any(self.processes.gather(self.stopped or bool(asked and Path(asked).exists())))
        return super().on_step_end(args, state, control, **kwargs)


def run_device(device: torch.device) -> torch.device:
    """Return the CPU where the launcher asks for it (``ACCELERATE_USE_CPU``), else ``device``."""
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "yes", "y", "on", "t"}
    return torch.device("cpu") if asked else device


def check_eval_device(name: str | None, engine: str) -> None:
    """Refuse an ``eval.device`` that is not there, or that the rollout engine cannot use (ConfigError)."""
    if name is None:
        return
    cuda = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    there = [
        "cpu",
        *(["cuda", *cuda] if cuda else []),
        *(["mps"] if torch.backends.mps.is_available() else []),
    ]
    if name not in there:
        raise ConfigError(
            f"eval.device is '{name}', but torch {torch.__version__} has no such device here.{nearest(name, there)} "
            f"There is: {', '.join(there)}; left out, evaluations run where the training runs"
        )
    if ENGINES.get(engine).own_device:
        raise ConfigError(
            f"eval.device is '{name}' while their engine is {engine}, which samples where it runs; leave eval.device out, or "
            "take eval.engine=native"
        )


def model_on(model: Any, device: str | None) -> Any:
    """Return a copy of a policy on ``device`` with its present weights; without one, or of a sharded model, itself."""
    if device is None:
        return model
    if is_sharded(model):
        log.warning(
            "the model lies in parts on several processes: evaluated there, not on eval.device=%s", device
        )
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


@contextmanager
def rank_draws(accelerator: Any, params: SamplingParams, first_row: int) -> Iterator[SamplingParams]:
    """Sample with the random numbers that one process alone would use for these rows of the global batch.

    An engine draws its numbers row by row, so the numbers of a row have a fixed place in the stream of the seed. torch's global
    CPU generator is put there, by drawing what comes before, and the seed taken out of the parameters; the generator is
    restored afterwards.

    Args:
        accelerator: Knows count and rank.
        params: Sampling settings; without a seed nothing is done.
        first_row: Place of the first completion in the global batch.
    """
    if accelerator.num_processes == 1 or params.seed is None:
        yield params
        return
    before = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(params.seed)
        left = first_row * params.max_new_tokens
        while left > 0:
            torch.rand(min(left, _SKIP_AT_ONCE))
            left -= _SKIP_AT_ONCE
        yield replace(params, seed=None)
    finally:
        torch.set_rng_state(before)


@contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    """Give every process the whole weights of a sharded model for sampling; nothing to do for others.

    Every process must enter. FSDP1 is refused, because its parameters are views of one flat tensor.

    Raises:
        ConfigError: The model is sharded by FSDP version 1.
    """
    names = {k.__name__ for k in type(model).__mro__}
    if "FSDPModule" in names:
        modules = [m for m in model.modules() if any(k.__name__ == "FSDPModule" for k in type(m).__mro__)]
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
    elif "FullyShardedDataParallel" in names:
        raise ConfigError(
            "the model is sharded by FSDP version 1, whose weights no rollout engine of ours can read; take the shipped "
            "configuration: algorist run --launch fsdp2 …"
        )
    elif any(hasattr(p, "ds_id") for p in model.parameters()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            yield
    else:
        yield

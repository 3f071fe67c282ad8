"""Callbacks of training: the live line, metrics.jsonl, a clean stop on Ctrl-C or SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from algorist.system import own_memory
from algorist.training.extension import Control
from algorist_grader.system import HANGUP, STOPPING, waited

log = logging.getLogger("algorist.training.callbacks")

BUSY, BUSY_AFTER_S = 0.4, 60.0
"""Share of the time spent waiting for a processor that is reported, once this many seconds have passed."""
MetricsSink = Callable[[int, dict[str, float]], Control | None]


def _obey(control: Any, wish: Control | None) -> Any:
    """Have transformers' loop do what an extension asks."""
    if wish is not None:
        control.should_save |= wish.save
        control.should_training_stop |= wish.stop
    return control


class MetricsCallback(TrainerCallback):
    """Passes every logged line to ``sink(step, values)``: numbers only, under the names that TRL or we gave them, and ``hardware/…``.

    The closing line (run time, mean loss) is left out: it tells of one process, not of the run, which may have had several.
    """

    def __init__(self, sink: MetricsSink) -> None:
        self.sink, self.hardware = sink, Hardware()
        self._said_busy = False

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> Any:
        values = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, (int, float))}
        if values and "train_runtime" not in values:
            hardware = self.hardware.read() if state.is_world_process_zero else {}
            self._say_busy()
            return _obey(control, self.sink(state.global_step, values | hardware))
        return control

    def _say_busy(self) -> None:
        """Warn once that this process gets less than its share of the processor."""
        waited_s, worked_s = self.hardware.waited_s, self.hardware.worked_s
        if self._said_busy or waited_s + worked_s < BUSY_AFTER_S or waited_s < worked_s * BUSY / (1 - BUSY):
            return
        self._said_busy = True
        log.warning(
            "other programs hold this machine's processors: this one waits for them %.0f %% of the time. It takes as much longer%s",
            100 * waited_s / (waited_s + worked_s),
            "; with fewer threads (threads=1) its threads wait less for each other"
            * (torch.get_num_threads() > 1),
        )


class EveryNSteps(TrainerCallback):
    """Calls ``action(step)`` after every ``every`` steps (held-out evaluation during training)."""

    def __init__(self, every: int, action: Callable[[int], None]) -> None:
        self.every, self.action = every, action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            self.action(state.global_step)


class EventsCallback(TrainerCallback):
    """Tells of each step and each checkpoint, and has the loop do what is asked in return."""

    def __init__(self, on_step: Callable[[int], Control], on_checkpoint: Callable[[int], Control]) -> None:
        self.step, self.checkpoint = on_step, on_checkpoint

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        return _obey(control, self.step(state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        return _obey(control, self.checkpoint(state.global_step))


class StopSignal(TrainerCallback):
    """Turns the first SIGINT, SIGTERM or SIGHUP into: finish this step, save a checkpoint, stop. A second one ends at once.

    Use as a context manager around ``trainer.train()``; ``stopped`` tells whether a signal came.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.stopped = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in STOPPING:
            if number == HANGUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: the caller handles signals
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        self.say("stopping after this step; what was done is being saved (Ctrl-C again: stop at once)")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.stopped:
            control.should_save = True
            control.should_training_stop = True
        return control


class ProgressCallback(TrainerCallback):
    """Reports ``show(step, max_steps, values, seconds_left)`` at every log call, ``move(step, max_steps)`` at the others.

    The seconds left come from the mean step.
    """

    def __init__(
        self, show: Callable[[int, int, dict[str, float], float], None], move: Callable[[int, int], None]
    ) -> None:
        self.show, self.move = show, move
        self._start = 0.0
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start, self._first_step = time.monotonic(), state.global_step
        self.move(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not control.should_log and state.is_world_process_zero:
            self.move(state.global_step, state.max_steps)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        done = state.global_step - self._first_step
        if not logs or done <= 0 or not state.is_world_process_zero or "train_runtime" in logs:
            return
        per_step = (time.monotonic() - self._start) / done
        values = {k: float(v) for k, v in logs.items() if isinstance(v, (int, float))}
        self.show(
            state.global_step, state.max_steps, values, per_step * (state.max_steps - state.global_step)
        )


class FlushBeforeSave(TrainerCallback):
    """Writes rollouts and metrics through before a checkpoint is made; must be the last callback.

    A checkpoint that is newer than the stored rollouts would lose them when the process is killed. The step is logged too,
    because means over the steps since the last logged line would otherwise begin anew in a resumed run.
    """

    def __init__(self, *flushes: Callable[[], None]) -> None:
        self.flushes = flushes

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Log when this step ends in a checkpoint."""
        if control.should_save:
            control.should_log = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Flush between the log line of a step and its checkpoint."""
        if control.should_save:
            for flush in self.flushes:
                flush()


# ---- what a run takes of its machine: memory and processor of the process and its children, memory and load of the GPU


LOOK_EVERY_S = 10.0
"""Seconds between two looks for new child processes and for the load of the GPU, which cost more than the rest."""


class Hardware:
    """Reads the use of hardware since the reading before; cheap enough for every logged line.

    Children are found up to ``LOOK_EVERY_S`` late, and short-lived ones are missed. Memory that processes share counts in
    each of them.
    """

    def __init__(self) -> None:
        self._children: list[psutil.Process] = []
        self._seconds: dict[int, float] = {}
        self._gpu_percent: float | None = None
        self._asks_gpu = True
        self._looked = float("-inf")
        self._time, self._own_seconds = time.perf_counter(), time.process_time()
        self._waited = waited(os.getpid())
        self.waited_s = self.worked_s = 0.0
        self._own = psutil.Process()

    def read(self) -> dict[str, float]:
        """Return ``hardware/…``: ram_gb (resident, 1e9 bytes), ram_peak_gb (the most so far, of this process alone),
        cpu_percent (100 is one core), waiting_percent (of the time in which this process's threads had work, what they waited for a
        processor; Linux), and with CUDA gpu_memory_gb (allocated by tensors now), gpu_memory_peak_gb
        (most so far), gpu_percent (where the driver tells)."""
        if time.perf_counter() - self._looked > LOOK_EVERY_S:
            self._look()
        ram, spent = float(self._own.memory_info().rss), 0.0
        for child in list(self._children):
            try:
                with child.oneshot():
                    times, memory = child.cpu_times(), child.memory_info().rss
            except psutil.Error:  # it has ended, or is not ours to see
                self._children.remove(child)
                continue
            seconds = times.user + times.system
            spent += seconds - self._seconds.get(child.pid, seconds)
            self._seconds[child.pid] = seconds
            ram += memory
        now, own = time.perf_counter(), time.process_time()
        spent += own - self._own_seconds
        before, self._waited = self._waited, waited(os.getpid())
        waiting = sum(seconds - before.get(thread, 0.0) for thread, seconds in self._waited.items())
        self.waited_s, self.worked_s = self.waited_s + waiting, self.worked_s + own - self._own_seconds
        had_work = max(waiting + own - self._own_seconds, 1e-9)
        percent = 100 * spent / max(now - self._time, 1e-9)
        self._time, self._own_seconds = now, own
        values = {
            "hardware/ram_gb": ram / 1e9,
            "hardware/ram_peak_gb": own_memory(peak=True) / 1e9,
            "hardware/cpu_percent": percent,
        }
        if self._waited:
            values["hardware/waiting_percent"] = 100 * waiting / had_work
        if torch.cuda.is_initialized():
            values["hardware/gpu_memory_gb"] = torch.cuda.memory_allocated() / 1e9
            values["hardware/gpu_memory_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            if self._gpu_percent is not None:
                values["hardware/gpu_percent"] = self._gpu_percent
        return values

    def _look(self) -> None:
        """Find child processes, and ask for the load of the GPU."""
        try:
            self._children = self._own.children(recursive=True)
        except psutil.Error:
            self._children = []
        self._seconds = {c.pid: self._seconds[c.pid] for c in self._children if c.pid in self._seconds}
        if self._asks_gpu and torch.cuda.is_initialized():
            try:
                self._gpu_percent = float(torch.cuda.utilization())
            except Exception as error:  # no NVML binding, or a device that does not tell (MIG)
                self._asks_gpu = False
                log.warning("the load of the GPU is not recorded (%s); pip install nvidia-ml-py", error)
        self._looked = time.perf_counter()

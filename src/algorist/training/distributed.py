"""One run in several processes: who writes, what is gathered, which random numbers a process samples with.

The main process (rank 0) reads and writes the run folder, evaluates and decides; the others wait for it and take its
answer. Every process samples and updates its own share of each batch; its gradients are averaged under DDP, and the numbers of passes
are equal under FSDP2 and DeepSpeed. A single process skips all of this.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from algorist.errors import ConfigError, is_out_of_memory
from algorist.models.modes import eval_mode
from algorist.models.precision import mixed_precision
from algorist.models.sharding import is_sharded, wrapped_module
from algorist.rollouts.base import Completions, Prompts, RolloutEngine, SamplingParams, Turns

T = TypeVar("T")
log = logging.getLogger("algorist.training.distributed")

# The others wait for the main process while it evaluates or saves, and for the slowest while it samples.
PATIENCE = timedelta(days=1)
REMINDER_S = 180.0
"""Seconds that a process waits for others before it reports so, and between further reports."""
_SKIP_AT_ONCE = 1 << 20


def of_all(value: T) -> list[T]:
    """Return the values of all processes, by rank, exchanged by their CPUs: no device waits. Every process must call this."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_side_group(dist.group.WORLD))
    return values


@cache
def _side_group(_: Any) -> Any:
    """The group for what CPUs exchange (gloo): with NCCL alone each number would be a wait for the GPU, and a wait of hours its error."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


@contextmanager
def reminder(what: str) -> Iterator[None]:
    """Report every few minutes on standard error that this process waits ``what``, as long as the block takes.

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


class ShardedTraining:
    """Mixin for Hugging Face trainers: autocast that keeps no copies of the weights; FSDP2 with sums in float32, also on the CPU."""

    args: Any
    accelerator: Any
    model: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as the library does, then keep what FSDP2 adds up and returns in float32."""
        from accelerate.utils import AutocastKwargs

        _let_fsdp_shard(self.args.device)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # A pass reads each weight once: cached, all 16-bit copies would be held until it ends, also where layers are computed again.
        self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
        if not shares_passes(self.accelerator):
            return
        gather = self.accelerator.get_state_dict

        def without_copies(model: Any, unwrap: bool = True) -> Any:
            """Return the whole weights, those of a tied head once; None where DeepSpeed gives them to the first process only."""
            state, seen = gather(model, unwrap) or {}, set()
            for name, weight in wrapped_module(model).named_parameters(remove_duplicate=False):
                if id(weight) in seen:
                    state.pop(name, None)
                seen.add(id(weight))
            return state or None

        self.accelerator.get_state_dict = without_copies
        _add_up_in_float32(self.accelerator)
        if self.accelerator.is_fsdp2 and is_sharded(self.model):
            # accelerate 1.15 does not find the layers again.
            self.accelerator.state.fsdp_plugin.auto_wrap_policy = None


def uses_fsdp2() -> bool:
    """Whether this process was started for FSDP2."""
    names = ("ACCELERATE_USE_FSDP", "FSDP_VERSION")
    return [os.environ.get(name, "").lower() for name in names] == ["true", "2"]


def shard(model: Any, device: torch.device, *, send: bool = True) -> None:
    """Shard a model by FSDP2 in place, each process with its part on ``device``; every process must call this.

    Args:
        model: All weights of the main process, which may lie on the CPU; those of the others may be shapes only.
        device: Of this process.
        send: Send the main process's weights; else all give shapes only and load their parts themselves.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import fsdp2_prepare_model

    AcceleratorState._reset_state()  # of an earlier stage
    _let_fsdp_shard(device)
    mixed = next((name for name, used in mixed_precision(model, device).items() if used), "no")
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=mixed)
    accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = send
    _add_up_in_float32(accelerator)
    fsdp2_prepare_model(accelerator, model)
    AcceleratorState._reset_state()  # accelerate 1.15 takes a second accelerator for one without shards


def _let_fsdp_shard(device: torch.device) -> None:
    """Have accelerate 1.15 shard on the CPU too: it shards only what it counts as GPUs, and takes DDP without a word."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if device.type == "cpu" and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        PartialState().distributed_type = DistributedType.MULTI_GPU


def _add_up_in_float32(accelerator: Any) -> None:
    """Replace accelerate's types for FSDP2, which round log-probs, and the sums of gradients over the processes, to 16 bit."""
    if not accelerator.is_fsdp2 or accelerator.mixed_precision == "no":
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = accelerator.state.fsdp_plugin
    compute = plugin.mixed_precision_policy.param_dtype
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def passes_of_all(accelerator: Any, passes: int) -> int:
    """Return the number of passes of every process: the largest, where each pass gathers weights or adds up gradients."""
    if accelerator.num_processes == 1 or not shares_passes(accelerator):
        return passes
    return max(of_all(passes))


def shares_passes(accelerator: Any) -> bool:
    """Whether a pass waits for the other processes: FSDP2 and DeepSpeed gather weights in it, or add its gradients up."""
    return bool(accelerator.is_fsdp2) or getattr(accelerator.state, "deepspeed_plugin", None) is not None


class SharedPasses:
    """Forward and backward passes of a model that FSDP2 shards, in step with the other processes also where memory runs out in one.

    Each pass gathers weights and adds gradients up in the same order, which the first one notes. A process that cannot finish a
    pass takes part in what is left of it with empty tensors; then all hear of it, and all count the pass as failed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.order: list[Callable[[], Any]] = []
        """Exchanges of a pass, each with its own tensors."""
        self._done: list[Callable[[], Any]] = []
        self.failed = False
        for module in model.modules():
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(_Exchange(self._done, dist.all_gather_single))
                module.set_custom_reduce_scatter(_Exchange(self._done, dist.reduce_scatter_single))

    @classmethod
    def of(cls, model: Any) -> SharedPasses | None:
        """Return those of a model that FSDP2 shards; None for others, and before torch 2.13, which cannot go on after a failed pass."""
        return cls(model) if hasattr(model, "reset_iter_state") and dist.get_world_size() > 1 else None

    def run(self, one_pass: Callable[[], None]) -> None:
        """Run a pass after others of the model; every process must call this.

        Raises:
            torch.OutOfMemoryError: Memory ran out in a process.
        """
        self.model.reset_iter_state()  # forwards without a gradient leave weights gathered, and plans for gathering more
        self._done.clear()
        failed: BaseException | None = None
        try:
            one_pass()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not self.order:
                raise
            failed = error
            traceback.clear_frames(error.__traceback__)  # which hold the pass's tensors
            self.model.zero_grad()  # of the gathered weights, which are not added up yet
            self.model.reset_iter_state()
            for exchange in self.order[len(self._done) :]:
                exchange()
        self.order = self.order or self._done.copy()
        self.failed = failed is not None
        if any(of_all(self.failed)):
            raise failed or torch.OutOfMemoryError("out of memory in another process")

    def all_smaller(self, smaller: bool) -> bool:
        """Return whether each process that failed can make its next attempt ``smaller``; every process must call this."""
        return all(of_all(smaller or not self.failed))


class _Exchange:
    """A collective of FSDP2 that is noted before it is called."""

    def __init__(self, noted: list[Callable[[], Any]], collective: Callable[..., Any]) -> None:
        self.noted, self.collective = noted, collective

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, **ways: Any) -> Any:
        sizes = [(t.shape, t.dtype, t.device) for t in (output_tensor, input_tensor)]

        def again() -> None:
            made = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in sizes]
            self.collective(*made, group=group, **{**ways, "async_op": False})

        self.noted.append(again)
        return self.collective(output_tensor, input_tensor, group=group, **ways)


@contextmanager
def without_buckets(model: Any) -> Iterator[None]:
    """Wrapped by DDP in here, a model gets no second copy of its gradients: ours are averaged where they lie.

    DDP wants one parameter to look after; what it would broadcast at the start is broadcast here.
    """
    names = {name for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())}
    trained = [(p.numel(), name) for name, p in model.named_parameters() if p.requires_grad]
    if trained and dist.is_initialized():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        names.discard(min(trained)[1])
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    try:
        yield
    finally:
        vars(model).pop("_ddp_params_and_buffers_to_ignore", None)


def average_gradients(model: torch.nn.Module) -> None:
    """Replace each gradient by its mean over all processes; every process must call this."""
    grads = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
    for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
        work.wait()
    for grad in grads:
        grad /= dist.get_world_size()


# ---- the policy that is being trained, as a rollout engine


class PolicyEngine:
    """The trainer's engine on the weights of this moment: dropout off, whole weights, the random numbers of this process.

    Args:
        engine: Samples.
        trainer: Has the policy and the accelerator.
        first_row: Place of this process's first completion among those of all processes.
    """

    def __init__(self, engine: RolloutEngine, trainer: Any, first_row: int) -> None:
        self.engine, self.trainer, self.name = engine, trainer, engine.name
        self.row = first_row  # of the next completion among those of all processes

    def generate(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Completions:
        accelerator = self.trainer.accelerator
        policy = accelerator.unwrap_model(self.trainer.model_wrapped, keep_fp32_wrapper=True)
        with (
            eval_mode(policy),
            torch.no_grad(),
            whole_weights(policy),
            rank_draws(accelerator, params, self.row) as drawn,
        ):
            more = () if turns is None else (turns,)
            groups = self.engine.generate(prompts, group_size, drawn, *more)
        self.row += len(prompts) * group_size
        return groups

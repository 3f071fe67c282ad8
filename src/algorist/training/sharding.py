"""The trainer's accelerator; gradients and passes of several processes: averages under DDP, equal numbers of passes under FSDP2 and DeepSpeed."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from algorist.models.sharding import wrapped_module


class ShardedTraining:
    """Mixin for Hugging Face trainers: autocast that keeps no copies of the weights; FSDP2 with sums in float32, also on the CPU."""

    args: Any
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as the library does, then keep what FSDP2 adds up and returns in float32."""
        from accelerate import PartialState
        from accelerate.utils import AutocastKwargs, DistributedType

        if self.args.device.type == "cpu" and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            # accelerate 1.15 shards only what it counts as GPUs, and takes DDP on the CPU without a word.
            PartialState().distributed_type = DistributedType.MULTI_GPU
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
        if not self.accelerator.is_fsdp2 or self.accelerator.mixed_precision == "no":
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = self.accelerator.state.fsdp_plugin
        # accelerate's policy rounds log-probs, and the sums of gradients over the processes, to 16 bit.
        compute = plugin.mixed_precision_policy.param_dtype
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def passes_of_all(accelerator: Any, passes: int) -> int:
    """Return the number of passes of every process: the largest, where each pass gathers weights or adds up gradients."""
    if accelerator.num_processes == 1 or not shares_passes(accelerator):
        return passes
    needed = torch.tensor([passes], device=accelerator.device)
    return int(accelerator.gather(needed).max())


def shares_passes(accelerator: Any) -> bool:
    """Whether a pass waits for the other processes: FSDP2 and DeepSpeed gather weights in it, or add its gradients up."""
    return bool(accelerator.is_fsdp2) or getattr(accelerator.state, "deepspeed_plugin", None) is not None


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

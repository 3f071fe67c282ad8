"""vLLM's weight transfer over NCCL, with its store for metadata in NCCL's place: a vLLM plugin for machines without GPUs.

Both ends are vLLM's own: the HTTP routes, the order of the calls, the names, types and shapes, and how the weights are loaded.
"""

from __future__ import annotations

from typing import Any

import torch


class OverTCP:
    """What the engines use of ``PyNcclCommunicator``."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        sent = self.group.broadcast(tensor, src)
        if self.group.rank != src:
            assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(sent)

    def destroy(self) -> None:
        pass


def register() -> None:
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer import nccl_common

    def joined(address: str, port: int, rank: int, size: int, device: Any) -> OverTCP:
        return OverTCP(StatelessProcessGroup.create(address, port, rank, size))

    nccl_common.stateless_init_process_group = joined
    torch.distributed.is_nccl_available = lambda: True
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: None

"""Groups of completions packed into one row of tokens: each prompt once, then its completions, no padding.

Linear layers, norms and the feed-forward see one row without padding or repeated prompts. Attention knows the layout
(``shared_prefix.py``): a prompt attends to itself, a completion to its prompt and to itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from algorist.errors import EngineError
from algorist.models.precision import on_gpu
from algorist.models.products import row_bucket
from algorist.training.batch import Batch

BLOCK_TOKENS = 2048
"""Rows of similar length are padded together in the attention to themselves, up to this many places."""


class NotPackable(EngineError):
    """The packed forward would not compute what the model computes; use the model's own pass."""


@dataclass(frozen=True)
class SelfBlock:
    """Prompts or completions that are padded together for the causal attention to themselves.

    ``index_nL`` are packed positions, ``real_R`` the places of the flattened (n·L,) that are no padding, ``packed_R`` their
    packed positions; ``prompt_n2`` says where each row's prompt starts and how long it is (0 for prompts themselves).
    """

    longest_prompt: int
    index_nL: Tensor
    real_R: Tensor
    packed_R: Tensor
    prompt_n2: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that move to the device."""
        return self.index_nL, self.real_R, self.packed_R, self.prompt_n2


class Span(NamedTuple):
    """A row's packed tokens, and its prompt's."""

    first: int
    size: int
    prompt_start: int
    prompt_size: int


@dataclass(frozen=True)
class GroupSpan:
    """One prompt and its completions: packed tokens [start, middle) and [middle, stop); with a single completion all is [start, middle)."""

    start: int
    middle: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Layout of the packed row.

    ``tokens_N`` and ``positions_N`` are the model's input, padded after ``used`` tokens where the device is the CPU;
    ``predict_M`` are the packed positions whose hidden states predict ``targets_M``; ``scatter_M`` are those targets'
    places in the flattened (B, T) completions.
    """

    used: int
    longest: int
    groups: tuple[GroupSpan, ...]
    prompts: tuple[SelfBlock, ...]
    completions: tuple[SelfBlock, ...]
    tokens_N: Tensor
    positions_N: Tensor
    predict_M: Tensor
    targets_M: Tensor
    scatter_M: Tensor


def pack(batch: Batch, block_tokens: int = BLOCK_TOKENS) -> Layout:
    """Pack a batch whose completions of a prompt follow each other.

        prompt 0 | completion 0.0 | completion 0.1 | … | prompt 1 | completion 1.0 | …
                 └ the prompt's last token predicts the first token of each of its completions

    Args:
        batch: Completions and prompts, none of them empty.
        block_tokens: Places of one block in the attention of rows to themselves.
    """
    device = batch.mask.device
    tokens: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    scatter: list[int] = []
    groups: list[GroupSpan] = []
    spans: list[Span] = []
    longest = 0
    for prompt, members in itertools.groupby(range(len(batch)), key=lambda row: batch.prompt_of[row]):
        prompt_ids, rows = batch.prompts[prompt], list(members)
        start, length = len(tokens), len(prompt_ids)
        tokens.extend(prompt_ids)
        positions.extend(range(length))
        middle = len(tokens)
        for row in rows:
            completion = batch.completions[row]
            first, size = len(tokens), len(completion)
            tokens.extend(completion[:-1])  # nothing is predicted from the last token
            positions.extend(range(length, length + size - 1))
            predict.append(middle - 1)
            predict.extend(range(first, first + size - 1))
            targets.extend(completion)
            scatter.extend(range(row * batch.width, row * batch.width + size))
            longest = max(longest, length + size)
            if size > 1 and len(rows) > 1:
                spans.append(Span(first, size - 1, start, length))
        # A prompt that nothing is shared of is one sequence with its completion.
        groups.append(GroupSpan(start, middle if len(rows) > 1 else len(tokens), len(tokens)))
    used = len(tokens)
    fill = row_bucket(used) - used if device.type == "cpu" else 0

    lists = (tokens + [0] * fill, positions + [0] * fill, predict, targets, scatter)
    prompts = _blocks([Span(g.start, g.middle - g.start, 0, 0) for g in groups], block_tokens)
    completions = _blocks(spans, block_tokens)
    moved = iter(
        in_one_copy(
            [
                *(torch.tensor(values, dtype=torch.long) for values in lists),
                *(t for block in (*prompts, *completions) for t in block.tensors),
            ],
            device,
        )
    )
    row_tensors = [next(moved) for _ in lists]
    prompts, completions = (
        tuple(SelfBlock(block.longest_prompt, *(next(moved) for _ in block.tensors)) for block in blocks)
        for blocks in (prompts, completions)
    )
    return Layout(used, longest, tuple(groups), prompts, completions, *row_tensors)


def in_one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move int64 tensors of the host together: one pinned copy, for which the host does not wait."""
    if device.type == "cpu":
        return list(tensors)
    packed = torch.cat([t.reshape(-1) for t in tensors])
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _blocks(spans: list[Span], most: int) -> tuple[SelfBlock, ...]:
    """Cut spans, shortest first, into blocks of at most ``most`` padded places (or one row)."""
    blocks: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.size):
        if not blocks or (len(blocks[-1]) + 1) * span.size > most:
            blocks.append([])
        blocks[-1].append(span)
    return tuple(_self_block(block) for block in blocks)


def _self_block(spans: list[Span]) -> SelfBlock:
    first_n, size_n, *prompt = torch.tensor(spans).unbind(1)
    offsets_L = torch.arange(int(size_n.max()))
    # Padding repeats the row's last token: a right-padded causal row never looks at it, and its output is dropped.
    index = first_n[:, None] + torch.minimum(offsets_L[None], size_n[:, None] - 1)
    real = (offsets_L[None] < size_n[:, None]).view(-1).nonzero()[:, 0]
    packed = index.view(-1)[real]
    return SelfBlock(int(prompt[1].max()), index, real, packed, torch.stack(prompt, 1))


# ---- the last resort for a single completion that does not fit: its MLPs in tiles, its layers' inputs in the host's memory

TILE_TOKENS = 4096
"""Tokens of a tile: enough for the products, a quarter of a row of 16,384."""


def tiles(mlp: Any, tokens: int) -> int:
    """Return in how many tiles an MLP is computed: 1 below two tiles' tokens, and for anything but a dense gated MLP."""
    dense = all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
    return -(-tokens // TILE_TOKENS) if dense and tokens >= 2 * TILE_TOKENS else 1


@contextmanager
def mlp_in_tiles(layer: Any, tokens: int) -> Iterator[None]:
    """Let ``layer`` compute its MLP of ``tokens`` tokens in tiles, where it has one that can be; None: nothing changes."""
    mlp: Any = getattr(layer, "mlp", None)
    if tiles(mlp, tokens) == 1:
        yield
        return
    own, plain = vars(mlp).get("forward"), mlp.forward

    def forward(hidden_BTH: Tensor) -> Tensor:
        parts = hidden_BTH.split(TILE_TOKENS, dim=1)
        return torch.cat([checkpoint(plain, part, use_reentrant=False) for part in parts], dim=1)

    mlp.forward = forward
    try:
        yield
    finally:
        if own is None:
            del mlp.forward
        else:
            mlp.forward = own


@contextmanager
def input_on_host(hidden: Any) -> Iterator[None]:
    """Offload the saved input ``hidden`` (1, N, H) of a checkpointed layer to the host's memory; nothing changes without a GPU."""
    if not isinstance(hidden, Tensor) or not on_gpu(hidden.device):
        yield
        return

    shape, device = hidden.shape, hidden.device

    def pack(tensor: Tensor) -> Tensor | tuple[Tensor]:
        # Detached: the graph would hold itself, and stay after a pass that fails.
        # Not waited for: both copies are in the order of the stream, and the one on the host is pinned.
        return (tensor.detach().to("cpu", non_blocking=True),) if tensor.shape == shape else tensor.detach()

    def unpack(stored: Tensor | tuple[Tensor]) -> Tensor:
        return stored if isinstance(stored, Tensor) else stored[0].to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield

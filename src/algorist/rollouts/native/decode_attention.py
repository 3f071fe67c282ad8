"""State of a decode step of the graph tier, and its attention in plain torch.

Nothing here depends on numbers that the host knows: lengths, positions and groups are tensors, so a captured step serves
every length. Shapes: S slots, P prompt places, G rows of a group, H heads, K key-value heads, T tokens, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from algorist.rollouts.native.decoder import _scores as scores


@dataclass(frozen=True, slots=True)
class StepState:
    """Views of the tier's buffers for one slot size; all of them stay where they are.

    ``keys[l]`` and ``values[l]`` are (S, K, T, D), the prompts' (P, K, T, D). ``position`` (S,) is the place of a
    row's newest token in its sequence, ``length`` (S,) the number of stored tokens of its completion; ``place`` (S,) its prompt's
    place, -1 for an idle slot; ``prompt_length`` (P,) is 0 for an empty place. ``member`` (P, G) lists the slots of each
    prompt, -1 for none; ``member_of`` (S,) is the slot's place in it, flat. ``rotation[l]`` (T, D / 2, 2) holds cosine and sine of
    the pairs of a head, ``window[l]`` the number of tokens that are seen, 0 for all.
    """

    keys: list[Tensor]
    values: list[Tensor]
    prompt_keys: list[Tensor]
    prompt_values: list[Tensor]
    position: Tensor
    length: Tensor
    place: Tensor
    prompt_length: Tensor
    member: Tensor
    member_of: Tensor
    rotation: list[Tensor]
    window: list[int]
    query_scale: float
    eps: float


class DecodeAttention(Protocol):
    """Attention of one step, for one slot size."""

    name: str

    def step(self, index: int, qkv_SND: Tensor, norm_ND: Tensor | None) -> Tensor:
        """Rotate, store the new keys and values of layer ``index``, attend.

        Args:
            index: The layer.
            qkv_SND: Queries, keys and values of the new tokens (S, H + 2 K, D).
            norm_ND: Weights (H + K, D) of the norm of queries and keys, or None without one.

        Returns:
            (S, H · D), in the cache's type.
        """
        ...


class PlainAttention:
    """In torch's own operations: the twin of the Triton kernels, and what runs where there is no Triton."""

    name = "torch"

    def __init__(self, state: StepState, heads: int) -> None:
        self.state = state
        slots, self.kv_heads, self.times, self.dim = state.keys[0].shape
        self.slots, self.heads, self.queries = slots, heads, heads // self.kv_heads
        device = state.position.device
        self._slot = torch.arange(slots, device=device)
        self._time = torch.arange(self.times, device=device)
        self._prompt_time = torch.arange(state.prompt_keys[0].shape[2], device=device)

    def step(self, index: int, qkv_SND: Tensor, norm_ND: Tensor | None) -> Tensor:
        state, heads = self.state, self.heads
        keys, values = state.keys[index], state.values[index]
        qk = self._rotated(qkv_SND[:, : heads + self.kv_heads].float(), norm_ND, state.rotation[index])
        q = (qk[:, :heads] * state.query_scale).to(keys.dtype)
        keys[self._slot, :, state.length] = qk[:, heads:].to(keys.dtype)
        values[self._slot, :, state.length] = qkv_SND[:, heads + self.kv_heads :].to(values.dtype)
        prompts = state.prompt_keys[index], state.prompt_values[index]
        return self._attend(q, keys, values, *prompts, state.window[index])

    def _rotated(self, qk: Tensor, norm_ND: Tensor | None, rotation: Tensor) -> Tensor:
        state = self.state
        if norm_ND is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, state.eps) * norm_ND
        cos, sin = rotation.index_select(0, state.position).unsqueeze(1).unbind(-1)
        a, b = qk.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, prompt_keys: Tensor, prompt_values: Tensor, window: int
    ) -> Tensor:
        """One softmax over the prompt and the row's own tokens; a prompt's keys are read once for its group."""
        state, slots, heads, queries, dim = self.state, self.slots, self.kv_heads, self.queries, self.dim
        places, group = state.member.shape
        size = self._prompt_time.shape[0]
        own = scores(q.view(slots * heads, queries, dim), keys.flatten(0, 1), None)
        unseen = self._time > state.length.unsqueeze(-1)
        if window:
            unseen |= self._time <= state.length.unsqueeze(-1) - window
        own = own.view(slots, heads, queries, -1).masked_fill(unseen[:, None, None], float("-inf"))

        members = state.member.clamp(min=0).view(-1)
        group_q = q.view(slots, heads, queries, dim).index_select(0, members)
        group_q = group_q.view(places, group, heads, queries, dim).transpose(1, 2)
        shared = scores(
            group_q.reshape(places * heads, group * queries, dim), prompt_keys.flatten(0, 1), None
        )
        shared = shared.view(places, heads, group, queries, size)
        empty = self._prompt_time >= state.prompt_length.unsqueeze(-1)
        shared = shared.masked_fill(empty[:, None, None, None], float("-inf"))
        shared = shared.transpose(1, 2).reshape(places * group, heads, queries, size)
        shared = shared.index_select(0, state.member_of)
        if window:
            before = self._prompt_time <= state.position.unsqueeze(-1) - window
            shared = shared.masked_fill(before[:, None, None], float("-inf"))
        weight = torch.softmax(torch.cat([shared, own], -1), dim=-1)
        weight = weight.to(values.dtype)

        group_weight = weight[..., :size].index_select(0, members)
        group_weight = group_weight.view(places, group, heads, queries, size).transpose(1, 2)
        out = torch.bmm(
            group_weight.reshape(places * heads, group * queries, size), prompt_values.flatten(0, 1)
        )
        out = out.view(places, heads, group, queries, dim).transpose(1, 2)
        out = out.reshape(places * group, heads * queries, dim).index_select(0, state.member_of)
        own_weight = weight[..., size:].reshape(slots * heads, queries, -1)
        own_out = torch.bmm(own_weight, values.flatten(0, 1)).view(slots, -1, dim)
        return (out.view(slots, -1, dim) + own_out).flatten(1)

"""The memory of the graph tier: everything a captured step reads or writes, at addresses that stay.

Shapes: S slots, P prompt places, G rows of a group, K key-value heads, T tokens, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from algorist.rollouts.native.decode_attention import StepState
from algorist.rollouts.native.decoder import Decoder

LADDER = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of slots that graphs are captured for; beyond the last, its multiples by quarters."""
FIELDS = ("position", "length", "next", "token", "alive", "begin", "end", "place", "member_of")
_STEP = 64


def slots_for(rows: int) -> int:
    """Return the smallest number of slots with a graph that holds ``rows``."""
    last = LADDER[-1]
    return next((n for n in LADDER if n >= rows), -(-rows // (last // 4)) * (last // 4))


@dataclass(frozen=True, slots=True)
class Room:
    """Size of a request: slots, prompt places, rows per group, tokens of a prompt and of a completion, all outputs."""

    slots: int
    places: int
    group: int
    prompt: int
    times: int
    outputs: int

    def rounded(self) -> Room:
        """Return the room that is set aside: similar requests then fit too."""
        prompt, times = (-(-n // _STEP) * _STEP for n in (self.prompt, self.times))
        return Room(self.slots, self.places, self.group, prompt, times, self.outputs)

    def covers(self, other: Room) -> bool:
        """Whether ``other`` fits, without wasting more than half of the cache."""
        fits = all(a >= b for a, b in zip(astuple(self), astuple(other), strict=True))
        return fits and self.cached <= 2 * other.rounded().cached

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return self.slots * self.times + self.places * self.prompt


class Buffers:
    """Cache, per-slot state, outputs and tables for one ``Room``.

    ``state`` (9, S) int64 holds ``FIELDS``: position and number of stored tokens, place of the next output, newest token,
    alive (1 or 0), begin and end of the row's output, place of the prompt (-1: idle), place among the members. Idle slots
    write to the spare output; their other numbers are harmless. ``reply`` holds tokens that take the place of sampled ones, or -1.
    """

    def __init__(self, room: Room, decoder: Decoder, vocabulary: int, device: torch.device) -> None:
        self.room, self.device = room, device
        w = decoder.w
        kind: dict[str, Any] = {"dtype": decoder.cache_dtype, "device": device}
        layers = range(len(w.layers))
        # Zeros, not garbage: what a mask hides must still be finite.
        own, prompt = (room.slots, w.kv_heads, room.times), (room.places, w.kv_heads, room.prompt)
        self.rows = [torch.zeros(2, *own, w.head_dim, **kind) for _ in layers]
        self.prompts = [torch.zeros(2, *prompt, w.head_dim, **kind) for _ in layers]
        self.state = torch.zeros(len(FIELDS), room.slots, dtype=torch.int64, device=device)
        self.member = torch.full((room.places, room.group), -1, dtype=torch.int64, device=device)
        self.prompt_length = torch.zeros(room.places, dtype=torch.int64, device=device)
        self.spare = room.outputs
        self.uniform = torch.zeros(room.outputs + 1, device=device)
        self.log_prob = torch.zeros(room.outputs + 1, device=device)
        self.token = torch.zeros(room.outputs + 1, dtype=torch.int64, device=device)
        self.reply = torch.full_like(self.token, -1)
        self.is_stop = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.rotations = torch.zeros(
            len(w.rotations), room.prompt + room.times + 1, w.head_dim // 2, 2, device=device
        )
        self.ids: int | None = None
        """Token ids that may be sampled; see ``sample``."""
        self.idle(range(room.slots))

    @property
    def nbytes(self) -> int:
        """Memory of the cache and the outputs."""
        return sum(
            t.nbytes for t in (*self.rows, *self.prompts, self.uniform, self.log_prob, self.token, self.reply)
        )

    def write_prompts(self, layer: int, places: Tensor, keys_PKTD: Tensor, values_PKTD: Tensor) -> None:
        """Store the keys and values of newly computed prompts at ``places``; what ``Decoder.prefill`` calls."""
        cache, size = self.prompts[layer], keys_PKTD.shape[2]
        cache[0, places, :, :size] = keys_PKTD.to(cache.dtype)
        cache[1, places, :, :size] = values_PKTD.to(cache.dtype)

    def put(self, slots: list[int], fields: list[list[int]]) -> None:
        """Set all ``FIELDS`` of some slots, in one copy from the host."""
        packed = torch.tensor([slots, *fields]).to(self.device)
        self.state[:, packed[0]] = packed[1:]

    def idle(self, slots: range | list[int]) -> None:
        """Make slots idle: they write to the spare place and see only their own token."""
        values = {"next": self.spare, "begin": self.spare, "end": self.spare + 1, "place": -1}
        self.put(list(slots), [[values.get(name, 0)] * len(slots) for name in FIELDS])

    def set_back(self, states: Sequence[Sequence[int]], reply: dict[int, int]) -> None:
        """Let rows continue from an earlier token: their slots, ``FIELDS`` up to ``alive``, and the tokens that come, by output."""
        packed = torch.tensor(states).to(self.device)
        self.state[: len(states) - 1, packed[0]] = packed[1:]
        if reply:
            at = torch.tensor([list(reply), list(reply.values())]).to(self.device)
            self.reply[at[0]] = at[1]

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy rows, cache and state, from slots to slots."""
        at = torch.tensor([source, target]).to(self.device)
        for row in self.rows:
            row[:, at[1]] = row[:, at[0]]
        self.state[:, at[1]] = self.state[:, at[0]]

    def view(self, slots: int, decoder: Decoder) -> StepState:
        """Return the attention's inputs and outputs in a step over the first ``slots`` slots."""
        by_name = dict(zip(FIELDS, self.state[:, :slots], strict=True))
        return StepState(
            keys=[row[0, :slots] for row in self.rows],
            values=[row[1, :slots] for row in self.rows],
            prompt_keys=[prompt[0] for prompt in self.prompts],
            prompt_values=[prompt[1] for prompt in self.prompts],
            prompt_length=self.prompt_length,
            member=self.member,
            rotation=[self.rotations[layer.rotation] for layer in decoder.w.layers],
            window=[layer.window or 0 for layer in decoder.w.layers],
            query_scale=decoder.w.query_scale,
            eps=decoder.w.eps,
            **{name: by_name[name] for name in ("position", "length", "place", "member_of")},
        )

"""The cache of the native engine: prompts once per group, completions row by row, both with room set aside.

All rows write at the same place in time, whatever their position: row r started at a time s_r, so its completion
lies at times s_r … now. Writing is then one copy per layer, and no mask is needed while all rows started together.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of L layers for P prompt places and S row slots.

    Each layer has a block of prompts (2, P, K, T, D), for keys and values of K key-value heads, and one of rows (2, S, K, T, D).
    ``keys[l]`` and ``values[l]`` are (S·K, T, D) views, ``prompt_keys[l]`` and ``prompt_values[l]`` (P·K, T, D).
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self._kind = {"dtype": dtype, "device": device}
        self.slots = self.places = self.prompt_size = 0
        self._row = [self._empty(0, 0) for _ in range(layers)]
        self._prompt = [self._empty(0, 0) for _ in range(layers)]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.prompt_keys: list[Tensor] = []
        self.prompt_values: list[Tensor] = []

    def _empty(self, rows: int, times: int) -> Tensor:
        # Zeros, not garbage: what a mask hides must still be finite.
        return torch.zeros(2, rows, self.kv_heads, times, self.head_dim, **self._kind)  # type: ignore[call-overload,no-any-return]

    @property
    def times(self) -> int:
        """Times that the row part has room for."""
        return self._row[0].shape[3]

    def set_slots(self, slots: int) -> None:
        """Use the first ``slots`` rows; make room if there are fewer."""
        if slots > self._row[0].shape[1]:
            self._resize_rows(slots, self.times)
        self.slots = slots
        self._refresh_rows()

    def grow_times(self, times: int) -> None:
        """Make room for ``times``; rows no longer in use are given up meanwhile."""
        self._resize_rows(self.slots, times)
        self._refresh_rows()

    def shift_times(self, by: int, until: int) -> None:
        """Forget the first ``by`` times: what lies at by … until moves to the front."""
        for row in self._row:
            row[:, :, :, : until - by] = row[:, :, :, by:until].clone()

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows at ``source`` over those at ``target``."""
        for row in self._row:
            row[:, target] = row[:, source]

    def set_prompts(self, places: int, size: int) -> None:
        """Make room for ``places`` prompts of up to ``size`` tokens, keeping what is there."""
        if places > self._prompt[0].shape[1] or size > self._prompt[0].shape[3]:
            old = self._prompt[0].shape
            for i, prompt in enumerate(self._prompt):
                room = self._empty(max(places, old[1]), max(size, old[3]))
                room[:, : old[1], :, : old[3]] = prompt
                self._prompt[i] = room
        self.places, self.prompt_size = places, size
        self._refresh_prompts()

    def write_prompts(self, layer: int, places: Tensor, keys_PKTD: Tensor, values_PKTD: Tensor) -> None:
        """Store the keys and values of newly computed prompts at ``places``."""
        size = keys_PKTD.shape[2]
        self._prompt[layer][0, places, :, :size] = keys_PKTD.to(self._prompt[layer].dtype)
        self._prompt[layer][1, places, :, :size] = values_PKTD.to(self._prompt[layer].dtype)

    def keep_prompts(self, places: Tensor) -> None:
        """Keep the prompts at ``places``, in this order."""
        for i, prompt in enumerate(self._prompt):
            self._prompt[i] = prompt[:, places]
        self.places = places.shape[0]
        self._refresh_prompts()

    def _resize_rows(self, slots: int, times: int) -> None:
        self.keys, self.values = [], []  # views, which would keep what each layer leaves
        for i, row in enumerate(self._row):
            room = self._empty(slots, times)
            rows, old = min(slots, row.shape[1]), min(times, row.shape[3])
            room[:, :rows, :, :old] = row[:, :rows, :, :old]
            self._row[i] = room

    def _refresh_rows(self) -> None:
        shape = (self.slots * self.kv_heads, self.times, self.head_dim)
        self.keys = [row[0, : self.slots].view(shape) for row in self._row]
        self.values = [row[1, : self.slots].view(shape) for row in self._row]

    def _refresh_prompts(self) -> None:
        count = self.places
        self.prompt_keys = [p[0, :count].flatten(0, 1)[:, : self.prompt_size] for p in self._prompt]
        self.prompt_values = [p[1, :count].flatten(0, 1)[:, : self.prompt_size] for p in self._prompt]

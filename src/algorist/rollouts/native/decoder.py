"""The decoder by hand: prompts in one pass, then one token per row and step with few, large operations.

Attention of a step has two parts under one softmax: over the prompt, whose keys are read once for the whole group, and
over the row's own completion. Shapes: S slots (rows of the batch), P prompts, K key-value heads, Q queries per such head,
T tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from algorist.models.precision import on_gpu
from algorist.rollouts.native.kv_cache import KVCache
from algorist.rollouts.native.weights import DecoderWeights, Layer, rms_norm


@dataclass(slots=True)
class GroupMap:
    """Index maps from slots to the grouped layout (prompt, head, row of the group, query).

    ``slot_query`` and ``slot_score`` list, for every place of the grouped layout, the row of the (S, N, D) queries and of
    the (S, K, Q) scores that belongs there; ``place`` lists for every (S, K, Q) its place. Rows of a group fewer than the
    largest group's are filled with slot 0. ``mask`` (P·K, 1, T) hides the padding of shorter prompts; None without any.
    """

    slot_query: Tensor
    slot_score: Tensor
    place: Tensor
    size: int
    mask: Tensor | None


@dataclass(slots=True)
class Sight:
    """View of a layer at a step: the times of completions from ``first`` on, less ``start_mask`` (S·K, 1, times).

    ``hidden_prompt`` (S, 1, T) tells the prompt's tokens that lie before the layer's window; None where none does.
    """

    first: int
    start_mask: Tensor | None
    hidden_prompt: Tensor | None = None


class Decoder:
    """Runs ``DecoderWeights`` against a ``KVCache``."""

    def __init__(self, weights: DecoderWeights, longest: int) -> None:
        """Prepare the rotations of positions 0 … longest - 1."""
        self.w = weights
        self.queries = weights.heads // weights.kv_heads
        self.width = weights.heads + weights.kv_heads
        device = weights.embedding_VH.device
        position = torch.arange(longest, device=device, dtype=torch.float32).unsqueeze(-1)
        angles = [(position * r.frequency, r.scale) for r in weights.rotations]
        self.rotations = [torch.polar(scale.expand_as(a), a).unsqueeze(1) for a, scale in angles]
        self.dtype = weights.dtype
        # A 16-bit cache would cost more accuracy than it saves time on a CPU.
        self.cache_dtype = cache_dtype(weights.dtype, device)
        self.cache = KVCache(
            len(weights.layers), weights.kv_heads, weights.head_dim, dtype=self.cache_dtype, device=device
        )

    def prefix(self, ids_C: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Compute tokens that several prompts begin with; return keys and values (1, K, C, D) of each layer."""
        layers: list[tuple[Tensor, Tensor]] = []
        self._whole(ids_C.unsqueeze(0), [], lambda index, k, v: layers.append((k, v)))
        return layers

    def prefill(
        self, ids_PT: Tensor, lengths_P: Tensor, places: Tensor, prefix: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Compute new prompts, padded on the right, store them at ``places`` of the cache, return logits (P, V).

        Args:
            ids_PT: The tokens that follow those of ``prefix``, at least one of each prompt.
            lengths_P: How many they are, without padding.
            places: Where whole prompts go.
            prefix: What ``prefix`` returned; empty for prompts that begin with nothing in common.
        """
        prompts, size = ids_PT.shape
        x = self._whole(ids_PT, prefix, lambda index, k, v: self.cache.write_prompts(index, places, k, v))
        last = torch.arange(prompts, device=x.device) * size + lengths_P - 1
        return self._logits(x[last])

    def _whole(
        self, ids_PT: Tensor, prefix: list[tuple[Tensor, Tensor]], keep: Callable[[int, Tensor, Tensor], None]
    ) -> Tensor:
        """Run whole prompts after a common prefix of C tokens; ``keep`` gets each layer's (P, K, C + T, D); return (P·T, H)."""
        w = self.w
        prompts, size = ids_PT.shape
        past = prefix[0][0].shape[2] if prefix else 0
        x = self._embed(ids_PT.reshape(-1))
        rotations = [self._scaled(r[past : past + size].repeat(prompts, 1, 1)) for r in self.rotations]
        masks = {window: self._seen(past, size, window) for window in {layer.window for layer in w.layers}}
        for index, layer in enumerate(w.layers):
            qk, v = self._project(layer, x, rotations[layer.rotation])
            seen = masks[layer.window]
            qk = qk.view(prompts, size, self.width, w.head_dim).transpose(1, 2)
            q, k = qk[:, : w.heads], qk[:, w.heads :]
            v = v.view(prompts, size, w.kv_heads, w.head_dim).transpose(1, 2).to(k.dtype)
            if prefix:
                k, v = (
                    torch.cat([p.expand(prompts, -1, -1, -1), own], 2)
                    for p, own in zip(prefix[index], (k, v), strict=True)
                )
            keep(index, k, v)
            k, v = k.repeat_interleave(self.queries, 1), v.repeat_interleave(self.queries, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=1.0)
            x = self._rest(layer, x, out.transpose(1, 2).reshape(prompts * size, -1))
        return x

    def _seen(self, past: int, size: int, window: int | None) -> Tensor | None:
        """Return the mask of the last ``size`` of past + size tokens; None where it is merely causal."""
        if not past and (window is None or size <= window):
            return None
        device = self.w.embedding_VH.device
        seen = torch.ones(size, past + size, dtype=torch.bool, device=device).tril(past)
        return seen if window is None else seen.triu(past - window + 1)

    def step(
        self,
        token_S: Tensor,
        position_S: Tensor,
        first: int,
        now: int,
        groups: GroupMap,
        start_mask: Tensor | None,
    ) -> Tensor:
        """Run one token per slot at time ``now``; completions are read from time ``first`` on; return logits (S, V).

        Args:
            token_S: The tokens sampled last.
            position_S: Their positions in the sequence.
            first: Earliest start of a row.
            now: Where their keys and values go.
            groups: The grouped layout.
            start_mask: (S·K, 1, now - first + 1), hides the times before a row's start; None when all started together.
        """
        x = self._embed(token_S)
        rotations = [self._scaled(r.index_select(0, position_S)) for r in self.rotations]
        sights: dict[int | None, Sight] = {}
        for index, layer in enumerate(self.w.layers):
            if layer.window not in sights:
                sights[layer.window] = self._sight(layer.window, Sight(first, start_mask), position_S, now)
            qk, v = self._project(layer, x, rotations[layer.rotation])
            out = self._attend(index, qk, v, now, groups, sights[layer.window])
            x = self._rest(layer, x, out)
        return self._logits(x)

    def _sight(self, window: int | None, every: Sight, position_S: Tensor, now: int) -> Sight:
        """Return the part of the others' view that a layer with a window has."""
        size, first, mask = self.cache.prompt_size, every.first, every.start_mask
        if window is None or size + now - first < window:
            return every
        begin = max(first, now - window + 1)
        hidden = torch.arange(size, device=position_S.device) <= (position_S - window).unsqueeze(-1)
        return Sight(begin, None if mask is None else mask[..., begin - first :], hidden.unsqueeze(1))

    def _embed(self, token_S: Tensor) -> Tensor:
        x = self.w.embedding_VH.index_select(0, token_S)
        return x if self.w.embedding_scale == 1.0 else x * self.w.embedding_scale

    def _project(self, layer: Layer, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys (S, H + K, D) and values (S, K, D); queries are scaled already."""
        w = self.w
        qkv = layer.qkv(self._normed(x, layer.attention_norm))
        qk = qkv[:, : self.width].float()
        if layer.qk_norm_ND is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, w.eps).mul_(layer.qk_norm_ND)
        pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * rotation
        turned = torch.view_as_real(pairs).flatten(-2)
        return turned.to(self.cache_dtype), qkv[:, self.width :]

    def _scaled(self, rotation_S1D: Tensor) -> Tensor:
        """Return the rotation of queries and keys, with the factor of the scores that the weights do not hold."""
        w = self.w
        if w.query_scale == 1.0:
            return rotation_S1D
        parts = (
            (rotation_S1D * w.query_scale).expand(-1, w.heads, -1),
            rotation_S1D.expand(-1, w.kv_heads, -1),
        )
        return torch.cat(parts, dim=1)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return (x if weight is None else rms_norm(x, weight, self.w.eps)).to(self.dtype)

    def _rest(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP, each added to the residual."""
        x = layer.output_add(attended.to(self.dtype), x)
        gate, up = layer.gate_up(self._normed(x, layer.mlp_norm))
        return layer.down_add(self.w.gated(gate, up), x)

    def _attend(self, index: int, qk: Tensor, v: Tensor, now: int, groups: GroupMap, sight: Sight) -> Tensor:
        w, cache, queries = self.w, self.cache, self.queries
        slots, heads, dim = qk.shape[0], w.heads, w.head_dim
        keys, values = cache.keys[index], cache.values[index]
        keys.select(1, now).view(slots, -1, dim).copy_(qk[:, heads:])
        values.select(1, now).view(slots, -1, dim).copy_(v)
        keys, values = keys[:, sight.first : now + 1], values[:, sight.first : now + 1]
        prompt_keys, prompt_values = cache.prompt_keys[index], cache.prompt_values[index]
        size = prompt_keys.shape[1]

        own_q = qk[:, :heads].reshape(-1, queries, dim)
        group_q = qk.view(-1, dim).index_select(0, groups.slot_query).view(prompt_keys.shape[0], -1, dim)
        own = _scores(own_q, keys, sight.start_mask)
        shared = _scores(group_q, prompt_keys, groups.mask)
        shared = shared.view(-1, size).index_select(0, groups.place)
        if sight.hidden_prompt is not None:
            shared.view(slots, -1, size).masked_fill_(sight.hidden_prompt, float("-inf"))
        scores = torch.cat([shared, own.view(shared.shape[0], -1)], dim=-1)
        weight = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)

        group_weight = weight[:, :size].index_select(0, groups.slot_score)
        out = torch.bmm(group_weight.view(group_q.shape[0], -1, size), prompt_values)
        out = out.view(-1, dim).index_select(0, groups.place).view(own_q.shape)
        own_weight = weight.view(own_q.shape[0], queries, -1)[:, :, size:]
        return torch.baddbmm(out, own_weight, values).view(slots, heads * dim)

    def _logits(self, x: Tensor) -> Tensor:
        return self.w.head(self._normed(x, self.w.final_norm))


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type of keys and values for products of type ``dtype``."""
    return torch.float32 if device.type == "cpu" else dtype


def _scores(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return query · keyᵀ + mask in float32: keys of some models are large, and 16-bit scores would be off by 10 % and more."""
    key = key.transpose(1, 2)
    if query.dtype == torch.float32:
        return torch.bmm(query, key) if mask is None else torch.baddbmm(mask, query, key)
    if on_gpu(query.device):
        scores = torch.bmm(query, key, out_dtype=torch.float32)
    else:
        scores = torch.bmm(query.float(), key.float())
    return scores if mask is None else scores.add_(mask)

"""Decoding with the model's own forward and cache: shared prefill, rows leave as they finish, any cached causal LM.

Used for what the hand-written decoder does not cover: RoPE scaling, soft-capping, mixtures of experts, attention sinks,
states that are no keys and values (convolutions, linear attention), other architectures.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from algorist.models.sharding import unwrap
from algorist.rollouts.base import Prompts
from algorist.rollouts.row_state import Rows
from algorist.rollouts.sampling import Wave, left_pad, plan_waves


def why_no_module_tier(model: Any) -> str | None:
    """Return the reason the model's own forward cannot use a shared cache, or None."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "its adapter is a learned prompt"
    names = _forward_names(model)
    if "past_key_values" not in names or "use_cache" not in names:
        return "its forward takes no past_key_values"
    if getattr(config, "use_cache", True) is None:
        return "its config has no cache"
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"its cache cannot be built ({type(error).__name__}: {error})"
    kinds = {type(layer) for layer in layers}
    if not all(
        issubclass(k, LinearAttentionLayer) or k in (DynamicLayer, DynamicSlidingWindowLayer) for k in kinds
    ):
        return f"its cache has layers of kind {', '.join(sorted(k.__name__ for k in kinds))}"
    return None


class ModuleTier:
    """Runs waves of rows through ``model.forward``."""

    name = "module"

    def __init__(self, model: Any, pad_token_id: int) -> None:
        self.model, self.pad_token_id = model, pad_token_id
        self._names = _forward_names(model)

    def run(self, prompts: Prompts, rows: Rows, group_size: int, token_budget: int | None) -> None:
        lengths = [len(p) for p in prompts]
        for wave in plan_waves(lengths, group_size, rows.params.max_new_tokens, token_budget, rows.context):
            self._run_wave([prompts[p] for p in wave.prompts], wave, rows)

    def _run_wave(self, prompts: list[Sequence[int]], wave: Wave, rows: Rows) -> None:
        device = rows.device
        ids, mask = left_pad(prompts, self.pad_token_id, device)
        padded = bool((mask == 0).any())
        position = (mask.cumsum(-1) - 1).clamp_(min=0)
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids, mask if padded else None, position, cache)
        prompt_of_row = torch.tensor(wave.prompt_of_row, device=device)
        if prompt_of_row.tolist() != list(range(len(prompts))):
            cache.reorder_cache(prompt_of_row)  # type: ignore[arg-type]
        rows.admit(wave.rows)
        logits = logits.index_select(0, prompt_of_row)
        position = position[prompt_of_row, -1:] + 1
        room = rows.params.max_new_tokens
        mask = torch.cat([mask[prompt_of_row], mask.new_ones(len(rows), room)], dim=1)
        filled = ids.shape[1]
        while True:
            token, done = rows.take(logits)
            if bool(done.any()):
                rows.finish(done.nonzero().view(-1))
                alive = (~done).nonzero().view(-1)
                rows.keep(alive)
                if not len(rows):
                    return
                cache.reorder_cache(alive)  # type: ignore[arg-type]
                token, position, mask = token[alive], position[alive], mask[alive]
            filled += 1
            logits = self._forward(token.unsqueeze(1), mask[:, :filled] if padded else None, position, cache)
            position = position + 1

    def _forward(self, ids: Tensor, mask: Tensor | None, position: Tensor, cache: DynamicCache) -> Tensor:
        arguments: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if "position_ids" in self._names:
            arguments["position_ids"] = position
        if "logits_to_keep" in self._names:
            arguments["logits_to_keep"] = 1
        return self.model(input_ids=ids, **arguments).logits[:, -1]


def _forward_names(model: Any) -> set[str]:
    return set(inspect.signature(unwrap(model).forward).parameters)

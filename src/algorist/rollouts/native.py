"""The native engine: each distinct prompt computed once, rows leave when they finish, log-probs come back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from algorist.errors import EngineError
from algorist.rollouts.base import Completion, SamplingParams
from algorist.rollouts.module_tier import ModuleTier, why_no_module_tier
from algorist.rollouts.setting import ModelSetting

log = logging.getLogger("algorist.rollouts")


class NativeEngine:
    """Samples groups from a Hugging Face causal LM without a server.

    Args:
        model: The policy (a PreTrainedModel or a PeftModel); its weights are read as they are at each call.
        tokenizer: Needed for stop strings (a tokenizer or a function ids → text); gives end and pad tokens.
        eos_token_ids: Default: those of the generation config and of the tokenizer.
        pad_token_id: Default: the tokenizer's, or 0 (it is always masked).
        token_budget: Most tokens held in the cache at a time; None takes what the memory allows.
        tier: ``decoder`` (hand-written decode), ``module`` (the model's own forward) or ``auto``.

    Raises:
        EngineError: The model has no usable cache (take ``make_engine``, which falls back), or the tier does not fit.
    """

    name = "native"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        eos_token_ids: Sequence[int] | None = None,
        pad_token_id: int | None = None,
        token_budget: int | None = None,
        tier: str = "auto",
    ) -> None:
        self.model, self.token_budget = model, token_budget
        self.setting = ModelSetting(model, tokenizer, eos_token_ids, pad_token_id)
        reason = why_no_module_tier(model)
        if reason:
            raise EngineError(f"the native engine cannot run {type(model).__name__}: {reason}; take engine=transformers")
        self._tier = ModuleTier(model, self.setting.pad_token_id)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        params: SamplingParams,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        """Sample ``group_size`` completions per prompt; see ``RolloutEngine.generate``."""
        if not len(prompts):
            return []
        rows = self.setting.new_rows(prompts, group_size, params, on_finished)
        with self.setting.generating(), torch.no_grad():
            self._tier.run(prompts, rows, group_size, self.token_budget)
        return rows.completions()

"""The fallback: ``model.generate`` runs the model, our sampler chooses the tokens.

Every row stays in the batch until the last one is finished, so this is the slow engine; it covers whatever
``generate`` covers. The tokens are chosen in a logits processor, so that seeds, filters, stop rules and log-probs mean the
same as in every other engine, whatever the model's generation config says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from algorist.errors import EngineError
from algorist.models.sharding import is_sharded, unwrap, why_not_by_forward
from algorist.rollouts.base import Completions, Prompts, SamplingParams, Turns
from algorist.rollouts.model_info import ModelSetting
from algorist.rollouts.row_state import Rows
from algorist.rollouts.sampling import left_pad, plan_waves


class TransformersEngine:
    """Samples through ``model.generate``.

    Args:
        model: Any causal language model of transformers or PEFT.
        tokenizer: Needed for stop strings; gives the end and pad tokens together with the model's generation config.
        token_budget: Most cached tokens at a time; None takes all rows together.
        on_token: Called with each token of the first unfinished row, as it is chosen.
    """

    name = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        token_budget: int | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        self.model, self.token_budget, self.on_token = model, token_budget, on_token
        self.setting = ModelSetting(model, tokenizer)
        self.share, self.tokens = self.setting.share, self.setting.tokens

    def generate(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Completions:
        if not len(prompts):
            return []
        if is_sharded(self.model):
            raise EngineError(why_not_by_forward(self.model, "engine=transformers"))
        rows = self.setting.new_rows(prompts, group_size, params, turns)
        lengths = [len(p) for p in prompts]
        waves = plan_waves(lengths, group_size, params.max_new_tokens, self.token_budget, rows.context)
        with self.setting.generating(), torch.no_grad():
            for wave in waves:
                ids, mask = left_pad(
                    [prompts[row // group_size] for row in wave.rows], self.setting.pad_token_id, rows.device
                )
                rows.admit(wave.rows)
                self._run_wave(ids, mask, rows)
        return rows.completions()

    def _run_wave(self, ids: Tensor, mask: Tensor, rows: Rows) -> None:
        chooser = _Chooser(rows, ids.shape[0], ids.device, self.on_token)
        # The model's own generation config would fill what ours leaves open (repetition penalty, end tokens, …).
        neutral = GenerationConfig(
            do_sample=False,
            max_new_tokens=rows.params.max_new_tokens,
            pad_token_id=self.setting.pad_token_id,
            use_cache=getattr(self.model.config, "use_cache", True) is not False,
        )
        base = unwrap(self.model)
        own, base.generation_config = base.generation_config, neutral
        try:
            self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=neutral,
                logits_processor=LogitsProcessorList([chooser]),
                stopping_criteria=StoppingCriteriaList([_AllDone(chooser)]),
            )
        finally:
            base.generation_config = own
        if len(rows):
            raise EngineError(
                f"model.generate ended with {len(rows)} rows unfinished after {ids.shape[1]} prompt tokens"
            )


class _Chooser(LogitsProcessor):
    """Chooses the next token of every unfinished row and leaves it as the only possible one."""

    def __init__(
        self, rows: Rows, size: int, device: torch.device, on_token: Callable[[int], None] | None
    ) -> None:
        self.rows, self.on_token = rows, on_token
        self.place = torch.arange(size, device=device)
        self.finished = torch.zeros(size, dtype=torch.bool, device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token, done = self.rows.take(scores[self.place].float())
        if self.on_token:
            self.on_token(int(token[0]))
        only = torch.full_like(scores, float("-inf"))
        only[:, 0] = 0.0
        only[self.place, 0] = float("-inf")
        only[self.place, token] = 0.0
        if bool(done.any()):
            self.rows.finish(done.nonzero().view(-1))
            self.finished[self.place[done]] = True
            self.rows.keep((~done).nonzero().view(-1))
            self.place = self.place[~done]
        return only


class _AllDone(StoppingCriteria):
    def __init__(self, chooser: _Chooser) -> None:
        self.chooser = chooser

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self.chooser.finished.clone()

"""The engine for any causal decoder: the module's own forward with a cache, each prompt prefilled once.

A group's rows share one prefill: the prompt's keys and values are computed once and repeated for the group. Finished
rows leave the batch at once, so that stragglers do not hold the others. Sampler log-probs come from the
temperature-scaled, unfiltered distribution, which is what the loss uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from algorist.errors import EngineError
from algorist.rollouts.base import Completion, SamplingParams
from algorist.rollouts.sampling import sample_tokens


class ModuleEngine:
    """Samples through the module's forward and a ``DynamicCache``.

    Args:
        model: Any causal language model of transformers, with or without a PEFT adapter.
        tokenizer: Decodes for stop strings; gives the padding token and the default stop token.
        token_budget: Rows × (prompt + completion) tokens that are in the cache at once.
    """

    name = "module"

    def __init__(self, model: Any, tokenizer: Any, *, token_budget: int = 262_144) -> None:
        self.model, self.tokenizer, self.token_budget = model, tokenizer, token_budget
        config_eos = getattr(model.generation_config, "eos_token_id", None)
        listed = config_eos if isinstance(config_eos, list) else [config_eos]
        self.stop_ids = {i for i in (*listed, tokenizer.eos_token_id) if i is not None}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        params: SamplingParams,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        """See ``RolloutEngine.generate``."""
        self._check(prompts, group_size, params)
        generator = None
        if params.seed is not None:
            generator = torch.Generator(self.model.device).manual_seed(params.seed)
        results: list[list[Completion]] = [[] for _ in prompts]
        with _evaluation_mode(self.model), torch.no_grad():
            for chunk in self._chunks(prompts, group_size, params):
                rows = self._decode([list(prompts[i]) for i in chunk], group_size, params, generator, on_finished)
                for position, index in enumerate(chunk):
                    results[index] = rows[position * group_size : (position + 1) * group_size]
        return results

    def _check(self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if group_size < 1:
            raise EngineError(f"group_size is {group_size}; expected at least 1")
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise EngineError(f"prompt {index} is empty; expected at least one token")
            if limit and len(prompt) + params.max_new_tokens > limit:
                raise EngineError(
                    f"prompt {index} has {len(prompt)} tokens; with max_new_tokens={params.max_new_tokens} that is more "
                    f"than the model's context of {limit}; shorten the prompt or max_new_tokens"
                )
            if len(prompt) + params.max_new_tokens > self.token_budget:
                raise EngineError(
                    f"prompt {index} needs {len(prompt) + params.max_new_tokens} cached tokens for one row, more than the "
                    f"token budget of {self.token_budget}; raise it or shorten the completion"
                )

    def _chunks(self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams) -> Iterator[list[int]]:
        """Yield prompt positions, the longest together, within the token budget."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        chunk: list[int] = []
        for index in order:
            width = len(prompts[index]) + params.max_new_tokens
            if chunk and (len(chunk) + 1) * group_size * width > self.token_budget:
                yield chunk
                chunk = []
            chunk.append(index)
        if chunk:
            yield chunk

    def _decode(
        self,
        prompts: list[list[int]],
        group_size: int,
        params: SamplingParams,
        generator: torch.Generator | None,
        on_finished: Callable[[int], None] | None,
    ) -> list[Completion]:
        device = self.model.device
        cache, logits, mask = self._prefill(prompts)
        rows = torch.arange(len(prompts), device=device).repeat_interleave(group_size)
        if group_size > 1:
            cache.batch_repeat_interleave(group_size)
        logits, mask = logits[rows], mask[rows]
        position = mask.sum(1)
        alive = torch.arange(len(rows), device=device)
        tokens = torch.zeros(len(rows), params.max_new_tokens, dtype=torch.long, device=device)
        log_probs = torch.zeros(len(rows), params.max_new_tokens, device=device)
        lengths = [params.max_new_tokens] * len(rows)
        stopped = [False] * len(rows)
        stops = torch.tensor(sorted(self.stop_ids | set(params.stop_token_ids)), device=device)
        for step in range(params.max_new_tokens):
            blocked = stops if step < params.min_new_tokens else None
            chosen, chosen_log_probs = sample_tokens(logits, params, generator, blocked=blocked)
            tokens[alive, step], log_probs[alive, step] = chosen, chosen_log_probs
            done = torch.isin(chosen, stops) | self._met_stop_string(tokens, alive, step, params)
            for row in alive[done].tolist():
                lengths[row], stopped[row] = step + 1, True
            if on_finished and bool(done.any()):
                on_finished(int(done.sum()))
            if bool(done.all()) or step + 1 == params.max_new_tokens:
                break
            keep = (~done).nonzero().squeeze(1)
            if len(keep) < len(alive):
                cache.batch_select_indices(keep)
                alive, chosen, mask, position = alive[keep], chosen[keep], mask[keep], position[keep]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            out = self.model(
                input_ids=chosen[:, None],
                attention_mask=mask,
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            logits, position = out.logits[:, -1], position + 1
        return [
            Completion(tokens[i, :n].tolist(), log_probs[i, :n].tolist(), "stop" if end else "length")
            for i, (n, end) in enumerate(zip(lengths, stopped, strict=True))
        ]

    def _prefill(self, prompts: list[list[int]]) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
        device, width = self.model.device, max(map(len, prompts))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        out = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return cache, out.logits[:, -1], mask

    def _met_stop_string(self, tokens: torch.Tensor, alive: torch.Tensor, step: int, params: SamplingParams) -> torch.Tensor:
        if not params.stop_strings or step + 1 < params.min_new_tokens:
            return torch.zeros(len(alive), dtype=torch.bool, device=tokens.device)
        start = max(0, step + 1 - 32)
        texts = self.tokenizer.batch_decode(tokens[alive, start : step + 1])
        return torch.tensor([any(s in t for s in params.stop_strings) for t in texts], device=tokens.device)


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    """Switch dropout off and put every module back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

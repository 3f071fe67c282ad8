"""MLX as a rollout engine: mlx-lm's models with their own batched caches, each distinct prompt computed once.

Tested with mlx 0.32 and mlx-lm 0.32 on a Linux CPU (``make test-mlx``); on a Mac it was not run yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import torch
from mlx_lm.models.cache import make_prompt_cache

from algorist.errors import EngineError
from algorist.extensions.mlx.sampling import choose
from algorist.extensions.mlx.weights import OTHERWISE, first_line, mirror_of
from algorist.models.precision import HALF
from algorist.models.sharding import is_sharded
from algorist.rollouts.base import Completions, Prompts, SamplingParams, Turns
from algorist.rollouts.model_info import ModelSetting
from algorist.rollouts.native.engine import affordable_tokens
from algorist.rollouts.row_state import Rows
from algorist.rollouts.sampling import Wave, plan_waves

PREFILL_TOKENS = 8192
_COMPARED = (5, 3)
_GAP, _GAP_IN_16_BIT = 1e-4, 0.3
"""Accepted mean difference of log-probs between MLX and the model's own forward."""


class _OnHost(ModelSetting):
    """The properties of a model whose rows are followed on the CPU, wherever it lies."""

    device = torch.device("cpu")  # type: ignore[assignment]


class MLXEngine:
    """Samples groups through mlx-lm's model of the same architecture, given the policy's weights before each call.

    Rows run in waves that fit the budget; a finished row leaves its wave when an eighth of it has.

    Args:
        model: The policy; active adapters are merged into the copies that MLX gets.
        tokenizer: Needed for stop strings; gives end tokens together with the model's generation config.
        token_budget: Most tokens held in the cache at a time; None takes what the memory allows.

    Raises:
        EngineError: mlx-lm has no such model, or one whose log-probs are others than the model's own.
    """

    name = "mlx"

    def __init__(self, model: Any, tokenizer: Any = None, *, token_budget: int | None = None) -> None:
        if is_sharded(model):
            raise EngineError(f"a model in parts on several processes cannot be handed to MLX; {OTHERWISE}")
        self.model, self.token_budget = model, token_budget
        self.setting = _OnHost(model, tokenizer)
        self.share, self.tokens = self.setting.share, self.setting.tokens
        self.mirror = mirror_of(model)
        if not self.mirror.agrees:
            self._compare()

    def generate(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Completions:
        if not len(prompts):
            return []
        rows = self.setting.new_rows(prompts, group_size, params, turns)
        rows.choose = choose
        self.mirror.refresh(self.model)
        lengths = [len(p) for p in prompts]
        longest = max(lengths) + params.max_new_tokens
        if self.mirror.window and longest > self.mirror.window:
            raise EngineError(
                f"mlx-lm's {self.mirror.kind} has other attention windows than the policy from {self.mirror.window} tokens on, and "
                f"rows may have {longest}; {OTHERWISE}"
            )
        budget = self.token_budget or affordable_tokens(self.model, self.setting.device, longest)
        try:
            for wave in plan_waves(lengths, group_size, params.max_new_tokens, budget, rows.context):
                self._run([prompts[p] for p in wave.prompts], wave, rows)
        finally:
            mx.clear_cache()  # the update's memory is the same
        return rows.completions()

    def _run(self, prompts: list[Sequence[int]], wave: Wave, rows: Rows) -> None:
        cache = self._prefill(prompts)
        logits = self._forward([p[-1] for p in prompts], cache)
        if wave.prompt_of_row != list(range(len(prompts))):
            of_row = mx.array(wave.prompt_of_row)
            logits = logits[of_row]
            _keep(cache, of_row)
        rows.admit(wave.rows)
        while True:
            token, done = rows.take(logits)
            if bool(done.any()):
                rows.finish(done.nonzero().view(-1))
                alive = rows.alive_S.nonzero().view(-1)
                if not len(alive):
                    rows.set_slots(0)
                    return
                if 8 * len(alive) <= 7 * len(rows):
                    rows.keep(alive)
                    _keep(cache, mx.array(alive.numpy()))
                    token = token[alive]
            logits = self._forward(token.tolist(), cache)

    def _prefill(self, prompts: list[Sequence[int]]) -> list[Any]:
        """Return mlx-lm's caches after all tokens of the prompts but the last ones; they are padded on the right meanwhile."""
        sizes = [len(p) - 1 for p in prompts]
        width = max(sizes)
        cache = [c.merge([c] * len(prompts)) for c in make_prompt_cache(self.mirror.model)]
        for layer in cache:
            layer.prepare(lengths=sizes, right_padding=[width - size for size in sizes])
        ids = mx.array([[*p[:-1], *[0] * (width - len(p) + 1)] for p in prompts])
        step = max(1, PREFILL_TOKENS // len(prompts))
        for begin in range(0, width, step):
            self.mirror(ids[:, begin : begin + step], cache)  # the head is not computed: nobody asks for it
            mx.eval([layer.state for layer in cache])
        for layer in cache:
            layer.finalize()
        return cache

    def _forward(self, tokens: list[int], cache: list[Any]) -> mx.array:
        """Return the logits (S, V) after one more token a row, not computed yet."""
        return self.mirror(mx.array(tokens)[:, None], cache)[:, -1]

    @torch.no_grad()
    def _compare(self) -> None:
        """Refuse a model of mlx-lm that is not the policy's: log-probs of two short rows, once for a model."""
        prompts = [[7 * i % self.setting.vocabulary for i in range(1, 1 + size)] for size in _COMPARED]
        greedy = SamplingParams(temperature=0.0, max_new_tokens=_COMPARED[-1], seed=0)
        try:
            groups = self.generate(prompts, 1, greedy)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"mlx-lm cannot sample this {self.mirror.kind} in a batch ({first_line(error)}); {OTHERWISE}"
            ) from error
        gaps, own = [], ModelSetting(self.model)
        with own.generating():
            for prompt, (completion,) in zip(prompts, groups, strict=True):
                ids = torch.tensor([prompt + completion.token_ids], device=own.device)
                logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().cpu()
                expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids).unsqueeze(1))[
                    :, 0
                ]
                gaps.append((torch.tensor(completion.log_probs) - expected).abs())
        gap = float(torch.cat(gaps).mean())
        if not gap <= (_GAP_IN_16_BIT if self.mirror.dtype in HALF else _GAP):
            raise EngineError(
                f"mlx-lm's {self.mirror.kind} is not the model that torch trains: its log-probs are {gap:.1e} from its own "
                f"forward's; {OTHERWISE}"
            )
        self.mirror.agrees = True


def _keep(cache: list[Any], rows: mx.array) -> None:
    """Keep these rows of the caches, in this order; a row may be kept several times."""
    for layer in cache:
        layer.filter(rows)

"""Properties of a model that engines need: context, vocabulary, end tokens, device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from algorist.errors import EngineError
from algorist.models.modes import context_of, eval_mode
from algorist.models.precision import compute_dtype, weight_dtype
from algorist.rollouts.base import Prompts, SamplingParams, Turns
from algorist.rollouts.row_state import Rows, check_request


class ModelSetting:
    """Properties read from the model, its generation config and the tokenizer.

    ``eos_token_ids`` are the end tokens of the generation config and of the tokenizer, together.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model
        self.context = context_of(model)
        self.vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        self.decode = _decoder(tokenizer)
        self._ids = 1 + max(tokenizer.get_vocab().values()) if hasattr(tokenizer, "get_vocab") else None
        sources = (getattr(model, "generation_config", None), tokenizer)
        ends = [i for source in sources for i in _as_list(getattr(source, "eos_token_id", None))]
        if not all(isinstance(i, int) for i in ends):
            raise EngineError(
                f"eos_token_id is {ends[:8]} in the model's generation_config.json and tokenizer; expected whole numbers"
            )
        self.eos_token_ids = tuple(dict.fromkeys(ends))
        self._rows: weakref.ref[Rows] | None = None
        self.pad_token_id = int(getattr(tokenizer, "pad_token_id", None) or 0)  # always masked

    @property
    def device(self) -> torch.device:
        """Device of the embeddings."""
        return self.model.get_input_embeddings().weight.device

    def new_rows(
        self, prompts: Prompts, group_size: int, params: SamplingParams, turns: Turns | None = None
    ) -> Rows:
        """Check the request and return its bookkeeping."""
        check_request(prompts, group_size, self.context, self.vocabulary)
        rows = Rows(
            prompts,
            group_size,
            params,
            stop_ids=[*self.eos_token_ids, *params.stop_token_ids],
            vocabulary=self._logit_count(),
            ids=self._ids,
            context=self.context,
            device=self.device,
            decode=self.decode,
            turns=turns,
        )
        self._rows = weakref.ref(rows)
        return rows

    def share(self) -> float:
        """Fraction of the running ``generate`` call that is done, between 0 and 1."""
        rows = self._rows() if self._rows else None
        return rows.share if rows is not None else 0.0  # no slots, no length

    def tokens(self) -> int:
        """Tokens sampled so far by the running ``generate`` call."""
        rows = self._rows() if self._rows else None
        return rows.tokens if rows is not None else 0

    def _logit_count(self) -> int:
        """The head may be larger than the vocabulary (padded to a round number)."""
        weight = getattr(self.model.get_output_embeddings(), "weight", None)
        return self.vocabulary if weight is None or weight.dim() != 2 else weight.shape[0]

    @contextmanager
    def generating(self, *, by_hand: bool = False) -> Iterator[None]:
        """Dropout off, products in the compute type; every submodule's training flag comes back as it was.

        Args:
            by_hand: Without autocast: the model's own forward is not called.
        """
        dtype = compute_dtype(self.model)
        mixed = not by_hand and dtype != weight_dtype(self.model)
        autocast = torch.autocast(self.device.type, dtype=dtype if mixed else None, enabled=mixed)
        with eval_mode(self.model), autocast:
            yield


def _decoder(tokenizer: Any) -> Callable[[list[int]], str] | None:
    """Return ids → text: from a tokenizer, or the callable itself."""
    if tokenizer is None:
        return None
    if hasattr(tokenizer, "decode"):
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    return tokenizer if callable(tokenizer) and not isinstance(tokenizer, nn.Module) else None


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]

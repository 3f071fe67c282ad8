"""The bookkeeping of one ``generate`` call: which rows exist, what they have sampled, which are finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from algorist.errors import EngineError
from algorist.rollouts.base import Completion, SamplingParams
from algorist.rollouts.sampling import draw_uniforms, sample
from algorist.rollouts.stopping import StopStrings


def check_request(
    prompts: Sequence[Sequence[int]], group_size: int, context: int | None, vocabulary: int
) -> None:
    """Refuse prompts that cannot be completed.

    Raises:
        EngineError: Empty prompt, prompt as long as the context, token id outside the vocabulary, group_size below 1.
    """
    if group_size < 1:
        raise EngineError(f"group_size is {group_size}; expected at least 1")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise EngineError(
                f"prompt {index} is empty; a model needs at least one token to start from (a BOS token)"
            )
        if context is not None and len(prompt) >= context:
            raise EngineError(
                f"prompt {index} has {len(prompt)} tokens, but the model's context holds {context} with the completion; "
                f"leave out prompts longer than {context - 1} tokens"
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocabulary:
            raise EngineError(
                f"prompt {index} holds token id {low if low < 0 else high}; expected 0 … {vocabulary - 1}: was it encoded "
                "with another model's tokenizer?"
            )


class Rows:
    """All rows of a request; the engine keeps the active ones in any order and calls ``take`` once per step.

    Row r is completion r % group_size of prompt r // group_size. ``next_R`` holds the place of each active row's next
    token in the flat (rows x max_new_tokens) output.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        params: SamplingParams,
        *,
        stop_ids: Sequence[int],
        vocabulary: int,
        context: int | None,
        device: torch.device,
        decode: Callable[[list[int]], str] | None = None,
        on_finished: Callable[[int], None] | None = None,
    ) -> None:
        self.params, self.group_size, self.device = params, group_size, device
        self.count = len(prompts) * group_size
        self._on_finished = on_finished
        self._steps = params.max_new_tokens
        room = [self._steps if context is None else min(self._steps, context - len(p)) for p in prompts]
        self.limit_R = torch.tensor(room).repeat_interleave(group_size)
        self._uniform = draw_uniforms(self.count, self._steps, params.seed).view(-1).to(device)
        self._token = torch.zeros(self.count * self._steps, dtype=torch.int64, device=device)
        self._log_prob = torch.zeros(self.count * self._steps, device=device)
        self._is_stop_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._is_stop_V[[i for i in stop_ids if 0 <= i < vocabulary]] = True
        self._length_R = [0] * self.count
        self._strings = StopStrings(params.stop_strings, decode) if params.stop_strings else None
        self.row_R = torch.zeros(0, dtype=torch.int64, device=device)
        self.next_R = torch.zeros(0, dtype=torch.int64, device=device)
        self.end_R = torch.zeros(0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return self.row_R.shape[0]

    def admit(self, rows: Sequence[int]) -> None:
        """Append rows to the active ones."""
        added = torch.tensor(list(rows), dtype=torch.int64)
        start = added * self._steps
        end = start + self.limit_R[added]
        self.row_R = torch.cat([self.row_R, added.to(self.device)])
        self.next_R = torch.cat([self.next_R, start.to(self.device)])
        self.end_R = torch.cat([self.end_R, end.to(self.device)])

    def keep(self, index: Tensor) -> None:
        """Keep the active rows at ``index``, in this order."""
        self.row_R, self.next_R, self.end_R = self.row_R[index], self.next_R[index], self.end_R[index]

    def take(self, logits_RV: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Sample the next token of the active rows from ``start`` on.

        Returns:
            Tokens (R,) and done (R,) bool: finished by a stop token, a stop string or length.
        """
        params, next_R = self.params, self.next_R[start:]
        if params.min_new_tokens:
            early_R = next_R - self.row_R[start:] * self._steps < params.min_new_tokens
            token_R, log_prob_R = self._sample_not_stopping(logits_RV, next_R, early_R)
        else:
            early_R = None
            token_R, log_prob_R = sample(logits_RV, self._uniform.index_select(0, next_R), params)
        self._token.index_copy_(0, next_R, token_R)
        self._log_prob.index_copy_(0, next_R, log_prob_R)
        next_R += 1
        done_R = self._is_stop_V.index_select(0, token_R)
        if self._strings is not None:
            done_R = done_R | self._string_stops(token_R, start, early_R)
        return token_R, done_R.logical_or_(next_R >= self.end_R[start:])

    def _sample_not_stopping(
        self, logits_RV: Tensor, next_R: Tensor, early_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sample with stop tokens excluded in the rows that are still too short; log-probs stay unfiltered."""
        uniform_R = self._uniform.index_select(0, next_R)
        full_RV = logits_RV.float().clone()
        barred_RV = full_RV.masked_fill(early_R.unsqueeze(-1) & self._is_stop_V, float("-inf"))
        token_R, _ = sample(barred_RV, uniform_R, self.params)
        scaled_RV = full_RV.div_(self.params.temperature or 1.0)
        chosen_R = scaled_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1)
        return token_R, chosen_R - scaled_RV.logsumexp(-1)

    def _string_stops(self, token_R: Tensor, start: int, early_R: Tensor | None) -> Tensor:
        assert self._strings is not None
        rows, ends, tokens = self.row_R[start:].tolist(), self.next_R[start:].tolist(), token_R.tolist()
        early = early_R.tolist() if early_R is not None else [False] * len(tokens)
        found = [False] * len(tokens)
        for i, token in enumerate(tokens):
            if not early[i] and self._strings.may_end(token):
                begin = max(rows[i] * self._steps, ends[i] - self._strings.window)
                found[i] = self._strings.just_ended(self._token[begin : ends[i]].tolist())
        return torch.tensor(found, device=self.device)

    def finish(self, index: Tensor) -> list[int]:
        """Record that the active rows at ``index`` are finished; return their row numbers."""
        rows, ends = self.row_R[index].tolist(), self.next_R[index].tolist()
        for row, end in zip(rows, ends, strict=True):
            self._length_R[row] = end - row * self._steps
        if self._on_finished is not None and rows:
            self._on_finished(len(rows))
        return rows

    def completions(self) -> list[list[Completion]]:
        """Return what was sampled, grouped by prompt."""
        tokens = self._token.view(self.count, self._steps).cpu()
        log_probs = self._log_prob.view(self.count, self._steps).cpu()
        stops = self._is_stop_V.cpu()
        result: list[list[Completion]] = []
        for row, length in enumerate(self._length_R):
            ids = tokens[row, :length].tolist()
            stopped = bool(stops[ids[-1]]) or (
                self._strings is not None and self._strings.just_ended(ids[-self._strings.window :])
            )
            if row % self.group_size == 0:
                result.append([])
            result[-1].append(
                Completion(ids, log_probs[row, :length].tolist(), "stop" if stopped else "length")
            )
        return result

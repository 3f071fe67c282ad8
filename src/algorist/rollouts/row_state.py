"""The bookkeeping of one ``generate`` call: which rows exist, what they have sampled, which are finished."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from algorist.errors import EngineError
from algorist.rollouts.base import Completion, Completions, OutOfTime, Prompts, SamplingParams, Turns
from algorist.rollouts.sampling import StopStrings, draw_uniforms, sample_longer
from algorist.rollouts.turns import OpenTurns


def check_request(prompts: Prompts, group_size: int, context: int | None, vocabulary: int) -> None:
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
    """All rows of a request and the slots in which some of them run.

    Row r is completion r % group_size of prompt r // group_size. Each slot holds a running row or is idle (``alive_S`` 0).
    ``next_S`` is the place of the slot's next token in the flat (rows x max_new_tokens) output; idle slots write to one
    place after its end. ``choose`` samples, as ``sample_longer`` does; an engine whose logits are no tensors has its own.
    """

    def __init__(
        self,
        prompts: Prompts,
        group_size: int,
        params: SamplingParams,
        *,
        stop_ids: Sequence[int],
        vocabulary: int,
        context: int | None,
        device: torch.device,
        ids: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.ids = ids
        self.params, self.group_size, self.device, self.context = params, group_size, device, context
        self.count = len(prompts) * group_size
        self._steps = params.max_new_tokens
        room = [self._steps if context is None else min(self._steps, context - len(p)) for p in prompts]
        self._limit_R = torch.tensor(room).repeat_interleave(group_size)
        self._behind = self.count * self._steps
        uniform = draw_uniforms(self.count, self._steps, params.seed).view(-1)
        self._uniform = torch.cat([uniform, uniform.new_zeros(1)]).to(device)
        self._token = torch.zeros(self._behind + 1, dtype=torch.int64, device=device)
        self._log_prob = torch.zeros(self._behind + 1, device=device)
        self._is_stop_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._is_stop_V[[i for i in stop_ids if 0 <= i < vocabulary]] = True
        self._length_R = [0] * self.count
        self.tokens, self._running, self._spared = 0, 0, 0
        self.choose: Callable[..., tuple[Tensor, Tensor]] = sample_longer
        self._strings = StopStrings(params.stop_strings, decode) if params.stop_strings else None
        self._tails: dict[int, deque[int]] = {}
        self.turns = OpenTurns(turns, decode, self.count) if turns is not None else None
        self.row_S = self.next_S = self.end_S = self.alive_S = torch.zeros(
            0, dtype=torch.int64, device=device
        )

    def __len__(self) -> int:
        return self.row_S.shape[0]

    def admit(self, rows: Sequence[int]) -> None:
        """Start ``rows`` in new slots after the present ones."""
        slots = torch.arange(len(self), len(self) + len(rows), device=self.device)
        self.set_slots(len(self) + len(rows))
        self.start(slots, rows)

    def set_slots(self, count: int) -> None:
        """Cut or extend the slots to ``count``; new ones are idle."""
        extra = torch.zeros(max(0, count - len(self)), dtype=torch.int64, device=self.device)
        self.row_S = torch.cat([self.row_S[:count], extra])
        self.next_S = torch.cat([self.next_S[:count], extra + self._behind])
        self.end_S = torch.cat([self.end_S[:count], extra + self._behind + 1])
        self.alive_S = torch.cat([self.alive_S[:count], extra])

    def start(self, slots: Tensor, rows: Sequence[int]) -> None:
        """Start ``rows`` in idle ``slots``."""
        self._running += len(rows)
        added = torch.tensor(list(rows), dtype=torch.int64)
        begin = added * self._steps
        self.row_S[slots] = added.to(self.device)
        self.next_S[slots] = begin.to(self.device)
        self.end_S[slots] = (begin + self._limit_R[added]).to(self.device)
        self.alive_S[slots] = 1

    def keep(self, slots: Tensor) -> None:
        """Keep the slots at ``slots``, in this order."""
        self.row_S, self.next_S = self.row_S[slots], self.next_S[slots]
        self.end_S, self.alive_S = self.end_S[slots], self.alive_S[slots]

    def take(self, logits_SV: Tensor) -> tuple[Tensor, Tensor]:
        """Sample the next token of every slot.

        Returns:
            Tokens (S,) and done (S,) bool: the row has just finished by a stop token, a stop string or its length.
        """
        params, next_S = self.params, self.next_S
        self.check_time()
        self.tokens += min(len(self), self._running)  # idle slots sample nothing
        early_S, uniform_S = None, self._uniform.index_select(0, next_S)
        if params.min_new_tokens:
            early_S = next_S - self.row_S * self._steps < params.min_new_tokens
        token_S, log_prob_S = self.choose(logits_SV, uniform_S, params, early_S, self._is_stop_V, self.ids)
        forced = self._forced()
        if forced:
            slots = torch.tensor(list(forced), device=self.device)
            token_S[slots] = torch.tensor(list(forced.values()), device=self.device)
            log_prob_S[slots] = 0.0
        self._token.index_copy_(0, next_S, token_S)
        self._log_prob.index_copy_(0, next_S, log_prob_S)
        next_S += self.alive_S
        done_S = self._is_stop_V.index_select(0, token_S)
        if self._strings is not None or self.turns is not None:
            done_S = self._followed(token_S, done_S, early_S, forced)
        return token_S, done_S.logical_or_(next_S >= self.end_S).logical_and_(self.alive_S)

    def check_time(self) -> None:
        """End the call where its time is over (``OutOfTime``)."""
        if self.params.until is not None and time.monotonic() >= self.params.until:
            raise OutOfTime(f"the time is over after {self.tokens} tokens")

    def take_at(self, slots: Tensor, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """``take`` for some slots only."""
        whole = self.row_S, self.next_S, self.end_S, self.alive_S
        self.keep(slots)
        token_R, done_R = self.take(logits_RV)
        moved_R = self.next_S
        self.row_S, self.next_S, self.end_S, self.alive_S = whole
        self.next_S[slots] = moved_R
        return token_R, done_R

    def _forced(self) -> dict[int, int]:
        """Return the tokens that replies put in place of sampled ones, by slot."""
        if self.turns is None or not self.turns.waiting:
            return {}
        rows = torch.stack([self.row_S, self.alive_S]).tolist()
        tokens = {
            slot: self.turns.forced(row) for slot, (row, alive) in enumerate(zip(*rows, strict=True)) if alive
        }
        return {slot: token for slot, token in tokens.items() if token is not None}

    def _followed(
        self, token_S: Tensor, stop_S: Tensor, early_S: Tensor | None, forced: Mapping[int, int]
    ) -> Tensor:
        """Follow the texts on the host by one token; return which rows stop with it."""
        looked_at = self.alive_S if early_S is None else self.alive_S * ~early_S
        # One copy per step.
        state = torch.stack([self.row_S, token_S, self.alive_S, looked_at, stop_S, self.end_S - self.next_S])
        ends = [False] * len(self)
        for slot, (row, token, alive, may_stop, stop, room) in enumerate(zip(*state.tolist(), strict=True)):
            if slot in forced:
                self._tails.pop(row, None)
            elif alive:
                ended = bool(stop)
                if self._strings is not None:
                    ended |= self.ends_string(row, token, bool(may_stop))
                if self.turns is not None:
                    ended = self.turns.sampled(row, token, ended, room > 0)
                ends[slot] = ended
        return torch.tensor(ends, device=self.device)

    def ends_string(self, row: int, token: int, may_stop: bool = True) -> bool:
        """Follow the text of ``row`` by one token; return whether a stop string is complete with it."""
        assert self._strings is not None
        tail = self._tails.setdefault(row, deque(maxlen=self._strings.window))
        tail.append(token)
        return may_stop and self._strings.may_end(token) and self._strings.just_ended(list(tail))

    def finish(self, slots: Tensor) -> list[int]:
        """Record that the rows in ``slots`` are finished, make the slots idle, return the row numbers."""
        rows, ends = self.row_S[slots].tolist(), self.next_S[slots].tolist()
        self.next_S[slots] = self._behind
        self.end_S[slots] = self._behind + 1
        self.alive_S[slots] = 0
        self._running -= len(rows)
        self.record({row: end - row * self._steps for row, end in zip(rows, ends, strict=True)})
        return rows

    def record(self, lengths: Mapping[int, int]) -> None:
        """Note the lengths of rows that have just finished."""
        for row, length in lengths.items():
            self._length_R[row] = length
            self._spared += self._steps - length

    @property
    def share(self) -> float:
        """Approximate fraction done: tokens sampled, and those that finished rows will not need."""
        return min(1.0, (self.tokens + self._spared) / max(1, self._behind))

    # ---- for an engine that samples on the device without asking the host ------------------------------------------

    @property
    def tables(self) -> dict[str, Tensor]:
        """By place of the flat output (the last one is spare): uniform numbers, tokens, log-probs; and the stop tokens (V,)."""
        return {
            "uniform": self._uniform,
            "token": self._token,
            "log_prob": self._log_prob,
            "is_stop": self._is_stop_V,
        }

    @property
    def has_strings(self) -> bool:
        """Whether stop strings have to be looked for on the host."""
        return self._strings is not None

    def reply_to(self, row: int, room: int) -> list[int]:
        """Return the tokens of the reply to ``row``, ``room`` at most."""
        tokens: list[int] = []
        while self.turns is not None and len(tokens) < room and (token := self.turns.forced(row)) is not None:
            tokens.append(token)
        if tokens:
            self._tails.pop(row, None)
        return tokens

    def span(self, row: int) -> tuple[int, int]:
        """Return the start of the row's output, and the end that it must not pass."""
        begin = row * self._steps
        return begin, begin + int(self._limit_R[row])

    def completions(self) -> Completions:
        """Return the sampled completions, grouped by prompt.

        Raises:
            EngineError: The model's outputs were not finite numbers.
        """
        tokens = self._token[: self._behind].view(self.count, self._steps).tolist()
        log_probs = self._log_prob[: self._behind].view(self.count, self._steps).tolist()
        stops = self._is_stop_V.cpu()
        result: Completions = []
        for row, length in enumerate(self._length_R):
            ids = tokens[row][:length]
            if row % self.group_size == 0:
                result.append([])
            if not math.isfinite(math.fsum(log_probs[row][:length])):
                raise EngineError(
                    "the model's outputs are not finite numbers (NaN or infinite): its weights are broken. Continue from an "
                    "earlier checkpoint with a lower learning rate, or check the model's files"
                )
            if self.turns is not None:
                result[-1].append(self.turns.completion(row, ids, log_probs[row][:length]))
                continue
            stopped = bool(stops[ids[-1]]) or (
                self._strings is not None and self._strings.just_ended(ids[-self._strings.window :])
            )
            result[-1].append(Completion(ids, log_probs[row][:length], "stop" if stopped else "length"))
        return result

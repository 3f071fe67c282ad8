"""Turns inside a completion: tokens that somebody else puts there, a tool or an environment, and the policy continues from.

They are appended as token ids, never decoded and encoded again, and fed to the model one a step like sampled ones: the row keeps
its cache, the others decode meanwhile, and a call may run while the first tokens of its reply are fed. A token's place decides its
random number whoever put it there, so turns change nothing for other rows, and a row's tokens do not depend on how long a call took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from algorist.errors import EngineError
from algorist.rollouts.base import Completion, Completions, Prompts, SamplingParams, Turns
from algorist.rollouts.sampling import StopStrings

SEED_STRIDE = 7_368_787
"""Between the seeds of the rounds of ``continued``."""


class OpenTurns:
    """The turns of one request, followed token by token."""

    def __init__(self, turns: Turns, decode: Callable[[list[int]], str] | None, rows: int) -> None:
        turns.begin(rows)
        self.turns, self._decode = turns, decode
        self._strings = StopStrings(turns.stop_strings, decode) if turns.stop_strings else None
        self._pending: dict[int, Iterator[int]] = {}
        self._segment: dict[int, list[int]] = {}  # what was sampled since the last reply
        self._sampled: dict[int, list[bool]] = {}
        self._ended: set[int] = set()

    @property
    def waiting(self) -> bool:
        """Whether some row has tokens of a reply to come."""
        return bool(self._pending)

    def forced(self, row: int) -> int | None:
        """Return the next token of the row's reply; None when there is none, and the sampled one counts."""
        if row not in self._pending:
            return None
        token = next(self._pending[row], None)
        if token is None:
            del self._pending[row]
        else:
            self._sampled.setdefault(row, []).append(False)
            self._segment[row] = []
        return token

    def replies_to(self, row: int) -> bool:
        """Whether tokens of a reply to the row may come."""
        return row in self._pending

    def sampled(self, row: int, token: int, ended: bool, room: bool) -> bool:
        """Take a token that the policy sampled; return whether the row ends with it.

        Args:
            row: The row.
            token: The token.
            ended: It is a stop token, or completes a stop string of the request.
            room: The row may have more tokens; without room nobody is asked.
        """
        segment = self._segment.setdefault(row, [])
        segment.append(token)
        self._sampled.setdefault(row, []).append(True)
        if room and (ended or self._calls(token, segment)):
            reply = self.turns.reply(row, list(segment), ended)
            ended = reply is None
            if reply is not None:
                self._pending[row] = reply
        if ended:
            self._ended.add(row)
        return ended

    def _calls(self, token: int, segment: list[int]) -> bool:
        strings = self._strings
        return (
            strings is not None and strings.may_end(token) and strings.just_ended(segment[-strings.window :])
        )

    def piece(
        self, row: int, piece: Completion, ids: list[int], log_probs: list[float], params: SamplingParams
    ) -> bool:
        """Add the tokens that an engine sampled for a row, and the reply to them; return whether the row continues."""
        taken = piece.token_ids[: params.max_new_tokens - len(ids)]
        whole = len(taken) == len(piece.token_ids) and piece.finish_reason == "stop"
        own = StopStrings(params.stop_strings, self._decode) if params.stop_strings else None
        for place, token in enumerate(taken):
            ids.append(token)
            log_probs.append(piece.log_probs[place])
            last = whole and place == len(taken) - 1
            ended = last and ((own is not None and own.just_ended(taken)) or not self._calls(token, taken))
            self.sampled(row, token, ended, last and len(ids) < params.max_new_tokens)
        while len(ids) < params.max_new_tokens and (forced := self.forced(row)) is not None:
            ids.append(forced)
            log_probs.append(math.nan)
        return whole and row not in self._ended and len(ids) < params.max_new_tokens

    def completion(self, row: int, token_ids: list[int], log_probs: list[float]) -> Completion:
        """Return the finished row; log-probs of tokens that were not sampled are NaN."""
        self._pending.pop(row, None)
        sampled = self._sampled.get(row, [])
        own = [value if mine else math.nan for value, mine in zip(log_probs, sampled, strict=True)]
        return Completion(
            token_ids,
            own,
            "stop" if row in self._ended else "length",
            None if all(sampled) else sampled,
            self.turns.turns_of(row),
        )


def continued(
    generate: Callable[[Prompts, int, SamplingParams], Completions],
    prompts: Prompts,
    group_size: int,
    params: SamplingParams,
    turns: Turns,
    decode: Callable[[list[int]], str] | None,
) -> Completions:
    """Sample with turns through an engine that only knows prompts: each reply is one more round, with the row so far as its prompt.

    Prefix caching makes the rounds cheap. Greedy completions are those of the other engines; the draws of later rounds have seeds of
    their own.

    Args:
        generate: The engine's own, without turns.
        prompts: See ``RolloutEngine.generate``, as the next two.
        group_size: Completions per prompt.
        params: How they are sampled.
        turns: Who replies.
        decode: Token ids → text, for stop strings.
    """
    if params.min_new_tokens:
        raise EngineError(
            "min_new_tokens with turns needs the native or the transformers engine; leave it out"
        )
    rows = len(prompts) * group_size
    follow = OpenTurns(turns, decode, rows)
    strings = (*params.stop_strings, *turns.stop_strings)
    ids: list[list[int]] = [[] for _ in range(rows)]
    log_probs: list[list[float]] = [[] for _ in range(rows)]
    running, number = list(range(rows)), 0
    while running:
        most = params.max_new_tokens - min(len(ids[row]) for row in running)
        seed = None if params.seed is None else params.seed + number * SEED_STRIDE
        request = replace(params, stop_strings=strings, max_new_tokens=most, seed=seed)
        if number == 0:
            pieces = [piece for group in generate(prompts, group_size, request) for piece in group]
        else:
            whole = [[*prompts[row // group_size], *ids[row]] for row in running]
            pieces = [group[0] for group in generate(whole, 1, request)]
        number += 1
        running = [
            row
            for row, piece in zip(running, pieces, strict=True)
            if follow.piece(row, piece, ids[row], log_probs[row], params)
        ]
    flat = [follow.completion(row, ids[row], log_probs[row]) for row in range(rows)]
    return [flat[start : start + group_size] for start in range(0, rows, group_size)]

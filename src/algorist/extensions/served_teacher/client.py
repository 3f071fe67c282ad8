"""The trainer's side: completions go to the server as token ids, log-probs come back; a self-test before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algorist.errors import ConfigError, EngineError
from algorist.extensions.openai_server.client import Server
from algorist.extensions.teacher import TeacherSection
from algorist.extensions.teacher.divergence import LEAST
from algorist.extensions.teacher.model import Teacher
from algorist.training.batch import Batch
from algorist.training.extension import PolicyTrainer
from algorist.training.lm_head import OfHead

ROWS, CONNECTIONS = 16, 8
"""Completions of one request, and requests at a time."""
LARGEST_REPLY = 1 << 30
SPREAD = 256
"""Ids of the vocabulary that the self-test compares."""
GAP = 0.1
"""Nats by which the log-prob of a token may differ when it is computed twice; bfloat16 stays below."""
UNREADABLE = "\ufffd"


def _is_score(one: Any) -> bool:
    """Return whether a token's entry has the form of vLLM's: token id as text → log-prob and text."""
    return isinstance(one, dict) and all(
        key.isdecimal() and isinstance(value, dict) and isinstance(value.get("decoded_token") or "", str)
        for key, value in one.items()
    )


START = "vllm serve MODEL --max-logprobs 64, or: algorist serve MODEL --engine scores"


@dataclass
class Served(Teacher):
    """A teacher whose server scores; ``name`` is that of its model there."""

    server: Server = Server("")  # noqa: RUF009

    @classmethod
    def connect(cls, section: TeacherSection, student: Any, tokenizer: Any) -> Served:
        """Return the teacher of an address, ``http://HOST:PORT`` or ``http://HOST:PORT#MODEL``, after the self-test.

        Raises:
            ConfigError: Its tokenizer is another one.
            EngineError: It cannot be reached, or does not score what it writes.
        """
        url, _, name = section.model.partition("#")
        server = Server(url, "grpo.teacher.model", most_bytes=LARGEST_REPLY)
        home, rows = next(student.parameters()).device, 1 + max(tokenizer.get_vocab().values())
        teacher = cls(name or server.first_model(), None, home, rows, home=home, server=server)
        teacher.try_out(tokenizer)
        return teacher

    def line(self) -> str:
        return f"teacher {self.name}, served by {self.server}; its token ids and scores were tried"

    def log_probs(self, batch: Batch, policy: PolicyTrainer, of_head: OfHead | None = None) -> Tensor:
        return self.top(batch, policy, 0)[..., 1]

    def top(self, batch: Batch, policy: PolicyTrainer, k: int) -> Tensor:
        numbers = torch.zeros(len(batch), batch.width, 2 + 2 * k)
        parts = [range(start, min(start + ROWS, len(batch))) for start in range(0, len(batch), ROWS)]

        def fill(rows: range) -> None:
            prompts = [batch.prompts[batch.prompt_of[row]] for row in rows]
            texts = [[*prompt, *batch.completions[row]] for prompt, row in zip(prompts, rows, strict=True)]
            for row, prompt, text, scores in zip(rows, prompts, texts, self.scores(texts, k), strict=True):
                pairs = zip(scores[len(prompt) :], text[len(prompt) :], strict=True)
                if values := [self.numbers(score, token, k) for score, token in pairs]:
                    numbers[row, : len(values)] = torch.tensor(values)

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(fill, parts))
        return numbers.to(batch.mask.device)

    def mass_left_out(self, batch: Batch, policy: PolicyTrainer) -> None:
        return None

    def scores(self, texts: Sequence[Sequence[int]], k: int) -> list[list[dict[str, Any]]]:
        """Return the server's scores of each token in each list of ids, the first one aside ({}).

        Raises:
            EngineError: The server gives no log-probs of prompts.
        """
        body = {
            "model": self.name,
            "prompt": [list(map(int, ids)) for ids in texts],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": k,
        }
        choices = self.server.choices("/v1/completions", body)
        if all(type(choice.get("index", 0)) is int for choice in choices):
            choices.sort(key=lambda choice: choice.get("index", 0))
        scores = [choice.get("prompt_logprobs") for choice in choices]
        sizes = [len(score) if isinstance(score, list) else None for score in scores]
        if sizes != [len(ids) for ids in texts]:
            raise EngineError(
                f"{self.server} gives no log-probs of a prompt's tokens (prompt_logprobs), as llama.cpp's and transformers' servers do "
                f"not; start one that does ({START}), or let the file compute here: grpo.teacher.model=FILE.gguf"
            )
        if odd := [one for score in scores for one in score or () if not (one is None or _is_score(one))]:
            raise EngineError(
                f"{self.server} gives {odd[0]!r:.200} as the log-probs of a token; expected an object of token ids, each with its "
                "logprob and decoded_token"
            )
        return [[one or {} for one in score] for score in scores]  # type: ignore[union-attr]

    def try_out(self, tokenizer: Any) -> None:
        """Compare the meaning of token ids, and two scores of the same tokens.

        Raises:
            ConfigError: Ids mean other texts there.
            EngineError: Two scores differ, or are no log-probs.
        """
        known = sorted(tokenizer.get_vocab().values())
        ids = [*known[:: max(1, len(known) // SPREAD)], known[-1]]
        (once,), (twice,) = (self.scores([ids], 0) for _ in range(2))
        other = [
            (own, text)
            for token, score in zip(ids[1:], once[1:], strict=True)
            if (text := score.get(str(token), {}).get("decoded_token")) is not None
            and UNREADABLE not in (own := tokenizer.decode([token])) + text
            and own.strip() != text.strip()
        ]
        if other:
            raise ConfigError(
                f"grpo.teacher.model={self.server} serves {self.name}, which has another tokenizer: the student's {other[0][0]!r} is "
                f"{other[0][1]!r} there ({len(other)} of {len(ids)} token ids differ), so it cannot score what the student writes. Take "
                "a larger model of the student's own family"
            )
        for token, first, second in zip(ids[1:], once[1:], twice[1:], strict=True):
            before, after = (self.of_token(score, token) for score in (first, second))
            if abs(before - after) > GAP:
                raise EngineError(
                    f"{self.server} gave a token's log-prob as {before:.3f} and then as {after:.3f}; a teacher must say the same twice"
                )

    def of_token(self, score: dict[str, Any], token: int) -> float:
        """Return the log-prob of a token of a prompt (EngineError)."""
        value = score.get(str(token), {}).get("logprob")
        if not isinstance(value, int | float) or not -1e9 < value < 1e-3:
            raise EngineError(
                f"{self.server} gives {value!r} as the log-prob of token {token}; expected a number up to 0"
            )
        return float(value)

    def numbers(self, score: dict[str, Any], token: int, k: int) -> list[float]:
        """Return the row of a token (``divergence.top_of``): log-mass of the rest, log-prob of the token, k ids, their log-probs."""
        best = sorted(((int(i), self.of_token(score, int(i))) for i in score), key=lambda pair: -pair[1])[:k]
        if len(best) < k or any(i >= self.rows for i, _ in best):
            raise EngineError(
                f"{self.server} gives {len(score)} likely tokens where grpo.teacher.top_k={k} are expected, ids up to {self.rows - 1}; "
                "start it with --max-logprobs, or take a smaller top_k"
            )
        rest = math.log(max(1.0 - sum(math.exp(value) for _, value in best), math.exp(LEAST)))
        return [
            rest,
            self.of_token(score, token),
            *(float(i) for i, _ in best),
            *(value for _, value in best),
        ]

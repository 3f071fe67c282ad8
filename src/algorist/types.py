"""The nouns of the project, plain data without torch: problem, prompt, completion, grade, reward, rollout, group."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from algorist_grader.types import Grade, Parsed


class Message(TypedDict):
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with its gold answer.

    ``answer`` is the gold answer as text (never empty), ``solution`` the worked solution or an empty string. ``checker`` names what
    decides where many answers are right (``algorist_grader.checkers``); without one the gold answer does.
    """

    id: str
    question: str
    answer: str
    solution: str = ""
    subject: str = ""
    level: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    checker: str = ""

    def columns(self) -> dict[str, Any]:
        """Return every field and every further column of the row, by name: what rewards and checkers see."""
        return {**self.extra, "problem_id": self.id} | {name: getattr(self, name) for name in PROBLEM_COLUMNS}

    def __getitem__(self, column: str) -> Any:
        """Return a field or a further column of the row by name."""
        return self.columns()[column]


PROBLEM_COLUMNS = ("question", "answer", "solution", "subject", "level", "checker")


ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange inside a rollout: what the policy asked for, and what was appended for it.

    ``source`` names who answered: a tool, or ``environment``, whose ``request`` is all that was written since its last reply.
    ``error`` is the class of the error, empty without one; ``seconds`` by the clock, with the wait for a process that others use.
    """

    source: str
    request: str
    reply: str
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion of a problem, read, graded and rewarded once.

    Attributes:
        completion_ids: Token ids, a stop token included.
        text: What they decode to, without special tokens; after an environment's reply, what follows the last of them.
        log_probs: Natural log-probability of each token under the policy that sampled, at the sampling temperature, NaN for
            tokens that it did not sample; None where the engine gave none.
        truncated: Whether the length limit ended it.
        parsed: What the prompt format read.
        grade: The verdict; None for a question without a gold answer.
        rewards: The value of each reward, None where it does not apply.
        reward: Their weighted sum; None when no reward applies.
        sampled: For each token whether the policy sampled it; None when it sampled all. The others (a tool's output, an
            environment's reply) are context: no loss, KL, entropy, ratio or length reward counts them.
        turns: The exchanges that put them there, in their order.
    """

    completion_ids: list[int]
    text: str
    log_probs: list[float] | None
    truncated: bool
    parsed: Parsed
    grade: Grade | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    sampled: list[bool] | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def sampled_ids(self) -> list[int]:
        """The tokens that the policy sampled."""
        return [i for i, own in zip(self.completion_ids, self.sampled_mask, strict=True) if own]

    @property
    def sampled_mask(self) -> list[bool]:
        """``sampled``, written out."""
        return [True] * len(self.completion_ids) if self.sampled is None else self.sampled


@dataclass(frozen=True, slots=True)
class Group:
    """One problem, its prompt, and the completions that were sampled for it and are compared with each other.

    ``seconds`` is the wall time of the engine call that sampled the group, together with the others of the same call.
    """

    problem: Problem
    prompt: str
    prompt_ids: list[int]
    rollouts: list[Rollout]
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all but the problem as lists and dictionaries, for a checkpoint."""
        return {
            "prompt": self.prompt,
            "prompt_ids": self.prompt_ids,
            "rollouts": [asdict(r) for r in self.rollouts],
        }

    @classmethod
    def from_dict(cls, problem: Problem, values: dict[str, Any]) -> Group:
        """Return the group that ``to_dict`` gave ``values``."""
        rollouts = [
            Rollout(
                **row
                | {
                    "grade": None if row["grade"] is None else Grade(**row["grade"]),
                    "parsed": Parsed(**row["parsed"] | {"flags": tuple(row["parsed"]["flags"])}),
                    "turns": tuple(Turn(**turn) for turn in row["turns"]),
                }
            )
            for row in values["rollouts"]
        ]
        return cls(problem, values["prompt"], values["prompt_ids"], rollouts)

"""Answers from a trained model: the prompt format, the engine and the grader of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorist.config.schema import Recipe
from algorist.evaluation.estimators import elect
from algorist.models.load import Policy, pick_device, policy_of
from algorist.prompts import PromptFormat
from algorist.prompts.attached import attached
from algorist.prompts.base import answer_row
from algorist.rollouts import make_engine
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.collect import collect
from algorist.rollouts.transformers import TransformersEngine
from algorist.runs.asking import how_to_ask, with_turns
from algorist.types import Group, Problem
from algorist_grader import grade


@dataclass
class Solver:
    """A policy with its prompt format."""

    policy: Policy
    prompt_format: PromptFormat
    max_new_tokens: int = 512
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def load(
        cls,
        model: Path | str,
        *,
        recipe: Recipe | None = None,
        prompt_format: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Mapping[str, Any] | None = None,
    ) -> Solver:
        """Load a model folder or hub model; prompt format, length and tools are those of its training, else the recipe's."""
        device = pick_device(recipe.device if recipe else "auto")
        policy = policy_of(model, device=device, like=recipe.model if recipe else None)
        how = how_to_ask(recipe, prompt_format, attached(policy.tokenizer), template_kwargs)
        form = with_turns(how.prompt_format, tools)
        return cls(policy, form, how.max_completion_tokens, how.stop_strings)

    def solve(
        self,
        questions: Sequence[str],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        samples: int = 1,
        vote: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Return one row per question and sample: question, completion, reasoning, answer, well_formed, truncated.

        Args:
            questions: Questions, each asked alone.
            max_new_tokens: Longest completion in tokens; that of the training when left out.
            temperature: 0 is greedy.
            seed: Makes samples repeatable.
            samples: Completions per question.
            vote: One row per question: the first sample with the answer that most give, and ``votes`` and ``samples``.
            on_text: Called with each piece of text as it is generated; one question, one sample.
        """
        tokenizer = self.policy.tokenizer
        params = SamplingParams(
            temperature=temperature,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            seed=seed,
            stop_strings=self.stop_strings,
        )
        problems = [Problem(str(number), question, "") for number, question in enumerate(questions)]
        engine = make_engine("auto", self.policy.model, tokenizer)
        if on_text is not None:
            engine = TransformersEngine(
                self.policy.model, tokenizer, on_token=_TextOfTokens(tokenizer, on_text)
            )
        groups = collect(engine, tokenizer, problems, self.prompt_format, params, samples, graded=False)
        if vote:
            return [_elected(group) for group in groups]
        return [answer_row(group.problem.question, rollout) for group in groups for rollout in group.rollouts]


def _elected(group: Group) -> dict[str, Any]:
    answer, votes = elect([r.parsed.answer for r in group.rollouts], lambda a, b: grade(a, b).correct)
    rollout = next(r for r in group.rollouts if r.parsed.answer == answer)
    return {**answer_row(group.problem.question, rollout), "votes": votes, "samples": len(group.rollouts)}


class _TextOfTokens:
    """Turns tokens into pieces of text; a character of several tokens waits for its last one."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self.tokenizer, self.on_text, self.ids, self.shown = tokenizer, on_text, [], 0  # type: ignore[var-annotated]

    def __call__(self, token: int) -> None:
        self.ids.append(token)
        text = str(self.tokenizer.decode(self.ids, skip_special_tokens=True))
        if not text.endswith("\ufffd"):
            self.on_text(text[self.shown :])
            self.shown = len(text)


def append_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a JSONL file, one object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

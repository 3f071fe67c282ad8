"""Answers from a trained model: the prompt format of training, the engine of training, reasoning and answer apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorist.config.schema import ModelSection, Recipe
from algorist.models.load import Policy, load_policy, make_policy, pick_device
from algorist.prepare import recipe_format
from algorist.prompts import PromptFormat, get_format
from algorist.prompts.chat import encode_prompt
from algorist.rollouts import make_engine
from algorist.rollouts.base import SamplingParams


@dataclass
class Solver:
    """A policy with its prompt format."""

    policy: Policy
    prompt_format: PromptFormat
    max_new_tokens: int = 512

    @classmethod
    def load(
        cls, model: Path | str, *, recipe: Recipe | None = None, prompt_format: str | None = None
    ) -> Solver:
        """Load a model folder or hub model; the recipe gives prompt format and length."""
        device = pick_device(recipe.device if recipe else "auto")
        if isinstance(model, Path):
            policy = load_policy(model, device=device)
        else:
            policy = make_policy(ModelSection(name=model), device=device, seed=0)
        if prompt_format is not None or recipe is None:
            found = get_format(prompt_format or "reasoning_answer")
        else:
            found = recipe_format(recipe)
        return cls(policy, found, recipe.grpo.max_completion_tokens if recipe else 512)

    def solve(
        self,
        questions: Sequence[str],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return one row per question: question, completion, reasoning, answer, well_formed, truncated."""
        tokenizer = self.policy.tokenizer
        prompts = [encode_prompt(self.prompt_format, tokenizer, q) for q in questions]
        params = SamplingParams(
            temperature=temperature, max_new_tokens=max_new_tokens or self.max_new_tokens, seed=seed
        )
        groups = make_engine("auto", self.policy.model, tokenizer).generate(prompts, 1, params)
        rows = []
        for question, (completion,) in zip(questions, groups, strict=True):
            text = str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))
            parsed = self.prompt_format.parse(text)
            rows.append(
                {
                    "question": question,
                    "completion": text,
                    "reasoning": parsed.reasoning,
                    "answer": parsed.answer,
                    "well_formed": parsed.well_formed,
                    "truncated": completion.finish_reason == "length",
                }
            )
        return rows


def append_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a JSONL file, one object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

"""The built-in prompt formats: the table ``formats.yaml``, and how completions without tags are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import yaml

from algorist.prompts.base import PromptFormat, Tags, add_format
from algorist.types import Message, Parsed, Problem
from algorist_grader.extract import from_boxes
from algorist_grader.markers import after_reasoning


class QuestionOnly(PromptFormat):
    """The prompt is the bare question; a completion is well formed when it has exactly one distinct box."""

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the reasoning followed by the boxed answer, which may be in it already."""
        boxed = self.parse(reasoning).answer == answer.strip()
        return reasoning.strip() + ("" if boxed else f"\n\\boxed{{{answer.strip()}}}")

    def parse(self, text: str) -> Parsed:
        """Read the last balanced box after the reasoning; boxes that say different things are flagged ``several_answers``."""
        body = after_reasoning(text)
        if body is None:
            return Parsed(text.strip() or None, None, False, ("unfinished_reasoning",))
        answer, boxes = from_boxes(body)
        if answer.answer is None:
            flag = "unclosed_answer" if "\\boxed" in body and answer.marker == "unclosed box" else "no_answer"
            return Parsed(text.strip() or None, None, False, (flag,))
        reasoning = text[: len(text) - len(body) + boxes[-1].command].strip()
        distinct = {body[box.start : box.end].strip() for box in boxes}
        flags = ("several_answers",) if answer.ambiguous else ()
        return Parsed(reasoning or None, answer.answer, len(distinct) == 1, flags)


@dataclass(frozen=True)
class PublishedPrompt(QuestionOnly):
    """A prompt without tags.

    The answer is the first match of ``stated``, or the last box
    where there is no such pattern; ``closing`` states one in a demonstration. ``shots`` has by question what comes before it.
    """

    stated: str = ""
    closing: str = "\n\\boxed{{answer}}"
    shots: Mapping[str, str] = field(default_factory=dict, hash=False)

    def render(self, question: str) -> list[Message] | str:
        """Return the prompt of a question."""
        prompt = super().render(question)
        return self.shots.get(question.strip(), "") + prompt if isinstance(prompt, str) else prompt

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the reasoning and the sentence that states the answer; a box may be in it already."""
        boxed = "\\boxed" in self.closing and self.parse(reasoning).answer == answer.strip()
        closing = "" if boxed else self.closing.replace("{answer}", answer.strip())
        return f"{' ' * (not self.is_chat)}{reasoning.strip()}{closing}"

    def parse(self, text: str) -> Parsed:
        """Read the first match of ``stated``, else the last box where answers are boxed."""
        match = re.search(self.stated, text) if self.stated else None
        if match is None and "\\boxed" in self.closing:
            return super().parse(text)
        answer = match[1].strip().rstrip(".,") if match else ""
        reasoning = (text[: match.start()] if match else text).strip()
        return Parsed(reasoning or None, answer or None, bool(answer), () if answer else ("no_answer",))


def harness_shots(problems: Sequence[Problem], train: Sequence[Problem], count: int) -> dict[str, str]:
    """Return the solved problems that lm-evaluation-harness puts before each question of ``gsm8k``: drawn anew for each, seed 1234."""
    draw, rows = Random(1234), [problem.extra for problem in train]
    return {
        problem.question: "".join(
            f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in draw.sample(rows, count)
        )
        for problem in problems
    }


KINDS = {"plain": PromptFormat, "question_only": QuestionOnly, "published": PublishedPrompt}
for _name, _parts in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
    _kind = KINDS[_parts.pop("kind", "plain")]
    add_format(_kind(_name, Tags(*_parts.pop("tags", ())), **_parts))

"""open-r1's rules: accuracy of the first answer block, neutral where the gold answer cannot be read."""

from __future__ import annotations

import re

from algorist.errors import ConfigError
from algorist.grading import grade
from algorist.grading.markers import after_reasoning
from algorist.prompts import Tags
from algorist.rewards.base import reward
from algorist.rewards.extract import first_block, formula_in, numbers_in

THINK_TAGS = Tags("<think>", "</think>", "<answer>", "</answer>")
_LATEX = re.compile(r"[\\$]")


def _neutral_bounds(*, neutral: float, **_: object) -> tuple[float, float]:
    if not 0 <= neutral <= 1:
        raise ConfigError(f"reward 'accuracy' has neutral {neutral}; expected a value from 0 to 1")
    return 0.0, 1.0


@reward("accuracy", low=0.0, high=1.0, bounds=_neutral_bounds, source="S4.15, S4.22")
def accuracy(
    completion: str,
    *,
    gold: str,
    matcher: str = "symbolic",
    tags: Tags = THINK_TAGS,
    neutral: float = 0.5,
    latex_gold_only: bool = False,
) -> float:
    """1 or 0 by the grader on the first answer block (the whole text without one); ``neutral`` for unreadable gold.

    A box or ``$…$`` inside the answer is what counts. ``latex_gold_only`` takes a gold answer without LaTeX, a bare
    "4" for example, as unreadable, as the original does.
    """
    if not gold.strip() or (latex_gold_only and not _LATEX.search(gold)):
        return neutral
    block = first_block(completion, tags.answer_open, tags.answer_close)
    said = (after_reasoning(completion) or "") if block is None else block
    graded = grade(formula_in(said), formula_in(gold), matcher=matcher)
    return neutral if graded.reason == "unparseable_gold" else float(graded.correct)


@reward("accuracy_last_number", low=0.0, high=1.0, source="S4.16")
def accuracy_last_number(completion: str, *, gold: str, tags: Tags = THINK_TAGS) -> float:
    """1 when the last numbers of the answer block and of the gold agree within 1e-6, else when the texts do.

    What is left of ``accuracy`` without any symbolic package; a completion without an answer block gets 0.
    """
    block = first_block(completion, tags.answer_open, tags.answer_close)
    if block is None:
        return 0.0
    left, right = numbers_in(block), numbers_in(gold)
    if left and right:
        return float(abs(float(left[-1].replace(",", "")) - float(right[-1].replace(",", ""))) <= 1e-6)
    return float(block.strip().lower() == gold.strip().lower())

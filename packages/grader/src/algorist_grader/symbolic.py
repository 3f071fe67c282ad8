"""The matcher ``symbolic``: strings, exact numbers, structure, quick points, and only then a worker process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from algorist_grader.algebra import Node, Unreadable, equal, is_close, read
from algorist_grader.child_process import Answer
from algorist_grader.golds import Choice, is_date_or_range, labelled, why_no_answer
from algorist_grader.numeric import numeric_value
from algorist_grader.text import MAX_ANSWER, clean, letters_only, tight
from algorist_grader.types import GradeReason
from algorist_grader.workers import pool_for

Verdict = tuple[bool, GradeReason]

MAX_GOLD = 2_000
"""Longer gold answers are unreadable (characters)."""

_CHOICE = re.compile(r"(?:\\(?:text|textbf|mathrm)\s*\{\s*)?\(?([A-J])\)?\s*\}?")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a slow decision, and a relative tolerance where the dataset declares one."""

    timeout_s: float = 1.0
    memory_mb: int = 512
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """An answer as it was read: one spelling, the tree if the grammar knows it, else why not.

    ``tight`` is the text without needless blanks, ``letters`` the text as letters only where it is nothing else.
    """

    text: str
    tree: Node | None
    why: str = ""
    code: str = ""
    tight: str = ""
    letters: str = ""


def reading(text: str) -> Read:
    """Read an answer or a gold answer; nothing is raised."""
    return _reading(text) if len(text) <= 200 else _reading.__wrapped__(text)


@lru_cache(maxsize=4_096)
def _reading(text: str) -> Read:
    if len(text) > MAX_ANSWER:
        return Read("", None, f"longer than {MAX_ANSWER} characters", "too_large")
    cleaned = clean(text)
    if not cleaned:
        why = (
            'control characters; a single backslash in JSON, as in "\\frac", becomes one: write two'
            if cleaned is None
            else "empty"
        )
        return Read("", None, why, "unparseable")
    same = tight(cleaned), letters_only(cleaned)
    if is_date_or_range(cleaned):
        dated = re.sub(r"(?<!\d)0+(?=\d)", "", same[0])
        return Read(cleaned, None, "a date or a range", "", dated, same[1])
    try:
        return Read(cleaned, read(cleaned), "", "", *same)
    except Unreadable as error:
        return Read(cleaned, None, str(error), error.code, *same)


def _balanced(text: str) -> bool:
    bare = re.sub(r"\\.", "", text)
    return bare.count("{") == bare.count("}")


def why_unreadable(gold: str) -> str:
    """Explain why a gold answer cannot be graded against, or return an empty string; plain text is compared as text."""
    if len(gold) > MAX_GOLD:
        return f"longer than {MAX_GOLD} characters"
    if why := why_no_answer(gold):
        return why
    if numeric_value(gold) is not None:
        return ""
    trees = reading(gold)
    if trees.tree is not None:
        return ""
    if not trees.text:
        return trees.why
    if not re.search(r"[0-9A-Za-z]", trees.text):
        return "no letter and no digit"
    return "" if _balanced(trees.text) else "braces that do not match"


def is_text_only(gold: str) -> bool:
    """Return whether a gold answer can only be compared as a string, because the grammar does not know it."""
    choice = _labelled(gold)
    value = choice.value if choice else gold
    return numeric_value(value) is None and reading(value).tree is None


def symbolic(answer: str, gold: str, limits: Limits, *, slow: bool = True) -> Verdict:
    """Return whether an answer is the gold answer, and why."""
    if "%" not in answer and "%" not in gold:
        left, right = numeric_value(answer), numeric_value(gold)
        if left is not None and right is not None:
            return number_verdict(answer, gold, is_close(left, right, limits.tolerance))
    if why_unreadable(gold):
        return False, "unparseable_gold"
    answer, gold, decided = _without_labels(answer, gold)
    if decided is not None:
        return decided, "equal_string" if decided else "different"
    said, truth = reading(answer), reading(gold)
    if not said.text:
        return False, "unparseable_answer"
    if said.tight == truth.tight or (said.letters and _same_letters(said.letters, truth.letters)):
        return True, "equal_string"
    if said.tree is None:
        return False, "ambiguous" if said.code == "ambiguous" else "unparseable_answer"
    if truth.tree is None:
        return False, "different"
    try:
        same = equal(said.tree, truth.tree, tolerance=limits.tolerance)
    except Unreadable:
        return False, "unparseable_answer"
    if same is None:
        return _slowly(said.text, truth.text, limits) if slow else (False, "unparseable_answer")
    if same:
        return True, "equal_number" if said.tree[0] == "num" else "equal_symbolic"
    several = said.tree[0] == "list" and truth.tree[0] not in ("list", "set", "union", "named")
    return False, "ambiguous" if several else "different"


def _without_labels(answer: str, gold: str) -> tuple[str, str, bool | None]:
    """Take the labels of choices off: ``\\textbf{(B)} 27``. Both letter and value must be right where both are written.

    Returns:
        Answer and gold without their labels, and the verdict where the letters decide.
    """
    if gold.strip() == answer.strip():
        return answer, gold, None
    chosen_gold, chosen_answer = _labelled(gold), _labelled(answer)
    if chosen_answer and (letter := _CHOICE.fullmatch(gold.strip())):
        return answer, gold, chosen_answer.letter == letter[1]
    if chosen_gold:
        if chosen_answer:
            same = chosen_gold.letter == chosen_answer.letter
            return chosen_answer.value, chosen_gold.value, None if same else False
        only = _CHOICE.fullmatch(answer.strip())
        return answer, chosen_gold.value, None if only is None else only[1] == chosen_gold.letter
    if chosen_answer and "\\" in answer and numeric_value(chosen_answer.value) is not None:
        return chosen_answer.value, gold, None
    return answer[:-1] if re.fullmatch(r"[A-Ja-j]\)", answer) else answer, gold, None


_WORDS = re.compile(r"(?<![\\a-zA-Z])[A-Za-z]{2,} +[A-Za-z]{2,}\b")
"""Words of a sentence, which letters side by side would else be a product of."""


def _labelled(text: str) -> Choice | None:
    """Read a choice with its label; ``A. Smith`` is none, ``A. 5`` is."""
    choice = labelled(text)
    if choice and choice.strict and numeric_value(choice.value) is None:
        tree = None if _WORDS.search(choice.value) else reading(choice.value).tree
        return choice if tree is not None and tree[0] not in ("text", "name", "list") else None
    return choice


def number_verdict(answer: str, gold: str, same: bool) -> Verdict:
    """Return the verdict on two numbers as they are written."""
    if not same:
        return False, "different"
    return True, "equal_string" if answer.strip() == gold.strip() else "equal_number"


def _same_letters(answer: str, gold: str) -> bool:
    """Return whether two texts are the same letters; those of words (marked by a dot) or of more than three in any case."""
    one, other = answer.lstrip("."), gold.lstrip(".")
    any_case = answer[0] == "." or gold[:1] == "." or len(one) > 3
    return one.casefold() == other.casefold() if any_case else one == other


def _slowly(answer: str, gold: str, limits: Limits) -> Verdict:
    """Ask a worker process, which computes as many digits as the two texts can hide."""
    reply = pool_for("symbolic", limits.timeout_s, limits.memory_mb).ask(answer, gold)
    return verdict_of(reply, right="equal_symbolic", unsure="unparseable_answer")


def verdict_of(reply: Answer, *, right: GradeReason, unsure: GradeReason) -> Verdict:
    """Return the verdict that a worker's answer is: ``right`` says why where it is True, ``unsure`` where it is None."""
    if reply.error:
        return False, reply.error if reply.error in ("timeout", "memory") else "crashed"  # type: ignore[return-value]
    return bool(reply.value), unsure if reply.value is None else right if reply.value else "different"

"""Overlap of one dataset with another: the same question, the same with other numbers, or a shared run of words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from algorist.types import Problem

_WORDS = re.compile(r"\d+(?:[.,]\d+)+|\w+|[^\w\s.,;:?\"-]|(?<![^\W\d]{2})-|-(?![^\W\d]{2})|[.,;:?\"](?=\S)")
"""Words, numbers with their points, and every sign but what ends a word or a sentence, or joins two words."""
KINDS = ("exact", "numbers_changed", "ngram")


def overlap(train: Iterable[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """Return the held-out problems whose question is also in the training set, up to case and spacing."""
    seen = {normal(p.question) for p in train}
    return [p for p in held_out if normal(p.question) in seen]


def shared_questions(
    train: Sequence[Problem], held_out: Sequence[Problem], *, words: int = 8
) -> dict[str, list[tuple[Problem, Problem]]]:
    """Return pairs (held out, training) by kind; a held-out problem is counted under the first kind that fits.

    Args:
        train: What a model may have been trained on.
        held_out: What it is measured on.
        words: Length of a shared run of words, numbers aside, that counts as ``ngram``.
    """
    exact: dict[str, Problem] = {}
    skeletons: dict[str, Problem] = {}
    runs: dict[tuple[str, ...], Problem] = {}
    for problem in train:
        text = normal(problem.question)
        exact.setdefault(text, problem)
        skeletons.setdefault(_without_numbers(text), problem)
        for run in _runs(text, words):
            runs.setdefault(run, problem)
    pairs: dict[str, list[tuple[Problem, Problem]]] = {kind: [] for kind in KINDS}
    for problem in held_out:
        text = normal(problem.question)
        skeleton = _without_numbers(text)
        common = [run for run in _runs(text, words) if run in runs]
        if text in exact:
            pairs["exact"].append((problem, exact[text]))
        elif skeleton in skeletons and re.search(r"[^\W\d]", skeleton):
            pairs["numbers_changed"].append((problem, skeletons[skeleton]))
        elif common:
            pairs["ngram"].append((problem, runs[common[0]]))
    return pairs


def _is_unseen(character: str) -> bool:
    """Return whether no reader sees a character; an invisible operator (3⁤4 is 3 + 4) has a meaning."""
    joins = "\u2061" <= character <= "\u2064"
    return not joins and (unicodedata.category(character) == "Cf" or character in "\ufe0e\ufe0f\u034f")


def normal(text: str) -> str:
    """Return a text's words, numbers and signs in lower case, one space between them: 4 - 1 is not 4 + 1, nor 2(3 + 4) 2·3 + 4."""
    text = text.lower()
    if not text.isascii():  # the same letters and marks in one form, without what no reader sees
        text = unicodedata.normalize("NFC", "".join(c for c in text if not _is_unseen(c)))
    return " ".join(_WORDS.findall(text))


def _without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.,]*( \d[\d.,]*)*", "0", text)


def _runs(text: str, words: int) -> list[tuple[str, ...]]:
    parts = text.split()
    return [tuple(parts[start : start + words]) for start in range(len(parts) - words + 1)]

"""Words and digits of problems that a run solves far less often than its others: what its wrong answers have in common."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path

from algorist.diagnosis.rule import Share
from algorist.store.read import query
from algorist.store.safe_text import one_line

FAR_LESS = 4.0
"""Standard errors by which such problems are solved less often: the word is chosen among hundreds, so chance alone reaches 3."""
SELDOM = 0.05
"""Share of problems with a word, or without it, that are too few."""
MOST_PROBLEMS, NAMED = 2000, 2
"""Problems that are looked at, and words that are named."""


def wrong_in_common(run: Path) -> list[str]:
    """Name the words and digits that go with wrong answers, with the accuracy of problems that have them and of the others.

    Problems are those of the second half of the steps of GRPO, each with its share of right completions.
    """
    later = "step >= (SELECT max(step) / 2 FROM rollouts WHERE stage = 'grpo')"
    rows = query(
        run,
        "SELECT question, any_value(gold) AS gold, avg(correct::INT) AS solved FROM rollouts "
        f"WHERE stage = 'grpo' AND {later} AND question IS NOT NULL GROUP BY question ORDER BY hash(question) LIMIT {MOST_PROBLEMS}",
    )
    solved = [float(row["solved"] or 0.0) for row in rows]
    count, total = len(rows), sum(solved)
    if not 0 < total < count:
        return []
    variance = max(0.01, sum(share * share for share in solved) / count - (total / count) ** 2)
    shares: dict[str, list[float]] = defaultdict(list)
    for row, share in zip(rows, solved, strict=True):
        for mark in _marks(str(row["question"]), str(row["gold"])):
            shares[mark].append(share)
    ranked = []
    for mark, of in shares.items():
        others = count - len(of)
        if min(len(of), others) < SELDOM * count:
            continue
        here, elsewhere = sum(of) / len(of), (total - sum(of)) / others
        errors = (elsewhere - here) / math.sqrt(variance * (1 / len(of) + 1 / others))
        if errors >= FAR_LESS:
            ranked.append((-errors, f"{mark} ({Share(here)} right, the others {Share(elsewhere)})"))
    return [text for _, text in sorted(ranked)[:NAMED]]


def _marks(question: str, gold: str) -> set[str]:
    """Return the words and digits of a question, and the digits of its gold answer."""
    words = {f"the word '{one_line(word, 20)}'" for word in re.findall(r"[^\W\d_]{2,}", question.lower())}
    digits = {f"the digit {digit} in the question" for digit in re.findall(r"[0-9]", question)}
    return words | digits | {f"the digit {digit} in the gold answer" for digit in re.findall(r"[0-9]", gold)}

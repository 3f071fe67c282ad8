"""Grade a file of answers and count the reasons.

    python examples/grade_answers.py answers.jsonl

Each line has `gold` and one of `answer` (an extracted answer) and `completion` (a whole one, in the quickstart's tags).
Without a file, a few built-in answers are graded.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from algorist.prompts import get_format
from algorist_grader import grade, grade_completion

BUILT_IN = [
    {"answer": "0.5", "gold": "1/2"},
    {"answer": r"\frac{2}{4}", "gold": "1/2"},
    {"answer": "0.33", "gold": "1/3"},
    {"answer": "12 or 15", "gold": "12"},
    {"completion": "<reasoning>\n3 * 4 = 12\n</reasoning>\n<answer>\n12\n</answer>", "gold": "12"},
]


def main(file: str | None = None) -> None:
    """Print a line for each answer that is not right, and the reasons with their counts."""
    lines = Path(file).read_text(encoding="utf-8").splitlines() if file else []
    rows = [json.loads(line) for line in lines] if file else BUILT_IN
    tags = get_format("reasoning_answer")
    reasons: Counter[str] = Counter()
    for number, row in enumerate(rows):
        if "completion" in row:
            text = row["completion"]
            found = grade_completion(text, row["gold"], parsed=tags.parse(text))
        else:
            found = grade(row["answer"], row["gold"])
        reasons[found.reason] += 1
        if not found.correct:
            print(f"row {number}: read {found.extracted!r}, gold {found.gold!r}: {found.reason}")
    print(", ".join(f"{reason} {count}" for reason, count in reasons.most_common()))


if __name__ == "__main__":
    main(*sys.argv[1:2])

"""Does a model know a benchmark by heart? It gets the first 60 % of each question as bare text and has to write the rest.

Beside it the same with other numbers: what a model completes there it completes from language, so the difference is what it
remembers. Source: Wu et al. (2507.10532), partial-prompt completion; the control with rewritten numbers is added here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from algorist.errors import DataError
from algorist.evaluation.estimators import Interval, paired_share_difference, wilson
from algorist.prompts import get_format
from algorist.rollouts.base import RolloutEngine, SamplingParams
from algorist.rollouts.collect import collect
from algorist.types import Problem

SHARE = 0.6
"""Share of the question's words that is given."""
NEAR = 0.75
"""A completion with at least this ROUGE-L counts as near."""
_LEAST = 4
"""Words that have to be missing; shorter rests are met by chance."""
_WORD = re.compile(r"\w+|[^\w\s]")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Memory:
    """Shares of completed questions: ``exact`` and ``near``, as they are, with other numbers, and the paired difference.

    ``left_out`` questions are too short or hold no number; ``rows`` has every completion.
    """

    n: int
    left_out: int
    original: dict[str, Interval]
    rewritten: dict[str, Interval]
    difference: dict[str, Interval]
    rows: list[dict[str, Any]]


def probe_memory(
    engine: RolloutEngine,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    batch_size: int = 32,
    on_progress: Callable[[int, int], None] | None = None,
) -> Memory:
    """Let a model complete each question and its twin with other numbers, greedily and without a chat template.

    Raises:
        DataError: No question is long enough and has a number.
    """
    pairs = [(p, with_other_numbers(p.question)) for p in problems if _NUMBER.search(p.question)]
    pairs = [(p, twin) for p, twin in pairs if len(_words(truncated(p.question)[1])) >= _LEAST]
    if not pairs:
        raise DataError(
            f"none of {len(problems)} questions has a number and a rest of {_LEAST} words; the memory probe needs longer questions"
        )
    rows: list[dict[str, Any]] = []
    form = get_format("question_only")
    for start in range(0, len(pairs), batch_size):
        texts = [
            (p.id, kind, text)
            for p, twin in pairs[start : start + batch_size]
            for kind, text in (("original", p.question), ("rewritten", twin))
        ]
        cut = [(name, kind, *truncated(text)) for name, kind, text in texts]
        longest = max(len(tokenizer(rest)["input_ids"]) for *_, rest in cut)
        groups = collect(
            engine,
            tokenizer,
            [Problem(f"{name}/{kind}", begun, rest) for name, kind, begun, rest in cut],
            form,
            SamplingParams(temperature=0.0, max_new_tokens=longest + longest // 4 + 4),
            1,
            graded=False,
        )
        for (name, kind, begun, rest), group in zip(cut, groups, strict=True):
            missing = _words(rest)
            written = _words(group.rollouts[0].text)[: len(missing)]
            score = rouge_l(written, missing)
            row = {
                "problem_id": name,
                "kind": kind,
                "given": begun,
                "rest": rest,
                "completion": group.rollouts[0].text,
            }
            rows.append(row | {"rouge_l": score, "exact": written == missing, "near": score >= NEAR})
        if on_progress:
            on_progress(min(start + batch_size, len(pairs)), len(pairs))
    n = len(pairs)
    original, rewritten, difference = dict[str, Interval](), dict[str, Interval](), dict[str, Interval]()
    for name in ("exact", "near"):  # the rows of a question and of its twin follow each other
        both = [(first[name], second[name]) for first, second in zip(rows[::2], rows[1::2], strict=True)]
        original[name] = wilson(sum(first for first, _ in both), n)
        rewritten[name] = wilson(sum(second for _, second in both), n)
        difference[name] = paired_share_difference(both.count((True, False)), both.count((False, True)), n)
    return Memory(n, len(problems) - n, original, rewritten, difference, rows)


def truncated(question: str, share: float = SHARE) -> tuple[str, str]:
    """Return the first ``share`` of a question's words (rounded up, at least one stays) and the rest."""
    starts = [match.start() for match in re.finditer(r"\S+", question)]
    cut = max(1, -int(-share * len(starts) // 1)) if starts else 0
    place = starts[cut] if cut < len(starts) else len(question)
    return question[:place].rstrip(), question[place:]


def with_other_numbers(question: str) -> str:
    """Return a question with every whole number replaced by another of as many digits, the same everywhere; repeatable."""
    numbers, drawn = list(dict.fromkeys(_NUMBER.findall(question))), random.Random(question)
    other: dict[str, str] = {}
    for number in numbers:
        low = 0 if len(number) == 1 else 10 ** (len(number) - 1)
        step = drawn.randint(1, 10 ** len(number) - low - 1)  # never 0: another number
        other[number] = str(low + (int(number) - low + step) % (10 ** len(number) - low))
    return _NUMBER.sub(lambda match: other[match[0]], question)


def rouge_l(written: Sequence[str], expected: Sequence[str]) -> float:
    """Return the F1 of the longest common subsequence of two word sequences. Source: Lin (2004), ROUGE-L with beta 1."""
    if not written or not expected:
        return 0.0
    row = [0] * (len(expected) + 1)
    for word in written:
        before = row
        row = [0]
        for place, other in enumerate(expected):
            row.append(before[place] + 1 if word == other else max(row[-1], before[place + 1]))
    return 2 * row[-1] / (len(written) + len(expected))


def memory_lines(memory: Memory) -> list[str]:
    """Return the probe's results, for the terminal."""
    left_out = f", {memory.left_out} without a number or too short left out" if memory.left_out else ""
    lines = [f"{memory.n} questions, the first {SHARE:.0%} given as bare text{left_out}"]
    for name, how in (("exact", "completed word for word"), ("near", f"completed nearly (ROUGE-L ≥ {NEAR})")):
        lines.append(
            f"  {how:<32} {memory.original[name].text('format')} · with other numbers {memory.rewritten[name].text('format')} · "
            f"difference {memory.difference[name].text('format', signed=True)}"
        )
    remembered = memory.difference["exact"].low > 0 or memory.difference["near"].low > 0
    lines.append(
        "it completes these questions better than their twins: they, or texts like them, were in its training"
        if remembered
        else "no more is completed than with other numbers: no sign of memory here, which does not show that there is none"
    )
    return lines


def memory_json(memory: Memory) -> dict[str, Any]:
    """Return the probe's result as plain data."""
    return {**asdict(memory), "share": SHARE, "near": NEAR}


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]

"""The grader against math-verify 0.9 in one run: verdicts per dataset, and time per pair.

    python benchmarks/grading.py                 # about 4 minutes; writes benchmarks/baselines/grading.json
    python benchmarks/grading.py --pairs 300     # a quick look

Both sides parse gold and answer and compare, in this process, on one thread, in turns. math-verify keeps its own
timeouts off its clock (5 s signals are set anyway, as its users have them); our caches are emptied before each round.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from golds import datasets, golds
from measure import environment, ratio_with_interval, save_json

from algorist_grader import forget_verdicts, grade, grade_many, is_text_only, why_unreadable
from algorist_grader.algebra.tree import _root
from algorist_grader.numeric import _value
from algorist_grader.symbolic import _reading
from algorist_grader.text import _cleaned

Judge = Callable[[str, str], bool]


def ours(answer: str, gold: str) -> bool:
    """Our verdict."""
    return grade(answer, gold).correct


def math_verify() -> Judge:
    """math-verify's verdict as its README shows it."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def judge(answer: str, gold: str) -> bool:
        marked = [text if "$" in text else f"${text}$" for text in (gold, answer)]
        return bool(verify(parse(marked[0]), parse(marked[1])))

    return judge


def forget() -> None:
    """Empty our caches, so that every round reads everything again."""
    forget_verdicts()
    for cached in (_reading, _value, _cleaned, _root):
        cached.cache_clear()


def timed(judge: Judge, pairs: list[tuple[str, str]]) -> tuple[list[float], int]:
    """Return the seconds of each pair and how many are equal."""
    seconds, equal = [], 0
    for answer, gold in pairs:
        began = time.perf_counter()
        equal += judge(answer, gold)
        seconds.append(time.perf_counter() - began)
    return seconds, equal


def summary(seconds: list[float]) -> dict[str, float]:
    """Return median, p99, maximum (µs) and the total (s)."""
    ordered = sorted(seconds)
    return {
        "median_us": round(statistics.median(ordered) * 1e6, 2),
        "p99_us": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e6, 1),
        "max_us": round(ordered[-1] * 1e6, 1),
        "total_s": round(sum(ordered), 3),
    }


def speed(limit: int | None, rounds: int) -> dict[str, Any]:
    """Time both on GSM8K golds against themselves and MATH golds against the next, in turns."""
    gsm8k, math = golds("gsm8k test"), golds("math test")
    sets = {
        "gsm8k self": [(g, g) for g in gsm8k][:limit],
        "math self": [(g, g) for g in math][:limit],
        "math next": [(b, a) for a, b in pairwise(math)][:limit],
    }
    judges = {"algorist": ours, "math_verify": math_verify()}
    for judge in judges.values():
        judge("\\sqrt{5+2\\sqrt{6}}", "\\sqrt{2}+\\sqrt{3}")
    found: dict[str, Any] = {}
    for name, pairs in sets.items():
        runs: dict[str, list[list[float]]] = {who: [] for who in judges}
        equal = {}
        for turn in range(rounds):
            order = list(judges.items())
            for who, judge in order if turn % 2 == 0 else order[::-1]:
                forget()
                seconds, equal[who] = timed(judge, pairs)
                runs[who].append(seconds)
        best = {who: [min(times) for times in zip(*each, strict=True)] for who, each in runs.items()}
        medians = {who: [statistics.median(one) for one in each] for who, each in runs.items()}
        totals = {who: [sum(one) for one in each] for who, each in runs.items()}
        found[name] = {
            "pairs": len(pairs),
            "equal": equal,
            **{who: summary(best[who]) for who in judges},
            "ratio_of_medians": ratio_with_interval(medians["math_verify"], medians["algorist"]),
            "ratio_of_totals": ratio_with_interval(totals["math_verify"], totals["algorist"]),
        }
        print(name, found[name], flush=True)
    return found


def table(limit: int | None) -> list[dict[str, Any]]:
    """Return verdicts per dataset for both graders: gold against itself, and against the next different gold."""
    judge = math_verify()
    rows = []
    for name in datasets():
        found = golds(name)[:limit]
        neighbours = [(b, a) for a, b in pairwise(found) if a != b]
        mine_self = [g.correct for g in grade_many([(g, g) for g in found], workers=1)]
        mine_next = [g.correct for g in grade_many(neighbours, workers=1)]
        their_self = [judge(g, g) for g in found]
        their_next = [judge(a, g) for a, g in neighbours]
        rows.append(
            {
                "dataset": name,
                "golds": len(found),
                "unreadable": sum(bool(why_unreadable(g)) for g in found),
                "text_only": sum(is_text_only(g) for g in found),
                "self": {"algorist": sum(mine_self), "math_verify": sum(their_self)},
                "next_equal": {"algorist": sum(mine_next), "math_verify": sum(their_next)},
                "next_disagree": [
                    {"gold": g, "answer": a, "algorist": m, "math_verify": t}
                    for (a, g), m, t in zip(neighbours, mine_next, their_next, strict=True)
                    if m != t
                ][:20],
            }
        )
        print({k: v for k, v in rows[-1].items() if k != "next_disagree"}, flush=True)
    return rows


def import_seconds() -> dict[str, float]:
    """Return the best of five times of importing the grader in a fresh interpreter, beside an empty one (s)."""

    def best(code: str) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - began)
        return round(min(times), 4)

    return {
        "empty": best("pass"),
        "algorist_grader": best("import algorist_grader"),
        "math_verify": best("import math_verify"),
    }


def main() -> None:
    """Run everything and save it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, help="only the first N pairs of each set")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-table", action="store_true")
    options = parser.parse_args()
    payload = {
        "import_s": import_seconds(),
        "speed": speed(options.pairs, options.rounds),
        "datasets": [] if options.no_table else table(options.pairs),
    }
    if options.pairs is None:
        print(save_json("grading", payload))
    print(environment()["libraries"])


if __name__ == "__main__":
    main()

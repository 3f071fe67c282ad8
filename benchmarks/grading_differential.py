"""Rewritings and near-misses of the real golds through our grader and through math-verify; every disagreement is kept.

    python benchmarks/grading_differential.py                  # about 10 minutes; writes baselines/grading_differential.json
    python benchmarks/grading_differential.py --ours           # our verdicts only, about a minute
    python benchmarks/grading_differential.py --kept-aside     # the fifth of the golds that is looked at only at the end
    python benchmarks/grading_differential.py --kinds 40       # up to 40 answers of each rule of grading_kinds, and nothing else

Golds are split by a checksum of their text: one in five is kept aside. What is made of a gold is seeded by the gold, so two
runs compare the same pairs. The arguments for what we decide otherwise than math-verify are in ``ARGUED`` and ``ARGUED_RULES``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import zlib
from collections import defaultdict
from typing import Any

from golds import datasets, golds
from grading_kinds import kinds
from grading_rewritings import FAIR, FAIR_COMPLETIONS, WRONG, WRONG_COMPLETIONS, balanced, bare, is_value
from measure import environment, save_json

from algorist.prompts import get_format
from algorist_grader import grade, grade_completion, is_text_only, why_unreadable

ARGUED = {
    "fair, only we pay": "math-verify cannot read the spelling, or takes another part of the answer for it",
    "fair, only math-verify pays": "a miss of ours; listed one by one in the result",
    "near-miss, only math-verify pays": "math-verify reads the first thing it knows and drops the rest: hedges, negations, names, units, scales",
    "near-miss, only we pay": "a mistake of ours; listed one by one in the result",
}


# Rules of grading_kinds whose disagreements have a reason of their own; the others are spellings that math-verify cannot read.
ARGUED_RULES = {
    "kind: permutations": "5P2, nPr(5,2), P_5^2 and A_5^2 are 20 beside a number; math-verify reads letters, a product or a power",
    "kind: combinations": "C(10,3), nCr and C_10^3 are 120 beside a number (a point beside a point); math-verify reads a letter times a pair",
    "kind: mixed": "'5 and 1/3' is 16/3 beside a number, two answers beside a list; math-verify takes the last number",
    "kind: mixed in words": "'7 and a half' is 15/2; math-verify takes the 7",
    "kind: money": "a currency beside a bare number may be there or missing, as every unit may",
    "kind: cents": "'2 dollars and 78 cents' is 2.78; math-verify takes one of the two numbers",
    "kind: thousands": "4\\,100 and 4 100 with a thin blank are one number; math-verify reads a product",
    "kind: complex": "5-i\\cdot11 is 5-11i and \\mathrm{i} is i, beside a gold with i",
    "kind: choice": "the letter of a choice, however it is marked; another letter stays wrong",
    "kind: number": "fair: a number in words, in quotes or stars. Near-misses: '84 or more', '188 + k', '108?', '2302, …' are not the number; math-verify drops what follows it",
    "kind: root": "n^{0.5} and n**0.5 are roots, exactly; math-verify makes floats of them",
    "kind: two values": "x=20 \\lor x=30 are both values; math-verify takes one",
    "kind: point": "a point may have a name: P(8,-2); another pair stays wrong",
    "kind: up": "x > 5, its set and (5,∞) are one half line",
    "kind: down": "x < -3, its set and (-∞,-3) are one half line",
    "kind: line": "f(x) = 2x+3 says what y = 2x+3 says; another right side stays wrong",
    "kind: degrees": "\\ang{61} is 61 degrees",
    "made: n": "a residue beside a plain number is another answer: 9 is not '\\equiv 9 (mod 12)'",
    "made: n \\pmod{<m>}": "71 and 34 modulo 37 are one residue; math-verify drops the modulus or reads a product",
    "made: x \\equiv n \\pmod{<m>}": "fair: spellings of one residue. Near-misses: another modulus, another unknown, a bare number; math-verify compares the left parts",
    "made: x = nk, k \\in \\mathbb{Z}": "fair: another letter, or no clause where it is meant. Near-misses: 4k+1 for 4k, natural numbers for integers; math-verify compares the clause only",
    "made: \\frac{\\pi}{n}+2k\\pi": "the clause on k may be there, in words or symbols; k over the reals, k > 0 or another period stays wrong",
    "made: x = \\frac{\\pi}{n} + k\\pi, k \\in \\mathbb{Z}": "the letter may be another and run backwards; another period or a missing letter stays wrong",
}
SPELLING = "a spelling that math-verify cannot read"
EXAMPLES = 6


def is_kept_aside(gold: str) -> bool:
    """Say whether a gold belongs to the fifth that is looked at only at the end."""
    return zlib.crc32(gold.encode()) % 5 == 0


def chosen(name: str, most: int, *, aside: bool) -> list[str]:
    """Return up to ``most`` distinct readable golds of a dataset, kinds other than plain integers first."""
    found = [
        g
        for g in dict.fromkeys(golds(name))
        if is_kept_aside(g) == aside and not why_unreadable(g) and len(g) < 200
    ]
    source = random.Random(f"{name}/{aside}")
    source.shuffle(found)
    written = [g for g in found if not bare(g).isdigit() and not is_text_only(g) and balanced(g)]
    return (written[:most] + [g for g in found if bare(g).isdigit()][: most // 4])[: most + most // 4]


def pairs(most: int, *, aside: bool) -> list[dict[str, Any]]:
    """Return the answers: dataset, gold, rule, whether fair, text."""
    rows: list[dict[str, Any]] = []
    for name in datasets():
        for gold in chosen(name, most, aside=aside):
            plain = bare(gold)
            for rule, truth, fair, text in kinds(plain):
                rows.append({"dataset": name, "gold": truth, "rule": rule, "fair": fair, "answer": text})
            for fair, rules in ((True, FAIR), (False, WRONG)):
                for rule, make in rules.items():
                    text = make(plain, random.Random(f"{rule}/{gold}"))
                    if text is not None and (fair or text.strip() != plain):
                        rows.append(
                            {"dataset": name, "gold": gold, "rule": rule, "fair": fair, "answer": text}
                        )
    return rows


def of_kinds(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return up to ``most`` answers of each rule of ``grading_kinds``, fair and not, drawn with a fixed seed."""
    by_rule: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["rule"].startswith(("kind: ", "made: ")):
            by_rule[row["rule"], row["fair"]].append(row)
    return [
        row
        for (rule, fair), found in sorted(by_rule.items())
        for row in random.Random(f"{rule}/{fair}").sample(found, min(most, len(found)))
    ]


def completions(most: int, *, aside: bool) -> list[dict[str, Any]]:
    """Return completions graded in free form and through the prompt formats."""
    rows = []
    for name in datasets():
        for gold in chosen(name, most, aside=aside)[:12]:
            plain = bare(gold)
            if not is_value(plain):
                continue
            for fair, shapes in ((True, FAIR_COMPLETIONS), (False, WRONG_COMPLETIONS)):
                for rule, shape in shapes.items():
                    text = shape.format(*[plain] * 2, other="987654")
                    rows.append({"dataset": name, "gold": gold, "rule": rule, "fair": fair, "answer": text})
    return rows


def routes(row: dict[str, Any]) -> dict[str, bool]:
    """Return the verdict on a completion by each route that reads its markers."""
    text, gold = row["answer"], row["gold"]
    found = {"free form": grade_completion(text, gold).correct}
    names = (
        []
        if row["rule"] == "hashes"
        else ["think_answer", "r1_zero"]
        if "<answer>" in text
        else ["question_only"]
    )
    for name in names:
        found[name] = grade_completion(text, gold, parsed=get_format(name).parse(text)).correct
    return found


def judged(rows: list[dict[str, Any]], *, theirs: bool) -> None:
    """Add the verdicts to the rows."""
    if theirs:
        from grading import math_verify

        their = math_verify()
    for row in rows:
        began = time.process_time()
        verdict = grade(row["answer"], row["gold"])
        row |= {"ours": verdict.correct, "reason": verdict.reason, "cpu_s": time.process_time() - began}
        if theirs:
            row["math_verify"] = their(row["answer"], bare(row["gold"]))


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per rule how many answers were made and how many were paid by each grader."""
    found: dict[tuple[bool, str], dict[str, Any]] = defaultdict(
        lambda: {"made": 0, "paid": 0, "math_verify": 0}
    )
    for row in rows:
        entry = found[(row["fair"], row["rule"])]
        entry["made"] += 1
        entry["paid"] += row["ours"]
        entry["math_verify"] += row.get("math_verify", False)
    return [{"fair": fair, "rule": rule, **entry} for (fair, rule), entry in found.items()]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the shares, every mistake of ours, and the disagreements by kind and rule with examples."""
    fair, wrong = [r for r in rows if r["fair"]], [r for r in rows if not r["fair"]]
    shown = ("dataset", "gold", "rule", "answer", "reason")
    return {
        "fair": len(fair),
        "fair_paid": sum(r["ours"] for r in fair),
        "fair_paid_math_verify": sum(r.get("math_verify", False) for r in fair),
        "near_misses": len(wrong),
        "near_misses_paid": sum(r["ours"] for r in wrong),
        "near_misses_paid_math_verify": sum(r.get("math_verify", False) for r in wrong),
        "slowest_call_cpu_s": max((r["cpu_s"] for r in rows), default=0.0),
        "missed": [{k: r[k] for k in shown} for r in fair if not r["ours"]],
        "wrongly_paid": [{k: r[k] for k in shown} for r in wrong if r["ours"]],
        "disagreements": disagreements(
            [r for r in rows if "math_verify" in r and r["ours"] != r["math_verify"]]
        ),
    }


def disagreements(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what the two graders decide differently: by kind with its argument, by rule with the number and examples."""
    told: dict[str, dict[str, Any]] = {name: {"argument": text, "rules": {}} for name, text in ARGUED.items()}
    for row in rows:
        who = "we pay" if row["ours"] else "math-verify pays"
        rules = told[f"{'fair' if row['fair'] else 'near-miss'}, only {who}"]["rules"]
        entry = rules.setdefault(row["rule"], {"number": 0, "gold and answer": []})
        if row["rule"].startswith(("kind: ", "made: ")):
            entry["argument"] = ARGUED_RULES.get(row["rule"], SPELLING)
        entry["number"] += 1
        if len(entry["gold and answer"]) < EXAMPLES:
            entry["gold and answer"].append([row["gold"], row["answer"]])
    return told


def main() -> None:
    """Make, judge, count, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=int, default=120, help="golds per dataset")
    parser.add_argument("--kinds", type=int, help="only this many answers of each rule of grading_kinds")
    parser.add_argument("--ours", action="store_true", help="leave math-verify out")
    parser.add_argument("--kept-aside", action="store_true", help="the golds kept aside")
    parser.add_argument("--show", type=int, default=5, help="mistakes shown per rule")
    parser.add_argument("--save", default="", help="name of the result; nothing is written without it")
    options = parser.parse_args()
    rows = pairs(options.most, aside=options.kept_aside)
    if options.kinds:
        rows = of_kinds(rows, options.kinds)
    judged(rows, theirs=not options.ours)
    result = summary(rows)
    for entry in sorted(table(rows), key=lambda e: (not e["fair"], e["rule"])):
        mistakes = entry["made"] - entry["paid"] if entry["fair"] else entry["paid"]
        if mistakes:
            print(
                f"{'missed' if entry['fair'] else 'PAID'} {mistakes:5d} of {entry['made']:5d}  {entry['rule']}"
            )
            listed = [
                r
                for r in rows
                if r["rule"] == entry["rule"] and r["fair"] == entry["fair"] and r["ours"] != r["fair"]
            ]
            for row in listed[: options.show]:
                print(f"        {row['dataset']:14s} {row['gold']!r:40s} {row['answer']!r}  {row['reason']}")
    texts = [] if options.kinds else completions(options.most, aside=options.kept_aside)
    odd = [
        (row["rule"], route, row["answer"])
        for row in texts
        for route, paid in routes(row).items()
        if paid != row["fair"]
    ]
    for rule in dict.fromkeys(r for r, _, _ in odd):
        print(
            f"completions: {rule}: {sum(r == rule for r, _, _ in odd)} wrong, by {sorted({way for r, way, _ in odd if r == rule})}"
        )
    result |= {
        "completions": len(texts),
        "completions_wrong": len(odd),
        "table": table(rows),
        "golds_kept_aside": options.kept_aside,
    }
    print(
        {k: v for k, v in result.items() if isinstance(v, (int, float))},
        environment()["libraries"],
        file=sys.stderr,
    )
    if options.save:
        print(save_json(options.save, result))


if __name__ == "__main__":
    main()

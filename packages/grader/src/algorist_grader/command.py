"""The command ``grade``: answers and completions against their golds, a verdict a line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from algorist_grader.errors import AlgoristError, ConfigError
from algorist_grader.grade import grade, grade_completion
from algorist_grader.matchers import MATCHERS
from algorist_grader.types import Grade, Parsed


def grade_rows(
    rows: Iterable[Mapping[str, Any]], matcher: str, parse: Callable[[str], Parsed] | None = None
) -> Iterator[Grade]:
    """Grade rows with ``gold`` and one of ``answer`` (None: there is none) and ``completion``; ``parse`` reads completions in a prompt format.

    Raises:
        ConfigError: A row lacks one of them.
    """
    for number, row in enumerate(rows, 1):
        gold, answer, text = (row.get(name) for name in ("gold", "answer", "completion"))
        if gold is None or not {"answer", "completion"} & row.keys():
            raise ConfigError(
                f"row {number}: expected gold and one of answer, completion; write --answer 0.5 --gold 1/2"
            )
        if text is None:
            yield grade(None if answer is None else str(answer), str(gold), matcher=matcher)
        else:
            yield grade_completion(str(text), str(gold), parsed=parse and parse(str(text)), matcher=matcher)


def present(**values: str | None) -> dict[str, str]:
    """Return the values that are there, as a row."""
    return {name: value for name, value in values.items() if value is not None}


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """Write a verdict as one line of text."""
    rest = [f"{key} {verdict[key]}" for key in ("extracted", "gold") if verdict[key]]
    return " · ".join([f"{'right' if verdict['correct'] else 'wrong'}: {verdict['reason']}", *rest])


def main(arguments: Sequence[str] | None = None) -> int:
    """Grade answers: exit 0 when all are right, 1 otherwise, 2 for a mistake in the call."""
    parser = argparse.ArgumentParser(
        prog="grade",
        description=main.__doc__,
        epilog=r"Example: grade '\frac{2}{4}' 0.5 · grade --completion 'so \boxed{0.5}' --gold 1/2",
    )
    parser.add_argument("answer", nargs="?", help="an answer")
    parser.add_argument("gold", nargs="?", help="the gold answer")
    parser.add_argument(
        "--answer", dest="named_answer", metavar="TEXT", help="the same, for texts with a dash"
    )
    parser.add_argument("--gold", dest="named_gold", metavar="TEXT")
    parser.add_argument("--completion", metavar="TEXT", help="a whole completion; its answer is extracted")
    parser.add_argument(
        "--file", metavar="FILE", help="JSONL with answer or completion, and gold; - reads standard input"
    )
    parser.add_argument(
        "--matcher", default="symbolic", choices=MATCHERS.names(), help="how answers are compared"
    )
    parser.add_argument("--json", action="store_true", help="print the verdicts as a JSON list")
    options = parser.parse_args(arguments)
    answer, gold = options.named_answer or options.answer, options.named_gold or options.gold
    if options.completion is not None and gold is None:
        answer, gold = None, answer
    try:
        rows = (
            _rows(options.file)
            if options.file
            else [present(answer=answer, completion=options.completion, gold=gold)]
        )
        verdicts = [asdict(verdict) for verdict in grade_rows(rows, options.matcher)]
    except (AlgoristError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    if options.json:
        print(json.dumps(verdicts))
    else:
        print("\n".join(map(verdict_line, verdicts)))
    return 0 if all(verdict["correct"] for verdict in verdicts) else 1


def _rows(name: str) -> Iterator[dict[str, Any]]:
    with open(0 if name == "-" else name, encoding="utf-8", closefd=name != "-") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.strip() else None
            except ValueError as error:
                raise ConfigError(f"{name}, line {number} is no JSON: {error}") from error
            if row is not None and not isinstance(row, dict):
                raise ConfigError(f'{name}, line {number}: expected {{"answer": "0.5", "gold": "1/2"}}')
            if row:
                yield row

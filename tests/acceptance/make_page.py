"""Write README.md from table.yaml: ``python -m tests.acceptance.make_page`` (``--check`` only compares).

The table maps each item of the five reference systems to the tests that show it. Its entries have:

    says     the item in a few words
    tests    tests that show it, as path::name below tests/
    reason   why it is not built as the original has it, or what stands in its place
    missing  what is lacking
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
TABLE = FOLDER / "table.yaml"
PAGE = FOLDER / "README.md"
KEYS = {"says", "tests", "reason", "missing"}
SYSTEMS = {
    "S0": "OneShotGRPO: GSM8K, `<reasoning>` and `<answer>`",
    "S1": "SFT then GRPO with LoRA: OpenMathReasoning, DAPO",
    "S2": "the GSM8K gist with fine-grained rewards",
    "S3": "policy gradients on MATH: SFT, grader, public functions",
    "S4": "the R1-Zero reproduction: NuminaMath-TIR, five rewards",
}
INTRODUCTION = """\
# Acceptance table

Written by `python -m tests.acceptance.make_page` from `table.yaml`; a test compares the two and looks every
named test up in its file. Each row is one item of the five reference systems (S0 … S4) and what shows that algorist
does it. *Instead* says why a thing is not as in the original, **missing** what is not there yet.
"""


def read_table(path: Path = TABLE) -> dict[str, dict[str, Any]]:
    """Return item → entry, in the file's order.

    Raises:
        ValueError: An item stands twice.
    """
    text = path.read_text(encoding="utf-8")
    first = re.findall(r"^([A-Z][\d.]+):", text, re.MULTILINE)
    twice = [item for item, count in Counter(first).items() if count > 1]
    if twice:
        raise ValueError(f"{path.name} has {', '.join(twice)} more than once; keep one entry for each item")
    return dict(yaml.safe_load(text))


def mistakes(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the table: unknown keys, entries that show nothing, tests that do not exist."""
    found = []
    for item, entry in table.items():
        if unknown := set(entry) - KEYS:
            found.append(f"{item}: unknown {', '.join(sorted(unknown))}; expected {', '.join(sorted(KEYS))}")
        if not str(entry.get("says") or "").endswith("."):
            found.append(
                f"{item}: says is missing or is no sentence; write the item in a few words and a full stop"
            )
        if not any(entry.get(key) for key in ("tests", "reason", "missing")):
            found.append(f"{item}: neither tests nor reason nor missing; name a test that shows it")
        for name in entry.get("tests", []):
            path, _, test = name.partition("::")
            if not test or test not in tests_in(path):
                found.append(f"{item}: no test {name} below tests/")
    return found


@cache
def tests_in(path: str) -> frozenset[str]:
    """Return the names of the test functions of a file below ``tests/``; none if there is no such file."""
    file = FOLDER.parent / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(
        n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
    )


def status(entry: Mapping[str, Any]) -> str:
    """Return ``missing``, ``in part`` (some of it is missing), ``instead`` (a reason, no test) or ``shown``."""
    if entry.get("missing"):
        return "in part" if entry.get("tests") else "missing"
    return "shown" if entry.get("tests") else "instead"


def order(item: str) -> tuple[str, int]:
    """Return the sorting key of an item such as ``S3.27``."""
    system, _, number = item.partition(".")
    return system, int(number)


def page(table: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the whole page."""
    counts = Counter(status(entry) for entry in table.values())
    told = ", ".join(f"{counts[name]} {name}" for name in ("shown", "instead", "in part", "missing"))
    another = sum(status(entry) == "shown" and bool(entry.get("reason")) for entry in table.values())
    told += f". Of those shown, {another} differ from the original, with the reason beside"
    parts = [INTRODUCTION, f"{len(table)} items: {told}.\n"]
    for system, title in SYSTEMS.items():
        rows = [item for item in sorted(table, key=order) if item.startswith(f"{system}.")]
        parts += [f"## {system}: {title}\n", "| item | what it asks | shown by |", "|---|---|---|"]
        parts += [f"| {item} | {_cell(table[item]['says'])} | {_shown(table[item])} |" for item in rows]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _shown(entry: Mapping[str, Any]) -> str:
    parts = [_by_file(entry["tests"])] if entry.get("tests") else []
    parts += [f"*Instead*: {_cell(entry['reason'])}"] if entry.get("reason") else []
    parts += [f"**missing**: {_cell(entry['missing'])}"] if entry.get("missing") else []
    return "<br>".join(parts)


def _by_file(tests: Iterable[str]) -> str:
    found: dict[str, list[str]] = {}
    for name in tests:
        path, _, test = name.partition("::")
        found.setdefault(path, []).append(f"`{test}`")
    return "<br>".join(f"`tests/{path}`: {', '.join(names)}" for path, names in found.items())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` say whether it is up to date; exit 1 for mistakes in the table."""
    table = read_table()
    if found := mistakes(table):
        print("\n".join(found), file=sys.stderr)
        return 1
    text = page(table)
    if "--check" in arguments:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    print(next(line for line in text.splitlines() if line[:1].isdigit()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

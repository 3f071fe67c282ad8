"""Local names say what they hold, and messages are in plain English: what DESIGN forbids may only become less."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "algorist"
NAMES = {"found", "told", "given", "kept", "asked", "wanted", "chosen", "there"}
CLEAN = {
    "config", "data", "diagnosis", "evaluation", "grading", "objectives", "preflight", "prompts", "report", "rewards", "store",
    "child_process.py",
}  # fmt: skip
"""Rooms that have none left."""
CEILING = 60
"""Uses of such names in the other rooms: lower it when you rename some."""
PHRASES = re.compile(
    r"\b(behind|stands|goes on|has not(?! (?:been|begun|had|\w+ed)\b)|by itself|of one's own|to say honestly)\b"
)
MOST_PHRASES = 50
"""Lines of the other rooms with such a phrase: lower it too."""


def uses(path: Path) -> int:
    """Return how often a file uses a forbidden name, as variable, argument or attribute."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = (
        getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
        for node in nodes
    )
    return sum(name in NAMES for name in names)


def phrases(path: Path) -> int:
    """Return how many lines of a file have a forbidden phrase."""
    return sum(bool(PHRASES.search(line)) for line in path.read_text(encoding="utf-8").splitlines())


def by_room(count: Counter[str]) -> tuple[dict[str, int], int]:
    """Return the counts of the clean rooms that have one, and the sum of the others."""
    return {room: n for room, n in count.items() if room in CLEAN and n}, sum(
        n for room, n in count.items() if room not in CLEAN
    )


def test_forbidden_names_and_phrases_only_become_less() -> None:
    names, lines = Counter[str](), Counter[str]()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        names[room] += uses(path)
        lines[room] += phrases(path)
    assert by_room(names)[0] == {} and by_room(names)[1] <= CEILING, names
    assert by_room(lines)[0] == {} and by_room(lines)[1] <= MOST_PHRASES, lines

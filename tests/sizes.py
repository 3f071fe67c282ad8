"""What may only become less: code lines per room, words of the documents, names and phrases that DESIGN forbids: ``python -m tests.sizes``."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "algorist"
GRADER = ROOT / "packages/grader/src/algorist_grader"
BESIDE = {"diagnosis", "report", "preflight", "cli", "recipes", "extensions", "grader"}
"""Rooms beside the core, and the grader, a package of its own."""
BUDGET = {"core": 17_500, "all": 27_000, "an extension": 600, "vllm": 900}
HELD = {"core": 16_992, "all": 34_575}
"""What the house has now. While it is above the budget it may only go down: lower these when you take something out."""
HELD_EXTENSIONS = {"extensions/toolkit": 648}
"""Extensions above their budget, held in the same way."""
WRITTEN_BY_COMMANDS = ("settings", "json", "troubleshooting", "recipes", "rewards", "estimators")
MOST_WORDS = {"by hand": 12_450, "by commands": 9_550}
"""Ceilings of README and docs/, without the bars of tables; they may only go down."""
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Return how many lines of a Python file hold code; a string that is a statement (a docstring) is none."""
    tree = ast.parse(text)
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


@functools.cache
def rooms(source: Path = SOURCE) -> dict[str, int]:
    """Return the code lines of each room: a folder, or ``top`` for the files beside them; ``extensions/NAME``; ``grader``."""
    sizes: dict[str, int] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        room = parts[0] if len(parts) > 1 else "top"
        if room == "extensions":
            room = "/".join([room, *([parts[1].removesuffix(".py")] if parts[1] != "__init__.py" else [])])
        sizes[room] = sizes.get(room, 0) + code_lines(path.read_text(encoding="utf-8"))
    sizes["grader"] = sum(code_lines(path.read_text(encoding="utf-8")) for path in GRADER.rglob("*.py"))
    return sizes


def totals(sizes: dict[str, int]) -> dict[str, int]:
    """Return the code lines of the core and of everything."""
    core = sum(lines for room, lines in sizes.items() if room.partition("/")[0] not in BESIDE)
    return {"core": core, "all": sum(sizes.values())}


def table(sizes: dict[str, int]) -> str:
    """Return the rooms, the extensions and the sums as lines of text."""
    sums = totals(sizes)
    core = [room for room in sizes if room.partition("/")[0] not in BESIDE]
    beside = [room for room in sizes if room not in core and "/" not in room and room != "extensions"]
    parts = [room for room in sizes if room.partition("/")[0] == "extensions"]
    lines = []
    for title, names in (("core", core), ("beside it", beside), ("extensions", parts)):
        lines.append(f"{title:<34} {sum(sizes[name] for name in names):>7,}")
        lines += [f"  {name:<32} {sizes[name]:>7,}" for name in sorted(names, key=lambda name: -sizes[name])]
    lines += [
        f"{name:<34} {sums[name]:>7,}  held at {HELD[name]:,}, budget {BUDGET[name]:,}" for name in HELD
    ]
    return "\n".join(lines)


def words() -> dict[str, int]:
    """Return the words of README and docs/, of the pages that are written by hand and of those that commands write."""
    counts = {"by hand": 0, "by commands": 0}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        kind = "by commands" if page.stem in WRITTEN_BY_COMMANDS else "by hand"
        counts[kind] += len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8")))
    return counts


def extension_budget(room: str) -> int:
    """Return the most code lines of an extension."""
    name = room.partition("/")[2]
    return BUDGET.get(name, BUDGET["an extension"])


def main() -> None:
    """Print everything that is held."""
    from tests.unit.test_names import phrases, uses

    print(table(rooms()))
    counted = words()
    print(f"words of the documents {sum(counted.values()):,}: {counted}, held at {MOST_WORDS}")
    files = [*SOURCE.rglob("*.py"), *GRADER.rglob("*.py")]
    print(f"forbidden names {sum(map(uses, files))}, lines with forbidden phrases {sum(map(phrases, files))}")


if __name__ == "__main__":
    main()

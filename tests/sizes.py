"""What may only become less: what must be read to understand a file, the core, words of the documents, forbidden names: ``python -m tests.sizes``.

What must be read is the import closure of a file in code lines: itself and all that it imports at module level in this project. A
package under packages/ is another project: what is in it does not count.
"""

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
MOST_LINES = {
    "core": 16_575,
    "objectives.losses": 800,
    "training.step": 3_300,
    "rollouts.collect": 2_000,
    "training.grpo": 6_080,
    "runs.pipeline": 12_045,
}
"""The most code lines of the core, and of the import closures of files. A limit may only be lowered: ``test_sizes`` reads the history."""
AIMS: dict[str, int] = {}
"""Closures that are still above their aim."""
EXTENSION, EXTENSIONS = 600, {"vllm": 900}
"""The most code lines of an extension, and of those with a limit of their own."""
HELD_EXTENSIONS = {"extensions/toolkit": 618}
"""Extensions above that: this may only go down."""
WRITTEN_BY_COMMANDS = ("settings", "json", "troubleshooting", "recipes", "rewards", "estimators")
MOST_WORDS = {"by hand": 13_080, "by commands": 10_009}
"""Ceilings of README and docs/, without the bars of tables; they may only go down."""
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@functools.cache
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


def table(counts: dict[str, int]) -> str:
    """Return the rooms, the extensions and the sums as lines of text."""
    sums = totals(counts)
    core = [room for room in counts if room.partition("/")[0] not in BESIDE]
    beside = [room for room in counts if room not in core and "/" not in room and room != "extensions"]
    parts = [room for room in counts if room.partition("/")[0] == "extensions"]
    lines = []
    for title, names in (("core", core), ("beside it", beside), ("extensions", parts)):
        lines.append(f"{title:<34} {sum(counts[name] for name in names):>7,}")
        lines += [
            f"  {name:<32} {counts[name]:>7,}" for name in sorted(names, key=lambda name: -counts[name])
        ]
    lines.append(f"{'all':<34} {sums['all']:>7,}")
    lines += [
        f"{name:<34} {now:>7,}  limit {MOST_LINES[name]:,}"
        + (f", aim {AIMS[name]:,}" if name in AIMS else "")
        for name, now in sizes().items()
    ]
    return "\n".join(lines)


def words() -> dict[str, int]:
    """Return the words of README and docs/, of the pages that are written by hand and of those that commands write."""
    counts = {"by hand": 0, "by commands": 0}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        kind = "by commands" if page.stem in WRITTEN_BY_COMMANDS else "by hand"
        counts[kind] += len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8")))
    return counts


def extension_limit(room: str) -> int:
    """Look up the most code lines of an extension."""
    return HELD_EXTENSIONS.get(room, EXTENSIONS.get(room.partition("/")[2], EXTENSION))


@functools.cache
def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Map the name of each module, without ``algorist.``, to its file."""
    names = {}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@functools.cache
def imports(path: Path) -> set[str]:
    """List the modules of this project that a file imports when it is loaded, without ``algorist.``."""
    names: set[str] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.update([str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)])
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                visit([*node.body, *node.orelse])
            elif isinstance(node, ast.Try):
                visit([*node.body, *(inner for handler in node.handlers for inner in handler.body)])

    visit(ast.parse(path.read_text(encoding="utf-8")).body)
    return {
        name.removeprefix("algorist.") for name in names if name.startswith("algorist.")
    } & modules().keys()


def closure(start: str) -> set[str]:
    """List the modules that must be read to understand one: itself, its packages, and all that these import."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name in seen or not name or name not in modules():
            continue
        seen.add(name)
        todo += [*imports(modules()[name]), name.rpartition(".")[0]]
    return seen


def sizes() -> dict[str, int]:
    """Count what ``MOST_LINES`` limits."""
    files = {
        name: sum(code_lines(modules()[m].read_text(encoding="utf-8")) for m in closure(name))
        for name in MOST_LINES
        if "." in name
    }
    return {"core": totals(rooms())["core"], **files}


def limits_in(text: str) -> dict[str, int]:
    """Read ``MOST_LINES`` in the text of this file, of now or of an earlier commit; empty where there is none."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MOST_LINES":
            return dict(ast.literal_eval(node.value))
    return {}


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

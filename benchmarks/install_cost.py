"""What each dependency costs: megabytes, megabytes that only it brings, processor seconds to import it (with all that it imports), and who imports it.

Run with the Python of the environment to measure, such as a fresh one that holds the wheel: ``python benchmarks/install_cost.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

IMPORTED_AS = {
    "antlr4-python3-runtime": "antlr4", "math-verify": "math_verify", "pyyaml": "yaml", "huggingface-hub": "huggingface_hub",
}  # fmt: skip


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name: str) -> list[str]:
    """Return what a distribution requires here, extras left out."""
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in distribution(name).requires or ()]
    return [normal(r.name) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]


def closure(names: Iterable[str]) -> set[str]:
    """Return distributions and all that they require, installed here."""
    seen: set[str] = set()
    queue = [*names]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        try:
            more = required(name)
        except PackageNotFoundError:
            continue
        seen.add(name)
        queue += more
    return seen


def megabytes(names: Iterable[str]) -> float:
    """Return the size of the files of distributions; compiled bytecode counts."""
    paths = {Path(str(file.locate())) for name in names for file in distribution(name).files or ()}
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def import_seconds(module: str, times: int) -> float:
    """Return the least processor time of ``import module`` in a fresh process, without the start of Python."""

    def of(code: str) -> float:
        began = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        ended = os.times()
        return ended.children_user + ended.children_system - began.children_user - began.children_system

    return max(0.0, min(of(f"import {module}") for _ in range(times)) - min(of("") for _ in range(times)))


def importers(module: str) -> str:
    """Return which rooms of the package import a module."""
    spec = importlib.util.find_spec("algorist")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    line = re.compile(rf"^\s*(?:import|from) {module}\b", re.MULTILINE)
    rooms = {
        "/".join(file.relative_to(package).parts[: 2 if "extensions" in file.parts else 1])
        for file in package.rglob("*.py")
        if line.search(file.read_text(encoding="utf-8"))
    }
    return ", ".join(sorted(room.removesuffix(".py") for room in rooms)) or "nothing here, another one's"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--times", type=int, default=2, help="imports of each, the fastest counts")
    times = options.parse_args().times
    direct = sorted(set(required("algorist")))
    everything = closure(direct)
    rows = []
    for name in direct:
        alone = everything - closure(other for other in direct if other != name)
        module = IMPORTED_AS.get(name, name)
        rows.append(
            (
                megabytes([name]),
                megabytes(alone),
                import_seconds(module, times),
                name,
                importers(module),
                alone,
            )
        )
    print("| package | MB | MB only for it | import s | imported by |\n|---|---|---|---|---|")
    for own, only, seconds, name, by, alone in sorted(rows, reverse=True):
        others = f" (with {len(alone) - 1} more)" if len(alone) > 1 else ""
        print(f"| {name} | {own:.1f} | {only:.1f}{others} | {seconds:.2f} | {by} |")
    print(f"\n{len(everything)} packages, {megabytes(everything):.0f} MB")


if __name__ == "__main__":
    main()

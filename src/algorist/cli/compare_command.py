"""``algorist compare A B``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.terminal import Line, Result, View, closing_table, table, verb
from algorist.errors import ConfigError, DataError, nearest
from algorist.store.safe_text import one_line
from algorist.store.stages import EVALUATED, STAGES

if TYPE_CHECKING:
    from algorist.evaluation.artifact import Artifact

app = typer.Typer(add_completion=False)

SHOWN = 10
"""Flipped problems that are shown of each kind; ``--json`` has all of them."""


class Compared(Result):
    """Two evaluations of the same problems."""

    first: Annotated[str, "the evaluation before"]
    second: Annotated[str, "the evaluation after"]
    n: Annotated[int, "problems that both have"]
    differences: Annotated[dict[str, Any], "metric → paired difference: value, low, high (95 %), n"]
    gained: Annotated[list[str], "ids of problems that turned right (greedy)"]
    lost: Annotated[list[str], "ids of problems that turned wrong (greedy)"]
    p_value: Annotated[float | None, "McNemar's exact test of the greedy answers"]
    sampled_p_value: Annotated[float | None, "permutation test of the sampled accuracy"]
    warnings: Annotated[list[str], "what makes them hard to compare"]
    settings: Annotated[dict[str, list[str]], "key → its values, where they differ"]
    parts: Annotated[dict[str, Any] | None, "reason → gain"]
    next: Annotated[str | None, "the command for one page about both runs"]
    questions: dict[str, str]
    before: Any
    after: Any
    names: Sequence[str]
    draws: int
    reference: str

    def view(self, width: int) -> View:
        from algorist.cli.few_problems import too_few
        from algorist.evaluation.compare import without_the_form

        for key, values in self.settings.items():
            yield f"{key}: {one_line(values[0], 60)} → {one_line(values[1], 60)}"
        yield closing_table(width, self.before, self.after, self.differences, self.names, only=None)
        flips = f" · greedy answers: {len(self.gained)} turned right, {len(self.lost)} turned wrong, McNemar's exact p = "
        yield f"{self.n} problems" + ("" if self.p_value is None else f"{flips}{self.p_value:.2g}")
        if remains := without_the_form(self.differences):
            yield remains
        if self.parts is not None:
            yield from self._gain()
        if self.sampled_p_value is not None:
            yield f"sampled accuracy: permutation test p = {self.sampled_p_value:.2g}"
        for what, problems in (("turned right", self.gained), ("turned wrong", self.lost)):
            if problems:
                yield f"{what}:"
            for name in problems[:SHOWN]:
                yield Line(f"  {name}  {one_line(self.questions[name], max(30, min(90, width - 17)))}")
            if len(problems) > SHOWN:
                yield f"  … and {len(problems) - SHOWN} more (--json has them all)"
        few = too_few(self.n, self.draws, self.reference)
        for text in [*([few] if few else []), *self.warnings]:
            yield f"warning: {text}"
        if self.next:
            yield f"both runs in one page: {self.next}"

    def _gain(self) -> View:
        """Yield the parts of the gain in a table, and in a sentence what they add up to."""

        def points(interval: Any) -> str:
            value, low, high = (100 * number for number in (interval.value, interval.low, interval.high))
            return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"

        parts = self.parts or {}
        rows = [
            [name, f"{part.before:.1%}", f"{part.after:.1%}", points(part.gain)]
            for name, part in parts.items()
            if not part.total
        ]
        yield table(("wrong by", "before", "after", "points of the gain"), rows)
        totals = [f"{name} {points(part.gain)}" for name, part in parts.items() if part.total]
        yield f"points of the gain: {', '.join(totals)}"


@verb(app)
def compare(
    before: Path,
    after: Path,
    score: list[str] | None = None,
    plugin: list[str] | None = None,
    parts: bool = False,
) -> Compared:
    """Compare two evaluations on the problems that both have: paired differences, McNemar's test, flipped problems.

    Args:
        before: An evaluation, RUN/eval/NAME.json; a run: that of its last stage; a log of inspect_ai (.eval, .json); samples of lm-eval
            (samples_TASK_TIME.jsonl).
        after: The other one.
        score: Which score of another program's file counts; given twice: of the first, of the second.
        plugin: A Python file of yours with an @importer for further files.
        parts: Also where the gain comes from: format, length, extraction, arithmetic, operations.

    Example: algorist compare runs/quickstart/eval/sft.json runs/quickstart/eval/grpo.json
    """
    import algorist.config.schema  # noqa: F401  (finds the extensions, and so who reads other files)
    from algorist.evaluation.compare import compare as compare_artifacts
    from algorist.evaluation.compare import on_common_problems
    from algorist.evaluation.doors import BREAKDOWNS
    from algorist.user_code import load_plugins

    load_plugins(plugin or [])
    paths, scores = (before, after), score or []
    if len(scores) > 2:
        raise ConfigError("--score is given more than twice; expected one for both files, or one for each")
    first, second = (
        _read(path, scores[i if len(scores) == 2 else 0] if scores else None) for i, path in enumerate(paths)
    )
    comparison = compare_artifacts(first, second)
    first, second, _ = on_common_problems(first, second)
    parents = [parent for path in paths for parent in (path.resolve(), *path.resolve().parents[:2])]
    runs = list(dict.fromkeys(p for p in parents if (p / "metrics.jsonl").is_file()))
    settings: dict[str, list[str]] = {}
    if len(runs) == 2:
        from algorist.report.build import differing

        settings = {key: list(values) for key, values in differing(runs)}
    questions = {row["problem_id"]: str(row["question"]) for row in second.samples}
    problem = next(iter(questions), None)
    return Compared(
        parts=BREAKDOWNS.get("parts")(first.samples, second.samples) if parts else None,
        **{f.name: getattr(comparison, f.name) for f in fields(comparison)},
        settings=settings,
        next=f"algorist report {shlex.join(map(str, runs))}" if len(runs) == 2 else None,
        questions=questions,
        before=first.metrics,
        after=second.metrics,
        names=[
            a.name if "imported" in a.protocol else path.stem
            for a, path in zip((first, second), paths, strict=True)
        ],
        reference=second.protocol.get("protocol") or "",
        draws=sum(row["problem_id"] == problem for row in second.samples) - 1,
    )


def _read(path: Path, score: str | None) -> Artifact:
    """Return an evaluation of algorist's, or of another program's file."""
    from algorist.cli.imported import fits, forms, read_imported
    from algorist.evaluation.artifact import read_artifact

    if path.is_file() and not path.with_suffix(".parquet").is_file():
        if fits(path):
            return read_imported(path, score)
        raise DataError(f"{path} is no evaluation; expected a run folder, RUN/eval/NAME.json, {forms()}")
    return read_artifact(*_evaluation(path))


def _evaluation(path: Path) -> tuple[Path, str]:
    """Return the folder and the name of an evaluation; of a run folder, its last stage's.

    Raises:
        DataError: Nothing is there.
    """
    from algorist.evaluation.artifact import artifact_names

    if not path.is_dir() and not (path.parent.is_dir() and artifact_names(path.parent)):
        missing = next(p for p in (path, *path.parents) if p.parent.is_dir())
        beside = [p.name for p in missing.parent.iterdir() if p != missing]
        raise DataError(
            f"no run or evaluation at {path}.{nearest(missing.name, beside)} Expected a run folder or RUN/eval/NAME.json"
        )
    if not path.is_dir():
        return path.parent, path.name.removesuffix(".json")
    folder = path / "eval" if (path / "eval").is_dir() else path
    names = artifact_names(folder)
    return folder, next((name for name in reversed(EVALUATED) if name in names), (names or [STAGES[-1]])[-1])

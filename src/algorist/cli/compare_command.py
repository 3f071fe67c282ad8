"""``algorist compare A B``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.terminal import closing_table, console, say
from algorist.errors import DataError, nearest
from algorist.store.safe_text import json_text, one_line
from algorist.store.stages import EVALUATED, STAGES

if TYPE_CHECKING:
    from algorist.evaluation.compare import Comparison

app = typer.Typer(add_completion=False)

ArtifactPath = Annotated[
    Path, typer.Argument(help="An evaluation, RUN/eval/NAME.json, or a run: that of its last stage.")
]
SHOWN = 10
"""Flipped problems that are shown of each kind; ``--json`` has all of them."""


@app.command(epilog="Example: algorist compare runs/quickstart/eval/sft.json runs/quickstart/eval/grpo.json")
def compare(
    before: ArtifactPath,
    after: ArtifactPath,
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as one JSON object.")] = False,
) -> None:
    """Compare two evaluations on the problems that both have: paired differences, McNemar's test, flipped problems."""
    from algorist.evaluation.artifact import read_artifact
    from algorist.evaluation.compare import compare as compare_artifacts
    from algorist.evaluation.compare import on_common_problems

    places = [_evaluation(path) for path in (before, after)]
    first, second = (read_artifact(folder, name) for folder, name in places)
    found = compare_artifacts(first, second)
    first, second, _ = on_common_problems(first, second)
    if as_json:
        print(json_text(asdict(found)))
        return
    parents = [parent for folder, _ in places for parent in (folder.resolve(), folder.resolve().parent)]
    runs = list(dict.fromkeys(p for p in parents if (p / "metrics.jsonl").is_file()))
    if len(runs) == 2:
        from algorist.report.overlay import differing

        for key, values in differing(runs):
            say(f"{key}: {one_line(values[0], 60)} → {one_line(values[1], 60)}")
    closing_table(
        console(), first.metrics, second.metrics, found.differences, (before.stem, after.stem), only=None
    )
    say(_told(found, second.samples))
    if len(runs) == 2:
        say(f"both runs in one page: algorist report {shlex.join(map(str, runs))}")


def _told(found: Comparison, samples: Sequence[Mapping[str, Any]]) -> str:
    from algorist.evaluation.compare import without_the_form
    from algorist.evaluation.protocols import too_few

    questions = {row["problem_id"]: row["question"] for row in samples}
    lines = [
        f"{found.n} problems · greedy answers: {len(found.gained)} turned right, {len(found.lost)} turned wrong, "
        f"McNemar's exact p = {found.p_value:.2g}"
    ]
    remains = without_the_form(found.differences)
    lines += [remains] if remains else []
    if found.sampled_p_value is not None:
        lines.append(f"sampled accuracy: permutation test p = {found.sampled_p_value:.2g}")
    for what, problems in (("turned right", found.gained), ("turned wrong", found.lost)):
        if problems:
            lines.append(f"{what}:")
            lines += [f"  {name}  {one_line(str(questions[name]), 90)}" for name in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"  … and {len(problems) - SHOWN} more (--json has them all)")
    first = next(iter(questions), None)
    draws = sum(row["problem_id"] == first for row in samples) - 1
    few = too_few(found.n, draws)
    lines += [f"warning: {few}"] if few else []
    return "\n".join([*lines, *(f"warning: {text}" for text in found.warnings)])


def _evaluation(path: Path) -> tuple[Path, str]:
    """Return the folder and the name of an evaluation; of a run folder, its last stage's.

    Raises:
        DataError: Nothing is there.
    """
    from algorist.evaluation.artifact import artifact_names

    if not path.is_dir() and not (path.parent.is_dir() and artifact_names(path.parent)):
        missing = next(p for p in (path, *path.parents) if p.parent.is_dir())
        beside = [p.name for p in missing.parent.iterdir()]
        raise DataError(
            f"no run or evaluation at {path}.{nearest(missing.name, beside)} Expected a run folder or RUN/eval/NAME.json"
        )
    if not path.is_dir():
        return path.parent, path.name.removesuffix(".json")
    folder = path / "eval" if (path / "eval").is_dir() else path
    there = artifact_names(folder)
    return folder, next((name for name in reversed(EVALUATED) if name in there), (there or [STAGES[-1]])[-1])

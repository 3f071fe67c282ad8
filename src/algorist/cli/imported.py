"""Evaluations of other programs as artifacts, so that they are compared with ours; ``@importer`` registers who reads which file."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from algorist.config.schema import EvalSection
from algorist.errors import DAMAGED, DataError, nearest
from algorist.evaluation.artifact import Artifact
from algorist.evaluation.compare import metrics_of
from algorist.evaluation.doors import IMPORTERS, Foreign

OWN = "correct"
"""The score of algorist's own rows."""


def fits(path: Path) -> str | None:
    """Return the importer that reads files of this name, or None."""
    return next((n for n in IMPORTERS if any(fnmatch(path.name, p) for p in IMPORTERS.get(n).patterns)), None)


def forms() -> str:
    """List the files that can be read, for messages."""
    return ", ".join(f"{' or '.join(IMPORTERS.get(name).patterns)} of {name}" for name in IMPORTERS)


def read_imported(path: Path, score: str | None = None) -> Artifact:
    """Return the evaluation in another program's file.

    Args:
        path: The file; ``fits`` says who reads it.
        score: Which of its scores counts; may be left out where there is one. A part between commas suffices.

    Raises:
        DataError: It is damaged, has no score, or several and none or an unknown one is named.
    """
    name = fits(path)
    if name is None:
        raise DataError(f"{path} is no evaluation that is known; expected {forms()}")
    try:
        foreign = IMPORTERS.get(name).read(path)
    except DataError:
        raise
    except DAMAGED as error:
        raise DataError(
            f"{path} is no evaluation that {name} wrote, or it is damaged ({type(error).__name__}: {error})"
        ) from None
    own = all("greedy" in row for row in foreign.rows)
    score = _score(path, foreign, score or (OWN if own else None))
    rows = [row | {OWN: row["scores"].get(score)} for row in foreign.rows]
    scored = [row for row in rows if row[OWN] is not None]
    if not scored:
        raise DataError(f"{path}: no completion has a number for the score '{score}'")
    yes_or_no = all(row[OWN] in (0, 1) for row in scored)
    alone = yes_or_no and max(Counter(row["problem_id"] for row in scored).values()) == 1
    for row in scored:
        row[OWN] = bool(row[OWN]) if yes_or_no else float(row[OWN])
        row.setdefault("greedy", alone and not foreign.protocol.get("temperature"))
        row.setdefault("extracted", None)
    protocol = {**foreign.protocol, "imported": name} | ({} if own and score == OWN else {"score": score})
    if len(scored) < len(rows):
        protocol["unscored"] = len(rows) - len(scored)
    metrics = metrics_of(scored, protocol.get("ks") or EvalSection().ks)
    return Artifact(
        f"{foreign.task} ({foreign.model})", foreign.model, foreign.task, protocol, metrics, scored
    )


def _score(path: Path, foreign: Foreign, score: str | None) -> str:
    names: list[str] = list(dict.fromkeys(name for row in foreign.rows for name in row["scores"]))
    matches = [n for n in names if n == score] or [n for n in names if score in (None, *n.split(","))]
    if len(matches) == 1:
        return matches[0]
    if not names:
        raise DataError(f"{path} has no scores; compare needs an evaluation whose completions are scored")
    known = f"it has {', '.join(names)}; choose one: --score {names[0]}"
    if score is None:
        raise DataError(f"{path} has several scores: {known}")
    raise DataError(
        f"{path}: the score '{score}' is {'not alone' if matches else 'unknown'}.{nearest(score, names)} {known}"
    )


def number(value: Any) -> float | None:
    """Return a score as a number: right and wrong, yes and no, numbers and their texts; None for what is none of these."""
    if isinstance(value, str):
        text = value.strip().lower()
        words = {"c": 1.0, "i": 0.0, "p": 0.5, "n": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
        if text in words:
            return words[text]
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return result if abs(result) < float("inf") else None

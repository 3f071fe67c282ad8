"""Sample files of lm-evaluation-harness (``--log_samples``): one JSON object per problem and filter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from algorist.cli.imported import number
from algorist.data.files import read_rows
from algorist.errors import DataError
from algorist.evaluation.doors import Foreign

QUESTIONS = ("question", "problem", "Problem", "query", "prompt", "input", "text", "sentence", "goal")
"""Columns of tasks that hold the question; without one of them all of the problem's columns are."""

LENGTH = {"max_gen_toks": "max_completion_tokens"}
SAMPLED = {"temperature": "temperature", "top_p": "top_p", "repeats": "samples"}
"""The harness's settings of generation → ours."""


def read_samples(path: Path) -> Foreign:
    """Return the scores of a file, each named ``METRIC,FILTER`` as in the harness's results.

    Raises:
        DataError: No file of samples, damaged, or one that holds a problem twice.
    """
    rows: dict[str, dict[str, Any]] = {}
    own: list[dict[str, Any]] = []
    protocol: dict[str, Any] = {}
    for number_of_line, line in enumerate(read_rows(path), 1):
        if lacking := [key for key in ("doc_id", "doc", "target") if key not in line]:
            raise DataError(
                f"{path}:{number_of_line}: no {', '.join(lacking)}; expected a file of lm-eval's --log_samples"
            )
        row = rows.setdefault(str(line["doc_id"]), _row(line))
        kind = line.get("filter", "none")
        protocol |= _settings(line.get("arguments"))
        for metric in line.get("metrics") or [k for k in ("exact_match", "acc") if k in line]:
            name = f"{metric},{kind}"
            if name in row["scores"]:
                raise DataError(
                    f"{path}:{number_of_line}: doc_id {line['doc_id']} has '{name}' twice; the file holds two runs"
                )
            row["scores"][name] = number(line.get(metric))
        own += [row | {"problem_id": str(line["doc"]["id"])} | saved for saved in line.get("algorist") or ()]
    task = path.stem.removeprefix("samples_").rpartition("_")[0] or path.stem
    model = path.parent.name.replace("__", "/")
    return Foreign(task=task, model=model, rows=_own(own) or list(rows.values()), protocol=protocol)


def _row(line: dict[str, Any]) -> dict[str, Any]:
    doc, answers = line["doc"], line.get("resps") or [[""]]
    columns = [key for key in QUESTIONS if isinstance(doc.get(key), str)]
    first = answers[0][0] if isinstance(answers[0], list) and answers[0] else answers[0]
    return {
        "problem_id": str(line["doc_id"]),
        "sample": 0,
        "question": doc[columns[0]] if columns else json.dumps(doc, sort_keys=True, ensure_ascii=False),
        "gold": str(line["target"]),
        "completion": first if isinstance(first, str) else str(first),
        "scores": {},
    }


def _settings(arguments: Any) -> dict[str, Any]:
    """Return the settings of generation among a request's arguments, under our names; of a greedy one the longest completion alone."""
    request = (
        next(iter(arguments.values()), ()) if isinstance(arguments, dict) else next(iter(arguments or ()), ())
    )
    last = list(request.values() if isinstance(request, dict) else request)[-1:]
    if not last or not isinstance(last[0], dict):
        return {}
    names = SAMPLED if last[0].get("do_sample") else {}
    return {
        ours: last[0][theirs] for theirs, ours in (LENGTH | names).items() if last[0].get(theirs) is not None
    }


def _own(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return algorist's own completions with their scores."""
    return [
        row | {"scores": {n: row.get(n) for n in ("correct", "lenient") if row.get(n) is not None}}
        for row in rows
    ]

"""Samples in the form of lm-evaluation-harness (``--log_samples``), so that its viewers and scripts read them.

One file per task, ``FOLDER/MODEL/samples_TASK_TIME.jsonl``, one object per problem and filter: ``greedy`` has the greedy
completion, ``sampled`` the others of the same problem. Names and hashes are those of the harness (0.4).
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from algorist.evaluation.artifact import Artifact
from algorist.evaluation.doors import EXPORTED
from algorist.evaluation.estimators import pass_at_k
from algorist.store.atomic import replace_text
from algorist.store.redact import redact, redact_tree

NO_ANSWER = "[invalid]"


def export_harness(
    artifact: Artifact, folder: Path, *, task: str | None = None, time: datetime | None = None
) -> Path:
    """Write the samples of an evaluation below ``folder`` and return the file.

    Args:
        artifact: The evaluation.
        folder: Gets one subfolder per model, as the harness makes it.
        task: Name of the task; the dataset's when left out.
        time: When; now when left out.

    Raises:
        CheckpointError: The disk refuses.
    """
    moment = (time or datetime.now()).isoformat().replace(":", "-")
    name = re.sub(r"\W+", "_", task or artifact.dataset).strip("_") or "task"
    inside = folder / re.sub(r'["<>:/|\\?*\[\]]+', "__", redact(artifact.model).strip("/"))
    inside.mkdir(parents=True, exist_ok=True)
    path = inside / f"samples_{name}_{moment}.jsonl"
    rows = redact_tree(harness_samples(artifact))
    replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def harness_samples(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the rows of the export: for each problem one of the filter ``greedy``, and one of ``sampled`` if it has samples.

    ``resps`` has one list of raw completions per request, ``filtered_resps`` one answer (or list of answers) per request,
    ``[invalid]`` where none was read; ``metrics`` names the keys that hold values: ``exact_match`` (the share of right
    completions) and, with samples, ``pass@N``. ``algorist`` has what ``compare`` needs of each completion beside.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in artifact.samples:
        groups.setdefault(row["problem_id"], []).append(row)
    samples = []
    for number, (problem, rows) in enumerate(groups.items()):
        rows.sort(key=lambda r: (not r["greedy"], r.get("sample") or 0))
        greedy = [r for r in rows if r["greedy"]]
        sampled = [r for r in rows if not r["greedy"]]
        if greedy:
            samples.append(_row(number, problem, "greedy", greedy[:1], artifact.protocol))
        if sampled:
            samples.append(_row(number, problem, "sampled", sampled, artifact.protocol))
    return samples


def _row(
    number: int, problem: str, name: str, rows: list[dict[str, Any]], protocol: dict[str, Any]
) -> dict[str, Any]:
    first = rows[0]
    topic = {"subject": first.get("subject"), "level": first.get("level")}
    doc = {"id": problem, "question": first.get("question"), "answer": first.get("gold")}
    doc |= {key: value for key, value in topic.items() if value}
    prompt, target = str(first.get("prompt") or first.get("question") or ""), str(first.get("gold") or "")
    answers = [r.get("extracted") or NO_ANSWER for r in rows]
    right = sum(bool(r["correct"]) for r in rows)
    metrics = {"exact_match": right / len(rows)}
    if name == "sampled" and len(rows) > 1:
        metrics[f"pass@{len(rows)}"] = pass_at_k(len(rows), right, len(rows))
    return {
        "doc_id": number,
        "doc": doc,
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": _generation(name, protocol)}},
        "resps": [[r.get("completion") for r in rows]],
        "filtered_resps": answers if name == "greedy" else [answers],
        "filter": name,
        "metrics": list(metrics),
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(target),
        "algorist": [{key: r[key] for key in EXPORTED if r.get(key) is not None} for r in rows],
        **metrics,
    }


def _generation(name: str, protocol: dict[str, Any]) -> dict[str, Any]:
    """Return the generation settings under the harness's names."""
    length = {"max_gen_toks": protocol.get("max_completion_tokens")}
    if name == "greedy":
        return {"do_sample": False, "temperature": 0.0, **length}
    sampling = {"temperature": protocol.get("temperature"), "top_p": protocol.get("top_p")}
    return {"do_sample": True, **sampling, "repeats": protocol.get("samples"), **length}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="backslashreplace")).hexdigest()

"""The ``.eval`` file of inspect_ai (log version 2): a zip with a header, a summary and one JSON file per completion."""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from algorist.evaluation.artifact import Artifact
from algorist.evaluation.doors import EXPORTED
from algorist.store.atomic import replace_file
from algorist.store.redact import redact_tree


def export_inspect(artifact: Artifact, folder: Path, task: str) -> Path:
    """Write an evaluation as ``FOLDER/TIME_TASK_ID.eval`` and return the file.

    Each completion is a sample, the greedy one epoch 1; scores are ``correct`` and ``lenient``, and the metrics carry their intervals.

    Raises:
        CheckpointError: The disk refuses.
    """
    ended, took = datetime.now(UTC), float(artifact.protocol.get("seconds") or 0.0)
    times = ended - timedelta(seconds=took), ended
    created, completed = (time.isoformat(timespec="seconds") for time in times)
    model = (
        "/".join(Path(artifact.model).parts[-3:]) if Path(artifact.model).is_absolute() else artifact.model
    )
    samples = redact_tree([_sample(row, model) for row in artifact.samples])
    mark = hashlib.sha256(json.dumps([created, artifact.name, samples]).encode()).hexdigest()[:22]
    spec = {
        "eval_id": mark,
        "run_id": mark,
        "task_id": mark,
        "created": created,
        "task": task,
        "dataset": {"name": artifact.dataset, "samples": len({s["id"] for s in samples})},
        "model": f"algorist/{model}",
        "config": {"epochs": max((s["epoch"] for s in samples), default=1)},
        "metadata": artifact.protocol,
    }
    metrics = {
        name: {"name": name, "value": i.value, "params": {"low": i.low, "high": i.high, "n": i.n}}
        for name, i in artifact.metrics.items()
        if all(map(math.isfinite, (i.value, i.low, i.high)))
    }
    counts = {"total_samples": len(samples), "completed_samples": len(samples)}
    scores = [{"name": "correct", "scorer": "correct", "metrics": metrics}]
    start = redact_tree({"version": 2, "eval": spec, "plan": {"name": "plan", "steps": [], "config": {}}})
    header = start | {"status": "success", "results": counts | {"scores": scores}}
    header["stats"] = {"started_at": created, "completed_at": completed, "model_usage": {}}
    keys = ("id", "epoch", "input", "target", "scores", "metadata", "model_usage", "total_time")
    files: dict[str, Any] = {}
    for number, sample in enumerate(samples):
        name = f"samples/{_plain(sample['id'])}_epoch_{sample['epoch']}"
        files[f"{name}_{number}.json" if f"{name}.json" in files else f"{name}.json"] = sample
    summaries = [
        {key: s[key] for key in keys} | {"completed": True, "message_count": len(s["messages"])}
        for s in samples
    ]
    files |= {"_journal/start.json": start, "summaries.json": summaries, "header.json": header}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_plain(created.replace(':', '-'))}_{_plain(task)}_{mark}.eval"

    def write(partial: Path) -> None:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, json.dumps(content, default=str))

    replace_file(path, write)
    return path


def _sample(row: dict[str, Any], model: str) -> dict[str, Any]:
    text = row.get("completion") or ""
    message = {"role": "assistant", "source": "generate", "content": text}
    stop = "max_tokens" if row.get("truncated") else "stop"
    scores = {
        name: {
            "value": "C" if row[name] else "I",
            "answer": row.get("extracted"),
            "explanation": row.get("reason"),
        }
        for name in ("correct", "lenient")
        if row.get(name) is not None
    }
    read, wrote = (row.get(f"{part}_tokens") or 0 for part in ("prompt", "completion"))
    usage = {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote}
    question = row.get("question") or ""
    return {
        "id": row["problem_id"],
        "epoch": (row.get("sample") or 0) + 1,
        "input": question,
        "target": row.get("gold") or "",
        "messages": [{"role": "user", "content": question}, message],
        "output": {
            "model": model,
            "choices": [{"message": message, "stop_reason": stop}],
            "completion": text,
            "usage": usage,
        },
        "model_usage": {model: usage},
        "total_time": row.get("seconds"),
        "scores": scores,
        "metadata": {key: row[key] for key in (*EXPORTED, "prompt") if row.get(key) is not None},
    }


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text)

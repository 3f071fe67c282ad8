"""``result.json`` of a run, which anybody can send, and the page that is made from such files."""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import algorist
from algorist.config.schema import Recipe
from algorist.errors import DAMAGED, DataError
from algorist.evaluation.artifact import Artifact, plain_numbers
from algorist.evaluation.compare import paired_metrics
from algorist.store.redact import redact_tree, with_texts
from algorist.store.run_folder import RunFolder, environment
from algorist.store.safe_text import markdown
from algorist.store.times import Took

NAME = "result.json"
STRICT, LENIENT = "greedy_accuracy", "lenient_accuracy"
SHARES = (STRICT, LENIENT, "pass@1")
LIBRARIES = ("algorist", "torch", "transformers")
_PLACE = {"output_dir", "run_name", "device"}
"""Keys that are not part of the recipe's hash."""
_PATH = re.compile(r"(?<![\w.])[~/][^\s'\"=,\]]*/(?=[^\s'\"=,\]/])")


def write_result(folder: RunFolder, recipe: Recipe, evaluations: dict[str, Artifact], took: Took) -> Path:
    """Write ``result.json``: what was trained on what, how much better it became, and what that took. No paths, no secrets."""
    record = environment()
    here = Path(algorist.__file__).resolve().is_relative_to(Path.cwd())
    versions = {name: record["versions"].get(name) for name in LIBRARIES}
    values = recipe.model_dump(mode="json", exclude=_PLACE)
    content = {
        "recipe": recipe.name,
        "recipe_hash": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16],
        "model": recipe.model.name,
        "data": {part: section and section["name"] for part, section in values["data"].items()},
        "seed": recipe.seed,
        **_gain(evaluations),
        "hardware": {
            **{key: record[key] for key in ("processor", "cores", "memory_gib", "devices")},
            "threads": recipe.threads or _torch("get_num_threads"),
        },
        **took.until_now(),
        "command": record["command"],
        "versions": {
            "python": record["python"],
            **versions,
            "commit": record["git_commit"] if here else None,
        },
        "date": datetime.now(UTC).date().isoformat(),
    }
    content = with_texts(redact_tree(content), lambda text: _PATH.sub("", text))
    folder.write_json(NAME, content)
    return folder.path / NAME


def _torch(name: str) -> Any:
    import torch

    if name.startswith("cuda") and not torch.cuda.is_available():
        return None
    value: Any = torch
    for part in name.split("."):
        value = getattr(value, part)
    return value()


def _gain(evaluations: dict[str, Artifact]) -> dict[str, Any]:
    if not evaluations:
        return {"n": 0, "before": None, "after": None, "difference": None}
    names = list(evaluations)
    first, last = evaluations[names[0]], evaluations[names[-1]]
    numbers = {
        name: {"evaluation": name, **{m: v for m, v in plain_numbers(a.metrics).items() if m in SHARES}}
        for name, a in evaluations.items()
    }
    paired = plain_numbers(paired_metrics(first.samples, last.samples)) if names[1:] else None
    return {
        "n": len({row["problem_id"] for row in last.samples}),
        "before": numbers[names[0]] if names[1:] else None,
        "after": numbers[names[-1]],
        "difference": paired and {metric: value for metric, value in paired.items() if metric in SHARES},
    }


def results_table(folder: Path) -> str:
    """Return a line of Markdown for each result file in a folder, sorted by their names; of a run's folder or a file that alone.

    Raises:
        DataError: There is none, or one is damaged.
    """
    own = folder if folder.is_file() else folder / NAME
    files = [own] if own.is_file() else sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"no result files in {folder}; a run leaves one: RUN/{NAME}")
    return "".join(textwrap.fill(_line(file), 118, subsequent_indent="  ") + "\n" for file in files)


def _line(file: Path) -> str:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        machine = result["hardware"]
        where = markdown(
            ", ".join(machine["devices"]) or f"{machine['processor']}, {machine['threads']} × CPU"
        )
        memory = float(result["peak_gpu_memory_gib"] or result["peak_memory_gib"])
        minutes = "? minutes"
        if result["minutes"] is not None:
            processor = result["processor_minutes"]
            minutes = f"{result['minutes']:.0f} minutes"
            minutes += f" ({processor:.0f} of the processor)" if processor is not None else ""
        strict, lenient = (_change(result, metric) for metric in (STRICT, LENIENT))
        return (
            f"- {markdown(result['recipe'])}, seed {int(result['seed'])} ({markdown(result['model'])}; "
            f"{markdown(result['data']['eval'])}, {int(result['n'])} problems): strict {strict}, lenient "
            f"{'the same' if lenient == strict else lenient}; {where}, {minutes}, {memory:.1f} GiB"
        )
    except DAMAGED as error:
        raise DataError(
            f"{file} is no result of a run ({type(error).__name__}: {error}); expected RUN/{NAME}"
        ) from None


def gained(run: Path) -> str:
    """Describe the change of held-out accuracy by a run's ``result.json``, or return an empty string."""
    try:
        result = json.loads((run / NAME).read_text(encoding="utf-8"))
        low, high = (result["difference"][STRICT][key] for key in ("low", "high"))
        chance = (
            "a gain beyond chance"
            if low > 0
            else "a loss beyond chance"
            if high < 0
            else "which may be chance"
        )
        return f"Held-out accuracy {_change(result, STRICT)} points, {chance}."
    except DAMAGED:
        return ""


def _change(result: dict[str, Any], metric: str) -> str:
    before, after = ((result[key] or {}).get(metric) for key in ("before", "after"))
    difference = (result["difference"] or {}).get(metric)
    if after is None:
        return "–"
    if before is None or difference is None:
        return f"{100 * after['value']:.1f} %"
    low, high = 100 * difference["low"], 100 * difference["high"]
    return f"{100 * before['value']:.1f} → {100 * after['value']:.1f} %: {100 * difference['value']:+.1f} [{low:+.1f}, {high:+.1f}]"

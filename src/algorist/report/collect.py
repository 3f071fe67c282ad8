"""Reads a run folder into the plain data of its report, within a size budget."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
from statistics import median
from typing import Any

from algorist.diagnosis.diagnose import find_causes, too_little
from algorist.diagnosis.signals import read_settings, read_signals
from algorist.errors import DataError
from algorist.evaluation.artifact import Artifact, artifact_names, read_artifact
from algorist.evaluation.compare import compare
from algorist.evaluation.console import breakdown
from algorist.evaluation.estimators import Interval
from algorist.report.curves import charts, phases, where_time_went
from algorist.store.read import metrics, opened, query
from algorist.store.run_folder import RunFolder
from algorist.store.run_log import clock
from algorist.store.safe_text import printable
from algorist.store.stages import EVALUATED
from algorist.store.times import FILE as TIMES
from algorist.store.write import conversation

PAIRS_CHARACTERS = 500_000
ROLLOUT_CHARACTERS = 1_100_000
LONGEST_TEXT = 6_000
STEPS_SHOWN = 40
ROLLOUTS_SHOWN = 2_000
PAUSE = 20
"""Times the usual gap between two logged steps: a longer one is no training (an evaluation, a run that was stopped)."""


MAIN_METRICS = ("greedy_accuracy", "lenient_accuracy", "format", "truncated", "mean_tokens")
"""Metrics of the table that is not folded, beside those of several samples."""


def collect(run: RunFolder) -> dict[str, Any]:
    """Return everything the report shows.

    Raises:
        CheckpointError: The run folder is damaged.
    """
    with opened(run.path):
        return _collected(run)


def _collected(run: RunFolder) -> dict[str, Any]:
    lines = metrics(run.path)
    names = list(dict.fromkeys(str(line.get("stage")) for line in lines if line.get("stage")))
    evaluations = [read_artifact(run.evaluations, name) for name in artifact_names(run.evaluations)]
    evaluations.sort(key=lambda a: _order(a.name))
    main = [a for name in EVALUATED for a in evaluations if a.name == name]
    environment = run.read_json("environment.json") or {}
    environment = environment if isinstance(environment, dict) else {}
    return {
        "name": run.path.resolve().name,
        "runs": [],
        "facts": facts(run, lines),
        "spent": where_time_went(run.read_json(TIMES), lines),
        "verdict": _verdict(run),
        "place": printable(shlex.quote(str(run.path))),
        "evaluations": [_evaluation(a) for a in evaluations],
        "metrics": _metrics(evaluations),
        "differing": [],
        "comparisons": [
            {"first": earlier.name, "second": main[-1].name, **compared(earlier, main[-1])}
            for earlier in reversed(main[:-1])
        ],
        "breakdowns": _breakdowns(main[-2:]),
        "stages": [
            {"name": name, "charts": charts(lines, name), "phases": phases(lines, name)} for name in names
        ],
        "pairs": _pairs(main),
        "rollouts": _rollouts(run),
        "config": printable(run.config.read_text(encoding="utf-8", errors="replace")),
        "environment": [
            (key.replace("_gib", ", GiB"), _plain(value))
            for key, value in (environment | _hardware(lines)).items()
            if value not in (None, "", [], {})
        ],
        "reproduce": _reproduce(run, environment),
    }


def _metrics(evaluations: Sequence[Artifact]) -> dict[str, list[str]]:
    """Return the names of the metrics: those of the table, and those that are folded."""
    names = list(dict.fromkeys(name for a in evaluations if "-step-" not in a.name for name in a.metrics))
    first = [n for n in names if n.startswith(("pass@", "maj@")) or n in MAIN_METRICS]
    return {"first": first, "rest": [name for name in names if name not in first]}


def _evaluation(artifact: Artifact) -> dict[str, Any]:
    return {
        "name": artifact.name,
        "between": "-step-" in artifact.name,
        "model": printable(str(artifact.model)),
        "dataset": artifact.dataset,
        "n": max((interval.n for interval in artifact.metrics.values()), default=0),
        "protocol": printable(_protocol(artifact.protocol)),
        "metrics": artifact.metrics,
    }


def _protocol(record: dict[str, Any]) -> str:
    """Describe the protocol of an evaluation, in words."""
    samples = record.get("samples") or 0
    parts = [
        "one greedy completion per problem"
        + (f" and {samples} sampled at temperature {record.get('temperature', 1):g}" if samples else ""),
        f"prompt format {record['prompt_format']}" if "prompt_format" in record else "",
        f"up to {record['max_completion_tokens']} tokens" if "max_completion_tokens" in record else "",
        f"matcher {record['matcher']}" if "matcher" in record else "",
    ]
    return ", ".join(part for part in parts if part)


def facts(run: RunFolder, lines: Sequence[dict[str, Any]]) -> str:
    """Return model, data, recipe, seed and duration in one line."""
    values = read_settings(run.path)
    took = training_seconds(lines)
    shown = {
        "recipe": values.get("name"),
        "model": values.get("model.name"),
        "data": values.get("data.train.name"),
        "seed": values.get("seed"),
        "training": clock(took) if took else None,
    }
    return printable(" · ".join(f"{key} {value}" for key, value in shown.items() if value is not None))


def training_seconds(lines: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of a run's steps: those between its lines, and those before the first of a stage at its usual pace.

    A gap of more than ``PAUSE`` times that pace is a pause: its steps count at the pace, too.
    """
    total = 0.0
    logged = [line for line in lines if "loss" in line and {"step", "time"} <= line.keys()]
    for _, stage in itertools.groupby(logged, key=lambda line: line.get("stage")):
        ends = [(int(line["step"]), float(line["time"])) for line in stage]
        gaps = [(b - a, now - then) for (a, then), (b, now) in itertools.pairwise(ends) if b > a]
        usual = median(gap / steps for steps, gap in gaps) if gaps else 0.0
        total += usual * ends[0][0]
        total += sum(gap if gap <= PAUSE * usual * steps else usual * steps for steps, gap in gaps)
    return total


def _verdict(run: RunFolder) -> list[tuple[str, str]]:
    """Return ``diagnose``'s verdict: (sentence, first piece of evidence) of each finding, or why there is none."""
    signals = read_signals(run.path)
    findings = find_causes(signals)
    if findings:
        return [(printable(f.sentence), printable(f.evidence[0])) for f in findings]
    return [("", too_little(signals))]


def compared(first: Artifact, second: Artifact) -> dict[str, Any]:
    """Return the paired comparison of two evaluations as ``result``, or why there is none as ``problem``."""
    try:
        return {"result": compare(first, second), "problem": ""}
    except DataError as error:
        return {"result": None, "problem": str(error)}


def _breakdowns(last: Sequence[Artifact]) -> list[dict[str, Any]]:
    """Return greedy accuracy by subject, level and dataset, where there is more than one value of it."""
    breakdowns = []
    for by in ("subject", "level", "dataset"):
        parts = [breakdown(a.samples, by) if any(by in r for r in a.samples) else {} for a in last]
        values = list(dict.fromkeys(v for part in parts for v in part))
        if 1 < len(values) <= 40:
            rows: list[tuple[str, list[Interval | None]]] = [
                (printable(v), [part[v]["greedy_accuracy"] if v in part else None for part in parts])
                for v in values
            ]
            breakdowns.append({"by": by, "names": [a.name for a in last], "rows": rows})
    return breakdowns


def _pairs(main: Sequence[Artifact]) -> dict[str, Any]:
    """Return greedy completions before and after, changed ones first, as many as the budget allows."""
    if not main:
        return {"names": [], "rows": [], "all": 0}
    last = main[-2:]
    answers = [{r["problem_id"]: r for r in a.samples if r["greedy"]} for a in last]
    shared = [[part[i] for part in answers] for i in answers[-1] if all(i in part for part in answers)]
    shared.sort(key=lambda sides: bool(sides[0]["correct"]) == bool(sides[-1]["correct"]))
    rows, used = [], 0
    for sides in shared:
        row = {
            "id": _safe(sides[-1]["problem_id"]),
            "question": _safe(sides[-1].get("question")),
            "gold": _safe(sides[-1].get("gold")),
            "sides": [
                {
                    "text": _safe(side.get("completion")),
                    "correct": bool(side["correct"]),
                    "reason": _safe(side.get("reason")),
                    "extracted": _safe(side.get("extracted")),
                    "tokens": side.get("completion_tokens"),
                }
                for side in sides
            ],
        }
        used += _weight(row)
        if used > PAIRS_CHARACTERS:
            break
        rows.append(row)
    return {"names": [a.name for a in last], "rows": rows, "all": len(shared)}


def _rollouts(run: RunFolder) -> dict[str, Any]:
    """Return whole groups of rollouts from steps spread over the run, as many as the budget allows."""
    groups = query(
        run.path,
        'SELECT stage, step, "group", count(*) AS n FROM rollouts GROUP BY ALL ORDER BY stage, step, "group"',
    )
    total = sum(g["n"] for g in groups)
    steps = list(dict.fromkeys((g["stage"], g["step"]) for g in groups))
    shown_steps = _spread(steps, STEPS_SHOWN)
    # Round by round: the first group of every chosen step, then the second …: a full budget covers all chosen steps.
    of_step: dict[Any, list[dict[str, Any]]] = {key: [] for key in shown_steps}
    for group in groups:
        if (group["stage"], group["step"]) in of_step:
            of_step[group["stage"], group["step"]].append(group)
    rows: list[dict[str, Any]] = []
    prompts: dict[str, int] = {}
    used = 0
    for places in itertools.zip_longest(*of_step.values()):
        for rollouts_of_group in _groups_of(run, [g for g in places if g is not None]):
            before = len(prompts)
            block = [_rollout(r, prompts) for r in rollouts_of_group[:32]]
            used += sum(map(_weight, [*block, *list(prompts)[before:]]))
            if used > ROLLOUT_CHARACTERS:
                break
            rows.extend(block)
        if used > ROLLOUT_CHARACTERS or len(rows) > ROLLOUTS_SHOWN:
            break
    rows.sort(key=lambda r: (r["stage"] or "", r["step"], r["group"]))
    return {
        "rows": rows,
        "prompts": list(prompts),
        "all": total,
        "steps": len(shown_steps),
        "all_steps": len(steps),
    }


def _groups_of(run: RunFolder, places: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rollouts of the given groups, group by group."""
    wanted_steps = sorted({g["step"] for g in places})
    numbers = sorted({g["group"] for g in places if g["group"] is not None})
    marks = ", ".join("?" * len(wanted_steps))
    rows = query(
        run.path,
        f'SELECT * FROM rollouts WHERE step IN ({marks}) AND (len(?::BIGINT[]) = 0 OR list_contains(?, "group"))',
        [*wanted_steps, numbers, numbers],
    )
    keys: dict[Any, list[dict[str, Any]]] = {(g["stage"], g["step"], g["group"]): [] for g in places}
    for row in rows:
        key = (row["stage"], row["step"], row["group"])
        if key in keys:
            keys[key].append(row)
    return list(keys.values())


def _rollout(row: dict[str, Any], prompts: dict[str, int]) -> dict[str, Any]:
    prompt = _safe(row["prompt"])
    return {
        "stage": row["stage"],
        "step": row["step"],
        "group": row["group"] or 0,
        "problem": _safe(row["problem_id"]),
        "prompt": prompts.setdefault(prompt, len(prompts)),
        "text": _safe(conversation(row)),
        "reward": _number(row["reward"]),
        "rewards": {_safe(k): _number(v) for k, v in (row["rewards"] or {}).items()},
        "advantage": _number(row["advantage"]),
        "tokens": row["completion_tokens"],
        "correct": row["correct"],
        **{name: _safe(row[name]) if row[name] else None for name in ("reason", "extracted", "gold")},
        "truncated": bool(row["truncated"]),
    }


def _hardware(lines: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return one line on what the run took of the machine, from the ``hardware/…`` numbers of its metrics."""
    facts = []
    ram = ("ram_gb", "ram_peak_gb")  # with its children, but at the lines only; between them, but alone
    for names, text, mean in (
        (ram, "RAM up to {:.2f} GB", False),
        (("cpu_percent",), "processor {:.0f} % of one core in the mean", True),
        (("gpu_memory_peak_gb",), "GPU memory up to {:.2f} GB", False),
        (("gpu_percent",), "GPU {:.0f} % busy in the mean", True),
    ):
        measured = [line.get(f"hardware/{name}") for line in lines for name in names]
        values = [v for v in measured if isinstance(v, (int, float))]
        if values:
            facts.append(text.format(sum(values) / len(values) if mean else max(values)))
    return {"use of hardware": ", ".join(facts)} if facts else {}


def _reproduce(run: RunFolder, environment: dict[str, Any]) -> list[str]:
    """Return the shell lines that repeat the run."""
    versions = environment.get("versions") or {}
    lines = []
    if environment.get("git_commit"):
        lines.append(f"git checkout {environment['git_commit']}")
        if environment.get("git_changed_files"):
            lines.append(f"# {environment['git_changed_files']} files were changed and not committed")
    pinned = [f"{name}=={str(v).partition('+')[0]}" for name, v in versions.items() if name != "algorist"]
    if pinned:
        lines.append("pip install " + " ".join(pinned))
    command = environment.get("command")
    if command:
        words = command if isinstance(command, str) else " ".join(map(str, command))
        lines.append(f"# it was started with: {words}")
    lines.append(
        shlex.join(["algorist", "run", str(run.config), f"run_name={run.path.resolve().name}-again"])
    )
    return [printable(line) for line in lines]


def _spread(values: list[Any], count: int) -> list[Any]:
    """Return at most ``count`` values, evenly spread, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _safe(value: Any) -> str:
    """Return text without secrets and invisible characters, cut to what can be read."""
    text = printable(str(value if value is not None else ""))
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT} more characters in the store)"
    return text


def _weight(row: Any) -> int:
    """Return about how many bytes a row takes in the page."""
    return len(json.dumps(row))


def _number(value: float | None) -> float | None:
    return None if value is None or value != value else float(f"{value:.4g}")


def _order(name: str) -> tuple[int, int, str]:
    """Order evaluations: base, those during SFT, sft, those during GRPO, grpo, others."""
    stage, _, step = name.partition("-step-")
    rank = EVALUATED.index(stage) if stage in EVALUATED else len(EVALUATED)
    return (rank, int(step) if step.isdecimal() else 10**9, name)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return printable(", ".join(f"{k} {v}" for k, v in value.items()))
    if isinstance(value, list):
        return printable(" ".join(map(str, value)))
    return printable(str(value))

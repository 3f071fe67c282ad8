"""One recipe under several seeds: a run folder for each, then mean, spread and one page of all curves.

Run ``NAME`` with N seeds makes ``NAME-seed-S`` for S = seed … seed + N − 1 and, beside them, ``NAME-seeds.json`` (numbers) and
``NAME-seeds.html`` (curves of the first eight). The unit of the intervals here is the seed: they say what another seed would give, not another problem.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from algorist.config.schema import Recipe
from algorist.errors import ConfigError
from algorist.evaluation.artifact import Artifact, artifact_names, read_artifact
from algorist.evaluation.compare import paired_metrics
from algorist.evaluation.estimators import mean_interval
from algorist.report.build import MOST, build_overlay
from algorist.store.atomic import replace_text
from algorist.store.run_folder import RunFolder
from algorist.store.stages import EVALUATED

SHOWN = ("greedy_accuracy", "lenient_accuracy", "pass@1", "format")


def recipes_of_seeds(recipe: Recipe, count: int) -> list[Recipe]:
    """Return the recipe once per seed, each with a run folder of its own.

    Raises:
        ConfigError: ``count`` is below 1.
    """
    if count < 1:
        raise ConfigError(f"--seeds is {count}; expected 1 or more, usually 3")
    name = recipe.path.name
    return [
        recipe.model_copy(update={"seed": seed, "run_name": f"{name}-seed-{seed}"})
        for seed in range(recipe.seed, recipe.seed + count)
    ]


def summarise_seeds(recipe: Recipe, runs: Sequence[Path]) -> dict[str, Any]:
    """Write the numbers and the page of finished runs beside them, and return the numbers.

    Args:
        recipe: The recipe without a seed's name.
        runs: The run folders, one per seed.

    Returns:
        ``runs``, for each stage and metric ``stages/STAGE/METRIC`` with ``values``, ``mean``, ``sd`` and the Student-t interval over
        seeds (``low``, ``high``), and the same of each run's paired ``gain`` from its first evaluation to its last.

    Raises:
        CheckpointError: An evaluation is damaged, or the disk refuses.
    """
    evaluations = [_evaluations(run) for run in runs]
    stages = [s for s in EVALUATED if evaluations and all(s in of_run for of_run in evaluations)]
    summary: dict[str, Any] = {
        "recipe": recipe.name,
        "runs": [str(run) for run in runs],
        "stages": {},
        "gain": {},
    }
    for stage in stages:
        metrics = [of_run[stage].metrics for of_run in evaluations]
        summary["stages"][stage] = {
            name: _spread([m[name].value for m in metrics])
            for name in SHOWN
            if all(name in m for m in metrics)
        }
    if len(stages) > 1:
        summary["from"], summary["to"] = stages[0], stages[-1]
        gains = [
            paired_metrics(of_run[stages[0]].samples, of_run[stages[-1]].samples) for of_run in evaluations
        ]
        for name in SHOWN:
            if all(name in gain for gain in gains):
                each = [{"value": g[name].value, "low": g[name].low, "high": g[name].high} for g in gains]
                summary["gain"][name] = _spread([g[name].value for g in gains]) | {"each": each}
    place = recipe.path
    replace_text(place.with_name(f"{place.name}-seeds.json"), json.dumps(summary, indent=2) + "\n")
    if len(runs) > 1:
        build_overlay(runs[:MOST], place.with_name(f"{place.name}-seeds.html"))
    return summary


def lines_of_seeds(summary: dict[str, Any]) -> list[str]:
    """Return the numbers as lines for the terminal: mean ± standard deviation over seeds, then each run's gain."""
    count = len(summary["runs"])
    lines = [f"{count} seeds: mean ± standard deviation over seeds [95 % interval of the mean]"]
    for stage, metrics in summary["stages"].items():
        lines += [f"  {stage:<5} {name.replace('_', ' '):<17} {_text(m)}" for name, m in metrics.items()]
    for name, gain in summary["gain"].items():
        each = ", ".join(
            f"{100 * g['value']:+.1f} [{100 * g['low']:+.1f}, {100 * g['high']:+.1f}]" for g in gain["each"]
        )
        lines.append(f"  gain  {name.replace('_', ' '):<17} {_text(gain, signed=True)}; each, paired: {each}")
    if 1 < count < 3:
        lines.append("  two seeds say little about a third: --seeds 3 or more")
    return lines


def _evaluations(run: Path) -> dict[str, Artifact]:
    folder = RunFolder.open(run).evaluations
    return {name: read_artifact(folder, name) for name in artifact_names(folder) if name in EVALUATED}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    mean = mean_interval(values)
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    low, high = (None, None) if mean.low != mean.low else (mean.low, mean.high)
    return {"values": list(values), "mean": mean.value, "sd": sd, "low": low, "high": high}


def _text(spread: dict[str, Any], *, signed: bool = False) -> str:
    form, unit = ("+.1f", "points") if signed else (".1f", "%")
    mean = f"{100 * spread['mean']:{form}}"
    if spread["sd"] is None:
        return f"{mean} {unit} (one seed has no spread)"
    return f"{mean} ± {100 * spread['sd']:.1f} {unit} [{100 * spread['low']:{form}}, {100 * spread['high']:{form}}]"

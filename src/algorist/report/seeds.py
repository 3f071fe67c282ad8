"""One recipe under several seeds: a run folder for each, then mean, spread and one page of all curves.

Run ``NAME`` with N seeds makes ``NAME-seed-S`` for S = seed … seed + N − 1 and, beside them, ``NAME-seeds.json`` (numbers) and
``NAME-seeds.html`` (curves of the first eight). The unit of the intervals here is the seed: they say what another seed would give, not another problem.

``--seeds until-sure=M`` stops as soon as a gain, or a loss, is proven, after M seeds at the latest. From the third seed on two hypotheses are
tested after each: another seed gains nothing, and another sample of problems gains nothing (Student's t over seeds; over problems, of each the
mean over seeds). Both must fall at 0.05 / (M − 2): the chance of a false proof in all looks together is at most 5 %, whichever of the two is
true (intersection-union test: Berger 1982, Technometrics 24; looks: Bonferroni). Gains of seeds are taken as normally distributed. Where a
run either learns or collapses, three seeds that agree by chance prove too much: a gain falsely in up to an eighth of the cases (M = 3).
Seeds that agree more closely than their problems allow are taken to differ by that sampling error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from algorist.config.schema import Recipe
from algorist.errors import ConfigError
from algorist.evaluation.artifact import Artifact, artifact_names, read_artifact
from algorist.evaluation.compare import paired_metrics
from algorist.evaluation.estimators import cluster_means, mean_interval
from algorist.report.build import MOST, build_overlay
from algorist.store.atomic import replace_text
from algorist.store.run_folder import RunFolder
from algorist.store.stages import EVALUATED

SHOWN = ("greedy_accuracy", "lenient_accuracy", "pass@1", "format")
ERROR, LEAST, USUAL_MOST = 0.05, 3, 8
"""Chance of a false proof, seeds before the first look, and seeds at most where the command names none."""
UNTIL_SURE = "until-sure"


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


def read_seeds(text: str) -> tuple[int, bool]:
    """Return the most seeds that ``--seeds`` asks for, and whether to stop as soon as the gain is sure.

    Raises:
        ConfigError: It is neither a number nor ``until-sure`` with or without one.
    """
    word, _, number = (
        text.rpartition("=") if "=" in text or text != UNTIL_SURE else (text, "", str(USUAL_MOST))
    )
    if word not in ("", UNTIL_SURE) or not number.strip().isdecimal():
        raise ConfigError(
            f"--seeds is '{text}'; expected a number such as 3, {UNTIL_SURE} or {UNTIL_SURE}={USUAL_MOST} (at most {USUAL_MOST})"
        )
    if word and int(number) < LEAST:
        raise ConfigError(
            f"--seeds {text}: a proof takes {LEAST} seeds or more; expected {UNTIL_SURE}={LEAST} or higher"
        )
    return int(number), bool(word)


def proof(runs: Sequence[Path], most: int) -> dict[str, Any]:
    """Test whether the gain of finished runs, one per seed, is proven after so many of ``most`` seeds; as ``proof_of``."""
    gains = [_gains(run) for run in runs]
    if not all(gains):
        return {"gain": None, "p_seeds": None, "p_problems": None, "level": None, "sure": False}
    return proof_of([[gain[problem] for problem in gains[0]] for gain in gains], most)


def proof_of(gains: Sequence[Sequence[float]], most: int) -> dict[str, Any]:
    """Test whether gains (seeds, problems) are proven at this look, the last of which comes after ``most`` seeds.

    Returns:
        ``gain`` (mean over seeds and problems), ``p_seeds``, ``p_problems`` (two-sided; None before the third seed), ``level`` of one
        look, ``sure``.
    """
    table, level = np.asarray(gains, dtype=np.float64), ERROR / (most - LEAST + 1)
    seen: dict[str, Any] = {"gain": float(table.mean()), "p_seeds": None, "p_problems": None, "level": level}
    if len(table) < LEAST:
        return seen | {"sure": False}
    by_chance = math.sqrt(table.var(1).mean() / table.shape[1])  # of a seed's mean, by its problems alone
    p_seeds, p_problems = _student_p(table.mean(1), least_sd=by_chance), _student_p(table.mean(0))
    return seen | {"p_seeds": p_seeds, "p_problems": p_problems, "sure": max(p_seeds, p_problems) <= level}


def line_of_proof(seen: dict[str, Any], count: int, most: int) -> str:
    """Return a proof in one line, and what follows from it."""
    if seen["gain"] is None:
        return f"{count} of at most {most} seeds: no gain to test; a run needs two evaluations (eval.baseline=true)"
    gain = f"{count} of at most {most} seeds: {100 * seen['gain']:+.1f} points"
    if seen["p_seeds"] is None:
        return f"{gain}; tested from {LEAST} seeds on"
    tests = f"p = {seen['p_seeds']:.2g} over seeds, {seen['p_problems']:.2g} over problems; a look takes {seen['level']:.2g}"
    proven = "a gain is proven" if seen["gain"] > 0 else "a loss is proven"
    end = proven if seen["sure"] else "not proven" if count >= most else "not sure yet"
    return f"{gain}, {tests}: {end}"


def summarise_seeds(recipe: Recipe, runs: Sequence[Path], most: int | None = None) -> dict[str, Any]:
    """Write the numbers and the page of finished runs beside them, and return the numbers.

    Args:
        recipe: The recipe without a seed's name.
        runs: The run folders, one per seed.
        most: Seeds at most, where they ended with a proof of the gain.

    Returns:
        ``runs``, for each stage and metric ``stages/STAGE/METRIC`` with ``values``, ``mean``, ``sd`` and the Student-t interval over
        seeds (``low``, ``high``), and the same of each run's paired ``gain`` from its first evaluation to its last; with ``most`` the
        ``proof`` of that gain.

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
    if most is not None:
        summary["proof"] = proof(runs, most) | {"most": most}
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
    if "proof" in summary:
        lines.append(f"  {line_of_proof(summary['proof'], count, summary['proof']['most'])}")
    elif 1 < count < 3:
        lines.append("  two seeds say little about a third: --seeds 3 or more")
    return lines


def _gains(run: Path) -> dict[Any, float]:
    """Return the gain of each problem from the first evaluation to the last; empty where there are not two."""
    of_run = _evaluations(run)
    stages = [stage for stage in EVALUATED if stage in of_run]
    if len(stages) < 2:
        return {}
    ends = []
    for stage in (stages[0], stages[-1]):
        samples = of_run[stage].samples
        rows = [row for row in samples if row["greedy"]] or samples
        ends.append(
            cluster_means([float(row["correct"]) for row in rows], [row["problem_id"] for row in rows])
        )
    return {problem: ends[1][problem] - value for problem, value in ends[0].items() if problem in ends[1]}


def _student_p(values: Any, *, least_sd: float = 0.0) -> float:
    """Return the two-sided p-value of "the mean is 0" by Student's t; (N,) values, 1 where they say nothing.

    ``least_sd`` is the least standard deviation that they are taken to have.

    Source: Abramowitz and Stegun (1964), 26.7.3 and 26.7.4: exact for whole degrees of freedom.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2 or not x.mean():
        return 1.0
    degrees, error = len(x) - 1, max(float(x.std(ddof=1)), least_sd) / math.sqrt(len(x))
    angle = math.atan2(abs(float(x.mean())), error * math.sqrt(degrees))
    odd, square = degrees % 2, math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= square * (k - 1) / k
        total += term
    within = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + within) if odd else within)


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

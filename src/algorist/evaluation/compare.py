"""Two evaluations of the same problems, paired: difference with interval, McNemar's test, flipped problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from algorist.errors import DataError
from algorist.evaluation.artifact import Artifact
from algorist.evaluation.estimators import (
    MEANS,
    SHARES,
    Interval,
    mcnemar,
    mean_interval,
    measured,
    paired_difference,
    paired_rate_difference,
    paired_share_difference,
    permutation_test,
    sampled_groups,
    share_interval,
    summarise,
)

NOT_PROTOCOL = {"seconds", "batch_size", "name", "fingerprint", "ks", "imported"}
Samples = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """``second`` − ``first`` over the same problems.

    ``differences`` has a metric's paired difference and interval; ``p_value`` is McNemar's exact one of the greedy
    answers (None where one side has none), ``sampled_p_value`` the permutation test of the sampled accuracy (None without
    samples). ``warnings`` names what else differs between the two evaluations.
    """

    first: str
    second: str
    n: int
    differences: dict[str, Interval]
    gained: list[str]
    lost: list[str]
    p_value: float | None
    sampled_p_value: float | None = None
    warnings: list[str] = field(default_factory=list)


def compare(first: Artifact, second: Artifact) -> Comparison:
    """Compare two evaluation artifacts problem by problem; of different problems, those that both have.

    Raises:
        DataError: They have no problem in common, or the same id belongs to another question or answer.
    """
    first, second, left_out = on_common_problems(first, second)
    both_greedy = _greedy(first.samples) and _greedy(second.samples)
    differences = paired_metrics(first.samples, second.samples)
    gained, lost = flipped(first.samples, second.samples)
    p_sampled = None
    rates = _sampled_rates(first.samples, second.samples)
    if rates is not None:
        p_sampled = permutation_test([b - a for a, b in zip(*rates, strict=True)])
    return Comparison(
        first=first.name,
        second=second.name,
        n=len(_answers(first.samples)),
        differences=differences,
        gained=gained,
        lost=lost,
        p_value=mcnemar(len(gained), len(lost)) if both_greedy else None,
        sampled_p_value=p_sampled,
        warnings=[*left_out, *_warnings(first, second)],
    )


def on_common_problems(first: Artifact, second: Artifact) -> tuple[Artifact, Artifact, list[str]]:
    """Return both evaluations on the problems that both have, their metrics counted again, and what to say of it.

    Raises:
        DataError: They have no problem in common.
    """
    second, notes = _with_ids_of(first, second)
    mine, theirs = (_answers(a.samples).keys() for a in (first, second))
    common = mine & theirs
    if mine == theirs:
        return first, second, notes
    if not common:
        raise DataError(
            f"the evaluations have no problem in common, neither by id nor by question ({len(mine)} in the first, {len(theirs)} in the "
            "second); evaluate both on the same dataset"
        )
    left_out = (
        f"only the {len(common)} problems that both evaluations have are compared ({len(mine)} in the first, {len(theirs)} in "
        "the second)"
    )
    return _only(first, common), _only(second, common), [*notes, left_out]


def _with_ids_of(first: Artifact, second: Artifact) -> tuple[Artifact, list[str]]:
    """Return the second with the first's ids, where these differ or mean other questions, by the text of the questions."""
    mine, theirs = _answers(first.samples), _answers(second.samples)
    imported = any("imported" in artifact.protocol for artifact in (first, second))
    common = mine.keys() & theirs.keys()
    same = all(_text(mine[i]) == _text(theirs[i]) for i in common)
    if common and not imported:
        return second, []
    ids = {i: i for i in theirs}
    notes = []
    if not (common and same):
        by_text = {key: i for i, key in _keys(mine).items()}
        ids = {i: by_text.get(key, f"{i} of the second") for i, key in _keys(theirs).items()}
        matches = sum(i in mine for i in ids.values())
        notes = [f"{matches} problems are matched by their questions, their ids differ"] if matches else []
    golds = sum(i in mine and mine[i].get("gold") != theirs[j].get("gold") for j, i in ids.items())
    if golds:
        notes.append(f"{golds} problems have another gold answer, or the same in other words, in the second")
    samples = []
    for row in second.samples:
        name = ids[row["problem_id"]]
        same_text = {key: mine[name].get(key) for key in ("question", "gold")} if name in mine else {}
        samples.append({**row, "problem_id": name, **same_text})
    return replace(second, samples=samples), notes


def _text(row: Mapping[str, Any]) -> str:
    return " ".join(str(row.get("question") or "").split())


def _keys(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, int]]:
    """Return id → (question, how many before have the same)."""
    seen: dict[str, int] = {}
    keys = {}
    for problem, row in rows.items():
        text = _text(row)
        keys[problem] = text, seen.setdefault(text, 0)
        seen[text] += 1
    return keys


def _only(artifact: Artifact, problems: Set[str]) -> Artifact:
    samples = [row for row in artifact.samples if row["problem_id"] in problems]
    return replace(artifact, samples=samples, metrics=metrics_of(samples, artifact.protocol.get("ks") or ()))


def metrics_of(samples: Samples, ks: Sequence[int] = ()) -> dict[str, Interval]:
    """Return the metrics of an evaluation; of one without greedy answers the mean over problems alone."""
    if _greedy(samples) or not samples:
        return summarise(samples, ks=ks)
    name, rates = _rate_name(samples), [_rate(g) for g in sampled_groups(samples).values()]
    return {name: share_interval(rates) if name == "pass@1" else mean_interval(rates)}


def paired_metrics(before: Samples, after: Samples) -> dict[str, Interval]:
    """Return after − before for each greedy metric and the sampled accuracy (``pass@1``), with 95 % intervals.

    Raises:
        DataError: The two do not hold the same problems.
    """
    first, second = _same_problems(before, after)
    metrics = {}
    greedy = _greedy(before) and _greedy(after)
    both = [*first.values(), *second.values()]
    for name, column in measured(SHARES, both) if greedy else ():
        up = sum(bool(second[i][column]) and not row[column] for i, row in first.items())
        down = sum(bool(row[column]) and not second[i][column] for i, row in first.items())
        metrics[name] = paired_share_difference(up, down, len(first))
    for name, column in measured(MEANS, both) if greedy else ():
        values = [float(row[column]) for row in first.values()]
        metrics[name] = paired_difference(values, [float(second[i][column]) for i in first])
    rates = _sampled_rates(before, after)
    if rates is not None:
        name = _rate_name([*before, *after])
        metrics[name] = (paired_rate_difference if name == "pass@1" else paired_difference)(*rates)
    return metrics


def flipped(before: Samples, after: Samples) -> tuple[list[str], list[str]]:
    """Return the ids of the problems whose greedy answer turned right and those that turned wrong."""
    first, second = _same_problems(before, after)
    if not (_greedy(before) and _greedy(after)):
        return [], []
    gained = [i for i, row in first.items() if second[i]["correct"] and not row["correct"]]
    lost = [i for i, row in first.items() if row["correct"] and not second[i]["correct"]]
    return gained, lost


def without_the_form(differences: Mapping[str, Interval]) -> str:
    """Return the change of the accuracy when the format does not count; empty where that is not known or the same."""
    strict, lenient = differences.get("greedy_accuracy"), differences.get("lenient_accuracy")
    if strict is None or lenient is None or strict.value == lenient.value:
        return ""
    value, low, high = (100 * number for number in (lenient.value, lenient.low, lenient.high))
    return f"by the last number of each completion, whatever its format: {value:+.1f} points [{low:+.1f}, {high:+.1f}]"


def _greedy(samples: Samples) -> dict[str, Mapping[str, Any]]:
    rows_by_id: dict[str, Mapping[str, Any]] = {}
    for row in samples:
        if row["greedy"]:
            if row["problem_id"] in rows_by_id:
                raise DataError(
                    f"problem '{row['problem_id']}' has two greedy answers; the ids of a dataset must be unique"
                )
            rows_by_id[row["problem_id"]] = row
    return rows_by_id


def _answers(samples: Samples) -> dict[str, Mapping[str, Any]]:
    """Return the greedy answers by their problems; where there is none, each problem's first."""
    return _greedy(samples) or {row["problem_id"]: row for row in reversed(samples)}


def _same_problems(
    before: Samples, after: Samples
) -> tuple[dict[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    first, second = _answers(before), _answers(after)
    if first.keys() != second.keys():
        raise DataError(
            f"the evaluations hold different problems ({len(first.keys() - second.keys())} only in the first, "
            f"{len(second.keys() - first.keys())} only in the second); evaluate both on the same dataset and limit"
        )
    for problem, row in first.items():
        for column in ("question", "gold"):
            if row.get(column) != second[problem].get(column):
                raise DataError(
                    f"problem '{problem}' has another {column} in the second evaluation; evaluate both on the same "
                    "version of the dataset"
                )
    return first, second


def _sampled_rates(before: Samples, after: Samples) -> tuple[list[float], list[float]] | None:
    """Return the sampled accuracy of each problem before and after, or None where one side has no samples."""
    first, second = sampled_groups(before), sampled_groups(after)
    if not (_greedy(before) and _greedy(after)):  # of a side without samples the greedy answers
        first, second = (
            sampled or {i: [row] for i, row in _greedy(rows).items()}
            for sampled, rows in ((first, before), (second, after))
        )
    if not first or first.keys() != second.keys():
        return None
    return [_rate(g) for g in first.values()], [_rate(second[i]) for i in first]


def _rate(group: Samples) -> float:
    return sum(float(r["correct"]) for r in group) / len(group)


def _rate_name(samples: Samples) -> str:
    """Name the mean over a problem's completions: a share of right ones, or any score."""
    return "pass@1" if all(isinstance(row["correct"], bool) for row in samples) else "score"


def _warnings(first: Artifact, second: Artifact) -> list[str]:
    warnings = []
    names = {*first.protocol, *second.protocol}
    if first.dataset != second.dataset and "imported" not in names:  # others name tasks as they like
        warnings.append(f"the datasets are named '{first.dataset}' and '{second.dataset}'")
    if "imported" in names:  # what one of the two does not say is not known
        names = (first.protocol.keys() & second.protocol.keys()) | (names & {"score", "unscored"})
    for name in sorted(names - NOT_PROTOCOL):
        a, b = first.protocol.get(name), second.protocol.get(name)
        if a != b:
            warnings.append(f"the protocol differs: {name} is {a!r} in the first and {b!r} in the second")
    return warnings

"""Artifacts go to disk and come back; two of them are compared problem by problem."""

from __future__ import annotations

import io
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from rich.console import Console

from algorist.cli.terminal import closing_table
from algorist.errors import CheckpointError, ConfigError, DataError
from algorist.evaluation.artifact import Artifact, artifact_names, read_artifact, write_artifact
from algorist.evaluation.compare import compare, flipped, paired_metrics
from algorist.evaluation.estimators import mcnemar, summarise
from algorist.extensions.lm_eval.samples import harness_samples


def make_samples(
    chance: float, *, problems: int = 60, samples: int = 4, seed: int = 0
) -> list[dict[str, Any]]:
    random_numbers = random.Random(seed)
    rows = []
    for problem in range(problems):
        for index in range(samples + 1):
            correct = random_numbers.random() < chance
            rows.append(
                {
                    "problem_id": f"p{problem}",
                    "sample": index,
                    "greedy": index == 0,
                    "question": f"What is {problem} + 1?",
                    "gold": str(problem + 1),
                    "completion": f"{problem} + 1 = {problem + correct}",
                    "extracted": str(problem + correct),
                    "correct": correct,
                    "reason": "equal_number" if correct else "different",
                    "well_formed": True,
                    "completion_tokens": 10 + index,
                    "truncated": False,
                    "subject": "addition",
                    "level": str(problem % 3),
                    "rewards": {"correct": float(correct)},
                }
            )
    return rows


def artifact(samples: list[dict[str, Any]], name: str = "sft", **protocol: Any) -> Artifact:
    return Artifact(name, "tiny", "arithmetic", protocol, summarise(samples), samples)


def write(folder: Path, name: str, samples: list[dict[str, Any]], dataset: str = "arithmetic") -> Path:
    metrics, protocol = summarise(samples), {"samples": 4}
    return write_artifact(
        folder, name, samples=samples, metrics=metrics, protocol=protocol, model="tiny", dataset=dataset
    )


def test_artifact_round_trip(tmp_path: Path) -> None:
    samples = make_samples(0.5)
    path = write(tmp_path, "sft", samples)
    assert json.loads(path.read_text())["n"] == 60
    found = read_artifact(tmp_path, "sft")
    assert found.metrics == summarise(samples)
    assert {k: found.samples[7][k] for k in samples[7]} == samples[7]
    assert found.samples[0]["dataset"] == "arithmetic"
    assert artifact_names(tmp_path) == ["sft"] and not list(tmp_path.glob("*.partial"))


def test_an_evaluation_that_ends_between_its_two_files_is_none(tmp_path: Path) -> None:
    """Not the numbers of a former one over the samples of this one."""
    write(tmp_path, "sft", make_samples(0.5))
    with pytest.raises(TypeError):
        broken: Any = {"greedy_accuracy": None}  # which is read when the samples are written
        write_artifact(
            tmp_path, "sft", samples=make_samples(0.9), metrics=broken, protocol={}, model="tiny", dataset="d"
        )
    with pytest.raises(CheckpointError, match="no evaluation 'sft'"):
        read_artifact(tmp_path, "sft")


def test_empty_evaluation_is_valid_json(tmp_path: Path) -> None:
    path = write(tmp_path, "none", [])
    json.loads(path.read_text(), parse_constant=pytest.fail)
    found = read_artifact(tmp_path, "none")
    assert found.samples == [] and math.isnan(found.metrics["greedy_accuracy"].value)


def test_more_columns_are_kept_and_wrong_ones_refused(tmp_path: Path) -> None:
    samples = [row | {"bits": 3} for row in make_samples(0.5, problems=2)]
    write(tmp_path, "more", samples)
    assert read_artifact(tmp_path, "more").samples[0]["bits"] == 3
    with pytest.raises(DataError, match="does not fit the schema"):
        write(tmp_path, "bad", [samples[0] | {"reason": 5}])
    with pytest.raises(DataError, match="sample 0 has no problem_id"):
        rows = [samples[0] | {"problem_id": None}]
        write_artifact(tmp_path, "bad", samples=rows, metrics={}, protocol={}, model="tiny", dataset="d")
    assert artifact_names(tmp_path) == ["more"]


def test_artifact_names_stay_in_the_folder(tmp_path: Path) -> None:
    for name in ("../x", "", ".hidden", "a/b"):
        with pytest.raises(ConfigError, match="cannot name an evaluation"):
            write(tmp_path, name, [])


def test_missing_and_damaged_artifacts_are_named(tmp_path: Path) -> None:
    write(tmp_path, "sft", make_samples(0.5, problems=2))
    with pytest.raises(CheckpointError, match=r"no evaluation 'grpo' in .*; there: sft"):
        read_artifact(tmp_path, "grpo")
    whole = {path: path.read_bytes() for path in tmp_path.glob("sft.*")}
    table = pyarrow.parquet.read_table(tmp_path / "sft.parquet")
    texts = pyarrow.array(["yes"] * len(table))
    spoiled = io.BytesIO()
    pyarrow.parquet.write_table(
        table.set_column(table.schema.get_field_index("correct"), "correct", texts), spoiled
    )
    content = json.loads(whole[tmp_path / "sft.json"]) | {"protocol": [1]}
    for name, damage in (
        ("sft.parquet", b"torn"),
        ("sft.parquet", spoiled.getvalue()),
        ("sft.json", json.dumps(content).encode()),
    ):
        for path, good in whole.items():
            path.write_bytes(good)
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"evaluation 'sft' .* is damaged"):
            read_artifact(tmp_path, "sft")


def test_compare_by_hand() -> None:
    before, after = make_samples(0.0, problems=10, samples=0), make_samples(0.0, problems=10, samples=0)
    for index in (1, 2, 3):
        after[index]["correct"] = True
    before[9]["correct"] = True
    for row in after:
        row["completion_tokens"] = 15
    found = compare(artifact(before), artifact(after, "grpo"))
    assert (found.gained, found.lost, found.n) == (["p1", "p2", "p3"], ["p9"], 10)
    assert found.p_value == mcnemar(3, 1) == 0.625
    assert found.differences["greedy_accuracy"].value == pytest.approx(0.2)
    assert found.differences["mean_tokens"].value == 5.0
    assert found.sampled_p_value is None and found.warnings == []


def test_a_gain_is_seen_and_itself_is_no_gain() -> None:
    weak, strong = artifact(make_samples(0.3, seed=1)), artifact(make_samples(0.7, seed=2), "grpo")
    found = compare(weak, strong)
    assert found.differences["pass@1"].low > 0.2 and found.sampled_p_value is not None
    assert found.sampled_p_value < 0.001 and found.p_value < 0.01
    same = compare(weak, weak)
    assert same.gained == same.lost == [] and same.p_value == same.sampled_p_value == 1.0
    zero = same.differences["greedy_accuracy"]
    assert zero.value == 0.0 and zero.low < 0 < zero.high


def test_other_problems_are_refused() -> None:
    samples = make_samples(0.5, problems=5)
    with pytest.raises(DataError, match="0 only in the first, 2 only in the second"):
        paired_metrics(make_samples(0.5, problems=3), samples)
    with pytest.raises(DataError, match="different problems"):
        flipped(make_samples(0.5, problems=3), samples)
    other = [row | {"question": "Something else?"} for row in samples]
    with pytest.raises(DataError, match="'p0' has another question"):
        paired_metrics(samples, other)
    with pytest.raises(DataError, match="two greedy answers"):
        paired_metrics(samples + samples[:1], samples)


def test_other_protocols_are_told() -> None:
    samples = make_samples(0.5, problems=3)
    found = compare(
        artifact(samples, temperature=1.0, seconds=3), artifact(samples, temperature=0.7, seconds=4)
    )
    assert found.warnings == ["the protocol differs: temperature is 1.0 in the first and 0.7 in the second"]


def test_harness_form(tmp_path: Path) -> None:
    write(tmp_path, "sft", make_samples(1.0, problems=2, samples=2))
    rows = harness_samples(read_artifact(tmp_path, "sft"))
    assert [(r["doc_id"], r["filter"]) for r in rows] == [
        (0, "greedy"), (0, "sampled"), (1, "greedy"), (1, "sampled"),
    ]  # fmt: skip
    assert rows[2]["resps"] == [["1 + 1 = 2"]] and rows[2]["filtered_resps"] == ["2"]
    assert rows[3]["resps"] == [["1 + 1 = 2"] * 2] and rows[3]["filtered_resps"] == [["2", "2"]]
    assert rows[0]["metrics"] == ["exact_match"] and rows[0]["exact_match"] == 1.0
    assert rows[1]["metrics"] == ["exact_match", "pass@2"] and rows[1]["pass@2"] == 1.0
    json.dumps(rows)
    assert pyarrow.parquet.read_schema(tmp_path / "sft.parquet").metadata[b"algorist.rollouts"] == b"2"


def test_a_difference_of_shares_is_in_points(tmp_path: Path) -> None:
    write(tmp_path, "sft", make_samples(0.2, problems=20, seed=1))
    write(tmp_path, "grpo", make_samples(0.9, problems=20, seed=2))
    first, second = (read_artifact(tmp_path, name) for name in ("sft", "grpo"))
    console = Console(width=140, record=True, file=io.StringIO())
    paired = paired_metrics(first.samples, second.samples)
    drawn = closing_table(140, first.metrics, second.metrics, paired)
    console.print(drawn)
    lines = [re.split(r" {2,}", line.strip()) for line in console.export_text().splitlines()]
    cells = {row[0]: row[1:] for row in lines if len(row) == 4}
    before, after, difference = cells["greedy accuracy"]
    assert before.partition("[")[0].endswith(" % ") and after.partition("[")[0].endswith(" % ")
    assert re.fullmatch(r"[+-]\d+\.\d points \[[+-]\d+\.\d, [+-]\d+\.\d\]", difference), difference
    assert float(difference.split()[0]) == pytest.approx(float(after.split()[0]) - float(before.split()[0]))
    shares = [name for name in cells if name not in ("mean tokens", "reward")]
    assert len(shares) >= 4 and not any("%" in cells[name][2] for name in shares)
    assert "points" not in cells["mean tokens"][2]

"""What evaluations and stored rollouts of a run say of its cause: run folders made of rows, as a training writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from algorist.diagnosis.diagnose import diagnose
from algorist.evaluation.artifact import write_artifact
from algorist.evaluation.estimators import summarise
from algorist.store.run_folder import RunFolder
from algorist.store.write import RolloutWriter

PROBLEMS, STEPS = 40, 12


def row(name: str, right: bool, completion: str, **values: Any) -> dict[str, Any]:
    usual = {"problem_id": name, "question": f"{name}?", "gold": str(sum(map(ord, name)) % 50), "completion": completion, "correct": right, "reward": float(right),
             "reason": "equal_string" if right else "different", "completion_tokens": 9, "truncated": False, "well_formed": True}  # fmt: skip
    return usual | values


def run_of(
    tmp_path: Path, config: str, rollouts: list[dict[str, Any]], **held_out: tuple[float, str]
) -> Path:
    """Make a run with these rollouts and with evaluations: share right and a text that is part of each completion."""
    folder = RunFolder.create(tmp_path / "run")
    folder.write_text("config.yaml", f"name: made\n{config}")
    with RolloutWriter(folder.rollouts) as store:
        store.write([{"stage": "grpo", **each} for each in rollouts])
    for name, (share, text) in held_out.items():
        rows = [
            row(f"{n % 12}+{n % 16}", n < share * PROBLEMS, f"{text} {n}", greedy=True, sample=0)
            for n in range(PROBLEMS)
        ]
        write_artifact(
            folder.path / "eval",
            name,
            samples=rows,
            metrics=summarise(rows),
            protocol={},
            model="m",
            dataset="sums",
        )
    return folder.path


def rising() -> list[dict[str, Any]]:
    """Return rollouts of problems that are solved ever more often, each problem once."""
    return [
        row(
            f"{step}-{group}",
            (group + sample) % STEPS < 4 + step / 2,
            f"text {sample}",
            step=step,
            group=group,
        )
        for step in range(STEPS)
        for group in range(16)
        for sample in range(4)
    ]


def test_gold_answers_that_contradict_each_other(tmp_path: Path) -> None:
    run = run_of(tmp_path, "grpo: {max_steps: 12}\n", rising(), base=(0.7, "a"), grpo=(0.2, "b"))
    (finding,) = diagnose(run)
    assert finding.name == "held_out_falls" and "may contradict each other" in finding.sentence
    assert finding.change == ()


@pytest.mark.parametrize(
    ("after", "said"), [("a", "may not have the weights that were trained"), ("b", "does not follow")]
)
def test_an_evaluation_of_other_weights(after: str, said: str, tmp_path: Path) -> None:
    config = "plugins: []\ngrpo: {max_steps: 12, engine: native}\neval: {engine: transformers}\n"
    run = run_of(tmp_path, config, rising(), base=(0.3, "a"), grpo=(0.3, after))
    for stage, value in (("sft", 1.0), ("grpo", 2.0)):
        (run / stage / "final").mkdir(parents=True)
        save_file({"w": numpy.full((4, 4), value, "f4")}, run / stage / "final" / "model.safetensors")
    (run / "eval" / "base.json").rename(run / "eval" / "sft.json")
    (run / "eval" / "base.parquet").rename(run / "eval" / "sft.parquet")
    (finding,) = diagnose(run)
    assert finding.name == "held_out_falls" and said in finding.sentence
    assert finding.change == (("eval.engine=native",) if after == "a" else ())


@pytest.mark.parametrize(("part", "plugin"), [(0.95, True), (0.95, False), (0.6, True)])
def test_weights_that_code_of_the_users_own_has_frozen(part: float, plugin: bool, tmp_path: Path) -> None:
    """Without such code, and for a part of the weights, freezing may be meant."""
    config = f"plugins: [{'own.py' if plugin else ''}]\ngrpo: {{max_steps: 12}}\n"
    rows = [
        row(f"{step}-{n // 4}", n % 2 == 0, f"text {n}", step=step, group=n // 4, reward=n % 2)
        for step in range(STEPS)
        for n in range(64)
    ]
    run = run_of(tmp_path, config, rows)
    for name in "own.py", "metrics.jsonl":
        text = "".join(
            json.dumps({"stage": "grpo", "step": n, "grad_norm": 0.1, "learning_rate": 1e-3}) + "\n"
            for n in range(STEPS)
        )
        (run / name).write_text(text if name == "metrics.jsonl" else "")
    for stage, value in (("sft", 1.0), ("grpo", 2.0)):
        (run / stage / "final").mkdir(parents=True)
        sizes = {"frozen": (round(10_000 * part), 1.0), "norm": (round(10_000 * (1 - part)), value)}
        tensors = {name: numpy.full(size, of, "f4") for name, (size, of) in sizes.items()}
        save_file(tensors, run / stage / "final" / "model.safetensors")
    found = [finding for finding in diagnose(run) if finding.name == "weights_unchanged"]
    assert bool(found) is (plugin and part > 0.9)
    assert all("they are frozen, maybe by code of your own (plugins)" in each.sentence for each in found)


@pytest.mark.parametrize(
    ("pays", "says"),
    [
        (lambda size: size <= 72, "pays 456 of 864 right completions no more than wrong ones: those of more than 70 characters"),
        (lambda size: size > 72, None),
        (lambda size: False, "pays 864 of 864 right completions no more than wrong ones"),
    ],
)  # fmt: skip
def test_right_completions_that_a_reward_does_not_pay(pays: Any, says: str | None, tmp_path: Path) -> None:
    rows = []
    for step in range(STEPS):
        for group in range(16):
            for sample in range(8):
                size, right = 60 + 10 * (sample % 3 + 1), sample < 4 or (group + sample) % 8 == 0
                paid = float(right and pays(size))
                values = {"step": step, "group": group, "reward": 0.2, "rewards": {"score": paid}}
                rows.append(row(f"{step}-{group}", right, "x" * size, **values))
    run = run_of(tmp_path, "rewards: [{name: 'own.py:score'}]\ngrpo: {max_steps: 12}\n", rows)
    (finding,) = diagnose(run)
    assert finding.name == "flat_reward"
    assert [text for text in finding.evidence if "right completions" in text] == (
        [f"score {says}"] if says else []
    )

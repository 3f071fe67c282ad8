"""A teacher in whole runs: what preflight says of it, and a student that learns from it without any reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from algorist.runs.pipeline import run_recipe
from tests.marks import first
from tests.runs.test_data_rollouts import recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one tokenizer, SFT of 50 and of 150 steps, and a recipe."""
    folder = tmp_path_factory.mktemp("teacher")
    for name, steps in (("weak", 50), ("strong", 150)):
        run = run_recipe(
            recipe(folder, name, f"sft.max_steps={steps}", "grpo.enabled=false", "eval.enabled=false")
        )
    (folder / "r.yaml").write_text((run.folder.path / "config.yaml").read_text())
    return folder


def look(verb: Any, runs: Path, student: str, teacher: str) -> dict[str, Any]:
    code, out, err = verb(
        "preflight", str(runs / "r.yaml"), "grpo.enabled=true", f"grpo.teacher.model={runs / teacher}", "threads=1",
        "--model", str(runs / student), "--no-trial", "--samples", "4", "--json",
    )  # fmt: skip
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_preflight_says_whether_it_is_a_teacher(runs: Path, verb: Any) -> None:
    up, down, same = (
        look(verb, runs, *names) for names in (("weak", "strong"), ("strong", "weak"), ("strong", "strong"))
    )
    seen = up["extensions"]["teacher"]
    assert seen["teacher"] > seen["student"] == pytest.approx(up["sampling"]["pass_rate"])
    assert seen["difference"]["value"] == pytest.approx(seen["teacher"] - seen["student"])
    assert seen["difference"]["low"] < seen["difference"]["value"] < seen["difference"]["high"]
    assert seen["student_log_prob"] < seen["teacher_log_prob"] < 0 < seen["shared_mass"] <= 1
    nothing = "there is nothing to learn from it here"
    assert not any(nothing in advice["explanation"] for advice in up["advice"])
    for found in (down, same):
        assert any(nothing in advice["explanation"] for advice in found["advice"])
    alike = same["extensions"]["teacher"]
    assert alike["shared_mass"] == pytest.approx(1) and alike["difference"]["value"] == 0
    assert alike["student_log_prob"] == pytest.approx(alike["teacher_log_prob"], abs=1e-4)


def test_what_preflight_prints(runs: Path, verb: Any) -> None:
    code, out, err = verb(
        "preflight", str(runs / "r.yaml"), "grpo.enabled=true", f"grpo.teacher.model={runs / 'weak'}", "threads=1",
        "--model", str(runs / "strong"), "--no-trial", "--samples", "2", "--problems", "4",
    )  # fmt: skip
    assert code == 0, err
    shown = " ".join(out.split())
    assert "paired difference" in shown and "nats a token for itself" in shown
    assert "solves no more of these problems than the student" in shown


@pytest.mark.long
def test_planned_memory_is_near_the_measured_one(tmp_path: Path) -> None:
    """Within 15 %, in parts of 2,048 tokens."""
    from tests.runs.test_preflight import planned

    shape = "model.tiny={hidden_size: 64, layers: 2, vocab_size: 700}"
    for name, tiny in (
        ("teacher", "model.tiny={hidden_size: 512, layers: 4, vocab_size: 700}"),
        ("student", shape),
    ):
        run_recipe(
            recipe(tmp_path, name, "sft.max_steps=1", "grpo.enabled=false", "eval.enabled=false", tiny)
        )
    memory = planned(
        f"model.name={tmp_path}/student/sft/final", f"grpo.teacher={{model: '{tmp_path}/teacher', loss: sampled}}",
        "sft.enabled=false", "grpo.loss=dapo", "grpo.batch_size=32", "device=cpu",
    )["grpo"]["memory"]  # fmt: skip
    assert memory["peak"] == pytest.approx(memory["measured_peak"], rel=0.15), memory


@pytest.mark.parametrize("loss", first(1, ["sampled", "full", "top_k"]))
def test_a_student_learns_without_a_reward(runs: Path, loss: str) -> None:
    done = run_recipe(
        recipe(
            runs,
            f"from-{loss}",
            f"model.name={runs / 'weak' / 'sft' / 'final'}",
            "sft.enabled=false",
            "eval.enabled=false",
            "rewards=[{name: correct, weight: 0}]",
            f"grpo.teacher={{model: '{runs / 'strong'}', loss: {loss}}}",
            "grpo.loss=dapo",
            *(
                ["grpo.group_size=1", "grpo.batch_size=24"] if loss == "full" else []
            ),  # a teacher needs no group
            "grpo.max_steps=24",
            "grpo.learning_rate=4e-3",
            "grpo.logging_steps=1",
        )
    )
    lines = [json.loads(line) for line in done.folder.metrics.read_text().splitlines()]
    kl = [line["teacher/reverse_kl"] for line in lines if "teacher/reverse_kl" in line]
    assert len(kl) == 24 and sum(kl[-3:]) < 0.7 * sum(kl[:3])

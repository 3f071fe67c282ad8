"""``algorist regrade``: a stored run graded again says what changes, and the store stays as it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from algorist.config import load_recipe
from algorist.config.own_files import inputs_of
from algorist.config.yaml_text import to_yaml
from algorist.errors import AlgoristError, ConfigError
from algorist.extensions.regrade.differences import differences
from algorist.runs.begin import hold_folder
from algorist.store.run_folder import RunFolder
from algorist.store.write import RolloutWriter
from tests.conftest import Cli

ANSWERS = [
    ("12", True, "equal_string"),
    ("12.0", True, "equal_number"),
    ("\\sqrt{144}", False, "unparseable_answer"),
    ("13", False, "different"),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four rollouts of one step, graded as ``numeric`` grades them."""
    folder = RunFolder.create(tmp_path / "run")
    folder.write_text("config.yaml", to_yaml(load_recipe("smoke-cpu", ["matcher=numeric"]).recipe))
    rows: list[dict[str, Any]] = []
    for index, (answer, correct, reason) in enumerate(ANSWERS):
        text = f"<reasoning>\nr\n</reasoning>\n<answer>\n{answer}\n</answer>"
        rows.append(
            {
                "stage": "grpo", "step": 0, "problem_id": "p", "group": 0, "prompt": "q", "completion": text, "prompt_tokens": 1,
                "completion_tokens": 9, "sampler_log_prob_sum": -1.0, "rewards": {"correct": float(correct), "well_formed": 1.0},
                "reward": float(correct) + 0.2, "advantage": 0.1 * index, "correct": correct, "reason": reason, "extracted": answer,
                "gold": "12", "truncated": False, "seconds": 0.1,
            }
        )  # fmt: skip
    with RolloutWriter(folder.rollouts) as store:
        store.write(rows)
    return folder.path


def test_the_same_matcher_changes_nothing(run: Path) -> None:
    found = differences(run, None)
    assert (found["rollouts"], found["matcher"], found["verdicts_changed"], found["rewards_changed"]) == (
        4,
        "numeric",
        0,
        0,
    )
    assert found["changed"] == [] and found["accuracy_before"] == found["accuracy_after"] == 0.5


def test_what_an_environment_paid_is_paid_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_text("config.yaml", to_yaml(load_recipe("smoke-cpu", ["rewards=[environment]"]).recipe))
    paid = {"source": "get_reward", "request": "", "reply": "0.5", "error": "", "seconds": 0.0}
    with RolloutWriter(folder.rollouts) as store:
        store.write(
            [{"step": 0, "problem_id": "p", "group": 0, "completion": "7", "gold": "7", "reward": 0.5, "turns": [paid]}]
        )  # fmt: skip
    assert differences(folder.path, None)["rewards_changed"] == 0


def test_rewards_that_compare_completions_are_paid_as_they_were(tmp_path: Path) -> None:
    """Each completion was paid alone, so that all of them changed."""
    (tmp_path / "mine.py").write_text(
        "def shortest(completions, **_):\n    lengths = [len(text) for text in completions]\n"
        "    return [float(n == min(lengths)) for n in lengths]\n"
    )
    own = [f"rewards=['{tmp_path / 'mine.py'}:shortest']", f"output_dir={tmp_path}", "run_name=run"]
    recipe = load_recipe("smoke-cpu", own).recipe
    with (
        hold_folder(recipe, inputs_of(recipe), resume=False) as folder,
        RolloutWriter(folder.rollouts) as store,
    ):
        store.write(
            [
                {"step": step, "problem_id": "p", "group": 0, "completion": text, "gold": "7", "reward": float(text == "7")}
                | {"correct": False, "reason": "no_answer"}
                for step in (0, 1)
                for text in ("7", "seven", "It is 7.")
            ]
        )  # fmt: skip
    assert differences(folder.path, None)["rewards_changed"] == 0


def test_another_matcher_is_a_diff_and_the_store_is_untouched(run: Path) -> None:
    parts = sorted((run / "rollouts").iterdir())
    before = [hashlib.sha256(p.read_bytes()).hexdigest() for p in parts]
    found = differences(run, "symbolic")
    assert found["moves"] == {"unparseable_answer → equal_number": 1}
    assert (found["accuracy_before"], found["accuracy_after"]) == (0.5, 0.75)
    (changed,) = found["changed"]
    assert changed["new_reward"] == pytest.approx(1.2) and changed["reward"] == pytest.approx(0.2)
    assert [hashlib.sha256(p.read_bytes()).hexdigest() for p in parts] == before


def test_mistakes(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'symbolic'"):
        differences(run, "symbolik")
    with pytest.raises(AlgoristError, match="nowhere"):
        differences(tmp_path / "nowhere", None)
    with pytest.raises(AlgoristError, match=r"config.yaml is a file; give the folder of a run"):
        differences(run / "config.yaml", None)


def test_the_verb(run: Path, tmp_path: Path, call: Cli) -> None:
    done = call("regrade", str(run), "--matcher", "symbolic", "--changed", "c.jsonl")
    assert done.returncode == 1 and "1 verdict and 1 reward change" in done.stdout, done.stderr
    assert json.loads((tmp_path / "c.jsonl").read_text())["new_reason"] == "equal_number"
    same = call("regrade", str(run), "--json")
    assert same.returncode == 0 and json.loads(same.stdout)["changed"] == 0

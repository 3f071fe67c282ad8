"""A model that was not trained here, and one that forgets a tag: what ``eval``, ``diagnose`` and ``solve`` say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from algorist.config import load_recipe
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Quiet
from tests.tiny import save_writer

DATA = ("--data", "arithmetic,params={count: 6, seed: 3}")


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never closes its reasoning."""
    folder = tmp_path_factory.mktemp("forgetful")
    return save_writer(folder, "<reasoning>", "a", "<answer>", "3", "5", "</answer>")


def test_eval_counts_the_answers_that_lack_a_tag(forgetful: Path, verb: Any) -> None:
    words = ("eval", str(forgetful), *DATA, "--format", "reasoning_answer", "--out", "e", "--name", "n")
    code, out, err = verb(*words)
    assert code == 0, err
    assert "without </reasoning>" in out and "6 of 6 completions: their answer is not read" in out
    code, out, _ = verb(*words, "--json", "--by", "reason")
    (entry,) = json.loads(out)["evaluations"]
    assert entry["missing_tags"] == {"</reasoning>": 6} and set(entry["by"]["reason"]) == {
        "no_reasoning_close"
    }
    assert entry["metrics"]["greedy_accuracy"]["value"] == 0
    code, out, _ = verb("inspect", "e/n.json", "--wrong", "--limit", "1")
    assert code == 0 and "no_reasoning_close" in out


def test_diagnose_says_which_tag_is_missing(forgetful: Path, tmp_path: Path, verb: Any) -> None:
    more = ("threads=1", "sft.enabled=false", "eval.enabled=false", f"output_dir={tmp_path}", "run_name=r")
    recipe = load_recipe("smoke-cpu", [*more, f"model.name={forgetful}", "grpo.max_steps=2"]).recipe
    run_recipe(recipe, display=Quiet())
    code, out, _ = verb("diagnose", str(tmp_path / "r"))
    assert code == 1 and "</reasoning> is missing in 32 of 32 rollouts" in out
    assert "no_reasoning_close 32" in out
    _, out, _ = verb("diagnose", str(tmp_path / "r"), "--json")
    assert json.loads(out)["missing_tags"] == {"</reasoning>": 32}

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
    assert code == 1 and "32 of 32 rollouts lack </reasoning> alone" in out
    assert "no_reasoning_close 32" in out
    _, out, _ = verb("diagnose", str(tmp_path / "r"), "--json")
    assert json.loads(out)["missing_tags"] == {"</reasoning>": 32}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers without a tag and without a box."""
    return save_writer(tmp_path_factory.mktemp("stock"), "a", "3", "5")


def test_a_model_from_elsewhere_is_asked_without_tags_and_graded_both_ways(
    stock: Path, tmp_path: Path, verb: Any
) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "30 + 5?", "answer": "35"}) + "\n")
    code, out, err = verb(
        "eval", str(stock), "--data", str(tmp_path / "own.jsonl"), "--out", "e", "--name", "n"
    )
    assert code == 0, err
    assert "prompt format boxed (not trained here; another: --format NAME)" in err
    head, both, *_ = out.splitlines()
    assert "boxed" in head and both.startswith("  strict 0.0 % [") and "· lenient 100.0 % [" in both
    code, out, err = verb("solve", "30 + 5?", "--model", str(stock))
    assert code == 0, err
    question, answer, text, *_ = out.splitlines()
    assert (question, answer) == ("question: 30 + 5?", "answer: none · last number: 35") and text.endswith(
        "35"
    )


@pytest.mark.parametrize("protocol", ["gsm8k", "gsm8k_cot_zeroshot"])
def test_one_option_reads_as_the_harness_does(stock: Path, tmp_path: Path, verb: Any, protocol: str) -> None:
    rows = [{"question": f"{n} + 5?", "answer": f"{n} + 5 = {n + 5}\n#### {n + 5}"} for n in range(8)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--data", "gsm8k", "--path", str(tmp_path), "--protocol", protocol, "--max-new-tokens", "8")
    code, out, err = verb("eval", str(stock), *words, "--out", "e", "--name", "n")
    assert code == 0, err
    assert "  strict-match 0.0 % [" in out and "· flexible-extract " in out

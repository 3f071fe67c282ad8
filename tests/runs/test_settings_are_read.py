"""Settings that were once ignored change something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import algorist
from algorist.config import load_recipe
from algorist.data import load_problems
from algorist.errors import ConfigError, DataError
from algorist.runs.pipeline import run_recipe
from algorist.store.read import query
from algorist.store.run_log import Quiet

PROMPT = "Q: {}\nA: <think>"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    written = [
        {
            "prompt": PROMPT.format(n),
            "response": f" it is {n} </think> <answer>{n}</answer>",
            "answer": str(n),
        }
        for n in range(24)
    ]
    file = tmp_path / "sft.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in written))
    return file


@pytest.mark.parametrize("adapter", ["sft_jsonl", "local"])
def test_prompt_and_response_are_taught_as_they_are(rows: Path, tmp_path: Path, adapter: str) -> None:
    from algorist.training import sft

    shown: list[Any] = []
    make = sft.make_sft_trainer

    def spy(**settings: Any) -> Any:
        shown.extend(settings["demos"])
        return make(**settings)

    settings = [
        f"data.sft={{name: {adapter}, path: {rows}}}",
        "sft.source=prompt_response",
        "grpo.enabled=false",
    ]
    own = ["eval.enabled=false", "threads=1", f"output_dir={tmp_path}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "make_sft_trainer", spy)
        run_recipe(load_recipe("smoke-cpu", [*settings, *own]).recipe, display=Quiet())
    assert [(d.prompt, d.completion) for d in shown] == [
        (PROMPT.format(n), f" it is {n} </think> <answer>{n}</answer>") for n in range(24)
    ]
    with pytest.raises(DataError, match=r"sft\.source is prompt_response, but problem"):
        run_recipe(load_recipe("smoke-cpu", [*settings[1:], *own, "run_name=other"]).recipe, display=Quiet())


def test_sft_data_without_a_name_is_the_training_data() -> None:
    data = load_recipe("math-sft", ["data.sft.correct_only=true", "data.train.path=x.jsonl"]).recipe.data
    assert data.sft is not None
    assert data.sft.model_dump() == data.train.model_dump() | {"correct_only": True}
    columns = [
        "data.train={name: local, path: x.jsonl, columns: {question: q, answer: a}, params: {decimal: ','}}"
    ]
    data = load_recipe("smoke-cpu", [*columns, "data.sft={columns: {solution: s}}"]).recipe.data
    assert data.sft is not None and data.sft.params == {"decimal": ","}
    assert data.sft.columns == {"question": "q", "answer": "a", "solution": "s"}


def test_correct_only_filters_the_files_own_rows(rows: Path) -> None:
    with rows.open("a") as file:
        file.write(
            json.dumps({"prompt": "Q", "response": " x </think> <answer>1</answer>", "answer": "2"}) + "\n"
        )
    recipe = load_recipe("math-sft", ["data.sft.correct_only=true", f"data.train.path={rows}"]).recipe
    assert recipe.data.sft is not None and len(load_problems(recipe.data.sft)) == 24
    assert len(load_problems(recipe.data.train)) == 25


def test_top_k_of_vllm_is_answered_with_ours() -> None:
    with pytest.raises(ConfigError, match=r"here 0 turns it off: grpo\.top_k=0"):
        load_recipe("quickstart", ["grpo.top_k=-1"])


def test_the_api_takes_rewards_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe(
        load_recipe(
            "smoke-cpu", ["grpo.enabled=false", "eval.enabled=false", f"output_dir={tmp_path}"]
        ).recipe,
        display=Quiet(),
    )

    def brief(completion: str) -> float:
        return 1.0 / (1 + len(completion))

    def batch(completions: list[Any], **columns: Any) -> list[float]:
        return [0.5 for _ in completions]

    setup = algorist.create_math_training_setup(
        str(tmp_path / "smoke-cpu" / "sft" / "final"),
        dataset=[{"question": f"What is {n} + 2?", "answer": f"so\n#### {n + 2}"} for n in range(8)],
        reward_funcs=["correct", brief, batch, {"name": "well_formed"}],
        reward_weights=[1, 1, 2, 1],
        limit=6,
        output_dir=tmp_path / "out",
        device="cpu",
        grpo_args={
            "num_generations": 2,
            "per_device_train_batch_size": 4,
            "max_steps": 1,
            "gradient_accumulation_steps": 1,
            "max_completion_length": 8,
        },
    )
    assert len(setup.dataset) == 6 and setup.reward_funcs.names == [
        "correct",
        "brief",
        "batch",
        "well_formed",
    ]
    assert setup.dataset[0]["reference_answer"] == "2"
    algorist.run_training(setup.artifacts)
    assert "grpo 1/1 · loss" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="reward_weights has 1 values, expected 2"):
        algorist.create_math_training_setup("x", reward_funcs=["correct", brief], reward_weights=[1])


def test_a_reward_gets_any_column_of_the_file(tmp_path: Path) -> None:
    other = {"completion": "x", "reference_answer": "-1", "ground_truth": "-1"}
    rows = [{"question": f"What is {n}?", "answer": str(n), "weight": n, **other} for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def f(completions, weight, level, **_):\n    return [float(w) for w in weight]\n"
        "def g(completion, *, gold):\n    return float(gold)\n"
    )
    data = f"data.train={{name: local, path: {tmp_path}/rows.jsonl, columns: {{level: weight}}}}"
    settings = [
        "sft.enabled=false",
        "eval.enabled=false",
        "threads=1",
        "grpo.max_steps=1",
        f"output_dir={tmp_path}",
    ]
    rewards = f"rewards=[{tmp_path}/mine.py:f, {tmp_path}/mine.py:g]"
    run_recipe(load_recipe("smoke-cpu", [data, rewards, *settings]).recipe, display=Quiet())
    stored = query(tmp_path / "smoke-cpu", "SELECT gold, reward FROM rollouts")
    assert stored and all(2 * float(row["gold"]) == row["reward"] for row in stored)

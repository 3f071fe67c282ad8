"""Each reference system from end to end: its recipe, a tiny model, a handful of rows, two steps, evaluation, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from algorist.config.load import load_recipe
from algorist.report.build import build_report
from algorist.runs.pipeline import Run, run_recipe

TINY = [
    "model.name=tiny",
    "model.tiny={hidden_size: 32, layers: 2, vocab_size: 600, max_position_embeddings: 2048}",
    "device=cpu",
    "threads=1",
]
SHORT = [
    "grpo.max_steps=2",
    "grpo.max_completion_tokens=16",
    "eval.max_completion_tokens=16",
    "grpo.save_steps=2",
]


def run_tiny(
    folder: Path, name: str, *overrides: str, group: int = 0, stages: tuple[str, ...] = ("sft", "grpo")
) -> Run:
    """Run a recipe with the tiny model in ``folder`` and build its report."""
    sizes = [f"grpo.group_size={group}", f"grpo.batch_size={group}", "grpo.gradient_accumulation_steps=1"]
    recipe = load_recipe(
        name, [*TINY, *SHORT, *(sizes if group else []), f"output_dir={folder}", *overrides]
    ).recipe
    run = run_recipe(recipe, stages=stages)
    assert build_report(run.folder.path).is_file()
    return run


def logged(run: Run, stage: str) -> list[dict[str, Any]]:
    lines = (run.folder.path / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["stage"] == stage]


def rollouts(run: Run) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(run.folder.path / "rollouts").to_pylist()


def check_grpo(run: Run, *, steps: int, completions: int) -> None:
    """The stage did its steps, kept every rollout, and its total is the weighted sum of the recipe's rewards."""
    rows = rollouts(run)
    assert {row["step"] for row in rows} == set(range(steps)) and len(rows) == steps * completions
    weights = {spec.name: spec.weight for spec in run.recipe.rewards}
    for row in rows:
        parts = dict(row["rewards"])
        assert set(parts) == set(weights)
        assert row["reward"] == pytest.approx(
            sum(weights[name] * value for name, value in parts.items()), abs=1e-5
        )
    assert {row["gold"] for row in rows} <= {p.answer for p in run.train}
    assert (run.folder.path / "grpo" / "final").is_dir()
    assert "greedy_accuracy" in run.summaries["grpo"]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines(path: Path, count: int) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(next(file)) for _ in range(count)]


@pytest.mark.parametrize("name", ["oneshot-gsm8k", "gist-gsm8k"])
def test_gsm8k_systems(name: str, tmp_path: Path, real_data: Path) -> None:
    run = run_tiny(
        tmp_path,
        name,
        f"data.train={{name: gsm8k, path: '{real_data / 'gsm8k/train.jsonl'}', limit: 12}}",
        f"data.eval={{name: gsm8k, path: '{real_data / 'gsm8k/test.jsonl'}', split: test, limit: 4}}",
        group=4,
    )
    check_grpo(run, steps=2, completions=4)
    assert not run.folder.is_finished("sft") and (name == "gist-gsm8k") == (run.recipe.model.lora is not None)
    saved = {p.name for p in (run.folder.path / "grpo/final").iterdir()}
    assert ("adapter_model.safetensors" if run.recipe.model.lora else "model.safetensors") in saved


@pytest.mark.slow
def test_sft_then_grpo_with_an_adapter(tmp_path: Path, shared_data: Path) -> None:
    dapo = tmp_path / "train.parquet"
    rows = pyarrow.parquet.read_table(shared_data / "dapo_math_14k/train.parquet").slice(0, 20)
    pyarrow.parquet.write_table(rows, dapo)
    demos = shared_data / "openmathinstruct2_sample/sample.jsonl"
    run = run_tiny(
        tmp_path,
        "sft-grpo-dapo",
        f"data.sft.path={demos}",
        "data.sft.limit=12",
        f"data.train.path={dapo}",
        f"data.eval.path={dapo}",
        "sft.max_steps=2",
        "sft.logging_steps=1",
        "grpo.eval_every=1",
    )
    check_grpo(run, steps=2, completions=2)
    golds = {row["reward_model"]["ground_truth"] for row in rows.to_pylist()}
    assert len(run.train) < 18 and len(run.held_out) == 2  # the longest tenth of the prompts is gone
    assert {p.answer for p in [*run.train, *run.held_out]} <= golds
    assert not {p.question for p in run.train} & {p.question for p in run.held_out}
    assert "Please reason step by step" not in "".join(p.question for p in run.train)
    assert {row["step"] for row in logged(run, "sft") if "loss" in row} == {1, 2}
    assert {"sft", "grpo-step-1", "grpo"} <= set(run.summaries)
    assert (run.folder.path / "sft/final/adapter_model.safetensors").is_file()
    assert all(row["prompt"].endswith("<start_working_out>\n") for row in rollouts(run))


def traces(path: Path, math: Path, count: int) -> Path:
    """Write S3's SFT rows: the r1_zero prompt, a response that ends with the closing tag, the gold answer."""
    rows = [
        {
            "prompt": f"A conversation between User and Assistant.\nUser: {row['problem']}\nAssistant: <think>",
            "response": f"{row['solution']} </think> <answer> {row['answer']} </answer>",
            "ground_truth": row["answer"],
        }
        for row in lines(math, count)
    ]
    return jsonl(path, rows)


@pytest.mark.slow
def test_math_sft_baseline_and_grpo(tmp_path: Path, shared_data: Path) -> None:
    math500 = shared_data / "math500/test.jsonl"
    demos = traces(tmp_path / "sft.jsonl", math500, 12)
    other = jsonl(tmp_path / "test.jsonl", lines(math500, 15)[12:])
    held_out = f"data.eval={{name: math, path: '{other}', split: test}}"
    run = run_tiny(
        tmp_path,
        "math-sft",
        held_out,
        f"data.train.path={demos}",
        "data.train.limit=10",
        "sft.max_steps=2",
        "sft.batch_size=2",
        "sft.gradient_accumulation_steps=2",
        "sft.eval_every=1",
    )
    assert len(run.train) == 10 and {"sft-step-1", "sft"} <= set(run.summaries)
    between, last = (
        json.loads((run.folder.path / f"eval/{n}.json").read_text()) for n in ("sft-step-1", "sft")
    )
    assert between["model"] == f"{run.folder.path / 'sft'}, step 1"  # no folder holds it
    assert Path(last["model"]).is_dir() and between["date"] <= last["date"]
    assert not (run.folder.path / "rollouts").exists() or not rollouts(run)
    final = run.folder.path / "sft/final"
    assert (final / "model.safetensors").is_file()
    base = run_tiny(
        tmp_path,
        "math-baseline",
        held_out,
        f"data.train={{name: math, path: '{math500}', limit: 1}}",
        f"model.name={final}",
    )
    assert set(base.summaries) == {"base"} and not (base.folder.path / "sft").exists()
    trained = run_tiny(
        tmp_path,
        "math-grpo",
        held_out,
        f"data.train={{name: math, path: '{math500}', limit: 8}}",
        f"model.name={final}",
        "grpo.eval_every=1",
        group=4,
    )
    check_grpo(trained, steps=2, completions=4)
    assert set(trained.summaries) == {"grpo-step-1", "grpo"}
    assert all(row["prompt"].endswith("Assistant: <think>") for row in rollouts(trained))


def test_r1_zero_on_numina(tmp_path: Path, shared_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    def numina(file: str, first: int) -> Path:
        """Write rows in NuminaMath-TIR's schema from real MATH problems; the last row has no box and is left out."""
        rows = [
            {"problem": row["problem"], "solution": row["solution"], "messages": []}
            for row in lines(shared_data / "math500/test.jsonl", first + 8)[first:]
        ]
        return jsonl(tmp_path / file, [*rows, {"problem": "Prove it.", "solution": "Done.", "messages": []}])

    run = run_tiny(
        tmp_path,
        "r1-zero-numina",
        f"data.train.path={numina('train.jsonl', 0)}",
        f"data.eval.path={numina('test.jsonl', 8)}",
        "data.eval.limit=3",
        "grpo.logging_steps=1",
        group=4,
    )
    check_grpo(run, steps=2, completions=4)
    assert len(run.train) == 8 and len(run.held_out) == 3
    logged = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if row["stage"] == "grpo" and "loss" in row] == [1, 2]
    assert "1 of 9 rows are left out" in caplog.text


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

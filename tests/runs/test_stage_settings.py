"""A setting of one stage does not reach the next one: a run in one call is the run in two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from algorist.config import load_recipe
from algorist.runs.pipeline import Quiet, run_recipe
from algorist.training.log_probs import recomputes

SETTINGS = [
    "threads=1",
    "model.tiny={hidden_size: 32, layers: 1, vocab_size: 300, max_position_embeddings: 256}",
    "eval.enabled=false",
    "sft.gradient_checkpointing=true",
    "sft.max_steps=3",
    "grpo.max_steps=3",
    "grpo.learning_rate=0.003",
    "rewards=[{name: well_formed}, {name: xmlcount}]",
]


@pytest.mark.long
def test_activation_checkpointing_of_sft_is_over_when_grpo_begins(tmp_path: Path) -> None:
    def recipe(name: str) -> object:
        return load_recipe("smoke-cpu", [*SETTINGS, f"output_dir={tmp_path}", f"run_name={name}"]).recipe

    run = run_recipe(recipe("one"), display=Quiet())  # type: ignore[arg-type]
    assert run.policy is not None
    assert not recomputes(run.policy.model.train())
    run_recipe(recipe("two"), display=Quiet(), stages=("sft",))  # type: ignore[arg-type]
    run_recipe(recipe("two"), display=Quiet(), resume=True)  # type: ignore[arg-type]
    one, two = (load_file(tmp_path / name / "grpo/final/model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert "log-prob pass is off" not in (tmp_path / "one" / "training.log").read_text()


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_a_constant_rate_also_begins_with_its_warm_up(stage: str, tmp_path: Path) -> None:
    own = [f"{stage}.lr_scheduler=constant", f"{stage}.warmup_steps=2", f"{stage}.learning_rate=0.01"]
    only = "grpo.enabled=false" if stage == "sft" else "sft.enabled=false"
    run = run_recipe(
        load_recipe("smoke-cpu", [*SETTINGS, *own, only, f"output_dir={tmp_path}", "run_name=r", f"{stage}.logging_steps=1"]).recipe,
        display=Quiet(),
    )  # fmt: skip
    rows = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows if "learning_rate" in row] == [0, 0.005, 0.01]

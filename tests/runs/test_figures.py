"""The tables of figures in docs are those of benchmarks/baselines, and the cost of a recipe is what it takes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from algorist.config.load import load_recipe
from algorist.runs.pipeline import run_recipe
from algorist.store.read import query

ROOT = Path(__file__).resolve().parents[2]


def test_tables_are_made_from_the_baselines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    import tables

    with pytest.raises(SystemExit) as end:
        tables.main()
    assert end.value.code == 0, f"{capsys.readouterr().out}run: python benchmarks/tables.py"


@pytest.mark.parametrize(
    ("build", "argument", "reason"),
    [
        (signal.raise_signal, signal.SIGKILL, "killed, most likely for its memory"),
        (int, "x", "ended by an error"),
    ],
)
def test_a_side_that_is_killed_is_named(
    monkeypatch: pytest.MonkeyPatch, build: Any, argument: Any, reason: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import measure

    side = measure.InOwnProcess(build, argument)
    with pytest.raises(ChildProcessError, match=f"the process of {build.__name__} was {reason}"):
        side()
    side.close()


@pytest.mark.long
def test_the_cost_of_a_recipe_is_what_its_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from recipe_cost import cost

    foretold = cost("smoke-cpu")
    recipe = load_recipe("smoke-cpu", [f"output_dir={tmp_path}", "device=cpu"]).recipe
    run_recipe(recipe)
    run = tmp_path / "smoke-cpu"

    def one(sql: str) -> int:
        return int(next(iter(query(run, sql)[0].values())))

    assert one("SELECT max(step) FROM metrics WHERE stage = 'sft'") == foretold.sft_steps
    assert one("SELECT max(step) FROM metrics WHERE stage = 'grpo'") == foretold.grpo_steps
    assert one("SELECT count(*) FROM rollouts") == foretold.sampled
    assert one("SELECT count(*) FROM samples") == foretold.evaluated
    assert one("SELECT max(completion_tokens) FROM rollouts") <= foretold.longest
    demonstrations = one("SELECT max(value) FROM metrics WHERE stage = 'sft' AND name = 'num_tokens'")
    completions = one("SELECT sum(completion_tokens) FROM rollouts")
    prompts = one("SELECT sum(prompt_tokens) FROM rollouts") // recipe.grpo.group_size
    assert foretold.tokens is not None
    assert foretold.tokens / 4 < demonstrations + completions + prompts <= foretold.tokens

    weights = sum(w.nbytes for w in load_file(run / "grpo/final/model.safetensors").values())
    state = torch.load(run / "grpo/checkpoint-1/optimizer.pt", weights_only=True)["state"]
    moments = sum(part[key].nbytes for part in state.values() for key in ("exp_avg", "exp_avg_sq"))
    assert foretold.fixed == weights + weights + moments


def test_six_flops_per_parameter_and_token_are_what_a_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from recipe_cost import MODELS

    config, shape, published = MODELS["Qwen/Qwen2.5-0.5B"]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config(**shape, tie_word_embeddings=True))
        tokens = torch.zeros((1, 64), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        # Without a mask the model would look for packed rows, which needs values.
        mask = {"full_attention": None}
        model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() == pytest.approx(6 * published * tokens.numel(), rel=0.02)


def test_a_finished_run_of_the_estimators_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from estimators import stored

    def make() -> dict[str, Any]:
        made.append(1)
        return {"arm": "GRPO", "pass_at": {1: [0.5], 8: [1.0]}}

    made: list[int] = []
    runs = [stored(tmp_path / "GRPO-1.json", {"seconds": 60.0}, make) for _ in range(2)]
    assert made == [1] and runs[0]["pass_at"] == runs[1]["pass_at"] == {1: [0.5], 8: [1.0]}
    with pytest.raises(SystemExit, match="made with another seconds"):
        stored(tmp_path / "GRPO-1.json", {"seconds": 30.0}, make)

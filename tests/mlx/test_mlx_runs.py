"""Whole runs with ``grpo.engine=mlx``: they learn, with all weights and with an adapter, and a killed one goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "mlx.core", reason="MLX lives in an environment of its own: make test-mlx", exc_type=ImportError
)

from transformers import BloomConfig

from algorist.config import load_recipe
from algorist.errors import ConfigError
from algorist.extensions.mlx.weights import Mirror
from algorist.runs.draft import Draft
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import make_plan
from algorist.store.read import metrics

pytestmark = pytest.mark.mlx

DIGITS = """
def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_grpo_run_with_it_learns(adapter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(DIGITS)
    monkeypatch.chdir(tmp_path)
    handed: list[int] = []
    refresh = Mirror.refresh
    monkeypatch.setattr(Mirror, "refresh", lambda self, model: handed.append(refresh(self, model)))
    settings = [
        "model.tiny={hidden_size: 64, heads: 2, kv_heads: 1, layers: 2}",
        "rewards=[{name: 'own.py:digits'}]",
        "grpo={batch_size: 32, group_size: 8, max_completion_tokens: 24, learning_rate: 1e-2, max_steps: 16}",
        "grpo.engine=mlx",
        *(
            ["model.lora={rank: 16, target_modules: all-linear}", "grpo.learning_rate=3e-2"]
            if adapter
            else []
        ),
    ]
    run = run_recipe(load_recipe("smoke-cpu", [*settings, "run_name=r"]).recipe)
    rows = [row for row in metrics(run.folder.path) if "reward" in row]
    rewards = [row["reward"] for row in rows]
    assert len(rewards) == 16
    # An adapter on a random base moves it slowly.
    assert sum(rewards[-4:]) > (1.4 if adapter else 5) * sum(rewards[:4]), rewards
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) <= 1e-4
    assert sum(size > 0 for size in handed) >= 16


# Forks, so that each life of the run imports only MLX; the parent must not have it.
LIVES = """
import json, os, signal, sys, time
from pathlib import Path
from algorist.store.stages import checkpoints
from tests.slow.kill_runs import differences, live, outcome

whole, killed = Path(sys.argv[1]) / "whole", Path(sys.argv[1]) / "killed"
settings = ["grpo.engine=mlx", "grpo.max_steps=5", "sft.max_steps=2", "eval.samples=0"]
for folder in (whole, killed):
    folder.mkdir()
_, status = os.waitpid(live(whole, *settings), 0)
if status:
    raise SystemExit((whole / "life.log").read_text()[-3000:])
child = live(killed, *settings)
while not checkpoints(killed / "r/grpo"):
    time.sleep(0.01)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
left = [place.name for place in checkpoints(killed / "r/grpo")]
if os.waitpid(live(killed, *settings), 0)[1]:
    raise SystemExit((killed / "life.log").read_text()[-3000:])
expected, found = outcome(whole / "r"), outcome(killed / "r")
print(json.dumps({"left": left, "different": differences(expected, found), "rollouts": len(found["rollouts"])}))
"""


def test_a_killed_run_goes_on_with_the_same_rollouts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["different"] == [] and told["rollouts"] >= 5 * 8, told
    assert len(told["left"]) < 5, "killed too late"


def test_evaluations_take_it_too(tmp_path: Path) -> None:
    settings = ["sft.enabled=false", "grpo.enabled=false", "run_name=r", "eval.baseline=true"]
    found: dict[str, Any] = {}
    for engine in ("mlx", "native"):
        recipe = load_recipe(
            "smoke-cpu", [*settings, f"output_dir={tmp_path / engine}", f"eval.engine={engine}"]
        ).recipe
        (file,) = (run_recipe(recipe).folder.path / "eval").glob("base.json")
        found[engine] = json.loads(file.read_text())["metrics"]
    assert found["mlx"] == found["native"]


def test_a_model_that_mlx_lm_lacks_is_refused_before_the_run(tmp_path: Path) -> None:
    BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=64).save_pretrained(tmp_path / "model")
    recipe = load_recipe("smoke-cpu", ["grpo.engine=mlx", f"model.name={tmp_path / 'model'}"]).recipe
    with pytest.raises(
        ConfigError,
        match=r"grpo\.engine is mlx, but mlx-lm has no model of the type 'bloom'; take grpo\.engine=native",
    ):
        make_plan(Draft.of(recipe))

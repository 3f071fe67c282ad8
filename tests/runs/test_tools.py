"""Runs with tools: calls are learned, answered, stored, counted and repeated after a kill; a tool that fails always ends the run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from safetensors.torch import load_file

from algorist.config import load_recipe
from algorist.config.load import load_run_recipe
from algorist.diagnosis.diagnose import diagnose
from algorist.errors import ConfigError, TrainingError
from algorist.evaluation.artifact import read_artifact
from algorist.prompts.attached import attached
from algorist.runs.pipeline import run_recipe
from algorist.runs.solve import Solver
from algorist.store.read import query
from algorist.store.run_log import Quiet
from algorist.store.write import read_metrics
from tests.tiny import smoke_recipe
from tests.warm import PYTHON

OWN = '''
import os, signal, time

def lookup(request):
    """a sum"""
    pid, flag = os.environ.get("TRAINER_PID"), os.environ.get("KILL_FLAG")
    if flag:
        with open(flag, "a") as file:
            file.write("x")
        if pid and os.path.getsize(flag) == 20:
            os.kill(int(pid), signal.SIGKILL)
    return str(eval(request, {}))

def askew(request):
    return str(eval(request, {}) + 1)

def slow(request):
    time.sleep(0.03)
    return str(eval(request, {}))

def broken(request):
    raise ConnectionError("placeholder")

class Again:
    def start(self, problem):
        self.asked = False

    def reply(self, rollout):
        if self.asked or "<answer>" not in rollout.text:
            return None
        self.asked = True
        return "Are you sure?"
'''


def settings(folder: Path, tool: str, *more: str) -> list[str]:
    """Return a tiny run whose SFT teaches one call by heart: the model calls in nearly every completion."""
    (folder / "own.py").write_text(OWN)
    rows = [
        {"question": f"{a} + 1", "answer": str(a + 1), "solution": f"<{tool}>{a} + 1</{tool}>\n<output>\n{a + 1}\n</output>\n"}
        for a in range(1, 7)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"{{name: local, path: {folder / 'rows.jsonl'}}}"
    return [
        f"data={{train: {data}, sft: {data}, eval: {data}}}",
        "prompt.system_prompt=''",
        "model.tiny={vocab_size: 320, hidden_size: 32, layers: 2}",
        f"tools={{use: ['{folder / 'own.py'}:{tool}'], calls: 2, output_tokens: 8, seconds: 10, memory_mb: 256, instructions: false}}",
        "sft={max_steps: 150, batch_size: 6, learning_rate: 0.01}",
        "grpo={max_steps: 3, group_size: 4, batch_size: 8, max_completion_tokens: 112, save_steps: 1, save_total_limit: 9}",
        *more,
    ]


def run(folder: Path, *overrides: str) -> Path:
    return run_recipe(smoke_recipe(folder, *overrides), display=Quiet()).folder.path


@pytest.mark.slow
def test_a_run_with_calls_and_an_environment(tmp_path: Path) -> None:
    environment = f"environment={tmp_path / 'own.py'}:Again"
    path = run(tmp_path, *settings(tmp_path, "lookup", environment, "eval={enabled: true, samples: 0}"))
    rows = query(path, "SELECT * FROM rollouts")
    turns = [turn for row in rows for turn in row["turns"] or ()]
    calls = [turn for turn in turns if turn["source"] == "lookup"]
    assert len(calls) > len(rows) / 2
    assert all(turn["error"] or turn["reply"] == str(eval(turn["request"])) for turn in calls)
    assert {turn["reply"] for turn in turns if turn["source"] == "environment"} == {"Are you sure?"}
    assert all(row["sampled_tokens"] < row["completion_tokens"] for row in rows if row["turns"])
    line = next(row for row in read_metrics(path / "metrics.jsonl") if "tools/call_s" in row)
    assert line["tools/calls_per_rollout"] > 0.5 and 0 < line["tools/unsampled_share"] < 1
    assert line["tools/environment_replies_per_rollout"] > 0 and line["tools/call_s"] > 0
    artifact = read_artifact(path / "eval", "grpo")
    assert artifact.protocol["turns"]["tools"]["calls"] == 2
    # The answer after the environment's reply counts, and the model's own settings name no code that others would run.
    assert "Are you sure?" not in "".join(row["completion"] for row in rows)
    asked = attached(path / "grpo" / "final")
    assert asked is not None and asked.prompt_format.turns.foreign  # type: ignore[union-attr]

    def algorist(*arguments: str) -> str:
        done = subprocess.run(
            [PYTHON, "-m", "algorist", *arguments], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    algorist("eval", str(path), "--no-tools", "--limit", "3")
    without = next((path / "eval").glob("*no-tools.json"))
    assert "turns" not in json.loads(without.read_text())["protocol"]
    (row,) = Solver.load(path / "sft" / "final", recipe=load_run_recipe(path)).solve(
        ["2 + 1"], on_text=(seen := []).append
    )
    assert row["turns"][0]["source"] == "lookup" and row["turns"][0]["reply"] == "3"
    assert "<output>\n3\n</output>" in "".join(seen)  # the call is shown while it is answered
    assert "[lookup, " in algorist("inspect", str(path), "--limit", "20")


@pytest.mark.slow
def test_a_tool_whose_results_are_wrong_is_named(tmp_path: Path) -> None:
    run_of_askew = run(tmp_path, *settings(tmp_path, "askew", "grpo.max_steps=6", "eval.enabled=false"))
    assert [(f.name, f.sentence) for f in diagnose(run_of_askew)][:1] == [
        ("wrong_replies", "A tool replies with wrong results.")
    ]
    path = run(tmp_path / "right", *settings(tmp_path, "lookup", "grpo.max_steps=6", "eval.enabled=false"))
    assert "wrong_replies" not in [f.name for f in diagnose(path)]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_is_killed_in_a_call_ends_as_one_that_is_not(tmp_path: Path) -> None:
    """With useless groups sampled anew and earlier ones used again: their calls and spans are in the checkpoint."""

    def go(name: str, killed: bool) -> int:
        flag = tmp_path / f"{name}.flag"
        environment = {**os.environ, **({"KILL_FLAG": str(flag)} if killed else {})}
        own = settings(tmp_path, "lookup", f"output_dir={tmp_path}", f"run_name={name}", "eval.enabled=false",
                       "grpo.resample={when_below: 1, max_rounds: 1}", "grpo.replay={max_age: 2}")  # fmt: skip
        command = ["algorist", "run", "smoke-cpu", "device=cpu", "threads=1", *own]
        resume = ["--resume"] if flag.exists() else []
        return subprocess.run(
            ["sh", "-c", 'TRAINER_PID=$$ exec "$0" -m "$@"', PYTHON, *command, *resume],
            env=environment, capture_output=True, timeout=600,
        ).returncode  # fmt: skip

    assert go("whole", killed=False) == 0
    assert go("killed", killed=True) == -9
    count = "SELECT count(*) AS rows, sum(len(turns)) AS calls FROM rollouts"
    before, all_of_them = (query(tmp_path / name, count)[0] for name in ("killed", "whole"))
    assert 0 < before["rows"] < all_of_them["rows"] and all_of_them["calls"] > 12
    logged = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert any(row.get("groups/refill_rounds") for row in logged)
    assert go("killed", killed=True) == 0
    whole, killed = (
        load_file(tmp_path / n / "grpo" / "final" / "model.safetensors") for n in ("whole", "killed")
    )
    assert all(bool((whole[name] == killed[name]).all()) for name in whole)
    sql = (
        "SELECT step, problem_id, sample, completion, reward, sampler_log_prob_sum FROM rollouts ORDER BY ALL"
    )
    assert query(tmp_path / "whole", sql) == query(tmp_path / "killed", sql)


@pytest.mark.long
@pytest.mark.slow
def test_preflight_plans_the_calls_that_the_run_then_makes(tmp_path: Path, verb: Any) -> None:
    """Before SFT the model calls nothing: its demonstrations say how often it will, with how many tokens, how long."""
    own = settings(tmp_path, "slow", "eval.enabled=false", f"output_dir={tmp_path}")

    def planned(*more: str) -> dict[str, Any]:
        code, output, errors = verb(
            "preflight", "smoke-cpu", *own, *more, "--json", "--minutes", "1", "--samples", "2"
        )
        assert code == 0, errors
        return dict(json.loads(output))

    plan, without = planned(), planned("tools=null", "--no-trial")
    calls = plan["extensions"]["tools"]
    assert "tools" not in without["extensions"]
    path = run_recipe(load_recipe("smoke-cpu", own).recipe, display=Quiet()).folder.path
    lines = [row for row in read_metrics(path / "metrics.jsonl") if "tools/call_s" in row]
    rows = query(path, "SELECT completion_tokens - sampled_tokens AS replies FROM rollouts")
    measured = mean(row["tools/calls_per_rollout"] for row in lines)
    assert calls["calls"] == pytest.approx(measured, rel=0.3)
    assert calls["reply_tokens"] == pytest.approx(mean(row["replies"] for row in rows), rel=0.3)
    assert 0.03 < calls["call_s"] < 0.3
    # After its tried steps of SFT the model may call already: these calls are in the time of the tried steps of GRPO.
    expected = 8 * (measured - calls["sampled_calls"]) * 0.03
    assert plan["grpo"]["seconds_per_step"] > calls["more_s"] > 0.5 * expected
    assert calls["most_s"] == 8 * 2 * 10 and calls["most_reply_tokens"] == 16
    sampled = query(path, "SELECT avg(completion_tokens) AS tokens FROM rollouts")[0]["tokens"]
    assert plan["grpo"]["completion_tokens"] == pytest.approx(sampled, rel=0.3)  # that of the demonstrations


@pytest.mark.long
@pytest.mark.slow
def test_a_tool_that_fails_always_ends_the_run(tmp_path: Path) -> None:
    own = settings(tmp_path, "broken", "tools.fail_steps=2", "grpo.max_steps=9", "tools.drop_void=true")
    with pytest.raises(
        TrainingError,
        match=r"every call of broken failed in 2 rollout batches in a row.*ConnectionError.*tools\.fail_steps",
    ):
        run(tmp_path, *own)
    (path,) = [p.parent for p in tmp_path.glob("*/config.yaml")]
    steps = query(path, "SELECT max(step) AS last FROM rollouts WHERE len(turns) > 0")[0]["last"]
    assert steps is None or steps <= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tools=[calcu]", r"unknown tool 'calcu'.*Did you mean 'calculator'"),
        ("tools=[missing.py:f]", "no file at"),
        ("tools={use: [python], format: equals}", "an equals sign calls the calculator"),
        ("tools={use: []}", "tools.use is empty"),
        ("tools={us: [calculator]}", "use"),
        ("environment=missing.py:Class", "no file at"),
        ("environment=own.py:Nothing", r"own\.py:Nothing has no start and no reply.*Its methods: begin"),
        ("environment=own.py:Starts", r"own\.py:Starts has no reply; expected a class with start"),
        ("environment=own.py:Agan", "has no function 'Agan'.*Did you mean 'Again'"),
        ("environment=own.py:lookup", "own.py:lookup cannot be made: .*request"),
    ],
)
def test_what_cannot_reply_is_refused_before_the_run(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = "class Nothing:\n    def begin(self): ...\nclass Starts:\n    def start(self, problem): ...\n"
    (tmp_path / "own.py").write_text(OWN + more)
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, change)
    assert {path.name for path in tmp_path.iterdir()} <= {"own.py", "__pycache__"}


def test_a_list_of_tools_is_enough_and_void_completions_can_be_left_out() -> None:
    recipe: Any = load_recipe("smoke-cpu", ["tools=[calculator]"]).recipe
    assert recipe.tools.use == ["calculator"] and not recipe.tools.drop_void and recipe.tools.demonstrations

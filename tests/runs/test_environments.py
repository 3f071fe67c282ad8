"""Runs with environments: TRL's class trains a model, is repeated after a kill, and hostile ones end no run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from algorist.errors import ConfigError
from algorist.extensions.environments import user
from algorist.runs.pipeline import run_recipe
from algorist.store.read import query
from algorist.store.run_log import Quiet
from algorist.store.write import read_metrics
from tests.tiny import smoke_recipe
from tests.unit.extensions.test_tools import CHATML
from tests.warm import PYTHON

MINE = '''
import os, random, signal

class Dice:
    def reset(self, answer, **row):
        self.points, self.target = 0, int(answer)
        return f" Target {random.randint(1, 9)}."

    def roll(self, sides: int) -> str:
        """
        Roll a die.

        Args:
            sides: Its sides.
        """
        flag = os.environ.get("KILL_FLAG")
        if flag:
            with open(flag, "a") as file:
                file.write("x")
            if os.path.getsize(flag) == 15:
                os.kill(int(os.environ["TRAINER_PID"]), signal.SIGKILL)
        self.points = random.randint(1, sides)
        return str(self.points)

    def get_reward(self):
        return self.points / 6

class Hostile:
    def start(self, problem):
        self.kind = int(problem.answer)
    def reply(self, rollout):
        if self.kind % 3 == 0: os._exit(1)
        if self.kind % 3 == 1: raise type("Odd", (Exception,), {"__reduce__": None})()
        while True: pass
'''


def settings(folder: Path, name: str, *more: str) -> list[str]:
    """Return a tiny run whose SFT teaches one call by heart."""
    (folder / "mine.py").write_text(MINE)
    (folder / "chat.jinja").write_text(CHATML)
    call = '<tool_call>{"name": "roll", "arguments": {"sides": 6}}</tool_call>'
    rows = [{"question": f"Roll {n}", "answer": str(n), "solution": call} for n in range(1, 7)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"{{name: local, path: {folder / 'rows.jsonl'}}}"
    return [
        f"data={{train: {data}, sft: {data}, eval: {data}}}",
        "prompt.system_prompt=''",
        f"model={{chat_template: {folder / 'chat.jinja'}, tiny: {{vocab_size: 420, hidden_size: 32, layers: 2}}}}",
        f"environment={folder / 'mine.py'}:{name}",
        "sft={max_steps: 120, batch_size: 6, learning_rate: 0.01}",
        "grpo={max_steps: 3, group_size: 4, batch_size: 8, max_completion_tokens: 160, save_steps: 1, save_total_limit: 9}",
        "eval.enabled=false",
        *more,
    ]


@pytest.mark.long
@pytest.mark.slow
def test_a_run_with_trls_class_that_is_killed_in_a_call_ends_as_one_that_is_not(tmp_path: Path) -> None:
    """The die's numbers are the environment's state: they are the same in both, and pay the rewards."""

    def go(name: str, killed: bool) -> subprocess.CompletedProcess[str]:
        flag = tmp_path / f"{name}.flag"
        environment = {**os.environ, **({"KILL_FLAG": str(flag)} if killed else {})}
        own = settings(
            tmp_path, "Dice", f"output_dir={tmp_path}", f"run_name={name}", "rewards=[environment]"
        )
        command = ["algorist", "run", "smoke-cpu", "device=cpu", "threads=1", *own]
        resume = ["--resume"] if flag.exists() else []
        return subprocess.run(
            ["sh", "-c", 'TRAINER_PID=$$; export TRAINER_PID; exec "$0" -m "$@"', PYTHON, *command, *resume],
            env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    whole, killed = go("whole", killed=False), go("killed", killed=True)
    assert whole.returncode == 0, whole.stderr
    assert killed.returncode == -9, killed.stderr
    rows = query(tmp_path / "whole", "SELECT * FROM rollouts")
    rolls = [[t["reply"] for t in row["turns"] or () if t["source"] == "roll"] for row in rows]
    assert sum(map(len, rolls)) > len(rows) / 2 and len({roll for row in rolls for roll in row}) > 3
    for row, replies in zip(rows, rolls, strict=True):
        assert row["reward"] == (int(replies[-1]) / 6 if replies and replies[-1].isdigit() else 0)
    assert all(" Target " in row["prompt"] for row in rows if "prompt" in row)
    assert go("killed", killed=True).returncode == 0
    weights = [load_file(tmp_path / n / "grpo" / "final" / "model.safetensors") for n in ("whole", "killed")]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])
    sql = (
        "SELECT step, problem_id, sample, completion, reward, sampler_log_prob_sum FROM rollouts ORDER BY ALL"
    )
    assert query(tmp_path / "whole", sql) == query(tmp_path / "killed", sql)


@pytest.mark.long
@pytest.mark.slow
def test_a_hostile_environment_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user, "SECONDS", 0.3)
    recipe = smoke_recipe(tmp_path, *settings(tmp_path, "Hostile"))
    path = run_recipe(recipe, display=Quiet()).folder.path
    log = (path / "train.log").read_text() if (path / "train.log").is_file() else ""
    log = log or "".join(file.read_text() for file in path.glob("*.log"))
    for error in ("Crashed", "Odd", "TimeoutError"):
        assert log.count(f"reply failed: {error}") == 1, log
    line = next(
        row for row in read_metrics(path / "metrics.jsonl") if "tools/environment_failed_share" in row
    )
    assert line["tools/environment_failed_share"] == 1


def test_what_pays_must_be_named_and_what_the_template_cannot_say_is_refused(tmp_path: Path) -> None:
    own = settings(tmp_path, "Dice", "rewards=[correct]")
    with pytest.raises(
        ConfigError, match=r"get_reward, which rewards does not name; write rewards: \[environment\]"
    ):
        run_recipe(smoke_recipe(tmp_path, *own), display=Quiet())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "environment=null",
            r"names environment.*the recipe has no environment; write environment: mine\.py",
        ),
        ("environment={mine}:Hostile", "names environment.*its environment has no get_reward"),
        (
            "rewards=[verifiers]",
            r"names verifiers.*data\.train has none; write data\.train: \{name: verifiers",
        ),
    ],
)
def test_a_reward_that_nothing_could_pay_is_refused(change: str, message: str, tmp_path: Path) -> None:
    change = change.replace("{mine}", str(tmp_path / "mine.py"))
    own = settings(tmp_path, "Hostile", "rewards=[environment]", "sft.enabled=false", change)
    with pytest.raises(ConfigError, match=message):
        run_recipe(smoke_recipe(tmp_path, *own), display=Quiet())


def test_a_mapping_of_classes_is_copied_into_the_run(tmp_path: Path) -> None:
    from algorist.config.own_files import inputs_of, own_files

    own: list[Any] = settings(tmp_path, "Dice", f"environment={{dice: '{tmp_path / 'mine.py'}:Dice'}}")
    recipe = smoke_recipe(tmp_path, *own)
    assert any(key == "environment.dice" for key, _, _ in own_files(recipe))
    assert inputs_of(recipe)["environment.dice"]["copy"] == "files/mine.py"

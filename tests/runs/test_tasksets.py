"""Tasksets of verifiers: problems and rewards from another Python; the real package where ``VERIFIERS_PYTHON`` names one."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from algorist.data.base import Source
from algorist.errors import DataError
from algorist.extensions.verifiers import taskset
from algorist.prompts import get_format
from algorist.rewards import build_rewards
from algorist.runs.pipeline import run_recipe
from algorist.store.read import query
from algorist.store.run_log import Quiet
from algorist.types import Group, Problem, Rollout
from algorist_grader import grade_completion
from tests.tiny import smoke_recipe

EXAMPLES = Path(__file__).parents[2] / "examples"
STANDIN = Path(__file__).parents[1] / "data" / "verifiers_standin"
REAL = os.environ.get("VERIFIERS_PYTHON", "")

ODD = """
import os, time
import verifiers.v1 as vf

class Odd(vf.Task):
    @vf.reward(weight=1.0)
    async def odd(self, trace):
        kind = trace.assistant_messages[-1].content
        if kind == "hang": time.sleep(600)
        if kind == "exit": os._exit(3)
        if kind == "print": print("x" * 10**6)
        if kind == "memory": bytearray(6 * 2**30)
        if kind == "raise": raise type("E", (Exception,), {"__reduce__": None})("no")
        return {"nan": float("nan"), "text": "much"}.get(kind, 1.0)

class Boxed(vf.Task):
    @vf.reward(weight=1.0)
    async def tested(self, trace, runtime): return 1.0

class Odds(vf.Taskset):
    def load(self): return [Odd(vf.TaskData(prompt="?"), None)]

class Boxes(vf.Taskset):
    def load(self): return [Boxed(vf.TaskData(prompt="?"), None)]

class Game(vf.Env):
    async def run(self, task, agents): ...

class Searched(vf.Task):
    toolsets = classmethod(lambda cls, config: [Game()])

class Searches(vf.Taskset):
    def load(self): return [Searched(vf.TaskData(prompt="?"), None)]

class Silents(vf.Taskset):
    def load(self): return [Odd(vf.TaskData(prompt=""), None)]

__all__ = [NAME]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the stand-in and tasksets for it."""
    shutil.copytree(STANDIN, tmp_path / "sets")
    shutil.copy(EXAMPLES / "verifiers_taskset.py", tmp_path / "sets")
    for name in ("Odds", "Boxes", "Searches", "Silents", "Odds, Game"):
        file = name.lower().replace(", ", "_")
        names = ", ".join(f'"{each}"' for each in name.split(", "))
        (tmp_path / "sets" / f"{file}.py").write_text(ODD.replace("NAME", names))
    return tmp_path / "sets"


def load(folder: Path | None, name: str, **params: Any) -> list[Problem]:
    values = {"taskset": name, "python": sys.executable, **params}
    return taskset.verifiers(Source(path=str(folder) if folder else None, params=values))


def paid(problems: list[Problem], *texts: str) -> list[float | None]:
    form = get_format("reasoning_answer")
    (reward,) = build_rewards(["verifiers"], form)
    rollouts = [[Rollout([1], text, None, False, form.parse(text)) for text in texts] for _ in problems]
    return reward.values([Group(p, p.question, [1], r) for p, r in zip(problems, rollouts, strict=True)])


def check_example(problems: list[Problem]) -> None:
    """Compare 500 rewards with those of the example's own rules."""
    texts = [f"It is {n} " for n in range(0, 500, 10)]
    for problem, values in zip(problems, [paid([p], *texts) for p in problems], strict=True):
        expected = [(problem.answer in text.split()) + 0.5 / (1 + len(text)) for text in texts]
        assert values == pytest.approx(expected, abs=1e-12)


def test_tasks_are_problems_and_their_rewards_rewards(folder: Path) -> None:
    problems = load(folder, "verifiers_taskset", count=10, skip=3)
    assert [p.question for p in problems[:2]] == ["What is 3 + 3?", "What is 4 + 4?"] and len(problems) == 10
    assert problems[0].answer == "6" and problems[0].checker == ""
    check_example(problems)
    assert "verifiers.v1" not in sys.modules


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="VERIFIERS_PYTHON names no Python with verifiers 0.4 (700 MB)")
def test_the_real_verifiers() -> None:
    check_example(load(EXAMPLES, "verifiers_taskset", python=REAL, count=10))


def test_what_a_taskset_does_ends_nothing_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taskset, "SCORE_S", 1.0)
    problems = load(folder, "odds")
    assert paid(problems, "fine", "hang", "fine", "exit", "fine", "print", "raise", "memory", "text", "fine") == [
        1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0,
    ]  # fmt: skip
    assert paid(problems, "nan") == [0.0]
    assert problems[0].checker == "verifiers"
    columns = problems[0].columns()
    text = "<reasoning>a</reasoning><answer>fine</answer>"
    assert grade_completion(text, problems[0].answer, parsed=get_format("reasoning_answer").parse(text), problem=columns).correct  # fmt: skip


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("boxes", {}, "pays what only its own server can: tested asks for a runtime"),
        ("odds_game", {}, "pays what only its own server can: Game asks for turns of its own"),
        ("silents", {}, "SingleAgentEnv asks for turns of its own"),
        ("searches", {}, "Game asks for tool servers"),
        ("nothing", {}, "No module named 'nothing'"),
        ("odds", {"python": "/nowhere/python"}, r"/nowhere/python does not exist.*install=true"),
        ("odds", {"config": {"sze": 1}}, "unexpected keyword argument 'sze'"),
        ("odds", {"cout": 1}, "Did you mean 'count'"),
    ],
)
def test_what_cannot_be_scored_here_is_refused(
    name: str, params: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load(folder, name, **params)


def test_the_interface_that_verifiers_dropped_is_named(folder: Path) -> None:
    (folder / "verifiers" / "__init__.py").write_text(
        "__version__ = '0.2.1'\ndef load_environment(name): ...\n"
    )
    with pytest.raises(
        DataError, match=r"verifiers 0\.2\.1 has the interface that 0\.3\.1 dropped.*take\s+verifiers 0\.4"
    ):
        load(folder, "odds")


@pytest.mark.slow
def test_a_taskset_trains_a_tiny_model(folder: Path, tmp_path: Path) -> None:
    data = f"{{name: verifiers, path: {folder}, params: {{taskset: verifiers_taskset, python: {sys.executable}, count: 24}}}}"
    path = run_recipe(
        smoke_recipe(
            tmp_path, f"data={{train: {data}, sft: {data}, eval: {data}}}", "rewards=[verifiers]", "sft.enabled=false",
            "grpo={max_steps: 2, group_size: 4, batch_size: 8}", "eval.enabled=false", "run_name=r",
        ),
        display=Quiet(),
    ).folder.path  # fmt: skip
    rows = query(path, "SELECT completion, reward FROM rollouts")
    assert len(rows) == 16 and all(0 < row["reward"] <= 1.5 for row in rows)


@pytest.mark.long
@pytest.mark.slow
def test_a_python_that_is_made_says_so_before_the_minutes_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here no package comes: the words are there nevertheless, and what pip says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DataError, match=r"cannot be installed into .*verifiers"):
        taskset.verifiers(Source(params={"taskset": "any", "install": True}))
    assert f"making {tmp_path}/algorist/verifiers, a Python with verifiers>=0.4" in capsys.readouterr().err

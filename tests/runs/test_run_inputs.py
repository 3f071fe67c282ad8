"""The user's files belong to the run: copied or hashed when it begins, compared when it continues, used from the copy."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.main import main
from algorist.config import load_recipe
from algorist.config.load import load_run_recipe
from algorist.errors import ConfigError
from algorist.runs.pipeline import run_recipe
from algorist.runs.solve import Solver
from algorist.store.run_log import Quiet

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
REWARD = "def short(completion):\n    return 1.0 / (1 + len(completion))\n"
ENVIRONMENT = """class Again:
    def start(self, problem):
        pass

    def reply(self, rollout):
        return None
"""

SETTINGS = [
    "threads=1",
    "data.train={name: local, path: mine.jsonl, checker: 'right.py:right'}",
    "data.sft=null",
    "rewards=[correct, short.py:short]",
    "prompt={format: reasoning_answer, system_prompt_path: system.txt}",
    "model.chat_template=chat.jinja",
    "tools={use: [calculator, 'tool.py:lookup'], instructions: false}",
    "environment=again.py:Again",
    "grpo.max_steps=1",
    "eval.enabled=false",
    "run_name=r",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's files and the run that was made from them."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "short.py").write_text(REWARD)
    (folder / "right.py").write_text("def right(problem, answer):\n    return answer == problem['answer']\n")
    (folder / "system.txt").write_text("Think.\n")
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "tool.py").write_text("def lookup(text: str) -> str:\n    return text\n")
    (folder / "again.py").write_text(ENVIRONMENT)
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "solution": "count"} for n in range(24)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with chdir(folder):
        run_recipe(load_recipe("smoke-cpu", SETTINGS).recipe)
    return folder


@pytest.fixture
def run(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made / "runs" / "r"


def test_they_are_copied_and_hashed(run: Path) -> None:
    inputs = json.loads((run / "inputs.json").read_text())
    assert {key: entry.get("copy") for key, entry in inputs.items()} == {
        "data.train.path": None,
        "rewards.1.name": "files/short.py",
        "data.train.checker": "files/right.py",
        "prompt.system_prompt_path": "files/system.txt",
        "model.chat_template": "files/chat.jinja",
        "tools.use.1": "files/tool.py",
        "environment": "files/again.py",
    }
    assert (run / "files" / "short.py").read_text() == REWARD


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("short.py", "rewards.1.name"),
        ("system.txt", "prompt.system_prompt_path"),
        ("chat.jinja", "model.chat_template"),
        ("tool.py", "tools.use.1"),
        ("again.py", "environment"),
        ("mine.jsonl", "data.train.path"),
    ],
)
def test_an_edited_file_is_reported_on_resume(run: Path, made: Path, name: str, key: str) -> None:
    longer, before = load_recipe("smoke-cpu", SETTINGS).recipe, (made / name).read_text()
    more = "\n\n" if name != "mine.jsonl" else '{"question": "2+2?", "answer": "4", "solution": "s"}\n'
    (made / name).write_text(before + more)
    with pytest.raises(ConfigError) as error:
        run_recipe(longer, resume=True)
    (made / name).write_text(before)
    assert f"{name} ({key})" in str(error.value) and "run_name=NAME" in str(error.value)
    run_recipe(longer, resume=True)


def test_a_run_works_where_the_files_are_not(
    run: Path,
    made: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    request: pytest.FixtureRequest,
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(run, elsewhere / "r")
    hidden = made.rename(elsewhere / "with another name")
    request.addfinalizer(lambda: hidden.rename(made))
    monkeypatch.chdir(elsewhere)
    stored: Any = load_run_recipe(Path("r"))
    assert (
        stored.rewards[1].name == "r/files/short.py:short" and stored.environment == "r/files/again.py:Again"
    )
    assert stored.tools.use == ["calculator", "r/files/tool.py:lookup"]
    template = Solver.load(Path("r/grpo/final")).policy.tokenizer.chat_template
    assert template.endswith(TEMPLATE) and '"Think."' in template  # the trained system prompt is its default
    monkeypatch.setattr(sys, "argv", ["algorist", "eval", "r", "--data", "arithmetic,params={count: 2}"])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr()
    assert stop.value.code == 0, told.err
    assert "rewards/short" in told.out


def edited_meanwhile(folder: Path, before: str, after: str, *lines: str) -> list[str]:
    """Run a recipe that names ``mine.py``, which is edited when GRPO begins; return what is said of the file."""
    mine, said = folder / "mine.py", list[str]()
    mine.write_text(before)

    class Editing(Quiet):
        def say(self, text: str) -> None:
            said.append(text)
            if "grpo begins" in text:
                mine.write_text(after)

    settings = [
        "sft.enabled=false",
        "grpo.max_steps=1",
        "data.eval.limit=4",
        f"output_dir={folder}",
        "run_name=r",
    ]
    run_recipe(load_recipe("smoke-cpu", [*settings, *lines]).recipe, display=Editing())
    return [line for line in said if "has changed or is gone since this run began" in line]


def test_a_reward_that_changes_during_a_run_is_reported_and_the_copy_counts(tmp_path: Path) -> None:
    before, after = (f"def paid(rollout):\n    return {value}\n" for value in (0.25, 0.75))
    (told,) = edited_meanwhile(tmp_path, before, after, f"rewards=[correct, '{tmp_path / 'mine.py'}:paid']")
    artifact = json.loads((tmp_path / "r" / "eval" / "grpo.json").read_text())
    assert "0.25" in json.dumps(artifact["metrics"]) and "0.75" not in json.dumps(artifact["metrics"])
    assert "mine.py (rewards.1.name)" in told and "the run uses its copy" in told and "files/mine.py" in told


def test_a_checker_that_changes_during_a_run_is_reported_as_what_the_run_reads(tmp_path: Path) -> None:
    """Its copy was said to count, while the edited file did."""
    before, after = (f"def check(problem, answer):\n    return {value}\n" for value in (True, False))
    mine, copy = tmp_path / "mine.py", tmp_path / "r" / "files" / "mine.py"
    (told,) = edited_meanwhile(tmp_path, before, after, f"data.train.checker={mine}:check")
    assert "mine.py (data.train.checker)" in told and "the run uses" not in told
    assert told.endswith(f"as it was: cp {copy} {mine}") and copy.read_text() == before

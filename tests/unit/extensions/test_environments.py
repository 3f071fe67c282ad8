"""Environments of a user's: TRL's class as TRL runs it, hostile ones, and what they may do to a run."""

from __future__ import annotations

import json
import logging
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from algorist.errors import ConfigError
from algorist.extensions.environments import user
from algorist.extensions.tools.section import ToolsSection
from algorist.extensions.tools.source import Tools
from algorist.prompts import get_format
from algorist.prompts.base import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.rewards import build_rewards
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.collect import collect
from algorist.types import Group, Problem, Rollout
from algorist_grader.user_code import import_file
from tests.marks import first
from tests.unit.extensions.test_tools import CHATML, Script, tokenizer_with

EXAMPLE = Path(__file__).parents[3] / "examples" / "environments.py"


def form_of(environment: str | dict[str, str], **tools: Any) -> PromptFormat:
    section = ToolsSection(**tools) if tools else None
    return Tools(section, environment).instructed(get_format("reasoning_answer"))


def groups_of(
    form: PromptFormat, problems: list[Problem], *texts: str, size: int | None = None
) -> list[Group]:
    """Write the texts for each problem, or one text after the other in groups, and pay them what their environment says."""
    tokenizer = tokenizer_with(form)
    tokenizer.chat_template = CHATML
    params = SamplingParams(temperature=0.0, max_new_tokens=400, stop_strings=("</answer>",))
    script, rewards = Script(tokenizer, *texts), build_rewards(["environment"], form)
    return collect(script, tokenizer, problems, form, params, size or len(texts), rewards=rewards)


def rollouts_of(form: PromptFormat, *texts: str, **row: Any) -> list[Rollout]:
    return groups_of(form, [Problem("p", "q", "42", extra=row)], *texts)[0].rollouts


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def as_trl(entry: Any, row: dict[str, Any], text: str) -> tuple[str | None, list[str], float]:
    """Do what TRL's GRPOTrainer does with a class: reset, a call for each tool call of the text, get_reward."""
    environment, replies = entry(), []
    observation = environment.reset(**row)
    for found in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        asked = json.loads(found)
        try:
            result = getattr(environment, asked["name"])(**asked["arguments"])
        except Exception as error:
            result = {"error": str(error)}
        replies.append(str(result))
    return observation, replies, environment.get_reward()


def test_problems_of_two_datasets_may_share_an_id(tmp_path: Path) -> None:
    """The text of ``reset`` is a problem's own; ids 0, 1, 2 … are in many files."""
    (tmp_path / "mine.py").write_text(
        "class Numbers:\n    def reset(self, numbers, **row): return f' Numbers: {numbers}.'\n"
        '    def add(self, a: int) -> int:\n        """Add.\n\n        Args:\n            a: A.\n        """\n'
    )
    form = form_of(f"{tmp_path / 'mine.py'}:Numbers")
    problems = [Problem("0", "Add.", "3", extra={"numbers": n}) for n in ("1 2", "900 901")]
    asked = [str(form.turns.for_problem(form, p).render(p.question)) for p in (*problems, problems[0])]
    assert [("1 2." in text, "900 901." in text) for text in asked] == [
        (True, False),
        (False, True),
        (True, False),
    ]


@pytest.mark.slow
@pytest.mark.long
def test_trls_class_is_run_as_trl_runs_it() -> None:
    """Prompt, replies and rewards of 500 completions are those of the class itself, called in TRL's order."""
    form, entry = form_of(f"{EXAMPLE}:GuessNumber"), import_file(EXAMPLE).GuessNumber
    draw = random.Random(5)
    problems = [
        Problem(str(n), f"Number {n}?", str(draw.randint(1, 100)), extra={"kind": n}) for n in range(50)
    ]
    texts = []
    for problem in problems:
        for _ in range(10):
            numbers = [
                draw.choice([int(problem.answer), draw.randint(1, 100)]) for _ in range(draw.randint(0, 3))
            ]
            wrong = draw.choice(["", call("guess", numbers=3)])
            texts.append("".join([*(call("guess", number=n) for n in numbers), wrong, "<answer>1</answer>"]))
    groups = groups_of(form, problems, *texts, size=10)
    tokenizer, written = tokenizer_with(form), iter(texts)
    tokenizer.chat_template = CHATML
    tools = [get_json_schema(entry().guess)]
    for group in groups:
        for rollout in group.rollouts:
            observation, replies, paid = as_trl(entry, group.problem.columns(), next(written))
            assert [turn.reply for turn in rollout.turns if turn.source != "get_reward"] == replies
            assert rollout.reward == paid
        messages: Any = [*form.render(group.problem.question)]
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + observation}
        assert group.prompt == tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
    assert sum((rollout.reward or 0) > 0 for group in groups for rollout in group.rollouts) > 200


FORMS = '''
import random

class Board:
    """Draws its task, has async tools, one without arguments, and pays nothing."""
    def reset(self, **row):
        self.word, self.seen = random.choice(["red", "blue", "green", "black"]), []
        return f"{row['prompt'][0]['role']} {row['kind']} {self.word}"
    async def look(self):
        """Look at the board."""
        self.seen.append(random.random())
        return {"word": self.word, "seen": len(self.seen)}
    def fail(self):
        """Fail."""
        raise RuntimeError("no board")
    def start(self):
        """Has the name of another form's method."""
    def _hidden(self): ...

class Paid(Board):
    async def get_reward(self):
        return self.word == "red"

class Strict:
    def reset(self, kind, ground_truth): self.kind = kind, ground_truth
    def get_reward(self): return float(self.kind == (1, "42"))

def factory(): return Strict()

class Quiet:
    def reset(self, **row): return None
    def get_reward(self): return None
'''


@pytest.fixture
def forms(tmp_path: Path) -> Path:
    path = tmp_path / "forms.py"
    path.write_text(FORMS)
    return path


@pytest.mark.slow
def test_what_a_class_may_have(forms: Path) -> None:
    form = form_of(f"{forms}:Board")
    names = [tool["function"]["name"] for tool in form.template_kwargs["tools"]]
    assert names == ["fail", "look", "start"]
    problems = [Problem(str(n), "q", "42", extra={"kind": n}) for n in range(8)]
    text = call("look") + call("look") + call("fail") + call("lok") + "<answer>42</answer>"
    groups = groups_of(form, problems, text, text)
    words = set()
    for number, group in enumerate(groups):
        word = re.search(rf"q?user {number} (\w+)", group.prompt)
        assert word is not None
        words.add(word[1])
        replies = [[turn.reply for turn in rollout.turns] for rollout in group.rollouts]
        assert replies[0] == replies[1]
        assert replies[0][:3] == [f"{{'word': '{word[1]}', 'seen': {n}}}" for n in (1, 2)] + ["{'error': 'no board'}"]  # fmt: skip
        assert "no such tool; there is fail, look, start" in replies[0][3]
        assert group.rollouts[0].reward is None
    assert len(words) > 1
    again = groups_of(form_of(f"{forms}:Board"), problems, text, text)
    assert [g.prompt for g in again] == [g.prompt for g in groups]
    (paid,) = groups_of(form_of(f"{forms}:Paid"), problems[:1], "a")
    assert paid.rollouts[0].reward == float("red" in paid.prompt)
    for name in ("Strict", "factory"):
        assert rollouts_of(form_of(f"{forms}:{name}"), "a", kind=1)[0].reward == 1.0
    assert rollouts_of(form_of(f"{forms}:Quiet"), "a")[0].reward is None


@pytest.mark.long
@pytest.mark.slow
def test_a_column_chooses_among_classes(forms: Path) -> None:
    """Each prompt has the tools of its own class, and ``reset`` does not get the column, as in TRL."""
    classes = {"guess": f"{EXAMPLE}:GuessNumber", "board": f"{forms}:Board", "quiet": f"{forms}:Quiet"}
    form = form_of(classes)
    problems = [
        Problem(name, "q", "42", extra={"environment": name, "kind": 1})
        for name in ("guess", "board", "quiet")
    ]
    text = call("guess", number=42) + call("look") + "<answer>1</answer>"
    guess, board, quiet = groups_of(form, problems, text)
    for group, mine, other in ((guess, "guess", "look"), (board, "look", "guess")):
        assert f'"name": "{mine}"' in group.prompt and f'"name": "{other}"' not in group.prompt
    assert [turn.error for turn in guess.rollouts[0].turns] == ["", "NoSuchTool", ""]
    assert guess.rollouts[0].reward == 1.0 and board.rollouts[0].reward is None
    assert "tool" not in quiet.prompt.partition("<|im_start|>user")[0]
    with pytest.raises(ConfigError, match=r"problem x has 'gues_' in its column environment.*'guess'"):
        groups_of(form, [Problem("x", "q", "42", extra={"environment": "gues_"})], text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("class A:\n    def go(self): ...", "A", r"A has no start and no reply; expected .*TRL's\s+form: reset.*Its methods: go"),
        ("class A:\n    def reset(self, **row): ...\n    def go(self, x): ...", "A", "method go, which cannot be described"),
        ("class A:\n    def __init__(self, x): ...\n    def reset(self): ...", "A", "cannot be made: .*'x'"),
        ("class A:\n    def reset(self): return 1", "A", "reset fails for problem p: TypeError: reset returned int"),
        ("class A:\n    def reset(self): raise OSError('no server')", "A", "reset fails for problem p: OSError: no server"),
        ("import time\nclass A:\n    def reset(self): return str(time.time_ns())", "A", "another text than before"),
        ("class A:\n    def reset(self): return 'x' * 10**7", "A", "returned 10,000,000 characters"),
        ("class A:\n    def reset(self): ...\n    def get_reward(self): return 1", "A", r"rewards: \[environment\]"),
        ("def go(): return 3", "go", "has no start and no reply"),
        ("raise SystemExit(3)", "A", "cannot be imported"),
        ("class B: ...", "A", "has no function 'A'"),
    ],
)  # fmt: skip
def test_what_is_no_environment_is_refused(source: str, name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=message):
        Tools(None, f"{path}:{name}").check([Problem("p", "q", "42")], ["correct"])


def test_tools_and_methods_together(forms: Path) -> None:
    target = f"{EXAMPLE}:GuessNumber"
    both = form_of(target, use=["calculator"], format="chat")
    assert [t["function"]["name"] for t in both.template_kwargs["tools"]] == ["calculator", "guess"]
    (row,) = rollouts_of(both, call("calculator", expression="6 * 7") + call("guess", number=42))
    assert [turn.reply for turn in row.turns] == ["42", "right", "1.0"]
    with pytest.raises(ConfigError, match=r"tools.format is tags.*take tools.format=chat"):
        form_of(target, use=["calculator"])
    with pytest.raises(ConfigError, match="needs a chat template that writes tools"):
        tokenizer = tokenizer_with(form_of(target))
        render_prompt(form_of(target), tokenizer, "q")


# ---- hostile ones

SLEEP = "import time; time.sleep(600)"
HOSTILE = {
    "hang": (SLEEP, "TimeoutError"),
    "spin": ("while True: pass", "TimeoutError"),
    "exit": ("import sys; sys.exit(3)", "SystemExit"),
    "end": ("import os; os._exit(3)", "Crashed"),
    "kill": ("import os; os.kill(os.getpid(), 9)", "Crashed"),
    "parent": ("import os; os.kill(os.getppid(), 9)", "Crashed"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "Crashed"),
    "memory": ("x = bytearray(6 * 2**30)", "MemoryError"),
    "recursion": ("f = lambda: f()\n        f()", "RecursionError"),
    "fork": ("import os; os.fork()", ""),
    "orphan": ("import os\n        if os.fork() == 0: import time; time.sleep(600)", ""),
    "thread": ("import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()", ""),
    "print": ("print('x' * 10**7)", ""),
    "write": ("import os; os.write(1, b'x' * 10**6); os.write(2, b'y' * 10**6)", ""),
    "close": ("import sys; sys.stdout.close(); sys.stdin.close()", ""),
    "chdir": ("import os; os.chdir('/'); os.environ.clear(); os.umask(0)", ""),
    "network": ("import socket; socket.create_connection(('127.0.0.1', 1), 0.2)", "ConnectionRefusedError"),
    "files": ("open('/nowhere/x', 'w')", "FileNotFoundError"),
    "signal": ("import signal; signal.alarm(1); signal.signal(signal.SIGTERM, signal.SIG_IGN)", ""),
    "unpicklable": ("class E(Exception):\n            def __init__(self, a, b): self.a = lambda: a\n        raise E(1, 2)", "E"),
    "speechless": ("class E(Exception):\n            def __str__(self): raise self\n        raise E()", "E"),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "modules": ("import sys; sys.modules.clear(); import json", "*"),
}  # fmt: skip
"""What a method does → the class of the error that is named; an empty text for none, ``*`` for any."""
OWN = """
class {name}:
    def start(self, problem):
        {start}
        self.count = 0
    def reply(self, rollout):
        self.count += 1
        if self.count > 1: return None
        {reply}
        return "again"
"""
TRLS = '''
class {name}:
    def reset(self, **row):
        self.count = 0
    def act(self):
        """Act."""
        self.count += 1
        {act}
        return "done"
    def get_reward(self):
        {score}
        return self.count
'''


PARTS = ("start", "reply", "act", "score")


def written(name: str, where: str, does: str) -> str:
    """Write a class that does it in one of its methods."""
    parts = {part: does if part == where else "pass" for part in PARTS}
    return (OWN if where in ("start", "reply") else TRLS).format(name=name, **parts)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a class for every kind and method, and one without harm."""
    path = tmp_path_factory.mktemp("hostile") / "bad.py"
    classes = [written(f"{kind}_{where}", where, HOSTILE[kind][0]) for kind in HOSTILE for where in PARTS]
    path.write_text("".join([*classes, written("good", "act", "pass")]))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(10, HOSTILE))
@pytest.mark.parametrize("where", first(1, PARTS))
def test_a_hostile_environment_ends_its_own_rollouts_and_nothing_else(
    where: str, kind: str, hostile: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rollout that it answers ends or goes on, one of a harmless environment beside it is as ever, and it is named once."""
    monkeypatch.setattr(user, "SECONDS", 0.4)
    error, name = HOSTILE[kind][1], f"{kind}_{where}"
    form = form_of({"bad": f"{hostile}:{name}", "good": f"{hostile}:good"})
    problems = [
        Problem(f"{n}", "q", "42", extra={"environment": n.rstrip("12")}) for n in ("bad1", "good", "bad2")
    ]
    state = (Path.cwd(), dict(os.environ), random.getstate())
    with caplog.at_level(logging.WARNING):
        bad, good, more = groups_of(form, problems, call("act") + "<answer>42</answer>" * 2)
    assert (Path.cwd(), dict(os.environ), random.getstate()) == state
    assert [turn.reply for turn in good.rollouts[0].turns] == ["done", "1.0"] and good.rollouts[0].reward == 1
    for group in (bad, more):
        errors = {turn.error for turn in group.rollouts[0].turns} - {"", "NoSuchTool"}
        assert errors == {error} - {""} if error != "*" else True
        assert group.rollouts[0].reward is None or 0 <= group.rollouts[0].reward <= 1
    named = [r.getMessage() for r in caplog.records if f"{name}: " in r.getMessage()]
    assert len(named) == len({line.split(" failed: ")[0] for line in named}) >= bool(error.strip("*"))
    assert not error.strip("*") or f"failed: {error}" in named[0]


WRONG = {
    "text": ("'1.0'", "expected a number"),
    "nan": ("float('nan')", "finite"),
    "infinity": ("1e400", "finite"),
    "huge": ("10**400", "OverflowError"),
    "list": ("[1.0]", "TypeError"),
    "object": ("object()", "TypeError"),
    "array": ("__import__('numpy').zeros(3)", "TypeError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(3, WRONG))
def test_what_is_no_reward_is_counted_and_named_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value, message = WRONG[kind]
    (tmp_path / "bad.py").write_text(
        f"class A:\n    def reset(self): ...\n    def get_reward(self): return {value}\n"
    )
    form = form_of(f"{tmp_path}/bad.py:A")
    with caplog.at_level(logging.WARNING):
        rollouts = rollouts_of(form, "a", "b")
    assert [rollout.reward for rollout in rollouts] == [0.0, 0.0]
    named = [r.getMessage() for r in caplog.records if "reward 'environment' failed" in r.getMessage()]
    assert len(named) == 1
    assert message in caplog.text


@pytest.mark.slow
def test_wrong_replies_end_the_rollout(tmp_path: Path) -> None:
    for value in ("[1]", "object()", "b'x'", "{}"):
        path = tmp_path / f"{len(value)}.py"
        path.write_text(written("Own", "reply", f"return {value}"))
        (row,) = rollouts_of(form_of(f"{path}:Own"), "<answer>1</answer>" * 2)
        assert [turn.error for turn in row.turns] == ["TypeError"]
    (tmp_path / "long.py").write_text(written("Own", "reply", "return 'x' * 10**8"))
    (row,) = rollouts_of(form_of(f"{tmp_path}/long.py:Own"), "a")
    assert len(row.turns[0].reply) < 20_000 and row.truncated

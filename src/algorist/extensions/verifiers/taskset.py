"""Tasksets of verifiers 0.4: dataset and reward ``verifiers``, in a Python of their own whose packages and code touch nothing here."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from subprocess import PIPE, Popen, run
from typing import Any

from pydantic import BaseModel, Field

from algorist.data.base import Source, dataset, read_params
from algorist.errors import ConfigError, DataError
from algorist.rewards.base import reward
from algorist.store.redact import secret_variables
from algorist.types import Problem, Rollout
from algorist_grader import checker
from algorist_grader.child_process import Child
from algorist_grader.system import limit_memory

log = logging.getLogger("algorist.extensions.verifiers.taskset")
LOAD_S, SCORE_S = 300.0, 30.0
"""Most seconds until a taskset is loaded, and of one score."""
MEMORY_MB = 4096
NO_ANSWER = "any that the taskset pays in full"
INSTALLED = "verifiers>=0.4,<0.5"


class Params(BaseModel):
    """``params`` of the dataset."""

    taskset: str
    """Its name: the installed module, or one in the folder ``data.….path``."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Its own settings."""
    count: int = Field(1000, ge=1)
    """Most tasks."""
    skip: int = Field(0, ge=0)
    """Tasks left out before them."""
    python: str = ""
    """The Python that has verifiers; left out: the one that ``install`` makes."""
    install: bool = False
    """Make that Python (about 500 MB)."""


@dataset("verifiers")
def verifiers(source: Source) -> list[Problem]:
    """The tasks of a verifiers taskset; params: ``taskset``, ``config``, ``count``, ``skip``, ``python``, ``install``."""
    params = read_params(source.params, Params, "verifiers")
    python = _python(params)
    folder = str(Path(source.path).expanduser().resolve()) if source.path else ""
    made = [python, folder, params.taskset, json.dumps(params.config), str(params.skip + params.count)]
    problems = []
    for place, row in list(enumerate(_ask(made)))[params.skip :]:
        answer, name = row["answer"], f"{row['key'][:12]}-{place}"
        extra, decides = {"verifiers": [*made, place]}, "" if answer else "verifiers"
        entry = Problem(
            name, row["question"], answer or NO_ANSWER, answer, params.taskset, "", extra, decides
        )
        problems.append(entry)
    return problems


@reward("verifiers", low=-math.inf, high=math.inf, needs_gold=False, source="verifiers 0.4, Task.score")
def paid(rollout: Rollout, problem: Problem) -> float | None:
    """The sum of the rewards of the problem's verifiers task; nothing for other problems."""
    return None if "verifiers" not in problem.extra else float(_ask(problem.extra["verifiers"], rollout.text))


def _probe(problems: Sequence[Problem], *settings: Any) -> None:
    """Refuse the reward where no problem is a task (ConfigError)."""
    if problems and not any("verifiers" in problem.extra for problem in problems):
        raise ConfigError(
            "rewards names verifiers, which pays what a task of verifiers does, but data.train has none; write data.train: {name: "
            "verifiers, params: {taskset: NAME}} (docs/tools.md), or leave the reward out"
        )


paid.probe = _probe  # type: ignore[attr-defined]


@checker("verifiers")
def in_full(problem: Mapping[str, Any], answer: str) -> bool:
    """Whether the task's rewards sum up to 1 for an answer."""
    return bool(_ask(problem["verifiers"], answer) >= 1.0)


def _ask(task: Sequence[Any], text: str | None = None) -> Any:
    """Return the rows of a task's taskset, or the sum of the task's rewards for a text.

    Raises:
        DataError: The taskset failed.
    """
    child = _child(*task[:5], os.getpid())
    answer = child.start(LOAD_S)
    if text is not None and not answer.error:
        answer = child.ask(json.dumps([task[5], text]).encode(), SCORE_S)
    value = {"error": answer.said} if answer.error else answer.value
    if isinstance(value, dict):
        raise DataError(f"verifiers: taskset '{task[2]}': {value['error']}")
    return value


@lru_cache(maxsize=8)
def _child(python: str, folder: str, taskset: str, config: str, count: str, process: int) -> Child:
    return Child(f"{__name__}:prepare", [python, folder, taskset, config, count], without=secret_variables())


def _python(params: Params) -> str:
    """Return the Python that has verifiers; make it where that is asked for.

    Raises:
        DataError: It does not exist, or cannot be made.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "algorist" / "verifiers"
    path = Path(params.python).expanduser() if params.python else home / "bin" / "python"
    if path.exists() if params.python else any(home.glob("lib/*/site-packages/verifiers/v1")):
        return str(path)
    if params.python or not params.install:
        raise DataError(
            f"verifiers runs in a Python of its own, and {path} does not exist. Make one (about 500 MB, a minute or more): "
            "data.….params.install=true; or name yours, with verifiers 0.4 and the taskset: data.….params.python=FILE"
        )
    began = time.monotonic()
    print(f"making {home}, a Python with {INSTALLED}: 500 MB, minutes …", file=sys.stderr, flush=True)
    venv.create(home, with_pip=True, clear=True)
    done = run([path, "-m", "pip", "install", "-q", INSTALLED], capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"verifiers cannot be installed into {home}: {done.stderr.strip()[-500:]}")
    size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file()) / 1e6
    log.warning("made %s: %.0f MB in %.0f s", home, size, time.monotonic() - began)
    return str(path)


# From here on: in the process that guards the other Python.


def prepare(python: str, *taskset: str) -> tuple[Callable[[bytes], Any], Any]:
    """Start the other Python, which loads the taskset; return what answers requests, and the rows of the tasks."""
    limit_memory(MEMORY_MB)  # before the other process, which has the same limit
    worker = Path(__file__).with_name("taskset_worker.py")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["PYTHONHASHSEED"] = "0"
    process = Popen([python, "-P", worker, *taskset], stdin=PIPE, stdout=PIPE, env=variables)
    assert process.stdin is not None and process.stdout is not None
    requests, replies = process.stdin, process.stdout

    def answer(request: bytes) -> Any:
        requests.write(request + b"\n")
        requests.flush()
        line = replies.readline()
        if not line:
            os._exit(1)  # it died; the next request begins anew
        return json.loads(line)

    return answer, answer(b"[]")

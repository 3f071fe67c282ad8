"""Tasksets of verifiers 0.4: dataset and reward ``verifiers``, in a Python of their own whose packages and code touch nothing here."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from algorist.data.base import Source, dataset, read_params
from algorist.errors import ConfigError, DataError
from algorist.rewards.base import reward
from algorist.store.redact import secret_variables
from algorist.types import Problem, Rollout
from algorist_grader import checker
from algorist_grader.child_process import Child

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
    key = json.dumps([params.taskset, params.config, params.skip + params.count], sort_keys=True)
    folder = str(Path(source.path).expanduser().resolve()) if source.path else ""
    rows = _ask(python, folder, key, {"what": "rows"}, LOAD_S)
    if isinstance(rows, str):
        raise DataError(f"verifiers: taskset '{params.taskset}' cannot be used: {rows}")
    made = []
    for place, row in list(enumerate(rows))[params.skip :]:
        question = f"{row['system']}\n\n{row['prompt']}".strip()
        extra = {"verifiers": {"python": python, "folder": folder, "key": key, "place": place}}
        answer, decides = row["answer"] or NO_ANSWER, "" if row["answer"] else "verifiers"
        made.append(
            Problem(
                f"{row['key'][:12]}-{place}", question, answer, row["answer"], params.taskset, extra=extra, checker=decides
            )
        )  # fmt: skip
    return made


@reward("verifiers", low=-math.inf, high=math.inf, needs_gold=False, source="verifiers 0.4, Task.score")
def paid(rollout: Rollout, problem: Problem) -> float | None:
    """The sum of the rewards of the problem's verifiers task; nothing for other problems."""
    return _score(problem.extra["verifiers"], rollout.text) if "verifiers" in problem.extra else None


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
    return _score(problem["verifiers"], answer) >= 1.0


def _score(place: Mapping[str, Any], text: str) -> float:
    """Return the sum of a task's rewards for a text.

    Raises:
        RuntimeError: The taskset failed.
    """
    order = {"what": "score", "place": place["place"], "text": text}
    value = _ask(place["python"], place["folder"], place["key"], order, SCORE_S)
    if isinstance(value, str):
        raise RuntimeError(f"verifiers: {value}")
    return float(value["reward"])


def _ask(python: str, folder: str, key: str, order: Mapping[str, Any], seconds: float) -> Any:
    """Return the value of a request, or a text that says what went wrong."""
    child = _child(python, folder, key, os.getpid())
    started = child.start(LOAD_S)
    answer = started if started.error else child.ask(json.dumps(order).encode(), seconds)
    if answer.error:
        died = {
            "timeout": f"it took longer than {seconds:g} s",
            "memory": f"it took more than {MEMORY_MB} MiB",
        }
        said = answer.detail.partition("\n")[0] if answer.error == "raised" else "its process died"
        return died.get(answer.error, said)
    return answer.value.get("error") or answer.value["value"]


@lru_cache(maxsize=8)
def _child(python: str, folder: str, key: str, process: int) -> Child:
    worker = f"{__name__}:prepare"
    return Child(worker, [python, folder, key], memory_mb=MEMORY_MB, without=secret_variables())


def _python(params: Params) -> str:
    """Return the Python that has verifiers; make it where that is asked for.

    Raises:
        DataError: It does not exist, or cannot be made.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "algorist" / "verifiers"
    path = Path(params.python).expanduser() if params.python else home / "bin" / "python"
    if path.exists():
        return str(path)
    if params.python or not params.install:
        raise DataError(
            f"verifiers runs in a Python of its own, and {path} does not exist. Make one (about 500 MB, a minute or more): "
            "data.….params.install=true; or name yours, with verifiers 0.4 and the taskset: data.….params.python=FILE"
        )
    began = time.monotonic()
    log.warning("making %s, a Python with %s: about 500 MB, a minute or more …", home, INSTALLED)
    try:
        venv.create(home, with_pip=True)
        done = subprocess.run([path, "-m", "pip", "install", "-q", INSTALLED], capture_output=True, text=True)
        if done.returncode:
            raise DataError(f"verifiers cannot be installed into {home}: {done.stderr.strip()[-500:]}")
    except BaseException:  # half a Python would be taken for a whole one the next time
        shutil.rmtree(home, ignore_errors=True)
        raise
    size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file()) / 1e6
    log.warning("made %s: %.0f MB in %.0f s", home, size, time.monotonic() - began)
    return str(path)


# From here on: in the process that guards the other Python.


def prepare(python: str, folder: str, key: str) -> tuple[Callable[[bytes], Any], str]:
    """Start the other Python and load the taskset; return what answers requests."""
    worker = Path(__file__).with_name("taskset_worker.py")
    paths = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = subprocess.Popen(
        [python, "-P", worker, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**paths, "PYTHONHASHSEED": "0"},
    )

    def ask(order: Mapping[str, Any]) -> Any:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            os._exit(1)  # it died; the next request begins anew
        return json.loads(line)

    name, config, count = json.loads(key)
    rows = ask({"what": "load", "taskset": name, "config": config, "count": count})

    def answer(request: bytes) -> Any:
        order = json.loads(request)
        return rows if order["what"] == "rows" or "error" in rows else ask(order)

    return answer, name

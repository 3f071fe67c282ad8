"""The environments of a recipe: one class, or one for each value of the column ``environment``; what a rollout does with them."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from algorist.errors import ConfigError, check_known
from algorist.extensions.environments.process import ANY_ROW, DESCRIBED
from algorist.extensions.environments.reward import REWARD
from algorist.extensions.toolbox.base import Output
from algorist.prompts.base import PromptFormat
from algorist.rewards.trl_form import with_other_names
from algorist.store.redact import secret_variables
from algorist.types import Problem, Turn
from algorist_grader.child_process import START_S, Child
from algorist_grader.user_code import find_file, no_function

log = logging.getLogger("algorist.extensions.environments.user")
SECONDS = 30.0
"""Most seconds of one call of an environment."""
MEMORY_MB = 1024
"""Most memory of an environment (MiB), beyond that of its file."""
TRIED = 20
"""Problems whose ``reset`` is tried before a run."""


@lru_cache(maxsize=64)
def _child(path: Path, modified_ns: int, process: int) -> Child:
    # Sets have the same order in each process.
    return Child(
        "algorist.extensions.environments.process:prepare",
        [str(path)],
        memory_mb=MEMORY_MB,
        environment={"PYTHONHASHSEED": "0"},
        without=secret_variables(),
    )


@dataclass(frozen=True)
class EnvironmentClass:
    """``file.py:Class`` of a recipe."""

    target: str

    def _process(self) -> tuple[Child, Path, str]:
        path, name = find_file(self.target, f"environment: {self.target}")
        return _child(path, path.stat().st_mtime_ns, os.getpid()), path, name

    def ask(self, what: str, row: int = ANY_ROW, seconds: float = 0.0, **order: Any) -> dict[str, Any]:
        """Return ``value``, or an ``error`` with its ``kind`` and ``detail``."""
        child, _, name = self._process()
        seconds = seconds or SECONDS
        text = json.dumps({"what": what, "row": row, "name": name, "seconds": seconds, **order}, default=str)
        answer = child.ask(text.encode(), seconds + 10)
        if answer.error:
            return {"error": answer.error, "detail": answer.detail}
        return answer.value or {}

    def about(self) -> Mapping[str, Any]:
        """Return its form (``start`` or ``trl``), its tools as chat templates take them, and whether it pays.

        Raises:
            ConfigError: Its file cannot be imported, or the class is no environment.
        """
        child, path, name = self._process()
        return _about(self, child, path, name)


@lru_cache(maxsize=64)
def _about(self: EnvironmentClass, child: Child, path: Path, name: str) -> Mapping[str, Any]:
    where = f"environment: {self.target}"
    started = child.start(START_S)
    if started.error:
        raise ConfigError(f"{where}: {path} cannot be imported: {started.detail or started.error}")
    if name not in started.value:
        raise ConfigError(f"{where}: {path} {no_function(name, started.value)}")
    answer = self.ask("describe", DESCRIBED, START_S)
    if answer.get("error"):
        raise ConfigError(f"{where} cannot be made: {_said(answer)}")
    value: Mapping[str, Any] = answer["value"]
    if "refused" in value:
        raise ConfigError(f"{where} {value['refused']} (docs/tools.md)")
    return value


class Environments:
    """The environments of the rollouts of one request at a time; ``targets`` by the column ``environment``, or one for all."""

    def __init__(self, targets: str | Mapping[str, str]) -> None:
        named = {"": targets} if isinstance(targets, str) else targets
        self.classes = {name: EnvironmentClass(target) for name, target in named.items()}
        self.one = self.classes[""] if isinstance(targets, str) else None
        self.problems: list[Problem] = []
        self.failed: dict[int, Output] = {}
        self._shown: dict[str, str | None] = {}

    def methods_beside(self, tools: Collection[str], form: str | None) -> tuple[str, ...]:
        """Return the names of all their tools, beside other tools whose calls have a form.

        Raises:
            ConfigError: That form is not the chat template's, or a tool has the name of another.
        """
        names = tuple(dict.fromkeys(name for made in self.classes.values() for name in _names(made)))
        if names and form not in (None, "chat"):
            raise ConfigError(
                f"tools.format is {form}, while the environment's tools ({', '.join(names)}) are called in the chat template's own form; "
                "take tools.format=chat"
            )
        if clash := {*names} & {*tools}:
            raise ConfigError(
                f"'{clash.pop()}' names a tool and a method of the environment; rename one of them"
            )
        return names

    def of(self, problem: Problem) -> EnvironmentClass:
        """Return the class of a problem's environment (ConfigError: its column names none)."""
        if self.one is not None:
            return self.one
        name = str(problem.extra.get("environment", ""))
        check_known(
            name,
            self.classes,
            f"problem {problem.id} has '{name}' in its column environment",
            "The recipe has: {}",
        )
        return self.classes[name]

    @property
    def pays(self) -> bool:
        """Whether one of them has ``get_reward``."""
        return any(made.about()["pays"] for made in self.classes.values())

    def check(self, problems: Sequence[Problem], rewards: Sequence[str]) -> None:
        """Try them before a run.

        Raises:
            ConfigError: One is no environment, a problem names none, or what they pay is no reward of the recipe.
        """
        _NAMED.clear()
        if self.pays and "environment" not in rewards:
            raise ConfigError(
                "the environment has get_reward, which rewards does not name; write rewards: [environment], beside others that you want, "
                "or {name: environment, weight: 0} to leave it out of the sum"
            )
        for number, problem in enumerate(problems):
            made = self.of(problem)
            if number < TRIED and made.about()["form"] == "trl":
                for _ in range(2):  # the second time it is compared with the first
                    answer = made.ask("observe", **self._order(problem))
                    if answer.get("error"):
                        raise ConfigError(
                            f"environment: {made.target}: reset fails for problem {problem.id}: {_kind(answer)}: {_said(answer)}"
                        )
                    self._shown[problem.id] = answer.get("value")

    def observation(self, problem: Problem) -> str:
        """Return the text of ``reset`` for a problem, which is the end of its prompt; empty where it returns nothing or fails."""
        if problem.id not in self._shown:
            made = self.of(problem)
            answer = made.ask("observe", **self._order(problem)) if made.about()["form"] == "trl" else {}
            if answer.get("error"):
                _warn(made.target, "reset", _kind(answer), _said(answer))
            self._shown[problem.id] = answer.get("value")
        return self._shown[problem.id] or ""

    def for_problem(self, prompt_format: PromptFormat, problem: Problem) -> PromptFormat:
        """Return a prompt format as it asks a problem, with what ``reset`` says and the tools that only some problems have."""
        text, switches = self.observation(problem), dict(prompt_format.template_kwargs)
        if self.one is None and (tools := self.of(problem).about()["tools"]):
            switches["tools"] = [*switches.get("tools", ()), *tools]
        raw = prompt_format.raw_template
        return replace(
            prompt_format,
            template_kwargs=switches,
            message=(prompt_format.message or "{question}") + text if text else prompt_format.message,
            raw_template=raw and raw.replace("{question}", "{question}" + text),
        )

    def _order(self, problem: Problem) -> dict[str, Any]:
        listed = {name: [value] for name, value in problem.columns().items()}
        columns = {name: values[0] for name, values in with_other_names(listed).items()}
        if self.one is None:
            columns.pop("environment", None)
        prompt = [{"role": "user", "content": problem.question}]
        order = {
            "form": self.of(problem).about()["form"],
            "problem": {"id": problem.id, **problem.columns()},
            "columns": {**columns, "prompt": prompt},
        }
        return {**order, "shown": self._shown[problem.id]} if problem.id in self._shown else order

    # ---- the rollouts of a request

    def begin(self, problems: Sequence[Problem]) -> None:
        """Forget all rollouts, and expect one for each problem."""
        self.problems = list(problems)
        self.failed.clear()
        for made in self.classes.values():
            made.ask("end")

    def methods(self, row: int) -> dict[str, Any]:
        """Return the tools of a row's environment by name; each takes the JSON of its arguments."""
        names = _names(self.of(self.problems[row]))
        return {name: partial(self.call, row, name) for name in names}

    def call(self, row: int, method: str, arguments: str, session: Any = None) -> Output:
        """Return the text of a method's result; of an error the text that TRL makes of it."""
        output = self._ask(row, method, "call", method=method, arguments=arguments)
        return Output(str({"error": output.text}), output.error) if output.error else output

    def reply(self, row: int, text: str, turns: Sequence[Turn]) -> Output | None:
        """Return the reply to a completion that has ended; None ends the rollout, an error does too."""
        if self.of(self.problems[row]).about()["form"] != "start":
            return None
        rollout = {"text": text, "turns": [asdict(turn) for turn in turns]}
        return self._ask(row, "reply", "reply", rollout=rollout)

    def end(self, row: int) -> list[Turn]:
        """End a rollout's environment; return the turn with what it paid, if it pays."""
        made, began = self.of(self.problems[row]), time.perf_counter()
        turns = []
        if made.about()["pays"]:
            output = self._ask(row, "get_reward", "score")
            seconds = time.perf_counter() - began
            turns = [
                Turn(REWARD, "", output.text if output else "null", output.error if output else "", seconds)
            ]
        made.ask("end", row)
        return turns

    def _ask(self, row: int, who: str, what: str, **order: Any) -> Any:
        """Return the output of a request to a row's environment, None for none; one whose process ended says so ever after."""
        if row in self.failed:
            return self.failed[row]
        problem = self.problems[row]
        made = self.of(problem)
        answer = made.ask(what, row, **self._order(problem), **order)
        if not answer.get("error"):
            value = answer.get("value")
            return None if value is None else Output(value if isinstance(value, str) else json.dumps(value))
        output = Output(_said(answer), _kind(answer))
        _warn(made.target, who, output.error, output.text)
        if what != "call" and answer["error"] == "raised":
            output = Output(f"{output.error}: {output.text}", output.error)
        if not answer.get("began"):
            self.failed[row] = output
        return output


def _names(made: EnvironmentClass) -> list[str]:
    return [tool["function"]["name"] for tool in made.about()["tools"]]


def _kind(answer: Mapping[str, Any]) -> str:
    kinds = {"timeout": "TimeoutError", "memory": "MemoryError", "raised": answer.get("kind") or "Error"}
    return str(kinds.get(answer["error"], "Crashed"))


def _said(answer: Mapping[str, Any]) -> str:
    said = {
        "timeout": f"it took longer than {SECONDS:g} s and was ended",
        "memory": f"it took more than {MEMORY_MB} MiB of memory and was ended",
        "raised": answer.get("detail", ""),
    }.get(answer["error"], "its process died")
    return str(said)


_NAMED: set[tuple[str, str, str]] = set()


def _warn(target: str, method: str, kind: str, said: str) -> None:
    """Log a failure of an environment, each kind once in a run."""
    if (target, method, kind) not in _NAMED:
        _NAMED.add((target, method, kind))
        log.warning(
            "environment %s: %s failed: %s: %s (shown once; tools/environment_failed_share counts them)",
            target, method, kind, said[:300],
        )  # fmt: skip

"""The environments of a recipe: one class, or one for each value of the column ``environment``; what rollouts do with them."""

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
from algorist.extensions.environments.process import MEMORY_MB
from algorist.extensions.environments.reward import REWARD
from algorist.extensions.toolbox.base import Output
from algorist.prompts.base import PromptFormat
from algorist.rewards.trl_form import with_other_names
from algorist.store.redact import secret_variables
from algorist.types import Problem, Turn
from algorist_grader.child_process import START_S, Answer, Child
from algorist_grader.user_code import find_file

log = logging.getLogger("algorist.extensions.environments.user")
SECONDS = 30.0
"""Most seconds of one call of an environment."""
TRIED = 20
"""Problems whose ``reset`` is tried before a run."""


@lru_cache(maxsize=64)
def _child(path: Path, name: str, modified_ns: int, process: int) -> Child:
    worker = "algorist.extensions.environments.process:prepare"
    fixed = {"PYTHONHASHSEED": "0"}  # sets have the same order in each process
    return Child(
        worker, [str(path), name], memory_mb=MEMORY_MB, environment=fixed, without=secret_variables()
    )


@dataclass(frozen=True)
class EnvironmentClass:
    """``file.py:Class`` of a recipe."""

    target: str

    @property
    def process(self) -> Child:
        """The process that makes environments of the class."""
        path, name = find_file(self.target, f"environment: {self.target}")
        return _child(path, name, path.stat().st_mtime_ns, os.getpid())

    def ask(self, what: str, row: int | None = None, **order: Any) -> Answer:
        """Ask a rollout's environment, or one that is only looked at."""
        text = json.dumps({"what": what, "row": row, "seconds": SECONDS, **order}, default=str)
        answer = self.process.ask(text.encode(), SECONDS + 10)
        return answer if answer.error else Answer(**answer.value)

    def about(self) -> Mapping[str, Any]:
        """Return its form (``start`` or ``trl``), its tools as chat templates take them, and whether it pays.

        Raises:
            ConfigError: Its file cannot be imported, or the class is no environment.
        """
        answer = self.process.start(START_S)
        refused = f"cannot be imported: {answer.said}" if answer.error else answer.value.get("refused")
        if refused:
            raise ConfigError(f"environment: {self.target} {refused} (docs/tools.md)")
        return dict(answer.value)


class Environments:
    """The environments of the rollouts of one request at a time; ``targets`` by the column ``environment``, or one for all."""

    def __init__(self, targets: str | Mapping[str, str]) -> None:
        named = {"": targets} if isinstance(targets, str) else targets
        self.classes = {name: EnvironmentClass(target) for name, target in named.items()}
        self.one = self.classes[""] if isinstance(targets, str) else None
        self.problems: list[Problem] = []
        self._shown: dict[tuple[str, str, str], str | None] = {}

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
            raise ConfigError(f"'{clash.pop()}' names a tool and a method of the environment; rename one")
        return names

    def of(self, problem: Problem) -> EnvironmentClass:
        """Return the class of a problem's environment (ConfigError: its column names none)."""
        name = str(problem.extra.get("environment", "")) if self.one is None else ""
        where = f"problem {problem.id} has '{name}' in its column environment"
        check_known(name, self.classes, where, "The recipe has: {}")
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
            where = f"environment: {self.of(problem).target}: reset fails for problem {problem.id}"
            for _ in range(2 * (number < TRIED)):  # the second text is compared with the first
                if (answer := self._observe(problem)).error:
                    raise ConfigError(f"{where}: {answer.detail}")

    def _observe(self, problem: Problem) -> Answer:
        """Ask for the text of ``reset``, and keep it."""
        made = self.of(problem)
        answer = made.ask("begin", **self._order(problem)) if made.about()["form"] == "trl" else Answer()
        self._shown[_key(problem)] = answer.value
        return answer

    def observation(self, problem: Problem) -> str:
        """Return the text of ``reset`` for a problem, which is the end of its prompt; empty where it returns nothing or fails."""
        if _key(problem) not in self._shown and (answer := self._observe(problem)).error:
            _warn(self.of(problem).target, "reset", answer)
        return self._shown[_key(problem)] or ""

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
        columns["prompt"] = [{"role": "user", "content": problem.question}]
        order = {"form": self.of(problem).about()["form"], "id": problem.id, "columns": columns}
        key = _key(problem)
        return {**order, "shown": self._shown[key]} if key in self._shown else order

    # ---- the rollouts of a request

    def begin(self, problems: Sequence[Problem]) -> None:
        """Forget all rollouts, and expect one for each problem."""
        self.problems = list(problems)
        for made in self.classes.values():
            made.ask("rows", rows=len(problems))

    def methods(self, row: int) -> dict[str, Any]:
        """Return the tools of a row's environment by name; each takes the JSON of its arguments."""
        return {name: partial(self.call, row, name) for name in _names(self.of(self.problems[row]))}

    def call(self, row: int, method: str, arguments: str, session: Any = None) -> Output:
        """Return the text of a method's result; of an error the text that TRL makes of it."""
        output = self._ask(row, method, "call", method=method, arguments=arguments) or Output("")
        said = {"error": output.text.removeprefix(f"{output.error}: ")}
        return Output(str(said), output.error) if output.error else output

    def reply(self, row: int, text: str, turns: Sequence[Turn]) -> Output | None:
        """Return the reply to a completion that has ended; None ends the rollout, an error does too."""
        if self.of(self.problems[row]).about()["form"] != "start":
            return None
        return self._ask(row, "reply", "reply", text=text, turns=[asdict(turn) for turn in turns])

    def end(self, row: int) -> list[Turn]:
        """End a rollout's environment; return the turn with what it paid, if it pays."""
        if not self.of(self.problems[row]).about()["pays"]:
            return []
        began = time.perf_counter()
        output = self._ask(row, REWARD, "score") or Output("null")
        return [Turn(REWARD, "", output.text, output.error, time.perf_counter() - began)]

    def _ask(self, row: int, who: str, what: str, **order: Any) -> Output | None:
        """Return the output of a request to a row's environment, None for none."""
        problem = self.problems[row]
        made = self.of(problem)
        answer = made.ask(what, row, **self._order(problem), **order)
        if answer.error:
            _warn(made.target, who, answer)
            return Output(answer.detail, answer.kind)
        value = answer.value
        return None if value is None else Output(value if isinstance(value, str) else json.dumps(value))


def _key(problem: Problem) -> tuple[str, str, str]:
    """Return what tells a problem from others: ids are unique within a dataset only."""
    return problem.id, problem.question, repr(problem.columns())


def _names(made: EnvironmentClass) -> list[str]:
    return [tool["function"]["name"] for tool in made.about()["tools"]]


_NAMED: dict[tuple[str, str, str], Answer] = {}
"""The first failure of each kind in a run."""


def _warn(target: str, method: str, answer: Answer) -> None:
    """Log a failure of an environment, each kind once in a run."""
    if _NAMED.setdefault((target, method, answer.kind), answer) is answer:
        text = "environment %s: %s failed: %s (shown once; tools/environment_failed_share counts them)"
        log.warning(text, target, method, answer.detail[:300])

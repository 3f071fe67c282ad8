"""The names of ``verifiers.v1`` that the stand-in has; messages, traces and configs are plain records."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class Record(SimpleNamespace):
    pass


UserMessage = AssistantMessage = MessageNode = TraceTask = AgentInfo = AgentConfig = Record


class Generic:
    def __class_getitem__(cls, item: Any) -> type:
        return cls


class TaskData:
    system_prompt = None

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    @property
    def prompt_text(self) -> str:
        return self.prompt


@dataclass
class TasksetConfig:
    id: str = ""
    task: Any = None
    size: int = 1000


def taskset_config_type(name: str) -> type:
    return TasksetConfig


def load_taskset(config: TasksetConfig) -> Any:
    module = importlib.import_module(config.id)
    return getattr(module, module.__all__[0])(config)


class Env(Generic):
    pass


class SingleAgentEnv(Env):
    pass


def environment_class(name: str) -> type:
    module = importlib.import_module(name)
    classes = [getattr(module, exported) for exported in module.__all__]
    return next((entry for entry in classes if issubclass(entry, Env)), SingleAgentEnv)


class Taskset(Generic):
    toolsets = classmethod(lambda cls, config: [])

    def __init__(self, config: TasksetConfig) -> None:
        self.config = config

    def __iter__(self) -> Any:
        return iter(self.load())


@dataclass
class Trace:
    task: Any
    agent: Any
    nodes: list[Any]
    is_completed: bool
    ok: bool
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def assistant_messages(self) -> list[Any]:
        return [node.message for node in self.nodes if getattr(node, "sampled", False)]

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())


def reward(weight: float = 1.0) -> Any:
    def decorate(function: Any) -> Any:
        function._vf_weight = weight
        return function

    return decorate


class Task(Generic):
    NEEDS_CONTAINER = False
    toolsets = classmethod(lambda cls, config: [])

    def __init__(self, data: TaskData, config: Any = None) -> None:
        self.data, self.config, self.key = data, config, f"{abs(hash(data.prompt)):064x}"

    def plugged_judges(self) -> list[Any]:
        return []

    def hooks(self, kind: str) -> list[Any]:
        methods = inspect.getmembers(self, inspect.ismethod)
        return [method for _, method in methods if hasattr(method, "_vf_weight")]

    async def score(self, trace: Trace, runtime: Any = None) -> None:
        for function in self.hooks("reward"):
            trace.rewards[function.__name__] = function._vf_weight * await function(trace)

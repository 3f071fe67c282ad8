"""The program that runs where verifiers is installed, with that Python: it loads a taskset and scores texts, a JSON line each.

It imports nothing of algorist: ``python -P taskset_worker.py FOLDER``, where FOLDER, which may be empty, holds the taskset's module.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import sys
from typing import Any


class Taskset:
    """A taskset of verifiers 0.4 or later, and its tasks."""

    def __init__(self, name: str, config: dict[str, Any], count: int) -> None:
        import verifiers

        if not hasattr(verifiers, "__version__") or hasattr(verifiers, "load_environment"):
            raise ImportError(
                f"verifiers {getattr(verifiers, '__version__', '')} has the interface that 0.3.1 dropped (load_environment); take verifiers "
                "0.4 or later, and the environment's taskset for it"
            )
        import verifiers.v1 as vf

        self.vf = vf
        made = vf.load_taskset(vf.taskset_config_type(name)(id=name, **config))
        self.tasks = list(itertools.islice(made, count))
        for task in self.tasks[:1]:
            if lacking := self._needs(task, made, vf.environment_class(name)):
                raise ValueError(f"{name} pays what only its own server can: {lacking}")

    def _needs(self, task: Any, made: Any, environment: type) -> str:
        """Name what one finished text cannot be scored without; empty for nothing."""
        hooks = {
            function.__name__: inspect.signature(function).parameters.get("runtime")
            for function in task.hooks("reward")
        }
        runtime = [name for name, asks in hooks.items() if asks and asks.default is inspect.Parameter.empty]
        judges = [judge.reward_name for judge in task.plugged_judges()]
        turns = [environment.__name__] * (
            environment is not self.vf.SingleAgentEnv or not task.data.prompt_text
        )
        servers = [*made.toolsets(made.config), *task.toolsets(task.config)]
        images = not isinstance(task.data.prompt, str) and "image_url" in repr(task.data.prompt)
        needs = {
            "turns of its own": turns,
            "tool servers": [type(server).__name__ for server in servers],
            "images": [type(task).__name__] * images,
            "a runtime": runtime,
            "a judge": judges,
            "a container": [type(task).__name__] * task.NEEDS_CONTAINER,
        }
        return "; ".join(f"{', '.join(names)} asks for {what}" for what, names in needs.items() if names)

    def rows(self) -> list[dict[str, Any]]:
        """Return prompt, system prompt, answer and key of each task."""
        return [
            {
                "prompt": task.data.prompt_text,
                "system": task.data.system_prompt or "",
                "answer": str(getattr(task.data, "answer", None) or ""),
                "key": task.key,
            }
            for task in self.tasks
        ]

    def score(self, place: int, text: str) -> dict[str, float]:
        """Return ``reward``, the weighted sum, and each reward of a finished text."""
        vf, task = self.vf, self.tasks[place]
        messages = [vf.UserMessage(content=task.data.prompt_text), vf.AssistantMessage(content=text)]
        nodes = [
            vf.MessageNode(message=messages[0]),
            vf.MessageNode(parent=0, message=messages[1], sampled=True),
        ]
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
        )
        asyncio.run(task.score(trace, runtime=None))
        return {"reward": float(trace.reward)}


def main(folder: str) -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if folder:
        sys.path.insert(0, folder)
    taskset: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["what"] == "load":
                taskset = Taskset(order["taskset"], order["config"], order["count"])
                value: Any = taskset.rows()
            else:
                value = taskset.score(order["place"], order["text"])
            reply = {"value": value}
        except BaseException as error:
            reply = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])

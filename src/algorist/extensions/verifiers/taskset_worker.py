"""The program that runs where verifiers is installed, with that Python: it loads a taskset and scores texts, a JSON line each.

It imports nothing of algorist: ``python -P taskset_worker.py FOLDER TASKSET CONFIG COUNT``, where FOLDER, which may be empty, holds the
taskset's module. A request is ``[]`` for the rows of the tasks, or the number of a task and a text.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import sys
from typing import Any


def load(name: str, config: str, count: str) -> list[Any]:
    """Return the tasks of a taskset of verifiers 0.4 or later.

    Raises:
        ValueError: Its rewards need more than a finished text.
    """
    import verifiers

    if hasattr(verifiers, "load_environment"):
        raise ImportError(
            f"verifiers {verifiers.__version__} has the interface that 0.3.1 dropped (load_environment); take verifiers 0.4 or later, and "
            "the environment's taskset for it"
        )
    import verifiers.v1 as vf

    made = vf.load_taskset(vf.taskset_config_type(name)(id=name, **json.loads(config)))
    tasks = list(itertools.islice(made, int(count)))
    for task in tasks[:1]:
        if lacking := _lacking(task, made, vf.environment_class(name), vf):
            raise ValueError(f"{name} pays what only its own server can: {lacking}")
    return tasks


def _lacking(task: Any, made: Any, environment: type, vf: Any) -> str:
    """Name what one finished text cannot be scored without; empty for nothing."""
    several = environment is not vf.SingleAgentEnv or not task.data.prompt_text
    images = not isinstance(task.data.prompt, str) and "image_url" in repr(task.data.prompt)
    servers = [*made.toolsets(made.config), *task.toolsets(task.config)]
    needs = {
        "turns of its own": [environment.__name__] * several,
        "tool servers": [type(server).__name__ for server in servers],
        "images": [type(task).__name__] * images,
        "a runtime": [hook.__name__ for hook in task.hooks("reward") if _required(hook, "runtime")],
        "a judge": [judge.reward_name for judge in task.plugged_judges()],
        "a container": [type(task).__name__] * task.NEEDS_CONTAINER,
    }  # fmt: skip
    return "; ".join(f"{', '.join(names)} asks for {what}" for what, names in needs.items() if names)


def _required(function: Any, name: str) -> bool:
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty


def row(task: Any) -> dict[str, str]:
    """Return question, answer and key of a task."""
    question = f"{task.data.system_prompt or ''}\n\n{task.data.prompt_text}".strip()
    return {"question": question, "answer": str(getattr(task.data, "answer", None) or ""), "key": task.key}


def score(task: Any, text: str) -> float:
    """Return the weighted sum of a task's rewards for a finished text."""
    import verifiers.v1 as vf

    prompt, reply = vf.UserMessage(content=task.data.prompt_text), vf.AssistantMessage(content=text)
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[vf.MessageNode(message=prompt), vf.MessageNode(parent=0, message=reply, sampled=True)],
        is_completed=True,
        ok=True,
    )
    asyncio.run(task.score(trace, runtime=None))
    return float(trace.reward)


def main(folder: str, *taskset: str) -> None:
    """Load the taskset, and answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path[:0] = filter(None, [folder])
    tasks: list[Any] = []
    for line in sys.stdin:
        try:
            request = json.loads(line)
            tasks = tasks or load(*taskset)
            value: Any = score(tasks[request[0]], request[1]) if request else [row(task) for task in tasks]
        except BaseException as error:
            value = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:2000]}"}
        print(json.dumps(value), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A user's reward functions in a process of their own: what hangs is killed, what crashes takes nothing with it.

The file is imported there and nowhere else. Arguments go there pickled, plain values come back as JSON.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from algorist.child_process import START_S, Answer, Child
from algorist.errors import RewardError
from algorist.store.safe_text import printable

MAX_TIMEOUTS = 3
"""So many time-outs in a row end the run: the function hangs always, not on one completion."""


class UserFile:
    """One file of rewards and the process that has imported it; all its functions share that process."""

    def __init__(self, path: Path) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**21
        self.path = path
        self.memory_mb = memory  # half of this machine's
        self.child = Child(
            "algorist.rewards.isolated_worker:prepare", [str(path)], memory_mb=memory, show=_show
        )

    def functions(self) -> list[str]:
        """Import the file and return the names of the functions that it defines.

        Raises:
            RuntimeError: It cannot be imported; the first line says why.
        """
        return list(self._value(self.child.start(START_S), START_S)["functions"])

    def describe(self, name: str) -> dict[str, Any]:
        """Return what ``isolated_worker`` says about a name in the file."""
        return dict(self.ask("describe", name, (), {}, START_S))

    def ask(
        self, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        """Return what ``name`` gave in the other process.

        Raises:
            TimeoutError: It took too long; the next call starts a new process.
            RuntimeError: It raised, or the process was ended; the message holds its traceback.
        """
        return self._value(self.child.ask(pickle.dumps((what, name, args, kwargs)), timeout_s), timeout_s)

    def _value(self, answer: Answer, timeout_s: float) -> Any:
        if answer.error == "timeout":
            raise TimeoutError(f"it took longer than {timeout_s:g} s and was killed")
        if answer.error == "memory":
            raise RuntimeError(f"it needed more than {self.memory_mb} MiB of memory, half of this machine's")
        if answer.error:
            raise RuntimeError(answer.detail or answer.error)
        return answer.value


class Isolated:
    """Callable like the function ``name`` of ``file``; each call may take ``timeout_s`` seconds.

    Raises, when called:
        TimeoutError: The call took too long (the process is killed, the next call starts a new one).
        RewardError: ``MAX_TIMEOUTS`` calls in a row took too long.
        RuntimeError: The function raised, or the process died; the message holds its traceback.
    """

    def __init__(self, file: UserFile, name: str, about: dict[str, Any], timeout_s: float) -> None:
        self.file, self.name, self.timeout_s = file, name, timeout_s
        self.timeouts_in_a_row = 0
        self.__name__, self.__doc__ = name, about["doc"]
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    parameter["name"],
                    inspect._ParameterKind(parameter["kind"]),
                    default=_default(parameter),
                )
                for parameter in about["parameters"]
            ]
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returned: a number, None, or a list of them."""
        try:
            value = self.file.ask("call", self.name, args, kwargs, self.timeout_s)
        except TimeoutError:
            self.timeouts_in_a_row += 1
            if self.timeouts_in_a_row >= MAX_TIMEOUTS:
                self.timeouts_in_a_row = 0
                raise RewardError(
                    f"reward function '{self.name}' in {self.file.path} took longer than {self.timeout_s:g} s "
                    f"{MAX_TIMEOUTS} times in a row, so it hangs rather than works. Correct it and continue with --resume, "
                    "or give it more time: rewards: [{name: …, timeout_s: 120}]"
                ) from None
            raise
        self.timeouts_in_a_row = 0
        return value

    def bounds(self, **params: Any) -> tuple[float, float]:
        """Return the range that the function declares for these parameters."""
        known = {key: value for key, value in params.items() if not isinstance(value, _Hidden)}
        low, high = self.file.ask("bounds", self.name, (), known, self.timeout_s)
        return float(low), float(high)

    def close(self) -> None:
        """End the process."""
        self.file.child.close()


class _Hidden:
    """A default value that only the other process has."""


def _default(parameter: dict[str, Any]) -> Any:
    if not parameter["has_default"]:
        return inspect.Parameter.empty
    return parameter["default"] if "default" in parameter else _Hidden()


def user_file(path: Path) -> UserFile:
    """Return the file of a resolved path; one that has changed since is imported anew."""
    return _file(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _file(path: Path, modified_ns: int) -> UserFile:
    return UserFile(path)


def _show(text: str) -> None:
    sys.stderr.write(printable(text))

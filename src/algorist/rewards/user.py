"""A user's own reward, ``file.py:function``, in a process of its own: what hangs is killed, what crashes takes nothing with it.

The file is imported there and nowhere else; what a call needs goes there pickled, plain values come back as JSON. A function with a
state, or one that asks for what only the trainer has, runs in this process, without a limit.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import psutil

from algorist.errors import ConfigError, RewardError
from algorist.rewards.base import Reward, as_reward, paid_in
from algorist.store.redact import secret_variables
from algorist.store.safe_text import printable
from algorist.types import Problem, Rollout
from algorist_grader.child_process import START_S, Answer, Child
from algorist_grader.user_code import find_file, functions_of, import_file, no_function

log = logging.getLogger("algorist.rewards.user")

TIMEOUT_S = 30.0
"""Seconds that one call of a user's function may take, unless the recipe says otherwise."""
ENDED = ("timeout", "crashed", "memory")
MAX_ENDED = 3
"""Consecutive calls that hang or kill their process and so end the run: the function always does, not on one completion."""


class UserFunction:
    """Callable like a function of a user's file, in the process of that file.

    Raises, when called:
        TimeoutError: The call took too long (the process is killed, the next call starts a new one).
        RewardError: ``MAX_ENDED`` calls in a row took too long or killed their process.
        RuntimeError: The function raised, or the process died; the message holds its traceback.
    """

    def __init__(self, child: Child, path: Path, name: str, timeout_s: float) -> None:
        self.child, self.path, self.__name__, self.timeout_s = child, path, name, timeout_s
        self.place = path.name
        self.ended_in_a_row = 0

    def __call__(self, rollout: Rollout, problem: Problem, form: Any, matcher: str, **params: Any) -> Any:
        """Call the function for a rollout."""
        return self.ask("call", (rollout, problem), form, matcher, params)

    def bounds(self, **params: Any) -> tuple[float, float]:
        """Return the range under these parameters, which are checked where the function is."""
        low, high = self.ask("set_to", (), None, "", params)
        return low, high

    def probe(self, problems: Any, form: Any, matcher: str, params: Any) -> None:
        """Probe the function where it is (see ``Reward.probe``)."""
        with suppress(RuntimeError):
            try:
                self.ask("probe", (problems,), form, matcher, params)
            except TimeoutError:
                log.warning(
                    f"reward function '{self.__name__}' in {self.path} took longer than {self.timeout_s:g} s for the few completions "
                    "that it was tried on; a call that takes so long in training is killed, and its completions get the reward's floor"
                )

    def ask(
        self, what: str, args: tuple[Any, ...], form: Any = None, matcher: str = "", params: Any = None
    ) -> Any:
        """Return the other process's answer to a request (see ``prepare``)."""
        request = pickle.dumps((what, self.__name__, args, form, matcher, params or {}))
        answer = self.child.ask(request, self.timeout_s)
        self.ended_in_a_row = self.ended_in_a_row + 1 if answer.error in ENDED else 0
        if self.ended_in_a_row >= MAX_ENDED:
            self.ended_in_a_row = 0
            slow = answer.error == "timeout"
            does = f"took longer than {self.timeout_s:g} s" if slow else "ended its process"
            more = ", or give it more time: rewards: [{name: …, timeout_s: 120}]" if slow else ""
            raise RewardError(
                f"reward function '{self.__name__}' in {self.path} {does} {MAX_ENDED} times in a row, so it always does. Correct your file "
                f"and start a new run, run_name=NAME{more}"
            )
        value = value_of(answer, self.timeout_s)
        if isinstance(value, dict) and "refused" in value:
            raise ConfigError(value["refused"])
        return value


class UserLists(UserFunction):
    """The same for a function of TRL's form."""

    def __call__(self, completions: Any, form: Any, matcher: str, **columns: Any) -> Any:  # type: ignore[override]
        """Call the function for lists."""
        return self.ask("lists", ({"completions": completions, **columns},), form, matcher)


def value_of(answer: Answer, timeout_s: float) -> Any:
    """Return an answer's value, or raise its TimeoutError or RuntimeError."""
    if answer.error == "timeout":
        raise TimeoutError(f"it took longer than {timeout_s:g} s and was killed")
    if answer.error == "memory":
        raise RuntimeError(f"it needed more than {_memory_mb()} MiB of memory, half of this machine's")
    if answer.error:
        raise RuntimeError(answer.detail or answer.error)
    return answer.value


def load_user_reward(
    target: str, *, timeout_s: float = TIMEOUT_S, environment: tuple[str, ...] = ()
) -> Reward:
    """Load ``file.py:function`` as a reward.

    Args:
        target: The file and the function, or an object that can be called. ``low`` and ``high`` attributes, or ``@reward``, declare
            its range.
        timeout_s: Seconds that one call may take.
        environment: Secret variables of the environment that its process gets; all others that are no secret it gets anyway.

    Raises:
        ConfigError: No such file or function, a file that cannot be imported, or a signature that fits no form.
    """
    path, name = find_file(target, f"reward '{target}'")
    child = _process(path, path.stat().st_mtime_ns, environment)
    try:
        names = value_of(child.start(START_S), START_S)["functions"]
        about = UserFunction(child, path, name, START_S).ask("describe", ())
    except (RuntimeError, TimeoutError) as error:
        child.close()
        raise ConfigError(
            f"reward '{target}': {path} cannot be imported: {(str(error).splitlines() or ['?'])[0]}"
        ) from None
    if about is None:
        raise ConfigError(f"reward '{target}': {path} {no_function(name, names)}")
    if about.pop("runs_here"):
        try:
            return as_reward(name, getattr(import_file(path, anew=True), name))
        except (Exception, SystemExit) as error:
            raise ConfigError(f"reward '{target}': {path} cannot be imported: {error!r}") from error
    function = (UserLists if about.pop("takes_lists") else UserFunction)(child, path, name, timeout_s)
    function.place = about.pop("place")
    return Reward(name, function, bounds=function.bounds, **about)


_processes: WeakValueDictionary[tuple[Any, ...], Child] = WeakValueDictionary()


def _process(path: Path, modified_ns: int, environment: tuple[str, ...]) -> Child:
    """Return the process of a file, which all its functions share until the last one is gone; a file that has changed since gets a new one."""
    key = (path, modified_ns, environment)
    child = _processes.get(key) or Child(
        "algorist.rewards.user:prepare",
        [str(path)],
        memory_mb=_memory_mb(),
        show=_show,
        without=secret_variables() - set(environment),
    )
    return _processes.setdefault(key, child)


def _show(text: str) -> None:
    sys.stderr.write(printable(text))


def _memory_mb() -> int:
    return int(psutil.virtual_memory().total // 2**21)


# From here on: in the other process.


def prepare(file: str) -> tuple[Callable[[bytes], Any], dict[str, Any]]:
    """Import the file; return what answers a pickled ``(what, name, args, kwargs)``, and the names of its functions."""
    sys.path.append(str(Path.cwd()))
    module = import_file(Path(file))
    reward_of = lru_cache(lambda name: as_reward(name, getattr(module, name)))

    def answer(request: bytes) -> Any:
        what, name, args, form, matcher, params = pickle.loads(request)
        if not callable(getattr(module, name, None)):
            return None
        try:
            made = reward_of(name)
            if what == "describe":
                here = hasattr(made.function, "state_dict") or made.needs_trainer
                about = {key: getattr(made, key) for key in ("low", "high", "source", "takes_lists", "place")}
                return {**about, "gold": made.needs_gold, "runs_here": here}
            made.params, *bounds = made.set_to(params)
            if what == "set_to":
                return bounds
            made.form, made.matcher = form, matcher
            if what == "probe":
                return made.probe(*args)
        except ConfigError as error:
            return {"refused": str(error)}
        call: Any = made.call if what == "call" else made.call_lists
        return plain(call(*args, {}))

    return answer, {"functions": functions_of(module)}


def plain(value: Any) -> Any:
    """Convert a reward function's result to a number, None, or a list of them.

    Raises:
        TypeError: It is something else.
    """
    value = paid_in(value)
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (str, bytes, dict)):
        raise TypeError(
            f"it returned {value!r:.80}; expected a number, or a list of one number per completion"
        )
    if not hasattr(value, "__float__"):
        return [plain(v) for v in value]
    return float(value.item() if hasattr(value, "item") else value)

"""The turns of one request: calls are read, run and answered; each of them is recorded with its rollout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from algorist.extensions.tools.base import Output, Tool
from algorist.extensions.tools.formats import Call, CallFormat
from algorist.extensions.tools.user import UserEnvironment
from algorist.types import ENVIRONMENT, Problem, Turn

REFUSED = "TooManyCalls"
"""Error class of a call beyond the limit of its rollout."""


@dataclass
class _Row:
    """What is known of a row: its text since the last reply of an environment, its exchanges, the tools' sessions, a call that runs."""

    text: str = ""
    turns: list[Turn] = field(default_factory=list)
    sessions: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    open: Callable[[], str] | None = None


class Replies:
    """Replies to the rows of one ``generate`` call (``rollouts.base.Turns``).

    Args:
        problems: The problem of each row.
        tools: By name; empty for an environment alone.
        calls: How calls are written.
        most_calls: Calls of a rollout that are run.
        output_tokens: Most tokens of an output.
        encode: Text → ids; with True special tokens in it are plain text.
        decode: Ids → text.
        closing: What an output must not contain: the tags of answers, the stop strings.
        environment: Answers what has ended.
        message: An environment's reply as what follows the end of a completion.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        tools: dict[str, Tool],
        calls: CallFormat,
        *,
        most_calls: int,
        output_tokens: int,
        encode: Callable[[str, bool], list[int]],
        decode: Callable[[list[int]], str],
        closing: tuple[str, ...] = (),
        environment: UserEnvironment | None = None,
        message: Callable[[str], tuple[str, str]] | None = None,
    ) -> None:
        self.problems, self.tools, self.calls = problems, tools, calls
        self.most_calls, self.output_tokens = most_calls, output_tokens
        self.encode, self.decode, self.closing = encode, decode, closing
        self.environment, self.message = environment, message
        self.stop_strings = calls.stop_strings if tools else ()
        self._rows: list[_Row] = []

    def begin(self, rows: int) -> None:
        self._rows = [_Row() for _ in range(rows)]
        if self.environment is not None:
            self.environment.begin()
            for row in range(rows):
                self.environment.start(row, self.problems[row])

    def reply(self, row: int, token_ids: list[int], ended: bool) -> Iterator[int] | None:
        state = self._rows[row]
        text = self.decode(token_ids)
        if ended:
            state.text += text
            return self._environment(row, state)
        call = self.calls.find(text)
        if call is None:
            return iter(())
        state.text += text
        before, after = self.calls.around(call.tool, text)
        if self.calls.name == "chat" and self.message is not None:
            before, after = self.message("tool")
        state.open = self._started(state, call)
        return self._tokens(state, before, after)

    def turns_of(self, row: int) -> tuple[Turn, ...]:
        state = self._rows[row]
        if state.open is not None:
            state.open()  # the length limit came before the output
        return tuple(state.turns)

    # ---- tools ---------------------------------------------------------------------------------------------------------

    def _started(self, state: _Row, call: Call) -> Callable[[], str]:
        """Start a call; return what waits for it, records it and returns its output."""
        state.calls += 1
        name = call.tool
        tool = self.tools.get(name)
        if tool is None:
            job: Output | Future[Output] = Output(
                f"Error: no such tool; there is {', '.join(self.tools)}", "NoSuchTool"
            )
        elif state.calls > self.most_calls:
            job = Output(f"Error: all {self.most_calls} calls are used up", REFUSED)
        elif tool.inline:
            job = _timed(tool, call.request, state.sessions.get(name))
        else:
            job = _threads(os.getpid()).submit(_timed, tool, call.request, state.sessions.get(name))

        def finish() -> str:
            found = job if isinstance(job, Output) else job.result()
            output = self.calls.clean(found.text, self.closing)
            state.sessions[name] = found.session
            state.turns.append(Turn(name or "unknown", call.request, output, found.error, found.seconds))
            state.open = None
            return output

        return finish

    def _tokens(self, state: _Row, before: str, after: str) -> Iterator[int]:
        yield from self.encode(before, False)
        assert state.open is not None
        output = state.open()
        ids = self.encode(output, True)
        if len(ids) > self.output_tokens:
            ids = [*ids[: self.output_tokens], *self.encode("…", True)]
        yield from ids
        yield from self.encode(after, False)
        state.text += before + output + after

    # ---- environment ---------------------------------------------------------------------------------------------------

    def _environment(self, row: int, state: _Row) -> Iterator[int] | None:
        if self.environment is None or self.message is None:
            return None
        began = time.perf_counter()
        found = self.environment.reply(row, state.text, state.turns)
        if found is None:
            return None
        state.turns.append(
            Turn(ENVIRONMENT, state.text, found.text, found.error, time.perf_counter() - began)
        )
        if found.error:
            return None
        before, after = self.message("user")
        state.text = ""
        return iter([*self.encode(before, False), *self.encode(found.text, True), *self.encode(after, False)])


def _timed(tool: Tool, request: str, session: Any) -> Output:
    began = time.perf_counter()
    found = tool.call(request, session)
    return replace(found, seconds=time.perf_counter() - began)


@lru_cache(maxsize=2)
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads that wait for calls; one set a process."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tool")

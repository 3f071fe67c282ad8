"""The turns of one request: calls are read, run and answered; each of them is recorded with its rollout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from algorist.extensions.environments.user import Environments
from algorist.extensions.toolbox.base import Output, Tool
from algorist.extensions.tools.formats import Call, CallFormat
from algorist.extensions.tools.section import ToolsSection
from algorist.prompts.attached import own_template
from algorist.prompts.base import PromptFormat
from algorist.prompts.pieces import encode_after
from algorist.types import ENVIRONMENT, Problem, Turn

REFUSED = "TooManyCalls"
"""Error class of a call beyond the limit of its rollout."""
_MARK = "\u2042algorist\u2042"


@dataclass
class _Row:
    """What is known of a row: its text since the last reply of an environment, its exchanges, the tools' sessions, a call that runs."""

    text: str = ""
    turns: list[Turn] = field(default_factory=list)
    sessions: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    open: Callable[[], str] | None = None
    ended: bool = False


class Replies:
    """Replies to the rows of one ``generate`` call (``rollouts.base.Turns``); arguments as those of ``prompts.base.TurnSource.open``.

    An output loses what only the policy may write: the tags of answers and calls, the stop strings, special tokens.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        calls: CallFormat,
        section: ToolsSection,
        environment: Environments | None,
        problems: Sequence[Problem],
        tokenizer: Any,
        form: PromptFormat,
        stops: Sequence[str],
    ) -> None:
        self.problems, self.tokenizer, self.form = problems, tokenizer, form
        self.tools, self.calls, self.section, self.environment = tools, calls, section, environment
        self.stop_strings = self.calls.stop_strings if calls.tools else ()
        self.closing = (*form.tags.all(), *stops, *tokenizer.all_special_tokens)
        self._rows: list[_Row] = []

    def begin(self, rows: int) -> None:
        self._rows = [_Row() for _ in range(rows)]
        if self.environment is not None:
            self.environment.begin(self.problems[:rows])

    def reply(self, row: int, token_ids: list[int], ended: bool) -> Iterator[int] | None:
        state = self._rows[row]
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        closed = token_ids[-1] in self.tokenizer.all_special_ids  # and not by a stop string
        call = self.calls.find(text, ended)
        if call is not None and (call.tool in self.calls.tools or not ended):
            state.text += text
            state.open = self._started(row, state, call)
            in_chat = self.calls.name == "chat"
            return self._tokens(
                state, *(self._message("tool", closed) if in_chat else self.calls.around(call.tool, text))
            )
        if not ended:
            return iter(())
        state.text += text
        reply = self._environment(row, state, closed)
        if reply is None:
            self._end(row, state)
        return reply

    def turns_of(self, row: int) -> tuple[Turn, ...]:
        state = self._rows[row]
        if state.open is not None:
            state.open()  # the length limit came before the output
        self._end(row, state)
        return tuple(state.turns)

    def _end(self, row: int, state: _Row) -> None:
        """End a row's environment, which may pay for it."""
        if self.environment is not None and not state.ended:
            state.ended = True
            state.turns += self.environment.end(row)

    def _ids(self, text: str, plain: bool = False) -> list[int]:
        """Return the tokens of a text; ``plain``: special tokens in it are none."""
        text = text.encode(errors="replace").decode()  # no tokenizer takes half of a surrogate pair
        return encode_after(self.tokenizer, [text], split_special_tokens=plain)[0]

    def _message(self, role: str, closed: bool) -> tuple[str, str]:
        """Return what stands before and after a message inside a conversation; a completion that is closed has its end token already."""
        if not self.form.is_chat:
            return "\n", "\n"
        said = [("user", "?"), ("assistant", _MARK), (role, _MARK)]
        text = str(
            self.tokenizer.apply_chat_template(
                [{"role": who, "content": content} for who, content in said],
                chat_template=own_template(self.tokenizer),
                add_generation_prompt=True,
                tokenize=False,
                **self.form.template_kwargs,
            )
        )
        _, between, after = text.split(_MARK)
        prefill = self.form.prefill()
        after += "" if after.rstrip().endswith(prefill.strip()) else prefill
        return between.removeprefix(self.tokenizer.eos_token or "") if closed else between, after

    # ---- tools ---------------------------------------------------------------------------------------------------------

    def _started(self, row: int, state: _Row, call: Call) -> Callable[[], str]:
        """Start a call; return what waits for it, records it and returns its output."""
        state.calls += 1
        name = call.tool
        methods = self.environment.methods(row) if self.environment is not None else {}
        tool = self.tools.get(name)
        run = tool.call if tool else methods.get(name)
        if run is None:
            job: Output | Future[Output] = Output(
                f"Error: no such tool; there is {', '.join([*self.tools, *methods])}", "NoSuchTool"
            )
        elif state.calls > self.section.calls:
            job = Output(f"Error: all {self.section.calls} calls are used up", REFUSED)
        elif tool is None or tool.inline:
            job = _timed(run, call.request, state.sessions.get(name))
        else:
            job = _threads(os.getpid()).submit(_timed, run, call.request, state.sessions.get(name))

        def finish() -> str:
            found = job if isinstance(job, Output) else job.result()
            output = self.calls.clean(found.text, self.closing)
            state.sessions[name] = found.session
            state.turns.append(Turn(name or "unknown", call.request, output, found.error, found.seconds))
            state.open = None
            return output

        return finish

    def _tokens(self, state: _Row, before: str, after: str) -> Iterator[int]:
        yield from self._ids(before)
        assert state.open is not None
        output = state.open()
        ids, most = self._ids(output, plain=True), self.section.output_tokens
        cut = self._ids("…", plain=True)[:most]
        yield from ids if len(ids) <= most else [*ids[: most - len(cut)], *cut]
        yield from self._ids(after)
        state.text += before + output + after

    # ---- environment ---------------------------------------------------------------------------------------------------

    def _environment(self, row: int, state: _Row, closed: bool) -> Iterator[int] | None:
        if self.environment is None:
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
        before, after = self._message("user", closed)
        state.text = ""
        return iter([*self._ids(before), *self._ids(found.text, plain=True), *self._ids(after)])


def _timed(call: Callable[..., Output], *request: Any) -> Output:
    began = time.perf_counter()
    output = call(*request)
    return replace(output, seconds=time.perf_counter() - began)


@lru_cache(maxsize=2)
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads that wait for calls; one set a process."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tool")

"""Questions to an OpenAI-compatible server: what ``algorist serve`` starts, or any other."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from algorist.data.columns import THOUGHTS
from algorist.errors import ConfigError, EngineError
from algorist.prompts import PromptFormat
from algorist.prompts.base import answer_row
from algorist.prompts.chat import render_prompt
from algorist.store.safe_text import one_line
from algorist.types import Rollout

T = TypeVar("T")
MAX_REPLY = 16 * 2**20
"""Largest reply of a server (bytes)."""
LIST_S = 15.0
"""Longest wait for the list of models (s); an answer may take ``Endpoint.timeout_s``."""


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server; ``key`` is what named it, for messages."""

    url: str
    key: str = "--endpoint"
    timeout_s: float = 600.0
    most_bytes: int = MAX_REPLY

    def first_model(self) -> str:
        """Return the name of the first model that it lists (EngineError)."""
        models = self.call("/v1/models").get("data")
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise EngineError(f"{self} lists no model; name the one it serves with --served-model NAME")
        return str(first["id"])

    def choices(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of a reply (EngineError)."""
        reply = self.call(path, body)
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices or not all(isinstance(c, dict) for c in choices):
            raise EngineError(f"{self}{path} answered without choices: {_short(reply)}")
        return choices

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the object that a path replies with.

        Raises:
            ConfigError: The address is none.
            EngineError: The server cannot be reached, refuses, or its reply is no object or too large.
        """
        url = self.url.rstrip("/").removesuffix("/v1") + path
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{self.key} is '{self}'; expected http://HOST:PORT, such as http://localhost:8000"
            )
        try:
            limit = self.timeout_s if body else min(self.timeout_s, LIST_S)
            sent = None if body is None else json.dumps(body).encode()
            return _within(limit, lambda: _json(url, sent, limit, self.most_bytes))
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise EngineError(f"{_short(url)}: {error.code} {_short(error.reason)}: {_short(said)}") from None
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise EngineError(
                f"{_short(url)} cannot be reached or answers no JSON ({_short(error)}); is it running? Start one: algorist serve "
                "RUN"
            ) from None

    def __str__(self) -> str:
        return _short(self.url)


@dataclass(frozen=True)
class Endpoint:
    """A server and the prompt format that its model was trained with.

    With a ``tokenizer`` the prompt is rendered here, exactly as in training, and goes to ``/v1/completions``; without one the
    messages go to ``/v1/chat/completions`` and the server renders them.
    """

    url: str
    prompt_format: PromptFormat
    tokenizer: Any = None
    model: str | None = None
    timeout_s: float = 600.0
    stop_strings: tuple[str, ...] = ()

    def solve(
        self, questions: Sequence[str], *, max_new_tokens: int = 512, temperature: float = 0.0
    ) -> list[dict[str, Any]]:
        """Return one row per question, as ``Solver.solve`` does.

        Raises:
            EngineError: The server cannot be reached or refuses.
            ConfigError: The format starts the answer itself, which a chat endpoint cannot do.
        """
        name = self.model or self._server.first_model()
        rows = []
        for question in questions:
            choice, text, prompt = self._ask(name, question, max_new_tokens, temperature)
            text, stopped = self._with_its_stop(choice, text)
            cut = choice.get("finish_reason") == "length" and not stopped
            rows.append(
                answer_row(question, Rollout([], text, None, cut, self.prompt_format.read(text, prompt)))
            )
        return rows

    def _with_its_stop(self, choice: Mapping[str, Any], text: str) -> tuple[str, bool]:
        """Return a text to the end of its first stop string, and whether it has one: servers leave it out, or know none."""
        ends = [at + len(stop) for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        if ends:
            return text[: min(ends)], True
        said = choice.get("stop_reason")  # vLLM's
        closing = [self.prompt_format.tags.answer_close] if choice.get("finish_reason") == "stop" else []
        ended = next(
            (stop for stop in self.stop_strings if stop == said or (said is None and stop in closing)), ""
        )
        return text + ended, bool(ended)

    def _ask(
        self, name: str, question: str, limit: int, temperature: float
    ) -> tuple[dict[str, Any], str, str]:
        """Return a server's choice, its text, and the prompt as far as it is rendered here."""
        body: dict[str, Any] = {"model": name, "max_tokens": limit, "temperature": temperature}
        if self.stop_strings:  # OpenAI's own server takes four
            body["stop"] = list(self.stop_strings[:4])
        rendered = self.prompt_format.render(question)
        if self.tokenizer is not None:
            rendered = render_prompt(self.prompt_format, self.tokenizer, question)
        if isinstance(rendered, str):
            choice = self._server.choices("/v1/completions", {**body, "prompt": rendered})[0]
            return choice, self._text(choice.get("text")), rendered
        if self.prompt_format.prefill():
            raise ConfigError(
                f"the format {self.prompt_format.name} starts the answer with {self.prompt_format.prefill().strip()!r}, which a "
                "chat endpoint cannot do; give --model RUN too, so that the prompt is rendered here"
            )
        if self.prompt_format.template_kwargs:  # the name that vLLM and llama.cpp's server take
            body["chat_template_kwargs"] = dict(self.prompt_format.template_kwargs)
        choice = self._server.choices("/v1/chat/completions", {**body, "messages": rendered})[0]
        message = choice.get("message")
        return choice, self._text(self._whole(message) if isinstance(message, dict) else None), ""

    def _whole(self, message: Mapping[str, Any]) -> Any:
        """Return a message with its thoughts, which many servers put beside its content."""
        content, tags = message.get("content"), self.prompt_format.tags
        if not isinstance(thought := next(filter(None, map(message.get, THOUGHTS)), None), str):
            return content
        opened = (tags.reasoning_open or "<think>") + thought
        return f"{opened}{tags.reasoning_close or '</think>'}\n{content}" if content else opened

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            raise EngineError(f"{self._server} answered without a text: {_short(value)}")
        return value

    @property
    def _server(self) -> Server:
        return Server(self.url, timeout_s=self.timeout_s)


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """Call a function and return its result, or raise its error; one that takes longer is abandoned, whatever it waits for."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.result(limit_s)
    except TimeoutError:  # of a single read, or of the whole reply
        raise TimeoutError(f"its reply takes longer than {limit_s:g} s") from None


def _json(url: str, body: bytes | None, timeout_s: float, most_bytes: int) -> dict[str, Any]:
    """Return the reply's object, within a limit of size and of each wait for bytes."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with _opener.open(request, timeout=timeout_s) as answer:
        content = answer.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"its reply has more than {most_bytes} bytes")
    reply = json.loads(content)
    if not isinstance(reply, dict):
        raise ValueError(f"a {type(reply).__name__} where an object is expected")
    return reply


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A question goes to the server that was named, nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse; the reply counts as an error."""


_opener = urllib.request.build_opener(_NoRedirect)


def _short(value: Any) -> str:
    return one_line(str(value)[:2000], 300)

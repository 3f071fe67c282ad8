"""Questions to an OpenAI-compatible server: what ``algorist serve`` starts, or any other."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from algorist.errors import ConfigError, EngineError
from algorist.prompts import PromptFormat
from algorist.prompts.answer import answer_row
from algorist.prompts.chat import render_prompt
from algorist.types import Rollout


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

    def solve(
        self, questions: Sequence[str], *, max_new_tokens: int = 512, temperature: float = 0.0
    ) -> list[dict[str, Any]]:
        """Return one row per question, as ``Solver.solve`` does.

        Raises:
            EngineError: The server cannot be reached or refuses.
            ConfigError: The format starts the answer itself, which a chat endpoint cannot do.
        """
        name = self.model or self._first_model()
        rows = []
        for question in questions:
            text, reason = self._ask(name, question, max_new_tokens, temperature)
            rows.append(
                answer_row(
                    question, Rollout([], text, None, reason == "length", self.prompt_format.parse(text))
                )
            )
        return rows

    def _ask(self, name: str, question: str, limit: int, temperature: float) -> tuple[str, str]:
        body: dict[str, Any] = {"model": name, "max_tokens": limit, "temperature": temperature}
        rendered = self.prompt_format.render(question)
        if self.tokenizer is not None:
            rendered = render_prompt(self.prompt_format, self.tokenizer, question)
        if isinstance(rendered, str):
            choice = self._post("/v1/completions", {**body, "prompt": rendered})["choices"][0]
            return str(choice["text"]), str(choice["finish_reason"])
        if self.prompt_format.prefill():
            raise ConfigError(
                f"the format {self.prompt_format.name} starts the answer with {self.prompt_format.prefill().strip()!r}, which a "
                "chat endpoint cannot do; give --model RUN too, so that the prompt is rendered here"
            )
        choice = self._post("/v1/chat/completions", {**body, "messages": rendered})["choices"][0]
        return str(choice["message"]["content"]), str(choice["finish_reason"])

    def _first_model(self) -> str:
        found = self._call("/v1/models", None).get("data") or []
        if not found:
            raise EngineError(f"{self.url} lists no model; name the one it serves with --served-model NAME")
        return str(found[0]["id"])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        found = self._call(path, json.dumps(body).encode())
        if not found.get("choices"):
            raise EngineError(f"{self.url}{path} answered without choices: {str(found)[:200]}")
        return found

    def _call(self, path: str, body: bytes | None) -> dict[str, Any]:
        url = self.url.rstrip("/").removesuffix("/v1") + path
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--endpoint is '{self.url}'; expected http://HOST:PORT, such as http://localhost:8000"
            )
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            raise EngineError(
                f"{url}: {error.code} {error.reason}: {error.read(300).decode(errors='replace')}"
            ) from None
        except (OSError, ValueError) as error:
            raise EngineError(
                f"{url} cannot be reached or answers no JSON ({error}); is it running? Start one: algorist serve RUN"
            ) from None

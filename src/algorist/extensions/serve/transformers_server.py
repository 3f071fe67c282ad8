"""transformers' own server, sampling as a model was trained: ``python -m algorist.extensions.serve.transformers_server serve MODEL …``.

vLLM has a switch for it. transformers' server samples only where ``generation_config.json`` says ``do_sample``, whatever temperature a
request asks for, applies that file's other settings too, lists the models of the hub's cache instead of the one that it serves, and parses
replies by the kind of model: of one that was trained with a raw prompt the reply begins with the prompt. It leaves a request's stop
strings in the reply, gives one choice whatever ``n`` is, and breaks where ``messages`` is missing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from algorist.extensions.model_folder.card import UNUSED_SETTINGS
from algorist.prompts.attached import attached


def main() -> None:
    """Serve a model; arguments are those of ``transformers``."""
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse
    from transformers.cli.serving import chat_completion, utils
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.transformers import app

    class AsTrained(ModelManager):
        def load_model_and_processor(self, *args: Any, **options: Any) -> Any:
            model, processor = super().load_model_and_processor(*args, **options)
            trained = attached(getattr(processor, "tokenizer", processor))
            only_requests(model.generation_config, trained.stop_strings if trained else ())
            if trained:  # a reply is the model's text, nothing taken out of it
                utils.get_response_template = lambda processor, model: None
            return model, processor

    class LikeOpenAI(chat_completion.ChatCompletionHandler):
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            if wrong := fault_of(body):
                raise HTTPException(status_code=400, detail=wrong)
            reply = await super().handle_request(body, request_id)
            stops = body.get("stop")
            return reply if body.get("stream") or not stops else JSONResponse(without_stop(reply.body, stops))

    chat_completion.ChatCompletionHandler = LikeOpenAI  # type: ignore[misc]
    model = {"id": sys.argv[2], "object": "model", "created": int(time.time()), "owned_by": "algorist"}
    AsTrained.get_gen_models = staticmethod(lambda cache_dir=None: [model])  # type: ignore[method-assign]
    sys.modules[ModelManager.__module__].ModelManager = AsTrained  # type: ignore[attr-defined]
    app()


def fault_of(body: dict[str, Any]) -> str:
    """Name what of a chat request this server cannot do; an empty text where it can."""
    if not body.get("messages"):
        return 'messages is missing or empty; expected [{"role": "user", "content": "…"}]'
    many = (body.get("n") or 1) != 1
    return (
        f"n is {body['n']}, but this server gives one choice; send the request {body['n']} times"
        if many
        else ""
    )


def without_stop(body: bytes, stops: str | Sequence[str]) -> dict[str, Any]:
    """Return a chat reply whose texts end before the first of the request's stop strings."""
    reply: dict[str, Any] = json.loads(body)
    for message in (choice["message"] for choice in reply["choices"]):
        text = message.get("content") or ""
        ends = [text.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
        message["content"] = text[: min(ends, default=len(text))]
    return reply


def only_requests(settings: Any, stop_strings: Sequence[str]) -> None:
    """Have a model's settings of generation leave sampling to the requests: temperature 1 where one names none, as at OpenAI's.

    Stop strings are those of the training, where a request has none.
    """
    for name in UNUSED_SETTINGS:
        setattr(settings, name, None)
    settings.do_sample, settings.temperature, settings.top_k, settings.top_p = True, 1.0, 0, 1.0
    settings.stop_strings = list(stop_strings) or None


if __name__ == "__main__":
    main()

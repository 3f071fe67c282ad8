"""Questions to an OpenAI-compatible server (``algorist solve --endpoint URL``), asked as the model was trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from algorist.cli.endpoints import endpoint


@endpoint("openai")
def _server(
    url: str,
    served: str | None,
    model: str | None,
    prompt_format: str | None,
    template_kwargs: Mapping[str, Any],
    say: Callable[[str], None],
) -> tuple[Any, int]:
    from algorist.cli.arguments import find_model
    from algorist.config.load import load_run_recipe
    from algorist.extensions.openai_server.client import Endpoint
    from algorist.prompts.attached import attached
    from algorist.runs.asking import how_to_ask

    tokenizer, recipe = None, None
    if model is None:  # most often one that algorist serves, whose template adds the trained prompt
        prompt_format = prompt_format or "reasoning_answer"
    else:
        from algorist.models.load import load_tokenizer

        path, run = find_model(model)
        recipe = load_run_recipe(run) if run else None
        tokenizer = load_tokenizer(str(path))
        served = served or str(path)
    how = how_to_ask(recipe, prompt_format, attached(tokenizer) if tokenizer else None, template_kwargs)
    say(f"asking {url} …")
    if how.prompt_format.turns:
        say(f"warning: {how.prompt_format.turns.unanswered()}")
    server = Endpoint(url, how.prompt_format, tokenizer, served, stop_strings=how.stop_strings)
    return server, how.max_completion_tokens

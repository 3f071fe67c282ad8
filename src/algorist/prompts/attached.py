"""How a model was asked in training, kept in its tokenizer's settings: it goes wherever the model goes.

``save_pretrained`` of a tokenizer writes its settings to ``tokenizer_config.json``, so every checkpoint, ``final/``, merge,
export and upload has the prompt format, system prompt, tags and completion length. The chat template lies beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from algorist.errors import DAMAGED, ConfigError
from algorist.prompts.base import FORMATS, PromptFormat, Tags

KEY = "algorist"
_WORDING = ("system_prompt", "raw_template", "prefilled_start", "block_join", "inner")
_TEMPLATE = ("template_kwargs", "system_role")


@dataclass(frozen=True)
class Asked:
    """How a model is asked: the prompt format with its wording, and where a completion ends."""

    prompt_format: PromptFormat
    max_completion_tokens: int
    stop_strings: tuple[str, ...] = ()


def attach(tokenizer: Any, asked: Asked) -> None:
    """Make ``asked`` part of a tokenizer; it is saved with it."""
    form = asked.prompt_format
    tokenizer.init_kwargs[KEY] = {
        "prompt_format": form.name,
        "tags": asdict(form.tags),
        **{name: getattr(form, name) for name in _WORDING},
        **({"template_kwargs": dict(form.template_kwargs)} if form.template_kwargs else {}),
        **({"system_role": form.system_role} if form.system_role != "system" else {}),
        "max_completion_tokens": asked.max_completion_tokens,
        "stop_strings": list(asked.stop_strings),
    }


def attached(model: Any) -> Asked | None:
    """Return how the model of a tokenizer, or of a folder, was asked in training; None where nothing says so.

    Raises:
        ConfigError: What is there was not written by ``attach``.
    """
    if isinstance(model, Path):
        file = model / "tokenizer_config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get(KEY) if file.is_file() else None
        except DAMAGED:
            return None  # the loader says what is wrong with the file
    else:
        found = getattr(model, "init_kwargs", {}).get(KEY)
    if found is None:
        return None
    try:
        return _read(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"tokenizer_config.json of the model has a damaged entry '{KEY}' ({error!r}); take the entry out and name the "
            "prompt format: --format NAME"
        ) from None


def _read(found: Mapping[str, Any]) -> Asked:
    name, tags, stops = found["prompt_format"], Tags(**found["tags"]), found["stop_strings"]
    form = FORMATS.get(name) if name in FORMATS.names() else PromptFormat(str(name), tags)
    wording = {key: found[key] for key in _WORDING}
    template = {key: found[key] for key in _TEMPLATE if key in found}
    if not isinstance(template.get("template_kwargs", {}), dict):
        raise TypeError("expected template_kwargs as an object")
    texts = (
        *asdict(tags).values(),
        *stops,
        *(v for k, v in wording.items() if k not in ("prefilled_start", "raw_template")),
    )
    if not all(isinstance(text, str) for text in texts) or not isinstance(
        wording["raw_template"], str | None
    ):
        raise TypeError("expected texts")
    limit = found["max_completion_tokens"]
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"max_completion_tokens is {limit!r}")
    return Asked(replace(form, tags=tags, **wording, **template), limit, tuple(stops))

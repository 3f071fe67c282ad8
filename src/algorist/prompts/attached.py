"""Prompt settings of a trained model, kept in its tokenizer's settings: they go wherever the model goes.

``save_pretrained`` of a tokenizer writes its settings to ``tokenizer_config.json``, so every checkpoint, ``final/``, merge,
export and upload has the prompt format, system prompt, tags and completion length. The chat template is saved beside them and asks
in the same way: a bare question, rendered by any program, is the prompt of the training.

vLLM, LM Studio, llama.cpp and transformers render the messages that they get. The template fills in what the caller leaves out:
the system prompt, the switches, the first token, the tag that an answer begins with; a raw format replaces the model's own template.
Our own prompts are always made with the model's own template, which the tokenizer's settings keep.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from algorist.errors import DAMAGED, ConfigError
from algorist.prompts.base import FORMATS, PromptFormat, Tags, turn_source


def with_defaults(template: str, form: PromptFormat, *, prefill: bool, bos: bool) -> str:
    """Return ``template`` with the wording of ``form`` as its defaults.

    Args:
        template: The model's own chat template; a raw format does not use it.
        form: The prompt format of the training.
        prefill: Whether the generation prompt ends with the format's opening tag.
        bos: Whether the text begins with the first token, because ``tokenizer(text)`` adds it and the template does not.
    """
    # Jinja drops a line's end after a block.
    start = "{{ bos_token }}" if bos else '{{ "" }}' * template.startswith(("\n", "\r"))
    if form.raw_template is not None:
        pieces = " + ".join(
            map(_literal, form.raw_template.replace("{question}", "\0{question}\0").split("\0"))
        )
        question = pieces.replace(_literal("{question}"), "(message['content'] | trim)")
        return (
            start + "{% for message in messages %}{% if message['role'] == 'user' %}{{ " + question + " }}"
            "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
        )
    end = _literal(form.prefill()) if prefill else ""
    return (
        "".join(f"{{% {line} %}}" for line in _settings(form))
        + start
        + template.removesuffix("\n")
        + (f"{{{{ {end} if add_generation_prompt else '' }}}}" if end else "")
    )


def variants(template: str, form: PromptFormat) -> Iterator[str]:
    """Yield the template with each combination of what depends on the tokenizer."""
    for prefill, bos in product((False, True), repeat=2):
        yield with_defaults(template, form, prefill=prefill, bos=bos)


def _settings(form: PromptFormat) -> Iterator[str]:
    for key, value in form.template_kwargs.items():
        assert key.isidentifier(), key
        yield f"set {key} = {key} if {key} is defined else {_literal(value)}"
    if form.message:
        before, after = map(_literal, form.message.split("{question}", 1))
        last = "messages[-1]['content']"
        bare = f"messages and messages[-1]['role'] == 'user' and {last} is string and not {last}.startswith({before})"
        message = f"[{{'role': 'user', 'content': {before} + ({last} | trim) + {after}}}]"
        yield f"set messages = messages[:-1] + {message} if {bare} else messages"
    if not form.system_prompt:
        return
    system, first = _literal(form.system_prompt), "messages[0]['content']"
    if form.system_role == "system":
        yield "if not messages or messages[0]['role'] not in ['system', 'developer']"
        yield f"set messages = [{{'role': 'system', 'content': {system}}}] + messages"
    else:
        yield f"if messages and messages[0]['role'] == 'user' and {first} is string and not {first}.startswith({system})"
        yield f"set messages = [{{'role': 'user', 'content': {system} + '\\n\\n' + {first}}}] + messages[1:]"
    yield "endif"


def _literal(value: Any) -> str:
    """Return a value as Jinja writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(str(k))}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False)


KEY = "algorist"
_WORDING = ("system_prompt", "raw_template", "prefilled_start", "block_join", "inner")
_TEMPLATE = ("template_kwargs", "system_role")
LONGEST = 200_000
"""Characters of an entry: every prompt has its texts."""


_RECIPE_KEYS = {
    "prompt_format": "prompt.format",
    **{key: f"prompt.{key}" for key in ("system_prompt", "tags", "template_kwargs", "system_role")},
    "raw_template": "prompt.system_prompt",
    "stop_strings": "eval.stop_strings",
}
"""What a model carries of its prompt (``Asked.recorded``) → the key of a recipe."""


@dataclass(frozen=True)
class Asked:
    """Prompt settings of a model: the format with its wording, the end of a completion, and the user's class that the format was."""

    prompt_format: PromptFormat
    max_completion_tokens: int
    stop_strings: tuple[str, ...] = ()
    code: str = ""

    def recorded(self) -> dict[str, Any]:
        """Return it as plain data, which ``attached`` reads."""
        form = self.prompt_format
        return {
            "prompt_format": form.name,
            **({} if type(form).__module__.startswith("algorist.") else {"code": type(form).__name__}),
            "tags": asdict(form.tags),
            **{name: getattr(form, name) for name in _WORDING},
            **({"template_kwargs": dict(form.template_kwargs)} if form.template_kwargs else {}),
            **({"system_role": form.system_role} if form.system_role != "system" else {}),
            **({"turns": form.turns.recorded()} if form.turns else {}),
            "max_completion_tokens": self.max_completion_tokens,
            "stop_strings": list(self.stop_strings),
        }

    def differences(self, now: Asked) -> dict[str, tuple[Any, Any]]:
        """Return the differences of another way to ask: key of a recipe → (this value, the other one)."""
        mine, theirs = self.recorded(), now.recorded()
        pairs = [(key, mine.get(name), theirs.get(name)) for name, key in _RECIPE_KEYS.items()]
        return {key: (one, other) for key, one, other in pairs if one != other}


def own_template(tokenizer: Any) -> str | None:
    """Return the chat template of the model itself, without the defaults of its training; None where it has none."""
    held = tokenizer.chat_template
    held = held.get("default") if isinstance(held, dict) else held
    entry = getattr(tokenizer, "init_kwargs", {}).get(KEY)
    return held if held is None or entry is None else _own(held, json.dumps(entry))


@lru_cache(maxsize=16)
def _own(held: str, entry: str) -> str:
    with suppress(KeyError, TypeError, ValueError, AttributeError):  # damage is named by ``attached``
        template = json.loads(entry)
        if held in variants(str(template["template"]), _read(template).prompt_format):
            return str(template["template"])
    return held


def attached(model: Any) -> Asked | None:
    """Read the prompt settings that the model of a tokenizer, or of a folder, was trained with; None without a record.

    Raises:
        ConfigError: The record was not written by ``attach``.
    """
    if isinstance(model, Path):
        file = model / "tokenizer_config.json"
        try:
            stored = json.loads(file.read_text(encoding="utf-8")).get(KEY) if file.is_file() else None
        except DAMAGED:
            return None  # the loader says what is wrong with the file
    else:
        stored = getattr(model, "init_kwargs", {}).get(KEY)
    if stored is None:
        return None
    try:
        return _read(stored)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"tokenizer_config.json of the model has a damaged entry '{KEY}' ({error!r}); take the entry out and name the "
            "prompt format: --format NAME"
        ) from None


def _read(stored: Mapping[str, Any]) -> Asked:
    if len(json.dumps(stored)) > LONGEST:
        raise ValueError(f"it has more than {LONGEST} characters")
    name, tags, stops = stored["prompt_format"], Tags(**stored["tags"]), stored["stop_strings"]
    form = FORMATS.get(name) if name in FORMATS.names() else PromptFormat(str(name), tags)
    wording = {key: stored[key] for key in _WORDING}
    template = {key: stored[key] for key in _TEMPLATE if key in stored}
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
    limit = stored["max_completion_tokens"]
    if not isinstance(limit, int) or not 1 <= limit <= 2**24:
        raise ValueError(f"max_completion_tokens is {limit!r}")
    turns = stored.get("turns")
    source = turn_source(turns, trusted=False) if turns is not None else None
    form = replace(form, tags=tags, turns=source, **wording, **template)
    return Asked(form, limit, tuple(stops), str(stored.get("code", "")))

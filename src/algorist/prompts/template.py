"""The chat template that a trained model is saved with: a bare question, rendered by any program, is the prompt of the training.

vLLM, LM Studio, llama.cpp and transformers render the messages that they get. The template fills in what the caller leaves out:
the system prompt, the switches, the first token, the tag that an answer begins with; a raw format replaces the model's own template.
Our own prompts are always made with the model's own template, which the tokenizer's settings keep.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

from algorist.prompts.base import PromptFormat


def with_defaults(template: str, form: PromptFormat, *, prefill: bool, bos: bool) -> str:
    """Return ``template`` with the wording of ``form`` as its defaults.

    Args:
        template: The model's own chat template; a raw format does not use it.
        form: The prompt format of the training.
        prefill: Whether the generation prompt ends with the format's opening tag.
        bos: Whether the text begins with the first token, because ``tokenizer(text)`` adds it and the template does not.
    """
    start = "{{ bos_token }}" if bos else ""
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

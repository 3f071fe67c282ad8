"""A question as the exact prompt text that the model reads: the same for SFT, rollouts, evaluation and ``solve``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError

from algorist.errors import ConfigError, nearest
from algorist.prompts.attached import KEY, Asked, own_template, variants
from algorist.prompts.base import PromptFormat
from algorist.types import Message


def render_prompt(prompt_format: PromptFormat, tokenizer: Any, question: str) -> str:
    """Return the prompt of ``question`` with the tokenizer's chat template, generation prompt and prefilled tag.

    The text is meant for ``tokenizer(text)``: a leading BOS that the tokenizer adds is taken off.

    Args:
        prompt_format: The format; a raw format ignores the chat template.
        tokenizer: A transformers tokenizer with a chat template.
        question: The problem's text.

    Raises:
        ConfigError: The template refuses the messages, for example a system message, or never reads a switch.
    """
    rendered = prompt_format.render(question)
    if prompt_format.template_kwargs:
        _check_switches(prompt_format, tokenizer)
    if isinstance(rendered, str):
        return rendered
    try:
        text = str(
            tokenizer.apply_chat_template(
                rendered,
                chat_template=own_template(tokenizer),
                add_generation_prompt=True,
                tokenize=False,
                **prompt_format.template_kwargs,
            )
        )
    except TemplateError as error:
        roles = {message["role"] for message in rendered}
        way = (
            "prompt.system_role=user puts the system prompt before the question"
            if "system" in roles
            else "correct the template, or give another: model.chat_template=FILE"
        )
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path or 'the model'} refuses the prompt ({' '.join(str(error).split())[:200]}); {way}"
        ) from None
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        empty = tokenizer("")["input_ids"]
        if empty and empty[0] == tokenizer.bos_token_id:
            text = text.removeprefix(tokenizer.bos_token)
    prefill = prompt_format.prefill()
    return text if not prefill or text.rstrip().endswith(prefill.strip()) else text + prefill


def opened_by_template(prompt_format: PromptFormat, tokenizer: Any) -> PromptFormat:
    """Return the format as the chat template has it: where the prompt ends with the opening reasoning tag, completions start after it."""
    tag = prompt_format.tags.reasoning_open
    if not tag or not prompt_format.is_chat or prompt_format.prefilled_start:
        return prompt_format
    opened = render_prompt(prompt_format, tokenizer, "1 + 1?").rstrip().endswith(tag)
    return replace(prompt_format, prefilled_start=True) if opened else prompt_format


def encode_prompt(prompt_format: PromptFormat, tokenizer: Any, question: str) -> list[int]:
    """Return the token ids of the prompt."""
    return list(tokenizer(render_prompt(prompt_format, tokenizer, question))["input_ids"])


def _check_switches(prompt_format: PromptFormat, tokenizer: Any) -> None:
    """Refuse a switch that the chat template never reads: it would change nothing, and silently."""
    if not prompt_format.is_chat:
        raise ConfigError(
            f"prompt.template_kwargs is set, but the prompt format {prompt_format.name} is raw text and uses no chat template; "
            "take it out, or take a chat format: prompt.format=reasoning_answer"
        )
    words = _names_in(own_template(tokenizer) or "")
    if "tools" in prompt_format.template_kwargs and "tools" not in words:
        raise ConfigError(
            "tools.format=chat needs a chat template that writes tools, which the model's does not, and so do an environment's tools; take "
            "tools.format=tags, or equals for a calculator, or a model whose template does"
        )
    if unread := sorted(set(prompt_format.template_kwargs) - words):
        raise ConfigError(
            f"prompt.template_kwargs has {unread[0]}, which the chat template of {tokenizer.name_or_path or 'the model'} never "
            f"reads.{nearest(unread[0], words)} Take it out; what a template reads is in the model's tokenizer_config.json or "
            "chat_template.jinja"
        )


@lru_cache(maxsize=32)
def _names_in(template: str) -> frozenset[str]:
    """Return the names in a template but those of attributes, filters and tests, and its operators."""
    words = [text for _, kind, text in Environment().lex(template) if kind in ("name", "operator")]
    return frozenset(word for before, word in pairwise(["", *words]) if before not in (".", "|", "is"))


# ---- a tokenizer that asks in this way wherever its model goes


def attach(tokenizer: Any, asking: Asked) -> None:
    """Attach prompt settings to a tokenizer and to its chat template; both are saved with it."""
    form, own = asking.prompt_format, own_template(tokenizer)
    _set_template(tokenizer, own)
    tokenizer.init_kwargs[KEY] = asking.recorded()
    if own is None:
        return
    tokenizer.init_kwargs[KEY]["template"] = own
    question: list[Message] = [{"role": "user", "content": "What is 1 + 1?"}]
    with suppress(ConfigError, TemplateError):  # a template that refuses the prompt is named when one is made
        expected = encode_prompt(form, tokenizer, question[0]["content"])
        for template in variants(own, form):
            ids = tokenizer.apply_chat_template(
                question, chat_template=template, add_generation_prompt=True, return_dict=False
            )
            if ids == expected:
                return _set_template(tokenizer, template)


def _set_template(tokenizer: Any, template: str | None) -> None:
    held = tokenizer.chat_template
    tokenizer.chat_template = {**held, "default": template} if isinstance(held, dict) else template

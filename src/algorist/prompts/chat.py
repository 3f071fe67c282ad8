"""A question as the exact prompt text that the model reads: the same for SFT, rollouts, evaluation and ``solve``."""

from __future__ import annotations

from typing import Any

from algorist.prompts.base import PromptFormat


def render_prompt(prompt_format: PromptFormat, tokenizer: Any, question: str) -> str:
    """Return the prompt of ``question`` with the tokenizer's chat template, generation prompt and prefilled tag.

    The text is meant for ``tokenizer(text)``: a leading BOS that the tokenizer adds by itself is taken off.

    Args:
        prompt_format: The format; a raw format ignores the chat template.
        tokenizer: A transformers tokenizer with a chat template.
        question: The problem's text.
    """
    rendered = prompt_format.render(question)
    if isinstance(rendered, str):
        return rendered
    text = str(tokenizer.apply_chat_template(rendered, add_generation_prompt=True, tokenize=False))
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        empty = tokenizer("")["input_ids"]
        if empty and empty[0] == tokenizer.bos_token_id:
            text = text.removeprefix(tokenizer.bos_token)
    prefill = prompt_format.prefill()
    return text if not prefill or text.rstrip().endswith(prefill.strip()) else text + prefill


def encode_prompt(prompt_format: PromptFormat, tokenizer: Any, question: str) -> list[int]:
    """Return the token ids of the prompt."""
    return list(tokenizer(render_prompt(prompt_format, tokenizer, question))["input_ids"])

"""Faults between tokenizer, prompt format and model that keep a model from ever writing what is graded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from algorist.data.problems import trained_otherwise
from algorist.models.load import Policy
from algorist.prompts import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.store.safe_text import one_line
from algorist.types import Problem

LOOKED_AT = 200


def tokenization_facts(
    policy: Policy,
    form: PromptFormat,
    problems: Sequence[Problem],
    as_written: Sequence[Problem] = (),
    demonstrations: Sequence[Problem] = (),
) -> dict[str, Any]:
    """Return what is wrong as facts by name, of up to 200 prompts; empty when nothing is.

    Args:
        policy: Model and tokenizer.
        form: Renders the prompts.
        problems: What is sampled with.
        as_written: What SFT trains on with the data's own prompts (``sft.source=prompt_response``).
        demonstrations: What SFT trains on with prompts of the format.
    """
    tokenizer: Any = policy.tokenizer
    texts = [render_prompt(form.of(p), tokenizer, p.question) for p in problems[:LOOKED_AT]]
    rows = [list(tokenizer(text)["input_ids"]) for text in texts]
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    twice = start is not None and any(row[:2] == [start, start] for row in rows)
    ends = end is not None and any(row and row[-1] == end for row in rows)
    odd = _changed(tokenizer, texts, rows)
    facts: dict[str, Any] = {
        "lost_tags": ", ".join(_lost_tags(tokenizer, form)),
        "outside": out_of_vocabulary(policy, rows),
        "changed_prompts": len(odd),
        "changed_text": one_line(odd[0][-160:], 160) if odd else None,
        "start_token": tokenizer.bos_token if twice else None,
        "end_token": tokenizer.eos_token if ends else None,
        "trained_otherwise": trained_otherwise(tokenizer, form, as_written),
        "system_prompt_lost": form.is_chat and _flat(form.system_prompt) not in _flat(texts[0])
        if texts
        else False,
        "opened_tag": _opened_tag(tokenizer, form, texts[0]) if texts else "",
        **_control_tokens(tokenizer, form, [*problems, *demonstrations]),
    }
    if facts["outside"]:
        facts |= {"highest_id": max(map(max, rows)), "embeddings": embeddings(policy)}
    return {name: value for name, value in facts.items() if value}


def _flat(text: str) -> str:
    return " ".join(text.split())


def _opened_tag(tokenizer: Any, form: PromptFormat, prompt: str) -> str:
    """Return a tag that the chat template opens at the end of the prompt and the format does not know."""
    match = re.search(r"<\w+>\s*$", prompt)
    tag = match[0].strip() if match else ""
    known = (*form.tags.all(), *tokenizer.all_special_tokens)
    return tag if form.is_chat and form.tags.all() and tag not in known else ""


def _control_tokens(tokenizer: Any, form: PromptFormat, problems: Sequence[Problem]) -> dict[str, Any]:
    """Return how many problems hold control tokens as text, which ones, and the first of these problems."""
    tokens = [t for t in tokenizer.all_special_tokens if len(t) > 2 and t not in form.markers]
    pattern = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
    each = {p.id: pattern.findall(f"{p.question}\n{p.solution}") for p in problems}
    hits = {name: sorted(set(held)) for name, held in each.items() if held}
    first = next(iter(hits), "")
    return {
        "control_tokens": len(hits),
        "control_example": f"{', '.join(hits[first])} in {first}" if hits else "",
    }


def embeddings(policy: Policy) -> int:
    """Return how many token ids the model has an embedding for."""
    return int(policy.model.get_input_embeddings().weight.shape[0])


def out_of_vocabulary(policy: Policy, rows: Sequence[Sequence[int]]) -> int:
    """Return how many prompts hold a token id that the model has no embedding for; such a prompt cannot be computed."""
    size = embeddings(policy)
    return sum(any(token >= size for token in row) for row in rows)


def _lost_tags(tokenizer: Any, form: PromptFormat) -> list[str]:
    ids = {tag: tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in form.markers}
    return [tag for tag in ids if tag not in tokenizer.decode(ids[tag], skip_special_tokens=True)]


def _changed(tokenizer: Any, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> list[str]:
    """Return prompts that do not come back as they were, white space aside: letters the tokenizer does not know."""
    unknown = tokenizer.unk_token_id
    odd = []
    for text, row in zip(texts, rows, strict=True):
        back = "".join(str(tokenizer.decode(row, skip_special_tokens=False)).split())
        if "".join(text.split()) not in back or (unknown is not None and unknown in row):
            odd.append(text)
    return odd

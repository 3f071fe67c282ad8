"""Faults between tokenizer, prompt format and model that keep a model from ever writing what is graded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from algorist.models.load import Policy
from algorist.prompts import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.store.safe_text import one_line
from algorist.types import Problem

LOOKED_AT = 200
Fault = dict[str, str] | None


def tokenization_faults(
    policy: Policy, form: PromptFormat, problems: Sequence[Problem], as_written: Sequence[Problem] = ()
) -> list[dict[str, str]]:
    """Return what is wrong as ``why`` and ``change`` (YAML), of up to 200 prompts; empty when nothing is.

    Args:
        policy: Model and tokenizer.
        form: Renders the prompts.
        problems: What is sampled with.
        as_written: What SFT trains on with the data's own prompts (``sft.source=prompt_response``).
    """
    tokenizer: Any = policy.tokenizer
    texts = [render_prompt(form, tokenizer, p.question) for p in problems[:LOOKED_AT]]
    rows = [list(tokenizer(text)["input_ids"]) for text in texts]
    looks = (
        _lost_tags(tokenizer, form),
        _outside(policy, rows),
        _unknown(tokenizer, texts, rows),
        _two_starts(tokenizer, rows),
        _no_end(tokenizer),
        _ends_at_once(tokenizer, rows),
        _trained_otherwise(tokenizer, form, as_written[:LOOKED_AT]),
    )
    return [fault for fault in looks if fault]


def out_of_vocabulary(policy: Policy, rows: Sequence[Sequence[int]]) -> int:
    """Return how many prompts hold a token id that the model has no embedding for; such a prompt cannot be computed."""
    size = int(policy.model.get_input_embeddings().weight.shape[0])
    return sum(any(token >= size for token in row) for row in rows)


def _lost_tags(tokenizer: Any, form: PromptFormat) -> Fault:
    lost = []
    for tag in form.tags.all():
        ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
        if tag not in tokenizer.decode(ids, skip_special_tokens=True):
            lost.append(tag)
    if not lost:
        return None
    return {
        "why": f"the tokenizer cannot write {', '.join(lost)} so that it can be read back: special tokens are taken out of "
        "completions, so these tags are never found in one",
        "change": "prompt:  # tags that are plain text to this tokenizer\n  tags: {answer_open: <answer>, answer_close: </answer>, "
        "reasoning_open: <reasoning>, reasoning_close: </reasoning>}",
    }


def _outside(policy: Policy, rows: Sequence[Sequence[int]]) -> Fault:
    count = out_of_vocabulary(policy, rows)
    if not count:
        return None
    size = int(policy.model.get_input_embeddings().weight.shape[0])
    return {
        "why": f"{count} of {len(rows)} prompts hold token ids up to {max(map(max, rows))}, but the model has {size} embeddings: "
        "the tokenizer belongs to another model, or tokens were added without embeddings",
        "change": "model:\n  name: FOLDER  # with the tokenizer files that were saved beside these weights",
    }


def _unknown(tokenizer: Any, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> Fault:
    """Find prompts that do not come back as they were, white space aside: letters the tokenizer does not know."""
    unknown = tokenizer.unk_token_id
    odd = []
    for text, row in zip(texts, rows, strict=True):
        back = "".join(str(tokenizer.decode(row, skip_special_tokens=False)).split())
        if "".join(text.split()) not in back or (unknown is not None and unknown in row):
            odd.append(text)
    if not odd:
        return None
    return {
        "why": f"{len(odd)} of {len(texts)} prompts come back from the tokenizer as other text, such as: "
        f"{one_line(odd[0][-160:], 160)}",
        "change": "model:\n  name: FOLDER  # with its own tokenizer; unknown characters or a normaliser change the text",
    }


def _two_starts(tokenizer: Any, rows: Sequence[Sequence[int]]) -> Fault:
    start = tokenizer.bos_token_id
    if start is None or not any(list(row[:2]) == [start, start] for row in rows):
        return None
    return {
        "why": f"prompts begin with {tokenizer.bos_token} twice: the chat template writes it and the tokenizer adds it",
        "change": "model:\n  chat_template: FILE  # the template without the first token",
    }


def _no_end(tokenizer: Any) -> Fault:
    if tokenizer.eos_token_id is not None:
        return None
    return {
        "why": "the tokenizer names no end-of-sequence token, so no completion ends before the limit",
        "change": "# eos_token in the model folder's tokenizer_config.json: the token that ends a turn in its chat template",
    }


def _ends_at_once(tokenizer: Any, rows: Sequence[Sequence[int]]) -> Fault:
    end = tokenizer.eos_token_id
    if end is None or not any(row and row[-1] == end for row in rows):
        return None
    return {
        "why": f"prompts end with {tokenizer.eos_token}, which the tokenizer adds: completions begin after the end of a text",
        "change": "# add_eos_token: false in the model folder's tokenizer_config.json (or its tokenizer.json's post_processor)",
    }


def _trained_otherwise(tokenizer: Any, form: PromptFormat, problems: Sequence[Problem]) -> Fault:
    """Compare, token by token, the prompts that SFT trains on as written with those that are sampled with."""
    differ = []
    for problem in problems:
        text = str(problem.extra.get("prompt", ""))
        trained, sampled = (
            tokenizer(t)["input_ids"] for t in (text, render_prompt(form, tokenizer, problem.question))
        )
        if trained != sampled:
            differ.append((trained, sampled))
    if not differ:
        return None
    trained, sampled = differ[0]
    place = next(
        (i for i, (a, b) in enumerate(zip(trained, sampled)) if a != b), min(len(trained), len(sampled))
    )
    shown = [
        one_line(str(tokenizer.decode(ids[place : place + 8])), 60) or "its end" for ids in (trained, sampled)
    ]
    return {
        "why": f"{len(differ)} of {len(problems)} prompts of SFT differ from those that are sampled with, the first at token "
        f"{place}: trained on '{shown[0]}', sampled with '{shown[1]}'",
        "change": "sft:\n  source: problems  # or a prompt.format that writes what data.sft's prompt column has",
    }

"""Faults between tokenizer, prompt format and model that keep a model from ever writing what is graded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from algorist.models.load import Policy
from algorist.prompts import PromptFormat
from algorist.prompts.chat import render_prompt
from algorist.store.safe_text import one_line
from algorist.types import Problem

LOOKED_AT = 200
Faults = Iterator[tuple[str, str]]


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
    faults = chain(
        _lost_tags(tokenizer, form),
        _outside(policy, rows),
        _unknown(tokenizer, texts, rows),
        _starts_and_ends(tokenizer, rows),
        _trained_otherwise(tokenizer, form, as_written[:LOOKED_AT]),
    )
    return [{"why": why, "change": change} for why, change in faults]


def out_of_vocabulary(policy: Policy, rows: Sequence[Sequence[int]]) -> int:
    """Return how many prompts hold a token id that the model has no embedding for; such a prompt cannot be computed."""
    size = int(policy.model.get_input_embeddings().weight.shape[0])
    return sum(any(token >= size for token in row) for row in rows)


def _lost_tags(tokenizer: Any, form: PromptFormat) -> Faults:
    lost = []
    for tag in form.markers:
        ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
        if tag not in tokenizer.decode(ids, skip_special_tokens=True):
            lost.append(tag)
    if lost:
        yield (
            f"the tokenizer cannot write {', '.join(lost)} so that it can be read back: special tokens are taken out of "
            "completions, so these tags are never found in one",
            "prompt:  # tags that are plain text to this tokenizer\n  tags: {answer_open: <answer>, answer_close: </answer>, "
            "reasoning_open: <reasoning>, reasoning_close: </reasoning>}",
        )


def _outside(policy: Policy, rows: Sequence[Sequence[int]]) -> Faults:
    if count := out_of_vocabulary(policy, rows):
        size = int(policy.model.get_input_embeddings().weight.shape[0])
        yield (
            f"{count} of {len(rows)} prompts hold token ids up to {max(map(max, rows))}, but the model has {size} embeddings: "
            "the tokenizer belongs to another model, or tokens were added without embeddings",
            "model:\n  name: FOLDER  # with the tokenizer files that were saved beside these weights",
        )


def _unknown(tokenizer: Any, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> Faults:
    """Find prompts that do not come back as they were, white space aside: letters the tokenizer does not know."""
    unknown = tokenizer.unk_token_id
    odd = []
    for text, row in zip(texts, rows, strict=True):
        back = "".join(str(tokenizer.decode(row, skip_special_tokens=False)).split())
        if "".join(text.split()) not in back or (unknown is not None and unknown in row):
            odd.append(text)
    if odd:
        yield (
            f"{len(odd)} of {len(texts)} prompts come back from the tokenizer as other text, such as: "
            f"{one_line(odd[0][-160:], 160)}",
            "model:\n  name: FOLDER  # with its own tokenizer; unknown characters or a normaliser change the text",
        )


def _starts_and_ends(tokenizer: Any, rows: Sequence[Sequence[int]]) -> Faults:
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if start is not None and any(list(row[:2]) == [start, start] for row in rows):
        yield (
            f"prompts begin with {tokenizer.bos_token} twice: the chat template writes it and the tokenizer adds it",
            "model:\n  chat_template: FILE  # the template without the first token",
        )
    if end is None:
        yield (
            "the tokenizer names no end-of-sequence token, so no completion ends before the limit",
            "# eos_token in the model folder's tokenizer_config.json: the token that ends a turn in its chat template",
        )
    elif any(row and row[-1] == end for row in rows):
        yield (
            f"prompts end with {tokenizer.eos_token}, which the tokenizer adds: completions begin after the end of a text",
            "# add_eos_token: false in the model folder's tokenizer_config.json (or its tokenizer.json's post_processor)",
        )


def _trained_otherwise(tokenizer: Any, form: PromptFormat, problems: Sequence[Problem]) -> Faults:
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
        return
    trained, sampled = differ[0]
    place = next(
        (i for i, (a, b) in enumerate(zip(trained, sampled)) if a != b), min(len(trained), len(sampled))
    )
    shown = [
        one_line(str(tokenizer.decode(ids[place : place + 8])), 60) or "its end" for ids in (trained, sampled)
    ]
    yield (
        f"{len(differ)} of {len(problems)} prompts of SFT differ from those that are sampled with, the first at token "
        f"{place}: trained on '{shown[0]}', sampled with '{shown[1]}'",
        "sft:\n  source: problems  # or a prompt.format that writes what data.sft's prompt column has",
    )

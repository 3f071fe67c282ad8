"""Reading the answers of two classic benchmarks from free text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SENTENCE = re.compile(r"\banswer\s+is\s*:?\s*[(*]*([A-D])\b", re.IGNORECASE)
_ALONE = re.compile(r"\s*[(*]*([A-D])[)*.:]*(?:\s|$)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def parse_mmlu_response(mmlu_example: Mapping[str, Any], model_output: str) -> str | None:
    """Return the option letter that a response chooses, ``"A"`` … ``"D"``, or None.

    Read are "the answer is B", a response that starts with a letter ("B.", "(B) …"), and a response that is one of
    ``mmlu_example["options"]`` word by word. Two different letters are no choice.
    """
    letters = {letter.upper() for letter in _SENTENCE.findall(model_output)}
    if len(letters) == 1:
        return letters.pop()
    if letters:
        return None
    alone = _ALONE.match(model_output)
    if alone and (alone[1] != "A" or not re.match(r"\s*A\s+[a-z]", model_output)):  # not the article
        return alone[1]
    options = [str(option).strip().lower() for option in mmlu_example.get("options", ())]
    said = model_output.strip().rstrip(".").lower()
    return "ABCD"[options.index(said)] if said in options[:4] else None


def parse_gsm8k_response(model_output: str) -> str | None:
    """Return the last number of a response, without commas, or None."""
    numbers = _NUMBER.findall(model_output)
    return numbers[-1].replace(",", "") if numbers else None

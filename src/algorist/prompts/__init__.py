"""Prompt formats: one file each; a format renders problems and demonstrations and parses completions."""

from algorist.prompts import (  # noqa: F401
    few_shot,
    gsm8k_cot_zeroshot,
    question_only,
    r1_zero,
    reasoning_answer,
    think_answer,
    working_solution,
)
from algorist.prompts.base import FORMATS, PromptFormat, Tags, add_format, get_format, missing_tags

__all__ = ["FORMATS", "PromptFormat", "Tags", "add_format", "get_format", "missing_tags"]

"""Prompt formats: a format renders problems and demonstrations and parses completions; the built-in ones are in ``formats``."""

from algorist.prompts.base import FORMATS, PromptFormat, Tags, add_format, get_format, missing_tags

__all__ = ["FORMATS", "PromptFormat", "Tags", "add_format", "get_format", "missing_tags"]

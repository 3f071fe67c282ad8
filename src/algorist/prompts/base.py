"""What a prompt format is: it renders problems and demonstrations, and it reads completions back.

One object per format, in one file per format. The parser is strict about what counts: the answer is read from the
answer block after the reasoning, never from inside it; two different answers are flagged, not chosen between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from algorist.errors import ConfigError, nearest
from algorist.registry import Registry
from algorist.types import Message, Parsed


@dataclass(frozen=True, slots=True)
class Tags:
    """The four tags of a format; empty strings where the format has none."""

    reasoning_open: str = ""
    reasoning_close: str = ""
    answer_open: str = ""
    answer_close: str = ""

    def all(self) -> tuple[str, ...]:
        """Return the non-empty tags in their order of appearance."""
        tags = (self.reasoning_open, self.reasoning_close, self.answer_open, self.answer_close)
        return tuple(tag for tag in tags if tag)


@dataclass(frozen=True)
class PromptFormat:
    """A prompt format with reasoning and answer blocks.

    ``raw_template`` None means chat: the prompt is a system and a user message. A string means raw text, where
    ``{question}`` is replaced. ``prefilled_start`` says that the prompt already ends with the opening reasoning tag,
    so that a completion starts inside the reasoning. ``block_join`` stands between the two blocks, ``inner`` between
    a tag and its content, in what we render; parsing accepts any whitespace there.
    """

    name: str
    tags: Tags
    system_prompt: str = ""
    raw_template: str | None = None
    prefilled_start: bool = False
    block_join: str = "\n"
    inner: str = "\n"

    @property
    def is_chat(self) -> bool:
        """True when the prompt is a list of chat messages."""
        return self.raw_template is None

    def render(self, question: str) -> list[Message] | str:
        """Return the prompt of a question: chat messages, or the raw text of a raw format."""
        if self.raw_template is not None:
            return self.raw_template.replace("{question}", question.strip())
        messages: list[Message] = []
        if self.system_prompt:
            messages.append({"role": "system", "content": self.system_prompt})
        messages.append({"role": "user", "content": question.strip()})
        return messages

    def prefill(self) -> str:
        """Return the text that the prompt appends after the assistant header (chat formats only)."""
        return self.tags.reasoning_open + self.inner if self.prefilled_start and self.is_chat else ""

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the completion that shows ``reasoning`` and ``answer`` in this format (an SFT target)."""
        t, i = self.tags, self.inner
        start = "" if self.prefilled_start else t.reasoning_open + i
        return (
            f"{start}{reasoning.strip()}{i}{t.reasoning_close}{self.block_join}"
            f"{t.answer_open}{i}{answer.strip()}{i}{t.answer_close}"
        )

    def parse(self, text: str) -> Parsed:
        """Read a completion.

        The answer is the content of the answer block behind the last closing reasoning tag. Flags:
        ``answer_in_reasoning`` (an answer block inside the reasoning; ignored), ``several_answers`` (blocks with
        different contents behind it: ambiguous), ``unclosed_answer``, ``repeated_tag``, ``text_before``,
        ``text_after``, ``no_reasoning``. ``well_formed`` is true when each tag stands exactly once, in order, with
        nothing but whitespace around the blocks.
        """
        t = self.tags
        body = text
        if self.prefilled_start and not body.lstrip().startswith(t.reasoning_open):
            body = t.reasoning_open + body
        flags: list[str] = []
        head, closed, tail = body.rpartition(t.reasoning_close)
        if not closed:
            head, tail = "", body
        reasoning = self._reasoning(head) if closed else None
        if not reasoning:
            flags.append("no_reasoning")
        if closed and t.answer_open in head:
            flags.append("answer_in_reasoning")
        blocks = re.findall(f"{re.escape(t.answer_open)}(.*?){re.escape(t.answer_close)}", tail, re.DOTALL)
        answers = [b.rpartition(t.answer_open)[2].strip() for b in blocks]
        answer = answers[-1] if answers else None
        if len(set(answers)) > 1:
            flags.append("several_answers")
        if answer is None and t.answer_open in tail:
            flags.append("unclosed_answer")
        if any(body.count(tag) > 1 for tag in t.all()):
            flags.append("repeated_tag")
        if not body.lstrip().startswith(t.reasoning_open):
            flags.append("text_before")
        if answers and tail.rpartition(t.answer_close)[2].strip():
            flags.append("text_after")
        return Parsed(reasoning or None, answer or None, self._well_formed(body), tuple(flags))

    def _reasoning(self, head: str) -> str:
        before, opened, inside = head.partition(self.tags.reasoning_open)
        return (inside if opened else before).strip()

    def _well_formed(self, body: str) -> bool:
        t = self.tags
        if any(body.count(tag) != 1 for tag in t.all()):
            return False
        blocks = (
            f"\\s*{re.escape(t.reasoning_open)}(.+?){re.escape(t.reasoning_close)}\\s*"
            f"{re.escape(t.answer_open)}(.+?){re.escape(t.answer_close)}\\s*"
        )
        match = re.fullmatch(blocks, body, re.DOTALL)
        return bool(match and match[1].strip() and match[2].strip())


FORMATS: Registry[PromptFormat] = Registry("prompt format")


def add_format(prompt_format: PromptFormat) -> PromptFormat:
    """Register a prompt format under its own name and return it."""
    return FORMATS.register(prompt_format.name)(prompt_format)


def get_format(
    name: str, *, system_prompt: str | None = None, tags: Mapping[str, str] | None = None
) -> PromptFormat:
    """Return the format called ``name``, with another system prompt or other tags if given.

    Raises:
        ConfigError: Unknown format or tag name, or a repeated tag.
    """
    found = FORMATS.get(name)
    if tags:
        found = _with_tags(found, tags)
    if system_prompt is not None:
        found = replace(found, system_prompt=system_prompt.strip())
    return found


def missing_tags(prompt_format: PromptFormat) -> list[str]:
    """Return the tags that the prompt never mentions: a model cannot guess them before SFT."""
    text = prompt_format.system_prompt + (prompt_format.raw_template or "")
    return [tag for tag in prompt_format.tags.all() if tag not in text]


def _with_tags(found: PromptFormat, tags: Mapping[str, str]) -> PromptFormat:
    valid = ("reasoning_open", "reasoning_close", "answer_open", "answer_close")
    for key in tags:
        if key not in valid:
            raise ConfigError(
                f"prompt.tags has the key '{key}'.{nearest(key, valid)} Expected: {', '.join(valid)}"
            )
    new = replace(found.tags, **dict(tags))
    if len(set(new.all())) != len(new.all()):
        raise ConfigError(
            f"prompt.tags repeats a tag: {new.all()}; each of the four must differ from the others"
        )
    system = found.system_prompt
    for field in valid:
        old = getattr(found.tags, field)
        if old:
            system = system.replace(old, getattr(new, field))
    return replace(found, tags=new, system_prompt=system)

"""What a prompt format is: it renders problems and demonstrations, and it reads completions back.

One object per format, in one file per format. The parser is strict about what counts: the answer is read from the
answer block after the reasoning, never from inside it; two different answers are flagged, not chosen between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
    a tag and its content, in what we render; parsing accepts any whitespace there. ``template_kwargs`` are switches of
    the chat template (``enable_thinking``); ``system_role`` user puts the system prompt before the question.
    """

    name: str
    tags: Tags
    system_prompt: str = ""
    raw_template: str | None = None
    prefilled_start: bool = False
    block_join: str = "\n"
    inner: str = "\n"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    system_role: Literal["system", "user"] = "system"

    @property
    def is_chat(self) -> bool:
        """True when the prompt is a list of chat messages."""
        return self.raw_template is None

    def render(self, question: str) -> list[Message] | str:
        """Return the prompt of a question: chat messages, or the raw text of a raw format."""
        if self.raw_template is not None:
            return self.raw_template.replace("{question}", question.strip())
        asked: Message = {"role": "user", "content": question.strip()}
        if not self.system_prompt:
            return [asked]
        if self.system_role == "user":
            return [{"role": "user", "content": f"{self.system_prompt}\n\n{question.strip()}"}]
        return [{"role": "system", "content": self.system_prompt}, asked]

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

        The answer is the content of the answer block after the last closing reasoning tag; reasoning that is never closed
        has none. Flags: ``answer_in_reasoning`` (an answer block inside the reasoning; ignored), ``unfinished_reasoning``,
        ``several_answers`` (blocks with different contents after it: ambiguous), ``unclosed_answer``, ``repeated_tag``,
        ``text_before``, ``text_after``, ``no_reasoning``. ``well_formed`` is true when each tag stands exactly once, in
        order, with nothing but whitespace around the blocks. Linear in the text.
        """
        t = self.tags
        body = text
        if self.prefilled_start and not body.lstrip().startswith(t.reasoning_open):
            body = t.reasoning_open + body
        head, closed, tail = body.rpartition(t.reasoning_close)
        if not closed:
            head, tail = "", body
        tail, reopened, unfinished = tail.partition(t.reasoning_open)
        if reopened and not closed:
            head = unfinished
        reasoning = self._reasoning(head) if closed else None
        answers = self._answers(tail)
        answer = answers[-1] if answers else None
        flags = {
            "no_reasoning": not reasoning,
            "unfinished_reasoning": bool(reopened),
            "answer_in_reasoning": t.answer_open in head or t.answer_open in unfinished,
            "several_answers": len(set(answers)) > 1,
            "unclosed_answer": answer is None and t.answer_open in tail,
            "repeated_tag": any(body.count(tag) > 1 for tag in t.all()),
            "text_before": not body.lstrip().startswith(t.reasoning_open),
            "text_after": bool(answers and tail.rpartition(t.answer_close)[2].strip()),
        }
        raised = tuple(name for name, is_raised in flags.items() if is_raised)
        return Parsed(reasoning or None, answer or None, self._well_formed(body), raised)

    def _answers(self, tail: str) -> list[str]:
        """Return the contents of the closed answer blocks."""
        t, found, place = self.tags, [], 0
        while (start := tail.find(t.answer_open, place)) >= 0:
            end = tail.find(t.answer_close, start)
            if end < 0:
                break
            found.append(tail[start:end].rpartition(t.answer_open)[2].strip())
            place = end + len(t.answer_close)
        return found

    def _reasoning(self, head: str) -> str:
        before, opened, inside = head.partition(self.tags.reasoning_open)
        return (inside if opened else before).strip()

    def _well_formed(self, body: str) -> bool:
        """Say whether each tag stands once, in order, around something, and nothing stands around them."""
        if any(body.count(tag) != 1 for tag in self.tags.all()):
            return False
        parts = []
        for tag in self.tags.all():
            before, _, body = body.partition(tag)
            parts.append(bool(before.strip()))
        return parts == [False, True, False, True] and not body.strip()


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
    for name in valid:
        old = getattr(found.tags, name)
        if old:
            system = system.replace(old, getattr(new, name))
    return replace(found, tags=new, system_prompt=system)

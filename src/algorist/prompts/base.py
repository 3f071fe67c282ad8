"""Prompt formats: they render problems and demonstrations, and read completions back.

One object per format. The parser is strict about what counts: the answer is read from the
answer block after the reasoning, never from inside it; two different answers are flagged, not chosen between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import NoneType
from typing import Any, Literal, Protocol

from algorist.errors import ConfigError, check_known
from algorist.types import Message, Parsed, Problem, Rollout
from algorist_grader.extract import decided
from algorist_grader.markers import after_thinking, answer_blocks, opened_tag
from algorist_grader.registry import Registry

log = logging.getLogger("algorist.prompts.base")


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


_TAGS = tuple(Tags.__dataclass_fields__)


class TurnSource(Protocol):
    """Source of replies inside a model's completions: tools, an environment. It travels with the model, like its prompt format."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a model writes around its calls, besides the tags."""

    def open(
        self, problems: Sequence[Problem], tokenizer: Any, prompt_format: PromptFormat, stops: Sequence[str]
    ) -> Any:
        """Return the ``rollouts.base.Turns`` of one request: the problem of each row, and what ends a row."""

    def worked(self, solution: str) -> str:
        """Return a worked solution with its calls and their replies written out."""

    def replies(self, completion: str) -> list[tuple[int, int]] | None:
        """Return the spans (characters) of a demonstration that the model is not to imitate: the replies; None where its text has no
        marks around them, which are special tokens."""

    def recorded(self) -> dict[str, Any]:
        """Return its settings as plain data."""

    def for_problem(self, prompt_format: PromptFormat, problem: Problem) -> PromptFormat:
        """Return the prompt format as it asks a problem: what an environment says first."""

    def instructed(self, prompt_format: PromptFormat) -> PromptFormat:
        """Return a prompt format with it, and with the instructions that the model needs for it."""

    def check(self) -> None:
        """Try it once; raises an AlgoristError where it cannot run."""

    def unanswered(self) -> str:
        """Explain that a server answers no calls, and what to do."""

    def card(self) -> str:
        """Describe it for the model card, as Markdown."""


@dataclass(frozen=True)
class TurnSources:
    """A kind of turn sources.

    Attributes:
        of_recipe: Makes the source that a recipe asks for; None where it asks for none.
        of_settings: Makes a source from its settings, whose code is run only where they are trusted (the second argument).
    """

    of_recipe: Callable[[Any], TurnSource | None]
    of_settings: Callable[[Mapping[str, Any], bool], TurnSource]


TURN_SOURCES: Registry[TurnSources] = Registry("turn source")
"""By the key ``kind`` of their settings."""


def turn_source(settings: Mapping[str, Any], *, trusted: bool) -> TurnSource:
    """Return the source of settings that ``TurnSource.recorded`` gave, or a user.

    Raises:
        ConfigError: No extension knows their kind, or it refuses them.
    """
    import algorist.config.schema  # noqa: F401  (finds the extensions, which register theirs)

    return TURN_SOURCES.get(str(settings.get("kind"))).of_settings(settings, trusted)


@dataclass(frozen=True)
class PromptFormat:
    """A prompt format with reasoning and answer blocks.

    ``raw_template`` None means chat: the prompt is a system and a user message. A string means raw text, where
    ``{question}`` is replaced. ``message`` is the text of the user's message around ``{question}``; empty: the question alone. ``prefilled_start`` says that the prompt already ends with the opening reasoning tag,
    so that a completion starts inside the reasoning. ``block_join`` comes between the two blocks, ``inner`` between
    a tag and its content, in what we render; parsing accepts any whitespace there. ``template_kwargs`` are switches of
    the chat template (``enable_thinking``); ``system_role`` user puts the system prompt before the question. ``turns`` replies
    inside completions.
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
    turns: TurnSource | None = field(default=None, hash=False)
    message: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a model writes around its answer and its calls: the tags, and those of ``turns``."""
        return (*self.tags.all(), *(self.turns.markers if self.turns else ()))

    def __post_init__(self) -> None:
        """Refuse tags that completions cannot be read by: an empty one is everywhere.

        Raises:
            ConfigError: This class reads tags, and they are not four different texts.
        """
        tags = {tag.strip() for tag in self.tags.all()}
        if type(self).parse is PromptFormat.parse and len(tags - {""}) < len(_TAGS):
            raise ConfigError(
                f"prompt format {self.name} has the tags {asdict(self.tags)}; expected four texts that differ and are not blank, such as "
                "prompt.tags={answer_open: <answer>, answer_close: </answer>}"
            )

    @property
    def is_chat(self) -> bool:
        """True when the prompt is a list of chat messages."""
        return self.raw_template is None

    def render(self, question: str) -> list[Message] | str:
        """Return the prompt of a question: chat messages, or the raw text of a raw format."""
        if self.raw_template is not None:
            return self.raw_template.replace("{question}", question.strip())
        content = self.message.replace("{question}", question.strip()) or question.strip()
        last: Message = {"role": "user", "content": content}
        if not self.system_prompt:
            return [last]
        if self.system_role == "user":
            return [{"role": "user", "content": f"{self.system_prompt}\n\n{content}"}]
        return [{"role": "system", "content": self.system_prompt}, last]

    def of(self, problem: Problem) -> PromptFormat:
        """Return the format as it asks a problem; only ``turns`` may ask one in another way."""
        return self.turns.for_problem(self, problem) if self.turns else self

    def prefill(self) -> str:
        """Return the text that the prompt appends after the assistant header (chat formats only)."""
        return self.tags.reasoning_open + self.inner if self.prefilled_start and self.is_chat else ""

    def demonstrate(self, reasoning: str, answer: str) -> str:
        """Return the completion that shows ``reasoning`` and ``answer`` in this format (an SFT target)."""
        t, i = self.tags, self.inner
        reasoning = self.turns.worked(reasoning) if self.turns else reasoning
        start = "" if self.prefilled_start else t.reasoning_open + i
        return (
            f"{start}{reasoning.strip()}{i}{t.reasoning_close}{self.block_join}"
            f"{t.answer_open}{i}{answer.strip()}{i}{t.answer_close}"
        )

    def read(self, text: str, prompt: str) -> Parsed:
        """Read a completion of a rendered prompt: thinking that its chat template opened begins there."""
        own, opened = self.tags.reasoning_open, opened_tag(prompt)
        if own and prompt.rstrip().endswith(own):
            return replace(self, prefilled_start=True).parse(text)
        begun = not opened or text.lstrip().startswith(opened)
        return self.parse(text if begun else opened + text)

    def parse(self, text: str) -> Parsed:
        """Read a completion.

        The answer is the content of the answer block after the last closing reasoning tag; reasoning that is never closed
        has none. Flags: ``answer_in_reasoning`` (an answer block inside the reasoning; ignored), ``unfinished_reasoning``,
        ``several_answers`` (blocks with different contents after it: ambiguous), ``unclosed_reasoning`` (before an answer block),
        ``unopened_answer``, ``unclosed_answer``, ``repeated_tag``, ``text_before``, ``text_after``, ``no_reasoning``.
        ``well_formed`` is true when each tag occurs exactly once, in order, with nothing but whitespace around the blocks. Linear in the text.
        """
        t = self.tags
        body = text
        said = tuple(tag for tag in (t.reasoning_open, t.answer_open) if tag)
        if self.prefilled_start and not body.lstrip().startswith(said):  # an answer at once has no reasoning
            body = t.reasoning_open + body
        head, closed, tail = body.rpartition(t.reasoning_close)
        if not closed:
            head, tail = "", body
        tail, reopened, unfinished = tail.partition(t.reasoning_open)
        if reopened and not closed:
            head = unfinished
        if (after := after_thinking(tail)) is None:  # in the tags of another family
            unfinished, reopened = unfinished + tail, t.reasoning_open
        tail = after or ""
        last_block = decided(answer_blocks(tail, t.answer_open, t.answer_close), t.answer_open)
        reasoning, answer = self._reasoning(head) if closed else None, last_block.answer
        flags = {
            "no_reasoning": not reasoning,
            "unfinished_reasoning": bool(reopened),
            "answer_in_reasoning": t.answer_open in head or t.answer_open in unfinished,
            "several_answers": last_block.ambiguous,
            "unclosed_reasoning": t.answer_close in unfinished.partition(t.answer_open)[2],
            "unopened_answer": bool(closed) and t.answer_open not in body and t.answer_close in tail,
            "unclosed_answer": t.answer_open in tail and t.answer_close not in tail,
            "repeated_tag": any(body.count(tag) > 1 for tag in t.all()),
            "text_before": not body.lstrip().startswith(t.reasoning_open),
            "text_after": bool(answer and tail.rpartition(t.answer_close)[2].strip()),
        }
        raised = tuple(name for name, is_raised in flags.items() if is_raised)
        return Parsed(reasoning or None, answer or None, self._well_formed(body), raised)

    def _reasoning(self, head: str) -> str:
        before, opened, inside = head.partition(self.tags.reasoning_open)
        return (inside if opened else before).strip()

    def _well_formed(self, body: str) -> bool:
        """Return whether each tag occurs once, in order, around something, with nothing outside them."""
        if any(body.count(tag) != 1 for tag in self.tags.all()):
            return False
        parts = []
        for tag in self.tags.all():
            before, _, body = body.partition(tag)
            parts.append(bool(before.strip()))
        return parts == [False, True, False, True] and not body.strip()


FORMATS: Registry[PromptFormat] = Registry("prompt format", ["algorist.prompts.formats"])


def add_format(prompt_format: PromptFormat) -> PromptFormat:
    """Register a prompt format under its own name and return it; a class of a user's is tried on one problem.

    Raises:
        ConfigError: The name is there already, or a method returns something else.
    """
    if type(prompt_format).__module__.partition(".")[0] != "algorist":
        shown = prompt_format.demonstrate("1 + 1 = 2", "2")
        made: dict[str, tuple[Any, Any]] = {
            "demonstrate": (shown, str),
            "render": (prompt_format.render("1 + 1?"), (str, list)),
        }
        parsed = prompt_format.parse(str(shown))
        made |= {
            "parse": (parsed, Parsed),
            "parse's answer": (getattr(parsed, "answer", None), (str, NoneType)),
        }
        for method, (value, kind) in made.items():
            if not isinstance(value, kind):
                raise ConfigError(
                    f"prompt format '{prompt_format.name}': {method} is {value!r:.100}; expected {kind}"
                )
    return FORMATS.register(prompt_format.name)(prompt_format)


def get_format(
    name: str, *, system_prompt: str | None = None, tags: Mapping[str, str] | None = None
) -> PromptFormat:
    """Return the format called ``name``, with another system prompt or other tags if given.

    The ``system_prompt`` of a raw format is its whole text, with ``{question}``.

    Raises:
        ConfigError: Unknown format or tag name, a repeated tag, tags of a format that has none, or a raw text without its
            question or its opening tag.
    """
    form = _with_tags(FORMATS.get(name), tags or {})
    if not system_prompt or form.is_chat:
        return form if system_prompt is None else replace(form, system_prompt=system_prompt.strip())
    text, opening = system_prompt.strip(), form.tags.reasoning_open if form.prefilled_start else ""
    if "{question}" not in text or not text.endswith(opening):
        ending = f" that ends with {opening}" if opening else ""
        raise ConfigError(
            f"prompt.system_prompt is set, but the prompt format {name} is raw text without a system message; give the whole prompt "
            f"with {{question}} where the question goes{ending}, or leave it out"
        )
    return replace(form, raw_template=text)


def missing_tags(prompt_format: PromptFormat) -> list[str]:
    """Return the tags that the prompt never mentions: a model cannot guess them before SFT."""
    text = prompt_format.system_prompt + (prompt_format.raw_template or "")
    return [tag for tag in prompt_format.tags.all() if tag not in text]


def warn_of_missing_tags(prompt_format: PromptFormat) -> None:
    """Warn of tags that the system prompt never shows."""
    if missing := missing_tags(prompt_format):
        tags = ", ".join(missing)
        log.warning("the system prompt never shows %s; without SFT the model cannot know these tags", tags)


def _with_tags(form: PromptFormat, tags: Mapping[str, str]) -> PromptFormat:
    for key in tags:
        check_known(key, _TAGS, f"prompt.tags has the key '{key}'")
    if not form.tags.all() and any(tags.values()):
        raise ConfigError(f"prompt format {form.name} has no tags; leave them out: prompt.tags=null")
    new = replace(form.tags, **dict(tags))
    system = form.system_prompt
    for name in _TAGS:
        if old := getattr(form.tags, name):
            system = system.replace(old, getattr(new, name))
    return replace(form, tags=new, system_prompt=system)


def answer_row(question: str, rollout: Rollout) -> dict[str, Any]:
    """Return question, completion, reasoning, answer, well_formed and truncated."""
    return {
        "question": question,
        "completion": rollout.text,
        "reasoning": rollout.parsed.reasoning,
        "answer": rollout.parsed.answer,
        "well_formed": rollout.parsed.well_formed,
        "truncated": rollout.truncated,
        **({"turns": [asdict(turn) for turn in rollout.turns]} if rollout.turns else {}),
    }

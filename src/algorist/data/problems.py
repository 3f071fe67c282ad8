"""The problems of a run: what its recipe names, which of them fit, and what a tokenizer and a model need to know of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from algorist.config.schema import DatasetSection, Recipe
from algorist.data.files import HubAwayError, hub_is_away
from algorist.data.golds import check_golds
from algorist.data.load import load_problems, with_solutions
from algorist.errors import ConfigError, DataError
from algorist.prompts import PromptFormat
from algorist.prompts.chat import encode_prompt, render_prompt
from algorist.store.run_log import kept_records
from algorist.store.safe_text import one_line
from algorist.store.stages import STAGES
from algorist.types import Problem


@dataclass
class Problems:
    """The problems of a run, loaded before its folder is made: a wrong path or column leaves no folder."""

    train: list[Problem]
    sft: list[Problem]
    held_out: list[Problem]
    notes: list[logging.LogRecord] = field(default_factory=list)
    """Records logged while they were loaded, for the run's log."""

    @classmethod
    def load(cls, recipe: Recipe, stages: Sequence[str] = STAGES) -> Problems:
        """Load the recipe's problems; demonstrations where SFT is to be done, or a tokenizer made from them.

        Raises:
            DataError: A dataset, a column or a row is missing or unreadable.
        """
        train, held_out, sft = list[Problem](), list[Problem](), list[Problem]()
        away = _model_away(recipe.model.name)
        with kept_records() as notes:
            with _named("train", away):
                train = load_problems(recipe.data.train)
            with _named("eval", away):
                held_out = load_problems(recipe.data.eval) if recipe.eval.enabled else []
            if (recipe.sft.enabled and "sft" in stages) or recipe.model.name == "tiny":
                section = recipe.data.sft or recipe.data.train  # which may have inherited the filter
                unrated = section.model_copy(update={"pass_rate": None})
                with _named("sft" if recipe.data.sft else "train", away):
                    sft = load_problems(unrated) if recipe.data.sft or section.pass_rate else train
                if recipe.sft.enabled and not away:
                    solved = with_solutions(sft, section.name)
                    sft = solved if recipe.sft.source == "problems" else sft
        if away:
            raise HubAwayError(away[0].why, *dict.fromkeys(lack for error in away for lack in error.lacking))
        return cls(train, sft, held_out, notes)


def _model_away(name: str) -> list[HubAwayError]:
    """Return the error of a model on a hub that is not reached, unless its cache has it."""
    if name == "tiny" or Path(name).exists() or not (why := hub_is_away()) or name.count("/") != 1:
        return []
    from huggingface_hub import try_to_load_from_cache

    return (
        []
        if try_to_load_from_cache(name, "config.json")
        else [HubAwayError(why, f"model.name=FOLDER (now {name})")]
    )


@contextmanager
def _named(part: str, away: list[HubAwayError]) -> Iterator[None]:
    """Let a message of the data name its keys in this section: ``data.….path`` becomes ``data.sft.path``.

    ``away`` collects what an unreached hub lacks.
    """
    try:
        yield
    except HubAwayError as error:
        away.append(
            HubAwayError(error.why, *(lack.replace("data.….", f"data.{part}.") for lack in error.lacking))
        )
    except DataError as error:
        if "data.…." not in str(error):
            raise
        raise DataError(str(error).replace("data.….", f"data.{part}.")) from None


def tokenizer_texts(problems: Iterable[Problem], prompt_format: PromptFormat) -> list[str]:
    """Return the texts that the tokenizer of a model from scratch is trained on: questions and demonstrations."""
    return [text for p in problems for text in (p.question, prompt_format.demonstrate(p.solution, p.answer))]


def fitting_problems(
    section: DatasetSection, problems: list[Problem], prompt_format: PromptFormat, tokenizer: Any
) -> list[Problem]:
    """Return the problems whose prompts pass the section's length filters, which come before its ``limit``."""
    if section.max_prompt_percentile is None and section.max_prompt_tokens is None:
        return problems
    return load_problems(section, prompt_tokens=_length_in(prompt_format, tokenizer))


def fitting_demonstrations(
    recipe: Recipe, problems: list[Problem], prompt_format: PromptFormat, tokenizer: Any
) -> list[Problem]:
    """Return the demonstrations whose prompts pass the length filters of their section, as ``fitting_problems`` does."""
    section = (recipe.data.sft or recipe.data.train).model_copy(update={"pass_rate": None})
    fitting = fitting_problems(section, problems, prompt_format, tokenizer)
    return with_solutions(fitting, section.name) if recipe.sft.source == "problems" else fitting


def _length_in(prompt_format: PromptFormat, tokenizer: Any) -> Callable[[Problem], int]:
    return lambda problem: len(encode_prompt(prompt_format.of(problem), tokenizer, problem.question))


def prompts_beyond(
    tokens: int, problems: Sequence[Problem], prompt_format: PromptFormat, tokenizer: Any
) -> list[tuple[Problem, int]]:
    """Return the problems whose prompts have more tokens, with their number; a question of fewer bytes is not encoded."""
    length = _length_in(prompt_format, tokenizer)
    around = length(problems[0]) if problems else 0
    long = [p for p in problems if len(p.question.encode()) + around > tokens]
    return [(p, count) for p in long if (count := length(p)) > tokens]


def refuse_beyond_context(
    part: str, problems: Sequence[Problem], prompt_format: PromptFormat, tokenizer: Any, context: int | None
) -> None:
    """Refuse prompts that fill the model's context, so that nothing could be sampled; ``part`` is their data section.

    Raises:
        ConfigError: One sentence with their number, the longest, and the key that leaves them out.
    """
    if context and (beyond := prompts_beyond(context - 1, problems, prompt_format, tokenizer)):
        problem, count = max(beyond, key=lambda pair: pair[1])
        raise ConfigError(
            f"{len(beyond)} of {len(problems)} prompts of data.{part} leave no room for a completion in the model's context of {context} "
            f"tokens; the longest has {count} ({problem.id}). Leave them out: data.{part}.max_prompt_tokens={context - 1}, or less"
        )


def unreadable_golds(training: list[Problem], held_out: list[Problem]) -> list[str]:
    """Return the lines of each part that has gold answers which the grader cannot read, or questions with two."""
    parts = (("training", training), ("held-out", held_out))
    return [line for kind, part in parts for line in check_golds(part).warnings(kind, len(part))]


def trained_otherwise(tokenizer: Any, form: PromptFormat, problems: Sequence[Problem]) -> str:
    """Compare, token by token, the prompts that SFT trains on as written with those that are sampled with, of up to 200 rows."""
    differ, problems = [], problems[:200]
    for problem in problems:
        text = str(problem.extra.get("prompt", ""))
        prompt = render_prompt(form.of(problem), tokenizer, problem.question)
        trained, sampled = (tokenizer(one)["input_ids"] for one in (text, prompt))
        if trained != sampled:
            differ.append((trained, sampled))
    if not differ:
        return ""
    trained, sampled = differ[0]
    place = next(
        (i for i, (a, b) in enumerate(zip(trained, sampled)) if a != b), min(len(trained), len(sampled))
    )
    shown = [
        one_line(str(tokenizer.decode(ids[place : place + 8])), 60) or "its end" for ids in (trained, sampled)
    ]
    return (
        f"{len(differ)} of {len(problems)} prompts of SFT differ from those that are sampled with, the first at token "
        f"{place}: trained on '{shown[0]}', sampled with '{shown[1]}'"
    )


def longest_sequence(
    recipe: Recipe, problems: Problems, prompt_format: PromptFormat, tokenizer: Any
) -> int | None:
    """Return the most tokens of a prompt with its completion in a run, or None when ``sft.max_length`` sets no bound."""

    def prompt(section: DatasetSection, asking: list[Problem]) -> int:
        sizes = (len(encode_prompt(prompt_format.of(p), tokenizer, p.question)) for p in asking)
        return min(max(sizes, default=0), section.max_prompt_tokens or 1 << 62)

    completion, lengths = recipe.grpo.max_completion_tokens, [0]
    if recipe.sft.enabled:
        if recipe.sft.max_length is None:
            return None
        lengths.append(recipe.sft.max_length)
    if recipe.grpo.enabled:
        lengths.append(prompt(recipe.data.train, problems.train) + completion)
    if recipe.eval.enabled:
        longest = recipe.eval.max_completion_tokens or completion
        lengths.append(prompt(recipe.data.eval, problems.held_out) + longest)
    return max(lengths)

"""The form in which TRL calls rewards, lists and columns by name: from it to rollouts and problems, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from algorist.errors import ConfigError
from algorist.prompts import PromptFormat
from algorist.types import Group, Parsed, Problem, Rollout
from algorist_grader import grade_completion

Decode = Callable[[list[int]], str]
GOLDS = ("reference_answer", "ground_truth", "answer", "solution")
"""Columns of gold answers; the first that a row has counts: where ``reference_answer`` is plain, ``answer`` may be worked."""
_NOT_READ = Parsed(None, None, False)


def columns_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the rollouts of groups as TRL's lists: prompts, completions, completion_ids, and each column of the problems."""
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    problems = [group.problem.columns() for group, _ in rows]
    return {
        **{name: [p.get(name) for p in problems] for name in dict.fromkeys(n for p in problems for n in p)},
        "prompts": [group.prompt for group, _ in rows],
        "completions": [rollout.text for _, rollout in rows],
        "completion_ids": [rollout.sampled_ids for _, rollout in rows],
    }


def rollouts_of(
    reward: Any, completions: Sequence[Any], columns: Mapping[str, Any]
) -> list[tuple[Rollout, list[Problem]]]:
    """Return TRL's lists as rollouts, each with its problem, once for each of several gold answers.

    Raises:
        ConfigError: The gold answers or the token ids are missing, and the reward asks for them.
    """
    texts = [text_of(completion, reward.decode) for completion in completions]
    per_row = {n: c for n, c in columns.items() if isinstance(c, (list, tuple)) and len(c) == len(texts)}
    rows = [{name: column[place] for name, column in per_row.items()} for place in range(len(texts))]
    if "completion_ids" in reward.context and "completion_ids" not in columns:
        raise ConfigError(
            f"reward '{reward.name}' counts tokens and needs completion_ids; the trainer sends them, elsewhere write "
            "completion_ids=[[…], …]"
        )
    golds = _golds(reward, columns, len(texts))
    made = []
    for text, row, alternatives in zip(texts, rows, golds, strict=True):
        problems = [_problem(row, gold) for gold in alternatives]
        parsed = _read(reward.form, text) if reward.context & {"parsed", "rollout"} else _NOT_READ
        grade = None
        if "rollout" in reward.context and alternatives[0].strip():
            known = problems[0].columns()
            grade = grade_completion(
                text, alternatives[0], parsed=parsed, matcher=reward.matcher, problem=known
            )
        made.append(
            (Rollout(list(row.get("completion_ids", ())), text, None, False, parsed, grade), problems)
        )
    return made


@lru_cache(maxsize=4096)
def _read(form: PromptFormat, text: str) -> Parsed:
    return form.parse(text)


def _golds(reward: Any, columns: Mapping[str, Any], count: int) -> list[list[str]]:
    name = next((name for name in GOLDS if columns.get(name) is not None), None)
    if name is None:
        if reward.needs_gold:
            raise ConfigError(
                f"reward '{reward.name}' needs the gold answers and found none of the columns {', '.join(GOLDS)}; there are: "
                f"{', '.join(columns) or 'none'}. Rename the column of your data to 'answer'"
            )
        return [[""]] * count
    column = _plain(columns[name])
    golds = [_plain(gold) for gold in column] if isinstance(column, (list, tuple)) else [column] * count
    if len(golds) != count:
        raise ConfigError(f"column '{name}' has {len(golds)} gold answers for {count} completions")
    return [
        [_text(g) for g in (gold or [""])] if isinstance(gold, (list, tuple)) else [_text(gold)]
        for gold in golds
    ]


def _text(gold: Any) -> str:
    return "" if gold is None else str(gold)


def _plain(value: Any) -> Any:
    """Return a tensor or an array as numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _problem(row: Mapping[str, Any], gold: str) -> Problem:
    own = {name: str(row.get(name) or "") for name in ("question", "solution", "subject", "level", "checker")}
    extra = {name: value for name, value in row.items() if name not in own and name != "answer"}
    return Problem(id=str(row.get("problem_id", "")), answer=gold, extra=extra, **own)


def text_of(completion: Any, decode: Decode | None = None) -> str:
    """Return the text of a completion in any form that TRL sends.

    Args:
        completion: Text, a message, a list of messages (the assistant's last one counts) or of texts (the first one does),
            or token ids as a list or a tensor. None is the empty text.
        decode: Turns token ids into text, for example ``tokenizer.decode``.

    Raises:
        ConfigError: Token ids without ``decode``.
    """
    if completion is None:
        return ""
    if isinstance(completion, dict):
        content = completion.get("content")
        if isinstance(content, (list, tuple)):  # a message in parts: [{"type": "text", "text": …}, …]
            return "".join(str(p.get("text") or "") if isinstance(p, dict) else str(p) for p in content)
        return _text(content)
    completion = _plain(completion)
    if isinstance(completion, int):
        completion = [completion]
    if not isinstance(completion, (list, tuple)):
        return str(completion)
    turns = [m for m in completion if isinstance(m, dict) and m.get("role", "assistant") == "assistant"]
    if turns:
        return text_of(turns[-1], decode)
    if not completion or not isinstance(completion[0], int):
        return text_of(completion[0], decode) if completion else ""
    if decode is None:
        raise ConfigError(
            "a completion came as token ids, and the rewards cannot read them; write build_rewards(..., decode=tokenizer.decode)"
        )
    return decode(list(completion))

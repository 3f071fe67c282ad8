"""The form in which TRL calls rewards, lists and columns by name: from it to rollouts and problems, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from algorist.errors import ConfigError
from algorist.prompts import PromptFormat
from algorist.types import Group, Parsed, Problem, Rollout
from algorist_grader import grade_completion, last_boxed
from algorist_grader.markers import hash_answer

Decode = Callable[[list[int]], str]
GOLDS = ("reference_answer", "ground_truth", "answer", "solution")
"""Columns of gold answers; the first that a row has counts: where ``reference_answer`` is plain, ``answer`` may be worked."""
_NOT_READ = Parsed(None, None, False)


def columns_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the rollouts of groups as TRL's lists: prompts, completions, completion_ids, and each column of the problems."""
    rows = [(group, rollout) for group in groups for rollout in group.rollouts]
    problems = [group.problem.columns() for group, _ in rows]
    names = dict.fromkeys(name for problem in problems for name in problem)
    return {
        **with_other_names({name: [p.get(name) for p in problems] for name in names}),
        "prompts": [group.prompt for group, _ in rows],
        "completions": [rollout.text for _, rollout in rows],
        "completion_ids": [rollout.sampled_ids for _, rollout in rows],
    }


def with_other_names(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns also under the names that other systems' rewards have for them, row by row: each row's own value, else its gold."""

    def first(*names: str) -> list[Any] | None:
        held = [columns[name] for name in names if isinstance(columns.get(name), list | tuple)]
        rows = [
            [v for v in values if v is not None and not (isinstance(v, str) and not v)]
            for values in zip(*held)
        ]
        return [next(iter(values), None) for values in rows] if held else None

    names = {name: first(name, *GOLDS) for name in GOLDS}
    names |= {
        "reference_solution": first("reference_solution", "solution", *GOLDS),
        "problem": first("problem", "question"),
    }
    return {**columns, **{name: column for name, column in names.items() if column is not None}}


def as_messages(columns: Mapping[str, Any], form: PromptFormat) -> dict[str, Any]:
    """Return columns with prompts and completions as chat messages, which is how TRL hands over those of a chat dataset."""
    texts = columns["completions"]
    questions, prompts = columns.get("question"), columns.get("prompts") or [""] * len(texts)
    if questions and form.is_chat:
        prompts = [form.render(str(question)) for question in questions]
    return {
        **columns,
        "prompts": [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts],
        "completions": [[{"role": "assistant", "content": c}] if isinstance(c, str) else c for c in texts],
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
        [_gold(g) for g in (gold or [""])] if isinstance(gold, (list, tuple)) else [_gold(gold)]
        for gold in golds
    ]


def _gold(value: Any) -> str:
    """Return a gold answer as text; of a worked solution what it states: after its ``####``, or in its last box."""
    text = _text(value)
    stated = hash_answer(text) if "####" in text else None
    return (last_boxed(text) if stated is None and "\\boxed" in text else stated) or text


def _text(value: Any) -> str:
    return "" if value is None else str(value)


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

"""From a recipe's rewards to callables that TRL accepts; a reward that raises gives its floor and is counted."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from algorist.errors import ConfigError, RewardError, nearest
from algorist.prompts import PromptFormat, get_format
from algorist.rewards.base import REWARDS, Reward
from algorist.rewards.extract import Decode, text_of
from algorist.rewards.user import BOUND, TIMEOUT_S, BatchReward, load_user_reward
from algorist.types import Parsed

log = logging.getLogger("algorist.rewards")
GOLD_COLUMNS = ("answer", "reference_answer", "ground_truth", "solution")
DEFAULT_REWARDS = ("correctness_numeric", "numeric", "tag_fraction")
"""Names of the default rewards; a new one is registered in its theme's file and added here."""

DEFAULT_REWARD_WEIGHTS = [1.0, 0.1, 0.1]
"""Weights of the default rewards, in their order; the greatest total is 1.2."""


@dataclass(frozen=True, slots=True)
class RewardBreakdown:
    """The weighted total of one completion and the raw value of each reward; None where a reward does not apply."""

    total: float
    components: dict[str, float | None] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """What rewards are given besides the completion: the prompt format's reading, the matcher, the decoder."""

    prompt_format: PromptFormat
    matcher: str
    decode: Decode | None
    parse: Callable[[str], Parsed]

    def offers(self) -> dict[str, Any]:
        """Return the part of the context that is the same for every completion."""
        offered: dict[str, Any] = {"matcher": self.matcher, "prefilled": self.prompt_format.prefilled_start}
        if len(self.prompt_format.tags.all()) == 4:
            offered["tags"] = self.prompt_format.tags
        return offered


class TrainerReward:
    """One reward in TRL's call form: lists by keyword in, one float per completion out.

    ``failures`` counts completions for which the reward raised, returned something else than a finite number, or had
    no gold answer; they got ``low``; ``first_failure`` says what the first of them was. ``weight`` is what the recipe says;
    the values here are not weighted.
    """

    def __init__(
        self,
        name: str,
        reward: Reward | BatchReward,
        around: Surroundings,
        weight: float,
        params: dict[str, Any],
    ) -> None:
        self.__name__ = name
        self.reward, self.around, self.weight, self.params = reward, around, weight, params
        self.low, self.high = reward.range_with(params)
        self.failures = 0
        self.first_failure = ""
        self.log_every = 0
        self._calls = 0

    @property
    def needs_trainer(self) -> bool:
        """Whether the reward asks for what only a trainer has (``trainer_state``, ``log_metric``, …)."""
        if not isinstance(self.reward, BatchReward):
            return False
        return bool(set(BOUND) & set(inspect.signature(self.reward.function).parameters))

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        *,
        parsed: Sequence[Parsed] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return one value per completion; columns that the reward does not know are ignored.

        Args:
            prompts: Not used by the rewards here; passed to a user's own.
            completions: In any form that TRL sends (see ``text_of``).
            parsed: What the prompt format read of each completion, where that is known already.
            **columns: ``answer`` (or one of the other gold columns), ``completion_ids``, and every other column.

        Raises:
            ConfigError: No column holds the gold answers, or a column that the reward needs is missing.
        """
        if completions is None:
            raise ConfigError(
                f"reward '{self.__name__}' was called without completions; write completions=[…]"
            )
        texts = [text_of(completion, self.around.decode) for completion in completions]
        if isinstance(self.reward, BatchReward):
            values = self._batch(prompts, completions, columns)
        else:
            golds = self._golds(columns, len(texts))
            rows = _rows(columns, len(texts))
            self._show(texts, golds)
            read = list(parsed) if parsed is not None else [None] * len(texts)
            values = [self._one(self.reward, *row) for row in zip(texts, golds, rows, read, strict=True)]
        self._calls += 1
        return values

    def _golds(self, columns: Mapping[str, Any], count: int) -> list[Any]:
        name = next((name for name in GOLD_COLUMNS if columns.get(name) is not None), None)
        if name is None:
            if getattr(self.reward, "needs_gold", False):
                raise ConfigError(
                    f"reward '{self.__name__}' needs the gold answers and found none of the columns "
                    f"{', '.join(GOLD_COLUMNS)}; there are: {', '.join(columns) or 'none'}. "
                    "Rename the column of your data to 'answer'"
                )
            return [None] * count
        golds = columns[name]
        golds = [golds] * count if isinstance(golds, str) else list(golds)
        if len(golds) != count:
            raise ConfigError(f"column '{name}' has {len(golds)} gold answers for {count} completions")
        return golds

    def _one(
        self, reward: Reward, text: str, gold: Any, row: dict[str, Any], parsed: Parsed | None
    ) -> float | None:
        context: dict[str, Any] = {**self.around.offers(), "problem": row}
        if "completion_ids" in reward.context:
            if "completion_ids" not in row:
                raise ConfigError(
                    f"reward '{self.__name__}' counts tokens and needs completion_ids; "
                    "the trainer sends them, elsewhere write completion_ids=[[…], …]"
                )
            context["completion_ids"] = row["completion_ids"]
        golds = (
            [str(g) for g in gold] if isinstance(gold, (list, tuple)) else [str("" if gold is None else gold)]
        )
        try:
            if "parsed" in reward.context:
                context["parsed"] = parsed or self.around.parse(text)
            wanted = {key: value for key, value in context.items() if key in reward.context}
            if not reward.needs_gold:
                if "gold" in reward.context:
                    wanted["gold"] = golds[0]
                return self._checked(reward.function(text, **wanted, **self.params))
            if not golds or not all(g.strip() for g in golds):
                raise ValueError("the row has no gold answer")
            # Several gold answers: the one that serves the completion best.
            return max(self._checked(reward.function(text, gold=g, **wanted, **self.params)) for g in golds)
        except RewardError:
            raise
        except Exception as error:
            return self._failed(error)

    def _batch(self, prompts: Any, completions: Sequence[Any], columns: dict[str, Any]) -> list[float | None]:
        assert isinstance(self.reward, BatchReward)
        count = len(completions)
        given = {
            **self.around.offers(),
            **columns,
            "prompts": prompts,
            "completions": completions,
            **self.params,
        }
        try:
            values = list(self.reward.call(given))
            if len(values) != count:
                raise ValueError(f"it returned {len(values)} values for {count} completions")
        except RewardError:
            raise
        except Exception as error:
            return [self._failed(error) for _ in range(count)]
        return [self._value(value) for value in values]

    def _value(self, value: Any) -> float | None:
        try:
            return None if value is None else self._checked(value)
        except Exception as error:
            return self._failed(error)

    @staticmethod
    def _checked(value: Any) -> float:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"it returned {number}")
        return number

    def _failed(self, error: Exception) -> float:
        if self.failures == 0:
            said = (str(error).splitlines() or [""])[0]
            # What another process raised comes as a RuntimeError with its traceback.
            self.first_failure = (
                said if isinstance(error, RuntimeError) else f"{type(error).__name__}: {said}"
            )
            log.warning(
                "reward '%s' failed: %r; such completions get its floor %g and are counted (shown once)",
                self.__name__,
                error,
                self.low,
                exc_info=error,
            )
        self.failures += 1
        return self.low

    def _show(self, texts: Sequence[str], golds: Sequence[Any]) -> None:
        if self.log_every and texts and self._calls % self.log_every == 0:
            answer = self.around.parse(texts[0]).answer
            log.info("read %r, expected %r, completion %r", answer, golds[0], texts[0][:200])


class RewardSet(list[TrainerReward]):
    """The rewards of a recipe: a list of TRL-callables, with their weights, totals and counts of failures."""

    @property
    def names(self) -> list[str]:
        """The names of the rewards, each once, in the order of the recipe."""
        return [reward.__name__ for reward in self]

    @property
    def weights(self) -> list[float]:
        """The weights, in the order of the recipe."""
        return [reward.weight for reward in self]

    @property
    def failures(self) -> dict[str, int]:
        """How often each reward failed so far."""
        return {reward.__name__: reward.failures for reward in self}

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of the weighted total."""
        ends = [sorted((r.weight * r.low, r.weight * r.high)) for r in self]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    def score(self, completions: Sequence[Any], **columns: Any) -> list[RewardBreakdown]:
        """Return the total and the components of each completion; columns as in ``TrainerReward``."""
        values = [reward(completions=completions, **columns) for reward in self]
        weights = dict(zip(self.names, self.weights, strict=True))
        return [
            breakdown(dict(zip(self.names, row, strict=True)), weights)
            for row in (zip(*values, strict=True) if values else [()] * len(completions))
        ]

    def explain(self, completion: Any, gold: Any, **columns: Any) -> RewardBreakdown:
        """Return the total and the components of one completion; ``columns`` hold one value each."""
        row = {key: [value] for key, value in columns.items()}
        return self.score([completion], answer=[gold], **row)[0]


def breakdown(
    components: Mapping[str, float | None], weights: Mapping[str, float] | None = None
) -> RewardBreakdown:
    """Return the weighted total of named values; a name without a weight counts once, None counts as nothing."""
    used = {name: (weights or {}).get(name, 1.0) for name in components}
    total = math.fsum(used[name] * value for name, value in components.items() if value is not None)
    return RewardBreakdown(total, dict(components), used)


def build_rewards(
    specs: Sequence[Any],
    prompt_format: PromptFormat | str = "reasoning_answer",
    *,
    matcher: str = "symbolic",
    decode: Decode | None = None,
    log_every: int = 0,
) -> RewardSet:
    """Return the rewards of a recipe as TRL-callables.

    Args:
        specs: A name each, or ``{"name", "weight", "params"}`` as mapping or object. A name is that of a registered
            reward, or ``file.py:function``. A function of this process counts as it is, with weight 1.
        prompt_format: How completions are read, and whose tags the format rewards look for.
        matcher: How answers are compared.
        decode: Turns token ids into text, for completions that come as ids or tensors.
        log_every: Every that many calls, log what was read from a completion, what was expected, and its beginning.

    Raises:
        ConfigError: Unknown reward or parameter, a refused value, or a function that cannot be loaded.
    """
    form = get_format(prompt_format) if isinstance(prompt_format, str) else prompt_format
    around = Surroundings(form, matcher, decode, lru_cache(maxsize=4096)(form.parse))
    built: list[TrainerReward] = []
    taken: dict[str, int] = {}
    for spec in specs:
        name, weight, params, timeout_s = _spec(spec)
        found = as_reward(name, spec) if inspect.isfunction(spec) else _by_name(name, timeout_s)
        shown = name.rpartition(":")[2]
        taken[shown] = taken.get(shown, 0) + 1
        unique = shown if taken[shown] == 1 else f"{shown}_{taken[shown]}"
        built.append(TrainerReward(unique, found, around, weight, params))
    if built:
        built[0].log_every = log_every
    return RewardSet(built)


def default_reward_functions(prompt_format: str = "reasoning_answer") -> RewardSet:
    """Return the default rewards as TRL-callables with their weights."""
    specs = [{"name": n, "weight": w} for n, w in zip(DEFAULT_REWARDS, DEFAULT_REWARD_WEIGHTS, strict=True)]
    return build_rewards(specs, prompt_format)


def _by_name(name: str, timeout_s: float) -> Reward | BatchReward:
    if name.endswith(".py"):
        raise ConfigError(
            f"reward '{name}' names a file, not a function in it. Write {name}:FUNCTION (docs/extending.md)"
        )
    return load_user_reward(name, timeout_s=timeout_s) if ".py:" in name else REWARDS.get(name)


def as_reward(name: str, function: Callable[..., Any]) -> Reward | BatchReward:
    """Return a function of this process as a reward: one that takes lists (``completions``, or ``**kwargs``), or one completion."""
    parameters = inspect.signature(function).parameters
    lists = "completions" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    low, high = float(getattr(function, "low", 0.0)), float(getattr(function, "high", 1.0))
    if lists:
        return BatchReward(name, function, low, high)
    return Reward(name, function, low, high)


def _spec(spec: Any) -> tuple[str, float, dict[str, Any], float]:
    if isinstance(spec, str) or inspect.isfunction(spec):
        return spec if isinstance(spec, str) else spec.__name__, 1.0, {}, TIMEOUT_S
    if not isinstance(spec, Mapping):
        timeout_s = float(getattr(spec, "timeout_s", TIMEOUT_S))
        return str(spec.name), float(spec.weight), dict(spec.params), timeout_s
    valid = ("name", "weight", "params", "timeout_s")
    for key in spec:
        if key not in valid:
            raise ConfigError(
                f"a reward has the key '{key}'.{nearest(key, valid)} Expected: {', '.join(valid)}"
            )
    if "name" not in spec:
        raise ConfigError(f"a reward has no name: {dict(spec)}; write {{name: correct, weight: 1.0}}")
    params, timeout_s = dict(spec.get("params") or {}), float(spec.get("timeout_s", TIMEOUT_S))
    return str(spec["name"]), float(spec.get("weight", 1.0)), params, timeout_s


def _rows(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the row of each completion: columns with one entry per completion, by name."""
    split = {k: v for k, v in columns.items() if isinstance(v, (list, tuple)) and len(v) == count}
    return [{key: values[i] for key, values in split.items()} for i in range(count)]

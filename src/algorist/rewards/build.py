"""From a recipe's rewards to callables that TRL accepts; a reward that raises gives its floor and is counted."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from algorist.errors import ConfigError
from algorist.prompts import PromptFormat
from algorist.rewards.base import REWARDS, Reward, RewardInput, text_of

log = logging.getLogger("algorist.rewards")
GOLD_COLUMNS = ("answer", "reference_answer", "solution", "ground_truth")


class RewardSpec(Protocol):
    """What a recipe says about one reward."""

    name: str
    weight: float
    params: dict[str, Any]


class TrainerReward:
    """One reward in TRL's call form: keyword lists in, one float per completion out.

    ``failures`` counts completions for which the reward raised; they got the declared floor.
    """

    def __init__(
        self, reward: Reward, prompt_format: PromptFormat, *, matcher: str, params: dict[str, Any]
    ) -> None:
        self.__name__ = reward.name
        self.reward, self.prompt_format, self.matcher, self.params = reward, prompt_format, matcher, params
        self.failures = 0

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return one value per completion; unknown columns are ignored.

        Raises:
            ConfigError: No column holds the gold answers.
        """
        golds = next((columns[name] for name in GOLD_COLUMNS if columns.get(name) is not None), None)
        if golds is None:
            raise ConfigError(
                f"reward '{self.__name__}' needs the gold answers in one of the columns {GOLD_COLUMNS}"
            )
        return [self._one(text_of(c), str(gold)) for c, gold in zip(completions, golds, strict=True)]

    def _one(self, completion: str, gold: str) -> float:
        try:
            inputs = RewardInput(completion, self.prompt_format.parse(completion), gold, self.matcher)
            return float(self.reward.function(inputs, **self.params))
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                log.warning(
                    "reward '%s' raised %r; such completions get its floor %s",
                    self.__name__,
                    error,
                    self.reward.low,
                )
            return self.reward.low


def build_rewards(
    specs: Sequence[RewardSpec], prompt_format: PromptFormat, *, matcher: str
) -> list[Callable[..., list[float]]]:
    """Return one TRL-callable per reward of a recipe.

    Raises:
        ConfigError: Unknown reward, or a ``file.py:function`` that cannot be loaded.
    """
    return [
        user_reward(spec.name)
        if ".py:" in spec.name
        else TrainerReward(REWARDS.get(spec.name), prompt_format, matcher=matcher, params=spec.params)
        for spec in specs
    ]


def user_reward(target: str) -> Callable[..., list[float]]:
    """Load ``file.py:function`` in TRL's call form ``f(completions, **columns) -> list[float]``.

    Raises:
        ConfigError: No such file or function.
    """
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"reward '{target}': no file at {path.resolve()}; expected file.py:function")
    spec = importlib.util.spec_from_file_location(f"algorist_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward '{target}': {path} cannot be imported: {error!r}") from None
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            f"reward '{target}': {path} has no function '{name}'; there are: {', '.join(there) or 'none'}"
        )
    return function

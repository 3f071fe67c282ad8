"""What a reward is: a plain function of one completion, registered under a name with its declared range.

A reward names what it needs. From this list it receives what it asks for, by keyword:

- ``parsed``: the completion as its prompt format read it (``Parsed``);
- ``gold``: the gold answer (text, never empty);
- ``problem``: the other columns of the row, by name;
- ``matcher``: how the recipe compares answers;
- ``tags``: the four tags of the prompt format (only when it has four);
- ``prefilled``: True when the prompt already opens the reasoning;
- ``completion_ids``: the token ids of the completion.

Every other keyword is a parameter, set in a recipe under ``params``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from algorist.errors import ConfigError, nearest
from algorist.registry import Registry

RewardFunction = Callable[..., float]
Bounds = Callable[..., tuple[float, float]]
CONTEXT = frozenset({"parsed", "gold", "problem", "matcher", "tags", "prefilled", "completion_ids"})


@dataclass(frozen=True)
class Reward:
    """A function as a reward; what it asks for is read from its signature.

    ``low`` and ``high`` bound its values under the default parameters; ``range_with`` under others. ``gold`` says whether rows
    must have a gold answer (None: if the function asks for it), ``source`` where the rule comes from.

    Raises:
        ConfigError: ``low`` above ``high``, or a parameter without a default value.
    """

    name: str
    function: RewardFunction
    low: float
    high: float
    gold: bool | None = None
    source: str = ""
    aliases: tuple[str, ...] = ()
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(
                f"reward '{self.name}' declares the range {self.low} … {self.high}; expected low <= high"
            )
        for key, default in self.params.items():
            if default is inspect.Parameter.empty:
                raise ConfigError(
                    f"reward '{self.name}': parameter '{key}' has no default.{nearest(key, CONTEXT)} "
                    f"Give it one, or use a name that is filled in: {', '.join(sorted(CONTEXT))}"
                )

    @cached_property
    def _keywords(self) -> dict[str, Any]:
        """What the function takes besides the completion, with its defaults."""
        keywords = list(inspect.signature(self.function).parameters.values())[1:]
        return {p.name: p.default for p in keywords if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}

    @cached_property
    def context(self) -> frozenset[str]:
        """The names from ``CONTEXT`` that the function asks for."""
        return CONTEXT & self._keywords.keys()

    @cached_property
    def params(self) -> Mapping[str, Any]:
        """The function's own parameters with their defaults."""
        return {name: default for name, default in self._keywords.items() if name not in CONTEXT}

    @property
    def needs_gold(self) -> bool:
        """Whether rows must have a gold answer."""
        return "gold" in self.context if self.gold is None else self.gold

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def range_with(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the range of the values under ``params``.

        Raises:
            ConfigError: A parameter that the reward does not have, or a value that it refuses.
        """
        for key in params:
            if key not in self.params:
                raise ConfigError(
                    f"reward '{self.name}' has no parameter '{key}'.{nearest(key, self.params)} "
                    f"It has: {', '.join(self.params) or 'none'}"
                )
        return self.bounds(**{**self.params, **params}) if self.bounds else (self.low, self.high)


REWARDS: Registry[Reward] = Registry("reward")


def reward(
    name: str,
    *,
    low: float,
    high: float,
    needs_gold: bool | None = None,
    aliases: tuple[str, ...] = (),
    source: str = "",
    bounds: Bounds | None = None,
) -> Callable[[RewardFunction], RewardFunction]:
    """Register ``function(completion, *, …) -> float``; the function itself stays as it is.

    Args:
        name: The name in recipes.
        low: Least value under the default parameters; also what a completion gets for which the reward raises.
        high: Greatest value under the default parameters.
        needs_gold: Whether rows must have a gold answer; by default, whether the function asks for ``gold``.
        aliases: Other names for the same reward.
        source: Where the rule comes from.
        bounds: ``f(**params) -> (low, high)`` for a range that depends on the parameters; may refuse values.

    Raises:
        ConfigError: The name is taken, or the signature is not that of a reward.
    """

    def decorate(function: RewardFunction) -> RewardFunction:
        made = Reward(name, function, low, high, needs_gold, source, aliases, bounds)
        for key in (name, *aliases):
            REWARDS.register(key)(made)
        return function

    return decorate

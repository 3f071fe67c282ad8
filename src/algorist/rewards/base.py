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
from dataclasses import dataclass, field
from typing import Any

from algorist.errors import ConfigError, nearest
from algorist.registry import Registry

RewardFunction = Callable[..., float]
Bounds = Callable[..., tuple[float, float]]
CONTEXT = frozenset({"parsed", "gold", "problem", "matcher", "tags", "prefilled", "completion_ids"})


@dataclass(frozen=True)
class Reward:
    """A registered reward.

    ``low`` and ``high`` bound its values under the default parameters; ``range_with`` under others. ``context`` are
    the names from ``CONTEXT`` that the function asks for, ``params`` its own parameters with their defaults.
    ``source`` says where the rule comes from.
    """

    name: str
    function: RewardFunction
    low: float
    high: float
    needs_gold: bool = False
    source: str = ""
    aliases: tuple[str, ...] = ()
    bounds: Bounds | None = None
    context: frozenset[str] = frozenset()
    params: Mapping[str, Any] = field(default_factory=dict)

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


def make_reward(
    name: str,
    function: RewardFunction,
    *,
    low: float,
    high: float,
    needs_gold: bool | None = None,
    aliases: tuple[str, ...] = (),
    source: str = "",
    bounds: Bounds | None = None,
) -> Reward:
    """Return the ``Reward`` of a function, with what it asks for read from its signature.

    Raises:
        ConfigError: ``low`` above ``high``, or a parameter without a default value.
    """
    if not low <= high:
        raise ConfigError(f"reward '{name}' declares the range {low} … {high}; expected low <= high")
    keywords = list(inspect.signature(function).parameters.values())[1:]
    keywords = [p for p in keywords if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    params = {p.name: p.default for p in keywords if p.name not in CONTEXT}
    for key, default in params.items():
        if default is inspect.Parameter.empty:
            raise ConfigError(
                f"reward '{name}': parameter '{key}' has no default.{nearest(key, CONTEXT)} "
                f"Give it one, or use a name that is filled in: {', '.join(sorted(CONTEXT))}"
            )
    context = frozenset(p.name for p in keywords) & CONTEXT
    gold = "gold" in context if needs_gold is None else needs_gold
    return Reward(name, function, low, high, gold, source, aliases, bounds, context, params)


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
        made = make_reward(
            name,
            function,
            low=low,
            high=high,
            needs_gold=needs_gold,
            aliases=aliases,
            source=source,
            bounds=bounds,
        )
        for key in (name, *aliases):
            REWARDS.register(key)(made)
        return function

    return decorate

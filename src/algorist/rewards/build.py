"""The rewards of a recipe: built by name, paid to rollouts, summed by weight. Each is a callable that TRL takes, too."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from algorist.errors import ConfigError, check_known
from algorist.prompts import FORMATS, PromptFormat, get_format
from algorist.rewards.base import REWARDS, Reward, as_reward, tryouts
from algorist.rewards.trl_form import Decode
from algorist.rewards.user import TIMEOUT_S, load_user_reward
from algorist.types import Group, Problem, Rollout

log = logging.getLogger("algorist.rewards.build")


@dataclass(frozen=True, slots=True)
class RewardBreakdown:
    """The weighted total of one completion and the raw value of each reward; None where a reward does not apply."""

    total: float
    components: dict[str, float | None] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


class RewardSet(list[Reward]):
    """The rewards of a recipe, with their totals, states and counts of failures."""

    @property
    def names(self) -> list[str]:
        """The names of the rewards, each once, in the order of the recipe."""
        return [reward.name for reward in self]

    @property
    def weights(self) -> list[float]:
        """The weights, in the order of the recipe."""
        return [reward.weight for reward in self]

    @property
    def failures(self) -> dict[str, int]:
        """Failures of each reward so far."""
        return {reward.name: reward.failures for reward in self}

    @property
    def bounds(self) -> tuple[float, float]:
        """The range of the weighted total."""
        ends = [sorted((r.weight * r.low, r.weight * r.high)) for r in self if r.weight]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    def pay(self, groups: Sequence[Group], extra: Mapping[str, Any] | None = None) -> list[Group]:
        """Return the groups with the value of each reward and their weighted sum in every rollout.

        Args:
            groups: Problems with their rollouts, read and graded.
            extra: What the trainer offers to rewards that ask for it by name, such as ``trainer_state``.

        Raises:
            RewardError: A reward cannot be used any more.
        """
        columns = {reward.name: iter(reward.values(groups, extra)) for reward in self}
        weights = dict(zip(self.names, self.weights, strict=True))
        # Those of weight 0 are only logged.
        counted = [name for name in self.names if weights[name]] or self.names

        def paid(rollout: Rollout) -> Rollout:
            score = breakdown({name: next(values) for name, values in columns.items()}, weights)
            applies = any(score.components[name] is not None for name in counted)
            return replace(rollout, rewards=score.components, reward=score.total if applies else None)

        return [replace(group, rollouts=[paid(rollout) for rollout in group.rollouts]) for group in groups]

    def silence(self, components: Sequence[Mapping[str, float | None]]) -> str:
        """Say that no reward with a weight gave a number for any completion; an empty text where one did.

        Args:
            components: Name → value, of each completion.
        """
        counted = [reward for reward in self if reward.weight and not reward.needs_trainer]
        if not counted or any(values.get(one.name) is not None for values in components for one in counted):
            return ""
        names = ", ".join(f"'{one.name}' ({one.place})" for one in counted)
        rows = f"any of {len(components)} completions" if len(components) > 1 else "the completion"
        return (
            f"no reward gave a number for {rows}, only None: {names}. Nothing can be learned from it; None "
            "means that a reward does not apply, and is what a function without return gives"
        )

    def check_speaks(self, groups: Sequence[Group], problems: Sequence[Problem]) -> None:
        """Refuse rewards that give no number for the groups' completions, nor for demonstrations of the problems (ConfigError)."""

        def silence(groups: Sequence[Group]) -> str:
            return self.silence([rollout.rewards for group in groups for rollout in group.rollouts])

        said = silence(groups)
        if said and silence(self.pay([group for one in problems for group in tryouts(self[0].form, [one])])):
            raise ConfigError(f"{said}. Correct it, try it (algorist rewards explain), and start a new run")

    def probe(self, problems: Sequence[Problem] = ()) -> None:
        """Try each reward before the run (see ``Reward.probe``)."""
        for reward in self:
            reward.probe(problems)

    def score(self, completions: Sequence[Any], **columns: Any) -> list[RewardBreakdown]:
        """Return the total and the components of each completion; columns as TRL passes them."""
        values = [reward(completions=completions, **columns) for reward in self]
        weights, rows = dict(zip(self.names, self.weights, strict=True)), range(len(completions))
        return [breakdown(dict(zip(self.names, (v[row] for v in values))), weights) for row in rows]

    def explain(self, completion: Any, gold: Any, **columns: Any) -> RewardBreakdown:
        """Return the total and the components of one completion; ``columns`` of its row hold one value each."""
        usual = dict.fromkeys(("question", "subject", "level", "checker", "problem_id"), "")
        row = {key: [value] for key, value in {**usual, **columns, "reference_answer": gold}.items()}
        return self.score([completion], **{"prompts": row["question"], **row})[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each reward that has one: a function or object with ``state_dict`` and ``load_state_dict``."""
        return {r.name: r.function.state_dict() for r in self if hasattr(r.function, "state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the rewards the state that ``state_dict`` returned."""
        for reward in self:
            if reward.name in state:
                reward.function.load_state_dict(state[reward.name])  # type: ignore[attr-defined]


def breakdown(
    components: Mapping[str, float | None], weights: Mapping[str, float] | None = None
) -> RewardBreakdown:
    """Return the weighted total of named values; a name without a weight counts once, None counts as nothing."""
    used = {name: (weights or {}).get(name, 1.0) for name in components}
    total = math.fsum(used[name] * value for name, value in components.items() if value is not None)
    return RewardBreakdown(total, dict(components), used)


def build_rewards(
    specs: Sequence[Any],
    prompt_format: PromptFormat | str | None = None,
    *,
    matcher: str = "symbolic",
    decode: Decode | None = None,
) -> RewardSet:
    """Return the rewards of a recipe.

    Args:
        specs: A name each, or ``{"name", "weight", "params"}`` as mapping or object. A name is that of a registered
            reward, or ``file.py:function``. A function of this process counts as it is, with weight 1.
        prompt_format: How completions are read, and whose tags the format rewards look for; when left out, the one that the rewards
            were published for (``check_answer``: working_solution), else ``reasoning_answer``.
        matcher: How answers are compared.
        decode: Turns token ids into text, for completions that come as ids or tensors.

    Raises:
        ConfigError: Unknown reward or parameter, a refused value, or a function that cannot be loaded.
    """
    loaded = [_spec(spec) for spec in specs]
    named = prompt_format or _published_for([reward for reward, _ in loaded])
    form = get_format(named) if isinstance(named, str) else named
    built = RewardSet()
    taken: dict[str, int] = {}
    for reward, settings in loaded:
        params, low, high = reward.set_to(settings.get("params") or {})
        name = str(settings["name"]).rpartition(":")[2]
        taken[name] = taken.get(name, 0) + 1
        unique = name if taken[name] == 1 else f"{name}_{taken[name]}"
        weight = float(settings.get("weight", 1.0))
        ours = replace(reward, name=unique, weight=weight, params=params, low=low, high=high)
        built.append(replace(ours, form=form, matcher=matcher, decode=decode))
    return built


def _published_for(rewards: Sequence[Reward]) -> str:
    """Return the prompt format whose tags are the rewards' own; that of recipes where they have none, or not the same."""
    own = {reward.name: tags for reward in rewards if (tags := reward.own_tags) is not None}
    if len(set(own.values())) > 1:
        log.warning(
            "the rewards %s were published for different tags, and read those of reasoning_answer; name the tags of your completions: "
            "prompt_format='think_answer'",
            ", ".join(own),
        )
        return "reasoning_answer"
    same = (name for name in FORMATS for tags in own.values() if FORMATS.get(name).tags == tags)
    return next(same, "reasoning_answer")


def trl_reward(
    name: str,
    prompt_format: PromptFormat | str | None = None,
    *,
    matcher: str = "symbolic",
    decode: Decode | None = None,
    **params: Any,
) -> Reward:
    """Return one reward for TRL: ``GRPOTrainer(reward_funcs=[trl_reward("correct"), trl_reward("cosine", max_len=500)])``.

    Args as those of ``build_rewards``; ``params`` are the reward's own.
    """
    return build_rewards([{"name": name, "params": params}], prompt_format, matcher=matcher, decode=decode)[0]


def _spec(spec: Any) -> tuple[Reward, Mapping[str, Any]]:
    """Return the reward that a spec names, and its settings by key."""
    if callable(spec):
        name = getattr(spec, "__name__", type(spec).__name__)
        return as_reward(name, spec), {"name": name}
    settings = {"name": spec} if isinstance(spec, str) else spec if isinstance(spec, Mapping) else vars(spec)
    valid = ("name", "weight", "params", "timeout_s", "environment")
    for key in settings:
        check_known(key, valid, f"a reward has the key '{key}'")
    if "name" not in settings:
        raise ConfigError(f"a reward has no name: {dict(settings)}; write {{name: correct, weight: 1.0}}")
    name = str(settings["name"])
    if name.endswith(".py"):
        raise ConfigError(
            f"reward '{name}' names a file, not a function in it. Write {name}:FUNCTION (docs/extending.md)"
        )
    if ".py:" not in name:
        return REWARDS.get(name), settings
    limit, environment = float(settings.get("timeout_s", TIMEOUT_S)), tuple(settings.get("environment") or ())
    return load_user_reward(name, timeout_s=limit, environment=environment), settings

"""Lines of a recipe that may be the cause, each with what takes its place in a trial."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from algorist.config.load import validate
from algorist.config.schema import Recipe
from algorist.config.yaml_text import leaves, one_line_yaml
from algorist.errors import ConfigError

WHOLE = ("grpo.loss", "rewards", "data.train", "data.sft", "data.eval", "prompt")
"""Sections that are one line: their keys mean nothing for another name, or must fit each other."""
KEPT = (
    "name description output_dir run_name seed device threads model.* data.train data.sft data.eval prompt tools tools.* environment "
    "environment.* hub.* report_to tracking.* *.enabled *.max_steps *.epochs *.learning_rate grpo.max_completion_tokens *.batch_size "
    "*.gradient_accumulation_steps *.processes *.logging_steps *.save_steps *.save_total_limit *.gradient_checkpointing "
    "*.micro_batch_tokens *.eval_every *.samples_every eval.engine *.device *.ledger_every grpo.vllm.* sft.source sft.max_length eval.samples "
    "eval.ks eval.baseline grpo.stop grpo.stop.* grpo.keep_best rewards"
).split()
"""Patterns of keys that have no value that is neutral, or that do not change what is learned."""
OF_ONE_RUN = "name description output_dir run_name device threads hub.* report_to tracking.* rewards".split()
"""Patterns of keys that are a run's own or its machine's; rewards are lines of their own."""
DATA = ("train", "sft", "eval")
FILTERS = "limit numeric_answers_only correct_only pass_rate max_prompt_percentile max_prompt_tokens".split()
CORRECT = "correct"
FACTOR = 8.0
"""A learning rate is tried so many times smaller and larger."""
LONGER = 3
"""SFT is tried with so many times its steps."""


@dataclass(frozen=True)
class Suspect:
    """A line of the recipe, and what takes its place.

    Attributes:
        key: Dotted key; of a reward ``rewards.NAME``.
        now: The value in force; of a reward its weight, or all of it.
        other: The value in a trial; of a reward None takes it out.
    """

    key: str
    now: Any
    other: Any

    @property
    def of_start(self) -> bool:
        """Whether it changes the model that GRPO starts from."""
        return self.key.split(".")[0] in ("sft", "model", "prompt", "plugins") or self.key == "data.sft"

    @property
    def lowers_rate(self) -> bool:
        """Whether it lowers a learning rate."""
        return self.key.endswith(".learning_rate") and self.other < self.now

    @property
    def short(self) -> str:
        """The key alone; of a reward its name, without the folder of its file."""
        return self.key.removeprefix("rewards.").rpartition("/")[2]

    def text(self) -> str:
        """Return the line in force and the other one, in one line."""
        now, other = self.now, self.other
        if isinstance(now, dict) and isinstance(other, dict):
            keys = [key for key in {**now, **other} if now.get(key) != other.get(key)]
            one = len(keys) > 0 and keys[0] == "name"
            now, other = (
                value["name"] if one else {key: value.get(key) for key in keys} for value in (now, other)
            )

        def shown(value: Any) -> str:
            if isinstance(value, dict):
                value = {k: v for k, v in value.items() if v not in (None, False, {}, [])}
            text = one_line_yaml(value)
            return text if len(text) <= 60 else f"{text[:57]} …"

        if self.key.startswith("rewards."):
            weight = "" if isinstance(self.other, dict) else "weight "
            return f"the reward {self.short} ({'taken out' if self.other is None else f'{weight}{shown(other)}'}, was {shown(now)})"
        return f"{self.key}: {shown(now)} → {shown(other)}"


def neutral_suspects(recipe: Recipe) -> list[Suspect]:
    """Return the lines that differ from what does nothing: the schema's defaults, the reward ``correct`` alone, all data, no plugins.

    All of them can be changed together.
    """
    values, usual = recipe.model_dump(mode="json"), Recipe().model_dump(mode="json")
    lines = [Suspect(*line) for line in _lines(values, usual) if not _fits(line[0], KEPT)]
    for part in DATA:
        section, plain = values["data"][part] or {}, usual["data"]["train"]
        lines += [
            Suspect(f"data.{part}.{key}", section[key], plain[key]) for key in FILTERS if key in section
        ]
    lines = [s for s in lines if s.now != s.other]
    off = {stage for stage in ("sft", "grpo", "eval") if not values[stage]["enabled"]}
    lines = [s for s in lines if s.key.split(".")[0] not in off]
    lines += list(_rewards(values["rewards"]))
    return _together(values, lines)


def other_suspects(recipe: Recipe, *, demonstrated: bool) -> list[Suspect]:
    """Return lines that no value is neutral for, each with another value that would show that it is the cause.

    Args:
        recipe: The run's.
        demonstrated: Whether the training problems have worked solutions.
    """
    values = recipe.model_dump(mode="json")
    lines = []
    if recipe.grpo.enabled:
        rate, tokens = recipe.grpo.learning_rate, recipe.grpo.max_completion_tokens
        lines += [Suspect("grpo.learning_rate", rate, value) for value in (rate / FACTOR, rate * FACTOR)]
        lines += [Suspect("grpo.max_completion_tokens", tokens, 2 * tokens)]
    if recipe.sft.enabled:
        rate = recipe.sft.learning_rate
        lines += [Suspect("sft.learning_rate", rate, value) for value in (rate / FACTOR, rate * FACTOR)]
        if recipe.sft.max_steps:
            lines += [Suspect("sft.max_steps", recipe.sft.max_steps, LONGER * recipe.sft.max_steps)]
        if recipe.data.sft is not None and demonstrated:
            lines += [Suspect("data.sft", values["data"]["sft"], None)]
    plain = type(recipe.prompt)().model_dump(mode="json")
    if recipe.sft.enabled and values["prompt"] != plain:
        lines += [Suspect("prompt", values["prompt"], plain)]
    return [s for s in lines if _valid(values, [s])]


def differences(recipe: Recipe, good: Recipe) -> list[Suspect]:
    """Return the lines that differ from a recipe that works; all of them can be changed together."""
    values, others = recipe.model_dump(mode="json"), good.model_dump(mode="json")
    lines = [Suspect(*line) for line in _lines(values, others) if not _fits(line[0], OF_ONE_RUN)]
    lines = [s for s in lines if s.now != s.other]
    lines += list(_rewards(values["rewards"], others["rewards"]))
    return _together(values, lines)


def changed(values: Mapping[str, Any], suspects: Iterable[Suspect]) -> Recipe:
    """Return the recipe with the other value of each suspect; ``correct`` takes the place of the reward that weighs most.

    Raises:
        ConfigError: These values do not go together.
    """
    new = copy.deepcopy(dict(values))
    for suspect in suspects:
        section, _, name = suspect.key.partition(".")
        if section == "rewards":
            _set_reward(new["rewards"], name, suspect.other)
            continue
        *above, last = suspect.key.split(".")
        node: Any = new
        for part in above:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = copy.deepcopy(suspect.other)
    names = {reward["name"] for reward in new["rewards"]}
    first = max(values["rewards"], key=lambda reward: reward["weight"], default={"name": CORRECT})["name"]
    if first not in names and CORRECT not in names:
        _set_reward(new["rewards"], CORRECT, 1.0)
    return validate(new, where="a trial")


def _rewards(
    mine: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]] | None = None
) -> Iterator[Suspect]:
    """Yield the rewards that differ from ``correct`` alone with weight 1, or from those of another recipe, parameters included."""
    if theirs is None:
        good = {CORRECT: 1.0}
        weights = {reward["name"]: reward["weight"] for reward in mine}
        others: Iterable[tuple[str, Any, Any]] = ((name, weights[name], good.get(name)) for name in weights)
    else:
        entries, goods = ({_code(r["name"]): r for r in rewards} for rewards in (mine, theirs))
        pairs = [(entries.get(key), goods.get(key)) for key in {**entries, **goods}]
        others = (((now or other or {})["name"], now, other) for now, other in pairs)
    for name, now, other in others:
        if isinstance(now, dict) and isinstance(other, dict):
            other = other | {"name": name}
            differ = {key for key in now if now[key] != other[key]}
            now, other = (entry["weight"] if differ <= {"weight"} else entry for entry in (now, other))
        if _counted(now) != _counted(other):
            yield Suspect(f"rewards.{name}", now, other)


def _counted(reward: float | dict[str, Any] | None) -> Any:
    """Return a weight or an entry; None for one of weight 0."""
    return reward if (reward["weight"] if isinstance(reward, dict) else reward) else None


def _code(name: str) -> str:
    """Return a reward's name; of a file its content and function: each run has its own copy."""
    file, _, function = name.rpartition(":")
    return f"{Path(file).read_text(encoding='utf-8')}:{function}" if file and Path(file).is_file() else name


def _set_reward(rewards: list[dict[str, Any]], name: str, value: float | dict[str, Any] | None) -> None:
    """Set the weight of a reward, or all of it; None takes it out."""
    mine = [reward for reward in rewards if reward["name"] == name]
    if value is None:
        rewards[:] = [reward for reward in rewards if reward["name"] != name]
        return
    if not mine:
        rewards.append(entry := {"name": name})
        mine = [entry]
    mine[0].update(value if isinstance(value, dict) else {"weight": value})


def _lines(values: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, other value) of every line of either; a section that one of them lacks is one line."""
    mine, theirs = ([key for key, _ in leaves(v, lists=False, whole=WHOLE)] for v in (values, others))
    known = {*mine, *theirs}
    short = [next(k for k in _prefixes(key) if k in known) for key in (*mine, *theirs)]
    for key in dict.fromkeys(short):
        yield key, _value(values, key), _value(others, key)


def _prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def _value(values: Mapping[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _fits(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _together(values: Mapping[str, Any], suspects: Sequence[Suspect]) -> list[Suspect]:
    """Return the suspects that can be changed together, in their order."""
    taken: list[Suspect] = []
    for suspect in suspects:
        if _valid(values, [*taken, suspect]):
            taken.append(suspect)
    return taken


def _valid(values: Mapping[str, Any], suspects: Sequence[Suspect]) -> bool:
    try:
        changed(values, suspects)
    except ConfigError:
        return False
    return True

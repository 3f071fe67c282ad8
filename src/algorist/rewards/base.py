"""Rewards: functions of a rollout and its problem, with a name, a range and a weight.

A function names what it needs, and gets it by name: ``rollout`` and ``problem``, or a part of them (``OFFERS``). A first argument
of any other name is the rollout. Every further argument is a parameter, set in a recipe under ``params``. It returns a number, or
None where it does not apply.

The other form is TRL's: lists of ``completions``, ``prompts`` and columns by name, one value per completion (``trl_form``).
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from algorist import extensions
from algorist.errors import ConfigError, RewardError, nearest
from algorist.parameters import REQUIRED, Parameter, check_values, parameters_of
from algorist.prompts import PromptFormat, Tags, get_format
from algorist.rewards.trl_form import Decode, as_messages, columns_of, rollouts_of, with_other_names
from algorist.types import Group, Problem, Rollout
from algorist_grader import grade_completion
from algorist_grader.registry import Registry
from algorist_grader.user_code import own_line

log = logging.getLogger("algorist.rewards.base")

AROUND: dict[str, Callable[[Any], Any]] = {
    "matcher": lambda reward: reward.matcher,
    "form": lambda reward: reward.form,
    "tags": lambda reward: reward.form.tags,
    "prefilled": lambda reward: reward.form.prefilled_start,
}
"""Arguments of any function from the recipe: its matcher; its prompt format, the format's four tags, and whether the prompt opens the
reasoning already."""
OFFERS: dict[str, Callable[[Rollout, Problem], Any]] = {
    "rollout": lambda rollout, problem: rollout,
    "problem": lambda rollout, problem: problem,
    "completion": lambda rollout, problem: rollout.text,
    "parsed": lambda rollout, problem: rollout.parsed,
    "completion_ids": lambda rollout, problem: rollout.sampled_ids,
    "gold": lambda rollout, problem: problem.answer,
    "response": lambda rollout, problem: rollout.text,
    "ground_truth": lambda rollout, problem: problem.answer,
    "solution_str": lambda rollout, problem: rollout.text,
    "data_source": lambda rollout, problem: str(problem.extra.get("data_source", "")),
    "extra_info": lambda rollout, problem: problem.columns(),
}
"""Arguments of a function of a rollout: the rollout, its text, its reading, its sampled tokens; the problem, its gold answer; then
the same under the names of CS336's rewards (``response``, ``ground_truth``) and verl's."""
FROM_THE_TRAINER = ("trainer_state", "log_metric", "log_extra")
"""Arguments that only a trainer has; a function that names one of these runs in the trainer's process, and applies nowhere else."""
FORMS = "def f(rollout, problem): …  or, as TRL calls it,  def f(completions, **columns): …"
STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
LARGEST = 1e9
"""A value beyond this would overflow in the statistics of its group."""


@dataclass(eq=False)
class Reward:
    """A function as a reward. Registered ones say how it can be set, those of ``build_rewards`` how it is set.

    Attributes:
        name: In recipes, metrics and the store.
        function: A function of a rollout, or in TRL's form.
        low: Its least value, under the default parameters; also its floor, what a completion gets for which it fails.
        high: Its greatest value. A value outside is a failure.
        gold: Whether rows must have a gold answer; None: if it asks for ``gold``.
        source: Where the rule comes from.
        aliases: Other names of it.
        bounds: ``f(**params) -> (low, high)`` for a range that depends on the parameters; may refuse values.
        weight: Its factor in the sum.
        params: Its parameters.
        form: How completions are read.
        matcher: How answers are compared.
        decode: Turns token ids into text, for completions that come as ids.
        failures: Completions for which it raised, gave no finite number of its range, or had no gold answer.
        first_failure: What the first of them was.
        messages: Whether a function of lists takes chat messages; None until a call has shown it.
    """

    name: str
    function: Callable[..., Any]
    low: float = -math.inf
    high: float = math.inf
    gold: bool | None = None
    source: str = ""
    aliases: tuple[str, ...] = ()
    bounds: Callable[..., tuple[float, float]] | None = None
    weight: float = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)
    form: PromptFormat = field(default_factory=lambda: get_format("reasoning_answer"))
    matcher: str = "symbolic"
    decode: Decode | None = None
    failures: int = 0
    first_failure: str = ""
    messages: bool | None = None

    def __post_init__(self) -> None:
        self.__name__ = self.name  # TRL reads it
        if not self.low <= self.high:
            raise ConfigError(
                f"reward '{self.name}' declares the range {self.low} … {self.high}; expected low <= high"
            )
        if not self._arguments or inspect.iscoroutinefunction(self.function):
            wrong = "is async" if self._arguments else "takes no arguments"
            raise ConfigError(f"reward '{self.name}' {wrong}; expected {FORMS}")
        required = next((name for name, p in self.parameters.items() if p.default is REQUIRED), None)
        if required is not None:
            known = sorted({*OFFERS, *AROUND, *FROM_THE_TRAINER})
            raise ConfigError(
                f"reward '{self.name}': parameter '{required}' has no default.{nearest(required, known)} "
                f"Give it one, or use a name that is filled in: {', '.join(known)}"
            )

    @cached_property
    def _arguments(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    @cached_property
    def _first(self) -> str:
        return next(iter(self._arguments))

    @cached_property
    def _any_keyword(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self._arguments.values())

    @cached_property
    def takes_lists(self) -> bool:
        """Whether the function has TRL's form: it names lists, or takes any keyword and neither ``rollout`` nor ``completion``."""
        names = self._arguments.keys()
        return bool(names & {"completions", "prompts"}) or (
            self._any_keyword and names.isdisjoint({"rollout", "completion", "response", "solution_str"})
        )

    @cached_property
    def context(self) -> frozenset[str]:
        """The names from ``OFFERS`` that the function asks for."""
        return frozenset(OFFERS.keys() & {*self._arguments, *(() if self._first in OFFERS else ("rollout",))})

    @property
    def place(self) -> str:
        """The line on which the function begins, as ``file.py:line``; empty where it has none."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return getattr(
            self.function, "place", f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
        )

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters that ``params`` may set: the function's other arguments, with their defaults and types."""
        filled = {self._first, *OFFERS, *AROUND, *FROM_THE_TRAINER}
        own = parameters_of(self.function, without=filled)
        return {n: p for n, p in own.items() if not (self.takes_lists and p.default is REQUIRED)}

    @property
    def own_tags(self) -> Tags | None:
        """The tags that the function reads unless it is given others."""
        tags = self._arguments.get("tags")
        return tags.default if tags is not None and isinstance(tags.default, Tags) else None

    @property
    def needs_trainer(self) -> bool:
        """Whether the reward asks for what only a trainer has."""
        return not self._arguments.keys().isdisjoint(FROM_THE_TRAINER)

    @property
    def needs_gold(self) -> bool:
        """Whether rows must have a gold answer."""
        asks = not self.context.isdisjoint({"gold", "ground_truth"}) and not self.takes_lists
        return asks if self.gold is None else self.gold

    @property
    def floor(self) -> float:
        """Value of a completion for which the reward fails."""
        return self.low if math.isfinite(self.low) else 0.0

    def set_to(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], float, float]:
        """Return parameters as the types of the function's, and the range of the values under them.

        Raises:
            ConfigError: A parameter that the reward does not have, of another type, or a value that it refuses.
        """
        checked, own = dict(params), self.parameters
        if not self._any_keyword:
            checked = check_values(own, params, of=f"the reward '{self.name}'", key=f"rewards.{self.name}")
        if self.bounds is None:
            return checked, self.low, self.high
        low, high = self.bounds(**{**{name: p.default for name, p in own.items()}, **checked})
        return checked, low, high

    def values(self, groups: Sequence[Group], extra: Mapping[str, Any] | None = None) -> list[float | None]:
        """Return the value of each rollout of the groups, in their order.

        Args:
            groups: Problems with their rollouts.
            extra: What the trainer offers by name (``FROM_THE_TRAINER``).
        """
        count = sum(len(group.rollouts) for group in groups)
        if self.needs_trainer and not extra:
            return [None] * count
        if self.takes_lists:
            return self._from_lists(columns_of(groups), count, extra or {})
        return [self._value(r, [group.problem], extra or {}) for group in groups for r in group.rollouts]

    def __call__(
        self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        """Return one value per completion, as TRL calls rewards.

        Args:
            prompts: Passed to functions of TRL's form.
            completions: In any form that TRL sends (``trl_form.text_of``).
            **columns: Gold answers (``trl_form.GOLDS``), ``completion_ids``, and every other column.

        Raises:
            ConfigError: No column holds the gold answers, or a column that the reward needs is missing.
        """
        if completions is None:
            raise ConfigError(f"reward '{self.name}' was called without completions; write completions=[…]")
        extra = {name: columns.pop(name) for name in FROM_THE_TRAINER if name in columns}
        if self.takes_lists:
            lists = {**with_other_names(columns), "prompts": prompts, "completions": completions}
            return self._from_lists(lists, len(completions), extra)
        rows = rollouts_of(self, completions, columns)
        return [self._value(rollout, problems, extra) for rollout, problems in rows]

    def probe(self, problems: Sequence[Problem] = ()) -> None:
        """Call the function on a demonstration and on prose, for up to two problems of the run, or a made-up one.

        Raises:
            ConfigError: It fails on every one of them, returns something else than a number or None, or ends the program.
        """
        if hasattr(self.function, "probe"):
            self.function.probe(problems, self.form, self.matcher, self.params)
            return
        errors, tried = (
            [],
            list(tryouts(self.form, problems[:2] or [Problem("probe", "What is 3 + 4?", "7")])),
        )
        for group in tried:
            try:
                if self.takes_lists:
                    values = self.call_lists(columns_of([group]), {})
                else:
                    values = [paid_in(self.call(rollout, group.problem, {})) for rollout in group.rollouts]
            except SystemExit as error:
                raise ConfigError(f"reward '{self.name}' ended the program (SystemExit: {error})") from error
            except Exception as error:
                errors.append(error)
                continue
            wrong = next((v for v in values if v is not None and not hasattr(v, "__float__")), None)
            count = len(group.rollouts)
            if wrong is not None or len(values) != count:
                what = (
                    f"{len(values)} values for {count} completions"
                    if wrong is None
                    else f"a value of type {type(wrong).__name__}"
                )
                raise ConfigError(
                    f"reward '{self.name}' returned {what}; expected a number or None for a completion: {FORMS}"
                )
        if len(errors) == len(tried) and problems and not self.needs_trainer:
            raise ConfigError(self._always_fails(errors[0], problems[0]))

    def _always_fails(self, error: Exception, problem: Problem) -> str:
        offered = (
            with_other_names({n: [v] for n, v in problem.columns().items()}) if self.takes_lists else OFFERS
        )
        names = dict.fromkeys(["completions", "prompts", *offered] if self.takes_lists else offered)
        return (
            f"reward '{self.name}' fails on every completion that it was tried on, a demonstration among them: {self._said(error)}. "
            f"It may name: {', '.join(names)}. Try it: algorist rewards explain --completion TEXT --answer GOLD"
        )

    def _said(self, error: Exception) -> str:
        """Return the kind, the first line and the place of an error; that of another process is a RuntimeError with its traceback."""
        said = (str(error).splitlines() or [""])[0]
        places = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        said += f" in {place}" if (place := own_line(error, places, self.place)) else ""
        return said if isinstance(error, RuntimeError) else f"{type(error).__name__}: {said}"

    def call(self, rollout: Rollout, problem: Problem, extra: Mapping[str, Any]) -> Any:
        """Call the function for a rollout."""
        named = {name: offer(rollout, problem) for name, offer in OFFERS.items() if name in self._arguments}
        return self.function(*(() if self._first in OFFERS else (rollout,)), **named, **self._around(extra))

    def call_lists(self, columns: Mapping[str, Any], extra: Mapping[str, Any]) -> list[Any]:
        """Call a function of TRL's form with the columns that it names, or with ``**keywords`` all of them.

        Completions and prompts are texts; chat messages for a function that fails on texts and not on messages.
        """

        def call(columns: Mapping[str, Any]) -> list[Any]:
            taken = {n: column for n, column in columns.items() if self._any_keyword or n in self._arguments}
            arguments = {**taken, **self._around(extra)}
            lacking = (
                n for n, p in self._arguments.items() if p.default is p.empty and p.kind not in STARRED
            )
            if missing := next((name for name in lacking if name not in arguments), None):
                raise TypeError(
                    f"there is no column '{missing}'.{nearest(missing, columns)} Columns: {', '.join(columns)}"
                )
            if not hasattr(values := self.function(**arguments), "__iter__"):
                raise TypeError(f"it returned {values!r:.80}; expected a list of one number per completion")
            return list(values)

        if self.messages is None:
            try:
                values, self.messages = call(columns), False
            except (TypeError, AttributeError, LookupError):
                with suppress(Exception):  # "text"[0]["content"]: it reads messages
                    values, self.messages = call(as_messages(columns, self.form)), True
                if self.messages is None:
                    raise
            return values
        return call(as_messages(columns, self.form) if self.messages else columns)

    def _around(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        around = {name: offer(self) for name, offer in AROUND.items() if name in self._arguments}
        if len(self.form.tags.all()) != 4:
            around.pop("tags", None)  # the function's own default then
        return {**around, **{k: v for k, v in extra.items() if k in self._arguments}, **self.params}

    def _value(self, rollout: Rollout, problems: Sequence[Problem], extra: Mapping[str, Any]) -> float | None:
        """Return the value of a rollout; of several gold answers the one that serves it best."""

        def best() -> float | None:
            neutral = "neutral" in self.parameters  # it says itself what a missing gold answer pays
            if self.needs_gold and not neutral and not all(problem.answer.strip() for problem in problems):
                raise ValueError("the row has no gold answer")
            values = [self._checked(self.call(rollout, problem, extra)) for problem in problems]
            return max((value for value in values if value is not None), default=None)

        return self._or_floor(best)

    def _from_lists(
        self, columns: Mapping[str, Any], count: int, extra: Mapping[str, Any]
    ) -> list[float | None]:
        failed = self.failures
        values = self._or_floor(partial(self.call_lists, columns, extra))
        if self.failures == failed and len(values) != count:
            error = ValueError(f"it returned {len(values)} values for {count} completions")
            values = self._failed(error)
        if self.failures > failed:
            self.failures = failed + count
            return [self.floor] * count
        return [self._or_floor(partial(self._checked, value)) for value in values]

    def _checked(self, value: Any) -> float | None:
        if value is None:
            return None
        number = float(paid_in(value))
        if not abs(number) <= LARGEST:
            raise ValueError(f"it returned {number:g}; expected a finite number of at most {LARGEST:g}")
        slack = 1e-6 * max(1.0, abs(number))
        if not self.low - slack <= number <= self.high + slack:
            raise ValueError(
                f"it returned {number:g}, outside its declared range {self.low:g} … {self.high:g}"
            )
        return number

    def _or_floor(self, call: Callable[[], Any]) -> Any:
        """Run ``call``, or return the floor where it raises; that is counted, and logged the first time."""
        try:
            return call()
        except RewardError:
            raise
        except SystemExit as error:
            raise RewardError(
                f"reward '{self.name}' ended the program (SystemExit: {error}); let it return a number, or None where it does "
                "not apply, and continue with --resume"
            ) from error
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> float:
        if self.failures == 0:
            self.first_failure = self._said(error)
            warning = "reward '%s' failed: %s; such completions get its floor %g and are counted (shown once)"
            log.warning(warning, self.name, self.first_failure, self.floor, exc_info=error)
        self.failures += 1
        return self.floor


def paid_in(value: Any) -> Any:
    """Extract the value from a mapping that a reward of CS336 (``reward``) or verl (``score``) returns; return any other value as it is."""
    if isinstance(value, Mapping) and value.keys().isdisjoint({"reward", "score"}):
        raise TypeError(
            f"it returned a dict with {', '.join(map(str, value)) or 'no key'}, but without the key score"
        )
    return value.get("reward", value.get("score")) if isinstance(value, Mapping) else value


def tryouts(form: PromptFormat, problems: Sequence[Problem]) -> Iterator[Group]:
    """Yield each problem with a demonstration of its answer and prose, together and alone."""
    for problem in problems:
        rollouts = []
        for text in (form.demonstrate(problem.solution or "Step by step.", problem.answer), "It is 8."):
            parsed = form.parse(text)
            grade = grade_completion(text, problem.answer, parsed=parsed, problem=problem.columns())
            rollouts.append(Rollout([1, 2], text, None, False, parsed, grade))
        for part in (rollouts, rollouts[:1], rollouts[1:]):
            yield Group(problem, problem.question, [1], part)


REWARDS: Registry[Reward] = Registry("reward", ["algorist.rewards.basic", *extensions.REWARDS])


def as_reward(name: str, function: Callable[..., Any]) -> Reward:
    """Return a plain function as a reward; its attributes ``low`` and ``high``, or ``@reward``, declare its range."""
    declared = getattr(function, "reward", None)
    if isinstance(declared, Reward):
        return declared
    low, high = getattr(function, "low", -math.inf), getattr(function, "high", math.inf)
    return Reward(name, function, float(low), float(high))


def reward(
    name: str,
    *,
    low: float,
    high: float,
    needs_gold: bool | None = None,
    aliases: tuple[str, ...] = (),
    source: str = "",
    bounds: Callable[..., tuple[float, float]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``function(rollout, problem, *, …) -> float | None``; the function itself stays as it is.

    Args as the attributes of ``Reward``.

    Raises:
        ConfigError: The name is taken, or the signature is not that of a reward.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        made = Reward(name, function, low, high, needs_gold, source, aliases, bounds)
        for key in (name, *aliases):
            REWARDS.register(key)(made)
        function.reward = made  # type: ignore[attr-defined]
        return function

    return decorate

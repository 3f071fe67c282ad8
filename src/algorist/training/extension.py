"""The seam: what a training run may or may not have is an ``Extension``: one folder in ``extensions/``, or one file of a user's.

An extension declares its keys of the recipe (``declared.py``), refuses what cannot be before anything is loaded, and hooks into
the steps of ``training/step.py``.

=============  =====================================  ===================================================================
hook           when                                   what it gives
=============  =====================================  ===================================================================
form           a plan is made                         the prompt format, with instructions, with who replies (``turns``)
check          before anything is loaded              refusals, each a sentence
preview        preflight has sampled                  rows of its table, advice, numbers
memory         a step of GRPO is planned              its bytes
prepare        before GRPO's first step               the policy as it is, the trainer's problems and engine
problems       a rollout batch begins                 the problems that are sampled
avoid          problems are drawn beyond the loader's ids that are not drawn now
ready          before the groups are sampled          the groups, if they were sampled already
groups         the groups are sampled                 others in their place (``Sampled`` is changed)
sampled        the rollout batch is complete          metrics of all groups that were sampled
batch          advantages are known                   numbers per token, once for a rollout batch
update         each optimizer step                    numbers per token that depend on the policy of now
factor         loss of each part                      a factor of the policy's loss, per token or completion
of_head        forward of each part                   what computes numbers per token from the head's states
term           loss of each part                      a further term of the loss per token (B, T)
updated        the gradient of a step is computed     metrics; takes those of the step
open, close    the run's folder is open; the run ends
seen           an ``Event``                           ``Control``: save, stop, evaluate
=============  =====================================  ===================================================================

Hooks run in the order of ``order``, then of registration. The state of every extension is part of each checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from algorist.declared import Declared, extension, registered
from algorist.errors import ConfigError
from algorist.types import Group, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from algorist.config.schema import Recipe
    from algorist.objectives import Objective
    from algorist.prompts import PromptFormat
    from algorist.training.batch import Batch
    from algorist.training.lm_head import OfHead
    from algorist.training.metrics import Metrics

__all__ = ["Control", "Event", "Extension", "Extensions", "Policy", "Sampled", "Sampler", "extension"]


@dataclass
class Sampled:
    """The groups of a rollout batch.

    Attributes:
        groups: The P groups that train.
        spare: Groups that were sampled and do not train, in the order of drawing.
        earlier: Places in ``groups`` of groups that an earlier policy sampled.
        seconds: Wall time of all sampling.
        metrics: Further metrics of the rollout batch.
    """

    groups: list[Group]
    spare: list[Group] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Something that happened in a run; every process is told, with ``rows`` on the main one only.

    Attributes:
        kind: ``stage`` begins, before its first step; ``step``, an optimizer step is done; ``rollouts`` of a rollout batch; ``metrics``,
            a logged line; ``evaluation`` is done; ``evaluation_line``, one between steps is in the metrics as ``eval/…``;
            ``checkpoint`` is written; ``stage_end``, before the final model is saved; ``end`` of a run that was not stopped.
        stage: ``sft``, ``grpo``, or of an evaluation also ``base``; of ``end`` the last one.
        step: Optimizer steps done in the stage; None for an evaluation after the stage.
        values: Of ``metrics`` and evaluations.
        rows: Of ``rollouts``: rows of the rollout store.
        path: The stage's folder.
        trainer: Of ``stage`` and ``stage_end``.
    """

    kind: Literal[
        "stage",
        "step",
        "rollouts",
        "metrics",
        "evaluation",
        "evaluation_line",
        "checkpoint",
        "stage_end",
        "end",
    ]
    stage: str = ""
    step: int | None = 0
    values: Mapping[str, float] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    path: Path | None = None
    trainer: Any = None


@dataclass
class Control:
    """What an extension asks of the loop; what several ask is done together.

    Attributes:
        save: Write a checkpoint after this step.
        stop: End the stage after this step.
        evaluate: Of ``stage``: save and evaluate the policy that the stage begins with.
    """

    save: bool = False
    stop: bool = False
    evaluate: bool = False

    def add(self, other: Control | None) -> None:
        if other is not None:
            self.save |= other.save
            self.stop |= other.stop
            self.evaluate |= other.evaluate


class Sampler(Protocol):
    """What the hooks ``problems`` and ``groups`` get of the trainer."""

    @property
    def group_size(self) -> int:
        """Completions of a problem."""

    @property
    def processes(self) -> int:
        """Processes that sample."""

    def draw(self, number: int, without: set[str]) -> list[Problem]:
        """Return up to ``number`` problems beyond the data loader's whose ids are not in ``without``, nor avoided by an extension."""

    def sample(self, problems: Sequence[Problem]) -> list[Group]:
        """Return their groups from all processes; every process calls this."""

    def useful(self, groups: Sequence[Group]) -> list[bool]:
        """Return which groups carry a signal."""


class Policy(Protocol):
    """What the hooks ``prepare``, ``batch`` and ``update`` get of the trainer."""

    problems: list[Problem]
    engine: Any
    tokenizer: Any
    objective: Objective

    @property
    def rank(self) -> int:
        """Place of this process among them."""

    def log_probs_of(
        self, batch: Batch, *, model: Any = None, entropy: bool = False, of_head: OfHead | None = None
    ) -> Tensor:
        """Return (B, T) without gradient: log-probs under ``model`` (the policy when left out), or the entropies, or ``of_head``'s."""

    def everyone(self, values: Tensor) -> Tensor:
        """Return the values (N,) of all processes, which are 0 or more."""

    def sample_elsewhere(self, problems: Sequence[Problem]) -> Callable[[], list[Group]] | None:
        """Give the engine the weights of now; return what samples with them, for any thread. None: no rollout batch comes after this."""

    def sampler_is_exact(self, batch: Batch) -> bool:
        """Whether the sampler's log-probs are what the trainer would compute."""

    def unwrapped(self) -> Any:
        """Return the policy without the loop's wrappers."""

    def note(self, metrics: Metrics) -> None:
        """Log metrics of a rollout batch."""


class Extension(Declared):
    """One optional capability of a run. Every method may be left out."""

    teaches: bool = False
    """It has a signal of its own, so that a run without any weighted reward still learns."""
    needs_every_row: bool = False
    """Its term is not 0 where the advantage is 0, so that no completion can be left out of the update."""

    needs_old_log_probs: bool = False
    """Its ``batch`` hook reads log π_old of the trainer, also where the sampler's would do."""
    entropy_bonus: float = 0.0
    """Added to ``grpo.entropy_bonus`` in the steps that come; whoever sets it above 0 also needs every row."""

    def form(self, form: PromptFormat) -> PromptFormat:
        """Return how the model is asked."""
        return form

    def check(self, plan: Any) -> Iterable[str]:
        """Return why the plan cannot be run: what was wrong, what was expected, what to do next."""
        return ()

    def preview(self, look: Any) -> Mapping[str, Any] | None:
        """Return what a look (``preflight/completions.py``) before the run shows: ``rows`` and ``advice`` (``why``, ``change``), and numbers.

        ``more_tokens`` of a completion and ``more_s`` (seconds) of a step of GRPO are planned beyond what was sampled and tried.
        """
        return None

    def memory(self, model: Any, rows: int, width: int, tokens: int, *, loaded: bool) -> tuple[int, int]:
        """Return the bytes that it takes on the policy's device in an update, and at another time, beside what is loaded.

        Args:
            model: The policy, or its shapes.
            rows: Completions of a step.
            width: Tokens of the longest.
            tokens: Completion tokens of one forward and backward.
            loaded: Its own models are counted already.
        """
        return 0, 0

    def prepare(self, model: Any, trainer: Policy) -> None:
        """Take the policy as it is before the first step of GRPO; the trainer has its problems and its engine."""

    def problems(self, problems: Sequence[Problem], sampler: Sampler) -> Sequence[Problem]:
        """Return the problems of a rollout batch; as many as came."""
        return problems

    def avoid(self) -> set[str]:
        """Return the ids of problems that are not drawn now."""
        return set()

    def ready(self) -> list[Group]:
        """Return the groups of the problems that ``problems`` returned, where they were sampled before; else none."""
        return []

    def groups(self, sampled: Sampled, sampler: Sampler) -> None:
        """Change what was sampled."""

    def sampled(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Take all groups that the policy sampled for a rollout batch, spare ones included; return metrics."""
        return {}

    def batch(self, batch: Batch, policy: Policy) -> Batch:
        """Return the rollout batch of this process with more numbers per token."""
        return batch

    def update(self, batch: Batch, policy: Policy) -> Batch:
        """Return the batch of one optimizer step with numbers per token that depend on the policy of now."""
        return batch

    def factor(self, log_probs: Tensor, batch: Batch, metrics: Metrics) -> Tensor | None:
        """Return what the policy's loss is multiplied by, (B, T) or (B, 1) without gradient, or None; the arguments are those of ``term``."""
        return None

    def of_head(self, batch: Batch) -> OfHead | None:
        """Return what computes numbers per token where the policy's head has its states; ``term`` has them in ``batch.extra[name]``.

        The logits of a whole batch are never held, so what depends on the whole distribution is computed there, with its gradient.
        """
        return None

    def term(self, log_probs: Tensor, batch: Batch, metrics: Metrics) -> Tensor | None:
        """Return a further term of the loss per token (B, T), or None.

        Args:
            log_probs: (B, T) under the policy, with gradient; 0 outside the mask.
            batch: A part of the step.
            metrics: Takes sums over tokens and completions.
        """
        return None

    def updated(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Take the metrics of an optimizer step, of all processes, once its gradient is computed; return further ones."""
        return {}

    def open(self, run: Any) -> None:
        """Take the run (``runs/pipeline.py``): its plan, its folder, its display; before anything is loaded."""

    def close(self) -> None:
        """Let go, however the run ends."""

    def seen(self, event: Event) -> Control | None:
        """Take notice of an event; return what the loop is to do."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: numbers, texts, lists and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of a checkpoint."""


def _changes_groups(part: Extension) -> bool:
    return type(part).groups is not Extension.groups


def _equal_rewards_teach(part: Extension) -> Iterable[str]:
    """Yield the refusal of an extension that replaces groups without a signal where equal rewards are one."""
    advantage = part.recipe.grpo.advantage
    if _changes_groups(part) and advantage in ("reinforce_plus_plus", "reinforce"):
        other = {"reinforce": "leave_one_out"}.get(advantage, "reinforce_plus_plus_baseline")
        yield (
            f"grpo.{part.name} replaces groups of equal rewards, but these teach under grpo.advantage={advantage}; leave "
            f"grpo.{part.name} out, or take grpo.advantage={other}"
        )


_RETURNED: Mapping[str, tuple[type, ...]] = {
    "check": (Iterable,), "problems": (Sequence,), "sampled": (Mapping,), "updated": (Mapping,), "batch": (), "update": (),
    "groups": (NoneType,), "seen": (Control, NoneType), "state_dict": (dict,),
}  # fmt: skip
"""What hooks return; of ``()`` the type of their first argument."""


def _checked(part: Extension, hook: str, kinds: tuple[type, ...]) -> Any:
    method = getattr(part, hook)

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        value, expected = method(*arguments), kinds or (type(arguments[0]),)
        numbers = kinds != (Mapping,) or all(
            hasattr(v, "__float__") for v in getattr(value, "values", list)()
        )
        if isinstance(value, expected) and not isinstance(value, str) and numbers:
            return value
        raise ConfigError(
            f"extension '{part.name}': {hook}() returned {type(value).__name__}; expected "
            + " or ".join(kind.__name__ for kind in expected)
            + " of numbers" * (not numbers)
        )

    return call


class Extensions:
    """The extensions that take part in a run; each hook asks all of them in order."""

    def __init__(self, parts: Sequence[Extension] = ()) -> None:
        self.parts = list(parts)
        for part in self.parts:
            for hook, kinds in _RETURNED.items():
                setattr(part, hook, _checked(part, hook, kinds))

    @classmethod
    def of(cls, recipe: Recipe) -> Extensions:
        """Return the extensions that the recipe asks for."""
        parts = (part for part in registered() if issubclass(part, Extension) and part.takes_part(recipe))
        return cls([part(recipe) for part in parts])

    @property
    def change_groups(self) -> bool:
        """Whether one of them may put other groups in the places of those that were sampled."""
        return any(_changes_groups(part) for part in self.parts)

    @property
    def teach(self) -> bool:
        return any(part.teaches for part in self.parts)

    @property
    def need_every_row(self) -> bool:
        return any(part.needs_every_row for part in self.parts)

    @property
    def need_old_log_probs(self) -> bool:
        return any(part.needs_old_log_probs for part in self.parts)

    @property
    def entropy_bonus(self) -> float:
        return sum(part.entropy_bonus for part in self.parts)

    def form(self, form: PromptFormat) -> PromptFormat:
        for part in self.parts:
            form = part.form(form)
        return form

    def check(self, plan: Any) -> None:
        """Refuse a plan that one of them cannot run (ConfigError)."""
        refusals = [line for part in self.parts for line in (*part.check(plan), *_equal_rewards_teach(part))]
        if refusals:
            raise ConfigError("\n".join(refusals))

    def preview(self, look: Any) -> dict[str, dict[str, Any]]:
        return {part.name: dict(seen) for part in self.parts if (seen := part.preview(look)) is not None}

    def memory(self, model: Any, rows: int, width: int, tokens: int, *, loaded: bool) -> tuple[int, int]:
        """Return the bytes of all in an update, which are there together, and the most of one at another time."""
        sizes = [part.memory(model, rows, width, tokens, loaded=loaded) for part in self.parts]
        return sum(held for held, _ in sizes), max((alone for _, alone in sizes), default=0)

    def prepare(self, model: Any, trainer: Policy) -> None:
        for part in self.parts:
            part.prepare(model, trainer)

    def problems(self, problems: Sequence[Problem], sampler: Sampler) -> list[Problem]:
        for part in self.parts:
            before, problems = len(problems), part.problems(problems, sampler)
            if len(problems) != before:
                raise ConfigError(f"extension '{part.name}': problems() returned {len(problems)} of {before}")
        return list(problems)

    def avoid(self) -> set[str]:
        return {name for part in self.parts for name in part.avoid()}

    def ready(self) -> list[Group]:
        return next((groups for part in self.parts if (groups := part.ready())), [])

    def groups(self, sampled: Sampled, sampler: Sampler) -> Sampled:
        for part in self.parts:
            part.groups(sampled, sampler)
        return sampled

    def sampled(self, groups: Sequence[Group]) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.sampled(groups).items()}

    def batch(self, batch: Batch, policy: Policy) -> Batch:
        for part in self.parts:
            batch = part.batch(batch, policy)
        return batch

    def update(self, batch: Batch, policy: Policy) -> Batch:
        for part in self.parts:
            batch = part.update(batch, policy)
        return batch

    def factors(self, log_probs: Tensor, batch: Batch, metrics: Metrics) -> list[Tensor]:
        factors = (part.factor(log_probs, batch, metrics) for part in self.parts)
        return [factor for factor in factors if factor is not None]

    def of_head(self, batch: Batch) -> dict[str, OfHead]:
        return {part.name: compute for part in self.parts if (compute := part.of_head(batch)) is not None}

    def terms(self, log_probs: Tensor, batch: Batch, metrics: Metrics) -> list[Tensor]:
        terms = (part.term(log_probs, batch, metrics) for part in self.parts)
        return [term for term in terms if term is not None]

    def updated(self, values: Mapping[str, float]) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.updated(values).items()}

    @contextmanager
    def opened(self, run: Any) -> Iterator[None]:
        """Open all for a run, and close those that were opened however it ends."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.close)
                part.open(run)
            yield

    def seen(self, event: Event) -> Control:
        control = Control()
        for part in self.parts:
            control.add(part.seen(event))
        return control

    def state_dict(self) -> dict[str, Any]:
        return {part.name: state for part in self.parts if (state := part.state_dict())}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for part in self.parts:
            if part.name in states:
                part.load_state_dict(states[part.name])

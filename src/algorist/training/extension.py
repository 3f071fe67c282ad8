"""The seam: what a training run may or may not have is an ``Extension``: one folder in ``extensions/``, or one file of a user's.

An extension declares its keys of the recipe (``declared.py``), refuses what cannot be before anything is loaded, and hooks into the
steps of ``training/step.py``. A hook is a method of ``Extension`` that says when it is called, and whoever calls it asks the extensions
one after the other, in the order of ``order``, then of registration. The state of every extension is part of each checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from algorist.declared import Declared, registered
from algorist.declared import extension as extension
from algorist.errors import ConfigError
from algorist.types import Group, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from algorist.config.schema import Recipe
    from algorist.objectives import Objective
    from algorist.training.batch import Batch
    from algorist.training.lm_head import OfHead
    from algorist.training.metrics import Metrics
    from algorist.training.objective import LossInputs


@dataclass
class Sampled:
    """A rollout batch in the making.

    Attributes:
        problems: The P problems that are sampled.
        groups: Their groups, which train; empty while they are not sampled.
        spare: Groups that were sampled and do not train, in the order of drawing.
        earlier: Places in ``groups`` of groups that an earlier policy sampled.
        seconds: Wall time of all sampling.
        metrics: Further metrics of the rollout batch.
    """

    problems: list[Problem]
    groups: list[Group] = field(default_factory=list)
    spare: list[Group] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Something that happened in a run; every process is told, with ``rows`` on the main one only.

    Attributes:
        kind: ``loaded``, the model that a stage starts from; ``stage`` begins, before its first step; ``sampled``, a rollout batch is
            complete; ``gradient`` of an optimizer step is computed; ``step`` is done; ``rollouts`` of a rollout batch are stored;
            ``metrics``, a logged line; ``evaluation`` is done; ``evaluation_line``, one between steps is in the metrics as ``eval/…``;
            ``checkpoint`` is written; ``stage_end``, before the final model is saved; ``end`` of a run that was not stopped.
        stage: ``sft``, ``grpo``, or of an evaluation also ``base``; of ``end`` the last one.
        step: Optimizer steps done in the stage; None for an evaluation after the stage.
        values: Of ``metrics`` and evaluations; of ``gradient`` the metrics of the step, of all processes.
        groups: Of ``sampled``: all groups that the policy sampled, spare ones included.
        rows: Of ``rollouts``: rows of the rollout store.
        path: The stage's folder.
        trainer: Of ``stage`` and ``stage_end``.
    """

    kind: Literal[
        "loaded", "stage", "sampled", "gradient", "step", "rollouts", "metrics", "evaluation", "evaluation_line", "checkpoint", "stage_end",
        "end",
    ]  # fmt: skip
    stage: str = ""
    step: int | None = 0
    values: Mapping[str, float] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    path: Path | None = None
    trainer: Any = None


@dataclass
class Control:
    """Requests of an extension to the loop; those of several are combined.

    Attributes:
        save: Write a checkpoint after this step.
        stop: End the stage after this step.
        evaluate: Of ``stage``: save and evaluate the policy that the stage begins with.
        metrics: Of ``sampled`` and ``gradient``: numbers to log with the step.
    """

    save: bool = False
    stop: bool = False
    evaluate: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    def add(self, other: Control | None) -> None:
        if other is not None:
            self.save |= other.save
            self.stop |= other.stop
            self.evaluate |= other.evaluate
            self.metrics = {**self.metrics, **other.metrics}


class SamplingTrainer(Protocol):
    """Trainer interface for the hooks ``problems`` and ``groups``."""

    resting: set[str]
    """Ids of problems that ``draw`` leaves out; set by extensions in ``problems``."""

    @property
    def group_size(self) -> int:
        """Completions of a problem."""

    @property
    def processes(self) -> int:
        """Processes that sample."""

    def draw(self, number: int, without: set[str]) -> list[Problem]:
        """Return up to ``number`` problems beyond the data loader's whose ids are neither in ``without`` nor resting."""

    def sample(self, problems: Sequence[Problem]) -> list[Group]:
        """Return their groups from all processes; every process calls this."""

    def useful(self, groups: Sequence[Group]) -> list[bool]:
        """Mark the groups that carry a signal."""


class PolicyTrainer(Protocol):
    """Trainer interface for the hooks ``prepare``, ``batch`` and ``update``."""

    problems: list[Problem]
    engine: Any
    tokenizer: Any
    objective: Objective
    rewards: Any

    @property
    def rank(self) -> int:
        """Rank of this process."""

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

    def check(self, plan: Any) -> Iterable[str]:
        """Refuse a plan before anything is loaded: yield what was wrong, what was expected, what to do next."""
        return ()

    def preview(self, look: Any) -> Mapping[str, Any] | None:
        """Tell preflight what it shows, of a step that is planned or of completions that were sampled.

        Args:
            look: ``preflight.memory.PlannedStep``, for ``bytes`` that are taken on the policy's device beside what is loaded, (in an
                update, at another time); or ``preflight.completions.Look``, for ``rows`` of the table, ``advice`` (``why``, ``change``),
                ``more_tokens`` of a completion and ``more_s`` (seconds) of a step beyond what was sampled and tried, and numbers.
        """
        return None

    def prepare(self, model: Any, trainer: PolicyTrainer) -> None:
        """Take the policy as it is before the first step of GRPO; the trainer has its problems and its engine."""

    def problems(self, sampled: Sampled, sampler: SamplingTrainer) -> None:
        """Choose other problems for a rollout batch that begins, as many; or put there the groups that were sampled before."""

    def groups(self, sampled: Sampled, sampler: SamplingTrainer) -> None:
        """Change the sampled groups, before advantages are computed."""

    def batch(self, batch: Batch, policy: PolicyTrainer) -> Batch:
        """Return the rollout batch of this process, whose advantages are known, with more numbers per token."""
        return batch

    def update(self, batch: Batch, policy: PolicyTrainer) -> Batch:
        """Return the batch of one optimizer step with numbers per token that depend on the policy of now."""
        return batch

    def of_head(self, batch: Batch) -> OfHead | None:
        """Return a function that computes numbers per token from the policy head's inputs; ``loss`` has them in ``batch.extra``.

        The logits of a whole batch are never held, so what depends on the whole distribution is computed there, with its gradient.
        """
        return None

    def loss(self, inputs: LossInputs) -> None:
        """Change the loss of a part of a step: multiply the policy's (``factors``), add to it (``terms``)."""

    def open(self, run: Any) -> Callable[[], None] | None:
        """Take the run (``runs/pipeline.py``), its plan, folder and display, before anything is loaded; return what ends it, however it does."""
        return None

    def seen(self, event: Event) -> Control | None:
        """Take notice of an event; return what the loop is to do."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers, texts, lists and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of a checkpoint."""


def _changes_groups(member: Extension) -> bool:
    return type(member).groups is not Extension.groups


def _equal_rewards_teach(member: Extension) -> Iterable[str]:
    """Yield the refusal of an extension that replaces groups without a signal where equal rewards are one."""
    advantage = member.recipe.grpo.advantage
    if _changes_groups(member) and advantage in ("reinforce_plus_plus", "reinforce"):
        other = {"reinforce": "leave_one_out"}.get(advantage, "reinforce_plus_plus_baseline")
        yield (
            f"grpo.{member.name} replaces groups of equal rewards, but these teach under grpo.advantage={advantage}; leave "
            f"grpo.{member.name} out, or take grpo.advantage={other}"
        )


_RETURNED: Mapping[str, tuple[Any, ...]] = {
    "check": (Iterable,), "problems": (NoneType,), "groups": (NoneType,), "batch": (), "update": (), "loss": (NoneType,),
    "open": (Callable, NoneType), "seen": (Control, NoneType), "state_dict": (dict,),
}  # fmt: skip
"""Return types of hooks; ``()`` is the type of their first argument."""


def _checked(member: Extension, hook: str, kinds: tuple[Any, ...]) -> Any:
    method = getattr(member, hook)

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        value, expected = method(*arguments), kinds or (type(arguments[0]),)
        if not isinstance(value, expected) or isinstance(value, str):
            raise ConfigError(
                f"extension '{member.name}': {hook}() returned {type(value).__name__}; expected "
                + " or ".join(kind.__name__ for kind in expected)
            )
        if isinstance(value, Control) and not all(hasattr(v, "__float__") for v in value.metrics.values()):
            raise ConfigError(f"extension '{member.name}': {hook}() returned metrics that are not numbers")
        return value

    return call


class Extensions:
    """The extensions that take part in a run, in the order of their hooks."""

    def __init__(self, members: Sequence[Extension] = ()) -> None:
        self.members = list(members)
        for member in self.members:
            for hook, kinds in _RETURNED.items():
                setattr(member, hook, _checked(member, hook, kinds))

    @classmethod
    def of(cls, recipe: Recipe) -> Extensions:
        """Return the extensions that the recipe asks for."""
        kinds = (kind for kind in registered() if issubclass(kind, Extension) and kind.takes_part(recipe))
        return cls([kind(recipe) for kind in kinds])

    def __iter__(self) -> Iterator[Extension]:
        return iter(self.members)

    @property
    def change_groups(self) -> bool:
        """Whether one of them may put other groups in the places of those that were sampled."""
        return any(map(_changes_groups, self))

    def check(self, plan: Any) -> None:
        """Refuse a plan that one of them cannot run (ConfigError)."""
        refusals = [line for member in self for line in (*member.check(plan), *_equal_rewards_teach(member))]
        if refusals:
            raise ConfigError("\n".join(refusals))

    def preview(self, look: Any) -> dict[str, dict[str, Any]]:
        """Collect the previews of the extensions that have one, by name."""
        return {member.name: dict(says) for member in self if (says := member.preview(look)) is not None}

    def problems(self, sampled: Sampled, sampler: SamplingTrainer) -> None:
        """Let each choose the problems of a rollout batch; their number stays (ConfigError)."""
        count = len(sampled.problems)
        for member in self:
            member.problems(sampled, sampler)
            if len(sampled.problems) != count:
                raise ConfigError(
                    f"extension '{member.name}': problems() left {len(sampled.problems)} of {count}"
                )

    @contextmanager
    def opened(self, run: Any) -> Iterator[None]:
        """Open all for a run, and end those that were opened however it ends."""
        with ExitStack() as stack:
            for member in self:
                if (end := member.open(run)) is not None:
                    stack.callback(end)
            yield

    def seen(self, event: Event) -> Control:
        """Show all an event; return what they ask of the loop together."""
        control = Control()
        for member in self:
            control.add(member.seen(event))
        return control

    def state_dict(self) -> dict[str, Any]:
        return {member.name: state for member in self if (state := member.state_dict())}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for member in self:
            if member.name in states:
                member.load_state_dict(states[member.name])

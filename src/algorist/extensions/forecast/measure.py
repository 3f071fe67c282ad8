"""Numbers of a recipe before its GRPO: samples of held-out problems, and what the first steps of training do to them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from algorist.data.problems import fitting_problems
from algorist.errors import ConfigError
from algorist.extensions.forecast.agreement import Agreement, right_of
from algorist.models.load import Policy
from algorist.models.memory import bounded_memory
from algorist.models.modes import eval_mode
from algorist.models.precision import autocast_of
from algorist.preflight.completions import Sampler
from algorist.preflight.run import start_policy
from algorist.preflight.trial import grpo_trainer
from algorist.runs.plan import Plan
from algorist.training.batch import Batch
from algorist.training.log_probs import LogProbs
from algorist.types import Group

PROBLEMS, SAMPLES = 48, 8
FEWEST, MOST, SHARE = 5, 10, 0.1
"""Steps of the trial: a tenth of the run's, 5 at least, 10 at most."""
AT_ONCE = 8
"""Problems of the first call, which shows how long the others take."""


@dataclass(frozen=True)
class Measured:
    """Numbers of a model and a recipe before GRPO.

    Attributes:
        parameters: Of the model.
        samples: Completions of each problem, k.
        right: Of each held-out problem the right ones.
        right_after: The same, sampled after the trial.
        unread: Share of the completions without a readable answer.
        unread_after: The same after the trial.
        truncated: Share that the length limit ended.
        tokens: Mean length of a completion.
        steps: Optimizer steps of the run.
        tried: Of the trial.
        work: Learning rate summed over the run, in units of its sum over the trial.
        shift: Change of pass@1 when what was sampled before is weighted by its probabilities after the trial.
        drift: Mean fall of the log-prob of a sampled completion in the trial, nats.
        useful: Share of the trial's groups whose advantages are not all 0.
        agree: Correlation of advantage and correctness within the trial's groups; 0 where one of them is constant.
        accuracy: Mean correctness of each step of the trial, on training problems.
        seconds_per_step: Median without the first step.
        teacher: Another model teaches.
    """

    parameters: int
    samples: int
    right: list[int]
    right_after: list[int]
    unread: float
    unread_after: float
    truncated: float
    tokens: float
    steps: int
    tried: int
    work: float
    shift: float
    drift: float
    useful: float
    agree: float
    accuracy: list[float]
    seconds_per_step: float
    teacher: bool
    moved: list[list[float]] = field(default_factory=list, repr=False)
    """Change of each sampled completion's log-prob by the trial, nats."""

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready row without the single completions."""
        values = asdict(self)
        del values["moved"]
        return {name: round(v, 5) if isinstance(v, float) else v for name, v in values.items()}


@dataclass
class _Trial(TrainerCallback):
    """Ends a training after some steps, and keeps what they took and what their groups were."""

    until: float
    most: int = MOST
    seconds: list[float] = field(default_factory=list)
    agreement: Agreement = field(default_factory=Agreement)
    accuracy: list[float] = field(default_factory=list)
    began: float = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.most = min(MOST, max(FEWEST, int(SHARE * state.max_steps)))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        control.should_training_stop |= state.global_step >= self.most or time.monotonic() > self.until

    def on_rollouts(self, step: int, groups: Sequence[Group], advantages_PG: torch.Tensor) -> None:
        right = np.concatenate([right_of(group) for group in groups])
        self.accuracy.append(round(float(right.mean()), 4))
        for group, advantages in zip(groups, advantages_PG.tolist(), strict=True):
            self.agreement.add(group, advantages)


def measure(
    plan: Plan,
    *,
    model: Path | str | None = None,
    problems: int = PROBLEMS,
    samples: int = SAMPLES,
    minutes: float = 4.0,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Sample held-out problems, train a few steps in a temporary folder, and sample again.

    Args:
        plan: The plan of the run.
        model: The model that GRPO starts from, where SFT has made it already; else the recipe's.
        problems: Held-out problems, at most.
        samples: Completions of each.
        minutes: For all of it, about: half of it for the trial; fewer problems are sampled, and fewer steps tried, where they do not fit.
        say: Shows what is being done.

    Raises:
        ConfigError: The recipe has no GRPO, or nothing is held out.
    """
    recipe = plan.recipe
    if not recipe.grpo.enabled:
        raise ConfigError(
            f"recipe {recipe.name} has no GRPO, which is what a forecast is about: grpo.enabled=true"
        )
    if not plan.problems.held_out:
        raise ConfigError(
            f"recipe {recipe.name} holds nothing out; a forecast needs data.eval, and eval.enabled=true"
        )
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    with bounded_memory(plan.device):
        return _measure(plan, start_policy(plan, model), problems, samples, minutes, say)


def _measure(
    plan: Plan, policy: Policy, problems: int, samples: int, minutes: float, say: Callable[[str], None]
) -> Measured:
    recipe, data = plan.recipe, plan.problems
    plan = plan.opened(policy.tokenizer)
    data.train = fitting_problems(recipe.data.train, data.train, plan.form, policy.tokenizer)
    held_out = fitting_problems(recipe.data.eval, data.held_out, plan.form, policy.tokenizer)[:problems]
    groups = _groups(Sampler(plan, policy), held_out, samples, 15 * minutes, say)
    before = _log_probs(plan, policy, groups)
    say("training a few steps, then sampling the same problems again …")
    trial, steps, work = _try(plan, policy, time.monotonic() + 30 * minutes)
    moved = [after - first for after, first in zip(_log_probs(plan, policy, groups), before, strict=True)]
    again = Sampler(plan, policy).draw([group.problem for group in groups], samples)
    flat = [rollout for group in groups for rollout in group.rollouts]
    right = [right_of(group) for group in groups]
    return Measured(
        parameters=sum(p.numel() for p in policy.model.parameters()),
        samples=samples,
        right=[int(row.sum()) for row in right],
        right_after=[int(row.sum()) for row in map(right_of, again)],
        unread=_unread(groups),
        unread_after=_unread(again),
        truncated=sum(r.truncated for r in flat) / len(flat),
        tokens=sum(len(r.completion_ids) for r in flat) / len(flat),
        steps=steps,
        tried=len(trial.seconds),
        work=work,
        shift=reweighted(right, moved),
        drift=-float(np.mean(np.concatenate(moved))),
        useful=trial.agreement.useful,
        agree=trial.agreement.value,
        accuracy=trial.accuracy,
        seconds_per_step=median(trial.seconds[1:] or trial.seconds),
        teacher=bool(getattr(recipe.grpo, "teacher", None)),
        moved=[[round(float(value), 3) for value in row] for row in moved],
    )


def reweighted(right: Sequence[np.ndarray], moved: Sequence[np.ndarray]) -> float:
    """Return the change of pass@1 when each problem's completions weigh by how much likelier they became.

    Self-normalised importance weights: of far less variance than sampling again, and between −pass@1 and 1 − pass@1 however far the
    policy moved.
    """
    changes = []
    for c, d in zip(right, moved, strict=True):
        weights = np.exp(d - d.max())
        changes.append(float(weights @ c / weights.sum() - c.mean()))
    return float(np.mean(changes))


def _groups(
    sampler: Sampler, problems: Sequence[Any], samples: int, seconds: float, say: Callable[[str], None]
) -> list[Group]:
    """Return the groups of as many problems as fit into the time, some at least."""
    say(f"sampling {samples} completions of held-out problems …")
    began = time.monotonic()
    groups = sampler.draw(problems[:AT_ONCE], samples)
    fitting = int(AT_ONCE * (seconds / max(1e-6, time.monotonic() - began) - 1))
    rest = problems[AT_ONCE:][: max(0, fitting)]
    return groups + (sampler.draw(rest, samples) if rest else [])


def _unread(groups: Sequence[Group]) -> float:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return sum(r.parsed.answer is None for r in rollouts) / len(rollouts)


@torch.no_grad()
def _log_probs(plan: Plan, policy: Policy, groups: Sequence[Group]) -> list[np.ndarray]:
    """Return of each group the log-probs of its completions, of the tokens that were sampled."""
    log_probs = LogProbs(temperature=plan.recipe.grpo.temperature or 1.0, verify=False)
    autocast, values = partial(autocast_of, policy.model, plan.device), []
    with eval_mode(policy.model):
        for group in groups:
            batch = Batch.from_groups([group], torch.zeros(len(group.rollouts)), device=plan.device)
            rows, _ = log_probs(policy.model, batch, autocast=autocast)
            values.append((rows * batch.mask).sum(-1).double().cpu().numpy())
    return values


def _try(plan: Plan, policy: Policy, until: float) -> tuple[_Trial, int, float]:
    """Train the first steps of the run's GRPO on the policy, until a time; return them, the steps of the run, and its ``work``."""
    trial, short = _Trial(until), {"save_steps": 10**9, "logging_steps": 10**9, "eval_every": None}
    with tempfile.TemporaryDirectory() as folder:
        common = {"model": policy.model, "tokenizer": policy.tokenizer, "output_dir": Path(folder)}
        common |= {"seed": plan.recipe.seed, "device": plan.device, "callbacks": [trial]}
        trainer = grpo_trainer(plan, short, common | {"on_rollouts": trial.on_rollouts})
        trainer.train()
    steps = trainer.state.max_steps
    scheduler: Any = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    rate = scheduler.lr_lambdas[0] if hasattr(scheduler, "lr_lambdas") else lambda _: 1.0
    tried = sum(rate(step) for step in range(len(trial.seconds)))
    return trial, steps, sum(rate(step) for step in range(steps)) / max(1e-12, tried)

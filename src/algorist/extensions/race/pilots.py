"""Pilots of routes: what all take is planned first; each trains the start anew for a while, and is sampled on training problems."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from algorist.cli.arguments import find_model
from algorist.config.schema import Recipe
from algorist.config.yaml_text import to_yaml
from algorist.data.load import demonstrated_answer
from algorist.data.problems import fitting_problems
from algorist.errors import ConfigError
from algorist.evaluation.run import Pulse
from algorist.extensions.race.expect import Expected, Part, expect
from algorist.extensions.race.routes import EVEN, GRPO, SFT, TEACHER, TrainingRoute
from algorist.models.load import Policy, policy_of
from algorist.preflight.completions import Sampler
from algorist.preflight.run import start_policy
from algorist.preflight.time import Sizes, batch_arithmetic, measure, seconds_of, total
from algorist.preflight.trial import grpo_trainer
from algorist.prompts.chat import encode_prompt
from algorist.rewards import build_rewards
from algorist.runs.draft import Draft
from algorist.runs.plan import Plan, make_plan
from algorist.store.run_folder import RunFolder
from algorist.store.run_log import Display
from algorist.system import processor_seconds
from algorist.training.callbacks import ProgressCallback
from algorist.training.sft import demonstrations, make_sft_trainer
from algorist.types import Problem
from algorist_grader import grade

SHARE, FILL = 0.1, 0.5
"""Most of the run's time for all pilots; how much of that is planned, since they take more than their steps."""
FEWEST, MOST, SAMPLES = 24, 256, 4
"""Problems that pilots are sampled on, and completions of each."""
LEAST = 2
"""Steps of a stage, at least."""
LOOKING = 0.4
"""Share of the pilots' time for samples."""


@dataclass(frozen=True)
class Budget:
    """Time that a race takes, planned before it begins and kept in its folder.

    Attributes:
        recipe: Hash of the recipe.
        planned: Seconds of the whole run, evaluations included.
        training: Seconds of its stages.
        seconds: Of all pilots.
        per_step: Stage → seconds of a step.
        share: SFT's share of the training.
        problems: Those that pilots are sampled on.
        pilot: Seconds of each pilot's training.
    """

    recipe: str
    planned: float
    training: float
    seconds: float
    per_step: dict[str, float]
    share: float
    problems: int
    pilot: float


@dataclass
class Pilot:
    """Results of a pilot: level of each problem (N,) at the start (``base``) and after its stages; steps of these; seconds."""

    levels: dict[str, list[float]]
    steps: dict[str, int]
    right: float = 1.0
    """Share of right demonstrations."""
    passes: float = 0.0
    """Passes over the demonstrations that a step of SFT is."""
    seconds: float = 0.0


class _Clock(TrainerCallback):
    """Ends a stage of a pilot when it has had its seconds; ``steps`` were done."""

    def __init__(self, now: Callable[[], float], seconds: float) -> None:
        self.now, self.seconds, self.steps = now, seconds, 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.seconds += self.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps = state.global_step
        control.should_training_stop |= self.steps >= LEAST and self.now() >= self.seconds


class _Start:
    """A policy before any training, with its plan; ``held`` are training problems that no pilot trains on, drawn evenly."""

    def __init__(self, recipe: Recipe) -> None:
        plan = make_plan(Draft.of(recipe, in_folder=False))
        torch.set_num_threads(recipe.threads or torch.get_num_threads())
        self.policy = start_policy(plan, None)
        self.plan, data = plan.opened(self.policy.tokenizer), plan.problems
        train = fitting_problems(recipe.data.train, data.train, plan.form, self.policy.tokenizer)
        self.held = train[:: max(6, len(train) // MOST)][:MOST]
        questions = {p.question for p in self.held}
        data.train = [p for p in train if p.question not in questions]
        data.sft = [p for p in data.sft if p.question not in questions] or data.sft
        trained = (p for p in self.policy.model.parameters() if p.requires_grad)
        self._weights = [(p, p.detach().to("cpu", copy=True)) for p in trained]

    def again(self) -> _Start:
        """Take back what a pilot has learned."""
        for p, value in self._weights:
            p.data.copy_(value)
        return self


@dataclass
class Race:
    """Pilots of routes in a folder; those that are finished are not repeated.

    Attributes:
        folder: Of the race.
        recipe: Of the run.
        routes: All routes.
        read: Returns the recipe with changes.
        display: Shows the pilots.
        pilots: Route → what its pilot reached; the teacher's own level too.
        dropped: Route → why it was not tried.
    """

    folder: RunFolder
    recipe: Recipe
    routes: Sequence[TrainingRoute]
    read: Callable[[Sequence[str]], Recipe]
    display: Display
    pilots: dict[str, Pilot] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    _starts: dict[bool, _Start] = field(default_factory=dict)
    budget: Budget = field(init=False)

    def _now(self) -> float:
        """Return the processor's seconds; with a GPU those that pass."""
        on_gpu = torch.cuda.is_available() and self.recipe.device != "cpu"
        return time.monotonic() if on_gpu else processor_seconds()

    def plan(self, seconds: float | None) -> None:
        """Plan the race, or read what was planned.

        Raises:
            ConfigError: The folder is another race's, or a tenth of the run is too short.
        """
        digest = hashlib.sha256(to_yaml(self.recipe).encode()).hexdigest()[:16]
        stored = self.folder.read_json("race.json")
        if stored is not None and (stored["recipe"] != digest or seconds not in (None, stored["seconds"])):
            raise ConfigError(
                f"{self.folder.path} holds the pilots of another recipe or length; take another name: run_name=NAME"
            )
        self.budget = Budget(**stored) if stored else self._plan(digest, seconds)
        self.folder.write_json("race.json", asdict(self.budget))

    def _plan(self, digest: str, seconds: float | None) -> Budget:
        """Measure the machine, and divide the time between pilots and their samples."""
        start = self._starts[False] = _Start(self.read(self.routes[0].change))
        plan, policy, routes = start.plan, start.policy, self.routes
        sizes = Sizes.of(plan.recipe, plan.problems, policy, plan.form, sft=plan.recipe.sft.enabled)
        prompt = encode_prompt(plan.form, policy.tokenizer, plan.problems.train[0].question)
        speed = measure(plan.recipe, policy, prompt, plan.device)
        times = seconds_of(plan.recipe, sizes, speed, batch_arithmetic(plan.recipe, sizes.train, sizes.sft))
        own = {name: times[name] for name in times if getattr(getattr(self.recipe, name, 1), "enabled", True)}
        stages = {name: part["seconds"] for name, part in own.items() if name in (SFT, GRPO)}
        budget = SHARE * total(own) if seconds is None else seconds
        looks = 2 + sum(len(route.stages) for route in routes)
        one = speed.sampling(sizes.prompt, list(sizes.completions)) / len(sizes.completions) * SAMPLES
        count = int(max(FEWEST, LOOKING * FILL * budget / looks / one))
        pilot = (FILL * budget - looks * min(count, len(start.held)) * one) / len(routes)
        per_step = {name: times[name]["seconds_per_step"] for name in (SFT, GRPO) if name in times}
        if pilot < max(per_step.values()) and seconds is None:
            least = (looks * count * one + 2 * len(routes) * sum(per_step.values())) / FILL
            raise ConfigError(
                f"the run takes about {total(own):.0f} seconds: a tenth of it is too short for {len(routes)} pilots and their samples. "
                f"Run it, or give the race more: --seconds {max(1, round(least))}"
            )
        training = sum(stages.values())
        share = stages[SFT] / training if len(stages) > 1 else EVEN
        return Budget(digest, total(own), training, budget, per_step, share, count, max(0.0, pilot))

    def run(self) -> bool:
        """Run the pilots; return whether Ctrl-C ended it."""
        try:
            for route in self.routes:
                base = next(iter(self.pilots.values())).levels["base"] if self.pilots else [1.0]
                if route.stages == (GRPO,) and route.learner == GRPO and not any(base):
                    self.dropped[route.name] = "nothing is right before it, so there is nothing to reinforce"
                else:
                    self.pilots[route.name] = self._kept(route.name, partial(self._pilot, route))
            taught = [route for route in self.routes if route.learner == TEACHER]
            model = self.read(taught[0].change).grpo.teacher.model if taught else ""  # type: ignore[attr-defined]
            if model and Path(model).is_dir():
                self.pilots[TEACHER] = self._kept(TEACHER, partial(self._look_at, model))
        except KeyboardInterrupt:
            return True
        return False

    def _kept(self, name: str, do: Callable[[], Pilot]) -> Pilot:
        """Return a pilot from the folder, or do it and keep it."""
        file = f"{name.lower().replace(', ', '-').replace(' ', '-')}.json"
        if (stored := self.folder.read_json(file)) is not None:
            return Pilot(**stored)
        began = self._now()
        pilot = do()
        pilot.seconds = self._now() - began
        self.folder.write_json(file, asdict(pilot))
        last = 100 * np.mean(list(pilot.levels.values())[-1])
        self.display.say(f"{name}: {last:.1f} % of held-out training problems, {pilot.seconds:.1f} s")
        return pilot

    def _start(self, route: TrainingRoute) -> _Start:
        """Return the start of a route, as it was before any pilot."""
        bare = "tools=null" in route.change
        if bare not in self._starts:
            self._starts[bare] = _Start(self.read(route.change))
        return self._starts[bare].again()

    def _pilot(self, route: TrainingRoute) -> Pilot:
        start, recipe = self._start(route), self.read(route.change)
        rewards = build_rewards(
            recipe.rewards, start.plan.form, matcher=recipe.matcher
        )  # a pilot's own: they may count calls
        draft = replace(start.plan.draft, recipe=recipe, rewards=rewards)
        plan = make_plan(replace(draft, problems=start.plan.problems))
        look = partial(self._level, plan, start, start.policy, route.name)
        known = (
            next((pilot.levels for pilot in self.pilots.values()), {})
            if start is self._starts.get(False)
            else {}
        )
        done, levels = {}, {"base": known.get("base") or look()}
        for stage, count in self._steps(route, self.budget.pilot).items():
            done[stage] = self._train(plan, start.policy, stage, max(LEAST, count), route.name)
            levels[stage] = look()
        shown = plan.problems.sft
        rows = recipe.sft.batch_size * recipe.sft.gradient_accumulation_steps
        return Pilot(levels, done, _right_of(shown), rows / max(1, len(shown)))

    def _look_at(self, model: str) -> Pilot:
        """Return the level of a teacher."""
        start = self._start(self.routes[0])
        policy = policy_of(find_model(model)[0], device=start.plan.device, like=start.plan.recipe.model)
        return Pilot({"base": self._level(start.plan, start, policy, TEACHER)}, {})

    def _steps(self, route: TrainingRoute, seconds: float) -> dict[str, int]:
        return route.steps(seconds, self.budget.per_step, self.budget.share)

    def _train(self, plan: Plan, policy: Policy, stage: str, steps: int, name: str) -> int:
        """Train a stage of a pilot, its schedule over the steps that should fit; return those that did."""
        clock, shown = _Clock(self._now, steps * self.budget.per_step[stage]), f"{name}: {stage}"
        progress = ProgressCallback(partial(self.display.step, shown), partial(self.display.progress, shown))
        short = {"max_steps": steps, "save_steps": 10**9, "logging_steps": 10**9, "eval_every": None}
        section = plan.recipe.grpo if stage == GRPO else plan.recipe.sft
        short |= {"warmup_steps": 0} if section.warmup_steps else {}  # of the whole run; a ratio stays one
        with tempfile.TemporaryDirectory() as folder:
            common: dict[str, Any] = {"model": policy.model, "tokenizer": policy.tokenizer}
            common |= {"output_dir": Path(folder), "seed": plan.recipe.seed, "device": plan.device}
            common |= {"callbacks": [clock, progress]}
            if stage == GRPO:
                trainer: Any = grpo_trainer(plan, short, common)
            else:
                sft, data = plan.recipe.sft, plan.problems.sft
                needed = steps * sft.batch_size * sft.gradient_accumulation_steps
                some = data[:: max(1, len(data) // needed)]
                demos = demonstrations(some, plan.form, policy.tokenizer, sft.source)
                trainer = make_sft_trainer(demos=demos, section=sft.model_copy(update=short), **common)
            trainer.train()
        self.display.finished(shown)
        return clock.steps

    def _level(self, plan: Plan, start: _Start, policy: Policy, name: str) -> list[float]:
        """Return the share of right completions of each problem, sampled as GRPO samples."""
        sampler, shown, held = Sampler(plan, policy), f"{name}: samples", start.held[: self.budget.problems]
        with Pulse(partial(self.display.progress, shown), len(held)) as pulse:
            pulse.sampling(sampler.engine, 0, len(held))
            groups = sampler.draw(held, SAMPLES)
        self.display.finished(shown)
        return [float(np.mean([bool(r.grade and r.grade.correct) for r in g.rollouts])) for g in groups]

    def expected(self) -> Expected:
        """Return the expected ends of the routes whose pilots are done."""
        parts: dict[str, list[Part]] = {}
        budget, teacher = self.budget, self.pilots.get(TEACHER)
        for route in (route for route in self.routes if route.name in self.pilots):
            pilot, whole = self.pilots[route.name], self._steps(route, budget.training)
            parts[route.name], before = [], np.array(pilot.levels["base"])
            for stage in route.stages:
                part = budget.per_step[SFT] / budget.training if stage == SFT else 1.0
                tried, every = pilot.steps[stage] * part, whole[stage] * part
                learner, after = SFT if stage == SFT else route.learner, np.array(pilot.levels[stage])
                passes = pilot.passes * whole[stage]
                parts[route.name].append(Part(learner, tried, every, before, after, passes))
                before = after
        right = next(iter(self.pilots.values())).right
        level = None if teacher is None else np.array(teacher.levels["base"])
        return expect(parts, right, level, self.recipe.grpo.group_size)


def _right_of(shown: Sequence[Problem]) -> float:
    """Return the share of demonstrations whose own answer is right, of a thousand; one that states none is taken for right."""
    some = shown[:: max(1, len(shown) // 1000)]
    stated = [(p, answer) for p in some if (answer := demonstrated_answer(p))]
    right = [grade(answer, p.answer, problem=p.columns()).correct for p, answer in stated]
    return float(np.mean(right)) if right else 1.0

"""Pilots of routes: what all take is planned first; each trains a copy of the start briefly and is evaluated on training problems."""

from __future__ import annotations

import gc
import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from algorist.cli.arguments import find_model
from algorist.config.explain import to_yaml
from algorist.config.schema import Recipe
from algorist.data.load import demonstrated_answer
from algorist.data.problems import fitting_problems
from algorist.errors import ConfigError
from algorist.evaluation.run import Pulse
from algorist.extensions.race.expect import Expected, Known, Part, expect
from algorist.extensions.race.routes import EVEN, GRPO, SFT, TEACHER, Route
from algorist.models.load import Policy, policy_of
from algorist.models.precision import on_gpu
from algorist.preflight.completions import Sampler
from algorist.preflight.run import start_policy
from algorist.preflight.time import Sizes, batch_arithmetic, measure, seconds_of, total
from algorist.preflight.trial import grpo_trainer
from algorist.prompts.chat import encode_prompt
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
"""Most of the run's time for all pilots; how much of that is planned, since pilots take more than their steps."""
FEWEST, MOST, SAMPLES = 24, 256, 4
"""Problems that pilots are evaluated on, and completions of each."""
LOOKING = 0.4
"""Share of the pilots' time for evaluations."""
Read = Callable[[Sequence[str]], Recipe]


@dataclass(frozen=True)
class Budget:
    """What a race takes, planned before it begins and kept in its folder.

    Attributes:
        recipe: Hash of the recipe.
        planned: Seconds of the whole run, evaluations included.
        training: Seconds of its stages.
        seconds: Of all pilots.
        per_step: Stage → seconds of a step.
        share: SFT's share of the training.
        problems: Of each evaluation.
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


class Start:
    """A policy before any training, with its plan, and some training problems that no pilot trains on.

    Args:
        recipe: With both stages on where there are demonstrations.
    """

    def __init__(self, recipe: Recipe) -> None:
        plan = make_plan(Draft.of(recipe, in_folder=False))
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        self.policy = start_policy(plan, None)
        self.plan = plan.opened(self.policy.tokenizer)
        data = self.plan.problems
        data.train = fitting_problems(recipe.data.train, data.train, self.plan.form, self.policy.tokenizer)
        self._weights = {
            name: p.detach().clone() for name, p in self.policy.model.named_parameters() if p.requires_grad
        }

    @torch.no_grad()
    def again(self) -> None:
        """Take back what a pilot has learned."""
        for name, p in self.policy.model.named_parameters():
            if name in self._weights:
                p.copy_(self._weights[name])

    def hold_out(self, count: int) -> list[Problem]:
        """Return training problems, drawn evenly, and take them out of training and demonstrations."""
        data = self.plan.problems
        held = data.train[:: max(2, len(data.train) // count)][:count]
        asked = {p.question for p in held}
        data.train = [p for p in data.train if p.question not in asked]
        data.sft = [p for p in data.sft if p.question not in asked] or data.sft
        return held


def plan_race(recipe: Recipe, start: Start, routes: Sequence[Route], seconds: float | None) -> Budget:
    """Measure the machine, and divide the time between pilots and evaluations.

    Raises:
        ConfigError: A tenth of the run is too short for any pilot.
    """
    plan, policy = start.plan, start.policy
    sizes = Sizes.of(plan.recipe, plan.problems, policy, plan.form, sft=plan.recipe.sft.enabled)
    prompt = encode_prompt(plan.form, policy.tokenizer, plan.problems.train[0].question)
    speed = measure(plan.recipe, policy, prompt, plan.device)
    times = seconds_of(plan.recipe, sizes, speed, batch_arithmetic(plan.recipe, sizes.train, sizes.sft))
    own = {name: times[name] for name in times if getattr(getattr(recipe, name, None), "enabled", True)}
    stages = {name: part["seconds"] for name, part in own.items() if name in (SFT, GRPO)}
    budget = SHARE * total(own) if seconds is None else seconds
    looks = 1 + sum(len(route.stages) for route in routes) + any(TEACHER in r.name for r in routes)
    one = speed.sampling(sizes.prompt, list(sizes.completions)) / len(sizes.completions) * SAMPLES
    most = min(MOST, sizes.train // 2)
    problems = int(np.clip(LOOKING * FILL * budget / looks / one, min(FEWEST, most), most))
    pilot = (FILL * budget - looks * problems * one) / len(routes)
    per_step = {name: times[name]["seconds_per_step"] for name in (SFT, GRPO) if name in times}
    if pilot < max(per_step.values()) and seconds is None:
        least = 2 * (looks * problems * one + len(routes) * sum(per_step.values())) / FILL
        raise ConfigError(
            f"the run takes about {total(own):.0f} seconds, and a tenth of it is too short for {len(routes)} pilots (a step takes "
            f"{max(per_step.values()):.2g} s, their evaluations {looks * problems * one:.1f} s). Run it, or give the race more: "
            f"--seconds {max(1, round(least))}"
        )
    share = stages[SFT] / sum(stages.values()) if len(stages) > 1 else EVEN
    training, digest = sum(stages.values()), recipe_hash(recipe)
    return Budget(digest, total(own), training, budget, per_step, share, problems, max(0.0, pilot))


def recipe_hash(recipe: Recipe) -> str:
    """Return what tells a recipe from others."""
    return hashlib.sha256(to_yaml(recipe).encode()).hexdigest()[:16]


class _Clock(TrainerCallback):
    """Ends a stage of a pilot when it has had its seconds; ``steps`` were done."""

    def __init__(self, now: Callable[[], float], seconds: float) -> None:
        self.now, self.ends, self.steps = now, now() + seconds, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps = state.global_step
        control.should_training_stop |= self.now() >= self.ends


@dataclass
class Pilot:
    """What a pilot reached: level of each problem (N,) at the start (``base``) and after its stages, their steps, seconds."""

    levels: dict[str, list[float]]
    steps: dict[str, int]
    seconds: float
    right: float = 1.0
    """Share of right demonstrations."""
    passes: float = 0.0
    """Passes over the demonstrations that a step of SFT is."""


class Race:
    """Pilots of routes in a folder; those that are finished are not repeated.

    Args:
        folder: Of the race.
        recipe: Of the run.
        routes: All routes.
        read: Returns the recipe with changes.
        display: Shows the pilots.
    """

    def __init__(self, folder: RunFolder, recipe: Recipe, routes: Sequence[Route], read: Read, display: Display) -> None:
        self.folder, self.recipe, self.routes, self.read, self.display = folder, recipe, routes, read, display
        self.pilots: dict[str, Pilot] = {}
        self.dropped: dict[str, str] = {}
        self.starts: dict[tuple[str, ...], tuple[Start, list[Problem]]] = {}
        self.first: Start | None = None
        self.budget: Budget
        self.teacher: Pilot | None = None

    def plan(self, seconds: float | None) -> None:
        """Plan the race, or read what was planned.

        Raises:
            ConfigError: The folder is another race's, or a tenth of the run is too short.
        """
        kept = self.folder.read_json("race.json")
        if kept is None:
            self.first = Start(self.read(self.routes[0].change))
            self.budget = plan_race(self.recipe, self.first, self.routes, seconds)
            self.folder.write_json("race.json", asdict(self.budget))
        elif kept["recipe"] != recipe_hash(self.recipe) or seconds not in (None, kept["seconds"]):
            raise ConfigError(
                f"{self.folder.path} holds the pilots of another recipe or length; take another name: run_name=NAME"
            )
        else:
            self.budget = Budget(**kept)

    def run(self) -> bool:
        """Run the pilots; return whether Ctrl-C ended it."""
        try:
            for route in self.routes:
                if route.learner == GRPO and route.stages == (GRPO,) and self.pilots and not any(self._base()):
                    self.dropped[route.name] = "nothing is right before it, so there is nothing to reinforce"
                else:
                    self.pilots[route.name] = self._kept(route.name, partial(self._pilot, route))
            taught = next((route for route in self.routes if route.learner == TEACHER), None)
            if taught is not None:
                model = self.read(taught.change).grpo.teacher.model
                if Path(model).is_dir():
                    self.teacher = self._kept("the teacher itself", partial(self._look_at, model))
        except KeyboardInterrupt:
            return True
        return False

    def _base(self) -> list[float]:
        return next(iter(self.pilots.values())).levels["base"]

    def _kept(self, name: str, do: Callable[[], Pilot]) -> Pilot:
        """Return a pilot from the folder, or do it and keep it."""
        file = f"{name.lower().replace(', ', '-').replace(' ', '-')}.json"
        kept = self.folder.read_json(file)
        if kept is not None:
            return Pilot(**kept)
        began = self._now()
        pilot = do()
        pilot.seconds = self._now() - began
        self.folder.write_json(file, asdict(pilot))
        last = list(pilot.levels.values())[-1]
        self.display.say(f"{name}: {100 * np.mean(last):.1f} % of {len(last)} held-out training problems, {pilot.seconds:.1f} s")
        return pilot

    @cached_property
    def _now(self) -> Callable[[], float]:
        """The clock: the processor's seconds; with a GPU those that pass."""
        return time.monotonic if torch.cuda.is_available() and self.recipe.device != "cpu" else processor_seconds

    def _start(self, route: Route) -> tuple[Start, list[Problem]]:
        """Return the start of a route, as it was before any pilot, and the problems to look at."""
        kind = tuple(line for line in route.change if line.startswith("tools"))
        if kind not in self.starts:
            both = next(r.change for r in self.routes if r.stages == self.routes[0].stages)
            first = self.first if self.first is not None and not kind else Start(self.read([*both, *kind]))
            self.starts[kind] = first, first.hold_out(self.budget.problems)
        start, held = self.starts[kind]
        start.again()
        return start, held

    def _pilot(self, route: Route) -> Pilot:
        start, held = self._start(route)
        plan = make_plan(Draft.of(self.read(route.change), in_folder=False)).opened(start.policy.tokenizer)
        plan = replace(plan, problems=start.plan.problems)
        known = self.pilots and not any(line.startswith("tools") for line in route.change)
        levels = {"base": self._base() if known else self._level(plan, start.policy, held, route.name)}
        steps = route.steps(self.budget.pilot, self.budget.per_step, self.budget.share)
        done = {}
        for stage, count in steps.items():
            done[stage] = self._train(plan, start.policy, stage, count, route.name)
            levels[stage] = self._level(plan, start.policy, held, route.name)
        gc.collect()
        sft, shown = plan.recipe.sft, plan.problems.sft
        passes = sft.batch_size * sft.gradient_accumulation_steps / max(1, len(shown))
        return Pilot(levels, done, 0.0, _right_of(shown), passes)

    def _look_at(self, model: str) -> Pilot:
        """Return the level of a teacher."""
        start, held = self._start(self.routes[0])
        policy = policy_of(find_model(model)[0], device=start.plan.device, like=start.plan.recipe.model)
        return Pilot({"base": self._level(start.plan, policy, held, TEACHER)}, {}, 0.0)

    def _train(self, plan: Plan, policy: Policy, stage: str, steps: int, name: str) -> int:
        """Train a stage of a pilot, its schedule over the steps that fit; return those that were done."""
        clock = _Clock(self._now, 1.5 * steps * self.budget.per_step[stage])
        shown = f"{name}: {stage}"
        progress = ProgressCallback(partial(self.display.step, shown), partial(self.display.progress, shown))
        short = {"max_steps": steps, "save_steps": 10**9, "logging_steps": 10**9, "eval_every": None}
        with tempfile.TemporaryDirectory() as folder:
            common: dict[str, Any] = {"model": policy.model, "tokenizer": policy.tokenizer, "output_dir": Path(folder)}
            common |= {"seed": plan.recipe.seed, "device": plan.device, "callbacks": [clock, progress]}
            if stage == GRPO:
                trainer: Any = grpo_trainer(plan, short, common)
            else:
                sft, data = plan.recipe.sft, plan.problems.sft
                needed = steps * sft.batch_size * sft.gradient_accumulation_steps
                demos = demonstrations(data[:: max(1, len(data) // needed)], plan.form, policy.tokenizer, sft.source)
                trainer = make_sft_trainer(demos=demos, section=sft.model_copy(update=short), **common)
            trainer.train()
        self.display.finished(shown)
        return clock.steps

    def _level(self, plan: Plan, policy: Policy, held: Sequence[Problem], name: str) -> list[float]:
        """Return the share of right completions of each problem, sampled as GRPO samples."""
        sampler, shown = Sampler(plan, policy), f"{name}: evaluation"
        with Pulse(partial(self.display.progress, shown), len(held)) as pulse:
            pulse.sampling(sampler.engine, 0, len(held))
            groups = sampler.draw(held, SAMPLES)
        self.display.finished(shown)
        return [float(np.mean([bool(r.grade and r.grade.correct) for r in group.rollouts])) for group in groups]

    def expected(self) -> Expected:
        """Return where the routes whose pilots are done will end."""
        done = [route for route in self.routes if route.name in self.pilots]
        teacher = None if self.teacher is None else np.array(self.teacher.levels["base"])
        right = self.pilots[done[0].name].right
        known = Known(right, teacher, self.recipe.grpo.group_size, SAMPLES)
        return expect({route.name: self._parts(route) for route in done}, known)

    def _parts(self, route: Route) -> list[Part]:
        budget, pilot, parts = self.budget, self.pilots[route.name], []
        whole, before = route.steps(budget.training, budget.per_step, budget.share), pilot.levels["base"]
        for stage in route.stages:
            part = budget.per_step[stage] / budget.training
            after, passes = pilot.levels[stage], pilot.passes * whole[stage]
            learner = SFT if stage == SFT else route.learner
            both = np.array(before), np.array(after)
            parts.append(Part(learner, pilot.steps[stage] * part, whole[stage] * part, *both, passes))
            before = after
        return parts


def _right_of(shown: Sequence[Problem]) -> float:
    """Return the share of demonstrations whose own answer is right, of a thousand; one that states none is taken for right."""
    some = shown[:: max(1, len(shown) // 1000)]
    stated = [(p, answer) for p in some if (answer := demonstrated_answer(p))]
    right = [grade(answer, p.answer, problem=p.columns()).correct for p, answer in stated]
    return float(np.mean(right)) if right else 1.0

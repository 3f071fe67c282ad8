"""One rollout batch ahead: an engine that runs elsewhere samples the next rollout batch while the policy learns from this one.

Its completions are those of the policy before the update, so ``grpo.sampler_correction`` weighs them by their ratio to the policy that
learns from them: for the age as for the other program. Problems come in their order, after one batch from beyond the loader's, which
is sampled while the first is learned from; the loader's last batch is not reached.

Source: one step off-policy, 2410.18252.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Any

from algorist.config.section import Section
from algorist.errors import ConfigError
from algorist.rollouts.engines import ENGINES
from algorist.training.extension import Extension, PolicyTrainer, Sampled, SamplingTrainer, extension
from algorist.types import Group, Problem

ELSEWHERE = (
    'grpo.sample_ahead samples while the policy learns, with an engine that runs elsewhere; take "grpo.engine=vllm" and '
    "\"grpo.vllm={mode: server, server_base_url: 'http://HOST:8000'}\", or leave grpo.sample_ahead out"
)


class _Keys(Section):
    sample_ahead: bool = False
    """Sample the next rollout batch during the update (vLLM in a server)."""


@extension
class SampleAhead(Extension):
    """The rollout batch that is being sampled, or is ready."""

    name, keys, order = "sample_ahead", {"grpo": _Keys}, 90

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self._sampling: Future[list[Group]] | None = None
        self._groups: list[Group] = []
        self._next: list[Problem] = []

    def check(self, plan: Any) -> Iterable[str]:
        section, evaluation = self.recipe.grpo, self.recipe.eval
        if ENGINES.get(section.engine).exact:
            yield ELSEWHERE
        if getattr(section, "sampler_correction", None) is None:
            yield (
                "grpo.sample_ahead learns from the policy before this one, as if it were this one without grpo.sampler_correction; leave "
                "one of the two lines out"
            )
        if section.top_k or section.top_p < 1 or section.min_p:
            yield (
                "grpo.sample_ahead needs the sampler's log-probs of the whole distribution; leave grpo.top_k, top_p and min_p out, or "
                "grpo.sample_ahead"
            )
        if section.eval_every and evaluation.enabled and evaluation.engine in (None, section.engine):
            yield (
                f"grpo.eval_every={section.eval_every} would give the server other weights while it samples; take "
                "eval.engine=native"
            )
        turns = plan.form.turns
        if (
            section.eval_every
            and evaluation.enabled
            and turns is not None
            and "environment" in turns.recorded()
        ):
            yield (
                f"grpo.eval_every={section.eval_every} would begin the environment anew while rollouts are in it; leave it out, or "
                "grpo.sample_ahead"
            )
        if plan.processes.count > 1:
            yield (
                f"grpo.sample_ahead is for one training process, and the run has {plan.processes.count}; leave it out"
            )

    def prepare(self, model: Any, trainer: PolicyTrainer) -> None:
        if not hasattr(trainer.engine, "with_present_weights"):
            raise ConfigError(ELSEWHERE)
        self._trainer = trainer
        self._problems = {problem.id: problem for problem in trainer.problems}

    def problems(self, sampled: Sampled, sampler: SamplingTrainer) -> None:
        """Take those whose completions are ready; sample the ones that came next."""
        problems = sampled.problems
        began = time.perf_counter()
        self._wait()
        if not self._groups:  # the first rollout batch
            fresh = sampler.draw(len(problems), {problem.id for problem in problems})
            self._next = [*fresh, *problems][: len(problems)]
            return
        waited = time.perf_counter() - began
        sampled.groups, self._groups = [replace(group, seconds=waited) for group in self._groups], []
        sampled.problems, self._next = [group.problem for group in sampled.groups], problems

    def groups(self, sampled: Sampled, sampler: SamplingTrainer) -> None:
        """Begin with the next, with the weights of now."""
        sample = self._trainer.sample_elsewhere(self._next)
        if sample is None:
            return
        self._sampling = future = Future[
            list[Group]
        ]()  # no pool: a process that ends does not wait for a daemon

        def work() -> None:
            try:
                future.set_result(sample())
            except BaseException as error:  # raised where it is waited for
                future.set_exception(error)

        Thread(target=work, name="rollouts ahead", daemon=True).start()

    def _wait(self) -> None:
        if self._sampling is not None:
            self._groups, self._sampling = self._sampling.result(), None

    def state_dict(self) -> dict[str, Any]:
        self._wait()
        return {"groups": [(g.problem.id, g.to_dict()) for g in self._groups]} if self._groups else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._groups = [Group.from_dict(self._problems[name], values) for name, values in state["groups"]]

"""On-policy distillation (``grpo.teacher``): the student samples, a stronger model scores each of its tokens.

The advantage of a token becomes A_it − λ·(log π_student − log π_teacher): REINFORCE on the reverse KL, whose gradient is that of
KL(π_student ‖ π_teacher) in expectation; no gradient goes through the difference. It mixes with rewards; with weights 0 for all of them
it is distillation alone.

Source: GKD (2306.13649) for learning from one's own samples; MiniLLM (2306.08543) eq. 2 for the policy gradient of the reverse KL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from algorist.config.section import Section
from algorist.extension import Extension, Policy, extension

if TYPE_CHECKING:
    from algorist.training.batch import Batch

log = logging.getLogger("algorist.extensions.teacher")
BASE = "base"


class TeacherSection(Section):
    """A model that scores the completions of the one that is trained."""

    model: str
    """A model folder, a run, a hub name or a ``.gguf`` file, with the student's tokenizer; ``base``: the base of the student's own
    adapter, which takes no further memory."""
    weight: float = Field(1.0, gt=0)
    """λ: nats of disagreement per unit of advantage."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Keep the teacher in 4-bit NF4 or 8-bit numbers, through bitsandbytes."""
    device: Literal["same", "cpu"] = "same"
    """Where it computes: beside the student, or on the CPU."""


class _Keys(Section):
    teacher: TeacherSection | None = None
    """Learn from a stronger model: each sampled token is scored by it; left out, rewards alone teach."""


@extension
class Distillation(Extension):
    name, keys, order = "teacher", {"grpo": _Keys}, 60
    teaches = True
    say: Callable[[str], None] = log.info

    def check(self, plan: Any) -> Iterable[str]:
        from algorist.extensions.teacher.model import why_no_teacher

        if reason := why_no_teacher(self.recipe):
            yield reason

    def open(self, run: Any) -> None:
        self.say = run.display.say

    def prepare(self, model: Any, trainer: Policy) -> None:

        from algorist.extensions.teacher.model import Teacher

        self.section: TeacherSection = self.recipe.grpo.teacher
        self.teacher = Teacher.load(self.section, model, trainer.tokenizer, like=self.recipe.model)
        self.say(self.teacher.line())

    def batch(self, batch: Batch, policy: Policy) -> Batch:
        from algorist.training.metrics import Metrics

        teacher = self.teacher.log_probs(batch, policy)
        student = batch.old_log_probs
        if student is None and policy.sampler_is_exact(batch):
            student = batch.sampler_log_probs
        if student is None:
            student = policy.log_probs_of(batch)
        gap = (student - teacher).masked_fill(~batch.mask, 0.0)
        metrics = Metrics()
        metrics.add("teacher/reverse_kl", gap, batch.mask)
        metrics.add("teacher/log_prob", teacher, batch.mask)
        metrics.add("teacher/surer_share", (gap < 0).float(), batch.mask)
        metrics.add("teacher/agreement", (gap.abs() < AGREES).float(), batch.mask)
        policy.note(metrics)
        return replace(batch, advantages=batch.advantages - self.section.weight * gap)


AGREES = 0.1
"""Nats: tokens whose probability differs by less than a tenth count as agreement."""

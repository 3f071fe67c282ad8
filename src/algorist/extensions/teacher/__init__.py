"""On-policy distillation (``grpo.teacher``): the student samples, a stronger model scores each of its tokens.

``loss: sampled``: the advantage of a token becomes A_it − λ·(log π_student − log π_teacher): REINFORCE on the reverse KL, whose gradient is
that of KL(π_student ‖ π_teacher) in expectation; no gradient goes through the difference. ``loss: full`` adds λ times the exact divergence
of the two next-token distributions to the loss of each token, ``top_k`` that over the teacher's k likeliest tokens and the rest as one. All
mix with rewards; with weights 0 for these it is distillation alone.

Source: GKD (2306.13649) for learning from one's own samples; MiniLLM (2306.08543) eq. 2 for the policy gradient of the reverse KL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field

from algorist.config.section import Section
from algorist.extensions.teacher.rules import RULES
from algorist.training.extension import Extension, PolicyTrainer, extension

if TYPE_CHECKING:
    from torch import Tensor

    from algorist.training.batch import Batch
    from algorist.training.lm_head import AtHead, OfHead
    from algorist.training.metrics import Metrics
    from algorist.training.objective import LossInputs

WORDS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
"""Texts of refusals, model and preview."""
BASE = "base"
NUMBERS = "teacher/numbers"
"""Key of the teacher's numbers in ``Batch.extra``: hidden states (B, T, H), or its likeliest tokens (B, T, 2 + 2k)."""
AGREES = 0.1
"""Nats: tokens whose probability differs by less than a tenth count as agreement."""


class TeacherSection(Section):
    """A model that scores the completions of the one that is trained."""

    model: str
    """A model folder, a run, a hub name or a ``.gguf`` file, with the student's tokenizer; ``base``: the base of the student's own
    adapter, which takes no further memory; or a server, ``http://HOST:PORT``."""
    weight: float = Field(1.0, gt=0)
    """λ: nats of disagreement per unit of advantage."""
    loss: Literal["sampled", "full", "top_k"] = "sampled"
    """``sampled``: log-probs of the sampled tokens, as part of the advantage; ``full``: the exact divergence over the vocabulary, which
    varies less; ``top_k``: over the teacher's likeliest tokens, all others as one."""
    beta: float = Field(1.0, ge=0, le=1)
    """Only for ``full`` or ``top_k``: 1 is the reverse KL, 0 the forward KL, between them the generalised Jensen-Shannon divergence."""
    top_k: int = Field(64, ge=1)
    """Of ``top_k``: the teacher's tokens that are compared one by one."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Keep the teacher in 4-bit NF4 or 8-bit numbers, through bitsandbytes."""
    device: Literal["same", "cpu", "swap"] = "same"
    """Device of the teacher: the student's; the CPU; or ``swap``, the GPU, and the host's memory while it does not score."""
    temperature: float | None = Field(None, gt=0)
    """Its logits are divided by it; ``grpo.temperature`` when left out."""


class _Keys(Section):
    teacher: TeacherSection | None = None
    """Learn from a stronger model, which scores each sampled token."""


CHART = (
    "Teacher",
    "Reverse KL should fall; agreement is the share of tokens of nearly equal probability, surer that of tokens more likely for the teacher.",
    ("teacher/reverse_kl", "teacher/agreement", "teacher/surer_share"),
    ("teacher/",),
)


@extension
class Distillation(Extension):
    name, keys, order = "teacher", {"grpo": _Keys}, 60
    teaches = True
    rules, charts = RULES, (CHART,)
    say: Callable[[str], None] = logging.getLogger("algorist.extensions.teacher").info

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self.section: TeacherSection = recipe.grpo.teacher
        self.needs_every_row = self.section.loss != "sampled"  # a group of equal rewards teaches too
        self.mass_is_known = False

    def check(self, plan: Any) -> Iterable[str]:
        from algorist.extensions.teacher.refusals import refusals

        return refusals(self.recipe, plan)

    def preview(self, look: Any) -> dict[str, Any] | None:
        from algorist.extensions.teacher.memory import taken
        from algorist.extensions.teacher.preview import preview

        return preview(self.recipe, look) if hasattr(look, "groups") else {"bytes": taken(self.recipe, look)}

    def open(self, run: Any) -> None:
        self.say = run.display.say

    def prepare(self, model: Any, trainer: PolicyTrainer) -> None:
        from algorist.extensions.teacher.remote import load_teacher

        temperature = self.section.temperature or self.recipe.grpo.temperature
        section = self.section.model_copy(update={"temperature": temperature})
        self.teacher = load_teacher(section, model, trainer.tokenizer, like=self.recipe.model)
        self.say(self.teacher.line())

    def batch(self, batch: Batch, policy: PolicyTrainer) -> Batch:
        """Let the teacher read the completions; ``sampled``: subtract the disagreement from the advantages."""
        self.weigh_left_out(batch, policy)
        began = time.perf_counter()
        numbers = self.teacher.read(batch, policy, self.section)
        note(policy, "forward_s", time.perf_counter() - began)
        if self.section.loss != "sampled":
            return replace(batch, extra={**batch.extra, NUMBERS: numbers})
        student = batch.old_log_probs
        if student is None and policy.sampler_is_exact(batch):
            student = batch.sampler_log_probs
        if student is None:
            student = policy.log_probs_of(batch)
        gap = (student - numbers).masked_fill(~batch.mask, 0.0)
        policy.note(count(gap, numbers, batch.mask))
        return replace(batch, advantages=batch.advantages - self.section.weight * gap)

    def weigh_left_out(self, batch: Batch, policy: PolicyTrainer) -> None:
        """Log once how much of the teacher's mass lies on the rows that its head was cut by."""
        few = batch.take(range(min(4, len(batch))))
        if self.mass_is_known or not few.mask.any():
            return
        self.mass_is_known = True
        if (mass := self.teacher.mass_left_out(few, policy)) is not None:
            share = float(mass[few.mask].mean())
            note(policy, "left_out_mass", share)
            self.say(f"the teacher's mass on the rows that are left out: {share:.1e}")

    def of_head(self, batch: Batch) -> OfHead | None:
        if self.section.loss == "sampled":
            return None
        from algorist.extensions.teacher.divergence import at_head, from_states, from_top

        numbers = batch.extra[NUMBERS].flatten(0, 1)
        rows, beta, loss, head = self.teacher.rows, self.section.beta, self.section.loss, self.teacher.head

        def compare(at: AtHead) -> Tensor:
            own = numbers[at.places_M]
            if loss == "top_k":
                values = at_head(at, own, from_top, rows=rows, beta=beta)
                return values.clone().index_copy(1, at.places_M.new_tensor([1]), own[:, 1:2])
            weight, bias = (at.weight_VH, at.bias_V) if head[0] is None else head
            logs = from_states(weight, bias, rows, self.teacher.temperature)
            return at_head(at, own, logs, rows=rows, beta=beta)

        return compare

    def loss(self, inputs: LossInputs) -> None:
        """Add λ times the divergence (``full``, ``top_k``)."""
        if self.section.loss == "sampled":
            return
        mask, metrics = inputs.batch.mask, inputs.metrics
        value, of_target, agree = inputs.batch.extra[self.name].unbind(-1)
        metrics.add("teacher/divergence", value, mask)
        metrics.add("teacher/same_token", agree, mask)
        count(inputs.inside.detach() - of_target.detach(), of_target, mask, metrics)
        inputs.terms.append(self.section.weight * value)


def note(policy: PolicyTrainer, name: str, value: float) -> None:
    """Log a number of a rollout batch."""
    from algorist.training.metrics import Metrics

    metrics = Metrics()
    metrics.add_sum(f"teacher/{name}", value, 1)
    policy.note(metrics)


def count(gap: Tensor, teacher: Tensor, mask: Tensor, metrics: Metrics | None = None) -> Metrics:
    """Return metrics of what sampled tokens say of student and teacher."""
    from algorist.training.metrics import Metrics

    metrics = metrics or Metrics()
    agree, surer = (gap.abs() < AGREES).float(), (gap < 0).float()
    values = {"reverse_kl": gap, "log_prob": teacher, "surer_share": surer, "agreement": agree}
    for name, of_tokens in values.items():
        metrics.add(f"teacher/{name}", of_tokens, mask)
    return metrics

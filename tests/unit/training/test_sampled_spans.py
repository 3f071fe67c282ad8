"""Tokens that the policy did not sample are context and nothing else: in the loss, the metrics, the store, a checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.config.load import load_recipe
from algorist.extensions.weights import Weights
from algorist.objectives import LOSSES
from algorist.store.write import RolloutWriter, read_part, rows_of
from algorist.training.batch import Batch
from algorist.training.metrics import Metrics, rollout_metrics
from algorist.training.step import in_parts
from algorist.types import Group, Parsed, Problem, Rollout, Turn
from tests.tiny import TOKENIZER, make_model, make_trainer, penalise

SPANS = [(10, 3, 6), (7, 0, 2), (6, 2, 6), (9, 4, 4)]
"""Length of a completion, begin and end of its tokens that were not sampled: in the middle, at the start, at the end, none."""


def groups_with_spans() -> list[Group]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, len(TOKENIZER), (count,), generator=generator).tolist()

    groups = []
    for index, size in enumerate((9, 5)):
        rollouts = []
        for length, begin, end in SPANS:
            sampled = [not begin <= i < end for i in range(length)]
            log_probs = [-1.0 - 0.1 * i if own else math.nan for i, own in enumerate(sampled)]
            turn = Turn("python", "1+1\ud800", "2", seconds=0.1)
            turns = (turn,) if end > begin else ()
            rollouts.append(
                Rollout(tokens(length), "text", log_probs, False, Parsed(None, "2", True), None, {}, 0.5)
            )
            rollouts[-1] = replace(rollouts[-1], sampled=sampled if turns else None, turns=turns)
        groups.append(Group(Problem(f"p{index}", "q", "2"), "q", tokens(size), rollouts))
    return groups


def batch_of(groups: list[Group], noise: float = 0.0) -> Batch:
    """Return the batch with old and reference log-probs; noise of that size (and NaN) where tokens were not sampled."""
    generator = torch.Generator().manual_seed(1)
    batch = Batch.from_groups(groups, torch.randn(8, generator=generator))
    values = [-2 + torch.randn(batch.mask.shape, generator=generator) for _ in range(3)]
    if noise:
        values = [torch.where(batch.mask, v, v + noise * torch.randn(v.shape)) for v in values]
        values[1] = values[1].masked_fill(~batch.mask, math.nan)
    old, sampler, reference = values
    return replace(batch, old_log_probs=old, sampler_log_probs=sampler, extra={"ref": reference})


def corrected(trainer: Any, batch: Batch) -> Batch:
    """Return the batch with the weights of the sampler's correction; the reference's log-probs are in it."""
    return trainer.extensions.members[-1].batch(batch, trainer)  # type: ignore[no-any-return]


def gradient(trainer: Any, batch: Batch) -> tuple[float, torch.Tensor, dict[str, float]]:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.tokens_per_step = float(batch.mask.sum())
    loss, metrics = in_parts(trainer, trainer.model, corrected(trainer, batch))
    found = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    return float(loss), found, metrics.values()


def reference_loss(model: Any, batch: Batch, loss: str, beta: float) -> torch.Tensor:
    """Written out in float64, one completion and one sampled token at a time; a token that was not sampled is never looked at."""
    old, sampler, reference = batch.old_log_probs, batch.sampler_log_probs, batch.extra["ref"]
    assert old is not None and sampler is not None and reference is not None
    total = torch.zeros((), dtype=torch.float64)
    for row, ids in enumerate(batch.completions):
        prompt = batch.prompts[batch.prompt_of[row]]
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logs = torch.log_softmax(logits, -1)
        places = [t for t in range(len(ids)) if batch.mask[row, t]]
        log_p = torch.stack([logs[t, ids[t]] for t in places])
        before, base = old[row, places].double(), reference[row, places].double()
        ratio = (log_p - before).exp()
        sequence = (log_p - before).mean().exp()
        advantage = batch.advantages[row, places].double()
        correction = (before - sampler[row, places].double()).exp().clamp(max=2.0)
        kl = ((base - log_p).exp() - 1 - (base - log_p)) * (sequence if loss == "gspo" else ratio)
        if loss == "cispo":
            term = -ratio.detach().clamp(max=2.0) * advantage * log_p
        else:
            r = sequence.expand_as(log_p) if loss == "gspo" else ratio
            term = -torch.minimum(r * advantage, r.clamp(0.8, 1.28) * advantage)
        entropy = -(logs[places].exp() * logs[places]).sum(-1)
        term = term * correction + beta * kl - 0.01 * entropy
        total = total + (term.mean() / 8 if loss in ("gspo", "grpo") else term.sum() / batch.mask.sum())
    return total


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "grpo", "gspo", "cispo"])
def test_the_loss_sees_sampled_tokens_only(loss: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_model())
    takes = LOSSES.get(loss).parameters
    high = 2.0 if loss == "cispo" else 0.28
    parameters = {k: v for k, v in {"clip_low": 0.2, "clip_high": high}.items() if k in takes}
    trainer.objective = replace(
        trainer.objective, loss=LOSSES.get(loss).with_settings(parameters), entropy_bonus=0.01
    )
    penalise(trainer, 0.05)
    bounds = "mode: token_truncate, high: 2"
    correction = Weights(load_recipe("smoke-cpu", [f"grpo.sampler_correction={{{bounds}}}"]).recipe)
    correction.needs_old_log_probs = True
    trainer.extensions.members.append(correction)
    trainer.log_probs.temperature = 1.0
    groups = groups_with_spans()
    plain = gradient(trainer, batch_of(groups))
    noisy = gradient(trainer, batch_of(groups, noise=200.0))
    assert noisy[0] == plain[0] and torch.equal(noisy[1], plain[1]) and noisy[2] == plain[2]
    assert plain[1].norm() > 1e-3

    exact = make_model().double()
    expected = reference_loss(exact, batch_of(groups), loss, 0.05)
    expected.backward()
    theirs = torch.cat([p.grad.flatten() for p in exact.parameters()])
    assert plain[0] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float((plain[1] - theirs).norm() / theirs.norm()) <= 1e-5

    # They are context: other tool output is another gradient.
    groups[0].rollouts[0].completion_ids[4] = 3
    assert not torch.equal(gradient(trainer, batch_of(groups))[1], plain[1])


def test_they_are_stored_and_counted_apart(tmp_path: Path) -> None:
    groups = groups_with_spans()
    mask = Batch.from_groups(groups, torch.zeros(8)).mask
    assert mask.sum(1).tolist() == [7, 5, 2, 9] * 2
    metrics = rollout_metrics(groups, [], 2.0)
    assert metrics["completions/mean_length"] == 23 / 4 and metrics["rollout/tokens_per_s"] == 32
    rows = [row | {"step": 0} for row in rows_of(groups[0])]
    with RolloutWriter(tmp_path) as writer:
        writer.write(rows)
    first, *_, last = read_part(tmp_path / "part-000000.parquet").to_pylist()
    assert (first["completion_tokens"], first["sampled_tokens"]) == (10, 7)
    assert first["turns"] == [
        {"source": "python", "request": "1+1\\ud800", "reply": "2", "error": "", "seconds": 0.1}
    ]
    assert last["turns"] is None and last["sampled_tokens"] == 9
    assert first["sampler_log_prob_sum"] == pytest.approx(-sum(1 + 0.1 * i for i in (0, 1, 2, 6, 7, 8, 9)))
    counted = Metrics()
    counted.add("x", torch.ones(8, 10), mask)
    assert counted.sums["x"][1] == 46

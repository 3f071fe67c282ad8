"""The exact divergence to a teacher: float64 autograd of the plain formulas, TRL's own loss, chunks, padding rows, whole steps."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from algorist.extensions.teacher import divergence
from algorist.extensions.teacher.divergence import at_head, from_states, from_top, top_of
from algorist.training.lm_head import AtHead
from algorist.training.log_probs import LogProbs
from tests.marks import first
from tests.tiny import TOKENIZER, make_model, parameters_of
from tests.unit.extensions.test_teacher import save, taught

BETAS = [1.0, 0.0, 0.3]


def plain(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The formulas of GKD, eq. 1, on probabilities (N, V)."""
    p, q = student.softmax(-1), teacher.softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    if beta in (0.0, 1.0):
        return kl(p, q) if beta else kl(q, p)
    m = (1 - beta) * p + beta * q
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def heads(n: int = 37, v: int = 29) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    sizes = {"h": (n, 8), "w": (v, 8), "b": (v,), "th": (n, 12), "tw": (v - 3, 12), "tb": (v - 3,)}
    return {name: torch.randn(size, generator=draw, dtype=torch.float64) for name, size in sizes.items()}


def ours(values: dict[str, Tensor], beta: float, temperature: float = 1.0, k: int = 0) -> tuple[Tensor, ...]:
    v = {name: x.float() for name, x in values.items()}
    for name in "hwb":
        v[name].requires_grad_()
    n, rows = len(v["h"]), len(v["tw"])
    targets, places = torch.arange(n) % rows, torch.arange(n)
    at = AtHead(v["h"], v["w"], v["b"], targets, places, temperature)
    numbers, logs = v["th"], from_states(v["tw"], v["tb"], rows, temperature)
    if k:
        numbers = top_of(AtHead(v["th"], v["tw"], v["tb"], targets, places, temperature), k, rows)
        logs = from_top
    found = at_head(at, numbers, logs, rows=rows, beta=beta)
    weights = torch.linspace(-1, 2, n)
    return found, *torch.autograd.grad((found[:, 0] * weights).sum(), [v[name] for name in "hwb"])


def reference(values: dict[str, Tensor], beta: float, temperature: float = 1.0, k: int = 0) -> list[Tensor]:
    v = {name: x.clone() for name, x in values.items()}
    for name in "hwb":
        v[name].requires_grad_()
    rows = len(v["tw"])
    student = (v["h"] @ v["w"].t() + v["b"])[:, :rows] / temperature
    teacher = (v["th"] @ v["tw"].t() + v["tb"]) / temperature
    if k:  # k tokens of the teacher, and one outcome for all others
        ids = teacher.topk(k).indices
        student, teacher = (
            torch.cat([logs.gather(1, ids), logs.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)], 1)
            for logs in (student, teacher)
        )
    value = plain(student, teacher, beta)
    weights = torch.linspace(-1, 2, len(value)).double()
    return [value, *torch.autograd.grad((value * weights).sum(), [v[name] for name in "hwb"])]


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_those_of_float64_autograd(
    beta: float, cached: bool, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 7 tokens, slopes kept or computed again, rows of the student's vocabulary that the teacher has not."""
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", 7 * 26)
    monkeypatch.setattr(divergence, "CACHE_BYTES", 10**9 if cached else 0)
    exact = reference(heads(), beta, 0.7, k)
    found, *gradients = ours(heads(), beta, 0.7, k)
    assert torch.allclose(found[:, 0].double(), exact[0], rtol=1e-5, atol=1e-5)
    for gradient, right in zip(gradients, exact[1:], strict=True):
        assert torch.allclose(gradient.double(), right, rtol=1e-5, atol=2e-5), (gradient - right).abs().max()
    assert gradients[1][26:].eq(0).all() and exact[1].abs().max() > 0.1


@pytest.mark.parametrize("beta", BETAS)
def test_loss_and_gradient_are_trls(beta: float) -> None:
    """Against TRL's distillation kernel and its GKD loss, at one vocabulary, which both ask for."""
    values = heads()
    values |= {name: values[name][: len(values["tw"])] for name in "wb"}
    found, *gradients = ours(values, beta, 0.7)
    v = {name: x.float() for name, x in values.items()}
    for name in "hwb":
        v[name].requires_grad_()
    kernel, _ = ChunkedDivergenceFunction.apply(v["h"], v["w"], v["b"], v["th"], v["tw"], v["tb"], beta, 0.7)
    weights = torch.linspace(-1, 2, len(kernel))
    theirs = torch.autograd.grad((kernel * weights).sum(), [v[name] for name in "hwb"])
    assert torch.allclose(found[:, 0], kernel, rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-5)
    logits = [(v[a] @ v[b].t() + v[c])[None] for a, b, c in (("h", "w", "b"), ("th", "tw", "tb"))]
    gkd = GKDTrainer.generalized_jsd_loss(*logits, beta=beta, temperature=0.7, reduction="sum")
    assert float(gkd) == pytest.approx(float(found[:, 0].sum()), rel=1e-5)


def test_all_tokens_of_the_teacher_are_the_whole_divergence() -> None:
    full, *_ = ours(heads(), 1.0)
    for k, close in ((26, True), (5, False)):
        top, *_ = ours(heads(), 1.0, k=k)
        assert torch.allclose(top[:, 0], full[:, 0], atol=1e-5) == close
        assert (top[:, 0] <= full[:, 0] + 1e-5).all(), "fewer outcomes are never further apart"


def test_the_sampled_form_varies_around_the_full_one(capsys: pytest.CaptureFixture[str]) -> None:
    """10⁵ draws of a token: the mean of the sampled gradient is the full one's, within four standard errors."""
    draw = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 40, generator=draw)
    student.requires_grad_()
    one = torch.zeros(1, dtype=torch.long)
    at = AtHead(student[None], None, None, one, one)
    value = at_head(
        at, at.hidden_MH, lambda _, logs: teacher.log_softmax(-1).expand(logs.shape), rows=40, beta=1
    )
    exact = torch.autograd.grad(value[0, 0], student)[0]
    p = student.detach().softmax(-1)
    draws = torch.multinomial(p, 100_000, replacement=True, generator=draw)
    gap = (p.log() - teacher.log_softmax(-1))[draws]
    slopes = gap[:, None] * (torch.eye(40)[draws] - p)
    variance = slopes.var(0).sum()
    with capsys.disabled():
        print(
            f"\nsampled: variance {float(variance):.3f} per token, |gradient|² {float(exact @ exact):.3f}; full: 0"
        )
    assert ((slopes.mean(0) - exact).abs() < 4 * slopes.std(0) / len(draws) ** 0.5 + 1e-6).all()
    assert float(variance) > float(exact @ exact) > 0.01


def gradient_of(trainer: Any, teacher: Any, section: Any) -> Tensor:
    """The gradient of λ·mean divergence over the last rollouts, in float64 from plain forwards."""
    batch, student, total = trainer.rollouts, make_model().double(), 0.0
    rows = 1 + max(TOKENIZER.get_vocab().values())
    for row, ids in enumerate(batch.completions):
        prompt = batch.prompts[batch.prompt_of[row]]
        tokens = torch.tensor([prompt + ids])
        logits = [m(tokens).logits[0, len(prompt) - 1 : -1, :rows] for m in (student, teacher)]
        total = total + plain(*logits, section["beta"]).sum()
    loss = section["weight"] * total / batch.mask.sum()
    parameters = [p for p in student.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_a_step_of_training_takes_the_exact_gradient(tmp_path: Path, beta: float) -> None:
    """No reward, plain gradient descent: the change of the weights is -lr times the float64 gradient; all groups are dead."""
    section = {"weight": 0.7, "beta": beta}
    trainer, part = taught(
        tmp_path / "run",
        teacher={"model": save(tmp_path / "teacher", 1), "loss": "full", **section},
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler="constant",
        max_grad_norm=1e9,
        weight_decay=0.0,
        max_steps=1,
    )
    before = parameters_of(trainer).clone()
    trainer.train()
    assert (trainer.rollouts.advantages == 0).all()
    exact = gradient_of(trainer, part.teacher.model.double(), section)
    change = before - parameters_of(trainer)
    assert torch.allclose(change.double(), exact, atol=2e-5 * float(exact.abs().max()) + 1e-6)
    log = trainer.state.log_history[0]
    assert (
        log["teacher/divergence"] > 0
        and 0 < log["teacher/forward_s"] < 5
        and 0 <= log["teacher/same_token"] <= 1
    )
    assert log["loss"] == pytest.approx(0.7 * log["teacher/divergence"], rel=1e-4)


@pytest.mark.slow
def test_a_wide_teacher_is_cut_and_its_mass_on_the_rest_is_logged(tmp_path: Path) -> None:
    """Qwen2.5: 151,936 rows of the small, 152,064 of the large model, one tokenizer."""
    wide = make_model(1)
    wide.resize_token_embeddings(len(TOKENIZER) + 40, mean_resizing=False)
    with torch.no_grad():
        wide.get_output_embeddings().weight[len(TOKENIZER) :].normal_(0, 0.3)
    wide.save_pretrained(tmp_path / "wide")
    TOKENIZER.save_pretrained(tmp_path / "wide")
    for loss in ("sampled", "full", "top_k"):
        lines: list[str] = []
        trainer, part = taught(
            tmp_path / loss, teacher={"model": str(tmp_path / "wide"), "loss": loss}, max_steps=2
        )
        part.say = lines.append
        trainer.train()
        log = trainer.state.log_history
        share = log[0]["teacher/left_out_mass"]
        batch, rows = trainer.rollouts, 1 + max(TOKENIZER.get_vocab().values())
        assert 0.01 < share < 0.9 and "teacher/left_out_mass" not in log[1]
        assert lines == [f"the teacher's mass on the rows that are left out: {share:.1e}"]
        ids = torch.tensor([batch.prompts[0] + batch.completions[0]])
        probabilities = wide(ids).logits.softmax(-1)
        mass = part.teacher.mass_left_out(batch.take([0]), trainer)[0]
        expected = probabilities[0, len(batch.prompts[0]) - 1 : -1, rows:].sum(-1)
        assert torch.allclose(mass[: len(expected)], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", first(1, ["top_k", "full"]))
def test_the_base_of_an_adapter_teaches_by_its_distribution(tmp_path: Path, loss: str) -> None:
    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    trainer, part = taught(
        tmp_path, model, teacher={"model": "base", "loss": loss}, max_steps=16, learning_rate=3e-2
    )
    trainer.train()
    log = [line["teacher/divergence"] for line in trainer.state.log_history if "teacher/divergence" in line]
    assert part.teacher.model is None and log[-1] < 0.3 * log[0]


def test_the_plain_pass_of_a_student_gives_the_same(tmp_path: Path) -> None:
    trainer, part = taught(
        tmp_path / "run", teacher={"model": save(tmp_path / "t", 1), "loss": "full"}, max_steps=1
    )
    trainer.train()
    rows = trainer.rollouts.in_group_order(range(len(trainer.rollouts)))
    batch = part.update(trainer.rollouts.take(rows), trainer)
    results = []
    for log_probs in (LogProbs(), LogProbs(packed=False)):
        piece = batch.take(range(len(batch)))
        model = make_model()
        log_probs(model, piece, of_head={"teacher": part.of_head(piece)})
        piece.extra["teacher"][..., 0].sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((piece.extra["teacher"], gradient))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-4)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-3)


def test_a_teacher_without_the_packed_pass_is_refused_for_full_only(tmp_path: Path) -> None:
    from algorist.errors import ConfigError

    where = save(tmp_path / "teacher", 1)
    for loss in ("full", "top_k"):
        trainer, part = taught(
            tmp_path / loss, teacher={"model": where, "loss": loss, "top_k": 8}, max_steps=1
        )
        part.teacher.model.config.logit_scale = 1.0
        run = partial(trainer.train)
        if loss == "full":
            with pytest.raises(ConfigError, match=r"grpo\.teacher\.loss=full needs .*loss=top_k"):
                run()
        else:
            run()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["full", "top_k"])
def test_products_in_bfloat16_give_nearly_the_same(tmp_path: Path, loss: str) -> None:
    """Under autocast, as a run with float32 weights trains on a GPU."""
    trainer, part = taught(
        tmp_path / "run", teacher={"model": save(tmp_path / "t", 1), "loss": loss}, max_steps=1
    )
    trainer.train()
    rows = trainer.rollouts.in_group_order(range(len(trainer.rollouts)))
    batch, results = part.update(trainer.rollouts.take(rows), trainer), []
    for autocast in (nullcontext, partial(torch.autocast, "cpu", dtype=torch.bfloat16)):
        piece, model = batch.take(range(len(batch))), make_model()
        LogProbs()(model, piece, of_head={"teacher": part.of_head(piece)}, autocast=autocast)
        value = piece.extra["teacher"][..., 0][piece.mask]
        value.mean().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((value.detach(), gradient))
    (exact, slope), (rough, rough_slope) = results
    assert rough.dtype == torch.float32 and float((rough - exact).abs().mean()) < 0.05 * float(exact.mean())
    assert torch.cosine_similarity(slope, rough_slope, dim=0) > 0.99

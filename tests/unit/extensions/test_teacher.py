"""On-policy distillation: the term per token, its gradient in expectation, tokenizers and vocabularies, mistakes."""

from __future__ import annotations

import copy
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config

from algorist.config import load_recipe
from algorist.config.schema import Recipe
from algorist.config.section import ModelSection
from algorist.errors import ConfigError
from algorist.extensions.teacher import Distillation, TeacherSection
from algorist.extensions.teacher.model import Teacher, check_same_tokenizer, cut_vocabulary
from algorist.models.load import load_policy
from algorist.models.memory import memory_now
from algorist.objectives import policy_loss
from algorist.preflight.memory_advice import plan_from_config
from algorist.report.curves import charts
from algorist.runs.draft import Draft
from algorist.runs.plan import make_plan
from algorist.training.extension import Extensions
from algorist.training.objective import rows_to_compute
from tests.marks import first
from tests.tiny import TOKENIZER, make_model, make_trainer, parameters_of, rewards_of
from tests.unit.preflight.test_memory_advice import SHAPES, numina


def never(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.0 for _ in completion_ids]


def save(folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def taught(folder: Path, model: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Return a trainer with a teacher and no reward, and the teacher's extension."""
    teacher = settings.pop("teacher")
    recipe = Recipe.model_validate({"grpo": {"teacher": teacher, "advantage": "group_centered"}})
    part = Distillation(recipe)
    trainer = make_trainer(
        folder,
        model,
        rewards=rewards_of(never),
        extensions=Extensions([part]),
        advantage="group_centered",
        **settings,
    )
    return trainer, part


def test_the_sampled_form_is_unbiased() -> None:
    """10⁵ draws of one token: the mean gradient of the loss is that of KL(student ‖ teacher), within three standard errors."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    exact = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)[0]
    draws = torch.multinomial(student.detach().exp(), 100_000, replacement=True, generator=generator)
    log_probs = student[draws][:, None]
    advantages = -(log_probs.detach() - teacher[draws][:, None])  # λ = 1, no reward
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    mean = torch.autograd.grad(policy_loss(log_probs, advantages, mask, loss="dapo"), logits)[0]
    slopes = torch.eye(6, dtype=torch.float64)[draws] - student.detach().exp()
    error = (slopes * -advantages).std(0) / len(draws) ** 0.5
    assert ((mean - exact).abs() < 3 * error).all() and exact.norm() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [None, 0.4])
def test_the_advantage_of_a_token_is_the_teachers_disagreement(
    tmp_path: Path, temperature: float | None
) -> None:
    trainer, part = taught(
        tmp_path / "run",
        teacher={
            "model": save(tmp_path / "teacher", 1),
            "weight": 0.7,
            "device": "cpu",
            "temperature": temperature,
        },
        max_steps=1,
    )
    before = parameters_of(trainer).clone()
    trainer.train()
    batch, log = trainer.rollouts, trainer.state.log_history[0]
    student, teacher = make_model().double(), copy.deepcopy(part.teacher.model).double()
    assert not (batch.advantages == 0)[batch.mask].any()
    for row, ids in enumerate(batch.completions):
        prompt = batch.prompts[batch.prompt_of[row]]
        tokens = torch.tensor([prompt + ids])
        logs = [
            (model(tokens).logits[0, len(prompt) - 1 : -1] / divisor)
            .log_softmax(-1)
            .gather(1, torch.tensor(ids)[:, None])[:, 0]
            for model, divisor in ((student, 1.0), (teacher, temperature or 1.0))
        ]
        expected = -0.7 * (logs[0] - logs[1])
        assert batch.advantages[row, : len(ids)].tolist() == pytest.approx(expected.tolist(), abs=2e-4)
    assert log["teacher/reverse_kl"] > 0 and 0 <= log["teacher/surer_share"] <= 1
    assert float((parameters_of(trainer) - before).norm()) > 0, "no reward, and still it learns"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["full", "top_k"])
def test_the_divergence_is_that_to_the_teacher_at_its_temperature(tmp_path: Path, loss: str) -> None:
    rows = 1 + max(TOKENIZER.get_vocab().values())
    trainer, part = taught(
        tmp_path / "run",
        teacher={"model": save(tmp_path / "t", 1), "loss": loss, "temperature": 0.4}
        | ({"top_k": rows - 1} if loss == "top_k" else {}),
        max_steps=1,
    )
    trainer.train()
    batch, sums = trainer.rollouts, []
    for row, ids in enumerate(batch.completions):
        prompt = batch.prompts[batch.prompt_of[row]]
        p, q = (
            (model.double()(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1, :rows] / divisor).log_softmax(-1)
            for model, divisor in ((make_model(), 1.0), (copy.deepcopy(part.teacher.model), 0.4))
        )  # fmt: skip
        sums += (p.exp() * (p - q)).sum(-1).tolist()
    logged = trainer.state.log_history[0]["teacher/divergence"]
    assert logged == pytest.approx(sum(sums) / len(sums), rel=1e-3)


@pytest.mark.slow
def test_a_swapped_teacher_leaves_nothing_beside_the_student(tmp_path: Path) -> None:
    """Its copies are there while it scores and freed after it; what it says does not change. Measured with the host as the device."""
    config = make_model().config
    config.hidden_size, config.intermediate_size, config.head_dim = 512, 4096, 64
    big = type(make_model())(config)
    big.save_pretrained(tmp_path / "big")
    TOKENIZER.save_pretrained(tmp_path / "big")
    del big
    section = TeacherSection(model=str(tmp_path / "big"), device="swap")
    teacher = Teacher.load(section, make_model(), TOKENIZER, like=ModelSection())
    size = sum(p.numel() * p.element_size() for p in teacher.model.parameters())
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        with teacher.awake():  # what a first forward takes for good is not the copies
            teacher.model(ids)
        at_rest, before = teacher.model(ids).logits, memory_now()
        resting = {p.untyped_storage().data_ptr() for p in teacher.model.parameters()}
        with teacher.awake():
            storages = [p.untyped_storage() for p in teacher.model.parameters()]
            copies = {storage.data_ptr(): storage.nbytes() for storage in storages}
            places = [weakref.ref(storage) for storage in storages]
            del storages
            assert torch.equal(teacher.model(ids).logits, at_rest)
            awake = memory_now()
        after = memory_now()
        assert torch.equal(teacher.model(ids).logits, at_rest)
    assert not copies.keys() & resting and sum(copies.values()) == size
    # upward only: copies may fill blocks that tests before this one freed
    assert awake - before < 1.3 * size and after - before < 0.1 * size
    assert not any(place() is not None for place in places)


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "weights"), [("null", 15.2e9), ("8bit", 8.7e9), ("4bit", 5.5e9)])
def test_a_teacher_is_planned_before_it_is_loaded(tmp_path: Path, quantization: str, weights: float) -> None:
    """Qwen2.5-7B's shapes: 7.62 billion weights, 1.09 of them in head and embeddings, which stay in 16 bit."""
    Qwen2Config(**SHAPES["7B"]).save_pretrained(tmp_path / "big")
    teacher = f"grpo.teacher={{model: '{tmp_path / 'big'}', quantization: {quantization}}}"
    without, with_teacher = (
        plan_from_config(
            numina("model.dtype=bfloat16", "device=cpu", *more), "grpo", Qwen2Config(**SHAPES["0.5B"]), dtype=torch.bfloat16
        )
        for more in ((), (teacher,))
    )  # fmt: skip
    assert with_teacher.extensions == pytest.approx(weights, rel=0.03)
    assert with_teacher.peak - without.peak == pytest.approx(weights, rel=0.05)


@pytest.mark.slow
def test_the_students_own_base_teaches_without_further_memory(tmp_path: Path) -> None:
    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    trainer, part = taught(tmp_path, model, teacher={"model": "base"}, max_steps=2, learning_rate=3e-2)
    trainer.train()
    batch = trainer.rollouts
    by_base, _ = trainer.log_probs(make_model(), batch)
    assert part.teacher.model is None
    assert part.teacher.log_probs(batch, trainer)[batch.mask].tolist() == pytest.approx(
        by_base[batch.mask].tolist(), abs=1e-5
    )
    assert (
        float((trainer.log_probs_of(batch) - by_base).abs().max()) > 1e-3
    )  # the adapter is at work otherwise


def test_a_teacher_may_be_quantised(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    where = {"model": save(tmp_path / "teacher", 1), "quantization": "8bit"}
    trainer, part = taught(tmp_path / "run", teacher=where, max_steps=1)
    trainer.train()
    assert getattr(part.teacher.model, "is_quantized", False)
    assert trainer.rollouts.advantages[trainer.rollouts.mask].isfinite().all()


def test_rows_that_no_token_uses_are_cut() -> None:
    model = make_model()
    wide = make_model()
    wide.resize_token_embeddings(len(TOKENIZER) + 128)
    wide.load_state_dict(
        {
            **wide.state_dict(),
            **{k: v for k, v in model.state_dict().items() if v.shape == wide.state_dict()[k].shape},
        }
    )
    rows = 1 + max(TOKENIZER.get_vocab().values())
    cut = cut_vocabulary(wide, rows)
    assert len(cut[0]) >= 128
    ids = torch.tensor([[3, 4, 5]])
    assert wide(ids).logits.shape[-1] == rows and cut_vocabulary(wide, rows) == (None, None)
    assert wide.get_input_embeddings().weight.shape[0] >= rows + 128


def test_another_tokenizer_is_refused() -> None:
    other = copy.deepcopy(TOKENIZER)
    other.add_tokens(["<new>"])
    check_same_tokenizer(TOKENIZER, other, "big")  # what the student never writes does no harm
    with pytest.raises(ConfigError, match=r"grpo\.teacher\.model=big has another tokenizer: 1 of .*'<new>'"):
        check_same_tokenizer(other, TOKENIZER, "big")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["grpo.teacher.model=base"], r"grpo\.teacher\.model is base.*model\.lora is not set"),
        (
            ["grpo.teacher={model: base, device: swap}", "model.lora={rank: 4}"],
            r"grpo\.teacher\.model is base.*grpo\.teacher\.device says nothing of it; leave it out",
        ),
        (
            ["grpo.teacher={model: big, device: swap, quantization: 4bit}"],
            "swap cannot move a teacher in 4bit",
        ),
        (["grpo.teacher={model: big, device: swap}", "device=cpu"], "this run computes on the CPU"),
        (["grpo.teacher.model=tiny"], "made from scratch, it has nothing to teach"),
        (["grpo.teacher.model=runs/nowhere"], "there is no runs/nowhere"),
        (["rewards=[{name: correct, weight: 0}]"], r"every weight in rewards is 0.*name a teacher"),
        (
            ["grpo.teacher={model: big, beta: 0.5}"],
            r"beta is 0\.5, but loss: sampled is the reverse KL.*loss=full",
        ),
        (
            ["grpo.teacher={model: big, top_k: 8}"],
            r"top_k is read with grpo\.teacher\.loss=top_k only.*loss is sampled",
        ),
        (["grpo.teacher.model=big", "grpo.loss=gspo"], r"grpo\.loss=gspo has one ratio .*loss=full or top_k"),
        (
            ["grpo.teacher.model=big", "grpo.resample={}"],
            r"grpo\.resample replaces groups .*leave grpo\.resample out",
        ),
        (
            ["grpo.teacher.model=big", "grpo.replay={}"],
            r"grpo\.replay replaces groups .*leave grpo\.replay out",
        ),
    ],
)
def test_what_cannot_teach_is_refused_before_anything_is_loaded(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(Draft.of(load_recipe("smoke-cpu", settings).recipe, in_folder=False))


def test_the_report_draws_the_teacher() -> None:
    line = {"stage": "grpo", "teacher/reverse_kl": 0.5, "teacher/agreement": 0.4, "teacher/surer_share": 0.3}
    drawn = charts([{**line, "step": step} for step in range(4)], "grpo")
    (chart,) = [chart for chart in drawn if chart["title"] == "Teacher"]
    assert {curve["label"] for curve in chart["curves"]} == {"reverse kl", "agreement", "surer share"}
    assert "should fall" in chart["note"]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sampled", "full", "top_k"])
def test_groups_of_equal_rewards_are_computed(tmp_path: Path, loss: str) -> None:
    """Advantage 0 of the reward alone leaves completions out of the update; with a teacher all are computed, and move the weights."""
    reward_only = make_trainer(
        tmp_path / "none", rewards=rewards_of(never), max_steps=1, advantage="group_centered"
    )
    start = parameters_of(reward_only).clone()
    reward_only.train()
    assert torch.equal(parameters_of(reward_only), start)
    trainer, _ = taught(
        tmp_path / "run", teacher={"model": save(tmp_path / "teacher", 1), "loss": loss}, max_steps=1
    )
    trainer.train()
    batch = trainer.rollouts
    assert rows_to_compute(batch, trainer.objective, trainer.extensions) == batch.in_group_order(
        range(len(batch))
    )
    assert float((parameters_of(trainer) - start).norm()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("loss", first(1, ["full", "sampled", "top_k"]))
def test_a_continued_run_is_the_uninterrupted_one(tmp_path: Path, loss: str) -> None:
    """From every checkpoint, also in the middle of a rollout batch that feeds two steps; reward and teacher together."""
    from tests.runs.test_checkpoint import _restart, checkpoints, cut_back, run, same

    first = run(tmp_path / "sft", "grpo.enabled=false")
    policy = load_policy(first / "sft" / "final", device="cpu")
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    policy.model.save_pretrained(tmp_path / "teacher")
    policy.tokenizer.save_pretrained(tmp_path / "teacher")
    settings = [
        f"grpo.teacher={{model: '{tmp_path / 'teacher'}', loss: {loss}, top_k: 64}}",
        "grpo.max_steps=4",
        "grpo.batch_size=8",
        "grpo.steps_per_generation=2",
        "grpo.save_steps=1",
    ]
    shutil.copytree(first, tmp_path / "whole" / "r")
    (tmp_path / "whole" / "r" / "config.yaml").unlink()
    _restart(tmp_path / "whole", settings)
    done = tmp_path / "whole" / "r"
    for checkpoint in checkpoints(done / "grpo")[1:]:
        step = int(checkpoint.name.rpartition("-")[2])
        other = tmp_path / f"from-{step}"
        shutil.copytree(done, other / "r")
        cut_back(other / "r", "grpo", step)
        run(other, *settings, resume=True)
        same(done, other / "r", "grpo")

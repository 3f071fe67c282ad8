"""The trainer against stock TRL: generation seam, records, metrics, and equal steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from algorist.errors import ConfigError
from algorist.models.tiny import train_tokenizer
from algorist.rollouts.base import Completion, SamplingParams
from algorist.training.grpo import AlgoristGRPOTrainer

QUESTIONS = ["1+1", "23+4 is", "7*8", "what is 9-3", "5+5+5", "12/4 gives"]
TOKENIZER = train_tokenizer(QUESTIONS, vocab_size=300)
# Many stop tokens give completions of unequal length.
STOPS = [TOKENIZER.eos_token_id, *range(3, len(TOKENIZER), 7)]


def make_model(seed: int = 0) -> Qwen2ForCausalLM:
    """A small decoder whose next-token distribution is not flat."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.generation_config.pad_token_id = TOKENIZER.pad_token_id
    model.generation_config.eos_token_id = STOPS
    return model


def dataset() -> Dataset:
    return Dataset.from_list([{"prompt": q, "problem_id": f"p{i}"} for i, q in enumerate(QUESTIONS)])


def reward_digits(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Varied within most groups, constant in some."""
    return [float(sum(ids) % 3) if ids[0] % 2 else 1.0 for ids in completion_ids]


def reward_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / 10 for ids in completion_ids]


def config(folder: Path, **changes: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": 3,
        "logging_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "seed": 7,
    }
    return GRPOConfig(**{**settings, **changes})


class PlainEngine:
    """Samples with full forwards, one row at a time: slow, simple, right."""

    name = "plain"

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.calls: list[tuple[list[list[int]], int, int | None]] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        params: SamplingParams,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        assert not self.model.training
        self.calls.append(([list(p) for p in prompts], group_size, params.seed))
        generator = torch.Generator().manual_seed(params.seed or 0)
        return [[self._one(list(p), params, generator) for _ in range(group_size)] for p in prompts]

    def _one(self, prompt: list[int], params: SamplingParams, generator: torch.Generator) -> Completion:
        ids: list[int] = []
        kept: list[float] = []
        while len(ids) < params.max_new_tokens:
            logits = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1] / params.temperature
            logs = torch.log_softmax(logits.float(), -1)
            token = int(torch.multinomial(logs.exp(), 1, generator=generator))
            ids.append(token)
            kept.append(float(logs[token]))
            if token in params.stop_token_ids:
                return Completion(ids, kept, "stop")
        return Completion(ids, kept, "length")


def make(cls: type, folder: Path, model: Any = None, peft_config: Any = None, **kwargs: Any) -> Any:
    changes = kwargs.pop("changes", {})
    return cls(
        model=model if model is not None else make_model(),
        reward_funcs=[reward_digits, reward_length],
        args=config(folder, **changes),
        train_dataset=dataset(),
        processing_class=copy.deepcopy(TOKENIZER),
        peft_config=peft_config,
        **kwargs,
    )


def parameters_of(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


STEP_CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "dapo, accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "grpo, two iterations": {"loss_type": "grpo", "num_iterations": 2, "max_steps": 4},
    "generation feeds several steps": {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
    },
    "bnpo": {"loss_type": "bnpo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "masked truncation": {"mask_truncated_completions": True},
    "temperature": {"temperature": 0.7},
}


@pytest.mark.parametrize("case", STEP_CASES)
def test_steps_equal_stock_trl(case: str, tmp_path: Path) -> None:
    """With TRL's own generation both trainers see the same random numbers, so weights must agree after each step."""
    runs = []
    for cls in (GRPOTrainer, AlgoristGRPOTrainer):
        # SGD: Adam's first steps are the sign of the gradient, which hides scale and magnifies rounding.
        trainer = make(cls, tmp_path, changes={**STEP_CASES[case], "optim": "sgd", "learning_rate": 0.05})
        before = parameters_of(trainer)
        trainer.train()
        runs.append((parameters_of(trainer) - before, trainer.state.log_history))
    (stock, stock_log), (ours, our_log) = runs
    assert stock.norm() > 1e-3
    assert float((stock - ours).norm() / stock.norm()) < 1e-4
    for expected, found in zip(stock_log[:-1], our_log[:-1], strict=True):
        for key in ("loss", "grad_norm", "reward", "clip_ratio/region_mean", "frac_reward_zero_std"):
            if key not in expected:  # a step that reuses a generation logs no rewards
                continue
            assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key


def test_engine_records_and_metrics(tmp_path: Path) -> None:
    """One record per completion, with the numbers that the loss used; prompts reach the engine once per group."""
    batches: list[list[dict[str, Any]]] = []
    engines: list[PlainEngine] = []

    def factory(model: torch.nn.Module) -> PlainEngine:
        engines.append(PlainEngine(model))
        return engines[-1]

    sampling = SamplingParams(max_new_tokens=10, seed=5, stop_token_ids=tuple(STOPS))
    trainer = make(
        AlgoristGRPOTrainer, tmp_path, engine=factory, sampling=sampling, on_rollouts=batches.append
    )
    trainer.train()
    assert len(engines) == 1 and len(engines[0].calls) == 3 == len(batches)
    assert all(len(prompts) == 2 and size == 4 for prompts, size, _ in engines[0].calls)
    assert len({seed for _, _, seed in engines[0].calls}) == 3
    assert trainer.model.training
    for step, records in enumerate(batches):
        assert len(records) == 8 and {r["step"] for r in records} == {step}
        assert sorted({r["group"] for r in records}) == [0, 1]
        for record in records:
            assert QUESTIONS[int(record["problem_id"][1:])] == record["prompt"]
            assert record["reward"] == pytest.approx(sum(record["rewards"].values()), abs=1e-6)
            assert set(record["rewards"]) == {"reward_digits", "reward_length"}
            assert record["sampler_log_prob_sum"] < 0
            assert record["completion_tokens"] == 10 or not record["truncated"]
        assert sum(r["advantage"] for r in records) == pytest.approx(0, abs=1e-3)
    entry = trainer.state.log_history[0]
    for key in (
        "rollout/tokens_per_s",
        "rollout/seconds",
        "update/seconds",
        "reward/total",
        "reward/reward_length",
        "groups/useful_share",
        "completions/truncated_share",
        "completions/mean_tokens",
    ):
        assert math.isfinite(entry[key]), key
    assert entry["log_probs/sampler_gap_max"] >= entry["log_probs/sampler_gap_mean"] >= 0
    assert entry["reward/total"] == pytest.approx(entry["reward"], abs=1e-5)


def test_contradicting_sampling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        make(
            AlgoristGRPOTrainer, tmp_path, engine=PlainEngine, sampling=SamplingParams(0.5, max_new_tokens=10)
        )
    with pytest.raises(ConfigError, match="max_new_tokens"):
        make(AlgoristGRPOTrainer, tmp_path, engine=PlainEngine, sampling=SamplingParams(max_new_tokens=11))


def test_reference_pass_with_adapter_equals_stock_trl(tmp_path: Path) -> None:
    """β > 0 with LoRA: TRL asks twice without gradients, for old log-probs and, adapter off, for the reference's."""
    from peft import LoraConfig

    runs = []
    for cls in (GRPOTrainer, AlgoristGRPOTrainer):
        changes = {"beta": 0.1, "num_iterations": 2, "max_steps": 4, "optim": "sgd", "learning_rate": 0.05}
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        trainer = make(cls, tmp_path, peft_config=lora, changes=changes)
        with torch.no_grad():
            torch.manual_seed(2)
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        before = parameters_of(trainer)
        trainer.train()
        runs.append((parameters_of(trainer) - before, [e["kl"] for e in trainer.state.log_history[:-1]]))
    (stock, stock_kl), (ours, our_kl) = runs
    assert stock.norm() > 1e-4 and min(stock_kl) > 1e-4
    assert float((stock - ours).norm() / stock.norm()) < 1e-4
    assert our_kl == pytest.approx(stock_kl, rel=1e-3)


def old_log_probs_of(trainer: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Train one step that needs old log-probs; return them, the mask, and how many no-grad passes were run."""
    passes = 0
    original = trainer._update.log_probs

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += not torch.is_grad_enabled()
        return original(*args, **kwargs)

    trainer._update.log_probs = counting
    trainer.train()
    batch = trainer._buffered_inputs[0]
    return batch["old_per_token_logps"], batch["completion_mask"], passes


def test_old_log_probs_come_from_the_sampler_where_exact(tmp_path: Path) -> None:
    found = {}
    for taken in (True, False):
        trainer = make(
            AlgoristGRPOTrainer,
            tmp_path,
            engine=PlainEngine,
            sampling=SamplingParams(0.8, max_new_tokens=10, top_k=20, seed=5, stop_token_ids=tuple(STOPS)),
            sampler_log_probs=taken,
            changes={"num_iterations": 2, "max_steps": 2, "temperature": 0.8},
        )
        found[taken] = old_log_probs_of(trainer)
    (sampler, mask, passes), (recomputed, _, more_passes) = found[True], found[False]
    assert passes == 0 and more_passes == 1
    assert mask.sum() > 20 and float((sampler[mask == 0]).abs().max() if (mask == 0).any() else 0) == 0.0
    torch.testing.assert_close(sampler, recomputed, atol=2e-5, rtol=1e-5)


def test_everything_off_is_stock_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the fast pass ran")

    trainer = make(AlgoristGRPOTrainer, tmp_path, fast_update=False, skip_zero_advantage=False)
    monkeypatch.setattr(trainer._update, "log_probs", refuse)
    trainer.train()
    assert trainer.state.global_step == 3


def test_rollout_state_round_trip(tmp_path: Path) -> None:
    changes = {"num_iterations": 2, "max_steps": 1}
    trainer = make(AlgoristGRPOTrainer, tmp_path, changes=changes)
    trainer.train()
    state = trainer.extra_state()
    assert state["step"] == 1 and state["generation_count"] == 1
    other = make(AlgoristGRPOTrainer, tmp_path, changes=changes)
    other.load_extra_state(state)
    assert other._step == 1 and state["buffered_inputs"] is not None
    for mine, kept in zip(other._buffered_inputs, state["buffered_inputs"], strict=True):
        assert mine.keys() == kept.keys() and torch.equal(mine["completion_ids"], kept["completion_ids"])


@pytest.mark.parametrize("lora", [False, True])
def test_native_engine_follows_every_optimizer_step(lora: bool, tmp_path: Path) -> None:
    """Sampler and training log-probs agree after weights and adapters have moved: no stale copies."""
    from peft import LoraConfig

    from algorist.rollouts import make_engine

    trainer = make(
        AlgoristGRPOTrainer,
        tmp_path,
        engine=lambda model: make_engine("native", model, TOKENIZER),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
        changes={"num_iterations": 2, "max_steps": 6, "learning_rate": 3e-2},
    )
    before = parameters_of(trainer).clone()
    trainer.train()
    assert float((parameters_of(trainer) - before).abs().max()) > 1e-2
    gaps = [
        e["log_probs/sampler_gap_max"] for e in trainer.state.log_history if "log_probs/sampler_gap_max" in e
    ]
    assert len(gaps) == 3 and max(gaps) < 1e-4


def test_logged_entropy_counts_skipped_rows(tmp_path: Path) -> None:
    """Rows without advantage are not computed, yet the logged entropy stays close to stock TRL's."""
    means = []
    for cls in (GRPOTrainer, AlgoristGRPOTrainer):
        trainer = make(
            cls, tmp_path, changes={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        )
        trainer.reward_funcs = [lambda completion_ids, **_: [0.0] * len(completion_ids)] * 2
        trainer.reward_funcs[0] = reward_digits
        trainer.train()
        means.append([entry["entropy"] for entry in trainer.state.log_history[:-1]])
    assert means[1] == pytest.approx(means[0], rel=0.1)


def test_the_reference_is_the_policy_that_was_passed(tmp_path: Path) -> None:
    """Also for a model from scratch, whose config names no folder, and after SFT, whose config names the base model."""
    from algorist.config import load_recipe
    from algorist.pipeline import run_recipe
    from algorist.store.read import metrics

    recipe = load_recipe(
        "smoke-cpu",
        [f"output_dir={tmp_path}", "run_name=r", "threads=1", "grpo.beta=0.1", "eval.enabled=false"],
    ).recipe
    run_recipe(recipe)
    kl = [line["kl"] for line in metrics(tmp_path / "r", "grpo")]
    assert len(kl) == 2 and 0 <= kl[0] < 1e-6, "the first step is taken by the reference itself"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))

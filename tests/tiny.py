"""Small real things for tests: a tokenizer, a model whose next-token distribution is not flat, an engine that is slow and plain."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from algorist.config import load_recipe
from algorist.config.schema import GRPOSection, Recipe
from algorist.config.section import ModelSection
from algorist.extensions.reference import KLPenalty
from algorist.models.load import Policy, make_policy
from algorist.models.tiny import train_tokenizer
from algorist.prompts import get_format
from algorist.prompts.base import PromptFormat
from algorist.rewards import RewardSet, build_rewards
from algorist.rollouts.base import Completion, Completions, Prompts, SamplingParams
from algorist.training.extension import Extensions
from algorist.training.grpo_setup import make_grpo_trainer
from algorist.types import Problem
from benchmarks.stock_trl import make_stock_trainer

QUESTIONS = ["1+1", "23+4 is", "7*8", "what is 9-3", "5+5+5", "12/4 gives"]
PROBLEMS = [Problem(f"p{index}", question, str(index)) for index, question in enumerate(QUESTIONS)]
TOKENIZER = train_tokenizer(QUESTIONS, vocab_size=300)
# Many stop tokens give completions of unequal length.
STOPS = [TOKENIZER.eos_token_id, *range(3, len(TOKENIZER), 7)]


CPU = torch.device("cpu")
APPLES = "Tom has 14 apples. Tom buys 3 more. How many apples does Tom have?"


def smoke_recipe(folder: Path, *overrides: str) -> Recipe:
    """Return ``smoke-cpu`` in a folder, one thread, without evaluations."""
    place = ("device=cpu", "threads=1", f"output_dir={folder}", "eval.enabled=false")
    return load_recipe("smoke-cpu", [*place, *overrides]).recipe


def tiny_policy(prompt_format: str = "reasoning_answer") -> Policy:
    """Return a model from scratch whose tokenizer knows a format's tags."""
    section = ModelSection.model_validate(
        {
            "name": "tiny",
            "tiny": {"hidden_size": 32, "layers": 2, "vocab_size": 400, "max_position_embeddings": 1024},
        }
    )
    tags = get_format(prompt_format).tags.all()
    return make_policy(section, device=CPU, seed=0, texts=[APPLES] * 20, tags=tags)


def make_model(seed: int = 0) -> Qwen2ForCausalLM:
    """Return a small decoder whose next-token distribution is not flat."""
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


def reward_digits(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Varied within most groups, constant in some."""
    return [float(sum(ids) % 3) if ids[0] % 2 else 1.0 for ids in completion_ids]


def reward_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Tenths of a token."""
    return [len(ids) / 10 for ids in completion_ids]


class PlainEngine:
    """Samples with full forwards of a group's rows, which are equally long: slow, simple, right."""

    name = "plain"

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.calls: list[tuple[list[list[int]], int, int | None]] = []

    def generate(self, prompts: Prompts, group_size: int, params: SamplingParams) -> Completions:
        """Sample as ``RolloutEngine`` says; torch's global generator stands at the same place after each call."""
        assert not self.model.training
        self.calls.append(([list(p) for p in prompts], group_size, params.seed))
        generator = torch.Generator().manual_seed(params.seed or 0)
        groups = [self._group(list(prompt), group_size, params, generator) for prompt in prompts]
        torch.manual_seed(len(self.calls))
        return groups

    @torch.no_grad()
    def _group(
        self, prompt: list[int], size: int, params: SamplingParams, generator: torch.Generator
    ) -> list[Completion]:
        ids: list[list[int]] = [[] for _ in range(size)]
        log_probs: list[list[float]] = [[] for _ in range(size)]
        running = list(range(size))
        for _ in range(params.max_new_tokens):
            logits = self.model(input_ids=torch.tensor([prompt + ids[row] for row in running])).logits[:, -1]
            logs = torch.log_softmax((logits / params.temperature).float(), -1)
            tokens = torch.multinomial(logs.exp(), 1, generator=generator)
            for row, token, log_prob in zip(
                running, tokens[:, 0].tolist(), logs.gather(1, tokens)[:, 0].tolist()
            ):
                ids[row].append(token)
                log_probs[row].append(log_prob)
            running = [row for row in running if ids[row][-1] not in STOPS]
            if not running:
                break
        return [
            Completion(ids[row], log_probs[row], "length" if row in running else "stop")
            for row in range(size)
        ]


def raw_format() -> PromptFormat:
    """Return a format whose prompt is the question itself."""
    return get_format("question_only")


def rewards_of(*functions: Any) -> RewardSet:
    """Return rewards made of plain functions."""
    return build_rewards(list(functions) or [reward_digits, reward_length], raw_format())


def section(**changes: Any) -> GRPOSection:
    """Return a small ``grpo`` section: two groups of four in a step, three steps."""
    settings: dict[str, Any] = {
        "batch_size": 8,
        "group_size": 4,
        "max_completion_tokens": 10,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler": "linear",
        "save_steps": 10**9,
    }
    return GRPOSection(**{**settings, **changes})


def make_trainer(
    folder: Path, model: Any = None, *, engine: Any = None, stock: bool = False, **settings: Any
) -> Any:
    """Return the GRPO trainer of a small section, or TRL's own; ``settings`` are keys of the section or arguments of the trainer."""
    known = set(GRPOSection.model_fields)
    model = model if model is not None else make_model()
    arguments = {k: v for k, v in settings.items() if k not in known}
    return (make_stock_trainer if stock else make_grpo_trainer)(
        model=model,
        tokenizer=copy.deepcopy(TOKENIZER),
        problems=arguments.pop("problems", PROBLEMS),
        prompt_format=arguments.pop("prompt_format", raw_format()),
        section=section(**{k: v for k, v in settings.items() if k in known}),
        rewards=arguments.pop("rewards", rewards_of()),
        engine=engine
        if engine is not None
        else PlainEngine(getattr(model, "get_base_model", lambda: model)()),
        output_dir=folder,
        seed=arguments.pop("seed", 7),
        device=torch.device("cpu"),
        **arguments,
    )


def penalise(trainer: Any, beta: float) -> None:
    """Give a trainer the KL penalty on the reference's log-probs that its batches bring along, or none."""
    penalty = KLPenalty(Recipe())
    penalty.beta, penalty.importance = beta, trainer.objective.loss.importance
    trainer.extensions = Extensions([penalty] if beta else [])


def parameters_of(trainer: Any) -> torch.Tensor:
    """Return the trained parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def save_writer(folder: Path, *tokens: str, prompt_format: str = "reasoning_answer") -> Path:
    """Save a model that hardly attends and answers every chat with these different tokens, and return its folder."""
    tokenizer = tiny_policy(prompt_format).tokenizer
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], add_generation_prompt=True, return_dict=False
    )
    ids = [prompt[-1], *tokenizer.convert_tokens_to_ids(list(tokens)), tokenizer.eos_token_id]
    assert len(set(ids)) == len(ids) and tokenizer.unk_token_id not in ids[1:-1], (tokens, ids)
    size = 4 * ((len(tokenizer) + 3) // 4)
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    layer = model.model.layers[0]
    with torch.no_grad():
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.mul_(1e-6)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for before, after in itertools.pairwise(ids):
            model.lm_head.weight[after, before] = 2.0
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

"""The recipe as typed models, torch-free. Each field is followed by its docstring: unit, meaning, what the default does."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from os.path import expanduser
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from algorist.config.section import DataPath, ModelSection, OwnCode, Section, TextPath, merged
from algorist.declared import open_schema
from algorist.errors import ConfigError, MissingExtraError, check_known
from algorist.objectives import ADVANTAGES, LOSSES, Reduction
from algorist.store.safe_text import printable as safe

OR_OWN = "Expected one of {}, or a function of your own as file.py:function"


def no_empty_stop_string(section: str) -> Callable[[list[str] | None], list[str] | None]:
    """Return the check of ``SECTION.stop_strings``, which refuses an empty text (ValueError)."""

    def check(texts: list[str] | None) -> list[str] | None:
        if "" in (texts or ()):
            raise ValueError(
                f"{section}.stop_strings has an empty text, which would end every completion at once; take it out, or write "
                f"for example {section}.stop_strings=['</answer>']"
            )
        return texts

    return check


def refuse_groups_of_one(section: GRPOSection) -> None:
    """Refuse a group size of one where nothing but the group says what a completion is worth (ConfigError)."""
    if section.group_size == 1:
        raise ConfigError(
            "grpo.group_size is 1: the advantage of a group of one is always 0, so nothing is learned; take 8 "
            "(grpo.group_size=8), at least 2"
        )


def check_grpo(section: GRPOSection) -> GRPOSection:
    """Return the section; refuse combinations that cannot be trained (ValueError)."""
    if ".py:" not in section.advantage:
        check_known(section.advantage, ADVANTAGES, f"grpo.advantage is '{section.advantage}'", OR_OWN)
    per_micro, shared, factor = section.batch_size * section.processes, "", ""
    if section.processes > 1:
        shared, factor = " × processes", f" × {section.processes}"
    per_step = per_micro * section.gradient_accumulation_steps
    if per_step % section.group_size:
        fits = [k for k in range(2, min(per_step, 10_000) + 1) if per_step % k == 0]
        need = section.group_size // math.gcd(per_micro, section.group_size)
        raise ValueError(
            f"grpo.batch_size × grpo.gradient_accumulation_steps{shared} = {section.batch_size} × "
            f"{section.gradient_accumulation_steps}{factor} = {per_step} completions per step, not divisible by "
            f"grpo.group_size = {section.group_size}; take grpo.gradient_accumulation_steps={need}, or "
            f"grpo.group_size={min(fits, key=lambda k: abs(k - section.group_size), default=2)}"
        )
    generation = section.rows * section.processes
    if generation % section.group_size:
        raise ValueError(
            f"grpo.batch_size × grpo.steps_per_generation{shared} = {generation} completions per rollout batch, not "
            f"divisible by grpo.group_size = {section.group_size}; leave grpo.steps_per_generation out"
        )
    if section.steps_per_generation and section.steps_per_generation % section.gradient_accumulation_steps:
        raise ValueError(
            f"grpo.steps_per_generation is {section.steps_per_generation}, no multiple of grpo.gradient_accumulation_steps = "
            f"{section.gradient_accumulation_steps}; a rollout batch feeds whole steps: leave steps_per_generation out for one "
            f"step, or take {2 * section.gradient_accumulation_steps} for two"
        )
    return section


class DatasetSection(Section):
    """A dataset and the part of it that is used."""

    name: str = "arithmetic"
    """An adapter's name; ``algorist data list`` shows them."""
    split: str = "train"
    """Split of the dataset."""
    path: DataPath | None = None
    """A local file or folder; wins over the hub."""
    hub: str | None = None
    """Hub name that replaces the adapter's own."""
    subset: str | None = None
    """Configuration of the hub dataset."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Question, answer, solution, subject, level, id → the file's columns (adapter ``local``)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Adapter-specific parameters."""
    checker: OwnCode | None = None
    """Checker for problems with many right answers: a registered one or ``file.py:function``; a row's own ``checker`` column when left
    out."""
    limit: int | None = Field(None, ge=1)
    """Keep the first N problems."""
    unique: bool = False
    """Keep one problem per distinct question."""
    shuffle_seed: int | None = None
    """Shuffle before ``limit``; the order of the file when left out."""
    numeric_answers_only: bool = False
    """Drop problems whose gold answer is not a number."""
    correct_only: bool = False
    """Keep demonstrations whose own answer the grader finds right."""
    pass_rate: list[float] | None = Field(None, min_length=2, max_length=2)
    """Keep problems whose pass rate lies between these two, such as ``[0.1, 0.9]``; demonstrations of SFT are all kept."""
    pass_rates: DataPath | None = None
    """The table of pass rates; that of ``algorist data rate`` for this model, prompt and sampling when left out."""
    max_prompt_percentile: float | None = Field(None, gt=0, le=100)
    """Drop prompts longer than this percentile of the prompt lengths in tokens."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Drop prompts of more tokens."""

    @field_validator("pass_rate")
    @classmethod
    def _check_pass_rate(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and not 0 <= value[0] <= value[1] <= 1:
            raise ValueError(f"pass_rate is {value}; expected two shares, the lower first: [0.1, 0.9]")
        return value


class DataSection(Section):
    """Problems of each stage."""

    train: DatasetSection = Field(default_factory=DatasetSection)
    """Problems of GRPO, and of SFT when ``data.sft`` is left out."""
    sft: DatasetSection | None = None
    """Demonstrations of SFT: problems with worked solutions. Without a ``name`` it is ``data.train`` with these changes."""
    eval: DatasetSection = Field(default_factory=lambda: DatasetSection(split="test"))
    """Held-out problems."""

    @model_validator(mode="before")
    @classmethod
    def _sft_without_a_name(cls, values: Any) -> Any:
        """Take ``data.sft`` without a name for ``data.train`` with these changes."""
        sft = values.get("sft") if isinstance(values, dict) else None
        train = values.get("train") or {} if isinstance(values, dict) else {}
        if not isinstance(sft, dict) or "name" in sft or not isinstance(train, dict):
            return values
        return {**values, "sft": {**train, **sft} if {"path", "hub"} & sft.keys() else merged(train, sft)}

    @model_validator(mode="after")
    def _one_folder(self) -> DataSection:
        """Read held-out problems where those of training are: one adapter, a folder that holds both splits."""
        train, held_out = self.train, self.eval
        follows = train.name == held_out.name and not (held_out.path or held_out.hub)
        if follows and train.path and Path(train.path).expanduser().is_dir():
            self.eval = held_out.model_copy(update={"path": train.path})
        return self


class PromptSection(Section):
    """Settings of prompts."""

    format: str = "reasoning_answer"
    """A prompt format's name."""
    system_prompt: str | None = None
    """Replaces the format's system prompt; empty: none. Of a raw format: the whole prompt, with ``{question}``."""
    system_prompt_path: TextPath | None = None
    """A UTF-8 file with the system prompt."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Replaces tags: reasoning_open, reasoning_close, answer_open, answer_close."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Switches of the model's chat template, such as ``{enable_thinking: false}``."""
    system_role: Literal["system", "user"] = "system"
    """Role of the system prompt; ``user`` puts it before the question, for templates without a system role (Gemma)."""

    @field_validator("template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        own = "messages conversation chat_template add_generation_prompt continue_final_message tokenize"
        taken = sorted(set(own.split()) & set(value))
        if taken:
            raise ValueError(
                f"prompt.template_kwargs has {taken[0]}, which every prompt sets itself; take it out, and name what the "
                "model's own template reads, such as enable_thinking"
            )
        return value

    @model_validator(mode="after")
    def _check(self) -> PromptSection:
        if self.system_prompt is not None and self.system_prompt_path is not None:
            raise ValueError(
                "prompt.system_prompt and prompt.system_prompt_path are both set; keep one of them: "
                "prompt.system_prompt=null takes the file instead of the recipe's text"
            )
        return self


class RewardSection(Section):
    """One reward of the weighted sum; a text alone is its name."""

    name: OwnCode
    """A registered reward, or ``file.py:function``."""
    weight: float = 1.0
    """Factor in the sum; 0 logs the reward without using it."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The reward's own parameters."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds that one call of a user's own reward may take; then it is killed and the completions get its floor."""
    environment: list[str] = Field(default_factory=list)
    """Secret environment variables that a user's own reward gets, such as ``OPENAI_API_KEY``; it gets no others."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class LossSection(Section):
    """The loss of the policy: its name, and the parameters of this loss; a text alone is its name."""

    model_config = ConfigDict(extra="allow")

    name: OwnCode = "dapo"
    """A loss by name (``algorist.objectives.LOSSES``), or your own function: ``file.py:function``."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> LossSection:
        """Check the parameters and fill in the loss's own defaults; those of a user's file are checked with the file."""
        if ".py:" in self.name:
            return self
        check_known(self.name, LOSSES, f"grpo.loss is '{self.name}'", OR_OWN)
        loss = LOSSES.get(self.name).with_settings(self.parameters)
        defaults = {name: parameter.default for name, parameter in loss.parameters.items()}
        self.__pydantic_extra__ = {**defaults, **loss.settings}
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the loss; all of them for one that has a name, those that were set for a user's own."""
        return dict(self.model_extra or {})


_PACKAGES = {
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "lomo": "lomo_optim",
    "grokadamw": "grokadamw",
    "schedule_free": "schedulefree",
    "stable_adamw": "optimi",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "adamw_torch_xla": "torch_xla",
    "adamw_torch_npu": "torch_npu",
    "anyprecision": "torchdistx",
    **dict.fromkeys(("8bit", "32bit", "bnb", "ademamix"), "bitsandbytes"),
}
"""Part of an optimiser's name in transformers → the module that it needs; the first that fits."""


class OptimSection(Section):
    """Optimiser settings shared by the training stages."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    lr_scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "cosine"
    """Schedule after the warm-up."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of the steps with a rising rate."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps with a rising rate; wins over ``warmup_ratio``."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    optim: str = "adamw_torch"
    """A transformers optimiser name."""
    logging_steps: int = Field(1, ge=1)
    """Steps between two logged lines."""
    save_steps: int = Field(100, ge=1)
    """Steps between two checkpoints."""
    save_total_limit: int | None = Field(3, ge=1)
    """Checkpoints that are kept; the oldest go first."""
    gradient_checkpointing: bool = False
    """Trade time for memory."""
    micro_batch_tokens: int | None = Field(None, ge=16)
    """Most tokens of one forward and backward (each prompt once, every completion). Left out, the free memory decides (of a CPU at most
    2 GB of activations), and after running out of memory half of what did not fit."""

    def check_package(self, stage: str) -> None:
        """Refuse an optimiser whose package is not installed.

        Raises:
            MissingExtraError: The message says what to install.
        """
        module = next((module for part, module in _PACKAGES.items() if part in self.optim), None)
        if module and not find_spec(module):
            name = "torch-optimi" if module == "optimi" else module.replace("_", "-")
            raise MissingExtraError(
                f"{stage}.optim is {self.optim}, whose package is not installed: pip install {name}. Without it: {stage}.optim=adamw_torch"
            )


class SFTSection(OptimSection):
    """Supervised fine-tuning on demonstrations; the loss counts completion tokens only."""

    enabled: bool = True
    """Run this stage."""
    epochs: float = Field(1.0, gt=0)
    """Passes over the demonstrations."""
    max_steps: int | None = Field(None, ge=1)
    """Optimiser steps; wins over ``epochs``."""
    batch_size: int = Field(16, ge=1)
    """Demonstrations per device and micro-batch."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-batches per optimiser step."""
    max_length: int | None = Field(2048, ge=8)
    """Longest demonstration in tokens; longer ones are left out and counted."""
    learning_rate: float = Field(2e-5, gt=0)
    """Peak learning rate."""
    source: Literal["problems", "prompt_response"] = "problems"
    """Demonstrations from problems with solutions, or prompt and response columns as they are."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between two held-out evaluations during the stage."""


class GRPOSection(OptimSection):
    """Group Relative Policy Optimization with verifiable rewards."""

    enabled: bool = True
    """Run this stage."""
    epochs: float = Field(1.0, gt=0)
    """Passes over the problems."""
    max_steps: int | None = Field(None, ge=1)
    """Optimiser steps; wins over ``epochs``."""
    group_size: int = Field(8, ge=1)
    """Completions per problem (G)."""
    batch_size: int = Field(16, ge=1)
    """Completions per device and accumulated batch; memory decides how many are computed together."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-batches per optimiser step; completions per step = batch_size × gradient_accumulation_steps × processes."""
    processes: int = Field(1, ge=1)
    """Processes that share a step; set by the option ``-n``."""
    num_iterations: int = Field(1, ge=1)
    """Updates per rollout batch (μ)."""
    steps_per_generation: int | None = Field(None, ge=1)
    """Micro-batches per rollout batch; ``gradient_accumulation_steps`` when left out."""
    max_completion_tokens: int = Field(512, ge=1)
    """Longest completion in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the loss uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1 turns it off."""
    top_k: int = Field(0, ge=0)
    """Sample among the k likeliest tokens; 0 turns it off."""

    @field_validator("top_k", mode="before")
    @classmethod
    def _check_top_k(cls, value: Any) -> Any:
        if value == -1:
            raise ValueError("grpo.top_k is -1, which elsewhere means off; here 0 turns it off: grpo.top_k=0")
        return value

    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens below this share of the likeliest token's probability; 0 turns it off."""
    stop_strings: list[str] | None = None
    """Texts that end a completion; ``eval.stop_strings`` when left out."""
    loss: LossSection = Field(default_factory=LossSection)
    """The loss by name (dapo, grpo, dr_grpo, …) and its own parameters: ``loss: cispo`` or ``loss: {name: cispo, clip_high: 4}``."""
    reduction: Reduction | None = None
    """Average of the tokens' losses: ``token-mean`` (over all tokens of the step, DAPO), ``seq-mean-token-mean`` (each
    completion, then all, GRPO), ``prompt-mean-token-mean`` (all tokens of a prompt's completions, then the prompts, ScaleRL),
    ``seq-mean-token-sum``, ``seq-mean-token-sum-norm`` (divided by ``max_completion_tokens``, Dr. GRPO), ``micro-batch-token-mean``; the
    loss's own when left out."""
    advantage: OwnCode = "group_normalized"
    """Advantage by name: ``group_normalized`` (divided by the group's deviation), ``batch_normalized``, ``group_centered``
    (Dr. GRPO), ``leave_one_out`` (RLOO), ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``per_reward_normalized``
    (GDPO: each reward alone, then the sum), ``maxrl`` (divided by the group's mean), ``reinforce`` (1 and -1, no baseline); or your own function: ``file.py:function``."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the entropy per token, subtracted from the loss; above 0, completions without an advantage are computed too."""
    mask_truncated_completions: bool = False
    """Leave truncated completions out of the loss."""
    engine: str = "auto"
    """Rollout engine: ``auto`` (the fastest that covers the model), ``native``, ``transformers``, ``vllm``, or one that a plug-in registers."""
    skip_zero_advantage: bool = True
    """Leave rows of zero advantage out of the update where that is exact."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between two held-out evaluations during the stage."""
    samples_every: int | None = Field(None, ge=1)
    """Steps between two completions shown on the console, with question, gold answer and reward."""

    @property
    def rows(self) -> int:
        """Completions of a rollout batch of one process."""
        return self.batch_size * (self.steps_per_generation or self.gradient_accumulation_steps)

    _check_stop_strings = field_validator("stop_strings")(no_empty_stop_string("grpo"))
    _check = model_validator(mode="after")(check_grpo)


class EvalSection(Section):
    """Held-out evaluation: one greedy completion and ``samples`` sampled ones per problem."""

    enabled: bool = True
    """Evaluate after each stage."""
    samples: int = Field(0, ge=0)
    """Sampled completions per problem for pass@k and maj@k; 0: greedy only."""
    ks: list[int] = Field(default_factory=lambda: [1, 4, 8])
    """Values of k; those above ``samples`` are left out."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampled completions."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of the sampled completions."""
    top_k: int = Field(0, ge=0)
    """The sampled completions take the k likeliest tokens; 0: all."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Longest completion; that of GRPO when left out."""
    batch_size: int = Field(256, ge=1)
    """Problems per engine call."""
    stop_strings: list[str] = Field(default_factory=list)
    """Texts that end a completion, beside the end token; it is cut after the first one."""
    baseline: bool = False
    """Evaluate the model before any training as well."""
    engine: str | None = None
    """Rollout engine of the evaluations; that of GRPO when left out."""
    device: str | None = None
    """Device of the evaluations, such as ``cuda:1`` or ``cpu``, with a copy of the policy there; where the training runs, without a copy,
    when left out."""

    _check_stop_strings = field_validator("stop_strings")(no_empty_stop_string("eval"))


class Recipe(Section):
    """One run, from data to report."""

    name: str = "run"
    """Name of the recipe."""
    description: str = ""
    """One line for ``algorist recipes list``."""
    output_dir: str = "runs"
    """Folder of all runs; the run's own folder is ``output_dir/run_name``, and ``~`` one's home."""
    run_name: str | None = Field(None, coerce_numbers_to_str=True)
    """Name of the run's folder; the recipe's name when left out."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Seed of everything that is random, below 2^32."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of the training process."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads; torch chooses when left out."""
    model: ModelSection = Field(default_factory=ModelSection)
    """The policy."""
    data: DataSection = Field(default_factory=DataSection)
    """The problems."""
    prompt: PromptSection = Field(default_factory=PromptSection)
    """The prompts."""
    matcher: str = "symbolic"
    """Comparison of answers: a matcher of the grader."""
    rewards: list[RewardSection] = Field(
        default_factory=lambda: [
            RewardSection(name="correct", weight=1.0),
            RewardSection(name="well_formed", weight=0.2),
        ]
    )
    """The reward is the weighted sum of these."""
    sft: SFTSection = Field(default_factory=SFTSection)
    """Supervised fine-tuning."""
    grpo: GRPOSection = Field(default_factory=GRPOSection)
    """Reinforcement learning."""
    eval: EvalSection = Field(default_factory=EvalSection)
    """Evaluation."""
    plugins: list[TextPath] = Field(default_factory=list)
    """Python files that register datasets, matchers, engines, … before the recipe is checked."""

    _home = field_validator("output_dir")(expanduser)

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.grpo.stop_strings is None:
            self.grpo.stop_strings = list(self.eval.stop_strings)
        if not self.rewards and self.grpo.enabled:
            raise ValueError("rewards is empty while grpo.enabled is true; name at least one reward")
        return self

    @property
    def path(self) -> Path:
        """The run's folder (ConfigError where its name would lead out of ``output_dir``)."""
        name = self.run_name or self.name
        printable = all(c not in "/\\" and c.isprintable() for c in name)
        if name in (".", "..") or not printable or len(name.encode()) > 200:
            raise ConfigError(
                f"run_name is '{safe(name[:80])}'; expected a plain folder name of at most 200 bytes, such as run_name=first; another "
                "place is output_dir=FOLDER"
            )
        return Path(self.output_dir) / name


open_schema(Recipe, model=ModelSection, sft=SFTSection, grpo=GRPOSection, eval=EvalSection)

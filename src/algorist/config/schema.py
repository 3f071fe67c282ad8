"""The recipe as typed models, torch-free. Each field is followed by its docstring: unit, meaning, what the default does."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from algorist.config.grpo_checks import check_grpo, with_names_of_now
from algorist.config.grpo_sections import PoolsSection, ReplaySection, ResampleSection, StopSection
from algorist.config.model_section import ModelSection
from algorist.config.publishing import HubSection, TrackingSection
from algorist.config.section import Section
from algorist.config.vllm_sections import ColocatedVLLMSection, VLLMSection


class DatasetSection(Section):
    """A dataset and the part of it that is used."""

    name: str = "arithmetic"
    """An adapter's name; ``algorist data list`` shows them."""
    split: str = "train"
    """Split of the dataset."""
    path: str | None = None
    """A local file or folder; wins over the hub."""
    hub: str | None = None
    """Hub name that replaces the adapter's own."""
    subset: str | None = None
    """Configuration of the hub dataset."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our names (question, answer, solution, subject, level, id) → the file's columns (adapter ``local``)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Adapter-specific parameters."""
    checker: str | None = None
    """What decides where many answers are right, in place of the gold answer: a registered checker or ``file.py:function``; a row's own
    ``checker`` column when left out."""
    limit: int | None = Field(None, ge=1)
    """Keep the first N problems."""
    unique: bool = False
    """Keep one problem per distinct question."""
    shuffle_seed: int | None = None
    """Shuffle before ``limit``; the order of the file when left out."""
    numeric_answers_only: bool = False
    """Drop problems whose gold answer is not a number."""
    correct_only: bool = False
    """Keep demonstrations whose own answer (the response's, or the solution's last box or ``####``) the grader finds right."""
    pass_rate: list[float] | None = Field(None, min_length=2, max_length=2)
    """Keep problems whose pass rate lies between these two, such as ``[0.1, 0.9]``: neither hopeless nor solved. The demonstrations of
    SFT are not filtered."""
    pass_rates: str | None = None
    """The table of pass rates; the one that ``algorist data rate`` wrote for the recipe's model, prompt and sampling when left out."""
    max_prompt_percentile: float | None = Field(None, gt=0, le=100)
    """Drop prompts longer than this percentile of the prompt lengths in tokens."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Drop prompts of more tokens."""

    @field_validator("pass_rate")
    @classmethod
    def _check_pass_rate(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and not 0 <= value[0] <= value[1] <= 1:
            raise ValueError(
                f"pass_rate is {list(value)}; expected two shares, the lower first, such as [0.1, 0.9]"
            )
        return value


class DataSection(Section):
    """Which problems train which stage."""

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
        return {**values, "sft": {**train, **sft}}


class PromptSection(Section):
    """How a problem becomes a prompt."""

    format: str = "reasoning_answer"
    """A prompt format's name."""
    system_prompt: str | None = None
    """Replaces the format's system prompt; an empty string leaves it out."""
    system_prompt_path: str | None = None
    """A UTF-8 file with the system prompt."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Replaces tags: reasoning_open, reasoning_close, answer_open, answer_close."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Switches of the model's chat template, such as ``{enable_thinking: false}``; in force wherever a prompt is made."""
    system_role: Literal["system", "user"] = "system"
    """Who says the system prompt; ``user`` puts it before the question, for templates without a system role (Gemma)."""

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
                "prompt.system_prompt and prompt.system_prompt_path are both set; keep one of them"
            )
        return self


class RewardSection(Section):
    """One reward of the weighted sum; a text alone is its name."""

    name: str
    """A registered reward, or ``file.py:function``."""
    weight: float = 1.0
    """Factor in the sum; 0 logs the reward without using it."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The reward's own parameters."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds that one call of a user's own reward may take; then it is killed and the completions get its floor."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


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
    """Render demonstrations from problems with solutions, or read prompt and response columns as they are."""
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
    """Completions per device and micro-batch."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-batches per optimiser step; completions per step = batch_size × gradient_accumulation_steps × processes."""
    processes: int = Field(1, ge=1)
    """Processes that share a step; a run sets it to those it has, ``algorist launch`` before it starts them."""
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
            raise ValueError("grpo.top_k is -1, which vLLM takes for off; here 0 turns it off: grpo.top_k=0")
        return value

    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens below this share of the likeliest token's probability; 0 turns it off."""
    loss: str = "dapo"
    """Loss by name (``algorist.objectives.LOSSES``: dapo, grpo, dr_grpo, …), or a function of your own: ``file.py:function``."""
    loss_params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the loss that have no key of their own, such as ``delta`` of the clipped losses."""
    advantage: str = "group_normalized"
    """Advantage by name: ``group_normalized`` (divided by the group's deviation), ``batch_normalized``, ``group_centered``
    (Dr. GRPO), ``leave_one_out`` (RLOO), ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``per_reward_normalized``
    (GDPO: each reward by itself, then the sum); or a function of your own: ``file.py:function``."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference; 0 loads no reference."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the entropy of the next-token distributions, per token, subtracted from the loss; above 0 completions without an
    advantage are computed too."""
    top_entropy_share: float = Field(1.0, gt=0, le=1)
    """Share of a step's tokens that the loss counts: those where the policy was least certain, found by one more forward pass. 1 counts
    all of them; TRL's ``top_entropy_quantile``."""
    clip_low: float = Field(0.2, gt=0)
    """Lower clipping distance of the ratio."""
    clip_high: float = Field(0.2, gt=0)
    """Upper clipping distance of the ratio."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratios per token (GRPO) or per sequence (GSPO)."""
    mask_truncated_completions: bool = False
    """Leave truncated completions out of the loss."""
    engine: Literal["auto", "native", "transformers", "vllm"] = "auto"
    """Rollout engine; ``auto`` takes the fastest that covers the model."""
    vllm: VLLMSection = Field(default_factory=ColocatedVLLMSection)
    """What ``engine: vllm`` reads. ``mode`` decides which keys there are: ``colocate`` (vLLM in the training process) or ``server``."""
    micro_batch_tokens: int | None = Field(None, ge=16)
    """Most tokens of one forward and backward (each prompt once, every completion; one row at least). Left out, a
    GPU's free memory decides, and after running out of memory half of what did not fit."""
    fast_update: bool = True
    """Compute each prompt once per group, the head at completion positions only; off = stock TRL."""
    skip_zero_advantage: bool = True
    """Leave rows of zero advantage out of the update where that is exact."""
    resample: ResampleSection | None = None
    """Replace groups whose rewards are all equal by fresh ones; left out, they stay and teach nothing."""
    replay: ReplaySection | None = None
    """Put useful groups of earlier rollout batches in places that are left without a signal; left out, nothing is used again."""
    pools: PoolsSection | None = None
    """Let problems that are solved, or hopeless, rest for some rollout batches; left out, every problem comes each epoch."""
    keep_best: bool = True
    """Save the best checkpoint by held-out accuracy (``eval_every``) and keep it beside the last ones."""
    stop: StopSection | None = None
    """End a run that collapses or no longer improves at its best checkpoint; left out, every run goes to its last step."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between two held-out evaluations during the stage."""
    samples_every: int | None = Field(None, ge=1)
    """Steps between two completions shown on the console, with question, gold answer and reward; none when left out."""

    _former_names = model_validator(mode="before")(with_names_of_now)
    _check = model_validator(mode="after")(check_grpo)


class EvalSection(Section):
    """Held-out evaluation: one greedy completion and ``samples`` sampled ones per problem."""

    enabled: bool = True
    """Evaluate after each stage."""
    samples: int = Field(0, ge=0)
    """Sampled completions per problem for pass@k and maj@k; 0 evaluates greedily only."""
    ks: list[int] = Field(default_factory=lambda: [1, 4, 8])
    """Values of k; those above ``samples`` are left out."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampled completions."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of the sampled completions."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Longest completion; that of GRPO when left out."""
    batch_size: int = Field(64, ge=1)
    """Problems per engine call."""
    stop_strings: list[str] = Field(default_factory=list)
    """A completion ends behind the first of these texts, which stays part of it; none: at the model's end token only."""
    baseline: bool = False
    """Evaluate the model before any training as well."""
    engine: Literal["auto", "native", "transformers", "vllm"] | None = None
    """Rollout engine of the evaluations; that of GRPO when left out."""
    device: str | None = None
    """Device of the evaluations, such as ``cuda:1`` or ``cpu``: each one runs there on a fresh copy of the policy, which
    takes the memory of one more model. Left out, they run where the training runs, without a copy."""

    @field_validator("stop_strings")
    @classmethod
    def _check_stop_strings(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError(
                "eval.stop_strings has an empty text, which would end every completion at once; take it out, or write "
                "for example eval.stop_strings=['</answer>']"
            )
        return value


class Recipe(Section):
    """One run, from data to report."""

    name: str = "run"
    """Name of the recipe."""
    description: str = ""
    """One line for ``algorist recipes list``."""
    output_dir: str = "runs"
    """Folder of all runs; the run's own folder is ``output_dir/run_name``."""
    run_name: str | None = None
    """Name of the run's folder; the recipe's name when left out."""
    seed: int = 42
    """Seed of everything that is random."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of the training process."""
    threads: int | None = Field(None, ge=1)
    """CPU threads; torch chooses when left out."""
    model: ModelSection = Field(default_factory=ModelSection)
    """The policy."""
    data: DataSection = Field(default_factory=DataSection)
    """The problems."""
    prompt: PromptSection = Field(default_factory=PromptSection)
    """How a problem becomes a prompt."""
    matcher: str = "symbolic"
    """How answers are compared: a matcher of the grader."""
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
    report_to: list[Literal["wandb", "tensorboard", "trackio", "mlflow"]] = Field(default_factory=list)
    """Trackers that get the metrics, evaluations and the recipe; none unless named."""
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    """How the run is named in its trackers."""
    hub: HubSection = Field(default_factory=HubSection)
    """Upload of the trained model to the hub."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_tracker(cls, value: Any) -> Any:
        """Take ``report_to: wandb`` for a list of one, and ``none`` for none."""
        if isinstance(value, str):
            return [] if value == "none" else [value]
        return value

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if not self.rewards and self.grpo.enabled:
            raise ValueError("rewards is empty while grpo.enabled is true; name at least one reward")
        if self.rewards and all(r.weight == 0 for r in self.rewards) and self.grpo.enabled:
            raise ValueError(
                "every weight in rewards is 0 while grpo.enabled is true; nothing would be learned"
            )
        if self.grpo.stop and not (self.grpo.eval_every and self.grpo.keep_best and self.eval.enabled):
            raise ValueError(
                "grpo.stop is set, which needs held-out evaluations during the stage and its best checkpoint; take for example "
                "grpo.eval_every=10, with eval.enabled and grpo.keep_best true"
            )
        if self.model.quantization and (self.sft.enabled or self.grpo.enabled) and self.model.lora is None:
            raise ValueError(
                f"model.quantization is {self.model.quantization} without model.lora; quantised weights are not trained, an "
                "adapter on them is: model.lora={rank: 16}"
            )
        if self.model.quantization and (self.model.name == "tiny" or self.model.backend == "unsloth"):
            raise ValueError(
                f"model.quantization is {self.model.quantization}, which quantises saved models through transformers; take "
                "model.name=FOLDER or a hub name, and model.backend=transformers"
            )
        if self.model.name == "tiny" and self.model.backend == "unsloth":
            raise ValueError(
                "model.backend is unsloth while model.name is tiny; unsloth loads hub models only"
            )
        return self

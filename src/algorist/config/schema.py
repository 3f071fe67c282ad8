"""The recipe as typed models, torch-free. Each field is followed by its docstring: unit, meaning, what the default does."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from algorist.config.grpo_checks import check_grpo, with_names_of_now
from algorist.config.publishing import HubSection, TrackingSection
from algorist.config.section import Section


class TinySection(Section):
    """The shape of a model that is made from scratch."""

    vocab_size: int = Field(420, ge=300)
    """Entries of the byte-level BPE tokenizer trained on the training problems."""
    hidden_size: int = Field(128, ge=16)
    """Width of the decoder; a multiple of twice the number of heads."""
    layers: int = Field(3, ge=1)
    """Decoder layers."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    kv_heads: int = Field(2, ge=1)
    """Key and value heads; divides ``heads``."""
    intermediate_size: int | None = Field(None, ge=16)
    """Width of the feed-forward layer; 3 × ``hidden_size`` when left out."""
    max_position_embeddings: int = Field(512, ge=64)
    """Longest sequence in tokens."""

    @model_validator(mode="after")
    def _check(self) -> TinySection:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"model.tiny.hidden_size ({self.hidden_size}) is not a multiple of twice model.tiny.heads "
                f"({self.heads}); take hidden_size {2 * self.heads * max(1, self.hidden_size // (2 * self.heads))}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.tiny.kv_heads ({self.kv_heads}) does not divide model.tiny.heads ({self.heads}); take 1"
            )
        return self


class LoraSection(Section):
    """A PEFT LoRA adapter."""

    rank: int = Field(16, ge=1)
    """Rank r of the update matrices."""
    alpha: float = Field(32, gt=0)
    """Scaling numerator; the update is scaled by alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input. Rollouts are sampled without it."""
    target_modules: list[str] | Literal["all-linear", "attention", "attention+mlp"] = "attention+mlp"
    """Modules that get an adapter; the default is q, k, v, o, gate, up, down."""
    rslora: bool = False
    """Rank-stabilised scaling."""
    dora: bool = False
    """Weight-decomposed adapters."""
    in_several_processes: Literal["keep", "off"] = "keep"
    """``off`` trains all weights, with a warning, when the run starts in more than one process; a continued run keeps what it
    began with."""

    @field_validator("in_several_processes", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        """Take YAML's ``off``, which is false, for the word."""
        return "off" if value is False else value


class ModelSection(Section):
    """The policy."""

    name: str = "tiny"
    """``tiny`` (made from scratch), a local folder in the hub's layout, a ``.gguf`` file or a folder with one (extra ``gguf``),
    ``smollm2`` (SmolLM2-135M-Instruct: of the extra ``smollm2`` where installed, else from the hub), or a hub name
    ``owner/model``."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the weights are kept in. ``auto`` is float32 for weights that are trained, the products' type for an adapter's
    base; bfloat16 trains bare 16-bit weights, stochastically rounded."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the matrix products, under autocast where it is not the weights'. ``auto`` is bfloat16 on GPUs that have tensor
    cores for it, float16 on older ones, and the weights' type elsewhere."""
    attn_implementation: str | None = None
    """Attention kernel (``sdpa``, ``flash_attention_2``, ``eager``) of the passes through the model's module. Left out:
    ``flash_attention_2`` on CUDA with 16-bit products where the package flash_attn is installed, else transformers chooses."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust the model's author."""
    backend: Literal["transformers", "unsloth"] = "transformers"
    """Loader of the model; ``unsloth`` needs an NVIDIA GPU and an environment with Unsloth."""
    chat_template: str | None = None
    """A Jinja2 chat template, or the path of a file that holds one; the tokenizer's own when left out."""
    lora: LoraSection | None = None
    """Train an adapter instead of all weights."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Keep the base of an adapter, or a model that is only evaluated, in 4-bit NF4 (QLoRA) or 8-bit numbers, through
    bitsandbytes; embeddings, norms and head stay in ``dtype``."""
    tiny: TinySection = Field(default_factory=TinySection)
    """Shape of the model when ``model.name`` is ``tiny``."""


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
    max_prompt_percentile: float | None = Field(None, gt=0, le=100)
    """Drop prompts longer than this percentile of the prompt lengths in tokens."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Drop prompts of more tokens."""


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
        taken = sorted(
            {
                "messages",
                "conversation",
                "chat_template",
                "add_generation_prompt",
                "continue_final_message",
                "tokenize",
            }
            & set(value)
        )
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
    (Dr. GRPO), ``leave_one_out`` (RLOO); or a function of your own: ``file.py:function``."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference; 0 loads no reference."""
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
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM settings: ``mode`` (colocate or server), ``gpu_memory_utilization`` (share of the GPU's memory, 0.3),
    ``enable_sleep_mode`` (give it back during the update), ``server_base_url``, ``sync_folder``, …"""
    micro_batch_tokens: int | None = Field(None, ge=16)
    """Most tokens of one forward and backward (each prompt once, every completion; one row at least). Left out, a
    GPU's free memory decides, and after running out of memory half of what did not fit."""
    fast_update: bool = True
    """Compute each prompt once per group, the head at completion positions only; off = stock TRL."""
    skip_zero_advantage: bool = True
    """Leave rows of zero advantage out of the update where that is exact."""
    eval_every: int | None = Field(None, ge=1)
    """Steps between two held-out evaluations during the stage."""
    samples_every: int | None = Field(None, ge=1)
    """Steps between two completions shown on the console, with question, gold answer and reward; none when left out."""

    @model_validator(mode="before")
    @classmethod
    def _former_names(cls, given: Any) -> Any:
        return with_names_of_now(given)

    @model_validator(mode="after")
    def _check(self) -> GRPOSection:
        check_grpo(self)
        return self


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

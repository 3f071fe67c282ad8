"""The Python API for GRPO on GSM8K under the names of OneShotGRPO; every step is the one that the recipes use.

setup = create_math_training_setup("Qwen/Qwen2.5-0.5B-Instruct", split="train")
run_training(setup.artifacts)
print(generate_math_solution("What is 15 * 23?", generator=build_text_generator("outputs/math-grpo/final")))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from algorist.config.load import load_recipe
from algorist.config.other_names import ours_for, trl_names
from algorist.config.schema import DatasetSection, GRPOSection, refuse_groups_of_one
from algorist.config.section import ModelSection
from algorist.data import Source, load_problems
from algorist.data.columns import Columns, chat_text, load_source, pick_columns, to_problems
from algorist.data.golds import plain_number, stated_gold
from algorist.data.problems import fitting_problems, tokenizer_texts
from algorist.errors import ConfigError, DataError, EngineError, check_known
from algorist.extensions.published_rewards.small_models import DEFAULT_REWARD_WEIGHTS, DEFAULT_REWARDS
from algorist.prompts import PromptFormat, get_format
from algorist.prompts.attached import Asked, attached
from algorist.prompts.base import warn_of_missing_tags
from algorist.prompts.chat import attach, encode_prompt
from algorist.rewards import RewardSet, build_rewards
from algorist.store.run_log import Display, Lines
from algorist.store.stages import LAST_FIRST
from algorist.types import Message, Problem

if TYPE_CHECKING:
    from datasets import Dataset

    from algorist.models.load import Policy
    from algorist.runs.solve import Solver

RECIPE = "oneshot-gsm8k"
FORMAT = "reasoning_answer"
DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
DEFAULT_GENERATOR = "HarleyCooper/GRPOtuned"

OWN_KEYS = {"max_prompt_length", "bf16", "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "seed"}
TRAINER_KEYS = ("callbacks", "engine", "on_rollouts")
OF_TRL = {
    "model": "model_name=", "args": "grpo_args=", "train_dataset": "dataset=", "processing_class": "tokenizer=",
    "reward_funcs": "reward_funcs=", "peft_config": "model_name=, a model with its adapter: peft.get_peft_model(model, config)",
    "quantization_config": "model_name=, a model that is loaded so", "optimizers": "grpo_args={'optim': …, 'learning_rate': …}",
    "eval_dataset": "algorist eval RUN, or Solver.solve after the training", "tools": "tools.use=[…] of a recipe",
}  # fmt: skip
"""Arguments of TRL's trainer and where they are here."""


def _defaults() -> dict[str, Any]:
    recipe = load_recipe(RECIPE).recipe
    shown = {trl: getattr(recipe.grpo, ours) for trl, ours in trl_names().items() if "." not in ours}
    return {**shown, "max_prompt_length": recipe.data.train.max_prompt_tokens, "use_vllm": False}


DEFAULT_GRPO_ARGS: dict[str, Any] = _defaults()
"""The default hyperparameters in TRL's names, read from the recipe ``oneshot-gsm8k``."""


@dataclass
class TrainingArtifacts:
    """Arguments of ``run_training``: the trainer, and its settings as transformers' ``TrainingArguments``."""

    trainer: Any
    config: Any


@dataclass
class MathTrainingSetup:
    """A training run that is ready to start.

    ``dataset`` has a row per problem that trains, ``reward_funcs`` the rewards with their weights, ``grpo_args`` the
    defaults with the caller's own on top.
    """

    dataset: Dataset
    reward_funcs: RewardSet
    artifacts: TrainingArtifacts
    grpo_args: dict[str, Any]


def load_gsm8k(split: str = "train", *, path: str | Path | None = None) -> Dataset:
    """Return GSM8K (openai/gsm8k, main) with its columns ``question`` and ``answer``; ``path`` reads local files.

    Raises:
        DataError: The hub or the path cannot be read.
    """
    from datasets import Dataset

    source = Source(split, None if path is None else str(path))
    return Dataset.from_list(load_source(source, hub="openai/gsm8k", subset=("main",), where="gsm8k"))


def build_chat_prompt(question: str, system_prompt: str | None = None) -> list[Message]:
    """Return the system message, which shows the format, and the user message with the stripped question."""
    return cast("list[Message]", get_format(FORMAT, system_prompt=system_prompt).render(question))


def format_for_grpo(dataset: Dataset, system_prompt: str | None = None) -> Dataset:
    """Add ``prompt`` (chat messages), ``reference_solution`` and ``reference_answer``; other columns stay.

    Raises:
        DataError: There is no column ``question`` or ``answer``.
    """
    for column in ("question", "answer"):
        check_known(
            column,
            dataset.column_names,
            f"the dataset has no column '{column}'",
            "Its columns: {}; rename one with dataset.rename_column",
            DataError,
        )

    def formatted(row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompt": build_chat_prompt(row["question"], system_prompt),
            "reference_solution": row["answer"],
            "reference_answer": str(stated_gold(str(row["answer"]), "auto") or "").strip(),
        }

    return dataset.map(formatted)


def create_math_training_setup(
    model_name: Any = DEFAULT_MODEL,
    split: str = "train",
    *,
    tokenizer: Any = None,
    system_prompt: str | None = None,
    output_dir: str | Path | None = None,
    run_name: str = "math-grpo",
    report_to: str | Sequence[str] = "none",
    reward_funcs: Sequence[str | Mapping[str, Any] | Callable[..., Any]] | None = None,
    reward_weights: Sequence[float] | None = None,
    dataset: Sequence[Mapping[str, Any]] | None = None,
    grpo_args: Mapping[str, Any] | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
    limit: int | None = None,
    device: str = "auto",
) -> MathTrainingSetup:
    """Load and format GSM8K, take the default rewards, build the GRPO trainer.

    Args:
        model_name: A hub name, a model folder, or a loaded model of transformers, PEFT or Unsloth.
        split: Split of GSM8K.
        tokenizer: That of a loaded model; read from where the model came from when left out.
        system_prompt: Replaces the one that asks for the format.
        output_dir: Folder of ``checkpoint-STEP`` and ``final``; ``outputs/RUN_NAME`` when left out.
        run_name: Name of the run, also in trackers.
        report_to: Trackers: ``"none"``, a name or names.
        reward_funcs: Rewards: names of the registry, ``file.py:function``, functions of yours (of one completion, or as TRL
            calls them), or ``{"name": …, "weight": …, "params": …}``; ``DEFAULT_REWARDS`` when left out.
        reward_weights: One weight for each reward; ``DEFAULT_REWARD_WEIGHTS`` for the default ones, else their own, or 1.
        dataset: Rows with ``question`` and ``answer``, or the other usual names (a ``datasets.Dataset`` or a list of mappings),
            instead of GSM8K; a worked answer is read after its ``####`` or in its last box.
        grpo_args: Arguments in TRL's names or keys of a recipe's ``grpo`` section, over ``DEFAULT_GRPO_ARGS``.
        trainer_kwargs: ``callbacks``, ``engine``, ``on_rollouts`` of ``make_grpo_trainer``.
        path: A local file or folder of GSM8K instead of the hub.
        limit: Only the first problems.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.

    Raises:
        ConfigError: An unknown argument, a wrong number of weights, a model that cannot be loaded.
        DataError: The problems cannot be read.
    """
    from datasets import Dataset

    from algorist.models.load import pick_device

    merged = {**DEFAULT_GRPO_ARGS, **(grpo_args or {})}
    section = _grpo_section(merged)
    for key in OF_TRL.keys() & (trainer_kwargs or {}).keys():
        raise ConfigError(f"trainer_kwargs has the key '{key}': here it is {OF_TRL[key]}")
    own = _known(trainer_kwargs or {}, TRAINER_KEYS, "trainer_kwargs")
    form = get_format(FORMAT, system_prompt=system_prompt)
    warn_of_missing_tags(form)
    rewards = _rewards(reward_funcs, reward_weights, form)
    place = pick_device(device)
    _check_bf16(merged.get("bf16"), place)
    source = DatasetSection(
        name="gsm8k",
        split=split,
        path=str(path) if path is not None else None,
        limit=limit,
        max_prompt_tokens=merged["max_prompt_length"],
    )
    seed = int(merged.get("seed", 42))
    problems, rows = (load_problems(source), None) if dataset is None else _problems(dataset, limit)
    policy = _policy(model_name, tokenizer, place, seed, problems, form)
    attach(policy.tokenizer, Asked(form, section.max_completion_tokens))
    if rows is None:
        rows, problems = (
            load_gsm8k(split, path=path),
            fitting_problems(source, problems, form, policy.tokenizer),
        )
    elif most := merged["max_prompt_length"]:
        problems = [p for p in problems if len(encode_prompt(form, policy.tokenizer, p.question)) <= most]
    rewards.probe(problems)
    usable = {p.question for p in problems}
    fitting = [dict(row) for row in rows if str(row["question"]).strip() in usable]
    formatted = format_for_grpo(Dataset.from_list(fitting), system_prompt)
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    artifacts = _build(
        policy,
        problems,
        form,
        section,
        rewards,
        output_dir=Path(output_dir) if output_dir is not None else Path("outputs") / run_name,
        run_name=run_name,
        report_to=[name for name in names if name != "none"],
        seed=seed,
        device=place,
        **own,
    )
    return MathTrainingSetup(formatted, rewards, artifacts, merged)


def _policy(
    model: Any, tokenizer: Any, device: Any, seed: int, problems: list[Problem], form: PromptFormat
) -> Any:
    """Return a policy loaded by its name, or made of a model that is loaded already."""
    from algorist.models.load import Policy, load_tokenizer, make_policy, prepare_tokenizer

    if isinstance(model, str | Path):
        texts = tokenizer_texts(problems, form)
        section = ModelSection(name=str(model))
        return make_policy(section, device=device, seed=seed, texts=texts, tags=form.tags.all())
    if not getattr(model, "is_quantized", False):
        model.to(device)
    own = prepare_tokenizer(tokenizer, None) if tokenizer is not None else load_tokenizer(model.name_or_path)
    return Policy(model, own)


def run_training(
    artifacts: TrainingArtifacts,
    *,
    resume_from_checkpoint: str | bool | None = None,
    display: Display | None = None,
) -> Any:
    """Train, save the model under ``output_dir/final`` and return transformers' ``TrainOutput``.

    Args:
        artifacts: The trainer, from ``create_math_training_setup``.
        resume_from_checkpoint: A checkpoint's folder, or True for the newest.
        display: Where progress is shown; lines on standard error when left out, nothing with ``Quiet()``.
    """
    from algorist.training.callbacks import ProgressCallback

    trainer, shown = artifacts.trainer, display or Lines()
    trainer.add_callback(ProgressCallback(partial(shown.step, "grpo"), partial(shown.progress, "grpo")))
    result = trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    trainer.save_model(str(Path(artifacts.config.output_dir) / "final"))
    return result


def build_text_generator(
    model_id: str | Path = DEFAULT_GENERATOR, *, prompt_format: str | None = None
) -> Solver:
    """Return a generator for ``generate_math_solution`` that asks in the prompt format of the training.

    Args:
        model_id: A hub name, a run, or a folder that was saved after training.
        prompt_format: A prompt format's name; that of the training when left out, ``reasoning_answer`` where nothing says it.
    """
    from algorist.runs.solve import Solver

    folder = Path(model_id).expanduser()
    folder = next((f for s in LAST_FIRST if (f := folder / s / "final").is_dir()), folder)
    solver = Solver.load(folder if folder.is_dir() else str(model_id), prompt_format=prompt_format)
    return solver if prompt_format else _solver_of(solver.policy)


def generate_math_solution(
    question: str,
    *,
    generator: Any = None,
    max_new_tokens: int = 200,
    temperature: float = 0.9,
    seed: int | None = None,
) -> str:
    """Return the completion of a question, with its tags; ``temperature`` 0 is greedy.

    Args:
        question: The question alone; the prompt is that of the model's training.
        generator: Of ``build_text_generator``, or a text-generation pipeline of transformers; the default model's when left out.
        max_new_tokens: Longest completion in tokens.
        temperature: 0 is greedy.
        seed: Makes samples repeatable.

    Raises:
        EngineError: The model wrote nothing.
    """
    solver = generator if generator is not None else build_text_generator()
    solver = solver if hasattr(solver, "solve") else _solver_of(solver)
    (row,) = solver.solve([question], max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    if not (text := str(row["completion"]).strip()):
        raise EngineError(
            f"the model wrote nothing for {question[:80]!r}; raise max_new_tokens ({max_new_tokens}) or try another seed"
        )
    return text


def _solver_of(pipeline: Any) -> Solver:
    """Return a text-generation pipeline of transformers as a solver, which asks as the model was trained, in tags where nothing says it."""
    from algorist.models.load import Policy, prepare_tokenizer
    from algorist.runs.asking import how_to_ask
    from algorist.runs.solve import Solver

    how = how_to_ask(None, None if (of_model := attached(pipeline.tokenizer)) else FORMAT, of_model)
    policy = Policy(pipeline.model, prepare_tokenizer(pipeline.tokenizer, None))
    return Solver(policy, how.prompt_format, how.max_completion_tokens, how.stop_strings)


def save_prompt_and_response(
    prompt: str, generated_output: str, path: str | Path = "math_results.jsonl", **extra: Any
) -> Path:
    """Append one line with ``prompt``, ``generated_output`` and what else is given; return the file's path."""
    from algorist.runs.solve import append_jsonl

    file = Path(path)
    append_jsonl(file, [{"prompt": prompt, "generated_output": generated_output, **extra}])
    return file


NO_EFFECT = {
    "enabled": "it trains; leave it out",
    "processes": "algorist run -n 2 RECIPE",
    **dict.fromkeys(("eval_every", "eval_steps"), "algorist eval FOLDER after the training, or a recipe's grpo.eval_every"),
    **dict.fromkeys(("samples_every", "log_completions"), "trainer_kwargs={'on_rollouts': FUNCTION}, or a recipe's grpo.samples_every"),
}  # fmt: skip
"""Keys of a recipe, and names of TRL, that this door has no use for, and what does the same."""
SCALES = {"group": "group_normalized", "batch": "batch_normalized", "none": "group_centered"}


def _grpo_section(merged: Mapping[str, Any]) -> GRPOSection:
    """Return the recipe's ``grpo`` section for arguments in either vocabulary."""
    for name in NO_EFFECT.keys() & {name for name, value in merged.items() if value is not None}:
        raise ConfigError(f"grpo_args has the key '{name}', which has no effect here: {NO_EFFECT[name]}")
    fields = set(GRPOSection.model_fields)
    converted = {"loss_type", "scale_rewards", "generation_batch_size"}
    valid = sorted({*trl_names(), *OWN_KEYS, *converted, *fields})
    shipped = load_recipe(RECIPE).recipe.grpo.model_dump()
    values: dict[str, Any] = {}
    loss = merged.get("loss_type", merged.get("loss", shipped["loss"]))
    of_the_loss = {"name": loss} if isinstance(loss, str) else dict(loss)
    for name, value in _known(merged, valid, "grpo_args").items():
        if name in OWN_KEYS | converted | {"loss"} or (name == "max_steps" and value == -1):
            continue
        *section, key = trl_names().get(name, name).split(".")
        (of_the_loss if section else values)[key] = value
    if "scale_rewards" in merged:
        scale = str({True: "group", False: "none"}.get(merged["scale_rewards"], merged["scale_rewards"]))
        check_known(scale, SCALES, f"grpo_args has scale_rewards={scale}")
        values["advantage"] = SCALES[scale]
    if size := merged.get("generation_batch_size"):
        values["steps_per_generation"] = max(1, int(size) // int(values["batch_size"]))
    vllm = {k.removeprefix("vllm_"): v for k, v in merged.items() if k.startswith("vllm_")}
    values["vllm"] = {**vllm, **values.get("vllm", {})}
    if merged["use_vllm"]:
        values["engine"] = "vllm"
    try:
        return GRPOSection.model_validate({**shipped, "loss": of_the_loss, **values})
    except ValueError as error:
        raise ConfigError(f"grpo_args: {error}") from None


def _known(arguments: Mapping[str, Any], valid: Sequence[str], what: str) -> dict[str, Any]:
    for name, ours in ((name, ours_for(name)[:-1].replace(" Here", ": here")) for name in arguments):
        check_known(name, valid, f"{what} has the key '{name}'{ours}")
    return dict(arguments)


def _rewards(
    functions: Sequence[str | Mapping[str, Any] | Callable[..., Any]] | None,
    weights: Sequence[float] | None,
    form: PromptFormat,
) -> RewardSet:
    if functions is None:
        functions, weights = DEFAULT_REWARDS, DEFAULT_REWARD_WEIGHTS if weights is None else weights
    built = build_rewards(functions, form, matcher="numeric")  # a function of the caller runs in this process
    if weights is not None and len(weights) != len(built):
        raise ConfigError(
            f"reward_weights has {len(weights)} values, expected {len(built)}: one each for {', '.join(built.names)}, such as "
            f"{built.weights}"
        )
    if weights is not None and any(isinstance(one, Mapping) and "weight" in one for one in functions):
        raise ConfigError("reward_funcs has weights, and reward_weights is given too; leave out one of them")
    for reward, weight in zip(built, built.weights if weights is None else weights, strict=True):
        reward.weight = weight
    return built


def _problems(rows: Sequence[Mapping[str, Any]], limit: int | None) -> tuple[list[Problem], Any]:
    """Return the problems of the caller's rows, and the rows with the columns ``question`` and ``answer``."""
    table = [dict(row) for row in rows]
    names = pick_columns(table[0] if table else {}, {}, where="dataset")
    for row in table:
        answer = chat_text(row.get(names["answer"]), "assistant")
        is_number = isinstance(answer, int | float) and answer == answer
        row["question"] = chat_text(row.get(names["question"]), "user")
        row["answer"] = plain_number(answer) if is_number else answer
    columns = Columns(question="question", answer=lambda row: stated_gold(row["answer"], "auto"))
    return to_problems(table, columns, where="dataset")[:limit], table


def _check_bf16(bf16: bool | None, device: Any) -> None:
    import torch

    from algorist.models.precision import has_tensor_cores_for

    native = has_tensor_cores_for(torch.bfloat16, device)
    if bf16 is not None and bf16 != native:
        raise ConfigError(
            f"grpo_args has bf16={bf16}, but bfloat16 follows the device: it is {native} on {device}. Leave bf16 out"
        )


def _build(
    policy: Policy,
    problems: Sequence[Problem],
    form: PromptFormat,
    section: GRPOSection,
    rewards: RewardSet,
    **settings: Any,
) -> TrainingArtifacts:
    """Build the trainer with the engine that the section names."""
    from algorist.rollouts import make_engine
    from algorist.training.grpo_setup import make_grpo_trainer

    if "engine" not in settings:
        settings["engine"] = make_engine(section.engine, policy.model, policy.tokenizer, section=section)
    refuse_groups_of_one(section)
    trainer = make_grpo_trainer(
        model=policy.model,
        tokenizer=policy.tokenizer,
        problems=problems,
        prompt_format=form,
        section=section,
        rewards=rewards,
        matcher="numeric",
        **settings,
    )
    return TrainingArtifacts(trainer, trainer.args)

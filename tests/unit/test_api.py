"""The Python API: names of the reference systems, on a real tiny model and real GSM8K rows."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import algorist
from algorist.config.load import load_recipe
from algorist.config.section import ModelSection
from algorist.errors import ConfigError, DataError, EngineError, MissingExtraError
from algorist.extensions.toolkit.oneshot import DEFAULT_GRPO_ARGS, _grpo_section
from algorist.models.load import make_policy
from algorist.prompts import get_format

CS336 = """tokenize_prompt_and_output compute_group_normalized_rewards compute_entropy get_response_log_probs
    compute_naive_policy_gradient_loss compute_grpo_clip_loss compute_policy_gradient_loss masked_mean masked_normalize
    sft_microbatch_train_step grpo_microbatch_train_step get_packed_sft_dataset iterate_batches parse_mmlu_response
    parse_gsm8k_response compute_per_instance_dpo_loss""".split()
SMALL = {
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 12,
    "max_steps": 2,
    "save_steps": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in the hub's layout."""
    section = ModelSection.model_validate(
        {"name": "tiny", "tiny": {"hidden_size": 32, "layers": 2, "vocab_size": 400}}
    )
    folder = tmp_path_factory.mktemp("model")
    texts = ["Tom has 14 apples. How many apples does Tom have?"] * 20
    tags = get_format("reasoning_answer").tags.all()
    policy = make_policy(section, device=torch.device("cpu"), seed=0, texts=texts, tags=tags)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def setup_of(model: Path, data: Path, folder: Path, **changes: Any) -> algorist.MathTrainingSetup:
    values: dict[str, Any] = {
        "path": data / "gsm8k" / "train.jsonl",
        "limit": 12,
        "output_dir": folder / "run",
        "device": "cpu",
        "grpo_args": SMALL,
        **changes,
    }
    return algorist.create_math_training_setup(str(model), **values)


def in_a_process(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "kernels-community" not in done.stderr, done.stderr


@pytest.mark.slow
def test_import_is_light() -> None:
    in_a_process(
        "import sys, algorist\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'pydantic', 'sympy'}\n"
        "assert not heavy & set(sys.modules)\n"
        "algorist.extract_hash_answer, algorist.DEFAULT_GRPO_ARGS, algorist.create_math_training_setup\n"
        "assert not {'torch', 'trl'} & set(sys.modules), 'the API module imports torch or TRL'\n"
    )


@pytest.mark.long
@pytest.mark.slow
def test_a_star_import_has_every_name() -> None:
    in_a_process(
        "import algorist\n"
        "from algorist import *\n"
        "assert masked_mean is algorist.masked_mean and set(algorist.__all__) <= set(dir(algorist))\n"
        "import bitsandbytes\n"
    )


def test_what_bitsandbytes_says_is_heard_but_for_the_kernel_that_nothing_uses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with caplog.at_level(logging.WARNING, log.name):  # whatever the commands of earlier tests have quietened
        log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "no module 'kernels'")
        log.warning("a library cannot be read")
    assert [record.getMessage() for record in caplog.records] == ["a library cannot be read"]


@pytest.mark.parametrize("name", algorist.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    found = getattr(algorist, name)
    assert not callable(found) or (found.__doc__ or "").strip(), f"{name} has no docstring"


def test_dir_shows_what_is_offered_and_no_imports() -> None:
    assert [name for name in dir(algorist) if not name.startswith("__")] == sorted(algorist.__all__)


def test_s3_functions_are_importable() -> None:
    from algorist.extensions import toolkit

    assert set(CS336) <= set(algorist.__all__)
    assert all(getattr(algorist, name) is getattr(toolkit, name) for name in CS336)
    assert algorist.r1_zero_reward_fn("so</think> <answer>4</answer>", "4")["reward"] == 1.0
    mean = algorist.masked_mean(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
    assert float(mean) == 2.0


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="create_math_training_setup"):
        algorist.create_math_training  # type: ignore[attr-defined]  # noqa: B018


def test_build_chat_prompt() -> None:
    system, user = algorist.build_chat_prompt("  1 + 1? \n")
    assert (system["role"], user) == ("system", {"role": "user", "content": "1 + 1?"})
    assert all(tag in system["content"] for tag in get_format("reasoning_answer").tags.all())
    assert algorist.build_chat_prompt("q", " Reply in <answer>. ")[0]["content"] == "Reply in <answer>."


def test_load_gsm8k_reads_real_rows(real_data: Path) -> None:
    rows = algorist.load_gsm8k("test", path=real_data / "gsm8k")
    assert len(rows) == 80 and {"question", "answer"} <= set(rows.column_names)


def test_load_gsm8k_asks_the_hub_by_name() -> None:
    with pytest.raises(DataError, match=r"'openai/gsm8k' \(split train\)"):
        algorist.load_gsm8k()


def test_format_for_grpo_adds_columns_and_keeps_the_originals() -> None:
    from datasets import Dataset

    rows = Dataset.from_list(
        [{"question": " 2 + 2? ", "answer": "Two and two.\n#### $1,004\nmore", "note": "n"}]
    )
    (row,) = algorist.format_for_grpo(rows)
    assert row["prompt"] == algorist.build_chat_prompt("2 + 2?")
    assert row["reference_solution"] == "Two and two.\n#### $1,004\nmore"
    assert row["reference_answer"] == "$1,004"  # as it stands
    assert (row["question"], row["note"]) == (" 2 + 2? ", "n")
    with pytest.raises(DataError, match="no column 'answer'"):
        algorist.format_for_grpo(rows.remove_columns("answer"))


def test_default_arguments() -> None:
    stated = {
        "learning_rate": 5e-6,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "num_train_epochs": 1,
        "num_generations": 16,
        "gradient_accumulation_steps": 4,
        "save_steps": 100,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "max_prompt_length": 256,
        "max_completion_length": 200,
        "max_grad_norm": 0.1,
        "use_vllm": False,
    }
    assert {name: algorist.DEFAULT_GRPO_ARGS[name] for name in stated} == stated
    recipe = load_recipe("oneshot-gsm8k").recipe
    weights = algorist.DEFAULT_REWARD_WEIGHTS
    assert [r.weight for r in recipe.rewards] == weights == [1.0, 0.1, 0.1]
    assert algorist.default_reward_functions().names == [r.name for r in recipe.rewards]


def test_setup_holds_its_artifacts(model: Path, real_data: Path, tmp_path: Path) -> None:
    found = setup_of(
        model,
        real_data,
        tmp_path,
        system_prompt="Reply in <reasoning></reasoning><answer></answer>.",
        reward_weights=[2.0, 0.0, 0.5],
        run_name="mine",
        report_to=["none"],
        grpo_args={**SMALL, "epsilon": 0.1, "mask_truncated_completions": True, "bf16": False},
    )
    assert len(found.dataset) == 12
    assert {"question", "answer", "prompt", "reference_solution", "reference_answer"} == set(
        found.dataset.column_names
    )
    assert found.dataset[0]["reference_answer"] == "72"
    assert found.dataset[0]["prompt"][0]["content"].startswith("Reply in")
    assert found.reward_funcs.names == ["correctness_numeric", "numeric", "tag_fraction"]
    assert found.reward_funcs.weights == [2.0, 0.0, 0.5]
    assert found.grpo_args["num_generations"] == 4 and found.grpo_args["learning_rate"] == 5e-6
    config = found.artifacts.config
    trainer = found.artifacts.trainer
    assert config.run_name == "mine" == trainer.args.run_name and config.output_dir == trainer.args.output_dir
    assert config.output_dir == str(tmp_path / "run") and trainer.section.group_size == 4
    assert trainer.objective.loss.settings["clip_low"] == 0.1 and trainer.objective.mask_truncated
    assert trainer.problems[0].answer == "72"
    assert "Reply in" in str(trainer.prompt_format.render(trainer.problems[0].question))


@pytest.mark.slow
def test_prompts_that_are_too_long_are_left_out(model: Path, real_data: Path, tmp_path: Path) -> None:
    whole = setup_of(
        model,
        real_data,
        tmp_path,
        limit=None,
        path=first_rows(real_data, tmp_path),
        grpo_args={**SMALL, "max_prompt_length": None},
    )
    short = setup_of(
        model,
        real_data,
        tmp_path,
        limit=None,
        path=tmp_path / "rows.jsonl",
        grpo_args={**SMALL, "max_prompt_length": 300},
    )
    count = len(short.artifacts.trainer.problems)
    assert 0 < count < len(whole.artifacts.trainer.problems) == 40
    assert len(short.dataset) == count


def first_rows(data: Path, folder: Path, count: int = 40) -> Path:
    lines = (data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "rows.jsonl"


def test_a_system_prompt_without_the_tags_is_warned_about(
    real_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for prompt in ("Reply in <reasoning></reasoning><answer></answer>.", "Reply in <answer></answer>."):
        assert not caplog.records
        with pytest.raises(ConfigError, match="no model folder"):
            algorist.create_math_training_setup(
                "./nowhere", system_prompt=prompt, path=real_data / "gsm8k/train.jsonl"
            )
    assert "never shows <reasoning>, </reasoning>;" in caplog.text


@pytest.mark.slow
def test_setup_trains_and_checkpoints(model: Path, real_data: Path, tmp_path: Path) -> None:
    batches: list[Any] = []
    found = setup_of(
        model, real_data, tmp_path, trainer_kwargs={"on_rollouts": lambda *batch: batches.append(batch)}
    )
    result = algorist.run_training(found.artifacts)
    assert result.global_step == 2
    assert [sum(len(group.rollouts) for group in groups) for _, groups, _ in batches] == [8, 8]
    for rollout in (r for _, groups, _ in batches for group in groups for r in group.rollouts):
        assert set(rollout.rewards) == {"correctness_numeric", "numeric", "tag_fraction"}
        total = sum(w * v for w, v in zip(found.reward_funcs.weights, rollout.rewards.values(), strict=True))
        assert rollout.reward == pytest.approx(total, abs=1e-6)
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"checkpoint-1", "checkpoint-2", "final"}
    saved = {p.name for p in (tmp_path / "run" / "final").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= saved


@pytest.mark.slow
def test_stock_trl_takes_the_dataset_and_pays_its_reference_answer(model: Path, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    calls: list[dict[str, Any]] = []

    def record(**columns: Any) -> list[float]:
        calls.append(columns)
        return [0.0] * len(columns["completions"])

    row = {"question": "How many apples does Tom have?", "answer": "Tom has 1,000 + 80.\n#### 1,080"}
    setup = algorist.create_math_training_setup(
        str(model), dataset=[row] * 4, output_dir=tmp_path / "run", device="cpu", grpo_args=SMALL
    )
    ours = setup.artifacts.trainer
    trainer = GRPOTrainer(
        model=ours.model,
        reward_funcs=[
            *setup.reward_funcs,
            algorist.trl_reward("correct"),
            algorist.trl_reward("cosine", max_len=9),
            record,
        ],
        args=GRPOConfig(
            output_dir=str(tmp_path / "stock"),
            max_steps=1,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=8,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=setup.dataset,
        processing_class=ours.processing_class,
    )
    trainer.train()
    names = [*setup.reward_funcs.names, "correct", "cosine"]
    assert {f"rewards/{name}/mean" for name in names} <= trainer.state.log_history[0].keys()
    assert set(setup.reward_funcs.failures.values()) == {0}
    # what TRL passed, with completions that answer: the whole number pays in either spelling, its first digits do not
    columns = calls[0] | {
        "completions": [
            [{"role": "assistant", "content": f"<answer>{answer}</answer>"}]
            for answer in ("1,080", "1080", "1", "80")
        ]
    }
    assert columns["answer"][0] == row["answer"]
    for function in (setup.reward_funcs[0], algorist.trl_reward("correct")):
        assert function(**columns) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_loaded_model_is_taken_where_a_name_is(model: Path, real_data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model)
    args = {"path": real_data / "gsm8k" / "train.jsonl", "limit": 4, "device": "cpu"}
    grpo = SMALL | {"max_steps": 1, "gradient_accumulation_steps": 1}
    for more in ({}, {"tokenizer": AutoTokenizer.from_pretrained(model)}):
        setup = algorist.create_math_training_setup(
            loaded, output_dir=tmp_path / f"run{len(more)}", grpo_args=grpo, **args, **more
        )
        assert setup.artifacts.trainer.model is loaded
    assert algorist.run_training(setup.artifacts).global_step == 1


def test_output_dir_follows_the_run_name(
    model: Path, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = setup_of(model, real_data, tmp_path, output_dir=None, run_name="first")
    assert found.artifacts.config.output_dir == "outputs/first"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grpo_args": {"num_generation": 4}}, "Did you mean 'num_generations'"),
        ({"grpo_args": {"num_generations": 1}}, "take 8"),
        ({"grpo_args": {"loss_type": "dapoo"}}, "Did you mean 'dapo'"),
        ({"grpo_args": {"scale_rewards": "groups"}}, "Did you mean 'group'"),
        ({"grpo_args": {**SMALL, "num_generations": 3}}, "not divisible by grpo.group_size = 3"),
        ({"grpo_args": {**SMALL, "bf16": True}}, "bfloat16 follows the device"),
        ({"reward_weights": [1.0]}, "reward_weights has 1 values, expected 3"),
        ({"trainer_kwargs": {"callback": []}}, "Did you mean 'callbacks'"),
        ({"trainer_kwargs": {"peft_config": 1}}, "'peft_config': here it is model_name=, a model with its"),
        *(
            ({"grpo_args": {name: 1}}, f"has the key '{name}', which has no effect here: ")
            for name in (
                "eval_every",
                "eval_steps",
                "samples_every",
                "log_completions",
                "enabled",
                "processes",
            )
        ),
    ],
)
def test_mistakes_are_named(
    model: Path, real_data: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        setup_of(model, real_data, tmp_path, **changes)


def test_arguments_in_trls_names_take_effect() -> None:
    def section(**more: Any) -> Any:
        return _grpo_section({**DEFAULT_GRPO_ARGS, **more})

    for name in ("loss", "loss_type"):
        loss = section(**{name: "dr_grpo"}, epsilon=0.05).loss
        assert (loss.name, loss.parameters["clip_low"]) == ("dr_grpo", 0.05)
    assert section(epsilon=0.05).loss.parameters["clip_low"] == 0.05
    scales = {
        "batch": "batch_normalized",
        "none": "group_centered",
        False: "group_centered",
        True: "group_normalized",
    }
    assert {s: section(scale_rewards=s).advantage for s in scales} == scales
    size = section().batch_size
    assert section(generation_batch_size=8 * size).steps_per_generation == 8


def test_a_pipeline_of_transformers_is_asked_as_the_model_was_trained(model: Path, tmp_path: Path) -> None:
    """And so is a model whose format is not the default one: build_text_generator reads it from the folder."""
    from transformers import pipeline

    from algorist.prompts import get_format
    from algorist.prompts.attached import Asked
    from algorist.prompts.chat import attach

    solver = algorist.build_text_generator(model)
    attach(solver.policy.tokenizer, Asked(get_format("think_answer"), 12))
    for part in (solver.policy.model, solver.policy.tokenizer):
        part.save_pretrained(tmp_path / "other")
    generator = algorist.build_text_generator(tmp_path / "other")
    assert generator.prompt_format.name == "think_answer"
    theirs = pipeline("text-generation", str(tmp_path / "other"), device="cpu")
    texts = [
        algorist.generate_math_solution("1 + 1?", generator=one, max_new_tokens=12, seed=3)
        for one in (generator, theirs)
    ]
    assert texts[0] == texts[1]


def test_generator_answers_and_saves(model: Path, tmp_path: Path) -> None:
    generator = algorist.build_text_generator(model)
    assert generator.prompt_format.name == "reasoning_answer"
    text = algorist.generate_math_solution("1 + 1?", generator=generator, max_new_tokens=12, seed=3)
    again = algorist.generate_math_solution("1 + 1?", generator=generator, max_new_tokens=12, seed=3)
    assert text and text == again
    (tmp_path / "run" / "sft").mkdir(parents=True)
    (tmp_path / "run" / "sft" / "final").symlink_to(model)
    of_a_run = algorist.build_text_generator(tmp_path / "run")
    assert text == algorist.generate_math_solution("1 + 1?", generator=of_a_run, max_new_tokens=12, seed=3)
    file = tmp_path / "math_results.jsonl"
    for number in range(2):
        assert algorist.save_prompt_and_response("1 + 1?", text, file, number=number) == file
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"prompt": "1 + 1?", "generated_output": text, "number": n} for n in range(2)]


def test_an_empty_completion_is_an_error(model: Path) -> None:
    generator = algorist.build_text_generator(model)
    assert 0 in generator.policy.tokenizer.all_special_ids
    with torch.no_grad():  # all tokens are equally likely, so greedy decoding writes the special token 0
        generator.policy.model.lm_head.weight.zero_()
    with pytest.raises(EngineError, match="wrote nothing"):
        algorist.generate_math_solution("1 + 1?", generator=generator, max_new_tokens=3, temperature=0.0)


def test_use_vllm_turns_vllm_on(model: Path, real_data: Path, tmp_path: Path) -> None:
    asked = {**DEFAULT_GRPO_ARGS, "use_vllm": True}
    assert _grpo_section(asked).engine == "vllm" and _grpo_section(DEFAULT_GRPO_ARGS).engine == "auto"
    assert _grpo_section(asked).vllm.gpu_memory_utilization == 0.3

    def setup() -> Any:
        return algorist.create_math_training_setup(
            str(model),
            path=real_data / "gsm8k" / "train.jsonl",
            limit=12,
            output_dir=tmp_path,
            device="cpu",
            grpo_args={"use_vllm": True, "max_completion_length": 8},
        )

    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(MissingExtraError, match=r"vllm"):
            setup()
    else:
        assert setup().artifacts.trainer.engine.name == "vllm"


def test_the_defaults_of_the_text_generator() -> None:
    build = inspect.signature(algorist.build_text_generator).parameters
    assert build["model_id"].default == "HarleyCooper/GRPOtuned"
    ask = inspect.signature(algorist.generate_math_solution).parameters
    assert (ask["max_new_tokens"].default, ask["temperature"].default) == (200, 0.9)
    assert ask["generator"].default is None  # then it builds its own
    assert next(iter(ask)) == "question"


def test_the_hub_is_asked_for_main_and_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that would go over the network, by name, configuration and split; the rows are read as any others."""
    import datasets

    asked: list[Any] = []

    def load_dataset(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        return datasets.Dataset.from_list([{"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = algorist.load_gsm8k()
    assert asked == [(("openai/gsm8k", "main"), {"split": "train"})]
    assert [row["question"] for row in rows] == ["1 + 1?"]

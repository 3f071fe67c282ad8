"""Every key of a recipe changes something: a run with another value of it is another run, in what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from algorist.config import load_recipe
from algorist.config.schema import LossSection, Recipe, Section
from algorist.extensions.vllm.section import ColocatedVLLMSection, VLLMServerSection
from algorist.runs.pipeline import run_recipe
from algorist.store.read import query
from algorist.store.run_log import Display

TESTS = Path(__file__).resolve().parents[1]
TINY = [
    "device=cpu",
    "threads=1",
    "model.tiny={hidden_size: 16, layers: 1, vocab_size: 300}",
    "prompt.system_prompt=''",
]
TINY += ["data.train.params={count: 8, seed: 1}", "data.sft={name: arithmetic, params: {count: 6, seed: 2}}"]
TINY += [
    "data.eval.params={count: 2, seed: 3}",
    "eval={enabled: false, samples: 0, max_completion_tokens: 6}",
]
SFT = [
    "grpo.enabled=false",
    "sft={batch_size: 1, learning_rate: 0.01, max_steps: 3, gradient_accumulation_steps: 2}",
]
# Two batches of rollouts, each for two times two steps; one text in two is paid.
GRPO = ["sft.enabled=false", "grpo={group_size: 4, batch_size: 4, gradient_accumulation_steps: 2, num_iterations: 2, max_steps: 4, "
        "max_completion_tokens: 6, learning_rate: 0.01}", "rewards=[{name: random}, {name: well_formed}]"]  # fmt: skip
EVAL = ["sft.enabled=false", "grpo.enabled=false", "eval.enabled=true", "eval.baseline=true"]
SAMPLED = [*EVAL, "eval.samples=2", "eval.ks=[2]"]
DATA = ["sft.enabled=false", "grpo.enabled=false", "data.train={name: local, path: ROWS}"]
LORA = [*GRPO, "model.lora={rank: 2, alpha: 4}"]
OPTIMIZER = {"learning_rate": 1e-3, "lr_scheduler": "linear", "warmup_ratio": 0.5, "warmup_steps": 2, "weight_decay": 0.5,
             "adam_beta1": 0.5, "adam_beta2": 0.5, "max_grad_norm": 1e-9, "optim": "sgd", "logging_steps": 2, "save_steps": 1}  # fmt: skip

# Base -> key -> another value; a list: what the base needs besides, then the value.
CHANGES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "sft": (SFT, {f"sft.{key}": value for key, value in OPTIMIZER.items()} | {
        "sft.save_total_limit": ["sft.save_steps=1", 1], "sft.enabled": False, "sft.epochs": ["sft.max_steps=null", 2], "sft.max_steps": 2,
        "sft.batch_size": 2, "sft.gradient_accumulation_steps": 1, "sft.max_length": 150, "sft.eval_every": ["eval.enabled=true", 1],
        "seed": 7, "threads": 2, "run_name": "b", "name": "c", "model.dtype": "bfloat16", "model.compute_dtype": "bfloat16",
        "model.tiny.hidden_size": 32, "model.tiny.layers": 2, "model.tiny.vocab_size": 310, "model.tiny.heads": 8,
        "model.tiny.kv_heads": 1, "model.tiny.intermediate_size": 40, "model.tiny.max_position_embeddings": 300,
        "data.sft.params": "{count: 6, seed: 9}", "data.sft.limit": 5, "prompt.format": "think_answer", "prompt.system_prompt": "Add.",
        "prompt.tags": "{answer_open: <a>}", "prompt.system_role": ["prompt.system_prompt=Add.", "user"],
        "model.chat_template": "'{{ messages[-1].content }}'"}),
    "lora": (LORA, {
        "model.lora.rank": 3, "model.lora.alpha": 8, "model.lora.dropout": 0.5, "model.lora.target_modules": "[q_proj]",
        "model.lora.rslora": True, "model.lora.dora": True}),
    "grpo": (GRPO, {f"grpo.{key}": value for key, value in OPTIMIZER.items()} | {
        "grpo.save_total_limit": ["grpo.save_steps=1", 1], "grpo.enabled": False, "grpo.epochs": ["grpo.max_steps=null", 0.5],
        "grpo.max_steps": 3, "grpo.group_size": 2, "grpo.batch_size": 8, "grpo.gradient_accumulation_steps": 1, "grpo.num_iterations": 1,
        "grpo.steps_per_generation": 4, "grpo.max_completion_tokens": 5, "grpo.temperature": 0.5, "grpo.top_p": 0.3, "grpo.top_k": 3,
        "grpo.min_p": 0.9, "grpo.stop_strings": "[e, a, o, t]", "grpo.loss.name": "cispo", "grpo.loss.delta": 1.01, "grpo.advantage": "group_centered", "grpo.beta": 0.5,
        "grpo.reduction": "seq-mean-token-sum", "grpo.positive_weight": 0.1, "grpo.off_policy_mask": 1e-9,
        "grpo.entropy_bonus": 0.1, "grpo.top_entropy_share": 0.5, "grpo.update_share": ["grpo.group_size=4", 0.5], "grpo.loss.clip_low": 0.001, "grpo.loss.clip_high": 0.001,
        "grpo.loss.importance": "sequence", "grpo.mask_truncated_completions": True, "grpo.micro_batch_tokens": 16,
        "grpo.resample.max_share": ["grpo.resample={when_below: 1, max_rounds: 1}", 0.5], "grpo.eval_every": ["eval.enabled=true", 2], "grpo.samples_every": 1,
        "grpo.keep_best": ["eval.enabled=true", "grpo={eval_every: 1, save_steps: 1, save_total_limit: 1}", False],
        "grpo.engine": "transformers", "grpo.skip_zero_advantage": False,
        "rewards.0.name": "repetition", "rewards.0.weight": 2, "rewards.0.params": "{share: 0.2}",
        "data.train.name": "countdown", "data.train.max_prompt_percentile": 50, "data.train.max_prompt_tokens": ["grpo.gradient_accumulation_steps=1", 85],
        "data.train.shuffle_seed": 5, "data.train.params": "{count: 8, seed: 9}"}),
    "eval": (EVAL, {
        "eval.enabled": False, "eval.samples": 1, "eval.max_completion_tokens": 4, "eval.baseline": False,
        "eval.stop_strings": '["\\n"]', "data.eval.limit": 1, "data.eval.params": "{count: 2, seed: 4}"}),
    "sampled": (SAMPLED, {"eval.ks": "[1]", "eval.temperature": 0.5, "eval.top_p": 0.3, "eval.top_k": 2}),
    "data": (DATA, {
        "data.train.path": "OTHER", "data.train.columns": "{question: other}", "data.train.limit": 3,
        "data.train.unique": True, "data.train.numeric_answers_only": True, "data.train.split": ["data.train.path=FOLDER", "test"]}),
}  # fmt: skip


# What a small run cannot show -> the test that does.
def vllm_keys(section: type[Section]) -> list[str]:
    return [f"grpo.vllm.{key}" for key in section.model_fields]


SHOWN_BY = {
    "data.train.checker": "unit/data/test_checkers.py::test_rows_name_their_checker_and_files_hold_ones_own",
    "data.train.correct_only": "runs/test_settings_are_read.py::test_correct_only_filters_the_files_own_rows",
    "data.train.pass_rate": "runs/test_diagnosis.py::test_rated_problems_are_filtered_and_a_killed_rating_continues",
    "data.train.pass_rates": "runs/test_diagnosis.py::test_rated_problems_are_filtered_and_a_killed_rating_continues",
    "description": "unit/config/test_schema.py::test_every_shipped_recipe_is_valid_and_survives_its_own_yaml",
    "device": "unit/evaluation/test_run.py::test_evaluations_on_a_second_device_are_the_same",
    "eval.batch_size": "runs/test_stages.py::test_eval_on_the_command_line_leaves_an_artifact",
    "eval.device": "unit/evaluation/test_run.py::test_evaluations_on_a_second_device_are_the_same",
    "eval.engine": "unit/evaluation/test_run.py::test_a_device_that_is_not_there_is_refused_before_anything_is_loaded",
    "grpo.sample_ahead": "unit/extensions/test_sample_ahead.py::test_the_policy_before_the_update_samples_during_it",
    "grpo.teacher.beta": "unit/extensions/test_teacher_divergence.py::test_a_step_of_training_takes_the_exact_gradient",
    "grpo.teacher.device": "unit/extensions/test_teacher.py::test_the_advantage_of_a_token_is_the_teachers_disagreement",
    "grpo.teacher.loss": "unit/extensions/test_teacher_divergence.py::test_a_step_of_training_takes_the_exact_gradient",
    "grpo.teacher.model": "unit/extensions/test_teacher.py::test_the_advantage_of_a_token_is_the_teachers_disagreement",
    "grpo.teacher.quantization": "unit/extensions/test_teacher.py::test_a_teacher_may_be_quantised",
    "grpo.teacher.temperature": "unit/extensions/test_teacher.py::test_the_divergence_is_that_to_the_teacher_at_its_temperature",
    "grpo.teacher.top_k": "unit/extensions/test_teacher_divergence.py::test_a_teacher_without_the_packed_pass_is_refused_for_full_only",
    "grpo.teacher.weight": "unit/extensions/test_teacher.py::test_the_advantage_of_a_token_is_the_teachers_disagreement",
    "plugins": "runs/test_plugins.py::test_a_process_reward_moves_the_weights_and_resumes_exactly",
    **dict.fromkeys(
        (f"grpo.entropy_control.{key}" for key in ("target", "step", "start", "most")),
        "unit/training/test_objective.py::test_the_entropy_control_follows_the_target",
    ),
    "grpo.drop_equal_groups": "unit/training/test_objective.py::test_groups_that_teach_nothing_can_be_left_out_of_the_mean",
    "grpo.ledger_every": "unit/extensions/test_ledger.py::test_terms_of_the_gradient_add_up_to_what_training_computes",
    "grpo.pools.hopeless": "unit/extensions/test_refill.py::test_problems_that_no_completion_solves_rest",
    "grpo.pools.solved": "unit/extensions/test_refill.py::test_rests_double_and_end",
    "grpo.processes": "unit/config/test_schema.py::test_the_recipe_counts_its_processes",
    "grpo.replay.max_age": "unit/extensions/test_refill.py::test_replayed_groups_keep_the_log_probs_of_the_policy_that_sampled_them",
    "grpo.resample.max_rounds": "unit/extensions/test_refill.py::test_without_any_signal_it_ends_at_the_limits",
    "grpo.resample.when_below": "unit/extensions/test_refill.py::test_batches_with_enough_useful_groups_stay_as_they_are",
    "grpo.stop.on": "runs/test_diagnosis.py::test_a_run_that_collapses_ends_at_its_best_checkpoint",
    "grpo.stop.patience": "runs/test_diagnosis.py::test_a_run_that_collapses_ends_at_its_best_checkpoint",
    **dict.fromkeys(
        vllm_keys(VLLMServerSection),
        "unit/extensions/test_vllm.py::test_settings_of_a_server_reach_its_engine",
    ),
    **dict.fromkeys(
        vllm_keys(ColocatedVLLMSection), "unit/extensions/test_vllm.py::test_colocated_settings_reach_vllm"
    ),
    **dict.fromkeys(
        (f"grpo.sampler_correction.{key}" for key in ("mode", "low", "high")),
        "unit/training/test_step_equality.py::test_a_sampler_that_differs_is_corrected",
    ),
    "grpo.vllm.mode": "unit/extensions/test_vllm.py::test_the_mode_decides_and_survives_the_runs_yaml",
    "matcher": "runs/test_latex_fallback.py::test_a_run_of_r1_zero_numina_finishes_without_it",
    "model.liger_kernel": "unit/extensions/test_liger.py::test_a_recipes_model_runs_them_and_says_so",
    "model.attn_implementation": "unit/models/test_load.py::test_flash_attention_that_is_not_there_is_told_before_anything_is_written",
    "model.backend": "unit/extensions/test_unsloth.py::test_unsloth_gets_what_the_recipe_says",
    "model.lora.in_several_processes": "unit/models/test_load.py::test_the_adapter_goes_with_more_than_one_process_only",
    "model.name": "slow/test_runs.py::test_real_gsm8k_rows_and_a_model_folder_by_path",
    "model.quantization": "unit/extensions/test_quantization.py::test_a_run_on_a_4_bit_base_trains_the_adapter_alone_and_plain_peft_answers_the_same",
    "model.revision": "slow/test_hub.py::test_without_the_hub_the_run_ends_well_and_says_how_to_upload_later",
    "model.trust_remote_code": "runs/test_hostile_runs.py::test_remote_code_of_a_foreign_run_is_not_obeyed",
    "output_dir": "runs/test_training_log.py::test_the_log_tells_the_run_in_order",
    "prompt.system_prompt_path": "unit/prompts/test_attached.py::test_system_prompt_from_a_file_is_stripped",
    "prompt.template_kwargs": "unit/prompts/test_template_switches.py::test_a_run_its_evaluations_and_its_model_have_the_switch",
    "rewards.environment": "unit/training/test_faults.py::test_a_reward_gets_no_secrets_but_those_that_the_recipe_names",
    "rewards.timeout_s": "unit/training/test_faults.py::test_a_run_goes_on_when_a_reward_hangs_once",
    **dict.fromkeys(
        (
            f"tools.{key}"
            for key in ("use", "format", "calls", "output_tokens", "demonstrations", "instructions")
        ),
        "unit/extensions/test_tools.py::test_each_setting_of_tools_changes_what_is_asked_or_answered",
    ),
    **dict.fromkeys(
        ("tools.seconds", "tools.memory_mb"), "unit/extensions/test_tools.py::test_limits_reach_the_tool"
    ),
    "tools.fail_steps": "runs/test_tools.py::test_a_tool_that_fails_always_ends_the_run",
    "tools.drop_void": "unit/extensions/test_tools.py::test_what_neither_calls_nor_answers_can_be_left_out",
    "environment": "runs/test_tools.py::test_a_run_with_calls_and_an_environment",
    "sft.micro_batch_tokens": "unit/training/test_sft_equality.py::test_loss_gradient_and_metrics_equal_stock_trl",
    "sft.source": "runs/test_settings_are_read.py::test_prompt_and_response_are_taught_as_they_are",
    **dict.fromkeys(
        ("data.train.hub", "data.train.subset"),
        "unit/data/test_adapters.py::test_own_hub_datasets_are_asked_for_by_name",
    ),
    **dict.fromkeys(
        ("report_to", *(f"tracking.{key}" for key in ("project", "entity", "run_name", "tags", "offline"))),
        "runs/test_tracking.py::test_wandb_offline_has_names_recipe_metrics_and_an_end",
    ),
    **dict.fromkeys(
        ("hub.push", "hub.model_id"), "runs/test_export.py::test_a_repository_alone_turns_the_upload_on"
    ),
    **dict.fromkeys(
        ("hub.private", "hub.revision", "hub.commit_message"),
        "slow/test_hub.py::test_without_the_hub_the_run_ends_well_and_says_how_to_upload_later",
    ),
    "hub.strategy": "slow/test_hub.py::test_checkpoints_went_up_while_training",
    # What makes no difference but to memory:
    "grpo.gradient_checkpointing": "runs/test_stage_settings.py::test_activation_checkpointing_of_sft_is_over_when_grpo_begins",
    "sft.gradient_checkpointing": "runs/test_stage_settings.py::test_activation_checkpointing_of_sft_is_over_when_grpo_begins",
}


def keys(model: type[Section] = Recipe, before: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema; the three datasets count as one, and so do the rewards and the losses."""
    if model is LossSection:
        yield from (f"{before}{name}" for name in LossSection().parameters)
    for name, field in model.model_fields.items():
        kinds = [field.annotation]
        for kind in kinds:
            kinds.extend(get_args(kind))
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if below:
            for section in below:  # more than one where a mode decides
                yield from keys(section, f"{before}{name}.")
        else:
            yield f"{before}{name}"


class Said(Display):
    """Keeps what a run says of samples."""

    def __init__(self) -> None:
        self.samples: list[str] = []

    def say(self, text: str) -> None:
        """Keep a line about a sample."""
        if text.startswith("sample"):
            self.samples.append(text)


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v for k, v in row.items() if not (k.endswith("_s") or re.match("time|hardware|memory|seconds", k))
    }


def left_behind(folder: Path, settings: list[str]) -> str:
    """Run a recipe and return all that it leaves: problems, prompts, metrics, rollouts, evaluations, weights, names of files."""
    display = Said()
    run = run_recipe(load_recipe("smoke-cpu", [*settings, f"output_dir={folder}"]).recipe, display=display)
    path = run.folder.path
    metrics = path / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    samples = query(path, "SELECT * FROM rollouts") if list(path.glob("rollouts/*")) else []
    artifacts = [json.loads(file.read_text()) for file in sorted(path.glob("eval/*.json"))]
    parts: list[Any] = [
        run.train, run.sft, run.held_out, run.prompt_format.render("1 + 1?"), display.samples, path.name, torch.get_num_threads(),
        [without_times(json.loads(line)) for line in lines], [without_times(row) for row in samples],
        [a["metrics"] for a in artifacts],
        [query(path, "SELECT completion, correct, reason FROM samples ORDER BY ALL")] if artifacts else [],
        sorted(str(file.relative_to(path)) for file in path.rglob("*")),
        [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.glob("*/final/*")) if file.name in ("config.json", "adapter_config.json") or file.suffix == ".safetensors"],
    ]  # fmt: skip
    return repr(parts)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two files, and a folder with a file per split."""
    folder = tmp_path_factory.mktemp("rows")
    numbers = [1, 2, 2, 3, 4, 5]
    texts = [
        json.dumps({"question": f"What is {n}?", "other": f"Say {n}.", "answer": str(n) if n % 2 else "x+1"})
        + "\n"
        for n in numbers
    ]
    for name, count in (("a", 6), ("b", 4), ("train", 6), ("test", 4)):
        (folder / f"{name}.jsonl").write_text("".join(texts[:count]))
    (folder / "split").mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").rename(folder / "split" / f"{name}.jsonl")
    return {"ROWS": f"{folder}/a.jsonl", "OTHER": f"{folder}/b.jsonl", "FOLDER": f"{folder}/split"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "base", [base if base == "lora" else pytest.param(base, marks=pytest.mark.long) for base in CHANGES]
)
def test_another_value_is_another_run(base: str, rows: dict[str, str], tmp_path: Path) -> None:
    def done(*settings: str) -> str:
        text = "\n".join([*TINY, *CHANGES[base][0], *settings])
        for word, path in rows.items():
            text = text.replace(word, path)
        number = len(list(tmp_path.iterdir()))
        return left_behind(tmp_path / str(number), text.split("\n"))

    before = {"": done()}
    assert done() == before[""], "two equal runs differ, so that differences show nothing"
    same = []
    for key, change in CHANGES[base][1].items():
        *need, value = change if isinstance(change, list) else [change]
        if (first := "\n".join(need)) not in before:
            before[first] = done(*need)
        if done(*need, f"{key}={json.dumps(value) if isinstance(value, bool) else value}") == before[first]:
            same.append(key)
    assert same == []


def test_every_key_is_changed_in_a_run_or_shown_by_a_test() -> None:
    """The three datasets have one kind of section, and so have the rewards; a test named here speaks of the key."""
    changed = {
        re.sub(r"^data\.(sft|eval)\.", "data.train.", key) for _, more in CHANGES.values() for key in more
    }
    changed = {re.sub(r"^rewards\.0\.", "rewards.", key) for key in changed}
    every = {key for key in keys() if not key.startswith(("data.sft.", "data.eval."))}
    assert every - changed - set(SHOWN_BY) == set()
    assert (changed | set(SHOWN_BY)) - every == set() and changed & set(SHOWN_BY) == set()
    for key, place in SHOWN_BY.items():
        path, _, test = place.partition("::")
        text = (TESTS / path).read_text(encoding="utf-8")
        assert f"def {test}(" in text and re.search(rf"\b{key.rpartition('.')[2]}\b", text), f"{key}: {place}"

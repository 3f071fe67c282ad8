"""How a model is loaded: type of weights, attention kernel, adapter in several processes, memory settings of GPUs."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import is_flash_attn_2_available

from algorist.config.load import load_recipe
from algorist.config.own_files import inputs_of
from algorist.config.schema import GRPOSection, Recipe, SFTSection
from algorist.config.section import ModelSection
from algorist.config.yaml_text import to_yaml
from algorist.data.problems import Problems, longest_sequence
from algorist.errors import CheckpointError, ConfigError
from algorist.extensions.vllm.engine import llm_arguments
from algorist.extensions.vllm.section import ColocatedVLLMSection, VLLMServerSection
from algorist.extensions.vllm.sleep import SLEEPS_WITH_SEGMENTS, why_no_sleep
from algorist.models.attention import FLASH, describe, pick_attention, set_attention, takes_flash
from algorist.models.load import load_policy, make_policy, policy_of
from algorist.models.modes import context_of
from algorist.models.precision import Precision, mixed_precision, pick_precision, set_compute
from algorist.models.weights import check_sizes, check_weights
from algorist.prompts.chat import encode_prompt
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.native.engine import NativeEngine
from algorist.runs.asking import recipe_format
from algorist.runs.begin import settings_at_start, without_adapter
from algorist.runs.pass_rates import table_path
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import why_no_adapter
from algorist.training.batch import Batch
from algorist.training.log_probs import packed_log_probs
from algorist.training.training_arguments import optim_arguments
from algorist.types import Problem
from tests.tiny import tiny_policy
from tests.unit.rollouts.rollout_models import FAMILIES, SHAPE

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 2, "vocab_size": 400}
TEXTS = ["Tom has 14 apples.", "Mia gives 3 bags of 6 to Ben."] * 20
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def tiny(**settings: Any) -> ModelSection:
    return ModelSection.model_validate({"name": "tiny", "tiny": SIZES, **settings})


# --- type of weights


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_is_the_default_on_gpus_that_have_it(
    supported: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    fast = torch.bfloat16 if supported else torch.float16
    assert pick_precision(tiny(), CUDA) == Precision(torch.float32, fast)
    assert pick_precision(tiny(lora={}), CUDA) == Precision(fast, fast)
    for device in (CPU, torch.device("mps")):
        assert pick_precision(tiny(), device) == Precision(torch.float32, torch.float32)
    assert pick_precision(tiny(dtype="float16"), CPU).master is torch.float16
    place = {"output_dir": tmp_path, "seed": 0, "report_to": ()}
    model = make_policy(tiny(), device=CPU, seed=0, texts=TEXTS).model
    set_compute(model, fast)  # as on such a GPU
    for section in (SFTSection(), GRPOSection()):
        found = optim_arguments(section, device=CUDA, **place, mixed=mixed_precision(model, CUDA))
        assert found["bf16"] is supported and found["fp16"] is not supported
        assert optim_arguments(section, device=CPU, **place)["bf16"] is False


def test_a_folder_is_loaded_like_the_run_it_belongs_to(tmp_path: Path) -> None:
    made = make_policy(tiny(), device=CPU, seed=0, texts=TEXTS)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    assert describe(load_policy(tmp_path, device=CPU).model) == "float32 on cpu, attention sdpa"
    section = tiny(dtype="bfloat16", attn_implementation="eager")
    found = load_policy(tmp_path, device=CPU, like=section)
    assert describe(found.model) == "bfloat16 on cpu, attention eager"


# --- attention kernel


def test_flash_attention_is_chosen_where_it_runs_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    works = {("cuda", torch.bfloat16, True), ("cuda", torch.float16, True)}
    for case in itertools.product(("cpu", "mps", "cuda"), TYPES, (True, False)):
        place, dtype, installed = case
        monkeypatch.setattr("algorist.models.attention.flash_works", lambda device, works=installed: works)
        rest = torch.device(place), dtype
        assert pick_attention(ModelSection(), *rest) == (FLASH if case in works else None)
        for asked in ("sdpa", "eager"):
            assert pick_attention(ModelSection(attn_implementation=asked), *rest) == asked
        section = ModelSection(attn_implementation=FLASH)
        if case in works:
            assert pick_attention(section, *rest) == FLASH
        else:
            missing = "NVIDIA GPU" if place != "cuda" else "algorist.flash" if not installed else "bfloat16"
            with pytest.raises(ConfigError, match=f"attn_implementation is {FLASH}.*{missing}.*leave"):
                pick_attention(section, *rest)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may have flash attention")
def test_flash_attention_that_is_not_there_is_told_before_anything_is_written(tmp_path: Path) -> None:
    asked = f"model.attn_implementation={FLASH}"
    recipe = load_recipe("smoke-cpu", [asked, "device=cpu", f"output_dir={tmp_path}"]).recipe
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        run_recipe(recipe)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        make_policy(tiny(attn_implementation=FLASH), device=CPU, seed=0, texts=TEXTS)


def test_a_kernel_that_is_named_is_used_and_computes_the_same() -> None:
    models = {}
    for name in ("sdpa", "eager"):
        policy = make_policy(tiny(attn_implementation=name), device=CPU, seed=0, texts=TEXTS)
        assert describe(policy.model).endswith(f"attention {name}")
        models[name] = policy.model
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(models["sdpa"](ids).logits, models["eager"](ids).logits)
    section = ModelSection(attn_implementation="edgar")
    with pytest.raises(ConfigError, match=r"'edgar', which Qwen3ForCausalLM cannot.*Did you mean 'eager'"):
        set_attention(models["sdpa"], section, CPU, torch.float32)


def small(heads: int) -> Qwen2ForCausalLM:
    sizes: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": heads}
    config = Qwen2Config(**sizes, num_key_value_heads=2, intermediate_size=64, vocab_size=60, eos_token_id=1)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


def test_models_that_flash_attention_does_not_cover_are_known() -> None:
    assert takes_flash(small(heads=6)) and takes_flash(small(heads=2))
    assert not takes_flash(small(heads=4))  # heads of 12 numbers
    assert not takes_flash(BloomForCausalLM(BloomConfig(vocab_size=60, hidden_size=32, n_layer=1, n_head=2)))


@pytest.mark.gpu
@pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs CUDA and the package flash_attn")
def test_flash_attention_gives_the_log_probs_of_sdpa() -> None:
    found = []
    for asked in (None, "sdpa"):
        section = tiny(dtype="bfloat16", attn_implementation=asked)
        model = make_policy(section, device=CUDA, seed=0, texts=TEXTS).model
        assert describe(model).endswith(f"attention {asked or FLASH}")
        with torch.no_grad():
            found.append(model(torch.arange(5, 40, device=CUDA)[None]).logits.float().log_softmax(-1))
    torch.testing.assert_close(found[0], found[1], atol=5e-2, rtol=0)


def test_the_fast_paths_do_not_depend_on_the_kernel() -> None:
    """With a kernel that cannot run here, the decoder and the packed update give what they give with sdpa."""
    model, found = small(heads=4), []
    params = SamplingParams(max_new_tokens=8, seed=3)
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 4, 3]])
    rows = Batch([[5, 6, 7]], [[8, 9], [4, 3]], [0, 0], torch.zeros(2), torch.ones(2, 2, dtype=torch.bool))
    for kernel in ("sdpa", FLASH):
        model.config._attn_implementation = kernel
        groups = NativeEngine(model, tier="decoder").generate([[5, 6, 7], [8, 9]], 3, params)
        passed = packed_log_probs(model, rows)
        assert passed[0].requires_grad
        assert model.config._attn_implementation == kernel
        found.append(([(c.token_ids, c.log_probs) for g in groups for c in g], passed[0].tolist()))
    assert found[0] == found[1]
    with pytest.raises(Exception, match=r"(?i)flash|kernels"):
        model(ids)


# --- the adapter in several processes


def gist(folder: Path, *overrides: str) -> Recipe:
    return load_recipe("gist-gsm8k", [f"output_dir={folder}", *overrides]).recipe


def started(recipe: Recipe) -> Any:
    return settings_at_start(recipe, inputs_of(recipe), resume=True)


@pytest.mark.parametrize("name", ["gist-gsm8k", "gist-gsm8k-llama"])
def test_the_adapter_goes_with_more_than_one_process_only(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, [f"output_dir={tmp_path}"]).recipe
    assert why_no_adapter(recipe, None, 1) == ""
    reason = why_no_adapter(recipe, None, 2)
    assert "2 processes" in reason and "model.lora.in_several_processes=keep" in reason
    lora, trained = recipe.model.lora, without_adapter(recipe)
    assert lora is not None and trained.model.lora is None and recipe.model.lora is lora
    assert trained.model.name == recipe.model.name
    kept = gist(tmp_path, "model.lora.in_several_processes=keep")
    assert why_no_adapter(kept, None, 8) == ""
    assert why_no_adapter(trained, None, 8) == ""


def test_off_is_understood_on_the_command_line(tmp_path: Path) -> None:
    sections = [gist(tmp_path, f"model.lora.in_several_processes={v}").model.lora for v in ("off", "keep")]
    assert [s.in_several_processes for s in sections if s] == ["off", "keep"]


@pytest.mark.parametrize("rule", ["off", "keep"])
def test_a_resumed_run_keeps_what_it_began_with(rule: str, tmp_path: Path) -> None:
    recipe = gist(tmp_path)
    recipe.path.mkdir()
    config = recipe.path / "config.yaml"
    config.write_text(to_yaml(gist(tmp_path, f"model.lora.in_several_processes={rule}")), encoding="utf-8")
    for processes in (1, 2):
        assert why_no_adapter(recipe, started(recipe), processes) == ""

    config.write_text(to_yaml(without_adapter(recipe)), encoding="utf-8")
    for processes in (1, 2):
        assert "began without" in why_no_adapter(recipe, started(recipe), processes)
    started(without_adapter(recipe))
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: None in the run, 16 now"):
        started(gist(tmp_path, "model.lora.in_several_processes=keep"))


# --- memory of GPUs


def test_vllm_gets_30_percent_of_the_memory_unless_told_otherwise() -> None:
    arguments = llm_arguments(ColocatedVLLMSection(), "cuda", torch.bfloat16)
    assert arguments["gpu_memory_utilization"] == 0.3
    assert (arguments["dtype"], arguments["enable_sleep_mode"]) == ("bfloat16", True)
    given = ColocatedVLLMSection(gpu_memory_utilization=0.5, max_model_length=700)
    arguments = llm_arguments(given, "cuda", torch.float32)
    assert (arguments["gpu_memory_utilization"], arguments["max_model_len"]) == (0.5, 700)
    assert arguments["enable_sleep_mode"] is True and "kv_cache_memory_bytes" not in arguments
    assert llm_arguments(given, "cpu", torch.float32)["enable_sleep_mode"] is False


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_sleep_beside_expandable_segments_needs_a_newer_vllm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, sleep = (
        "max_split_size_mb:512, expandable_segments:True",
        ColocatedVLLMSection(enable_sleep_mode=True),
    )

    def why(settings: Any, device: torch.device, version: str, allocator: str) -> str:
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            monkeypatch.setenv(variable, allocator if variable == name else "")
        monkeypatch.setattr("algorist.extensions.vllm.sleep._vllm_version", lambda: version)
        return why_no_sleep(settings, device)

    reason = why(sleep, CUDA, "0.19.1", on)
    assert re.search(rf"{name}=.*vLLM 0\.19\.1 cannot sleep.*{SLEEPS_WITH_SEGMENTS}", reason)
    assert not why(sleep, CUDA, SLEEPS_WITH_SEGMENTS, on)
    assert not why(sleep, CUDA, "0.33.0rc1", on)
    assert not why(sleep, CPU, "0.19.1", on)
    assert not why(ColocatedVLLMSection(enable_sleep_mode=False), CUDA, "0.19.1", on)
    assert not why(VLLMServerSection(), CUDA, "0.19.1", on)
    assert not why(sleep, CUDA, "0.19.1", "expandable_segments:False")
    assert not why(sleep, CUDA, "0.19.1", "")


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["", "vllm", "WSL", "own"])
def test_the_command_line_lets_gpu_memory_grow(
    beside: str, verb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not beside vLLM, whose sleep does not bear it, under WSL, whose driver does not, or where the user has decided."""
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(variable, "")  # given back after the test
        monkeypatch.delenv(variable)
    if beside == "vllm":
        (tmp_path / "vllm.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    if beside == "WSL":
        monkeypatch.setattr("platform.release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    if beside == "own":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert verb("recipes", "list")[0] == 0
    assert os.environ.get("PYTORCH_ALLOC_CONF") == (None if beside else "expandable_segments:True")


def test_grpo_arguments_on_the_cpu_are_float32(tmp_path: Path) -> None:
    found = optim_arguments(GRPOSection(), output_dir=tmp_path, seed=0, device=CPU, report_to=[])
    assert found["bf16"] is False and not found.get("fp16")


def test_adamw_is_one_kernel(tmp_path: Path) -> None:
    """torch's default makes one more copy of all weights at the step's peak on a GPU, and takes longer on a CPU."""

    def optim(device: torch.device, name: str = "adamw_torch") -> str:
        section = GRPOSection(optim=name)
        return str(optim_arguments(section, output_dir=tmp_path, seed=0, device=device)["optim"])

    assert (optim(CPU), optim(CUDA)) == ("adamw_torch_fused", "adamw_torch_fused")
    assert optim(CUDA, "adamw_8bit") == "adamw_8bit"


# --- how long sequences get


def test_the_longest_sequence_of_a_run_is_that_of_its_longest_stage() -> None:
    sizes = ["grpo.max_completion_tokens=100", "eval.max_completion_tokens=30", "sft.enabled=false"]
    recipe = load_recipe("smoke-cpu", sizes).recipe
    form, tokenizer = recipe_format(recipe), make_policy(tiny(), device=CPU, seed=0, texts=TEXTS).tokenizer
    train = [Problem("a", "1 + 1?", "2"), Problem("b", "1 + 1 + 1 + 1 + 1?", "5")]
    held_out = [Problem("c", "1 + 2? " * 60, "3")]
    longest, far = (len(encode_prompt(form, tokenizer, p.question)) for p in (train[1], held_out[0]))
    assert longest + 100 < far + 30
    problems = Problems(train, train, held_out)
    assert longest_sequence(recipe, problems, form, tokenizer) == far + 30
    alone = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"enabled": False})})
    assert longest_sequence(alone, problems, form, tokenizer) == longest + 100
    with_sft = load_recipe("smoke-cpu", [*sizes[:2], "sft.max_length=1000"]).recipe
    assert longest_sequence(with_sft, problems, form, tokenizer) == 1000


# --- the base of an adapter


@pytest.fixture
def on_a_local_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with ``models/q`` and an adapter on it, made where ``models/q`` was a relative name."""
    base = tiny_policy()
    base.model.save_pretrained(tmp_path / "models/q")
    base.tokenizer.save_pretrained(tmp_path / "models/q")
    monkeypatch.chdir(tmp_path)
    section = ModelSection.model_validate({"name": "models/q", "lora": {"rank": 2}})
    make_policy(section, device=CPU, seed=0).model.save_pretrained(tmp_path / "runs/y/grpo/final")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return tmp_path


def test_an_adapter_finds_its_local_base_from_any_folder(on_a_local_base: Path) -> None:
    base = load_policy(on_a_local_base / "models/q", device=CPU)
    run = (on_a_local_base / "runs").rename(on_a_local_base / "moved")
    adapter = load_policy(run / "y/grpo/final", device=CPU)
    weight = adapter.model.get_base_model().get_input_embeddings().weight
    assert torch.equal(weight, base.model.get_input_embeddings().weight)


def test_a_relative_base_is_looked_for_above_the_adapter(on_a_local_base: Path) -> None:
    file = on_a_local_base / "runs/y/grpo/final/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "models/q"}))
    assert load_policy(file.parent, device=CPU).model.peft_config


def test_a_base_that_was_a_folder_is_never_asked_of_the_hub(on_a_local_base: Path) -> None:
    (on_a_local_base / "models").rename(on_a_local_base / "gone")
    with pytest.raises(
        CheckpointError, match=r"was the folder .*models/q, which is not there.*adapter_config"
    ):
        load_policy(on_a_local_base / "runs/y/grpo/final", device=CPU)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_from_scratch_in_16_bits_is_the_one_that_its_folder_holds(tmp_path: Path, dtype: str) -> None:
    made = make_policy(tiny(dtype=dtype), device=CPU, seed=0, texts=TEXTS)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    read = load_policy(tmp_path, device=CPU, dtype=getattr(torch, dtype))
    rows = torch.arange(64).view(1, 64) % 90
    assert torch.equal(made.model(rows).logits, read.model(rows).logits)


def test_a_folder_that_the_recipe_names_is_asked_with_the_recipes_template(tmp_path: Path) -> None:
    """The table of pass rates has another name then."""
    made = make_policy(tiny(), device=CPU, seed=0, texts=TEXTS)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    template = "{% for m in messages %}{{ m['content'] }} ->{% endfor %}"
    recipes = [
        load_recipe("quickstart", [f"model.name={tmp_path}", *more]).recipe
        for more in ([], [f'model.chat_template="{template}"'])
    ]
    own, other = (policy_of(tmp_path, device=CPU, like=recipe.model).tokenizer for recipe in recipes)
    assert other.chat_template == template and own.chat_template != template
    assert policy_of(tmp_path, device=CPU).tokenizer.chat_template == own.chat_template
    recipes.append(load_recipe("quickstart", [f"model.name={tmp_path}", "model.quantization=8bit"]).recipe)
    assert len({table_path(recipe, recipe_format(recipe)) for recipe in recipes}) == 3


def test_a_mixture_that_returns_its_router_is_asked_for_logits_alone(tmp_path: Path) -> None:
    """Its ``output_router_logits`` is for a loss of its own; with a cache it ends in transformers' words about sizes."""
    tokenizer = make_policy(tiny(), device=CPU, seed=0, texts=TEXTS).tokenizer
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        output_router_logits=True,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, device=CPU)
    rows = [[5, 6, 7], [5, 6, 7, 8]]
    groups = NativeEngine(policy.model).generate(rows, 2, SamplingParams(max_new_tokens=4, seed=0))
    assert [len(group) for group in groups] == [2, 2]


def test_a_longrope_model_has_the_context_that_one_choice_of_frequencies_has() -> None:
    """Beside a row beyond it, the others were computed with the long frequencies: by another function than alone."""
    model, config, shape, _ = FAMILIES["phi4_mini"]
    policy = model(config(**{**SHAPE, **shape}))
    assert context_of(policy) == 224 < policy.config.max_position_embeddings
    prompts = [[5 + n % 100 for n in range(length)] for length in (20, 215)]
    rows = NativeEngine(policy).generate(prompts, 1, SamplingParams(max_new_tokens=30, temperature=0.0))
    assert [len(completion.token_ids) for group in rows for completion in group] == [30, 9]


def test_sizes_may_differ_by_layer() -> None:
    check_sizes({"intermediate_size": [64, 128]})
    with pytest.raises(ValueError, match="intermediate_size is"):
        check_sizes({"intermediate_size": [64, 10**9]})


def test_a_bias_of_one_row_may_be_zeros() -> None:
    """Routers of Ernie 4.5 begin so; a matrix of zeros is half of a copy."""
    check_weights("m", tensors=[("correction_bias", torch.zeros(1, 4))])
    with pytest.raises(CheckpointError, match="nothing but zeros in weight"):
        check_weights("m", tensors=[("weight", torch.zeros(2, 4))])

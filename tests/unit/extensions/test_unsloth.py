"""Loading through Unsloth.

Unsloth itself needs an NVIDIA GPU and an environment of its own, so this is the one place where a stand-in takes the place
of the real thing: it has the keywords of Unsloth's public functions, records what it is given and returns a real tiny model
with a real PEFT adapter. The last test compares the keywords with the real ones wherever Unsloth can be imported.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from algorist.config.load import load_recipe
from algorist.config.section import ModelSection
from algorist.errors import ConfigError, MissingExtraError
from algorist.models.load import make_policy
from algorist.runs.pipeline import run_recipe

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TEXTS = ["Tom has 14 apples.", "Mia gives 3 bags of 6 to Ben."] * 20
LORA = {"rank": 4, "alpha": 8, "dropout": 0.25, "target_modules": "attention", "rslora": True}
LOADED = {
    "model_name", "revision", "dtype", "max_seq_length", "load_in_4bit", "full_finetuning", "trust_remote_code",
    "use_gradient_checkpointing", "use_exact_model_name", "random_state",
}  # fmt: skip
ADAPTED = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_gradient_checkpointing", "random_state",
    "max_seq_length",
}  # fmt: skip


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU that is not here has bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tiny model in the hub's layout."""
    path = tmp_path_factory.mktemp("model")
    section = ModelSection.model_validate(
        {"name": "tiny", "tiny": {"hidden_size": 32, "layers": 2, "max_position_embeddings": 384}}
    )
    policy = make_policy(section, device=CPU, seed=0, texts=TEXTS)
    policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What the stand-in was given, by function."""
    calls: dict[str, dict[str, Any]] = {}

    class FastLanguageModel:
        @staticmethod
        def from_pretrained(**keywords: Any) -> tuple[Any, Any]:
            calls["load"] = keywords
            torch.manual_seed(keywords["random_state"])
            name = keywords["model_name"]
            return AutoModelForCausalLM.from_pretrained(name, dtype=keywords["dtype"]), None

        @staticmethod
        def get_peft_model(model: Any, **keywords: Any) -> Any:
            calls["adapt"] = keywords
            torch.manual_seed(keywords["random_state"])  # as Unsloth's seeds the process
            names = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora")
            return get_peft_model(model, LoraConfig(**{n: keywords[n] for n in names}, task_type="CAUSAL_LM"))

    module = types.ModuleType("unsloth")
    module.FastLanguageModel = FastLanguageModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unsloth", module)
    monkeypatch.delenv("UNSLOTH_RETURN_LOGITS", raising=False)
    return calls


def section(folder: Path, **settings: Any) -> ModelSection:
    values = {"name": str(folder), "backend": "unsloth", "dtype": "bfloat16", "lora": LORA, **settings}
    return ModelSection.model_validate(values)


def test_unsloth_gets_what_the_recipe_says(folder: Path, given: dict[str, dict[str, Any]]) -> None:
    asked = section(folder, revision="v2")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    policy = make_policy(asked, device=CUDA, seed=11, longest=lambda t: 90 + len(t("1 + 1")["input_ids"]))
    assert torch.equal(torch.rand(3), expected)  # the process's generator is as it was

    load, adapt = given["load"], given["adapt"]
    assert load.keys() == LOADED and adapt.keys() == ADAPTED
    assert (load["model_name"], load["revision"], load["dtype"]) == (str(folder), "v2", torch.bfloat16)
    assert load["load_in_4bit"] is False and load["full_finetuning"] is False
    assert load["use_gradient_checkpointing"] is adapt["use_gradient_checkpointing"] is False
    assert load["max_seq_length"] == adapt["max_seq_length"] > 90
    assert (adapt["r"], adapt["lora_alpha"], adapt["lora_dropout"]) == (4, 8, 0.25)
    assert adapt["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"] and adapt["use_rslora"] is True
    assert load["random_state"] == adapt["random_state"] == 11

    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)  # once, not once more by us
    assert list(policy.model.peft_config) == ["default"]
    assert policy.tokenizer.padding_side == "left" and policy.tokenizer.pad_token is not None


def test_without_an_adapter_all_weights_are_trained(folder: Path, given: dict[str, dict[str, Any]]) -> None:
    policy = make_policy(section(folder, lora=None), device=CUDA, seed=0)
    assert given["load"]["full_finetuning"] is True and "adapt" not in given
    assert given["load"]["max_seq_length"] == 384  # the model's context where nobody says more
    assert all(p.requires_grad for p in policy.model.parameters())


@pytest.mark.parametrize(
    ("settings", "device", "error", "words"),
    [
        ({}, CPU, MissingExtraError, r"needs an NVIDIA GPU.*device is cpu.*model\.backend=transformers"),
        ({"name": "tiny"}, CUDA, ConfigError, r"name is tiny.*model\.backend=transformers"),
        ({"lora": {"dora": True}}, CUDA, ConfigError, r"no DoRA.*model\.lora\.dora=false"),
        ({"attn_implementation": "eager"}, CUDA, ConfigError, r"attn_implementation is eager.*leave it out"),
        ({"lora": {"target_modules": ["w_x"]}}, CUDA, ConfigError, r"no module .w_x.*all-linear"),
    ],
)
def test_what_unsloth_cannot_do_is_refused(
    settings: dict[str, Any],
    device: torch.device,
    error: type[Exception],
    words: str,
    folder: Path,
    given: dict[str, dict[str, Any]],
) -> None:
    with pytest.raises(error, match=words):
        make_policy(section(folder, **settings), device=device, seed=0)
    assert "adapt" not in given


def test_a_run_without_a_gpu_ends_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    asked = [f"model.name={folder}", "model.backend=unsloth", "device=cpu", f"output_dir={tmp_path}"]
    with pytest.raises(MissingExtraError, match="NVIDIA GPU"):
        run_recipe(load_recipe("smoke-cpu", asked).recipe)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_unsloth_takes_these_keywords() -> None:
    unsloth = pytest.importorskip("unsloth", exc_type=ImportError)
    for function, names in (
        (unsloth.FastLanguageModel.from_pretrained, LOADED),
        (unsloth.FastLanguageModel.get_peft_model, ADAPTED),
    ):
        assert names <= inspect.signature(function).parameters.keys()


def test_unsloth_that_is_not_installed_says_how_to_get_it() -> None:
    if importlib.util.find_spec("unsloth") is not None:
        pytest.skip("unsloth is installed")
    with pytest.raises(MissingExtraError, match=r"pip install .*unsloth_zoo.*model\.backend=transformers"):
        make_policy(ModelSection(name="Qwen/Qwen3-4B-Base", backend="unsloth"), device=CPU, seed=0)

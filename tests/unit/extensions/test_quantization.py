"""Bases in 4 and 8 bit: trained through an adapter, sampled by the native engine, loaded by plain PEFT with equal tokens."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.config.load import load_recipe
from algorist.config.section import LoraSection, ModelSection
from algorist.errors import ConfigError, MissingExtraError
from algorist.models.load import load_policy, make_policy
from algorist.models.loaders import LOADERS
from algorist.models.tiny import tiny_model
from algorist.rollouts import make_engine
from algorist.rollouts.base import SamplingParams
from algorist.runs.draft import Draft
from algorist.runs.pipeline import run_recipe
from algorist.runs.plan import make_plan
from algorist.store.read import query
from tests.tiny import QUESTIONS, TOKENIZER

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_new_tokens=6)
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes: pip install '.[quantization]'",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model(TOKENIZER, seed=1).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def is_quantized(model: Any) -> bool:
    return getattr(model.get_base_model(), "hf_quantizer", None) is not None


def test_what_cannot_be_quantised_is_told_with_the_recipe() -> None:
    for words, why in (
        (["model.quantization=4bit", "model.name=a/b"], "quantised weights are not trained"),
        (["model.quantization=4bit", "model.lora={rank: 4}"], "quantises saved models through transformers"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_plan(Draft.of(load_recipe("smoke-cpu", [*words, "device=cpu"]).recipe, in_folder=False))
    with pytest.raises(ConfigError, match="no kernels for Apple's GPU"):
        LOADERS.get("quantization").arguments(
            ModelSection(quantization="4bit"), torch.device("mps"), torch.float32
        )


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is here")
def test_without_bitsandbytes_the_way_out_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'algorist\[quantization\]'"):
        LOADERS.get("quantization").arguments(ModelSection(quantization="4bit"), CPU, torch.float32)


@pytest.mark.slow
@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_engines_sample_the_same_from_a_quantised_base(base: Path, kind: Any) -> None:
    section = ModelSection(name=str(base), quantization=kind, lora=LoraSection(rank=4))
    policy = make_policy(section, device=CPU, seed=0)
    assert is_quantized(policy.model)
    layer = policy.model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.dtype == (torch.uint8 if kind == "4bit" else torch.int8)
    assert {p.dtype for p in policy.model.parameters() if p.requires_grad} == {torch.float32}
    prompts = [TOKENIZER(text)["input_ids"] for text in QUESTIONS[:2]]
    mine, theirs = (
        make_engine(name, policy.model, TOKENIZER).generate(prompts, 1, GREEDY)
        for name in ("auto", "transformers")
    )
    assert [g[0].token_ids for g in mine] == [g[0].token_ids for g in theirs]


def test_whole_weights_of_a_run_are_loaded_whole(base: Path) -> None:
    """A merged folder beside a run on a 4-bit base: what is asked is what was exported."""
    model = load_policy(base, device=CPU, like=ModelSection(quantization="4bit")).model
    assert getattr(model, "hf_quantizer", None) is None


@pytest.mark.long
@needs_bitsandbytes
@pytest.mark.slow
def test_a_run_on_a_4_bit_base_trains_the_adapter_alone_and_plain_peft_answers_the_same(
    base: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = [
        "threads=1",
        f"model.name={base}",
        "model.quantization=4bit",
        "model.lora={rank: 4, alpha: 8}",
    ]
    settings += [
        "sft.max_steps=3",
        "sft.learning_rate=1e-2",
        "grpo.max_steps=1",
        f"output_dir={tmp_path}",
        "run_name=r",
    ]
    run_recipe(load_recipe("smoke-cpu", settings).recipe)
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(base).parameters())
    said = re.search(
        r"([\d.]+) M parameters, ([\d.]+) M trained", (tmp_path / "r" / "training.log").read_text()
    )
    assert said and float(said[1]) == pytest.approx(
        whole / 1e6 + float(said[2]), abs=0.011
    )  # no packed bytes
    losses = query(
        tmp_path / "r", "select value from metrics where stage = 'sft' and name = 'loss' order by step"
    )
    assert losses[-1]["value"] < losses[0]["value"]
    final = tmp_path / "r" / "grpo" / "final"
    ours = load_policy(final, device=CPU, like=ModelSection(name=str(base), quantization="4bit"))
    assert is_quantized(ours.model)

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, str(final)).eval()
    ids = TOKENIZER(QUESTIONS[0], return_tensors="pt")
    theirs = adapted.generate(**ids, max_new_tokens=6, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ].tolist()
    ((mine,),) = make_engine("auto", ours.model, TOKENIZER).generate(
        [ids["input_ids"][0].tolist()], 1, GREEDY
    )
    assert mine.token_ids == theirs[: len(mine.token_ids)]

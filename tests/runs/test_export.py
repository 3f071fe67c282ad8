"""Exported models: merged equals unmerged, only the files that others need, no copy of the starting adapter."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from typer.testing import CliRunner

from algorist.config.load import load_recipe
from algorist.config.schema import Recipe
from algorist.config.section import ModelSection, TinySection
from algorist.config.yaml_text import to_yaml
from algorist.errors import CheckpointError, ConfigError
from algorist.extensions.model_folder.card import model_card, question_of
from algorist.extensions.model_folder.export_command import app
from algorist.extensions.model_folder.write import export
from algorist.models.load import load_policy, make_policy
from algorist.prompts import get_format
from algorist.prompts.chat import render_prompt
from algorist.runs.asking import recipe_format
from algorist.runs.pipeline import run_recipe

CPU = torch.device("cpu")
TINY = ModelSection(name="tiny", tiny=TinySection(hidden_size=32, layers=2, vocab_size=400))
TEXTS = ["Tom has 9 pens. Tom loses 4. How many pens does Tom have now?"] * 20
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
TOKENIZER = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SFT and GRPO of an adapter with a KL penalty, so that TRL keeps a second adapter for the reference."""
    folder = tmp_path_factory.mktemp("export")
    base = make_policy(TINY, device=CPU, seed=0, texts=TEXTS, tags=get_format("reasoning_answer").tags.all())
    base.model.save_pretrained(folder / "base")
    base.tokenizer.save_pretrained(folder / "base")
    overrides = [
        *("device=cpu", "threads=1", f"output_dir={folder}", "run_name=r", "eval.enabled=false"),
        *(f"model.name={folder / 'base'}", "model.lora={rank: 4, alpha: 8, rslora: true}"),
        *("grpo.beta=0.1", "sft.learning_rate=1e-2", "grpo.learning_rate=1e-2"),
    ]
    run_recipe(load_recipe("smoke-cpu", overrides).recipe)
    return folder / "r"


def logits(folder: Path) -> torch.Tensor:
    policy = load_policy(folder, device=CPU)
    inputs = policy.tokenizer(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        return policy.model.eval()(**inputs).logits


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_a_final_adapter_is_two_files_and_the_tokenizer(run: Path, stage: str) -> None:
    final = run / stage / "final"
    assert {p.name for p in final.iterdir()} == ADAPTER | TOKENIZER
    newest = run / stage / "checkpoint-2"
    assert not [p for p in newest.iterdir() if p.is_dir()]


def test_a_resumed_run_without_the_reference_adapter_is_the_same_run(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    again = tmp_path / "r"
    again.mkdir()
    shutil.copytree(run, again, dirs_exist_ok=True)
    for left in ("grpo/final", "grpo/checkpoint-2"):
        shutil.rmtree(again / left)
    (again / "stages.json").write_text(json.dumps({"sft": {}}))
    values = load_recipe(str(run / "config.yaml"), [f"output_dir={tmp_path}"]).recipe
    run_recipe(values, resume=True)
    first, second = (load_file(folder / "grpo/final/adapter_model.safetensors") for folder in (run, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_merged_equals_unmerged(run: Path, tmp_path: Path, stage: str) -> None:
    final = run / stage / "final"
    names = export(final, tmp_path / "merged", run=run, merge=True)
    assert {"model.safetensors", "config.json", "README.md"} <= set(names) and not ADAPTER & set(names)
    merged, unmerged = logits(tmp_path / "merged"), logits(final)
    base = logits(run.parent / "base")
    assert (unmerged - base).abs().max() > 1e-2  # the adapter says something
    torch.testing.assert_close(merged, unmerged, rtol=1e-4, atol=1e-5)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "library_name: transformers" in card and "peft" not in card.partition("## Data")[0]


def test_a_merged_model_ends_where_it_was_taught_to(run: Path, tmp_path: Path) -> None:
    """Its base's generation ends with another token, as a base model's does under a chat tokenizer."""
    shutil.copytree(run.parent, tmp_path / "all")
    base = tmp_path / "all" / "base"
    settings = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 7}))
    final = tmp_path / "all/r/sft/final"
    adapter = json.loads((final / "adapter_config.json").read_text())
    (final / "adapter_config.json").write_text(json.dumps(adapter | {"base_model_name_or_path": str(base)}))
    export(final, tmp_path / "merged", merge=True)
    taught = load_policy(base, device=CPU).tokenizer.eos_token_id
    assert json.loads((tmp_path / "merged/generation_config.json").read_text())["eos_token_id"] == [7, taught]
    export(final, tmp_path / "given")
    assert "eos_token_id=tokenizer.eos_token_id" in (tmp_path / "given" / "README.md").read_text()


@pytest.mark.parametrize(
    "modules", [["q_proj", "embed_tokens"], ["q_proj", "lm_head"], ["embed_tokens", "lm_head"]]
)
def test_an_adapter_of_one_of_two_tied_weights_is_merged_into_that_one(
    run: Path, tmp_path: Path, modules: list[str]
) -> None:
    model = load_policy(run.parent / "base", device=CPU).model
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=modules, init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    for name in TOKENIZER:
        shutil.copy(run / "sft/final" / name, tmp_path / "adapter" / name)
    export(tmp_path / "adapter", tmp_path / "merged", merge=True)
    unmerged = logits(tmp_path / "adapter")
    assert (unmerged - logits(run.parent / "base")).abs().max() > 1e-2
    torch.testing.assert_close(logits(tmp_path / "merged"), unmerged, rtol=1e-4, atol=1e-4)


def test_a_whole_model_is_written_in_the_type_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    export(run.parent / "base", tmp_path / "half", dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "half" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    with pytest.raises(ConfigError, match="is an adapter; add --merge"):
        export(run / "sft/final", tmp_path / "adapter", run=run, dtype="bfloat16")


def test_a_16_bit_export_is_half_as_large(run: Path, tmp_path: Path) -> None:
    sizes = {}
    for dtype in ("auto", "bfloat16"):
        export(run / "grpo/final", tmp_path / dtype, run=run, merge=True, dtype=dtype)
        sizes[dtype] = (tmp_path / dtype / "model.safetensors").stat().st_size
        named = {"auto": "float32", "bfloat16": "bfloat16"}[dtype]
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == named
    assert sizes["bfloat16"] < 0.6 * sizes["auto"]


def test_a_copy_is_the_adapter_with_its_card_and_owns_its_files(run: Path, tmp_path: Path) -> None:
    names = export(run / "grpo/checkpoint-2", tmp_path / "copy", run=run)
    assert set(names) == ADAPTER | TOKENIZER | {"README.md", "trainer_state.json"}
    for name in ADAPTER:
        copy, original = tmp_path / "copy" / name, run / "grpo/checkpoint-2" / name
        assert copy.read_bytes() == original.read_bytes() and not copy.samefile(original)
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "library_name: peft" in card and "AutoPeftModelForCausalLM" in card


def test_the_command_takes_a_run_and_refuses_what_cannot_be(run: Path, tmp_path: Path) -> None:
    call = CliRunner().invoke
    done = call(app, [str(run), "--to", str(tmp_path / "out"), "--merge"])
    assert done.exit_code == 0 and "wrote" in done.output, done.output
    said, _, _ = done.output.partition("wrote")  # what is seen where the question is stopped
    assert "out is written and complete; one question to it follows" in " ".join(said.split())
    assert (
        "tried in plain transformers (its chat template makes the prompt of the training): Sam has"
        in done.output
    )
    unmerged = call(app, [str(run), "--to", str(tmp_path / "adapter")])
    assert "which others do not have" in unmerged.output and "--merge" in unmerged.output
    assert "which others do not have" not in done.output
    again = call(app, [str(tmp_path / "out"), "--to", str(tmp_path / "third"), "--merge"])
    assert "nothing to merge" in again.output and (tmp_path / "third/model.safetensors").is_file()
    full = call(app, [str(run), "--to", str(tmp_path / "out")])
    assert isinstance(full.exception, ConfigError) and "not empty" in str(full.exception)
    before_anything = call(app, ["me/not-there", "--to", str(tmp_path / "out")])  # no name is asked for first
    assert "not empty" in str(before_anything.exception)
    nowhere = call(app, [str(run)])
    assert isinstance(nowhere.exception, ConfigError) and "--push-to-hub" in str(nowhere.exception)
    wrong = call(app, [str(run), "--to", str(tmp_path / "x"), "--dtype", "bfloat"])
    assert "Did you mean 'bfloat16'" in str(wrong.exception)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no model"):
        export(tmp_path / "empty", tmp_path / "y")
    assert not (tmp_path / "y").exists() and not (tmp_path / "y.partial").exists()


def test_an_adapter_without_a_saved_base_is_not_merged(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "sft/final", tmp_path / "alone")
    file = tmp_path / "alone/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match="names no base model"):
        export(tmp_path / "alone", tmp_path / "x", merge=True)


def test_a_card_without_a_run_says_what_the_files_say(run: Path) -> None:
    card = model_card(run / "grpo/final", name="me/x")
    assert card.startswith("---\n") and 'from_pretrained("me/x")' in card and "## Recipe" not in card


def test_a_repository_alone_turns_the_upload_on() -> None:
    hub = load_recipe("smoke-cpu", ["hub.model_id=me/x"]).recipe.hub
    assert (hub.push, hub.model_id, hub.private) == (True, "me/x", True)
    assert not load_recipe("smoke-cpu").recipe.hub.push
    with pytest.raises(ConfigError, match="expected owner/name"):
        load_recipe("smoke-cpu", ["hub.model_id=a/b/c"])


@pytest.mark.parametrize("key", ["token", "hub_token"])
def test_a_token_is_no_setting(key: str) -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        load_recipe("smoke-cpu", [f"hub.{key}=hf_abcdefghijklmnopqrstuvwxyz"])
    assert "hf_abc" not in str(caught.value)


def test_the_card_names_the_base_its_licence_and_what_to_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "base" / "README.md").write_text("---\nlicense: mit\n---\n# A base\n")
    export(run / "grpo/final", tmp_path / "given", run=run)
    card = (tmp_path / "given" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert (
        head["license"] == "mit" and "base_model" not in head
    )  # a folder of this machine is nothing to others
    assert 'from_pretrained("given")' in card and "<details>" in card.partition("## Recipe")[2]
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out  # the model's answer, of an untrained one hardly more than a line's end
    of_hub = Recipe.model_validate({"model": {"name": "smollm2"}, "sft": {"enabled": False}})
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text(to_yaml(of_hub))
    head = yaml.safe_load(model_card(run / "grpo/final", tmp_path / "r", base="smollm2").split("---\n")[1])
    assert (head["base_model"], head["license"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")


@pytest.mark.parametrize("merge", [False, True])
def test_the_cards_code_asks_with_the_trained_prompt(
    merge: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(run / "grpo/final", tmp_path / "given", run=run, merge=merge)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "given" / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, made := {})
    tokenizer, form = made["tokenizer"], recipe_format(load_recipe(str(run / "config.yaml")).recipe)
    prompt = render_prompt(form, tokenizer, question_of(run))
    assert made["inputs"]["input_ids"][0].tolist() == tokenizer(prompt)["input_ids"]


def test_an_adapter_of_another_program_has_a_card_too(run: Path, tmp_path: Path) -> None:
    base = load_policy(run.parent / "base", device=CPU)
    adapter = get_peft_model(base.model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapter.peft_config["default"].base_model_name_or_path = str(run.parent / "base")
    adapter.save_pretrained(tmp_path / "foreign")
    base.tokenizer.save_pretrained(tmp_path / "foreign")
    export(tmp_path / "foreign", tmp_path / "given")
    assert "AutoPeftModelForCausalLM" in (tmp_path / "given" / "README.md").read_text()


@pytest.mark.long
@pytest.mark.slow
def test_an_adapter_on_a_model_from_scratch_keeps_its_base(tmp_path: Path, output_of: Any) -> None:
    """The stages can be done in two calls, and the final adapter is found to be a model, exported, too."""
    settings = [f"output_dir={tmp_path}", "threads=1", "model.lora={rank: 4}", "eval.enabled=false"]
    run_recipe(load_recipe("smoke-cpu", [*settings, "run_name=whole"]).recipe)
    run_recipe(load_recipe("smoke-cpu", [*settings, "run_name=parts"]).recipe, stages=("sft",))
    run_recipe(load_recipe("smoke-cpu", [*settings, "run_name=parts"]).recipe, resume=True)
    weights = []
    for name in ("whole", "parts"):
        final = tmp_path / name / "grpo" / "final"
        policy = load_policy(final, device=torch.device("cpu"))
        weights.append(policy.model.state_dict())
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    told = output_of("export", str(tmp_path / "whole"), "--to", str(tmp_path / "far/away/given"))
    assert "tried in plain transformers (its chat template makes" in told
    exported = load_policy(tmp_path / "far/away/given", device=CPU).model.state_dict()
    assert all(torch.equal(weights[0][key], exported[key]) for key in weights[0])

"""What model, tokenizer and problems show together is said before the first step, by ``run`` and by ``preflight``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from algorist.cli.terminal import compact
from algorist.config import load_recipe
from tests.conftest import Cli
from tests.marks import first
from tests.tiny import tiny_policy

NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endif %}"
    "{% endfor %}assistant: "
)
OPENS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant:\n<think>\n"
SHORT = ("sft.max_steps=2", "grpo.max_steps=1", "eval.enabled=false", "device=cpu", "threads=1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model with a context of 1,024 tokens."""
    folder, policy = tmp_path_factory.mktemp("models") / "m", tiny_policy()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "m"))


def said(run: subprocess.CompletedProcess[str]) -> str:
    return " ".join((run.stdout + run.stderr).split())


def change_json(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def rows_of(tmp_path: Path, question: str, solution: str = "1 + 1 = 2", count: int = 24) -> list[str]:
    file = tmp_path / "rows.jsonl"
    row = {"answer": "2", "solution": solution}
    file.write_text("".join(json.dumps({"question": f"{question} {n}", **row}) + "\n" for n in range(count)))
    return [f"data.{part}={{name: local, path: {file}}}" for part in ("train", "sft")]


def no_system(model: Path, tmp_path: Path) -> list[str]:
    (model / "chat_template.jinja").write_text(NO_SYSTEM)
    return ["prompt.system_prompt=null"]  # the tiny recipe has none


def opens_think(model: Path, tmp_path: Path) -> list[str]:
    (model / "chat_template.jinja").write_text(OPENS)
    return []


def control_tokens(model: Path, tmp_path: Path) -> list[str]:
    return rows_of(tmp_path, "1 + 1?", "1 + 1 <|im_end|> = 2")


def long_warm_up(model: Path, tmp_path: Path) -> list[str]:
    return ["grpo.warmup_steps=100"]


FAULTS: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "system_prompt_lost": (no_system, "prompt.system_role=user"),
    "template_opens_a_tag": (opens_think, "prompt.format=think_answer"),
    "control_tokens_in_text": (control_tokens, "<|im_end|> in "),
    "warm_up_too_long": (long_warm_up, "grpo.warmup_steps=0"),
}


@pytest.mark.parametrize("name", first(1, FAULTS))
def test_a_fault_between_model_and_recipe_is_said_first(
    name: str, model: Path, tmp_path: Path, call: Cli
) -> None:
    plant, says = FAULTS[name]
    settings = [*SHORT, f"model.name={model}", *plant(model, tmp_path)]
    run = call("run", "smoke-cpu", *settings)
    assert run.returncode == 0, said(run)
    before, _, after = (run.stdout + run.stderr).partition("sft begins")
    (line,) = [line for line in before.splitlines() if f"warning: {name}:" in line]
    assert says in line
    assert name not in after
    look = call("preflight", "smoke-cpu", *settings, "--no-trial", "--json")
    (advice,) = [item for item in json.loads(look.stdout)["advice"] if item["name"] == name]
    assert says in json.dumps(advice)


def test_a_sound_model_is_started_without_a_word(model: Path, call: Cli) -> None:
    run = call("run", "smoke-cpu", *SHORT, f"model.name={model}")
    assert "warning" not in said(run).partition("sft begins")[0]


def test_the_tag_that_a_template_opens_is_the_formats_own(model: Path, call: Cli) -> None:
    (model / "chat_template.jinja").write_text(OPENS)
    run = call("run", "smoke-cpu", *SHORT, f"model.name={model}", "prompt.format=think_answer", "run_name=r")
    assert run.returncode == 0, said(run)
    assert "warning" not in said(run).partition("sft begins")[0]
    carried = json.loads(Path("runs/r/grpo/final/tokenizer_config.json").read_text())["algorist"]
    assert carried["prefilled_start"]  # a completion, and a demonstration, begin behind <think>


@pytest.mark.parametrize(
    ("question", "count", "settings", "says"),
    [
        (
            "1 + 1 " * 400 + "?",
            24,
            (),
            r"24 of 24 prompts of data.train leave no room .* context of 1024 tokens; the longest has \d+ \(.*\)\. "
            r"Leave them out: data.train.max_prompt_tokens=1023",
        ),
        ("1 + 1?", 2, (), r"takes 4 problems .* there are only 2"),
        ("1 + 1?", 24, ("data.train.max_prompt_tokens=1",), r"no prompt has at most 1 tokens"),
    ],
)
def test_what_grpo_would_refuse_is_refused_before_sft(
    question: str, count: int, settings: tuple[str, ...], says: str, model: Path, tmp_path: Path, call: Cli
) -> None:
    train, _ = rows_of(tmp_path, question, count=count)
    run = call("run", "smoke-cpu", *SHORT, f"model.name={model}", train, *settings)
    assert run.returncode == 2
    assert "sft begins" not in said(run)
    assert re.search(says, said(run)), said(run)


def test_held_out_prompts_beyond_the_context_are_refused_and_can_be_left_out(
    model: Path, tmp_path: Path, call: Cli
) -> None:
    long, _ = rows_of(tmp_path, "1 + 1 " * 400 + "?")
    settings = ["device=cpu", "threads=1", "sft.max_steps=1", "grpo.enabled=false", f"model.name={model}"]
    held_out = long.replace("train", "eval")
    run = call("run", "smoke-cpu", *settings, held_out)
    assert run.returncode == 2 and "data.eval.max_prompt_tokens=1023" in said(run)
    file = tmp_path / "rows.jsonl"
    with file.open("a") as rows:
        rows.write(json.dumps({"question": "What is 1 + 1?", "answer": "2"}) + "\n")
    run = call("run", "smoke-cpu", *settings, held_out, "data.eval.max_prompt_tokens=500")
    assert run.returncode == 0 and "of 1," in said(run), said(run)


@pytest.mark.parametrize("tokens", [1000, 1024, 4000])
def test_completions_as_long_as_the_context_are_said_with_what_is_left(
    tokens: int, model: Path, tmp_path: Path, call: Cli
) -> None:
    train, _ = rows_of(tmp_path, "What is 1 + 1?")
    alone = (*SHORT, "sft.enabled=false", f"model.name={model}", train)
    run = call("run", "smoke-cpu", *alone, f"grpo.max_completion_tokens={tokens}", "grpo.stop_strings=[' ']")
    assert run.returncode == 0, said(run)
    assert f"leave no room for {tokens} tokens in the context of 1024" in said(run)
    assert (left := re.search(r"grpo.max_completion_tokens=(\d+)", said(run))) and 900 < int(left[1]) < 1000


def test_a_tokenizer_without_an_end_token_is_refused_or_takes_the_models(model: Path, call: Cli) -> None:
    change_json(model / "tokenizer_config.json", eos_token=None)
    run = call("run", "smoke-cpu", *SHORT, f"model.name={model}", "run_name=r")
    assert run.returncode == 0, said(run)  # generation_config.json names one
    change_json(model / "generation_config.json", eos_token_id=None)
    change_json(model / "config.json", eos_token_id=None)
    run = call("run", "smoke-cpu", *SHORT, f"model.name={model}", "run_name=s")
    assert run.returncode == 2
    assert "has no end token" in said(run) and "eos_token" in said(run)


def test_a_tokenizer_that_ends_every_text_is_refused(model: Path, call: Cli) -> None:
    """Each prompt would end with the end token, which no template shows and no line of a run."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    name = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    end = {"SpecialToken": {"id": name, "type_id": 0}}
    token = next(added["id"] for added in tokenizer["added_tokens"] if added["content"] == name)
    change_json(
        model / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
        },
    )
    run = call("run", "smoke-cpu", *SHORT, f"model.name={model}", "run_name=r")
    assert run.returncode == 2 and "writes its end token after every text" in said(run), said(run)


def test_the_saved_configuration_is_that_of_the_weights(model: Path, call: Cli) -> None:
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    run = call("run", "smoke-cpu", *SHORT, f"model.name={model}", "run_name=r")
    assert "tie_word_embeddings=true, but its lm_head.weight is not its embedding" in said(run)
    for stage in ("sft", "grpo"):
        config = json.loads(Path(f"runs/r/{stage}/final/config.json").read_text())
        assert config["tie_word_embeddings"] is False
        assert config["use_cache"] is True


def test_an_answer_that_is_cut_is_shown_whole_with_the_way_out(model: Path, call: Cli) -> None:
    words = ("solve", "What is 1 + 1?", "--model", str(model), "--max-new-tokens", "400")
    assert "cut off at the limit: --max-new-tokens N" in call(*words).stdout
    asked = (*words, "--format", "reasoning_answer")
    (answer,) = json.loads(call(*asked, "--json").stdout)["answers"]
    shown = call(*asked).stdout.partition("answer: none (cut off at the limit: --max-new-tokens N), in: ")[2]
    assert len(answer["completion"]) > 200 and shown.strip() == compact(answer["completion"]), shown


def test_the_card_names_settings_of_generation_that_nobody_used(
    model: Path, tmp_path: Path, call: Cli
) -> None:
    change_json(model / "generation_config.json", repetition_penalty=1.8, top_k=2)
    call("export", str(model), "--to", str(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "sets `repetition_penalty=1.8`, `top_k=2`. Neither training nor evaluation used them" in " ".join(
        card.split()
    )


def test_problems_that_fill_no_rollout_batch_are_named(model: Path, tmp_path: Path, call: Cli) -> None:
    train, sft = rows_of(tmp_path, "1 + 1?", count=5)
    settings = (f"model.name={model}", train, sft, "sft.max_steps=1", "eval.enabled=false", "device=cpu")
    once = call("run", "smoke-cpu", *settings, "grpo.max_steps=null", "grpo.epochs=1")
    assert once.returncode == 0, said(once)
    assert "1 of 5 problems fill no rollout batch of 4 and are not trained on" in said(once)
    twice = call("run", "smoke-cpu", *settings, "grpo.max_steps=null", "grpo.epochs=2", "run_name=twice")
    assert "rollout batch of" not in said(twice)


def test_sft_steps_are_planned_without_what_the_run_leaves_out(
    model: Path, tmp_path: Path, call: Cli
) -> None:
    lines = [
        {"question": f"1 + {n}?", "answer": "2", "solution": "so " * (300 if n % 2 else 1)} for n in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = [f"data.{part}={{name: local, path: {tmp_path}/rows.jsonl}}" for part in ("train", "sft")]
    settings = (f"model.name={model}", *data, "sft.max_steps=null", "sft.epochs=1", "sft.batch_size=2")
    settings = (*settings, "sft.max_length=256", "eval.enabled=false", "device=cpu", "threads=1")
    look = call("preflight", "smoke-cpu", *settings, "--no-trial", "--json")
    planned = json.loads(look.stdout)["batch"]["sft"]
    run = call("run", "smoke-cpu", *settings, "--only", "sft", "run_name=r")
    assert "12 of 24 demonstrations are longer" in said(run)
    steps = [json.loads(line) for line in Path("runs/r/metrics.jsonl").read_text().splitlines()]
    assert planned["steps"] == max(line["step"] for line in steps if line["stage"] == "sft")


def test_a_folder_of_both_splits_is_named_once(tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for split in ("train", "test"):
        rows = ({"question": f"1+{n}?", "answer": f"#### {1 + n}"} for n in range(20))
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = f"data.train.path={folder}"
    data = load_recipe("oneshot-gsm8k", [settings]).recipe.data
    assert data.eval.path == data.train.path == str(folder)
    for other in (f"data.train.path={folder}/train.jsonl", "data.eval.name=math", "data.eval.hub=me/mine"):
        assert load_recipe("oneshot-gsm8k", [settings, other]).recipe.data.eval.path is None


@pytest.mark.parametrize("key", ["eval.limit", "data.eval.params.limit"])
def test_a_limit_in_the_wrong_place_is_answered_with_the_right_one(key: str, call: Cli) -> None:
    run = call("run", "smoke-cpu", f"{key}=10")
    assert run.returncode == 2 and "data.eval.limit" in run.stderr and "data.train" not in run.stderr


def test_an_adapter_as_a_model_is_answered_with_the_command_that_merges_it(model: Path, call: Cli) -> None:
    settings = (*SHORT, f"model.name={model}", "model.lora={rank: 4}", "--only", "sft", "run_name=a")
    assert call("run", "smoke-cpu", *settings).returncode == 0
    run = call("run", "smoke-cpu", *SHORT, "model.name=runs/a/sft/final", "run_name=b")
    assert run.returncode == 2
    (command,) = re.findall(r"algorist (export .*) FOLDER, then model.name=FOLDER", said(run))
    assert call(*command.split(), "merged").returncode == 0
    again = call("run", "smoke-cpu", *SHORT, "model.name=merged", "run_name=c")
    assert again.returncode == 0, said(again)

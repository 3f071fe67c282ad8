"""``algorist from-trl``: a script for TRL becomes a recipe with the script's numbers, and is never run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from algorist.cli.trl_script import ADAPTERS, DEFAULTS, PEFT_MODULES
from algorist.config import load_recipe
from algorist.data import load_problems
from algorist.prompts import get_format
from algorist.training.sft import demonstrations
from algorist_grader.user_code import import_file
from tests.conftest import Cli
from tests.marks import first

SCRIPTS = Path(__file__).parents[1] / "data" / "trl"


def carried(call: Cli, name: str) -> tuple[Any, dict[str, Any]]:
    done = call("from-trl", str(SCRIPTS / f"{name}.py"), "--json")
    assert done.returncode == 0, done.stderr
    return load_recipe(f"{name}.yaml", []).recipe, json.loads(done.stdout)


def test_a_notebook_with_chat_rows_becomes_a_recipe_that_runs(call: Cli, tmp_path: Path) -> None:
    recipe, said = carried(call, "grpo")
    grpo = recipe.grpo
    assert (grpo.group_size, grpo.batch_size, grpo.gradient_accumulation_steps) == (16, 4, 4)
    assert (grpo.learning_rate, grpo.warmup_steps, grpo.adam_beta2, grpo.epochs) == (5e-6, 10, 0.99, 1)
    assert (grpo.loss.name, grpo.advantage, grpo.num_iterations) == ("dr_grpo", "group_centered", 2)
    assert grpo.loss.parameters["clip_high"] == 0.28 and not recipe.sft.enabled
    assert (recipe.model.name, recipe.model.lora.rank, recipe.model.lora.alpha) == (
        "Qwen/Qwen2.5-0.5B-Instruct",
        16,
        64,
    )
    assert recipe.data.train.name == "gsm8k" and "<reasoning>" in recipe.prompt.system_prompt
    assert [(Path(r.name).name, r.weight) for r in recipe.rewards] == [
        ("grpo_rewards.py:correctness_reward_func", 1.0),
        ("grpo_rewards.py:int_reward_func", 0.5),
    ]
    assert set(said["by_default"]) == {"grpo.temperature", "grpo.beta"}
    text = Path("grpo.yaml").read_text()
    assert not any("map(" in left for left in said["left"])  # the adapter reads its #### as well
    for line in ("log_on_each_node=False: not in a recipe", "holds no problems out"):
        assert any(line in left for left in said["left"]) and "# Not carried over:" in text
    assert "load_dataset" not in Path("grpo_rewards.py").read_text()
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}+1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(8))
    )
    small = ["grpo.max_steps=1", "grpo.group_size=4", "grpo.max_completion_tokens=8", "device=cpu"]
    tiny = ["model.name=tiny", "model.lora=null", "report_to=[]", "data.train.path=train.jsonl", "threads=1"]
    run = call("run", "grpo.yaml", *small, *tiny)
    assert run.returncode == 0 and "int_reward_func" in Path("runs/grpo/metrics.jsonl").read_text(), (
        run.stderr
    )


def test_sft_with_a_model_that_is_loaded_first(call: Cli) -> None:
    recipe, said = carried(call, "sft")
    assert (recipe.sft.max_length, recipe.sft.max_steps, recipe.sft.learning_rate) == (512, 60, 2e-4)
    assert recipe.sft.enabled and not recipe.grpo.enabled
    assert (recipe.model.name, recipe.model.quantization) == ("HuggingFaceTB/SmolLM2-135M", "4bit")
    assert recipe.data.train.hub == "me/worked-solutions"
    left = "\n".join(said["left"])
    assert "sft.packing=True: not in a recipe" in left and "set data.train.limit" in left


def test_settings_from_a_command_line_are_named(call: Cli) -> None:
    recipe, said = carried(call, "parsed")
    assert [r.name for r in recipe.rewards] == ["think_answer_format", "accuracy"]
    assert recipe.prompt.format == "think_answer" and recipe.data.train.name == "numina_tir"
    assert (recipe.data.train.split, recipe.data.eval.split) == ("train", "test")
    assert (recipe.grpo.learning_rate, recipe.grpo.group_size) == (1e-6, 8)
    left = "\n".join(said["left"])
    assert "set model.name" in left and "GRPOConfig is not built here" in left


def test_a_script_is_read_and_never_run(call: Cli, tmp_path: Path) -> None:
    text = "open('ran', 'w')\nfrom trl import GRPOConfig\nGRPOConfig(**settings(), beta=input())\n"
    (tmp_path / "own.py").write_text(text)
    done = call("from-trl", "own.py")
    assert done.returncode == 0 and not (tmp_path / "ran").exists()
    assert "settings(): known only when the script runs" in " ".join(done.stdout.split())
    again = call("from-trl", "own.py")
    assert again.returncode == 2 and "already there" in again.stderr
    (tmp_path / "other.py").write_text("print('hello')\n")
    other = call("from-trl", "other.py")
    assert other.returncode == 2 and "builds no GRPOConfig" in other.stderr
    (tmp_path / "broken.py").write_text("def (:\n")
    assert "cannot be read as Python" in call("from-trl", "broken.py").stderr


@pytest.mark.parametrize(("stage", "name"), [("grpo", "GRPOConfig"), ("sft", "SFTConfig")])
def test_the_defaults_are_those_of_trl(stage: str, name: str) -> None:
    trl = pytest.importorskip("trl")
    fields = {field.name: field.default for field in dataclasses.fields(getattr(trl, name))}
    assert {key: fields[key] for key in DEFAULTS[stage]} == DEFAULTS[stage]


def test_what_only_a_run_knows_is_left_to_the_reader(call: Cli, tmp_path: Path) -> None:
    """Names that refer to themselves, weights and messages that are computed: none of it ends the reading."""
    script = tmp_path / "odd.py"
    script.write_text(
        "from textwrap import dedent\nfrom trl import GRPOConfig, GRPOTrainer\n"
        "name = name.strip()\nweights = [0.5 * n for n in range(1, 3)]\nrate = {}[[]]\n"
        "rows = [{'role': 'system', 'content': 7}, {'role': 'system', 'content': dedent()}]\n"
        "def short(completions, **_):\n    return [0.0 for _ in completions]\n"
        "args = GRPOConfig(learning_rate=rate, reward_weights=weights, num_generations=4)\n"
        "GRPOTrainer(model=name, reward_funcs=[short], args=args)\n"
    )
    done = call("from-trl", str(script), "--to", str(tmp_path / "odd.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    left = " ".join(json.loads(done.stdout)["left"])
    for text in (
        "the model's name is known only",
        "learning_rate=rate",
        "reward_weights=weights",
        "'content': 7",
    ):
        assert text in left, left
    assert load_recipe(str(tmp_path / "odd.yaml"), []).recipe.grpo.group_size == 4


ENVIRONMENT = '''
import random
from textarena import Wordle
from trl import GRPOConfig, GRPOTrainer

MOST = 6

class Base:
    def get_reward(self) -> float:
        return self.paid

class Guess(Base):
    """A number is guessed."""

    def reset(self, answer, **row):
        self.number, self.paid = int(answer), 0.0
        return f" Between 1 and {MOST}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: A number.
        """
        self.paid = float(number == self.number)
        return "right" if self.paid else "wrong"

class Silent:
    def reset(self, **row):
        self.paid = 0.5

def length(completions, **_):
    return [0.0 for _ in completions]

def hit(environments, **_):
    return [game.paid for game in environments]

args = GRPOConfig(max_steps=1)
trainer = GRPOTrainer(model="tiny", args=args, FACTORY)
'''


@pytest.mark.parametrize(
    ("factory", "environment", "rewards"),
    first(
        3,
        [
            ("reward_funcs=[hit, length], environment_factory=Guess", "Guess", ["length", "environment"]),
            ("environment_factory={'a': Guess, 'b': Wordle}", {"a": "Guess"}, ["environment"]),
            ("reward_funcs=length, environment_factory=lambda: Guess(3)", None, ["length"]),
            ("environment_factory=Guess", "Guess", ["environment"]),
            (
                "reward_funcs=[length], environment_factory=lambda: Guess()",
                "Guess",
                ["length", "environment"],
            ),
            ("reward_funcs=[hit], environment_factory=Silent", "Silent", ["environment"]),
        ],
        together=True,
    ),
)
def test_an_environment_of_the_script_is_taken_over(
    factory: str, environment: Any, rewards: list[str], call: Cli, tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(ENVIRONMENT.replace("FACTORY", factory))
    done = call("from-trl", "game.py", "--json")
    assert done.returncode == 0, done.stderr
    recipe, left = load_recipe("game.yaml", []).recipe, "\n".join(json.loads(done.stdout)["left"])
    name = "game_environments.py:"
    expected = {k: name + v for k, v in environment.items()} if isinstance(environment, dict) else environment and name + environment  # fmt: skip
    made = recipe.environment
    assert ({k: Path(v).name for k, v in made.items()} if isinstance(made, dict) else made and Path(made).name) == expected  # fmt: skip
    assert [reward.name.rpartition(":")[2] for reward in recipe.rewards] == rewards
    why = "no class of this script without arguments: set environment: file.py:Class"
    assert (why in left) == ("Wordle" in factory or "(3)" in factory)
    assert ("hit: pays what an environment knows" in left) == ("hit" in factory and "Guess" in factory)
    if environment == "Silent":
        made = import_file(tmp_path / name[:-1]).Silent()
        made.reset()
        assert made.get_reward() == 0.5
    if environment == "Guess":
        (tmp_path / "rows.jsonl").write_text('{"question": "Guess", "answer": "3"}\n' * 2)
        assert "class Base" in (tmp_path / name[:-1]).read_text() and "textarena" not in (tmp_path / name[:-1]).read_text()  # fmt: skip
        from algorist.extensions.environments.user import EnvironmentClass

        about = EnvironmentClass(recipe.environment).about()
        assert about["pays"] and [tool["function"]["name"] for tool in about["tools"]] == ["guess"]


@pytest.fixture
def read(call: Cli, tmp_path: Path) -> Callable[[str], tuple[dict[str, Any], str]]:
    """Carry a script of one run over: its settings, and what is left as one text."""

    def read(text: str) -> tuple[dict[str, Any], str]:
        for file in ("own.yaml", "own_rewards.py"):
            (tmp_path / file).unlink(missing_ok=True)
        head = "from x import *\ndef short(completions, **_):\n    return [0.0]\n"
        (tmp_path / "own.py").write_text(f"{head}{text}\n")
        done = call("from-trl", "own.py", "--json")
        assert done.returncode == 0, done.stderr
        load_recipe("own.yaml", [])
        said = json.loads(done.stdout)
        return said["settings"], "\n".join(said["left"])

    return read


@pytest.mark.parametrize(
    ("adapter", "model", "rank", "alpha", "dropout", "modules"),
    [
        ("peft_config=LoraConfig()", "Qwen/Qwen2.5-0.5B", 8, 8, 0.0, ["q_proj", "v_proj"]),
        ("peft_config=LoraConfig(task_type='CAUSAL_LM')", "gpt2", 8, 8, 0.0, ["c_attn"]),
        ("peft_config=LoraConfig(r=4)", "me/own", 4, 8, 0.0, ["q_proj", "v_proj"]),
        ("peft_config=get_peft_config(used)", "microsoft/phi-2", 8, 32, 0.05, ["q_proj", "v_proj", "fc1", "fc2"]),
        ("model=FastModel.get_peft_model(m, r=4)", "Qwen/Qwen3-0.6B", 4, 16, 0.0, "attention+mlp"),
    ],
)  # fmt: skip
def test_an_adapter_has_the_defaults_of_its_library(
    adapter: str, model: str, rank: int, alpha: int, dropout: float, modules: Any, read: Any
) -> None:
    text = (
        "used = ModelConfig(use_peft=True, lora_r=8)\nGRPOTrainer({model!r}, short, GRPOConfig(), {adapter})"
    )
    settings, left = read(text.format(model=model, adapter=adapter))
    lora = {key.rpartition(".")[2]: value for key, value in settings.items() if "lora" in key}
    assert lora == {"rank": rank, "alpha": alpha, "dropout": dropout, "target_modules": modules}
    assert ("[q_proj, v_proj] are taken" in left) == (model == "me/own")


def test_an_adapter_that_only_the_run_knows_is_named(read: Any) -> None:
    text = "GRPOTrainer('gpt2', short, GRPOConfig(), peft_config={})"
    for adapter, said in {
        "get_peft_config(parsed)": "set model.lora",
        "IA3Config()": "all weights are trained; set model.lora",
        "None": None,
        "get_peft_config(ModelConfig(lora_r=8))": None,
    }.items():
        settings, left = read(text.format(adapter))
        assert not any("lora" in key for key in settings)
        assert said in left if said else "lora" not in left
    bits = "m = ModelConfig(load_in_4bit=True)\nGRPOTrainer('gpt2', short, GRPOConfig({}))"
    assert "model.quantization" not in read(bits.format(""))[0]
    assert (
        read(bits.format("model_init_kwargs=get_quantization_config(m)"))[0]["model.quantization"] == "4bit"
    )


def test_the_modules_of_an_adapter_are_those_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    peft = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    names = {"Qwen2.5": "qwen2", "Qwen3-4B": "qwen3", "tinyllama": "llama", "mistral-7b": "mistral", "gemma-2-2b": "gemma2",
             "opt-125m": "opt", "phi-2": "phi", "gpt2-xl": "gpt2", "pythia-70m": "gpt_neox", "bloom": "bloom"}  # fmt: skip
    for name, kind in names.items():
        (found,) = [modules for part, modules in PEFT_MODULES.items() if re.search(part, name.lower())]
        assert found == peft[kind], name
    config = pytest.importorskip("peft").LoraConfig()
    ours = ADAPTERS["LoraConfig"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (ours["r"], ours["alpha"], ours["dropout"])


def test_arguments_of_an_adapter_are_carried_or_named(read: Any) -> None:
    most = "modules_to_save=['lm_head'], layers_to_transform=0, bias='all', init_lora_weights='pissa', **more"
    plain = "bias='none', init_lora_weights=True, modules_to_save=None, fan_in_fan_out=False, task_type='CAUSAL_LM'"
    text = "GRPOTrainer('gpt2', short, GRPOConfig(), peft_config=LoraConfig(r=4, use_dora=True, use_rslora=True, {}))"
    settings, left = read(text.format(most))
    assert settings["model.lora.dora"] is True and settings["model.lora.rslora"] is True
    for word in most.split(", ")[:-1]:
        assert f"{word}: not in a recipe" in left
    assert "**more: known only" in left
    settings, left = read(text.format(plain))
    assert settings["model.lora.rank"] == 4 and not any(word in left for word in plain.split(", "))


@pytest.mark.parametrize(
    ("files", "train", "held_out"),
    [
        ("'json', data_files='rows.jsonl'", "rows.jsonl", None),
        ("'csv', data_files=['rows.csv'], split='train'", "rows.csv", None),
        ("'parquet', data_files={'train': 'a.parquet', 'test': 'b.parquet'}, split=['train', 'test']", "a.parquet", "b.parquet"),
        ("'json', data_dir='rows'", "rows", None),
        ("'json', data_files='parts/*.jsonl'", None, None),
        ("'json', data_files='hf://datasets/a/b.jsonl'", None, None),
        ("'json', data_files=['a.jsonl', 'b.jsonl']", None, None),
    ],
)  # fmt: skip
def test_local_files_become_paths(files: str, train: str | None, held_out: str | None, read: Any) -> None:
    settings, left = read(
        f"rows = load_dataset({files})\nGRPOTrainer('gpt2', short, GRPOConfig(), train_dataset=rows)"
    )
    assert (settings.get("data.train.path"), settings.get("data.eval.path")) == (train, held_out)
    assert not any(key.endswith(".hub") for key in settings)
    assert ("set data.train.path" in left) == (train is None)


MAPPED = """
SYSTEM = "Write the result as #### NUMBER."
def correct(prompts, completions, gold, weight=1.0, **kwargs):
    return [weight * (g == c[0]["content"]) for c, g in zip(completions, gold)]
def to_prompt(row):
    chat = {"role": "system", "content": SYSTEM}
    return {"prompt": [chat, {"role": "user", "content": row["q"]}], "gold": {gold}}
rows = load_dataset("json", data_files="rows.jsonl").map(to_prompt)
GRPOTrainer("gpt2", [correct, short], GRPOConfig(), train_dataset=rows)
"""


def test_columns_that_a_script_makes_are_named(read: Any, tmp_path: Path) -> None:
    """A reward that asked for ``gold`` ended in a missing argument, and ``#### 7`` was read as an answer without tags."""
    settings, left = read(MAPPED.replace("{gold}", 'str(row["a"])'))
    assert {key: settings[f"data.train.columns.{key}"] for key in ("question", "answer")} == {
        "question": "q",
        "answer": "a",
    }
    assert settings["prompt.format"] == "last_number" and "map(" not in left
    rewards = import_file(tmp_path / "own_rewards.py")
    assert rewards.correct(prompts=[""], completions=[[{"content": "7"}]], answer=["7"], level=[1]) == [1.0]
    boxed = MAPPED.replace("{gold}", 'str(row["a"])').replace("#### NUMBER", "a \\\\boxed{} at the end")
    settings, _ = read(boxed)
    get_format(settings["prompt.format"], system_prompt=settings["prompt.system_prompt"])
    assert settings["prompt.format"] == "boxed"
    _, left = read(MAPPED.replace("{gold}", 'clean(row["a"])'))
    assert "columns are read as they are, without: clean(row['a'])" in left
    hashed = 'def last(text):\n    if "####" not in text:\n        return None\n    return text.split("####")[1].strip()\n'
    for read_as_it_is in (
        'last(row["a"])',
        'row["a"].split("####")[-1].strip().replace(",", "")',
        'float(row["a"].split("####")[1])',
    ):
        settings, left = read(hashed + MAPPED.replace("{gold}", read_as_it_is))
        assert settings["data.train.columns.answer"] == "a" and "map(" not in left, left
    hashed += 'def other(text):\n    text = text.replace("-", "")\n    return text\n'
    hashed += "def ping(text):\n    return pong(text)\n\ndef pong(text):\n    return ping(text)\n"
    for changed in (
        'row["a"].split("=")[1]',
        'row["a"].split()',
        'row["a"].replace("-", "")',
        'row["a"].split("####")[0]',
        'other(row["a"])',
        'ping(row["a"])',
    ):
        _, left = read(hashed + MAPPED.replace("{gold}", changed))
        assert "columns are read as they are, without" in left, changed
    settings, left = read(MAPPED.replace("{gold}", 'row["a"] + row["b"]'))
    assert "data.train.columns.answer" not in settings and "name columns with data.train.columns" in left
    set_in_place = "lambda row: row"
    _, left = read(MAPPED.replace("map(to_prompt)", f"map({set_in_place})").replace("{gold}", "0"))
    assert "name columns with data.train.columns" in left


def test_settings_after_the_construction_are_applied_or_named(read: Any) -> None:
    settings, left = read(
        "args = GRPOConfig(learning_rate=1e-6)\nlora = LoraConfig(r=4)\n"
        "if __name__ == '__main__':\n    args.learning_rate = 3e-5\n    lora.r = 32\n"
        "if debug:\n    args.beta = 0.5\nargs.temperature *= 2\nsetattr(args, 'epsilon', 0.3)\n"
        "GRPOTrainer('gpt2', short, args, peft_config=lora)"
    )
    assert settings["grpo.learning_rate"] == 3e-5 and settings["model.lora.rank"] == 32
    assert "grpo.learning_rate" not in left and settings["grpo.beta"] == 0.0
    for text in ("args.beta = 0.5", "args.temperature *= 2", "setattr(args, 'epsilon', 0.3)"):
        assert f"{text}: known only when the script runs" in left
    _, left = read("args = parse()\nargs.learning_rate = 3e-5\nGRPOTrainer('gpt2', short, args)")
    assert "args.learning_rate = 3e-05: known only" in left


def test_what_a_script_turns_off_is_turned_off(read: Any) -> None:
    off = "GRPOConfig(use_vllm=True, vllm_importance_sampling_correction=False, max_completion_length=None)"
    settings, left = read(f"GRPOTrainer('gpt2', short, {off})")
    assert settings["grpo.engine"] == "vllm" and settings["grpo.sampler_correction"] is None
    assert "GRPOConfig(max_completion_length=None): not in a recipe" in left
    settings, _ = read("SFTTrainer('gpt2', args=SFTConfig(max_length=None))")
    assert settings["sft.max_length"] is None


LOADED = "rows = load_dataset('me/sums', split='train')\n"
TRAINED = "\nGRPOTrainer('gpt2', short, GRPOConfig(), train_dataset=rows)"


@pytest.mark.parametrize(
    ("steps", "seed", "limit", "said"),
    [
        ("rows = rows.shuffle(seed=7).select(range(200))", 7, 200, "shuffle_seed=7 draws an order of its own"),
        ("rows = rows.shuffle(7)\nrows = rows.filter(long).take(9)", 7, 9, "rows.filter(long)"),
        ("rows = rows.select(range(200)).shuffle(seed=7)", None, 200, ".shuffle(seed=7): the choice"),
        ("rows = rows.shuffle().select(range(5, 9))", None, None, "select(range(5, 9)): the choice"),
        ("few = rows.select(range(5))", None, None, "rows.select(range(5)): the choice"),
        ("if debug:\n    rows = rows.select(range(5))", None, None, "rows.select(range(5)): the choice"),
    ],
)  # fmt: skip
def test_the_choice_of_rows_is_carried_or_named(
    steps: str, seed: int | None, limit: int | None, said: str, read: Any
) -> None:
    settings, left = read(LOADED + steps + TRAINED)
    assert settings["data.train.hub"] == "me/sums" and said in left
    assert (settings.get("data.train.shuffle_seed"), settings.get("data.train.limit")) == (seed, limit)


def test_problems_held_out_are_those_of_the_trainer(read: Any) -> None:
    split = "split = rows.train_test_split(test_size=0.2, seed=1)\n"
    trainer = "GRPOTrainer('gpt2', short, GRPOConfig(), {}, {})"
    settings, left = read(LOADED + split + trainer.format("split['train']", "split['test']"))
    assert settings["data.train.hub"] == "me/sums" and settings["eval.enabled"] is False
    assert "split['test']: problems held out are not carried over" in left and "holds no" not in left
    assert "train_test_split(test_size=0.2, seed=1): the choice of rows" in left
    _, left = read(LOADED + trainer.format("rows", "None"))
    assert "the script holds no problems out" in left
    both = "rows = load_dataset('me/sums')\n" + trainer.format("rows['train']", "rows['test'].take(9)")
    settings, left = read(both)
    assert "eval.enabled" not in settings and "holds no" not in left
    assert [settings[f"data.{key}"] for key in ("train.split", "eval.split", "eval.limit")] == [
        "train",
        "test",
        9,
    ]
    local = "tried = load_dataset('json', data_files='tried.jsonl', split='train')\n"
    settings, _ = read(LOADED + local + trainer.format("rows", "tried"))
    assert (settings["data.train.hub"], settings["data.eval.path"]) == ("me/sums", "tried.jsonl")


@pytest.mark.parametrize(
    ("made", "given", "rank"),
    [
        ("lora = LoraConfig(r=4)", "", None),
        ("lora = LoraConfig(r=4)\nlora.r = 16\nprint(lora)", "", None),
        ("lora = LoraConfig(r=4)\nother = LoraConfig(r=8)", "peft_config=lora", 4),
        ("lora = LoraConfig(r=4)\nmore = {'peft_config': lora}", "**more", 4),
        ("model = get_peft_model(load(), LoraConfig(r=4))", "", 4),
    ],
)
def test_an_adapter_that_no_trainer_gets_is_named(made: str, given: str, rank: int | None, read: Any) -> None:
    settings, left = read(f"{made}\nGRPOTrainer('gpt2', short, GRPOConfig(), {given})")
    assert settings.get("model.lora.rank") == rank
    assert ("made and not used: all weights are trained" in left) == (rank is None)
    assert ("LoraConfig(r=8): made and not used" in left) == ("other" in made)


@pytest.mark.parametrize(
    ("rest", "form"),
    [
        ("GRPOTrainer('gpt2', [accuracy_reward, think_format_reward], GRPOConfig())", "think_answer"),
        ("GRPOTrainer('gpt2', short, GRPOConfig())", "question_only"),
        (
            "chat = [{'role': 'user', 'content': '1?'}]\nGRPOTrainer('gpt2', short, GRPOConfig())",
            "last_number",
        ),
        ("GRPOTrainer('gpt2', short, GRPOConfig(), tools=[add])", "reasoning_answer"),
    ],
)
def test_a_script_without_a_system_message_has_its_format_named(rest: str, form: str, read: Any) -> None:
    settings, left = read(rest)
    assert settings["prompt.format"] == form and "prompt.system_prompt" not in settings
    assert f"no system message is found: prompt.format is {form}, which" in left


def test_sft_of_a_script_imitates_its_rows_as_they_are(read: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1+1?", "completion": "2"}\n')
    _, left = read(
        "SFTTrainer('gpt2', args=SFTConfig(), train_dataset=load_dataset('json', data_files='rows.jsonl'))"
    )
    recipe = load_recipe("own.yaml", []).recipe
    problems = load_problems(recipe.data.train)
    (shown,) = demonstrations(problems, get_format(recipe.prompt.format), None, recipe.sft.source)
    assert (shown.prompt, shown.completion) == ("What is 1+1?", "2")
    assert get_format(recipe.prompt.format).render(problems[0].question) == "What is 1+1?"
    assert "SFT imitates prompt and completion of a row as they are" in left
    settings, _ = read(
        "rows = load_dataset('me/sums').map(as_text)\nSFTTrainer('gpt2', args=SFTConfig(), train_dataset=rows)"
    )
    assert "sft.source" not in settings


def test_arguments_of_trl_that_a_recipe_has_are_carried(read: Any) -> None:
    settings, left = read(
        "GRPOTrainer('gpt2', short, GRPOConfig(top_entropy_quantile=0.2, vllm_mode='colocate'))"
    )
    assert (settings["grpo.top_entropy_share"], settings["grpo.vllm.mode"]) == (0.2, "colocate")
    assert "not in a recipe" not in left


SEVERAL = """
a = load_dataset("openai/gsm8k", "main", split="train")
b = load_dataset("ChilleD/SVAMP", split="train")
c = load_dataset("json", data_files="own.jsonl", split="train")
{made}
"""
GRPO, SFT = (
    f'{stage}Trainer("gpt2", {more}args={stage}Config(), train_dataset={{data}})'
    for stage, more in (("GRPO", "reward_funcs=[correct], "), ("SFT", ""))
)


@pytest.mark.parametrize(
    ("made", "names", "left_out"),
    [
        (GRPO.format(data="a"), {"train": "gsm8k"}, 2),
        ("train = b\n" + GRPO.format(data="train"), {"train": "svamp"}, 2),
        (GRPO.format(data="c"), {"train": "local"}, 2),
        (SFT.format(data="c") + "\n" + GRPO.format(data="a"), {"sft": "local", "train": "gsm8k"}, 1),
        (GRPO.format(data="concatenate_datasets([a, b])"), {}, 2),
        (GRPO.format(data="a if BIG else b"), {}, 2),
    ],
)
def test_the_trainers_dataset_is_trained_on_whatever_else_is_loaded(
    made: str, names: dict[str, str], left_out: int, read: Any
) -> None:
    """The last dataset that a script loaded was, and keys of two were put together."""
    settings, left = read(SEVERAL.format(made=made))
    assert {part: settings.get(f"data.{part}.name") for part in ("train", "sft", "eval")} == (
        dict.fromkeys(("train", "sft", "eval")) | names
    )
    paths = [key for key in settings if key.startswith("data.") and key.endswith(".path")]
    assert paths == [f"data.{part}.path" for part, name in names.items() if name == "local"]
    assert left.count("load_dataset(") == left_out and ("set data.train" in left) is (not names)


def test_revisions_and_later_changes_are_carried_or_named(read: Any) -> None:
    loaded = 'model = AutoModelForCausalLM.from_pretrained("gpt2", revision="abc")\n'
    rows = 'a = load_dataset("openai/gsm8k", "main", split="train", revision="v1")\n'
    made = GRPO.format(data="a").replace('"gpt2"', "model")
    later = "\ntrainer.args.beta = 0.1\nparser.args.seed = 3"
    settings, left = read(f"{loaded}{rows}trainer = {made}{later}")
    assert settings["model.revision"] == "abc" and settings["grpo.beta"] == 0.0
    assert "'v1': a dataset's revision" in left and "trainer.args.beta = 0.1: changes the trainer" in left
    assert "parser.args" not in left


def test_what_rewards_use_comes_along_however_it_is_defined(read: Any, tmp_path: Path) -> None:
    """An annotated constant was missing, which only some completions came to."""
    code = (
        "PENALTY: float = 0.5\nSCALE = 2\nSCALE = SCALE * 2\ntry:\n    import absent_one\nexcept ImportError:\n    absent_one = None\n"
        "if SCALE:\n    FLAG = 3\n"
        "def correct(completions, answer, **kwargs):\n    return [-PENALTY * SCALE * FLAG * (absent_one is None)] * len(completions)\n"
        "correct.__name__ = 'correct'\n"
    )
    read(code + 'a = load_dataset("openai/gsm8k", "main")\n' + GRPO.format(data="a"))
    rewards = import_file(tmp_path / "own_rewards.py")
    assert rewards.correct(completions=["7"], answer=["7"]) == [-6.0]


def test_what_trains_when_it_is_imported_is_no_part_of_the_rewards(read: Any, tmp_path: Path) -> None:
    code = "if DEBUG:\n    model = 1\n    print(train(model))\n"
    own = "def correct(completions, **_):\n    model = 2\n    return [float(model)] * len(completions)\n"
    _, left = read(code + own + 'a = load_dataset("openai/gsm8k", "main")\n' + GRPO.format(data="a"))
    assert (
        "train(" not in (tmp_path / "own_rewards.py").read_text() and "defines model, but does more" in left
    )

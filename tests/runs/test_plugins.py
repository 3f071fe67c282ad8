"""``plugins:`` and the seam through a recipe: a process reward, a dataset with its prompt format, a metric, each in one file of a user's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from algorist.config import load_recipe
from algorist.config.load import load_run_recipe
from algorist.errors import ConfigError
from algorist.prompts import FORMATS, PromptFormat, Tags, get_format
from algorist.prompts.attached import KEY, Asked, attached
from algorist.rewards import REWARDS, build_rewards
from algorist.runs.asking import how_to_ask
from algorist.runs.draft import Draft
from algorist.runs.pipeline import Quiet, run_recipe
from algorist.runs.plan import make_plan
from algorist_grader.user_code import import_file
from tests.tiny import tiny_policy

pytestmark = pytest.mark.usefixtures("registrations_undone")

PROCESS_REWARD = '''
"""Every token up to the fourth is worth ``process_weight`` more; the extension counts its batches."""
from dataclasses import replace

from pydantic import Field

from algorist.config.section import Section
from algorist import Extension, extension


class Keys(Section):
    process_weight: float = Field(0.0, ge=0)
    """Weight of the process reward."""


@extension
class ProcessReward(Extension):
    name, keys, batches = "process_reward", {"grpo": Keys}, 0

    def check(self, plan):
        if self.recipe.grpo.process_weight > 9:
            yield "grpo.process_weight is above 9; take 1"

    def batch(self, batch, policy):
        self.batches += 1
        early = (batch.mask.cumsum(1) <= 4) & batch.mask
        return replace(batch, advantages=batch.advantages + self.recipe.grpo.process_weight * self.batches * early)

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]
'''
OWN_DATA = """
from algorist.data import dataset
from algorist_grader import MATCHERS
from algorist_grader.matchers import Matcher
from algorist.prompts import PromptFormat, Tags, add_format
from algorist.types import Problem


@dataset("plugin_sums")
def sums(source):
    return [Problem(f"s{n}", f"{n} + {n + 1}?", str(2 * n + 1), f"{2 * n + 1}") for n in range(40)]


add_format(PromptFormat("plugin_format", Tags("<t>", "</t>", "<a>", "</a>")))


def same(answer, gold, limits):
    return answer == gold, "equal_string" if answer == gold else "different"


MATCHERS.register("plugin_matcher")(Matcher("plugin_matcher", "the same characters", same))
"""
LANGUAGES = '''
from algorist import Extension, extension
from algorist.training.extension import Control


def scripts(text):
    return {"ascii" if c.isascii() else "other" for c in text if c.isalpha()}


@extension
class Languages(Extension):
    """Logs the share of completions with letters of another script than the question's."""

    name = "languages"

    def seen(self, event):
        if event.kind == "sampled":
            mixed = [bool(scripts(r.text) - scripts(g.problem.question)) for g in event.groups for r in g.rollouts]
            return Control(metrics={"languages/other_share": sum(mixed) / len(mixed)})
'''


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    paths = {}
    for name, text in {"process": PROCESS_REWARD, "data": OWN_DATA, "languages": LANGUAGES}.items():
        (tmp_path / f"{name}.py").write_text(text)
        paths[name] = str(tmp_path / f"{name}.py")
    return paths


def recipe_of(folder: Path, *settings: str) -> Any:
    place = (f"output_dir={folder}", "sft.max_steps=1", "eval.enabled=false", "grpo.learning_rate=1e-2")
    return load_recipe("smoke-cpu", [*place, *settings]).recipe


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "grpo" / "final" / "model.safetensors")


@pytest.mark.slow
def test_a_process_reward_moves_the_weights_and_resumes_exactly(
    tmp_path: Path, files: dict[str, str]
) -> None:
    own = (f"plugins=[{files['process']}]", "grpo.max_steps=4", "grpo.save_steps=2")
    recipes = {
        name: recipe_of(tmp_path, *own, f"run_name={name}", f"grpo.process_weight={value}")
        for name, value in {"with": 1, "without": 0, "again": 1}.items()
    }
    runs = {name: run_recipe(recipe, display=Quiet()).folder.path for name, recipe in recipes.items()}
    assert any(not torch.equal(a, weights(runs["without"])[n]) for n, a in weights(runs["with"]).items())
    again = runs["again"]  # as a process leaves it that was killed after the checkpoint of step 2
    shutil.rmtree(again / "grpo" / "final")
    shutil.rmtree(again / "grpo" / "checkpoint-4")
    assert "process_weight" in (again / "config.yaml").read_text()
    stages = json.loads((again / "stages.json").read_text())
    del stages["grpo"]
    (again / "stages.json").write_text(json.dumps(stages))
    run_recipe(recipes["again"], display=Quiet(), resume=True)
    assert all(torch.equal(a, weights(again)[n]) for n, a in weights(runs["with"]).items())


@pytest.mark.long
@pytest.mark.slow
def test_a_run_without_it_is_read_where_the_extension_is_not(tmp_path: Path, files: dict[str, str]) -> None:
    """Once registered, its keys are in every recipe of this process; a run that leaves them alone does not carry them."""
    recipe_of(tmp_path, f"plugins=[{files['process']}]")
    plain = recipe_of(tmp_path, "grpo.max_steps=1", "sft.enabled=false", "run_name=plain")
    run = run_recipe(plain, display=Quiet()).folder.path
    assert plain.grpo.process_weight == 0 and "process_weight" not in (run / "config.yaml").read_text()
    command = [sys.executable, "-m", "algorist", "report", str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_data_format_matcher_and_metric_of_files(
    tmp_path: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALGORIST_TRUST", raising=False)  # a verb of another test may have set it
    recipe = recipe_of(
        tmp_path,
        f"plugins=[{files['data']}, {files['languages']}]",
        "data.train={name: plugin_sums}",
        "prompt={format: plugin_format}",
        "matcher=plugin_matcher",
        "grpo.max_steps=1",
        "sft.enabled=false",
        "model.tiny.vocab_size=300",
    )
    run = run_recipe(recipe, display=Quiet()).folder.path
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("languages/other_share" in line for line in lines)
    for name in ("data", "languages"):
        Path(files[name]).unlink()
    assert load_run_recipe(run).prompt.format == "plugin_format"  # from its own copies
    (run / ".origin").unlink()
    with pytest.raises(ConfigError, match=r"names code to run: plugins=.*data\.py.*--trust"):
        load_run_recipe(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "raise ValueError('my bug')",
            r"plugins=.*own\.py cannot be imported: ValueError in own\.py:1: my bug",
        ),
        (
            "from algorist.training.extension import *\n@extension\nclass A(Extension): name = 'resample'",
            "extension 'resample' is registered twice",
        ),
        (
            PROCESS_REWARD.replace("process_weight:", "group_size:").replace("process_reward", "another"),
            r"extension 'another' adds the key grpo\.group_size, which is there already",
        ),
        (
            PROCESS_REWARD.replace('"grpo": Keys', '"gpro": Keys').replace("process_reward", "other"),
            r"extension 'other' adds keys to 'gpro'; expected one of model, sft, grpo, eval",
        ),
    ],
)
def test_mistakes_in_a_plugin_are_said_before_anything_is_loaded(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe("smoke-cpu", [f"plugins=[{tmp_path / 'own.py'}]"])
    with pytest.raises(ConfigError, match=r"plugins=.*owm\.py: no file at .*Did you mean 'own\.py'"):
        load_recipe("smoke-cpu", [f"plugins=[{tmp_path / 'owm.py'}]"])


def test_its_keys_are_checked_and_it_refuses(tmp_path: Path, files: dict[str, str]) -> None:
    own = f"plugins=[{files['process']}]"
    with pytest.raises(
        ConfigError, match=r"grpo\.process_weight: input should be greater than or equal to 0"
    ):
        recipe_of(tmp_path, own, "grpo.process_weight=-1")
    with pytest.raises(
        ConfigError, match=r"grpo\.process_weigth: unknown key\. Did you mean 'process_weight'"
    ):
        recipe_of(tmp_path, own, "grpo.process_weigth=1")
    with pytest.raises(ConfigError, match=r"grpo\.process_weight is above 9; take 1"):
        make_plan(Draft.of(recipe_of(tmp_path, own, "grpo.process_weight=10")))


def test_an_edited_plugin_replaces_what_it_registered(tmp_path: Path, files: dict[str, str]) -> None:
    file = Path(files["process"])
    recipe_of(tmp_path, f"plugins=[{file}]")
    file.write_text(PROCESS_REWARD.replace("ge=0", "ge=0, le=2"))
    with pytest.raises(ConfigError, match=r"grpo\.process_weight: input should be less than or equal to 2"):
        recipe_of(tmp_path, f"plugins=[{file}]", "grpo.process_weight=3")
    file.write_text(PROCESS_REWARD)
    recipe_of(tmp_path, f"plugins=[{file}]", "grpo.process_weight=3")


def test_a_recipe_has_what_its_own_plugin_registers_whichever_was_loaded_before(tmp_path: Path) -> None:
    """The first file was not run again after one of the same name: its recipe got the other's reward."""
    recipes = {}
    for name, pays in (("a", 0.25), ("b", 0.75)):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "mine.py"
        file.write_text(
            "from algorist.rewards import reward\n\n\n@reward('of_the_file', low=0, high=1)\n"
            f"def of_the_file(rollout, problem):\n    return {pays}\n"
        )
        recipes[name] = f"plugins=[{file}]"
    paid = []
    for name in "abaab":
        recipe = recipe_of(tmp_path, recipes[name], "rewards=[of_the_file]")
        paid.append(build_rewards(recipe.rewards, get_format("reasoning_answer")).explain("7", "7").total)
        module = import_file(tmp_path / name / "mine.py")  # which a reward of the same file shares
        assert REWARDS.get("of_the_file").function is module.of_the_file
    assert paid == [0.25, 0.75, 0.25, 0.25, 0.75]


def test_a_model_whose_format_is_code_that_is_not_loaded_is_asked_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was said to be asked as in its training."""

    class Own(PromptFormat):
        def render(self, question: str) -> str:
            return f"Q: {question}"

    def read_back(form: PromptFormat) -> Asked:
        tokenizer = SimpleNamespace(init_kwargs={KEY: json.loads(json.dumps(Asked(form, 9).recorded()))})
        kept = attached(tokenizer)
        assert kept is not None
        return how_to_ask(None, None, kept)

    form = Own(name="own_class", tags=Tags("<r>", "</r>", "<a>", "</a>"))
    assert type(read_back(form).prompt_format) is PromptFormat
    assert "'own_class' is a user's class (Own) that is not loaded" in caplog.text
    caplog.clear()
    read_back(get_format("reasoning_answer"))
    read_back(PromptFormat(name="own_tags", tags=form.tags))  # which its record holds whole
    monkeypatch.setitem(FORMATS._entries, "own_class", form)
    assert type(read_back(form).prompt_format) is Own and not caplog.text


DOORS = """
from algorist.evaluation.doors import Probed, exporter, probe
from algorist.models.loaders import Loader, loader


@loader("shelf")
class Shelf(Loader):
    def place(self, name, revision):
        return {model!r} if name == "shelf:1" else None

    def advice(self, name):
        return "the shelf has one model: model.name=shelf:1" if name.startswith("shelf:") else ""


@exporter("count")
def count(artifact, folder, task):
    folder.mkdir(parents=True)
    (folder / f"{{task}}.txt").write_text(str(len(artifact.samples)))
    return folder / f"{{task}}.txt"


@probe("digits")
def digits(engine, tokenizer, problems, on_progress):
    return Probed({{"n": len(problems)}}, [], [f"{{len(problems)}} problems"])
"""


def test_a_source_of_models_an_export_and_a_probe_of_a_file(tmp_path: Path, verb: Any) -> None:
    policy = tiny_policy()
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "doors.py"
    file.write_text(DOORS.format(model=str(tmp_path / "model")))
    own = (f"plugins=[{file}]", "sft.learning_rate=1e-4", "grpo.enabled=false", "run_name=r")
    run = str(run_recipe(recipe_of(tmp_path, *own, "model.name=shelf:1"), display=Quiet()).folder.path)
    code, _, errors = verb("eval", run, "--limit", "2", "--export", "count", str(tmp_path / "out"))
    assert code == 0, errors
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["6"]  # greedy and two sampled
    code, output, errors = verb("eval", run, "--limit", "2", "--probe", "digits")
    assert code == 0 and "2 problems" in output, errors
    code, _, errors = verb("eval", run, "--probe", "digit")
    assert code == 2 and "unknown probe 'digit'. Did you mean 'digits'?" in errors
    with pytest.raises(ConfigError, match=r"(?s)cannot load the model 'shelf:2'.*the shelf has one model"):
        run_recipe(recipe_of(tmp_path, *own, "model.name=shelf:2", "run_name=s"), display=Quiet())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "def check(self, plan): raise KeyError('x')",
            r"own.py:5 raised KeyError: 'x' (the traceback: add --debug)",
        ),
        ("def check(self, plan): raise SystemExit(0)", "own.py:5 raised SystemExit: 0"),
        ("def check(self, plan): return 'too small'", "'wrong': check() returned str; expected Iterable"),
        ("def batch(self, batch, policy): return None", "'wrong': batch() returned NoneType; expected Batch"),
        (
            "def groups(self, sampled, sampler): return []",
            "'wrong': groups() returned list; expected NoneType",
        ),
        (
            "def seen(self, event): from algorist.training.extension import Control; return Control(metrics={'x': 'text'})",
            "extension 'wrong': seen() returned metrics that are not numbers",
        ),
        ("def problems(self, sampled, sampler): sampled.problems = []", "'wrong': problems() left 0 of 4"),
        ("def loss(self, inputs): return inputs.terms", "'wrong': loss() returned list; expected NoneType"),
        ("def open(self, run): return 1", "'wrong': open() returned int; expected Callable or NoneType"),
        (
            "def state_dict(self): import threading; return {'l': threading.Lock()}",
            "extension 'wrong': what state_dict() returned cannot be kept in a checkpoint (cannot pickle",
        ),
        ("def state_dict(self): return {'r': self.recipe}", "(an object of another kind); expected tensors"),
    ],
)
def test_a_hook_that_raises_or_returns_something_else_is_named(
    tmp_path: Path, verb: Any, body: str, message: str
) -> None:
    lines = ["from algorist import Extension, extension", "@extension", "class Wrong(Extension):"]
    (tmp_path / "own.py").write_text("\n".join([*lines, "    name = 'wrong'", f"    {body}"]))
    settings = ("plugins=[own.py]", "sft.enabled=false", "eval.enabled=false", "grpo.save_steps=1")
    code, _, errors = verb("run", "smoke-cpu", *settings)
    assert (code, message in errors) == (2, True), errors


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "engine 'own': its function returned NoneType; expected an object with name"),
        ("return Own(None)", "engine 'own' returned NoneType None; expected 4 groups of 4 completions"),
        ("return Own([['a'] * 4] * 4)", "engine 'own' returned list [['a', 'a', 'a', 'a']"),
        ("return Own([])", "engine 'own' returned groups of sizes []; expected 4 groups"),
    ],
)
def test_what_an_own_engine_returns_is_looked_at(tmp_path: Path, verb: Any, body: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        "from algorist.rollouts.engines import engine\n"
        "class Own:\n    name = 'own'\n    def __init__(self, made): self.made = made\n"
        "    def generate(self, prompts, group_size, params, turns=None): return self.made\n"
        f"@engine('own')\ndef make(model, tokenizer, settings):\n    {body}\n"
    )
    settings = ("plugins=[own.py]", "sft.enabled=false", "eval.enabled=false", "grpo.engine=own")
    code, _, errors = verb("run", "smoke-cpu", *settings)
    assert (code, message in errors) == (2, True), errors


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def parse(self, text): return None", "'own': parse is None; expected"),
        ("def parse(self, text): return Parsed('1', 5, True)", "'own': parse's answer is 5; expected"),
        ("def render(self, question): return None", "'own': render is None; expected"),
        ("def demonstrate(self, reasoning, answer): return 5", "'own': demonstrate is 5; expected"),
        ("def parse(self, text): raise KeyError('x')", "KeyError in own.py:4: 'x'"),
    ],
)
def test_an_own_prompt_format_is_tried(tmp_path: Path, verb: Any, body: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        "from algorist.prompts import PromptFormat, Tags, add_format\n"
        f"from algorist.types import Parsed\nclass Own(PromptFormat):\n    {body}\n"
        "add_format(Own(name='own', tags=Tags('[w]', '[/w]', '[r]', '[/r]')))\n"
    )
    code, _, errors = verb("recipes", "show", "smoke-cpu", "plugins=[own.py]", "prompt.format=own")
    assert (code, message in errors) == (2, True), errors


def test_a_plugin_that_ends_the_program_is_named(tmp_path: Path, verb: Any) -> None:
    (tmp_path / "own.py").write_text("import sys\nsys.exit(0)\n")
    code, _, errors = verb("recipes", "show", "smoke-cpu", "plugins=[own.py]")
    assert code == 2 and "own.py:2 raised SystemExit: 0" in errors


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("None", "dataset 'own' made None; expected a list of Problem"),
        ("['a']", "dataset 'own' made 'a'; expected"),
        ("[Problem('1', 'q', 5)]", "each field of it a text: answer"),
        ("(Problem(str(n), f'q{n}', str(n)) for n in range(3))", ""),
    ],
)
def test_what_an_own_dataset_makes_is_looked_at(tmp_path: Path, verb: Any, made: str, message: str) -> None:
    lines = ["from algorist.data import dataset", "from algorist.types import Problem", "@dataset('own')"]
    (tmp_path / "own.py").write_text("\n".join([*lines, f"def own(source): return {made}"]))
    (tmp_path / "r.yaml").write_text("extends: smoke-cpu\nplugins: [own.py]\ndata: {train: {name: own}}\n")
    code, _, errors = verb("run", "r.yaml", "--only", "grpo", "grpo.batch_size=64")
    assert (code, message in errors) == (2, True), errors

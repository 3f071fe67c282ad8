"""Switches of a chat template are in force wherever a prompt is made, and what is trained on is what is sampled with."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from algorist.config import load_recipe
from algorist.diagnosis.tokenization import tokenization_facts
from algorist.errors import ConfigError
from algorist.evaluation.artifact import read_artifact
from algorist.models.load import PLAIN_TEMPLATE, Policy, load_tokenizer
from algorist.models.tiny import CHATML
from algorist.prompts import FORMATS, PromptFormat, get_format
from algorist.prompts.attached import Asked, attached, own_template
from algorist.prompts.chat import attach, encode_prompt, render_prompt
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.collect import collect
from algorist.runs.pipeline import run_recipe
from algorist.store.read import query
from algorist.training.log_probs import LogProbs
from algorist.training.sft import demonstrations, tokenize_demonstrations
from algorist.types import Problem
from tests.tiny import PROBLEMS, TOKENIZER, PlainEngine, make_model, make_trainer

THINKING = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ 'assistant: ' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
)
OFF = replace(get_format("reasoning_answer"), template_kwargs={"enable_thinking": False})
DATA = ["--data", "arithmetic,params={count: 4, seed: 3}"]


def tokenizer(template: str = THINKING) -> Any:
    made = copy.deepcopy(TOKENIZER)
    made.chat_template = template
    return made


def test_a_switch_changes_the_prompt_and_an_unknown_one_is_refused() -> None:
    with_thinking = render_prompt(get_format("reasoning_answer"), tokenizer(), "1+1")
    assert render_prompt(OFF, tokenizer(), "1+1") == with_thinking + "<think></think>"
    with pytest.raises(
        ConfigError, match=r"enable_thinkin, which .* never reads. Did you mean 'enable_thinking'"
    ):
        render_prompt(replace(OFF, template_kwargs={"enable_thinkin": False}), tokenizer(), "1+1")
    for word in ("think", "role", "defined"):  # of the template's text, an attribute, a test
        with pytest.raises(ConfigError, match=f"has {word}, which"):
            render_prompt(replace(OFF, template_kwargs={word: False}), tokenizer(), "1+1")
    with pytest.raises(
        ConfigError, match=r"tools\.format=chat needs a chat template .*; take tools\.format=tags"
    ):
        render_prompt(replace(OFF, template_kwargs={"tools": []}), tokenizer(), "1+1")
    with pytest.raises(ConfigError, match="raw text and uses no chat template"):
        render_prompt(replace(get_format("r1_zero"), template_kwargs={"a": 1}), tokenizer(), "1+1")
    with pytest.raises(ConfigError, match="add_generation_prompt, which every prompt sets itself"):
        load_recipe("smoke-cpu", ["prompt.template_kwargs={add_generation_prompt: false}"])


def test_a_template_without_a_system_role_names_the_way_out() -> None:
    form, refusing = get_format("reasoning_answer"), tokenizer(NO_SYSTEM)
    with pytest.raises(
        ConfigError, match=r"refuses the prompt \(System role not supported\); prompt.system_role=user"
    ):
        render_prompt(form, refusing, "1+1")
    asked = render_prompt(replace(form, system_role="user"), refusing, "1+1")
    assert asked == f"user: {form.system_prompt}\n\n1+1\n"


def plain(folder: Path, *before: dict[str, str], **switches: Any) -> str:
    """Render a question as any program does that knows nothing of algorist."""
    messages = [*before, {"role": "user", "content": "1+1"}]
    loaded = AutoTokenizer.from_pretrained(folder)
    return str(loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switches))


FORMS = {name: get_format(name) for name in FORMATS.names()} | {
    "quotes": get_format(
        "reasoning_answer", system_prompt='It\'s "so": {{ x }} {% y %} \\n, é 💡\n<answer> <reasoning>'
    ),
    "no system prompt": get_format("working_solution", system_prompt=""),
    "own tags": get_format("think_answer", tags={"answer_open": "<a>", "answer_close": "</a>"}),
    "switch": OFF,
    "system role user": replace(get_format("reasoning_answer"), system_role="user"),
}
TEMPLATES = {
    "plain": PLAIN_TEMPLATE,
    "thinking": THINKING,
    "new line": CHATML + "\n",
    "begins with a new line": "\n" + CHATML,
    "bos": "{{ bos_token }}" + CHATML,
    "S1": load_recipe("sft-grpo-dapo").recipe.model.chat_template,
    "no system": NO_SYSTEM,
}


def takes(template: str, form: PromptFormat) -> bool:
    return template != "no system" or form.system_role == "user" or not form.system_prompt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "template"), [(n, t) for t in TEMPLATES for n, form in FORMS.items() if takes(t, form)]
)
def test_a_saved_tokenizer_asks_as_in_training_wherever_it_is_loaded(
    name: str, template: str, tmp_path: Path
) -> None:
    form, made = FORMS[name], tokenizer(TEMPLATES[template])
    form = form if template == "thinking" else replace(form, template_kwargs={})
    trained = render_prompt(form, made, "1+1")
    for _ in range(2):  # a model that is trained twice
        attach(made, Asked(form, 9))
        made.save_pretrained(tmp_path)
        assert plain(tmp_path) == trained
        made = load_tokenizer(str(tmp_path))
        assert own_template(made) == TEMPLATES[template] and render_prompt(form, made, "1+1") == trained
    others = [get_format("question_only"), get_format("reasoning_answer", system_prompt="")]
    for other in others:  # nothing of the first training is in the prompts of another one
        assert render_prompt(other, made, "1+1") == render_prompt(
            other, tokenizer(TEMPLATES[template]), "1+1"
        )
    if form.is_chat and form.system_role == "system" and template != "no system":
        own_words = plain(tmp_path, {"role": "system", "content": "Short."})
        assert "Short." in own_words and (not form.system_prompt or form.system_prompt not in own_words)


def test_a_tokenizer_that_adds_the_first_token_is_asked_with_it_once(tmp_path: Path) -> None:
    made = tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    made.add_special_tokens({"bos_token": "[bos]"})
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="[bos] $A", special_tokens=[("[bos]", made.bos_token_id)]
    )
    for form in (get_format("reasoning_answer"), get_format("r1_zero")):
        attach(made, Asked(form, 9))
        made.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        ids = loaded.apply_chat_template(
            [{"role": "user", "content": "1+1"}], add_generation_prompt=True, return_dict=False
        )
        assert ids == encode_prompt(form, made, "1+1") and ids.count(made.bos_token_id) == 1


def test_a_few_shot_prompt_shows_what_it_reads() -> None:
    form = get_format("few_shot")
    shown = str(form.render("What is 2 + 2?"))
    solved = [part.partition("Solution:")[2] for part in shown.split("Problem: ")[1:-1]]
    assert [form.parse(text.removeprefix(" <reasoning>")).answer for text in solved] == ["29", "12", "34"]
    assert shown.endswith("Problem: What is 2 + 2?\nSolution: <reasoning>")


@pytest.mark.parametrize(
    "form", [OFF, get_format("few_shot"), get_format("working_solution")], ids=lambda f: f.name
)
def test_what_is_trained_on_is_what_is_sampled_with_token_by_token(form: Any, tmp_path: Path) -> None:
    made, problem = tokenizer(), Problem("p", "1+1", "2", "1+1 = 2")
    (row,), _ = tokenize_demonstrations(demonstrations([problem], form, made), made, max_length=None)
    taught = [token for token in row["labels"] if token != -100]
    engine = PlainEngine(make_model().eval())
    sampling = SamplingParams(max_new_tokens=4, seed=1)
    (group,) = collect(engine, made, [problem], form, sampling, 2)
    asked = engine.calls[-1][0][0]
    assert row["input_ids"] == asked + taught and row["labels"][: len(asked)] == [-100] * len(asked)
    assert group.prompt_ids == asked == encode_prompt(form, made, "1+1")
    assert made.decode(taught) == form.demonstrate("1+1 = 2", "2") + made.eos_token


def test_grpo_trains_on_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    class Watched(LogProbs):
        def __call__(self, model: Any, batch: Any, *args: Any, **options: Any) -> Any:
            computed.append(batch)
            return super().__call__(model, batch, *args, **options)

    class Kept(PlainEngine):
        def generate(self, prompts: Any, *args: Any) -> Any:
            found = super().generate(prompts, *args)
            sampled.update(
                (tuple(p), tuple(c.token_ids)) for p, group in zip(prompts, found, strict=True) for c in group
            )
            return found

    computed: list[Any] = []
    sampled: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    model = make_model()
    trainer = make_trainer(tmp_path, model, engine=Kept(model), max_steps=1)
    trainer.log_probs.__class__ = Watched
    trainer.train()
    rows = [
        (tuple(batch.prompts[batch.prompt_of[i]]), tuple(completion))
        for batch in computed
        for i, completion in enumerate(batch.completions)
    ]
    assert rows and set(rows) <= sampled


def test_preflight_finds_prompts_that_are_not_those_of_sampling() -> None:
    policy, form = Policy(make_model(), tokenizer()), get_format("question_only")
    same = Problem(
        "a", "1+1", "2", extra={"prompt": render_prompt(form, policy.tokenizer, "1+1"), "response": "2"}
    )
    other = Problem("b", "1+1", "2", extra={"prompt": "1+1 is ", "response": "2"})
    assert "trained_otherwise" not in tokenization_facts(policy, form, PROBLEMS, [same])
    differs = tokenization_facts(policy, form, PROBLEMS, [same, other])["trained_otherwise"]
    assert differs.startswith("1 of 2 prompts of SFT differ") and "trained on ' is '" in differs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "t.jinja").write_text(THINKING)
    settings = ["threads=1", "sft.max_steps=2", "grpo.max_steps=1", f"model.chat_template={folder}/t.jinja"]
    settings += ["prompt.template_kwargs={enable_thinking: false}", f"output_dir={folder}", "run_name=r"]
    run_recipe(load_recipe("smoke-cpu", settings).recipe)
    return folder / "r"


@pytest.mark.slow
def test_a_run_its_evaluations_and_its_model_have_the_switch(
    run: Path, tmp_path: Path, output_of: Any
) -> None:
    prompts = [row["prompt"] for row in query(run, "select prompt from rollouts")]
    assert prompts and all(prompt.endswith("assistant: <think></think>") for prompt in prompts)
    asked = attached(run / "grpo" / "final")
    assert asked is not None and asked.prompt_format.template_kwargs == {"enable_thinking": False}
    told = [
        json.loads(output_of("eval", str(run), *DATA, "--json", *more))["evaluations"][0]
        for more in ([], ["--template", "enable_thinking=true"])
    ]
    names = [Path(entry["artifact"]).stem for entry in told]
    assert names[1] == f"{names[0]}-enable_thinking-true"
    switches = [read_artifact(run / "eval", name).protocol["template_kwargs"] for name in names]
    assert switches == [{"enable_thinking": False}, {"enable_thinking": True}]
    output_of("export", str(run), "--to", "given")
    assert plain(tmp_path / "given").endswith("assistant: <think></think>")
    assert plain(tmp_path / "given", enable_thinking=True).endswith("assistant: ")
    given = load_tokenizer(str(tmp_path / "given"))
    form = attached(given)
    assert form and render_prompt(form.prompt_format, given, "1+1").endswith("<think></think>")

"""Faults that independent checks planted without knowledge of the rules: each is named by its cause.

Small real runs; the cause comes first, whatever symptoms there are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from algorist.config import load_recipe
from algorist.diagnosis.diagnose import diagnose
from tests.conftest import Verb
from tests.runs.sums import Runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("registrations_undone_after_all")]

OWN = """
import torch
from algorist import loss
from algorist_grader import MATCHERS
from algorist_grader.matchers import Matcher


def flipped(rewards_PG):
    return -(rewards_PG - rewards_PG.mean(1, keepdim=True)) / (rewards_PG.std(1, keepdim=True) + 1e-4)


def noise(completions, **_):
    return torch.rand(len(completions), generator=torch.Generator().manual_seed(sum(map(len, completions)))).tolist()


CALLS = []


def annealed(completions, answer, **_):
    CALLS.append(len(completions))
    worth = max(0.0, 1 - len(CALLS) / 6)
    return [worth * (f"<answer>{gold}</answer>" in "".join(text.split())) for text, gold in zip(completions, answer)]


def indices(rewards_PG):
    order = rewards_PG.argsort(-1).float()  # of which the argsort would be the ranks
    return order - order.mean(-1, keepdim=True)


@loss("backwards", reduction="token-mean")
def backwards(log_probs, old_log_probs, advantages, mask):
    return advantages * (log_probs - old_log_probs).exp()


def with_unit(answer, gold, limits):
    same = answer.strip() == gold.strip() + " apples"
    return same, "equal_string" if same else "different"


if "with_unit" not in MATCHERS:
    MATCHERS.register("with_unit")(Matcher("with_unit", "the number and its unit", with_unit))
"""
PLUGIN = """
from dataclasses import replace
from algorist import Extension, extension


@extension
class FirstTokens(Extension):
    name = "first_tokens"

    @classmethod
    def takes_part(cls, recipe):
        return any("first_tokens" in str(plugin) for plugin in recipe.plugins)

    def batch(self, batch, policy):
        return replace(batch, advantages=batch.advantages * ((batch.mask.cumsum(1) <= 2) & batch.mask))
"""
MORE = """
from algorist import loss


def lenient(completions, answer, **_):
    texts = ["".join(text.split()) for text in completions]
    return [float(f"<answer>{gold}</answer>" in text or sum(map(ord, text)) % 2) for text, gold in zip(texts, answer)]


@loss("endings", reduction="token-mean")
def endings(log_probs, old_log_probs, advantages, mask):
    last = mask.cumsum(1) > mask.sum(1, keepdim=True) - 4
    return -advantages * (log_probs - old_log_probs).exp() * last
"""
SLOW = """
import torch

from algorist import Extension, extension


@extension
class Slow(Extension):
    name = "slow"

    @classmethod
    def takes_part(cls, recipe):
        return any("slow" in str(plugin) for plugin in recipe.plugins)

    def prepare(self, model, trainer):
        self.model, self.start = model, [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def seen(self, event):
        if event.kind == "step":
            for parameter, start in zip(self.model.parameters(), self.start):
                parameter.lerp_(start, 0.9)
"""
STILL = """
from algorist import loss


@loss("even", reduction="token-mean")
def even(log_probs, old_log_probs, advantages, mask):
    return -advantages * (log_probs - log_probs).exp()
"""
CHECKER = """
from algorist_grader import MATCHERS
from algorist_grader.matchers import Matcher


def any_number(answer, gold, limits):
    return any(character.isdigit() for character in answer), "number"


if "any_number" not in MATCHERS:
    MATCHERS.register("any_number")(Matcher("any_number", "any number", any_number))
"""
FORMAT = """
import re
from dataclasses import dataclass, replace

from algorist.prompts import PromptFormat, Tags, add_format

TAGS = Tags("<reasoning>", "</reasoning>", "<answer>", "</answer>")


@dataclass(frozen=True)
class Small(PromptFormat):
    def parse(self, text):
        read = super().parse(text)
        number = re.search("[0-4]", read.answer or "")
        return replace(read, answer=number[0] if number else "0")


@dataclass(frozen=True)
class Short(PromptFormat):
    def render(self, question):
        return super().render(question[:3])


add_format(Small(name="small", tags=TAGS))
add_format(Short(name="short", tags=TAGS))
"""
STOPS = """
from algorist import Extension, extension
from algorist.training.extension import Control


@extension
class Enough(Extension):
    name = "enough"

    @classmethod
    def takes_part(cls, recipe):
        return any("stops" in str(plugin) for plugin in recipe.plugins)

    def seen(self, event):
        return Control(stop=True) if event.kind == "step" and event.step >= 2 else None
"""
ONLY_RIGHT = """
def only_right(completions, answer, **_):
    texts = ["".join(text.split()) for text in completions]
    return [1.0 + len(text) / 1000 if f"<answer>{gold}</answer>" in text else None for text, gold in zip(texts, answer)]
"""
HALF = (
    PLUGIN.replace("first_tokens", "half")
    .replace("FirstTokens", "Half")
    .replace(
        "advantages=batch.advantages * ((batch.mask.cumsum(1) <= 2) & batch.mask)",
        "mask=batch.mask & (batch.mask.cumsum(1) > batch.mask.sum(1, keepdim=True) - 4)",
    )
)
SFT = ("sft.enabled=true", "grpo.enabled=false", "sft.max_steps=10")
EVALUATED = (
    "data.train={name: local, path: SEEN}", "eval.enabled=true", "eval.baseline=true", "data.eval={name: local, path: UNSEEN}",
)  # fmt: skip
FAULTS: dict[str, tuple[str, ...]] = {
    "negative_weight": ("rewards=[{name: correct, weight: -1}]",),
    "stop_string_cuts": ("grpo.stop_strings=['=']",),
    "questions_elsewhere": ("data.train={name: local, path: TOPICS, columns: {question: topic}}",),
    "matcher_refuses": ("plugins=[OWN]", "matcher=with_unit"),
    "advantage_turned": ("grpo.advantage=OWN:flipped",),
    "entropy_bonus_too_large": ("grpo.entropy_bonus=1",),
    "decay_too_strong": ("grpo.weight_decay=300",),
    "gradient_cut_away": ("grpo.max_grad_norm=1e-12",),
    "learning_rate_too_large": (
        "grpo.teacher={model: MODEL}", "rewards=[{name: correct, weight: 0}]", "grpo.group_size=1",
        "grpo.learning_rate=0.5", "grpo.max_steps=12",
    ),
    "correct_is_drowned": ("rewards=[{name: correct, weight: 0.05}, {name: 'OWN:noise', weight: 5}]",),
    "penalty_too_large": ("grpo.beta=100",),
    "warm_up_too_long": ("grpo.warmup_steps=100000",),
    "reward_pays_others": (
        "rewards=[{name: 'OWN:noise', weight: 1}, {name: correct, weight: 0}]", "grpo.max_steps=12",
    ),
    "advantage_disagrees": ("grpo.advantage=OWN:indices", "grpo.max_steps=12"),
    "plugin_moves_advantages": ("plugins=[PLUGIN]", "grpo.max_steps=12"),
    "own_loss_breaks": ("plugins=[OWN]", "grpo.loss=OWN:backwards", "grpo.max_steps=12"),
    "optimizer_hardly_moves": ("grpo.optim=sgd", "grpo.learning_rate=1e-5"),
    "other_golds": ("data.train={name: local, path: SHIFTED}",),
    "one_question": ("data.train={name: local, path: SAME}",),
    "problems_of_another_kind": ("model.name=CAREFUL", "eval.enabled=true", "data.eval={name: local, path: OTHERS}"),
    "updates_unbounded": ("grpo.num_iterations=8", "grpo.loss={clip_low: 0.999, clip_high: 100}", "grpo.max_steps=12"),
    "adapter_hardly_counts": ("model.lora={rank: 64, alpha: 1}", "grpo.learning_rate=1e-4", "grpo.max_steps=12"),
    "reward_changes": ("rewards=['OWN:annealed']", "grpo.max_steps=12", "grpo.learning_rate=1e-5"),
    "cut_questions": ("data.train={name: local, path: CUT}",),
    "teacher_flattened": (
        "grpo.teacher={model: MODEL, temperature: 8, loss: full}", "rewards=[{name: correct, weight: 0}]", "grpo.group_size=1",
        "grpo.max_steps=16",
    ),
    "earlier_answers": (*SFT, "data.sft={name: local, path: EARLIER}"),
    "learned_by_heart": (
        *SFT, "sft.max_steps=60", "data.sft={name: local, path: TWENTY}", "eval.enabled=true",
        "data.eval={name: local, path: OTHERS}",
    ),
    "held_out_leaks": (
        *SFT, "data.sft={name: local, path: SHUFFLED}", "eval.enabled=true", "data.eval={name: local, path: TWENTY}",
    ),
    "stated_answers": ("data.train={name: local, path: STATED}",),
    "prompt_changed": ("prompt.tags={answer_open: '[', answer_close: ']'}",),
    "sampled_too_hot": (*EVALUATED, "grpo.temperature=2.5"),
    "evaluation_cut": (*EVALUATED, "eval.max_completion_tokens=4"),
    "problems_by_heart": (*EVALUATED, "data.train.limit=8", "grpo.max_steps=24"),
    "few_batches": ("grpo.num_iterations=12", "grpo.max_steps=12"),
    "golds_in_words": (*EVALUATED, "data.train={name: local, path: WORDS}"),
    "wrong_not_compared": ("rewards=['ONLY:only_right']", "grpo.max_steps=12"),
    "tokens_left_out": ("plugins=[HALF]", "grpo.max_steps=12"),
    "answers_misread": (*EVALUATED, "plugins=[FORMATS]", "prompt.format=small"),
    "question_not_asked": (*EVALUATED, "plugins=[FORMATS]", "prompt.format=short"),
    "matcher_accepts": ("plugins=[CHECKER]", "matcher=any_number"),
    "answers_without_steps": (
        *SFT, "sft.max_steps=240", "data.sft={name: local, path: ALONE}", "eval.enabled=true", "data.eval={name: local, path: UNSEEN}",
    ),
    "teacher_is_the_start": ("grpo.teacher={model: MODEL}",),
    "cut_solutions": (*SFT, "data.sft={name: local, path: NARROW}"),
    "sft_lowers_accuracy": (
        *SFT, "sft.max_steps=60", "data.sft={name: local, path: ONE_MORE}", "eval.enabled=true", "eval.baseline=true", "data.eval={name: local, path: UNSEEN}",
        "grpo.enabled=false",
    ),
    "wrong_sums": (*SFT, "data.sft={name: local, path: ASKEW}"),
    "demonstrations_left_out": (*SFT, "data.sft={name: local, path: LONG}", "sft.max_length=64"),
    "disputed_golds": (
        "model.name=CAREFUL", "data.train={name: local, path: DISPUTED}", "grpo.learning_rate=1e-6", "grpo.max_steps=12",
    ),
    "golds_written_otherwise": (*EVALUATED, "data.train={name: local, path: SCIENTIFIC}"),
    "reward_pays_wrong": ("rewards=['MORE:lenient']", "grpo.learning_rate=1e-5", "grpo.max_steps=12"),
    "plugin_moves_weights": ("plugins=[SLOW]", "grpo.max_steps=12"),
    "tokens_left_out/own_loss": ("plugins=[MORE]", "grpo.loss=MORE:endings", "grpo.learning_rate=1e-4", "grpo.max_steps=12"),
    "plugin_ends_run": ("plugins=[STOPS]", "grpo.max_steps=12"),
    "weights_unchanged/no_gradient": ("plugins=[STILL]", "grpo.loss=even", "grpo.max_steps=12"),
    "one_question/one_answer": ("data.train={name: local, path: ELEVENS}",),
    "wrong_sums/order": (*SFT, "data.sft={name: local, path: REVERSED}"),
    "held_out_falls": (*EVALUATED, "data.train={name: local, path: MISTAKEN}", "grpo.max_steps=24"),
}  # fmt: skip
"""The rule that names the cause, perhaps with a variant → what is planted."""


WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()


@pytest.fixture(scope="module")
def places(runs: Runs) -> dict[str, Path]:
    own, topics = runs.folder / "own_parts.py", runs.folder / "topics.jsonl"
    own.write_text(OWN, encoding="utf-8")
    rows = [json.loads(line) | {"topic": "addition"} for line in runs.train.read_text().splitlines()]
    topics.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    plugin, same, stated = (runs.folder / name for name in ("first_tokens.py", "same.jsonl", "stated.jsonl"))
    plugin.write_text(PLUGIN, encoding="utf-8")
    same.write_text("\n".join(map(json.dumps, rows[:1] * 100)) + "\n", encoding="utf-8")
    copied = [row | {"question": f"{row['question']} Answer: {row['answer']}"} for row in rows]
    stated.write_text("\n".join(map(json.dumps, copied)) + "\n", encoding="utf-8")
    kinds = runs.folder / "other_kinds.jsonl"
    longer = [
        row | {"question": f"1 + {row['question']}", "answer": str(int(row["answer"]) + 1)} for row in rows
    ]
    kinds.write_text("\n".join(map(json.dumps, longer)) + "\n", encoding="utf-8")
    shifted = runs.folder / "golds_of_others.jsonl"
    others = [row | {"answer": str(int(row["answer"]) + 1)} for row in rows]
    shifted.write_text("\n".join(map(json.dumps, others)) + "\n", encoding="utf-8")
    cut, earlier, twenty = (runs.folder / f"{name}.jsonl" for name in ("cut", "earlier", "twenty"))
    names = ["Leonardo", "Katharina", "Benjamin", "Mirjam", "Stefano", "Oliver"]
    stories = [
        row
        | {
            "question": f"On this fine day an old friend of ours, {names[n % 6]}, asks: {row['question']}"[
                :44
            ]
        }
        for n, row in enumerate(rows)
    ]
    cut.write_text("\n".join(map(json.dumps, stories)) + "\n", encoding="utf-8")
    onward = [
        row | {"solution": f"{row['solution']}\n{row['answer']} + 9 = {int(row['answer']) + 9}"}
        for row in rows
    ]
    earlier.write_text("\n".join(map(json.dumps, onward)) + "\n", encoding="utf-8")
    twenty.write_text("\n".join(map(json.dumps, rows[:20])) + "\n", encoding="utf-8")
    half, words, mistaken = (runs.folder / name for name in ("half.py", "words.jsonl", "mistaken.jsonl"))
    only = runs.folder / "only_right.py"
    half.write_text(HALF, encoding="utf-8")
    formats, stops, checker = (runs.folder / name for name in ("formats.py", "stops.py", "checker.py"))
    alone = runs.folder / "alone.jsonl"
    checker.write_text(CHECKER, encoding="utf-8")
    formats.write_text(FORMAT, encoding="utf-8")
    stops.write_text(STOPS, encoding="utf-8")
    only.write_text(ONLY_RIGHT, encoding="utf-8")
    seen, unseen = (runs.folder / f"{name}.jsonl" for name in ("seen", "unseen"))
    apart = [row["question"] < "3" for row in rows]  # by the first number
    parts = {seen: [r for r, held in zip(rows, apart, strict=True) if not held]}
    parts[unseen] = [r for r, held in zip(rows, apart, strict=True) if held]
    parts[words] = [row | {"answer": WORDS[int(row["answer"])], "solution": ""} for row in parts[seen]]
    slipped = [
        row | {"answer": str(int(row["answer"]) + n % 2), "solution": ""} for n, row in enumerate(parts[seen])
    ]
    parts[mistaken] = slipped
    narrow, one_more = (runs.folder / f"{name}.jsonl" for name in ("narrow", "one_more"))
    parts[narrow] = [
        row
        | {"solution": f"First we add the two of them: {row['solution']}"[:32] if n % 2 else row["solution"]}
        for n, row in enumerate(rows)
    ]
    parts[one_more] = [
        row
        | {
            "solution": f"{row['question'].split(' =')[0]} + 1 = {int(row['answer']) + 1}",
            "answer": str(int(row["answer"]) + 1),
        }
        for row in parts[seen]
    ]
    askew, long, disputed = (runs.folder / f"{name}.jsonl" for name in ("askew", "long", "disputed"))
    parts[askew] = [
        row | {"solution": f"{row['question'].split(' =')[0]} = {int(row['answer']) + n % 2}"}
        for n, row in enumerate(rows)
    ]
    parts[long] = [
        row | {"solution": f"{'We add the two of them. ' * 9 * (n % 4 > 0)}{row['solution']}"}
        for n, row in enumerate(rows)
    ]
    scientific, slow = runs.folder / "scientific.jsonl", runs.folder / "slow.py"
    slow.write_text(SLOW, encoding="utf-8")
    still, elevens, backwards = (
        runs.folder / name for name in ("still.py", "elevens.jsonl", "reversed.jsonl")
    )
    still.write_text(STILL, encoding="utf-8")
    parts[elevens] = [row | {"answer": "11", "solution": ""} for row in rows]
    parts[backwards] = [
        row
        | {
            "solution": f"{int(row['answer']) + 40} + 9 = {int(row['answer']) + 49}\n{row['answer']} + 40 = {int(row['answer']) + 40}\n"
            f"{row['question'].split(' =')[0]} = {row['answer']}",
            "question": f"40 and 9 more than {row['question']}",
            "answer": str(int(row["answer"]) + 49),
        }
        for row in rows
    ]
    own_too = runs.folder / "more_parts.py"
    own_too.write_text(MORE, encoding="utf-8")
    parts[scientific] = [
        row | {"answer": f"{int(row['answer']) + 1}E+00", "solution": ""} for row in parts[seen]
    ]
    parts[disputed] = [
        row | {"answer": str(int(row["answer"]) + 3 * (row["question"][0] > "3")), "solution": ""}
        for row in rows
    ]
    parts[alone] = [row | {"solution": str(int(row["answer"]) + 1)} for row in parts[seen]]
    for place, part in parts.items():
        place.write_text("\n".join(map(json.dumps, part)) + "\n", encoding="utf-8")
    more = {
        "NARROW": narrow,
        "ONE_MORE": one_more,
        "ASKEW": askew,
        "LONG": long,
        "DISPUTED": disputed,
        "SCIENTIFIC": scientific,
        "SLOW": slow,
        "STILL": still,
        "ELEVENS": elevens,
        "REVERSED": backwards,
        "MORE": own_too,
        "FORMATS": formats,
        "STOPS": stops,
        "ALONE": alone,
        "CHECKER": checker,
        "ONLY": only,
        "WORDS": words,
        "MISTAKEN": mistaken,
        "HALF": half,
        "UNSEEN": unseen,
    }
    more |= {"CUT": cut, "EARLIER": earlier, "TWENTY": twenty, "SHUFFLED": runs.train}
    return more | {"OWN": own, "TOPICS": topics, "MODEL": runs.model, "CAREFUL": runs.careful, "PLUGIN": plugin, "SAME": same, "STATED": stated,
            "SHIFTED": shifted, "OTHERS": kinds, "SEEN": seen}  # fmt: skip


def planted(name: str, places: dict[str, Path]) -> list[str]:
    """Return the overrides of a fault, with the places of its files."""
    changes = list(FAULTS[name])
    for word, place in places.items():
        changes = [change.replace(word, str(place)) for change in changes]
    return changes


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_by_its_cause(name: str, runs: Runs, places: dict[str, Path]) -> None:
    run = runs(f"planted_{name.replace('/', '_')}", "grpo.max_steps=8", *planted(name, places))
    first, *others = diagnose(run)
    assert first.name == name.partition("/")[0] and not others, [
        (finding.name, finding.evidence) for finding in (first, *others)
    ]
    assert "{" not in first.sentence
    load_recipe(str(run / "config.yaml"), first.change)


def test_held_out_problems_of_another_dataset_may_be_harder(runs: Runs, places: dict[str, Path]) -> None:
    run = runs("planted_sampled_too_hot", "grpo.max_steps=8", *planted("sampled_too_hot", places))
    copy = runs.folder / "another_dataset"
    shutil.copytree(run, copy)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config["data"]["eval"]["name"] = "aime"
    (copy / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert "sampled_too_hot" not in {finding.name for finding in diagnose(copy)}


def test_the_command_says_what_moved_the_weights_and_what_would_show_help(
    runs: Runs, places: dict[str, Path], verb: Verb
) -> None:
    run = runs("planted_advantage_turned", "grpo.max_steps=8", *planted("advantage_turned", places))
    lines = verb("diagnose", str(run))[1].splitlines()
    assert lines[0] == "what moved the weights, median over the steps:"
    assert any("agreement with correctness: advantage -" in line for line in lines[:5])
    assert any(
        line.strip().startswith("it helped if the advantage agrees with correctness") for line in lines
    )


def test_a_run_that_stands_still_is_not_called_free_of_faults(runs: Runs, verb: Verb) -> None:
    run = runs("still", "grpo.learning_rate=1e-6", "grpo.max_steps=12")
    assert diagnose(run) == []
    code, output, _ = verb("diagnose", str(run))
    assert code == 0 and "no known fault" not in output
    assert "not explained" in output and "the accuracy did not rise: 0." in output


@pytest.mark.parametrize("size", [8, 1])
def test_a_teacher_alone_is_no_fault(size: int, runs: Runs, verb: Verb) -> None:
    """Equal rewards are no symptom where the teacher is what teaches; groups of one count as something to judge."""
    run = runs(
        f"teacher_{size}", f"grpo.teacher={{model: {runs.careful}}}", "rewards=[{name: correct, weight: 0}]",
        f"grpo.group_size={size}", "grpo.max_steps=24", "grpo.learning_rate=3e-4",
    )  # fmt: skip
    assert [finding.name for finding in diagnose(run)] == []
    assert "too little to judge" not in verb("diagnose", str(run))[1]
    log = (run / "training.log").read_text(encoding="utf-8")
    assert "no_signal" not in log and "flat_reward" not in log


@pytest.mark.parametrize(
    ("name", "changes"),
    {
        "lora": ("model.lora={rank: 8, alpha: 16}", "grpo.learning_rate=3e-3"),
        "cispo": ("grpo.loss=cispo", "grpo.num_iterations=2", "grpo.beta=0.02", "grpo.learning_rate=3e-4"),
        "small_terms": ("grpo.beta=0.02", "grpo.entropy_bonus=0.002", "grpo.learning_rate=3e-4"),
    }.items(),
)
def test_healthy_variants_are_left_in_peace(name: str, changes: tuple[str, ...], runs: Runs) -> None:
    assert [finding.name for finding in diagnose(runs(f"variant_{name}", *changes))] == []

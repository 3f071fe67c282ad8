"""The table of rules: what is known before training, what extensions bring, and that every proposed line is one that ``run`` takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from algorist.config import load_recipe
from algorist.config.load import parse_override
from algorist.diagnosis.diagnose import find_causes, of_evaluation
from algorist.diagnosis.rule import FACTS, Facts, Share, apply, make_rule
from algorist.diagnosis.rules import all_rules
from algorist.diagnosis.settings import Settings
from algorist.diagnosis.signals import Signals
from algorist.extensions.ledger.rules import updates_unbounded

RECIPE = load_recipe("quickstart").recipe
SAMPLED: dict[str, Any] = {
    "asked_otherwise": {"prompt.format": "boxed", "prompt.system_prompt": ""},
    "limit": 96, "where": "24 problems × 8", "completions": 192, "silent": 192, "graded": 192, "reasons": {"no_answer": 192},
    "useful_share": {"4": 0.1, "8": 0.2, "16": 0.4}, "useful_here": ("8", 0.2), "pass_rate": Share(0.1), "failing_reward": "own",
    "failures": {"own": 192}, "learning_rate": 1e-4, "truncated": Share(1), "truncated_answered": Share(1), "end_of_turn": Share(0),
    "first_failure": "ValueError: no", "context": 128, "memory_steps": ["sft is planned to take 9 of 8 GB"],
    "memory_change": {"sft.gradient_checkpointing": True, "sft.batch_size": 2, "sft.gradient_accumulation_steps": 8},
    "ended": {"step": 4, "checkpoint": "checkpoint-4", "ended": {"reason": "collapse", "why": "kl", "step": 9}},
    "rewards_from_to": "0 to 0", "groups": 24, "opened_tag": "<thought>", "control_example": "<|im_end|> in p1", "steps": 3,
    "evening": {"grpo.max_steps": 12}, "do_not_fit": 3, "looked_at": 12, "longest": 70,
}  # fmt: skip
"""Plausible values of the facts that sentences and changes read."""
START: dict[str, dict[str, Any]] = {
    "does_not_fit": {
        "memory_steps": ["sft is planned to take 9 of 8 GB"],
        "memory_change": {"sft.batch_size": 2},
    },
    "takes_too_long": {
        "lasts_s": 90_000.0,
        "lasts": "25 hours (GRPO 23 hours, evaluations 2.1 hours)",
        "half_of_it": "grpo.max_steps=50",
        "evening": {"grpo.max_steps": 12, "data.eval.limit": 90},
        "laptop": True,
    },
    "tags_lost": {"lost_tags": "<answer>"},
    "ids_without_embeddings": {"outside": 3, "embeddings": 100, "highest_id": 104, "looked_at": 12},
    "prompts_changed": {"changed_prompts": 2, "changed_text": "what is ¿?", "looked_at": 12},
    "start_twice": {"start_token": "<s>"},
    "system_prompt_lost": {"system_prompt_lost": True},
    "template_opens_a_tag": {"opened_tag": "<think>"},
    "control_tokens_in_text": {"control_tokens": 2, "control_example": "<|im_end|> in p1"},
    "warm_up_too_long": {"steps": 3},
    "end_in_prompts": {"end_token": "</s>"},
    "sft_prompts_differ": {"trained_otherwise": "2 of 12 prompts of SFT differ"},
    "reward_hangs": {"hanging_reward": "own", "first_failure": "longer than 0.3 s"},
    "broken_text": {"broken_characters": Share(0.2)},
    "prompts_too_long": {"do_not_fit": 3, "looked_at": 12, "longest": 70, "context": 128, "limit": 96},
    "golds_unreadable": {"golds_unread": 0.5, "gold_example": "p1: see figure"},
    "few_useful_groups": {
        "useful_share": {"4": 0.1, "8": 0.2},
        "useful_here": ("8", 0.2),
        "pass_rate": Share(0.0),
    },
}
"""Rule → the least that preflight must know for it."""


def look(values: dict[str, Any], stage: str = "grpo") -> list[Any]:
    settings = Settings(RECIPE.model_dump())
    views = [Facts(settings, values if each == stage else {}, stage=each) for each in ("grpo", "sft")]
    return apply(list(all_rules().values()), *views)


@pytest.mark.parametrize("name", START)
def test_what_preflight_knows_names_the_fault_and_nothing_else(name: str) -> None:
    (finding,) = look(START[name])
    assert finding.name == name and finding.sentence and "{" not in finding.sentence
    assert json.loads(json.dumps(finding.as_dict()))["explanation"] == finding.sentence
    load_recipe("quickstart", finding.change)


@pytest.mark.parametrize("name", list(all_rules()))
def test_every_line_of_every_rule_is_one_that_run_takes(name: str) -> None:
    rule = all_rules()[name]
    facts = Facts(Settings(RECIPE.model_dump()), SAMPLED, stage=rule.stages[0])
    lines, before = facts.settings.changed(rule.changes(facts))
    assert len(lines) == len(before)
    for line in lines:
        key, value = parse_override(line)
        assert key and (value is not None or line.endswith("=null")), line
    load_recipe("quickstart", lines)


def test_every_rule_is_whole() -> None:
    rules = all_rules()
    for name, rule in rules.items():
        assert set(rule.explains) <= set(rules), name
        unknown = [fact for fact in rule.facts if fact not in FACTS and "." not in fact and "/" not in fact]
        assert not unknown, f"{name}: {unknown}"
        assert "**Recognised**" in rule.text or rule.room == "start", name
        assert "**Change**" in rule.text, name


def test_groups_need_not_differ_where_a_teacher_alone_teaches() -> None:
    settings = Settings(load_recipe("quickstart-distill").recipe.model_dump())
    facts = Facts(settings, START["few_useful_groups"], stage="grpo")
    assert apply([all_rules()["few_useful_groups"]], facts) == []


def test_an_unknown_fact_keeps_rules_silent() -> None:
    assert look({}) == []


@pytest.mark.parametrize(
    ("loss", "named"), [({"name": "cispo"}, False), ({"clip_low": 0.9, "clip_high": 100.0}, True)]
)
def test_only_a_clip_that_bounds_nothing_is_called_unbounded(loss: dict[str, Any], named: bool) -> None:
    """CISPO's usual cap of 5 is none, however the accuracy goes."""
    lines = [f"grpo.loss={json.dumps(loss)}", "grpo.num_iterations=2"]
    settings = Settings(load_recipe("quickstart", lines).recipe.model_dump())
    assert updates_unbounded(Facts(settings, {"accuracy_rise": 0.0})) is named


def test_one_fault_has_one_text_and_one_threshold_in_preflight_and_in_an_evaluation() -> None:
    row = {
        "completion": "1 + 1 is",
        "completion_tokens": 5,
        "reward": 0.0,
        "correct": False,
        "reason": "no_answer",
        "gold": "2",
    }
    rows = [{**row, "step": 0, "group": n, "problem_id": str(n), "truncated": n < 15} for n in range(20)]
    protocol = {"max_completion_tokens": 5, "prompt_format": "reasoning_answer"}
    (of_eval,) = of_evaluation(rows, protocol)
    values = {"truncated": Share(0.75), "limit": 5, "where": "20 completions"}
    (of_preflight,) = look(values)
    assert of_eval.name == of_preflight.name == "truncated" and of_eval.sentence == of_preflight.sentence
    assert of_eval.change == of_preflight.change == ("grpo.max_completion_tokens=20",)
    signals = Signals(settings=Settings({"grpo": {"max_completion_tokens": 5}}))
    for step in range(4):
        signals.add_rollouts(
            [{**r, "step": step, "group": n // 2, "problem_id": n // 2} for n, r in enumerate(rows)]
        )
    of_run = all_rules()["truncated"].look(Facts(signals.settings, signals=signals))
    assert of_run is not None and of_run.sentence == of_eval.sentence
    assert look({**values, "truncated": Share(0.69)}) == []


def test_an_evaluation_without_the_format_names_it() -> None:
    row = {
        "completion": "two",
        "completion_tokens": 1,
        "correct": False,
        "reason": "no_answer",
        "gold": "2",
        "truncated": False,
    }
    rows = [{**row, "step": 0, "group": n, "problem_id": str(n)} for n in range(6)]
    (finding,) = of_evaluation(rows, {"max_completion_tokens": 24, "prompt_format": "reasoning_answer"})
    assert finding.name == "nothing_answered"
    assert "the model does not write the prompt format reasoning_answer." in finding.sentence


TOOLS = {"tools": {"use": ["calculator"]}}
OF_EXTENSIONS: dict[str, tuple[dict[str, Any], list[dict[str, float]]]] = {
    "tool_fails": (TOOLS, [{"tools/failed_share": 0.95, "tools/called_share": 0.5}] * 6),
    "environment_fails": ({}, [{"tools/environment_failed_share": 1.0}] * 6),
    "calls_used_up": (
        {"tools": {"use": ["calculator"], "calls": 2}},
        [{"tools/refused_share": 0.4, "tools/called_share": 0.5, "tools/calls_per_rollout": 3.0}] * 6,
    ),
    "tool_unused": (TOOLS, [{"tools/called_share": 0.0}] * 6),
    "teacher_knows_nothing": ({}, [{"teacher/log_prob": -5.2, "teacher/reverse_kl": 3.0}] * 12),
    "teacher_kl_rises": ({}, [{"teacher/reverse_kl": 0.1 + 0.02 * n} for n in range(12)]),
    "teacher_is_worse": (
        {},
        [{"teacher/reverse_kl": 0.5 - 0.04 * n, "rewards/correct/mean": 0.8 - 0.03 * n} for n in range(12)],
    ),
    "teacher_shortens": (
        {"grpo": {"teacher": {"model": "big", "loss": "sampled"}}},
        [
            {
                "teacher/reverse_kl": 0.5 - 0.02 * n,
                "completions/mean_length": 60 / (1 + n),
                "rewards/correct/mean": 0.8 - 0.03 * n,
            }
            for n in range(12)
        ],
    ),
}
"""Rule of an extension → settings, and metrics of the logged steps."""


@pytest.mark.parametrize("name", OF_EXTENSIONS)
def test_extensions_bring_their_rules(name: str) -> None:
    settings, lines = OF_EXTENSIONS[name]

    def names(values: list[dict[str, float]], with_settings: dict[str, Any]) -> list[str]:
        signals = Signals(settings=Settings(with_settings))
        for step, line in enumerate(values):
            signals.add_metrics("grpo", step, line)
        return [finding.name for finding in find_causes(signals)]

    assert names(lines, settings) == [name]
    assert names(lines[:2], settings) == []
    healthy = {
        "tools/failed_share": 0.2,
        "tools/called_share": 0.5,
        "teacher/log_prob": -0.8,
        "teacher/reverse_kl": 0.2,
        "rewards/correct/mean": 0.8,
        "completions/mean_length": 60,
    }
    assert names([healthy] * 12, settings) == []
    if name == "tool_unused":
        assert names(lines, {}) == []


def test_a_student_on_its_way_to_its_teacher_is_left_in_peace() -> None:
    signals = Signals()
    for step in range(16):
        signals.add_metrics("grpo", step, {"teacher/log_prob": -6.0 + 0.15 * step})
    assert find_causes(signals) == []


def test_the_rewards_in_force_are_said_without_defaults() -> None:
    now = {"name": "correct", "weight": 1.0, "params": {}, "timeout_s": 30.0, "environment": []}
    _, before = Settings({"rewards": [now]}).changed({"rewards": [{"name": "well_formed"}]})
    assert before == ("[{name: correct}]",)


def test_an_own_rule_that_raises_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    def broken(facts: Facts) -> bool:
        raise KeyError("x")

    assert make_rule(broken, 1, facts="", says="").look(Facts(Settings())) is None
    assert "rule 'broken' raised KeyError('x'); it says nothing" in caplog.text


def test_what_was_learned_was_not_too_easy() -> None:
    values = {
        "all_right": Share(0.95),
        "same_reward": Share(0.97),
        "accuracy_by_step": "0: 0.4",
        "unpaid": False,
        "where": "8 groups",
    }
    assert [f.name for f in look({**values, "accuracy_rise": 0.3})] == ["all_right"]
    assert look({**values, "accuracy_rise": 6.0}) == []

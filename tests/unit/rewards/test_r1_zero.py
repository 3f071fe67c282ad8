"""What the original reward functions of CS336 pay on decorated integers, ours pay too; what is wrong stays unpaid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from algorist.extensions.published_rewards.systems import question_only_reward_fn, r1_zero_reward_fn
from algorist.rewards import build_rewards
from benchmarks.golds import golds

FORMS = [
    "{}", "{}^\\circ", "{}^{{\\circ}}", "{}\\%", "x = {}", "n={}", "{} \\text{{ cm}}", "\\text{{{}}}", "{} cm", "{} degrees", "{}.0", "\\${}", "{} inches",
    "{}\\text{{ cm}}^2", "{:,}", "{} \\text{{ units}}", "{}\\,\\text{{cm}}^3", "{{{}}}", "{}°",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [2, 18, 360, 1089, 10_000])
def test_decorated_integers(form: str, number: int) -> None:
    for text, paid in ((form.format(number), 1.0), (form.format(number + 1), 0.0)):
        tagged, box = f"so</think> <answer>{text}</answer>", f"so \\boxed{{{text}}}"
        assert r1_zero_reward_fn(tagged, str(number)) == {
            "format_reward": 1.0,
            "answer_reward": paid,
            "reward": paid,
        }
        assert question_only_reward_fn(box, number)["reward"] == paid
        assert build_rewards(["r1_zero"]).explain(tagged, str(number)).total == paid


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("8/2", "4"), ("2/4", "1/2"), ("x=8/2", "4"), ("\\frac{8}{2}", "4"), ("8/2 cm", "4"), ("4.5", "4"), ("4 or 5", "4"), ("-4", "4"), ("not 4", "4"),
        ("4 million", "4"), ("\\sqrt{16}", "4"), ("2+2", "4"), ("4 cm or 5 cm", "4"), ("4^\\circ", "5"), ("5 m", "5 s"), ("\\frac{2}{4}", "\\frac{1}{2}"),
    ],
)  # fmt: skip
def test_another_form_or_another_answer(answer: str, truth: str) -> None:
    assert r1_zero_reward_fn(f"so</think> <answer>{answer}</answer>", truth)["reward"] == 0.0
    assert question_only_reward_fn(f"\\boxed{{{answer}}}", truth)["reward"] == 0.0


def test_decorated_integers_among_the_answers_of_math(shared_data: Path) -> None:
    decoration = r"\\text\s*\{\s*[a-z][a-z. ]*\}(\^\{?\d\}?)?|\\mbox\s*\{[^{}]*\}(\^\d)?|\^\{?\\circ\}?|\\%|\\\$|\\!|^[a-z] *= *|\s"
    rows = []
    for gold in golds("math test"):
        plain = re.sub(r"^\\text\{([\d,]+)\}$", r"\1", re.sub(decoration, "", gold.strip()))
        plain = plain.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+", plain) else plain
        if re.fullmatch(r"-?\d+", plain) and plain != gold:
            rows.append((gold, plain))
    refused = [
        gold
        for gold, plain in rows
        if not r1_zero_reward_fn(f"so</think> <answer>{gold}</answer>", plain)["reward"]
    ]
    assert len(rows) >= 190
    assert [gold for gold in refused if not re.search(r"and|, *-?\d+\^", gold)] == []  # the others are lists

"""``compare --parts``: each wrong answer has one reason, and the reasons' parts add up to the gain."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from algorist.errors import DataError
from algorist.evaluation.estimators import paired_share_difference
from algorist.extensions.gain_parts.parts import MEANING, parts_of, reason, worked_out
from tests.conftest import Cli
from tests.unit.evaluation.test_compare import make_samples, write

WRONG: dict[str, list[dict[str, Any]]] = {
    "": [{"correct": True, "completion": "3 + 4 = 8"}],
    "format": [{"lenient": True, "completion": "3 + 4 = 7"}],
    "cut off": [{"truncated": True, "extracted": None, "completion": "3 + 4 = 7, 3 + 4 = 7, 3 +"}],
    "extraction": [
        {"completion": "Tom has 3 + 4 = 7 apples. <answer>3</answer>"},
        {"completion": "He pays $10 - $3 = $7 for them. The answer is 10.", "gold": "$7"},
        {"completion": "3 + 4 = 7", "extracted": "8", "truncated": True},
    ],
    "arithmetic": [
        {"completion": "Tom has 3 + 4 = 8 apples."},
        {"completion": "5 * 2 = 11 and 11 - 3 = 8"},  # the wrong result is used
        {"completion": r"$5 \times 2 = 11$, so $11 - 3 = 8$."},
        {"completion": "48/2=<<48/2=25>>25, then 25 + 48 = 73", "gold": "72"},
        {"completion": "7/2 = 4 and 4 * 2 = 8"},
    ],
    "operations": [
        {"completion": "Tom has 3 * 4 = 12 apples."},
        {"completion": "I think that it is 12."},
        {"completion": ""},
        {"completion": "10/3 = 3.33, so 3.33 * 3 = 9.99", "gold": "10"},  # rounded, not wrong
        {"completion": "3 + 4 = 8, no: 3 + 3 = 6"},
    ],
}


def row(**values: Any) -> dict[str, Any]:
    plain = {"problem_id": "p", "greedy": True, "correct": False, "lenient": False, "truncated": False}
    return plain | {"extracted": "12", "gold": "7"} | values


@pytest.mark.parametrize("expected", WRONG)
def test_a_wrong_answer_has_one_reason(expected: str) -> None:
    assert {name for name in WRONG if name} == set(MEANING)
    for values in WRONG[expected]:
        assert reason(row(**values)) == expected, values


def test_sums_are_worked_out_with_right_results_before_them() -> None:
    assert worked_out("2 + 2 = 5; 5 * 3 = 15; 1 + 1 = 2") == [
        (Fraction(5), Fraction(4)),
        (Fraction(15), Fraction(12)),
        (Fraction(2), Fraction(2)),
    ]
    assert worked_out("1/3 = 0.33 and x = 4, 2 = , 5 / 0 = 1") == [(Fraction("0.33"), Fraction("0.33"))]


def test_parts_add_up_to_the_gain() -> None:
    draw = random.Random(3)
    cases = [values for group in WRONG.values() for values in group]
    before, after = (
        [row(**{**draw.choice(cases), "problem_id": str(n)}) for n in range(200)] for _ in range(2)
    )
    parts = parts_of(before, [*after, row(greedy=False)])
    up = sum(b["correct"] > a["correct"] for a, b in zip(before, after, strict=True))
    down = sum(b["correct"] < a["correct"] for a, b in zip(before, after, strict=True))
    gain = paired_share_difference(up, down, 200)
    for total in (True, False):
        assert sum(p.gain.value for p in parts.values() if p.total is total) == pytest.approx(gain.value)
        wrong = [
            sum(getattr(p, side) for p in parts.values() if p.total is total) for side in ("before", "after")
        ]
        assert wrong == pytest.approx([sum(not r["correct"] for r in rows) / 200 for rows in (before, after)])
    assert all(part.gain.low <= part.gain.value <= part.gain.high for part in parts.values())
    with pytest.raises(DataError, match="of greedy answers"):
        parts_of(before, [row(greedy=False)])


def test_the_command_shows_them(call: Cli, tmp_path: Path) -> None:
    for name, chance in (("sft", 0.3), ("grpo", 0.7)):
        rows = make_samples(chance, problems=40, seed=len(name))
        write(tmp_path, name, [r | {"lenient": r["correct"], "completion": "1 + 1 = 3"} for r in rows])
    words = ("compare", str(tmp_path / "sft.json"), str(tmp_path / "grpo.json"))
    said = json.loads(call(*words, "--parts", "--json").stdout)
    gains = {name: part["gain"]["value"] for name, part in said["parts"].items() if not part["total"]}
    assert sum(gains.values()) == pytest.approx(said["differences"]["greedy_accuracy"]["value"])
    assert "points of the gain: form " in call(*words, "--parts").stdout
    assert json.loads(call(*words, "--json").stdout)["parts"] is None

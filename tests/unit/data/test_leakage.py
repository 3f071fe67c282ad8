"""``data overlap A B``: each held-out question is counted once, under the strongest way in which training has it."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from algorist.diagnosis.leakage import overlap, shared_questions
from algorist.types import Problem

TRAIN = [
    "Tom has 3 apples and buys 4 more. How many?",
    "A train leaves the station at noon and travels north at a steady 60 km per hour.",
]
FRENCH = "Zoé a 12 crêpes et en donne 5 à José. Combien en garde-t-elle ?"
HELD_OUT = {
    "exact": "TOM has 3 apples,  and buys 4 more: how many",
    "numbers_changed": "Tom has 12 apples and buys 4.5 more. How many?",
    "ngram": "At dawn a train leaves the station at noon and travels south.",
    "none": "A train leaves a station at noon and goes north.",
}


def problems(texts: Any) -> list[Problem]:
    return [Problem(str(i), text, "1") for i, text in enumerate(texts)]


def test_each_kind_is_found_once() -> None:
    found = shared_questions(problems(TRAIN), problems(HELD_OUT.values()))
    assert {kind: [p.question for p, _ in pairs] for kind, pairs in found.items()} == {
        kind: [HELD_OUT[kind]] for kind in ("exact", "numbers_changed", "ngram")
    }
    assert [q.question for _, q in found["ngram"]] == [TRAIN[1]]
    assert not shared_questions(problems(["1 + 1"]), problems(["2 + 2"]))[
        "numbers_changed"
    ]  # no words to share


@pytest.mark.parametrize(
    "other",
    [
        unicodedata.normalize("NFD", FRENCH),
        unicodedata.normalize("NFD", FRENCH).upper(),
        FRENCH.replace("12", "12\u200b").replace("garde", "gar\u00adde"),
        "\ufeff" + FRENCH.replace(" ", "\u00a0"),
    ],
)
def test_what_no_reader_sees_makes_no_other_question(other: str) -> None:
    assert len(overlap(problems([FRENCH]), problems([other]))) == 1
    assert len(shared_questions(problems([other]), problems([FRENCH]))["exact"]) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2*(3+4)", "(2*3)+4"),
        ("on [0,1)", "on (0,1]"),
        ("3.5 km", "3 5 km"),
        ("What is 5!?", "What is 5?"),
        ("10% of 8", "10 of 8"),
        ("x ≥ 3", "x ≤ 3"),
        ("⌊7/2⌋", "⌈7/2⌉"),
        ("A ∪ B", "A ∩ B"),
        ("f'(2)", "f(2)"),
        ("Find .5 + 1", "Find 5 + 1"),
        ("What is n! at n = 4?", "What is n at n = 4?"),
        ("What is a-b?", "What is a b?"),
    ],
)
def test_brackets_points_and_signs_make_another_question(one: str, other: str) -> None:
    assert overlap(problems([one]), problems([other])) == []
    assert len(overlap(problems([one]), problems([f" {one.upper()} "]))) == 1


def test_the_command_counts_with_intervals(tmp_path: Path, verb: Any) -> None:
    for name, texts in (("a", TRAIN), ("b", HELD_OUT.values())):
        rows = [json.dumps({"question": text, "answer": "1"}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))

    code, out, _ = verb("data", "overlap", "a.jsonl", "b.jsonl")
    assert code == 0 and "4 held-out problems against 2 of training" in out
    assert "the same question               1  25.0 % [4.6, 69.9]" in out
    code, out, _ = verb("data", "overlap", "a.jsonl", "b.jsonl", "--json")
    assert code == 0 and json.loads(out)["ngram"]["pairs"][0].keys() == {"held_out", "train"}
    code, _, err = verb("data", "overlap", "a.jsonl", "none.jsonl")
    assert code == 2 and "none.jsonl" in err

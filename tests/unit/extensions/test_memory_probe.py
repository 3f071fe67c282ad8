"""``algorist eval --probe memory``: what a model completes of questions it has seen, beside their twins with other numbers."""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch

from algorist.cli.main import main
from algorist.config.section import ModelSection
from algorist.diagnosis.leakage import overlap
from algorist.errors import DataError
from algorist.extensions.memory_probe.probe import (
    memory_lines,
    probe_memory,
    rouge_l,
    truncated,
    with_other_numbers,
)
from algorist.models.load import make_policy
from algorist.rollouts.transformers import TransformersEngine
from algorist.types import Problem
from tests.tiny import CPU

QUESTIONS = [
    "Tom has 14 apples and buys 3 bags of 6 apples each. He eats 2 of them on Monday and 9 on Friday. How many are left?",
    "A train of 12 cars carries 48 people in each car. At the first stop 31 people leave it, at the next one 77 more leave.",
    "Ida reads 25 pages on every day of a week but on Sunday, when she reads 60 pages. Her book has 305 pages in all.",
    "Nine boxes hold 18 pens each, and 7 boxes hold 24 pencils each. Ana takes 5 pens and 11 pencils out of them.",
]


def test_the_cut_and_the_twin() -> None:
    assert truncated("a b c d e f g h i j") == ("a b c d e f", "g h i j")
    assert truncated("one  two\nthree") == ("one  two", "three") and truncated("one") == ("one", "")
    for question in QUESTIONS:
        twin = with_other_numbers(question)
        assert twin == with_other_numbers(question) and len(twin) == len(question)
        pairs = [(a, b) for a, b in zip(question.split(), twin.split(), strict=True)]
        assert all((a != b) == any(c.isdigit() for c in a) for a, b in pairs)
    assert len(set(with_other_numbers("3 and 3 and 3").split(" and "))) == 1


def test_rouge_is_the_longest_common_subsequence() -> None:
    for written, wanted in (
        ("a b c d", "b a c d"),
        ("x a y b", "a b c"),
        ("q", "a b"),
        ("", "a"),
        ("a b", "a b"),
    ):
        left, right = written.split(), wanted.split()
        common = max(
            (
                k
                for k in range(len(left) + 1)
                for part in combinations(left, k)
                if part in set(combinations(right, k))
            ),
            default=0,
        )
        expected = 2 * common / (len(left) + len(right)) if common else 0.0
        assert rouge_l(left, right) == pytest.approx(expected)


def test_signs_tell_questions_apart() -> None:
    train = [Problem("a", "What is 4 + 1?", "5"), Problem("b", "A well-known sum - 3", "3")]
    same = ["what is 4+1", "A well known sum -3"]
    other = ["What is 4 - 1?", "What is 4 * 1?", "A well known sum 3"]
    held_out = [Problem(text, text, "1") for text in same + other]
    assert [p.question for p in overlap(train, held_out)] == same


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained on the questions alone until it knows them."""
    shape = {"hidden_size": 48, "layers": 2, "vocab_size": 420}
    policy = make_policy(
        ModelSection.model_validate({"name": "tiny", "tiny": shape}),
        device=CPU,
        seed=0,
        texts=QUESTIONS * 9,
        tags=(),
    )
    tokenizer, model = policy.tokenizer, policy.model
    batch = tokenizer([q + tokenizer.eos_token for q in QUESTIONS], return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(150):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert loss < 0.05
    folder = tmp_path_factory.mktemp("memorised")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_that_knows_the_questions_is_found_out(
    memorised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"question": q, "answer": "1"}) for q in [*QUESTIONS, "What is 1 + 1?"]]
    (tmp_path / "known.jsonl").write_text("\n".join(rows))
    words = [
        "eval",
        str(memorised),
        "--data",
        f"{tmp_path}/known.jsonl,split=train",
        "--out",
        str(tmp_path),
        "--probe",
    ]

    def call(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["algorist", *words, *more])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capsys.readouterr()

    code, out, _ = call("memory", "--json")
    (found,) = json.loads(out)["probes"]
    assert code == 0 and (found["n"], found["left_out"]) == (4, 1)
    assert found["original"]["exact"]["value"] == 1 and found["rewritten"]["exact"]["value"] == 0
    stored = json.loads(Path(found["artifact"]).read_text())["rows"]
    assert len(stored) == 8 and all(row["given"] + row["rest"] != row["completion"] for row in stored)
    assert "Did you mean 'memory'?" in call("memry")[2]


def test_a_model_that_knows_nothing_is_not_accused() -> None:
    shape = {"hidden_size": 32, "layers": 1, "vocab_size": 420}
    policy = make_policy(
        ModelSection.model_validate({"name": "tiny", "tiny": shape}),
        device=CPU,
        seed=0,
        texts=QUESTIONS,
        tags=(),
    )
    engine = TransformersEngine(policy.model, policy.tokenizer)
    found = probe_memory(engine, policy.tokenizer, [Problem(q[:9], q, "1") for q in QUESTIONS], batch_size=3)
    assert (
        found.original["near"].value == found.rewritten["near"].value == 0
        and found.original["near"].high > 0.3
    )
    assert "no sign of memory here" in memory_lines(found)[-1]
    with pytest.raises(DataError, match="none of 1 questions has a number and a rest of 4 words"):
        probe_memory(engine, policy.tokenizer, [Problem("p", "Why?", "1")])

"""Hostile answers: within the limit, no memory, no code, no output; and a fuzzer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from algorist_grader import extract, grade, grade_completion
from algorist_grader.symbolic import _reading, reading
from algorist_grader.types import Grade
from hostile_answers import CANARY, hostile
from pairs import pairs

OWN_S = 0.5
"""Processor time that one call may take in this process (s); the slow work is in a worker, which its own limit ends."""
GOLDS = ["3", "\\sqrt{2}+\\sqrt{3}", "x^2+1", "(-\\infty,3)"]
WORTH_3 = ("\\boxed", "3$", "\\text", "３", "\u202e3", "$", "|")  # some of them do say 3


def measured(judge: Callable[..., Grade], *arguments: str) -> tuple[Grade, float]:
    """Return a verdict and the processor time that it took in this process (s); the machine's load does not count."""
    began = time.process_time()
    verdict = judge(*arguments)
    return verdict, time.process_time() - began


@pytest.mark.slow
def test_the_corpus() -> None:
    answers = hostile()
    assert len(answers) >= 300
    me = psutil.Process()
    grade("\\sqrt{5+2\\sqrt{6}}", "\\sqrt{2}+\\sqrt{3}")  # a warm worker
    before = me.memory_info().rss
    for gold in GOLDS:
        for answer in answers:
            verdict, spent = measured(grade, answer, gold)
            assert spent < OWN_S, (answer[:80], gold)
            assert not verdict.correct or (gold == "3" and answer.startswith(WORTH_3)), (answer[:80], gold)
    assert me.memory_info().rss - before < 50 * 2**20
    assert not (Path.cwd() / CANARY).exists()


@pytest.mark.slow
def test_as_completions() -> None:
    for answer in hostile():
        for text in (
            answer,
            f"<think>{answer}</think><answer>{answer}</answer>",
            f"\\boxed{{{answer}}}",
            f"#### {answer}",
        ):
            verdict, spent = measured(grade_completion, text, "1000003")
            assert not verdict.correct and spent < OWN_S, text[:80]


def test_as_golds() -> None:
    for gold in hostile():
        verdict, spent = measured(grade, "1000003", gold)
        assert not verdict.correct and spent < OWN_S, gold[:80]


@pytest.mark.slow
@pytest.mark.parametrize("gmpy", [True, False])
def test_with_and_without_gmpy2(gmpy: bool, tmp_path: Path) -> None:
    pytest.importorskip("gmpy2", reason="gmpy2 is not installed; pip install gmpy2 to run this with it")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from hostile_answers import hostile\nfrom algorist_grader import grade\n"
        "from test_hostile import OWN_S, measured\n"
        "for a in hostile():\n    v, s = measured(grade, a, '\\\\sqrt{2}+\\\\sqrt{3}'); assert s < OWN_S and not v.correct, a[:60]\n"
        "assert grade('\\\\sqrt{5+2\\\\sqrt{6}}', '\\\\sqrt{2}+\\\\sqrt{3}').correct\n"
    )
    environment = {**os.environ, **({} if gmpy else {"MPMATH_NOGMPY": "1"})}
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def _fuzzed(source: random.Random, seeds: list[str]) -> str:
    text = source.choice(seeds)
    marks = "\\{}()[]^_$%|,;:=<>+-*/!&#~.'\" 0123456789xyeπ√∞−½²\n"
    for _ in range(source.randrange(1, 12)):
        place = source.randrange(len(text) + 1)
        kind = source.randrange(5)
        if kind == 0:
            text = text[:place] + source.choice(marks) + text[place:]
        elif kind == 1:
            text = text[:place] + text[place + 1 :]
        elif kind == 2:
            text = text[:place] + source.choice(seeds) + text[place:]
        elif kind == 3:
            text = text[:place] * source.randrange(1, 4) + text[place:]
        else:
            text = "".join(source.sample(text, len(text))) if len(text) < 30 else text[::-1]
    return text[:6000]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2_500, pytest.param(25_000, marks=pytest.mark.long)])
def test_fuzz(count: int) -> None:
    """Broken answers: never an exception, never over the limit, reading is deterministic."""
    source = random.Random(20261121 + count)
    seeds = sorted({p[3] for p in pairs()} | {a for a in hostile() if len(a) < 400})
    golds = sorted({p[2] for p in pairs()})
    for _ in range(count):
        answer, gold = _fuzzed(source, seeds), source.choice(golds)
        assert measured(grade, answer, gold)[1] < OWN_S, (answer, gold)
        assert _reading.__wrapped__(answer) == reading(answer)  # the same without the cache
        extract(answer)

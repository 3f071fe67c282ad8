"""Formats and rewards read any length in a bounded amount of work, as the grader does (``packages/grader/tests/test_size.py``)."""

from __future__ import annotations

import subprocess
import sys

import pytest

LONG = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))  # the kernel ends the process: no clock is read
from algorist.prompts import FORMATS
from algorist.extensions.published_rewards.systems import question_only_reward_fn, r1_zero_reward_fn
for token in sys.argv[1:]:
    body = token * (300_000 // len(token))
    for text in (body, "\\\\boxed{5}" + body, "</think> <answer>" + body + "</answer>"):
        for name in FORMATS:
            FORMATS.get(name).parse(text)
        r1_zero_reward_fn(text, "5"), question_only_reward_fn(text, "5")
print("done")
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_long_text_of_one_token_costs_no_more_than_reading_it() -> None:
    """300,000 characters: quadratic readers need many minutes for these; the linear ones need a second or two in all."""
    tokens = [
        "\\boxed{",
        "<answer>",
        "<SOLUTION>",
        "</think>",
        "{",
        "}",
        "####",
        "\\boxed{1}",
        "answer is ",
        "9,",
        "$",
        "\\frac{",
    ]
    done = subprocess.run([sys.executable, "-c", LONG, *tokens], capture_output=True, text=True)
    assert done.stdout == "done\n", (done.returncode, done.stderr[-500:])

"""One megabyte of one repeated token through every prompt format, matcher, extractor and reward: processor time per call.

python benchmarks/grading_hostile.py         # about 10 minutes; writes benchmarks/baselines/grading_hostile.json
python benchmarks/grading_hostile.py --quick # every tenth token, about a minute
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

from measure import save_json

from algorist.extensions.published_rewards.systems import question_only_reward_fn, r1_zero_reward_fn
from algorist.prompts import FORMATS
from algorist.rewards import REWARDS, build_rewards
from algorist_grader import MATCHERS, boxed, extract, grade, grade_completion, hash_answer, last_boxed

SIZE = 1_000_000
NEEDS_TOKENS = {"target_length", "soft_overlong"}
"""Rewards that count tokens; they never look at the text."""
WORDS = (
    "\\boxed{ \\boxed <answer> </answer> <SOLUTION> </SOLUTION> <think> </think> <reasoning> </reasoning> { } #### \\frac{ \\sqrt{ ( x x+ \\ \\text{"
    " <answer>1</answer> \\boxed{1} <think></think> <start_working_out> <end_working_out> é ½ ** ` _ ^ | & % . ... 1. 0. \\overline{ \\left( = < > 9, $"
    " $1$ - \\fbox{ \\boxed{{} 1 9 𝟏 [ \\{ \\begin{pmatrix} \\over \\prime ' !"
)
SPACED = (
    "\n",
    "\n\n",
    "A: ",
    "answer is ",
    "1 ",
    "1\n",
    " ",
    "\t",
    "not ",
    "</think> <answer>",
    "####\n",
    "wait ",
    "\n1. ",
    "\\boxed {",
    "\\boxed{1} ",
)
TOKENS = (*WORDS.split(), *SPACED)


def routes() -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Yield every way that text of a model takes into the grader and the rewards."""
    for name in FORMATS:
        yield f"format {name}", lambda text, n=name: FORMATS.get(n).parse(text)  # type: ignore[misc]
    for name in MATCHERS:
        yield f"matcher {name}", lambda text, n=name: grade(text, "5", matcher=n)  # type: ignore[misc]
        yield f"matcher {name}, as gold", lambda text, n=name: grade("5", text, matcher=n)  # type: ignore[misc]
    yield "grade_completion", lambda text: grade_completion(text, "x^2+1")
    yield "extract", lambda text: extract(text, last_number=True)
    for function in (hash_answer, boxed, last_boxed):
        yield function.__name__, function
    for name in REWARDS:
        if name not in NEEDS_TOKENS:
            built = build_rewards([name])
            yield f"reward {name}", lambda text, b=built: b.explain(text, "5")  # type: ignore[misc]
    for function in (r1_zero_reward_fn, question_only_reward_fn):
        yield function.__name__, lambda text, f=function: f(text, "5")  # type: ignore[misc]


def main() -> None:
    """Run every route on every text; keep the slowest call of each route."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    slowest: dict[str, dict[str, Any]] = {}
    calls = 0
    for token in TOKENS[:: 10 if options.quick else 1]:
        body = token * (SIZE // len(token))
        half = body[: len(body) // 2]
        for text in (body, f"\\boxed{{5}} {body}", f"<think>{half}</think> <answer>{half}</answer>"):
            for name, call in routes_list:
                began = time.process_time()
                call(text)
                spent = time.process_time() - began
                calls += 1
                if spent >= slowest.get(name, {"cpu_s": -1.0})["cpu_s"]:
                    slowest[name] = {"cpu_s": round(spent, 4), "token": token}
    rows = sorted(
        ({"route": name, **found} for name, found in slowest.items()), key=lambda row: -row["cpu_s"]
    )
    for row in rows[:12]:
        print(row)
    print(f"{calls} calls, slowest {rows[0]['cpu_s']} s of processor time")
    if not options.quick:
        print(save_json("grading_hostile", {"calls": calls, "bytes": SIZE, "slowest": rows}))


routes_list = list(routes())

if __name__ == "__main__":
    main()

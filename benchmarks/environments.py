"""Published environments: 500 rewards of each against the original's own call, and a short training of the tiny model.

    python benchmarks/environments.py --verifiers PYTHON --sources FOLDER [--texts 500] [--sft-steps 150] [--steps 40]

PYTHON has verifiers 0.4, ``datasets``, reasoning-gym and algorist-grader. FOLDER has TRL's ``grpo_2048.py`` (examples) and verifiers'
tasksets ``reverse_text`` and ``gsm8k`` (environments), as they are published; their rows, which a hub would bring, are made here.
reasoning-gym takes part through both forms: as the taskset that ``algorist export --environment`` writes, and as a class of TRL's form.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import reasoning_gym

from algorist.config import load_recipe
from algorist.data import load_problems
from algorist.data.base import Source
from algorist.evaluation.benchmark_option import read_benchmarks
from algorist.extensions.environments.process import _seed
from algorist.extensions.environments.user import Environments
from algorist.extensions.verifiers import taskset
from algorist.runs.pipeline import run_recipe
from algorist.store.run_log import Quiet
from algorist.store.write import read_metrics
from algorist.types import Problem
from algorist_grader.user_code import import_file

ORIGINAL = """
import asyncio, json, sys
from types import SimpleNamespace
import verifiers.v1 as vf
sys.path.insert(0, sys.argv[1])
name, config, pairs = json.load(sys.stdin)
tasks = list(vf.load_taskset(vf.taskset_config_type(name)(id=name, **config)))
trace = lambda text: SimpleNamespace(last_reply=text, assistant_messages=[SimpleNamespace(content=text)])
print(json.dumps([sum(float(asyncio.run(hook(trace(text)))) for hook in tasks[n].hooks("reward")) for n, text in pairs]))
"""
"""Calls the reward functions of a taskset's tasks themselves, in verifiers' Python; all have the weight 1."""
RG = "reasoning_gym,params={generator: chain_sum, count: 150, config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}\n<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if tools %}{% endif %}"
)


def texts_for(answer: str, wrap: str, rng: random.Random) -> str:
    """Return a completion: the answer, parts of it, other things, in the form that is asked for and in none."""
    part = answer[: rng.randint(0, len(answer))]
    said = rng.choice(
        [answer, answer, part, answer[::-1], f"{rng.randint(0, 30)}", f" {answer} ", f"{answer}.0", ""]
    )
    return rng.choice([wrap, wrap, wrap, "{}", f"so {wrap} or {wrap}"]).replace("{}", said)


def of_taskset(
    args: argparse.Namespace, folder: Path, name: str, config: dict[str, Any], wrap: str
) -> tuple[int, float]:
    """Return how many rewards of a taskset equal the original's, and their mean."""
    rng = random.Random(name)
    params = {"taskset": name, "config": config, "python": args.verifiers, "count": 200}
    problems = taskset.verifiers(Source(path=str(folder), params=params))
    pairs = [
        (n, texts_for(problems[n].answer, wrap, rng))
        for n in (rng.randrange(len(problems)) for _ in range(args.texts))
    ]
    paid = [taskset.paid(SimpleNamespace(text=text), problems[n]) for n, text in pairs]  # type: ignore[arg-type]
    order = json.dumps([name, config, pairs])
    done = subprocess.run(
        [args.verifiers, "-c", ORIGINAL, folder], input=order, capture_output=True, text=True, check=True
    )
    return _equal(paid, json.loads(done.stdout.splitlines()[-1]))


def of_class(
    target: str,
    problems: Sequence[Problem],
    calls: Sequence[list[tuple[str, dict[str, Any]]]],
    original: Callable[[int], float],
) -> tuple[int, float]:
    """Return how many rewards of a class, after so many calls in a rollout each, equal the original's, and their mean."""
    environments = Environments(target)
    environments.begin(problems)
    paid = []
    for row, asked in enumerate(calls):
        for method, arguments in asked:
            environments.call(row, method, json.dumps(arguments))
        (turn,) = environments.end(row)
        paid.append(json.loads(turn.reply))
    return _equal(paid, [original(row) for row in range(len(calls))])


def _equal(paid: Sequence[Any], original: Sequence[Any]) -> tuple[int, float]:
    equal = sum(one == other for one, other in zip(paid, original, strict=True))
    return equal, sum(original) / len(original)


def of_2048(args: argparse.Namespace) -> tuple[int, float]:
    """Compare TRL's example, carried over by from-trl, with its class and reward called in TRL's order."""
    subprocess.run(
        [sys.executable, "-m", "algorist", "from-trl", args.sources / "grpo_2048.py"],
        check=True,
        capture_output=True,
    )
    module: Any = import_file(Path("grpo_2048_environments.py"))
    rng = random.Random(0)
    problems = [Problem(f"{n}", "Play", "0") for n in range(args.texts)]
    calls = [
        [
            ("move", {"direction": rng.choice(["up", "down", "left", "right", "x"])})
            for _ in range(rng.randint(0, 9))
        ]
        for _ in problems
    ]

    def original(row: int) -> float:
        game = module.Game2048Env()
        _seed(f"{row}")
        game.reset()
        _seed(f"{row} {row}")
        for _, arguments in calls[row]:
            game.move(**arguments)
        return float(module.reward_score([game])[0])

    return of_class("grpo_2048_environments.py:Game2048Env", problems, calls, original)


GYM = '''
import reasoning_gym

score = reasoning_gym.get_score_answer_fn("chain_sum")


class Gym:
    """A task of reasoning-gym in TRL's form."""

    def reset(self, **row):
        self.entry, self.paid = {"answer": row["answer"], "metadata": {}}, 0.0
        return " Give your answer with the tool `answer`."

    def answer(self, text: str) -> str:
        """
        Give the final answer.

        Args:
            text: The answer alone.
        """
        self.paid = score(text, self.entry)
        return "taken"

    def get_reward(self) -> float:
        return self.paid
'''


def of_gym(args: argparse.Namespace) -> tuple[int, float]:
    """Compare reasoning-gym in TRL's form with its own scores."""
    rng, score = random.Random(1), reasoning_gym.get_score_answer_fn("chain_sum")
    rows = load_problems(read_benchmarks(["answers.jsonl"], split="train")[0].section)
    problems = [rng.choice(rows) for _ in range(args.texts)]
    texts = [texts_for(p.answer, "{}", rng) for p in problems]

    def original(row: int) -> float:
        return float(score(texts[row], {"answer": problems[row].answer, "metadata": {}}))

    calls = [[("answer", {"text": text})] for text in texts]
    return of_class("gym.py:Gym", problems, calls, original)


def train(args: argparse.Namespace, name: str, data: str, *more: str) -> tuple[float, float, float]:
    """Train the tiny model; return the mean reward of the first and last five steps, and the minutes."""
    began = time.monotonic()
    overrides = [
        f"data={{train: {data}, sft: {data}, eval: {data}}}", f"run_name={name}", "output_dir=runs", "eval.enabled=false", "threads=1",
        "device=cpu", "model.tiny={vocab_size: 420, hidden_size: 64, layers: 2}", "prompt.system_prompt=''",
        f"sft={{max_steps: {args.sft_steps}, batch_size: 8, learning_rate: 0.01}}", "report_to=[]",
        f"grpo={{max_steps: {args.steps}, group_size: 8, batch_size: 32, learning_rate: 0.001, max_completion_tokens: 96}}", *more,
    ]  # fmt: skip
    folder = run_recipe(load_recipe("smoke-cpu", overrides).recipe, display=Quiet()).folder.path
    rewards = [row["reward"] for row in read_metrics(folder / "metrics.jsonl") if "reward" in row]
    ends = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    return *ends, (time.monotonic() - began) / 60


def main() -> None:
    """Print a row for each environment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verifiers", required=True)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--only", default="", help="a part of the names of those that take part")
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/environments"))
    args = parser.parse_args()
    args.sources, args.verifiers = args.sources.resolve(), str(Path(args.verifiers).absolute())
    args.out.mkdir(parents=True, exist_ok=True)
    os.chdir(args.out)
    rng = random.Random(2)
    words = ["".join(rng.choices("abc", k=3)) for _ in range(200)]
    sums = [(rng.randint(0, 5), rng.randint(0, 5)) for _ in range(200)]
    for file, rows in {
        "reverse/train.jsonl": [{"prompt": word} for word in words],
        "openai/gsm8k/main/test.jsonl": [{"question": f"{a} + {b}?", "answer": f"#### {a + b}"} for a, b in sums],
        "moves.jsonl": [
            {"question": f"Play {n}.", "answer": "0", "solution": "<tool_call>" + json.dumps({"name": "move", "arguments": {"direction": d}}) + "</tool_call>"}
            for n in range(20) for d in ("up", "down", "left", "right")
        ],
    }.items():  # fmt: skip
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: [{split: test, path: main/test.jsonl}]\n---\n"
    )
    Path("chat.jinja").write_text(CHATML)
    Path("gym.py").write_text(GYM)
    if not Path("gym").exists():
        export = [
            "export",
            "smoke-cpu",
            "prompt.format=boxed",
            "prompt.system_prompt=null",
            "--environment",
            "--data",
            RG,
            "--to",
            "gym",
        ]
        subprocess.run([sys.executable, "-m", "algorist", *export], check=True)

    def of_verifiers(name: str, folder: Path, config: dict[str, Any]) -> str:
        params = {"taskset": name, "python": args.verifiers, "config": config, "count": 200}
        return json.dumps({"name": "verifiers", "path": str(folder), "params": params})

    reverse = {"dataset_name": str(Path("reverse").resolve())}
    tags = "prompt.tags={answer_open: <reversed_text>, answer_close: </reversed_text>}"
    chat, gym = "model.chat_template=chat.jinja", Path("gym").resolve()
    paid = "rewards=[environment]"
    cases: list[tuple[str, Callable[[], tuple[int, float]], tuple[str, ...]]] = [
        ("verifiers: reverse_text", lambda: of_taskset(args, args.sources, "reverse_text", reverse, "<reversed_text>{}</reversed_text>"),
         (of_verifiers("reverse_text", args.sources, reverse), "rewards=[verifiers]", tags)),
        ("verifiers: gsm8k", lambda: of_taskset(args, args.sources, "gsm8k", {}, "\\boxed{{}}"),
         (of_verifiers("gsm8k", args.sources, {}), "rewards=[verifiers]", "prompt.format=boxed")),
        ("TRL: grpo_2048", lambda: of_2048(args),
         ("{name: local, path: moves.jsonl}", paid, chat, "environment=grpo_2048_environments.py:Game2048Env", "grpo.max_completion_tokens=192")),
        ("reasoning-gym, verifiers' form", lambda: of_taskset(args, gym, "gym", {}, "\\boxed{{}}"),
         (of_verifiers("gym", gym, {}), "rewards=[verifiers]", "prompt.format=boxed")),
        ("reasoning-gym, TRL's form", lambda: of_gym(args),
         ("{name: local, path: answers.jsonl}", paid, chat, "environment=gym.py:Gym")),
    ]  # fmt: skip
    lines = [json.loads(line) for line in (gym / "gym/problems.jsonl").read_text().splitlines()]
    call = '<tool_call>{{"name": "answer", "arguments": {{"text": "{}"}}}}</tool_call>'
    Path("answers.jsonl").write_text(
        "".join(
            json.dumps(line | {"checker": "", "solution": call.format(line["answer"])}) + "\n"
            for line in lines
        )
    )
    print(
        "| environment | equal | mean | reward, first 5 steps | last 5 | minutes |\n|---|---|---|---|---|---|"
    )
    for number, (name, compare, (data, *more)) in enumerate(case for case in cases if args.only in case[0]):
        equal, mean = compare()
        first, last, minutes = train(args, f"e{number}-{int(time.time())}", data, *more)
        print(
            f"| {name} | {equal}/{args.texts} | {mean:.2f} | {first:.2f} | {last:.2f} | {minutes:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

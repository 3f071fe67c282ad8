"""Published environments: 500 rewards of each against the original's own call, and a short training of the tiny model.

    python benchmarks/environments.py --verifiers PYTHON --sources FOLDER [--texts 500] [--only NAME] [--sft-steps N] [--steps N]

PYTHON has verifiers 0.4, ``datasets``, reasoning-gym and algorist-grader. FOLDER has TRL's ``grpo_2048.py`` (examples) and verifiers'
tasksets ``reverse_text`` and ``gsm8k`` (environments), as they are published; their rows, which a hub would bring, are made here.
reasoning-gym takes part through both forms: as the taskset that ``algorist export --environment`` writes, and as a class of TRL's form.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import reasoning_gym

from algorist.cli.benchmark_option import read_benchmarks
from algorist.data import load_problems
from algorist.data.base import Source
from algorist.evaluation.estimators import Z95
from algorist.extensions.environments.process import _seed
from algorist.extensions.environments.user import Environments
from algorist.extensions.verifiers import taskset
from algorist.store.read import query
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
ENDS = 5
"""The first and the last so many steps are compared."""


class Size(NamedTuple):
    """The size of a training: SFT teaches the form and leaves GRPO something to learn; the tiny model gets by heart after some hundred steps."""

    sft_steps: int = 300
    sft_batch: int = 8
    steps: int = 80
    batch: int = 128
    tokens: int = 96


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
    write_games(module, 100)
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


def write_games(module: Any, count: int) -> None:
    """Write demonstrations of four random moves each: what the model sees before each, and the move."""
    random.seed(3)
    rows, end, begin = [], "<|im_end|>\n<|im_start|>", "<|im_start|>assistant\n"
    for number in range(count):
        game = module.Game2048Env()
        prompt = f"<|im_start|>user\nPlay {number}.{game.reset()}<|im_end|>\n{begin}"
        for _ in range(4):
            move = {"direction": random.choice(["up", "down", "left", "right"])}
            call = f"<tool_call>{json.dumps({'name': 'move', 'arguments': move})}</tool_call>"
            rows.append({"question": f"Play {number}.", "answer": "0", "prompt": prompt, "response": call})
            prompt += f"{call}{end}tool\n{game.move(**move)}<|im_end|>\n{begin}"
    Path("games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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


class Learned(NamedTuple):
    """What a training showed: the mean reward of its first and last steps, what lies between them, and what it took."""

    first: float
    last: float
    gain: float
    half_width: float
    core_minutes: float
    minutes: float

    def __str__(self) -> str:
        low, high = self.gain - self.half_width, self.gain + self.half_width
        return (
            f"{self.first:.2f} | {self.last:.2f} | {self.gain:+.2f} [{low:+.2f}, {high:+.2f}] | {self.core_minutes:.1f} | "
            f"{self.minutes:.1f}"
        )


def train(name: str, size: Size, data: str, *more: str) -> Learned:
    """Train the tiny model as a command would; compare the groups of the first and of the last ``ENDS`` steps.

    The completions of a group share a prompt, so that a group is one value of the interval (Welch, 95 %).
    """
    overrides = [
        f"data={{train: {data}, sft: {data}, eval: {data}}}", f"run_name={name}", "output_dir=runs", "eval.enabled=false", "threads=1",
        "device=cpu", "model.tiny={vocab_size: 420, hidden_size: 64, layers: 2}", "prompt.system_prompt=''", "report_to=[]",
        f"sft={{max_steps: {size.sft_steps}, batch_size: {size.sft_batch}, learning_rate: 0.01}}",
        f"grpo={{max_steps: {size.steps}, group_size: 8, batch_size: {size.batch}, learning_rate: 0.001}}",
        f"grpo.max_completion_tokens={size.tokens}", *more,
    ]  # fmt: skip
    began, used = time.monotonic(), _children_s()
    subprocess.run(
        [sys.executable, "-m", "algorist", "run", "smoke-cpu", *overrides], check=True, capture_output=True
    )
    took = (_children_s() - used) / 60, (time.monotonic() - began) / 60
    sql = 'SELECT step, "group", avg(reward) AS mean FROM rollouts WHERE stage = \'grpo\' GROUP BY step, "group" ORDER BY ALL'
    groups = query(Path("runs") / name, sql)
    steps = sorted({row["step"] for row in groups})
    first, last = (
        [row["mean"] for row in groups if row["step"] in ends] for ends in (steps[:ENDS], steps[-ENDS:])
    )
    error = math.sqrt(sum(statistics.variance(means) / len(means) for means in (first, last)))
    gain = statistics.mean(last) - statistics.mean(first)
    return Learned(statistics.mean(first), statistics.mean(last), gain, Z95 * error, *took)


def _children_s() -> float:
    """Return the processor seconds of all children that ended, and of theirs that they left (``main`` asks for those)."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print a row for each environment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verifiers", required=True)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--only", default="", help="a part of the names of those that take part")
    parser.add_argument("--sft-steps", type=int, help="instead of each environment's own")
    parser.add_argument("--steps", type=int, help="of GRPO, instead of each environment's own")
    parser.add_argument("--out", type=Path, default=Path("runs/environments"))
    args = parser.parse_args()
    args.sources, args.verifiers = args.sources.resolve(), str(Path(args.verifiers).absolute())
    args.out.mkdir(parents=True, exist_ok=True)
    os.chdir(args.out)
    ctypes.CDLL(None).prctl(
        36, 1, 0, 0, 0
    )  # PR_SET_CHILD_SUBREAPER: Linux; elsewhere core minutes are too few
    rng = random.Random(2)
    words = ["".join(rng.choices("abc", k=3)) for _ in range(200)]
    sums = [(rng.randint(0, 5), rng.randint(0, 5)) for _ in range(200)]
    for file, rows in {
        "reverse/train.jsonl": [{"prompt": word} for word in words],
        "openai/gsm8k/main/test.jsonl": [{"question": f"{a} + {b}?", "answer": f"#### {a + b}"} for a, b in sums],
        "play.jsonl": [{"question": f"Play {n}.", "answer": "0"} for n in range(200)],
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
    cases: list[tuple[str, Size, Callable[[], tuple[int, float]], tuple[str, ...]]] = [
        ("verifiers: reverse_text", Size(), lambda: of_taskset(args, args.sources, "reverse_text", reverse, "<reversed_text>{}</reversed_text>"),
         (of_verifiers("reverse_text", args.sources, reverse), "rewards=[verifiers]", tags)),
        ("verifiers: gsm8k", Size(), lambda: of_taskset(args, args.sources, "gsm8k", {}, "\\boxed{{}}"),
         (of_verifiers("gsm8k", args.sources, {}), "rewards=[verifiers]", "prompt.format=boxed")),
        ("TRL: grpo_2048", Size(70, 16, 60, 64, 512), lambda: of_2048(args),
         ("{name: local, path: play.jsonl}", paid, chat, "environment=grpo_2048_environments.py:Game2048Env",
          "data.sft.path=games.jsonl", "sft.source=prompt_response")),
        ("reasoning-gym, verifiers' form", Size(500, 16), lambda: of_taskset(args, gym, "gym", {}, "\\boxed{{}}"),
         (of_verifiers("gym", gym, {}), "rewards=[verifiers]", "prompt.format=boxed")),
        ("reasoning-gym, TRL's form", Size(500, 16), lambda: of_gym(args),
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
        f"| environment | equal | mean | reward, first {ENDS} steps | last {ENDS} | gain | core minutes | minutes |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for number, (name, size, compare, (data, *more)) in enumerate(cases):
        if args.only not in name:
            continue
        equal, mean = compare()
        size = size._replace(sft_steps=args.sft_steps or size.sft_steps, steps=args.steps or size.steps)
        learned = train(f"e{number}-{int(time.time())}", size, data, *more)
        print(f"| {name} | {equal}/{args.texts} | {mean:.2f} | {learned} |", flush=True)


if __name__ == "__main__":
    main()

"""Rewards as TRL calls them: every form of completion, gold columns, failures, totals, a user's own."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from algorist.errors import ConfigError
from algorist.extensions.published_rewards.small_models import (
    DEFAULT_REWARD_WEIGHTS,
    default_reward_functions,
)
from algorist.prompts import get_format
from algorist.rewards import REWARDS, breakdown, build_rewards, reward, text_of
from algorist.rewards.base import Reward
from algorist.types import Group, Parsed, Problem, Rollout
from algorist_grader import grade_completion
from tests.acceptance.rewards_page import reference_markdown
from tests.conftest import Cli

RIGHT = "<reasoning>\n3 * 4\n</reasoning>\n<answer>\n12\n</answer>"
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "completion",
    [
        RIGHT,
        {"role": "assistant", "content": RIGHT},
        [{"role": "assistant", "content": RIGHT}],
        [{"role": "assistant", "content": RIGHT}, {"role": "user", "content": "no"}],
        [RIGHT],
        (RIGHT,),
        [{"role": "assistant", "content": [{"type": "text", "text": RIGHT}]}],
        [ord(c) for c in RIGHT],
        torch.tensor([ord(c) for c in RIGHT]),
    ],
    ids=["text", "message", "messages", "several", "texts", "tuple", "parts", "ids", "tensor"],
)
def test_forms_of_completions(completion: object) -> None:
    rewards = build_rewards(["correct", "well_formed"], decode=lambda ids: "".join(map(chr, ids)))
    assert [r(completions=[completion], answer=["12"]) for r in rewards] == [[1.0], [1.0]]


def test_what_a_row_gets_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """Some rows have a worked solution or a ground truth of their own, the others' gold stands there."""
    (tmp_path / "mine.py").write_text(
        "def same(completions, solution, ground_truth, **rows):\n"
        "    return [float(c in (s, g)) for c, s, g in zip(completions, solution, ground_truth)]\n"
    )
    rewards = build_rewards([f"{tmp_path / 'mine.py'}:same"], get_format("reasoning_answer"))
    plain = Problem("a", "3 + 4?", "7")
    worked = Problem("b", "2 + 3?", "5", solution="2 + 3 = 5")
    named = Problem("c", "1 + 1?", "2", extra={"ground_truth": "two"})
    groups = [
        Group(problem, "q", [1], [Rollout([1], text, None, False, Parsed(None, None, False))])
        for problem, text in ((plain, "7"), (worked, "2 + 3 = 5"), (named, "two"))
    ]
    assert [group.rollouts[0].reward for group in rewards.pay(groups)] == [1.0, 1.0, 1.0]
    assert [rewards.pay([group])[0].rollouts[0].reward for group in groups] == [1.0, 1.0, 1.0]


def test_batch_tensor_and_empty_forms() -> None:
    rewards = build_rewards(["correct"], decode=lambda ids: "".join(map(chr, ids)))
    both: Any = torch.tensor([[ord(c) for c in text] for text in (RIGHT, RIGHT.replace("12", "13"))])
    assert rewards[0](completions=both, answer=["12", "12"]) == [1.0, 0.0]
    empty: list[Any] = [None, [], {}, {"content": None}, ""]
    assert [text_of(x) for x in empty] == [""] * 5


def test_token_ids_without_decode_say_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"decode=tokenizer\.decode"):
        build_rewards(["correct"])[0](completions=[[1, 2]], answer=["1"])


@pytest.mark.parametrize("column", ["answer", "reference_answer", "solution", "ground_truth"])
def test_gold_by_name_and_unknown_keywords(column: str) -> None:
    for one in build_rewards(["correct", "correctness_numeric", "accuracy", "cosine"]):
        right, wrong = one(
            prompts=["p", "p"],
            completions=[RIGHT, RIGHT.replace("12", "13")],
            completion_ids=[[1], [2]],
            trainer_state=object(),
            log_metric=print,
            extra=["a", "b"],
            **{column: ["12", "12"]},
        )
        assert right is not None and wrong is not None and right > wrong, one.__name__


def test_missing_gold_column_is_an_error_before_training() -> None:
    with pytest.raises(ConfigError, match="none of the columns reference_answer"):
        build_rewards(["correct"])[0](completions=["x"], question=["q"])
    assert build_rewards(["well_formed"])[0](completions=[RIGHT]) == [1.0]


def test_rows_without_gold_get_the_floor_and_are_counted() -> None:
    one = build_rewards(["check_answer"], "working_solution")[0]
    assert one(completions=["<SOLUTION>1</SOLUTION>"] * 3, answer=["1", "", None]) == [5.0, -2.0, -2.0]
    assert one.failures == 2


def test_several_golds_and_numbers() -> None:
    one = build_rewards(["correct"])[0]
    assert one(completions=[RIGHT, RIGHT, RIGHT], answer=[["11", "12"], 12, ["11"]]) == [1.0, 1.0, 0.0]
    tensors: list[Any] = [
        torch.tensor([12, 13]),
        [torch.tensor(12), torch.tensor([13])],
        [torch.tensor([11, 12]), 13],
    ]
    assert [one(completions=[RIGHT, RIGHT], answer=golds) for golds in tensors] == [[1.0, 0.0]] * 3
    assert one(completions=[RIGHT, RIGHT], answer=torch.tensor(12)) == [1.0, 1.0]


def test_what_counts_of_two_gold_columns() -> None:
    one = build_rewards(["correct"])
    columns = {"answer": ["so 11 + 1\n#### 12"], "reference_answer": ["12"], "ground_truth": ["13"]}
    assert one[0](completions=[RIGHT], **columns) == [1.0]
    assert one.explain(RIGHT, "12", reference_answer="13", ground_truth="13").total == 1.0


def test_batches_of_nothing() -> None:
    assert [r(completions=[], answer=[]) for r in default_reward_functions()] == [[], [], []]
    assert default_reward_functions().score([], answer=[]) == []


def test_trl_reads_the_name() -> None:
    rewards = build_rewards([{"name": "cosine"}, {"name": "cosine", "params": {"max_len": 50}}, "correct"])
    assert [r.__name__ for r in rewards] == ["cosine", "cosine_2", "correct"]
    assert not any(inspect.iscoroutinefunction(r) for r in rewards)


@reward("raises_in_test", low=-0.75, high=1.0)
def raises(completion: str, *, gold: str, kind: str = "raise") -> float:
    """Raise, or return what is no number, for completions with an x."""
    if "x" in completion:
        return {"nan": float("nan"), "huge": 1e308, "outside": 2.0, "text": "a"}[kind]  # type: ignore[return-value]
    return 1.0


@pytest.mark.parametrize("kind", ["raise", "nan", "huge", "outside", "text"])
def test_a_reward_that_raises_gives_its_floor_and_is_counted(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = build_rewards([{"name": "raises_in_test", "params": {"kind": kind}}, "correct"])
    for _ in range(2):
        assert rewards[0](completions=["a", "x", "x"], answer=["1"] * 3) == [1.0, -0.75, -0.75]
    assert rewards.failures == {"raises_in_test": 4, "correct": 0}
    assert len([r for r in caplog.records if "raises_in_test" in r.getMessage()]) == 1


def test_total_is_the_weighted_sum() -> None:
    rewards = default_reward_functions()
    assert rewards.weights == DEFAULT_REWARD_WEIGHTS == [1.0, 0.1, 0.1]
    told = rewards.explain(RIGHT, "12")
    assert told.total == pytest.approx(1.2)
    assert told.components == {"correctness_numeric": 1.0, "numeric": 1.0, "tag_fraction": 1.0}
    assert rewards.explain("<answer>3</answer>", "12").total == pytest.approx(0.1 + 0.05)
    assert rewards.bounds == pytest.approx((0.0, 1.2))
    assert breakdown({"a": 2.0, "b": 1.0, "c": None}, {"a": 0.5}).total == 2.0  # unknown weight 1


def test_range_of_the_total() -> None:
    names = ["exact_format", "approx_format", "check_answer", "check_numbers"]
    rewards = build_rewards(names, "working_solution")
    assert rewards.bounds == (-6.5, 12.5)
    assert rewards.explain("I do not know", "345").total == -6.5
    shown = "15 * 23\n<end_working_out>\n<SOLUTION>\n345\n</SOLUTION>"
    assert rewards.explain(shown, "345").total == 12.5
    for variant, total in (("origin", 13.5), ("notebook", 13.0)):
        specs = [{"name": n, "params": {"variant": variant} if "check" in n else {}} for n in names]
        best = build_rewards(specs, "working_solution").explain(shown.replace("\n345\n", "345"), "345").total
        assert best == total


def test_greatest_total() -> None:
    rewards = build_rewards(["xmlcount", "soft_format", "strict_format", "int", "correctness_exact"])
    assert rewards.explain(RIGHT + "\n", "12").total == pytest.approx(4.0)


def test_totals() -> None:
    names = ["accuracy", "format", "reasoning_steps", "cosine", "repetition_penalty"]
    rewards = build_rewards(names, "think_answer")
    good = "<think>\nStep 1: two and two.\nStep 2: count.\nStep 3: four.\n</think>\n\n<answer>\n4\n</answer>"
    assert rewards.explain(good, "$4$").total > 3.0
    assert rewards.explain("maybe maybe maybe maybe 7", "$4$").total < 1.0
    assert rewards.bounds == pytest.approx((-0.6, 4.0))


def test_tags_follow_the_prompt_format() -> None:
    form = get_format("reasoning_answer", tags={"answer_open": "<a>", "answer_close": "</a>"})
    one = build_rewards(["tag_fraction"], form)[0]
    assert one(completions=["<reasoning></reasoning><a></a>", "<answer></answer>"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("corect", "Did you mean 'correct'"),
        ({"name": "cosine", "params": {"maxlen": 3}}, "Did you mean 'max_len'"),
        ({"name": "repetition", "params": {"max_penalty": 1}}, "less than or equal to 0"),
        ({"name": "soft_overlong", "params": {"cache_tokens": 999}}, "cache_tokens"),
        ({"name": "accuracy", "params": {"neutral": 2}}, "less than or equal to 1"),
        ({"name": "check_numbers", "params": {"variant": "notbook"}}, "'bounded', 'origin' or 'notebook'"),
        ({"nam": "cosine"}, "Did you mean 'name'"),
        ({"weight": 1}, "no name"),
    ],
)
def test_mistakes_are_found_when_rewards_are_built(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_rewards([spec])


def test_token_rewards_need_ids() -> None:
    one = build_rewards([{"name": "soft_overlong", "params": {"max_tokens": 10, "cache_tokens": 5}}])[0]
    assert one(completions=["a", "b"], completion_ids=[[1] * 4, [1] * 10]) == [0.0, -1.0]
    with pytest.raises(ConfigError, match="completion_ids"):
        one(completions=["a"])


def test_registration_mistakes() -> None:
    with pytest.raises(ConfigError, match="registered twice"):
        reward("correct", low=0, high=1)(lambda completion: 1.0)
    with pytest.raises(ConfigError, match="low <= high"):
        Reward("r", lambda completion: 1.0, low=1, high=0)
    with pytest.raises(ConfigError, match=r"'golden' has no default.*'gold'"):
        Reward("r", lambda completion, golden: 1.0, low=0, high=1)


USER = """
from algorist.rewards import reward

calls = []

def trl_form(prompts, completions, answer, **kwargs):
    assert "tags" not in kwargs and kwargs["level"] == ["easy"] * len(completions)
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]

def only_some(completions):
    return [None if "x" in c else 0.25 for c in completions]

def wrong_number(completions, **kwargs):
    return [1.0]

def one(completion, *, parsed, gold, limit=3):
    return float(parsed.answer == gold and limit == 4)
one.low, one.high = -1.0, 1.0

def breaks(completions, **kwargs):
    raise KeyError("oops")
breaks.low = -2.0

@reward("declared_in_file", low=-3.0, high=3.0)
def declared(completion, *, problem):
    return 3.0 if problem["level"] == "easy" else 1 / 0

def whole(rollout, problem, *, limit: float = 0.5):
    if problem.level == "hard":
        return None
    assert problem["answer"] == problem.answer and rollout.parsed.answer is not None
    return rollout.grade.correct + limit

def any_name(r):
    return len(r.text)

class Count:
    seen = 0  # two sets of rewards do not share it
    def __call__(self, rollout):
        self.seen += 1
        return self.seen
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]
count = Count()

def nothing():
    return 1.0

async def later(completions):
    return []
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER.replace("declared_in_file", f"declared_in_{tmp_path.name}"))
    return path


def test_user_rewards_of_both_forms(user_file: Path) -> None:
    specs = [f"{user_file}:{n}" for n in ("trl_form", "only_some", "wrong_number", "breaks", "declared")]
    rewards = build_rewards([*specs, {"name": f"{user_file}:one", "params": {"limit": 4}}])
    assert rewards.names == ["trl_form", "only_some", "wrong_number", "breaks", "declared", "one"]
    rows = {"answer": ["12", "7"], "level": ["easy", "easy"], "prompts": ["p", "p"]}
    chat = [[{"role": "assistant", "content": text}] for text in ("12", "8")]
    assert rewards[0](completions=chat, **rows) == [1.0, 0.0]
    assert rewards[1](completions=["a", "x"], **rows) == [0.25, None]
    assert rewards[2](completions=["a", "b"], **rows) == [0.0, 0.0] and rewards[2].failures == 2
    assert rewards[3](completions=["a", "b"], **rows) == [-2.0, -2.0] and rewards[3].failures == 2
    assert rewards[4](completions=["a", "b"], **{**rows, "level": ["easy", "hard"]}) == [3.0, -3.0]
    assert rewards[5](completions=[RIGHT, RIGHT], **rows) == [1.0, 0.0]
    assert (rewards[5].low, rewards[4].low) == (-1.0, -3.0)


def test_a_reward_is_a_function_of_a_rollout_and_its_problem(user_file: Path) -> None:
    """Of a group's rollouts, and of the lists that TRL passes."""
    form = get_format("reasoning_answer")
    texts = [RIGHT, RIGHT.replace("12", "13")]
    problems = [Problem("a", "3 * 4", "12", level="easy"), Problem("b", "3 * 4", "12", level="hard")]
    specs = ["whole", {"name": "whole", "params": {"limit": "1e-1"}}, "any_name", "count"]
    rewards = build_rewards(
        [
            {"name": f"{user_file}:{s}"} if isinstance(s, str) else s | {"name": f"{user_file}:whole"}
            for s in specs
        ]
    )
    groups = []
    for problem in problems:
        parsed = [form.parse(text) for text in texts]
        grades = [grade_completion(t, "12", parsed=p, matcher="symbolic") for t, p in zip(texts, parsed)]
        made = [Rollout([1], t, None, False, p, g) for t, p, g in zip(texts, parsed, grades)]
        groups.append(Group(problem, "3 * 4", [1], made))
    paid = rewards.pay(groups)
    rows = [rollout.rewards for group in paid for rollout in group.rollouts]
    assert [row["whole"] for row in rows] == [1.5, 0.5, None, None]
    assert [row["whole_2"] for row in rows] == [1.1, 0.1, None, None]
    assert [row["any_name"] for row in rows] == [len(text) for text in texts] * 2
    assert [row["count"] for row in rows] == [1, 2, 3, 4]
    assert paid[1].rollouts[0].reward == len(texts[0]) + 3
    columns = {"answer": ["12"] * 4, "level": ["easy", "easy", "hard", "hard"]}
    assert rewards[0](completions=texts * 2, **columns) == [1.5, 0.5, None, None]
    again = build_rewards([f"{user_file}:count"])
    assert again[0](completions=["x"]) == [1]
    again.load_state_dict(rewards.state_dict())
    assert again[0](completions=["x"]) == [5] and rewards.failures == dict.fromkeys(rewards.names, 0)


def test_user_reward_twice_is_imported_once(user_file: Path) -> None:
    first, second = (build_rewards([f"{user_file}:declared"])[0] for _ in range(2))
    assert first.function.child is second.function.child


@pytest.mark.parametrize(
    ("name", "message"),
    [("trl_fom", "Did you mean 'trl_form'"), ("nothing", "takes no arguments"), ("later", "is async")],
)
def test_user_reward_mistakes(user_file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_rewards([f"{user_file}:{name}"])


def test_user_file_mistakes(user_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file at .*Did you mean 'mine\.py'"):
        build_rewards([f"{tmp_path / 'mime.py'}:one"])
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        build_rewards([f"{broken}:f"])


def test_extension_recipe() -> None:
    name = "short_in_test"
    if name not in REWARDS:

        @reward(name, low=0.0, high=1.0)
        def short(completion: str, *, limit: int = 400) -> float:
            """1 for a short text."""
            return float(len(completion) <= limit)

    rewards = build_rewards([{"name": "correct", "weight": 1.0}, {"name": name, "weight": 0.5}])
    assert rewards.explain(RIGHT, "12").total == 1.5
    assert f"`{name}`" in reference_markdown()


@pytest.mark.slow
def test_reference_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.acceptance.rewards_page"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8") == done.stdout, (
        "run: python -m tests.acceptance.rewards_page > docs/rewards.md"
    )


def test_each_reward_is_short_and_sourced() -> None:
    for name in REWARDS:
        one = REWARDS.get(name)
        if one.function.__module__.startswith("algorist.rewards."):
            assert len(inspect.getsource(one.function).splitlines()) <= 45, name
            assert one.source and inspect.getdoc(one.function), name


def test_a_reward_of_weight_zero_is_told_and_not_counted() -> None:
    rewards = build_rewards([{"name": "correct", "weight": 1.0}, {"name": "well_formed", "weight": 0.0}])
    told = rewards.explain("<reasoning>\na\n</reasoning>\n<answer>\n7\n</answer>", "8")
    assert told.components == {"correct": 0.0, "well_formed": 1.0} and told.total == 0.0


def test_a_reward_of_weight_zero_changes_no_total() -> None:
    """A completion that every weighted reward leaves out has no total, whatever is logged beside them."""
    rollouts = [
        Rollout([1], text, None, False, get_format("reasoning_answer").parse(text))
        for text in (RIGHT, "none")
    ]
    groups = [Group(Problem("p", "q", "12"), "q", [1], rollouts)]

    def verdict(completions: list[str], **_: Any) -> list[float | None]:
        return [1.0 if text == RIGHT else None for text in completions]

    for weights in ([], [{"name": "well_formed", "weight": 0.0}]):
        (group,) = build_rewards([verdict, *weights]).pay(groups)
        assert [r.reward for r in group.rollouts] == [1.0, None], weights
        assert len(group.rollouts[1].rewards) == 1 + len(weights)
    only = build_rewards([{"name": "well_formed", "weight": 0.0}])
    assert [r.reward for r in only.pay(groups)[0].rollouts] == [0.0, 0.0], "a teacher alone"


def test_rewards_explain_on_the_command_line(call: Cli) -> None:
    completion = "<think>\nStep 1: a\nStep 2: b\nStep 3: c\n</think>\n\n<answer>\n4\n</answer>"
    command = ("rewards", "explain", "--json", "--recipe", "r1-zero-numina")
    done = call(*command, "--completion", completion, "--answer", "$4$")
    told = json.loads(done.stdout)
    assert list(told["rewards"]) == ["accuracy", "format", "reasoning_steps", "cosine", "repetition"]
    assert told["total"] > 3.9, done.stderr


def test_a_users_reward_runs_where_the_system_has_no_sysconf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sysconf")  # as on Windows
    (tmp_path / "mine.py").write_text(
        "def short(rollout, problem):\n    return float(len(rollout.text) < 100)\n"
    )
    (short,) = build_rewards([f"{tmp_path / 'mine.py'}:short"])
    assert short(completions=[RIGHT, RIGHT * 100], answer=["12", "12"]) == [1.0, 0.0]

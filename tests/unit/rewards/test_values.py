"""Every reward against the values that the reference systems are required to give (items in the test names)."""

from __future__ import annotations

import math

import pytest

from algorist.errors import ConfigError
from algorist.extensions.published_rewards.small_models import (
    approx_format,
    correctness_exact,
    correctness_numeric,
    cosine,
    exact_format,
    integer,
    numeric,
    reasoning_steps,
    soft_format,
    strict_format,
    tag_count,
    tag_fraction,
    tagged_or_hash,
    think_answer_format,
    xmlcount,
)
from algorist.extensions.published_rewards.systems import (
    accuracy,
    accuracy_last_number,
    check_answer,
    check_numbers,
    question_only_reward_fn,
    r1_zero,
    r1_zero_reward_fn,
)
from algorist.rewards import REWARDS, trl_reward
from algorist.rewards.basic import random_reward, repetition, soft_overlong, target_length

PERFECT = "<reasoning>\nabc\n</reasoning>\n<answer>\n5\n</answer>\n"  # 50 characters


def working(answer: str, middle: str = "\n") -> str:
    return f"I add.\n<end_working_out>{middle}<SOLUTION>\n{answer}\n</SOLUTION>"


# --- S0


@pytest.mark.parametrize(
    ("completion", "gold", "value"),
    [
        ("<answer>72</answer>", "72", 1.0),
        ("<ANSWER>\n72\n</ANSWER>", "72", 1.0),
        ("<answer>72.0000001</answer>", "72", 1.0),  # relative 1e-6
        ("<answer>72.001</answer>", "72", 0.0),
        ("<answer>0.0000005</answer>", "0", 1.0),  # absolute 1e-6
        ("so\n#### 72", "72", 1.0),
        ("so\n#### -7.5 apples", "-7.5", 1.0),
        ("72", "72", 1.0),
        ("<answer>1,000</answer>", "1000", 1.0),  # separators of thousands, on either side
        ("<answer>1000</answer>", "1,000", 1.0),
        ("<answer>1</answer>", "so\n#### 1,080", 0.0),  # the gold is the whole number
        ("so\n#### 1,080", "1", 0.0),
        ("<answer>1,00</answer>", "100", 0.0),  # not a float, other text
        ("<answer>1,00</answer>", "1,00", 1.0),  # equal text
        ("<answer>5</answer><answer>6</answer>", "6", 0.0),  # the first block counts
        ("<answer>6", "6", 0.0),
        ("<answer>nan</answer>", "72", 0.0),
        ("", "72", 0.0),
        ("<answer>72</answer>", "He has 3 * 24 = 72\n#### 72", 1.0),  # the gold is read in the same way
    ],
)
def test_correctness_numeric(completion: str, gold: str, value: float) -> None:
    assert correctness_numeric(completion, gold=gold) == value


def test_extraction_order() -> None:
    assert tagged_or_hash("#### 1\n<answer> 2 </answer>") == "2"
    assert tagged_or_hash("x #### 1 y") == "1"
    assert tagged_or_hash("  bare \n") == "bare"
    assert tagged_or_hash("İ<answer>5</answer>") == "5"  # a letter whose lower case is longer


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("5", 1),
        ("-5.25", 1),
        ("1e3", 1),
        ("1,000", 0),
        ("five", 0),
        ("", 0),
        ("nan", 0),
        ("inf", 0),
        ("1_0", 0),
    ],
)
def test_numeric(answer: str, value: float) -> None:
    assert numeric(f"<answer>{answer}</answer>") == value


def test_numeric_as_the_original_takes_nan() -> None:
    assert numeric("<answer>nan</answer>", finite_only=False) == 1.0
    assert numeric("<answer>-inf</answer>", finite_only=False) == 1.0
    assert numeric("<answer>nancy</answer>", finite_only=False) == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (PERFECT, 1.0),
        ("</ANSWER><Answer></reasoning><REASONING>", 1.0),
        ("<answer>5</answer>", 0.5),
        ("<answer><answer>", 0.25),
        ("", 0.0),
    ],
)
def test_tag_fraction(text: str, value: float) -> None:
    assert tag_fraction(text) == value


# --- S1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (working("345"), 3.0),
        (working("345", ""), 3.0),
        (working("345", " \n\n"), 3.0),
        ("<start_working_out>" + working("345"), 3.0),  # the start tag may be repeated
        ("<start_working_out><start_working_out>" + working("345"), 0.0),
        (working("345") + " bye", 0.0),
        (working("345", " and "), 0.0),
        (working("345") + working("345"), 0.0),
        (working(""), 0.0),
        ("<end_working_out><SOLUTION>345</SOLUTION>", 0.0),
        ("345", 0.0),
        ("", 0.0),
    ],
)
def test_exact_format(text: str, value: float) -> None:
    assert exact_format(text) == value


def test_start_tag_is_needed_when_the_prompt_does_not_open_it() -> None:
    assert exact_format(working("345"), prefilled=False) == 0.0
    assert exact_format("<start_working_out>" + working("345"), prefilled=False) == 3.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (working("1"), 1.5),
        ("<SOLUTION>1</SOLUTION>", 0.0),
        ("<end_working_out>", -1.5),
        ("", -3.0),
        (working("1") * 2, -3.0),
    ],
)
def test_approx_format(text: str, value: float) -> None:
    assert approx_format(text) == value


# answer block, gold, bounded, origin, notebook
CHECK_ANSWER = [
    ("345", "345", 5.0, 5.0, 5.0),
    ("\n345\n", "345", 5.0, 5.0, 3.5),
    ("3 45", "345", 3.5, 3.5, -4.5),
    ("345.0", "345", 2.0, 2.0, 2.0),
    ("311", "345", 2.0, 2.0, 2.0),  # 0.9014
    ("414", "345", 1.5, 1.5, 1.5),  # 1.2
    ("276", "345", 1.5, 1.5, 1.5),  # 0.8
    ("275", "345", -2.0, -2.5, -2.5),
    ("-345", "345", -2.0, -2.5, -2.5),
    ("many", "345", -2.0, -2.5, -4.5),
    ("1,234", "1234", -2.0, -2.5, -4.5),
    ("nan", "345", -2.0, -2.5, -4.5),
    ("0.0", "0", 5.0, 5.0, 5.0),  # full marks only for 0
    ("0.001", "0", -2.0, -2.5, -2.5),
]


@pytest.mark.parametrize(("block", "gold", "bounded", "origin", "notebook"), CHECK_ANSWER)
def test_check_answer(block: str, gold: str, bounded: float, origin: float, notebook: float) -> None:
    text = f"<SOLUTION>{block}</SOLUTION>"
    assert check_answer(text, gold=gold) == bounded
    assert check_answer(text, gold=gold, variant="origin") == origin
    assert check_answer(text, gold=gold, variant="notebook") == notebook


def test_no_solution_tag() -> None:
    for variant in ("bounded", "origin", "notebook"):
        assert check_answer("345", gold="345", variant=variant) == -2.0


CHECK_NUMBERS = [
    ("345", "345", 3.0, 4.0, 3.5),
    ("it is 345.0000001 metres, not 7", "345", 3.0, 4.0, -1.5),
    ("345, I think", "345", 3.0, 4.0, 3.5),
    ("330", "345", 2.5, 2.5, -1.5),
    ("400", "345", 1.5, 1.5, -1.5),
    ("7", "345", -1.5, -2.0, -1.5),
    ("none", "345", -1.5, -1.5, -2.5),
    ("1,234", "1234", -1.5, -2.0, 3.5),
    ("3", "three", -1.5, -2.0, 0.0),
]


@pytest.mark.parametrize(("block", "gold", "bounded", "origin", "notebook"), CHECK_NUMBERS)
def test_check_numbers(block: str, gold: str, bounded: float, origin: float, notebook: float) -> None:
    text = f"<SOLUTION>{block}</SOLUTION>"
    assert check_numbers(text, gold=gold) == bounded
    assert check_numbers(text, gold=gold, variant="origin") == origin
    if block != "it is 345.0000001 metres, not 7":  # within the tolerance, which all variants share
        assert check_numbers(text, gold=gold, variant="notebook") == notebook


def test_unknown_variant_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="'bounded', 'origin' or 'notebook'"):
        trl_reward("check_answer", variant="orign")


# --- S2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (PERFECT, 0.5),
        (PERFECT[:-1], 0.452),
        (PERFECT + "0123456789", 0.48),
        (PERFECT * 2, 0.0),
        ("<reasoning>a</reasoning><answer>5</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_xmlcount(text: str, value: float) -> None:
    assert len(PERFECT) == 50
    assert xmlcount(text) == pytest.approx(value, abs=1e-12)


def test_xmlcount_ends_at_its_floor() -> None:
    assert xmlcount(PERFECT + "x" * 2000) == pytest.approx(0.5 - 4.0)
    assert xmlcount(PERFECT + "x" * 20000) == -10.0


@pytest.mark.parametrize(
    ("text", "soft", "strict", "lenient"),
    [
        (PERFECT, 0.5, 0.5, 0.5),
        (PERFECT[:-1], 0.5, 0.0, 0.5),
        (PERFECT.replace("abc", "a\nb\n\nc"), 0.5, 0.5, 0.5),
        (PERFECT + "bye", 0.5, 0.0, 0.0),
        ("\n" + PERFECT, 0.0, 0.0, 0.0),
        ("<reasoning>a</reasoning><answer>5</answer>", 0.5, 0.0, 0.0),
        ("<reasoning>a</reasoning> so <answer>5</answer>", 0.0, 0.0, 0.0),
        ("<answer>5</answer><reasoning>a</reasoning>", 0.0, 0.0, 0.0),
        (PERFECT * 2, 0.5, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_formats(text: str, soft: float, strict: float, lenient: float) -> None:
    assert soft_format(text) == soft
    assert strict_format(text) == strict
    assert strict_format(text, require_final_newline=False) == lenient


@pytest.mark.parametrize(
    ("text", "gold", "exact", "whole"),
    [
        ("<answer>\n5\n</answer>", "5", 2.0, 0.5),
        ("<answer>5.0</answer>", "5", 0.0, 0.0),
        ("<answer>1,000</answer>", "1000", 0.0, 0.0),
        ("<answer>-5</answer>", "-5", 2.0, 0.0),
        ("<answer>4</answer><answer>5</answer>", "5", 2.0, 0.5),
        ("<answer>5", "5", 2.0, 0.5),
        ("5", "5", 2.0, 0.5),
        ("<answer>²</answer>", "2", 0.0, 0.0),
        ("", "5", 0.0, 0.0),
    ],
)
def test_last_answer(text: str, gold: str, exact: float, whole: float) -> None:
    assert correctness_exact(text, gold=gold) == exact
    assert integer(text) == whole


# --- S3


def triple(result: dict[str, float]) -> tuple[float, float, float]:
    assert list(result) == ["format_reward", "answer_reward", "reward"]
    return result["format_reward"], result["answer_reward"], result["reward"]


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("so</think> <answer>4</answer>", "4", (1, 1, 1)),
        ("so</think> <answer>5</answer>", "4", (1, 0, 0)),
        ("so</think>\n<answer>4</answer>", "4", (0, 0, 0)),
        ("so</think><answer>4</answer>", "4", (0, 0, 0)),
        ("so</think>  <answer>4</answer>", "4", (0, 0, 0)),
        ("so</think> <answer>4", "4", (0, 0, 0)),
        ("4", "4", (0, 0, 0)),
        ("", "4", (0, 0, 0)),
        ("so</think> <answer>it is \\boxed{4}.</answer>", "4", (1, 1, 1)),
        ("so</think> <answer>\\boxed{3} no, \\boxed{4}</answer>", "4", (1, 1, 1)),
        ("so</think> <answer>\\boxed{4</answer>", "4", (1, 0, 0)),
        ("so</think> <answer>3</answer> <answer>4</answer>", "4", (1, 1, 1)),
        ("so</think> <answer>4</answer>", "\\boxed{4}", (1, 1, 1)),
        ("so</think> <answer>4</answer>", 4, (1, 1, 1)),
        ("so</think> <answer>0.5</answer>", 0.5, (1, 1, 1)),
        ("so</think> <answer>4</answer>", ["5", 4], (1, 1, 1)),
        ("so</think> <answer>4</answer>", ["5", "6"], (1, 0, 0)),
        ("so</think> <answer>2/4</answer>", "1/2", (1, 0, 0)),  # unreduced
        ("so</think> <answer>8/2</answer>", "4", (1, 0, 0)),  # integer truth, not an integer to look at
        ("so</think> <answer>4.0</answer>", "4", (1, 1, 1)),
    ],
)
def test_r1_zero(response: str, truth: object, expected: tuple[int, int, int]) -> None:
    assert triple(r1_zero_reward_fn(response, truth)) == expected  # type: ignore[arg-type]


def test_equal_values_in_another_form_without_fast() -> None:
    assert triple(r1_zero_reward_fn("</think> <answer>2/4</answer>", "1/2", fast=False)) == (1, 1, 1)
    assert triple(r1_zero_reward_fn("</think> <answer>8/2</answer>", "4", fast=False)) == (1, 1, 1)


def test_r1_zero_lenient_about_the_gap() -> None:
    text = "so</think>\n\n<answer>4</answer>"
    assert (r1_zero(text, gold="4"), r1_zero(text, gold="4", any_gap=True)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("thus \\boxed{4}", (1, 1, 1)),
        ("thus \\boxed{\\frac{1}{2}}", (1, 0, 0)),
        ("thus 4", (0, 0, 0)),
        ("$x$ thus \\boxed{4", (0, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_question_only(response: str, expected: tuple[int, int, int]) -> None:
    assert triple(question_only_reward_fn(response, "4")) == expected


# --- S4


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("<think>x</think>\n<answer>\\boxed{4}</answer>", "\\boxed{4}", 1.0),
        ("<answer>$4$</answer>", "$4$", 1.0),
        ("<answer>5</answer>", "$4$", 0.0),
        ("thus \\boxed{4}", "$4$", 1.0),
        ("<answer>4</answer><answer>5</answer>", "4", 1.0),
        ("", "4", 0.0),
        ("<answer>4</answer>", "", 0.5),
    ],
)
def test_accuracy(text: str, gold: str, value: float) -> None:
    assert accuracy(text, gold=gold) == value


def test_plain_gold_is_neutral_on_request() -> None:
    assert accuracy("<answer>4</answer>", gold="4", latex_gold_only=True) == 0.5
    assert accuracy("<answer>4</answer>", gold="4", latex_gold_only=True, neutral=0.0) == 0.0
    assert accuracy("<answer>4</answer>", gold="4") == 1.0


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("<answer>so 4</answer>", "it is 4.0000001", 1.0),
        ("<answer>1,000</answer>", "1000", 1.0),
        ("<answer>4</answer>", "5", 0.0),
        ("<answer> Paris</answer>", "paris", 1.0),
        ("4", "4", 0.0),
    ],
)
def test_last_number(text: str, gold: str, value: float) -> None:
    assert accuracy_last_number(text, gold=gold) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>x</think><answer>4</answer>", 1.0),
        ("<think>\nx\n</think>\n\n<answer>\n4\n</answer>", 1.0),
        ("<think>x</think>\n<answer>4</answer>\nmore", 1.0),
        ("<think>x</think>\n<answer>4</answer> more", 0.0),
        ("<think>x</think><think>y</think><answer>4</answer>", 1.0),
        ("<think>x</think> so <answer>4</answer>", 0.0),
        ("\n<think>x</think><answer>4</answer>", 0.0),
        ("Hm <think>x</think><answer>4</answer>", 0.0),
        ("<answer>4</answer><think>x</think>", 0.0),
        ("", 0.0),
    ],
)
def test_think_answer_format(text: str, value: float) -> None:
    assert think_answer_format(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Step 1: a\nStep 2: b\nStep 3: c", 1.0),
        ("1. a\n2. b", 2 / 3),
        ("First, a", 1 / 3),
        ("a\n- b\n* c\nNext, d. Finally, e", 1.0),
        ("first, second,", 0.0),
        ("It costs 3. Then", 0.0),
        ("", 0.0),
    ],
)
def test_reasoning_steps(text: str, value: float) -> None:
    assert reasoning_steps(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("length", "right", "wrong", "flipped"),
    [(20, None, None, None), (500, 0.9, -0.3, -0.3), (1000, 0.8, -0.1, -0.5), (2000, 0.8, -0.1, -0.5)],
)
def test_cosine(length: int, right: float | None, wrong: float | None, flipped: float | None) -> None:
    text = "<answer>4</answer>".ljust(length)
    if right is None:
        right = 0.8 + 0.1 * (1 + math.cos(math.pi * 0.02))
        wrong = -0.1 - 0.2 * (1 + math.cos(math.pi * 0.02))
        flipped = -0.5 + 0.2 * (1 + math.cos(math.pi * 0.02))
    assert cosine(text, gold="4") == pytest.approx(right)
    assert cosine(text, gold="5") == pytest.approx(wrong)
    assert cosine(text, gold="5", flipped=True) == pytest.approx(flipped)


def test_cosine_of_nothing() -> None:
    assert cosine("", gold="5") == pytest.approx(-0.5)


def test_unreadable_gold_counts_as_wrong() -> None:
    assert cosine("", gold="") == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a b " * 4, -4 / 60), ("A b c a B C", -0.025), ("one two", 0.0), ("", 0.0), ("a b c d", 0.0)],
)
def test_repetition(text: str, value: float) -> None:
    assert repetition(text) == pytest.approx(value)


def test_tag_count() -> None:
    assert tag_count("<think></think><answer></answer>") == 1.0
    assert tag_count("<think><think></think>") == 0.25


# --- length


@pytest.mark.parametrize(("tokens", "value"), [(80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0)])
def test_soft_overlong(tokens: int, value: float) -> None:
    assert soft_overlong("", completion_ids=[1] * tokens, max_tokens=100, cache_tokens=20) == pytest.approx(
        value
    )


def test_soft_overlong_equals_trl() -> None:
    from trl.rewards import get_soft_overlong_punishment

    theirs = get_soft_overlong_punishment(max_completion_len=50, soft_punish_cache=15)
    lengths = list(range(60))
    ours = [soft_overlong("", completion_ids=[0] * n, max_tokens=50, cache_tokens=15) for n in lengths]
    assert ours == pytest.approx(theirs(completion_ids=[[0] * n for n in lengths]))


def test_target_length() -> None:
    assert target_length("", completion_ids=[1] * 128) == 0.0
    assert target_length("", completion_ids=[1] * 28, alpha=0.003) == pytest.approx(-0.3)
    assert target_length("", completion_ids=[1] * 9999) == -1.0


def test_names_of_the_systems() -> None:
    names = """correctness_numeric numeric tag_fraction exact_format approx_format check_answer check_numbers xmlcount
        soft_format strict_format int correctness_exact r1_zero question_only accuracy format reasoning_steps cosine
        repetition repetition_penalty correct well_formed think_answer_format soft_overlong"""
    for name in names.split():
        assert name in REWARDS
    assert REWARDS.get("repetition_penalty") is REWARDS.get("repetition")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))


def test_the_random_control_knows_nothing_of_the_answer() -> None:
    texts = [f"<answer>{n}</answer>" for n in range(2000)]
    paid = [random_reward(text) for text in texts]
    assert set(paid) == {0.0, 1.0} and abs(sum(paid) / 2000 - 0.5) < 0.05  # four standard deviations
    assert paid == [random_reward(text) for text in texts]  # a resumed run draws the same
    other = [random_reward(text, seed=1) for text in texts]
    assert abs(sum(a == b for a, b in zip(paid, other, strict=True)) / 2000 - 0.5) < 0.05
    assert abs(sum(random_reward(text, share=0.1) for text in texts) / 2000 - 0.1) < 0.03
    with pytest.raises(ConfigError, match=r"share.*less than 1"):
        trl_reward("random", share=1)

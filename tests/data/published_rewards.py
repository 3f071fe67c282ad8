"""Ten published reward functions, shortened: what ``algorist rewards audit`` is tried on, as they are and with a defect planted.

Sources: open-r1 ``rewards.py`` (accuracy, format, tag count, reasoning steps, cosine, repetition), TRL ``think_format_reward`` and
``get_soft_overlong_punishment``, verl ``gsm8k.compute_score``, the GRPO gist of W. Brown (correctness, strict format). Apache-2.0, MIT.
"""

from __future__ import annotations

import math
import re


def last_answer(text):
    blocks = re.findall(r"<answer>\s*(.*?)\s*</answer>", text, re.S)
    return blocks[-1] if blocks else ""


def plain(text):
    return text.replace(",", "").replace("$", "").strip().rstrip(".")


def number(text):
    try:
        return float(plain(text))
    except ValueError:
        return None


def accuracy(completions, answer, **kwargs):
    """open-r1: 1 where the last answer equals the gold answer."""
    rewards = []
    for text, gold in zip(completions, answer):
        value = number(last_answer(text))
        rewards.append(float(value is not None and value == number(gold)))
    return rewards


def correctness(prompts, completions, answer, **kwargs):
    """The gist: 2 where the extracted text is the gold answer."""
    return [
        2.0 if plain(last_answer(text)) == plain(gold) else 0.0 for text, gold in zip(completions, answer)
    ]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl, GSM8K flexible: 1 where the answer block holds the gold number."""
    value = number(last_answer(solution_str))
    return 1.0 if value is not None and value == number(ground_truth) else 0.0


def strict_format(completions, **kwargs):
    """The gist: 0.5 for reasoning and answer blocks on lines of their own."""
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?$"
    return [0.5 if re.match(pattern, text, re.S) else 0.0 for text in completions]


def tag_count(completions, **kwargs):
    """open-r1: a quarter for each tag that occurs once."""
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    return [sum(0.25 for tag in tags if text.count(tag) == 1) for text in completions]


def think_format(completions, **kwargs):
    """TRL: 1 for one thinking block before the answer (tags of this prompt)."""
    pattern = r"^<reasoning>(?!.*<reasoning>)(.*?)</reasoning>.*$"
    return [1.0 if re.match(pattern, text, re.S) else 0.0 for text in completions]


def steps(completions, **kwargs):
    """open-r1: up to 1 for three marks of steps."""
    marks = r"(Step \d+:|^\d+\.|\n-|step by step|First,|Second,|Next,|Finally,|Then)"
    return [min(1.0, len(re.findall(marks, text)) / 3) for text in completions]


def cosine(completions, answer, **kwargs):
    """open-r1: right answers earn 1 to 0.5, less the longer; wrong ones -0.5 to -1, less the shorter."""
    rewards = []
    for text, right in zip(completions, accuracy(completions, answer)):
        share = min(len(text) / 4000, 1.0)
        low, high = (0.5, 1.0) if right else (-0.5, -1.0)
        rewards.append(low + 0.5 * (high - low) * (1.0 + math.cos(share * math.pi)))
    return rewards


def repetition(completions, **kwargs):
    """open-r1: down to -1 for repeated three-grams."""
    rewards = []
    for text in completions:
        words = text.lower().split()
        grams = list(zip(words, words[1:], words[2:]))
        rewards.append(-(1 - len(set(grams)) / len(grams)) if grams else 0.0)
    return rewards


def overlong(completions, **kwargs):
    """TRL, DAPO: 0 up to 300 words, then down to -1 at 400."""
    return [-min(max((len(text.split()) - 300) / 100, 0.0), 1.0) for text in completions]

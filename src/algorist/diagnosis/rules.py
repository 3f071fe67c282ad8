"""The rules: the table ``rules.yaml``, thresholds with their reason, and what takes more than a fact and a threshold.

Each fault has one threshold and one text, in ``preflight``, while a run trains, in ``diagnose`` and after an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from algorist.config import schema  # noqa: F401 (with it the extensions are registered)
from algorist.declared import registered
from algorist.diagnosis import course, demonstrations, evaluations, golds, sums, unchanged, unpaid
from algorist.diagnosis.course import rises
from algorist.diagnosis.facts import MOVING_STEPS
from algorist.diagnosis.rule import FACTS, RULES, Changes, Fact, Facts, Rule, rules_of
from algorist.diagnosis.signals import MIN_GROUPS
from algorist.diagnosis.unchanged import LOSS
from algorist.diagnosis.weights import HALF_MOVED, MOVED_SHARE

# ---- what shows before training
HARDLY_RIGHT, NEARLY_RIGHT = 0.05, 0.9
"""Share of right answers below which larger groups do not help (of 16 completions fewer than one is right), and above which neither."""
GOLDS_READ = 0.99
"""Share of gold answers that can be read below which it is worth a look: one in a hundred may be a slip of the data."""
LONG_S = 3600.0
"""Seconds of a run that are worth a question: nobody waits longer for what is only tried."""
# ---- what shows in the rollouts
NEARLY_ALL = 0.9
"""Share of groups without a signal at which a run has effectively stalled: at most one group in ten still teaches."""
NONE_ANSWERED = 0.98
"""Share without a readable answer at which there is nothing to grade."""
MOSTLY = 0.7
"""Share of truncated or unreadable completions at which they, not the answers, decide what is learned."""
FLAT_BY_GRADE = 0.7
"""Groups that are all right or all wrong have one reward rightly; above this share they are the reason."""
FAILS = 0.1
"""Share of completions on which a reward fails at which its floor is part of what the run learns: nearly every group of 16 has one."""
COPIES = 0.7
"""Share of groups whose completions are all one text. A healthy run stays well below a third."""
ANSWERED = 0.5
"""Of the truncated completions, the share that already holds an answer when they do not stop because they cannot."""
END_SHOWN = 0.1
"""Share of completions with an end-of-turn token as text. One in a hundred may be a model's whim."""
HARDER, EASIER = {"gsm8k": "math", "arithmetic": "gsm8k"}, {"math": "gsm8k"}
CORRECT = {"name": "correct", "weight": 1.0}
# ---- what shows in the training
LEAST_RATE = 1e-8
"""Adam moves a weight by about the learning rate per step. At 1e-8 a thousand steps move it by 1e-5, a thousandth of
the usual size of a weight; recipes for full fine-tuning take 1e-7 to 1e-5."""
LEAST_KL = 1e-6
"""KL per token (nats) to the start below which completions are sampled as if nothing had happened."""
LEAST_RELATIVE = 1e-6
"""|end − start| / |start| of the weights below which float32 arithmetic itself is of the same size."""
KL_STEPS = 20
"""Steps at half the peak rate or more before the KL says that the policy does not move."""
SURE = 6.0
"""Standard errors for the steepest drop of a run: the step is chosen among all, so chance alone reaches 3 to 4."""
CLEAR = 4.0
"""Standard errors for the comparison of two fixed windows."""
HALVED = 0.5
"""A policy is broken when it keeps less than half of its accuracy."""
LEAST_DROP, LEAST_UNREADABLE = 0.1, 0.3
"""Smallest fall of the accuracy that is worth a warning, and of readable completions that shows a broken policy."""
ENTROPY_TIMES, ENTROPY_NATS = 2.0, 1.0
"""An entropy that doubled and grew by a nat per token while the reward did not rise: the policy turns into noise."""
COLLAPSED, NARROW = 0.1, 0.3
"""Share of the entropy that is left: below a tenth of the first exploration is over; below three tenths of the widest it is when
few groups still differ (``FEW_USEFUL``)."""
FEW_USEFUL = 0.3
"""Share of groups that teach below which most of the sampling is wasted."""
LEAST_ENTROPY = 0.01
"""Nats per token at the start; below it a model is deterministic anyway and has nothing to lose."""
GROWN, GROWN_TOKENS, LITTLE_GAIN = 1.5, 8, 0.05
"""Completions half as long again (and by 8 tokens) without five points of accuracy for it."""
KL_LARGE = 0.5
"""Nats per token: a completion of 20 tokens is e^10 times less likely under the reference."""
GAP_LARGE = 0.1
"""Mean |sampler − trainer log-prob| in nats: tokens are off by 10 % on average. float32 gives 1e-6, bfloat16 engines
0.01 to 0.03."""
LONG_STEP = 0.3
"""Length of a step, of the weights' length, that no policy bears: what it knew is a third of what it then is."""
ALIGNED = 0.2
"""Agreement of advantages with correctness below which it is not the size of the steps that costs the accuracy."""
MISJUDGED, ENOUGH_SAME = 0.9, 8
"""Share of answers with the gold answer's number that a matcher calls wrong; and how many of these say it."""
STOPPED = 0.2
"""Share of completions that a stop string cuts before an answer."""
FALLEN = -4.0
"""Standard errors from the first to the last window from which on an accuracy has fallen."""
HOT = 1.5
"""Sampling temperature above which text falls apart before anything else is wrong with it."""
LOSS_TIMES, LOSS_NATS = 1.5, 0.5
"""The SFT loss rose from its best window to half as much again and by half a nat."""

for _name, _shows in {
    "first_failure": "first: {}",
    "tags": "tags in completions that ended: {}",
    "useful_share": "groups that would be useful: {}",
    "broken_characters": "{} of the completions hold bytes that are no character",
    "longest_room": "{} tokens are left for a prompt",
    "do_not_fit": "{} of {looked_at} prompts do not fit",
    "golds_unread": "such as {gold_example}",
    "memory_steps": "{}",
    "lost_tags": "tags that do not come back: {}",
    "embeddings": "{outside} of {looked_at} prompts hold token ids up to {highest_id}, the model has {} embeddings",
    "changed_text": "{changed_prompts} of {looked_at} prompts, such as: {}",
    "start_token": "the token is {}",
    "end_token": "the token is {}",
    "trained_otherwise": "{}",
    "opened_tag": "the prompt ends with {}",
    "control_tokens": "{} problems",
}.items():
    FACTS.register(_name)(Fact(_shows))


FACTS.register("steps")(Fact("{stage} has {} steps", lambda f: f.settings.get(f"{f.stage}.max_steps")))


def warm_up_too_long(f: Facts) -> bool:
    """Return whether a stage ends before its learning rate has risen."""
    share = math.ceil(f.number("{stage}.warmup_ratio", 0) * f["steps"])
    return bool(f["steps"] <= f.number("{stage}.warmup_steps", share))


def larger_groups(f: Facts) -> dict[str, int]:
    """Return the changes for groups twice as large; a step keeps a whole number of groups."""
    size = int(f.number("grpo.group_size", 8)) * 2
    batch = int(f.number("grpo.batch_size", 16))
    windows = int(f.number("grpo.gradient_accumulation_steps", 1))
    fits = next(w for w in range(windows, windows + size + 1) if batch * w % size == 0)
    return {"grpo.group_size": size, "grpo.gradient_accumulation_steps": fits}


def more_sft(f: Facts) -> dict[str, Any]:
    """Return the change for SFT where there was none, or for twice as much of it."""
    if not f.settings.get("sft.enabled", True):
        return {"sft.enabled": True}
    if steps := f.settings.get("sft.max_steps"):
        return {"sft.max_steps": 2 * steps}
    return {"sft.epochs": 2 * f.number("sft.epochs", 1)}


def cooler_or(f: Facts, otherwise: dict[str, Any]) -> dict[str, Any]:
    """Return the change to temperature 1 where sampling is so hot that nothing else need be wrong, else ``otherwise``."""
    return {"grpo.temperature": 1.0} if f.number("grpo.temperature", 1.0) > HOT else otherwise


def rewards_with(f: Facts, name: str, weight: float) -> list[dict[str, Any]]:
    """Return the recipe's rewards, with one more or with another weight for it."""
    now = f.settings.rewards() or [CORRECT]
    return [*(r for r in now if r.get("name") != name), {"name": name, "weight": weight}]


def longer(f: Facts) -> int | None:
    """Return four times the limit."""
    return 4 * int(f["limit"])


def cut_off(f: Facts) -> dict[str, Any]:
    """Return the sections that cut a held-out part off the data that training and evaluation share; nothing where they differ."""
    train, held_out = (dict(f.settings.get(f"data.{part}") or {}) for part in ("train", "eval"))
    if any(
        train.get(key) != held_out.get(key) for key in ("name", "path", "hub", "subset", "split", "params")
    ):
        return {}
    sections = {}
    for key, section, part in (("train", train, "train"), ("eval", held_out, "held_out")):
        own = {name: value for name, value in section.items() if value and name not in ("name", "params")}
        params = {**(section.get("params") or {}), "of": section["name"], "part": part}
        sections[f"data.{key}"] = {"name": "holdout", **own, "params": params}
    return sections


def rounded(value: float) -> float:
    """Return a number with two significant digits."""
    return float(f"{value:.1e}")


def tenth(f: Facts) -> float:
    """Return a tenth of the rate, and at most 3e-4: a tiny model from scratch hardly takes more."""
    return rounded(min(f["learning_rate"] / 10, 3e-4))


def _warmup(f: Facts) -> int:
    """Return ten steps of warm-up, fewer in a short run, never fewer than there are."""
    steps = f.number("{stage}.max_steps", 100.0)
    return max(int(f.number("{stage}.warmup_steps", 0)), min(10, max(1, round(steps / 10))))


def _wider(f: Facts) -> float | None:
    """Return a temperature at which completions differ; None where ``top_k`` or ``top_p`` is what narrows them."""
    temperature = f.number("grpo.temperature", 1.0)
    if temperature < 0.95:
        return 1.0
    narrow = f.number("grpo.top_k", 0.0) > 0 or f.number("grpo.top_p", 1.0) < 1
    return None if narrow else 1.3


def _usual(f: Facts) -> float:
    """Return a hundred times the rate, and at least the usual one."""
    usual = 2e-5 if f.stage == "sft" else 1e-5 if f.settings.get("model.lora") else 1e-6
    return rounded(max(100 * f["learning_rate"], usual))


def _way(f: Facts) -> tuple[str, dict[str, Any]]:
    """Return why few groups are useful, and what helps."""
    shares, rate = f["useful_share"], f["pass_rate"]
    larger = max(shares, key=lambda size: shares[size])
    if shares[larger] < FEW_USEFUL and rate < HARDLY_RIGHT:
        return "hardly any completion is right: teach the format first, or take easier problems", more_sft(f)
    if rate > NEARLY_RIGHT:
        return "nearly every completion is right: take harder problems", {"grpo.temperature": 1.2}
    windows = int(f.number("grpo.gradient_accumulation_steps", 1))
    per = int(f.number("grpo.batch_size", 16)) * windows
    times = max(1, -(-int(larger) // per)) if per % int(larger) else 1
    change = {"grpo.group_size": int(larger), "grpo.gradient_accumulation_steps": windows * times}
    return f"groups of {larger} differ in {shares[larger]:.0%} of the problems", change


def _cut(f: Facts) -> bool:
    return bool(f.get("truncated_so_far", f.get("truncated", 0.0)) >= MOSTLY)


def _what(f: Facts) -> str:
    zero = f["rewards_from_to"] == "0 to 0"
    return "every reward is 0" if zero else "all completions of a group get the same reward"


def _overlong(limit: int) -> dict[str, Any]:
    params = {"max_tokens": limit, "cache_tokens": max(1, limit // 4)}
    return {"name": "soft_overlong", "weight": 0.5, "params": params}


def _broke(drop: dict[str, float] | None, least: float) -> bool:
    if drop is None or drop["z"] > -SURE:
        return False
    return drop["after"] <= HALVED * drop["before"] and drop["before"] - drop["after"] >= least


def golds_unreadable(f: Facts) -> bool:
    return f["golds_unread"] > 1 - GOLDS_READ


def few_useful_groups(f: Facts) -> bool:
    return not f["unpaid"] and f["useful_here"][1] < FEW_USEFUL


def no_signal(f: Facts) -> bool:
    return f["groups"] >= MIN_GROUPS and not f["differing_groups"] and not f["unpaid"]


def all_right(f: Facts) -> bool:
    return (
        f["all_right"] >= NEARLY_ALL and not f["unpaid"] and not rises(f)
    )  # what was learned was not too easy


def all_wrong(f: Facts) -> bool:
    return f["all_wrong"] >= NEARLY_ALL and not f["unpaid"]


def flat_reward(f: Facts) -> bool:
    return (
        not f["unpaid"]
        and f["same_reward"] >= NEARLY_ALL
        and f["all_right"] + f["all_wrong"] <= FLAT_BY_GRADE
    )


def identical_completions(f: Facts) -> bool:
    return f["identical"] >= COPIES and f["pass_rate"] <= NEARLY_ALL


def no_stop(f: Facts) -> bool:
    shown = f["end_of_turn"] >= END_SHOWN
    return shown or (f["truncated"] >= MOSTLY and f["truncated_answered"] >= ANSWERED)


def not_finite(f: Facts) -> bool:
    return f["bad_steps"] or f["saved_batches"]


def weights_barely_move(f: Facts) -> bool:
    moved = MOVED_SHARE <= f["moved_share"] < HALF_MOVED
    return f["half"] and (not f["empty_adapter"]) and moved and (f["steps_with_gradient"] >= MOVING_STEPS)


def learning_rate_too_small(f: Facts) -> bool:
    by_kl = f["steps_at_rate"] >= KL_STEPS and f.get("highest_kl", 1.0) < LEAST_KL
    by_weights = f.get("moved_share", 0.0) >= MOVED_SHARE and f["moved_relative"] < LEAST_RELATIVE
    return f["steps_with_gradient"] >= MOVING_STEPS and (
        f["learning_rate"] < LEAST_RATE or by_kl or by_weights
    )


def learning_rate_too_large(f: Facts) -> bool:
    if f.stage == "sft":
        best, now = (f["loss"]["best"], f["loss"]["last"])
        return now > LOSS_TIMES * best and now > best + LOSS_NATS
    entropy = f.get("entropy") or {"first": 0.0, "last": 0.0}
    noise = entropy["last"] > max(ENTROPY_TIMES * entropy["first"], entropy["first"] + ENTROPY_NATS)
    fell = _broke(f.get("accuracy_drop"), LEAST_DROP) or _broke(f.get("readable_drop"), LEAST_UNREADABLE)
    if f.get("longest_step", 0.0) >= LONG_STEP and not rises(f):
        return True
    misled = not f["taught"] and f.get("aligned", 1.0) < ALIGNED
    return (fell or noise) and (not f["reward_rises"]) and not misled


def accuracy_falls(f: Facts) -> bool:
    drop = f.get("accuracy_drop") or {"z": 0.0, "before": 0.0, "after": 0.0}
    broke = drop["z"] <= -SURE and drop["before"] - drop["after"] >= LEAST_DROP
    return broke or (f.get("accuracy_rise", 0.0) <= FALLEN and f["accuracy_gain"] <= -LEAST_DROP)


def stop_string_cuts(f: Facts) -> bool:
    return f["stopped"] >= STOPPED


def matcher_refuses(f: Facts) -> bool:
    return f["misjudged"] >= MISJUDGED and f["same_number"] >= ENOUGH_SAME


def entropy_collapse(f: Facts) -> bool:
    entropy = f["entropy"]
    if entropy["first"] < LEAST_ENTROPY or f["pass_rate"] > NEARLY_ALL:
        return False
    narrowed = entropy["last"] < NARROW * entropy["widest"] and 1 - f["same_reward"] < FEW_USEFUL
    return entropy["last"] < COLLAPSED * entropy["first"] or narrowed


def length_growth(f: Facts) -> bool:
    before, after = (f["length"]["first"], f["length"]["last"])
    grown = after > GROWN * before and after > before + GROWN_TOKENS
    return grown and f["accuracy_gain"] < LITTLE_GAIN and (f["length"]["z"] >= CLEAR)


def reward_hacking(f: Facts) -> bool:
    up, down, lost = (f["hacked"][key] for key in ("reward_z", "accuracy_z", "lost"))
    return up >= CLEAR and down <= -CLEAR and (lost >= LITTLE_GAIN)


SAYS: dict[str, Callable[[Facts], str]] = {
    "weights_unchanged": unchanged.why_unchanged,
    "flat_reward": lambda f: (
        "The rewards do not tell right from wrong: in nearly every group all completions get the same reward."
        + (f" {f['right_unpaid']}." if f.get("right_unpaid") else "")
    ),
    "held_out_falls": evaluations.why_held_out_falls,
    "takes_too_long": lambda f: (
        f"It takes about {f['lasts']} on this machine; half of that with {f['half_of_it']}."
        + (" The change below takes about an evening." if f["evening"] else "")
        + (" A recipe for machines without a GPU: algorist run smollm2-demo" if f["laptop"] else "")
    ),
    "few_useful_groups": lambda f: (
        f"Only {f['useful_here'][1]:.0%} of groups of {f['useful_here'][0]} would be useful; {_way(f)[0]}."
    ),
    "nothing_answered": lambda f: (
        f.fill(
            "{silent} of {completions} completions have no answer that can be read, so none can be right: the model does not write the prompt format {prompt_format}"
        )
        + (f.fill(", or does not reach the answer within {limit} tokens.") if _cut(f) else ".")
    ),
    "no_signal": lambda f: f.fill(
        f"Nothing can be learned so far: {_what(f)} ({{completions}} completions in {{groups}} groups), so every advantage is 0."
    ),
    "no_stop": lambda f: (
        "The model does not stop: completions "
        + (
            "show an end-of-turn token as text"
            if f["end_of_turn"] >= END_SHOWN
            else "give an answer and continue to the token limit"
        )
        + ". The chat template and the tokenizer's end-of-sequence token do not belong together: set eos_token in tokenizer_config.json and "
        + f"eos_token_id in generation_config.json of {f.settings.get('model.name', 'the model')} to the token that ends a turn in its template."
    ),
}
LEAST_COMPLETION = 16
"""Tokens that a completion can do with, where most prompts leave it no more."""
CHANGE: dict[str, Changes | Callable[[Facts], Changes]] = {
    "does_not_fit": lambda f: f["memory_change"],
    "takes_too_long": lambda f: f["evening"],
    "held_out_falls": lambda f: (
        {"eval.engine": f.settings.get("grpo.engine", "auto")} if evaluations.evaluates_others(f) else {}
    ),
    "prompt_changed": lambda f: dict(f["asked_otherwise"]),
    "stop_string_cuts": lambda f: (
        {key: [] for key in ("grpo.stop_strings", "eval.stop_strings") if f.settings.get(key)}
    ),
    "prompts_too_long": lambda f: (
        {"grpo.max_completion_tokens": f["context"] - f["longest"]}
        if 2 * f["do_not_fit"] > f["looked_at"] and f["longest"] < f["context"] - LEAST_COMPLETION
        else {"data.train.max_prompt_tokens": max(1, f["context"] - f["limit"])}
    ),
    "template_opens_a_tag": lambda f: (
        {"prompt.format": "think_answer"}
        if f["opened_tag"] == "<think>"
        else {"prompt.tags.reasoning_open": f["opened_tag"]}
    ),
    "warm_up_too_long": lambda f: {f"{f.stage}.warmup_steps": f["steps"] // 10},
    "few_useful_groups": lambda f: _way(f)[1],
    "held_out_leaks": cut_off,
    "nothing_answered": lambda f: cooler_or(
        f, {"grpo.max_completion_tokens": longer(f) if _cut(f) else None, **more_sft(f)}
    ),
    "no_signal": lambda f: {"sft.enabled": True, **larger_groups(f)},
    "demonstrations_left_out": {"sft.max_length": lambda f: 4 * int(f.number("sft.max_length", 1024))},
    "all_right": lambda f: {
        "data.train.name": HARDER.get(str(f.settings.get("data.train.name"))),
        **larger_groups(f),
        "grpo.temperature": 1.2,
    },
    "all_wrong": lambda f: cooler_or(
        f,
        {
            "data.train.name": EASIER.get(str(f.settings.get("data.train.name"))),
            **more_sft(f),
            **larger_groups(f),
        },
    ),
    "identical_completions": lambda f: {"grpo.temperature": _wider(f), "grpo.top_k": 0, "grpo.top_p": 1.0},
    "truncated": lambda f: cooler_or(f, {"grpo.max_completion_tokens": longer(f)}),
    "unparseable": lambda f: cooler_or(f, {**more_sft(f), "rewards": rewards_with(f, "well_formed", 0.5)}),
    "not_finite": lambda f: (
        {"grpo.loss": LOSS}
        if f.stage == "grpo" and ":" in str(f.settings.get("grpo.loss.name", ""))
        else {
            "model.dtype": "bfloat16" if f.settings.get("model.dtype") == "float32" else "float32",
            f"{f.stage}.learning_rate": tenth(f),
            f"{f.stage}.max_grad_norm": 0.5,
        }
    ),
    "weights_unchanged": lambda f: (
        unchanged.in_the_way(f)
        or {
            "model.dtype": "float32",
            "model.lora": {"rank": 16, "alpha": 32},
            f"{f.stage}.learning_rate": _usual(f) if f["learning_rate"] <= LEAST_RATE else None,
        }
    ),
    "learning_rate_too_small": {"{stage}.learning_rate": _usual},
    "learning_rate_too_large": {"{stage}.learning_rate": tenth, "{stage}.warmup_steps": _warmup},
    "entropy_collapse": {
        "grpo.loss.clip_high": lambda f: 0.28 if 0.1 <= f.number("grpo.loss.clip_high", 0.0) < 0.28 else None,
        "grpo.learning_rate": lambda f: rounded(f["learning_rate"] / 3),
        "grpo.temperature": lambda f: max(1.0, f.number("grpo.temperature", 1.0)),
        "grpo.beta": lambda f: max(0.01, f.number("grpo.beta", 0.0)),
    },
    "length_growth": lambda f: {
        "grpo.loss.name": "dr_grpo",
        "grpo.advantage": "group_centered",
        "rewards": [CORRECT, _overlong(f["limit"])],
    },
    "kl_blow_up": {
        "grpo.beta": lambda f: max(10 * f.number("grpo.beta", 0.0), 0.04),
        "grpo.learning_rate": lambda f: rounded(f["learning_rate"] / 3),
    },
    "reward_hacking": {
        "rewards": [CORRECT, {"name": "well_formed", "weight": 0.2}],
        "grpo.beta": lambda f: max(0.04, f.number("grpo.beta", 0.0)),
    },
    "log_prob_mismatch": lambda f: (
        {"model.lora.dropout": 0.0}
        if f.number("model.lora.dropout", 0.0)
        else {"model.dtype": "float32", "grpo.engine": "transformers"}
    ),
}

_MODULES = (course, demonstrations, evaluations, golds, sums, unchanged, unpaid)
_NAMES = {name: value for module in _MODULES for name, value in vars(module).items()} | globals()
for _rule in rules_of(Path(__file__).with_suffix(".yaml"), _NAMES):
    RULES.register(_rule.name)(_rule)


def all_rules() -> dict[str, Rule]:
    """Return the rules by name: the core's and a user's, then those that extensions bring."""
    own = [RULES.get(name) for name in RULES]
    return {each.name: each for each in [*own, *(r for cls in registered() for r in cls.rules)]}

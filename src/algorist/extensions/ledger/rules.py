"""Facts of the ledger, and the rules that read it; where there is no run yet, the recipe alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from algorist.diagnosis import updates
from algorist.diagnosis.course import RISEN, rises
from algorist.diagnosis.facts import MOVING_STEPS
from algorist.diagnosis.rule import Changes, Facts, Share, Unknown, fact, rules_of
from algorist.diagnosis.signals import middle

PREFIX = "ledger/"
GRADES = ("correct", "correctness_numeric", "correctness_exact", "correctness")
"""Rewards that pay right answers."""
DROWNED = 0.1
"""Weight of such a reward, of the largest other one, below which the other decides. And its share of the advantages."""
ALIGNED, TURNED = 0.15, -0.2
"""Agreement of advantages with correctness below which right answers are not what is learned, and below which wrong ones are."""
DECAYS = 0.01
"""Share of the weights that the decay takes in one step: in 70 steps half of them."""
CUT_AWAY, LEAST_NORM = 1e-3, 1e-5
"""Factor by which a gradient is cut, and a limit of its norm, from which on Adam's steps shrink too."""
MUCH_BONUS, MUCH_BETA = 0.1, 1.0
"""Weights of entropy and of KL, in units of advantage per nat, that outweigh rewards; usual are 0.001 and 0.02."""
RULING = 0.5
"""Share of the gradient of a term beside the rewards' that rules the update."""
DECIDES, UNRELATED = 0.8, 0.3
"""Share of the advantages of a reward that decides alone, and an agreement with correctness below which it pays something else."""
FELL = -2.0
"""Standard errors by which an accuracy has fallen from the first to the last window."""
FOLLOWS = 0.7
"""Share of the rewards' agreement with correctness that advantages keep. Healthy ones keep nearly all."""
SCALES = ("per_reward_normalized",)
"""Advantages that give rewards of any size the same."""
CHANGED = 0.25
"""Share of the advantages' size that comes from a plugin and is no small correction."""
STILL = 1e-6
"""Length of a step, of the weights' length, that teaches nothing: Adam's are 1e-5 (a rate of 1e-7) to 1e-2."""
UNBOUNDED = 10.0
"""Clip of the ratio that bounds nothing: a token may become eleven times as likely before an update leaves it out; usual are 0.2 and
CISPO's cap of 5."""
FLAT = 2.0
"""Temperature from which on a teacher's distribution says little: at 4, of two tokens 4 nats apart the worse one gets 0.27."""
FAINT = 0.1
"""Factor alpha / rank of an adapter below which its steps hardly count at usual rates; usual is 2."""
ADAPTIVE = ("adam", "lion", "adafactor", "muon", "apollo", "galore", "lomo")
"""Optimizers whose step is as long as the rate, however small the gradient."""


def medians(f: Facts, prefix: str) -> dict[str, float]:
    """Return the median over the logged steps of the metrics that begin so, by the rest of their names (Unknown: none)."""
    lines = f.signals.lines.get(f.stage, ())
    names = {name for line in lines for name in line if name.startswith(PREFIX + prefix)}
    values = {name: middle(f.signals.series(name, f.stage)) for name in sorted(names)}
    known = {name.removeprefix(PREFIX + prefix): v for name, v in values.items() if v == v}
    if not known:
        raise Unknown(prefix)
    return known


@fact("rewards: {}", "moved_by_rewards", first=True)
def moved_by_rewards(f: Facts) -> str | None:
    shares, agree = f.get("reward_shares", {}), f.get("agreements", {})
    if not (shares or agree or f.signals.series("ledger/added")):
        return None
    parts = [f"{name} {Share(v)}" for name, v in sorted(shares.items(), key=lambda item: -abs(item[1]))]
    text = f"{', '.join(parts)} of the advantages" if parts else "no reward made the advantages"
    if agree:
        text += "; agreement with correctness: " + ", ".join(f"{name} {v:+.2f}" for name, v in agree.items())
    if added := f.get("ledger/added"):
        text += f"; {Share(added)} of their size from extensions"
    return text


@fact("gradient: {}", "moved_by_terms", first=True)
def moved_by_terms(f: Facts) -> str | None:
    terms = f["term_shares"]
    return ", ".join(f"{name} {Share(v)}" for name, v in sorted(terms.items(), key=lambda i: -abs(i[1])))


@fact("a step: {}", "moved_by_steps", first=True)
def moved_by_steps(f: Facts) -> str | None:
    step = medians(f, "step/")
    causes = [f"{name} {step[name]:.1e}" for name in ("gradient", "decay") if step.get(name)]
    text = (
        f"{step['length']:.1e} of the weights' length: {', '.join(causes)}" if causes else "no weight moves"
    )
    if step.get("clipped", 1.0) < 1:
        text += f"; max_grad_norm leaves {step['clipped']:.2g} of the gradient"
    return text + f"; the schedule {Share(step['schedule'])} of the peak rate" * ("schedule" in step)


@fact("tokens: {}", "moved_on_tokens", first=True)
def moved_on_tokens(f: Facts) -> str | None:
    names = {"truncated": "on truncated completions", "unread": "on unread ones", "before_reply": "before a reply",
             "first": "on first tokens", "last": "on last", "counted": "of all tokens count"}  # fmt: skip
    shares = medians(f, "tokens/")
    return ", ".join(f"{Share(shares[key])} {text}" for key, text in names.items() if key in shares)


@fact("shares of the advantages: {}")
def reward_shares(f: Facts) -> dict[str, float]:
    return {name: Share(value) for name, value in medians(f, "reward/").items()}


@fact("agreement with correctness: {}")
def agreements(f: Facts) -> dict[str, float]:
    return {name: round(value, 2) for name, value in medians(f, "correct/").items()}


@fact("shares of the gradient: {}")
def term_shares(f: Facts) -> dict[str, float]:
    return {name: Share(value) for name, value in medians(f, "gradient/share/").items()}


def _weights(f: Facts) -> dict[str, float]:
    """Return the weights of the recipe's rewards by name."""
    return {str(r["name"]).rpartition(":")[2]: float(r.get("weight", 1.0)) for r in f.settings.rewards()}


@fact("weights of the rewards: {}")
def reward_weights(f: Facts) -> dict[str, float] | None:
    return _weights(f) or None


@fact("{}")
def grading_reward(f: Facts) -> str | None:
    """Name the reward that pays right answers."""
    return next((name for name in _weights(f) if name in GRADES), None)


@fact("{}")
def larger_reward(f: Facts) -> str | None:
    """Name the reward that outweighs it: by the ledger, else by the recipe."""
    shares = f.get("reward_shares") or f["reward_weights"]
    others = {name: abs(v) for name, v in shares.items() if name != f.get("grading_reward")}
    return max(others, key=others.__getitem__) if others else None


def negative_weight(f: Facts) -> bool:
    return f["reward_weights"][f["grading_reward"]] < 0


def correct_is_drowned(f: Facts) -> bool:
    name, weights = f["grading_reward"], f["reward_weights"]
    if weights[name] <= 0 or not f["larger_reward"]:
        return False
    agrees, shares = f.get("aligned"), f.get("reward_shares")
    if agrees is None or not shares:
        return weights[name] < DROWNED * max(abs(v) for other, v in weights.items() if other != name)
    return abs(agrees) < ALIGNED and shares.get(name, 0.0) < DROWNED and not rises(f)


def reward_pays_others(f: Facts) -> bool:
    """Return whether a reward that is not correctness decides alone and has nothing to do with it.

    Where no completion is right nothing can agree with correctness; then a reward that follows the length is no better.
    """
    share = f["reward_shares"].get(f["larger_reward"], 0.0)
    agrees = f.get("agreements", {}).get("reward")
    if agrees is None:
        agrees = 0.0 if abs(f["length_paid"]) >= FOLLOWS else 1.0
    paid = f["reward_weights"].get(f.get("grading_reward"), 0.0) > 0  # else ``correct_is_drowned``
    return (
        share >= DECIDES
        and abs(agrees) < UNRELATED
        and f["accuracy_rise"] < RISEN
        and not (paid or f["taught"])
    )


def advantage_disagrees(f: Facts) -> bool:
    """Return whether an advantage loses what the rewards say: one of the user's own, or one that scales a tiny reward up."""
    reward, advantage = (f["agreements"].get(name, 0.0) for name in ("reward", "advantage"))
    lost = reward >= FOLLOWS and TURNED < advantage < FOLLOWS * reward
    own = ":" in str(f["grpo.advantage"]) or f["grpo.advantage"] in SCALES
    return own and lost and f["accuracy_rise"] < RISEN


def plugin_moves_advantages(f: Facts) -> bool:
    changed = f["ledger/added"] >= CHANGED and f["accuracy_rise"] <= 0
    return bool(f.settings.get("plugins")) and changed and not f["taught"]


def own_loss_breaks(f: Facts) -> bool:
    return ":" in str(f.settings.get("grpo.loss.name")) and f["accuracy_rise"] <= FELL


def optimizer_hardly_moves(f: Facts) -> bool:
    adaptive = any(name in f["optimizer"] for name in ADAPTIVE)
    return not adaptive and f["step_length"] < STILL and f["steps_with_gradient"] >= MOVING_STEPS


def updates_unbounded(f: Facts) -> bool:
    updates, high = (f.settings.get(f"grpo.{key}") for key in ("num_iterations", "loss.clip_high"))
    return int(updates or 1) > 1 and float(high or 0.0) >= UNBOUNDED and not rises(f)


def teacher_flattened(f: Facts) -> bool:
    return f.number("grpo.teacher.temperature", 1.0) >= FLAT and not rises(f)


def adapter_hardly_counts(f: Facts) -> bool:
    lora = f.settings.get("model.lora") or {}
    return bool(lora) and lora["alpha"] / lora["rank"] < FAINT and not lora.get("rslora") and not rises(f)


@fact("optimizer {}")
def optimizer(f: Facts) -> str:
    return str(f.settings.get(f"{f.stage}.optim") or "adamw_torch")


@fact("a step is {:.1e} of the weights' length")
def step_length(f: Facts) -> float | None:
    return medians(f, "step/").get("length")


def advantage_turned(f: Facts) -> bool:
    agree = medians(f, "correct/")
    return agree.get("advantage", 0.0) <= TURNED and agree.get("reward", 0.0) >= -TURNED


def decay_too_strong(f: Facts) -> bool:
    takes = f.get("taken_by_decay") or f.number("{stage}.weight_decay", 0.0) * f.number(
        "{stage}.learning_rate", 0.0
    )
    return takes >= DECAYS


@fact("the decay takes up to {} of the weights in a step")
def taken_by_decay(f: Facts) -> Share | None:
    series = f.signals.series("ledger/step/decay", f.stage)
    return Share(max(v for _, v in series)) if series else None


@fact("weight decay {:g}")
def weight_decay(f: Facts) -> float:
    return f.number("{stage}.weight_decay", 0.0)


@fact("limit of the gradient norm {:g}")
def max_grad_norm(f: Facts) -> float:
    return f.number("{stage}.max_grad_norm", 1.0)


def gradient_cut_away(f: Facts) -> bool:
    if f.number("{stage}.max_grad_norm", 1.0) <= LEAST_NORM:
        return True
    return medians(f, "step/").get("clipped", 1.0) <= CUT_AWAY and f.stage == "grpo" and not rises(f)


@fact("max_grad_norm leaves {:.1e} of the gradient")
def left_by_norm(f: Facts) -> float | None:
    return medians(f, "step/").get("clipped")


def entropy_bonus_too_large(f: Facts) -> bool:
    return _rules(f, "entropy", f.number("grpo.entropy_bonus", 0.0), MUCH_BONUS)


def penalty_too_large(f: Facts) -> bool:
    return _rules(f, "reference", f.number("grpo.beta", 0.0), MUCH_BETA)


def _rules(f: Facts, term: str, weight: float, much: float) -> bool:
    """Return whether a term rules the gradient, or has a weight that does, while the accuracy does not rise."""
    share = abs(f.get("term_shares", {}).get(term, 0.0))
    return (share >= RULING or weight >= much) and not rises(f)


CHANGE: dict[str, Changes] = {
    "tokens_left_out": updates.LEFT_OUT,
    "negative_weight": {"rewards": lambda f: _with(f, abs)},
    "correct_is_drowned": {"rewards": lambda f: _with(f, lambda _: 1.0, others=0.1)},
    "teacher_flattened": {
        "grpo.teacher.temperature": lambda f: 1.0 if f.get("grpo.teacher.temperature") else None
    },
    "adapter_hardly_counts": {"model.lora.alpha": lambda f: 2 * int(f.settings.get("model.lora.rank") or 16)},
}


def _with(f: Facts, change: Any, others: float | None = None) -> list[dict[str, Any]]:
    """Return the recipe's rewards with another weight of the one that pays right answers, and smaller ones of the others."""
    rows = f.settings.rewards()
    for row in rows:
        weight = float(row.get("weight", 1.0))
        if str(row.get("name")).rpartition(":")[2] == f["grading_reward"]:
            row["weight"] = change(weight)
        elif others is not None and abs(weight) > others:
            row["weight"] = others if weight > 0 else -others
    return rows


RULES = tuple(rules_of(Path(__file__).with_suffix(".yaml"), {**vars(updates), **globals()}))

"""Rules about what the completions are: right, wrong, cut off, unreadable, alike. Thresholds are constants with their reason.

Each fault has one threshold and one text, in ``preflight``, while a run trains, in ``diagnose`` and after an evaluation.
"""

from __future__ import annotations

from typing import Any

from algorist.diagnosis.rule import Facts, rule

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


def rewards_with(f: Facts, name: str, weight: float) -> list[dict[str, Any]]:
    """Return the recipe's rewards, with one more or with another weight for it."""
    now = [{"name": r} if isinstance(r, str) else dict(r) for r in f.settings.get("rewards") or [CORRECT]]
    return [*(r for r in now if r.get("name") != name), {"name": name, "weight": weight}]


def longer(f: Facts) -> int | None:
    """Return four times the limit."""
    return 4 * int(f["limit"])


@rule(
    1,
    facts="unreadable reasons truncated_so_far truncated",
    says=lambda f: (
        f.fill(
            "{silent} of {completions} completions have no answer that can be read, so none can be right: the model does not write the "
            "prompt format {prompt_format}"
        )
        + (f.fill(", or does not reach the answer within {limit} tokens.") if _cut(f) else ".")
    ),
    change=lambda f: {"grpo.max_completion_tokens": longer(f) if _cut(f) else None, **more_sft(f)},
    explains="no_signal all_wrong few_useful_groups weights_unchanged",
    samples="unreadable truncated",
    example="sft.enabled=true; grpo.max_completion_tokens=1024",
)
def nothing_answered(f: Facts) -> bool:
    """Hardly one completion has an answer that can be read, so none can be right. The model does not write the prompt format, or is cut
    off before the answer.

    **Recognised**: from the second step on (16 completions) or from 64 completions in one step, at least {NONE_ANSWERED} of all
    completions of the run have no readable answer.

    **Change**: teach the format first, leave room for the answer, or take a format that the model already writes (`prompt.format`).
    """
    return bool(f["unreadable"] >= NONE_ANSWERED)


def _cut(f: Facts) -> bool:
    return bool(f.get("truncated_so_far", f.get("truncated", 0.0)) >= MOSTLY)


@rule(
    1,
    facts="rewards_from_to reasons differing_groups",
    says=lambda f: f.fill(
        f"Nothing can be learned so far: {_what(f)} ({{completions}} completions in {{groups}} groups), so every advantage is 0."
    ),
    change=lambda f: {"sft.enabled": True, **larger_groups(f)},
    explains="weights_unchanged",
    samples="any",
    example="sft.enabled=true; grpo.group_size=16",
)
def no_signal(f: Facts) -> bool:
    """In no group does one completion get another reward than the others, so nothing was learned: all rewards are 0, or every group is
    paid alike.

    **Recognised**: as early as `nothing_answered`, over the whole run, where no other rule says why.

    **Change**: larger groups, SFT before GRPO, or a reward that tells completions apart.
    """
    return bool(f["groups"] and not f["differing_groups"])


def _what(f: Facts) -> str:
    zero = f["rewards_from_to"] == "0 to 0"
    return "every reward is 0" if zero else "all completions of a group get the same reward"


@rule(
    2,
    facts="all_right accuracy_by_step same_reward",
    says="The problems are too easy: in nearly every group all completions are right, so every advantage is 0.",
    change=lambda f: {
        "data.train.name": HARDER.get(str(f.settings.get("data.train.name"))),
        **larger_groups(f),
        "grpo.temperature": 1.2,
    },
    explains="entropy_collapse few_useful_groups weights_unchanged no_signal",
    samples="right",
    example="grpo.group_size=16; grpo.temperature=1.2",
)
def all_right(f: Facts) -> bool:
    """The problems are too easy. All completions of a group are right, so all advantages are 0.

    **Recognised**: at least {NEARLY_ALL} of the groups in the recent window are all right.

    **Change**: take harder problems (`data.train.name`), larger groups or a higher temperature, so that some completions fail; or stop:
    the model has learned these problems.
    """
    return bool(f["all_right"] >= NEARLY_ALL)


@rule(
    1,
    facts="all_wrong accuracy_by_step reasons",
    says="No completion of nearly any group is right: the problems are too hard for this model, the model was not prepared, or the gold "
    "answers are not what the grader compares with.",
    change=lambda f: {
        "data.train.name": EASIER.get(str(f.settings.get("data.train.name"))),
        **more_sft(f),
        **larger_groups(f),
    },
    explains="few_useful_groups weights_unchanged no_signal",
    samples="wrong",
    example="sft.enabled=true; grpo.group_size=16",
)
def all_wrong(f: Facts) -> bool:
    """No completion is ever right, so all advantages are 0. The completions end and can be read (else `truncated`, `no_stop` or
    `unparseable` is said). The problems are too hard, the model was not prepared, or the gold answers are not what the grader
    compares with.

    **Recognised**: at least {NEARLY_ALL} of the groups in the recent window are all wrong.

    **Change**: look at a few wrong completions first. If they are right, check the gold answers with `algorist data check` and try
    another matcher on the stored rollouts with `algorist regrade`. Otherwise: SFT first, easier problems, larger groups.
    """
    return bool(f["all_wrong"] >= NEARLY_ALL)


@rule(
    1,
    facts="same_reward all_right all_wrong reward_by_step accuracy_by_step",
    says="The rewards do not tell right from wrong: in nearly every group all completions get the same reward.",
    change={"rewards": [CORRECT, {"name": "well_formed", "weight": 0.2}]},
    explains="weights_unchanged no_signal",
    samples="right wrong",
    example="rewards=[{name: correct, weight: 1.0}, {name: well_formed, weight: 0.2}]",
)
def flat_reward(f: Facts) -> bool:
    """The rewards do not tell right from wrong. Some completions are right and some wrong, and all get the same.

    **Recognised**: at least {NEARLY_ALL} of the groups in the recent window have one reward only, and at most {FLAT_BY_GRADE} are all
    right or all wrong.

    **Change**: add a reward that reads the answer, or raise its weight from 0. `algorist rewards explain` shows what one completion
    gets.
    """
    return bool(f["same_reward"] >= NEARLY_ALL and f["all_right"] + f["all_wrong"] <= FLAT_BY_GRADE)


@rule(
    1,
    facts="failing_share failures first_failure",
    says="The reward '{failing_reward}' failed on {failure_count} of {graded} completions; they get its floor, so it teaches nothing there. "
    "Correct the function: algorist rewards explain --completion TEXT --answer GOLD --recipe RECIPE",
    change={"rewards": [CORRECT]},
    explains="flat_reward weights_unchanged no_signal",
    samples="any",
    example="rewards=[{name: correct, weight: 1.0}]",
)
def reward_fails(f: Facts) -> bool:
    """A reward raises, or returns no finite number; such completions get its floor.

    **Recognised**: it failed on at least {FAILS} of all completions (`rewards/NAME/failures`). The console says it at the first one with
    the error, `training.log` has the traceback.

    **Change**: correct the function. Try it without a run: `algorist rewards explain --completion TEXT --answer GOLD --recipe RECIPE`.
    """
    return bool(f["failing_share"] >= FAILS)


@rule(
    1,
    facts="identical grpo.temperature grpo.top_p grpo.top_k",
    says="The completions of a group are the same text, so their rewards are equal and every advantage is 0.",
    change=lambda f: {
        "grpo.temperature": 1.0 if f.number("grpo.temperature", 1.0) < 0.95 else 1.3,
        "grpo.top_k": 0,
        "grpo.top_p": 1.0,
    },
    explains="all_right all_wrong few_useful_groups flat_reward weights_unchanged no_signal",
    samples="any",
    example="grpo.temperature=1.0; grpo.top_p=1.0; grpo.top_k=0",
)
def identical_completions(f: Facts) -> bool:
    """The completions of a group are copies of one text, so there is nothing to compare.

    **Recognised**: at least {COPIES} of the groups in the recent window hold one text only, and at most {NEARLY_ALL} of the answers are
    right.

    **Change**: sample more freely. If it began like that, `temperature`, `top_p` or `top_k` are too narrow; if it became so, see
    `entropy_collapse`.
    """
    return bool(f["identical"] >= COPIES and f["pass_rate"] <= NEARLY_ALL)


@rule(
    1,
    facts="truncated truncated_answered tokens_by_step",
    says="Most completions are cut off at {limit} tokens, before they reach an answer.",
    change={"grpo.max_completion_tokens": longer},
    explains="all_wrong weights_unchanged nothing_answered no_signal",
    samples="truncated",
    example="grpo.max_completion_tokens=1024",
)
def truncated(f: Facts) -> bool:
    """Completions are cut off before they reach an answer.

    **Recognised**: at least {MOSTLY} of the completions in the recent window end at `grpo.max_completion_tokens`, and fewer than
    {ANSWERED} of these hold an answer (else `no_stop`).

    **Change**: allow longer completions. If memory does not, teach shorter ones with SFT, or punish length.
    """
    return bool(f["truncated"] >= MOSTLY)


@rule(
    1,
    facts="finished_unreadable reasons tags readable_by_step prompt_format",
    says="Most finished completions hold no readable answer: the tags of the prompt format {prompt_format} are missing, or the text between "
    "them cannot be read.",
    change=lambda f: {**more_sft(f), "rewards": rewards_with(f, "well_formed", 0.5)},
    explains="all_wrong few_useful_groups weights_unchanged nothing_answered no_signal",
    samples="unreadable",
    example="sft.enabled=true; rewards=[{name: correct, weight: 1.0}, {name: well_formed, weight: 0.5}]",
)
def unparseable(f: Facts) -> bool:
    """Completions end but hold no answer that can be read. Either the tags of the prompt format are missing (grading reason
    `no_answer`), or what is between them is no mathematics (`unparseable_answer`, `ambiguous`).

    **Recognised**: at least {MOSTLY} of the finished completions in the recent window; at least 12 must have finished.

    **Change**: SFT on the format, a reward for it, or a prompt format that the model knows.
    """
    return bool(f["finished_unreadable"] >= MOSTLY)


@rule(
    1,
    facts="truncated truncated_answered end_of_turn",
    says=lambda f: (
        "The model does not stop: completions "
        + (
            "show an end-of-turn token as text"
            if f["end_of_turn"] >= END_SHOWN
            else "give an answer and continue to the token limit"
        )
        + ". The chat template and the tokenizer's end-of-sequence token do not belong together: set eos_token in tokenizer_config.json and "
        + f"eos_token_id in generation_config.json of {f.settings.get('model.name', 'the model')} to the token that ends a turn in its template."
    ),
    change={"sft.enabled": True, "model.chat_template": "chatml.jinja"},
    explains="truncated unparseable all_wrong few_useful_groups weights_unchanged nothing_answered no_signal",
    samples="end_of_turn truncated_answered",
    example="sft.enabled=true",
)
def no_stop(f: Facts) -> bool:
    """The model does not stop. It answers and then continues to the limit, or writes an end-of-turn token as plain text. Chat template
    and end-of-sequence token do not belong together, or a base model has never seen the end of a turn.

    **Recognised**: at least {MOSTLY} of the completions in the recent window are truncated and at least {ANSWERED} of these hold an
    answer; or at least {END_SHOWN} of all completions show an end-of-turn token (`<|im_end|>`, `<|eot_id|>`, `</s>`, …) as text.

    **Change**: in the model's folder, set `eos_token` in `tokenizer_config.json` and `eos_token_id` in `generation_config.json` to the
    token that ends a turn in its chat template. A base model learns to stop in SFT.
    """
    shown = f["end_of_turn"] >= END_SHOWN
    return bool(shown or (f["truncated"] >= MOSTLY and f["truncated_answered"] >= ANSWERED))

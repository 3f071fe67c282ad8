"""Rules about what can be known before training: tokenizer, prompts, gold answers, rewards that hang, groups, memory."""

from __future__ import annotations

from typing import Any

from algorist.diagnosis.rule import FACTS, Fact, Facts, rule
from algorist.diagnosis.rules_rollouts import END_SHOWN, more_sft
from algorist.diagnosis.rules_training import FEW_USEFUL

HARDLY_RIGHT, NEARLY_RIGHT = 0.05, 0.9
"""Share of right answers below which larger groups do not help (of 16 completions fewer than one is right), and above which neither."""
GOLDS_READ = 0.99
"""Share of gold answers that can be read below which it is worth a look: one in a hundred may be a slip of the data."""

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
}.items():
    FACTS.register(_name)(Fact(_shows))


@rule(
    1,
    facts="memory_steps",
    says="The stage {stage} does not fit into memory. In this order:",
    change=lambda f: f["memory_change"],
    stages="sft grpo",
    every_stage=True,
    example="grpo.gradient_checkpointing=true; grpo.batch_size=8; grpo.gradient_accumulation_steps=8",
)
def does_not_fit(f: Facts) -> bool:
    """The plan of a stage takes more than nine tenths of the memory.

    **Recognised**: by `preflight`, from the model's configuration alone, or from a few real steps.

    **Change**: gradient checkpointing, a smaller batch with as much more accumulation, then a smaller model, an adapter, or more GPUs;
    [below](#out-of-memory) is the whole list.
    """
    return bool(f["memory_steps"])


@rule(
    1,
    facts="lost_tags",
    says="The tokenizer cannot write {lost_tags} so that it can be read back: special tokens are taken out of completions, so these tags "
    "never appear in one. Take tags that are plain text to this tokenizer.",
    change={
        "prompt.tags": {
            "answer_open": "<answer>",
            "answer_close": "</answer>",
            "reasoning_open": "<reasoning>",
            "reasoning_close": "</reasoning>",
        }
    },
    explains="unparseable nothing_answered all_wrong few_useful_groups",
    example="prompt.tags={answer_open: <answer>, answer_close: </answer>, reasoning_open: <reasoning>, reasoning_close: </reasoning>}",
)
def tags_lost(f: Facts) -> bool:
    """A tag of the prompt format is a special token of the tokenizer, which is taken out of completions.

    **Recognised**: by `preflight`: a tag that is encoded and decoded does not come back.

    **Change**: tags that are plain text to this tokenizer, or another prompt format.
    """
    return bool(f["lost_tags"])


@rule(
    1,
    facts="embeddings",
    says="Prompts hold token ids for which the model has no embedding: the tokenizer belongs to another model, or tokens were added without "
    "embeddings. Put the tokenizer files that were saved with these weights into the model's folder.",
)
def ids_without_embeddings(f: Facts) -> bool:
    """The tokenizer makes ids that the model has no embedding for, so such a prompt cannot be computed.

    **Recognised**: by `preflight`, in one of up to 200 prompts; nothing is sampled then.

    **Change**: the tokenizer files that were saved with these weights (`model.name` is their folder).
    """
    return bool(f["outside"])


@rule(
    2,
    facts="changed_text",
    says="Prompts come back from the tokenizer as other text: unknown characters, or a normaliser changes them. Take the model with its own "
    "tokenizer.",
)
def prompts_changed(f: Facts) -> bool:
    """Prompts are not the same text after encoding and decoding, white space aside.

    **Recognised**: by `preflight`, in one of up to 200 prompts.

    **Change**: the model with its own tokenizer, or data without the characters that it does not know.
    """
    return bool(f["changed_prompts"])


@rule(
    2,
    facts="start_token",
    says="Prompts begin with {start_token} twice: the chat template writes it and the tokenizer adds it. Give model.chat_template a file "
    "without the first token.",
)
def start_twice(f: Facts) -> bool:
    """The token that starts a text is there twice.

    **Recognised**: by `preflight`, in one of up to 200 prompts.

    **Change**: `model.chat_template` with a copy of the template that leaves the token out.
    """
    return bool(f["start_token"])


@rule(
    1,
    facts="",
    says="The tokenizer names no end-of-sequence token, so no completion ends before the limit: set eos_token in the model folder's "
    "tokenizer_config.json to the token that ends a turn in its chat template.",
    explains="truncated no_stop",
)
def no_end_token(f: Facts) -> bool:
    """The tokenizer has no end-of-sequence token.

    **Recognised**: by `preflight`.

    **Change**: `eos_token` in the model folder's `tokenizer_config.json`.
    """
    return bool(f["no_end"])


@rule(
    1,
    facts="end_token",
    says="Prompts end with {end_token}, which the tokenizer adds: completions begin after the end of a text. Set add_eos_token to false in "
    "the model folder's tokenizer_config.json, or correct the post_processor of its tokenizer.json.",
)
def end_in_prompts(f: Facts) -> bool:
    """The tokenizer adds the end-of-sequence token to prompts.

    **Recognised**: by `preflight`, in one of up to 200 prompts.

    **Change**: `add_eos_token: false` in the model folder's `tokenizer_config.json`.
    """
    return bool(f["end_token"])


@rule(
    2,
    facts="trained_otherwise",
    says="SFT trains on prompts that differ from those that are sampled with.",
    change={"sft.source": "problems"},
    example="sft.source=problems",
)
def sft_prompts_differ(f: Facts) -> bool:
    """With `sft.source=prompt_response` SFT trains on the data's own prompts, and GRPO samples with those of the prompt format.

    **Recognised**: by `preflight`: the tokens of one of up to 200 prompts differ.

    **Change**: demonstrations made from the problems, or a `prompt.format` that writes what the data's prompt column has.
    """
    return bool(f["trained_otherwise"])


@rule(
    1,
    facts="first_failure",
    says="reward '{hanging_reward}' hangs: {first_failure}. Correct the function: algorist rewards explain --completion TEXT --answer GOLD "
    "--recipe RECIPE",
    change={"rewards": [{"name": "correct", "weight": 1.0}]},
    explains="reward_fails flat_reward",
    example="rewards=[{name: correct, weight: 1.0}]",
)
def reward_hangs(f: Facts) -> bool:
    """A reward takes longer than its `timeout_s` again and again, which ends a run.

    **Recognised**: by `preflight`; no step is tried then.

    **Change**: correct the function. Try it without a run: `algorist rewards explain --completion TEXT --answer GOLD --recipe RECIPE`.
    """
    return bool(f["hanging_reward"])


@rule(
    2,
    facts="broken_characters grpo.temperature",
    says="Completions hold bytes that are no character: the model is untrained or sampled too freely, or weights and tokenizer do not belong "
    "together.",
    change={"grpo.temperature": 0.7},
    example="grpo.temperature=0.7",
)
def broken_text(f: Facts) -> bool:
    """Completions hold bytes that are no character.

    **Recognised**: by `preflight`, in more than {END_SHOWN} of the completions of a model that SFT will not change.

    **Change**: a lower temperature; the tokenizer that belongs to the weights.
    """
    return bool(f["broken_characters"] > END_SHOWN)


@rule(
    2,
    facts="do_not_fit",
    says="Some prompts leave no room for {limit} tokens in the context of {context}.",
    change={"data.train.max_prompt_tokens": lambda f: max(1, f["context"] - f["limit"])},
    example="data.train.max_prompt_tokens=512",
)
def prompts_too_long(f: Facts) -> bool:
    """Prompt and completion together are longer than the model's context.

    **Recognised**: by `preflight`, of up to 2,000 prompts.

    **Change**: leave the longest problems out, or allow shorter completions.
    """
    return bool(f["do_not_fit"])


@rule(
    2,
    facts="golds_unread",
    says="{golds_unread:.1%} of the gold answers cannot be read; they are never paid.",
    change={"data.train.numeric_answers_only": True},
    example="data.train.numeric_answers_only=true",
)
def golds_unreadable(f: Facts) -> bool:
    """Gold answers that the grader cannot read, so that no completion is ever right.

    **Recognised**: by `preflight`: fewer than {GOLDS_READ} of the training problems have a gold answer that can be read.

    **Change**: correct the data (`algorist data check` lists them), or leave such problems out.
    """
    return bool(f["golds_unread"] > 1 - GOLDS_READ)


@rule(
    3,
    facts="useful_share pass_rate",
    says=lambda f: (
        f"Only {f['useful_here'][1]:.0%} of groups of {f['useful_here'][0]} would be useful; {_way(f)[0]}."
    ),
    change=lambda f: _way(f)[1],
    explains="weights_unchanged no_signal",
    example="grpo.group_size=16",
)
def few_useful_groups(f: Facts) -> bool:
    """Few groups would have right and wrong completions, so most of the sampling is wasted.

    **Recognised**: by `preflight`: fewer than {FEW_USEFUL} of groups of this size, estimated from the pass rates of some problems.

    **Change**: larger groups where they would differ more often, else problems that fit the model, or SFT first.
    """
    return bool(f["useful_here"][1] < FEW_USEFUL)


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

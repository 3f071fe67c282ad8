"""What calls and replies take, before a run: measured in what was sampled, and where SFT is to come, in its demonstrations."""

from __future__ import annotations

import time
from typing import Any

from algorist.extensions.tools.section import ToolsSection
from algorist.extensions.tools.source import Tools
from algorist.extensions.tools.watch import OF_ENVIRONMENT

READ = 200
"""Demonstrations that are read."""
TRIED_S = 2.0
"""About how long calls of demonstrations are tried."""


def preview(recipe: Any, source: Tools, look: Any) -> dict[str, Any]:
    """Return calls, tokens of replies and seconds of a call, and what GRPO takes beyond what was sampled (``Extension.preview``).

    Args:
        recipe: The resolved recipe.
        source: Its tools.
        look: ``preflight.completions.Look``: completions of the policy as it is, and what SFT will teach it.
    """
    grpo, section = recipe.grpo, source.section or ToolsSection()
    rollouts = [rollout for group in look.groups for rollout in group.rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns if turn.source not in OF_ENVIRONMENT]
    calls = len(turns) / len(rollouts)
    tokens = sum(rollout.sampled_mask.count(False) for rollout in rollouts) / len(rollouts)
    seconds = sum(turn.seconds for turn in turns) / max(1, len(turns))
    taught_calls, taught_tokens, taught_seconds = _taught(recipe, source, look)
    call_s = taught_seconds or seconds
    inline = all(tool.inline for tool in source.tools.values())
    # One call after the other: what answers some of them side by side takes processors from the decoding.
    step = grpo.batch_size * grpo.gradient_accumulation_steps / grpo.num_iterations
    numbers = {
        "calls": max(calls, taught_calls),
        "sampled_calls": calls,
        "reply_tokens": max(tokens, taught_tokens),
        "call_s": call_s,
        "more_tokens": max(0.0, taught_tokens - tokens),
        "more_s": max(0.0, taught_calls - calls) * call_s * step,
        "most_reply_tokens": min(grpo.max_completion_tokens, section.calls * section.output_tokens),
        "most_s": section.calls * (call_s if inline else section.seconds) * step,
    }
    where = "the demonstrations" if taught_calls > calls else "what was sampled"
    rows = {
        "calls": f"{numbers['calls']:.2g} a completion in {where}, {call_s * 1e3:.2g} ms each; their replies have "
        f"{numbers['reply_tokens']:.2g} of its tokens; at most {section.calls} calls, {numbers['most_reply_tokens']} tokens, "
        f"{numbers['most_s']:.2g} s a step"
    }
    return {**numbers, "rows": rows if source.tools else {}, "advice": []}


def _taught(recipe: Any, source: Tools, look: Any) -> tuple[float, float, float]:
    """Return calls and tokens of replies of a demonstration, and the seconds of a call."""
    from algorist.training.sft import demonstrations

    if not look.sft:
        return 0.0, 0.0, 0.0
    demos = demonstrations(look.sft[:READ], look.plan.form, look.policy.tokenizer, recipe.sft.source)
    replies = [(demo.completion, begin, end) for demo in demos for begin, end in demo.replies]
    calls = [call for text, begin, _ in replies if (call := source.calls.find(text[:begin]))]
    began, tried = time.perf_counter(), 0
    while tried < len(calls) and (not tried or time.perf_counter() - began < TRIED_S):
        source.tools[calls[tried].tool].call(calls[tried].request, None)
        tried += 1
    seconds = (time.perf_counter() - began) / max(1, tried)
    texts = ["", *(text[begin:end] for text, begin, end in replies)]
    tokens = sum(map(len, look.policy.tokenizer(texts, add_special_tokens=False)["input_ids"]))
    return len(replies) / len(demos), tokens / len(demos), seconds

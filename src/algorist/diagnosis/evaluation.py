"""The rules on an evaluation: its completions as facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from algorist.diagnosis.findings import Finding, Settings
from algorist.diagnosis.rule import Facts, Share, all_rules, apply
from algorist.diagnosis.signals import make_batch

RULES_OF_EVALUATION = ("nothing_answered", "truncated", "no_stop")
"""What a few completions of a model show, whether or not it was trained."""


def findings(rows: Sequence[Mapping[str, Any]], protocol: Mapping[str, Any]) -> list[Finding]:
    """Return what the rules say of the completions of an evaluation.

    Args:
        rows: Its samples, with the columns of ``store.rows.SCHEMA``.
        protocol: How they were drawn.
    """
    if not rows:
        return []
    batch, count = make_batch(rows), len(rows)
    facts = {
        "where": f"{count} completions",
        "completions": count,
        "silent": batch.unreadable,
        "unreadable": Share(batch.unreadable / count),
        "truncated": Share(batch.truncated / count),
        "truncated_answered": Share(batch.truncated_answered / max(1, batch.truncated)),
        "end_of_turn": Share(batch.end_of_turn / count),
        "reasons": dict(Counter(batch.reasons).most_common(4)),
        "limit": protocol.get("max_completion_tokens"),
        "prompt_format": protocol.get("prompt_format"),
    }
    rules = all_rules()
    return apply([rules[name] for name in RULES_OF_EVALUATION], Facts(Settings(), facts))

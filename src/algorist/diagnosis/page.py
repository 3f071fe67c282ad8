"""docs/troubleshooting.md, written from the rules."""

from __future__ import annotations

import textwrap
from pathlib import Path

from algorist.diagnosis.rule import Rule, all_rules

ROOMS = {
    "start": "What shows before training",
    "rollouts": "What shows in the rollouts",
    "training": "What shows in the training",
    "": "What extensions look at",
}
"""Module of a rule → heading; other modules are extensions."""
WIDTH = 118


def troubleshooting_page() -> str:
    """Return the whole page: how to read a diagnosis, the rules, and what no rule sees."""
    text = Path(__file__).with_name("troubleshooting.md").read_text(encoding="utf-8")
    rooms: dict[str, list[Rule]] = {room: [] for room in ROOMS}
    for rule in all_rules().values():
        rooms[rule.room].append(rule)
    parts = [
        f"## {ROOMS[room]}\n\n" + "\n".join(map(_section, rules)) for room, rules in rooms.items() if rules
    ]
    return text.replace("<!-- rules -->\n", "\n".join(parts))


def _section(rule: Rule) -> str:
    text = rule.text.removeprefix("**Means**: ")
    example = ", ".join(f"`{line}`" for line in rule.example)
    paragraphs = [*f"Severity {rule.severity}. {text}".split("\n\n"), *([example] if example else [])]
    return f"### {rule.name}\n\n" + "\n".join(
        textwrap.fill(paragraph, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
                      break_on_hyphens=False)
        for paragraph in paragraphs
    ) + "\n"  # fmt: skip

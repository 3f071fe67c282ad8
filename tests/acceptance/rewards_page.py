"""The reference page of the rewards, written from their docstrings: ``python -m tests.acceptance.rewards_page > docs/rewards.md``."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

from algorist.rewards.base import REWARDS, Reward
from algorist.rewards.systems.dapo import ANSWER_TABLES, NUMBER_TABLES

_HEAD = """\
# Rewards

Written by `python -m tests.acceptance.rewards_page > docs/rewards.md` from the docstrings in `src/algorist/rewards/`.

The total of a completion is the weighted sum of the rewards that a recipe names; each component is logged and stored:

```yaml
rewards:
  - {name: correct, weight: 1.0}
  - {name: cosine, weight: 0.5, params: {max_len: 2000}}
  - {name: my_rewards.py:brevity, weight: 0.1}
```

Weight 0 logs a reward without using it. Rewards of one system belong together, their scales differ: mixing them is
allowed, and `RewardSet.bounds` says what range comes out. Format rewards look for the tags of the recipe's prompt
format. `format` is the strict `think_answer_format`; "the completion follows its own prompt format" is `well_formed`.
"""
_CALLS = """\
## How rewards are called

TRL calls each with keyword lists: `prompts`, `completions`, the gold answers in `answer` (or `reference_answer`,
`ground_truth`, `solution`), and every other column. Completions may be texts, messages, lists of either (the first
one counts), token ids or tensors (with `build_rewards(..., decode=tokenizer.decode)`). Unknown keywords are accepted.
Several gold answers in a row: the one that serves the completion best counts. A reward that raises, returns no finite
number or finds no gold answer in a row gives its least value; it is counted in `failures`, logged once with its
traceback, and never stops a run. A missing gold column is an error before the first step.

## A reward of your own

One function, by path in a recipe (`my_rewards.py:brevity`), on one completion:

```python
def brevity(completion: str, *, gold: str, limit: int = 400) -> float:
    return float(len(completion) <= limit)
brevity.low, brevity.high = 0.0, 1.0   # low is what a completion gets when the function raises
```

It receives by keyword what its signature names of `parsed`, `gold`, `problem` (the row), `matcher`, `tags`, `prefilled`,
`completion_ids`; every other keyword is a parameter. Functions in TRL's form, `def f(completions, **kwargs) -> list[float]`,
work as they are.

In the package: write it in the file of its theme in `src/algorist/rewards/` under
`@reward("name", low=..., high=...)`, name it in a recipe with its weight (for the Python API: in `DEFAULT_REWARDS` and
`DEFAULT_REWARD_WEIGHTS`), and regenerate this page.

## Decisions

- `numeric` takes finite numbers only; `finite_only: false` also takes "nan" and "inf" as the original did.
- `check_answer` and `check_numbers` keep the documented total of their recipe, -6.5 … 12.5; the tables below are variants.
- `exact_format` counts a start tag that the prompt has opened as present, and allows whitespace between the blocks.
- `strict_format` wants the final newline; generated text rarely has it, `require_final_newline: false` does without.
- `xmlcount` has no least value in the original; here it ends at -10 (`floor`).
- `cosine` punishes short wrong texts most, as its formula says; `flipped: true` reverses that. It is clamped behind `max_len`.
- `accuracy` gives `neutral` (0.5) for a gold answer that cannot be read; better drop such rows: `algorist data check`.
- `r1_zero` wants exactly one space between the two tags; `any_gap: true` takes any whitespace.
"""


def reference_markdown() -> str:
    """Return the page: a table of all rewards, their descriptions, the variants, how to write one."""
    rewards = [REWARDS.get(name) for name in REWARDS if REWARDS.get(name).name == name]
    lines = [_HEAD, "| name | range | gold | parameters | source |", "|---|---|---|---|---|"]
    lines += [
        f"| `{r.name}`{_also(r)} | {r.low:g} … {r.high:g} | {'yes' if r.needs_gold else ''} | {_params(r)} | {r.source} |"
        for r in rewards
    ]
    lines += ["", "## What each one pays", ""]
    for r in rewards:
        lines += [f"**`{r.name}`**: {_flat(r)}", ""]
    lines += ["## Variants", ""]
    variants: dict[str, dict[str, Any]] = {
        "check_answer": {**ANSWER_TABLES},
        "check_numbers": {**NUMBER_TABLES},
    }
    for title, tables in variants.items():
        rows = {name: asdict(table) for name, table in tables.items()}
        fields = list(rows["bounded"])
        lines += [
            f"| {title} | {' | '.join(f.replace('_', ' ') for f in fields)} |",
            "|---" * (len(fields) + 1) + "|",
        ]
        lines += [
            f"| {name} | {' | '.join(f'{value:g}' for value in row.values())} |" for name, row in rows.items()
        ]
        lines.append("")
    return "\n".join([*lines, _CALLS])


def _also(reward: Reward) -> str:
    return f" (also {', '.join(f'`{a}`' for a in reward.aliases)})" if reward.aliases else ""


def _params(reward: Reward) -> str:
    return ", ".join(f"`{key}: {value}`" for key, value in reward.params.items())


def _flat(reward: Reward) -> str:
    return " ".join((inspect.getdoc(reward.function) or "").split())


if __name__ == "__main__":
    print(reference_markdown(), end="")

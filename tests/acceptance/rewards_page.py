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
## A reward of your own

A function of a rollout and its problem, by path in a recipe (`my_rewards.py:brevity`):

```python title="my_rewards.py"
def brevity(rollout, problem, limit: int = 400) -> float:
    if not problem.level:
        return None                        # does not apply: counts as nothing
    short = len(rollout.text) <= limit
    return float(short and rollout.grade.correct) or 0.5 * short
brevity.low, brevity.high = 0.0, 1.0       # the range; a value outside is a failure
```

| name | holds |
|---|---|
| `rollout` | `text`, `parsed` (`answer`, `reasoning`, `well_formed`, `flags`), `grade` (`correct`, `reason`), `completion_ids`, `log_probs`, `truncated`, `turns` |
| `problem` | `question`, `answer` (the gold answer), `solution`, `subject`, `level`, `extra`; any column of the row as `problem["column"]` |
| `completion`, `parsed`, `completion_ids`, `gold` | parts of the two, for functions that need no more |
| `matcher`, `form`, `tags`, `prefilled` | the recipe's matcher; its prompt format, that format's four tags, and whether the prompt opens the reasoning |
| `trainer_state`, `log_metric` | the trainer's; such a function runs in its process and applies nowhere else |

Every other argument is a parameter, set under `params` and checked by its type. An object with `state_dict` and `load_state_dict`
has a state: it runs in the trainer's process and is in every checkpoint.

A reward that raises, returns no finite number or one outside its declared range, or finds no gold answer, gives `low` (0 where
none is declared); it is counted in `failures`, logged once with its traceback, and never stops a run. Three calls in a row that
hang or kill their process end the run. Before anything is loaded each reward of a recipe's files is called once with made-up
rollouts, so that a value of a wrong kind is found early. Its process gets no secrets of the environment but those that the recipe
names: `{name: judge.py:judge, environment: [OPENAI_API_KEY]}`.

In the package: write it in the file of its theme in `src/algorist/rewards/` under
`@reward("name", low=..., high=...)`, name it in a recipe with its weight (for the Python API: in `DEFAULT_REWARDS` and
`DEFAULT_REWARD_WEIGHTS`), and regenerate this page.

## In TRL, and from TRL

```python
from trl import GRPOTrainer

from algorist import build_rewards, trl_reward

functions = [trl_reward("correct"), trl_reward("cosine", max_len=500)]   # GRPOTrainer(reward_funcs=functions, …)
functions = build_rewards(["correct", {"name": "my_rewards.py:brevity", "weight": 0.1}])   # with .weights for reward_weights
```

TRL calls a reward with lists by name: `prompts`, `completions`, the gold answers in `reference_answer`, `ground_truth`, `answer` or
`solution` (the first that is there), and every other column. Completions may be texts, messages, lists of either (the first one
counts), token ids or tensors (with `decode=tokenizer.decode`). Of several gold answers in a row the one that serves the completion
best counts. A missing gold column is an error before the first step.

The other way round, a function in TRL's form, `def f(completions, **columns) -> list[float]`, works in a recipe as it is.

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
    return ", ".join(f"`{name}: {p.default}`" for name, p in reward.parameters.items())


def _flat(reward: Reward) -> str:
    return " ".join((inspect.getdoc(reward.function) or "").split())


if __name__ == "__main__":
    print(reference_markdown(), end="")

"""The reference page of the rewards, written from their docstrings: ``python -m tests.acceptance.rewards_page > docs/rewards.md``."""

from __future__ import annotations

import inspect
import textwrap

from algorist.rewards.base import REWARDS, Reward

_HEAD = """\
# Rewards

A completion's total is the weighted sum of the rewards that a recipe names; each one is logged and stored. Weight 0
only logs. Written by `python -m tests.acceptance.rewards_page`.

```yaml
rewards:
  - {name: correct, weight: 1.0}
  - {name: cosine, weight: 0.5, params: {max_len: 2000}}
  - {name: my_rewards.py:brevity, weight: 0.1}
```

Try one without a run: `algorist rewards explain` on a completion, `algorist rewards audit` on right and wrong ones.
Scales differ between systems: compare runs by accuracy, never by reward.

## What each one pays

"""
_CALLS = """
## A reward of your own

A function of a rollout and its problem, named by its file ([a worked example](extending.md#a-reward)):

| argument | holds |
|---|---|
| `rollout` | `text`, `parsed`, `grade` (`correct`, `reason`), `completion_ids`, `log_probs`, `truncated`, `turns` |
| `problem` | `question`, `answer`, `solution`, `subject`, `level`, `extra`; any column: `problem["column"]` |
| `completion`, `parsed`, `completion_ids`, `gold` | parts of the two |
| `matcher`, `form`, `tags`, `prefilled` | matcher, format, tags; whether the prompt opens the reasoning |
| `trainer_state`, `log_metric` | the trainer's; such a function runs in the training process |

`rollout.parsed` has `answer`, `reasoning`, `well_formed` and `flags`. Every other argument is a parameter, set under
`params`. None means that the reward does not apply. `function.low` and `function.high` declare the range.

- Before a run each is tried on a demonstration of two problems. One that fails on all of it is refused.
- A reward that raises, or returns no number in its range, pays `low` (else 0). It is counted, and logged once.
- A call over `timeout_s` (30 s) is killed. Three in a row end the run.
- An object with `state_dict` and `load_state_dict` has a state, which is in every checkpoint.
- Its process gets no secret variables but those that `environment` names ([security](security.md#what-runs-where)).

## In TRL, and from TRL

```python
from algorist import build_rewards, trl_reward

functions = [trl_reward("correct"), trl_reward("cosine", max_len=500)]   # GRPOTrainer(reward_funcs=functions, …)
functions = build_rewards(["correct", {"name": "well_formed", "weight": 0.1}])   # .weights for reward_weights
```

A reward reads the tags that it was published for; other tags: `trl_reward("correct", "think_answer")`. The gold answer
is the first of the columns `reference_answer`, `ground_truth`, `answer` and `solution`; of a worked solution, what its
`####` or last box states. Completions may be texts, messages (the assistant's last one counts), token ids or tensors
(with `decode=tokenizer.decode`).

A function written for another system works in a recipe as it is:

| form | gets |
|---|---|
| TRL, OneShotGRPO, open-r1: `def f(completions, **columns)`, a list | every column, and the names below |
| with chat messages: `completions[0][0]["content"]` | messages, where it fails on texts and not on messages |
| CS336: `def f(response, ground_truth)`, a mapping | `reward` counts |
| verl: `def f(data_source, solution_str, ground_truth, extra_info)` | `score` counts |

The gold answer is in `answer`, `reference_answer` and `ground_truth`, the worked solution (without one the gold answer)
in `solution` and `reference_solution`, the question in `question` and `problem`.
"""


def reference_markdown() -> str:
    """Return the page: what each reward pays, and how to write one."""
    rewards = [REWARDS.get(name) for name in REWARDS if REWARDS.get(name).name == name]
    return _HEAD + "\n".join(_entry(r) for r in rewards) + "\n" + _CALLS


def _entry(reward: Reward) -> str:
    also = f" (also {', '.join(f'`{a}`' for a in reward.aliases)})" if reward.aliases else ""
    parameters = ", ".join(f"`{name}: {p.default}`" for name, p in reward.parameters.items())
    text = " ".join((inspect.getdoc(reward.function) or "").split()).replace("``", "`")
    entry = f"- `{reward.name}`{also}, {reward.low:g} … {reward.high:g}: {text}"
    return textwrap.fill(f"{entry} Parameters: {parameters}." if parameters else entry, 118, subsequent_indent="  ",
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


if __name__ == "__main__":
    print(reference_markdown(), end="")

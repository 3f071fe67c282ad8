"""A reward of your own: one function, named in a recipe as `file.py:function`.

Try it:  algorist rewards explain --reward examples/own_reward.py:shows_work --answer 12 \\
             --completion '<reasoning>3 * 4 = 12</reasoning><answer>12</answer>'
Use it:  algorist run quickstart 'rewards=[correct, "examples/own_reward.py:shows_work"]'
"""

from __future__ import annotations


def shows_work(completion: str, *, gold: str) -> float:
    """Return 0.25 when the completion writes at least one equation before its answer."""
    reasoning = completion.partition("<answer>")[0]
    return 0.25 if "=" in reasoning else 0.0

"""algorist: turn a small language model into a mathematical reasoner.

The names below are imported when they are first used, so that ``import algorist`` needs no torch.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from algorist import extensions

# transformers must not pull TensorFlow in; only set when the user has not decided.
for _name, _value in (("TRANSFORMERS_NO_TF", "1"), ("TRANSFORMERS_NO_TENSORFLOW", "1"), ("USE_TF", "0")):
    os.environ.setdefault(_name, _value)
# On CPUs with bfloat16, importing bitsandbytes warns that a kernel of the hub is missing, which nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "kernels-community" not in str(record.msg)
)

# The grader's warnings go where those of this package go: to the screen and into the log of a run.
logging.getLogger("algorist_grader").parent = logging.getLogger("algorist")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from algorist.config import load_recipe as load_recipe
    from algorist.data.golds import extract_hash_answer as extract_hash_answer
    from algorist.extensions import *  # noqa: F403
    from algorist.models.load import load_policy as load_policy
    from algorist.objectives import advantage as advantage
    from algorist.objectives import loss as loss
    from algorist.objectives import policy_loss as policy_loss
    from algorist.objectives import token_losses as token_losses
    from algorist.prompts import get_format as get_format
    from algorist.prompts.chat import encode_prompt as encode_prompt
    from algorist.rewards import RewardBreakdown as RewardBreakdown
    from algorist.rewards import build_rewards as build_rewards
    from algorist.rewards import reward as reward
    from algorist.rewards import trl_reward as trl_reward
    from algorist.rollouts import make_engine as make_engine
    from algorist.rollouts.base import SamplingParams as SamplingParams
    from algorist.rollouts.collect import collect as collect
    from algorist.runs.pipeline import run_recipe as run_recipe
    from algorist.training.batch import Batch as Batch
    from algorist.training.extension import Extension as Extension
    from algorist.training.extension import extension as extension
    from algorist.training.log_probs import LogProbs as LogProbs
    from algorist_grader import grade as grade
    from algorist_grader import grade_completion as grade_completion

_MODULES = {
    "config": "load_recipe",
    "data.golds": "extract_hash_answer",
    "models.load": "load_policy",
    "objectives": "advantage loss policy_loss token_losses",
    "prompts": "get_format",
    "prompts.chat": "encode_prompt",
    "rewards": "RewardBreakdown build_rewards reward trl_reward",
    "rollouts": "make_engine",
    "rollouts.base": "SamplingParams",
    "rollouts.collect": "collect",
    "runs.pipeline": "run_recipe",
    "training.batch": "Batch",
    "training.extension": "Extension extension",
    "training.log_probs": "LogProbs",
}
_MODULE_OF = (
    {name: f"algorist.{module}" for module, names in _MODULES.items() for name in names.split()}
    | {name: f"algorist.{module}" for name, module in extensions.PUBLIC.items()}
    | dict.fromkeys(("grade", "grade_completion"), "algorist_grader")
)
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        from algorist.errors import nearest

        raise AttributeError(f"module 'algorist' has no attribute '{name}'.{nearest(name, __all__)}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

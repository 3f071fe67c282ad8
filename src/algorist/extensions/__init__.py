"""Optional capabilities of a run, one folder or file each; deleting one takes it out. ``algorist.declared`` finds them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

PUBLIC: dict[str, str] = {}
"""Names that ``algorist`` offers of extensions → their modules."""
REWARDS: list[str] = []
"""Modules of rewards, which are imported when one is looked up: importing algorist takes a fraction of what the grader takes."""

if TYPE_CHECKING:
    from algorist.extensions.published_rewards.small_models import (
        DEFAULT_REWARD_WEIGHTS as DEFAULT_REWARD_WEIGHTS,
    )
    from algorist.extensions.published_rewards.small_models import (
        default_reward_functions as default_reward_functions,
    )
    from algorist.extensions.published_rewards.systems import (
        question_only_reward_fn as question_only_reward_fn,
    )
    from algorist.extensions.published_rewards.systems import r1_zero_reward_fn as r1_zero_reward_fn
    from algorist.extensions.toolkit import *  # noqa: F403
else:
    with suppress(ModuleNotFoundError):
        from algorist.extensions.toolkit import MODULE_OF

        PUBLIC |= MODULE_OF
    for _module, _names in {
        "published_rewards.small_models": "DEFAULT_REWARDS DEFAULT_REWARD_WEIGHTS default_reward_functions",
        "published_rewards.systems": "question_only_reward_fn r1_zero_reward_fn",
    }.items():
        if (Path(__file__).parent / _module.partition(".")[0]).is_dir():
            REWARDS.append(f"{__name__}.{_module}")
            PUBLIC |= dict.fromkeys(_names.split(), f"extensions.{_module}")

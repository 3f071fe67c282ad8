"""Optional capabilities of a run, one folder or file each; deleting one takes it out. ``algorist.declared`` finds them."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

PUBLIC: dict[str, str] = {}
"""Names that ``algorist`` offers of extensions → their modules."""

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
    for _part in ("toolkit", "published_rewards"):
        with suppress(ModuleNotFoundError):
            PUBLIC |= import_module(f"{__name__}.{_part}").MODULE_OF

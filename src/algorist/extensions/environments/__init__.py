"""Environments that people have: a class of a user's file, in our form (``start``, ``reply``) or TRL's (``reset``, tools, ``get_reward``).

How they take part in a completion is the extension ``tools``.
"""

from __future__ import annotations

from algorist_grader.registry import add_module

add_module(f"{__name__}.reward", "reward")

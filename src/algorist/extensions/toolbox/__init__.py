"""What may be called (``base.Tool``): a calculator, Python in a sandbox, a user's own function; and a user's environment.

How a model calls them, and what a run makes of it, is the extension ``tools``.
"""

from __future__ import annotations

from functools import lru_cache

from algorist.errors import ConfigError
from algorist.extensions.toolbox import calculator, python  # noqa: F401  (they register themselves)
from algorist.extensions.toolbox.base import TOOLS, Tool, ToolLimits
from algorist.extensions.toolbox.user import UserTool


@lru_cache(maxsize=32)
def make_tools(names: tuple[str, ...], limits: ToolLimits) -> dict[str, Tool]:
    """Return tools by name; a user's is called by its function's name.

    Raises:
        ConfigError: Unknown tool, no such file.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        own = ".py:" in name
        made = UserTool(name, limits) if own else TOOLS.get(name)(limits)
        short = getattr(made, "called", name.rpartition(":")[2])
        if short in tools:
            raise ConfigError(
                f"tools.use names two tools that are called '{short}': {', '.join(names)}; rename one of them"
            )
        tools[short] = made
    return tools

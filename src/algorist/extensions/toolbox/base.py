"""What a tool is: text in, text out, in time; and the registry that recipes name tools from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from algorist_grader.registry import Registry


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """What one call may take: seconds, memory (MiB), characters of output."""

    seconds: float = 2.0
    memory_mb: int = 64
    output_characters: int = 2000


@dataclass(frozen=True, slots=True)
class Output:
    """What a call gave: text, the class of the error (empty without one), the session for the rollout's next call, the seconds."""

    text: str
    error: str = ""
    session: Any = None
    seconds: float = 0.0


class Tool(Protocol):
    """Answers calls; several threads may call at the same time."""

    description: str
    """One sentence for the system prompt: what goes between the tags."""
    inline: bool
    """Answers in well under a millisecond, so that no thread is needed; its output stays on the line of the call."""

    def check(self) -> None:
        """Try the tool once.

        Raises:
            AlgoristError: It cannot run here; the message says what to install or correct.
        """

    def call(self, request: str, session: Any) -> Output:
        """Answer a call; never raises for what the policy wrote.

        Args:
            request: What the policy wrote between the tags.
            session: ``Output.session`` of the rollout's last call of this tool; None for its first.
        """


TOOLS: Registry[Callable[[ToolLimits], Tool]] = Registry("tool")


def tool(name: str) -> Callable[[Callable[[ToolLimits], Any]], Callable[[ToolLimits], Any]]:
    """Register a class or function that makes a tool from ``ToolLimits``, as ``tools: [name]`` in a recipe."""
    return TOOLS.register(name)


def clipped(text: str, most: int) -> str:
    """Return text of at most ``most`` characters, with an ellipsis where it was cut."""
    return text if len(text) <= most else text[:most] + "…"


def schema_of(tool: str, description: str) -> dict[str, Any]:
    """Return a tool in the form that chat templates take as ``tools``."""
    argument = "code" if tool != "calculator" else "expression"
    return {
        "type": "function",
        "function": {
            "name": tool,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }

"""The recipe's keys ``tools`` and ``environment``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from algorist.config.section import OwnCode, Section


class ToolsSection(Section):
    """Tools that the policy may call while it writes; a list alone is ``use``."""

    use: list[OwnCode] = Field(default_factory=lambda: ["calculator"])
    """Names of tools (``calculator``, ``python``, ``full_python``), or ``file.py:function`` of your own."""
    format: Literal["tags", "equals", "chat"] = "tags"
    """How a call is written: ``tags`` (``<python>…</python>``, then ``<output>…</output>``), ``equals`` (calculator: every sum before an
    equals sign), ``chat`` (the tool calls of the model's own chat template)."""
    calls: int = Field(8, ge=1)
    """Most calls of a completion; further ones get an error as output."""
    output_tokens: int = Field(64, ge=1)
    """Most tokens of an output, which count in ``max_completion_tokens``; longer ones are cut."""
    seconds: float = Field(2.0, gt=0)
    """Most seconds of a call."""
    memory_mb: int = Field(64, ge=16)
    """Most memory of a call (MiB)."""
    instructions: bool = True
    """Describe the tools in the system prompt (``chat``: in the template's own place)."""
    demonstrations: bool = True
    """Write the sums of SFT's worked solutions as calls of the calculator; their outputs are not imitated."""
    fail_steps: int = Field(5, ge=1)
    """End the run when every call failed in so many rollout batches in a row."""
    drop_void: bool = False
    """Learn nothing from completions that neither called a tool nor gave an answer, and leave them out of their group's mean."""

    @model_validator(mode="before")
    @classmethod
    def _list_alone(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = [values]
        return {"use": values} if isinstance(values, list) else values

    @model_validator(mode="after")
    def _check(self) -> ToolsSection:
        if not self.use:
            raise ValueError(
                "tools.use is empty; name a tool, such as tools: [calculator], or leave tools out"
            )
        if self.format == "equals" and self.use != ["calculator"]:
            raise ValueError(
                f"tools.format is equals, where an equals sign calls the calculator, but tools.use is {self.use}; take "
                "tools.use=[calculator], or tools.format=tags"
            )
        return self


class ToolKeys(Section):
    """What the extension adds to a recipe."""

    tools: ToolsSection | None = None
    """Tools that the policy may call while it writes."""
    environment: OwnCode | dict[str, OwnCode] | None = None
    """``file.py:Class`` with ``start(problem)`` and ``reply(rollout) -> str | None``, or TRL's; or such classes by the column
    ``environment``."""

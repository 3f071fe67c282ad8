"""Tools and an environment as part of how a model is asked (``prompts.base.TurnSource``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from typing import Any

from pydantic import ValidationError

from algorist.errors import ConfigError
from algorist.extensions.environments.user import Environments
from algorist.extensions.toolbox import make_tools
from algorist.extensions.toolbox.base import TOOLS, Tool, ToolLimits, schema_of
from algorist.extensions.tools.formats import CallFormat
from algorist.extensions.tools.replies import Replies
from algorist.extensions.tools.section import ToolsSection
from algorist.prompts.base import TURN_SOURCES, PromptFormat, TurnSources
from algorist.types import Problem


@dataclass(frozen=True)
class Tools:
    """The tools of a recipe, and its environment."""

    section: ToolsSection | None
    environment: str | Mapping[str, str] | None = None
    foreign: str = ""
    """Code that the settings beside a model name, which is not run."""

    @property
    def tools(self) -> dict[str, Tool]:
        """The tools by name."""
        section = self.section
        if section is None:
            return {}
        return make_tools(
            tuple(section.use), ToolLimits(section.seconds, section.memory_mb, 16 * section.output_tokens)
        )

    @property
    def calls(self) -> CallFormat:
        """The form of calls, and who answers them."""
        inline = tuple(name for name, tool in self.tools.items() if tool.inline)
        name = self.section.format if self.section else None
        methods = self.environments.methods_beside(self.tools, name) if self.environments else ()
        return CallFormat(name or ("chat" if methods else "tags"), (*self.tools, *methods), inline, methods)

    @cached_property
    def environments(self) -> Environments | None:
        """The environments, which are other people's code."""
        return Environments(self.environment) if self.environment and not self.foreign else None

    @property
    def markers(self) -> tuple[str, ...]:
        return self.calls.markers if self.calls.tools else ()

    def check(self, problems: Sequence[Problem] = (), rewards: Sequence[str] = ("environment",)) -> None:
        """Try each tool once, and the environments with the problems and the names of the rewards of a run.

        Raises:
            AlgoristError: One of them cannot run.
        """
        for tool in self.tools.values():
            tool.check()
        if self.environments is not None:
            self.environments.check(problems, rewards)

    def open(
        self, problems: Sequence[Problem], tokenizer: Any, prompt_format: PromptFormat, stops: Sequence[str]
    ) -> Replies:
        if self.foreign:
            raise ConfigError(
                f"the model was trained with {self.foreign}, code that its settings may not start; name it yourself in a recipe, or "
                "ask without it: --no-tools"
            )
        # TRL limits neither the calls of an environment's tools nor what they return.
        section = self.section or ToolsSection(calls=10**6, output_tokens=10**6)
        return Replies(
            self.tools, self.calls, section, self.environments, problems, tokenizer, prompt_format, stops
        )

    def for_problem(self, prompt_format: PromptFormat, problem: Problem) -> PromptFormat:
        return self.environments.for_problem(prompt_format, problem) if self.environments else prompt_format

    def worked(self, solution: str) -> str:
        if self.section is None or not self.section.demonstrations:
            return solution
        return self.calls.worked(solution)

    def replies(self, completion: str) -> list[tuple[int, int]] | None:
        return self.calls.replies(completion) if self.section and self.section.demonstrations else []

    def recorded(self) -> dict[str, Any]:
        tools = {"tools": self.section.model_dump()} if self.section else {}
        return {"kind": "tools", **tools, **({"environment": self.environment} if self.environment else {})}

    def instructed(self, prompt_format: PromptFormat) -> PromptFormat:
        taken = {tag.strip("</>") for tag in prompt_format.tags.all()} | {"output"}
        if self.section is not None and (clash := taken & set(self.tools)):
            raise ConfigError(
                f"tools.use names '{clash.pop()}', whose tag the prompt format or an output has already; rename the function"
            )
        # A model that was trained with them knows them from its own system prompt.
        lines = [line for line in self.instructions() if line not in prompt_format.system_prompt]
        system = "\n".join(filter(None, [prompt_format.system_prompt, *lines]))
        switches, described = dict(prompt_format.template_kwargs), []
        if self.section is not None and self.section.format == "chat" and self.section.instructions:
            described = [schema_of(name, tool.description) for name, tool in self.tools.items()]
        if self.calls.methods and self.environments is not None:
            described += self.environments.one.about()["tools"] if self.environments.one else []
        if described:
            switches["tools"] = described
        return replace(prompt_format, turns=self, system_prompt=system, template_kwargs=switches)

    def unanswered(self) -> str:
        use = [name.rpartition(":")[2] for name in self.section.use] if self.section else []
        names = " and ".join(use + ([f"the environment {self.environment}"] if self.environment else []))
        return f"a server answers no calls of {names}: algorist solve answers them where it loads the model itself (without --endpoint)"

    def card(self) -> str:
        section, said = self.section, f"## Tools\n\nThis model was trained with tools; {self.unanswered()}."
        if section is not None and section.format == "equals":
            loop = (files(__package__) / "tool_loop.txt").read_text(encoding="utf-8")
            return f"{said} Elsewhere, a GGUF file in llama-server included, this fills in what follows an equals sign:\n\n```python\n{loop}```"
        return f"{said} Elsewhere: stop at the end of a call, run it, append its output (docs/tools.md has the form), continue."

    def instructions(self) -> list[str]:
        """Return what the system prompt says of the tools, a line each."""
        if self.section is None or not self.section.instructions or self.section.format != "tags":
            return []
        return [
            f"You may call a tool: write <{name}>{tool.description}</{name}> and read <output>…</output> after it."
            for name, tool in self.tools.items()
        ]


def of_recipe(recipe: Any) -> Tools | None:
    """Make the tools and the environment of a recipe."""
    return Tools(recipe.tools, recipe.environment) if recipe.tools or recipe.environment else None


def of_settings(settings: Mapping[str, Any], trusted: bool) -> Tools:
    """Make the tools of settings; code that they name is run only for those that are trusted.

    Raises:
        ConfigError: A key that ``tools`` does not have, or a wrong value.
    """
    try:
        section = ToolsSection.model_validate(settings["tools"]) if "tools" in settings else None
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"tools.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    environment = settings.get("environment")
    classes = [environment] if isinstance(environment, str) else (environment or {}).values()
    use = (*(section.use if section else ()), *classes)
    code = [name for name in use if name not in TOOLS and not trusted]
    return Tools(section, environment, foreign=", ".join(code))


TURN_SOURCES.register("tools")(TurnSources(of_recipe, of_settings))

"""How a call is written: where it begins and ends in what the policy writes, and what stands around its output."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from algorist.extensions.toolbox.calculator import (
    CURRENCIES,
    NotArithmetic,
    as_text,
    last_sum,
    plain,
    value_of,
)

FormatName = Literal["tags", "equals", "chat"]
_NUMBER = r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?"
_EXPRESSION = rf"[-(]?[{CURRENCIES}]?(?:\.?\d|\()[-+*/×÷^()xX{CURRENCIES}\d., ]*"
_SUM = re.compile(rf"(?<![\d.,])({_EXPRESSION})=[ ]?[{CURRENCIES}]?({_NUMBER})")
_ANNOTATION = re.compile(rf"({_EXPRESSION}=[ ]*[{CURRENCIES}]?)?<<([^<>=]+)=([^<>]*)>>[ ]?({_NUMBER})?")


@dataclass(frozen=True, slots=True)
class Call:
    """What the policy asked of which tool."""

    tool: str
    request: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A way of writing calls: ``tags``, ``equals`` or ``chat`` (see docs/tools.md).

    ``tools`` are the names of the tools that may be called; ``inline`` those whose output stays on the line; ``methods`` those of an
    environment, whose request is the JSON of all their arguments.
    """

    name: FormatName
    tools: tuple[str, ...]
    inline: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Where a call is complete."""
        if self.name == "tags":
            return tuple(f"</{tool}>" for tool in self.tools)
        return ("=",) if self.name == "equals" else ("</tool_call>",)

    @property
    def markers(self) -> tuple[str, ...]:
        """What an output must not contain."""
        if self.name == "equals":
            return ()
        if self.name == "chat":
            return "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
        return (*(f"<{tool}>" for tool in self.tools), *self.stop_strings, "<output>", "</output>")

    def find(self, text: str, ended: bool = False) -> Call | None:
        """Return the call that ends a text; None when nothing was called. ``ended``: the text is all that the policy has to say."""
        if ended:
            return (
                self._of_json(text.strip()) if self.name == "chat" and text.rstrip().endswith("}") else None
            )
        if self.name == "equals":
            expression = last_sum(text.rpartition("=")[0])
            return Call(self.tools[0], expression) if expression else None
        if self.name == "chat":
            _, opened, inside = text.rpartition("</tool_call>")[0].rpartition("<tool_call>")
            return self._of_json(inside.strip()) if opened else None
        ends = {tool: text.rfind(f"</{tool}>") for tool in self.tools}
        tool = max(ends, key=lambda name: ends[name])
        _, opened, request = text[: max(ends[tool], 0)].rpartition(f"<{tool}>")
        return Call(tool, request) if opened else None

    def _of_json(self, text: str) -> Call:
        """Return the call of a template's object, ``parameters`` in Llama's, or of a list of one, as SmolLM2 writes it."""
        try:
            call = json.loads(text)
            (call,) = call if isinstance(call, list) else [call]
            arguments = call["arguments"] if "arguments" in call else call["parameters"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if call["name"] in self.methods:
                return Call(str(call["name"]), json.dumps(arguments))
            request = next(iter(arguments.values())) if isinstance(arguments, dict) else arguments
            return Call(str(call["name"]), str(request))
        except (ValueError, KeyError, TypeError, RecursionError, StopIteration):
            return Call("", text)

    def around(self, tool: str, text: str) -> tuple[str, str]:
        """Return what stands before and after the output of a call that ends ``text``."""
        if self.name == "equals":
            return (" " if text.rpartition("=")[0].endswith(" ") else ""), ""
        return ("<output>", "</output>") if tool in self.inline else ("\n<output>\n", "\n</output>\n")

    def clean(self, output: str, more: tuple[str, ...] = ()) -> str:
        """Return an output without the markers of calls, answers and ends: they are the policy's to write."""
        for marker in (*self.markers, *more):
            if marker and len(marker) > 1:
                harmless = marker.replace("<", "[").replace(">", "]")
                harmless = harmless if harmless != marker else f"{marker[0]} {marker[1:]}"
                output = output.replace(marker, harmless)
        return output

    # ---- demonstrations ------------------------------------------------------------------------------------------------

    def worked(self, solution: str) -> str:
        """Return a worked solution with its sums written as calls, as far as the calculator gets their results.

        Sums are ``a + b = c`` in plain text, or GSM8K's annotations ``<<a+b=c>>``.
        """
        if self.name == "chat" or "calculator" not in self.tools:
            return solution if "<<" not in solution else re.sub(r"<<[^<>]*>>", "", solution)
        if "<<" in solution:
            return _ANNOTATION.sub(self._annotated, solution)
        return _SUM.sub(lambda m: self._called(m.group(1), m.group(2)) or m.group(0), solution)

    def _annotated(self, match: re.Match[str]) -> str:
        before, expression, value, shown = match.groups(default="")
        call = self._written(expression, value)
        if call is None:
            return before + (shown or value)
        shown_sum = before.partition("=")[0]
        same = plain(last_sum(shown_sum) or "").replace(" ", "") == plain(expression).replace(" ", "")
        return (self._called(shown_sum, value) if self.name == "equals" and same else None) or before + call

    def _called(self, text: str, result: str) -> str | None:
        """Return a text that ends in a sum, with the sum as a call; None where it is none."""
        if whole := self._written(text, result):
            return whole
        expression = last_sum(text) or ""
        call = self._written(expression, result)
        return call and text[: text.rindex(expression)] + call

    def _written(self, expression: str, result: str) -> str | None:
        """Return a sum as a call with its output; None where the calculator gets another result, or none."""
        expression = expression.strip()
        try:
            value = as_text(value_of(expression))
            if last_sum(expression) != expression.lstrip(CURRENCIES) or value != as_text(value_of(result)):
                return None
        except NotArithmetic:
            return None
        if self.name == "equals":
            return f"{expression} = {value}"
        return f"<calculator>{expression}</calculator><output>{value}</output>"

    def replies(self, completion: str) -> list[tuple[int, int]] | None:
        """Return which spans of a demonstration are outputs: begin and end in characters; None in a chat's form."""
        if self.name == "tags":
            spans = []
            for match in re.finditer(rf"</({'|'.join(self.tools)})>", completion):
                before, after = self.around(match.group(1), completion[: match.end()])
                end = completion.find(after, match.end())
                if completion.startswith(before, match.end()) and end >= 0:
                    spans.append((match.end(), end + len(after)))
            return spans
        if self.name == "chat":
            return None
        spans, since = [], 0
        for match in re.finditer(r"=([ ]?-?[\d.]*\d)(?![\d.]*\d)", completion):
            expression = last_sum(completion[since : match.start()])
            if expression and as_text(value_of(expression)) == match.group(1).strip():
                spans.append(match.span(1))
                since = match.end()  # a sum across an output is no call while the policy writes
        return spans

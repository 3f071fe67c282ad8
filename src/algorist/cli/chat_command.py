"""``algorist chat MODEL``: question after question, the reasoning as it is written, the answer apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from algorist.cli.arguments import Format, Length, ModelArgument, NoTools, Save, Template, Tools, read_tools
from algorist.cli.solve_command import load_solver, note
from algorist.store.safe_text import printable

if TYPE_CHECKING:
    from algorist.prompts.base import Tags
    from algorist.runs.solve import Solver

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist chat runs/quickstart · Next: algorist export runs/quickstart --to my-model"
)
def chat(
    model: ModelArgument = None,
    prompt_format: Format = None,
    template: Template = None,
    tools: Tools = None,
    no_tools: NoTools = False,
    max_new_tokens: Length = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0)] = 0.0,
    save: Save = None,
) -> int:
    """Ask question after question, each by itself, in the format that the model was trained with."""
    solver = load_solver(model, prompt_format, template, read_tools(tools, no_tools))
    return converse(solver, max_new_tokens, temperature, save)


def converse(solver: Solver, max_new_tokens: int | None, temperature: float, save: Path | None) -> int:
    """Answer what is typed until an empty line or Ctrl-D; Ctrl-C stops an answer."""
    from algorist.runs.solve import append_jsonl

    note("one question per line, each by itself; Ctrl-C stops an answer, an empty line or Ctrl-D ends")
    while question := _typed():
        live = _Live(solver.prompt_format.tags)
        try:
            (row,) = solver.solve(
                [question], max_new_tokens=max_new_tokens, temperature=temperature, on_text=live
            )
        except KeyboardInterrupt:
            print("\n(stopped)", flush=True)
            continue
        cut = " (cut off at the limit: --max-new-tokens N)" if row["truncated"] else ""
        none = f"no answer in the format {solver.prompt_format.name}{cut}"
        print(f"\nanswer: {printable(row['answer']) if row['answer'] is not None else none}\n", flush=True)
        if save:
            append_jsonl(save, [row])
    return 0


def _typed() -> str:
    try:
        line = input("? ").strip()
    except EOFError:
        return ""
    if not sys.stdin.isatty():
        print(line)
    return line


class _Live:
    """Prints the reasoning as it comes: no tags, and nothing from the answer's tag on."""

    def __init__(self, tags: Tags) -> None:
        self.tags, self.text, self.shown = tags, "", 0

    def __call__(self, piece: str) -> None:
        self.text += piece
        body, answer, _ = (
            self.text.partition(self.tags.answer_open) if self.tags.answer_open else (self.text, "", "")
        )
        for tag in (self.tags.reasoning_open, self.tags.reasoning_close):
            body = body.replace(tag, "") if tag else body
        begun = max((_begun(body, tag) for tag in self.tags.all()), default=0) if not answer else 0
        body = body[: len(body) - begun].rstrip().lstrip("\n")
        print(printable(body[self.shown :]), end="", flush=True)
        self.shown = max(self.shown, len(body))


def _begun(text: str, tag: str) -> int:
    """Return how many of the last characters of ``text`` may be the beginning of ``tag``."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)

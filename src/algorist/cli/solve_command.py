"""``algorist solve QUESTION… --model M``: an answer, many from a file or a pipe, or a conversation on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import (
    Format,
    Length,
    ModelOption,
    NoTools,
    Save,
    Template,
    Tools,
    find_model,
    read_template,
    read_tools,
)
from algorist.cli.endpoints import ENDPOINTS
from algorist.cli.session import import_quietly
from algorist.cli.terminal import Line, Result, View, compact, note, verb
from algorist.config.load import load_run_recipe
from algorist.errors import ConfigError, DataError, nearest
from algorist_grader.extract import last_number

if TYPE_CHECKING:
    from algorist.prompts.base import Tags
    from algorist.runs.solve import Solver

app = typer.Typer(add_completion=False)


class Answers(Result):
    """What a model answered."""

    answers: Annotated[list[Any], "per question: question, completion, reasoning, answer, truncated, votes"]
    shown: bool = False
    """In a conversation, already."""
    tagged: bool = True
    """Whether the prompt format has tags that set the reasoning apart."""

    def view(self, width: int) -> View:
        return [] if self.shown else [Line((_text if self.tagged else _whole)(row)) for row in self.answers]


@verb(app)
def solve(
    questions: Annotated[list[str] | None, typer.Argument()] = None,
    model: ModelOption = None,
    prompt_format: Format = None,
    template: Template = None,
    tools: Tools = None,
    no_tools: NoTools = False,
    samples: Annotated[int, typer.Option("--n", min=1, max=1024)] = 1,
    vote: bool = False,
    file: Path | None = None,
    save: Save = None,
    max_new_tokens: Length = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    endpoint: str | None = None,
    served_model: str | None = None,
    as_json: bool = False,
) -> Answers:
    """Answer questions: the reasoning and the answer, in the format the model was trained with.

    Args:
        questions: Questions; without any, one per line from stdin, or on a terminal a conversation.
        samples: Completions per question; more than one are sampled.
        vote: Give the answer that most of the --n samples agree on.
        file: A JSONL file with a question column.
        temperature: Sampling temperature; 0 is greedy, and the default for one completion; else 1.
        endpoint: Ask an OpenAI-compatible server, such as http://localhost:8000.
        served_model: The model's name at the server; that of --model, else the first it lists.

    Example: algorist solve 'Sam has 17 coins. Sam loses 2. Sam gives 2 to Lea. How many coins does Sam have now?'
    --json · a conversation: algorist solve --model runs/quickstart
    """
    if vote and samples == 1:
        raise ConfigError("--vote needs several samples to count; write for example --n 8 --vote")
    if samples > 1 and (endpoint is not None or temperature == 0):
        greedy = "--temperature 0 gives the same completion each time"
        why = "a server is asked for one completion" if endpoint else greedy
        raise ConfigError(f"--n {samples}: {why}; leave --{'endpoint' if endpoint else 'temperature'} out")

    if save:  # a place that cannot be written is said before anything is computed
        save.parent.mkdir(parents=True, exist_ok=True)
        save.open("a").close()
    heat = temperature if temperature is not None else 0.0 if samples == 1 else 1.0
    if not questions and file is None and sys.stdin.isatty() and endpoint is None and not as_json:
        solver = load_solver(model, prompt_format, template, read_tools(tools, no_tools))
        return Answers(converse(solver, max_new_tokens, heat, save), shown=True)
    texts = _questions(questions, file)
    if endpoint is not None:
        import_quietly("algorist.runs.solve")
        switches = read_template(template)
        ask = ENDPOINTS.get("openai")
        server, longest = ask(endpoint, served_model, model, prompt_format, switches, note)
        rows = server.solve(texts, max_new_tokens=max_new_tokens or longest, temperature=heat)
        tags = server.prompt_format.tags
    else:
        solver = load_solver(model, prompt_format, template, read_tools(tools, no_tools))
        each = f", {samples} samples each" if samples > 1 else ""
        note(f"answering {len(texts)} question{'s' if len(texts) > 1 else ''}{each} …")
        rows = solver.solve(
            texts, max_new_tokens=max_new_tokens, temperature=heat, samples=samples, vote=vote
        )
        tags = solver.prompt_format.tags
    if save:
        from algorist.runs.solve import append_jsonl

        append_jsonl(save, rows)
    return Answers(rows, tagged=bool(tags.all()))


def load_solver(
    model: str | None,
    prompt_format: str | None,
    template: list[str] | None,
    tools: Mapping[str, Any] | None = None,
) -> Solver:
    """Load the model; what takes seconds is said before it begins."""
    switches = read_template(template)
    path, run = find_model(model)
    note(f"loading {path} …")
    import_quietly("algorist.runs.solve")
    from algorist.runs.solve import Solver

    recipe = load_run_recipe(run, runs="model") if run else None
    return Solver.load(
        path, recipe=recipe, prompt_format=prompt_format, template_kwargs=switches, tools=tools
    )


def _questions(questions: list[str] | None, file: Path | None) -> list[str]:
    if file is not None and not file.is_file():
        beside = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        raise DataError(f"--file {file}: there is no such file.{nearest(file.name, beside)}")
    if file is not None:
        from algorist.data.files import read_rows

        rows = read_rows(file)
        texts = [str(row.get("question") or row.get("prompt") or "") for row in rows]
        for number, (row, question) in enumerate(zip(rows, texts, strict=True), start=1):
            if not question.strip():
                raise DataError(f"{file}: row {number} has no 'question'; columns: {', '.join(row)}")
        return texts
    if questions and questions != ["-"]:
        for question in questions:
            if not question.strip() or any("\ud800" <= letter <= "\udfff" for letter in question):
                raise DataError(f"the question {question!a} is empty or not UTF-8")
        return questions
    if sys.stdin.isatty():
        raise ConfigError("no question; write algorist solve 'QUESTION', or pipe one question per line")
    texts = [line.strip() for line in sys.stdin if line.strip()]
    if not texts:
        raise ConfigError("standard input has no question; expected one per line")
    return texts


def _text(row: dict[str, Any]) -> str:
    cut = " (cut off at the limit: --max-new-tokens N)" if row["truncated"] else ""
    answer = row["answer"] if row["answer"] is not None else f"none{cut}, in: {compact(row['completion'])}"
    votes = f" ({row['votes']} of {row['samples']} votes)" if "votes" in row else ""
    return f"question: {row['question']}\nreasoning: {compact(row['reasoning']) if row['reasoning'] else '(none)'}\nanswer: {answer}{votes}\n"


def _whole(row: dict[str, Any]) -> str:
    """Return an answer in a format without tags: strict and lenient side by side, then all that the model wrote."""
    cut = " · cut off at the limit: --max-new-tokens N" if row["truncated"] else ""
    votes = f" ({row['votes']} of {row['samples']} votes)" if "votes" in row else ""
    boxed, last = row["answer"] or "none", last_number(row["completion"]) or "none"
    return f"question: {row['question']}\nanswer: {boxed}{votes} · last number: {last}{cut}\n{compact(row['completion'])}\n"


def converse(
    solver: Solver, max_new_tokens: int | None, temperature: float, save: Path | None
) -> list[dict[str, Any]]:
    """Answer what is typed until an empty line or Ctrl-D; Ctrl-C stops an answer."""
    from algorist.runs.solve import append_jsonl

    answers = []
    note("one question per line, each on its own; Ctrl-C stops an answer, an empty line or Ctrl-D ends")
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
        print(f"\nanswer: {row['answer'] if row['answer'] is not None else none}\n", flush=True)
        answers.append(row)
        if save:
            append_jsonl(save, [row])
    return answers


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
        opens = self.tags.answer_open
        body, answer, _ = self.text.partition(opens) if opens else (self.text, "", "")
        for tag in (self.tags.reasoning_open, self.tags.reasoning_close):
            body = body.replace(tag, "") if tag else body
        begun = max((_begun(body, tag) for tag in self.tags.all()), default=0) if not answer else 0
        body = body[: len(body) - begun].rstrip().lstrip("\n")
        print(body[self.shown :], end="", flush=True)
        self.shown = max(self.shown, len(body))


def _begun(text: str, tag: str) -> int:
    """Return how many of the last characters of ``text`` may be the beginning of ``tag``."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)

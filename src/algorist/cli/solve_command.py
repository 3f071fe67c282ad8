"""``algorist solve QUESTION… --model M``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from algorist.cli.arguments import FormatOption, find_model
from algorist.config.load import load_run_recipe

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist solve 'Mia has 12 pens. Mia loses 5. How many pens does Mia have now?' --json"
)
def solve(
    questions: Annotated[
        list[str] | None, typer.Argument(help="Questions; without any, one per line from stdin.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Run, checkpoint, model folder or hub name; the newest run when left out."),
    ] = None,
    prompt_format: Annotated[str | None, FormatOption] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A JSONL file with a question column.")] = None,
    save: Annotated[Path | None, typer.Option(help="Append prompts and answers to this JSONL file.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest completion in tokens; the run's when left out.", min=1)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0)] = 0.0,
    endpoint: Annotated[
        str | None, typer.Option(help="Ask an OpenAI-compatible server, such as http://localhost:8000.")
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(help="The model's name at the server; that of --model, else the first it lists."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per question.")] = False,
) -> int:
    """Answer questions: the reasoning and the answer, in the format the model was trained with."""
    asked = _questions(questions, file)
    if endpoint is not None:
        rows = _from_server(endpoint, served_model, asked, model, prompt_format, max_new_tokens, temperature)
        return _give(rows, save, as_json)
    path, run = find_model(model)
    from algorist.cli.run_command import _quiet_libraries

    _quiet_libraries()
    from algorist.inference import Solver

    recipe = load_run_recipe(run) if run else None
    solver = Solver.load(path, recipe=recipe, prompt_format=prompt_format)
    return _give(solver.solve(asked, max_new_tokens=max_new_tokens, temperature=temperature), save, as_json)


def _give(rows: list[dict[str, Any]], save: Path | None, as_json: bool) -> int:
    for row in rows:
        print(json.dumps(row, ensure_ascii=False) if as_json else _told(row))
    if save:
        from algorist.inference import append_jsonl

        append_jsonl(save, rows)
    return 0


def _from_server(
    url: str,
    served: str | None,
    asked: list[str],
    model: str | None,
    prompt_format: str | None,
    max_new_tokens: int | None,
    temperature: float,
) -> list[dict[str, Any]]:
    """Ask a server; a run or model folder beside it gives prompt format, chat template and length."""
    from algorist.cli.run_command import _quiet_libraries

    _quiet_libraries()
    from algorist.endpoint import Endpoint
    from algorist.prepare import how_to_ask
    from algorist.prompts.attached import attached

    tokenizer, recipe = None, None
    if model is not None:
        from transformers import AutoTokenizer

        path, run = find_model(model)
        tokenizer = AutoTokenizer.from_pretrained(path)
        recipe = load_run_recipe(run) if run else None
        served = served or str(path)
    how = how_to_ask(recipe, prompt_format, attached(tokenizer) if tokenizer else None)
    return Endpoint(url, how.prompt_format, tokenizer, served).solve(
        asked, max_new_tokens=max_new_tokens or how.max_completion_tokens, temperature=temperature
    )


def _questions(questions: list[str] | None, file: Path | None) -> list[str]:
    from algorist.errors import ConfigError, DataError

    if file is not None:
        from algorist.data.files import read_rows

        rows = read_rows(file)
        missing = next(
            (i for i, r in enumerate(rows) if not str(r.get("question") or r.get("prompt") or "").strip()),
            None,
        )
        if missing is not None:
            raise DataError(f"{file}: row {missing} has no 'question'; columns: {', '.join(rows[missing])}")
        return [str(r.get("question") or r.get("prompt")) for r in rows]
    if questions and questions != ["-"]:
        return questions
    if sys.stdin.isatty():
        raise ConfigError("no question; write algorist solve 'QUESTION', or pipe one question per line")
    found = [line.strip() for line in sys.stdin if line.strip()]
    if not found:
        raise ConfigError("standard input has no question; expected one per line")
    return found


def _told(row: dict[str, Any]) -> str:
    from algorist.store.safe_text import printable

    answer = row["answer"] if row["answer"] is not None else f"no answer found in: {row['completion'][:200]}"
    return printable(
        f"question: {row['question']}\nreasoning: {row['reasoning'] or '(none)'}\nanswer: {answer}\n"
    )

"""``algorist grade``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from algorist.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist grade --answer 0.5 --gold 1/2 · algorist grade --completion '<answer>0.5</answer>' --gold 1/2 · Next: algorist rewards explain --help"
)
def grade_one(
    answer: Annotated[str | None, typer.Option(help="An extracted answer.")] = None,
    completion: Annotated[str | None, typer.Option(help="A whole completion, read in --format.")] = None,
    gold: Annotated[str | None, typer.Option(help="The gold answer.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A JSONL file with answer or completion, and gold.")
    ] = None,
    prompt_format: Annotated[
        str, typer.Option("--format", help="Prompt format of completions; algorist eval --help names them.")
    ] = "reasoning_answer",
    matcher: Annotated[
        str,
        typer.Option(help="How answers are compared: symbolic, numeric, exact and others (docs/grading.md)."),
    ] = "symbolic",
) -> int:
    """Grade an answer or a completion, with the reason. Exit 0 when all are right, 1 otherwise."""
    from algorist.data.files import read_rows
    from algorist.grading import grade, grade_completion
    from algorist.prompts import get_format

    rows = read_rows(file) if file else [{"answer": answer, "completion": completion, "gold": gold}]
    right = True
    for number, row in enumerate(rows):
        truth, text = row.get("gold"), row.get("completion")
        if truth is None or (row.get("answer") is None and text is None):
            raise ConfigError(
                f"row {number}: expected gold and one of answer, completion; write --answer 0.5 --gold 1/2"
            )
        if text is not None:
            parsed = get_format(prompt_format).parse(str(text))
            verdict = grade_completion(str(text), str(truth), parsed=parsed, matcher=matcher)
        else:
            verdict = grade(str(row["answer"]), str(truth), matcher=matcher)
        right = right and verdict.correct
        print(json.dumps(asdict(verdict), ensure_ascii=True))
    return 0 if right else 1

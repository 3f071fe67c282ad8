"""``algorist new FILE``: from a data file to a recipe that ``preflight`` takes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import find_model
from algorist.cli.session import import_quietly
from algorist.cli.terminal import Line, Result, TerminalDisplay, View, ask, console, say, table, verb
from algorist.errors import DataError, nearest
from algorist.store.run_log import without_warnings
from algorist.store.safe_text import one_line

if TYPE_CHECKING:
    from algorist.cli.first_look import DataFile
    from algorist.cli.first_recipe import Machine, Route

app = typer.Typer(add_completion=False)
FEW = 30
"""Held-out problems of which one is more than 3 points."""
NONE = "-"
"""No column."""


class Written(Result):
    """The recipe, reward and test that were written for a data file."""

    files: Annotated[list[str], "the recipe, a reward to change, its test"]
    columns: Annotated[dict[str, str], "question, answer, solution → column"]
    rows: Annotated[int, "rows of the file"]
    train: Annotated[int, "problems to train on"]
    held_out: Annotated[int, "problems to measure with"]
    left_out: Annotated[int, "rows without a question or an answer"]
    unreadable: Annotated[int, "answers that cannot be graded"]
    decimal: Annotated[str, "decimal sign of the answers"]
    model: Annotated[str, "of the recipe"]
    memory_gb: Annotated[float, "of the recipe"]
    gpu: Annotated[bool, "whether it is a GPU's"]
    learns: Annotated[list[str], "what a trial measured"]
    next: Annotated[list[str], "commands"]
    data: Any
    hardware: str

    def view(self, width: int) -> View:
        yield from _answers(self.data)
        yield f"{self.train} to train on, {self.held_out} held out to measure with"
        if self.held_out < FEW:
            again = "; repeated questions are never held out" if self.data.golds.repeated else ""
            yield Line(f"warning: so few held-out problems say little about the gain{again}", "yellow")
        little = "; made from nothing, it learns little from few rows" if self.model == "tiny" else ""
        yield f"model {self.model} for {self.hardware}{little}"
        yield from self.learns
        recipe, reward, test = self.files
        yield f"written: {recipe} (the recipe), {reward} (a reward to change), {test} (its test)"
        yield "Next: does it fit, will it learn, how long; then the run:"
        for step in self.next:
            yield f"  {step}"


@verb(app)
@without_warnings()  # rows that are left out are counted in what it shows
def new(
    data: Annotated[str | None, typer.Argument(metavar="FILE")] = None,
    question: Annotated[str | None, typer.Option(metavar="COLUMN")] = None,
    answer: Annotated[str | None, typer.Option(metavar="COLUMN")] = None,
    solution: Annotated[str | None, typer.Option(metavar="COLUMN")] = None,
    decimal: Annotated[str | None, typer.Option(metavar=". or ,")] = None,
    model: str | None = None,
    memory: Annotated[float | None, typer.Option(metavar="GB", min=0.5)] = None,
    gpu: Annotated[bool | None, typer.Option("--gpu/--cpu")] = None,
    name: str | None = None,
    trial: Annotated[bool | None, typer.Option("--trial/--no-trial")] = None,
    minutes: Annotated[float, typer.Option(min=0.1)] = 10.0,
    teacher: Annotated[str | None, typer.Option(metavar="MODEL")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False,
    as_json: bool = False,
) -> Written:
    """Write NAME.yaml, NAME_reward.py and its test for a data file; on a terminal, ask what was not named.

    Args:
        data: A CSV, JSONL, JSON or Parquet file.
        question: Column of the questions.
        answer: Column of the gold answers.
        solution: Column of worked solutions, for SFT; - for none.
        decimal: Decimal sign of the gold answers.
        model: tiny, smollm2, a hub name or a folder; one that fits the memory when left out.
        memory: Memory of the GPU, or of the machine without one.
        gpu: Where it will run.
        name: Name of recipe and run; that of the file when left out.
        trial: Without solutions, try how this model can learn from the answers alone; left out: where the model needs no download.
        minutes: How long the trial may take once the model is loaded.
        teacher: A run, model folder or hub name whose right completions SFT imitates.
        yes: Take every guess and ask nothing.

    Example: algorist new sums.csv · algorist new sums.csv --question Frage --answer Antwort --model tiny
    """
    from algorist.cli.first_look import FIELDS, look_at, read_problems
    from algorist.cli.first_recipe import name_for, write_files

    asks = not yes and not as_json and sys.stdin.isatty()
    if data is None and not asks:
        raise DataError("which file? algorist new FILE, such as algorist new sums.csv")
    data = data or ask("data file (CSV, JSONL, JSON or Parquet)", _first_data_file())
    if model not in (None, "tiny"):
        model = str(find_model(model)[0])
    options = zip(FIELDS, (question, answer, solution), strict=True)
    named = {field: None if column == NONE else column for field, column in options if column is not None}
    file = look_at(data, named)
    if not as_json:
        _show_columns(file)
    if asks:
        for field in FIELDS:
            if field not in named:
                _ask_column(file, field)
    read_problems(file, decimal)
    if asks and decimal is None and file.decimal == ",":
        commas = "12,5 is 12.5, 1.234,5 is 1234.5 (, or .)"
        read_problems(file, ask(f"decimal sign of the answers: {commas}", ","))
    hardware = _hardware(memory, gpu)
    name_of_model = _choose_model(hardware, asks) if model is None else model
    choose = partial(
        _choose, file, model=name_of_model, trial=trial, minutes=minutes, teacher=teacher, quiet=as_json
    )
    try:
        written = write_files(file, name or name_for(data), name_of_model, hardware, choose)
    except DataError:
        if not as_json:
            say("\n".join(map(str, _answers(file))), stderr=True)
        raise
    return Written(
        files=list(map(str, written.files)),
        columns=file.columns,
        rows=len(file.rows),
        train=written.train,
        held_out=written.held_out,
        left_out=file.left_out,
        unreadable=len(file.golds.unreadable),
        decimal=file.decimal,
        model=name_of_model,
        memory_gb=round(hardware.memory_gb, 1),
        gpu=hardware.gpu,
        next=[f"algorist {verb} {shlex.quote(str(written.files[0]))}" for verb in ("preflight", "run")],
        learns=list(written.choice.why),
        data=file,
        hardware=str(hardware),
    )


def _choose(
    file: DataFile,
    recipe: Callable[[Route], dict[str, Any]],
    *,
    model: str,
    trial: bool | None,
    minutes: float,
    teacher: str | None,
    quiet: bool,
) -> Route:
    """Choose how a recipe learns: from solutions where there are some, else as a trial measures."""
    from algorist.cli.first_recipe import Route
    from algorist.cli.first_trial import Trial, at_hand

    if file.has_solutions and teacher is None:
        return Route()
    teacher = str(find_model(teacher)[0]) if teacher else None
    absent = [name for name in (model, teacher) if name and not at_hand(name)]
    if trial is False or (trial is None and absent):
        why = "--no-trial" if trial is False else f"{absent[0]} has to be downloaded first: --trial does"
        return Route(why=[f"Not tried whether this model can learn from answers alone ({why})."])
    display = TerminalDisplay(stderr=quiet)
    import_quietly("algorist.preflight", display.say)
    try:
        return Trial(recipe, teacher, minutes, display).choose()
    finally:
        display.close()


def _first_data_file() -> str | None:
    from algorist.data.files import SUFFIXES

    return next((p.name for p in sorted(Path().iterdir()) if p.suffix.lower() in SUFFIXES), None)


def _show_columns(file: DataFile) -> None:
    """Print each column with its value in the first row and the field that it is read as."""
    fields: dict[str, list[str]] = {}
    for field, column in file.columns.items():
        fields.setdefault(column, []).append(field)
    screen = console()
    names = [one_line(str(column), 20) for column in file.rows[0]]
    uses = [" and ".join(fields.get(column, ())) for column in file.rows[0]]
    room = max(
        20, min(screen.width, 120) - max(map(len, [*names, "column"])) - max(map(len, [*uses, "used as"])) - 6
    )
    cells = [one_line(str(value), room) for value in file.rows[0].values()]
    screen.print(table(("column", "first row", "used as"), list(zip(names, cells, uses, strict=True))))


def _answers(file: DataFile) -> View:
    """Describe how the grader reads the gold answers, and the rows that are left out."""
    golds, column = file.golds, file.columns["answer"]
    count = sum(bool(p.solution) for p in file.problems)
    part = "" if count == len(file.problems) else f"{count} of them "
    solved = f"{part}with worked solutions" if count else "no worked solutions"
    lines = [f"{len(file.problems)} problems, answers compared as {file.matcher}, {solved}"]
    if file.left_out:
        lines.append(
            f"{file.left_out} of {len(file.rows)} rows lack a question or an answer and are left out (skip_bad_rows)"
        )
    if file.decimal == ",":
        example = next((str(row[column]) for row in file.rows if "," in str(row[column])), "12,5")
        lines.append(
            f"answers such as {example!r} have a decimal comma (decimal: ','); if they are lists: --decimal ."
        )
    elif golds.decimal_commas:
        count, example = len(golds.decimal_commas), golds.decimal_commas[0].answer
        lines.append(
            f"{count} answers such as {example!r} are read as two numbers; if the comma is a decimal sign: --decimal ,"
        )
    if golds.grouped:
        example = golds.grouped[0].answer
        lines.append(
            f"{len(golds.grouped)} answers such as {example!r} are read as several numbers; where one is meant, write 123456 or -1200"
        )
    if golds.unreadable:
        problem, why = golds.unreadable[0]
        example = one_line(problem.answer, 60)
        lines.append(
            f"warning: {len(golds.unreadable)} answers cannot be graded and earn nothing, such as {example!r} ({why})"
        )
    if golds.text_only:
        example = one_line(golds.text_only[0].answer, 60)
        lines.append(f"{len(golds.text_only)} answers are right in the same words only, such as {example!r}")
    if golds.repeated:
        lines.append(f"{golds.repeated} questions are repeated")
    return lines


def _hardware(memory: float | None, gpu: bool | None) -> Machine:
    from algorist.cli.first_recipe import Machine, this_machine

    here = this_machine()
    return Machine(here.memory_gb if memory is None else memory, here.gpu if gpu is None else gpu)


def _choose_model(hardware: Machine, asks: bool) -> str:
    from algorist.cli.first_recipe import default_model

    guess = default_model(hardware)
    if not asks:
        return guess
    say(
        "models: tiny (from nothing, no download, shows that all fits), smollm2 (135 M), Qwen/Qwen2.5-0.5B-Instruct, any hub name "
        "or folder"
    )
    return ask(f"model for {hardware}", guess)


def _ask_column(file: DataFile, field: str) -> None:
    """Ask for the column of a field until there is one of that name; the guess is the answer to an empty line."""
    while True:
        optional = field == "solution"
        guess = file.columns.get(field) or (NONE if optional else None)
        column = ask(f"{field} column{f' ({NONE} for none)' if optional else ''}", guess)
        if optional and column == NONE:
            file.columns.pop(field, None)
            return
        if column in file.rows[0]:
            file.columns[field] = column
            return
        say(
            f"no column '{column}'.{nearest(column, file.rows[0])} Columns: {', '.join(map(str, file.rows[0]))}"
        )

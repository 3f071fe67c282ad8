"""Renderer of results, as text or as JSON, for all verbs; one console, bars, tables, commands as they can be typed."""

from __future__ import annotations

import functools
import inspect
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TextIO,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from algorist.cli.safe_stream import SafeStream
from algorist.cli.verbs import VERBS
from algorist.parameters import meanings_of
from algorist.store.run_log import Lines, step_line
from algorist.store.safe_text import json_text, printable

Function = TypeVar("Function", bound=Callable[..., Any])
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; its keys: docs/json.md.")]
PIPE = 1_000_000
"""Columns without a terminal: nothing is wrapped, so that a line can be searched for."""
ROOMY = 96
"""Columns from which two intervals and that of their difference fit beside each other."""
CLOSING = ("greedy_accuracy", "lenient_accuracy", "pass@1", "format", "truncated", "mean_tokens")


COMMAND = re.compile(rf"(?<![\w/.-])algorist(?= (?:{'|'.join(VERBS)})\b)")


def compact(text: str) -> str:
    """Return ``text`` without blanks around it, four line ends or more in a row as their count; of nothing but blanks, their count."""
    if not text.strip():
        return f"(nothing but {len(text)} blanks and line ends)" if text else "(nothing)"
    return re.sub(
        r"\n(?:[^\S\n]*\n){3,}", lambda ends: f"\n({ends[0].count(chr(10))} line ends)\n", text.strip()
    )


def program() -> str:
    """Return the command that starts this program from the present folder."""
    places = Path(sys.argv[0]), Path(sys.executable).with_name("algorist")
    script = next((p for p in places if p.name == "algorist" and p.is_file()), None)
    if script is None:
        return f"{_short(Path(sys.executable))} -m algorist"
    known = shutil.which("algorist")
    return "algorist" if known and Path(known).samefile(script) else _short(script)


def as_typed(text: str) -> str:
    """Return a text with each ``algorist VERB`` as it can be typed."""
    return COMMAND.sub(lambda _: program(), text)


def _short(path: Path) -> str:
    place, here = path.absolute(), Path.cwd()
    text = str(place.relative_to(here)) if place.is_relative_to(here) else str(place)
    return shlex.quote(text if "/" in text else f"./{text}")


class Screen(Console):
    """A console whose texts are printable, whoever wrote them, and are no markup."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a text, its lines broken between words; commands as they can be typed, and whole, so that they can be copied."""
        for line in text.split("\n"):
            match = COMMAND.search(line)
            before = line[: match.start()] if match else line
            alone = match and (not before.strip() or (before.endswith(": ") and len(line) > self.width))
            if alone and before.strip():
                self.lines(before.rstrip(), style)
            if alone:
                self.print(f"  {as_typed(line[len(before) :])}", style=style, soft_wrap=True)
            else:
                self.lines(as_typed(line), style)

    @property
    def can_redraw(self) -> bool:
        """Whether a bar can move here: on a terminal. FORCE_COLOR, which notebooks set, only colours a pipe."""
        return self.is_terminal and self.file.isatty()

    def lines(self, text: str, style: str | None = None) -> None:
        """Print a text as it is; where a line is too long, the rest is indented as it is."""
        for line in text.split("\n"):
            indent = len(line) - len(line.lstrip(" ")) if len(line) > self.width else 0
            self.print(
                Padding(line[indent:], (0, 0, 0, indent), expand=False) if indent else line, style=style
            )


def console(*, stderr: bool = False) -> Screen:
    """Return the console for everything that is drawn.

    It writes past ``SafeStream``, which would show the console's own sequences as text.
    """
    stream = sys.stderr if stderr else sys.stdout
    raw = getattr(stream, "rich_proxied_file", stream)
    return Screen(file=raw, width=None if raw.isatty() else PIPE, highlight=False, markup=False, emoji=False)


def say(text: str, style: str | None = None, *, stderr: bool = False) -> None:
    """Print a text on standard output or standard error; see ``Screen.say``."""
    console(stderr=stderr).say(text, style)
    (sys.stderr if stderr else sys.stdout).flush()


def ask(what: str, guess: Any = None) -> str:
    """Prompt for a line; an empty one is the guess, the end of the input is Ctrl-C."""
    # input() writes past SafeStream.
    shown = printable(f"{what} [{guess}]: " if guess is not None else f"{what}: ")
    try:
        return input(shown).strip() or ("" if guess is None else str(guess))
    except EOFError:
        print()
        raise KeyboardInterrupt from None


class Line(NamedTuple):
    """A text of a view: as it is, so that commands in it, which a model may have written, are not replaced."""

    text: str
    style: str | None = None
    whole: bool = False
    """To be copied or read by a program: never broken."""


View = Iterable["str | Line | RenderableType"]
"""Output of a verb: messages, lines as they are, tables."""


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Result:
    """Result of a verb. A field with a text in ``Annotated`` is a key of ``--json``; others serve the view alone."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def view(self, width: int) -> View:
        """Return the output for a terminal of ``width`` columns."""
        raise NotImplementedError

    def code(self) -> int:
        """Return the exit code."""
        return 0


class TableResult(Result):
    """Rows of the same keys, shown as a table."""

    rows: Annotated[list[dict[str, Any]], "one object for each line of the table, with its headings as keys"]

    def view(self, width: int) -> View:
        if self.rows:
            yield table(list(self.rows[0]), [[str(v) for v in row.values()] for row in self.rows])


def keys_of(result: type[Result]) -> dict[str, str]:
    """Return the keys of a result's JSON with their meaning."""
    hints = get_type_hints(result, include_extras=True)
    return {
        f.name: hints[f.name].__metadata__[0]
        for f in fields(result)
        if get_origin(hints[f.name]) is Annotated
    }


def render(result: Result, *, as_json: bool) -> int:
    """Print a verb's result, and return the exit code: the only place where results are printed."""
    if as_json:
        print(json_text({key: plain(getattr(result, key)) for key in keys_of(type(result))}))
        return result.code()
    screen = console()
    for part in result.view(screen.width):
        if isinstance(part, str):
            screen.say(part)
        elif not isinstance(part, Line):
            screen.print(part)
        elif part.whole:
            screen.print(part.text, style=part.style, soft_wrap=True)
        else:
            screen.lines(part.text, part.style)
    sys.stdout.flush()
    return result.code()


def plain(value: Any) -> Any:
    """Return a value as JSON has it: None for NaN and infinity, text for paths and dates."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def verb(app: typer.Typer, name: str | None = None) -> Callable[[Function], Function]:
    """Register a function that returns a ``Result`` as a verb with ``--json``; it stays a function that returns it.

    Its help is its docstring: what comes before ``Args:``, what these say of each argument, and the example at the end.
    """

    def register(function: Function) -> Function:
        signature, doc = inspect.signature(function, eval_str=True), inspect.getdoc(function) or ""
        meanings = meanings_of(doc)
        parameters = [
            _with_help(p, meanings.get(p.name)) for p in signature.parameters.values() if p.name != "as_json"
        ]
        knows = len(parameters) < len(signature.parameters)

        def call(*, as_json: bool, **values: Any) -> int:
            result = function(**values, **({"as_json": as_json} if knows else {}))
            return render(result, as_json=as_json) if isinstance(result, Result) else result or 0

        functools.update_wrapper(call, function)
        option = inspect.Parameter(
            "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson
        )
        vars(call)["__signature__"] = inspect.Signature([*parameters, option], return_annotation=int)
        returned = signature.return_annotation
        vars(call)["returns"] = next((t for t in get_args(returned) if t is not type(None)), returned)
        what, example = re.split(r"\n\n(?=Args:|Example:)", doc)[0], doc.rpartition("\n\nExample: ")
        epilog = f"Example: {' '.join(example[2].split())}" if example[1] else None
        app.command(name, help=what, epilog=epilog)(call)
        return function

    return register


def _with_help(parameter: inspect.Parameter, meaning: str | None) -> inspect.Parameter:
    """Return a parameter with its help; what has a default is an option, and one that is False a flag without its opposite."""
    kind = parameter.annotation
    if get_origin(kind) is Annotated:
        (info,) = kind.__metadata__
        info.help = info.help or meaning
        return parameter
    flag = [f"--{parameter.name.replace('_', '-')}"] if parameter.default is False else []
    made = typer.Option if parameter.default is not parameter.empty else typer.Argument
    return parameter.replace(annotation=Annotated[kind, made(*flag, help=meaning)])


def note(text: str) -> None:
    """Report long work on standard error."""
    say(text, stderr=True)


@contextmanager
def printing_above(drawn: Console) -> Iterator[None]:
    """While ``drawn`` draws something that moves, let what others print come out above it, in whole lines.

    Rich's own redirection would lie over ``SafeStream`` and send terminals what models print; this one lies under it.
    """
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, SafeStream) and s.isatty()]
    for stream in streams:
        stream.below = cast(TextIO, FileProxy(drawn, stream.rich_proxied_file))
    try:
        yield
    finally:
        for stream in streams:
            stream.below.flush()
            stream.below = stream.rich_proxied_file


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Return a table without a frame; a column of numbers is right-aligned."""
    lines = list(rows)
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    drawn.header_style, drawn.show_header = "bold", any(headings)
    for heading, cells in zip(headings, zip(*lines, strict=True), strict=True):
        number = all(cell[:1] in "+-–0123456789" for cell in cells)
        drawn.add_column(heading, justify="right" if number else "left", overflow="fold")
    for line in lines:
        drawn.add_row(*line)
    return drawn


class TerminalDisplay(Lines):
    """Draws a run with rich; on a pipe it prints plain lines."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__()
        self.console = console(stderr=stderr)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(40 if self.console.width >= ROOMY else 20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            console=self.console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[str, TaskID] = {}
        self._drawing = ExitStack()
        self._live = self.console.can_redraw

    def say(self, text: str) -> None:
        self._work.last = time.monotonic()
        self.console.say(text)

    def step(self, stage: str, step: int, steps: int, values: dict[str, float], seconds_left: float) -> None:
        """Show a training step: a bar, and a line where one is due; SFT has lines only where no bar can be drawn."""
        line = step_line(stage, step, steps, values, seconds_left, width=self.console.width)
        if self._live:
            self._bar(stage, step, steps, line.split(" · ")[1])
        if (stage == "grpo" or not self._live) and self._work.step_is_due(stage, step, steps, bar=self._live):
            self.say(line)

    def progress(self, stage: str, done: int, total: int) -> None:
        if self._live:
            self._bar(stage, done, total)
        else:
            super().progress(stage, done, total)

    def finished(self, stage: str) -> None:
        """Take the stage's bar away."""
        super().finished(stage)
        if stage in self._tasks:
            self._bars.remove_task(self._tasks.pop(stage))
            if not self._tasks:
                self._bars.stop()
                self._drawing.close()

    def close(self) -> None:
        """Take all bars away; a terminal shows its cursor again."""
        for stage in list(self._tasks):
            self.finished(stage)

    def _bar(self, stage: str, done: int, total: int, said: str | None = None) -> None:
        if stage not in self._tasks:
            if not self._tasks:
                self._drawing.enter_context(printing_above(self.console))
                self._bars.start()
            self._tasks[stage] = self._bars.add_task(stage, total=total, said="")
        self._bars.update(self._tasks[stage], completed=done)
        if said is not None:
            self._bars.update(self._tasks[stage], said=said)


def closing_table(
    width: int,
    before: dict[str, Any],
    after: dict[str, Any],
    paired: dict[str, Any],
    names: Sequence[str] = ("SFT", "GRPO"),
    only: Sequence[str] | None = CLOSING,
) -> Table:
    """Return two evaluations of the same problems, each with a 95 % interval, and the paired difference.

    Where the terminal is narrow, only the difference has its interval. ``only`` names the metrics; None is all of them.
    """
    roomy = width >= ROOMY

    def text(side: dict[str, Any], name: str) -> str:
        if name not in side:  # it has greedy answers alone, or samples alone
            return "–"
        return str(side[name].text(name) if roomy else side[name].text(name).partition(" [")[0])

    rows = [
        (
            name.replace("_", " "),
            text(before, name),
            text(after, name),
            paired[name].text(name, signed=True) if name in paired else "",
        )
        for name in only or {**after, **paired}
        if name in paired or (name in before and name in after)
    ]
    what = "95 % intervals" if roomy else "95 % interval of the difference"
    return table(("", *names, "paired difference"), rows, title=f"held-out problems, {what}")

"""``algorist data list | show | check | rate | sample | overlap``."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import Overrides, find_model, read_pairs, read_recipe
from algorist.cli.session import import_quietly
from algorist.cli.terminal import Line, Result, TableResult, TerminalDisplay, View, verb
from algorist.store.safe_text import json_text, one_line

if TYPE_CHECKING:
    from algorist.types import Problem

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="List, show, check, rate, sample and compare datasets.",
    epilog="Example: algorist data check gsm8k --path data/gsm8k --split test",
)

Name = Annotated[
    str, typer.Argument(help="An adapter (algorist data list), then ,key=value of a data section.")
]
PathOption = Annotated[str | None, typer.Option(help="A local file or folder instead of the hub.")]
SplitOption = Annotated[str, typer.Option(help="Split of the dataset: train, test or what it has.")]
Column = Annotated[
    list[str] | None, typer.Option("--column", help="field=COLUMN, such as question=Body (adapter local).")
]


@verb(app, "list")
def list_datasets() -> TableResult:
    """List the adapters. Next: algorist data show NAME.

    Example: algorist data list
    """
    from algorist.data import DATASETS

    first = {name: (DATASETS.get(name).__doc__ or "").strip().partition("\n")[0] for name in DATASETS}
    return TableResult(
        [{"dataset": name, "what it is": text.replace("``", "")} for name, text in first.items()]
    )


class Shown(Result):
    """Problems of a dataset."""

    problems: Annotated[list[Any], "per problem: id, question, answer, solution, subject, level and more"]

    def view(self, width: int) -> View:
        for problem in self.problems:
            yield Line(json_text(problem, indent=2, default=str), whole=True)


@verb(app, "show")
def show(
    name: Name,
    path: PathOption = None,
    split: SplitOption = "train",
    column: Column = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1)] = 3,
) -> Shown:
    """Show the first problems of a dataset. Next: algorist data check NAME.

    Args:
        count: Problems to show.

    Example: algorist data show local --path sums.csv --column question=Frage -n 2
    """
    return Shown([asdict(problem) for problem in _load(name, path, split, column)[:count]])


CONTROL_TOKENS = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start|end)_of_turn>|</?s>|<(?:bos|eos|pad|unk)>|\[/?INST\]"
)
"""As the tokenizers of today's chat models write them; ``run`` and ``preflight`` look with the tokenizer at hand."""


class Checked(Result):
    """Check of gold answers by the grader."""

    problems: Annotated[int, "problems read"]
    repeated_questions: Annotated[int, "questions again"]
    unreadable: Annotated[list[dict[str, str]], "golds never paid: id, gold, reason"]
    text_only: Annotated[list[dict[str, str]], "compared as text: id, gold"]
    decimal_commas: Annotated[list[dict[str, str]], "maybe decimal commas: id, gold"]
    grouped: Annotated[list[dict[str, str]], "maybe one number: id, gold"]
    conflicting: Annotated[list[dict[str, str]], "repeated with another gold: id, gold, first_id, first_gold"]
    reasons: Annotated[dict[str, int], "reason → golds"]
    control_tokens: Annotated[list[dict[str, str]], "control tokens: id, tokens"]

    def view(self, width: int) -> View:
        yield (
            f"{self.problems} problems, {self.repeated_questions} repeated questions, {len(self.unreadable)} gold answers the "
            "grader cannot read"
        )
        if set(self.reasons) - {"equal_string"}:  # the same text, as it should be
            yield "  each graded against itself: " + ", ".join(
                f"{n} {why}" for why, n in self.reasons.items()
            )
        for row in self.unreadable[:50]:
            yield Line(f"  {row['id']}: {row['gold']!r} ({row['reason']})")
        if self.conflicting:
            yield f"  {len(self.conflicting)} repeat a question with another gold answer, such as:"
            for row in self.conflicting[:5]:
                yield Line(
                    f"    {row['id']}: {row['gold']!r}, where {row['first_id']} has {row['first_gold']!r}"
                )
        if self.decimal_commas:
            yield (
                f"  {len(self.decimal_commas)} may be decimal commas but are read as two numbers, right in the same order only; "
                "for 12.5 and 1234.5 write\n    params: {decimal: ','} into the data section (adapter local), such as:"
            )
            yield from self._some(self.decimal_commas)
        if self.grouped:
            yield (
                f"  {len(self.grouped)} may be one number (1,23,456 as in India, a negative (1,200)) but are read as several; where one is "
                "meant, write\n    123456 or -1200 into the data, such as:"
            )
            yield from self._some(self.grouped)
        if self.text_only:
            yield (
                f"  {len(self.text_only)} are compared as text only, so only the same words are right, such as:"
            )
            yield from self._some(self.text_only)

        if self.control_tokens:
            yield (
                f"  {len(self.control_tokens)} hold control tokens as text, which a model that has them reads as the ends of turns "
                "that they\n  stand for; take them out of the data, such as:"
            )
            for row in self.control_tokens[:5]:
                yield Line(f"    {row['id']}: {row['tokens']}")

    @staticmethod
    def _some(rows: list[dict[str, str]]) -> View:
        return [Line(f"    {row['id']}: {row['gold']!r}") for row in rows[:5]]

    def code(self) -> int:
        return 1 if self.unreadable else 0


@verb(app, "check")
def check(
    name: Name, path: PathOption = None, split: SplitOption = "train", column: Column = None
) -> Checked:
    """Run every gold answer through the grader and list what it cannot read. Exit 1 if there is any.

    Example: algorist data check gsm8k --path data/gsm8k --split test
    """
    from algorist.data.golds import check_golds

    problems = _load(name, path, split, column)
    golds = check_golds(problems)
    return Checked(
        problems=len(problems),
        repeated_questions=golds.repeated,
        unreadable=[{"id": p.id, "gold": p.answer, "reason": why} for p, why in golds.unreadable],
        text_only=[{"id": p.id, "gold": p.answer} for p in golds.text_only],
        decimal_commas=[{"id": p.id, "gold": p.answer} for p in golds.decimal_commas],
        grouped=[{"id": p.id, "gold": p.answer} for p in golds.grouped],
        conflicting=[
            {"id": p.id, "gold": p.answer, "first_id": first.id, "first_gold": first.answer}
            for first, p in golds.conflicting
        ],
        reasons=dict(golds.reasons.most_common()),
        control_tokens=[
            {"id": p.id, "tokens": " ".join(tokens)}
            for p in problems
            if (tokens := sorted(set(CONTROL_TOKENS.findall(f"{p.question}\n{p.solution}"))))
        ],
    )


class Rated(Result):
    """Pass rates of a model on the training problems."""

    table: Annotated[str, "the file of pass rates"]
    problems: Annotated[int, "problems in it"]
    samples: Annotated[int, "completions per problem"]
    right: Annotated[dict[int, int], "right completions → problems"]
    next: str

    def view(self, width: int) -> View:
        for count in range(self.samples + 1):
            problems = self.right.get(count, 0)
            yield f"{count:>4} of {self.samples} right  {problems:>7}  {problems / self.problems:6.1%}"
        yield f"{self.problems} problems in {self.table}\nNext: {self.next}"


@verb(app, "rate")
def rate(
    recipe: str,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=1)] = 8,
    model: str | None = None,
) -> Rated:
    """Sample each training problem as GRPO would and write its pass rate. Next: data.train.pass_rate=[0.1,0.9].

    Args:
        recipe: A shipped recipe or a .yaml file.
        samples: Completions per problem.
        model: A run, checkpoint, model folder or hub name instead of the recipe's model.

    Example: algorist data rate oneshot-gsm8k --model runs/oneshot-gsm8k/sft/final --samples 8
    """
    loaded = read_recipe(recipe, overrides)
    where = None if model is None else find_model(model)[0]

    import_quietly("algorist.runs.rate")
    from algorist.data.load import read_table
    from algorist.runs.rate import rate as measure

    display = TerminalDisplay(stderr=True)
    try:
        path = measure(loaded, samples=samples, model=where, on_progress=partial(display.progress, "rating"))
    finally:
        display.close()
    entries = read_table(path)["problems"].values()
    right = Counter(entry["right"] for entry in entries)
    file = f" data.train.pass_rates={path}" if model is not None else ""
    again = f"algorist run {recipe} 'data.train.pass_rate=[0.1,0.9]'{file}"
    return Rated(str(path), len(entries), samples, dict(sorted(right.items())), again)


class SampledResult(Result):
    """Completions drawn and demonstrations written."""

    path: Annotated[str, "the dataset"]
    problems: Annotated[int, "problems asked"]
    completions: Annotated[int, "completions drawn"]
    right: Annotated[int, "right completions"]
    solved: Annotated[int, "problems with a right completion"]
    repeated: Annotated[int, "left out: repeated texts"]
    unreadable: Annotated[int, "left out: no demonstrations of the format"]
    written: Annotated[int, "demonstrations written"]
    provenance: Annotated[str, "a file that says where it comes from"]
    recipe: str

    def view(self, width: int) -> View:
        yield (
            f"{self.right} of {self.completions} completions are right, for {self.solved} of {self.problems} problems\n"
            f"left out are {self.repeated} repeated and {self.unreadable} that do not follow the prompt format, or that an environment or a chat's tool answered\n"
            f"{self.written} demonstrations in {self.path}, where they come from in {self.provenance}\n"
            f"Next: algorist run {shlex.quote(self.recipe)} --only sft run_name=NAME "
            + shlex.quote(f"data.sft={{name: local, path: {self.path}}}")
        )


@verb(app, "sample")
def sample(
    recipe: str,
    overrides: Overrides = None,
    out: Path = Path("right.jsonl"),
    samples: Annotated[int, typer.Option(min=1)] = 8,
    per_problem: Annotated[int | None, typer.Option(min=1)] = None,
    model: str | None = None,
) -> SampledResult:
    """Sample a model's own completions, or a teacher's, and write the right ones as a dataset for SFT.

    Args:
        recipe: A shipped recipe or a .yaml file: problems, prompt, sampling.
        out: The dataset that is written (JSONL).
        samples: Completions per problem.
        per_problem: Most demonstrations of a problem, the shortest.
        model: A run, checkpoint, model folder or hub name instead of the recipe's model.

    Example: algorist data sample quickstart --model runs/quickstart --samples 8 --out data/right.jsonl
    """
    loaded = read_recipe(recipe, overrides)
    where = None if model is None else find_model(model)[0]

    import_quietly("algorist.runs.sample")
    from algorist.runs.sample import provenance_of
    from algorist.runs.sample import sample as draw

    display = TerminalDisplay(stderr=True)
    try:
        done = draw(
            loaded,
            out,
            samples=samples,
            per_problem=per_problem,
            model=where,
            on_progress=partial(display.progress, "sampling"),
        )
    finally:
        display.close()
    return SampledResult(**asdict(done), provenance=str(provenance_of(out)), recipe=recipe)


OVERLAPS = {
    "exact": "the same question",
    "numbers_changed": "the same but for numbers",
    "ngram": "{words} words in a row",
}


class Overlap(Result):
    """Held-out questions that training has as well."""

    train: Annotated[int, "problems of training"]
    held_out: Annotated[int, "held-out problems"]
    exact: Annotated[dict[str, Any], "word for word: share, low, high (95 %), pairs of ids"]
    numbers_changed: Annotated[dict[str, Any], "the same but for numbers: share, low, high, pairs"]
    ngram: Annotated[dict[str, Any], "a run of words in common: share, low, high, pairs"]
    words: int
    shown: Any = field(repr=False)

    def view(self, width: int) -> View:
        yield f"{self.held_out} held-out problems against {self.train} of training"
        for kind, name in OVERLAPS.items():
            row = getattr(self, kind)
            share, low, high = (100 * row[key] for key in ("share", "low", "high"))
            name = name.format(words=self.words)
            yield f"  {name:<26} {len(row['pairs']):>6}  {share:.1f} % [{low:.1f}, {high:.1f}]"
            for held, trained in self.shown[kind][:2]:
                yield Line(f"    {one_line(held.id, 30)}: {one_line(held.question, 100)}")
                yield Line(
                    f"      in training, {one_line(trained.id, 30)}: {one_line(trained.question, 100)}"
                )


@verb(app, "overlap")
def overlap(train: str, held_out: str, words: Annotated[int, typer.Option(min=3)] = 8) -> Overlap:
    """Count the questions of HELD_OUT that are also in TRAIN: word for word, with other numbers, or sharing a run of words.

    Args:
        train: What is trained on: an adapter or a file, then ,key=value.
        held_out: What is measured on, written the same way.
        words: Words in a row that count as shared.

    Example: algorist data overlap gsm8k,split=train gsm8k,split=test
    """
    from algorist.cli.benchmark_option import read_benchmarks
    from algorist.cli.eval_command import columns_of
    from algorist.data import load_problems
    from algorist.data.columns import ColumnError
    from algorist.diagnosis.leakage import shared_questions
    from algorist.evaluation.estimators import wilson

    def problems(text: str, split: str) -> list[Problem]:
        try:
            return load_problems(read_benchmarks([text], split=split)[0].section)
        except ColumnError as error:
            raise error.named_by(columns_of(error, text)) from None

    first, second = problems(train, "train"), problems(held_out, "test")
    shared = shared_questions(first, second, words=words)
    rows = {}
    for kind, pairs in shared.items():
        share = wilson(len(pairs), len(second))
        ids = [{"held_out": p.id, "train": q.id} for p, q in pairs]
        rows[kind] = {"share": share.value, "low": share.low, "high": share.high, "pairs": ids}
    return Overlap(len(first), len(second), **rows, words=words, shown=shared)


def _load(name: str, path: str | None, split: str, column: list[str] | None) -> list[Problem]:
    from algorist.cli.benchmark_option import after_the_name, read_benchmarks
    from algorist.config.schema import DatasetSection
    from algorist.data import load_problems
    from algorist.data.columns import ColumnError
    from algorist.errors import DataError

    columns = {field: str(name) for field, name in read_pairs("--column", column, "question=Body").items()}
    section = DatasetSection(name=name, path=path, split=split)
    if "," in name or Path(name).suffix:
        section = read_benchmarks([name], split=split, path=path)[0].section
    try:
        return load_problems(section.model_copy(update={"columns": columns or section.columns}))
    except ColumnError as error:
        raise error.named_by(" ".join(f"--column {f}=COLUMN" for f in error.fields)) from None
    except DataError as error:
        raise after_the_name(error, name) from None

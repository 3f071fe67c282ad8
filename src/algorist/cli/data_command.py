"""``algorist data list | show | check | rate | sample | overlap``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from algorist.cli.arguments import AsJson, Overrides, find_model, read_pairs, read_recipe
from algorist.cli.quiet import import_quietly
from algorist.cli.terminal import TerminalDisplay, listing, say
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


@app.command("list", epilog="Example: algorist data list")
def list_datasets(as_json: AsJson = False) -> None:
    """List the adapters. Next: algorist data show NAME."""
    from algorist.data import DATASETS

    first = {name: (DATASETS.get(name).__doc__ or "").strip().partition("\n")[0] for name in DATASETS}
    listing(
        [{"dataset": name, "what it is": text.replace("``", "")} for name, text in first.items()], as_json
    )


@app.command("show", epilog="Example: algorist data show local --path sums.csv --column question=Frage -n 2")
def show(
    name: Name,
    path: PathOption = None,
    split: SplitOption = "train",
    column: Column = None,
    count: Annotated[int, typer.Option("-n", "--count", help="Problems to show.", min=1)] = 3,
) -> None:
    """Show the first problems of a dataset. Next: algorist data check NAME."""
    for problem in _load(name, path, split, column)[:count]:
        print(json_text(asdict(problem), indent=2, default=str))


@app.command("check", epilog="Example: algorist data check gsm8k --path data/gsm8k --split test")
def check(
    name: Name,
    path: PathOption = None,
    split: SplitOption = "train",
    column: Column = None,
    as_json: AsJson = False,
) -> int:
    """Run every gold answer through the grader and list what it cannot read. Exit 1 if there is any."""
    from algorist.data.golds import check_golds

    problems = _load(name, path, split, column)
    golds = check_golds(problems)
    unreadable, text_only, commas = golds.unreadable, golds.text_only, golds.decimal_commas
    if as_json:
        rows = [{"id": p.id, "gold": p.answer, "reason": why} for p, why in unreadable]
        found = {"problems": len(problems), "repeated_questions": golds.repeated, "unreadable": rows}
        for kind, listed in (("text_only", text_only), ("decimal_commas", commas)):
            found[kind] = [{"id": p.id, "gold": p.answer} for p in listed]
        print(json.dumps(found))
        return 1 if unreadable else 0
    lines = [
        f"{len(problems)} problems, {golds.repeated} repeated questions, {len(unreadable)} gold answers the grader cannot read",
        "  " + ", ".join(f"{reason} {n}" for reason, n in golds.reasons.most_common()),
        *(f"  {problem.id}: {problem.answer!r} ({why})" for problem, why in unreadable[:50]),
    ]
    if commas:
        lines.append(
            f"  {len(commas)} may be decimal commas but are read as two numbers, right in the same order only; for 12.5 and 1234.5 write\n"
            "    params: {decimal: ','} into the data section (adapter local), such as:"
        )
        lines += [f"    {problem.id}: {problem.answer!r}" for problem in commas[:5]]
    if text_only:
        lines.append(
            f"  {len(text_only)} are compared as text only, so only the same words are right (never with matcher numeric), such as:"
        )
        lines += [f"    {problem.id}: {problem.answer!r}" for problem in text_only[:5]]
    say("\n".join(lines))
    return 1 if unreadable else 0


@app.command(
    "rate",
    epilog="Example: algorist data rate oneshot-gsm8k --model runs/oneshot-gsm8k/sft/final --samples 8",
)
def rate(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a .yaml file.")],
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(help="Completions per problem.", min=1)] = 8,
    model: Annotated[
        str | None,
        typer.Option(help="A run, checkpoint, model folder or hub name instead of the recipe's model."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Sample each training problem as GRPO would and write its pass rate. Next: data.train.pass_rate=[0.1,0.9]."""
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
    if as_json:
        print(
            json.dumps(
                {
                    "table": str(path),
                    "problems": len(entries),
                    "samples": samples,
                    "right": dict(sorted(right.items())),
                }
            )
        )
        return 0
    for count in range(samples + 1):
        say(f"{count:>4} of {samples} right  {right[count]:>7}  {right[count] / len(entries):6.1%}")
    named = f" data.train.pass_rates={path}" if model is not None else ""
    say(
        f"{len(entries)} problems in {path}\nNext: algorist run {recipe} 'data.train.pass_rate=[0.1,0.9]'{named}"
    )
    return 0


@app.command(
    "sample",
    epilog="Example: algorist data sample quickstart --model runs/quickstart --samples 8 --out data/right.jsonl",
)
def sample(
    recipe: Annotated[
        str, typer.Argument(help="A shipped recipe or a .yaml file: problems, prompt, sampling.")
    ],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="The dataset that is written (JSONL).")] = Path("right.jsonl"),
    samples: Annotated[int, typer.Option(help="Completions per problem.", min=1)] = 8,
    per_problem: Annotated[
        int | None, typer.Option(help="Most demonstrations of a problem, the shortest.", min=1)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A run, checkpoint, model folder or hub name instead of the recipe's model."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sample a model's own completions, or a teacher's, and write the right ones as a dataset for SFT."""
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
    if as_json:
        print(json.dumps(asdict(done) | {"provenance": str(provenance_of(out))}))
        return
    say(
        f"{done.right} of {done.completions} completions are right, for {done.solved} of {done.problems} problems\n"
        f"left out are {done.repeated} repeated and {done.unreadable} that do not follow the prompt format\n"
        f"{done.written} demonstrations in {out}, where they come from in {provenance_of(out)}\n"
        f"Next: algorist run {recipe} --only sft run_name=NAME 'data.sft={{name: local, path: {out}}}'"
    )


@app.command("overlap", epilog="Example: algorist data overlap gsm8k,split=train gsm8k,split=test")
def overlap(
    train: Annotated[str, typer.Argument(help="What is trained on: an adapter or a file, then ,key=value.")],
    held_out: Annotated[str, typer.Argument(help="What is measured on, written the same way.")],
    words: Annotated[int, typer.Option(help="Words in a row that count as shared.", min=3)] = 8,
    as_json: AsJson = False,
) -> None:
    """Count the questions of B that stand in A: word for word, with other numbers, or sharing a run of words."""
    from algorist.data import load_problems, shared_questions
    from algorist.evaluation.benchmark_option import read_benchmarks
    from algorist.evaluation.estimators import wilson

    first, second = (
        load_problems(read_benchmarks([text], split=split)[0].section)
        for text, split in ((train, "train"), (held_out, "test"))
    )
    found = shared_questions(first, second, words=words)
    shares = {kind: wilson(len(pairs), len(second)) for kind, pairs in found.items()}
    if as_json:
        rows = {
            kind: {
                "share": shares[kind].value,
                "low": shares[kind].low,
                "high": shares[kind].high,
                "pairs": [{"held_out": p.id, "train": q.id} for p, q in pairs],
            }
            for kind, pairs in found.items()
        }
        print(json.dumps({"train": len(first), "held_out": len(second), **rows}))
        return
    say(f"{len(second)} held-out problems against {len(first)} of training")
    names = {
        "exact": "the same question",
        "numbers_changed": "the same but for numbers",
        "ngram": f"{words} words in a row",
    }
    for kind, pairs in found.items():
        share = shares[kind]
        say(
            f"  {names[kind]:<26} {len(pairs):>6}  {100 * share.value:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"
        )
        for held, trained in pairs[:2]:
            say(f"    {one_line(held.id, 30)}: {one_line(held.question, 100)}")
            say(f"      in training, {one_line(trained.id, 30)}: {one_line(trained.question, 100)}")


def _load(name: str, path: str | None, split: str, column: list[str] | None) -> list[Problem]:
    from algorist.config.schema import DatasetSection
    from algorist.data import load_problems
    from algorist.data.columns import ColumnError

    columns = {field: str(name) for field, name in read_pairs("--column", column, "question=Body").items()}
    section = DatasetSection(name=name, path=path, split=split)
    if "," in name or Path(name).suffix:
        from algorist.evaluation.benchmark_option import read_benchmarks

        section = read_benchmarks([name], split=split, path=path)[0].section
    try:
        return load_problems(section.model_copy(update={"columns": columns or section.columns}))
    except ColumnError as error:
        raise error.named_by(" ".join(f"--column {f}=COLUMN" for f in error.fields)) from None

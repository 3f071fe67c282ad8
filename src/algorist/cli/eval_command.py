"""``algorist eval MODEL``: one or several benchmarks, resumable, as artifacts, a table, JSON, the harness's form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import (
    Format,
    Length,
    ModelArgument,
    NoTools,
    Template,
    Tools,
    find_model,
    read_template,
    read_tools,
)
from algorist.cli.session import import_quietly
from algorist.cli.terminal import Line, Result, TerminalDisplay, View, note, verb
from algorist.config.load import load_run_recipe
from algorist.errors import ConfigError, DataError, check_known

if TYPE_CHECKING:
    from algorist.cli.eval_benchmarks import Evaluated
    from algorist.config.schema import EvalSection, Recipe
    from algorist.data.columns import ColumnError
    from algorist.evaluation.artifact import Artifact
    from algorist.evaluation.estimators import Interval
    from algorist.evaluation.protocols import Benchmark
    from algorist.types import Problem

    Parts = dict[str, dict[str, dict[str, Interval]]]
    """Column, value, metric."""

app = typer.Typer(add_completion=False)
PROTOCOLS = (
    "greedy, sampled-N, sampled-N@TEMPERATURE, or as others do: gsm8k, gsm8k_cot_zeroshot, minerva_math500 (lm-eval), math_500, aime_avg "
    "(lighteval), matharena, matharena_aime; the run's when left out."
)
BY = ("subject", "level", "dataset", "reason")


class Evaluations(Result):
    """Evaluations of one model."""

    model: Annotated[str, "what was evaluated"]
    evaluations: Annotated[
        list[Any], "per benchmark: artifact, dataset, n, protocol, metrics, missing_tags, by, export"
    ]
    probes: Annotated[list[Any], "with --probe, per benchmark: artifact, its numbers, rows"]
    lines: list[str]

    def view(self, width: int) -> View:
        return (Line(line) if not line.startswith("  hint:") else line for line in self.lines)


@verb(app)
def evaluate_model(
    model: ModelArgument = None,
    data: Annotated[list[str] | None, typer.Option("--data", "--dataset")] = None,
    path: str | None = None,
    split: str | None = None,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    protocol: Annotated[str | None, typer.Option(help=PROTOCOLS)] = None,
    samples: Annotated[int | None, typer.Option(min=0)] = None,
    prompt_format: Format = None,
    template: Template = None,
    tools: Tools = None,
    no_tools: NoTools = False,
    max_new_tokens: Length = None,
    by: Annotated[
        list[str] | None, typer.Option(help=f"Break down by {', '.join(BY)}; may be repeated.")
    ] = None,
    name: str | None = None,
    out: Path | None = None,
    export: Annotated[tuple[str, Path] | None, typer.Option(metavar="lm-eval FOLDER")] = None,
    probe: Annotated[str | None, typer.Option(metavar="memory")] = None,
    again: Annotated[bool, typer.Option("--again")] = False,
) -> Evaluations:
    """Evaluate a run, a checkpoint or a model: greedy accuracy, pass@k, format, length, each with a 95 % interval.

    An evaluation that was stopped or killed continues when the same command is given again.

    Args:
        data: Adapter (algorist data list) or file, then ,key=value (path, limit, split, columns, …); may be repeated.
            The run's own held-out set when left out.
        path: The --data adapter's local file or folder instead of the hub.
        split: Split of the datasets; the recipe's, or test, when left out.
        limit: Only the first N problems of each.
        samples: Sampled completions per problem for pass@k; the run's when left out.
        name: Name of the artifact; else model and dataset.
        out: Folder of the artifact; the run's eval/ when left out.
        export: Also write the samples in lm-evaluation-harness's form.
        probe: Instead: does the model know the questions by heart?
        again: Evaluate again what is already evaluated.

    Example: algorist eval runs/quickstart --data gsm8k,limit=200 --data test.jsonl --protocol sampled-8@1 · Next:
    algorist compare A B
    """
    from algorist.config.schema import Recipe

    _check(by or [], export)
    where, run = find_model(model)
    recipe = load_run_recipe(run, runs="all") if run else Recipe()
    benchmarks = _benchmarks(recipe, data, split=split, path=path, limit=limit, name=name)
    if data:
        recipe = recipe.model_copy(update={"matcher": "symbolic"})
    folder = out or (run / "eval" if run else Path("eval"))
    if probe is not None:
        return _probe(probe, where, recipe if run else None, benchmarks, folder)
    prompt_format = _format_of(protocol, prompt_format)
    evaluation = _with_options(recipe.eval, protocol, samples, max_new_tokens)
    tags = _announce(where, recipe if run else None, prompt_format, evaluation.max_completion_tokens)
    import_quietly("algorist.cli.eval_benchmarks")
    from algorist.cli.eval_benchmarks import evaluate_benchmarks
    from algorist.evaluation.protocols import REFERENCES

    display = TerminalDisplay(stderr=True)
    evaluated = evaluate_benchmarks(
        where,
        benchmarks,
        recipe.model_copy(update={"eval": evaluation}),
        folder=folder,
        name=name,
        of_run=run is not None,
        prompt_format=prompt_format,
        template_kwargs=read_template(template),
        tools=read_tools(tools, no_tools),
        protocol=protocol if protocol in REFERENCES else "",
        again=again,
        on_progress=display.progress,
    )
    trained = _trained_on(run) if run else []
    entries: list[dict[str, Any]] = []
    lines: list[str] = []
    for done in _named_as_on_command_line(evaluated, data or []):
        display.finished(done.artifact.name)
        parts = _parts(done.artifact, by or [])
        entries.append(_entry(done, folder, parts, tags, export))
        shown = _lines(done, entries[-1], parts, trained)
        if len(benchmarks) > 1:  # the next one may take hours
            display.say(shown[1].strip())
        lines += shown
    return Evaluations(str(where), entries, [], lines)


def _trained_on(run: Path) -> list[Problem]:
    """Return the problems of a run's rollouts, and those of its local files."""
    from algorist.diagnosis.demonstrations import local_problems
    from algorist.store.read import query
    from algorist.types import Problem

    sampled = query(run, "SELECT DISTINCT question FROM rollouts")
    problems = [Problem("", str(row["question"]), "") for row in sampled]
    return [*problems, *local_problems(run, "train"), *local_problems(run, "sft")]


def _parts(artifact: Artifact, by: list[str]) -> Parts:
    """Return the metrics of an evaluation for each value of each column."""
    from algorist.evaluation.console import breakdown

    ks = artifact.protocol.get("ks") or (1, 4, 8)
    return {column: breakdown(artifact.samples, column, ks) for column in by}


def _entry(
    done: Evaluated, folder: Path, parts: Parts, tags: dict[str, str], export: tuple[str, Path] | None
) -> dict[str, Any]:
    """Return an evaluation for JSON, and export it where that was asked for."""
    from algorist.diagnosis.signals import missing_tags
    from algorist.evaluation.doors import EXPORTERS

    artifact = done.artifact
    entry = {
        "artifact": str(folder / f"{artifact.name}.json"),
        "dataset": artifact.dataset,
        "n": len({row["problem_id"] for row in artifact.samples}),
        "protocol": artifact.protocol,
        "metrics": artifact.metrics,
        "missing_tags": missing_tags(Counter(row["reason"] for row in artifact.samples), tags),
        "by": parts,
    }
    if export is not None:
        entry["export"] = str(EXPORTERS.get(export[0])(done.artifact, export[1], done.label))
    return entry


def _probe(
    probe: str, where: Path | str, recipe: Recipe | None, benchmarks: list[Benchmark], folder: Path
) -> Evaluations:
    """Probe a model on each benchmark; what it wrote goes to ``MODEL-BENCHMARK-PROBE.json`` beside the evaluations."""
    from algorist.evaluation.doors import PROBES

    PROBES.get(probe)  # before anything is loaded
    import_quietly("algorist.cli.eval_benchmarks")
    from algorist.cli.eval_benchmarks import probe_benchmarks

    display = TerminalDisplay(stderr=True)
    entries, lines = [], []
    for path, probed in probe_benchmarks(
        probe, where, benchmarks, recipe, folder=folder, on_progress=display.progress
    ):
        display.finished(path.stem)
        entries.append({"artifact": str(path), **probed.values, "rows": len(probed.rows)})
        lines += [f"{path.stem}:", *probed.lines, f"  every completion: {path}"]
    return Evaluations(str(where), [], entries, lines)


def _format_of(protocol: str | None, prompt_format: str | None) -> str | None:
    """Return the prompt format that a reference protocol fixes, else the one that was asked for."""
    from algorist.evaluation.protocols import REFERENCES

    fixed = REFERENCES[protocol].prompt_format if protocol in REFERENCES else None
    if fixed and prompt_format not in (None, fixed):
        raise ConfigError(
            f"--protocol {protocol} has a prompt format of its own ({fixed}), but --format is {prompt_format}; leave one out"
        )
    return fixed or prompt_format


def _with_options(
    section: EvalSection, protocol: str | None, samples: int | None, max_new_tokens: int | None
) -> EvalSection:
    from algorist.evaluation.protocols import with_protocol

    section = section if protocol is None else with_protocol(section, protocol)
    options = {"samples": samples, "max_completion_tokens": max_new_tokens}
    return section.model_copy(update={key: value for key, value in options.items() if value is not None})


def _announce(
    where: Path | str, recipe: Recipe | None, name: str | None, limit: int | None
) -> dict[str, str]:
    """Say before the model is loaded how it will be asked, and return the tags of that format by name."""
    from algorist.prompts.attached import attached
    from algorist.runs.asking import how_to_ask

    of_model = attached(where) if isinstance(where, Path) else None
    how = how_to_ask(recipe, name, of_model)
    default = "its training" if of_model or recipe else "not trained here; another: --format NAME"
    origin = "the option" if name else default
    length = limit or how.max_completion_tokens
    note(
        f"loading {where} · prompt format {how.prompt_format.name} ({origin}) · completions of up to {length} tokens"
        + ("" if limit else " (--max-new-tokens N)")
    )
    return asdict(how.prompt_format.tags)


OPTIONS = {"grpo.max_completion_tokens": "--max-new-tokens"}
"""Key of the recipe → the option of ``eval`` with the same meaning."""


def _hints(done: Evaluated, artifact: str, trained: list[Problem]) -> list[str]:
    """List hints: findings of the rules, too few problems, problems that were trained on."""
    from algorist.cli.few_problems import too_few
    from algorist.diagnosis.diagnose import of_evaluation
    from algorist.diagnosis.facts import leaked_text
    from algorist.types import Problem

    rows, protocol = done.artifact.samples, done.artifact.protocol
    few = too_few(
        len({r["problem_id"] for r in rows}), protocol.get("samples") or 0, protocol.get("protocol") or ""
    )
    asked = [Problem("", str(question), "") for question in {r["question"]: None for r in rows}]
    leak = leaked_text(trained, asked)
    lines = [text for text in (few, leak and f"at least {leak}") if text]
    for finding in of_evaluation(rows, protocol):
        changes = (line.partition("=") for line in finding.change)
        ways = [f"{OPTIONS[key]} {value}" for key, _, value in changes if key in OPTIONS]
        other = [f"algorist inspect {artifact} --wrong"]
        if protocol.get("prompt_format") not in ("boxed", "question_only"):
            other.append("another format: --format boxed (the last box)")
        lines.append(f"{finding.one_line()}: {' · '.join(ways or other)}")
    return lines


def _check(by: list[str], export: tuple[str, Path] | None) -> None:
    from algorist.evaluation.doors import EXPORTERS

    for column in by:
        check_known(column, BY, f"cannot break down by '{column}'", "Known: {}")
    if export is not None:
        EXPORTERS.get(export[0])


def _benchmarks(
    recipe: Recipe,
    data: list[str] | None,
    *,
    split: str | None,
    path: str | None,
    limit: int | None,
    name: str | None,
) -> list[Benchmark]:
    """Return what ``--data`` names, or the recipe's own held-out set; ``name`` is that of one artifact."""
    from algorist.cli.benchmark_option import read_benchmarks
    from algorist.evaluation.protocols import Benchmark

    if data:
        benchmarks = read_benchmarks(data, split=split or "test", path=path, limit=limit)
        if name is not None and len(benchmarks) > 1:
            raise ConfigError(
                f"--name {name} would name {len(benchmarks)} artifacts; leave it out, or take --out FOLDER"
            )
        return benchmarks
    if path is not None:
        raise ConfigError(f"--path needs the dataset it belongs to: --data NAME --path {path}")
    section = recipe.data.eval
    part, alone = section.params.get("part"), section.path is not None and Path(section.path).is_file()
    if (part and split) or (alone and split not in (None, section.split)):
        by = "data.eval.params.part" if part else f"data.eval.path={section.path}, one file"
        raise ConfigError(
            f"--split {split}: the recipe's held-out problems are no split of a dataset (they are chosen by {by}). Name others "
            f"with --data, such as --data {section.name},path=FILE"
        )
    changes = {"limit": limit or section.limit, "split": split or section.split}
    return [Benchmark(f"{section.name}-{part or changes['split']}", section.model_copy(update=changes))]


def columns_of(error: ColumnError, option: str, before: str = "") -> str:
    """Return the words that name a dataset's missing columns on the command line."""
    columns = ", ".join(f"{name}: COLUMN" for name in error.fields)
    if ",columns=" in option:
        return f"{columns} as well in columns={{…}}"
    return f"{before}'{option},columns={{{columns}}}'"


def _named_as_on_command_line(evaluated: Iterator[Evaluated], data: list[str]) -> Iterator[Evaluated]:
    """Pass the evaluations on; columns and keys of a dataset are named as ``--data`` takes them."""
    from algorist.cli.benchmark_option import after_the_name
    from algorist.data.columns import ColumnError

    try:
        yield from evaluated
    except ColumnError as error:
        option = next((text for text in data if error.where in text), error.where)
        raise error.named_by(columns_of(error, option, "--data ")) from None
    except DataError as error:
        raise (after_the_name(error, data[0]) if len(data) == 1 else error) from None


SIDE_BY_SIDE = ("greedy_accuracy", "lenient_accuracy")
"""The answer as the prompt format says, and the last number wherever it is."""


def _of_harness(protocol: dict[str, Any]) -> bool:
    """Tell whether an evaluation reads answers as lm-evaluation-harness reads those of GSM8K."""
    return str(protocol.get("protocol", "")).startswith("gsm8k")


def _lines(done: Evaluated, entry: dict[str, Any], parts: Parts, trained: list[Problem]) -> list[str]:
    """Return an evaluation as text: how, each metric, the parts, hints."""
    artifact = done.artifact
    known = " · already evaluated (--again: anew)" if done.reused else ""
    protocol = artifact.protocol
    how = f"{protocol.get('name', '')}, {protocol.get('prompt_format')}, up to {protocol.get('max_completion_tokens')} tokens"
    lines = [f"{artifact.name}: {artifact.dataset}, {entry['n']} problems, {how}{known}"]
    strict, lenient = (artifact.metrics.get(key) for key in SIDE_BY_SIDE)
    if strict is not None and lenient is not None:
        names = ("strict-match", "flexible-extract") if _of_harness(protocol) else ("strict", "lenient")
        texts = (
            f"{name} {value.text(names[0])}" for name, value in zip(names, (strict, lenient), strict=True)
        )
        lines.append(f"  {' · '.join(texts)}")
    lines += [
        f"  {key.replace('_', ' '):<26} {interval.text(key)}"
        for key, interval in artifact.metrics.items()
        if len(lines) < 2 or key not in SIDE_BY_SIDE
    ]
    lines += [
        f"  {f'without {tag}':<26} {count} of {len(artifact.samples)} completions: their answer is not read"
        for tag, count in entry["missing_tags"].items()
    ]
    for column, groups in parts.items():
        lines.append(f"  greedy accuracy by {column}:")
        for label, metrics in groups.items():
            accuracy = metrics["greedy_accuracy"]
            lines.append(f"    {label:<24} {accuracy.text('greedy_accuracy')} of {accuracy.n}")
    lines += [f"  hint: {text}" for text in _hints(done, entry["artifact"], trained)]
    exported = f", {entry['export']}" if "export" in entry else ""
    return [*lines, f"  written to {entry['artifact']} and .parquet{exported}"]

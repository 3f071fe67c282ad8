"""``algorist eval MODEL``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from algorist.cli.arguments import find_model, run_recipe_of

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: algorist eval runs/quickstart --dataset gsm8k --path test.jsonl · Next: algorist compare A B"
)
def evaluate_model(
    model: Annotated[
        str | None,
        typer.Argument(help="Run, checkpoint, model folder or hub name; the newest run when left out."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Adapter; the run's own held-out set when left out.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="A local file or folder instead of the hub.")] = None,
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "test",
    limit: Annotated[int | None, typer.Option(help="Only the first N problems.")] = None,
    samples: Annotated[int | None, typer.Option(help="Sampled completions per problem for pass@k.")] = None,
    prompt_format: Annotated[
        str | None, typer.Option("--format", help="Prompt format; the run's when left out.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the artifact; the dataset when left out.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the artifact; the run's eval/ when left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Evaluate a run, a checkpoint or a model: greedy accuracy, pass@k, format, length, each with a 95 % interval."""
    from algorist.cli.run_command import _quiet_libraries

    _quiet_libraries()
    from algorist.cli.display import TerminalDisplay, interval_text
    from algorist.config.schema import DatasetSection, Recipe
    from algorist.data import load_problems
    from algorist.evaluation.artifact import write_artifact
    from algorist.evaluation.estimators import summarise
    from algorist.evaluation.run import EvaluationSetting, evaluate
    from algorist.inference import Solver
    from algorist.rollouts import make_engine

    where, run = find_model(model)
    recipe = run_recipe_of(run) if run else Recipe()
    section = recipe.data.eval if dataset is None else DatasetSection(name=dataset, split=split, path=path)
    problems = load_problems(section.model_copy(update={"limit": limit or section.limit}))
    solver = Solver.load(where, recipe=recipe if run else None, prompt_format=prompt_format)
    section_eval = recipe.eval if samples is None else recipe.eval.model_copy(update={"samples": samples})
    setting = EvaluationSetting.from_section(
        section_eval,
        max_tokens=solver.max_new_tokens,
        matcher=recipe.matcher if dataset is None else "symbolic",
        seed=recipe.seed,
    )
    display = TerminalDisplay()
    tokenizer = solver.policy.tokenizer
    rows = evaluate(
        make_engine("auto", solver.policy.model, tokenizer),
        tokenizer,
        problems,
        solver.prompt_format,
        setting,
        on_progress=None if as_json else lambda done, total: display.progress("eval", done, total),
    )
    display.finished("eval")
    metrics = summarise(rows, ks=recipe.eval.ks)
    folder = out or (run / "eval" if run else Path("eval"))
    title = name or f"{Path(str(where)).name}-{section.name}-{section.split}"
    write_artifact(
        folder,
        title,
        samples=rows,
        metrics=metrics,
        protocol=asdict(setting),
        model=str(where),
        dataset=section.name,
    )
    if as_json:
        print(
            json.dumps(
                {
                    "artifact": str(folder / f"{title}.json"),
                    "metrics": {k: asdict(v) for k, v in metrics.items()},
                }
            )
        )
        return 0
    for key, interval in metrics.items():
        display.say(f"{key.replace('_', ' '):<24} {interval_text(interval, key)}")
    display.say(f"written to {folder / title}.json and .parquet")
    return 0

"""Write a model (merged, GGUF, upload) or an environment for others."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from algorist.cli.arguments import find_model, read_recipe
from algorist.cli.session import import_quietly
from algorist.cli.terminal import Result, TerminalDisplay, View, note, verb
from algorist.config.load import load_run_recipe
from algorist.errors import ConfigError, check_known
from algorist.extensions.model_folder import check_new

if TYPE_CHECKING:
    from algorist.config.schema import DatasetSection, Recipe
    from algorist.runs.solve import Solver

app = typer.Typer(add_completion=False)
_DTYPES = ("auto", "float32", "bfloat16", "float16")


class Exported(Result):
    """Files written and uploaded."""

    folder: Annotated[str | None, "the folder written"]
    files: Annotated[list[str], "its files"]
    uploaded: Annotated[str | None, "the repository"]
    warning: Annotated[str | None, "what its licence or base asks for"]
    verified: Annotated[list[Any], "per GGUF file: type, difference, accuracy, problems, gained, lost"]
    lines: list[str]

    def view(self, width: int) -> View:
        return self.lines


@verb(app)
def export(
    words: Annotated[list[str], typer.Argument(metavar="MODEL")],
    to: Path | None = None,
    merge: bool = False,
    dtype: Annotated[
        str, typer.Option(help=f"Type of the weights: {', '.join(_DTYPES)}; auto is the model's own.")
    ] = "auto",
    push_to_hub: Annotated[str | None, typer.Option(metavar="OWNER/NAME")] = None,
    private: Annotated[bool | None, typer.Option("--private/--public")] = None,
    gguf: Annotated[list[str] | None, typer.Option(metavar="TYPE…")] = None,
    verify: bool = False,
    data: str | None = None,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    environment: bool = False,
) -> Exported:
    """Write a model with its card into a folder, merged if wanted; upload it, or write GGUF files, if wanted.

    Args:
        words: Run, stage folder, checkpoint, model folder or hub name. After --gguf: more types. With --environment: a recipe or a run,
            and overrides.
        to: A new folder for the model and its card.
        merge: Merge an adapter into its base model.
        push_to_hub: Upload it as well.
        private: Of a new repository; default: private.
        gguf: Write GGUF files for llama.cpp and Ollama: Q8_0 Q4_K_M …
        verify: Evaluate each GGUF file through llama.cpp and print what it loses.
        data: Problems of --verify, the run's held-out set when left out; of --environment, data.train when left out.
        limit: Most problems; 200 of --verify when left out.
        environment: Write problems with prompt and checker instead: a verifiers taskset and TRL's environment class.

    Example: algorist export runs/quickstart --to my-model · Next: algorist solve 'Sam has 17 coins. Sam loses 2. Sam
    gives 2 to Lea. How many coins does Sam have now?' --model my-model
    """

    if environment:
        return _environment(words[0], words[1:], to, data, limit)
    model, types = words[0], [*(gguf or []), *words[1:]]
    if gguf is None and (types or verify):
        raise ConfigError(
            "--verify needs GGUF files to verify: --gguf Q8_0 Q4_K_M"
            if verify
            else f"'{types[0]}' is one model too many; expected one. GGUF types follow --gguf"
        )
    if gguf is not None:
        if push_to_hub is not None:
            raise ConfigError("--gguf and --push-to-hub are two exports; give one command for each")
        return _gguf(model, types, to, verify=verify, data=data, limit=limit or 200)
    if to is None and push_to_hub is None:
        raise ConfigError("nowhere to export to; give --to FOLDER, --push-to-hub OWNER/NAME or both")
    check_known(dtype, _DTYPES, f"--dtype {dtype} is unknown", "Expected one of {}")
    folder, run = find_model(model)
    if to is not None:
        check_new(to)
    import_quietly("algorist.extensions.model_folder.write")
    from algorist.config.load import validate
    from algorist.extensions.hub.upload import commit_message, require_token, upload
    from algorist.extensions.model_folder.card import base_warning, question_of
    from algorist.extensions.model_folder.write import export as write_folder
    from algorist.extensions.model_folder.write import fetch, tried

    recipe: Any = load_run_recipe(run) if run else None
    target = None
    if push_to_hub is not None:
        values = recipe.hub.model_dump() if recipe else {}
        values |= {"push": True, "model_id": push_to_hub}
        values |= {} if private is None else {"private": private}
        pushed: Any = validate({"hub": values}, where="--push-to-hub")
        target = pushed.hub
        require_token("--push-to-hub")
    source = folder if isinstance(folder, Path) else fetch(folder)
    lines, uploaded = [], None
    if merge and not (source / "adapter_config.json").is_file():
        lines.append("nothing to merge: this is a whole model already")
    with tempfile.TemporaryDirectory(prefix="algorist-export-") as temporary:
        place = to if to is not None else Path(temporary) / "model"
        names = write_folder(source, place, run=run, merge=merge, dtype=dtype, name=push_to_hub)
        if warning := base_warning(place):
            lines.append(warning)
        if to is not None:
            note(f"{place} is written and complete; one question to it follows …")
            lines += [f"wrote {place}: {', '.join(names)}", tried(place, question_of(run))]
        if target is not None:
            stage = source.parent.name if source.name == "final" or run else "export"
            message = target.commit_message or commit_message(recipe, stage, run.name if run else model)
            uploaded = upload(place, target, name=str(push_to_hub), message=message, say=note)
            lines.append(f"uploaded to {uploaded}")
    return Exported(None if to is None else str(to), list(names), uploaded, warning or None, [], lines)


def _environment(
    name: str, overrides: list[str], to: Path | None, data: str | None, limit: int | None
) -> Exported:
    """Write the problems of a recipe as environments for others."""
    from algorist.cli.benchmark_option import read_benchmarks
    from algorist.data import load_problems
    from algorist.extensions.environments.export import write_package
    from algorist.runs.asking import recipe_format

    if to is None:
        raise ConfigError("nowhere to export to; give --to FOLDER, whose name is the package's")
    run = Path(name) if (Path(name) / "config.yaml").is_file() else None
    if run and overrides:
        raise ConfigError(f"{name} is a run, whose settings are fixed; leave out {' '.join(overrides)}")
    recipe = load_run_recipe(run, runs="all") if run else read_recipe(name, overrides)
    section = read_benchmarks([data], split="train")[0].section if data else recipe.data.train
    problems = load_problems(section)[:limit]
    files = write_package(to, problems, recipe_format(recipe), recipe.matcher)
    lines = [
        f"wrote {to}: {len(problems)} problems; {', '.join(files)}",
        f"Next: {to}/README.md says how others take it",
    ]
    return Exported(str(to), files, None, None, [], lines)


def _gguf(
    model: str, types: list[str], to: Path | None, *, verify: bool, data: str | None, limit: int
) -> Exported:
    """Write GGUF files and a Modelfile, and verify the files if wanted."""
    from algorist.cli.benchmark_option import read_benchmarks
    from algorist.config.schema import Recipe
    from algorist.extensions.llama_cpp.write import check_kinds, write_gguf

    kinds = check_kinds(types)
    folder, run = find_model(model)
    recipe = load_run_recipe(run) if run else Recipe()
    if verify and not (run or data):
        raise ConfigError(f"--verify needs problems for {model}, which belongs to no run: --data gsm8k")
    name = run.name if run else Path(model).name
    target = to or (run or Path(name)) / "gguf"
    import_quietly("algorist.extensions.model_folder.write")
    from algorist.extensions.model_folder.write import export as write_folder
    from algorist.extensions.model_folder.write import fetch
    from algorist.prompts.attached import Asked
    from algorist.runs.solve import Solver

    with tempfile.TemporaryDirectory(prefix="algorist-gguf-") as temporary:
        whole = Path(temporary) / "model"
        note(f"loading {folder} …")
        write_folder(folder if isinstance(folder, Path) else fetch(folder), whole, merge=True)
        solver = Solver.load(whole, recipe=recipe if run else None)
        form = Asked(solver.prompt_format, solver.max_new_tokens, solver.stop_strings)
        note(f"writing {', '.join(kinds)} …")
        files = write_gguf(whole, target, name, kinds, form, solver.policy.tokenizer)
        lines = [f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)" for file in files]
        lines.append(f"with Ollama: cd {target} && ollama create {name.lower()} -f Modelfile")
        verified: list[dict[str, Any]] = []
        if verify:
            section = recipe.data.eval
            if data:
                section = read_benchmarks([data], split="test", path=None, limit=None)[0].section
                recipe = recipe.model_copy(update={"matcher": "symbolic"})
            section = section.model_copy(update={"limit": min(limit, section.limit or limit)})
            verified = _verify(solver, files, section, recipe, target)
            lines += [_loss_line(row) for row in verified]
            lines.append(f"paired, with 95 % intervals; compare A B shows which: {target / 'eval'}")
    return Exported(str(target), [file.name for file in files], None, None, verified, lines)


def _verify(
    solver: Solver, files: list[Path], section: DatasetSection, recipe: Recipe, target: Path
) -> list[dict[str, Any]]:
    from algorist.extensions.llama_cpp.verify import verify_gguf

    display = TerminalDisplay(stderr=True)
    pairs = verify_gguf(solver, files, section, recipe, target / "eval", on_progress=display.progress)
    display.close()
    return [
        {
            "type": file.stem.rpartition("-")[2],
            "difference": pair.differences["greedy_accuracy"],
            "accuracy": artifact.metrics["greedy_accuracy"].value,
            "problems": pair.n,
            "gained": len(pair.gained),
            "lost": len(pair.lost),
        }
        for file, (artifact, pair) in zip(files, pairs, strict=True)
    ]


def _loss_line(row: dict[str, Any]) -> str:
    loss, now = row["difference"], row["accuracy"]
    low, value, high = (f"{100 * x:+.1f}".replace("-", "−") for x in (loss.low, loss.value, loss.high))
    return (
        f"{row['type']}: {value} points [{low}, {high}] of {100 * (now - loss.value):.1f} % through llama.cpp: {100 * now:.1f} %, "
        f"{row['problems']} problems, {row['gained']} turned right, {row['lost']} wrong"
    )

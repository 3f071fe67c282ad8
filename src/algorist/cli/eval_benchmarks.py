"""Evaluate a model on benchmarks, or probe it: what a killed call has done is kept, the model is loaded once."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from algorist.config.schema import Recipe
from algorist.data import load_problems
from algorist.data.problems import fitting_problems
from algorist.errors import DAMAGED
from algorist.evaluation.artifact import Artifact
from algorist.evaluation.doors import PROBES, Probed
from algorist.evaluation.protocols import Benchmark, with_shots
from algorist.evaluation.record import finished_evaluation, mark_of, record_evaluation
from algorist.evaluation.run import EvaluationSetting
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.runs.solve import Solver
from algorist.store.atomic import replace_text


@dataclass(frozen=True)
class Evaluated:
    """The evaluation on one benchmark; ``reused`` when it had been done before."""

    label: str
    artifact: Artifact
    reused: bool


def evaluate_benchmarks(
    model: Path | str,
    benchmarks: Sequence[Benchmark],
    recipe: Recipe,
    *,
    folder: Path,
    name: str | None = None,
    of_run: bool = False,
    prompt_format: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Mapping[str, Any] | None = None,
    protocol: str = "",
    again: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[Evaluated]:
    """Evaluate a model on each benchmark, and yield each when it is done.

    What a killed call has done is kept: artifacts that stand are read, and an unfinished one continues with the problems
    that are missing. All datasets are loaded before the model.

    Args:
        model: Model folder or hub name.
        benchmarks: What to evaluate on.
        recipe: Protocol, matcher, rewards and prompt format.
        folder: Gets the artifacts.
        name: Name of the artifact; model and benchmark when left out.
        of_run: The recipe is that of the run which made the model: its prompt format and rewards count.
        prompt_format: Another prompt format.
        template_kwargs: Other switches of the chat template; the artifact is named after them.
        tools: Settings of other tools than those of the training; empty for none. The artifact is named after them.
        protocol: A reference protocol, whose shots, reading and comparison count; ``recipe`` has its sampling.
        again: Evaluate anew what is already there.
        on_progress: Called with (name, problems done, problems in all).

    Raises:
        AlgoristError: A dataset or the model cannot be loaded, or the disk refuses.
    """
    loaded = [(benchmark, load_problems(benchmark.section)) for benchmark in benchmarks]
    solver = Solver.load(
        model,
        recipe=recipe if of_run else None,
        prompt_format=prompt_format,
        template_kwargs=template_kwargs,
        tools=tools,
    )
    tokenizer, form = solver.policy.tokenizer, solver.prompt_format
    rewards = build_rewards(recipe.rewards if of_run else [], form, matcher=recipe.matcher)
    drawn = recipe.eval.model_copy(
        update={"stop_strings": recipe.eval.stop_strings or ([] if protocol else list(solver.stop_strings))}
    )
    setting = EvaluationSetting.from_section(
        drawn, max_tokens=solver.max_new_tokens, matcher=recipe.matcher, seed=recipe.seed, protocol=protocol
    )
    engine = make_engine("auto", solver.policy.model, tokenizer)
    for benchmark, problems in loaded:
        section = benchmark.section
        form = with_shots(solver.prompt_format, protocol, section, problems)
        problems = fitting_problems(section, problems, form, tokenizer)
        switches = "".join(f"-{key}-{value}" for key, value in (template_kwargs or {}).items())
        switches += "" if tools is None else f"-{'-'.join(tools['tools']['use']) if tools else 'no-tools'}"
        switches += f"-{protocol}" if protocol else ""
        title = name or _title(model, f"-{benchmark.label}{_plain(switches)}", of_run, folder)
        mark = mark_of(model, problems, form, setting, recipe.eval.ks, rewards)
        title = _free_title(folder, title, mark)
        if again:
            (folder / f"{title}.progress.jsonl").unlink(missing_ok=True)
        elif before := finished_evaluation(folder, title, mark):
            yield Evaluated(benchmark.label, before, reused=True)
            continue
        artifact = record_evaluation(
            folder,
            title,
            engine=engine,
            tokenizer=tokenizer,
            problems=problems,
            prompt_format=form,
            setting=setting,
            ks=recipe.eval.ks,
            rewards=rewards,
            model=str(model),
            dataset=section.name,
            mark=mark,
            on_progress=partial(on_progress, title) if on_progress else None,
        )
        yield Evaluated(benchmark.label, artifact, reused=False)


def probe_benchmarks(
    name: str,
    model: Path | str,
    benchmarks: Sequence[Benchmark],
    recipe: Recipe | None,
    *,
    folder: Path,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[tuple[Path, Probed]]:
    """Ask a model the probe ``name`` on each benchmark, and yield the file with its completions and the result.

    Raises:
        AlgoristError: No such probe, a dataset or the model cannot be loaded, no question fits, or the disk refuses.
    """
    probe = PROBES.get(name)
    loaded = [(benchmark, load_problems(benchmark.section)) for benchmark in benchmarks]
    policy = Solver.load(model, recipe=recipe).policy
    engine = make_engine("auto", policy.model, policy.tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    for benchmark, problems in loaded:
        title = _title(model, f"-{benchmark.label}-{name}", recipe is not None, folder)
        probed = probe(
            engine, policy.tokenizer, problems, partial(on_progress, title) if on_progress else None
        )
        replace_text(folder / f"{title}.json", json.dumps(probed.values, ensure_ascii=False) + "\n")
        yield folder / f"{title}.json", probed


def _plain(text: str) -> str:
    """Return text that can be part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:80].lower()


def _title(model: Path | str, end: str, of_run: bool, folder: Path) -> str:
    """Name an evaluation: ``grpo-final-…`` within a run; elsewhere after the last part of the model's name, or more where another has that."""
    parts = Path(model).resolve().parts[1:] if isinstance(model, Path) else tuple(model.split("/"))
    if of_run:
        return "-".join(parts[-2:]) + end
    titles = ["-".join(parts[-count:]) + end for count in range(1, len(parts) + 1)]
    return next((t for t in titles if _model_of(folder / f"{t}.json") in (None, str(model))), titles[-1])


def _free_title(folder: Path, title: str, mark: str) -> str:
    """Return ``title``, numbered where another evaluation has it: other problems, another protocol, another model since."""
    numbered = (title if n == 1 else f"{title}-{n}" for n in itertools.count(1))
    return next(
        t for t in numbered if not (folder / f"{t}.json").exists() or finished_evaluation(folder, t, mark)
    )


def _model_of(evaluation: Path) -> str | None:
    """Return the model of an evaluation; None where there is none, or the file does not say."""
    with suppress(*DAMAGED):
        return str(json.loads(evaluation.read_text(encoding="utf-8"))["model"])
    return None

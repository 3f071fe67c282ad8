"""Answers from a trained model, and its evaluation: the prompt format, the engine and the grader of training."""

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
from algorist.evaluation.estimators import elect
from algorist.evaluation.protocols import Benchmark, with_shots
from algorist.evaluation.record import finished_evaluation, mark_of, record_evaluation
from algorist.evaluation.run import EvaluationSetting
from algorist.models.load import Policy, pick_device, policy_of
from algorist.prompts import PromptFormat
from algorist.prompts.attached import attached
from algorist.prompts.base import answer_row
from algorist.rewards import build_rewards
from algorist.rollouts import make_engine
from algorist.rollouts.base import SamplingParams
from algorist.rollouts.collect import collect
from algorist.rollouts.transformers import TransformersEngine
from algorist.runs.asking import how_to_ask, with_turns
from algorist.store.atomic import replace_text
from algorist.types import Group, Problem
from algorist_grader import grade


@dataclass
class Solver:
    """A policy with its prompt format."""

    policy: Policy
    prompt_format: PromptFormat
    max_new_tokens: int = 512
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def load(
        cls,
        model: Path | str,
        *,
        recipe: Recipe | None = None,
        prompt_format: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Mapping[str, Any] | None = None,
    ) -> Solver:
        """Load a model folder or hub model; prompt format, length and tools are those of its training, else the recipe's."""
        device = pick_device(recipe.device if recipe else "auto")
        policy = policy_of(model, device=device, like=recipe.model if recipe else None)
        how = how_to_ask(recipe, prompt_format, attached(policy.tokenizer), template_kwargs)
        form = with_turns(how.prompt_format, tools)
        return cls(policy, form, how.max_completion_tokens, how.stop_strings)

    def solve(
        self,
        questions: Sequence[str],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        samples: int = 1,
        vote: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Return one row per question and sample: question, completion, reasoning, answer, well_formed, truncated.

        Args:
            questions: Questions, each asked alone.
            max_new_tokens: Longest completion in tokens; that of the training when left out.
            temperature: 0 is greedy.
            seed: Makes samples repeatable.
            samples: Completions per question.
            vote: One row per question: the first sample with the answer that most give, and ``votes`` and ``samples``.
            on_text: Called with each piece of text as it is generated; one question, one sample.
        """
        tokenizer = self.policy.tokenizer
        params = SamplingParams(
            temperature=temperature,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            seed=seed,
            stop_strings=self.stop_strings,
        )
        problems = [Problem(str(number), question, "") for number, question in enumerate(questions)]
        engine = make_engine("auto", self.policy.model, tokenizer)
        if on_text is not None:
            engine = TransformersEngine(
                self.policy.model, tokenizer, on_token=_TextOfTokens(tokenizer, on_text)
            )
        groups = collect(engine, tokenizer, problems, self.prompt_format, params, samples, graded=False)
        if vote:
            return [_elected(group) for group in groups]
        return [answer_row(group.problem.question, rollout) for group in groups for rollout in group.rollouts]


def _elected(group: Group) -> dict[str, Any]:
    answer, votes = elect([r.parsed.answer for r in group.rollouts], lambda a, b: grade(a, b).correct)
    rollout = next(r for r in group.rollouts if r.parsed.answer == answer)
    return {**answer_row(group.problem.question, rollout), "votes": votes, "samples": len(group.rollouts)}


class _TextOfTokens:
    """Turns tokens into pieces of text; a character of several tokens waits for its last one."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self.tokenizer, self.on_text, self.ids, self.shown = tokenizer, on_text, [], 0  # type: ignore[var-annotated]

    def __call__(self, token: int) -> None:
        self.ids.append(token)
        text = str(self.tokenizer.decode(self.ids, skip_special_tokens=True))
        if not text.endswith("\ufffd"):
            self.on_text(text[self.shown :])
            self.shown = len(text)


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


def append_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a JSONL file, one object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

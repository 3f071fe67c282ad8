"""GGUF files evaluated through llama.cpp on the problems of the model they were made of, and compared with it pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from algorist.config.schema import DatasetSection, Recipe
from algorist.data import load_problems
from algorist.data.problems import fitting_problems
from algorist.evaluation.artifact import Artifact
from algorist.evaluation.compare import Comparison, compare
from algorist.evaluation.record import record_evaluation
from algorist.evaluation.run import EvaluationSetting
from algorist.extensions.llama_cpp.engine import LlamaCppEngine
from algorist.prompts.chat import encode_prompt
from algorist.rollouts import make_engine
from algorist.rollouts.base import RolloutEngine
from algorist.runs.solve import Solver


def verify_gguf(
    solver: Solver,
    files: Sequence[Path],
    section: DatasetSection,
    recipe: Recipe,
    folder: Path,
    *,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[tuple[Artifact, Comparison]]:
    """Evaluate the model, then each file through llama.cpp, greedily, and compare.

    Args:
        solver: The model that the files were made of.
        files: GGUF files.
        section: Held-out problems.
        recipe: Matcher and batch size.
        folder: Gets one artifact for the model and one per file.
        on_progress: Called with (name, problems done, problems in all).

    Returns:
        For each file its evaluation and the comparison, file − model.
    """
    tokenizer, form = solver.policy.tokenizer, solver.prompt_format
    problems = fitting_problems(section, load_problems(section), form, tokenizer)
    protocol = recipe.eval.model_copy(update={"samples": 0, "stop_strings": list(solver.stop_strings)})
    setting = EvaluationSetting.from_section(
        protocol, max_tokens=solver.max_new_tokens, matcher=recipe.matcher, seed=recipe.seed
    )

    def evaluated(name: str, engine: RolloutEngine, model: str) -> Artifact:
        return record_evaluation(
            folder,
            name,
            engine=engine,
            tokenizer=tokenizer,
            problems=problems,
            prompt_format=form,
            setting=replace(setting, batch_size=setting.batch_size if engine.name != "llama_cpp" else 4),
            ks=(),
            rewards=None,
            model=model,
            dataset=section.name,
            on_progress=(lambda done, total: on_progress(name, done, total)) if on_progress else None,
        )

    plain = evaluated("model", make_engine("auto", solver.policy.model, tokenizer), "model")
    pairs = []
    longest = max(len(encode_prompt(form, tokenizer, p.question)) for p in problems)
    context = longest + setting.max_completion_tokens
    for file in files:
        engine = LlamaCppEngine(file, tokenizer, context=context)
        try:
            artifact = evaluated(file.stem, engine, file.name)
        finally:
            engine.llama.close()
        pairs.append((artifact, compare(plain, artifact)))
    return pairs

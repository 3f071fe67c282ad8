"""The model card: base, evaluations with intervals, how to load, data, curves, recipe, versions."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from algorist.config.load import load_run_recipe
from algorist.config.schema import DatasetSection, Recipe
from algorist.config.yaml_text import read_yaml
from algorist.errors import DAMAGED, CheckpointError, ConfigError
from algorist.evaluation.artifact import read_artifact
from algorist.evaluation.console import solved_question
from algorist.models.loaders import hub_name
from algorist.prompts.attached import attached
from algorist.runs.asking import how_to_ask
from algorist.store.redact import redact_tree
from algorist.store.safe_text import markdown, one_line, printable
from algorist.store.stages import EVALUATED, STAGES
from algorist.store.write import read_metrics

CARD = "README.md"
LICENCES = {
    "apache-2.0": (
        "Qwen/Qwen2.5-0.5B",
        "Qwen/Qwen2.5-1.5B",
        "Qwen/Qwen2.5-7B",
        "Qwen/Qwen2.5-Math-1.5B",
        "Qwen/Qwen3-",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "llama3.2": ("meta-llama/Llama-3.2-",),
}
"""Licences of the bases that recipes name, as their cards on the hub say."""


def model_card(
    folder: Path,
    run: Path | None = None,
    *,
    name: str | None = None,
    base: str | None = None,
    place: str = "FOLDER",
) -> str:
    """Return a model card: base, data, evaluations with intervals, how to load, recipe and versions.

    Args:
        folder: The model's files.
        run: The run that made it; without one the card says only what the files say.
        name: The repository.
        place: What to load where there is no repository.
        base: The base model; read from the adapter or the recipe when left out.
    """
    recipe, form = load_run_recipe(run) if run else None, attached(folder)
    is_adapter = (folder / "adapter_config.json").is_file()
    base = base or (base_of(folder) if is_adapter else None) or (recipe.model.name if recipe else None)
    stages = [s for s in STAGES if run and (run / s / "final").is_dir()] or [*STAGES]
    title = name or (run.name if run else folder.resolve().name)
    origin = _code(without_home(base)) if base else "a model"
    if base == "tiny":
        origin = "a tiny model made from scratch"
    head = yaml.safe_dump(redact_tree(_front_matter(recipe, base, is_adapter, stages)), sort_keys=False)
    parts = [
        f"---\n{head}---\n\n# {markdown(title)}",
        f"{'A LoRA adapter for' if is_adapter else 'Trained from'} {origin} on mathematical problems with algorist ({' → '.join(s.upper() for s in stages)}).",
        _how_to_load(folder, recipe, name or place, is_adapter, question_of(run)),
        form.prompt_format.turns.card() if form and form.prompt_format.turns else "",
        _of_generation(folder),
        *(_of_run(run, recipe) if run and recipe else []),
    ]
    return printable("\n\n".join(part for part in parts if part) + "\n")


def _code(text: str) -> str:
    """Return text as code of Markdown, whatever backticks it has."""
    flat = one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    return f"{fence}{flat}{fence}" if "`" not in flat else f"{fence} {flat} {fence}"


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def base_of(folder: Path) -> str | None:
    """Return the base model that an adapter's folder names."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return settings.get("base_model_name_or_path")
    except DAMAGED:
        return None


def base_warning(folder: Path) -> str:
    """Return a line when an adapter's base model is a folder of this machine, which others do not have."""
    base = base_of(folder)
    if base is None or (_is_hub_name(base) and not Path(base).exists()):
        return ""
    return (
        f"warning: the adapter's base model is the folder {base}, which others do not have; give the whole model away: "
        "algorist export … --merge"
    )


def _is_hub_name(name: str | None) -> bool:
    return bool(name) and str(name).count("/") == 1 and not str(name).startswith((".", "/", "~"))


def without_home(text: str | None) -> str:
    """Return text without the user's home folder: cards are read by others."""
    home = str(Path.home())
    return str(text).replace(home, "~") if len(home) > 1 else str(text)


def _front_matter(
    recipe: Recipe | None, base: str | None, is_adapter: bool, stages: Iterable[str]
) -> dict[str, Any]:
    head: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["algorist", "math", *stages],
    }
    base = hub_name(base) if base else None
    if base and _is_hub_name(base) and not Path(base).exists():
        head = {"base_model": base} | head
    if base and (licence := _licence(base)):
        head = {"license": licence} | head
    data = [s.hub for s in _datasets(recipe).values() if s.hub and not s.path]
    return head | ({"datasets": sorted(set(data))} if data else {})


def _licence(base: str) -> str | None:
    """Return the licence that the base model's own card names, where it lies here, or that of a base of the shipped recipes."""
    from huggingface_hub import try_to_load_from_cache

    file: Any = Path(base).expanduser() / CARD
    if not file.parent.is_dir() and _is_hub_name(base):
        file = try_to_load_from_cache(base, CARD)
    with suppress(*DAMAGED, ConfigError):
        head = read_yaml(
            Path(str(file)).read_text(encoding="utf-8").partition("---\n")[2].partition("---\n")[0], "a card"
        )
        if isinstance(head["license"], str):
            return str(head["license"])
    return next((licence for licence, names in LICENCES.items() if base.startswith(names)), None)


def _datasets(recipe: Recipe | None) -> dict[str, DatasetSection]:
    if recipe is None:
        return {}
    sections = {"GRPO": recipe.data.train, "SFT": recipe.data.sft or recipe.data.train}
    used = {k: v for k, v in sections.items() if getattr(recipe, k.lower()).enabled}
    return used | ({"held out": recipe.data.eval} if recipe.eval.enabled else {})


def question_of(run: Path | None) -> str:
    """Return a question to show: one that the run's last evaluation answered right."""
    for stage in reversed(EVALUATED):
        if run is not None and (run / "eval" / f"{stage}.json").is_file():
            try:
                example = solved_question(read_artifact(run / "eval", stage).samples)
            except CheckpointError:
                continue
            if example:
                return example
    return "Sam has 17 coins. Sam loses 2. Sam gives 2 to Lea. How many coins does Sam have now?"


def _how_to_load(folder: Path, recipe: Recipe | None, name: str, is_adapter: bool, question: str) -> str:
    if is_adapter:
        kind = "AutoPeftModelForCausalLM"
        imports = f"from peft import {kind}\nfrom transformers import AutoTokenizer"
    else:
        kind = "AutoModelForCausalLM"
        imports = f"from transformers import {kind}, AutoTokenizer"
    form = attached(folder)
    limit, prompt = "256", f'inputs = tokenizer({question!r}, return_tensors="pt")\n'
    if form is not None or recipe is not None:
        how = how_to_ask(recipe, None, form)
        limit, message = str(how.max_completion_tokens), repr({"role": "user", "content": question.strip()})
        if how.stop_strings:
            limit += f", stop_strings={list(how.stop_strings)}, tokenizer=tokenizer"
        prompt = (
            f"messages = [{message}]  # the chat template adds the rest of the trained prompt\n"
            'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)\n'
        )
    if is_adapter:  # whose base may end with another token
        limit += ", eos_token_id=tokenizer.eos_token_id"
    return (
        "## How to load\n\n```python\n"
        f"{imports}\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
        f'model = {kind}.from_pretrained("{name}")\n'
        f"{prompt}"
        f"output = model.generate(**inputs, max_new_tokens={limit}, do_sample=False)\n"
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))\n```\n\n'
        f"Or:\n\n```\nalgorist solve {shlex.quote(one_line(question)).replace('`', '')} --model {name}\n```"
    )


UNUSED_SETTINGS = (
    *("bad_words_ids", "do_sample", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size"),
    *("repetition_penalty", "suppress_tokens", "temperature", "top_k", "top_p"),
)
"""Settings of ``generation_config.json`` that neither training nor evaluation reads."""


def unused_settings(folder: Path) -> list[str]:
    """List the settings of ``generation_config.json`` that neither training nor evaluation used, as NAME=VALUE."""
    try:
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except DAMAGED:
        return []
    return [f"{name}={settings[name]}" for name in UNUSED_SETTINGS if settings.get(name)]


def _of_generation(folder: Path) -> str:
    """Describe the unused settings of generation; empty where there is none."""
    if not (unused := unused_settings(folder)):
        return ""
    return (
        "## Settings of generation\n\n`generation_config.json` is that of the base model and sets "
        f"{', '.join(f'`{setting}`' for setting in unused)}. Neither training nor evaluation used them: whoever generates with them gets other answers."
    )


def _of_run(run: Path, recipe: Recipe) -> list[str]:
    """Return the card's parts that only a run knows."""
    config = without_home((run / "config.yaml").read_text(encoding="utf-8"))
    data = "\n".join(
        f"- {use}: {markdown(s.name)}"
        + (f" ({markdown(without_home(s.hub or s.path))})" if s.hub or s.path else "")
        + f", split {markdown(s.split)}"
        + (f", {s.limit} problems" if s.limit else "")
        for use, s in _datasets(recipe).items()
    )
    return [
        _evaluations(run),
        f"## Data\n\n{data}",
        _curves(run),
        "## Recipe\n\n<details>\n<summary>Every setting, for <code>algorist run recipe.yaml</code></summary>\n\n"
        f"{_fenced(config, 'yaml')}\n\n</details>",
        _versions(run),
    ]


def _evaluations(run: Path) -> str:
    """Return a table of the stages' evaluations: value and 95 % interval."""
    evaluations = {}
    for name in EVALUATED:
        with suppress(CheckpointError):
            evaluations[name] = read_artifact(run / "eval", name)
    if not evaluations:
        return ""
    metrics = list(dict.fromkeys(m for evaluation in evaluations.values() for m in evaluation.metrics))
    last = list(evaluations.values())[-1]
    lines = [f"| | {' | '.join(evaluations)} |", "|---" * (len(evaluations) + 1) + "|"]
    for metric in metrics:
        cells = [e.metrics[metric].text(metric) if metric in e.metrics else "–" for e in evaluations.values()]
        lines.append(f"| {markdown(metric.replace('_', ' '))} | {' | '.join(cells)} |")
    count = len({row["problem_id"] for row in last.samples})
    return (
        f"## Evaluation\n\n{markdown(last.dataset)}, {count} held-out problems, 95 % intervals in brackets.\n\n"
        + "\n".join(lines)
    )


def _curves(run: Path) -> str:
    """Return loss and reward at up to eight steps of each stage."""
    tables = []
    rows = read_metrics(run / "metrics.jsonl")
    for stage, names in (("sft", ("loss",)), ("grpo", ("reward", "loss", "entropy"))):
        lines = [r for r in rows if r.get("stage") == stage and any(n in r for n in names)]
        shown = [name for name in names if any(name in r for r in lines)]
        if not lines:
            continue
        picked = [lines[round(i * (len(lines) - 1) / 7)] for i in range(8)] if len(lines) > 8 else lines
        table = [f"| {stage} step | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|"]
        for row in picked:
            cells = [f"{row[n]:.4g}" if isinstance(row.get(n), (int, float)) else "–" for n in shown]
            table.append(f"| {row.get('step')} | {' | '.join(cells)} |")
        tables.append("\n".join(table))
    return "## Training\n\n" + "\n\n".join(tables) if tables else ""


def _versions(run: Path) -> str:
    try:
        environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    except DAMAGED:
        return ""
    versions = environment.get("versions") or environment.get("libraries") or {}
    libraries = ", ".join(markdown(f"{name} {version}") for name, version in versions.items() if version)
    text = f"## Versions\n\n{libraries}; Python {markdown(environment.get('python', '?'))}"
    return text if libraries else ""

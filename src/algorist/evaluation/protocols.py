"""Named protocols: which completions an evaluation draws. The name is in every artifact and can be asked for.

``greedy``: one greedy completion per problem. ``sampled-N@T``: N more at temperature T, such as ``sampled-8@1``;
``sampled-8`` takes temperature 1; ``sampled-16@0.6/0.95`` has a nucleus (top_p) of 0.95 as well, ``sampled-16@0.6/0.95/20`` draws among 20 tokens.

A reference protocol (``REFERENCES``) fixes everything that a published figure depends on: prompt, shots, sampling, limit and
extraction. It has a version, which changes whenever one of them does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from algorist.config.schema import DatasetSection, EvalSection
from algorist.data import load_problems
from algorist.errors import ConfigError, DataError, nearest
from algorist.prompts import PromptFormat
from algorist.types import Problem
from algorist_grader.published import Score, gsm8k, lighteval_aime, lighteval_math_500, matharena, minerva

_SAMPLED = re.compile(r"sampled-(\d+)(?:@(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?)(?:/(\d+))?)?)?")
_USUAL = ("greedy", "sampled-4", "sampled-8@1", "sampled-16@0.6/0.95")


@dataclass(frozen=True)
class Benchmark:
    """A dataset section and the label that names its artifact."""

    label: str
    section: DatasetSection


@dataclass(frozen=True)
class ReferenceProtocol:
    """Settings of a published evaluation: all that its figure depends on.

    Attributes:
        version: Changes whenever one of the others does; the original's own where it has one.
        source: The file of the original, with its version.
        score: Reads and compares as the original does; its strict verdict is ``correct``, its lenient one ``lenient``.
        prompt_format: Has the prompt.
        max_completion_tokens: Limit of a completion.
        stop_strings: What ends a completion.
        samples: Sampled completions per problem (avg@n); 0 is greedy.
        shots: Solved problems before each question, drawn from the training split (``prompts.formats``).
    """

    version: str
    source: str
    score: Score
    prompt_format: str
    max_completion_tokens: int
    stop_strings: tuple[str, ...] = ()
    samples: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    shots: int = 0

    def is_kept_by(self, setting: Any, prompt_format: str) -> bool:
        """Return whether an evaluation's setting is this protocol's; another number of samples is another n of avg@n."""
        drawn = ["temperature", "top_p", "top_k"] if self.samples else []
        names = ["max_completion_tokens", "stop_strings", *drawn]
        same = all(getattr(self, name) == getattr(setting, name) for name in names)
        return same and self.prompt_format == prompt_format and bool(self.samples) == bool(setting.samples)


_HARNESS = "lm-evaluation-harness 0.4.13, lm_eval/tasks/"
_LIGHTEVAL = "lighteval 0.13.0, tasks/tasks/"
REFERENCES = {
    # Where a task says nothing of the length, the harness writes 256 tokens.
    "gsm8k": ReferenceProtocol(
        "3.0",
        f"{_HARNESS}gsm8k/gsm8k.yaml: 5 shots drawn anew for each question",
        gsm8k(r"#### (\-?[0-9\.\,]+)"),
        "gsm8k_shots",
        256,
        ("Question:", "</s>", "<|im_end|>"),
        shots=5,
    ),
    "gsm8k_cot_zeroshot": ReferenceProtocol(
        "3.0",
        f"{_HARNESS}gsm8k/gsm8k-cot-zeroshot.yaml",
        gsm8k(r"The answer is (\-?[0-9\.\,]+)."),
        "gsm8k_cot_zeroshot",
        256,
        ("Q:", "</s>", "<|im_end|>"),
    ),
    "minerva_math500": ReferenceProtocol(
        "3.1",
        f"{_HARNESS}minerva_math: four fixed shots; exact_match is strict, math_verify lenient",
        minerva,
        "minerva_shots",
        256,
        ("Problem:",),
    ),
    "math_500": ReferenceProtocol(
        "2", f"{_LIGHTEVAL}math_500.py: pass@1 of one greedy completion", lighteval_math_500, "lighteval_math_500", 32768
    ),
    # aime24_avg and aime25_avg average 64 samples and leave temperature, top_p and limit to the caller; these are our choice (open-r1's, from memory).
    "aime_avg": ReferenceProtocol(
        "2", f"{_LIGHTEVAL}aime.py: aime24_avg, aime25_avg", lighteval_aime, "lighteval_aime", 32768, samples=64,
        temperature=0.6, top_p=0.95,
    ),
    # Four runs of each problem; sampling and limit are the model's own: here those of configs/models/deepseek/deepseek_distill_1.5b.yaml.
    "matharena": ReferenceProtocol(
        "2026-03", "eth-sri/matharena, configs/competitions/*.yaml, src/matharena/{parser,grader}.py", matharena, "boxed", 32000,
        samples=4, temperature=0.6, top_p=0.95,
    ),
    "matharena_aime": ReferenceProtocol(
        "2026-03", "the same with the line of configs/competitions/aime/*.yaml on integers", matharena, "boxed_aime", 32000,
        samples=4, temperature=0.6, top_p=0.95,
    ),
}  # fmt: skip


def protocol_name(samples: int, temperature: float, top_p: float, top_k: int = 0) -> str:
    """Return the name of a protocol; ``with_protocol`` reads it back."""
    if not samples:
        return "greedy"
    nucleus = f"/{top_p:g}/{top_k}" if top_k else "" if top_p == 1 else f"/{top_p:g}"
    return f"sampled-{samples}@{temperature:g}{nucleus}"


def with_shots(
    prompt_format: PromptFormat, name: str, section: DatasetSection, problems: Sequence[Problem]
) -> PromptFormat:
    """Return the prompt format with the solved problems that the protocol ``name`` puts before these problems.

    Raises:
        DataError: The training split that they are drawn from is not there.
    """
    from algorist.prompts.formats import harness_shots

    known = REFERENCES.get(name)
    if known is None or not known.shots:
        return prompt_format
    path = Path(section.path) if section.path else None
    if path is not None and path.is_file():
        path = path.with_name(path.name.replace("test", "train"))
        if not path.is_file() or path == Path(str(section.path)):
            raise DataError(
                f"--protocol {name} draws {known.shots} solved problems from the training split, which is not beside {section.path}. "
                f"Expected {path.with_name('train' + path.suffix)}; or give the folder that holds both: --path {path.parent}"
            )
    train = section.model_copy(update={"split": "train", "limit": None, "path": path and str(path)})
    shots = harness_shots(problems, load_problems(train), known.shots)
    return replace(prompt_format, shots=shots)  # type: ignore[call-arg]


def with_protocol(section: EvalSection, name: str) -> EvalSection:
    """Return ``section`` with the samples, temperature, top_p and top_k of the protocol ``name``.

    Raises:
        ConfigError: There is no such protocol.
    """
    if name == "greedy":
        return section.model_copy(update={"samples": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0})
    if known := REFERENCES.get(name):
        fixed = ("max_completion_tokens", "samples", "temperature", "top_p", "top_k")
        stops = {"stop_strings": list(known.stop_strings)}
        return section.model_copy(update={name: getattr(known, name) for name in fixed} | stops)
    match = _SAMPLED.fullmatch(name)
    numbers = (int(match[1]), float(match[2] or 1), float(match[3] or 1)) if match else (0, 0, 0)
    samples, temperature, top_p = numbers
    if samples < 1 or temperature <= 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"no protocol '{name}'.{nearest(name, (*_USUAL, *REFERENCES))} Expected {', '.join(REFERENCES)}, greedy, sampled-N, sampled-N@TEMPERATURE or "
            "sampled-N@TEMPERATURE/TOP_P[/TOP_K] with N ≥ 1, a temperature above 0 and top_p in (0, 1], such as sampled-8@1"
        )
    top_k = int(match[4] or 0) if match else 0
    return section.model_copy(
        update={"samples": samples, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    )

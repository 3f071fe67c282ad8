"""Named protocols: which completions an evaluation draws. The name is in every artifact and can be asked for.

``greedy``: one greedy completion per problem. ``sampled-N@T``: N more at temperature T, such as ``sampled-8@1``;
``sampled-8`` takes temperature 1; ``sampled-16@0.6/0.95`` has a nucleus (top_p) of 0.95 as well.

A reference protocol (``REFERENCES``) fixes everything that a published figure depends on: prompt, shots, sampling, limit and
extraction. It has a version, which changes whenever one of them does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from algorist.config.schema import EvalSection
from algorist.errors import ConfigError, nearest

_SAMPLED = re.compile(r"sampled-(\d+)(?:@(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?)?")
_USUAL = ("greedy", "sampled-4", "sampled-8@1", "sampled-16@0.6/0.95")


@dataclass(frozen=True)
class Reference:
    """How others evaluate a benchmark: the prompt format has prompt, shots and extraction."""

    version: str
    source: str
    dataset: str
    prompt_format: str
    max_completion_tokens: int
    stop_strings: tuple[str, ...]


REFERENCES = {
    "gsm8k_cot_zeroshot": Reference(
        version="3.0",
        source="EleutherAI/lm-evaluation-harness, lm_eval/tasks/gsm8k/gsm8k-cot-zeroshot.yaml",
        dataset="gsm8k",
        prompt_format="gsm8k_cot_zeroshot",
        max_completion_tokens=256,  # the harness's max_gen_toks where a task says nothing
        stop_strings=("Q:", "</s>", "<|im_end|>"),
    )
}
"""Greedy, no shots. ``greedy_accuracy`` is the harness's strict-match, ``lenient_accuracy`` about its flexible-extract."""

FEW = 100
"""Below so many problems one greedy run says little about a difference between two models."""


def samples_for(problems: int) -> int:
    """Return how many sampled completions per problem (avg@n) make a benchmark of this size worth comparing on.

    About 1,000 completions, a power of two up to 64: 32 for AIME's 30 problems, none from 500 on.
    """
    samples = 1
    while samples < 64 and samples * problems < 900:
        samples *= 2
    return samples if problems < 500 and samples > 1 else 0


def too_few(problems: int, samples: int) -> str:
    """Return a warning where ``problems`` and ``samples`` cannot tell two models apart, else an empty string."""
    enough = samples_for(problems)
    if problems == 0 or problems >= FEW or samples >= enough:
        return ""
    return (
        f"{problems} problems: one of them is {100 / problems:.1f} points, and two runs of the same model may differ by "
        f"{round(196 * (0.5 / problems) ** 0.5)} points; average {enough} samples: --protocol sampled-{enough}@0.6/0.95 (pass@1 is then "
        f"avg@{enough})"
    )


def protocol_name(samples: int, temperature: float, top_p: float) -> str:
    """Return the name of a protocol; ``with_protocol`` reads it back."""
    if not samples:
        return "greedy"
    nucleus = "" if top_p == 1 else f"/{top_p:g}"
    return f"sampled-{samples}@{temperature:g}{nucleus}"


def with_protocol(section: EvalSection, name: str) -> EvalSection:
    """Return ``section`` with the samples, temperature and top_p of the protocol ``name``.

    Raises:
        ConfigError: There is no such protocol.
    """
    if name == "greedy":
        return section.model_copy(update={"samples": 0, "temperature": 1.0, "top_p": 1.0})
    if known := REFERENCES.get(name):
        limits = {
            "max_completion_tokens": known.max_completion_tokens,
            "stop_strings": list(known.stop_strings),
        }
        return section.model_copy(update={"samples": 0, **limits})
    match = _SAMPLED.fullmatch(name)
    samples, temperature, top_p = (
        (int(match[1]), float(match[2] or 1), float(match[3] or 1)) if match else (0, 0, 0)
    )
    if samples < 1 or temperature <= 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"no protocol '{name}'.{nearest(name, (*_USUAL, *REFERENCES))} Expected {', '.join(REFERENCES)}, greedy, sampled-N, sampled-N@TEMPERATURE or "
            "sampled-N@TEMPERATURE/TOP_P with N ≥ 1, a temperature above 0 and top_p in (0, 1], such as sampled-8@1"
        )
    return section.model_copy(update={"samples": samples, "temperature": temperature, "top_p": top_p})

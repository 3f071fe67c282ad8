"""What an extension may look at before a run. A file of its own: extensions need it, and nothing else of the preflight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from algorist.models.load import Policy
from algorist.prompts import PromptFormat
from algorist.types import Problem


@dataclass(frozen=True)
class Look:
    """The policy before any training, and what it solved.

    Attributes:
        policy: The model that was sampled, with its tokenizer.
        problems: Those that were sampled.
        form: The prompt format.
        samples: Completions of each problem.
        rates: Share of right completions by the problem's id.
        before_sft: SFT is still to come, so that GRPO will start from another model.
        device: Of the policy.
        say: Shows what is being done.
    """

    policy: Policy
    problems: Sequence[Problem]
    form: PromptFormat
    samples: int
    rates: Mapping[str, float]
    before_sft: bool
    device: Any
    say: Callable[[str], None]

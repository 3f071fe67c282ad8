"""The sections below ``grpo``: what is done with samples that teach nothing, and when a run that turns is ended."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from algorist.config.section import Section


class ResampleSection(Section):
    """Dynamic sampling (DAPO): groups without a signal are replaced by groups of fresh problems."""

    when_below: float = Field(0.5, gt=0, le=1)
    """Share of useful groups below which a rollout batch is filled up; 1: always, as DAPO does."""
    max_rounds: int = Field(4, ge=1)
    """Most rounds of fresh groups for a rollout batch."""
    max_share: float = Field(3.0, gt=0)
    """Most fresh groups for a rollout batch, as a multiple of its own."""


class ReplaySection(Section):
    """Replay of useful groups, corrected by the ratio to the policy that sampled them."""

    max_age: int = Field(4, ge=1)
    """Rollout batches after which a group is not used any more. Each is replayed once at most."""


class PoolsSection(Section):
    """How many rollout batches a problem rests; each time in a row it rests twice as long."""

    solved: int = Field(16, ge=0)
    """After a group in which every completion was right."""
    hopeless: int = Field(8, ge=0)
    """After a group in which none was right."""


class StopSection(Section):
    """When GRPO ends before its last step, at the best checkpoint by held-out accuracy (``grpo.eval_every``)."""

    patience: int = Field(20, ge=1)
    """Steps without a better held-out accuracy (plateau), or with the same sign of collapse in each logged line, before the run ends."""
    on: list[Literal["collapse", "plateau"]] = Field(default_factory=lambda: ["collapse"], min_length=1)  # type: ignore[arg-type]
    """What ends it. Collapse: the held-out accuracy halved, the entropy fell to a tenth or blew up, completions became a fifth as long or
    are all cut off, or the KL is above 0.5 nats per token, in a policy that was better before."""

    @model_validator(mode="before")
    @classmethod
    def _read_on(cls, given: Any) -> Any:
        """Take YAML's ``on``, which is true, for the word."""
        return (
            {"on" if key is True else key: value for key, value in given.items()}
            if isinstance(given, dict)
            else given
        )

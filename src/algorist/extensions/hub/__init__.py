"""Upload of the trained model to the Hugging Face hub, during the run or after it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from algorist.config.section import Section
from algorist.training.extension import Control, Event, Extension, extension

if TYPE_CHECKING:
    from algorist.extensions.hub.upload import HubUpload

_HUB_NAME = r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}"


class HubSection(Section):
    """Upload to the Hugging Face hub. The token comes from HF_TOKEN or ``hf auth login``, never from a recipe."""

    push: bool = False
    """Upload the trained model; ``hub.model_id`` alone turns it on."""
    model_id: str | None = None
    """Repository ``owner/name``; the run's name under the token's owner when left out."""
    private: bool = True
    """Make the repository private when it is new."""
    strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = "end"
    """When: after the run; also the model at every checkpoint; that and the newest checkpoint in ``last-checkpoint/``;
    or every checkpoint in its own folder."""
    revision: str | None = None
    """Branch of the repository; ``main`` when left out."""
    commit_message: str | None = None
    """Message of the last commit; names the base model when left out."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        """Refuse a token; turn pushing on when only a name is given."""
        if not isinstance(values, dict):
            return values
        token = next((key for key in values if "token" in str(key)), None)
        if token is not None:
            raise ValueError(
                f"hub.{token}: a token is never part of a recipe, which is stored and uploaded; leave it out and "
                "write in the shell: export HF_TOKEN=…, or once: hf auth login"
            )
        return {"push": True, **values} if values.get("model_id") else values

    @field_validator("model_id")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        """Refuse a name that the hub would refuse after the training."""
        if value is not None and not re.fullmatch(_HUB_NAME, value):
            raise ValueError(
                f"hub.model_id is '{value}'; expected owner/name of letters, digits, '-', '_' and '.', such as "
                "me/qwen-0.5b-gsm8k"
            )
        return value


class _Keys(Section):
    hub: HubSection = Field(default_factory=HubSection)
    """Upload of the trained model to the hub."""


@extension
class Hub(Extension):
    name, keys = "hub", {"": _Keys}
    uploads: HubUpload | None = None

    @classmethod
    def takes_part(cls, recipe: Any) -> bool:
        return bool(recipe.hub.push)

    def check(self, plan: Any) -> tuple[str, ...]:
        from algorist.extensions.hub.upload import check_hub

        plan.processes.from_main(lambda: check_hub(self.recipe.hub, plan.say))
        return ()

    def open(self, run: Any) -> None:
        from algorist.extensions.hub.upload import HubUpload

        if run.processes.main:
            self.uploads = HubUpload(self.recipe, run.folder.path, run.display.say)

    def seen(self, event: Event) -> Control | None:
        if self.uploads is None:
            return None
        if event.kind == "checkpoint" and event.path is not None:
            self.uploads.checkpoint(event.path / f"checkpoint-{event.step}")
        if event.kind == "end":
            self.uploads.finish(event.stage)
        return None

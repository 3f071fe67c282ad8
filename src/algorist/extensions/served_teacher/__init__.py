"""Teacher at an address: ``grpo.teacher.model: http://HOST:PORT``, vLLM's server or ``algorist serve MODEL --engine scores``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from algorist.extensions.teacher.remote import REMOTES, Remote

if TYPE_CHECKING:
    from algorist.extensions.teacher import TeacherSection
    from algorist.extensions.teacher.model import Teacher


@REMOTES.register("http")
@REMOTES.register("https")
class ServedTeacher(Remote):
    """Scores prompts over HTTP (``prompt_logprobs``), in token ids."""

    def refusals(self, recipe: Any) -> Iterable[str]:
        section: TeacherSection = recipe.grpo.teacher
        if section.loss == "full":
            yield (
                "grpo.teacher.loss=full compares whole distributions, which no server sends; take grpo.teacher.loss=top_k, or sampled"
            )
        for key in ("device", "quantization"):
            if getattr(section, key) != type(section).model_fields[key].default:
                yield f"grpo.teacher.{key} says nothing of a teacher that is served; set it where the server is started, and leave it out here"
        temperature = recipe.grpo.temperature if section.temperature is None else section.temperature
        if temperature != 1:
            yield (
                f"a served teacher scores at temperature 1, but it should at {temperature:g} (grpo.teacher.temperature, else "
                "grpo.temperature); set grpo.teacher.temperature=1"
            )

    def connect(self, section: TeacherSection, student: Any, tokenizer: Any) -> Teacher:
        from algorist.extensions.served_teacher.client import Served

        return Served.connect(section, student, tokenizer)

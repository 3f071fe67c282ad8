"""The door for teachers that compute elsewhere. A file of its own: who registers one imports this, and not the section."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from algorist_grader.registry import Registry

if TYPE_CHECKING:
    from algorist.config.section import ModelSection
    from algorist.extensions.teacher import TeacherSection
    from algorist.extensions.teacher.model import Teacher


class Remote:
    """A teacher that computes in another process, by the scheme of its address (``@REMOTES.register("http")``)."""

    def refusals(self, recipe: Any) -> Iterable[str]:
        """List the reasons a recipe cannot learn from it."""
        return ()

    def connect(self, section: TeacherSection, student: Any, tokenizer: Any) -> Teacher:
        """Return a teacher that scores the student's tokens (EngineError, ConfigError)."""
        raise NotImplementedError


REMOTES: Registry[type[Remote]] = Registry("scheme of a teacher's address")


def remote_of(section: TeacherSection) -> Remote | None:
    """Return the remote named by a teacher's address, None for a model that is loaded here."""
    scheme, separator, _ = section.model.partition("://")
    return REMOTES.get(scheme)() if separator else None


def load_teacher(section: TeacherSection, student: Any, tokenizer: Any, *, like: ModelSection) -> Teacher:
    """Return the teacher of a section, here or elsewhere.

    Raises:
        ConfigError: Its tokenizer is another one.
        EngineError: It is served, and its server does not score.
    """
    from algorist.extensions.teacher.model import Teacher

    if (remote := remote_of(section)) is not None:
        return remote.connect(section, student, tokenizer)
    return Teacher.load(section, student, tokenizer, like=like)

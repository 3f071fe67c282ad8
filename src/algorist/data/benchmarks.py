"""Evaluation sets that are no contests: Minerva, College Math, SVAMP."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import as_file, files

from algorist.data.base import Source, dataset
from algorist.data.cleaning import plain_number, without_dollars
from algorist.data.columns import load_source, to_problems
from algorist.data.files import Row
from algorist.errors import DataError
from algorist.grading import last_boxed
from algorist.types import Problem


@dataset("minerva")
def load_minerva(source: Source) -> list[Problem]:
    """Minerva's MIT OpenCourseWare questions (math-ai/minervamath); the gold is the last ``\\boxed{}``."""
    return to_problems(
        load_source(source, hub="math-ai/minervamath", where="minerva"),
        where="minerva",
        question=lambda row: row.get("problem") or row.get("question"),
        answer=lambda row: row.get("answer") or last_boxed(str(row.get("solution", ""))),
        solution=lambda row: row.get("solution"),
        subject=lambda row: row.get("type"),
        identity=lambda row: row.get("idx"),
    )


@dataset("college_math")
def load_college_math(source: Source) -> list[Problem]:
    """Textbook exercises (realtreetune/college_math) whose golds are expressions; subject from the topic."""
    return to_problems(
        load_source(source, hub="realtreetune/college_math", where="college_math"),
        where="college_math",
        question=lambda row: row.get("question") or row.get("problem"),
        answer=lambda row: without_dollars(row.get("answer")),
        subject=lambda row: str(row.get("data_topic") or "").rpartition(".")[2],
        identity=_exercise,
    )


@dataset("svamp")
def load_svamp(source: Source) -> list[Problem]:
    """SVAMP (ChilleD/SVAMP): body and question as one text; ``145.0`` read as ``145``."""
    return to_problems(
        load_source(source, hub="ChilleD/SVAMP", where="svamp"),
        where="svamp",
        question=_story,
        answer=lambda row: plain_number(row.get("Answer")),
        subject=lambda row: row.get("Type"),
        identity=lambda row: row.get("ID"),
        extra=lambda row: {"equation": row["Equation"]} if row.get("Equation") else {},
    )


@dataset("svamp_300")
def load_svamp_300(source: Source) -> list[Problem]:
    """The first 300 problems of SVAMP (Patel et al. 2021, MIT), which come with the package: no hub and no file needed."""
    if source.path is not None or source.hub is not None:
        raise DataError(
            "svamp_300 comes with the package, but data.….path or hub is set; all of SVAMP is name=svamp"
        )
    with as_file(files("algorist.data") / "svamp_300.jsonl") as path:
        return load_svamp(replace(source, path=str(path)))


def _exercise(row: Row) -> str:
    parts = (str(row.get(key) or "") for key in ("data_source", "question_number"))
    return ".".join(part for part in parts if part)


def _story(row: Row) -> str:
    body, question = (str(row.get(key) or "").strip() for key in ("Body", "Question"))
    if not body or not question:
        return question
    return f"{body}{'' if body.endswith(('.', '!', '?')) else '.'} {question}"

"""Published datasets: a row of a table for each, read from files or the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib.resources import as_file, files
from typing import Any

from algorist.data.adapters import VERL, demonstrated, verl_row
from algorist.data.base import Source, dataset, refuse_unknown
from algorist.data.columns import Columns, load_source, require_columns, to_problems
from algorist.data.files import Row
from algorist.data.golds import clean_solution, extract_hash_answer, plain_number, without_dollars
from algorist.errors import DataError
from algorist.prompts import get_format
from algorist.types import Problem
from algorist_grader import last_boxed

AIME_HUBS = {24: "math-ai/aime24", 25: "math-ai/aime25", 26: "math-ai/aime26"}
MATHARENA = ("aime_2026", "hmmt_feb_2025", "hmmt_feb_2026", "brumo_2025", "apex_2025")
"""Sets of MathArena with final answers; each is the hub's ``MathArena/NAME``."""
STRATOS_ORDER = re.compile(r"\A\s*Return your final response within \\boxed\{\}\.\s*")
STRATOS_THOUGHT = re.compile(r"<\|begin_of_thought\|>(.*?)<\|end_of_thought\|>", re.DOTALL)
STRATOS_SOLUTION = re.compile(r"<\|begin_of_solution\|>(.*?)(?:<\|end_of_solution\|>|\Z)", re.DOTALL)
R1_ZERO_PROMPT = re.compile(r"(?:\A|\n)User:\s*(.*?)\s*\nAssistant:\s*(?:<think>)?\s*\Z", re.DOTALL)


def _stratos_row(row: Row) -> Row:
    turns = row.get("conversations") or row.get("messages")
    turns = [t for t in turns if isinstance(t, dict)] if isinstance(turns, list) else []
    texts = [(t.get("from") or t.get("role"), str(t.get("value") or t.get("content") or "")) for t in turns]
    question = next((text for who, text in texts if who in ("user", "human")), "")
    reply = next((text for who, text in texts if who in ("assistant", "gpt")), "")
    thought, solution = STRATOS_THOUGHT.search(reply), STRATOS_SOLUTION.search(reply)
    return {
        "problem": STRATOS_ORDER.sub("", question).strip(),
        "thought": thought[1].strip() if thought else "",
        "answer": last_boxed(solution[1]) if solution else None,
    }


def _r1_zero_row(row: Row) -> Row:
    prompt, response = str(row.get("prompt") or ""), str(row.get("response") or row.get("completion") or "")
    match, parsed = R1_ZERO_PROMPT.search(prompt), get_format("r1_zero").parse(response)
    golds = (row.get("ground_truth"), row.get("answer"), parsed.answer)
    return {
        **row,
        "question": match[1] if match else prompt.strip(),
        "gold": next((gold for gold in golds if gold not in (None, "", [])), None),
        "solution": parsed.reasoning if parsed.reasoning and parsed.answer else response.strip(),
        "shown": parsed.answer,
    }


def _answer_or_box(row: Row) -> Any:
    answer = row.get("answer")
    return (
        answer
        if answer or (answer == 0 and answer is not False)
        else last_boxed(str(row.get("solution", "")))
    )


def _gsm8k_gold(row: Row) -> str:
    answer = row.get("answer")
    if not isinstance(answer, str) or "####" not in answer:
        return ""
    return extract_hash_answer(answer).replace(",", "").replace("$", "")


def _aime_gold(row: Row) -> str:
    """Return the digits; one published gold carries a degree sign."""
    gold = plain_number(without_dollars(_answer_or_box(row)))
    return plain_number(re.sub(r"\s*\^\s*\{?\\circ\}?\s*$", "", gold))


def _joined(value: Any, separator: str, clean: Callable[[Any], str]) -> str:
    parts = [clean(part) for part in (value if isinstance(value, list) else [value]) if part is not None]
    return separator.join(part for part in parts if part)


def _svamp_question(row: Row) -> str:
    body, question = (str(row.get(key) or "").strip() for key in ("Body", "Question"))
    return (
        f"{body}{'' if body.endswith(('.', '!', '?')) else '.'} {question}" if body and question else question
    )


@dataclass(frozen=True, kw_only=True)
class PublishedDataset(Columns):
    """A published dataset: where it is, and which of its columns is what."""

    about: str
    hub: str | None
    subset: tuple[str, ...] = ()
    split: str | None = None
    """The only split that the hub has."""
    needs: tuple[tuple[str, ...], ...] = ()
    """Columns that must exist, each with its alternatives."""
    reshape: Callable[[Row], Row] = lambda row: row
    params: tuple[str, ...] = ()

    def read(self, source: Source, where: str) -> list[Problem]:
        """Return the problems of ``source``: a copy of the dataset, or the hub's."""
        refuse_unknown(source.params, self.params, where)
        if self.split is not None and source.path is None and source.hub is None:
            source = replace(source, split=self.split)
        rows = load_source(source, hub=self.hub, subset=self.subset, where=where)
        require_columns(rows, *self.needs, where=where)
        return to_problems([self.reshape(row) for row in rows], self, where=where)


MATH = PublishedDataset(
    about="""MATH or MATH-500, in the original columns, with an ``answer`` column, or in verl's nested layout.""",
    hub="EleutherAI/hendrycks_math",
    subset=(
        "algebra",
        "counting_and_probability",
        "geometry",
        "intermediate_algebra",
        "number_theory",
        "prealgebra",
        "precalculus",
    ),
    reshape=verl_row,
    question="problem",
    answer=_answer_or_box,
    solution="solution",
    subject=("subject", "type"),
    level=lambda row: str(row.get("level", "")).removeprefix("Level ").strip(),
    identity="unique_id",
    known_gaps=2,  # two training problems have an empty box
)
PUBLISHED = {
    "gsm8k": PublishedDataset(
        about="""GSM8K from the hub (openai/gsm8k, main) or local files with question and answer columns.""",
        hub="openai/gsm8k",
        subset=("main",),
        question="question",
        answer=_gsm8k_gold,
        solution=lambda row: clean_solution(str(row.get("answer", ""))),
    ),
    "math": MATH,
    "math500": replace(
        MATH,
        about="""MATH-500 (HuggingFaceH4/MATH-500), a part of the MATH test split, with subject and level.""",
        hub="HuggingFaceH4/MATH-500",
        subset=(),
        known_gaps=0,
    ),
    "aime": PublishedDataset(
        about="""AIME 2024, 2025 or 2026 (params: ``year`` 24, 25 or 26); golds are integers without leading zeros.""",
        hub=AIME_HUBS[24],
        params=("year",),
        reshape=verl_row,
        question=("question", "problem"),
        answer=_aime_gold,
        solution="solution",
        identity="id",
    ),
    "amc": PublishedDataset(
        about="""AMC 12 2023 without choices (math-ai/amc23); golds are numbers, ``27.0`` read as ``27``.""",
        hub="math-ai/amc23",
        reshape=verl_row,
        question=("question", "problem"),
        answer=lambda row: plain_number(row.get("answer")),
        identity="id",
    ),
    "olympiadbench": PublishedDataset(
        about="""OlympiadBench, English, text only, open-ended (math-ai/olympiadbench); several golds are joined by commas.

        ``extra`` holds the columns of the row, among them ``unit``, ``answer_type``, ``is_multiple_answer`` and ``error``
        (the tolerance).
        """,
        hub="math-ai/olympiadbench",
        question=lambda row: "\n".join(str(row[k]) for k in ("context", "question") if row.get(k)),
        answer=lambda row: _joined(row.get("final_answer") or row.get("answer"), ", ", without_dollars),
        solution=lambda row: _joined(row.get("solution"), "\n\n", lambda part: str(part).strip()),
        subject="subfield",
        identity="id",
    ),
    "gaokao": PublishedDataset(
        about="""Gaokao 2023 in English (MARIO-Math-Reasoning/Gaokao2023-Math-En): sets, intervals, coordinates, equations.""",
        hub="MARIO-Math-Reasoning/Gaokao2023-Math-En",
        split="train",
        question=("question", "problem"),
        answer=lambda row: without_dollars(str(row.get("answer") or "").strip().removesuffix("solution:")),
        identity="source",
        known_gaps=2,  # two published rows have an empty answer
    ),
    "minerva": PublishedDataset(
        about="""Minerva's MIT OpenCourseWare questions (math-ai/minervamath); the gold is the last ``\\boxed{}``.""",
        hub="math-ai/minervamath",
        question=("problem", "question"),
        answer=_answer_or_box,
        solution="solution",
        subject="type",
        identity="idx",
    ),
    "college_math": PublishedDataset(
        about="""Textbook exercises (realtreetune/college_math) whose golds are expressions; subject from the topic.""",
        hub="realtreetune/college_math",
        question=("question", "problem"),
        answer=lambda row: without_dollars(row.get("answer")),
        subject=lambda row: str(row.get("data_topic") or "").rpartition(".")[2],
        identity=lambda row: ".".join(str(row[k]) for k in ("data_source", "question_number") if row.get(k)),
    ),
    "svamp": PublishedDataset(
        about="""SVAMP (ChilleD/SVAMP): body and question as one text; ``145.0`` read as ``145``.""",
        hub="ChilleD/SVAMP",
        question=_svamp_question,
        answer=lambda row: plain_number(row.get("Answer")),
        subject="Type",
        identity="ID",
        extra=lambda row: {"equation": row["Equation"]} if row.get("Equation") else {},
    ),
    "dapo": PublishedDataset(
        about="""DAPO-Math-17k (open-r1/DAPO-Math-17k-Processed, en): the plain problem and its answer.

        Reads ``answer``, else ``reward_model.ground_truth``, else ``solution``; the prompt may be a text or messages.
        """,
        hub="open-r1/DAPO-Math-17k-Processed",
        subset=("en",),
        needs=(("prompt", "problem", "question"), ("answer", "solution", "reward_model")),
        reshape=verl_row,
        **{field.name: getattr(VERL, field.name) for field in fields(VERL)},
    ),
    "openmath_reasoning": PublishedDataset(
        about="""OpenMathReasoning-mini (unsloth/OpenMathReasoning-mini, split cot): thoughts without their think tags.

        Rows without a problem, an expected answer (proofs) or a generated solution are left out and counted.
        """,
        hub="unsloth/OpenMathReasoning-mini",
        split="cot",
        needs=(("expected_answer",), ("problem",), ("generated_solution",)),
        question="problem",
        answer="expected_answer",
        solution=lambda row: re.sub(r"</?think>", "", str(row.get("generated_solution") or "")).strip(),
        subject="problem_source",
        skip_bad=True,
        needs_solution=True,
    ),
    "numina_tir": PublishedDataset(
        about="""NuminaMath-TIR (AI-MO/NuminaMath-TIR): the gold is the last ``\\boxed{}`` of the solution, braces balanced.

        Rows without a problem or without a readable box are left out and counted.
        """,
        hub="AI-MO/NuminaMath-TIR",
        needs=(("problem",), ("solution",)),
        question="problem",
        answer=lambda row: last_boxed(str(row.get("solution") or "")),
        solution="solution",
        skip_bad=True,
        gold_name="boxed answer",
    ),
    "bespoke_stratos": PublishedDataset(
        about="""Bespoke-Stratos-17k (bespokelabs/Bespoke-Stratos-17k): the first question, the thought, the boxed answer.

        Rows whose solution has no box (programming tasks, proofs) are left out and counted.
        """,
        hub="bespokelabs/Bespoke-Stratos-17k",
        needs=(("conversations", "messages"),),
        reshape=_stratos_row,
        question="problem",
        answer="answer",
        solution="thought",
        skip_bad=True,
        needs_solution=True,
        gold_name="boxed answer",
    ),
    "sft_jsonl": PublishedDataset(
        about="""Rows of ``prompt`` and ``response`` in the r1_zero form, with ``ground_truth`` or ``answer`` if there is one.

        The question is read out of the prompt, reasoning and answer out of the response; SFT renders them again, or takes both
        as they are with ``sft.source=prompt_response``. A response without answer tags counts as reasoning as a whole.
        """,
        hub=None,
        needs=(("prompt",), ("response", "completion")),
        reshape=_r1_zero_row,
        question="question",
        answer="gold",
        solution="solution",
        subject="subject",
        level="level",
        identity="unique_id",
        extra=demonstrated("shown"),
    ),
}
PUBLISHED["gsm8k_platinum"] = replace(
    PUBLISHED["gsm8k"],
    about="""GSM8K-Platinum (madrylab/gsm8k-platinum): GSM8K's test questions with wrong and ambiguous ones taken out.""",
    hub="madrylab/gsm8k-platinum",
)
PUBLISHED |= {
    f"matharena_{name}": PublishedDataset(
        about=f"""MathArena's {name} (MathArena/{name}): final answers, several of them joined by commas.""",
        hub=f"MathArena/{name}",
        split="train",
        question="problem",
        answer=lambda row: without_dollars(row.get("answer")),
        subject=lambda row: ", ".join(row.get("problem_type") or ()),
        identity="problem_idx",
    )
    for name in MATHARENA
}


def _register(name: str, published: PublishedDataset) -> None:
    def load(source: Source) -> list[Problem]:
        of_year = replace(published, hub=_aime_hub(source.params)) if name == "aime" else published
        return of_year.read(source, name)

    load.__doc__ = published.about
    dataset(name)(load)


def _aime_hub(params: dict[str, Any]) -> str:
    year = params.get("year", 24)
    if not isinstance(year, int) or year not in (*AIME_HUBS, *(2000 + key for key in AIME_HUBS)):
        raise DataError(
            f"aime: data.….params.year is {year!r}. Expected year: 24, 25 or 26; for another give data.….path or data.….hub"
        )
    return AIME_HUBS[year % 100]


for _name, _published in PUBLISHED.items():
    _register(_name, _published)


@dataset("svamp_300")
def load_svamp_300(source: Source) -> list[Problem]:
    """The first 300 problems of SVAMP (Patel et al. 2021, MIT), which come with the package: no hub and no file needed."""
    if source.path is not None or source.hub is not None:
        raise DataError(
            "svamp_300 comes with the package, but data.….path or hub is set; all of SVAMP is name=svamp"
        )
    with as_file(files(__package__) / "svamp_300.jsonl") as path:
        return PUBLISHED["svamp"].read(replace(source, path=str(path)), "svamp")

"""Demonstrations for SFT: problems with long worked solutions by a stronger model."""

from __future__ import annotations

import re
from typing import Any

from algorist.data.base import Source, dataset
from algorist.data.cleaning import own_split, require_columns
from algorist.data.columns import load_source, to_problems, written
from algorist.data.files import Row
from algorist.grading import last_boxed
from algorist.prompts import get_format
from algorist.types import Parsed, Problem

STRATOS_ORDER = re.compile(r"\A\s*Return your final response within \\boxed\{\}\.\s*")
STRATOS_THOUGHT = re.compile(r"<\|begin_of_thought\|>(.*?)<\|end_of_thought\|>", re.DOTALL)
STRATOS_SOLUTION = re.compile(r"<\|begin_of_solution\|>(.*?)(?:<\|end_of_solution\|>|\Z)", re.DOTALL)
ASKED = re.compile(r"(?:\A|\n)User:\s*(.*?)\s*\nAssistant:\s*(?:<think>)?\s*\Z", re.DOTALL)


@dataset("openmath_reasoning")
def load_openmath_reasoning(source: Source) -> list[Problem]:
    """OpenMathReasoning-mini (unsloth/OpenMathReasoning-mini, split cot): thoughts without their think tags.

    Rows without a problem, an expected answer (proofs) or a generated solution are left out and counted.
    """
    where = "openmath_reasoning"
    rows = load_source(own_split(source, "cot"), hub="unsloth/OpenMathReasoning-mini", where=where)
    require_columns(rows, ("expected_answer",), ("problem",), ("generated_solution",), where=where)
    return to_problems(
        rows,
        where=where,
        question=lambda row: row.get("problem"),
        answer=lambda row: row.get("expected_answer"),
        solution=_thoughts,
        subject=lambda row: row.get("problem_source"),
        skip_bad=True,
        needs_solution=True,
    )


@dataset("numina_tir")
def load_numina_tir(source: Source) -> list[Problem]:
    """NuminaMath-TIR (AI-MO/NuminaMath-TIR): the gold is the last ``\\boxed{}`` of the solution, braces balanced.

    Rows without a problem or without a readable box are left out and counted.
    """
    where = "numina_tir"
    rows = load_source(source, hub="AI-MO/NuminaMath-TIR", where=where)
    require_columns(rows, ("problem",), ("solution",), where=where)
    return to_problems(
        rows,
        where=where,
        question=lambda row: row.get("problem"),
        answer=lambda row: last_boxed(str(row.get("solution") or "")),
        solution=lambda row: row.get("solution"),
        skip_bad=True,
        gold_name="boxed answer",
    )


@dataset("bespoke_stratos")
def load_bespoke_stratos(source: Source) -> list[Problem]:
    """Bespoke-Stratos-17k (bespokelabs/Bespoke-Stratos-17k): the first question, the thought, the boxed answer.

    Rows whose solution has no box (programming tasks, proofs) are left out and counted.
    """
    where = "bespoke_stratos"
    rows = load_source(source, hub="bespokelabs/Bespoke-Stratos-17k", where=where)
    require_columns(rows, ("conversations", "messages"), where=where)
    return to_problems(
        [_stratos(row) for row in rows],
        where=where,
        question=lambda row: row["problem"],
        answer=lambda row: row["answer"],
        solution=lambda row: row["thought"],
        skip_bad=True,
        needs_solution=True,
        gold_name="boxed answer",
    )


@dataset("sft_jsonl")
def load_sft_jsonl(source: Source) -> list[Problem]:
    """Rows of ``prompt`` and ``response`` in the r1_zero form, with ``ground_truth`` or ``answer`` if there is one.

    The question is read out of the prompt, reasoning and answer out of the response; SFT renders them again, or takes both
    as they are with ``sft.source=prompt_response``. A response without answer tags counts as reasoning as a whole.
    """
    where = "sft_jsonl"
    rows = load_source(source, hub=None, where=where)
    require_columns(rows, ("prompt",), ("response", "completion"), where=where)
    r1_zero = get_format("r1_zero")
    read = [(row, r1_zero.parse(str(row.get("response") or row.get("completion") or ""))) for row in rows]
    return to_problems(
        [
            {
                **row,
                "question": _asked(str(row.get("prompt") or "")),
                "gold": _first(row.get("ground_truth"), row.get("answer"), parsed.answer),
                "solution": _reasoning(row, parsed),
                "shown": parsed.answer,
            }
            for row, parsed in read
        ],
        where=where,
        question=lambda row: row["question"],
        answer=lambda row: row["gold"],
        solution=lambda row: row["solution"],
        subject=lambda row: row.get("subject"),
        level=lambda row: row.get("level"),
        identity=lambda row: row.get("unique_id"),
        extra=lambda row: written(row) | ({"demonstrated_answer": row["shown"]} if row["shown"] else {}),
    )


def _thoughts(row: Row) -> str:
    return re.sub(r"</?think>", "", str(row.get("generated_solution") or "")).strip()


def _stratos(row: Row) -> Row:
    turns = row.get("conversations") or row.get("messages")
    turns = [t for t in turns if isinstance(t, dict)] if isinstance(turns, list) else []
    said = [(t.get("from") or t.get("role"), str(t.get("value") or t.get("content") or "")) for t in turns]
    asked = next((text for who, text in said if who in ("user", "human")), "")
    told = next((text for who, text in said if who in ("assistant", "gpt")), "")
    thought, solution = STRATOS_THOUGHT.search(told), STRATOS_SOLUTION.search(told)
    return {
        "problem": STRATOS_ORDER.sub("", asked).strip(),
        "thought": thought[1].strip() if thought else "",
        "answer": last_boxed(solution[1]) if solution else None,
    }


def _asked(prompt: str) -> str:
    match = ASKED.search(prompt)
    return match[1] if match else prompt.strip()


def _reasoning(row: Row, parsed: Parsed) -> str:
    if parsed.reasoning and parsed.answer:
        return parsed.reasoning
    return str(row.get("response") or row.get("completion") or "").strip()


def _first(*values: Any) -> Any:
    return next((value for value in values if value not in (None, "", [])), None)

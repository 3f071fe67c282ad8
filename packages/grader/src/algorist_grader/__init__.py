"""Grading: extract → strings → exact numbers → structure → quick points → a killable worker with all the digits needed.

``algebra`` decides on mathematics through one door; neither sympy nor torch is imported here: ``algebra.decide_exact`` (mpmath) and
``math_verify`` only run inside worker processes.
"""

from algorist_grader.checkers import checker
from algorist_grader.extract import Extraction, extract
from algorist_grader.grade import (
    forget_verdicts,
    gold_texts,
    grade,
    grade_completion,
    grade_many,
    is_right_leniently,
)
from algorist_grader.markers import boxed, hash_answer, last_boxed
from algorist_grader.matchers import MATCHERS, deciding_matcher
from algorist_grader.numeric import numeric_value
from algorist_grader.symbolic import is_text_only, why_unreadable

__all__ = [
    "MATCHERS", "Extraction", "boxed", "checker", "deciding_matcher", "extract", "forget_verdicts", "gold_texts",
    "grade", "grade_completion", "grade_many", "hash_answer", "is_right_leniently", "is_text_only", "last_boxed",
    "numeric_value", "why_unreadable",
]  # fmt: skip
